"""Every source by its name, and what a call must bring along for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lookahead_hf
from lookahead_hf import SpeculativeConfig
from lookahead_hf.ngram_pool import NgramPool
from tests.models import prompt, tiny

GREEDY = {"do_sample": False, "max_new_tokens": 40, "pad_token_id": 0}


def config_of(drafters: tuple[str, ...] | None, **fields: Any) -> SpeculativeConfig:
    return SpeculativeConfig(drafters=drafters, budget=24, **fields)


def repeating(rows: int) -> dict[str, torch.Tensor]:
    """Prompts in which there is something to find, the first row longer than the others."""
    ids = prompt(rows, 8, seed=1).repeat(1, 3)
    mask = torch.ones_like(ids)
    mask[1:, :6] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    "drafters", [("ngram",), ("recycling",), ("assistant",), ("lookahead",), None]
)
def test_alone_and_together(drafters: Any, rows: int, do_sample: bool) -> None:
    # Small weights make texts that repeat, in which every source finds something.
    model, assistant = tiny("llama", scale=1.5), tiny("llama", scale=1.5)
    call = {**GREEDY, "do_sample": do_sample, **repeating(rows)}
    if do_sample:
        call |= {"temperature": 0.3, "top_k": 5}
    torch.manual_seed(5)
    plain = model.generate(**call)
    extra = {"assistant_model": assistant} if drafters in (None, ("assistant",)) else {}
    torch.manual_seed(5)
    with lookahead_hf.enabled(model):
        ours = model.generate(**call, **extra, speculative=config_of(drafters))
    assert ours.tolist() == plain.tolist()
    stats = lookahead_hf.last_stats(model)
    assert stats is not None and stats.fallback_reason is None and stats.num_accepted > 0
    names = {"ngram", "recycling", "assistant"} if drafters is None else set(drafters)
    assert set(stats.per_source) == names


def test_the_target_as_its_own_assistant_is_always_right() -> None:
    model = tiny("llama")
    options = {"assistant": {"min_reach": 0.0, "top_k": 1, "num_draft": 5}}
    config = config_of(("assistant",), options=options)
    with lookahead_hf.enabled(model):
        model.generate(prompt(), **GREEDY, assistant_model=tiny("llama"), speculative=config)
    stats = lookahead_hf.last_stats(model)
    assert stats is not None
    assert stats.acceptance_rate == 1.0
    assert stats.num_steps == 7  # 39 tokens behind the first, 6 a step


def test_an_assistant_by_name_needs_one() -> None:
    model = tiny("llama")
    with lookahead_hf.enabled(model), pytest.raises(ValueError, match="assistant_model="):
        model.generate(prompt(), **GREEDY, speculative="assistant")


def test_predictions_must_fit_the_rows() -> None:
    model = tiny("llama")
    with lookahead_hf.enabled(model), pytest.raises(ValueError, match="2 texts.*3 rows"):
        model.generate(prompt(3), **GREEDY, speculative=True, prediction=[[1, 2], [3]])


def test_rejection_draws_from_the_same_distribution() -> None:
    model, assistant = tiny("llama"), tiny("llama", seed=0, scale=2.9)
    config = config_of(("assistant",), verification="rejection")
    call = {"do_sample": True, "top_k": 3, "max_new_tokens": 3, "pad_token_id": 0}
    ids = prompt().repeat(500, 1)
    torch.manual_seed(0)
    plain = model.generate(ids, **call)[:, 12:]
    with lookahead_hf.enabled(model):
        ours = model.generate(ids, **call, assistant_model=assistant, speculative=config)[:, 12:]
    stats = lookahead_hf.last_stats(model)
    assert stats is not None and stats.engine == "rejection" and stats.num_accepted > 0
    for place in range(3):
        tokens = set(plain[:, place].tolist()) | set(ours[:, place].tolist())
        for token in tokens:
            a, b = (float((x[:, place] == token).float().mean()) for x in (plain, ours))
            assert abs(a - b) < 0.13  # four standard deviations at 500 texts


def test_rejection_is_exact_where_nothing_is_drawn() -> None:
    model = tiny("llama")
    plain = model.generate(prompt(), **GREEDY)
    config = config_of(("assistant",), verification="rejection")
    with lookahead_hf.enabled(model):
        ours = model.generate(prompt(), **GREEDY, assistant_model=tiny("llama"), speculative=config)
    assert ours.tolist() == plain.tolist()


def test_a_pool_learns_only_where_it_is_told_to() -> None:
    model, ids = tiny("llama"), prompt()
    plain = model.generate(ids, **GREEDY)
    accepted = []
    with lookahead_hf.enabled(model):
        for learn in (False, True, True):
            config = config_of(("pool",), learn=learn)
            assert model.generate(ids, **GREEDY, speculative=config).tolist() == plain.tolist()
            stats = lookahead_hf.last_stats(model)
            assert stats is not None and stats.fallback_reason is None
            accepted.append(stats.num_accepted)
    assert accepted[:2] == [0, 0]
    assert accepted[2] > 20


def test_a_pool_of_the_callers_joins_the_sources(tmp_path: Any) -> None:
    model, ids = tiny("llama"), prompt()
    plain = model.generate(ids, **GREEDY)
    pool = NgramPool(max_tokens=10_000)
    pool.add(plain[0].tolist())
    pool.save(tmp_path / "texts.pool")
    for given in (pool, tmp_path / "texts.pool", str(tmp_path / "texts.pool")):
        with lookahead_hf.enabled(model):
            ours = model.generate(ids, **GREEDY, speculative=config_of(("ngram",), pool=given))
        assert ours.tolist() == plain.tolist()
        stats = lookahead_hf.last_stats(model)
        assert stats is not None and stats.per_source["pool"].accepted > 20


def test_a_file_that_is_no_pool_is_refused_before_any_work(tmp_path: Any) -> None:
    path = tmp_path / "broken.pool"
    path.write_bytes(b"nothing of the kind")
    model = tiny("llama")
    with lookahead_hf.enabled(model), pytest.raises(ValueError, match="broken.pool"):
        model.generate(prompt(), **GREEDY, speculative=config_of(("ngram",), pool=path))
