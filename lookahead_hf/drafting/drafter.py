"""The interface of a drafter, which proposes the next tokens."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from lookahead_hf.draft import DraftTree, Verdict

if TYPE_CHECKING:
    import torch

    from lookahead_hf.rows import EncoderInputs, Rows
    from lookahead_hf.runner.transfer import HostCopy


class Drafter(ABC):
    """Proposes the next tokens of every live row; the target decides which of them are right.

    A drafter of your own overrides `propose`, and the other methods if it remembers anything. One
    object serves one call at a time. An exception in any method costs the call its speed, never its
    text. Methods may write into their arguments, which are copies, except the logits of `observe`.

    Attributes:
        name: Its name in statistics.
        rates: Learned acceptance rate of each bucket, [num_buckets] float32; the library updates
            it.
    """

    name: ClassVar[str] = "custom"
    rates: np.ndarray

    @property
    def num_buckets(self) -> int:
        """Number of classes of proposals; `Evidence.bucket` is below it."""
        return 1

    def prior(self) -> np.ndarray:
        """Acceptance rate of each bucket before anything was learned, [num_buckets] float32."""
        return np.full(self.num_buckets, 0.3, np.float32)

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

    def observe(  # noqa: B027 (an optional hook)
        self, rows: Rows, draft: DraftTree, verdict: Verdict, logits: torch.Tensor
    ) -> None:
        """Learn from a step; `rows` holds the emitted tokens already.

        Args:
            rows: The texts so far.
            draft: What was verified.
            verdict: What was accepted and emitted.
            logits: The target's raw logits, [rows, 1 + max nodes, vocab]: index 0 follows the last
                token, index 1 + i follows node i of the row. They are valid during this call only.
        """

    def begin_row(self, rows: Rows, row: int) -> None:
        """Start a new text in a row, which holds its prompt and first token.

        By default, all rows begin again.
        """
        self.begin(rows)

    def end_row(self, rows: Rows, row: int) -> None:  # noqa: B027 (an optional hook)
        """End the text of a row, which another text may take over."""

    def end(self, rows: Rows) -> None:  # noqa: B027 (an optional hook)
        """End the call, also after an exception."""


class BuiltInDrafter(Drafter):
    """A drafter of this package, which may read a step's logits while the device still works.

    If it `reads_hidden_states`, it gets the target's last ones, [rows, width, hidden]: of the
    prompt at `begin` (None if drafting begins later), of the step at `observe`.
    """

    sees_all: ClassVar[bool] = True  # whether it observes also steps in which it is not asked
    widens: ClassVar[bool] = False  # further nodes cost it little, if another source sorts them
    is_listed: bool = True  # in statistics
    reads_hidden_states: ClassVar[bool] = False
    hidden_states: torch.Tensor | None = None

    def prepare(self, logits: torch.Tensor) -> None:  # noqa: B027 (an optional hook)
        """Begin to read the logits of a launched step, whose verdict is not known yet."""

    def bring(self, copy: HostCopy) -> None:  # noqa: B027 (an optional hook)
        """Add what `observe` needs on the host to the copy of the verdict, if a device verifies."""


class Guard:
    """Runs functions of one part of drafting, which is left out of the call once one raises.

    `works` says whether none has raised so far, `seconds` how long they took.
    """

    def __init__(self, warn: Callable[[Exception], None]) -> None:
        self._warn, self.works, self.seconds = warn, True, 0.0

    def run(self, function: Callable[..., Any], *arguments: Any, always: bool = False) -> Any:
        """Call a function; return None if it raises or the part is left out."""
        if not (self.works or always):
            return None
        start = perf_counter()
        try:
            return function(*arguments)
        except Exception as error:
            if self.works:
                self.works = False
                self._warn(error)
        finally:
            self.seconds += perf_counter() - start
        return None


def warn_of_failure(name: str, error: Exception, part: str = "this call") -> None:
    """Warn that a drafter is left out of a call or a part of it, since it raised an error."""
    warnings.warn(
        f"the drafter {name!r} failed and is left out of {part}: {type(error).__name__}: {error}",
        RuntimeWarning,
        stacklevel=3,
    )


def class_path(drafter: object) -> str:
    return f"{type(drafter).__module__}.{type(drafter).__qualname__}"


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
