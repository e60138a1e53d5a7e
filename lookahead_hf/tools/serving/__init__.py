"""Speculation in transformers' own server, `transformers serve`. It needs the extra `[serve]`."""
