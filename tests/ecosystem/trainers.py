"""Trainers and evaluators that generate between their steps, from batches with labels."""

from __future__ import annotations

from typing import Any

import transformers

from tests.ecosystem.callers import GREEDY, NEW_TOKENS, PROMPT
from tests.ecosystem.room import Caller, Room, speculating
from tests.helpers.models import tiny

TEXTS = [PROMPT, "abcd abcd", "xyz xyz xyz"]


def predicted(room: Room, speculative: Any, model: Any) -> list[list[int]]:
    """The texts that `predict` of a trainer generates."""
    inputs = room.tokenizer()(TEXTS, padding=True, return_tensors="pt")
    ids = inputs["input_ids"] % model.config.vocab_size
    columns = {"input_ids": ids, "attention_mask": inputs["attention_mask"], "labels": ids}
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    settings = transformers.Seq2SeqTrainingArguments(
        str(room.scratch / "seq2seq"),
        predict_with_generate=True,
        generation_max_length=NEW_TOKENS + ids.shape[1],
        per_device_eval_batch_size=2,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = transformers.Seq2SeqTrainer(
        speculating(model, speculative),
        settings,
        data_collator=transformers.default_data_collator,
        processing_class=room.tokenizer(),
    )
    return trainer.predict(rows).predictions.tolist()


class Shown(transformers.TrainerCallback):
    """Generates texts at the end of every evaluation."""

    def __init__(self, inputs: Any) -> None:
        self._inputs = inputs
        self.texts: list[list[int]] = []

    def on_evaluate(self, args: Any, state: Any, control: Any, model: Any, **more: Any) -> None:
        self.texts += model.generate(**self._inputs, **GREEDY).tolist()


def evaluated(room: Room, speculative: Any) -> list[list[int]]:
    """The texts that a callback of a trainer generates after training steps."""
    inputs = room.tokenizer()(TEXTS, padding=True, return_tensors="pt")
    rows = [{"input_ids": ids, "labels": ids} for ids in inputs["input_ids"]]
    settings = transformers.TrainingArguments(
        str(room.scratch / "trainer"),
        max_steps=2,
        eval_strategy="steps",
        eval_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )
    shown = Shown(inputs)
    model = room.model(speculative)
    data = {"train_dataset": rows, "eval_dataset": rows}
    transformers.Trainer(model, settings, callbacks=[shown], **data).train()
    return shown.texts


def logged(room: Room, speculative: Any) -> list[str]:
    """The completions that TRL's callback logs."""
    from datasets import Dataset
    from trl import LogCompletionsCallback, SFTConfig, SFTTrainer

    settings = SFTConfig(
        str(room.scratch / "sft"),
        max_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
    )
    trainer = SFTTrainer(
        room.model(speculative),
        settings,
        train_dataset=Dataset.from_dict({"text": TEXTS}),
        processing_class=room.tokenizer(),
    )
    trainer.eval_dataset = Dataset.from_dict({"prompt": TEXTS})
    config = transformers.GenerationConfig(**GREEDY, pad_token_id=0)
    callback = LogCompletionsCallback(trainer, config, freq=1)
    trainer.add_callback(callback)
    trainer.train()
    return [row[-1] for row in callback.table]


DEFAULT = "`enable(model)` and `set_default(model, True)`"

CALLERS = [
    Caller(
        "Seq2SeqTrainer, predict_with_generate, an encoder-decoder",
        DEFAULT,
        lambda room, asked: predicted(room, asked, tiny("t5")),
        note="it passes `labels`, which plain `generate` ignores",
    ),
    Caller(
        "Seq2SeqTrainer, predict_with_generate, a decoder",
        DEFAULT,
        lambda room, asked: predicted(room, asked, room.model(asked)),
        note="the same",
    ),
    Caller("Trainer, a callback that generates", "`enable(model)`", evaluated),
    Caller("TRL, LogCompletionsCallback", "`enable(model)`", logged, ("trl", "datasets")),
]
