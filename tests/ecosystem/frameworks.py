"""More libraries that build applications on `generate`."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.ecosystem.callers import GREEDY, NEW_TOKENS, PROMPT
from tests.ecosystem.room import ENTRY, Caller, Room, asking


def _llama_index(room: Room, speculative: Any) -> Any:
    from llama_index.llms.huggingface import HuggingFaceLLM

    return HuggingFaceLLM(
        model=room.enabled(speculative),
        tokenizer=room.tokenizer(),
        max_new_tokens=NEW_TOKENS,
        context_window=256,
        generate_kwargs={"do_sample": False, **asking(speculative)},
    )


def haystack(room: Room, speculative: Any) -> Any:
    from haystack.dataclasses import ChatMessage
    from haystack_integrations.components.generators.transformers import TransformersChatGenerator

    chat = TransformersChatGenerator(
        model=room.folder(None),
        task="text-generation",
        generation_kwargs={**GREEDY, **asking(speculative)},
    )
    chat.warm_up()
    return chat.run([ChatMessage.from_user(PROMPT)])["replies"][0].text


def outlines_json(room: Room, speculative: Any) -> Any:
    """A choice among two answers, enforced token by token by a stateful processor."""
    from typing import Literal

    import outlines

    model = outlines.from_transformers(room.enabled(speculative), room.tokenizer())
    choice = Literal["abc abc abc abc abc abc abd", "abc abc abc abc abc abc abe"]
    return model(PROMPT, choice, max_new_tokens=40, do_sample=False, **asking(speculative))


def inspect_ai(room: Room, speculative: Any) -> Any:
    from inspect_ai.model import GenerateConfig, get_model

    model = get_model(
        f"hf/{room.folder(speculative)}",
        config=GenerateConfig(max_tokens=NEW_TOKENS, temperature=0.001, seed=0),
        device="cpu",
        memoize=False,
    )
    return asyncio.run(model.generate(PROMPT)).completion


INDEX = '`enable(model)` and `HuggingFaceLLM(model=model, generate_kwargs={"speculative": True})`'
INDEX_NEEDS = ("llama_index.llms.huggingface",)
HAYSTACK = '`generation_kwargs={"speculative": True}`'
HAYSTACK_NEEDS = ("haystack_integrations.components.generators.transformers",)

CALLERS = [
    Caller(
        "LlamaIndex, complete",
        INDEX,
        lambda room, asked: _llama_index(room, asked).complete(PROMPT).text,
        INDEX_NEEDS,
    ),
    Caller("Haystack, run", HAYSTACK, haystack, HAYSTACK_NEEDS, auto=True),
    Caller(
        "outlines, a choice",
        "`enable(model)` and `from_transformers(model, ...)(prompt, choice, speculative=True)`",
        outlines_json,
        ("outlines",),
        note="the processor keeps a guide per row",
    ),
    Caller(
        "inspect-ai",
        ENTRY,
        inspect_ai,
        ("inspect_ai",),
        note="batches run in their own thread",
        auto=True,
    ),
]
