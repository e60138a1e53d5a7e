"""Norms that one compiled function computes in our steps on a CPU, in place of eight operations.

Between two matrix products the caches of a core have lost the code of torch and of Python: the
eight operations of a root mean square norm take 20 us one after another, and 50 in a step. For the
length of a step, a stand-in lies under each norm whose class computes what Llama's does. It gives
the same bits, and calls the module itself in every other case.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache
from types import FunctionType, ModuleType
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import nn
from transformers.models.llama import modeling_llama

from lookahead_hf.ngram_pool import compilation
from lookahead_hf.runner.stand_ins import OnThread, StandIns, only_computes

_logger = logging.getLogger(__name__)

MOST_NUMBERS = 32768
"""Largest input. For a larger one, torch's operations use several threads."""

TRIED_ROWS = 512

_DTYPE, _RSQRT = torch.bfloat16, torch.rsqrt

_same_bits: dict[tuple[type, int], bool] = {}
"""Whether the compiled function has the bits of norms of a class and a size, of which the first one
was tried."""


class NormCalls(StandIns):
    """The norms of a model, for the steps of one call."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        """Find the norms that the compiled function can take, none before it is compiled."""
        super().__init__()
        norms = [each for each in modules if _is_served(each)]
        if norms and compilation.ready():
            self.stand_ins = [_StandIn(self.thread, each) for each in norms if _has_same_bits(each)]

    def step(self) -> AbstractContextManager[None]:
        """Return a context in which this thread's calls of the norms go through the stand-ins."""
        is_torchs = torch.rsqrt is _RSQRT  # what the forward of a norm looks up there
        return self.laid_under() if self.stand_ins and is_torchs else nullcontext()


class _StandIn:
    """Computes a norm in place of the module."""

    def __init__(self, thread: OnThread, module: Any) -> None:
        self.thread, self.module, self.weight = thread, ref(module), module.weight
        self.forward, self.norm = type(module).forward, _functions().norm
        self.address, self.size = self.weight.data_ptr(), len(self.weight)

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x, size, module = hidden_states, self.size, self.module()
        assert module is not None
        epsilon = module.variance_epsilon
        if (
            not self.thread.depth
            or type(x) is not torch.Tensor
            or x.dtype is not _DTYPE
            or x.shape[-1] != size
            or x.numel() > MOST_NUMBERS
            or not (x.is_cpu and x.is_contiguous())
            or module._parameters.get("weight") is not self.weight
            or self.weight.data_ptr() != self.address
            or type(epsilon) is not float
            or type(module).forward is not self.forward
            or not only_computes(module)
        ):
            own: torch.Tensor = module._call_impl(hidden_states)
            return own
        out = torch.empty_like(x)
        addresses = out.data_ptr(), x.data_ptr(), self.address
        self.norm(*addresses, x.numel() // size, size, epsilon)
        return out


def _is_served(module: nn.Module) -> bool:
    """Whether a module is a norm whose forward is Llama's, with a weight in bfloat16 on a CPU."""
    kind, weight = type(module), module._parameters.get("weight")
    is_plain = kind.__bases__ == (nn.Module,) and kind.__call__ is nn.Module.__call__
    return (
        is_plain
        and kind.__getattr__ is nn.Module.__getattr__
        and _is_llamas(kind.forward)
        and type(vars(module).get("variance_epsilon")) is float
        and len(module._parameters) == 1
        and type(weight) is nn.Parameter
        and (weight.dtype, weight.dim(), weight.device.type) == (_DTYPE, 1, "cpu")
        and weight.is_contiguous()
        and len(weight) <= MOST_NUMBERS
    )


def _is_llamas(forward: Any) -> bool:
    """Whether a forward has the instructions of that of Llama's norm, which nobody has replaced."""
    llamas: Any = modeling_llama.LlamaRMSNorm.forward
    if not (isinstance(forward, FunctionType) and isinstance(llamas, FunctionType)):
        return False
    if (
        llamas.__globals__ is not vars(modeling_llama)
        or forward.__globals__.get("torch") is not torch
    ):
        return False
    parts = ("co_code", "co_names", "co_varnames", "co_consts", "co_argcount", "co_flags")
    codes = llamas.__code__, forward.__code__
    return all(getattr(codes[0], part) == getattr(codes[1], part) for part in parts)


def _has_same_bits(module: Any) -> bool:
    """Whether the compiled function has the bits of a norm; tried once for a class and a size."""
    kind = type(module), len(module.weight)
    if kind not in _same_bits:
        try:
            _same_bits[kind] = _try(module, len(module.weight))
        except Exception as error:  # numba's
            _logger.info("norms are left to torch: %r", error)
            _same_bits[kind] = False
    return _same_bits[kind]


@torch.no_grad()
def _try(module: Any, size: int) -> bool:
    """Compare the results, and in float32 the means, which show another order of additions."""
    generator = np.random.default_rng(0)
    scales = np.logspace(-12, 12, TRIED_ROWS, dtype=np.float32)[:, None]
    numbers = generator.standard_normal((TRIED_ROWS, size), np.float32) * scales
    x, functions = torch.from_numpy(numbers).to(_DTYPE), _functions()
    out, means = torch.empty_like(x), np.empty(TRIED_ROWS, np.float32)
    addresses = out.data_ptr(), x.data_ptr(), module.weight.data_ptr()
    functions.norm(*addresses, TRIED_ROWS, size, module.variance_epsilon)
    functions.means_of_squares(means, x.data_ptr(), size)
    own, mean = type(module).forward(module, x), x.float().pow(2).mean(-1)
    has_same_means = torch.equal(mean, torch.from_numpy(means))
    return has_same_means and torch.equal(own.view(torch.int16), out.view(torch.int16))


@cache
def _functions() -> ModuleType:
    with compilation.importing_numba():
        from lookahead_hf.runner import _norm_numba
    return _norm_numba


def _warm_up() -> None:
    x, means = np.ones(64, np.uint16), np.empty(1, np.float32)
    address = x.ctypes.data
    with suppress(Exception):  # drafting goes on without compiled norms
        _functions().norm(address, address, address, 1, 64, 1e-6)
        _functions().means_of_squares(means, address, 64)


compilation.register(_warm_up)
