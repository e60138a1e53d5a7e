"""Runs mixers with recurrent states in steps: a state waits until its tokens are kept."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from lookahead_hf.model import compat
from lookahead_hf.model.facts import facts_of
from lookahead_hf.runner import watch
from lookahead_hf.runner.forward import SetOwn, current


def install(model: nn.Module, give: SetOwn) -> None:
    """Have a model's mixers run our blocks by the forwards of the context."""
    for module in facts_of(model).mixers:
        give(module, "forward", _in_steps(module))


def _in_steps(module: Any) -> Callable[..., Any]:
    """Return a `forward` for a mixer that differs from its own within our forwards only."""
    original = short = module.forward
    if watch.is_untouched(module):
        short = compat.without_padding(module)  # pads short blocks to their own length only

    def forward(*args: Any, **kwargs: Any) -> Any:
        context = current()
        run = None if context is None else context.mixers.get(id(module))
        return original(*args, **kwargs) if run is None else run(short, *args, **kwargs)

    return forward


MOST_PENDING = 16  # Kept tokens of a row that make its state advance over them


class Mixer:
    """A module that reads and writes a recurrent state, in the blocks of one call.

    A state cannot be rolled back, so it stays where it is until all of a row's block is kept. The
    mixer stores its inputs for the tokens that a row has kept since then. They *wait*: they precede
    the inputs of the next block, and only the outputs of the block are returned. The rest of the
    model sees an ordinary block. Padding is to the right of a row's tokens, where it cannot reach
    them, so that ragged rows need no mask.
    """

    def __init__(self, module: Any, cache: Any, num_rows: int) -> None:
        """Prepare for one call; `cache` holds the module's states."""
        self._module, self._cache, self._num_rows = module, cache, num_rows
        self._names = tuple(inspect.signature(type(module).forward).parameters)[1:]
        self._run: Callable[..., Any] = module.forward
        self._given: dict[str, Any] = {}

    def forward(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a block by the module's forward, from the state of every row, which stays as it is.

        Returns the module's outputs for the block; tensors are [rows, width, ...].
        """
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        inputs = given.pop(self._names[0])
        self._run = run
        # No token of a block is padding, and no other tensor may depend on where a token is.
        self._given = {k: None if _holds_tensors(v) else v for k, v in given.items()}
        return self._block(inputs)

    def _block(self, inputs: torch.Tensor) -> Any:  # [rows, width, hidden]
        raise NotImplementedError

    def keep(self, counts: np.ndarray) -> None:
        """Keep the first tokens of the latest block in every row, [rows]; 0 ends a row."""
        raise NotImplementedError

    def settle(self) -> None:
        """Bring the state of every row to its last kept token."""

    @property
    def _places(self) -> list[tuple[dict[int, torch.Tensor], int]]:
        return compat.states_of(self._module, self._cache)

    def _states(self) -> list[torch.Tensor]:
        return [states[key] for states, key in self._places]

    def _set(self, values: list[torch.Tensor]) -> None:
        for (states, key), value in zip(self._places, values, strict=True):
            states[key] = value

    @contextmanager
    def _unchanged(self) -> Iterator[list[torch.Tensor]]:
        states = self._states()
        try:
            yield states
        finally:
            self._set(states)

    def _call(self, inputs: torch.Tensor) -> Any:
        output = self._run(inputs, **self._given)
        assert all(part.shape[:2] == inputs.shape[:2] for part in _tensors(output))
        return output


class ReplayMixer(Mixer):
    """A mixer whose forward takes blocks: tokens that wait run again, before the next block."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._waiting: list[torch.Tensor] = []  # [tokens, hidden] per row
        self._inputs = torch.empty(0)
        self._after: list[torch.Tensor] = []
        self._is_reached = np.ones(self._num_rows, bool)

    def _block(self, inputs: torch.Tensor) -> Any:
        if not self._waiting:
            self._waiting = [inputs[0, :0]] * self._num_rows
        waiting = np.array([len(tokens) for tokens in self._waiting])
        most, width = int(waiting.max()), inputs.shape[1]
        with self._unchanged() as states:
            self._set([state.clone() for state in states])
            output = self._call(self._behind_waiting(inputs, most))
            self._inputs, self._after = inputs, self._states()
        self._is_reached = waiting == most  # the state after the call is that of the last token
        if not most:
            return output
        if self._is_reached.all():
            return _mapped(output, lambda part: part[:, most:])
        places = torch.from_numpy(waiting[:, None] + np.arange(width)).to(inputs.device)
        rows = torch.arange(self._num_rows, device=inputs.device)[:, None]
        return _mapped(output, lambda part: part[rows, places])

    def _behind_waiting(self, inputs: torch.Tensor, most: int) -> torch.Tensor:
        """Return the inputs of waiting tokens and the block, [rows, most + width, hidden]."""
        if not most:
            return inputs
        joined = inputs.new_zeros(len(inputs), most + inputs.shape[1], inputs.shape[2])
        for row, tokens in enumerate(self._waiting):
            joined[row, : len(tokens)] = tokens
            joined[row, len(tokens) : len(tokens) + inputs.shape[1]] = inputs[row]
        return joined

    def keep(self, counts: np.ndarray) -> None:
        is_whole = self._is_reached & (counts == self._inputs.shape[1])
        if is_whole.all():
            self._set(self._after)
        elif is_whole.any():
            rows = torch.from_numpy(np.flatnonzero(is_whole))
            for state, after in zip(self._states(), self._after, strict=True):
                state[rows] = after[rows].to(state.dtype)
        self._after = []
        for row, count in enumerate(counts.tolist()):
            kept = self._inputs[row, :count]
            waiting = torch.cat([self._waiting[row], kept]) if len(self._waiting[row]) else kept
            self._waiting[row] = kept[:0] if is_whole[row] else waiting
        while full := [r for r, tokens in enumerate(self._waiting) if len(tokens) >= MOST_PENDING]:
            self._advance(full, MOST_PENDING)
        self._settle(np.flatnonzero(counts == 0).tolist())

    def settle(self) -> None:
        self._settle(range(len(self._waiting)))

    def _settle(self, rows: Sequence[int]) -> None:
        for count in {len(self._waiting[row]) for row in rows} - {0}:
            self._advance([row for row in rows if len(self._waiting[row]) == count], count)

    def _advance(self, rows: list[int], count: int) -> None:
        index = torch.tensor(rows)
        with self._unchanged() as states:
            self._set([state[index] for state in states])
            self._call(torch.stack([self._waiting[row][:count] for row in rows]))
            moved = self._states()
        for state, new in zip(states, moved, strict=True):
            state[index] = new.to(state.dtype)
        for row in rows:
            self._waiting[row] = self._waiting[row][count:]


class TokenByToken(Mixer):
    """A mixer whose forward of several tokens may differ from single ones, or depend on a draft."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._after: list[list[torch.Tensor]] = []  # before the block, and after each of its tokens

    def _block(self, inputs: torch.Tensor) -> Any:
        with self._unchanged() as states:
            self._after, parts = [states], []
            for token in inputs.split(1, 1):
                self._set([state.clone() for state in self._after[-1]])
                parts.append(self._call(token))
                self._after.append(self._states())
        if not isinstance(parts[0], tuple):
            return torch.cat(parts, 1)
        columns = zip(*parts, strict=True)
        return tuple(None if part[0] is None else torch.cat(part, 1) for part in columns)

    def keep(self, counts: np.ndarray) -> None:
        picked = []
        for after in zip(*self._after, strict=True):
            picked.append(torch.stack([after[n][row] for row, n in enumerate(counts.tolist())]))
        self._set(picked)
        self._after = []


def _holds_tensors(value: Any) -> bool:
    values = value if isinstance(value, (tuple, list)) else (value,)
    return any(isinstance(each, torch.Tensor) for each in values)


def _tensors(output: Any) -> list[torch.Tensor]:
    parts = output if isinstance(output, tuple) else (output,)
    return [part for part in parts if part is not None]


def _mapped(output: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(output, tuple):
        return tuple(None if part is None else change(part) for part in output)
    return change(output)


class RecurrentLayers:
    """The mixers of a model in one call, each with the state of every row."""

    def __init__(self, model: nn.Module, cache: Any, num_rows: int, by_token: bool = False) -> None:
        """Prepare for one call.

        With `by_token`, every mixer gets a block's tokens one by one, so that a token's bits do not
        depend on the draft.
        """
        self._mixers: dict[int, Mixer] = {}
        for module in facts_of(model).mixers:
            kind = ReplayMixer if compat.takes_blocks(module) and not by_token else TokenByToken
            self._mixers[id(module)] = kind(module, cache, num_rows)
        # Tokens behind the prompt, [rows]; None in `keep`, and after an exception there.
        self._kept: np.ndarray | None = np.zeros(num_rows, np.int64)

    @property
    def forwards(self) -> dict[int, Callable[..., Any]]:
        """Forwards of the mixers in a block, by the id of the mixer."""
        return {each: mixer.forward for each, mixer in self._mixers.items()}

    def keep(self, counts: np.ndarray) -> None:
        """Keep the first tokens of the latest block in every row, [rows]; 0 for an ended row."""
        kept, self._kept = self._kept, None
        for mixer in self._mixers.values():
            mixer.keep(counts)
        self._kept = None if kept is None else kept + counts

    def are_at(self, num_kept: int) -> bool:
        """Return whether every row has kept `num_kept` tokens behind the prompt."""
        return self._kept is not None and bool((self._kept == num_kept).all())

    def settle(self) -> None:
        """Bring the state of every row to its last kept token."""
        for mixer in self._mixers.values():
            mixer.settle()
