"""Recorded steps write the model's own text, and give way where they would not."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

import lookahead_hf
from lookahead_hf.drafting.session import cost_setting, memory_of
from lookahead_hf.runner import packed_linear, recorded
from lookahead_hf.runner.arguments import Arguments
from lookahead_hf.runner.program import Program
from tests.helpers.compared import compared
from tests.helpers.models import NAMES, VOCAB, prompt, tiny
from tests.helpers.packing import needs_packing
from tests.helpers.scripted import RandomTrees, scripted

SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 40}


def both(
    model: Any, ids: torch.Tensor, new: int = 24, packed: bool = False, **call: Any
) -> lookahead_hf.SpeculativeStats:
    """Run a call plainly and recorded; assert the same text, and speculation."""
    lookahead_hf.enable(model)  # what is kept of it is freed where `enabled` ends
    call = {"input_ids": ids, "do_sample": False, "max_new_tokens": new, **call}
    fields = {"recorded_steps": True, "packed_weights": packed}
    return compared(model, lambda: dict(call), ids.shape[1], **fields).stats


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_the_text_is_plains(name: str, sampled: bool) -> None:
    model = tiny(name)
    call = SAMPLED if sampled else {}
    assert both(model, prompt(), 40, **call).graphs == "recorded"
    ragged = prompt(3)
    mask = torch.ones_like(ragged)
    mask[1, :5] = 0
    stats = both(model, ragged, attention_mask=mask, pad_token_id=0, **call)
    assert stats.graphs == "recorded"
    assert recorded._kept[model].refusal is None
    checked = recorded._kept[model].num_checked
    assert {kind[0][0] for kind in checked} == {1, 3}


def test_steps_are_repeated_and_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    both(model, prompt(), 40)
    forwards: list[int] = []
    kind = type(model.model.norm)
    forward, key = kind.forward, recorded._kept[model].key
    monkeypatch.setattr(recorded, "fingerprint", lambda _: key[0])

    def counted(self: Any, x: torch.Tensor) -> torch.Tensor:
        if self is model.model.norm:
            forwards.append(1)
        return forward(self, x)

    with lookahead_hf.enabled(model):
        drafted = scripted([[]], RandomTrees())
        monkeypatch.setattr(kind, "forward", counted)
        model.generate(prompt(), max_new_tokens=24, do_sample=False, speculative=drafted)
    stats = lookahead_hf.last_stats(model)
    assert stats is not None
    assert stats.num_steps > 10
    assert len(forwards) <= 1 + 2 * recorded.CHECKS  # the prompt, and kinds of steps still checked


@pytest.fixture
def packs(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_packing()
    monkeypatch.setattr(packed_linear, "GAIN", float("inf"))


def bits(
    model: Any, processors: LogitsProcessorList | None = None, **fields: Any
) -> tuple[list[int], str | None]:
    """A text in bfloat16 with the same trees in every call, and how its steps were run."""
    lookahead_hf.enable(model)
    config = replace(scripted([list(range(3, 60))], RandomTrees(hit=1.0)), **fields)
    output = model.generate(
        prompt(), max_new_tokens=40, do_sample=False, output_logits=True,
        return_dict_in_generate=True, speculative=config, logits_processor=processors,
    )  # fmt: skip
    assert output.speculative_stats.fallback_reason is None
    logits = torch.cat(output.logits).view(torch.int32).tolist()
    return [output.sequences.tolist(), logits], output.speculative_stats.graphs


@pytest.mark.parametrize("name", ["llama", "gemma3", "phi"])
def test_packed_weights_change_no_bit(name: str, packs: None) -> None:
    model = tiny(name).bfloat16()
    own, state = bits(model, recorded_steps=False)
    assert state is None
    assert bits(model, recorded_steps=True, packed_weights=False) == (own, "recorded")
    assert bits(model, recorded_steps=True, packed_weights=True) == (own, "packed")
    assert bits(model, recorded_steps=True, packed_weights=False) == (own, "recorded")


def test_packed_float32_writes_plains_text(packs: None) -> None:
    model = tiny("llama")
    assert both(model, prompt(), 40, packed=True).graphs == "packed"
    assert both(model, prompt(3), 40, packed=True, **SAMPLED).graphs == "packed"


def test_invariance_allows_no_other_rounding(packs: None) -> None:
    model = lookahead_hf.enable(tiny("llama"))
    config = {"recorded_steps": True, "packed_weights": True, "draft_invariant": True}
    for dtype, state in ((torch.float32, "recorded"), (torch.bfloat16, "packed")):
        model.to(dtype).generate(prompt(), max_new_tokens=8, do_sample=False, speculative=config)
        stats = lookahead_hf.last_stats(model)
        assert stats is not None
        assert stats.graphs == state


@pytest.mark.parametrize("through_data", [False, True])
def test_weights_written_to_between_calls_count(packs: None, through_data: bool) -> None:
    model = tiny("llama").bfloat16()
    before, _ = bits(model, recorded_steps=True, packed_weights=True)
    with torch.no_grad():
        for layer in model.model.layers:
            weight = layer.mlp.down_proj.weight
            (weight.data if through_data else weight).mul_(-1.0)
    own, _ = bits(model, recorded_steps=False)
    assert own != before
    assert bits(model, recorded_steps=True, packed_weights=True) == (own, "packed")


def test_little_memory_leaves_the_weights_alone_unless_packing_is_asked_for(
    packs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[int] = []

    def free_memory() -> int:
        looked.append(1)
        return 1000

    monkeypatch.setattr(packed_linear, "free_memory", free_memory)
    monkeypatch.setattr(recorded, "PACKED_AFTER", 0)
    model = tiny("llama").bfloat16()
    assert bits(model, recorded_steps=True)[1] == "recorded"
    assert bits(model, recorded_steps=True)[1] == "recorded"
    assert len(looked) == 1
    assert bits(model, recorded_steps=True, packed_weights=True)[1] == "packed"


def test_weights_that_cannot_be_packed_leave_the_recording(
    packs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def packed(*_: Any) -> Any:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: not enough memory")

    monkeypatch.setattr(packed_linear, "_gains", lambda *_: True)
    monkeypatch.setattr(packed_linear, "packed", packed)
    model = tiny("llama")
    assert bits(model, recorded_steps=True, packed_weights=True)[1] == "recorded"


def test_only_so_many_batch_sizes_are_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "MOST_BATCH_SIZES", 2)
    model = tiny("llama")
    states = [both(model, prompt(rows)).graphs for rows in (1, 2, 3, 2, 1)]
    assert states == ["recorded", "recorded", "too few steps to record", "recorded", "recorded"]


def test_arguments_that_a_program_depends_on_are_told_apart() -> None:
    ids, mask = torch.ones(2, 3, dtype=torch.long), torch.zeros(2, 1, 3, 9)
    both_masks = {"full_attention": mask, "sliding_attention": mask + 1}

    def of(**model_inputs: Any) -> Arguments | None:
        return Arguments.of({"input_ids": ids, **model_inputs}, 2)

    first = of(attention_mask=both_masks, scales={"scale": 1, "on": None})
    assert first is not None
    assert first.width == 3
    assert list(first.given) == [
        "input_ids", "attention_mask.full_attention", "attention_mask.sliding_attention"
    ]  # fmt: skip
    other = of(attention_mask=both_masks, scales={"scale": 2, "on": None})
    assert other is not None
    assert other.shape != first.shape
    assert of(scales={"scale": object()}) is None
    assert of(scales=np.ones(2000)) is None, "whose repr leaves most of it out"


def test_nothing_is_recorded_for_a_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    model = lookahead_hf.enable(tiny("llama"))

    def state(new: int) -> str | None:
        model.generate(prompt(), max_new_tokens=new, do_sample=False, speculative={"budget": 0})
        stats = lookahead_hf.last_stats(model)
        assert stats is not None
        return stats.graphs

    assert state(recorded.TRACED_AFTER // 2) == "too few steps to record"
    assert state(recorded.TRACED_AFTER) == "recorded"
    assert state(4) == "recorded"
    lookahead_hf.disable(model)
    lookahead_hf.enable(model)
    assert state(4) == "too few steps to record"


def hooked(model: Any) -> None:
    model.model.layers[1].register_forward_hook(lambda *_: None)


def replaced(model: Any) -> None:
    layer = model.model.layers[1].mlp
    own = layer.forward
    layer.forward = lambda x: own(x) * 1.5


def alone(model: Any) -> None:
    model.set_attn_implementation("eager")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (hooked, "modules have hooks"),
        (replaced, "a forward was replaced"),
        (alone, "its attention is its own"),
    ],
)
def test_what_a_recording_would_pass_over_is_run(
    change: Callable[[Any], None], reason: str
) -> None:
    model = tiny("llama")
    change(model)
    assert both(model, prompt()).graphs == reason


def test_the_models_own_hooks_are_called_around_every_step() -> None:
    model = tiny("llama")
    before: list[int] = []
    after: list[tuple[int, ...]] = []
    model.register_forward_pre_hook(lambda _, args: before.append(len(args)))
    model.register_forward_hook(lambda _, args, out: after.append(tuple(out.logits.shape)))
    stats = both(model, prompt(), 40)
    assert stats.graphs == "recorded"
    ours = stats.num_steps + 1
    assert len(before) == len(after) == 40 + ours
    assert after[-1][:1] == (1,)
    kept = recorded._kept[model]
    with_another = model.register_forward_pre_hook(lambda *_: None)
    both(model, prompt(), 40)
    with_another.remove()
    assert recorded._kept[model] is kept, "hooks around the forward are no part of it"


def test_hooks_may_change_what_goes_in_and_comes_out() -> None:
    model = tiny("llama")

    def other_token(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "input_ids": kwargs["input_ids"] + 1}

    model.register_forward_pre_hook(other_token, with_kwargs=True)
    both(model, prompt(), 40)

    def other_logits(_: Any, args: Any, outputs: Any) -> Any:
        outputs.logits = outputs.logits.roll(1, -1)
        return outputs

    model = tiny("llama")
    model.register_forward_hook(other_logits)
    assert both(model, prompt(), 40).graphs == "recorded"


def test_a_change_between_calls_is_noticed() -> None:
    model = tiny("llama")
    assert both(model, prompt()).graphs == "recorded"
    layer = model.model.layers[1].mlp
    own = type(layer).forward
    seen = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.shape[1])
        return own(layer, x) * 1.5

    layer.forward = forward
    assert both(model, prompt()).graphs == "a forward was replaced"
    del layer.forward
    assert both(model, prompt()).graphs == "recorded"
    model.model.layers[1].mlp = torch.nn.Identity().eval()
    assert both(model, prompt()).graphs == "recorded"


def scaled(model: Any) -> None:
    model.model.layers[1].self_attn.scaling *= 3.0


def capped(model: Any) -> None:
    model.config.final_logit_softcapping = 1.0


def listed(model: Any) -> None:
    model.model.layers[1].mlp.scaling["default"] = 2.0


def in_doubles(model: Any) -> None:
    torch.set_default_dtype(torch.float64)


def by_a_numpy_number(model: Any) -> None:
    model.model.layers[1].mlp.scaling["default"] = np.float64(2.5)


def in_an_object(model: Any) -> None:
    model.model.layers[1].mlp.options.factor = -2.0  # of the same hash as -1.0


def in_a_closure(model: Any) -> None:
    model.model.layers[1].mlp.function = doubling(2.0)


def doubling(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x * factor


@dataclass
class Options:
    factor: float = -1.0


@pytest.mark.parametrize(
    "change",
    [scaled, capped, listed, in_doubles, by_a_numpy_number, in_an_object, in_a_closure],
)
def test_settings_that_change_between_calls_count(change: Callable[[Any], None]) -> None:
    class Scaled(torch.nn.Module):
        """Keeps its factor as adapters do."""

        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner, self.scaling = inner, {"default": np.float64(1.5)}
            self.options, self.function = Options(), doubling(1.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.function(self.inner(x)) * self.options.factor
            return x * torch.tensor(self.scaling["default"] / 3.0)

    model = tiny("gemma3")
    model.model.layers[1].mlp = Scaled(model.model.layers[1].mlp).eval()
    default = torch.get_default_dtype()
    before, _ = bits(model, recorded_steps=True)
    try:
        change(model)
        own, _ = bits(model, recorded_steps=False)
        assert bits(model, recorded_steps=True) == (own, "recorded")
    finally:
        torch.set_default_dtype(default)
    if change is not in_doubles:
        assert own != before


def test_a_tensor_that_no_trace_can_hold_leaves_the_recording() -> None:
    """As that of the positions' offsets, which models for pictures put into themselves."""
    model = tiny("llama")
    model.offsets = torch.zeros(2)
    both(model, prompt(), 40)
    kept = recorded._kept[model]
    model.offsets = torch.zeros(2)
    assert both(model, prompt(), 40).graphs == "recorded"
    assert recorded._kept[model] is kept


class Once(LogitsProcessor):
    """Does something to the model in the middle of a call."""

    def __init__(self, change: Callable[[], Any]) -> None:
        self.change, self.is_done, self.at = change, False, 30

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] >= self.at and not self.is_done:
            self.is_done = True
            self.change()
        return scores


def steered(model: Any) -> None:
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: output * 1.5)


def turned(model: Any) -> None:
    weight = torch.nn.Parameter(-model.model.layers[1].mlp.down_proj.weight)
    model.model.layers[1].mlp.down_proj.weight = weight


@pytest.mark.parametrize("change", [scaled, steered, turned, replaced])
def test_changes_in_the_middle_of_a_call_count(change: Callable[[Any], None]) -> None:
    outputs = []
    for recorded_steps in (False, True):
        model = tiny("llama")
        before, _ = bits(model, recorded_steps=recorded_steps)
        once = LogitsProcessorList([Once(lambda model=model: change(model))])
        output, state = bits(model, once, recorded_steps=recorded_steps)
        outputs.append(output)
        assert output != before
    assert outputs[0] == outputs[1]
    assert state == recorded.CHANGED


def test_what_a_call_has_changed_is_not_traced_as_what_it_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recorded, "TRACED_AFTER", 5)
    model = tiny("llama")
    own, _ = bits(model, recorded_steps=False)
    attended = model.model.layers[1].self_attn
    found = attended.scaling
    both(model, prompt(3), 24)  # so that the next call looks the model over when it begins

    def turned_up() -> None:
        attended.scaling = 3.0 * found

    early = Once(turned_up)
    early.at = 14
    assert bits(model, LogitsProcessorList([early]))[0] != own
    attended.scaling = found
    assert bits(model, recorded_steps=True) == (own, "recorded")


@pytest.mark.parametrize("through_data", [False, True])
def test_packed_weights_written_to_in_the_middle_of_a_call(packs: None, through_data: bool) -> None:
    """Writing through `.data`, which torch does not count, is seen by the next call."""
    model = tiny("llama").bfloat16()
    weight = model.model.layers[1].mlp.down_proj.weight

    @torch.no_grad()
    def written() -> None:
        (weight.data if through_data else weight).mul_(-1.0)

    def call(**fields: Any) -> tuple[list[int], str | None]:
        output = bits(model, LogitsProcessorList([Once(written)]), **fields)
        written()
        return output

    before, _ = bits(model, recorded_steps=True, packed_weights=True)
    own, _ = call(recorded_steps=False)
    assert own != before
    ours, state = call(recorded_steps=True, packed_weights=True)
    assert (ours == own) is not through_data
    assert state == ("packed" if through_data else "recorded")
    written()
    own, _ = bits(model, recorded_steps=False)
    assert bits(model, recorded_steps=True, packed_weights=True) == (own, "packed")


def test_hooks_around_the_model_see_hidden_states_where_they_are_configured() -> None:
    model = tiny("llama")
    model.config.output_hidden_states = True
    seen: list[bool] = []
    handle = model.register_forward_hook(
        lambda module, args, out: seen.append(out.hidden_states is not None)
    )
    state = both(model, prompt(), 40).graphs
    assert state == "hooks around the model are given more than logits"
    assert all(seen)
    handle.remove()
    assert both(model, prompt(), 40).graphs == "recorded"


def test_hidden_states_that_were_asked_for_once_leave_the_recording() -> None:
    model = lookahead_hf.enable(tiny("llama"))
    call = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True}
    model.generate(prompt(), **call, output_hidden_states=True)
    assert both(model, prompt(), 40).graphs == "recorded"


def test_steps_that_were_not_recorded_are_not_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    model = lookahead_hf.enable(tiny("llama"))
    both(model, prompt(), 40)
    monkeypatch.setattr(Arguments, "of", lambda *_: None)
    assert both(model, prompt(), 40).graphs == "such steps were not recorded"


def test_new_embeddings_are_recorded_though_they_are_in_training_mode() -> None:
    model = tiny("llama")
    model.resize_token_embeddings(VOCAB + 8, mean_resizing=False)
    assert model.lm_head.training
    assert both(model, prompt(), 40).graphs == "recorded"


def test_a_model_that_changes_often_is_not_traced_in_every_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recorded, "TRACED_AFTER", 10)
    model = tiny("llama")

    def state(new: int, scaling: float) -> str | None:
        model.model.layers[1].self_attn.scaling = scaling
        config = {"budget": 0, "on_fallback": "error"}
        model.generate(prompt(), max_new_tokens=new, do_sample=False, speculative=config)
        stats = lookahead_hf.last_stats(model)
        assert stats is not None
        return stats.graphs

    with lookahead_hf.enabled(model):
        assert state(20, 0.3) == "recorded"
        assert [state(8, 0.1), state(8, 0.2), state(8, 0.1)] == ["too few steps to record"] * 3
        assert state(8, 0.1) == "recorded"


def test_numbers_that_python_counts_up_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward that changes from call to call is no function of its arguments."""
    monkeypatch.setattr(recorded, "CHECKS", 3)
    model = tiny("llama")
    norm = type(model.model.norm)
    own = norm.forward
    calls: list[int] = []

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return own(self, x) * (1.0 + (len(calls) > 60))

    monkeypatch.setattr(norm, "forward", forward)
    with lookahead_hf.enabled(model):
        model.generate(
            prompt(), max_new_tokens=24, do_sample=False, speculative={"recorded_steps": True}
        )
    stats = lookahead_hf.last_stats(model)
    assert stats is not None
    assert stats.graphs == "repeating a step gave other logits"


def test_blocks_wider_than_any_traced_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "WIDEST_TRACED", 6)
    model = tiny("llama")
    norm = type(model.model.norm)
    forward = norm.forward

    def doubled(self: Any, x: torch.Tensor) -> torch.Tensor:
        return forward(self, x) * (1.0 + (x.shape[1] > 8))

    monkeypatch.setattr(norm, "forward", doubled)
    own, _ = bits(model, recorded_steps=False)
    assert bits(model, recorded_steps=True) == (own, "repeating a step gave other logits")


def test_tracing_needs_no_positions_of_its_own() -> None:
    """Where a text that ends at the last position has just begun."""
    model = tiny("gpt2", n_positions=32)
    with lookahead_hf.enabled(model):
        config = {"recorded_steps": True, "on_fallback": "error"}
        model.generate(prompt(length=28), max_new_tokens=5, do_sample=False, speculative=config)
    stats = lookahead_hf.last_stats(model)
    assert stats is not None
    assert stats.graphs == "recorded"


def test_a_repetition_that_is_wrong_leaves_nothing_in_the_cache() -> None:
    model = tiny("llama")
    own, _ = bits(model, recorded_steps=False)
    bits(model, recorded_steps=True)
    kept = recorded._kept[model]
    kept.num_checked.clear()

    def wrong(width: int, layers: list[Any], *given: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            layer.update(*(torch.ones(1, 2, width, 12) for _ in "kv"))
        return torch.zeros(1, width, VOCAB)

    for key, program in kept.programs.items():
        kept.programs[key] = Program(program.inputs, wrong)
    assert bits(model, recorded_steps=True) == (own, "repeating a step gave other logits")


def test_a_recording_that_breaks_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    assert both(model, prompt(), 40).graphs == "recorded"

    def broken(*_: Any) -> torch.Tensor:
        raise RuntimeError("no such operation\nmore of it")

    for key, program in recorded._kept[model].programs.items():
        recorded._kept[model].programs[key] = Program(program.inputs, broken)
    assert both(model, prompt(), 40).graphs == "RuntimeError: no such operation"


def test_costs_are_told_apart_by_mode() -> None:
    model = tiny("llama")
    both(model, prompt(), 40)
    costs, setting = memory_of(model).costs, cost_setting(model)
    lookahead_hf.warm_up(model, context_length=20, max_draft_nodes=8)
    assert costs.curve(1, 20, setting, "recorded").num_samples(8) >= 5
    assert costs.curve(1, 20, setting).num_samples(8) < 5


def test_two_threads_share_one_recording() -> None:
    model = tiny("llama")
    prompts = [prompt(seed=seed) for seed in range(4)]
    plain = [model.generate(ids, max_new_tokens=40, do_sample=False).tolist() for ids in prompts]
    found: dict[int, list[list[int]]] = {}

    def run(index: int) -> None:
        config = lookahead_hf.SpeculativeConfig(budget=8, recorded_steps=True)
        ids = prompts[index]
        output = model.generate(ids, max_new_tokens=40, do_sample=False, speculative=config)
        found[index] = output.tolist()

    with lookahead_hf.enabled(model):
        run(0)
        threads = [threading.Thread(target=run, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert recorded._kept[model].refusal is None
    assert [found[index] for index in range(4)] == plain


def test_a_recording_does_not_keep_its_model_alive() -> None:
    model = tiny("llama")
    both(model, prompt(), 40)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
