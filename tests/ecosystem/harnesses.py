"""Evaluation and training that call `generate`."""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from transformers import GenerationMixin

import lookahead_hf
from tests.ecosystem.callers import GREEDY, NEW_TOKENS, PROMPT
from tests.ecosystem.room import ENTRY, Caller, Room, asking

PROMPTS = [PROMPT, "abcd", "xyz xyz xyz"]


def lm_eval(room: Room, speculative: Any, batch_size: int = 1) -> Any:
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    model = HFLM(room.folder(None), device="cpu", batch_size=batch_size, max_length=128)
    asked = {"until": ["\x00"], "max_gen_toks": NEW_TOKENS, **asking(speculative)}
    requests = [
        Instance("generate_until", {}, (text, dict(asked)), index)
        for index, text in enumerate(PROMPTS)
    ]
    return model.generate_until(requests, disable_tqdm=True)


def lighteval(room: Room, speculative: Any) -> list[str]:
    return [answer.text for answer in _answers(room, room.folder(speculative))]


def lighteval_together(room: Room, speculative: Any) -> list[Any]:
    """Plain is `generate`: transformers' own manager would take all memory that there is."""
    settings = {
        "generation_parameters": {"max_new_tokens": NEW_TOKENS, "temperature": 0},
        "continuous_batching": True,
    }
    if speculative:
        lookahead_hf.enable_everywhere(default=speculative)
    try:
        plain = mock.patch.object(GenerationMixin, "generate_batch", _one_by_one)
        with nullcontext() if speculative else plain:
            answers = _answers(room, room.folder(None), **settings)
        return [(answer.text, answer.output_tokens) for answer in answers]
    finally:
        lookahead_hf.disable_everywhere()


def _one_by_one(model: Any, inputs: list[list[int]], generation_config: Any) -> dict[str, Any]:
    """What `generate_batch` returns, written by `generate` for every prompt alone."""
    found = {}
    for index, ids in enumerate(inputs):
        output = model.generate(torch.tensor([ids]), generation_config=generation_config)
        tokens = output.sequences[0, len(ids) :].tolist()
        found[f"req_{index}"] = SimpleNamespace(prompt_ids=ids, generated_tokens=tokens)
    return found


def _answers(room: Room, folder: str, **settings: Any) -> Any:
    from lighteval.models.transformers import transformers_model as models
    from lighteval.tasks.requests import Doc

    config = models.TransformersModelConfig(
        model_name=folder,
        device="cpu",
        batch_size=2,
        max_length=128,
        model_parallel=False,
        cache_dir=tempfile.mkdtemp(dir=room.scratch),
        **settings,
    )
    docs = [
        Doc(query=text, choices=[""], gold_index=0, generation_size=NEW_TOKENS, id=str(at))
        for at, text in enumerate(PROMPTS)
    ]
    for doc in docs:
        doc.sampling_methods = ["GENERATIVE"]
    return models.TransformersModel(config).greedy_until(docs)


def rewarded(room: Room, speculative: Any, method: str, **more: Any) -> list[str]:
    """The completions that were rewarded in two training steps."""
    import trl

    trainer, config = getattr(trl, f"{method}Trainer"), getattr(trl, f"{method}Config")
    seen: list[str] = []

    def reward(completions: list[str], **kwargs: Any) -> list[float]:
        seen.extend(completions)
        return [float(text.count("a")) for text in completions]

    settings = _settings(
        room, config, speculative, per_device_train_batch_size=4, num_generations=4, **more
    )
    model = room.enabled(speculative)
    trainer(
        model=model,
        args=settings,
        reward_funcs=reward,
        train_dataset=_prompts(),
        processing_class=room.tokenizer(),
    ).train()
    assert model.training
    return seen


def rewarded_together(room: Room, speculative: Any) -> list[str]:
    """Plain is `generate`: transformers' own manager leaves the tokens of `suppress_tokens` in."""
    return rewarded(
        room,
        speculative,
        "GRPO",
        generation_kwargs={"do_sample": False, **asking(speculative)},
        use_transformers_continuous_batching=bool(speculative),
    )


def _settings(room: Room, config: Any, speculative: Any, **more: Any) -> Any:
    return config(
        output_dir=str(room.scratch / config.__name__),
        max_completion_length=NEW_TOKENS,
        max_steps=2,
        learning_rate=1e-5,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        seed=0,
        **{"generation_kwargs": asking(speculative) or None, **more},
    )


def _prompts() -> Any:
    from datasets import Dataset

    return Dataset.from_dict({"prompt": PROMPTS * 2})


def training_mode(room: Room, speculative: Any) -> Any:
    """What a training loop of one's own does between two steps."""
    model = room.model(speculative).train()
    inputs = room.tokenizer()(PROMPTS, return_tensors="pt", padding=True)
    with torch.no_grad():
        output = model.generate(**inputs, **GREEDY)
    return output.tolist()


GEN_KWARGS = "`--gen_kwargs speculative=True`"
TRL = '`enable(model)` and `{}(generation_kwargs={{"speculative": True}})`'
TRL_NEEDS = ("trl", "datasets")
TRAINING = "the model is in training mode before and after, with TRL's gradient checkpointing"

CALLERS = [
    Caller("lm-eval, one by one", GEN_KWARGS, lm_eval, ("lm_eval",), auto=True),
    Caller(
        "lm-eval, batches",
        GEN_KWARGS,
        partial(lm_eval, batch_size=2),
        ("lm_eval",),
        auto=True,
    ),
    Caller(
        "lighteval",
        ENTRY,
        lighteval,
        ("lighteval",),
        note="requests the scores of every call",
        auto=True,
    ),
    Caller(
        "lighteval, continuous batching",
        "`lookahead_hf.enable_everywhere(default=True)`",
        lighteval_together,
        ("lighteval",),
        note="it replaces the model's generation config; lengths come from its generation "
        "parameters; a chat template is needed",
    ),
    *(
        Caller(
            f"TRL, {method}",
            TRL.format(f"{method}Config"),
            partial(rewarded, method=method),
            TRL_NEEDS,
            note=TRAINING,
        )
        for method in ("GRPO", "RLOO")
    ),
    Caller(
        "TRL, GRPO with use_transformers_continuous_batching",
        TRL.format("GRPOConfig"),
        rewarded_together,
        TRL_NEEDS,
        note="greedy, compared with GRPO without continuous batching",
    ),
    Caller("a model in training mode, without dropout", "`enable(model)`", training_mode),
]
