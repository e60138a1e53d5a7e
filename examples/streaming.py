"""Stream from another thread, as web servers do: tokens arrive as from plain `generate`."""

from __future__ import annotations

from threading import Thread

from _model import ask, load
from transformers import TextIteratorStreamer

import lookahead_hf

model, tokenizer = load()
inputs = ask(tokenizer, "List the days of the week, then list them again in reverse order.")
streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)

arguments = {**inputs, "max_new_tokens": 96, "do_sample": False}
worker = Thread(
    target=model.generate, kwargs={**arguments, "streamer": streamer, "speculative": True}
)
worker.start()
for piece in streamer:
    print(piece, end="", flush=True)
worker.join()
print()
print(lookahead_hf.last_stats(model))
