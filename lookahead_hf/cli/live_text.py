"""Show a text while it is generated, with accepted draft tokens marked."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tokenizers.decoders import DecodeStream

from lookahead_hf.cli.screen import Screen
from lookahead_hf.draft import DraftTree, Verdict
from lookahead_hf.drafting.drafter import Drafter

if TYPE_CHECKING:
    import torch

    from lookahead_hf.rows import Rows

ACCEPTED_STYLE = "bold green"


class StepRecorder(Drafter):
    """Proposes nothing; records for each emitted token whether it was an accepted draft token."""

    name = "recorder"

    def __init__(self) -> None:
        self.was_drafted: list[bool] = []
        self.listener: Callable[[], None] = lambda: None  # called after every step

    def begin(self, rows: Rows) -> None:
        self.was_drafted = [False]  # the first token comes from the prefill

    def propose(self, rows: Rows, max_nodes: int) -> DraftTree:
        return DraftTree.empty(rows.num_rows)

    def observe(self, rows: Rows, draft: DraftTree, verdict: Verdict, logits: torch.Tensor) -> None:
        accepted, emitted = int(verdict.num_accepted[0]), int(verdict.num_emitted[0])
        self.was_drafted += [index < accepted for index in range(emitted)]
        self.listener()


class LiveText:
    """A streamer for one text. Tokens of a step appear together, in colour where accepted.

    Args:
        tokenizer: Turns ids into text. One that is not of the package tokenizers shows the text at
            its end.
        screen: Where the text goes.
        recorder: Knows where each token came from; None marks nothing.
    """

    def __init__(self, tokenizer: Any, screen: Screen, recorder: StepRecorder | None = None):
        self._tokenizer, self._screen, self._recorder = tokenizer, screen, recorder
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._stream = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._num_shown = 0
        self._shown = ""
        self._past_prompt = False
        if recorder is not None:
            recorder.listener = self._show_known

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt first, then tokens, [1] or [1, tokens]."""
        if not self._past_prompt:
            self._past_prompt = True
            return
        self._ids += value.reshape(-1).tolist()
        self._show_known()

    def _show_known(self) -> None:
        """Show the tokens that have arrived and whose origin is known."""
        known = len(self._ids) if self._recorder is None else len(self._recorder.was_drafted)
        self._show(min(known, len(self._ids)))

    def end(self) -> None:
        """Show what was held back, such as half a character; the text is complete."""
        self._show(len(self._ids))
        text = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        if text.startswith(self._shown):
            self._screen.write(text[len(self._shown) :])
        self._screen.line()

    def _show(self, count: int) -> None:
        """Show tokens up to `count`; bytes that are not a whole character yet wait for the next."""
        for index in range(self._num_shown, count):
            fresh = self._decoded(self._ids[index])
            flags = self._recorder.was_drafted if self._recorder else []
            is_accepted = index < len(flags) and flags[index]
            self._screen.write(fresh, ACCEPTED_STYLE if is_accepted else "")
            self._shown += fresh
        self._num_shown = max(count, self._num_shown)

    def _decoded(self, token: int) -> str:
        """What a token adds to the text."""
        if self._backend is None:
            return ""
        try:
            return self._stream.step(self._backend, token) or ""
        except Exception:  # bytes that no text has; `end` shows the rest
            self._backend = None
            return ""
