"""Texts that obey a grammar are plain's, and the grammar drafts."""

from __future__ import annotations

import json
from contextlib import nullcontext
from typing import Any

import llguidance.hf
import pytest
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
)

import lookahead_hf
from lookahead_hf import SpeculativeConfig
from lookahead_hf.drafting import NgramDrafter
from lookahead_hf.logits import constraints
from lookahead_hf.logits.grammars import LLGuidance
from lookahead_hf.ngram_pool import compilation
from tests.helpers import grammars, requests
from tests.helpers.compared import served
from tests.helpers.constrained import BUDGET, check, generate, held, prompts
from tests.helpers.fakes import Recorder
from tests.helpers.grammars import END, LIBRARIES, SCHEMAS, WIDTH, processor


@pytest.fixture(scope="module")
def model() -> Any:
    compilation.wait([compilation.drafting])
    return lookahead_hf.enable(grammars.model())


@pytest.mark.filterwarnings("ignore:Error in LLMatcher")  # plain's, at the pads of outlines
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("rows", [1, 3])
def test_every_library_writes_plains_text(model: Any, library: str, rows: int) -> None:
    has_one = rows == 1 or library.startswith("outlines")
    schemas = [SCHEMAS[0]] * rows if has_one else SCHEMAS
    stats, plain, ours = check(model, library, schemas, do_sample=rows > 1)
    assert held(ours) == held(plain)
    if rows == 1:
        assert stats.num_steps < 0.7 * stats.row_stats[0].num_emitted
        return
    assert len({(row.num_accepted, row.num_emitted) for row in stats.row_stats}) > 1
    assert stats.engine == ("lockstep" if library.startswith("llguidance") else "walk")


@pytest.mark.parametrize(
    ("library", "more"),
    [
        ("xgrammar strict", {"repetition_penalty": 1.3}),
        ("llguidance default", {"stop_strings": ['"level'], "tokenizer": grammars.tokenizer()}),
        ("xgrammar strict", {"num_beams": 1, "min_new_tokens": 8, "max_new_tokens": 20}),
        ("llguidance default", {"speculative": SpeculativeConfig(budget=8, draft_invariant=True)}),
        ("xgrammar strict", {"speculative": SpeculativeConfig(drafters=("recycling",), budget=3)}),
    ],
    ids=["penalty", "stop", "short", "invariant", "small"],
)
def test_with_other_settings(model: Any, library: str, more: dict[str, Any]) -> None:
    check(model, library, SCHEMAS[:1], **more)


@pytest.mark.parametrize("is_behind", [False, True])
def test_with_other_processors(model: Any, is_behind: bool) -> None:
    def both() -> list[Any]:
        own = processor("xgrammar strict", SCHEMAS)
        others = [RepetitionPenaltyLogitsProcessor(1.4), TemperatureLogitsWarper(0.7)]
        return [own, *others] if is_behind else [*others, own]

    plain = generate(model, both(), 3, speculative=False, do_sample=True)
    assert generate(model, both(), 3, do_sample=True).tolist() == plain.tolist()
    stats = lookahead_hf.last_stats(model)
    assert stats.engine == "walk" and stats.per_source["grammar"].accepted > 0


@pytest.mark.parametrize(
    "library", ["xgrammar strict", "outlines core", "outlines llguidance", "llguidance strict"]
)
def test_the_processor_after_an_exception_of_a_streamer(model: Any, library: str) -> None:
    left = []
    for each in (False, BUDGET):
        own = processor(library, SCHEMAS[:1])
        with pytest.raises(ConnectionError):
            generate(model, [own], speculative=each, streamer=Recorder(9))
        left.append(held(own))
    assert left[0] == left[1]


@pytest.mark.filterwarnings("ignore:Error in LLMatcher")  # plain's, at the pads of outlines
@pytest.mark.parametrize("library", ["xgrammar strict", *LIBRARIES[-3:]])
def test_the_processor_of_a_batch_after_an_exception(model: Any, library: str) -> None:
    class Interrupting(NgramDrafter):
        left = 6

        def observe(self, step: Any) -> None:
            super().observe(step)
            self.left -= 1
            if not self.left:
                self.columns = step.rows.num_columns
                raise KeyboardInterrupt

    drafter = Interrupting()
    interrupted = processor(library, [SCHEMAS[0]] * 3)
    with pytest.raises(KeyboardInterrupt):
        config = SpeculativeConfig(drafters=(drafter,), budget=8)
        generate(model, [interrupted], 3, speculative=config)
    assert drafter.columns > 6  # drafts were accepted
    plain = processor(library, [SCHEMAS[0]] * 3)
    generate(model, [plain], 3, speculative=False, max_new_tokens=drafter.columns)
    assert held(interrupted) == held(plain)


def test_a_streamer_of_a_batch_sees_the_processor_as_plain_leaves_it(model: Any) -> None:
    class Watches(Recorder):
        def put(self, value: Any) -> None:
            self.events.append(held(own) if own.prefilled else None)

    seen = []
    for each in (False, BUDGET):
        own, watches = processor("xgrammar strict", SCHEMAS), Watches()
        generate(model, [own], 3, speculative=each, streamer=watches)
        seen.append(watches.events)
    assert seen[0] == seen[1] and len(seen[0]) > 20
    assert lookahead_hf.last_stats(model).per_source["grammar"].accepted > 0


class OfAnotherTokenizer(grammars.LLGuidanceProcessor):
    """Drafts by a grammar of other tokens."""

    def row_grammars(self, num_rows: int) -> Any:
        other = llguidance.hf.from_tokenizer(
            grammars.swapped_tokenizer(), n_vocab=WIDTH, eos_token=[END]
        )
        return [LLGuidance(other, grammar) for grammar in self.grammars]


class ByRow(grammars.LLGuidanceProcessor):
    """Tells what it does to each row alone."""

    def row_processors(self, num_rows: int) -> Any:
        return [grammars.LLGuidanceProcessor([grammar]) for grammar in self.grammars]


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_class_with_processors_for_single_rows_leaves_lockstep(
    model: Any, do_sample: bool
) -> None:
    given = processor("llguidance strict", SCHEMAS).grammars
    plain = generate(model, [ByRow(given)], 3, do_sample=do_sample, speculative=False)
    assert generate(model, [ByRow(given)], 3, do_sample=do_sample).tolist() == plain.tolist()
    stats = lookahead_hf.last_stats(model)
    assert stats.engine == "walk" and stats.per_source["grammar"].accepted > 0
    assert len({(row.num_accepted, row.num_emitted) for row in stats.row_stats}) > 1


class Lying(grammars.LLGuidanceProcessor):
    """Drafts by another schema than it obeys."""

    def row_grammars(self, num_rows: int) -> Any:
        wrong = processor("llguidance strict", [SCHEMAS[1]]).row_grammars(1)
        return wrong + super().row_grammars(num_rows)[1:]


class Refusing(grammars.LLGuidanceProcessor):
    """Has no grammar for the first row."""

    def row_grammars(self, num_rows: int) -> Any:
        return [object(), *super().row_grammars(num_rows)[1:]]


@pytest.mark.parametrize(
    ("kind", "rows"), [(Lying, 1), (OfAnotherTokenizer, 1), (Lying, 3), (Refusing, 3)]
)
def test_a_wrong_shadow_costs_its_source_in_its_row_alone(model: Any, kind: Any, rows: int) -> None:
    given = processor("llguidance strict", [SCHEMAS[0]] * rows).grammars
    plain = generate(model, [kind(given)], rows, speculative=False)
    with pytest.warns(RuntimeWarning, match="'grammar' failed and is left out of a text") as warned:
        assert generate(model, [kind(given)], rows).tolist() == plain.tolist()
    assert len(warned) == 1
    sources = served(model).per_source
    assert sources["grammar"].accepted > 0 if rows > 1 else sources["recycling"].drafted > 0


def test_used_processors_and_those_of_other_classes_are_left_alone(model: Any) -> None:
    class Own(type(processor("xgrammar strict", SCHEMAS[:1]))):
        """Might do anything else."""

    used = processor("xgrammar strict", SCHEMAS[:1])
    own = Own(used.compiled_grammars)
    generate(model, [used], speculative=False, max_new_tokens=3)
    assert constraints.recognise(used, 1) is None is constraints.recognise(own, 1)


def test_rejection_sampling_is_not_refined(model: Any) -> None:
    config = SpeculativeConfig(verification="rejection", budget=8, on_fallback="error")
    own = processor("xgrammar strict", SCHEMAS[:1])
    ids = generate(model, [own], speculative=config, do_sample=True)[0, 12:].tolist()
    assert "grammar" not in lookahead_hf.last_stats(model).per_source
    text = grammars.tokenizer().decode(ids[: ids.index(END)])
    assert json.loads(text, strict=False)


@pytest.mark.parametrize("lies", [False, True])
def test_requests_of_a_queue_have_schemas_of_their_own(lies: bool) -> None:
    """A wrong shadow costs its request alone."""
    model = lookahead_hf.enable(grammars.model(), default=BUDGET)
    ids = [row.tolist() for row in prompts(3)["input_ids"][:, 6:]]
    config = requests.settings(model, max_new_tokens=60)

    def own(row: int) -> dict[str, Any]:
        made = processor("llguidance strict" if lies else "xgrammar strict", [SCHEMAS[row]])
        liar = lies and row == 0
        return {"logits_processor": LogitsProcessorList([Lying(made.grammars) if liar else made])}

    warns = pytest.warns(RuntimeWarning, match="'grammar' failed and is left out of a text")
    with warns if lies else nullcontext(), requests.running(model, config) as manager:
        for row, prompt in enumerate(ids):
            manager.add_request(prompt, request_id=str(row), **own(row))
        found = requests.results(manager, 3)
    requests.speculated(found.values())
    for row, prompt in enumerate(ids):
        assert found[str(row)].generated_tokens == requests.alone(model, prompt, config, **own(row))
        accepted = found[str(row)].speculative_stats.per_source["grammar"].accepted
        assert (accepted > 0) == (row > 0 or not lies)
