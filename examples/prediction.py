"""Give a prediction of the answer: here, the answer to a slightly different question."""

from __future__ import annotations

from _model import ask, compare, load, timed

import lookahead_hf

model, tokenizer = load()
task = "Write a Python function {name}(numbers) that returns the mean of a list."
limits = {"max_new_tokens": 128, "do_sample": False}

first = ask(tokenizer, task.format(name="average"))
before = model.generate(**first, **limits)[0, first.input_ids.shape[1] :]

changed = ask(tokenizer, task.format(name="mean_of"))
plain, plain_seconds = timed(model.generate, **changed, **limits)
predicted = {"speculative": True, "prediction": before}
fast, seconds = timed(model.generate, **changed, **limits, **predicted)

print(tokenizer.decode(fast[0, changed.input_ids.shape[1] :], skip_special_tokens=True))
print("identical:", plain.equal(fast))
compare(model, plain_seconds, seconds)
print(lookahead_hf.last_stats(model))
