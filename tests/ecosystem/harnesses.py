"""Evaluation and training that call `generate`."""

from __future__ import annotations

from typing import Any

import torch

import lookahead_hf
from tests.ecosystem.callers import GREEDY, NEW_TOKENS, PROMPT
from tests.ecosystem.room import ENTRY, Caller, Room

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
    from trl import GRPOConfig, GRPOTrainer

    return _rewarded(room, speculative, GRPOTrainer, GRPOConfig)


def rloo(room: Room, speculative: Any) -> Any:
    from trl import RLOOConfig, RLOOTrainer

    return _rewarded(room, speculative, RLOOTrainer, RLOOConfig)


def _rewarded(room: Room, speculative: Any, trainer: Any, config: Any) -> list[str]:
    """Two training steps; what is compared are the completions that were rewarded."""
    seen: list[str] = []

    def reward(completions: list[str], **kwargs: Any) -> list[float]:
        seen.extend(completions)
        return [float(text.count("a")) for text in completions]

    settings = _settings(
        room, config, speculative, per_device_train_batch_size=4, num_generations=4
    )
    model = _student(room, speculative)
    trainer(
        model=model,
        args=settings,
        reward_funcs=reward,
        train_dataset=_prompts(),
        processing_class=room.tokenizer(),
    ).train()
    assert model.training
    return seen


def distillation(room: Room, speculative: Any) -> Any:
    """Two training steps on the student's own texts; what is compared are its weights."""
    from trl import DistillationConfig, DistillationTrainer

    settings = _settings(room, DistillationConfig, speculative, per_device_train_batch_size=2)
    model = _student(room, speculative)
    DistillationTrainer(
        model=model,
        teacher_model=room.folder(None),
        args=settings,
        train_dataset=_prompts(),
        processing_class=room.tokenizer(),
    ).train()
    return [parameter.sum().item() for parameter in model.parameters()]


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
        generation_kwargs={"speculative": speculative} if speculative else None,
        **more,
    )


def _student(room: Room, speculative: Any) -> Any:
    model = room.model(None)
    return lookahead_hf.enable(model) if speculative else model


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
    Caller("lm-eval, one by one", GEN_KWARGS, lm_eval_generate, ("lm_eval",), auto=True),
    Caller("lm-eval, batches", GEN_KWARGS, lm_eval_batches, ("lm_eval",), auto=True),
    Caller(
        "lighteval",
        ENTRY,
        lighteval_greedy,
        ("lighteval",),
        note="requests the scores of every call",
        auto=True,
    ),
    Caller("TRL, GRPO", TRL.format("GRPOConfig"), grpo, TRL_NEEDS, note=TRAINING),
    Caller("TRL, RLOO", TRL.format("RLOOConfig"), rloo, TRL_NEEDS, note=TRAINING),
    Caller(
        "TRL, distillation",
        TRL.format("DistillationConfig"),
        distillation,
        TRL_NEEDS,
        note=TRAINING,
    ),
    Caller("a model in training mode, without dropout", "`enable(model)`", training_mode),
]
