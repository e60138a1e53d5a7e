"""Time each source that a call must ask for, beside the default ones and what it would replace.

Every call is run by all ways of its case, one after the other; the first way is plain `generate`.

* pool: without and with a pool that starts empty and learns from each call. `rollouts` are eight
  samples of one prompt, `turns` the second and third questions of a chat, `traffic` one user's
  questions one after the other.
* assistant: `--assistant` beside transformers' `assistant_model=` with its default settings and
  with chains of 4 tokens, and the default sources alone.

A prediction has a benchmark of its own, prediction.py. `mtp` needs a checkpoint with such layers.

    python benchmarks/sources.py --dtype bfloat16 pool
    python benchmarks/sources.py --dtype bfloat16 --model MODEL --assistant SMALL assistant
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import common

import lookahead_hf
from lookahead_hf import SpeculativeConfig
from lookahead_hf.ngram_pool import NgramPool
from lookahead_hf.tools.cli.commands.env import machine
from lookahead_hf.tools.cli.measuring import PLAIN, Batch, Run, summarize, timed_call

DEFAULT = ("ngram", "recycling")
FOLLOW_UPS = ("Say that again in three short sentences.", "Now give one more example of it.")
SAMPLES = 8

Ways = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Setting:
    """A model, and how its calls are made."""

    model: Any
    tokenizer: Any
    arguments: argparse.Namespace
    shared: dict[str, Any]

    def way(self, *drafters: str, **fields: Any) -> dict[str, Any]:
        """Return the arguments of `generate` that draft from the default sources and others."""
        named = {"drafters": (*DEFAULT, *drafters), "budget": self.arguments.budget or "auto"}
        return {"speculative": SpeculativeConfig(**(named | fields))}

    def prompts(self, families: list[str] | None) -> list[Batch]:
        chosen = vars(self.arguments) | {"families": families}
        return common.chosen_batches(self.tokenizer, argparse.Namespace(**chosen))

    def run(self, batch: Batch, ways: Ways, seed: int = 0, **extra: Any) -> list[Run]:
        """Call `generate` each way."""
        runs = []
        for name, way in ways.items():
            call = timed_call(self.model, batch.inputs | self.shared | extra | way, seed)
            if "speculative" in way:
                assert call.stats is not None and call.stats.fallback_reason is None
            runs.append(Run(batch.family, name, [call]))
        return runs


def pool(setting: Setting) -> Iterator[list[Run]]:
    """Compare calls without a pool with calls that learn from those before them."""
    for calls in (rollouts, turns, traffic):
        yield from calls(setting)


def learning(setting: Setting) -> Ways:
    """Return the ways of calls whose pool starts empty."""
    pooled = setting.way(pool=NgramPool(1_000_000), learn=True)
    return {PLAIN: {}, "default": setting.way(), "default + pool": pooled}


def rollouts(setting: Setting) -> Iterator[list[Run]]:
    for batch in setting.prompts(["math_reasoning"]):
        ways, batch = learning(setting), Batch("rollouts", batch.indices, batch.inputs)
        for seed in range(SAMPLES):
            yield setting.run(batch, ways, seed, do_sample=True, temperature=0.8, top_p=0.95)


def turns(setting: Setting) -> Iterator[list[Run]]:
    skip, count = setting.arguments.skip, setting.arguments.prompts_per_family
    ways = learning(setting)
    for at, question in enumerate(common.read_prompts(["chat"])["chat"][skip : skip + count]):
        messages: list[dict[str, str]] = []
        for number, asked in enumerate((question, *FOLLOW_UPS)):
            messages.append({"role": "user", "content": asked})
            encoded = setting.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            runs = setting.run(Batch("turns", (at,), dict(encoded)), ways)
            if number:
                yield runs
            answer = setting.tokenizer.decode(runs[0].call.rows[0], skip_special_tokens=True)
            messages.append({"role": "assistant", "content": answer})


def traffic(setting: Setting) -> Iterator[list[Run]]:
    ways = learning(setting)
    for batch in setting.prompts(None):
        yield setting.run(Batch("traffic", batch.indices, batch.inputs), ways)


def assistant(setting: Setting) -> Iterator[list[Run]]:
    """Compare an assistant with transformers' assisted generation."""
    arguments = setting.arguments
    small, tokenizer = common.load(arguments.assistant, arguments.dtype, arguments.device)
    given: dict[str, Any] = {"assistant_model": small}
    if tokenizer.get_vocab() != setting.tokenizer.get_vocab():
        given |= {"tokenizer": setting.tokenizer, "assistant_tokenizer": tokenizer}
    ways = {
        PLAIN: {},
        "transformers": given,
        "transformers, 4 tokens": given
        | {"num_assistant_tokens": 4, "num_assistant_tokens_schedule": "constant"},
        "default": setting.way(),
        "default + assistant": setting.way("assistant") | given,
    }
    for batch in setting.prompts(arguments.families or ["chat", "code", "summarization"]):
        yield setting.run(batch, ways)


CASES: dict[str, Callable[[Setting], Iterator[list[Run]]]] = {
    "pool": pool,
    "assistant": assistant,
}


def main() -> None:
    parser = common.prompts_parser(__doc__)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--assistant", help="a folder or hub name (default: the demo's model)")
    parser.add_argument("--budget", type=int, help="draft tokens of a step (default: auto)")
    options = common.parsed(parser)
    model, tokenizer = common.load(options.model, options.dtype, options.device)
    lookahead_hf.enable(model)
    lookahead_hf.warm_up(model, context_length=300, seconds=None)
    setting = Setting(model, tokenizer, options, common.greedy(tokenizer, options))
    report = common.Report(options, **machine(model))
    for line in summarize([run for runs in CASES[options.case](setting) for run in runs]):
        report.add(line)
    report.end()


if __name__ == "__main__":
    main()
