"""Run one prompt plainly and speculatively, and find where two texts part."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lookahead_hf.cli.live_text import LiveText, StepRecorder
from lookahead_hf.cli.loading import within_positions
from lookahead_hf.cli.screen import CommandError, Screen
from lookahead_hf.config import DEFAULT_DRAFTERS, SpeculativeConfig
from lookahead_hf.fallback import SpeculationFallbackError
from lookahead_hf.stats import SpeculativeStats


@dataclass(frozen=True)
class Stage:
    """What stays the same from one text to the next."""

    model: Any
    tokenizer: Any
    generation: dict[str, Any]  # arguments of `generate`
    screen: Screen

    @property
    def dtype(self) -> str:
        return str(self.model.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Timed:
    """The text of one call and its speed, prefill included."""

    ids: tuple[int, ...]
    seconds: float
    stats: SpeculativeStats | None = None  # None of a plain call

    @property
    def tokens_per_second(self) -> float:
        return len(self.ids) / self.seconds


@dataclass(frozen=True)
class Parting:
    """The first token in which a speculative text differs from the plain one.

    Attributes:
        index: Tokens that are the same.
        plain: The token that the plain run took, as text.
        speculative: The token that the speculative run took, as text.
        gap: How far plain's best logit was above its second best.
        block_shift: How far the two tokens' logits move against each other when the same context is
            computed in one block instead of token by token: rounding, without any drafting.
        spacing: The distance of neighbouring numbers of the model's dtype at plain's best logit.
    """

    index: int
    plain: str
    speculative: str
    gap: float
    block_shift: float
    spacing: float


def run_plain(stage: Stage, inputs: dict[str, Any]) -> Timed:
    """Generate one text without speculation and show it live."""
    return _run(stage, inputs, LiveText(stage.tokenizer, stage.screen), speculative=False)


def run_speculative(
    stage: Stage, inputs: dict[str, Any], drafters: Sequence[Any] = DEFAULT_DRAFTERS
) -> Timed:
    """Generate one text speculatively and show it live, accepted tokens marked.

    Args:
        stage: The model, and what belongs to it.
        inputs: Arguments of `generate` for this text.
        drafters: As in a `SpeculativeConfig`.

    Raises:
        CommandError: This model cannot be speculated.
    """
    recorder = StepRecorder()
    config = SpeculativeConfig(drafters=(*drafters, recorder), on_fallback="error")
    text = LiveText(stage.tokenizer, stage.screen, recorder)
    try:
        timed = _run(stage, inputs, text, config)
    except SpeculationFallbackError as error:
        raise CommandError(f"{error}\n`lookahead-hf env` lists all reasons.") from error
    assert timed.stats is not None
    sources = {name: s for name, s in timed.stats.per_source.items() if name != recorder.name}
    return replace(timed, stats=replace(timed.stats, per_source=sources))


def _run(stage: Stage, inputs: dict[str, Any], text: LiveText, speculative: Any) -> Timed:
    import lookahead_hf

    columns = inputs["input_ids"].shape[1]
    start = time.perf_counter()
    with within_positions(stage.model, columns, stage.generation["max_new_tokens"]):
        output = stage.model.generate(
            **inputs, **stage.generation, streamer=text, speculative=speculative
        )
    seconds = time.perf_counter() - start
    ids = output[0, columns:].tolist()
    return Timed(tuple(ids), seconds, lookahead_hf.last_stats(stage.model))


def first_difference(left: tuple[int, ...], right: tuple[int, ...]) -> int | None:
    """Index of the first token that differs, None where the texts are identical."""
    if left == right:
        return None
    pairs = zip(left, right, strict=False)
    shorter = min(len(left), len(right))
    return next((index for index, (a, b) in enumerate(pairs) if a != b), shorter)


def explain_parting(
    stage: Stage, inputs: dict[str, Any], plain: Timed, speculative: Timed, index: int
) -> Parting:
    """Look at the target's own logits, without speculation, where two greedy texts part."""
    import torch

    arguments = {**stage.generation, "max_new_tokens": index + 1, "speculative": False}
    output = stage.model.generate(
        **inputs, **arguments, return_dict_in_generate=True, output_logits=True
    )
    stepwise = output.logits[index][0].float()  # [vocab]
    with torch.no_grad():
        block = stage.model(output.sequences[:, :-1]).logits[0, -1].float()  # [vocab]
    tokens = [plain.ids[index], speculative.ids[index]]
    best, second = stepwise.topk(2).values.tolist()
    return Parting(
        index,
        plain=repr(stage.tokenizer.decode(tokens[:1])),
        speculative=repr(stage.tokenizer.decode(tokens[1:])),
        gap=best - second,
        block_shift=(stepwise[tokens] - block[tokens]).diff().abs().item(),
        spacing=_spacing(best, stage.model.dtype),
    )


def _spacing(value: float, dtype: Any) -> float:
    """Distance from `value` to the next number that `dtype` can hold."""
    import torch

    return float(torch.finfo(dtype).eps) * 2.0 ** math.floor(math.log2(abs(value) or 1.0))
