"""Models whose `generate` a library or a repository has replaced write plain's text."""

from __future__ import annotations

import copy
import functools
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaForCausalLM, dynamic_module_utils

import lookahead_hf
from lookahead_hf.hook import custom_generate
from tests.helpers.compared import speculated
from tests.helpers.models import prompt, tiny

REPOSITORY = Path(__file__).parents[1] / "examples" / "custom_generate"
SETTINGS = {"max_new_tokens": 24, "do_sample": False}
BUDGET = lookahead_hf.SpeculativeConfig(budget=8)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    ids = prompt()
    output = tiny("llama").generate(ids, attention_mask=torch.ones_like(ids), **SETTINGS)
    return output.tolist()


def generate(model: Any, **kwargs: Any) -> list[list[int]]:
    """Generate by keywords, as a custom `generate` takes them."""
    ids = prompt()
    output = model.generate(
        inputs=ids, attention_mask=torch.ones_like(ids), **{**SETTINGS, **kwargs}
    )
    return output.tolist()


def unsloth_generate(self: Any, *args: Any, **kwargs: Any) -> Any:
    """As a library that replaces `generate` on the object and prepares the model for it."""
    self.prepared = True
    return self._old_generate(*args, **kwargs)


def test_a_method_that_somebody_bound(model: Any, expected: list[list[int]]) -> None:
    model._old_generate = model.generate
    model.generate = MethodType(unsloth_generate, model)
    lookahead_hf.enable(model)
    assert generate(model, speculative=BUDGET) == expected
    assert model.prepared
    speculated(model)
    twin = pickle.loads(pickle.dumps(model))
    assert generate(twin, speculative=BUDGET) == expected
    speculated(twin)


@pytest.fixture
def modules_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers keeps the code that it loads in a folder; here in one of this test's."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))


@pytest.mark.parametrize("is_enabled", [False, True])
def test_a_call_that_names_a_repository(
    model: Any, is_enabled: bool, expected: list[list[int]], modules_cache: None
) -> None:
    if is_enabled:
        lookahead_hf.enable(model)
    call = functools.partial(
        generate, model, custom_generate=str(REPOSITORY), trust_remote_code=True
    )
    assert call() == expected
    assert lookahead_hf.last_stats(model) is not None
    if is_enabled:
        return  # and `speculative=` would ask for two strategies
    assert call(speculative=BUDGET, prediction=expected[0][12:]) == expected
    assert speculated(model).per_source["prediction"].accepted > 15
    assert call(speculative=False) == expected
    assert lookahead_hf.last_stats(model) is None


def test_a_model_loaded_from_such_a_repository(
    model: Any, tmp_path: Path, expected: list[list[int]], modules_cache: None
) -> None:
    model.save_pretrained(tmp_path / "mine")
    shutil.copytree(REPOSITORY / "custom_generate", tmp_path / "mine" / "custom_generate")
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "mine", trust_remote_code=True)
    found = vars(loaded)["generate"]
    assert isinstance(found, functools.partial) and found.func is custom_generate
    lookahead_hf.set_default(loaded, {"budget": 8})
    assert generate(loaded) == expected
    speculated(loaded)
    ids = prompt()
    assert loaded.generate(ids, **SETTINGS).tolist() == expected  # by position
    lookahead_hf.enable(loaded)
    assert generate(loaded) == expected
    speculated(loaded)
    assert lookahead_hf.generate(loaded, ids, **SETTINGS).tolist() == expected
    speculated(loaded)
    twin = copy.deepcopy(loaded)
    assert generate(twin) == expected
    speculated(twin)
    lookahead_hf.disable(loaded)
    assert vars(loaded)["generate"] is found


PASSES_ON = """
from transformers import GenerationMixin

def generate(model, penalty=1.3, **kwargs):
    return GenerationMixin.generate(model, repetition_penalty=penalty, **kwargs)

"""
DECLARED = "generate.speculative_passthrough = True\n"
LOOP = """
import torch

def generate(model, inputs, attention_mask=None, max_new_tokens=4, do_sample=False, **kwargs):
    for _ in range(max_new_tokens):
        logits = model(inputs, **kwargs).logits
        inputs = torch.cat([inputs, logits[:, -1:].argmax(-1)], 1)
    return inputs
"""


def loaded_with(source: str, model: Any, folder: Path) -> Any:
    """The model, loaded from a folder that brings its own `generate`."""
    model.save_pretrained(folder)
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(source)
    return LlamaForCausalLM.from_pretrained(folder, trust_remote_code=True)


def test_a_repository_that_declares_to_pass_its_arguments_on(
    model: Any, tmp_path: Path, expected: list[list[int]], modules_cache: None
) -> None:
    loaded = loaded_with(PASSES_ON + DECLARED, model, tmp_path / "mine")
    own = generate(loaded)
    assert own != expected
    lookahead_hf.enable(loaded)
    assert generate(loaded, speculative=BUDGET) == own
    speculated(loaded)
    assert generate(loaded, penalty=1.0, speculative=BUDGET) == expected
    speculated(loaded)


@pytest.mark.parametrize("source", [LOOP, PASSES_ON])
def test_a_repository_that_declares_nothing(
    source: str, model: Any, tmp_path: Path, modules_cache: None
) -> None:
    loaded = loaded_with(source, model, tmp_path / "mine")
    own = generate(loaded)
    lookahead_hf.enable(loaded)
    match = "own_generate.*speculative_passthrough"
    with pytest.warns(lookahead_hf.SpeculationFallbackWarning, match=match):
        assert generate(loaded, speculative=BUDGET) == own


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    if not dist.is_available():
        pytest.skip("torch is built without distributed")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_data_parallel(model: Any, group: None, expected: list[list[int]]) -> None:
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    lookahead_hf.enable(wrapped)
    assert generate(wrapped.module, speculative=BUDGET) == expected
    speculated(model)
    assert lookahead_hf.generate(wrapped, prompt(), **SETTINGS).tolist() == expected


@pytest.mark.parametrize("is_first", [True, False])
def test_sharded_before_and_after(
    model: Any, is_first: bool, group: None, expected: list[list[int]]
) -> None:
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (1,))
    if is_first:
        lookahead_hf.enable(model)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    lookahead_hf.enable(model)
    assert type(model).__name__ == "FSDPLlamaForCausalLM"
    assert generate(model, speculative=BUDGET) == expected
    speculated(model)
