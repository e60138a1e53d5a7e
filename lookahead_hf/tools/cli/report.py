"""Reports what was measured: speeds, reasons, settings, a verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lookahead_hf.tools.cli.measuring import PLAIN, Call, Line, Run, summarize
from lookahead_hf.tools.cli.screen import Screen

DEFAULT, NGRAM, LEARN, NO_DRAFTS = "default", "prompt lookup", "learning pool", "no drafts"
SETTINGS: Mapping[str, dict[str, Any]] = {
    DEFAULT: {},
    NGRAM: {"drafters": ("ngram",)},
    LEARN: {"drafters": ("ngram", "recycling", "pool"), "learn": True},
    NO_DRAFTS: {"budget": 0},
}
"""The settings that are compared, as fields of a `SpeculativeConfig`."""

CLEARLY = 1.05
"""How many times faster another setting must be to be preferred to the default."""

WORTH = 1.1
"""The speed-up from which on speculation is worth switching on."""

MUCH = 0.15
"""Share of the tokens or of the time that is named as a reason."""

NGRAM_LENGTH = 4
"""Tokens that must be the same for the last one of them to count as repeated."""

PLACES = ("the prompt", "the text itself", "earlier texts", "nothing")


@dataclass(frozen=True)
class Measured:
    """The calls on one prompt, by the name of the setting; `PLAIN` is one of them."""

    group: str
    prompt: list[int]
    calls: Mapping[str, Call]

    @property
    def output(self) -> list[int]:
        return list(self.calls[DEFAULT].rows[0])


@dataclass(frozen=True)
class Finding:
    """What was measured for one group of prompts."""

    group: str
    texts: int
    prompt_tokens: float  # per text
    output_tokens: float
    repeats: dict[str, float]  # shares of the output's tokens
    prefill_share: float  # of the time of plain generate
    plain_tokens_per_second: float
    speeds: dict[str, Line]  # by setting

    @property
    def best(self) -> Line:
        """The setting to use: the default, unless another one is clearly faster."""
        fastest = max(self.speeds.values(), key=lambda each: each.ratio)
        default = self.speeds[DEFAULT]
        return fastest if fastest.ratio > CLEARLY * default.ratio else default

    @property
    def verdict(self) -> str:
        """Whether speculation is worth switching on."""
        if self.best.ratio >= WORTH:
            return "worth it"
        return "hardly worth it" if self.best.ratio > 1.0 else "not worth it"

    @property
    def advice(self) -> str:
        return f"speculative={config_line(self.best.system) if self.best.ratio > 1.0 else False}"

    @property
    def why(self) -> str:
        *known, new = self.repeats.items()
        named = [f"{share:.0%} repeat {place}" for place, share in known if share >= MUCH]
        said = [f"Of the output's tokens, {', '.join([*named, f'{new[1]:.0%} are new'])}."]
        if new[1] >= 0.5:
            said.append("The model's own earlier guesses can foresee some of these.")
        if self.prefill_share >= MUCH:
            share = f"{self.prefill_share:.0%} of the plain time"
            said.append(f"The prompt takes {share}, which stays.")
        alone = self.speeds[NO_DRAFTS].ratio
        if alone >= WORTH or alone <= 1 / WORTH:
            said.append(f"Without drafts, the library reaches {alone:.2f} times the plain speed.")
        if self.best.system == LEARN:
            said.append("With a learning pool, a text may change the speed of other users' texts.")
        return " ".join(said)

    def to_dict(self) -> dict[str, Any]:
        derived = {"verdict": self.verdict, "why": self.why, "use": self.advice}
        return {**asdict(self), **derived, "best": self.best.system}


def findings(measured: Sequence[Measured]) -> list[Finding]:
    return [_finding(group, measured) for group in dict.fromkeys(each.group for each in measured)]


def _finding(group: str, measured: Sequence[Measured]) -> Finding:
    own = [each for each in measured if each.group == group]
    runs = [Run(group, name, [call]) for each in own for name, call in each.calls.items()]
    speeds = {line.system: line for line in summarize(runs) if line.family == group}
    seconds = sum(each.calls[PLAIN].seconds for each in own)
    prefill = [stats.prefill_ms for each in own if (stats := each.calls[DEFAULT].stats)]
    return Finding(
        group=group,
        texts=len(own),
        prompt_tokens=sum(len(each.prompt) for each in own) / len(own),
        output_tokens=sum(len(each.output) for each in own) / len(own),
        repeats=repeats(measured, group),
        prefill_share=min(1.0, sum(prefill) / 1000 / seconds),
        plain_tokens_per_second=speeds[PLAIN].tokens_per_second,
        speeds={name: speeds[name] for name in SETTINGS},
    )


def repeats(measured: Sequence[Measured], group: str) -> dict[str, float]:
    """Return the shares of a group's output tokens by what they repeat; texts come in order."""
    found = Counter(dict.fromkeys(PLACES, 0))
    prompt, itself, others, nothing = PLACES
    earlier: set[tuple[int, ...]] = set()
    for each in measured:
        tokens, start = [*each.prompt, *each.output], len(each.prompt)
        ends = range(1, len(tokens) + 1)
        ngrams = [tuple(tokens[max(0, end - NGRAM_LENGTH) : end]) for end in ends]
        known = dict.fromkeys(ngrams[:start], prompt)
        for ngram in ngrams[start:]:
            if each.group == group:
                found[known.get(ngram, others if ngram in earlier else nothing)] += 1
            known.setdefault(ngram, itself)
        earlier.update(ngrams[start:])
    return {place: count / max(found.total(), 1) for place, count in found.items()}


def config_line(setting: str) -> str:
    fields = ", ".join(f"{name}={value!r}" for name, value in SETTINGS[setting].items())
    return f"SpeculativeConfig({fields})".replace("'", '"')


def show(found: Sequence[Finding], about: dict[str, Any], screen: Screen) -> None:
    """Write a table of all groups, then the reasons and settings of each."""
    headers = ["prompts", "texts", "speed-up", "of texts", "per step", "tokens/s", "verdict"]
    rows = [
        [
            each.group,
            str(each.texts),
            f"{each.best.ratio:.2f}",
            f"{each.best.lowest:.2f}-{each.best.highest:.2f}",
            f"{each.best.tokens_per_step:.2f}",
            f"{each.plain_tokens_per_second:.1f} -> {each.best.tokens_per_second:.1f}",
            each.verdict,
        ]
        for each in found
    ]
    screen.line(f"\nWhat speculation brings for {about['file']}", "bold")
    screen.line()
    screen.table(headers, rows)
    for each in found:
        screen.line(f"\n{each.group}: {each.verdict}", "bold")
        screen.line(each.why)
        compared = [f"{e.system} {e.ratio:.2f}" for e in each.speeds.values()]
        screen.line(f"Speed-ups by setting: {', '.join(compared)}.")
        screen.write(f"{each.advice}\n", "bold green")  # never wrapped, to be copied
    screen.line()
    screen.line(about["basis"], "dim")
