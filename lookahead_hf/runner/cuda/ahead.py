"""Compiles the kernels that the steps of a call will launch, by the model's configuration."""

from __future__ import annotations

from functools import partial
from typing import Any

from lookahead_hf import compat, kernels
from lookahead_hf.runner.masks import MaskKind


def compile_kernels(
    model: Any, kinds: list[MaskKind], num_rows: int, widths: tuple[int, ...], draws: bool | None
) -> None:
    """Begin to compile; a step compiles what differs, such as heads of an unusual size."""
    config = compat.text_config(model)
    heads, hidden = (getattr(config, n, None) for n in ("num_attention_heads", "hidden_size"))
    if not (isinstance(heads, int) and isinstance(hidden, int) and heads):
        return
    if kernels.backend(model.device) != "triton":
        return
    from lookahead_hf.kernels import ahead

    steps = partial(
        ahead.compile_steps,
        rows=num_rows,
        widths=widths,
        vocab=config.vocab_size,
        dtype=model.dtype,
        draws=draws,
        heads=(heads, getattr(config, "num_key_value_heads", None) or heads),
        dim=getattr(config, "head_dim", None) or hidden // heads,
        windows=tuple({kind.window is not None for kind in kinds if kind.chunk is None}),
        softcap=getattr(config, "attn_logit_softcapping", None) or 0.0,
    )
    ahead.compile_beside(model.device, steps)
