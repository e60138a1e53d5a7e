"""Drafts from the target's own logits: what it expected after the same tokens before.

Token recycling (arXiv 2408.08696) keeps the best logits of every verified token. Keyed by two
tokens instead of one, and with probabilities, they predict much better (STAND, arXiv 2506.04708).
The other candidates of the last logits are guesses for the token after next (LogitSpec, arXiv
2507.01449).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from lookahead_hf.config import check_int
from lookahead_hf.draft import DraftTree
from lookahead_hf.drafting.drafter import Drafter, Step, Traits

if TYPE_CHECKING:
    from lookahead_hf.ngram_pool.logits_memory import LogitsMemory
    from lookahead_hf.rows import Rows

MIN_REACH = 1e-4  # Least probability of a node worth verifying


MAX_TOP_K = 64

MANY_ROWS = 32
"""Rows from which on nodes with rejected parents teach nothing, since the others fill the memory.
That costs no tokens in batches of 32, and up to 2 % in smaller ones."""

# Measured on texts of a 135M model: acceptance rates by classes of rank (rows) and of probability.
# A first rank is never improbable and a late one never probable: the ends of the rows are guesses.
PAIR_RATES = (
    (0.25, 0.27, 0.30, 0.38, 0.39, 0.43, 0.50, 0.58, 0.75, 0.87),
    (0.02, 0.04, 0.07, 0.09, 0.12, 0.20, 0.25, 0.25, 0.25, 0.25),
    (0.02, 0.04, 0.06, 0.08, 0.11, 0.11, 0.11, 0.11, 0.11, 0.11),
    (0.01, 0.02, 0.03, 0.05, 0.06, 0.06, 0.06, 0.06, 0.06, 0.06),
    (0.01, 0.02, 0.03, 0.04, 0.04, 0.04, 0.04, 0.04, 0.04, 0.04),
    (0.01, 0.01, 0.02, 0.02, 0.02, 0.02, 0.02, 0.02, 0.02, 0.02),
)
SINGLE_RATES = (
    (0.10, 0.11, 0.14, 0.16, 0.19, 0.25, 0.30, 0.40, 0.42, 0.48),
    (0.03, 0.06, 0.06, 0.07, 0.11, 0.15, 0.15, 0.15, 0.15, 0.15),
    (0.02, 0.04, 0.05, 0.09, 0.10, 0.10, 0.10, 0.10, 0.10, 0.10),
    (0.02, 0.03, 0.03, 0.05, 0.05, 0.05, 0.05, 0.05, 0.05, 0.05),
    (0.02, 0.02, 0.02, 0.04, 0.04, 0.04, 0.04, 0.04, 0.04, 0.04),
    (0.01, 0.01, 0.02, 0.02, 0.02, 0.02, 0.02, 0.02, 0.02, 0.02),
)
NEXT_RATES = (
    (0.07, 0.06, 0.04, 0.05, 0.05, 0.04, 0.05, 0.05, 0.05, 0.05),
    (0.05, 0.02, 0.03, 0.02, 0.05, 0.03, 0.03, 0.03, 0.03, 0.03),
    (0.05, 0.03, 0.02, 0.02, 0.02, 0.02, 0.02, 0.02, 0.02, 0.02),
    (0.02, 0.03, 0.02, 0.02, 0.02, 0.02, 0.02, 0.02, 0.02, 0.02),
    (0.02, 0.02, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01),
    (0.02, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01),
)


class RecyclingDrafter(Drafter):
    """Grows its tree from the best logits of verified nodes, accepted or not.

    The rows of a call share one memory, which starts empty unless `keep` is set.
    """

    name: ClassVar[str] = "recycling"

    def __init__(
        self, *, top_k: int = 12, num_next: int = 48, capacity: int = 16_384, keep: bool = False
    ) -> None:
        """Validate the options.

        Args:
            top_k: Next tokens to remember per context.
            num_next: Candidates of the last logits to try as the token after next. Each is
                unlikely, but a large tree has room: with 12, trees of 64 nodes had 3.5 % fewer
                tokens per step.
            capacity: Contexts to remember; beyond that, new ones replace old ones.
            keep: Whether the memory outlives a call of this object.

        Raises:
            ValueError: An option is out of its range.
        """
        check_int("recycling: top_k", top_k, 1, MAX_TOP_K)
        check_int("recycling: num_next", num_next, 1, MAX_TOP_K)
        check_int("recycling: capacity", capacity, 1, 2**24)
        if not isinstance(keep, bool):
            raise ValueError(f"recycling: keep must be True or False, not {keep!r}")
        self._top_k, self._num_next = top_k, num_next
        self._capacity, self._keep = capacity, keep
        self._memory: LogitsMemory | None = None
        rates = np.ravel([PAIR_RATES, SINGLE_RATES, NEXT_RATES])
        self.traits = Traits(
            rates.size,
            rates,
            needs={"best_tokens": (top_k, max(top_k, num_next))},
            widens=True,
            sees_all=False,  # searching the best logits is expensive
        )

    def begin(self, rows: Rows) -> None:
        from lookahead_hf.ngram_pool.logits_memory import LogitsMemory

        if self._memory is None or not self._keep:
            self._memory = LogitsMemory(self._top_k, self._capacity)
        self._max_nodes = self._num_next
        shape = rows.num_rows, self._num_next
        self._next_tokens = np.full(shape, -1, np.int32)
        self._next_probs = np.zeros(shape, np.float32)

    def begin_row(self, rows: Rows, row: int) -> None:
        self._next_tokens[row] = -1

    def propose(self, rows: Rows, max_nodes: int) -> DraftTree:
        from lookahead_hf.drafting.sources._recycling_numba import grow_trees

        memory, self._max_nodes = self._memory, max_nodes
        assert memory is not None, "begin() comes first"
        offsets, tokens, parents, depth, score, entries, buckets = grow_trees(
            memory.keys, memory.tokens, memory.probs, rows.last_two(),
            self._next_tokens, self._next_probs, rows.live, self.rates, max_nodes, MIN_REACH,
        )  # fmt: skip
        return DraftTree(offsets, tokens, parents, depth, score).with_buckets(buckets, entries)

    def observe(self, step: Step) -> None:
        assert self._memory is not None, "begin() comes first"
        rows, draft, verdict = step.rows, step.draft, step.verdict
        self._next_tokens[:] = -1
        live = np.flatnonzero(verdict.live)
        if not len(live):
            return
        from lookahead_hf.drafting.sources._recycling_numba import verified_contexts

        before, last, row, place, ends = verified_contexts(
            self._memory.keys, rows.last_two(verdict.num_emitted), draft.row_offsets,
            draft.token_ids, draft.parents, verdict.path_offsets, verdict.path, verdict.live,
            len(live) < MANY_ROWS,
        )  # fmt: skip
        # A tree has no room for more other candidates than it has nodes.
        most = max(self._top_k, min(self._num_next, self._max_nodes))
        counts = np.full(len(last), self._top_k)
        counts[ends] = most
        tokens, probs = step.best_tokens(row, place, counts)
        self._memory.remember(before, last, tokens, probs)
        self.note_rejected(live, rows.last_tokens[live], tokens[ends], probs[ends])

    def end(self, rows: Rows) -> None:
        if not self._keep:
            self._memory = None

    def note_rejected(
        self,
        rows: np.ndarray,  # [noted] int64
        emitted: np.ndarray,  # [noted] int64
        tokens: np.ndarray,  # [noted, tokens] int32
        probs: np.ndarray,  # [noted, tokens] float32
    ) -> None:
        """Keep the other tokens that the target considered in place of each row's last one."""
        from lookahead_hf.drafting.sources._recycling_numba import note_rejected

        note_rejected(rows, emitted, tokens, probs, self._next_tokens, self._next_probs)
