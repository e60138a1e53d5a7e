"""More libraries that build applications on `generate`."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.ecosystem.callers import GREEDY, NEW_TOKENS, PROMPT
from tests.ecosystem.room import Caller, Room


def llama_index_complete(room: Room, speculative: Any) -> Any:
    return _llama_index(room, speculative).complete(PROMPT).text


def llama_index_stream(room: Room, speculative: Any) -> Any:
    return [piece.delta for piece in _llama_index(room, speculative).stream_complete(PROMPT)]


def _llama_index(room: Room, speculative: Any) -> Any:
    from llama_index.llms.huggingface import HuggingFaceLLM

    extra = {"speculative": speculative} if speculative else {}
    return HuggingFaceLLM(
        model=room.model(None),
        tokenizer=room.tokenizer(),
        max_new_tokens=NEW_TOKENS,
        context_window=256,
        generate_kwargs={"do_sample": False, **extra},
    )


def haystack(room: Room, speculative: Any) -> Any:
    from haystack.dataclasses import ChatMessage
    from haystack_integrations.components.generators.transformers import TransformersChatGenerator

    extra = {"speculative": speculative} if speculative else {}
    chat = TransformersChatGenerator(
        model=room.folder(None), task="text-generation", generation_kwargs={**GREEDY, **extra}
    )
    chat.warm_up()
    return chat.run([ChatMessage.from_user(PROMPT)])["replies"][0].text


def outlines_json(room: Room, speculative: Any) -> Any:
    """A choice among two answers, enforced token by token by a stateful processor."""
    from typing import Literal

    import outlines

    model = outlines.from_transformers(room.model(None), room.tokenizer())
    extra = {"speculative": speculative} if speculative else {}
    choice = Literal["abc abc abc abc abc abc abd", "abc abc abc abc abc abc abe"]
    return model(PROMPT, choice, max_new_tokens=40, do_sample=False, **extra)


def inspect_ai(room: Room, speculative: Any) -> Any:
    from inspect_ai.model import GenerateConfig, get_model

    model = get_model(
        f"hf/{room.folder(speculative)}",
        config=GenerateConfig(max_tokens=NEW_TOKENS, temperature=0.001, seed=0),
        device="cpu",
        memoize=False,
    )
    return asyncio.run(model.generate(PROMPT)).completion


CALLERS = [
    Caller(
        "LlamaIndex, complete",
        '`HuggingFaceLLM(..., generate_kwargs={"speculative": True})`',
        llama_index_complete,
        ("llama_index.llms.huggingface",),
    ),
    Caller(
        "LlamaIndex, stream_complete",
        '`HuggingFaceLLM(..., generate_kwargs={"speculative": True})`',
        llama_index_stream,
        ("llama_index.llms.huggingface",),
    ),
    Caller(
        "Haystack, TransformersChatGenerator",
        '`generation_kwargs={"speculative": True}`',
        haystack,
        ("haystack_integrations.components.generators.transformers",),
    ),
    Caller(
        "outlines, a choice",
        "`model(prompt, choice, speculative=True)`",
        outlines_json,
        ("outlines",),
        note="its processor keeps a guide per row",
    ),
    Caller(
        "inspect-ai",
        "`model.generation_config.speculative = True`",
        inspect_ai,
        ("inspect_ai",),
        note="runs batches in a thread of its own",
    ),
]
