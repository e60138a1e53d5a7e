"""Compare this project's default drafters with others by tokens per step, on the same texts.

The texts are greedy fp32 outputs, recorded once with the target's likeliest tokens at every
position. Every drafter is then replayed on them, so no clock is involved and no drafter changes the
text. The first eight prompts of each family are left out, since the initial acceptance rates were
measured on them. The peers are rewritten from their papers and code, with published settings.
Only the logits of the text itself were recorded. Drafters that also recycle those of rejected
nodes (Token Recycling, SAM-Decoding, RACER, this project's) get them with --on-model, which runs
the model on every draft and takes hours on a CPU. Without it they score lower than they would.

    python benchmarks/drafters.py --json drafters.json --picture docs/images/drafters.svg
    python benchmarks/drafters.py --on-model --device cuda
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path

import common
import svg
from on_model import OnModel
from ours import Ours
from peers import LogitSpec, PromptLookup, Racer, SamDecoding, SuffixDecoding, TokenRecycling
from record import folder_of, recorded
from replay import RECORDED, Contender, Line, Outcome, Recorded, Text, replay

ALL = "all"
COLOURS = ("#8b949e", "#d29922", "#3fb950", "#2f81f7")
"""They stand out on white and on black; the last is ours."""


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


def print_leads(lines: list[Line]) -> None:
    """Print our lead over the best other of each family and of all."""
    leads: dict[str, list[str]] = {}
    for line in filter(is_ours, lines):
        others = [each for each in lines if each.family == line.family and not is_ours(each)]
        best = max(others, key=lambda each: each.tokens_per_step)
        lead = f"{line.family} {line.tokens_per_step / best.tokens_per_step - 1:+.1%}"
        leads.setdefault(line.drafter, []).append(f"{lead} ({best.drafter})")
    for name, said in leads.items():
        print(f"{name}, beside the best other: {', '.join(said)}")


def is_ours(line: Line) -> bool:
    return line.drafter.startswith("ours")


def by_family(lines: list[Line]) -> str:
    """A picture of tokens per step by family: the first, the two best others, our largest."""
    over_all = [line for line in lines if line.family == ALL]
    first, *others = [line for line in over_all if not is_ours(line)]
    best = sorted(others, key=lambda line: -line.tokens_per_step)[:2]
    ours = [line for line in over_all if is_ours(line) and "kept" not in line.drafter]
    names = {}
    for line in (first, *reversed(best), max(ours, key=lambda line: line.nodes_per_step)):
        label = "lookahead_hf" if is_ours(line) else line.drafter
        names[line.drafter] = f"{label}: {line.nodes_per_step:.0f} nodes"
    groups: dict[str, list[svg.Bar]] = {}
    for line in lines:
        if line.drafter in names:
            label = f"{line.tokens_per_step:.2f}" if is_ours(line) else ""
            bar = names[line.drafter], line.tokens_per_step, label
            groups.setdefault(line.family, []).append(bar)
    colours = dict(zip(names.values(), COLOURS, strict=True))
    return svg.bars(groups, colours, "tokens per step by family")


def main() -> None:
    parser = common.parser(__doc__, prompts_per_family=8, skip=8, new_tokens=128)
    parser.add_argument("--prompts", type=Path, default=common.PROMPTS, help="file of JSON lines")
    parser.add_argument("--nodes", type=common.numbers, default=[16, 64], help="of ours")
    parser.add_argument("--on-model", action="store_true", help="verify drafts by the model")
    parser.add_argument("--texts", type=Path, help="folder of the recorded texts")
    parser.add_argument("--picture", type=Path, help="draw bars by family as an SVG file")
    options = common.parsed(parser, skip=0)
    load = functools.cache(lambda: common.load(options.model, options.dtype, options.device))
    from lookahead_hf.utils import cache_root

    folder = options.texts or folder_of(load()[0], cache_root() / "texts")
    chosen = slice(options.skip, options.skip + options.prompts_per_family)
    texts = recorded(load, chosen, options.new_tokens, folder, options.prompts)
    target = OnModel(load()[0]) if options.on_model else RECORDED
    ours = [
        Ours(size, options.new_tokens, keep=keep)
        for keep in (False, True)
        for size in options.nodes
    ]
    report = common.Report(options)
    for contender in [*peers(), *ours]:
        for line in lines_of(contender, texts, target):
            report.add(line)
    print_leads(report.lines)
    if options.picture:
        options.picture.write_text(by_family(report.lines))


if __name__ == "__main__":
    main()
