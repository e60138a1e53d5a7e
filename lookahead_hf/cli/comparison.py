"""Generate from a prompt plainly or speculatively, and show the text live."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lookahead_hf.cli.live_text import LiveText, StepRecorder
from lookahead_hf.cli.screen import CommandError, Screen
from lookahead_hf.config import DEFAULT_DRAFTERS, SpeculativeConfig
from lookahead_hf.fallback import SpeculationFallbackError
from lookahead_hf.stats import SpeculativeStats


@dataclass(frozen=True)
class Stage:
    """A model, its tokenizer, its settings and the screen: what all texts of a command share."""

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
    stats: SpeculativeStats | None = None  # None for a plain call

    @property
    def tokens_per_second(self) -> float:
        return len(self.ids) / self.seconds


def run_plain(stage: Stage, inputs: dict[str, Any]) -> Timed:
    """Generate one text without speculation and show it live."""
    return _run(stage, inputs, LiveText(stage.tokenizer, stage.screen), speculative=False)


def run_speculative(
    stage: Stage, inputs: dict[str, Any], drafters: Sequence[Any] = DEFAULT_DRAFTERS
) -> Timed:
    """Generate one text speculatively and show it live, accepted tokens marked.

    Args:
        stage: The model, its tokenizer and the settings.
        inputs: Arguments of `generate` for this text.
        drafters: As in a `SpeculativeConfig`.

    Raises:
        CommandError: The call cannot be speculated.
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
    output = stage.model.generate(
        **inputs, **stage.generation, streamer=text, speculative=speculative
    )
    seconds = time.perf_counter() - start
    ids = output[0, columns:].tolist()
    return Timed(tuple(ids), seconds, lookahead_hf.last_stats(stage.model))
