"""A padded batch: every row advances at its own pace, sampling with a seed gives plain's texts."""

from __future__ import annotations

import torch
from _model import ask, load

import lookahead_hf

model, tokenizer = load()
inputs = ask(
    tokenizer,
    "Count from one to thirty in words.",
    "Hi!",
    "Copy this sentence twice: the cat sat on the mat and looked at the moon.",
)
sampling = {"max_new_tokens": 64, "do_sample": True, "temperature": 0.7, "top_p": 0.9}

torch.manual_seed(0)
plain = model.generate(**inputs, **sampling)
torch.manual_seed(0)
fast = model.generate(**inputs, **sampling, speculative=True)

for text in tokenizer.batch_decode(fast[:, inputs.input_ids.shape[1] :], skip_special_tokens=True):
    print("-", text)
print("identical:", plain.equal(fast))
stats = lookahead_hf.last_stats(model)
for row, counts in enumerate(stats.row_stats):
    print(f"row {row}: {counts.num_emitted} tokens in {counts.row_steps} steps")
