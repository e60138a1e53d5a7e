"""Annotate a data set: a queue of prompts, decoded together, with a bar."""

from __future__ import annotations

import copy

import torch
from _model import ask, load

import lookahead_hf

TEXTS = (
    "The parcel came late and the box was torn, but the lamp works.",
    "Great lamp, great price. I will buy another one for my sister.",
    "The lamp broke after two days, and nobody answers my letters.",
    "It is a lamp. It gives light. What more is there to say?",
    "I wanted a blue lamp and got a green one. I kept it.",
    "The switch is loose, the cable is short, the light is warm.",
)
TASK = "Print this text again, word by word, then say whether it is positive or negative:\n\n"

model, tokenizer = load()
prompts = [ask(tokenizer, TASK + text).input_ids[0].tolist() for text in TEXTS]
config = copy.deepcopy(model.generation_config)
config.update(max_new_tokens=64, do_sample=False)

plain = [
    model.generate(torch.tensor([prompt]), generation_config=config)[0, len(prompt) :].tolist()
    for prompt in prompts
]
found = model.generate_batch(prompts, config, speculative=True, max_slots=4, progress_bar=True)

for text, output in zip(TEXTS, found.values(), strict=True):
    print("-", text)
    print(" ", output.error or tokenizer.decode(output.generated_tokens, skip_special_tokens=True))
print("identical:", plain == [output.generated_tokens for output in found.values()])
total = lookahead_hf.totals(model).stats
print(f"{total.num_accepted} of {total.num_drafted} draft tokens accepted")
print(f"{total.tokens_per_step:.2f} tokens per step and text")
