"""Reports the estimates: expected speeds, reasons, settings, a verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lookahead_hf.cli.analysis.costs import length_class
from lookahead_hf.cli.analysis.estimate import (
    DEFAULT,
    LEARN,
    NO_DRAFTS,
    SETTINGS,
    CostsOf,
    Traced,
    repeats,
)
from lookahead_hf.cli.screen import Screen

CLEARLY = 1.05
"""How many times faster another setting must be to be preferred to the default."""

WORTH = 1.1
"""The speed-up from which on speculation is worth switching on."""

MUCH = 0.15
"""Share of the tokens or of the time that is named as a reason."""


@dataclass(frozen=True)
class Expectation:
    """The speed that one setting is expected to have, prompts included.

    Attributes:
        config: The Python expression that makes the setting.
        speed_up: Time of plain `generate` over the time with this setting; `lowest` and `highest`
            are those of single texts.
        tokens_per_second: None where costs are given.
    """

    setting: str
    config: str
    speed_up: float
    lowest: float
    highest: float
    tokens_per_step: float
    tokens_per_second: float | None


@dataclass(frozen=True)
class Finding:
    """Expectations for one group of prompts."""

    group: str
    texts: int
    prompt_tokens: float  # per text
    output_tokens: float
    repeats: dict[str, float]  # shares of the output's tokens
    prefill_share: float  # of the time of plain generate
    plain_tokens_per_second: float | None
    expected: dict[str, Expectation]
    recycles: bool  # whether the model's logits are known

    @property
    def best(self) -> Expectation:
        """The setting to use: the default, unless another one is clearly faster."""
        fastest = max(self.expected.values(), key=lambda each: each.speed_up)
        default = self.expected[DEFAULT]
        return fastest if fastest.speed_up > CLEARLY * default.speed_up else default

    @property
    def verdict(self) -> str:
        """Whether speculation is worth switching on."""
        if self.best.speed_up >= WORTH:
            return "worth it"
        return "hardly worth it" if self.best.speed_up > 1.0 else "not worth it"

    @property
    def advice(self) -> str:
        return f"speculative={self.best.config if self.best.speed_up > 1.0 else False}"

    @property
    def why(self) -> str:
        *known, new = self.repeats.items()
        named = [f"{share:.0%} repeat {place}" for place, share in known if share >= MUCH]
        said = [f"Of the output's tokens, {', '.join([*named, f'{new[1]:.0%} are new'])}."]
        if new[1] >= 0.5:
            can = "can foresee some of these" if self.recycles else "are not in this estimate"
            said.append(f"The model's own earlier guesses {can}.")
        if self.prefill_share >= MUCH:
            share = f"{self.prefill_share:.0%} of the plain time"
            said.append(f"The prompt takes {share}, which stays.")
        alone = self.expected[NO_DRAFTS].speed_up
        if alone >= WORTH or alone <= 1 / WORTH:
            said.append(f"Without drafts, the library reaches {alone:.2f} times the plain speed.")
        if self.best.setting == LEARN:
            said.append("With a learning pool, a text may change the speed of other users' texts.")
        return " ".join(said)

    def to_dict(self) -> dict[str, Any]:
        derived = {"verdict": self.verdict, "why": self.why, "use": self.advice}
        return {**asdict(self), **derived, "best": self.best.setting}


def findings(texts: Sequence[Traced], costs: CostsOf) -> list[Finding]:
    groups = dict.fromkeys(traced.text.family for traced in texts)
    return [_finding(group, texts, costs) for group in groups]


def _finding(group: str, texts: Sequence[Traced], costs: CostsOf) -> Finding:
    own = [
        (traced, costs[length_class(len(traced.text.prompt))])
        for traced in texts
        if traced.text.family == group
    ]
    plain = [traced.plain_seconds(cost) for traced, cost in own]
    prompts = sum(len(traced.text.prompt) for traced, _ in own)
    tokens = sum(len(traced.text.output) for traced, _ in own)
    is_timed = own[0][1].prefill > 0
    expected = {}
    for name in SETTINGS:
        ours = [traced.seconds(name, cost) for traced, cost in own]
        ratios = [each / seconds for each, seconds in zip(plain, ours, strict=True)]
        steps = sum(sum(traced.steps(name).values()) for traced, _ in own)
        expected[name] = Expectation(
            setting=name,
            config=config_line(name),
            speed_up=sum(plain) / sum(ours),
            lowest=min(ratios),
            highest=max(ratios),
            tokens_per_step=(tokens - len(own)) / steps,
            tokens_per_second=tokens / sum(ours) if is_timed else None,
        )
    return Finding(
        group=group,
        texts=len(own),
        prompt_tokens=prompts / len(own),
        output_tokens=tokens / len(own),
        repeats=repeats([traced.text for traced in texts], group),
        prefill_share=sum(c.plain_prefill * len(t.text.prompt) for t, c in own) / sum(plain),
        plain_tokens_per_second=tokens / sum(plain) if is_timed else None,
        expected=expected,
        recycles=all(traced.text.has_logits for traced, _ in own),
    )


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
            f"{each.best.speed_up:.2f}",
            f"{each.best.lowest:.2f}-{each.best.highest:.2f}",
            f"{each.best.tokens_per_step:.2f}",
            f"{each.plain_tokens_per_second or 0:.1f} -> {each.best.tokens_per_second or 0:.1f}",
            each.verdict,
        ]
        for each in found
    ]
    if about["machine"] is None:
        for line in [headers, *rows]:
            del line[5]
    screen.line(f"\nWhat speculation brings for {about['file']}", "bold")
    screen.line()
    screen.table(headers, rows)
    for each in found:
        screen.line(f"\n{each.group}: {each.verdict}", "bold")
        screen.line(each.why)
        compared = [f"{e.setting} {e.speed_up:.2f}" for e in each.expected.values()]
        screen.line(f"Speed-ups by setting: {', '.join(compared)}.")
        screen.write(f"{each.advice}\n", "bold green")  # never wrapped, to be copied
    if about["command"] is not None:
        screen.write(f"\nTo measure it: {about['command']}\n")
    screen.line(about["basis"], "dim")
