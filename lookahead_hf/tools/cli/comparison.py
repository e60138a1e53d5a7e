"""Compares plain and speculative generation, with text as it is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tokenizers.decoders import DecodeStream

from lookahead_hf.config import DEFAULT_DRAFTERS, SpeculativeConfig
from lookahead_hf.draft import DraftTree
from lookahead_hf.drafting.drafter import Drafter, Step
from lookahead_hf.tools.cli.measuring import Call, timed_call
from lookahead_hf.tools.cli.screen import Screen

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

    def observe(self, step: Step) -> None:
        self.listener(int(step.verdict.num_accepted[0]))


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


Messages = Sequence[dict[str, str]]
"""A conversation, each message with its role and its content."""


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@dataclass(frozen=True)
class Stage:
    """A model, its tokenizer, its settings and the screen, shared by all texts of a command."""

    model: Any
    tokenizer: Any
    generation: dict[str, Any]  # arguments of `generate`
    screen: Screen
    drafting: dict[str, Any] = field(default_factory=dict)  # further ones of speculative calls
    seed: int | None = None  # of every call; None keeps the generator as it is

    @property
    def dtype(self) -> str:
        return str(self.model.dtype).removeprefix("torch.")

    @property
    def config(self) -> SpeculativeConfig:
        return self.drafting.get("speculative") or SpeculativeConfig()

    def encode(self, *chats: str | Messages) -> dict[str, Any]:
        """Encode questions or conversations as arguments of `generate`: ids, mask, pad token."""
        tokenizer = self.tokenizer
        conversations = [user(chat) if isinstance(chat, str) else list(chat) for chat in chats]
        is_chat = bool(tokenizer.chat_template)
        if is_chat:
            texts = tokenizer.apply_chat_template(
                conversations, add_generation_prompt=True, tokenize=False
            )
        else:
            texts = ["\n\n".join(message["content"] for message in each) for each in conversations]
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        padding = {"padding": True, "padding_side": "left"} if len(texts) > 1 else {}
        inputs = tokenizer(texts, return_tensors="pt", add_special_tokens=not is_chat, **padding)
        device = "cpu" if self.model is None else self.model.device
        chosen = {name: inputs[name].to(device) for name in ("input_ids", "attention_mask")}
        return {**chosen, "pad_token_id": tokenizer.pad_token_id}


def run_plain(stage: Stage, inputs: dict[str, Any]) -> Call:
    """Generate without speculation and show the text live, or several of them at the end."""
    return _run(stage, inputs, LiveText(stage.tokenizer, stage.screen), {"speculative": False})


def run_speculative(stage: Stage, inputs: dict[str, Any]) -> Call:
    """Generate speculatively and show the text live, accepted tokens marked.

    ValueError if the call cannot be speculated.
    """
    recorder, config = StepRecorder(), stage.config
    drafters = (*(config.drafters or DEFAULT_DRAFTERS), recorder)
    config = replace(config, drafters=drafters, on_fallback="error")
    text = LiveText(stage.tokenizer, stage.screen, recorder)
    call = _run(stage, inputs, text, {**stage.drafting, "speculative": config})
    assert call.stats is not None
    sources = {name: s for name, s in call.stats.per_source.items() if name != recorder.name}
    return replace(call, stats=replace(call.stats, per_source=sources))


def _run(stage: Stage, inputs: dict[str, Any], text: LiveText, extra: dict[str, Any]) -> Call:
    is_live = len(inputs["input_ids"]) == 1
    streamed = {"streamer": text} if is_live else {}
    call = timed_call(stage.model, {**inputs, **stage.generation, **extra, **streamed}, stage.seed)
    if not is_live:
        for each in stage.tokenizer.batch_decode(call.rows, skip_special_tokens=True):
            stage.screen.line(each)
    return call
