"""Flash attention on a machine without it: transformers' own function over stand-in kernels.

transformers prepares its arguments, loads the kernels by the name in the module's configuration,
and takes padding out, as with the real ones.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers import modeling_flash_attention_utils as flash_utils
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.masking_utils import flash_attention_mask

from lookahead_hf.model import compat
from tests.helpers.trees import under_mask


class Flash:
    """The kernels; `widths` are the queries of the longest text of each call."""

    def __init__(self) -> None:
        self.widths: list[int] = []

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any
    ) -> torch.Tensor:
        """What `flash_attn_func` returns: the last query stands at the last key."""
        (rows, *lengths), texts = (*q.shape[:2], k.shape[1]), (x.flatten(0, 1) for x in (q, k, v))
        ends = (torch.arange(rows + 1) * length for length in lengths)
        return self.attend_texts(*texts, *ends, *lengths, **given).unflatten(0, q.shape[:2])

    def attend_texts(  # noqa: PLR0913 (another's signature)
        self,
        q: torch.Tensor,  # [queries of all texts, heads, dim]
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        s_aux: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """What `flash_attn_varlen_func` returns, of texts one after another."""
        self.widths.append(int(max_seqlen_q))
        assert dropout_p == 0.0 and softmax_scale is not None

        def of_text(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            before = window_size[0]
            distance = torch.arange(k.shape[1] - q.shape[1], k.shape[1])[:, None]
            distance = distance - torch.arange(k.shape[1])
            seen = ((distance >= 0) | (not causal)) & ((distance <= before) | (before < 0))
            mask = torch.zeros(seen.shape).masked_fill_(~seen, -1.0)[None, None]
            heads = (x.transpose(1, 2) for x in (q, k, v))
            return under_mask(mask, *heads, softmax_scale, softcap or None, s_aux)

        (of_q, of_k) = (cu.diff().tolist() for cu in (cu_seqlens_q, cu_seqlens_k))
        texts = zip(q.split(of_q), k.split(of_k), v.split(of_k), strict=True)
        return torch.cat([of_text(*(x[None] for x in text))[0] for text in texts])


def with_flash(model: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> Flash:
    """Let a model attend by flash attention of this name; return its kernels."""
    flash = Flash()
    process = flash_utils._lazy_define_process_function(flash.attend_texts)
    for attribute, value in {
        "_loaded_implementation": name,
        "_flash_fn": flash.attend,
        "_flash_varlen_fn": flash.attend_texts,
        "_pad_fn": flash_utils._pad_input,
        "_unpad_fn": flash_utils._unpad_input,
        "_process_flash_kwargs_fn": process,
    }.items():
        monkeypatch.setattr(flash_utils, attribute, value)
    monkeypatch.setitem(AttentionInterface._global_mapping, name, flash_attention_forward)
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, name, flash_attention_mask)
    for config in compat.configs_of(model.modules()):
        compat.set_attention_name(config, name)
    return flash
