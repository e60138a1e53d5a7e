"""Runs the target: feeds it blocks of draft tokens over a cache with ragged rows."""
