"""Models that are adapted, quantised or spread over devices."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

import lookahead_hf
from tests.ecosystem.callers import GREEDY, PROMPT
from tests.ecosystem.room import Caller, Room, speculating

PROMPTS = [PROMPT, "abcd"]


def _texts(model: Any, room: Room, **kwargs: Any) -> Any:
    inputs = room.tokenizer()(PROMPTS, return_tensors="pt", padding=True)
    return model.generate(**inputs, **GREEDY, **kwargs).tolist()


def _adapted(room: Room, speculative: Any, *configs: Any) -> Any:
    """A PEFT model with an adapter per config, whose weights matter."""
    import peft

    torch.manual_seed(0)
    model = peft.get_peft_model(room.model(None), configs[0])
    for number, config in enumerate(configs[1:]):
        model.add_adapter(f"other{number}", config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or "prompt" in name:
                parameter.normal_(std=0.2)
    return speculating(model.eval(), speculative)


def _lora(**kwargs: Any) -> Any:
    import peft

    targets = ["q_proj", "v_proj"]
    return peft.LoraConfig(task_type="CAUSAL_LM", target_modules=targets, r=4, **kwargs)


def lora_around(room: Room, speculative: Any) -> Any:
    """An adapter around a model that was enabled before."""
    import peft

    torch.manual_seed(0)
    model = peft.get_peft_model(room.model(speculative), _lora(init_lora_weights=False)).eval()
    return _texts(model, room)


def lora_disabled(room: Room, speculative: Any) -> Any:
    model = _adapted(room, speculative, _lora())
    with model.disable_adapter():
        return _texts(model, room)


def lora_mixed(room: Room, speculative: Any) -> Any:
    model = _adapted(room, speculative, _lora(), _lora())
    return _texts(model, room, adapter_names=["default", "other0"])


def lora_native(room: Room, speculative: Any) -> Any:
    """transformers' own `add_adapter`."""
    model = room.model(speculative)
    torch.manual_seed(0)
    model.add_adapter(_lora(init_lora_weights=False))
    return _texts(model.eval(), room)


def lora_activated(room: Room, speculative: Any) -> Any:
    config = _lora(alora_invocation_tokens=room.tokenizer()("ab")["input_ids"])
    return _texts(_adapted(room, speculative, config), room)


def virtual_tokens(room: Room, speculative: Any, kind: str) -> Any:
    import peft

    config = getattr(peft, f"{kind}TuningConfig")(task_type="CAUSAL_LM", num_virtual_tokens=4)
    return _texts(_adapted(room, speculative, config), room)


def dispatched(room: Room, speculative: Any) -> Any:
    import accelerate

    model = room.model(speculative)
    devices = dict.fromkeys(("model", "lm_head"), "cpu")
    return _texts(accelerate.dispatch_model(model, devices, force_hooks=True), room)


def offloaded(room: Room, speculative: Any) -> Any:
    import accelerate

    model = room.model(speculative)
    folder = room.scratch / f"offload {bool(speculative)}"
    return _texts(accelerate.disk_offload(model, str(folder), torch.device("cpu")), room)


def prepared(room: Room, speculative: Any) -> Any:
    import accelerate

    wrapped = accelerate.Accelerator(cpu=True).prepare(room.model(speculative))
    return _texts(wrapped, room)


def by_torchao(room: Room, speculative: Any, config: str) -> Any:
    from torchao import quantization
    from transformers import TorchAoConfig

    chosen = TorchAoConfig(getattr(quantization, config)())
    return _texts(room.model(speculative, quantization_config=chosen), room)


def int8_by_torch(room: Room, speculative: Any) -> Any:
    model = room.model(speculative)
    torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8, inplace=True)
    return _texts(model, room)


def nf4(room: Room, speculative: Any) -> Any:
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    # Its kernels want sizes that divide by their blocks.
    folder = room.wide_folder(speculative)
    model = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, device_map="cpu"
    ).eval()
    return _texts(lookahead_hf.enable(model) if speculative else model, room)


PEFT = ("peft",)
ENABLE = "`enable(model)`"
ROUNDING = "quantised activations: the same text is not promised, and one warning states this"

CALLERS = [
    Caller(
        "PEFT, LoRA", ENABLE, lambda room, asked: _texts(_adapted(room, asked, _lora()), room), PEFT
    ),
    Caller(
        "PEFT, LoRA around an enabled model",
        "`enable(model)` before the adapter",
        lora_around,
        PEFT,
    ),
    Caller("PEFT, LoRA disabled for a call", ENABLE, lora_disabled, PEFT),
    Caller("PEFT, two LoRA adapters in a batch", ENABLE, lora_mixed, PEFT),
    Caller("PEFT, transformers' add_adapter", ENABLE, lora_native, PEFT),
    Caller("PEFT, activated LoRA", ENABLE, lora_activated, PEFT, "adapter"),
    Caller("PEFT, prefix tuning", ENABLE, partial(virtual_tokens, kind="Prefix"), PEFT, "adapter"),
    Caller("PEFT, prompt tuning", ENABLE, partial(virtual_tokens, kind="Prompt"), PEFT, "adapter"),
    Caller("accelerate, dispatch_model", ENABLE, dispatched, ("accelerate",)),
    Caller("accelerate, disk_offload", ENABLE, offloaded, ("accelerate",)),
    Caller("accelerate, prepare", ENABLE, prepared, ("accelerate",)),
    Caller(
        "torchao, int8 weights",
        ENABLE,
        partial(by_torchao, config="Int8WeightOnlyConfig"),
        ("torchao",),
    ),
    Caller(
        "torchao, int8 weights and activations",
        ENABLE,
        partial(by_torchao, config="Int8DynamicActivationInt8WeightConfig"),
        ("torchao",),
        promises=False,
        note=ROUNDING,
    ),
    Caller("torch, quantize_dynamic", ENABLE, int8_by_torch, promises=False, note=ROUNDING),
    Caller(
        "bitsandbytes, nf4",
        ENABLE,
        nf4,
        ("bitsandbytes",),
        note="one row and several rows use different kernels, which can turn a near tie",
    ),
]
