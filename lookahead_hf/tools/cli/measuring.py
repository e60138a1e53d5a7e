"""Measures plain and speculative calls: their speeds, and where their texts diverge."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median_low
from typing import TYPE_CHECKING, Any

from lookahead_hf.tools.cli.screen import CommandError

if TYPE_CHECKING:
    import torch

    from lookahead_hf.stats import SpeculativeStats


PLAIN, LOOKUP, OURS = "plain", "HF prompt lookup", "speculative"


def systems(batch_size: int = 1) -> dict[str, dict[str, Any]]:
    """Return the systems to compare, each with the arguments that it adds to `generate`."""
    known: dict[str, dict[str, Any]] = {PLAIN: {}}
    if batch_size == 1:  # HF's assisted decoding takes no batches
        known[LOOKUP] = {"prompt_lookup_num_tokens": 10}
    known[OURS] = {"speculative": True}
    return known


@dataclass(frozen=True)
class Batch:
    """Prompts that one call generates from."""

    family: str
    indices: tuple[int, ...]  # of the prompts within their family
    inputs: dict[str, Any]  # input_ids and attention_mask, [rows, columns], and a pad token


@dataclass(frozen=True)
class Call:
    """One timed call of `generate`."""

    seconds: float
    rows: tuple[tuple[int, ...], ...]  # new tokens of each row, up to and with its end token
    forwards: int = 0  # forwards of the model, the prefill's included
    stats: SpeculativeStats | None = None  # of a speculative call

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.rows))

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.num_tokens / self.seconds


@dataclass
class Run:
    """The calls of one batch by one system, one per round."""

    family: str
    system: str
    calls: list[Call] = field(default_factory=list)

    @property
    def call(self) -> Call:
        """The call of median speed: in half precision, rounds may write different texts."""
        speeds = [call.speed for call in self.calls]
        return self.calls[speeds.index(median_low(speeds))]


def measure(
    model: Any,
    batches: Sequence[Batch],
    ways: Mapping[str, dict[str, Any]],
    shared: dict[str, Any],
    rounds: int,
    seed: int = 0,
    prepares: bool = True,
) -> Iterator[list[Run]]:
    """Run every batch by every system, round after round; yield the runs so far after every batch.

    `ways` are the arguments that each system adds to the `shared` ones of `generate`. `seed` is
    that of the first batch; every further batch has the next number. At first the first batch runs
    untimed, if that `prepares` what later calls find. CommandError if plain `generate` ran instead.
    """
    for extra in ways.values() if prepares else ():
        timed_call(model, batches[0].inputs | shared | extra, seed)
    runs = [{name: Run(batch.family, name) for name in ways} for batch in batches]
    named = list(ways.items())
    for number in range(rounds):
        for at, batch in enumerate(batches):
            shift = (number + at) % len(named)  # the first system meets colder caches
            for name, extra in named[shift:] + named[:shift]:
                call = timed_call(model, batch.inputs | shared | extra, seed + at)
                reason = call.stats and call.stats.fallback_reason
                if "speculative" in extra and (call.stats is None or reason is not None):
                    raise CommandError(f"The call was not speculated: {reason}")
                runs[at][name].calls.append(call)
            done = runs if number else runs[: at + 1]
            yield [run for by_system in done for run in by_system.values()]


def timed_call(model: Any, arguments: dict[str, Any], seed: int | None = None) -> Call:
    """Run `generate` once and count the model's forwards; the generator goes on without a seed."""
    import torch

    import lookahead_hf

    prompts = {name: arguments[name].to(model.device) for name in ("input_ids", "attention_mask")}
    if seed is not None:
        torch.manual_seed(seed)
    is_ours, forwards = bool(arguments.get("speculative")), 0

    def count(*_: object) -> None:
        nonlocal forwards
        forwards += 1

    # Our calls are counted by their statistics: a hook would change how their steps run.
    with nullcontext() if is_ours else model.register_forward_pre_hook(count):
        start = time.perf_counter()
        output = model.generate(**{**arguments, **prompts})
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    sequences = getattr(output, "sequences", output)
    new = sequences[:, prompts["input_ids"].shape[1] :].tolist()
    end_ids = end_tokens(model)
    stats = lookahead_hf.last_stats(model) if is_ours else None
    if stats is not None:
        forwards = 1 + stats.num_steps
    return Call(seconds, tuple(until_end(row, end_ids) for row in new), forwards, stats)


def until_end(row: list[int], end_ids: frozenset[int]) -> tuple[int, ...]:
    """Return the tokens of a row up to and with its end token."""
    ends = [index for index, token in enumerate(row) if token in end_ids]
    return tuple(row[: ends[0] + 1] if ends else row)


def end_tokens(model: Any) -> frozenset[int]:
    """Return the ids of a model's end tokens."""
    ids = model.generation_config.eos_token_id
    return frozenset([ids] if isinstance(ids, int) else ids or ())


@dataclass(frozen=True)
class Line:
    """One line of the result: a system on one family of prompts, or on all families."""

    family: str
    system: str
    texts: int
    tokens: int
    tokens_per_second: float
    ratio: float  # to plain; `lowest` and `highest` are those of single calls
    lowest: float
    highest: float
    tokens_per_step: float
    identical: float  # share of the texts that equal the plain ones


def summarize(runs: list[Run]) -> list[Line]:
    """Return a line per family and system, then a line per system over all families."""
    families = list(dict.fromkeys(run.family for run in runs))
    lines = []
    for family in [*families, "all"]:
        chosen = [run for run in runs if family in (run.family, "all")]
        plain = [run for run in chosen if run.system == PLAIN]
        for system in dict.fromkeys(run.system for run in chosen):
            lines.append(_line(family, [run for run in chosen if run.system == system], plain))
    return lines


def table(lines: Sequence[Line]) -> list[list[str]]:
    """Return the lines as the rows of a table, below its headers."""
    rows = [
        [
            f"{line.family}, {line.system}",
            f"{line.tokens_per_second:.1f}",
            f"{line.ratio:.2f}",
            f"{line.lowest:.2f}-{line.highest:.2f}",
            f"{line.tokens_per_step:.2f}",
            f"{line.identical * line.texts:.0f} of {line.texts}",
        ]
        for line in lines
    ]
    return [["prompts, system", "tokens/s", "ratio", "of texts", "per step", "identical"], *rows]


def _line(family: str, runs: list[Run], plain: list[Run]) -> Line:
    pairs = [
        pair
        for run, reference in zip(runs, plain, strict=True)
        for pair in zip(run.call.rows, reference.call.rows, strict=True)
    ]
    speed = _tokens_per_second(runs)
    ratios = [run.call.speed / each.call.speed for run, each in zip(runs, plain, strict=True)]
    return Line(
        family=family,
        system=runs[0].system,
        texts=len(pairs),
        tokens=sum(len(text) for text, _ in pairs),
        tokens_per_second=speed,
        ratio=speed / _tokens_per_second(plain),
        lowest=min(ratios),
        highest=max(ratios),
        tokens_per_step=_tokens_per_step(runs),
        identical=sum(text == reference for text, reference in pairs) / len(pairs),
    )


def _tokens_per_second(runs: list[Run]) -> float:
    calls = [run.call for run in runs]
    return sum(call.num_tokens for call in calls) / sum(call.seconds for call in calls)


def _tokens_per_step(runs: list[Run]) -> float:
    """Return (emitted - rows) / row steps; without statistics, forwards count as steps."""
    calls = [run.call for run in runs]
    if found := [call.stats for call in calls if call.stats is not None]:
        emitted = sum(stats.num_emitted - stats.rows for stats in found)
        return _ratio(emitted, sum(stats.row_steps for stats in found))
    if runs[0].system == PLAIN:
        return 1.0
    emitted = sum(call.num_tokens - len(call.rows) for call in calls)
    return _ratio(emitted, sum(call.forwards - 1 for call in calls))


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else float("nan")


MOST_ULPS = 12
"""Rounding may move two logits this far against each other, in units of the last place.

The unit is that of the larger logit, or of the median size of the step's logits if that is more:
the error comes from the hidden state and does not shrink with a single logit.

How far depends on the step. Noise of one rounding behind each part of torch's own layers, in 75
steps of SmolLM2-135M six times each, moved the five best logits by 1 unit against each other at the
median, 99 of 100 times by less than 5, and by 7 at most. Compiled layers moved them by 9 in the
most sensitive of 144 steps, and parted from plain's text at 8 in another one.
"""

SHIFTS = (0, 1, 2, 3, 4, 5, 6, 8, 12, 16, 32, 64)
"""Shifts of a logit that are tried, in units of the last place."""


@dataclass(frozen=True)
class Divergence:
    """The first token of a row that differs from the plain run's.

    One of the two logits must move by `ulps`, units of the last place, before plain decoding takes
    the other token; None: no shift that was tried is enough. Instead of a token, None stands for
    the end of a text.
    """

    row: int
    num_same: int  # tokens before it
    plain: int | None
    other: int | None
    ulps: int | None = None

    @property
    def is_near_tie(self) -> bool:
        return self.ulps is not None and self.ulps <= MOST_ULPS


def describe(divergences: Sequence[Divergence | None]) -> str:
    """Say how many texts part from the plain run's, and whether all do so at near ties."""
    found = [each for each in divergences if each is not None]
    if not found:
        return f"identical, {len(divergences)} of {len(divergences)}"
    beyond = [each for each in found if not each.is_near_tie]
    if beyond:
        return f"BUG: parts beyond near ties, {len(beyond)} of {len(divergences)}"
    most = max(each.ulps or 0 for each in found)
    return f"parts at near ties only, {len(found)} of {len(divergences)} (at most {most} ulps)"


def find_divergences(
    model: Any,
    call: Mapping[str, Any],
    plain: Sequence[Sequence[int]],
    others: Sequence[Sequence[Sequence[int]]],
    seed: int = 0,
) -> list[list[Divergence | None]]:
    """Compare texts with those of plain decoding; where they part, decode again and look closely.

    The logits are those of plain decoding itself: its batch, its cache, one token per step. One
    logit after the other is then shifted, and plain decoding's own processors and choice (the
    largest score, or the draw for this seed and step) decide again.

    Args:
        model: An enabled model.
        call: Arguments of plain `generate`, inputs included.
        plain: New tokens of each row by plain decoding, up to and with the end token.
        others: The same of other runs of that call.
        seed: Seed of all these runs.

    Returns:
        How each row of `others` parts; None: it is identical. CommandError if plain decoding did
            not write the same text again.
    """
    import torch

    from lookahead_hf.model import compat

    found = [
        [_divergence(row, *pair) for row, pair in enumerate(zip(plain, rows, strict=True))]
        for rows in others
    ]
    places = {each for rows in found for each in rows if each is not None}
    if not places:
        return found
    examined: dict[Divergence, Divergence] = {}

    def decode(
        model: Any,
        input_ids: torch.Tensor,  # [rows, columns]
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **kwargs: Any,
    ) -> Any:
        def watch(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            choose = partial(_choices, logits_processor, generation_config.do_sample, ids)
            for place in places:
                if place.num_same == ids.shape[1] - input_ids.shape[1]:
                    examined[place] = _with_ulps(place, choose, logits, model.dtype)
            return logits_processor(ids, logits)

        given = input_ids, watch, stopping_criteria, generation_config
        return compat.run_loop(model, *given, **kwargs)

    last = max(place.num_same for place in places)
    settings = {**call, "max_new_tokens": last + 1, "speculative": False}
    torch.manual_seed(seed)
    model.generate(**settings, custom_generate=decode)
    return [[each and examined.get(each, each) for each in rows] for rows in found]


def _divergence(row: int, plain: Sequence[int], other: Sequence[int]) -> Divergence | None:
    if list(plain) == list(other):
        return None
    pairs = enumerate(zip(plain, other, strict=False))
    index = next((at for at, (a, b) in pairs if a != b), min(len(plain), len(other)))
    tokens = (text[index] if index < len(text) else None for text in (plain, other))
    return Divergence(row, index, *tokens)


def _choices(
    processors: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    do_sample: bool,
    ids: torch.Tensor,  # [rows, columns]
    logits: torch.Tensor,  # [rows, vocab]
) -> list[int]:
    """Choose the next token of every row as plain decoding does; draws change no generator."""
    import torch

    with torch.random.fork_rng([logits.device] if logits.device.type == "cuda" else []):
        scores = processors(ids, logits.clone())
        if do_sample:
            return torch.multinomial(scores.softmax(-1), 1)[:, 0].tolist()
        return scores.argmax(-1).tolist()


def _with_ulps(
    place: Divergence,
    choose: Callable[[torch.Tensor], list[int]],
    logits: torch.Tensor,  # [rows, vocab]
    dtype: torch.dtype,
) -> Divergence:
    """Shift the two logits of a place until plain decoding takes the other token."""
    import torch

    row, plain, other = place.row, place.plain, place.other
    if plain is None or other is None:  # a text stopped where no end token made it
        return place
    if choose(logits)[row] != plain:
        raise CommandError(
            "Plain generate did not write the same text again, so that its logits cannot be "
            "compared. Does this model compute the same call twice with the same result?"
        )
    sizes = logits[row].abs()
    size = float(torch.maximum(sizes[[plain, other]].max(), sizes.median()))
    spacing = float(torch.finfo(dtype).eps) * 2.0 ** math.floor(math.log2(size or 1.0))
    for ulps in SHIFTS:
        shift = (ulps + 0.01) * spacing  # beyond a tie, which the smaller token id would win
        for token, by in ((other, shift), (plain, -shift)):
            shifted = logits.clone()
            shifted[row, token] += by
            if choose(shifted)[row] == other:
                return replace(place, ulps=ulps)
    return place
