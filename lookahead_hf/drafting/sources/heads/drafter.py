"""Base class of drafters that read the target's last hidden states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch

from lookahead_hf.config import check_int
from lookahead_hf.draft import DraftTree, Verdict
from lookahead_hf.drafting.drafter import BuiltInDrafter
from lookahead_hf.drafting.sources.assistant.growth import (
    NUM_BUCKETS,
    Growth,
    Likeliest,
    prior_rates,
    tree_of,
)
from lookahead_hf.model_state import kept, state_of
from lookahead_hf.rows import Rows
from lookahead_hf.runner.cuda.transfer import pinned

MOST_TOKENS = 64
"""Upper limit of options that count tokens."""


class HeadsDrafter(BuiltInDrafter):
    """Drafts from heads, each of which predicts the token at one place ahead of the text."""

    num_buckets = NUM_BUCKETS
    reads_hidden_states: ClassVar[bool] = True

    def __init__(self, top_k: int, beam: int, vocab_size: int | None) -> None:
        check_int(f"{self.name}: top_k", top_k, 1, MOST_TOKENS)
        check_int(f"{self.name}: beam", beam, 1, MOST_TOKENS)
        self._picks, self._beam = Likeliest(top_k, vocab_size), beam
        self.rates = self.prior()

    def prior(self) -> np.ndarray:
        return prior_rates()

    def observe(self, rows: Rows, draft: DraftTree, verdict: Verdict, logits: torch.Tensor) -> None:
        if self.hidden_states is None:
            raise RuntimeError("the model's forward returns no hidden states")
        self._keep(rows, verdict, self.hidden_states)
        self.hidden_states = None  # the next step overwrites them

    def _keep(self, rows: Rows, verdict: Verdict, states: torch.Tensor) -> None:
        """Keep what is needed of a step's hidden states, [rows, width, hidden]."""
        raise NotImplementedError

    def _tree(self, rows: Rows, logits: torch.Tensor) -> DraftTree:
        """Return the live rows' drafts; logits of the places ahead are [rows, places, vocab]."""
        num_rows, depths = logits.shape[:2]
        row, place = np.indices((num_rows, depths)).reshape(2, -1)
        tokens, classes, _ = self._picks.pick(logits, row, place)
        growths = []
        for row_number, is_live in enumerate(rows.live.tolist()):
            growth = Growth([rows.last_token(row_number)] if is_live else [])
            for at in range(row_number * depths, (row_number + 1) * depths):
                places = [at] * len(growth.frontier)
                growth.extend((tokens[places], classes[places], None), self.rates, self._beam, 0.0)
            growths.append(growth)
        return tree_of(growths)


def gather_states(states: torch.Tensor, places: np.ndarray) -> torch.Tensor:
    """Copy the hidden states at `places`, [rows, count] int64, without waiting for the device."""
    return states.take_along_dim(on_device(places, states.device)[..., None], 1)


def on_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy numbers to a device without waiting for it."""
    return pinned(array, device).to(device, non_blocking=True)


class Heads(dict[str, tuple[Any, Any]]):
    """Loaded heads by the drafter's name, each with the key it was loaded for."""

    def release(self) -> None:
        """Do nothing: a call in progress keeps its heads until it ends."""


def kept_heads(model: Any, name: str, key: tuple[Any, ...], load: Callable[[], Any]) -> Any:
    """Return the heads that are kept with a model, loaded again if the key has changed."""
    heads = kept(model, Heads, Heads)
    with state_of(model).lock:
        found = heads.get(name)
        if found is None or found[0] != key:
            found = heads[name] = key, load()
        return found[1]
