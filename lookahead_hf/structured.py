"""Logits processors that make a text obey a JSON schema, a regular expression or a grammar.

    from lookahead_hf import structured

    processor = structured.json_schema(schema, tokenizer)
    model.generate(**inputs, logits_processor=[processor], speculative=True)

They are xgrammar's, which the extra `[structured]` installs. A processor serves one call of
`generate`. Making another one for the next call costs little, since compiled grammars are kept as
long as the tokenizer lives.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

try:
    import xgrammar
    from xgrammar.contrib import hf
except ImportError as error:
    raise ImportError(
        "lookahead_hf.structured needs xgrammar, of the extra `structured`: in a checkout of "
        "lookahead_hf, pip install '.[structured]'"
    ) from error

__all__ = ["Processor", "grammar", "json_schema", "regex"]

_PLACE = re.compile(r"^\[[\d:]+\] \S+:\d+: (Check failed: .*? is false: )?")
"""The start of xgrammar's errors: the time, a line of its source, and what it checks there."""

_FORBIDDEN = (
    "a token was chosen that the grammar forbids: nothing may follow, or the other processors, "
    "or settings such as min_new_tokens and no_repeat_ngram_size, leave none of what may"
)

_KEPT_BYTES = 1 << 28  # Size of the compiled grammars that are kept for a tokenizer

_compilers: WeakKeyDictionary[Any, tuple[Any, Any, Any]] = WeakKeyDictionary()
"""What each tokenizer was when its compiler was made, the compiler, and xgrammar's description."""


class Processor(hf.LogitsProcessor):
    """xgrammar's processor, also for models with more logits than the tokenizer has tokens."""

    prefilled: bool
    _columns = 0  # of the latest call

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores, [rows, vocab], without the tokens that may not follow.

        Raises:
            ValueError: The processor has served another call of `generate` or has not one grammar
                for each row, or something else has chosen a token that may not follow.
        """
        rows, columns = input_ids.shape
        if len(self.compiled_grammars) not in (1, rows):
            raise ValueError(
                f"the processor has {len(self.compiled_grammars)} grammars, the batch {rows} rows: "
                "give one for all of them, or a list with one for each row"
            )
        if self.prefilled and columns != self._columns + 1:
            raise ValueError(
                "this processor has served another call of generate: make one for each call"
            )
        self._columns = columns
        if self.prefilled:
            for matcher, token in zip(self.matchers, input_ids[:, -1].tolist(), strict=False):
                if not (matcher.is_terminated() or matcher.accept_token(token)):
                    raise ValueError(_FORBIDDEN)
            self.prefilled = False  # xgrammar would accept the token again, in an assertion
        known = super().__call__(input_ids, scores[:, : self.full_vocab_size].contiguous())
        missing = scores.shape[1] - known.shape[1]
        return torch.nn.functional.pad(known, (0, missing), value=-torch.inf)


def json_schema(schema: Any, tokenizer: Any, *, any_whitespace: bool = False) -> Processor:
    """Make a processor for texts that are JSON of a schema.

    Args:
        schema: A JSON schema as a dict or as text, or a pydantic model; or a list of these, one for
            each row of a batch.
        tokenizer: The model's tokenizer.
        any_whitespace: Whether any whitespace may stand between the parts. By default they are
            separated by `", "` and `": "`, of which more can be drafted.

    Raises:
        ValueError: A schema cannot be compiled.
    """

    def compile_one(compiler: Any, each: Any) -> Any:
        return compiler.compile_json_schema(_text_of(each), any_whitespace=any_whitespace)

    return compiled("the JSON schema", schema, tokenizer, compile_one)


def regex(pattern: str | Sequence[str], tokenizer: Any) -> Processor:
    """Make a processor for texts that match a regular expression as a whole.

    Args:
        pattern: The expression; or a list of these, one for each row of a batch.
        tokenizer: The model's tokenizer.

    Raises:
        ValueError: An expression cannot be compiled.
    """
    compile_one = xgrammar.GrammarCompiler.compile_regex
    return compiled("the regular expression", pattern, tokenizer, compile_one)


def grammar(ebnf: str | Sequence[str], tokenizer: Any) -> Processor:
    """Make a processor for texts of a context-free grammar.

    Args:
        ebnf: The grammar in xgrammar's EBNF, with the rule `root`; or a list of these, one for each
            row of a batch.
        tokenizer: The model's tokenizer.

    Raises:
        ValueError: A grammar cannot be compiled.
    """
    compile_one = xgrammar.GrammarCompiler.compile_grammar
    return compiled("the grammar", ebnf, tokenizer, compile_one)


def compiled(
    what: str, given: Any, tokenizer: Any, compile_one: Callable[[Any, Any], Any]
) -> Processor:
    """Make a processor of something that `compile_one` compiles, or of a list of them.

    Args:
        what: Its name in errors.
        given: One thing to compile, or a list.
        tokenizer: The model's tokenizer.
        compile_one: Takes xgrammar's compiler and one thing; returns the compiled grammar.

    Raises:
        ValueError: It cannot be compiled.
    """
    each = given if isinstance(given, (list, tuple)) else [given]
    if not each:
        raise ValueError(f"{what} is missing: the list is empty")
    try:
        found = [compile_one(_compiler(tokenizer), one) for one in each]
        if not all(map(_allows_text, found)):
            raise ValueError("no text obeys it")
        return Processor(found)
    except Exception as error:  # xgrammar's own classes, and whatever pydantic raises
        reason = _PLACE.sub("", str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"{what} cannot be compiled: {reason}") from error


def _text_of(schema: Any) -> str:
    if isinstance(schema, str):
        try:
            json.loads(schema)
        except ValueError as error:
            raise ValueError(f"it is no JSON: {error}") from error
        return schema
    if hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    if not isinstance(schema, Mapping):
        raise ValueError(f"{schema!r} is no dict, no text and no pydantic model")
    return json.dumps(schema)


def _allows_text(grammar: Any) -> bool:
    mask = xgrammar.allocate_token_bitmask(1, grammar.tokenizer_info.vocab_size)
    constrains = xgrammar.GrammarMatcher(grammar).fill_next_token_bitmask(mask)
    return not constrains or bool(mask.any())


def vocabulary(tokenizer: Any) -> str:
    """Return xgrammar's description of a tokenizer, for another process."""
    _compiler(tokenizer)
    return str(_compilers[getattr(tokenizer, "tokenizer", tokenizer)][2].serialize_json())


def _compiler(tokenizer: Any) -> Any:
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    now = len(tokenizer), tokenizer.eos_token_id  # tokens may be added at any time
    if tokenizer not in _compilers or _compilers[tokenizer][0] != now:
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer)
        compiler = xgrammar.GrammarCompiler(info, cache_limit_bytes=_KEPT_BYTES)
        _compilers[tokenizer] = now, compiler, info
    return _compilers[tokenizer][1]
