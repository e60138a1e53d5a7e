"""Compare this project's default drafters with others by tokens per step, on the same texts.

The texts are greedy fp32 outputs, recorded once with the target's likeliest tokens at every
position. Every drafter is then replayed on them, so no clock is involved and no drafter changes the
text. The first eight prompts of each family are left out, since the initial acceptance rates were
measured on them. The peers are rewritten from their papers and code, with published settings.
Only the logits of the text itself were recorded. Drafters that also recycle those of rejected
nodes (Token Recycling, SAM-Decoding, RACER, this project's) get them with --on-model, which runs
the model on every draft and takes hours on a CPU. Without it they score lower than they would.

    python benchmarks/drafters.py
    python benchmarks/drafters.py --json drafters.json --plot drafters.svg
    python benchmarks/drafters.py --plots docs/images
    python benchmarks/drafters.py --on-model --device cuda
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import common
import torch
from call_replay import Text
from on_model import OnModel
from ours import Ours
from peers import LogitSpec, PromptLookup, Racer, SamDecoding, SuffixDecoding, TokenRecycling
from record import folder_of, recorded
from replay import RECORDED, Contender, Line, Outcome, Recorded, replay

ALL = "all"


def peers() -> list[Contender]:
    """Return the other projects' drafters with their published settings."""
    return [
        PromptLookup(),
        PromptLookup(ngram_size=3),
        TokenRecycling(),
        SamDecoding(),
        Racer(),
        LogitSpec(),
        SuffixDecoding(),
        SuffixDecoding(tree=True, factor=4.0, depth=64),
    ]


def lines_of(
    contender: Contender, texts: Iterable[Text], target: Recorded = RECORDED
) -> list[Line]:
    """Replay all texts; return a line per family, then one for all of them."""
    outcomes = replay(texts, contender, target)
    families = [*sorted({outcome.family for outcome in outcomes}), ALL]
    return [
        _line(family, contender, [o for o in outcomes if family in (o.family, ALL)])
        for family in families
    ]


def _line(family: str, contender: Contender, outcomes: list[Outcome]) -> Line:
    steps = sum(outcome.steps for outcome in outcomes)
    return Line(
        family,
        contender.name,
        contender.settings,
        len(outcomes),
        sum(outcome.emitted for outcome in outcomes) / steps,
        sum(outcome.drafted for outcome in outcomes) / steps,
    )


def print_table(lines: list[Line]) -> None:
    """Print tokens per step as a Markdown table: a row per drafter, a column per family."""
    families = list(dict.fromkeys(line.family for line in lines))
    print("| drafter | settings | nodes per step |", " | ".join(families), "|")
    print("|---|---|" + "---|" * (1 + len(families)))
    for drafter in dict.fromkeys(line.drafter for line in lines):
        own = [line for line in lines if line.drafter == drafter]
        values = " | ".join(f"{line.tokens_per_step:.2f}" for line in own)
        settings, nodes = own[-1].settings, own[-1].nodes_per_step
        print(f"| {drafter} | {settings} | {nodes:.1f} | {values} |")


def print_leads(lines: list[Line], ours: list[str]) -> None:
    """Print our lead over the best peer of each family and of all."""
    for name in ours:
        leads = []
        for line in (line for line in lines if line.drafter == name):
            best = best_peer(lines, line.family, ours)
            lead = line.tokens_per_step / best.tokens_per_step - 1
            leads.append(f"{line.family} {lead:+.1%} ({best.drafter})")
        print(f"{name}, beside the best other: {', '.join(leads)}")


def best_peer(lines: list[Line], family: str, ours: list[str]) -> Line:
    """Return the line of the peer with the most tokens per step."""
    others = [line for line in lines if line.family == family and line.drafter not in ours]
    return max(others, key=lambda line: line.tokens_per_step)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a folder or hub name (default: the demo's model)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--prompts", type=Path, default=common.PROMPTS, help="file of JSON lines")
    parser.add_argument("--prompts-per-family", type=int, default=8)
    parser.add_argument("--skip", type=int, default=8, help="leave out the first of each family")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--nodes", type=_sizes, default=(16, 64), metavar="N,N", help="of ours")
    parser.add_argument("--on-model", action="store_true", help="verify drafts by the model")
    parser.add_argument("--threads", type=int, help="torch's threads")
    parser.add_argument("--texts", type=Path, help="folder of the recorded texts")
    parser.add_argument("--json", type=Path, help="write the lines to this file")
    parser.add_argument("--plot", type=Path, help="write bars by family (needs matplotlib)")
    parser.add_argument("--plots", type=Path, help="folder for the figures of docs")
    return parser.parse_args(argv)


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.split(","))


def read_texts(arguments: argparse.Namespace, load: Callable[[], tuple[Any, Any]]) -> list[Text]:
    """Return the recorded texts; record those that are missing."""
    from lookahead_hf.utils import cache_root

    folder = arguments.texts or folder_of(load()[0], cache_root() / "texts")
    chosen = slice(arguments.skip, arguments.skip + arguments.prompts_per_family)
    return recorded(load, chosen, arguments.new_tokens, folder, arguments.prompts)


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    load = functools.cache(lambda: common.load(arguments.model, "float32", arguments.device))
    texts = read_texts(arguments, load)
    target = OnModel(load()[0]) if arguments.on_model else RECORDED
    ours = [
        Ours(size, arguments.new_tokens, keep=keep)
        for keep in (False, True)
        for size in arguments.nodes
    ]
    lines = []
    for contender in [*peers(), *ours]:
        print(f"replaying {contender.name}", file=sys.stderr)
        lines += lines_of(contender, texts, target)
    print_table(lines)
    print_leads(lines, [contender.name for contender in ours])
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(line) for line in lines], indent=1) + "\n")
    if arguments.plot or arguments.plots:
        import drafter_plots

        if arguments.plot:
            drafter_plots.by_family(lines, arguments.plot)
        if arguments.plots:
            drafter_plots.for_docs(lines, texts, target, arguments.new_tokens, arguments.plots)


if __name__ == "__main__":
    main()
