"""In bfloat16 a text parts from plain's only where plain's own two best tokens are nearly tied.

`pytest -m slow -s tests/test_half_precision.py` prints how many texts part, and how far apart the
logits of the two tokens are at most.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch

import lookahead_hf
from lookahead_hf import SpeculativeConfig
from lookahead_hf.cli.measuring import end_tokens, until_end
from lookahead_hf.cli.near_ties import Parting, describe, find_partings
from tests.helpers.real_texts import encode, load_real_model, texts

SEED = 3
MODES: dict[str, dict[str, Any]] = {
    "as they are": {"packed_weights": False},
    "packed": {"packed_weights": True},
    "invariant": {"packed_weights": False, "draft_invariant": True},
    "invariant, packed": {"packed_weights": True, "draft_invariant": True},
}
"""Which weights steps use, and whether the drafts may change the shape of a step."""

SAMPLED = {"do_sample": True, "temperature": 0.7, "top_p": 0.9}

Texts = list[tuple[int, ...]]


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    return load_real_model(torch.bfloat16)


def written(model: Any, call: dict[str, Any], speculative: Any) -> Texts:
    """New tokens of each row, up to its end token."""
    torch.manual_seed(SEED)
    output = model.generate(**call, speculative=speculative)
    new = output[:, call["input_ids"].shape[1] :].tolist()
    return [until_end(row, end_tokens(model)) for row in new]


def compared(
    loaded: tuple[Any, Any], prompts: list[str], modes: list[str], **settings: Any
) -> dict[str, list[Parting | None]]:
    """How the texts of one batch part from plain's, by mode; every mode must have speculated."""
    model, tokenizer = loaded
    call = {**encode(tokenizer, prompts), "max_new_tokens": 48, **settings}
    plain = written(model, call, False)
    ours = []
    for mode in modes:
        ours.append(written(model, call, SpeculativeConfig(budget=16, **MODES[mode])))
        stats = lookahead_hf.last_stats(model)
        assert stats is not None and stats.fallback_reason is None
        if sum(map(len, plain)) > 24 * len(plain):  # longer than an answer of a few words
            assert stats.num_accepted > 0
    found = find_partings(model, call, plain, ours, SEED)
    return dict(zip(modes, found, strict=True))


def assert_near_ties(
    loaded: tuple[Any, Any], prompts: list[str], rows: int, modes: list[str], **settings: Any
) -> None:
    found: dict[str, list[Parting | None]] = defaultdict(list)
    for first in range(0, len(prompts), rows):
        batch = prompts[first : first + rows]
        for mode, partings in compared(loaded, batch, modes, **settings).items():
            found[mode] += partings
    for mode, partings in found.items():
        print(
            f"\n{'sampled' if settings['do_sample'] else 'greedy'}, batch {rows}, {mode}: ", end=""
        )
        print(describe(partings), [parting.ulps for parting in partings if parting])
    assert [each for rows in found.values() for each in rows if each and not each.is_near_tie] == []


@pytest.mark.parametrize("rows", [1, 3])
def test_some_greedy_texts(loaded: tuple[Any, Any], rows: int) -> None:
    prompts = texts(per_family=1, longest=400)[: 2 if rows == 1 else 3]
    modes = ["packed", "invariant"]
    assert_near_ties(loaded, prompts, rows, modes, do_sample=False, max_new_tokens=32)


def test_some_sampled_texts(loaded: tuple[Any, Any]) -> None:
    prompts = texts(per_family=1, longest=400)[:3]
    assert_near_ties(loaded, prompts, 3, ["packed"], **SAMPLED, max_new_tokens=32)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("settings", [{"do_sample": False}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("part", range(3))
def test_many_texts(
    loaded: tuple[Any, Any], part: int, settings: dict[str, Any], rows: int
) -> None:
    prompts = texts(per_family=5, longest=3000, skip=8)[part::3]
    assert len(prompts) == 15
    assert_near_ties(loaded, prompts, rows, list(MODES), **settings)


def test_a_wrong_verdict_is_no_near_tie(loaded: tuple[Any, Any]) -> None:
    """In blocks of several tokens the best logit is handed to the third best token."""
    model, tokenizer = loaded
    call = {**encode(tokenizer, texts(per_family=1, longest=400)[:1]), "do_sample": False}
    call["max_new_tokens"] = 24
    plain = written(model, call, False)

    def swap(_: Any, __: Any, logits: torch.Tensor) -> torch.Tensor:
        if logits.shape[1] == 1:
            return logits
        values, ids = logits.topk(3)
        return logits.scatter(-1, ids[..., [0, 2]], values[..., [2, 0]])

    handle = model.get_output_embeddings().register_forward_hook(swap)
    wrong = written(model, call, SpeculativeConfig(budget=16))
    handle.remove()
    (parting,) = find_partings(model, call, plain, [wrong], SEED)[0]
    assert parting is not None and not parting.is_near_tie
