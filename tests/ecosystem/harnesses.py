"""Evaluation and training that call `generate`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.ecosystem.callers import GREEDY, NEW_TOKENS, PROMPT
from tests.ecosystem.room import ENTRY, Caller, Room, asking

PROMPTS = [PROMPT, "abcd", "xyz xyz xyz"]


def lm_eval(speculative: Any, model: Any, requests: list[tuple[Any, ...]]) -> Any:
    """The answers of lm-eval to requests: texts, each with what else is shown of it."""
    from lm_eval.api.instance import Instance

    asked = {"until": ["\x00"], "max_gen_toks": NEW_TOKENS, **asking(speculative)}
    return model.generate_until(
        [
            Instance("generate_until", {}, (text, dict(asked), *more), index)
            for index, (text, *more) in enumerate(requests)
        ],
        disable_tqdm=True,
    )


def lm_eval_texts(room: Room, speculative: Any, batch_size: int = 1) -> Any:
    from lm_eval.models.huggingface import HFLM

    model = HFLM(room.folder(None), device="cpu", batch_size=batch_size, max_length=128)
    return lm_eval(speculative, model, [(text,) for text in PROMPTS])


def lighteval(
    room: Room, kind: Any, config: Any, folder: str, prompts: list[str], **shown: Any
) -> list[str]:
    """The answers of a model of lighteval."""
    from lighteval.tasks.requests import Doc

    model = kind(
        config(
            model_name=folder,
            device="cpu",
            batch_size=2,
            max_length=128,
            model_parallel=False,
            cache_dir=str(room.scratch / f"lighteval {kind.__name__} {Path(folder).name}"),
        )
    )
    docs = [
        Doc(query=text, choices=[""], gold_index=0, generation_size=NEW_TOKENS, id=str(at), **shown)
        for at, text in enumerate(prompts)
    ]
    for doc in docs:
        doc.sampling_methods = ["GENERATIVE"]
    return [answer.text for answer in model.greedy_until(docs)]


def lighteval_texts(room: Room, speculative: Any) -> Any:
    from lighteval.models.transformers import transformers_model as models

    kinds = models.TransformersModel, models.TransformersModelConfig
    return lighteval(room, *kinds, room.folder(speculative), PROMPTS)


def rewarded(room: Room, speculative: Any, method: str) -> list[str]:
    """The completions that were rewarded in two training steps."""
    import trl

    trainer, config = getattr(trl, f"{method}Trainer"), getattr(trl, f"{method}Config")
    seen: list[str] = []

    def reward(completions: list[str], **kwargs: Any) -> list[float]:
        seen.extend(completions)
        return [float(text.count("a")) for text in completions]

    settings = _settings(
        room, config, speculative, per_device_train_batch_size=4, num_generations=4
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


def distillation(room: Room, speculative: Any) -> Any:
    """The student's weights after two training steps on its own texts."""
    from trl import DistillationConfig, DistillationTrainer

    settings = _settings(room, DistillationConfig, speculative, per_device_train_batch_size=2)
    model = room.enabled(speculative)
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
        generation_kwargs=asking(speculative) or None,
        **more,
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
    Caller("lm-eval, one by one", GEN_KWARGS, lm_eval_texts, ("lm_eval",), auto=True),
    Caller(
        "lm-eval, batches",
        GEN_KWARGS,
        lambda room, asked: lm_eval_texts(room, asked, batch_size=2),
        ("lm_eval",),
        auto=True,
    ),
    Caller(
        "lighteval",
        ENTRY,
        lighteval_texts,
        ("lighteval",),
        note="requests the scores of every call",
        auto=True,
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
        "TRL, distillation",
        TRL.format("DistillationConfig"),
        distillation,
        TRL_NEEDS,
        note=TRAINING,
    ),
    Caller("a model in training mode, without dropout", "`enable(model)`", training_mode),
]
