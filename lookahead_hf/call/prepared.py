"""A call of `generate`: the request of its caller, and what transformers has prepared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lookahead_hf.model import compat

if TYPE_CHECKING:
    from lookahead_hf.config import SpeculativeConfig
    from lookahead_hf.rows import EncoderInputs


@dataclass(frozen=True, slots=True)
class Request:
    """The arguments of a caller that concern speculation.

    Attributes:
        use_mtp: Whether the model's own layers draft, too.
        assistant_settings: Generation settings for assistants.
        synced_gpus: As `generate` computes it.
        prediction: The predicted text of every row, token ids.
        encoder_inputs: An encoder's inputs, [texts, ...].
    """

    config: SpeculativeConfig
    streamer: Any = None
    tokenizer: Any = None
    assistant_model: Any = None
    assistant_tokenizer: Any = None
    use_mtp: bool = False
    assistant_settings: Mapping[str, Any] = field(default_factory=dict)
    synced_gpus: bool = False
    prediction: Sequence[np.ndarray] | None = None
    encoder_inputs: torch.Tensor | None = None

    def draws(self, do_sample: bool) -> bool:
        """Return whether drafts, and the verdicts on them, are drawn from distributions."""
        return do_sample and self.config.verification == "rejection"


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """The arguments of transformers' decoding loop, and the request of the caller.

    Attributes:
        input_ids: Prompt tokens, [rows, columns].
        model_kwargs: Further arguments of the model's forward.
        request: What the caller asked for beside transformers' own arguments.
    """

    model: Any
    input_ids: torch.Tensor
    processors: Any
    criteria: Any
    generation_config: Any
    model_kwargs: dict[str, Any]
    request: Request

    @property
    def num_rows(self) -> int:
        """Rows of the batch."""
        return len(self.input_ids)

    @property
    def num_new(self) -> int:
        """Most tokens that the call generates."""
        return int(self.generation_config.max_length) - self.input_ids.shape[1]

    @property
    def do_sample(self) -> bool:
        """Whether tokens are sampled."""
        return bool(self.generation_config.do_sample)

    @property
    def pad(self) -> int | None:
        """The pad token, None where there is none."""
        return compat.pad_token(self.generation_config)

    @property
    def returns_cache(self) -> bool:
        """Whether the caller sees the cache afterwards."""
        returned = bool(self.generation_config.return_dict_in_generate)
        return returned or compat.is_users_cache(compat.given_cache(self.model_kwargs))

    @property
    def encoder_inputs(self) -> EncoderInputs | None:
        """The encoder's inputs of each row; several rows may share one text."""
        texts = self.request.encoder_inputs
        if texts is None:
            return None
        repeated = texts.repeat_interleave(self.num_rows // len(texts), 0)
        return repeated, self.model_kwargs.get("attention_mask")
