"""Libraries and servers that call `generate` themselves, one function each."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import transformers
from torch import nn

import lookahead_hf
from lookahead_hf.fallback import FallbackReason
from tests.ecosystem.room import GREEDY, NEW_TOKENS, PROMPTS, Room
from tests.helpers.models import tiny
from tests.helpers.served import free_port, wait_for

SAID = [{"role": "user", "content": PROMPTS[0]}]
SHOWN = [{"role": "user", "content": [{"type": "text", "text": PROMPTS[0]}]}]


def pipe(room: Room) -> Any:
    build = lookahead_hf.pipeline if room.asks else transformers.pipeline
    model, tokenizer = room.model(), room.tokenizer
    return build("text-generation", model=model, tokenizer=tokenizer, device="cpu", **room.argument)


def pipe_out_of_reach(room: Room) -> Any:
    """transformers' own pipeline, which passes the argument on."""
    model, tokenizer = room.model(), room.tokenizer
    own = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
    return own(PROMPTS[0], **GREEDY, **room.argument)


def transformers_serve(room: Room, **options: Any) -> Any:
    """Chats of the OpenAI client at the same time."""
    from openai import OpenAI
    from transformers.cli.serve import Serve

    folder, port = room.folder, free_port()
    server = Serve(folder, port=port, device="cpu", non_blocking=True, **options)
    client = OpenAI(base_url=f"http://localhost:{port}/v1", api_key="none", timeout=120)

    def chat(text: str) -> Any:
        said = [{"role": "user", "content": text}]
        answer = client.chat.completions.create(
            model=folder, messages=said, max_tokens=NEW_TOKENS, temperature=0.0
        )
        return answer.choices[0].message.content, answer.usage.completion_tokens

    try:
        wait_for(port)
        with ThreadPoolExecutor(3) as pool:
            return list(pool.map(chat, PROMPTS))
    finally:
        server.kill_server()


def smolagents(room: Room) -> Any:
    from smolagents import TransformersModel

    agent = TransformersModel(room.plain_folder, device_map="cpu", **GREEDY, **room.argument)
    whole = agent.generate(SHOWN, stop_sequences=["\x00"]).content
    return whole, [each.content for each in agent.generate_stream(SHOWN)]


def langchain(room: Room) -> Any:
    from langchain_huggingface import HuggingFacePipeline

    settings = {**GREEDY, **room.argument}
    chain = HuggingFacePipeline.from_model_id(
        room.plain_folder, "text-generation", pipeline_kwargs=settings
    )
    return chain.invoke(PROMPTS[0]), list(chain.stream(PROMPTS[0]))


def llama_index(room: Room) -> Any:
    from llama_index.llms.huggingface import HuggingFaceLLM

    chain = HuggingFaceLLM(
        model=room.enabled(),
        tokenizer=room.tokenizer,
        max_new_tokens=NEW_TOKENS,
        context_window=256,
        generate_kwargs={"do_sample": False, **room.argument},
    )
    return chain.complete(PROMPTS[0]).text


def haystack(room: Room) -> Any:
    from haystack.dataclasses import ChatMessage
    from haystack_integrations.components.generators.transformers import TransformersChatGenerator

    settings = {**GREEDY, **room.argument}
    chat = TransformersChatGenerator(
        room.plain_folder, "text-generation", generation_kwargs=settings
    )
    chat.warm_up()
    return chat.run([ChatMessage.from_user(PROMPTS[0])])["replies"][0].text


def outlines(room: Room) -> Any:
    """A choice among two answers, enforced token by token by a stateful processor."""
    import outlines

    model = outlines.from_transformers(room.enabled(), room.tokenizer)
    choice = Literal["abc abc abc abc abc abc abd", "abc abc abc abc abc abc abe"]
    return model(PROMPTS[0], choice, max_new_tokens=40, do_sample=False, **room.argument)


def inspect_ai(room: Room) -> Any:
    from inspect_ai.model import GenerateConfig, get_model

    config = GenerateConfig(max_tokens=NEW_TOKENS, temperature=0.001, seed=0)
    model = get_model(f"hf/{room.folder}", config=config, device="cpu", memoize=False)
    return asyncio.run(model.generate(PROMPTS[0])).completion


def map_of_datasets(room: Room) -> Any:
    """The data set tells calls apart by what it pickles of the model."""
    from datasets import Dataset

    model = room.speculating()
    rows = Dataset.from_dict({"text": PROMPTS})
    answer = lambda rows: {"answer": room.texts(model)}  # noqa: E731
    return rows.map(answer, batched=True, load_from_cache_file=False)["answer"][:]


def lm_eval(room: Room) -> Any:
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    model = HFLM(room.plain_folder, device="cpu", batch_size=2, max_length=128)
    asked = {"until": ["\x00"], "max_gen_toks": NEW_TOKENS, **room.argument}
    requests = [Instance("generate_until", {}, (text, {**asked}), 0) for text in PROMPTS]
    return model.generate_until(requests, disable_tqdm=True)


def lighteval(room: Room) -> Any:
    from lighteval.models.transformers import transformers_model as models
    from lighteval.tasks.requests import Doc

    config = models.TransformersModelConfig(
        model_name=room.folder,
        device="cpu",
        batch_size=2,
        max_length=128,
        model_parallel=False,
        cache_dir=tempfile.mkdtemp(dir=room.scratch),
    )
    docs = [Doc(text, [""], 0, generation_size=NEW_TOKENS, id=text) for text in PROMPTS]
    for doc in docs:
        doc.sampling_methods = ["GENERATIVE"]
    return [each.text for each in models.TransformersModel(config).greedy_until(docs)]


def rewarded(room: Room) -> Any:
    """The completions that TRL's GRPO rewards in two training steps."""
    import trl
    from datasets import Dataset

    seen: list[str] = []

    def reward(completions: list[str], **kwargs: Any) -> list[float]:
        seen.extend(completions)
        return [float(text.count("a")) for text in completions]

    settings = trl.GRPOConfig(
        str(room.scratch / "trl"),
        max_completion_length=NEW_TOKENS,
        max_steps=2,
        per_device_train_batch_size=4,
        num_generations=4,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        generation_kwargs=room.argument or None,
    )
    rows, model = Dataset.from_dict({"prompt": PROMPTS * 2}), room.enabled()
    trl.GRPOTrainer(model, reward, settings, rows, processing_class=room.tokenizer).train()
    assert model.training
    return seen


def predicted(room: Room) -> Any:
    """The texts of a trainer's `predict`, which passes `labels`."""
    columns = room.tokenizer(PROMPTS, padding=True)
    ids = torch.tensor(columns["input_ids"]) % 100
    rows = [{"input_ids": row, "labels": row} for row in ids]
    settings = transformers.Seq2SeqTrainingArguments(
        str(room.scratch / "seq2seq"),
        predict_with_generate=True,
        generation_max_length=NEW_TOKENS,
        report_to="none",
        use_cpu=True,
    )
    trainer = transformers.Seq2SeqTrainer(
        room.speculating(tiny("t5")),
        settings,
        data_collator=transformers.default_data_collator,
        processing_class=room.tokenizer,
    )
    return trainer.predict(rows).predictions.tolist()


def adapted(room: Room, **fields: Any) -> Any:
    """Two LoRA adapters whose weights matter, one of them around an enabled model."""
    import peft

    torch.manual_seed(0)
    given = {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, **fields}
    config = peft.LoraConfig(task_type="CAUSAL_LM", **given)
    around = peft.get_peft_model(room.speculating(), config).eval()
    within = peft.get_peft_model(room.model(), config).eval()
    within.add_adapter("other", config)
    both = {"adapter_names": ["default", "other", "other"]} if not fields else {}
    inputs = room.tokenizer(PROMPTS, return_tensors="pt", padding=True)
    mixed = room.speculating(within).generate(**inputs, **both, **GREEDY)
    return room.texts(around), mixed.tolist()


def activated(room: Room) -> Any:
    return adapted(room, alora_invocation_tokens=room.tokenizer("ab")["input_ids"])


def virtual_tokens(room: Room) -> Any:
    import peft

    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    return room.texts(room.speculating(peft.get_peft_model(room.model(), config).eval()))


def dispatched(room: Room) -> Any:
    import accelerate

    devices = dict.fromkeys(("model", "lm_head"), "cpu")
    return room.texts(accelerate.dispatch_model(room.speculating(), devices, force_hooks=True))


def offloaded(room: Room) -> Any:
    import accelerate

    folder = str(room.scratch / "offloaded")
    return room.texts(accelerate.disk_offload(room.speculating(), folder, torch.device("cpu")))


def by_torchao(room: Room, config: str) -> Any:
    from torchao import quantization

    chosen = transformers.TorchAoConfig(getattr(quantization, config)())
    return room.texts(room.speculating(room.model(quantization_config=chosen)))


def int8_by_torch(room: Room) -> Any:
    model = room.speculating()
    torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8, inplace=True)
    return room.texts(model)


@dataclass(frozen=True)
class Caller:
    """One caller, by its name in docs/ecosystem.md.

    Attributes:
        run: Returns what a caller writes in a room.
        needs: Packages that it imports.
        expects: Why it runs plainly, None if it speculates.
        promises: Whether the text is to be plain's.
        auto: Whether `lookahead_hf.auto` is needed: the caller loads its own model.
    """

    run: Callable[[Room], Any]
    needs: tuple[str, ...] = ()
    expects: FallbackReason | None = None
    promises: bool = True
    auto: bool = False


SERVED = ("fastapi", "uvicorn", "openai")
TOGETHER = {"continuous_batching": True, "cb_num_blocks": 8, "cb_max_batch_tokens": 256}
INT8 = "Int8DynamicActivationInt8WeightConfig"

CALLERS = {
    "pipeline text-generation, a chat": Caller(lambda room: pipe(room)(SAID, **GREEDY)),
    "pipeline text-generation, a list, batch_size=2": Caller(
        lambda room: pipe(room)(PROMPTS, batch_size=2, **GREEDY)
    ),
    "pipeline text-generation, transformers' own, a model out of reach": Caller(
        pipe_out_of_reach, auto=True
    ),
    "transformers serve": Caller(transformers_serve, SERVED, auto=True),
    "transformers serve --continuous-batching": Caller(
        partial(transformers_serve, **TOGETHER), SERVED, auto=True
    ),
    "smolagents, generate and stream": Caller(smolagents, ("smolagents",), auto=True),
    "LangChain, invoke and stream": Caller(langchain, ("langchain_huggingface",), auto=True),
    "LlamaIndex, complete": Caller(llama_index, ("llama_index.llms.huggingface",)),
    "Haystack, run": Caller(
        haystack, ("haystack_integrations.components.generators.transformers",), auto=True
    ),
    "outlines, a choice": Caller(outlines, ("outlines",)),
    "inspect-ai": Caller(inspect_ai, ("inspect_ai",), auto=True),
    "datasets, map": Caller(map_of_datasets, ("datasets",)),
    "lm-eval": Caller(lm_eval, ("lm_eval",), auto=True),
    "lighteval": Caller(lighteval, ("lighteval",), auto=True),
    "TRL, GRPO": Caller(rewarded, ("trl", "datasets")),
    "Seq2SeqTrainer, predict_with_generate": Caller(predicted),
    "PEFT, LoRA": Caller(adapted, ("peft",)),
    "PEFT, activated LoRA": Caller(activated, ("peft",), FallbackReason.ADAPTER),
    "PEFT, prefix tuning": Caller(virtual_tokens, ("peft",), FallbackReason.ADAPTER),
    "accelerate, dispatch_model": Caller(dispatched, ("accelerate",)),
    "accelerate, disk_offload": Caller(offloaded, ("accelerate",)),
    "torchao, int8 weights": Caller(
        partial(by_torchao, config="Int8WeightOnlyConfig"), ("torchao",)
    ),
    "torchao, int8 weights and activations": Caller(
        partial(by_torchao, config=INT8), ("torchao",), promises=False
    ),
    "torch, quantize_dynamic": Caller(int8_by_torch, promises=False),
}
