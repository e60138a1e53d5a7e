"""Speculate through a `custom_generate` repository: the call names it, nothing is enabled."""

from __future__ import annotations

from pathlib import Path

from _model import ask, compare, load, timed

import lookahead_hf

REPOSITORY = Path(__file__).parent / "custom_generate"  # or OWNER/NAME once it is uploaded

model, tokenizer = load()
lookahead_hf.disable(model)
inputs = ask(tokenizer, "Write the numbers from one to ten in words, then write them again.")
limits = {"max_new_tokens": 64, "do_sample": False}

plain, plain_seconds = timed(model.generate, **inputs, **limits)
named = {"custom_generate": str(REPOSITORY), "trust_remote_code": True}
fast, seconds = timed(model.generate, **inputs, **limits, **named)

print(tokenizer.decode(fast[0, inputs.input_ids.shape[1] :], skip_special_tokens=True))
print("identical:", plain.equal(fast))
compare(model, plain_seconds, seconds)
print(lookahead_hf.last_stats(model))
