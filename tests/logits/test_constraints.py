"""What is read off the processors of grammars, and how they are left."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import lookahead_hf
from lookahead_hf import structured
from lookahead_hf.logits.grammars import LLGuidance, XGrammar
from lookahead_hf.ngram_pool import compilation
from tests.helpers import grammars
from tests.helpers.constrained import BUDGET, generate
from tests.helpers.grammars import END, SCHEMAS, WIDTH


@pytest.fixture(scope="module")
def model() -> Any:
    compilation.wait([compilation.drafting])
    return lookahead_hf.enable(grammars.model())


def test_our_processor_goes_on_after_a_batch_as_after_plain(model: Any) -> None:
    left = []
    for each in (False, BUDGET):
        own = structured.json_schema([*SCHEMAS], grammars.tokenizer())
        ids = generate(model, [own], 3, speculative=each, max_new_tokens=9)
        scores = own(ids, torch.zeros(3, WIDTH))
        left.append((vars(own)["_columns"], ids.tolist(), scores.tolist()))
    assert left[0] == left[1]
    assert lookahead_hf.last_stats(model).per_source["grammar"].accepted > 0


def test_ids_beyond_a_vocabulary_are_refused_in_silence(capfd: pytest.CaptureFixture[str]) -> None:
    shadow = XGrammar(grammars.compiled(json.dumps(SCHEMAS[0]), True))
    assert not any(map(shadow.advance, (0, 1, END, WIDTH, WIDTH + 7, 2**31 - 1)))
    assert capfd.readouterr().err == ""


def test_tokenizers_of_one_size_have_vocabularies_of_their_own() -> None:
    import llguidance.hf

    other = grammars.tokenizer()
    words = grammars.processor("llguidance strict", SCHEMAS[:1]).grammars[0]
    first = LLGuidance(grammars.lltokenizer(), words)
    again = llguidance.hf.from_tokenizer(other, n_vocab=WIDTH, eos_token=[END])
    assert LLGuidance(again, words).vocabulary == first.vocabulary
    swapped = grammars.swapped_tokenizer()
    wrong = llguidance.hf.from_tokenizer(swapped, n_vocab=WIDTH, eos_token=[END])
    assert LLGuidance(wrong, words).vocabulary != first.vocabulary


def test_what_is_kept_of_a_tokenizer_has_a_limit() -> None:
    structured.json_schema(SCHEMAS[0], grammars.tokenizer())
    _, kept, _ = structured._compilers[grammars.tokenizer()]
    assert kept.cache_limit_bytes == structured._KEPT_BYTES
