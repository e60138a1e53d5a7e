"""The code that the compiled kernels know: that of some decoders of transformers, and its equals.

A class is known by its forward, not by its name: by the function's instructions, the names in them,
and the functions that these names refer to.
"""

from __future__ import annotations

import importlib
import sys
from functools import cache
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lookahead_hf.model import compat

_PREFIXES = {
    "llama": "Llama",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "mistral": "Mistral",
    "gemma": "Gemma",
    "gemma2": "Gemma2",
    "gemma3": "Gemma3",
    "phi3": "Phi3",
    "granite": "Granite",
    "olmo2": "Olmo2",
    "smollm3": "SmolLM3",
    "starcoder2": "Starcoder2",
}
"""Modules of transformers whose code the kernels compute, and the prefixes of their classes. They
are imported in this order until one has the code in question."""

_PARTS = ("DecoderLayer", "Attention", "MLP", "RMSNorm", "Model", "TextModel")

NORM = compat.NORM_METHOD

_FUNCTIONS = ("apply_rotary_pos_emb", "rotate_half", "eager_attention_forward", "repeat_kv")

_STOCK = {"torch": torch, "nn": nn, "ALL_ATTENTION_FUNCTIONS": ALL_ATTENTION_FUNCTIONS}

_LIBRARIES = ("torch", "transformers")

_FIELDS = ("co_code", "co_names", "co_varnames", "co_argcount", "co_kwonlyargcount", "co_freevars")


def is_known(part: str, function: Any) -> bool:
    """Return whether a function has the code of a part of a known decoder.

    Args:
        part: The end of a class's name, or the name of a function.
        function: The forward of the class, or the function.
    """
    instructions = _instructions(function)
    if instructions is None:
        return False
    parts = ("Model", "TextModel") if part == "Model" else (part,)
    modules = map(_of_module, _PREFIXES)  # imported only as far as needed
    has_code = any(instructions in known.get(each, ()) for known in modules for each in parts)
    return has_code and _has_own_names(function)


@cache
def _of_module(name: str) -> dict[str, list[Any]]:
    """Return the instructions of the parts of a decoder of transformers."""
    try:
        module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    except ImportError:  # this version of transformers lacks it
        return {}
    found: dict[str, list[Any]] = {}
    for part in _PARTS:
        kind = getattr(module, _PREFIXES[name] + part, None)
        if kind is not None:
            found[part] = _own_instructions(module, kind.forward)
            if NORM in vars(kind):
                found[NORM] = _own_instructions(module, getattr(kind, NORM))
    for function in _FUNCTIONS:
        if hasattr(module, function):
            found[function] = _own_instructions(module, getattr(module, function))
    return found


def _own_instructions(module: Any, function: Any) -> list[Any]:
    """Return the instructions of a function that a module defines, none if it was replaced."""
    return [_instructions(function)] if _is_from(module, function) else []


def is_own(kind: Any) -> bool:
    """Return whether the forward of a class is from the file of the class."""
    return _is_from(sys.modules[kind.__module__], kind.forward)


def _is_from(module: Any, function: Any) -> bool:
    return getattr(unwrapped(function)[-1], "__globals__", None) is vars(module)


def unwrapped(function: Any) -> list[Any]:
    """Return a function and those that it wraps, one inside the other.

    Only wrappers of torch and transformers count: any other may do something else.
    """
    chain = [function]
    while hasattr(chain[-1], "__wrapped__") and _is_of_library(chain[-1]):
        chain.append(chain[-1].__wrapped__)
    return chain


def _is_of_library(function: Any) -> bool:
    own = getattr(function, "__globals__", {})
    return str(own.get("__name__")).partition(".")[0] in _LIBRARIES


def _instructions(function: Any) -> Any:
    """Return the code of a function and its wrappers, without names and places of their own."""
    chain = unwrapped(function)
    if not all(isinstance(each, FunctionType) for each in chain):
        return None
    return tuple((_of_code(each.__code__), _settings(each, chain)) for each in chain)


def _settings(function: FunctionType, chain: list[Any]) -> tuple[str, ...]:
    """Return a function's defaults and closure, without the functions that it wraps."""
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    others = [each for each in cells if all(each is not known for known in chain)]
    return tuple(map(repr, (function.__defaults__, function.__kwdefaults__, others)))


def _of_code(code: CodeType) -> tuple[Any, ...]:
    own = tuple(getattr(code, field) for field in _FIELDS)
    consts = code.co_consts[1:] if isinstance(code.co_consts[0], str) else code.co_consts
    inner = (_of_code(each) if isinstance(each, CodeType) else each for each in consts)
    return own, tuple(map(repr, inner))


def own_names(function: Any) -> list[tuple[dict[str, Any], str, Any]]:
    """Return the global names that a forward looks up: the mapping, the name, and its value."""
    function = unwrapped(function)[-1]
    own, names = function.__globals__, function.__code__.co_names
    looked_up = [name for name in (*_FUNCTIONS, *_STOCK) if name in names and name in own]
    found = [(own, name, own[name]) for name in looked_up]
    return found + [each for _, name, of in found if name in _FUNCTIONS for each in own_names(of)]


def _has_own_names(function: Any) -> bool:
    """Return whether the names that a known function looks up have their original values."""
    return all(
        is_known(name, each) if name in _FUNCTIONS else each is _STOCK[name]
        for _, name, each in own_names(function)
    )
