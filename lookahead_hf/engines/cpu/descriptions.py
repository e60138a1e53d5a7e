"""Describes layers as programs for the compiled kernels, which know some of transformers' classes.

A class is known by its name and its file, and a class derived from it is another one. Whether the
kernels do what a layer of such a class does is shown in its first step.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lookahead_hf.engines.cpu.kernels import fields
from lookahead_hf.engines.cpu.kernels.fields import bits
from lookahead_hf.engines.cpu.programs import Program, Unknown, check_linear, piece_of
from lookahead_hf.model import compat
from lookahead_hf.runner.watch import Watch


class Family(NamedTuple):
    """What the classes of a file of transformers have in common."""

    prefix: str  # the prefix of their names
    norm: int = fields.RMS  # what their RMS norms compute


FAMILIES = {
    "gemma": Family("Gemma", fields.RMS_FROM_ONE),
    "gemma2": Family("Gemma2", fields.RMS_FROM_ONE),
    "gemma3": Family("Gemma3", fields.RMS_FROM_ONE),
    "granite": Family("Granite"),
    "llama": Family("Llama"),
    "ministral": Family("Ministral"),
    "mistral": Family("Mistral"),
    "olmo2": Family("Olmo2", fields.RMS_WEIGHTED_WIDE),
    "phi3": Family("Phi3"),
    "phi4_multimodal": Family("Phi4Multimodal"),
    "qwen2": Family("Qwen2"),
    "qwen3": Family("Qwen3"),
    "smollm3": Family("SmolLM3"),
    "starcoder2": Family("Starcoder2"),
}
"""Families by the names of their files, which define all parts of layers but those in `STOCK`."""

PARTS = ("DecoderLayer", "Attention", "MLP", "RMSNorm")
"""Ends of the names of classes that layers consist of."""

MODELS = ("Model", "TextModel")
"""Ends of the names of classes that call nothing between their layers."""

ACTIVATIONS: dict[type, int] = {
    nn.SiLU: fields.SILU,
    type(ACT2FN["silu"]): fields.SILU,
    type(ACT2FN["gelu_pytorch_tanh"]): fields.GELU_TANH,
}
"""Activations by their classes."""

STOCK = {nn.Linear, nn.LayerNorm, nn.Dropout, *ACTIVATIONS}  # Other classes that layers consist of

FUNCTIONS = ("apply_rotary_pos_emb", "rotate_half", "eager_attention_forward", "repeat_kv")
"""Functions of a file that its layers call."""

OTHERS = {"torch": torch, "nn": nn, "ALL_ATTENTION_FUNCTIONS": ALL_ATTENTION_FUNCTIONS}
"""Other names of a file that its layers look up, with their original values."""


def family_of(kind: type, parts: tuple[str, ...]) -> Family | None:
    """Return the family that one of whose parts a class is, None if it is none's."""
    name = kind.__module__.rpartition(".modeling_")[2]
    family = FAMILIES.get(name)
    if family is None or kind.__module__ != f"transformers.models.{name}.modeling_{name}":
        return None
    return family if kind.__name__ in [family.prefix + part for part in parts] else None


def is_original(function: Any) -> bool:
    """Return whether a function and all that it wraps are torch's or transformers' own."""
    return _is_of_library(inspect.unwrap(function, stop=lambda each: not _is_of_library(each)))


def _is_of_library(function: Any) -> bool:
    name = str(getattr(function, "__globals__", {}).get("__name__"))
    return name.partition(".")[0] in ("torch", "transformers")


_DROPOUTS = ("attention_dropout", "residual_dropout", "p")


def describe_linear(module: nn.Linear) -> Program:
    """Describe a lone linear layer; Unknown if there are no kernels for it."""
    check_linear(module)
    program = _program_for([module], None)
    program.linear(module, "stream", "out")
    program.outputs, program.size = module.weight.shape
    return program


def describe_layer(layer: Any) -> Program:
    """Describe a decoder layer; Unknown if there are no kernels for what it does."""
    kind = type(layer)
    family = family_of(kind, PARTS[:1])
    if family is None:
        raise Unknown(f"{kind.__name__} of {kind.__module__} is not known")
    program = _program_for([*layer.modules()], family)
    program.norm_kind, program.layer_index = family.norm, layer.self_attn.layer_idx
    hidden = "normed" if hasattr(layer, "input_layernorm") else "stream"
    if hidden == "normed":
        program.norm(layer.input_layernorm, "stream", hidden)
    before_feedforward = getattr(layer, "pre_feedforward_layernorm", None)
    norms_results = before_feedforward is not None or hidden == "stream"
    factor = bits(getattr(layer, "residual_multiplier", 1.0))
    after = norms_results and layer.post_attention_layernorm
    _end(program, *_attention(program, layer.self_attn, hidden), after, factor)
    if before_feedforward is not None:
        program.norm(before_feedforward, "stream", "normed")
    elif not norms_results:
        program.norm(layer.post_attention_layernorm, "stream", "normed")
    after = norms_results and layer.post_feedforward_layernorm
    _end(program, *_feedforward(program, layer.mlp, hidden), after, factor)
    program.size = len(layer.post_attention_layernorm.weight)
    program.buffers |= {"normed": program.size, "mixed": program.size}
    _check_sizes(program)
    return program


def _program_for(modules: list[nn.Module], family: Family | None) -> Program:
    """Return an empty program for modules whose code is the original code of a family."""
    for module in modules:
        kind, own = type(module), vars(module)
        is_part = family is not None and family_of(kind, PARTS) is family
        if not (is_part or kind in STOCK):
            raise Unknown(f"{kind.__name__} of {kind.__module__} is not known")
        held = compat.parameters_of(module).keys() | compat.children_of(module).keys()
        hidden = [name for name in own if name in held or callable(getattr(kind, name, None))]
        is_called = compat.CALL in own and module is not modules[0]
        if hidden or is_called or not all(map(is_original, (kind.forward, kind.__call__))):
            raise Unknown(f"the code of a {kind.__name__} was replaced")
        if module.training and any(getattr(module, name, 0.0) for name in _DROPOUTS):
            raise Unknown("a dropout is active")
    watch = Watch(modules)
    if family is not None:
        file = sys.modules[type(modules[0]).__module__]
        for name in (*FUNCTIONS, *OTHERS):
            found = watch.functions[file, name] = getattr(file, name, None)
            if not (found is OTHERS.get(name) or is_original(found)):
                raise Unknown(f"{name} of {file.__name__} was replaced")
    return Program(watch)


def _end(program: Program, linear: Any, source: str, norm: Any, factor: int) -> None:
    """Multiply by the last weight of a layer's half; add the result, or its norm, to the stream."""
    if norm:
        program.linear(linear, source, "mixed")
        program.norm(norm, "mixed", "stream", mode=fields.ADD)
    else:
        program.linear(linear, source, "stream", mode=fields.ADD, factor=factor)


def _attention(program: Program, module: Any, hidden: str) -> tuple[Any, str]:
    """Add the operations of attention; return its last linear layer and the input of that."""
    dim = program.head_dim = module.head_dim
    q, k, v = _projections(program, module)
    heads, shared = len(q[1]) // dim, len(k[1]) // dim
    program.shared_heads = shared
    if heads % shared or len(v[1]) != shared * dim:
        raise Unknown("heads of K and V differ in size")
    program.buffers |= {"queries": heads * dim, "keys": shared * dim, "attended": heads * dim}
    q_norm, k_norm = getattr(module, "q_norm", None), getattr(module, "k_norm", None)
    rotates = bool(getattr(module, "use_rope", True))
    program.is_rotated = rotates
    turns = rotates or k_norm is not None
    program.linear(q[0], hidden, "queries", rows=q[1], joins_next=1)
    if turns:
        program.linear(k[0], hidden, "keys", rows=k[1], joins_next=1)
    else:
        program.linear(k[0], hidden, "k_store", rows=k[1], mode=fields.TO_SLOTS, joins_next=1)
    program.linear(v[0], hidden, "v_store", rows=v[1], mode=fields.TO_SLOTS)
    if q_norm is not None and len(q_norm.weight) != dim:  # of all heads together
        program.norm(q_norm, "queries", "queries", joins_next=1)
        program.norm(k_norm, "keys", "keys")
        q_norm = k_norm = None
    if turns:
        _turn(program, q_norm, "queries", "queries", heads, joins_next=1)
        _turn(program, k_norm, "keys", "k_store", shared, mode=fields.TO_SLOTS)
    limit = getattr(module, "attn_logit_softcapping", None)
    scores = {"factor": bits(module.scaling), "epsilon": bits(float(limit or 0.0))}
    places = {
        fields.SOURCE: "queries",
        fields.TARGET: "attended",
        fields.WEIGHT: "k_store",
        fields.WEIGHT_2: "v_store",
        fields.PLAN: "plan",
    }
    program.add(fields.ATTEND, places, heads=heads, shared=shared, size=dim, **scores)
    return module.o_proj, "attended"


def _projections(program: Program, module: Any) -> list[tuple[Any, range]]:
    if not hasattr(module, "qkv_proj"):
        parts = (module.q_proj, module.k_proj, module.v_proj)
        return [(each, range(len(each.weight))) for each in parts]
    config, dim = module.config, module.head_dim
    program.watch.hold(vars(config), ("num_attention_heads", "num_key_value_heads"))
    q, kv = config.num_attention_heads * dim, config.num_key_value_heads * dim
    if len(module.qkv_proj.weight) != q + 2 * kv:
        raise Unknown("a joined weight does not have the heads of the configuration")
    rows = range(q), range(q, q + kv), range(q + kv, q + 2 * kv)
    return [(module.qkv_proj, each) for each in rows]


def _turn(program: Program, norm: Any, source: str, target: str, heads: int, **given: int) -> None:
    addresses: dict[int, Any] = {fields.SOURCE: source, fields.TARGET: target, fields.PLAN: "plan"}
    if program.is_rotated:
        addresses |= {fields.COS: "cos", fields.SIN: "sin"}
        addresses |= {fields.ROTATED: "rotated", fields.FLAVOUR: "wide"}
    if norm is not None:
        flavour, epsilon = program.norm_of(norm)
        addresses[fields.WEIGHT] = norm, "weight"
        given |= {"outputs": flavour, "epsilon": epsilon}
    program.add(fields.ROTATE, addresses, heads=heads, size=program.head_dim, **given)


def _feedforward(program: Program, module: Any, hidden: str) -> tuple[Any, str]:
    """Add the operations of a feed-forward network, as `_attention` does."""
    if hasattr(module, "c_fc"):
        flavour = _activation(module.act)
        program.linear(module.c_fc, hidden, "active", flavour=flavour, mode=fields.PACK)
        program.buffers["active"] = len(module.c_fc.weight)
        return module.c_proj, "active"
    if hasattr(module, "gate_up_proj"):
        gate = up = module.gate_up_proj
        inner = last = len(up.weight) // 2
        flavour = _activation(module.activation_fn)
    else:
        gate, up = module.gate_proj, module.up_proj
        inner, last = len(gate.weight), 0
        flavour = _activation(module.act_fn)
    check_linear(gate)
    check_linear(up)
    if last + inner != len(up.weight):
        raise Unknown("a gate and what it opens differ in size")
    addresses: dict[int, Any] = {
        fields.SOURCE: hidden,
        fields.TARGET: "active",
        fields.WEIGHT: (gate, "weight"),
        fields.BIAS: (gate, "bias"),
        fields.WEIGHT_2: (up, "weight", last),
        fields.BIAS_2: (up, "bias", last),
    }
    sizes = {"size": gate.weight.shape[1], "outputs": inner, "piece": piece_of(inner)}
    program.add(fields.GATED, addresses, flavour=flavour, mode=fields.PACK, **sizes)
    program.buffers["active"] = inner
    return module.down_proj, "active"


def _activation(module: Any) -> int:
    flavour = ACTIVATIONS.get(type(module))
    if flavour is None:
        raise Unknown(f"there is no kernel for the activation {type(module).__name__}")
    return flavour


def numbers_at(op: dict[int, int]) -> dict[int, int]:
    """Return the numbers that an operation uses at each address: per token, or of a weight."""
    size, outputs, heads = (op.get(at, 0) for at in (fields.SIZE, fields.OUTPUTS, fields.HEADS))
    if op[fields.KIND] in (fields.LINEAR, fields.GATED):
        weight = size * outputs
        of_weights = {fields.WEIGHT: weight, fields.WEIGHT_2: weight}
        of_biases = {fields.BIAS: outputs, fields.BIAS_2: outputs}
        return {fields.SOURCE: size, fields.TARGET: outputs} | of_weights | of_biases
    of_token = {fields.SOURCE: heads * size, fields.TARGET: heads * size}
    if op[fields.KIND] == fields.ATTEND:
        stored = op[fields.SHARED] * size
        return of_token | {fields.WEIGHT: stored, fields.WEIGHT_2: stored}
    return of_token | {fields.WEIGHT: size, fields.BIAS: size}


def _check_sizes(program: Program) -> None:
    """Raise Unknown unless operations, buffers and weights agree in size.

    The kernels compute addresses from sizes, and nothing else stops them at the end of a tensor.
    """
    stored = program.shared_heads * program.head_dim
    of_token = {"stream": program.size, "out": program.outputs}
    of_token |= {"k_store": stored, "v_store": stored} | program.buffers
    for op, field, of, offset in program.places:
        needed = numbers_at(program.ops[op]).get(field)
        if isinstance(of, int):
            assert needed is not None
            fits = offset + needed * program.dtype.itemsize <= program.weights[of].nbytes
        else:
            fits = needed is None or needed == of_token[of]
        if not fits:
            raise Unknown("weights differ in size from what they are multiplied by")
