"""JSON by a schema: plain, speculative without what the grammar knows, and speculative.

Twenty prompts of benchmarks/data/schemas.jsonl are answered greedily, one by one, with xgrammar's
processor and with one of llguidance, each with strict and with the library's default whitespace.
All three answers to a prompt are written one after another, so that they meet the same machine. It
prints a table in Markdown; ratios are of tokens/s, since texts may differ in half precision.

    python benchmarks/structured.py --dtype bfloat16 --model FOLDER
    python benchmarks/structured.py --budget 16 --libraries xgrammar --cases 5
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
import torch

import lookahead_hf
from lookahead_hf.logits.grammars import LLGuidance

SCHEMAS = Path(__file__).parent / "data" / "schemas.jsonl"
PLAIN, UNKNOWN, OURS = KINDS = ("plain", "grammar unknown", "ours")
COLUMNS = (
    "grammar",
    "whitespace",
    *(f"tokens per step, {kind}" for kind in KINDS),
    "ours : plain",
    "ours : grammar unknown",
    "slowest schema, ours : plain",
    "texts of plain",
)

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


@dataclass
class Total:
    """What one way of writing took for all prompts."""

    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0
    same: int = 0

    def add(self, ids: list[int], steps: int, seconds: float, is_same: bool) -> None:
        self.tokens, self.steps = self.tokens + len(ids) - 1, self.steps + steps
        self.seconds, self.same = self.seconds + seconds, self.same + is_same

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    @property
    def per_step(self) -> float:
        """Tokens per step."""
        return self.tokens / self.steps


def write(
    model: Any, tokenizer: Any, make: Make, case: dict[str, Any], arguments: argparse.Namespace
) -> dict[str, tuple[list[int], int, float]]:
    """Answer one prompt in all ways: the tokens, the steps and the seconds of each."""
    fields = ", ".join(case["schema"]["properties"])
    prompt = f"{case['prompt']}\nAnswer in JSON with the fields: {fields}"
    inputs = common.encode(tokenizer, [prompt])
    config = lookahead_hf.SpeculativeConfig(budget=arguments.budget, on_fallback="error")
    answers = {}
    for kind in KINDS:
        processor = make(json.dumps(case["schema"]))
        if kind == UNKNOWN:
            processor = lambda ids, scores, inner=processor: inner(ids, scores)  # noqa: E731
        start = time.perf_counter()
        ids = model.generate(
            **inputs,
            max_new_tokens=arguments.new_tokens,
            do_sample=False,
            pad_token_id=tokenizer.eos_token_id,
            logits_processor=[processor],
            speculative=False if kind == PLAIN else config,
        )[0, inputs["input_ids"].shape[1] :].tolist()
        seconds = time.perf_counter() - start
        stats = None if kind == PLAIN else lookahead_hf.last_stats(model)
        answers[kind] = ids, len(ids) - 1 if stats is None else stats.num_steps, seconds
    return answers


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = common.model_parser(__doc__)
    parser.add_argument("--libraries", nargs="+", default=["xgrammar", "llguidance"])
    parser.add_argument("--cases", type=common.positive, default=20, help="the first N")
    parser.add_argument("--new-tokens", type=common.positive, default=112)
    parser.add_argument("--budget", type=common.budget)
    parser.set_defaults(budget=16)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    model, tokenizer = common.load(arguments.model, arguments.dtype, arguments.device)
    lookahead_hf.enable(model)
    lookahead_hf.warm_up(model, seconds=None, max_draft_nodes=16)
    lines = SCHEMAS.read_text(encoding="utf-8").splitlines()
    cases = [json.loads(line) for line in lines][: arguments.cases]
    print("|", " | ".join(COLUMNS), "|\n" + "|---" * len(COLUMNS) + "|")
    for library in arguments.libraries:
        for is_strict in (True, False):
            make = makers(library, is_strict, tokenizer, model)
            cells = compared(model, tokenizer, make, cases, arguments)
            whitespace = "strict" if is_strict else "default"
            print("|", " | ".join([library, whitespace, *cells]), "|", flush=True)


def compared(
    model: Any,
    tokenizer: Any,
    make: Make,
    cases: list[dict[str, Any]],
    arguments: argparse.Namespace,
) -> list[str]:
    """Answer all prompts in all ways, and return the cells of the table."""
    totals = {kind: Total() for kind in KINDS}
    slowest = float("inf")
    write(model, tokenizer, make, cases[0], arguments)  # reads the vocabulary, untimed
    for case in cases:
        answers = write(model, tokenizer, make, case, arguments)
        speeds = {kind: (len(ids) - 1) / seconds for kind, (ids, _, seconds) in answers.items()}
        slowest = min(slowest, speeds[OURS] / speeds[PLAIN])
        for kind, (ids, steps, taken) in answers.items():
            totals[kind].add(ids, steps, taken, ids == answers[PLAIN][0])
    plain, unknown, ours = totals.values()
    ratios = ours.speed / plain.speed, ours.speed / unknown.speed, slowest
    numbers = [*(total.per_step for total in totals.values()), *ratios]
    return [*(f"{number:.2f}" for number in numbers), f"{ours.same} of {len(cases)}"]


if __name__ == "__main__":
    main()
