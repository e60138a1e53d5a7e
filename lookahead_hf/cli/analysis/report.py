"""What the estimates mean for the user: expected speeds, reasons, settings, a verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lookahead_hf.cli.analysis.costs import length_class
from lookahead_hf.cli.analysis.estimate import (
    DEFAULT,
    LEARN,
    SETTINGS,
    CostsOf,
    Repeats,
    Traced,
    repeats,
)

CLEARLY = 1.05
"""How much faster another setting must be to be preferred to the default."""

WORTH = 1.1
"""The speed-up from which on speculation is worth switching on."""

MUCH = 0.15
"""The share of the tokens or of the time from which on it is named as a reason."""


@dataclass(frozen=True)
class Expectation:
    """What one setting is expected to bring.

    Attributes:
        setting: Its name.
        config: The Python expression that makes it.
        speed_up: Time of plain `generate` over the time with this setting, prompts included.
        lowest: The smallest speed-up of a text.
        highest: The largest speed-up of a text.
        tokens_per_step: New tokens per step after the prefill.
        tokens_per_second: New tokens per second, prompts included; None under assumed costs.
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
    """What is expected of one group of prompts."""

    group: str
    texts: int
    prompt_tokens: float  # per text
    output_tokens: float
    repeats: Repeats
    prefill_share: float  # of the time of plain generate
    plain_tokens_per_second: float | None
    expected: tuple[Expectation, ...]
    recycles: bool

    def of(self, setting: str) -> Expectation:
        """The expectation of one setting."""
        return next(each for each in self.expected if each.setting == setting)

    @property
    def best(self) -> Expectation:
        """The setting to use: the default, unless another one is clearly faster."""
        fastest = max(self.expected, key=lambda each: each.speed_up)
        default = self.of(DEFAULT)
        return fastest if fastest.speed_up > CLEARLY * default.speed_up else default

    @property
    def verdict(self) -> str:
        """Whether speculation is worth switching on."""
        if self.best.speed_up >= WORTH:
            return "worth it"
        return "hardly worth it" if self.best.speed_up > 1.0 else "not worth it"

    @property
    def why(self) -> str:
        """The reasons, as sentences."""
        found = self.repeats
        places = {"the prompt": found.prompt, "the text itself": found.output}
        places |= {"earlier texts": found.earlier_texts}
        named = [f"{share:.0%} repeat {name}" for name, share in places.items() if share >= MUCH]
        said = (
            f"Of the output's tokens {_listed(named)}." if named else "The output repeats little."
        )
        if found.new >= 0.5:
            source = "can foresee parts of it" if self.recycles else "were not simulated"
            said += f" {found.new:.0%} are new: the model's own earlier guesses {source}."
        if self.prefill_share >= MUCH:
            said += (
                f" Reading the prompt takes {self.prefill_share:.0%} of plain's time; that stays."
            )
        alone = self.of("no drafts").speed_up
        if alone >= WORTH:
            said += f" Faster steps alone bring {alone:.2f} x, without any draft."
        if self.best.setting == LEARN:
            said += " A learning pool lets texts show in the speed of others: keep users apart."
        return said

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON values."""
        derived = {"verdict": self.verdict, "why": self.why, "use": asdict(self.best)}
        return {
            **asdict(self),
            "repeats": {**asdict(self.repeats), "new": self.repeats.new},
        } | derived


def findings(texts: Sequence[Traced], costs: CostsOf, measured: bool) -> list[Finding]:
    """Sum up the texts of each group."""
    groups = dict.fromkeys(traced.text.family for traced in texts)
    return [_finding(group, texts, costs, measured) for group in groups]


def _finding(group: str, texts: Sequence[Traced], costs: CostsOf, measured: bool) -> Finding:
    own = [traced for traced in texts if traced.text.family == group]
    of = [costs[length_class(len(traced.text.prompt))] for traced in own]
    plain = [traced.plain_seconds(cost) for traced, cost in zip(own, of, strict=True)]
    prefill = sum(c.plain_prefill * len(t.text.prompt) for t, c in zip(own, of, strict=True))
    tokens = sum(len(traced.text.output) for traced in own)
    expected = []
    for setting in SETTINGS:
        ours = [traced.seconds(setting, cost) for traced, cost in zip(own, of, strict=True)]
        ratios = [p / o for p, o in zip(plain, ours, strict=True) if o]
        steps = sum(sum(traced.steps(setting).values()) for traced in own)
        expected.append(
            Expectation(
                setting=setting,
                config=config_line(setting),
                speed_up=sum(plain) / sum(ours) if sum(ours) else 1.0,
                lowest=min(ratios, default=1.0),
                highest=max(ratios, default=1.0),
                tokens_per_step=(tokens - len(own)) / steps if steps else 1.0,
                tokens_per_second=tokens / sum(ours) if measured else None,
            )
        )
    return Finding(
        group=group,
        texts=len(own),
        prompt_tokens=sum(len(traced.text.prompt) for traced in own) / len(own),
        output_tokens=tokens / len(own),
        repeats=repeats([traced.text for traced in texts], group),
        prefill_share=prefill / sum(plain) if sum(plain) else 0.0,
        plain_tokens_per_second=tokens / sum(plain) if measured else None,
        expected=tuple(expected),
        recycles=all(traced.text.has_logits for traced in own),
    )


def config_line(setting: str) -> str:
    """The Python expression of a setting."""
    fields = ", ".join(
        f"{name}={value!r}".replace("'", '"') for name, value in SETTINGS[setting].items()
    )
    return f"SpeculativeConfig({fields})"


def _listed(parts: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))


def basis(about: dict[str, Any]) -> str:
    """What the numbers rest on, as sentences."""
    said = f"Greedy, batch 1, at most {about['max_new_tokens']} new tokens; outputs {about['outputs']}."
    machine = about["machine"]
    if machine is None:
        return said + (
            " No model ran: the costs of steps are assumed and given in plain steps, prompts are "
            "left out, and the drafter recycling, which draws on the model's logits, could not "
            "take part. Real calls usually draft more."
        )
    said += f" Costs were measured with {machine['model']} in {machine['dtype']} on {machine['device']}."
    if about["outputs"] == "of the file":
        said += (
            " The outputs were replayed as if the model wrote them; drafts from its logits are "
            "estimated."
        )
    return said
