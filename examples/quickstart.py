"""The same text with and without speculation, and what the library says about the call."""

from __future__ import annotations

from _model import ask, load

import lookahead_hf

FUNCTION = """def area(width, height):
    if width < 0 or height < 0:
        raise ValueError("negative size")
    return width * height"""

model, tokenizer = load()
inputs = ask(tokenizer, f"Print this function again:\n\n```python\n{FUNCTION}\n```")

plain = model.generate(**inputs, max_new_tokens=64, do_sample=False)
fast = model.generate(**inputs, max_new_tokens=64, do_sample=False, speculative=True)

print(tokenizer.decode(fast[0, inputs.input_ids.shape[1] :], skip_special_tokens=True))
print("identical:", plain.equal(fast))
print(lookahead_hf.last_stats(model))
