"""The interface of a drafter, which proposes the next tokens."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from lookahead_hf.config import check_int
from lookahead_hf.draft import DraftTree, Verdict
from lookahead_hf.utils import known_names

if TYPE_CHECKING:
    import torch

    from lookahead_hf.kernels.data import RowScan, TopKCounts
    from lookahead_hf.rows import EncoderInputs, Rows
    from lookahead_hf.runner.outputs import HostCopy, PendingCopy


class BestTokens:
    """Finds the k best logits of nodes: in one kernel for all, or on demand."""

    def __init__(self, logits: torch.Tensor, top_k: int, few: int | None = None) -> None:
        """Take the logits, [rows, width, vocab], of which the `top_k` best are searched later.

        `few` are enough where no accepted path ends.
        """
        self._top_k, self._few = top_k, few
        self._width = logits.shape[1]
        self._flat = logits.detach().flatten(0, 1)  # [rows * width, vocab]
        self._pending: PendingCopy | None = None
        self._held: np.ndarray | None = None
        self._bits: np.ndarray | None = None

    def prefetch(self, copy: HostCopy) -> None:
        """Start the search on the device and add its result to the copy to the host."""
        from lookahead_hf.kernels import backend

        device = self._flat.device
        if device.type != "cpu" or backend(device) == "triton":
            from lookahead_hf.kernels.data import TopKCounts

            wanted = None
            if copy.walk is not None and copy.num_nodes is not None and self._few is not None:
                wanted = TopKCounts(copy.walk, copy.num_nodes, min(self._few, self._flat.shape[1]))
            self._pending = copy.add(_pack(self._flat, self._top_k, copy.scan, wanted))

    def take(
        self, rows: np.ndarray, places: np.ndarray, counts: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the best tokens at places of rows, [nodes] each, and their probabilities.

        Both are [nodes, most of counts], best first, padded with -1. On a CPU only `counts`,
        [nodes], are searched, and the probabilities are approximate.
        """
        if counts is None:
            counts = np.full(len(rows), self._top_k)
        which, most = rows * self._width + places, int(counts.max(initial=0))
        if self._pending is None and self._flat.device.type == "cpu":
            from lookahead_hf.ngram_pool.logits_memory import top_rows

            if self._bits is None:
                self._bits = _bits(self._flat)
            return top_rows(self._bits, which, counts)
        if self._held is None:
            on_way = self._pending
            self._held = on_way.take() if on_way else _pack(self._flat, self._top_k).cpu().numpy()
        tokens, probs = self._held[:, which, :most]
        return _padded(tokens.astype(np.int32), most, -1), _padded(probs, most, 0.0)


def _pack(
    logits: torch.Tensor, top_k: int, scan: RowScan | None = None, wanted: TopKCounts | None = None
) -> torch.Tensor:
    """Return tokens and probabilities as one float32 tensor [2, rows, k], for a single copy.

    float32 holds whole numbers up to 2**24, more than any vocabulary has.
    """
    import torch

    from lookahead_hf.kernels import topk_rows

    values, ids, log_sum = topk_rows(logits, min(top_k, logits.shape[1]), scan, wanted)
    return torch.stack([ids.float(), (values - log_sum[:, None]).exp()])


def _bits(logits: torch.Tensor) -> np.ndarray:
    """Return the bit patterns of CPU logits: int16 of bfloat16, otherwise int32 of float32."""
    import torch

    is_half = logits.dtype == torch.bfloat16
    logits = logits if is_half else logits.float()
    bits: np.ndarray = logits.view(torch.int16 if is_half else torch.int32).numpy()
    return np.ascontiguousarray(bits)  # the compiled search knows one layout


def _padded(values: np.ndarray, top_k: int, fill: float) -> np.ndarray:
    wide = np.full((len(values), top_k), fill, values.dtype)
    wide[:, : values.shape[1]] = values
    return wide


@dataclass(frozen=True, eq=False)
class Traits:
    """What the library has to know of a drafter.

    Attributes:
        buckets: Number of classes of its proposals; `Evidence.bucket` is below it.
        prior: Acceptance rate of each bucket before anything was learned, [buckets], or of all.
        needs: What `observe` reads beside texts and logits: "hidden_states", and "best_tokens" with
            their number at a node and where an accepted path ends.
        widens: Whether further nodes cost it little, if another drafter sorts them.
        sees_all: Whether it observes also steps in which it is not asked.
    """

    buckets: int = 1
    prior: Any = 0.3
    needs: Mapping[str, Any] = field(default_factory=dict)
    widens: bool = False
    sees_all: bool = True

    def __post_init__(self) -> None:
        check_int("buckets", self.buckets, 1, 2**31)
        rates = np.asarray(self.prior)
        if rates.shape not in ((), (self.buckets,)) or rates.dtype.kind not in "iuf":
            raise ValueError(f"prior must be {self.buckets} rates or one, not {self.prior!r}")
        if not ((rates >= 0) & (rates <= 1)).all():
            raise ValueError(f"prior must be rates between 0 and 1, not {self.prior!r}")
        if wrong := next((name for name in self.needs if name not in NEEDS), None):
            raise ValueError(f"needs {wrong!r}: {known_names(NEEDS)}")
        prior = np.broadcast_to(rates, self.buckets).astype(np.float32)
        object.__setattr__(self, "prior", prior)


NEEDS = ("hidden_states", "best_tokens")


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """A verified step.

    Attributes:
        rows: The texts, which hold the emitted tokens already.
        draft: What was verified.
        verdict: What was accepted and emitted.
        logits: The target's raw logits, [rows, 1 + max nodes, vocab]: index 0 follows the last
            token, index 1 + i follows node i of the row. They are valid in `observe` only.
        hidden_states: The target's last ones at the same places, if the drafter needs them.
    """

    rows: Rows
    draft: DraftTree
    verdict: Verdict
    logits: torch.Tensor
    hidden_states: torch.Tensor | None = None
    _best: BestTokens | None = None

    def best_tokens(
        self, rows: np.ndarray, places: np.ndarray, counts: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the `counts` best tokens at places of rows, [places] each; see `BestTokens.take`.

        A device has begun the search beside the verification, for a drafter that needs them.
        """
        best = self._best or BestTokens(self.logits, int(counts.max(initial=1)))
        return best.take(rows, places, counts)


class Drafter(ABC):
    """Proposes the next tokens of every live row; the target decides which of them are right.

    A drafter of your own overrides `propose`, and the other methods if it remembers anything. One
    object serves one call at a time. An exception in any method costs the call its speed, never its
    text. Methods may write into their arguments, which are copies, except logits and hidden states.

    Attributes:
        name: Its name in statistics.
        traits: What the library has to know of it.
    """

    name: ClassVar[str] = "custom"
    traits: Traits = Traits()
    _rates: np.ndarray | None = None

    @property
    def rates(self) -> np.ndarray:
        """Acceptance rate of each bucket, [buckets] float32; the library updates it."""
        if self._rates is None:
            self._rates = np.array(self.traits.prior)
        return self._rates

    @rates.setter
    def rates(self, rates: np.ndarray) -> None:
        self._rates = rates

    @property
    def kept_as(self) -> str:
        """What its rates are kept under between calls, beside its name."""
        return f"{type(self).__module__}.{type(self).__qualname__}"

    def begin(self, rows: Rows) -> None:  # noqa: B027 (an optional hook)
        """Start a call; `rows` holds the prompts and the first token that each row emitted."""

    @abstractmethod
    def propose(self, rows: Rows, max_nodes: int) -> DraftTree:
        """Guess what comes after `rows.context(row)` for each row that is live.

        Args:
            rows: The texts so far.
            max_nodes: Most nodes that a row may have; further nodes are cut off.

        Returns:
            One tree per row (`DraftTree.from_chains` takes plain lists); finished rows get none.
        """

    def observe(self, step: Step) -> None:  # noqa: B027 (an optional hook)
        """Learn from a step."""

    def begin_row(self, rows: Rows, row: int) -> None:
        """Start a new text in a row, which holds its prompt and first token.

        By default, all rows begin again.
        """
        self.begin(rows)

    def end_row(self, rows: Rows, row: int) -> None:  # noqa: B027 (an optional hook)
        """End the text of a row, which another text may take over."""

    def end(self, rows: Rows) -> None:  # noqa: B027 (an optional hook)
        """End the call, also after an exception."""


class Refiner(Drafter):
    """A drafter that changes the merged draft of all others while it `refines` some row."""

    refines = False
    is_listed = False  # in statistics: whether any row was refined

    def propose(self, rows: Rows, max_nodes: int) -> DraftTree:
        return DraftTree.empty(rows.num_rows)

    @abstractmethod
    def refine(
        self, rows: Rows, tree: DraftTree, source: int, max_nodes: int, max_depth: np.ndarray
    ) -> DraftTree:
        """Change the merged draft of all sources, of which this is number `source`.

        A row keeps at most `max_nodes` nodes, none deeper than `max_depth`, [rows].
        """


class Guard:
    """Runs the parts of a call's drafting. A part that raises is left out, with one warning.

    Attributes:
        works: Whether each part has never raised.
        seconds: How long each part took.
    """

    def __init__(self, warnings: Sequence[Callable[[Exception], None]]) -> None:
        """Take the function of each part that warns of its error."""
        self._warnings = warnings
        self.works, self.seconds = [True] * len(warnings), [0.0] * len(warnings)

    def run(
        self, part: int, function: Callable[..., Any], *arguments: Any, always: bool = False
    ) -> Any:
        """Call a function of a part; return None if it raises or the part is left out."""
        if not (self.works[part] or always):
            return None
        start = perf_counter()
        try:
            return function(*arguments)
        except Exception as error:
            if self.works[part]:
                self.works[part] = False
                self._warnings[part](error)
        finally:
            self.seconds[part] += perf_counter() - start
        return None


def warn_of_failure(name: str, error: Exception, part: str = "this call") -> None:
    """Warn that a drafter is left out of a call or a part of it, since it raised an error."""
    warnings.warn(
        f"the drafter {name!r} failed and is left out of {part}: {type(error).__name__}: {error}",
        RuntimeWarning,
        stacklevel=3,
    )


@dataclass(frozen=True)
class TargetCall:
    """The target's call that an assistant drafts for.

    Attributes:
        vocab_size: Token ids of the target; higher ids of the assistant are never drafted.
        encoder_inputs: Inputs of the target's encoder by row, and their mask.
        processors: Logits processors; those that only read the scores shape what is drawn from.
        draws: Whether to draw drafts and to add their distributions, for rejection sampling.
        settings: Settings for assistants, by their names in generation configs.
    """

    vocab_size: int | None = None
    encoder_inputs: EncoderInputs | None = None
    processors: Sequence[Any] = ()
    draws: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
