"""Layers of one input in one product: plain's text, and a model that shows nothing of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.pytorch_utils import id_tensor_storage

import lookahead_hf
from lookahead_hf.model_state import state_of
from lookahead_hf.runner.cuda import joined_linear
from lookahead_hf.runner.cuda.joined_linear import JoinedLinears, joined
from tests.helpers.calls import GREEDY, padded
from tests.helpers.changes import (
    adapted,
    given_a_bias,
    hooked,
    merged,
    replaced_data,
    replaced_parameter,
)
from tests.helpers.device import HostReads, Tape, TapeRecorder, on_device
from tests.helpers.models import prompt, tiny
from tests.helpers.replayed import Switch, compare, compare_calls, sets_of, small, streamed

JOINED = {"packed_weights": True}


def names_of(model: Any, kept: JoinedLinears | None = None) -> list[str]:
    """Last parts of the names of the layers that are joined now, in the order of their calls."""
    kept = kept or state_of(model).joined
    assert kept is not None and kept.are_current()
    names = {module: name.rpartition(".")[2] for name, module in model.named_modules()}
    return [names[stand_in.module()] for stand_in in kept.stand_ins]


def num_products(model: Any) -> int:
    kept = state_of(model).joined
    return 0 if kept is None else kept.thread.num_products


def with_biases() -> Any:
    return tiny("llama", attention_bias=True, num_hidden_layers=2)


ATTENTION, GATED = ["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"]


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("make", "of_layer", "saved"),
    [
        (small, ATTENTION + GATED, 3),
        (with_biases, ATTENTION + GATED, 3),
        pytest.param(lambda: tiny("gemma3"), ATTENTION + GATED, 3, marks=SLOW),
        pytest.param(lambda: tiny("mixtral"), ATTENTION, 2, marks=SLOW),
        pytest.param(lambda: tiny("phi"), ATTENTION, 2, marks=SLOW),
        pytest.param(lambda: tiny("gpt2"), [], 0, marks=SLOW),
    ],
    ids=["llama", "biases", "gemma3", "mixtral", "phi", "gpt2"],
)
def test_joined_layers_write_plains_text(
    make: Callable[[], Any], of_layer: list[str], saved: int, made: list[TapeRecorder]
) -> None:
    counts = []
    for fields in ({}, JOINED):
        model = make()  # a tape of the other one holds its weights, as no graph does
        layers = model.config.num_hidden_layers
        assert compare(model, padded("left"), fields).execution == "replayed"
        counts.append(len(sets_of(made)[-1].recordings[0].tape.calls))
    assert names_of(model) == of_layer * layers
    assert counts[0] - counts[1] == saved * layers
    assert len(sets_of(made)) == 2


@pytest.mark.parametrize(
    "call", [{}, {"do_sample": True, "top_k": 20}, {"no_repeat_ngram_size": 4}]
)
def test_steps_that_are_not_captured_join_layers_too(
    call: dict[str, Any], made: list[TapeRecorder]
) -> None:
    model, fields = small(), {**JOINED, "cuda_graphs": False}
    stats = compare_calls(model, lambda: {**GREEDY, **call, **padded("holes")}, fields)
    assert stats.execution == "not asked for"
    assert num_products(model) >= 10 * stats.num_steps


# What others see of the model.


def test_nothing_that_saves_a_model_sees_a_difference(
    made: list[TapeRecorder], tmp_path: Any
) -> None:
    model = with_biases()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    parameters, copies = dict(model.named_parameters()), []

    def saved() -> None:
        model.save_pretrained(tmp_path / "in a call")
        copies.append(copy.deepcopy(model))

    assert text(model, JOINED, Switch({5: saved})) == text(with_biases(), {})
    model.save_pretrained(tmp_path / "after it")
    save_file(model.state_dict(), tmp_path / "by itself")  # refuses shared weights
    torch.save(model.model.layers[0].self_attn.q_proj.state_dict(), tmp_path / "of one layer")
    loaded = [type(model).from_pretrained(tmp_path / name) for name in ("in a call", "after it")]
    states = [each.state_dict() for each in (model, *copies, *loaded)]
    for state in (*states, load_file(tmp_path / "by itself")):
        assert state.keys() == before.keys()
        assert all(torch.equal(state[name], value) for name, value in before.items())
    assert all(parameters[name] is each for name, each in model.named_parameters())
    storages = {id_tensor_storage(each) for each in model.parameters()}
    assert len(storages) == len(parameters), "transformers and accelerate drop shared weights"
    q = model.model.layers[0].self_attn.q_proj
    assert (tmp_path / "of one layer").stat().st_size < q.weight.nbytes + q.bias.nbytes + 4000
    assert len(state_of(model).joined.stand_ins) == 10  # type: ignore[union-attr]
    assert not any("_compiled_call_impl" in vars(module) for module in model.modules())


def test_the_weights_are_in_memory_once(made: list[TapeRecorder]) -> None:
    model = small()
    text(model, JOINED)
    attended = model.model.layers[1].self_attn
    q, k, v = attended.q_proj.weight, attended.k_proj.weight, attended.v_proj.weight
    assert (k.data_ptr(), v.data_ptr()) == (q.data_ptr() + q.nbytes, k.data_ptr() + k.nbytes)
    assert [each.untyped_storage().nbytes() for each in (q, k, v)] == [q.nbytes, k.nbytes, v.nbytes]
    text(model, JOINED)
    assert q.data_ptr() == attended.q_proj.weight.data_ptr(), "they move once"
    lookahead_hf.disable(model)
    assert state_of(model).joined is None
    assert all(each.untyped_storage().resizable() for each in (q, k, v)), "apart again"
    assert (k.data_ptr(), v.data_ptr()) != (q.data_ptr() + q.nbytes, k.data_ptr() + k.nbytes)
    text(model, JOINED)
    assert k.data_ptr() == q.data_ptr() + q.nbytes
    q.data.zero_()
    assert k.count_nonzero() == k.numel()


def text(
    model: Any, fields: dict[str, Any], streamer: Any = None, graphs: bool = True
) -> list[int]:
    return streamed(model, graphs, streamer, **fields)[0]


# Changes to the model.


@torch.no_grad()
def written(model: Any) -> None:
    model.model.layers[0].self_attn.k_proj.weight.mul_(-2)


def loaded(model: Any) -> None:
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})


def transposed_data(model: Any) -> None:
    weight = model.model.layers[1].self_attn.q_proj.base.weight
    weight.data = weight.data.t()


def replaced_forward(model: Any) -> None:
    layer = model.model.layers[0].mlp.gate_proj
    layer.forward = lambda x: nn.functional.linear(x, layer.weight) * 2


def moved(model: Any) -> None:
    model.to(torch.float64).to(torch.float32)


def disabled(model: Any) -> None:
    lookahead_hf.disable(model)  # takes the joined weights apart in the middle of a call


CHANGES = (
    merged, written, loaded, replaced_data, replaced_parameter, given_a_bias, hooked,
    replaced_forward, moved, disabled,
)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "graphs"),
    [(change, True) for change in CHANGES]
    + [(change, False) for change in (hooked, transposed_data)],
)
def test_a_change_counts_at_once(
    change: Callable[[Any], None], graphs: bool, made: list[TapeRecorder]
) -> None:
    own, ours = adapted(small), adapted(small)
    first = text(ours, JOINED, graphs=graphs)
    in_call = [
        text(model, fields, Switch({8: lambda model=model: change(model)}), is_captured)
        for model, fields, is_captured in ((own, {}, False), (ours, JOINED, graphs))
    ]
    assert in_call[0] == in_call[1]
    changed = text(own, {}, graphs=False)
    assert text(ours, JOINED, graphs=graphs) == changed
    assert change in (moved, merged, disabled) or changed != first
    assert num_products(ours) > 0


# What is left alone.


class Read(nn.Module):
    """Three layers that read the same input."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 4, **settings) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.first(x), self.second(x), self.third(x)], -1)


def joined_in(model: nn.Module, input_shape: tuple[int, ...] = (2, 3, 8)) -> list[str]:
    x = torch.randn(input_shape)

    @torch.no_grad()
    def step() -> torch.Tensor:
        return model(x.to(next(model.parameters()).dtype))

    own = step()
    kept = joined(model, step)
    assert torch.allclose(step(), own)
    return [] if kept is None else names_of(model, kept)


def shared(model: Read) -> None:
    model.second.weight = model.first.weight


def shared_by_data(model: Read) -> None:
    model.second.weight.data = model.first.weight.data


def with_an_alias(model: Read) -> None:
    model.kept = [model.second.weight.detach()]  # as in a state dict that somebody keeps


def of_another_model(model: Read) -> None:
    other = Read()
    other.second = model.second
    assert joined_in(other) == ["first", "second", "third"]
    model.kept = [other]


def part_of_a_buffer(model: Read) -> None:
    model.register_buffer("flat", torch.randn(8 * 4 + 8))
    model.second.weight.data = model.flat[8:].view(4, 8)


def without_a_bias(model: Read) -> None:
    model.second.bias = None


def of_a_subclass(model: Read) -> None:
    class Own(nn.Linear):
        pass

    model.second.__class__ = Own


def quantised(model: Read) -> None:
    class Weight(nn.Parameter):
        pass

    model.second.weight = Weight(model.second.weight.detach())


def hooked_before(model: Read) -> None:
    model.second.register_forward_pre_hook(lambda m, args: (args[0] * 2,))


def in_an_adapter(model: Read) -> None:
    model.second = nn.Sequential()
    model.second.base_layer = nn.Linear(8, 4)


@pytest.mark.parametrize(
    "change",
    [shared, shared_by_data, with_an_alias, of_another_model, part_of_a_buffer, of_a_subclass,
     quantised, hooked_before, in_an_adapter, without_a_bias],
)  # fmt: skip
def test_what_is_not_a_layers_own_is_left_alone(change: Callable[[Read], None]) -> None:
    model = Read()
    change(model)
    first, second, third = (id_tensor_storage(each) for each in weights_of(model))
    found = joined_in(model)
    assert "second" not in found
    assert id_tensor_storage(weights_of(model)[1]) == second
    if change is shared_by_data:
        assert model.first.weight.data_ptr() == model.second.weight.data_ptr()


def weights_of(model: Read) -> list[torch.Tensor]:
    second = getattr(model.second, "base_layer", model.second)
    return [layer.weight for layer in (model.first, second, model.third)]


# Where nothing is joined.


class TakesPartsForWholes(nn.Module):
    """Reads its layers' outputs by address, as a kernel may that was written for whole tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.read = Read()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = [layer(x) for layer in (self.read.first, self.read.second, self.read.third)]
        return torch.cat([out.as_strided((2, 3, 4), (12, 4, 1)) for out in outputs], -1)


class NeedsWholes(Read):
    """Asks for a view that a part of a product does not have."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x).view(-1) * self.second(x).view(-1)


@pytest.mark.parametrize("kind", [TakesPartsForWholes, NeedsWholes])
def test_a_model_that_takes_no_parts_keeps_its_own_products(kind: type[nn.Module]) -> None:
    assert joined_in(kind()) == []


def test_weights_stay_where_they_are_while_another_call_may_read_them() -> None:
    model = Read()
    users = state_of(model).attention_users
    users.update((1, 2))
    assert joined_in(model) == []
    users.clear()
    with torch.inference_mode():
        assert joined_in(model) == []
    with HostReads():
        assert joined_in(model) == []
    assert state_of(model).joined is None
    assert joined_in(model) == ["first", "second", "third"]


def test_joined_steps_wait_for_nothing() -> None:
    model, x = Read(), torch.randn(2, 3, 8)
    assert joined_in(model)
    kept = state_of(model).joined
    assert kept is not None
    with torch.no_grad(), Tape() as tape, kept.laid_under():
        model(x)
    assert [str(call[0]) for call in tape.calls].count("aten.addmm.default") == 1
    assert tape.reads == []


def test_no_memory_joins_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    move, moved = joined_linear._moved_together, []

    def one(parameters: Any) -> torch.Tensor:
        if moved:
            raise torch.OutOfMemoryError("no memory")
        moved.append(move(parameters))
        return moved[0]

    model = small()
    monkeypatch.setattr(joined_linear, "_moved_together", one)
    with on_device(monkeypatch):
        text(model, JOINED, graphs=False)
    assert names_of(model) == ATTENTION
    assert num_products(model) > 0


def test_bits_that_may_not_vary_do_not(made: list[TapeRecorder]) -> None:
    model = small()
    stats = compare(model, padded("left"), {**JOINED, "draft_invariant": True})
    assert stats.execution == "replayed" and state_of(model).joined is None
    compare(model, padded("left"), {"packed_weights": "auto"})
    assert state_of(model).joined is None


def test_no_step_is_tried_behind_the_last_position(made: list[TapeRecorder]) -> None:
    model = tiny("gpt2", n_positions=32)
    ids = prompt(1, 32)
    call = {"max_new_tokens": 1, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(ids, **call)
    lookahead_hf.enable(model)
    config = replace(lookahead_hf.SpeculativeConfig(), cuda_graphs=True, packed_weights=True)
    assert model.generate(ids, **call, speculative=config).tolist() == plain.tolist()
    assert state_of(model).joined is None
