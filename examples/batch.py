"""Sample a padded batch: each row advances at its own pace, and a seed gives the same texts."""

from __future__ import annotations

import torch
from _model import ask, compare, load, timed

import lookahead_hf

FUNCTION = """def area(width, height):
    if width < 0 or height < 0:
        raise ValueError("negative size")
    return width * height"""
LIST = "milk, bread, butter, cheese, apples, pears, plums, rice, pasta, flour, sugar, salt, tea"

model, tokenizer = load()
inputs = ask(
    tokenizer,
    f"Print this function again:\n\n```python\n{FUNCTION}\n```",
    "Hi!",
    f"Print this list again: {LIST}",
)
sampling = {"max_new_tokens": 64, "do_sample": True, "temperature": 0.7, "top_p": 0.9}

torch.manual_seed(0)
plain, plain_seconds = timed(model.generate, **inputs, **sampling)
torch.manual_seed(0)
fast, seconds = timed(model.generate, **inputs, **sampling, speculative=True)

for text in tokenizer.batch_decode(fast[:, inputs.input_ids.shape[1] :], skip_special_tokens=True):
    print("-", text)
print("identical:", plain.equal(fast))
compare(model, plain_seconds, seconds)
stats = lookahead_hf.last_stats(model)
for row, counts in enumerate(stats.row_stats):
    print(f"row {row}: {counts.num_emitted} tokens in {counts.row_steps} steps")
