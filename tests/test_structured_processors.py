"""`lookahead_hf.structured`: processors from schemas, and grammars that begin late."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pydantic
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lookahead_hf
from lookahead_hf import structured
from lookahead_hf.ngram_pool import compilation
from tests.helpers import grammars
from tests.helpers.compared import served
from tests.helpers.constrained import BUDGET
from tests.helpers.grammars import END, LEVEL, NUMBER, SCHEMAS, WIDTH, schema, text


@pytest.fixture(scope="module")
def model() -> Any:
    compilation.wait([compilation.drafting])
    return lookahead_hf.enable(grammars.model())


def written(model: Any, make: Any, **more: Any) -> str:
    """The text of a fresh processor after a prompt, which is plain's, and which drafts."""
    ids = torch.arange(20, 32)[None]
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 80, "do_sample": False}
    texts = [
        model.generate(ids, **given, logits_processor=make(), **more, speculative=each).tolist()
        for each in (False, BUDGET)
    ]
    assert texts[0] == texts[1]
    assert lookahead_hf.last_stats(model).per_source["grammar"].accepted > 0
    new = texts[0][0][12:]
    return grammars.tokenizer().decode(new[: new.index(END)] if END in new else new)


class Record(pydantic.BaseModel):
    level: bool
    size: bool


@pytest.mark.parametrize(
    ("given", "any_whitespace"),
    [(SCHEMAS[0], True), (json.dumps(SCHEMAS[0]), False), (Record, False)],
)
def test_json_schemas(model: Any, given: Any, any_whitespace: bool) -> None:
    def make() -> list[Any]:
        tokenizer = grammars.tokenizer()
        return [structured.json_schema(given, tokenizer, any_whitespace=any_whitespace)]

    blank = {"suppress_tokens": grammars.blank_tokens()} if any_whitespace else {}
    record = json.loads(written(model, make, **blank), strict=False)
    assert list(record)[-1] == ("size" if given is Record else "country")


def test_regular_expressions_and_grammars(model: Any) -> None:
    tokenizer = grammars.tokenizer()
    found = written(model, lambda: [structured.regex(r"level: [a-z]{3} of (one|two)", tokenizer)])
    assert re.fullmatch(r"level: [a-z]{3} of (one|two)", found)
    ebnf = 'root ::= "name is " ("debug" | "default") "!"'
    found = written(model, lambda: [structured.grammar(ebnf, tokenizer)])
    assert found in ("name is debug!", "name is default!")


@pytest.mark.parametrize(
    ("make", "given", "said"),
    [
        (structured.json_schema, {"type": "x"}, 'the JSON schema .*: Unsupported type "x"'),
        (structured.json_schema, {"$ref": "#/x"}, "Cannot find field x in #/x"),
        (structured.json_schema, "{", "the JSON schema .*: it is no JSON: Expecting"),
        (structured.regex, ["a", "(a"], "the regular expression .*The parenthesis is not closed"),
        (structured.json_schema, [], "the JSON schema is missing: the list is empty"),
        (structured.json_schema, {"$ref": "#"}, "the JSON schema .*: no text obeys it"),
        (structured.json_schema, 7, "7 is no dict, no text and no pydantic model"),
        (structured.regex, "(a", "the regular expression .*The parenthesis is not closed"),
        (structured.grammar, 'x ::= "a"', 'the grammar .*name "root" is not found'),
    ],
)
def test_what_cannot_be_compiled_is_one_sentence(make: Any, given: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said) as raised:
        make(given, grammars.tokenizer())
    assert "\n" not in str(raised.value) and "/project" not in str(raised.value)


@pytest.mark.parametrize("make", [structured.json_schema, structured.regex, structured.grammar])
def test_what_is_no_tokenizer_is_one_sentence(make: Any) -> None:
    with pytest.raises(ValueError, match="cannot be compiled: ") as raised:
        make("{}", SimpleNamespace())
    assert "\n" not in str(raised.value)


def test_tokens_that_are_added_later_count() -> None:
    tokenizer = copy.deepcopy(grammars.tokenizer())
    before = structured.regex("<new>", tokenizer).full_vocab_size
    tokenizer.add_tokens(["<new>"])
    assert structured.regex("<new>", tokenizer).full_vocab_size == before + 1


def test_a_processor_serves_one_call(model: Any) -> None:
    own = [structured.json_schema(SCHEMAS[0], grammars.tokenizer())]
    ids = torch.arange(20, 32)[None]
    model.generate(ids, max_new_tokens=4, logits_processor=own)
    with pytest.raises(ValueError, match="has served another call of generate: make one for each"):
        model.generate(ids, max_new_tokens=4, logits_processor=own)
    with pytest.raises(ValueError, match="2 grammars, the batch 1 rows"):
        structured.json_schema(SCHEMAS[:1] * 2, grammars.tokenizer())(ids, torch.zeros(1, WIDTH))


@pytest.mark.filterwarnings("ignore:the drafter .grammar. failed")
@pytest.mark.parametrize(("speculative", "rows"), [(False, 1), (True, 1), (True, 3)])
def test_settings_that_contradict_a_grammar_are_named(
    model: Any, speculative: bool, rows: int
) -> None:
    own = [structured.json_schema(schema(a={"const": 1}), grammars.tokenizer())]
    ids = torch.arange(20, 32).expand(rows, -1)
    given = {"min_new_tokens": 60, "max_new_tokens": 80, "do_sample": False}
    with pytest.raises(ValueError, match="that the grammar forbids.*min_new_tokens"):
        model.generate(ids, **given, logits_processor=own, speculative=speculative)


_CALL = """
import sys
import torch
import lookahead_hf
from tests.helpers.models import tiny

model = lookahead_hf.enable(tiny("llama"))
ids = torch.arange(20, 32)[None]
model.generate(ids, max_new_tokens=8, speculative=True)
assert lookahead_hf.last_stats(model).fallback_reason is None
print([name for name in ("xgrammar", "llguidance", "outlines") if name in sys.modules])
"""


def test_calls_without_a_grammar_import_no_library_of_grammars() -> None:
    found = subprocess.run([sys.executable, "-c", _CALL], capture_output=True, text=True)
    assert found.stdout.strip() == "[]", found.stderr


THINKING = 'root ::= [a-z ]+ "!" "{\\"level\\": \\"" ("debug" | "default") "\\"}"'
"""Free words up to a mark, and JSON behind it."""


class ThinkingBudget:
    """Ends the reasoning after a number of tokens."""

    def __init__(self, prompt_columns: int, budget: int, end_of_thinking: int) -> None:
        self.start, self.budget, self.end = prompt_columns, budget, end_of_thinking

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        new = input_ids[:, self.start :]
        if new.shape[1] == self.budget:
            thinks = ~(new == self.end).any(1)
            scores[thinks] = -torch.inf
            scores[thinks, self.end] = 0.0
        return scores


def test_a_grammar_that_begins_late_and_a_budget_for_what_comes_before(model: Any) -> None:
    tokenizer = grammars.tokenizer()
    (mark,) = tokenizer.encode("!")

    def make() -> list[Any]:
        return [structured.grammar(THINKING, tokenizer), ThinkingBudget(12, 20, mark)]

    thoughts, mark_and_behind, record = written(model, make).partition("!")
    assert thoughts and mark_and_behind and json.loads(record)["level"] in ("debug", "default")


FIELDS = st.sampled_from(
    [
        {"type": "boolean"},
        LEVEL,
        NUMBER,
        text(5),
        {"type": "null"},
        {"type": "string", "format": "date"},
        {"type": "string", "format": "date-time"},
        {"type": "string", "format": "email"},
        {"type": "number"},
        {"type": "array", "items": schema(level=LEVEL, size=NUMBER), "minItems": 1, "maxItems": 2},
        {"type": "array", "items": LEVEL, "minItems": 1, "maxItems": 2},
        {"anyOf": [{"type": "boolean"}, LEVEL]},
        {"const": "Great Britain"},
    ]
)
NAMES = st.sampled_from(["name", "level", "default", "größe", "is_open", "parts", 'a"b'])


@st.composite
def schemas(draw: st.DrawFn) -> dict[str, Any]:
    """Objects with some fields, one of them an object, some of them optional."""
    own = schema(**draw(st.dictionaries(NAMES, FIELDS, min_size=1, max_size=3)))
    if draw(st.booleans()):
        own["required"] = own["required"][1:]
    return schema(country=own) if draw(st.booleans()) else own


def check_random(model: Any, own: dict[str, Any], library: str, seed: int) -> None:
    ids = torch.randint(3, 300, (1, 9), generator=torch.Generator().manual_seed(seed))
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 100}
    given["do_sample"] = bool(seed % 2)
    if not library.endswith("strict"):
        given["suppress_tokens"] = grammars.blank_tokens()
    found = []
    for each in (False, BUDGET):
        torch.manual_seed(seed)
        processors = [grammars.processor(library, [own])]
        found.append(model.generate(ids, **given, logits_processor=processors, speculative=each))
    assert found[0].tolist() == found[1].tolist()
    assert served(model).per_source["grammar"].drafted > 0
    new = found[1][0, 9:].tolist()
    if END in new:
        json.loads(grammars.tokenizer().decode(new[: new.index(END)]), strict=False)


LIBRARIES = st.sampled_from([each for each in grammars.LIBRARIES if "outlines" not in each])


@pytest.mark.parametrize("num_schemas", [20, pytest.param(500, marks=pytest.mark.slow)])
def test_random_schemas(model: Any, num_schemas: int) -> None:
    @settings(max_examples=num_schemas, deadline=None, suppress_health_check=[*HealthCheck])
    @given(schemas(), LIBRARIES, st.integers(0, 9999))
    def agrees(own: dict[str, Any], library: str, seed: int) -> None:
        check_random(model, own, library, seed)

    agrees()
