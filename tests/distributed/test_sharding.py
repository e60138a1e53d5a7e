"""How models lie over processes, told from what they carry."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import distributed, nn

from lookahead_hf import distributed as coordinator
from lookahead_hf.fallback import Unserved
from lookahead_hf.sources.assistant.drafter import AssistantDrafter
from tests.helpers.models import tiny


class Mesh:
    """What is asked of a device mesh."""

    def __init__(self, *shape: int, names: tuple[str, ...] = ()) -> None:
        self.shape, self.ndim, self.mesh_dim_names = shape, len(shape), names

    def size(self) -> int:
        return int(torch.tensor(self.shape).prod())

    def get_group(self) -> Any:
        return f"group of {self.shape}"


@pytest.fixture
def several(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is one of several."""
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_world_size", lambda: 4)


def lies_over(monkeypatch: pytest.MonkeyPatch, *meshes: Any) -> None:
    monkeypatch.setattr(coordinator, "_meshes", lambda _: list(meshes))


def decided_by(model: Any, *, synced: bool = False, assistant: Any = None) -> coordinator.Processes:
    return coordinator.processes_for(
        model, torch.device("cpu"), synced=synced, draws=False, assistant=assistant
    )


def test_a_model_of_one_process() -> None:
    model = tiny("llama")
    assert not coordinator.is_spread(model) and coordinator.tensor_group(model) is None
    assert type(decided_by(model)) is coordinator.Processes


def test_whole_models_in_several_processes(several: None) -> None:
    model = tiny("llama")
    assert not coordinator.is_spread(model) and coordinator.tensor_group(model) is None
    assert type(decided_by(model)) is coordinator.Processes
    assert type(decided_by(model, synced=True)) is coordinator.InStep


def test_weights_of_deepspeed(several: None) -> None:
    model = nn.Linear(2, 2)
    assert not coordinator.is_sharded(model)
    model.weight.ds_id = 0  # type: ignore[assignment]
    assert coordinator.is_sharded(model) and coordinator.is_spread(model)
    with pytest.raises(Unserved, match="synced_gpus=True"):
        decided_by(model)
    assert type(decided_by(model, synced=True)) is coordinator.InStep


def test_an_assistant_that_is_spread(several: None) -> None:
    """Only one process would run it, or each as often as it likes."""
    model, assistant = tiny("llama"), tiny("llama", num_hidden_layers=1)
    assistant.lm_head.weight.ds_id = 0
    with pytest.raises(Unserved, match="give every process the whole assistant"):
        decided_by(model, synced=True, assistant=assistant)
    assert type(decided_by(model, assistant=assistant)) is coordinator.Processes
    with pytest.raises(ValueError, match="whole in the process"):
        AssistantDrafter(assistant)


def test_one_mesh_is_served(several: None, monkeypatch: pytest.MonkeyPatch) -> None:
    lies_over(monkeypatch, Mesh(2))
    assert coordinator.tensor_group(nn.Linear(2, 2)) == "group of (2,)"


@pytest.mark.parametrize(
    ("meshes", "is_sharded"),
    [([Mesh(2, 2)], False), ([Mesh(2), Mesh(4)], False), ([Mesh(2), Mesh(4)], True)],
    ids=["two dimensions", "two meshes", "sharded too"],
)
def test_what_is_not_served(
    several: None, monkeypatch: pytest.MonkeyPatch, meshes: list[Mesh], is_sharded: bool
) -> None:
    model = nn.Linear(2, 2)
    if is_sharded:
        model.weight.ds_id = 0  # type: ignore[assignment]
    lies_over(monkeypatch, *meshes)
    with pytest.raises(Unserved, match="tensor_parallel"):
        coordinator.check(model)


def test_a_pipeline_of_processes_is_not_served() -> None:
    model = tiny("llama")
    model._device_mesh = Mesh(2, 1, 1, names=("pp", "fsdp", "tp"))
    with pytest.raises(Unserved, match="a pipeline of 2 processes"):
        coordinator.check(model)
    model._device_mesh = Mesh(1, 1, 2, names=("pp", "fsdp", "tp"))
    coordinator.check(model)
