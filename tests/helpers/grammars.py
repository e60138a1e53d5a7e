"""JSON schemas for the tiny models, and processors that obey them."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

import llguidance.hf
import llguidance.torch
import outlines_core
import torch
import xgrammar
from llguidance import LLMatcher
from outlines.backends.llguidance import LLGuidanceLogitsProcessor
from outlines.backends.outlines_core import OutlinesCoreBackend, OutlinesCoreLogitsProcessor
from outlines.backends.xgrammar import XGrammarLogitsProcessor
from outlines_core.json_schema import build_regex_from_schema
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LogitsProcessor, PreTrainedTokenizerFast

from lookahead_hf.logits.grammars import LLGuidance
from tests.helpers.models import tiny

PAD, BEGIN, END = range(3)
WIDTH = 512  # Logits of the model; the tokenizer has fewer tokens

_TRAINED_ON = """\
{"name": "Ada Lovelace", "country": "Great Britain", "level": "debug", "is_open": true, "size": 12}
{"name": "debug", "level": "default", "country": "France", "is_open": false, "parts": [1, 22, 333]}
{
  "name": "nobody",
  "level": "info",
  "country": "Kenya"
}
"""


def schema(**fields: Any) -> dict[str, Any]:
    """An object that has exactly these fields."""
    return {
        "type": "object",
        "properties": fields,
        "required": list(fields),
        "additionalProperties": False,
    }


def text(longest: int) -> dict[str, Any]:
    """A string of at most so many characters."""
    return {"type": "string", "maxLength": longest}


LEVEL = {"enum": ["debug", "default", "info"]}
NUMBER = {"type": "integer", "minimum": 0, "maximum": 999}

SCHEMAS = (
    schema(name=text(6), level=LEVEL, is_open={"type": "boolean"}, country=text(3)),
    schema(level=LEVEL, parts={"type": "array", "items": NUMBER, "minItems": 1, "maxItems": 3}),
    schema(country=text(4), name=schema(level=LEVEL, size=NUMBER)),
)
"""Records that a model which writes anything completes in some fifty tokens."""


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer that knows some JSON."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<pad>", "<begin>", "<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator([_TRAINED_ON] * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=trained, pad_token="<pad>", eos_token="<end>")


@functools.cache
def swapped_tokenizer() -> PreTrainedTokenizerFast:
    """The same tokens under other ids."""
    written = json.loads(tokenizer().backend_tokenizer.to_str())
    vocabulary: dict[str, int] = written["model"]["vocab"]
    last = len(vocabulary) - 1
    for token, place in vocabulary.items():
        vocabulary[token] = place if place <= END else last + END + 1 - place
    swapped = Tokenizer.from_str(json.dumps(written))
    return PreTrainedTokenizerFast(tokenizer_object=swapped, pad_token="<pad>", eos_token="<end>")


def model(**own: Any) -> Any:
    """A tiny model for the tokenizer, whose texts end."""
    made = tiny("llama", vocab_size=WIDTH, **own)
    made.generation_config.eos_token_id = END
    return made


@functools.cache
def blank_tokens() -> list[int]:
    """Tokens of whitespace alone, which a random model would write without end."""
    vocabulary = tokenizer().get_vocab()
    return [token for text, token in vocabulary.items() if not _decoded(text).strip()]


class LLGuidanceProcessor(LogitsProcessor):
    """What users of llguidance write, with the method that lets its grammars draft."""

    def __init__(self, grammars: Sequence[str]) -> None:
        self.grammars = grammars
        self.matchers = [LLMatcher(lltokenizer(), grammar) for grammar in grammars]
        self.mask = llguidance.torch.allocate_token_bitmask(len(grammars), WIDTH)
        self.shown: list[list[int]] = [[] for _ in grammars]

    def row_grammars(self, num_rows: int) -> list[LLGuidance]:
        return [LLGuidance(lltokenizer(), grammar) for grammar in self.grammars]

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for row, matcher in enumerate(self.matchers):
            if self.shown[row] and not matcher.is_stopped():
                assert matcher.consume_token(int(ids[row, -1]))
            self.shown[row].append(int(ids[row, -1]))
            llguidance.torch.fill_next_token_bitmask(matcher, self.mask, row)
        llguidance.torch.apply_token_bitmask_inplace(scores, self.mask)
        return scores


@functools.cache
def lltokenizer() -> Any:
    return llguidance.hf.from_tokenizer(tokenizer(), n_vocab=WIDTH, eos_token=[END])


@functools.cache
def compiled(schema: str, is_strict: bool) -> Any:
    """xgrammar's grammar of a schema."""
    info = xgrammar.TokenizerInfo.from_huggingface(
        tokenizer(), vocab_size=WIDTH, stop_token_ids=[END]
    )
    compiler = xgrammar.GrammarCompiler(info)
    return compiler.compile_json_schema(schema, any_whitespace=not is_strict)


def _llguidance(schema: str, is_strict: bool) -> str:
    options = {"whitespace_flexible": not is_strict}
    return LLMatcher.grammar_from_json_schema(schema, overrides=options)


def _index(schema: str) -> Any:
    vocabulary = OutlinesCoreBackend.create_outlines_core_vocabulary(
        tokenizer().get_vocab(), END, "<end>", lambda token: _decoded(token)
    )
    return outlines_core.Index(build_regex_from_schema(schema), vocabulary)


def _decoded(token: str) -> str:
    return decoders.ByteLevel().decode([token])


def processor(library: str, schemas: Sequence[dict[str, Any]]) -> Any:
    """Return a fresh processor; outlines' have one grammar for all rows."""
    kind, _, whitespace = library.partition(" ")
    texts, is_strict = [json.dumps(each) for each in schemas], whitespace == "strict"
    if kind == "xgrammar":
        from xgrammar.contrib.hf import LogitsProcessor as Processor

        return Processor([compiled(each, is_strict) for each in texts])
    if kind == "llguidance":
        return LLGuidanceProcessor([_llguidance(each, is_strict) for each in texts])
    if whitespace == "xgrammar":
        return XGrammarLogitsProcessor(compiled(texts[0], False), "torch")
    if whitespace == "llguidance":
        return LLGuidanceLogitsProcessor(_llguidance(texts[0], False), lltokenizer(), "torch")
    return OutlinesCoreLogitsProcessor(_index(texts[0]), "torch")


LIBRARIES = (
    "xgrammar strict",
    "xgrammar default",
    "llguidance strict",
    "llguidance default",
    "outlines core",
    "outlines xgrammar",
    "outlines llguidance",
)
