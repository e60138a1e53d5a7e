"""Every source by its name, and what a call must bring along for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LogitsProcessorList

import lookahead_hf
from lookahead_hf import SpeculativeConfig
from lookahead_hf.call.prepared import Request
from lookahead_hf.config import BUILT_IN_DRAFTERS
from lookahead_hf.draft import DraftTree, Verdict
from lookahead_hf.drafting.drafter import Step
from lookahead_hf.drafting.registry import build
from lookahead_hf.drafting.sources.recycling import RecyclingDrafter
from lookahead_hf.ngram_pool import NgramPool
from tests.helpers.calls import GREEDY
from tests.helpers.compared import compared, served, speculated
from tests.helpers.drafts import rows_of
from tests.helpers.models import VOCAB, characters, prompt, tiny, unsure
from tests.helpers.ngrams import held, pool_of
from tests.helpers.users_parts import Unknown


def config_of(drafters: tuple[str, ...], **fields: Any) -> SpeculativeConfig:
    return SpeculativeConfig(drafters=drafters, budget=24, **fields)


def repeating(rows: int) -> dict[str, torch.Tensor]:
    """Prompts in which there is something to find, the first row longer than the others."""
    ids = prompt(rows, 8, seed=1).repeat(1, 3)
    mask = torch.ones_like(ids)
    mask[1:, :6] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def brought_along(names: Iterable[str], plain: torch.Tensor, columns: int) -> dict[str, Any]:
    """Arguments without which some sources have nothing to draft from."""
    brought: dict[str, Any] = {}
    if "assistant" in names:
        brought["assistant_model"] = unsure(tiny("llama", scale=1.5), 0.05)
    if "prediction" in names:  # the first row's, with an edit, and of the others the second half
        first, *others = [row[columns:].tolist() for row in plain]
        edited = first[:12] + [3, 4] + first[14:]
        brought["prediction"] = [edited, *(text[len(text) // 2 :] for text in others)]
    return brought


SOURCES = tuple(name for name in BUILT_IN_DRAFTERS if name not in ("mtp", "medusa"))
"""All but those that need layers of a checkpoint or a file."""

ALONE = [(name,) for name in SOURCES]


@pytest.mark.parametrize(("rows", "do_sample"), [(1, False), (3, True)])
@pytest.mark.parametrize("names", [*ALONE, SOURCES], ids="+".join)
def test_alone_and_together(names: tuple[str, ...], rows: int, do_sample: bool) -> None:
    # Small weights make texts that repeat, in which every source finds something.
    model = tiny("llama", scale=1.5)
    call = {**GREEDY, "max_new_tokens": 60, "do_sample": do_sample, **repeating(rows)}
    if do_sample:
        call |= {"temperature": 0.3, "top_k": 5}
    torch.manual_seed(7)
    plain = model.generate(**call)
    brought = brought_along(names, plain, call["input_ids"].shape[1])
    # What another request wrote: the first row's text but for its end.
    pool = pool_of(plain[0, :-5].tolist(), max_tokens=10_000) if "pool" in names else None
    config, columns = config_of(names, pool=pool), call["input_ids"].shape[1]
    stats = compared(model, lambda: dict(call), columns, config=config, brought=brought).stats
    assert set(stats.per_source) == set(names)
    assert all(source.drafted > 0 for source in stats.per_source.values())
    if rows > 1:  # each row at its own pace
        assert len({row.row_steps for row in stats.row_stats}) > 1
    if len(names) == 1:
        assert stats.per_source[names[0]].accepted == stats.num_accepted
        assert stats.per_source[names[0]].exclusive == stats.num_accepted


@pytest.mark.parametrize("name", SOURCES)
def test_a_finished_row_gets_no_draft(name: str) -> None:
    text = [1, 2, 3, 1, 2, 3, 1, 2]
    request = Request(
        SpeculativeConfig((name,), pool=pool_of(text)),
        assistant_model=tiny("llama"),
        prediction=[np.array([2, 3, 1, 2])],
    )
    drafter, *_ = [each for each in build(request) if each.name == name]
    rows = rows_of([text, text])
    drafter.begin(rows)
    for row in range(2):
        rows.emit(row, 3)
    logits = torch.nn.functional.one_hot(torch.full((2, 1), 3), VOCAB).float()
    verdict = Verdict.from_rows([[3], [3]], [[], []])
    drafter.observe(Step(rows, DraftTree.empty(2), verdict, logits))
    for finished in ([], [0], [1]):
        for row in finished:
            rows.end(row)
        assert ((np.diff(drafter.propose(rows, 8).row_offsets) > 0) == rows.live).all()
    drafter.end(rows)


def test_what_was_learned_of_sources_can_be_looked_at() -> None:
    model, ids = tiny("llama", scale=1.5), prompt()
    with lookahead_hf.enabled(model):
        assert lookahead_hf.learned_rates(model) == []
        model.generate(ids, **GREEDY, speculative=config_of(("ngram", "recycling")))
        first = lookahead_hf.learned_rates(model)
        assert {(rate.source, rate.sampled) for rate in first} == {
            ("ngram", False), ("recycling", False)
        }  # fmt: skip
        assert all(0 < rate.rate < 1 and rate.tested > 0 for rate in first)
        model.generate(
            ids, **GREEDY, speculative=config_of(("ngram",)), prediction=[[5, 6, 7, 8, 9]]
        )
    rates = {(rate.source, rate.bucket): rate for rate in lookahead_hf.learned_rates(model)}
    # What drafted beside it makes no other source of it, and who drafts no more is not forgotten.
    assert {source for source, _ in rates} == {"ngram", "recycling", "prediction"}
    old = [rate for rate in first if rate.source == "ngram"]
    assert all(rates["ngram", rate.bucket].tested >= rate.tested for rate in old)
    assert sum(rates["ngram", rate.bucket].tested > rate.tested for rate in old) > 0


def test_a_pool_learns_only_where_it_is_told_to() -> None:
    model, ids = tiny("llama"), prompt()
    plain = model.generate(ids, **GREEDY)
    accepted = []
    with lookahead_hf.enabled(model):
        for learn in (False, True, True):
            config = config_of(("pool",), learn=learn)
            assert model.generate(ids, **GREEDY, speculative=config).tolist() == plain.tolist()
            accepted.append(served(model).num_accepted)
    assert accepted[:2] == [0, 0]
    assert accepted[2] > 20


@pytest.mark.parametrize(
    ("engine", "extra"),
    [
        ("walk", {}),
        ("walk", {"return_dict_in_generate": True}),
        ("lockstep", {"logits_processor": LogitsProcessorList([Unknown()])}),
    ],
)
def test_what_follows_the_end_of_a_text_is_not_learned(engine: str, extra: dict[str, Any]) -> None:
    model, ids = tiny("llama"), prompt(3)
    call = {**GREEDY, **extra}
    eos = int(model.generate(ids, **GREEDY)[0, 18])
    pool = NgramPool(10_000)
    config = config_of(("ngram",), pool=pool, learn=True)
    with lookahead_hf.enabled(model):
        given = model.generate(ids, **call, eos_token_id=eos, speculative=config)
    assert served(model).engine == engine
    texts: list[int] = []
    for row in (given if isinstance(given, torch.Tensor) else given.sequences).tolist():
        end = row.index(eos, 12) + 1 if eos in row[12:] else len(row)
        texts += [*row[4:end], -1]
    assert len(texts) < 3 * 49  # a row has ended before the others
    assert held(pool) == texts


def test_an_assistant_of_another_vocabulary_is_refused_without_tokenizers() -> None:
    model, small = tiny("llama"), tiny("llama", vocab_size=40)
    forwards: list[Any] = []
    model.register_forward_pre_hook(lambda *_: forwards.append(1))
    call = {**GREEDY, "assistant_model": small, "speculative": True}
    with lookahead_hf.enabled(model):
        with pytest.raises(ValueError, match="40 token ids, the model 100.*assistant_tokenizer="):
            model.generate(prompt(), **call)
        with pytest.raises(ValueError, match="assistant_tokenizer= needs tokenizer="):
            model.generate(prompt(), **call, assistant_tokenizer=characters())
    assert not forwards


def test_a_memory_that_is_to_outlive_a_call_needs_an_object() -> None:
    model, accepted = tiny("llama"), []
    options = {"recycling": {"keep": True}}
    with lookahead_hf.enabled(model):
        with pytest.raises(ValueError, match="keep=True.*drafters=.*RecyclingDrafter.keep=True"):
            model.generate(
                prompt(), **GREEDY, speculative=config_of(("recycling",), options=options)
            )
        config = SpeculativeConfig(drafters=(RecyclingDrafter(keep=True),), budget=24)
        for _ in range(2):
            model.generate(prompt(), **GREEDY, speculative=config)
            accepted.append(speculated(model).num_accepted)
    assert accepted[1] > accepted[0]
