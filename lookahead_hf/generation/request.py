"""What the caller of `generate` asked for beside transformers' own arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from lookahead_hf import compat
from lookahead_hf.config import SpeculativeConfig
from lookahead_hf.drafting.drafter import Drafter
from lookahead_hf.drafting.registry import Resources
from lookahead_hf.drafting.session import sources_of
from lookahead_hf.generation import prompts


@dataclass(frozen=True, slots=True)
class Request:
    """What a call is told of its caller.

    Attributes:
        config: How to speculate.
        streamer: Gets the prompt and every token, as plain `generate` feeds it.
        tokenizer: The caller's `tokenizer=`.
        assistant_model: The caller's `assistant_model=`.
        assistant_tokenizer: The caller's `assistant_tokenizer=`.
        assistant_settings: What the caller asks of assistants, by generation setting.
        synced_gpus: As `generate` computes it.
        prediction: The caller's guess of every row's text, token ids.
        encoder_inputs: What an encoder was given, [texts, ...].
    """

    config: SpeculativeConfig
    streamer: Any = None
    tokenizer: Any = None
    assistant_model: Any = None
    assistant_tokenizer: Any = None
    assistant_settings: Mapping[str, Any] = field(default_factory=dict)
    synced_gpus: bool = False
    prediction: Sequence[np.ndarray] | None = None
    encoder_inputs: torch.Tensor | None = None

    def draws(self, do_sample: bool) -> bool:
        """Whether drafts are drawn from a distribution, and so are verdicts on them."""
        return do_sample and self.config.verification == "rejection"


def sources(
    model: Any,
    request: Request,
    num_rows: int | None,
    do_sample: bool,
    encoder_inputs: prompts.EncoderInputs | None = None,
    processors: Sequence[Any] = (),
) -> list[Drafter]:
    """What drafts in a call; making it costs little and runs nothing.

    Args:
        model: The target.
        request: What the caller asked for.
        num_rows: Rows of the call, None where that is not known.
        do_sample: Whether tokens are drawn.
        encoder_inputs: What the target's encoder was given.
        processors: The call's logits processors.

    Raises:
        ValueError: An option, a pool or a prediction is wrong.
    """
    config, predictions = request.config, request.prediction
    resources = Resources(
        predictions=predictions,
        assistant=request.assistant_model,
        tokenizers=(request.tokenizer, request.assistant_tokenizer),
        encoder_inputs=encoder_inputs,
        vocab_size=int(compat.text_config(model).vocab_size),
        processors=processors,
        draws=request.draws(do_sample),
        pool=config.pool,
        learn=config.learn,
        settings=request.assistant_settings,
    )
    if num_rows is None:
        num_rows = len(predictions or ())
    return sources_of(model, config, num_rows, resources)
