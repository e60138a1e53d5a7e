"""Evaluation and training that call `generate`."""

from __future__ import annotations

from typing import Any

import torch

from tests.ecosystem.callers import GREEDY, NEW_TOKENS, PROMPT
from tests.ecosystem.room import Caller, Room

PROMPTS = [PROMPT, "abcd", "xyz xyz xyz"]


def lm_eval_generate(room: Room, speculative: Any, batch_size: int = 1) -> Any:
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    model = HFLM(room.folder(None), device="cpu", batch_size=batch_size, max_length=128)
    asked = {"until": ["\x00"], "max_gen_toks": NEW_TOKENS}
    if speculative:
        asked["speculative"] = speculative
    requests = [
        Instance("generate_until", {}, (text, dict(asked)), index)
        for index, text in enumerate(PROMPTS)
    ]
    return model.generate_until(requests, disable_tqdm=True)


def lm_eval_batches(room: Room, speculative: Any) -> Any:
    return lm_eval_generate(room, speculative, batch_size=2)


def lighteval_greedy(room: Room, speculative: Any) -> Any:
    from lighteval.models.transformers.transformers_model import (
        TransformersModel,
        TransformersModelConfig,
    )
    from lighteval.tasks.requests import Doc

    config = TransformersModelConfig(
        model_name=room.folder(speculative),
        device="cpu",
        batch_size=2,
        max_length=128,
        model_parallel=False,
        cache_dir=str(room.scratch / f"lighteval {bool(speculative)}"),
    )
    model = TransformersModel(config)
    docs = [
        Doc(query=text, choices=[""], gold_index=0, generation_size=NEW_TOKENS, id=str(index))
        for index, text in enumerate(PROMPTS)
    ]
    for doc in docs:
        doc.sampling_methods = ["GENERATIVE"]
    return [answer.text for answer in model.greedy_until(docs)]


def grpo(room: Room, speculative: Any) -> Any:
    """Two training steps; what is compared are the completions that were rewarded."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    seen: list[str] = []

    def reward(completions: list[str], **kwargs: Any) -> list[float]:
        seen.extend(completions)
        return [float(text.count("a")) for text in completions]

    settings = GRPOConfig(
        output_dir=str(room.scratch / "grpo"),
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=NEW_TOKENS,
        max_steps=2,
        learning_rate=1e-5,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        seed=0,
        generation_kwargs={"speculative": speculative} if speculative else None,
    )
    model = room.model(None)
    trainer = GRPOTrainer(
        model=model,
        args=settings,
        reward_funcs=reward,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS * 2}),
        processing_class=room.tokenizer(),
    )
    trainer.train()
    assert model.training
    return seen


def training_mode(room: Room, speculative: Any) -> Any:
    """What a training loop of one's own does between two steps."""
    model = room.model(speculative).train()
    inputs = room.tokenizer()(PROMPTS, return_tensors="pt", padding=True)
    with torch.no_grad():
        output = model.generate(**inputs, **GREEDY)
    return output.tolist()


CALLERS = [
    Caller(
        "lm-eval, one by one", "`--gen_kwargs speculative=True`", lm_eval_generate, ("lm_eval",)
    ),
    Caller("lm-eval, batches", "`--gen_kwargs speculative=True`", lm_eval_batches, ("lm_eval",)),
    Caller(
        "lighteval",
        "`model.model.generation_config.speculative = True`",
        lighteval_greedy,
        ("lighteval",),
        note="asks for the scores of every call",
    ),
    Caller(
        "TRL, GRPO",
        '`GRPOConfig(generation_kwargs={"speculative": True})`',
        grpo,
        ("trl", "datasets"),
        note="the model is in training mode around it",
    ),
    Caller("a model in training mode, without dropout", "`enable(model)`", training_mode),
]
