"""What a first call compiles beside its prompt, and what its steps have to compile themselves.

`python -m tests.helpers.first_call llama greedy` runs a call on the CPU as on a GPU, with kernels
that Triton compiles and launches in name only. It needs a process without TRITON_INTERPRET.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any
from unittest.mock import patch

import pytest
import torch
import triton
from triton.runtime.jit import JITFunction

import lookahead_hf
from lookahead_hf import SpeculativeConfig, kernels
from lookahead_hf.kernels import _launch, ahead
from tests.helpers.ahead_of_time import GPUS, Driver
from tests.helpers.compared import served
from tests.helpers.device import taped
from tests.helpers.models import prompt, tiny

FIELDS: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "head_dim": 16,
    "num_hidden_layers": 2,
}
KINDS = {"gemma3": {"layer_types": ["sliding_attention", "full_attention"]}}


class Named:
    """A kernel that was compiled in name only."""

    function = packed_metadata = None

    def run(self, *_: Any) -> None:
        pass

    def launch_metadata(self, *_: Any) -> None:
        pass


def main(name: str, do_sample: bool) -> None:
    """Print how many variants each thread compiles in a first call."""
    compiled: dict[str, list[str]] = {"beside": [], "step": []}
    launched = set()

    def compile_in_name(kernel: Any, key: Any, signature: Any, device: Any, *_: Any) -> Named:
        is_beside = threading.current_thread() in _launch.threads
        compiled["beside" if is_beside else "step"].append(kernel.fn.__name__)
        return kernel.device_caches[device][0].setdefault(key, Named())

    def compile_first(*given: Any) -> None:
        beside(*given)
        for thread in list(_launch.threads):
            thread.join()

    def launching(kernel: Any, *given: Any, **arguments: Any) -> Any:
        if not arguments["warmup"]:
            launched.add(kernel.fn.__name__)
        return run(kernel, *given, **arguments)

    def zeros(*given: Any, **options: Any) -> torch.Tensor:
        made = empty(*given, **options)  # which no kernel writes to
        return made if made.is_meta else made.zero_()

    empty, beside, run = torch.empty, ahead.compile_beside, JITFunction.run
    model = tiny(name, **FIELDS, **KINDS.get(name, {}))
    triton.runtime.driver.set_active(Driver(GPUS["sm_90"].target))
    os.environ |= {"TRITON_INTERPRET": "1", "LOOKAHEAD_HF_BACKEND": "triton"}  # for `backend`
    assert kernels.backend(torch.device("cpu")) == "triton"
    config = SpeculativeConfig(cuda_graphs=True, budget=40)
    with (
        pytest.MonkeyPatch.context() as monkeypatch,
        taped(monkeypatch),
        patch.object(JITFunction, "_do_compile", compile_in_name),
        patch.object(JITFunction, "run", launching),
        patch.object(ahead, "compile_beside", compile_first),
        patch.object(torch, "empty", zeros),
        lookahead_hf.enabled(model),
    ):
        model.generate(prompt(), max_new_tokens=70, do_sample=do_sample, speculative=config)
    assert served(model).num_drafted > 64
    print(len(compiled["beside"]), len(launched), *compiled["step"])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] == "sampled")
