"""Libraries and servers that call `generate` themselves."""

from __future__ import annotations

import copy
from threading import Thread
from typing import Any

import transformers

import lookahead_hf
from tests.ecosystem.room import Caller, Room, asking
from tests.helpers.models import tiny
from tests.helpers.speech import (
    tiny_whisper,
    wave,
    whisper_features,
    whisper_tokenizer,
)

NEW_TOKENS = 24
PROMPT = "abc abc abc"
SAID = [{"role": "user", "content": PROMPT}]
SHOWN = [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}]
GREEDY = {"max_new_tokens": NEW_TOKENS, "do_sample": False}


def _pipe(room: Room, speculative: Any) -> Any:
    build = lookahead_hf.pipeline if speculative else transformers.pipeline
    model = transformers.AutoModelForCausalLM.from_pretrained(room.folder(None)).eval()
    return build(
        "text-generation",
        model=model,
        tokenizer=room.tokenizer(),
        device="cpu",
        **asking(speculative),
    )


def text_generation_stop(room: Room, speculative: Any) -> Any:
    whole = _pipe(room, None)(PROMPT, return_full_text=False, **GREEDY)[0]["generated_text"]
    return _pipe(room, speculative)(PROMPT, stop_sequence=whole[10], **GREEDY)


def text_generation_streamer(room: Room, speculative: Any) -> Any:
    pipe = _pipe(room, speculative)
    streamer = transformers.TextIteratorStreamer(pipe.tokenizer, skip_prompt=True)
    worker = Thread(target=pipe, args=(PROMPT,), kwargs={**GREEDY, "streamer": streamer})
    worker.start()
    pieces = list(streamer)
    worker.join()
    return pieces


def text_generation_enabled(room: Room, speculative: Any) -> Any:
    pipe = _pipe(room, None)
    if not speculative:
        return pipe(PROMPT, **GREEDY)
    lookahead_hf.enable(pipe.model)
    return pipe(PROMPT, speculative=speculative, **GREEDY)


def text_generation_out_of_reach(room: Room, speculative: Any) -> Any:
    return _pipe(room, None)(PROMPT, **GREEDY, **asking(speculative))


def _written_down(speculative: Any, **parts: Any) -> Any:
    build = lookahead_hf.pipeline if speculative else transformers.pipeline
    return build("automatic-speech-recognition", device="cpu", **parts, **asking(speculative))


def speech(room: Room, speculative: Any, **more: Any) -> Any:
    tokenizer = room.tokenizer()
    pipe = _written_down(
        speculative,
        model=tiny("moonshine", vocab_size=len(tokenizer)),
        tokenizer=tokenizer,
        feature_extractor=transformers.Wav2Vec2FeatureExtractor(),
    )
    return pipe(wave(), generate_kwargs={"max_new_tokens": 40, **more})


def speech_by_whisper(room: Room, speculative: Any) -> Any:
    pipe = _written_down(
        speculative,
        model=tiny_whisper(),
        tokenizer=whisper_tokenizer(),
        feature_extractor=whisper_features(),
    )
    settings = {"max_new_tokens": 40, "num_beams": 1}
    return pipe(wave(5.0), generate_kwargs=settings, return_timestamps="word")


def _agent(room: Room, speculative: Any) -> Any:
    from smolagents import TransformersModel

    return TransformersModel(
        model_id=room.folder(None), device_map="cpu", **GREEDY, **asking(speculative)
    )


def _langchain(room: Room, speculative: Any) -> Any:
    from langchain_huggingface import HuggingFacePipeline

    return HuggingFacePipeline.from_model_id(
        model_id=room.folder(None),
        task="text-generation",
        pipeline_kwargs={**GREEDY, **asking(speculative)},
    )


def map_of_datasets(room: Room, speculative: Any) -> Any:
    from datasets import Dataset

    model, tokenizer = room.model(speculative), room.tokenizer()

    def answer(rows: dict[str, list[str]]) -> dict[str, list[str]]:
        inputs = tokenizer(rows["text"], return_tensors="pt", padding=True)
        output = model.generate(**inputs, **GREEDY)
        return {"answer": tokenizer.batch_decode(output)}

    rows = Dataset.from_dict({"text": [PROMPT, "abcd", "xyz xyz"]})
    return rows.map(answer, batched=True, batch_size=2, load_from_cache_file=False)["answer"][:]


def queue_of_datasets(room: Room, speculative: Any) -> Any:
    from datasets import Dataset

    model, tokenizer = room.model(speculative), room.tokenizer()
    config = copy.deepcopy(model.generation_config)
    config.update(**GREEDY)
    few = transformers.ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)

    def annotate(rows: dict[str, list[str]]) -> dict[str, list[str]]:
        found = model.generate_batch(
            tokenizer(rows["text"]).input_ids, config, few, progress_bar=True
        )
        return {"answer": [tokenizer.decode(each.generated_tokens) for each in found.values()]}

    rows = Dataset.from_dict({"text": [PROMPT, "abcd", "xyz xyz"] * 2})
    return rows.map(annotate, batched=True, load_from_cache_file=False)["answer"][:]


OURS = "`lookahead_hf.pipeline(...)`"
NO_BEAMS = '`lookahead_hf.pipeline(...)` and `pipe(audio, generate_kwargs={"num_beams": 1})`'
AGENT = "`TransformersModel(model_id=..., speculative=True)`"
CHAIN = '`from_model_id(..., pipeline_kwargs={"speculative": True})`'
LANGCHAIN = ("langchain_huggingface",)

CALLERS = [
    Caller(
        "pipeline text-generation, a chat",
        OURS,
        lambda room, asked: _pipe(room, asked)(SAID, **GREEDY),
    ),
    Caller(
        "pipeline text-generation, a list, batch_size=2",
        OURS,
        lambda room, asked: _pipe(room, asked)([PROMPT, "abcd"], batch_size=2, **GREEDY),
    ),
    Caller("pipeline text-generation, stop_sequence", OURS, text_generation_stop),
    Caller("pipeline text-generation, a streamer", OURS, text_generation_streamer),
    Caller(
        "pipeline text-generation, transformers' own",
        "`enable(pipe.model)` and `pipe(x, speculative=True)`",
        text_generation_enabled,
    ),
    Caller(
        "pipeline text-generation, transformers' own, a model out of reach",
        "`pipe(x, speculative=True)`",
        text_generation_out_of_reach,
        auto=True,
    ),
    Caller(
        "pipeline automatic-speech-recognition",
        OURS,
        speech,
        expects="beams",
        note="the pipeline's default is num_beams=5; the warning names the remedy num_beams=1",
    ),
    Caller(
        "pipeline automatic-speech-recognition, num_beams=1",
        NO_BEAMS,
        lambda room, asked: speech(room, asked, num_beams=1),
    ),
    Caller(
        "pipeline automatic-speech-recognition, Whisper, words of several segments",
        NO_BEAMS,
        speech_by_whisper,
    ),
    Caller(
        "smolagents, generate",
        AGENT,
        lambda room, asked: _agent(room, asked).generate(SHOWN, stop_sequences=["\x00"]).content,
        ("smolagents",),
        auto=True,
    ),
    Caller(
        "smolagents, stream",
        AGENT,
        lambda room, asked: [each.content for each in _agent(room, asked).generate_stream(SHOWN)],
        ("smolagents",),
        auto=True,
    ),
    Caller(
        "LangChain, invoke",
        CHAIN,
        lambda room, asked: _langchain(room, asked).invoke(PROMPT),
        LANGCHAIN,
        auto=True,
    ),
    Caller(
        "LangChain, stream",
        CHAIN,
        lambda room, asked: list(_langchain(room, asked).stream(PROMPT)),
        LANGCHAIN,
        auto=True,
    ),
    Caller("datasets, map", "`enable(model)`", map_of_datasets, ("datasets",)),
    Caller(
        "datasets, map, generate_batch with a bar",
        "`enable(model)`",
        queue_of_datasets,
        ("datasets",),
    ),
]
