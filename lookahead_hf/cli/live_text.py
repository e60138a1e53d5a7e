"""Shows a text while it is generated, with accepted draft tokens marked."""

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
    """Proposes nothing; tells how many draft tokens of its row every step has accepted."""

    name = "recorder"

    def __init__(self) -> None:
        self.listener: Callable[[int], None] = lambda num_accepted: None

    def begin(self, rows: Rows) -> None:
        self.listener(0)  # the first token comes from the prefill

    def propose(self, rows: Rows, max_nodes: int) -> DraftTree:
        return DraftTree.empty(rows.num_rows)

    def observe(self, rows: Rows, draft: DraftTree, verdict: Verdict, logits: torch.Tensor) -> None:
        self.listener(int(verdict.num_accepted[0]))


class LiveText:
    """A streamer for one text. Tokens of a step appear together, in colour where accepted.

    Without a recorder, which tells when a step is complete, every token is shown at once. A
    tokenizer that is not of the package tokenizers shows the text at its end.
    """

    def __init__(self, tokenizer: Any, screen: Screen, recorder: StepRecorder | None = None):
        self._tokenizer, self._screen, self._is_marked = tokenizer, screen, recorder is not None
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._stream = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._num_shown = 0
        self._shown = ""
        self._past_prompt = False
        self._failure: OSError | None = None
        if recorder is not None:
            recorder.listener = self._show_step

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt first, then tokens, [1] or [1, tokens]."""
        if self._failure is not None:
            raise self._failure
        if not self._past_prompt:
            self._past_prompt = True
            return
        self._ids += value.reshape(-1).tolist()
        if not self._is_marked:
            self._show()

    def end(self) -> None:
        """Show what was held back, such as half a character; the text is complete."""
        self._show()
        text = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        if text.startswith(self._shown):
            self._screen.write(text[len(self._shown) :])
        self._screen.line()

    def _show_step(self, num_accepted: int) -> None:
        """Show the tokens of a step; what fails waits for `put`, which can end the call."""
        try:
            self._show(num_accepted)
        except OSError as error:
            self._failure = error

    def _show(self, num_accepted: int = 0) -> None:
        """Show the new tokens, of which the first `num_accepted` were drafted.

        Bytes that are not a whole character yet wait for the next token.
        """
        for index, token in enumerate(self._ids[self._num_shown :]):
            fresh = self._decoded(token)
            self._screen.write(fresh, ACCEPTED_STYLE if index < num_accepted else "")
            self._shown += fresh
        self._num_shown = len(self._ids)

    def _decoded(self, token: int) -> str:
        if self._backend is None:
            return ""
        try:
            return self._stream.step(self._backend, token) or ""
        except Exception:  # bytes that no text has; `end` shows the rest
            self._backend = None
            return ""
