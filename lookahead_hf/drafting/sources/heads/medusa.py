"""Drafts from Medusa-1 heads (arXiv:2401.10774) in a file.

Head k reads the last hidden state alone and predicts the token `k + 1` places after the next one.
No head knows what another predicts, so the candidates of a place follow several of the place
before.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import safetensors.torch
import torch
from torch.nn.functional import linear, silu

from lookahead_hf import compat
from lookahead_hf.draft import DraftTree, Verdict
from lookahead_hf.drafting.sources.heads.drafter import HeadsDrafter, gather_states, kept_heads
from lookahead_hf.rows import Rows

Head = tuple[list[tuple[torch.Tensor, torch.Tensor]], torch.Tensor]
"""Weights and biases of the residual blocks, and the weights of the last layer."""


class MedusaDrafter(HeadsDrafter):
    """Predicts several tokens ahead from the hidden state of the last verified token."""

    name: ClassVar[str] = "medusa"
    sees_all: ClassVar[bool] = False  # the step before a draft is all that the heads read

    def __init__(
        self,
        target: Any,
        *,
        path: Any = None,
        top_k: int = 4,
        beam: int = 4,
        vocab_size: int | None = None,
    ) -> None:
        """Draft with the heads in a file, which the first call loads.

        Args:
            target: The model that the heads were trained for.
            path: The file: safetensors, or what `torch.save` wrote of a dict of tensors.
            top_k: Tokens to propose at each place, the likeliest first.
            beam: Nodes at each place that the next place's tokens follow.
            vocab_size: Token ids of the target; higher ids are never drafted.

        Raises:
            ValueError: An option is out of its range, or the file does not hold Medusa-1 heads of
                this model.
        """
        super().__init__(top_k, beam, vocab_size)
        self._path = _checked(path)
        if target.config.is_encoder_decoder:
            raise ValueError('the drafter "medusa" serves models without an encoder')
        weight = target.get_output_embeddings().weight
        key = self._path, self._path.stat().st_mtime_ns, weight.device, target.dtype
        sizes = int(compat.text_config(target).vocab_size), weight.shape[1]
        move = {"device": weight.device, "dtype": target.dtype}
        self._heads: list[Head] = kept_heads(
            target, "medusa", key, lambda: _heads_of(_read(self._path, move), *sizes)
        )
        self._last: torch.Tensor | None = None  # [rows, hidden]

    @property
    def kept_as(self) -> str:
        """Heads have rates of their own by their path."""
        return str(self._path)

    def begin(self, rows: Rows) -> None:
        states, self.hidden_states = self.hidden_states, None
        self._last = None if states is None else states[:, -1]

    def _keep(self, rows: Rows, verdict: Verdict, states: torch.Tensor) -> None:
        last = [verdict.accepted(row)[-1:] for row in range(rows.num_rows)]
        places = np.array([1 + int(node[0]) if len(node) else 0 for node in last], np.int64)
        self._last = gather_states(states, places[:, None])[:, 0]

    @torch.no_grad()
    def propose(self, rows: Rows, max_nodes: int) -> DraftTree:
        if self._last is None:
            return DraftTree.empty(rows.num_rows)
        logits = [_predicted(head, self._last) for head in self._heads[:max_nodes]]
        return self._tree(rows, torch.stack(logits, 1))

    def end(self, rows: Rows) -> None:
        self._last = self.hidden_states = None


def _predicted(head: Head, states: torch.Tensor) -> torch.Tensor:
    """Run a head on hidden states, [rows, hidden]; return logits, [rows, vocab]."""
    blocks, last = head
    for weight, bias in blocks:
        states = states + silu(linear(states, weight, bias))
    return linear(states, last)


def _checked(path: Any) -> Path:
    if not isinstance(path, (str, os.PathLike)):
        raise ValueError(
            f'the drafter "medusa" needs the file of its heads, not path={path!r}: pass '
            'options={"medusa": {"path": ...}}'
        )
    if not Path(path).is_file():
        raise ValueError(f"medusa: path is {os.fspath(path)!r}, but there is no such file")
    return Path(path).resolve()


def _read(path: Path, move: dict[str, Any]) -> dict[str, torch.Tensor]:
    try:
        with torch.inference_mode(False):  # later calls may run outside of it
            if path.suffix == ".safetensors":
                found = safetensors.torch.load_file(path)
            else:
                found = torch.load(path, map_location="cpu", weights_only=True)
            return {name: tensor.to(**move) for name, tensor in found.items()}
    except Exception as error:
        raise ValueError(
            f"medusa: {path} cannot be read as a dict of tensors: {type(error).__name__}: {error}"
        ) from error


def _heads_of(tensors: dict[str, torch.Tensor], vocab_size: int, hidden: int) -> list[Head]:
    """Sort the tensors of a file into heads; ValueError if they do not fit a model of this size."""
    left = {name.removeprefix("medusa_head."): tensor for name, tensor in tensors.items()}

    def take(name: str, *shape: int) -> torch.Tensor:
        tensor = left.pop(name, None)
        if tensor is None or tuple(tensor.shape) != shape:
            found = "is missing" if tensor is None else f"has the shape {tuple(tensor.shape)}"
            raise ValueError(
                f"medusa: the tensor {name!r} {found}, but Medusa-1 heads of this model have it in "
                f"the shape {shape}: give the heads that were trained for this model"
            )
        return tensor

    heads: list[Head] = []
    while left or not heads:
        at, blocks = len(heads), list[tuple[torch.Tensor, torch.Tensor]]()
        while f"{at}.{len(blocks)}.linear.weight" in left:
            name = f"{at}.{len(blocks)}.linear"
            blocks.append((take(f"{name}.weight", hidden, hidden), take(f"{name}.bias", hidden)))
        heads.append((blocks, take(f"{at}.{len(blocks)}.weight", vocab_size, hidden)))
    return heads
