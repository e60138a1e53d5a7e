"""Say what the answer will probably be: here the same question was asked a little differently."""

from __future__ import annotations

from _model import ask, load

import lookahead_hf

model, tokenizer = load()
task = "Write a Python function {name}(numbers) that returns the mean of a list."
limits = {"max_new_tokens": 128, "do_sample": False}

first = ask(tokenizer, task.format(name="average"))
before = model.generate(**first, **limits)[0, first.input_ids.shape[1] :]

changed = ask(tokenizer, task.format(name="mean_of"))
plain = model.generate(**changed, **limits)
fast = model.generate(**changed, **limits, speculative=True, prediction=before)

print(tokenizer.decode(fast[0, changed.input_ids.shape[1] :], skip_special_tokens=True))
print("identical:", plain.equal(fast))
print(lookahead_hf.last_stats(model))
