"""Generate a text with and without speculation, and read the statistics of the call."""

from __future__ import annotations

from _model import ask, compare, load, timed

import lookahead_hf

FUNCTION = """def area(width, height):
    if width < 0 or height < 0:
        raise ValueError("negative size")
    return width * height


def volume(width, height, depth):
    if depth < 0:
        raise ValueError("negative size")
    return area(width, height) * depth"""

model, tokenizer = load()
inputs = ask(tokenizer, f"Print this code again:\n\n```python\n{FUNCTION}\n```")
limits = {"max_new_tokens": 96, "do_sample": False}

plain, plain_seconds = timed(model.generate, **inputs, **limits)
fast, seconds = timed(model.generate, **inputs, **limits, speculative=True)

print(tokenizer.decode(fast[0, inputs.input_ids.shape[1] :], skip_special_tokens=True))
print("identical:", plain.equal(fast))
compare(model, plain_seconds, seconds)
print(lookahead_hf.last_stats(model))
