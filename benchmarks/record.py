"""Record greedy texts of a model, with the likeliest next tokens at every position.

Drafters are then compared on the same texts without running the model again. Each text has a file
in the user's cache folder; a text of the same prompt is not recorded twice.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch
from replay import Text

from lookahead_hf.model.compat import GENERATE_CACHE
from lookahead_hf.tools.cli.measuring import Batch, end_tokens

TOP = 64
"""Likeliest next tokens recorded per position, as many as any drafter uses."""

CHUNK = 128
"""Prompt positions whose logits are computed at once."""


def recorded(
    load: Callable[[], tuple[Any, Any]],
    chosen: slice,
    new_tokens: int,
    folder: Path,
    prompts: Path = common.PROMPTS,
) -> list[Text]:
    """Return the texts of the `chosen` prompts of each family; record those that `folder` lacks.

    Args:
        load: Returns the model and the tokenizer; the model only runs for missing texts.
        chosen: Slice of a family's prompts that are short enough.
        new_tokens: Longest output.
        folder: Where the texts are kept.
        prompts: JSON lines, each with the `family` and the `prompt`.

    Returns:
        The first text of every family, then the second of every family and so on, so that a
        drafter with a memory keeps something of all kinds of texts.
    """
    model, tokenizer = load()
    batches = _in_turn(common.batches(tokenizer, common.read_prompts(None, prompts), chosen, 1))
    folder.mkdir(parents=True, exist_ok=True)
    texts = []
    for done, batch in enumerate(batches):
        path = folder / f"{batch.family}-{batch.indices[0]}-{new_tokens}.npz"
        prompt = batch.inputs["input_ids"]
        if not _holds(path, prompt[0].numpy()):
            print(f"recording text {done + 1} of {len(batches)}", file=sys.stderr)
            _store(path, prompt, model, new_tokens)
        texts.append(_read(path, batch))
    return texts


def folder_of(model: Any, root: Path) -> Path:
    """Return the folder of this model's texts, named by the model and some of its weights."""
    weights = model.get_output_embeddings().weight.detach()[::97].float().cpu().numpy()
    digest = hashlib.sha256(weights.tobytes()).hexdigest()[:8]
    dtype = str(model.dtype).removeprefix("torch.")
    return root / f"{Path(model.config.name_or_path).name}-{dtype}-{digest}"


def _in_turn(batches: Iterator[Batch]) -> list[Batch]:
    """Return the first prompt of every family, then the second of every family and so on."""
    by_family: dict[str, list[Batch]] = {}
    for batch in batches:
        by_family.setdefault(batch.family, []).append(batch)
    places = ((number, batch) for own in by_family.values() for number, batch in enumerate(own))
    return [batch for _, batch in sorted(places, key=lambda place: place[0])]


def _holds(path: Path, prompt: np.ndarray) -> bool:
    if not path.exists():
        return False
    with np.load(path) as held:
        return np.array_equal(held["prompt"], prompt)


def _read(path: Path, batch: Batch) -> Text:
    with np.load(path) as held:
        return Text(batch.family, batch.indices[0], **{name: held[name] for name in held.files})


def _store(path: Path, prompt: torch.Tensor, model: Any, new_tokens: int) -> None:
    output, ids, probs = generate(model, prompt.to(model.device), new_tokens)
    part = path.with_suffix(".part.npz")
    np.savez_compressed(part, prompt=prompt[0].numpy(), output=output, top_ids=ids, top_probs=probs)
    part.replace(path)


@torch.no_grad()
def generate(
    model: Any, prompt: torch.Tensor, new_tokens: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Generate greedily, token by token, as plain `generate` does.

    Args:
        model: A causal language model.
        prompt: Token ids, [1, prompt].
        new_tokens: Longest output.

    Returns:
        output: New token ids, including the end token, [output] int64.
        top_ids: Likeliest tokens after every token but the last, [prompt + output - 1, TOP] int32.
        top_probs: Their probabilities, float32.
    """
    end_ids = end_tokens(model)
    states = model.get_decoder()(prompt, use_cache=True)
    cache, head = states[GENERATE_CACHE], model.get_output_embeddings()
    best = [best_tokens(head(part)) for part in states.last_hidden_state[0].split(CHUNK)]
    output = [int(best[-1][0][-1, 0])]
    while len(output) < new_tokens and output[-1] not in end_ids:
        last = torch.tensor([[output[-1]]], device=prompt.device)
        best.append(best_tokens(model(last, **{GENERATE_CACHE: cache}, use_cache=True).logits[0]))
        output.append(int(best[-1][0][-1, 0]))
    ids, probs = (np.concatenate(parts) for parts in zip(*best, strict=True))
    return np.array(output), ids, probs


def best_tokens(logits: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return the likeliest tokens of logits [positions, vocab] and their probabilities."""
    probs = logits.float().softmax(-1)
    values, ids = probs.topk(min(TOP, logits.shape[1]))
    return ids.cpu().numpy().astype(np.int32), values.cpu().numpy()
