"""Several turns on one cache of transformers: each turn computes only what is new."""

from __future__ import annotations

import torch
from _model import ask, load
from transformers import DynamicCache

import lookahead_hf

TURNS = (
    "Name three colours and say a sentence about each.",
    "Repeat the second sentence.",
    "Now repeat all of them.",
)

model, tokenizer = load()
cache = DynamicCache(config=model.config)
ids = torch.empty(1, 0, dtype=torch.long)
for turn in TURNS:
    print(">", turn)
    ids = torch.cat([ids, ask(tokenizer, turn).input_ids], dim=1)
    known = cache.get_seq_length()
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=cache,
        max_new_tokens=64,
        do_sample=False,
        speculative=True,
    )
    answer = output[0, ids.shape[1] :]
    print(tokenizer.decode(answer, skip_special_tokens=True))
    steps = lookahead_hf.last_stats(model).tokens_per_step
    print(f"[{known} of {ids.shape[1]} tokens came from the cache, {steps:.2f} tokens per step]")
    ids = output
