"""Drafts from heads that read the target's last hidden states.

DeepSeek-V3 (arXiv:2412.19437) trains layers that read the model's last hidden states and the next
tokens, and predict one token further each. Going on from a layer's own output drafts more tokens
than there are layers. Medusa-1 (arXiv:2401.10774) trains heads that read the last hidden state
alone; no head knows what another predicts.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import safetensors.torch
import torch
from torch.nn.functional import linear, silu

from lookahead_hf import distributed
from lookahead_hf.config import check_int
from lookahead_hf.draft import DraftTree
from lookahead_hf.drafting.drafter import Drafter, Step, Traits
from lookahead_hf.model import compat
from lookahead_hf.model.state import kept, state_of
from lookahead_hf.rows import Rows
from lookahead_hf.runner.outputs import pinned
from lookahead_hf.sources.growth import NUM_BUCKETS, Growth, Likeliest, prior_rates, tree_of

MOST_TOKENS = 64  # Upper limit of options that count tokens
NUM_DRAFT = 3  # Tokens that a single layer writes ahead
PIECE = 512  # Most tokens of a long prompt that are read at once: a mask has as many rows


class HeadsDrafter(Drafter):
    """Collects the hidden states of accepted tokens and drafts what heads predict from them.

    The heads have three members. `begin()` forgets all texts. `write(rows, states, columns)` reads
    hidden states, [rows, width, hidden], with their places in the texts, [rows, width], -1 for
    none; the newest are last. It returns the logits of the places ahead, [rows, places, vocab], and
    how many of the states need not be shown again. `breadth` nodes of each place are followed by
    the tokens of the next place.
    """

    traits = Traits(NUM_BUCKETS, prior_rates(), needs={"hidden_states": True})

    def __init__(self, heads: Any, *, top_k: int = 3, vocab_size: int | None = None) -> None:
        """Draft the `top_k` likeliest tokens of each place, with ids below `vocab_size`."""
        check_int(f"{self.name}: top_k", top_k, 1, MOST_TOKENS)
        self._heads, self._picks = heads, Likeliest(top_k, vocab_size)
        self._states: list[torch.Tensor] = []  # not read yet, [rows, columns, hidden] each
        self._columns: list[np.ndarray] = []  # as in `write`, [rows, columns] each

    def begin(self, rows: Rows) -> None:
        self.end(rows)
        if rows.prompt_states is None:
            return
        width = rows.prompt_states.shape[1]
        columns = np.full((rows.num_rows, width), -1, np.int64)
        for row in range(rows.num_rows):
            length = rows.prompt_length(row)
            count = min(width, length)  # a cache may hold the beginning; pads are on the left
            columns[row, width - count :] = np.arange(length - count, length)
        self._states, self._columns = [rows.prompt_states], [columns]

    def observe(self, step: Step) -> None:
        rows, verdict = step.rows, step.verdict
        if step.hidden_states is None:
            raise RuntimeError("the model's forward returns no hidden states")
        going = verdict.live & ~verdict.finished
        counts = np.where(going, verdict.num_accepted + 1, 0)
        places = np.zeros((rows.num_rows, int(counts.max())), np.int64)
        columns = np.full_like(places, -1)
        for row in np.flatnonzero(going).tolist():
            count = int(counts[row])
            places[row, 1:count] = verdict.accepted(row) + 1
            end = len(rows.context(row)) - 1
            columns[row, :count] = np.arange(end - count, end)
        self._states.append(_gather(step.hidden_states, places))
        self._columns.append(columns)

    @torch.no_grad()
    def propose(self, rows: Rows, max_nodes: int) -> DraftTree:
        columns, places = self._unread()
        if not columns.size:
            return DraftTree.empty(rows.num_rows)
        states = _gather(torch.cat(self._states, 1), places)
        logits, read = self._heads.write(rows, states, columns)
        self._states, self._columns = [states[:, read:]], [columns[:, read:]]
        return self._tree(rows, logits)

    def _unread(self) -> tuple[np.ndarray, np.ndarray]:
        if not self._columns:
            return np.zeros((0, 0), np.int64), np.zeros((0, 0), np.int64)
        columns = np.concatenate(self._columns, 1)
        width = int((columns >= 0).sum(1).max())
        places = np.argsort(columns >= 0, 1, kind="stable")[:, columns.shape[1] - width :]
        return np.take_along_axis(columns, places, 1), places

    def _tree(self, rows: Rows, logits: torch.Tensor) -> DraftTree:
        """Return the live rows' drafts; logits of the places ahead are [rows, places, vocab]."""
        num_rows, depths = logits.shape[:2]
        row, place = np.indices((num_rows, depths)).reshape(2, -1)
        tokens, classes, _ = self._picks.pick(logits, row, place)
        growths = [Growth(is_live) for is_live in rows.live.tolist()]
        for at, number in enumerate(row.tolist()):
            picked = tokens[at], classes[at], self.rates
            growths[number].extend(*picked, breadth=self._heads.breadth)
        return tree_of(growths)

    def end(self, rows: Rows) -> None:
        self._heads.begin()
        self._states, self._columns = [], []


class MtpDrafter(HeadsDrafter):
    """Drafts from a checkpoint's multi-token-prediction layers."""

    name: ClassVar[str] = "mtp"

    def __init__(
        self,
        target: Any,
        *,
        num_draft: int | None = None,
        top_k: int = 3,
        vocab_size: int | None = None,
    ) -> None:
        """Draft with a model's own layers, which the first call loads.

        Args:
            target: The model.
            num_draft: Tokens to write ahead; each costs one forward of one layer for all rows. None
                is the number of layers, or 3 for a single one. Beyond the number of layers, the
                last one goes on from its own output.
            top_k: Tokens to propose at each place, the likeliest first.
            vocab_size: Token ids of the target; higher ids are never drafted.

        Raises:
            ValueError: An option is out of its range, or the model has no layers that are served.
        """
        if num_draft is not None:
            check_int("mtp: num_draft", num_draft, 1, MOST_TOKENS)
        check_int("mtp: top_k", top_k, 1, MOST_TOKENS)
        super().__init__(MtpHeads(target, num_draft), top_k=top_k, vocab_size=vocab_size)


class MedusaDrafter(HeadsDrafter):
    """Drafts from Medusa-1 heads in a file."""

    name: ClassVar[str] = "medusa"

    def __init__(
        self, target: Any, *, path: Any = None, top_k: int = 4, vocab_size: int | None = None
    ) -> None:
        """Draft with the heads in a file, which the first call loads.

        Args:
            target: The model that the heads were trained for.
            path: The file: safetensors, or what `torch.save` wrote of a dict of tensors.
            top_k: Tokens to propose at each place, the likeliest first.
            vocab_size: Token ids of the target; higher ids are never drafted.

        Raises:
            ValueError: An option is out of its range, or the file has no such heads of this model.
        """
        check_int("medusa: top_k", top_k, 1, MOST_TOKENS)
        heads = MedusaHeads(target, path)
        super().__init__(heads, top_k=top_k, vocab_size=vocab_size)
        self._path = heads.path

    @property
    def kept_as(self) -> str:
        """Heads have rates of their own by their path."""
        return str(self._path)


class MtpHeads:
    """Runs the layers over the verified tokens, in a cache of their own, and then ahead of them.

    Layer k reads the hidden states of a token and the token `k + 1` places after it. So the last
    known hidden states meet drafted tokens in all layers but the first. These columns leave the
    cache after the draft, and the next step reads the hidden states again. A row may have empty
    columns in the cache, where another row kept more.
    """

    breadth = 1  # what a layer predicts follows the likeliest token alone

    def __init__(self, target: Any, num_draft: int | None) -> None:
        """Take the layers of a model; write so many tokens ahead, None as in `MtpDrafter`."""
        if distributed.is_spread(target):
            raise ValueError(
                'the drafter "mtp" needs the whole model in the process that drafts, but it is '
                "split over processes: leave the drafter out"
            )
        key = target.config.name_or_path, target.device, target.dtype
        self._layers = _kept(target, "mtp", key, lambda: compat.load_mtp(target))
        self._layers.tie_with_main_model(target)  # whose layers may have been replaced
        layers = len(self._layers.layers)
        self._num_draft = num_draft or (layers if layers > 1 else NUM_DRAFT)
        self._num_layers = min(layers, self._num_draft)
        self._cache: Any = None

    def begin(self) -> None:
        self._cache = None

    def write(
        self, rows: Rows, states: torch.Tensor, columns: np.ndarray
    ) -> tuple[torch.Tensor, int]:
        if self._cache is None:
            self._cache = compat.mtp_cache(rows.num_rows, states.device)
        ahead = columns + 1 + np.arange(self._num_layers)[:, None, None]  # what each layer reads
        for row in range(rows.num_rows):
            context = rows.context(row)
            ahead[:, row] = context[ahead[:, row].clip(max=len(context) - 1)]
        on_it, *tokens = _on_device(np.concatenate([columns[None], ahead]), states.device)
        known = max(0, columns.shape[1] - self._num_layers + 1)
        last = max(0, known - 1) // PIECE * PIECE
        for start in range(0, last, PIECE):
            piece = slice(start, start + PIECE)
            self._read(states[:, piece], on_it[:, piece], [each[:, piece] for each in tokens])
        num_kept = self._cache.columns.shape[1] + known - last
        logits = self._write(states[:, last:], on_it[:, last:], tokens[0][:, last:])
        compat.crop_mtp_cache(self._cache, num_kept)
        return logits, known

    def _read(
        self, states: torch.Tensor, columns: torch.Tensor, tokens: list[torch.Tensor]
    ) -> None:
        """Let all layers read columns whose following text is known; see `_write`."""
        self._extend(columns)
        for layer, ids in enumerate(tokens):
            states = self._run(layer, states, columns, ids)

    def _write(
        self,
        states: torch.Tensor,  # [rows, width, hidden]
        columns: torch.Tensor,  # [rows, width]
        tokens: torch.Tensor,  # [rows, width]
    ) -> torch.Tensor:
        """Read the newest columns, and draft the likeliest chain without waiting for the device.

        Returns the logits of the places ahead, [rows, `num_draft`, vocab].
        """
        logits: list[torch.Tensor] = []
        self._extend(columns)
        for depth in range(self._num_draft):
            layer = min(depth, self._num_layers - 1)
            if depth > layer:  # on from its own output
                columns, states, tokens = columns[:, -1:] + 1, states[:, -1:], tokens[:, -1:]
                self._extend(columns)
            states = self._run(layer, states, columns, tokens)
            logits.append(compat.head_logits(self._layers, states[:, -1:]))
            tokens = torch.cat([tokens[:, 1:], logits[-1].argmax(-1)], 1)
        return torch.cat(logits, 1)

    def _extend(self, columns: torch.Tensor) -> None:
        self._cache.columns = torch.cat([self._cache.columns, columns], 1)

    def _run(
        self, layer: int, states: torch.Tensor, columns: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor:
        """Run a layer, whose tokens are `layer + 1` places after the columns."""
        positions = columns + 1 + layer
        ran: torch.Tensor = self._layers.forward_layer(
            layer, states, positions, self._cache, input_ids=tokens
        )
        return ran


class MedusaHeads:
    """Heads of residual blocks and a linear layer; head k predicts `k + 1` places ahead."""

    breadth = 4

    def __init__(self, target: Any, path: Any) -> None:
        """Take the heads in the file `path`, a path, for a model."""
        if not isinstance(path, (str, os.PathLike)):
            raise ValueError(
                f'the drafter "medusa" needs the file of its heads, not path={path!r}: pass '
                'options={"medusa": {"path": ...}}'
            )
        if not Path(path).is_file():
            raise ValueError(f"medusa: path is {os.fspath(path)!r}, but there is no such file")
        if target.config.is_encoder_decoder:
            raise ValueError('the drafter "medusa" serves models without an encoder')
        self.path, weight = Path(path).resolve(), target.get_output_embeddings().weight
        key = self.path, self.path.stat().st_mtime_ns, weight.device, target.dtype
        vocab, hidden = int(compat.text_config(target).vocab_size), weight.shape[1]

        def load() -> list[Head]:
            return _heads_of(_read(self.path, weight.device, target.dtype), vocab, hidden)

        self._heads: list[Head] = _kept(target, "medusa", key, load)

    def begin(self) -> None:
        """Nothing to forget: the heads read the newest hidden state alone."""

    def write(
        self, rows: Rows, states: torch.Tensor, columns: np.ndarray
    ) -> tuple[torch.Tensor, int]:
        logits = []
        for blocks, last in self._heads:
            state = states[:, -1]
            for weight, bias in blocks:
                state = state + silu(linear(state, weight, bias))
            logits.append(linear(state, last))
        return torch.stack(logits, 1), columns.shape[1] - 1


Head = tuple[list[tuple[torch.Tensor, torch.Tensor]], torch.Tensor]
"""Weights and biases of the residual blocks, and the weights of the last layer."""


def _read(path: Path, device: torch.device, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    try:
        with torch.inference_mode(False):  # later calls may run outside of it
            if path.suffix == ".safetensors":
                found = safetensors.torch.load_file(path)
            else:
                found = torch.load(path, map_location="cpu", weights_only=True)
            return {name: tensor.to(device, dtype) for name, tensor in found.items()}
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


def _gather(states: torch.Tensor, places: np.ndarray) -> torch.Tensor:
    return states.take_along_dim(_on_device(places, states.device)[..., None], 1)


def _on_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy numbers to a device without waiting for it."""
    return pinned(array, device).to(device, non_blocking=True)


class KeptLayers(dict[str, tuple[Any, Any]]):
    """Layers that are kept with a model, by drafters, each with what they were loaded for."""

    def release(self) -> None:
        """Do nothing: a call in progress keeps its layers until it ends."""


def _kept(target: Any, name: str, key: tuple[Any, ...], load: Callable[[], Any]) -> Any:
    with state_of(target).lock:
        found = kept(target, KeptLayers)
        if name not in found or found[name][0] != key:
            found[name] = key, load()
        return found[name][1]
