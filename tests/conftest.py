"""What every test relies on: no network, one thread, a fixed seed, kernels in the interpreter."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from typing import Any

# Before any import that reads them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"

import pytest
import torch
import transformers

if not torch.cuda.is_available():
    # Triton reads it when a kernel's module is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from tests.helpers.device import TapeRecorder, taped
from tests.helpers.fakes import PlainDecoding
from tests.helpers.models import characters, tiny
from tests.helpers.replayed import WIDTHS

torch.set_num_threads(1)

LONGEST = ("test_real_model.py", "test_properties.py")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.addoption("--check-bounds", action="store_true", help="check every call of CPU kernels")
    parser.addoption("--requests", type=int, default=8, help="random requests to a server")
    parser.addoption("--random-calls", type=int, default=500, help="calls of the property test")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # First what takes longest, so that no process waits for it at the end.
    items.sort(key=lambda item: not any(file in item.nodeid for file in LONGEST))
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):  # a folder may have that name, too
            item.add_marker(pytest.mark.skip(reason="needs an accelerator"))


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device that was asked for by `--device`."""
    return torch.device(request.config.getoption("--device"))


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """Every test begins with the same random numbers."""
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def compiled(request: pytest.FixtureRequest) -> None:
    """No call decodes plainly because another process still compiles.

    Tests of a GPU alone need no kernels for a CPU, which take 46 seconds of one core.
    """
    import lookahead_hf.drafting.registry  # noqa: F401 (says what there is to compile)
    from lookahead_hf.engines.cpu.kernels import program
    from lookahead_hf.ngram_pool import compilation

    if importlib.util.find_spec("numba"):
        groups = [compilation.drafting]
        if request.config.getoption("markexpr") != "gpu":
            groups += program.groups_of(program.KINDS)
        compilation.wait(groups)


@pytest.fixture(scope="module")
def compiles() -> Iterator[None]:
    """Compiled functions may be called with types that no call of `generate` has."""
    from lookahead_hf.ngram_pool import jit

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jit, "may_compile", True)
        yield


@pytest.fixture(scope="session", autouse=True)
def bounds(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compiled kernels stay within their memory, if `--check-bounds` asks for that."""
    if not request.config.getoption("--check-bounds"):
        yield
        return
    from tests.helpers.bounds import bounds_checked

    with bounds_checked():
        yield


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[TapeRecorder]]:
    """The recorders of a test, one per call that asks for graphs; few of them record anything."""
    monkeypatch.setattr("lookahead_hf.engines.cuda.graphs.WIDTHS", WIDTHS)
    with taped(monkeypatch) as recorders:
        yield recorders


@pytest.fixture
def decoding(monkeypatch: pytest.MonkeyPatch) -> PlainDecoding:
    """Plain decoding in place of the library's: tests see which calls reach it, and how."""
    fake = PlainDecoding()
    monkeypatch.setattr("lookahead_hf.generation.strategy.decode", fake)
    return fake


@pytest.fixture
def model() -> Any:
    """A tiny Llama."""
    return tiny("llama")


@pytest.fixture
def llava() -> tuple[Any, Any]:
    """A tiny model that reads pictures, with its processor."""
    pytest.importorskip("PIL")
    tokenizer = characters(pad_token="!", extra_special_tokens={"image_token": "#"})
    vision = transformers.CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        image_size=16, patch_size=8, projection_dim=16,
    )  # fmt: skip
    config = transformers.LlavaConfig(
        vision_config=vision,
        text_config=tiny("llama").config,
        image_token_id=tokenizer.convert_tokens_to_ids("#"),
    )
    model = transformers.LlavaForConditionalGeneration(config).eval()
    model.generation_config.eos_token_id = None
    processor = transformers.LlavaProcessor(
        transformers.CLIPImageProcessorPil(
            size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}
        ),
        tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token="#",
    )
    return model, processor
