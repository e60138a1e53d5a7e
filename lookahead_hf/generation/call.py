"""A call of `generate` as transformers has prepared it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lookahead_hf import compat

if TYPE_CHECKING:
    from lookahead_hf.generation.options import Request
    from lookahead_hf.rows import EncoderInputs


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """What decoding is given: the arguments of a decoding loop, and what the caller asked for.

    Attributes:
        model: The target.
        input_ids: Prompt tokens, [rows, columns].
        processors: The logits processors.
        criteria: The stopping criteria.
        generation_config: The generation config.
        model_kwargs: Further arguments of the model's forward.
        request: What the caller asked for beside transformers' own arguments.
        is_checked: Whether the model and a cache of the caller's were checked already.
    """

    model: Any
    input_ids: torch.Tensor
    processors: Any
    criteria: Any
    generation_config: Any
    model_kwargs: dict[str, Any]
    request: Request
    is_checked: bool = False

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
        return returned or compat.is_users_cache(
            self.model_kwargs.get(compat.decoder_names(self.model).cache)
        )

    @property
    def encoder_inputs(self) -> EncoderInputs | None:
        """What each row's encoder was given; several rows may share one text."""
        texts = self.request.encoder_inputs
        if texts is None:
            return None
        repeated = texts.repeat_interleave(self.num_rows // len(texts), 0)
        return repeated, self.model_kwargs.get("attention_mask")
