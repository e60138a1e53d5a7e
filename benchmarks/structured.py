"""JSON by a schema: plain, speculative without what the grammar knows, and speculative.

Twenty prompts of benchmarks/data/schemas.jsonl are answered greedily, one by one, with xgrammar's
processor and with one of llguidance, each with strict and with the library's default whitespace.
All three answers to a prompt are written one after another, so that they meet the same machine.
Ratios are of tokens/s, since texts may differ in half precision. "Unknown" is speculation with the
processor hidden behind a function.

    python benchmarks/structured.py --dtype bfloat16 --model FOLDER
    python benchmarks/structured.py --budget 16 --libraries xgrammar --cases 5
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import common
import torch

import lookahead_hf
from lookahead_hf.logits.grammars import LLGuidance
from lookahead_hf.tools.cli.commands.env import machine
from lookahead_hf.tools.cli.measuring import PLAIN, Call, Run, summarize, timed_call

SCHEMAS = Path(__file__).parent / "data" / "schemas.jsonl"
KINDS = (PLAIN, "grammar unknown", "ours")


@dataclass(frozen=True)
class Line:
    """The prompts with one grammar: tokens per step, ratios of tokens/s, texts equal to plain's."""

    grammar: str
    whitespace: str
    unknown: float
    ours: float
    ours_to_plain: float
    ours_to_unknown: float
    slowest_to_plain: float  # of a schema
    texts_of_plain: str


Make = Callable[[str], Any]
"""Makes a fresh processor from a schema."""


class LLGuidanceProcessor:
    """What users of llguidance write; `row_grammars` lets it draft."""

    def __init__(self, tokenizer: Any, grammar: str) -> None:
        import llguidance.torch

        self.library, self.tokenizer, self.grammar = llguidance.torch, tokenizer, grammar
        self.matcher = llguidance.LLMatcher(tokenizer, grammar)
        self.mask = llguidance.torch.allocate_token_bitmask(1, tokenizer.vocab_size)
        self.is_first = True

    def row_grammars(self, num_rows: int) -> list[LLGuidance]:
        return [LLGuidance(self.tokenizer, self.grammar) for _ in range(num_rows)]

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not self.is_first and not self.matcher.is_stopped():
            self.matcher.consume_token(int(ids[0, -1]))
        self.is_first = False
        self.library.fill_next_token_bitmask(self.matcher, self.mask, 0)
        self.library.apply_token_bitmask_inplace(scores, self.mask)
        return scores


def makers(library: str, is_strict: bool, tokenizer: Any, model: Any) -> Make:
    """What makes a library's processors."""
    vocab, stop = model.config.vocab_size, [tokenizer.eos_token_id]
    if library == "xgrammar":
        import xgrammar
        from xgrammar.contrib.hf import LogitsProcessor

        info = xgrammar.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=vocab, stop_token_ids=stop
        )
        compiler = xgrammar.GrammarCompiler(info)
        return lambda schema: LogitsProcessor(
            compiler.compile_json_schema(schema, any_whitespace=not is_strict)
        )
    import llguidance.hf

    own = llguidance.hf.from_tokenizer(tokenizer, n_vocab=vocab, eos_token=stop)
    options = {"whitespace_flexible": not is_strict}
    return lambda schema: LLGuidanceProcessor(
        own, llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=options)
    )


def write(
    model: Any, tokenizer: Any, make: Make, case: dict[str, Any], options: argparse.Namespace
) -> dict[str, Call]:
    """Answer one prompt in all ways."""
    fields = ", ".join(case["schema"]["properties"])
    prompt = f"{case['prompt']}\nAnswer in JSON with the fields: {fields}"
    inputs = common.encode(tokenizer, [prompt])
    config = lookahead_hf.SpeculativeConfig(budget=options.budget, on_fallback="error")
    answers = {}
    for kind in KINDS:
        processor = make(json.dumps(case["schema"]))
        if kind == KINDS[1]:
            processor = lambda ids, scores, inner=processor: inner(ids, scores)  # noqa: E731
        given = inputs | common.greedy(tokenizer, options) | {"logits_processor": [processor]}
        if kind != PLAIN:
            given["speculative"] = config
        answers[kind] = timed_call(model, given)
    return answers


def measure(
    model: Any, tokenizer: Any, make: Make, cases: list[dict[str, Any]], options: argparse.Namespace
) -> dict[str, Any]:
    """Answer all prompts in all ways, and return the fields of a line."""
    write(model, tokenizer, make, cases[0], options)  # reads the vocabulary, untimed
    answers = [write(model, tokenizer, make, case, options) for case in cases]
    runs = [Run("", kind, [call]) for each in answers for kind, call in each.items()]
    lines = {line.system: line for line in summarize(runs) if line.family == "all"}
    _, unknown, ours = (lines[kind] for kind in KINDS)
    return {
        "unknown": unknown.tokens_per_step,
        "ours": ours.tokens_per_step,
        "ours_to_plain": ours.ratio,
        "ours_to_unknown": ours.ratio / unknown.ratio,
        "slowest_to_plain": ours.lowest,
        "texts_of_plain": f"{ours.identical * ours.texts:.0f} of {ours.texts}",
    }


def main() -> None:
    parser = common.parser(__doc__, cases=20, new_tokens=112, budget=16)
    parser.add_argument("--libraries", type=common.words, default=["xgrammar", "llguidance"])
    options = common.parsed(parser, cases=2, new_tokens=12)
    model, tokenizer = common.load(options.model, options.dtype, options.device)
    lookahead_hf.enable(model)
    lookahead_hf.warm_up(model, seconds=None, max_draft_nodes=16)
    rows = SCHEMAS.read_text(encoding="utf-8").splitlines()
    cases = [json.loads(row) for row in rows][: options.cases]
    report = common.Report(options, **machine(model))
    for library, is_strict in product(options.libraries, (True, False)):
        make = makers(library, is_strict, tokenizer, model)
        found = measure(model, tokenizer, make, cases, options)
        report.add(Line(library, "strict" if is_strict else "default", **found))


if __name__ == "__main__":
    main()
