"""Hold a conversation on one transformers cache: each turn computes only the new tokens."""

from __future__ import annotations

import torch
from _model import ask, compare, load, timed
from transformers import DynamicCache

TURNS = (
    "Name three colours and say a sentence about each.",
    "Repeat the second sentence.",
    "Now repeat all of them.",
)

model, tokenizer = load()
plain_cache, cache = (DynamicCache(config=model.config) for _ in range(2))
ids = torch.empty(1, 0, dtype=torch.long)
for turn in TURNS:
    print("\n>", turn)
    ids = torch.cat([ids, ask(tokenizer, turn).input_ids], dim=1)
    known = cache.get_seq_length()
    call = {"inputs": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 64}
    call["do_sample"] = False
    plain, plain_seconds = timed(model.generate, **call, cache=plain_cache)
    fast, seconds = timed(model.generate, **call, cache=cache, speculative=True)

    print(tokenizer.decode(fast[0, ids.shape[1] :], skip_special_tokens=True))
    print("identical:", plain.equal(fast))
    print(f"{known} of the prompt's {ids.shape[1]} tokens came from the cache")
    compare(model, plain_seconds, seconds)
    ids = fast
