"""Generates from prompts plainly or speculatively, and shows the text live."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lookahead_hf.cli.live_text import LiveText, StepRecorder
from lookahead_hf.cli.measuring import Call, timed_call
from lookahead_hf.cli.screen import Screen
from lookahead_hf.config import DEFAULT_DRAFTERS, SpeculativeConfig

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
