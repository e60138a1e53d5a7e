"""Stream from another thread, as web servers do: tokens arrive in the order of plain `generate`."""

from __future__ import annotations

from threading import Thread

from _model import ask, compare, load, timed
from transformers import TextIteratorStreamer

model, tokenizer = load()
inputs = ask(tokenizer, "List the days of the week, then list them again in reverse order.")


def stream(speculative: bool) -> str:
    """Print the text piece by piece, and return it."""
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    arguments = {**inputs, "max_new_tokens": 96, "do_sample": False}
    arguments |= {"streamer": streamer, "speculative": speculative}
    worker = Thread(target=model.generate, kwargs=arguments)
    worker.start()
    text = ""
    for piece in streamer:
        print(piece, end="", flush=True)
        text += piece
    worker.join()
    print()
    return text


plain, plain_seconds = timed(stream, speculative=False)
fast, seconds = timed(stream, speculative=True)
print("identical:", plain == fast)
compare(model, plain_seconds, seconds)
