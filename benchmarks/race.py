"""Draw plain and speculative `generate` side by side, as an animated SVG.

Every token appears when a streamer received it, prefill included, in the colour of the sources that
drafted it. Each side shows its run of median time. The token ids of both sides must be equal.

    python benchmarks/race.py docs/images/race.svg --family code_edit --prompt 4
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import common
import svg
from transformers.generation.streamers import BaseStreamer

import lookahead_hf
from lookahead_hf.tools.cli.commands.env import machine
from lookahead_hf.trace import MODEL, pieces_of

COLUMNS, LINE, TOP = 58, 16.5, 66
"""Characters of a line; pixels of a line, and above the first one."""
SIDE = COLUMNS * svg.CHARACTER + 36
ROUNDS = 3
PAUSE, TICK = 4.0, 0.2  # seconds: how long the end is shown, how often a clock changes
INK, PAPER = "#e6edf3", "#161b22"
COLOURS = ("#58a6ff", "#3fb950", "#e3b341", "#f778ba", "#bc8cff", "#ff7b72")
"""For the sources, the most frequent first; what the model itself adds is white."""


class Run(NamedTuple):
    """The tokens of a call."""

    times: list[float]  # seconds until each arrived
    ids: list[int]
    origins: list[str]  # who foresaw each


class Arrivals(BaseStreamer):  # type: ignore[misc]
    """Notes when the prompt and every token arrive."""

    def __init__(self) -> None:
        self.start, self.times = time.perf_counter(), list[float]()

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter() - self.start)

    def end(self) -> None:
        pass


def timed_run(model: Any, inputs: dict[str, Any], num_tokens: int, speculates: bool) -> Run:
    """Write a text greedily, with a trace if it is speculated."""
    config = lookahead_hf.SpeculativeConfig(trace=True, on_fallback="error")
    arrivals = Arrivals()
    limits = {"max_new_tokens": num_tokens, "do_sample": False, "streamer": arrivals}
    output = model.generate(**inputs, **limits, speculative=config if speculates else False)
    ids = output[0, inputs["input_ids"].shape[1] :].tolist()
    stats = lookahead_hf.last_stats(model) if speculates else None
    return Run(arrivals.times[1:], ids, stats.trace.origins(0) if stats else [MODEL] * len(ids))


def placed(run: Run, texts: tuple[str, ...]) -> Iterator[tuple[float, int, str, int, str]]:
    """Yield the time, line, origin, column and character of everything that a run wrote."""
    line = column = 0
    for at, origin, text in zip(run.times, run.origins, texts, strict=True):
        for character in text:
            if character == "\n" or column == COLUMNS:
                line, column = line + 1, 0
            if character != "\n":
                yield round(at, 2), line, origin, column, character
                column += 1


def story(x: float, run: Run, texts: tuple[str, ...], styles: dict[str, str], total: float) -> str:
    """The text of one side, as it grows."""
    groups = []
    for at, moment in groupby(placed(run, texts), lambda each: each[0]):
        lines = []
        for (line, origin), part in groupby(moment, lambda each: each[1:3]):
            columns, characters = zip(*(each[3:] for each in part), strict=True)
            text = "".join(characters)
            left = x + svg.CHARACTER * (columns[0] + len(text) - len(text.lstrip()))
            lines.append(svg.text(left, TOP + LINE * (line + 1), text.strip(), styles[origin]))
        groups.append(svg.between(at, total, total, "".join(lines)))
    return "".join(groups)


def clock(x: float, y: float, run: Run, result: str, total: float) -> str:
    """Seconds and tokens per second while tokens arrive; then also the result."""
    end = run.times[-1]
    ticks = [TICK * count for count in range(int(end / TICK) + 1)] + [end]
    shown = []
    for start, stop in [*pairwise(ticks), (end, total)]:
        count = sum(at <= start for at in run.times)
        content = f"{start:.1f} s  {count / start if start else 0:5.1f} tokens/s"
        content, style = (content + result, "big s1") if start == end else (content, "big")
        shown.append(svg.between(start, stop, total, svg.text(x, y, content, style)))
    return "".join(shown)


def draw(plain: Run, fast: Run, texts: tuple[str, ...], prompt: str, about: str) -> str:
    """The picture of two runs that wrote the same text."""
    total = max(plain.times[-1], fast.times[-1]) + PAUSE
    counts = Counter(fast.origins)
    sources = [name for name, _ in counts.most_common() if name != MODEL]
    colours = {f"s{at}": colour for at, colour in enumerate(COLOURS)}
    styles = {MODEL: ""} | {name: f"s{at % len(COLOURS)}" for at, name in enumerate(sources)}
    bottom = TOP + LINE * (max(each[1] for each in placed(plain, texts)) + 1)
    parts = [svg.text(18, 28, f"> {prompt}"), svg.text(18, bottom + 58, about, "dim")]
    gain = f"  {plain.times[-1] / fast.times[-1]:.1f} times plain"
    sides = ((18, plain, "", ""), (18 + SIDE, fast, ", speculative=True", gain))
    for x, run, option, result in sides:
        parts.append(svg.text(x, 52, f"model.generate(**inputs{option})", "dim"))
        parts += [story(x, run, texts, styles, total), clock(x, bottom + 34, run, result, total)]
    for name in [*sources, MODEL]:  # x is still that of the right side
        parts.append(svg.text(x, bottom + 58, f"{name} {counts[name]}", styles[name]))
        x += svg.CHARACTER * len(f"{name} {counts[name]}   ")
    parts.append(svg.text(18 + SIDE, bottom + 71, "tokens by who foresaw them", "dim"))
    return svg.document(2 * SIDE, bottom + 78, about, "".join(parts), colours, INK, PAPER, total)


def main() -> None:
    """Run both systems and write the picture."""
    parser = common.parser(__doc__, prompt=4, new_tokens=128)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--family", default="code_edit", help="with --prompt, its prompt's number")
    options = common.parsed(parser, family="qa", prompt=1)
    model, tokenizer = common.load(options.model, options.dtype, options.device)
    lookahead_hf.warm_up(lookahead_hf.enable(model), context_length=512, seconds=None)
    prompts = common.read_prompts([options.family])[options.family]
    chosen, other = (prompts[options.prompt - back] for back in (0, 1))
    runs: dict[bool, list[Run]] = {False: [], True: []}
    for prompt in [other] + [chosen] * ROUNDS:  # the other prompt only warms up
        inputs = common.encode(tokenizer, [prompt])
        for speculates, done in runs.items():
            done.append(timed_run(model, inputs, options.new_tokens, speculates))
    by_time = (sorted(done[1:], key=lambda run: run.times[-1]) for done in runs.values())
    plain, fast = (done[len(done) // 2] for done in by_time)
    if plain.ids != fast.ids:
        raise SystemExit("the texts differ, as near ties in half precision may fall either way")
    about = "{model}, {dtype}, {threads} of {cores} CPU cores".format(**machine(model))
    about = re.sub("-[0-9a-f]{8},", ",", about)  # the demo's folder ends in a checksum
    picture = draw(plain, fast, pieces_of(tokenizer, plain.ids), chosen.splitlines()[0], about)
    options.picture.write_text(picture)
    print(f"{plain.times[-1]:.2f} s plain, {fast.times[-1]:.2f} s speculative")


if __name__ == "__main__":
    main()
