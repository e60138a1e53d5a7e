"""A call of `generate`: the request of its caller, and what transformers has prepared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig

from lookahead_hf.config import SpeculativeConfig
from lookahead_hf.model import compat
from lookahead_hf.rows import EncoderInputs


@dataclass(frozen=True, slots=True)
class Request:
    """The arguments of a caller that concern speculation."""

    config: SpeculativeConfig
    streamer: Any = None
    tokenizer: Any = None
    assistant_model: Any = None
    assistant_tokenizer: Any = None
    use_mtp: bool = False  # whether the model's own layers draft, too
    assistant_settings: Mapping[str, Any] = field(default_factory=dict)  # of generation
    synced_gpus: bool = False  # as `generate` computes it
    prediction: Sequence[np.ndarray] | None = None  # the predicted text of every row, token ids
    encoder_inputs: torch.Tensor | None = None  # an encoder's inputs, [texts, ...]

    def draws(self, do_sample: bool) -> bool:
        """Return whether drafts, and the verdicts on them, are drawn from distributions."""
        return do_sample and self.config.verification == "rejection"


@dataclass(frozen=True, eq=False)
class PreparedCall:
    """The arguments of transformers' decoding loop, the request of the caller, and what follows.

    What follows is found once, when somebody first reads it.
    """

    model: Any
    input_ids: torch.Tensor  # prompt tokens, [rows, columns]
    processors: Any
    criteria: Any
    generation_config: Any
    model_kwargs: dict[str, Any]  # further arguments of the model's forward
    request: Request  # what the caller asked for beside transformers' own arguments

    @property
    def num_rows(self) -> int:
        return len(self.input_ids)

    @property
    def num_new(self) -> int:
        """Most tokens that the call generates."""
        return int(self.generation_config.max_length) - self.input_ids.shape[1]

    @cached_property
    def names(self) -> compat.DecoderNames:
        return compat.decoder_names(self.model)

    @cached_property
    def attended(self) -> np.ndarray | None:
        """Which columns of the prompt are attended, [rows, columns] bool; None for all."""
        mask = self.model_kwargs.get(self.names.mask)
        return None if mask is None else mask.to("cpu").numpy().astype(bool)

    @property
    def seen(self) -> np.ndarray:
        """The same, also if all are attended."""
        return np.ones(self.input_ids.shape, bool) if self.attended is None else self.attended

    @cached_property
    def num_columns(self) -> int:
        """Columns of the decoder's prompt, which may be embeddings without ids."""
        embeds = self.model_kwargs.get(self.names.ids.replace("input_ids", "inputs_embeds"))
        return max(self.input_ids.shape[1], 0 if embeds is None else embeds.shape[1])

    @cached_property
    def position_ids(self) -> torch.Tensor:
        """Positions of the prompt, [..., rows, columns], perhaps of one row for all."""
        columns, name = self.num_columns, self.names.positions
        if name is not None:
            prepared = self.model, name, self.input_ids, self.model_kwargs
            if (given := compat.prepared_positions(*prepared)) is not None:
                return given
            if self.attended is not None:
                columns = self.attended.shape[1]  # the caller's cache included
        return torch.arange(columns, device=self.input_ids.device)[None]

    @cached_property
    def num_draftable(self) -> int:
        """How many of the new tokens drafts may cover before a table of positions ends.

        Plain generation feeds every row one token per step, so no row needs more than the longest
        has room for. A text that goes on beyond the table fails as it does in plain generation.
        """
        table = compat.position_table(self.model)
        if table is None or not self.position_ids.numel():
            return self.num_new
        newest = int(self.position_ids[..., -1].max())
        return self.num_new if newest >= table else min(self.num_new, table - newest)

    @cached_property
    def passed(self) -> dict[str, Any]:
        """Arguments that every step passes on unchanged; it sets the ones in `names` anew."""
        ours = self.names.prepared | compat.PROMPT_ONLY
        given = self.model_kwargs.items()
        passed = {name: value for name, value in given if name not in ours and value is not None}
        for name in passed.keys() & set(compat.TOKEN_TYPES):  # of every token behind the prompt
            last = passed[name][:, -1:]
            passed[name] = torch.zeros_like(last) if name == "mm_token_type_ids" else last
        return passed

    @property
    def cache(self) -> Any:
        """The cache that the forwards are given, None without one."""
        return compat.given_cache(self.model_kwargs)

    @property
    def do_sample(self) -> bool:
        return bool(self.generation_config.do_sample)

    @property
    def pad(self) -> int | None:
        """The pad token, None where there is none."""
        return compat.pad_token(self.generation_config)

    @property
    def returns_cache(self) -> bool:
        """Whether the caller sees the cache afterwards."""
        returned = bool(self.generation_config.return_dict_in_generate)
        return returned or compat.is_users_cache(self.cache)

    @property
    def encoder_inputs(self) -> EncoderInputs | None:
        """The encoder's inputs of each row; several rows may share one text."""
        texts = self.request.encoder_inputs
        if texts is None:
            return None
        repeated = texts.repeat_interleave(self.num_rows // len(texts), 0)
        return repeated, self.model_kwargs.get("attention_mask")


def prompt_call(
    model: Any, input_ids: torch.Tensor, mask: torch.Tensor | None = None, **further: Any
) -> PreparedCall:
    """Return a call that reads a prompt outside of `generate`, as `generate` would prepare it.

    The mask, [rows, columns], may be None; `further` arguments of the model's forward are such as
    its encoder's outputs.
    """
    names = compat.decoder_names(model)
    seen = torch.ones_like(input_ids) if mask is None else mask.long()
    given = {names.mask: seen, names.prepared_cache: compat.empty_cache(model), "use_cache": True}
    if names.positions is not None:
        is_whole, by_mask = mask is None, compat.positions_by_mask(seen)
        given[names.positions] = compat.text_positions(model, input_ids) if is_whole else by_mask
    arguments = GenerationConfig(), {**given, **further}, Request(SpeculativeConfig())
    return PreparedCall(model, input_ids, (), (), *arguments)
