"""Stream from another thread, as web servers do: tokens arrive in the order of plain `generate`."""

from __future__ import annotations

import time
from threading import Thread

from _model import ask, compare, load, timed
from transformers import TextIteratorStreamer

model, tokenizer = load()
inputs = ask(tokenizer, "List the days of the week, then list them again in reverse order.")
arguments = {**inputs, "max_new_tokens": 96, "do_sample": False}
plain, plain_seconds = timed(model.generate, **arguments)

streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
arguments |= {"streamer": streamer, "speculative": True}
start = time.perf_counter()
worker = Thread(target=model.generate, kwargs=arguments)
worker.start()
text = ""
for piece in streamer:
    print(piece, end="", flush=True)
    text += piece
worker.join()
seconds = time.perf_counter() - start

print()
expected = tokenizer.decode(plain[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)
print("identical:", text == expected)
compare(model, plain_seconds, seconds)
