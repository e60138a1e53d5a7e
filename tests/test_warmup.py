"""Warming up leaves compiled code and measured costs, and no trace in the model."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import lookahead_hf
from lookahead_hf import SpeculativeConfig, warmup
from lookahead_hf.call import execution
from lookahead_hf.drafting.rates import memory_of, placement
from lookahead_hf.engines.cuda import graphs
from lookahead_hf.ngram_pool import compilation
from tests.helpers.compared import speculated
from tests.helpers.compiling import nothing_compiled
from tests.helpers.device import taped
from tests.helpers.models import prompt, tiny
from tests.helpers.multimodal import build
from tests.helpers.scripted import Scripted, continuations, right


@pytest.mark.parametrize(
    ("batch_size", "compiled", "mode"),
    [(1, False, ""), (3, False, ""), (1, True, "compiled"), (3, True, "compiled")],
)
def test_costs_are_known_afterwards(batch_size: int, compiled: bool, mode: str) -> None:
    model = tiny("llama")
    before = model.generate(prompt(), max_new_tokens=8, do_sample=False)
    warm = {"batch_size": batch_size, "context_length": 20, "max_draft_nodes": 16}
    lookahead_hf.warm_up(model, **warm, seconds=None, compiled_layers=compiled)  # type: ignore[arg-type]
    is_packed = batch_size > 1  # tokens of all rows count together then
    setting = batch_size, 20, placement(model), mode, None, is_packed
    curve = memory_of(model).costs.curve(*setting)

    def num_samples(num_nodes: int) -> int:
        return curve.num_samples((1 + num_nodes) * batch_size if is_packed else num_nodes)

    assert all(num_samples(num_nodes) >= 3 for num_nodes in (0, 1, 2, 4, 8, 16))
    assert num_samples(32) == 0
    assert compilation.drafting.is_loaded()
    assert model.config._attn_implementation == "sdpa"
    assert type(model.config._attn_implementation) is str  # not ours
    assert model.generate(prompt(), max_new_tokens=8, do_sample=False).tolist() == before.tolist()


def test_a_model_without_weights_is_refused() -> None:
    with pytest.raises(ValueError, match="without weights: load them first"):
        lookahead_hf.warm_up(tiny("llama").to("meta"))


def test_kernels_that_cannot_be_compiled_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those for float16 on a processor that does not convert such numbers."""

    def fails() -> None:
        raise RuntimeError("no instructions")

    with nothing_compiled(monkeypatch, compilation.kernels["float16"]) as pending:
        pending.append(fails)
        with pytest.warns(RuntimeWarning, match="no instructions"):
            model = lookahead_hf.enable(tiny("llama").half())
        with pytest.warns(RuntimeWarning, match="no instructions"):
            monkeypatch.setattr(compilation, "_has_warned", False)
            lookahead_hf.warm_up(model, context_length=20, max_draft_nodes=1, seconds=None)
    model.generate(prompt(), max_new_tokens=8, speculative=True)
    stats = lookahead_hf.last_stats(model)
    assert stats is not None and stats.own_code == (execution.NO_COMPILER,)


@pytest.mark.parametrize(
    ("name", "rows", "do_sample", "sizes"),
    [
        ("llama", 1, False, (0, 7, 15, 31, 63)),
        ("llama", 16, False, (0, 7, 15, 31)),
        ("llama", 2, True, (0, 7, 15, 31, 63)),
        ("qwen2_vl", 2, False, (0, 7, 15, 31, 63)),
    ],
)
def test_it_captures_every_width_that_a_call_uses(
    name: str, rows: int, do_sample: bool, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is patched but the device: these are the widths and lengths of a GPU.

    The tokens of one model have a height and a width, beside a position in the text.
    """
    model, ids = (
        tiny(name, num_hidden_layers=1) if name == "llama" else build(name),
        prompt(rows, 20),
    )
    call = {"max_new_tokens": 70, "do_sample": do_sample, "pad_token_id": 0}
    torch.manual_seed(7)
    plain = model.generate(ids, **call)
    drafters = Scripted(continuations(plain, 20), right(max(sizes) - 3))
    with taped(monkeypatch) as made, lookahead_hf.enabled(model):
        lookahead_hf.warm_up(model, batch_size=rows, seconds=None, do_sample=do_sample)
        (recorder,) = [each for each in made if each.recordings]
        widths = [each.outputs[0].shape[1] for each in recorder.recordings]
        assert widths == 2 * [1 + size for size in reversed(sizes)]  # for 512 and 1,024 slots
        for budget in ("auto", max(sizes)):
            config = SpeculativeConfig(drafters=(drafters,), budget=budget)
            torch.manual_seed(7)
            assert model.generate(ids, **call, speculative=config).tolist() == plain.tolist()
            assert speculated(model).execution == "replayed"
        assert len(recorder.recordings) == len(widths)
        curve = memory_of(model).costs.curve(rows, 256, placement(model), "graphs", sizes)
    assert all(curve.num_samples(size) >= 5 for size in sizes)
    assert max(rows * width for width in widths) <= graphs.MOST_TOKENS


def test_where_nothing_is_captured_the_ancestors_fit_their_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Hooks keep graphs away, whose widths would end there anyway."""
    model = tiny("llama", num_hidden_layers=1)
    model.model.norm.register_forward_hook(lambda *_: None)
    with taped(monkeypatch) as made:
        lookahead_hf.warm_up(model, context_length=20)
    curve = memory_of(model).costs.curve(1, 20, placement(model), "device")
    assert not any(each.recordings for each in made)
    assert curve.num_samples(64) >= 3  # 63 nodes count for it


@pytest.mark.parametrize(
    "name", ["batch_size", "context_length", "max_draft_nodes", "max_new_tokens"]
)
@pytest.mark.parametrize("value", [0, "8"])
def test_what_is_no_number_from_one_on_is_refused(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{name} is {value!r}, but must be an int"):
        lookahead_hf.warm_up(tiny("llama"), **{name: value})  # type: ignore[arg-type]


def test_a_table_of_positions_is_not_outgrown() -> None:
    model = tiny("gpt2", n_positions=32)
    lookahead_hf.warm_up(model, context_length=256)
    curve = memory_of(model).costs.curve(1, 15, placement(model), "")
    assert curve.num_samples(16) >= 3
    assert curve.num_samples(24) == 0


def test_positions_that_change_with_the_length_stay_as_they_are() -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    model = tiny("llama", max_position_embeddings=32, rope_parameters=rope)
    before = model.model.rotary_emb.inv_freq.clone()
    lookahead_hf.warm_up(model, context_length=256)
    assert model.model.rotary_emb.inv_freq.tolist() == before.tolist()


def test_an_encoder_decoder_model_is_left_to_its_calls() -> None:
    lookahead_hf.warm_up(tiny("bart"))
    assert compilation.drafting.is_loaded()


@pytest.mark.parametrize("limit", [3.0, None])
def test_it_ends_in_time_with_what_it_has(
    limit: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, model, own = [100.0], tiny("llama"), warmup._time_step

    def step(*given: Any) -> float:
        now.append(now[-1] + 1.0)
        return own(*given)

    monkeypatch.setattr(warmup, "_time_step", step)
    monkeypatch.setattr(time, "monotonic", lambda: now[-1])
    lookahead_hf.warm_up(model, context_length=20, seconds=limit, compiled_layers=False)
    curve = memory_of(model).costs.curve(1, 20, placement(model), "")
    assert len(now) == 1 + 3 if limit else len(now) > 20
    assert curve.num_samples(64) == (1 if limit else 5)
    assert curve.num_samples(0) == (0 if limit else 5)
