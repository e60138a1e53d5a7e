"""Estimates the time of calls under several settings, from replayed texts and costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lookahead_hf.call.prepared import Request
from lookahead_hf.cli.analysis.costs import Costs, length_class
from lookahead_hf.cli.analysis.replay import MemoryHolder, RecordedRecycling, Replayed, Text, replay
from lookahead_hf.config import SpeculativeConfig
from lookahead_hf.drafting.control.cost_model import KEPT_SAMPLES
from lookahead_hf.drafting.drafter import Drafter
from lookahead_hf.drafting.memory import memory_of, placement
from lookahead_hf.drafting.registry import build
from lookahead_hf.drafting.sources.recycling import RecyclingDrafter

TOP = 64
"""Likeliest next tokens recorded per position, as many as any drafter uses."""

DEFAULT, NGRAM, LEARN, NO_DRAFTS = "default", "prompt lookup", "learning pool", "no drafts"
SETTINGS: Mapping[str, dict[str, Any]] = {
    DEFAULT: {},
    NGRAM: {"drafters": ("ngram",)},
    LEARN: {"drafters": ("ngram", "recycling", "pool"), "learn": True},
    NO_DRAFTS: {"budget": 0},
}
"""The settings that are compared, as fields of a `SpeculativeConfig`."""

CostsOf = Mapping[int, Costs]
"""Costs by `length_class` of the prompt."""


@dataclass
class Traced:
    """A text and the steps that it takes under each setting.

    Attributes:
        called: Steps by draft tokens of a real call with the default setting, if there was one.
        missing: Steps of a call for each replayed one, where the replay lacks some logits.
    """

    text: Text
    called: Mapping[int, int] | None = None
    replayed: dict[str, Replayed] = field(default_factory=dict)
    missing: float = 1.0

    def steps(self, setting: str) -> dict[int, float]:
        if setting == DEFAULT and self.called is not None:
            return {nodes: float(count) for nodes, count in self.called.items()}
        recycles = self.text.has_logits and setting in (DEFAULT, LEARN)
        factor = self.missing if recycles else 1.0
        return {nodes: factor * n for nodes, n in self.replayed[setting].budgets.items()}

    def seconds(self, setting: str, costs: Costs) -> float:
        drafting = 0.0 if setting == NO_DRAFTS else costs.drafting
        steps = self.steps(setting).items()
        in_steps = sum(count * (costs.step(nodes) + drafting) for nodes, count in steps)
        return costs.prefill * len(self.text.prompt) + in_steps

    def plain_seconds(self, costs: Costs) -> float:
        prefill = costs.plain_prefill * len(self.text.prompt)
        return prefill + costs.plain_step * (len(self.text.output) - 1)


def trace(
    texts: Sequence[Traced], costs: CostsOf, new_tokens: int, report: Callable[[int], None]
) -> None:
    """Replay all texts under all settings, in order, so that memories fill as in a run."""
    done = 0
    for setting, fields in SETTINGS.items():
        model, config = MemoryHolder(), SpeculativeConfig(**fields)
        _teach(model, costs)
        for traced in texts:
            text, known = traced.text, costs[length_class(len(traced.text.prompt))]
            traced.replayed[setting] = replay(
                text, model, config, _sources(text, model, config), new_tokens, known.step
            )
            done += 1
            report(done)


def shortfall(texts: Sequence[Traced]) -> float:
    """Return the steps of the calls for each step of their replay, at most 1.

    The logits after rejected draft tokens, which recycling draws on, are not recorded.
    """
    pairs = [(t.called, t.replayed[DEFAULT].steps) for t in texts if t.called is not None]
    called = sum(sum(budgets.values()) for budgets, _ in pairs if budgets is not None)
    replayed = sum(steps for _, steps in pairs)
    return min(1.0, called / replayed) if replayed else 1.0


def _teach(model: Any, costs: CostsOf) -> None:
    """Let the stand-in of a model know its costs, as if it was warmed up."""
    for length, known in costs.items():
        curve = memory_of(model).costs.curve(1, 2**length - 1, placement(model))
        for _ in range(KEPT_SAMPLES):
            for size, seconds in known.steps.items():
                curve.observe(size, seconds)


def _sources(text: Text, model: Any, config: SpeculativeConfig) -> list[Drafter]:
    """Return the drafters of a call, those that read logits only where these were recorded."""
    return [
        RecordedRecycling() if isinstance(source, RecyclingDrafter) else source
        for source in build(Request(config), model)
        if text.has_logits or not isinstance(source, RecyclingDrafter)
    ]


CHUNK = 256
"""Tokens of a forward whose logits are read; those of a whole text may take gigabytes."""


def likeliest(model: Any, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a model's likeliest next tokens after all tokens, [tokens], but the last.

    Ids, best first, and probabilities are [tokens - 1, TOP], of width 0 without a model.
    """
    import torch

    from lookahead_hf import compat
    from lookahead_hf.drafting.topk import BestTokens

    if model is None:
        return np.empty((len(tokens) - 1, 0), np.int32), np.empty((len(tokens) - 1, 0), np.float32)
    best, cache, name = [], None, compat.decoder_names(model).cache
    ids = torch.from_numpy(tokens[:-1])[None].to(model.device)
    for chunk in ids.split(CHUNK, 1):
        with torch.no_grad():
            outputs = model(chunk, **{name: cache}, use_cache=True)
        cache, places = compat.returned_cache(outputs), np.arange(chunk.shape[1])
        best.append(BestTokens(outputs.logits, TOP).take(np.zeros_like(places), places))
    token_ids, probs = (np.concatenate(parts) for parts in zip(*best, strict=True))
    return token_ids, probs


NGRAM_LENGTH = 4
"""Tokens that must be the same for the last one of them to count as repeated."""

PLACES = ("the prompt", "the text itself", "earlier texts", "nothing")


def repeats(texts: Sequence[Text], group: str) -> dict[str, float]:
    """Return the shares of a group's output tokens by what they repeat; texts come in order."""
    found = Counter(dict.fromkeys(PLACES, 0))
    prompt, itself, others, nothing = PLACES
    earlier: set[tuple[int, ...]] = set()
    for text in texts:
        tokens, start = text.tokens.tolist(), len(text.prompt)
        ends = range(1, len(tokens) + 1)
        ngrams = [tuple(tokens[max(0, end - NGRAM_LENGTH) : end]) for end in ends]
        known = dict.fromkeys(ngrams[:start], prompt)
        for ngram in ngrams[start:]:
            if text.family == group:
                found[known.get(ngram, others if ngram in earlier else nothing)] += 1
            known.setdefault(ngram, itself)
        earlier.update(ngrams[start:])
    return {place: count / max(found.total(), 1) for place, count in found.items()}
