"""Prompts that compiled kernels read: a text whose bits do not depend on what stands beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationConfig

import lookahead_hf
from lookahead_hf import SpeculativeConfig
from lookahead_hf.call import execution
from lookahead_hf.engines.cpu import layers
from lookahead_hf.engines.cpu.kernels import program
from lookahead_hf.engines.cpu.workspace import Workspace
from lookahead_hf.model import compat
from lookahead_hf.model.state import state_of
from lookahead_hf.ngram_pool import compilation
from lookahead_hf.runner import prefill
from lookahead_hf.runner.host import Runner
from tests.helpers.caches import CACHE
from tests.helpers.compiling import nothing_compiled
from tests.helpers.listening import Bits, Listener, same
from tests.helpers.models import prompt, tiny

LENGTHS = (5, 300, 130, 41)
NUM_NEW = 12


@pytest.fixture(name="model")
def _model() -> Any:
    return lookahead_hf.enable(tiny("llama", max_position_embeddings=512).bfloat16())


def texts() -> list[list[int]]:
    return [prompt(1, length, seed=length)[0].tolist() for length in LENGTHS]


def config(listener: Any, compiled: Any = "everywhere") -> SpeculativeConfig:
    return SpeculativeConfig(drafters=(listener, "ngram"), compiled_layers=compiled)


def generated(model: Any, rows: Sequence[list[int]], compiled: Any = "everywhere") -> Bits:
    """The logits behind the texts of one batch, whose prompts are padded on the left."""
    longest, listener = max(map(len, rows)), Listener()
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=NUM_NEW,
        do_sample=False,
        eos_token_id=None,
        speculative=config(listener, compiled),
    )
    stats = lookahead_hf.last_stats(model)
    assert stats is not None and stats.fallback_reason is None
    if compiled == "everywhere":
        assert stats.execution == "compiled" and stats.own_code == ()
    return listener.logits


def test_a_batch_does_not_change_the_bits_of_its_texts(model: Any) -> None:
    alone = [generated(model, [text]) for text in texts()]
    assert all(len(each) > 3 for each in alone)
    threads = torch.get_num_threads()
    for order in ((0, 1, 2, 3), (3, 1), (2, 0, 2), (1, 1, 3)):
        try:
            torch.set_num_threads(3 - torch.get_num_threads() % 2)
            together = generated(model, [texts()[index] for index in order])
        finally:
            torch.set_num_threads(threads)
        assert all(same(alone[index], together) for index in order)


@pytest.mark.parametrize("compiled", [True, "everywhere"])
def test_kernels_compute_the_tokens_of_prompts(
    compiled: bool | str, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the bits would be torch's, which often are the same by chance."""
    monkeypatch.setattr(layers, "reads_faster", lambda *_: False)
    widths, run = [], Workspace.run

    def counted(self: Any, layers: Any, given: Any, num_tokens: int, floats: int) -> None:
        widths.append(num_tokens if len(layers) > 1 else 0)  # lone: the output layer, and trials
        run(self, layers, given, num_tokens, floats)

    generated(model, texts(), compiled)  # finds out whom to trust
    monkeypatch.setattr(Workspace, "run", counted)
    generated(model, texts(), compiled)
    of_prompts = [width for width in widths if width > 60]  # no step is that wide
    assert of_prompts == ([sum(LENGTHS)] if compiled == "everywhere" else [])  # in one block


def test_a_queue_does_not_change_the_bits_of_its_texts(model: Any) -> None:
    alone = [generated(model, [text]) for text in texts()]
    limits = GenerationConfig(max_new_tokens=NUM_NEW, do_sample=False, eos_token_id=-1)
    for slots in (1, 3):
        listener = Listener()
        model.generate_batch(texts(), limits, speculative=config(listener), max_slots=slots)
        stats = lookahead_hf.last_stats(model)
        assert stats is not None and stats.fallback_reason is None and stats.own_code == ()
        assert all(same(each, listener.logits) for each in alone)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_in_float32_the_text_is_plains(name: str) -> None:
    model, ids = tiny(name, max_position_embeddings=512), prompt(1, 200)
    call = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(ids, **call)
    with lookahead_hf.enabled(model):
        ours = model.generate(ids, **call, speculative={"compiled_layers": "everywhere"})
    stats = lookahead_hf.last_stats(model)
    assert stats is not None and stats.fallback_reason is None and stats.num_accepted > 0
    assert torch.equal(plain, ours)
    is_windowed = name == "gemma3"  # a window that is shorter than the prompt
    assert (execution.PROMPT in stats.own_code) == is_windowed


def test_a_block_has_the_frequencies_of_the_whole_prompt() -> None:
    """Long factors hold for a prompt of 600 tokens, and not for its first 512 alone."""
    factors = {"short_factor": [1.0] * 6, "long_factor": [4.0 + 3 * i for i in range(6)]}
    model = tiny(
        "phi3",
        scale=5.0,
        max_position_embeddings=1024,
        original_max_position_embeddings=520,
        rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, **factors},
    )
    ids, call = prompt(1, 600), {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(ids, **call)
    with lookahead_hf.enabled(model):
        ours = model.generate(ids, **call, speculative={"compiled_layers": "everywhere"})
    stats = lookahead_hf.last_stats(model)
    assert stats is not None and stats.fallback_reason is None and stats.num_accepted > 0
    assert torch.equal(plain, ours) and stats.own_code == (execution.PROMPT,)


def test_a_prompt_of_no_token_fails_as_it_does_in_plain_generation(model: Any) -> None:
    ids = torch.zeros((1, 0), dtype=torch.long)
    for speculative in (False, {"compiled_layers": "everywhere"}):
        with pytest.raises(RuntimeError, match="cannot reshape"):
            model.generate(ids, max_new_tokens=4, speculative=speculative)


def test_a_model_without_kernels_reads_its_prompts_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    model = lookahead_hf.enable(tiny("llama").double())
    monkeypatch.setattr(prefill, "_read", None)
    model.generate(prompt(2, 20), max_new_tokens=8, speculative={"compiled_layers": "everywhere"})
    stats = lookahead_hf.last_stats(model)
    assert stats is not None and stats.fallback_reason is None and stats.execution == "model"
    assert execution.UNKNOWN in stats.own_code[0]


def test_a_warm_up_measures_the_blocks_of_such_calls(model: Any) -> None:
    lookahead_hf.warm_up(model, context_length=64, max_draft_nodes=4, compiled_layers="everywhere")
    assert {is_packed for _, _, is_packed in state_of(model).run_blocks} == {True}


@pytest.mark.parametrize("is_faster", [False, True])
def test_kernels_read_prompts_where_they_are_faster(
    is_faster: bool, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without being asked for."""
    monkeypatch.setattr(layers, "reads_faster", lambda *_: is_faster)
    blocks: list[bool] = []
    forward = Runner.forward
    monkeypatch.setattr(
        Runner,
        "forward",
        lambda self, *args: blocks.append(self.reads_prompts()) or forward(self, *args),
    )
    alone = generated(model, texts()[:1])
    assert same(generated(model, texts()[:1], compiled=True), alone) == is_faster
    assert blocks.pop() == is_faster
    model.generate(prompt(), max_new_tokens=8, speculative={"compiled_layers": False})
    stats = lookahead_hf.last_stats(model)
    assert stats is not None and stats.own_code == (execution.NOT_ASKED_FOR,)


def test_kernels_are_faster_by_tiles_and_where_torch_is_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for tiles, is_slow in (("", False), ("_amx", False), ("", True)):
        monkeypatch.setattr(program, "tiles_of", lambda dtype, tiles=tiles: tiles)
        monkeypatch.setattr(compat, "multiplies_slowly", lambda dtype, slow=is_slow: slow)
        most = layers.LONGEST_BY_TILES
        assert layers.reads_faster(torch.bfloat16, most) == (bool(tiles) or is_slow)
        assert layers.reads_faster(torch.bfloat16, most + 1) == is_slow


def test_a_prompt_that_the_models_code_has_read_is_in_the_statistics(model: Any) -> None:
    ids = prompt(1, 20)
    given = {CACHE: DynamicCache(config=model.config)}
    for extra in (given, {"return_dict_in_generate": True}):
        model.generate(
            ids, **extra, max_new_tokens=8, speculative={"compiled_layers": "everywhere"}
        )
        stats = lookahead_hf.last_stats(model)
        assert stats is not None and stats.own_code == (execution.PROMPT,)


def test_kernels_that_are_not_there_yet_are_waited_for(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[str] = []

    def wait(groups: list[compilation.Functions]) -> None:
        waited.extend(each.name for each in groups)
        compilation.common.pending.clear()

    with nothing_compiled(monkeypatch, compilation.common) as pending:
        pending.append(lambda: pytest.fail("the process that compiles has not ended"))
        monkeypatch.setattr(compilation, "wait", wait)
        generated(model, texts()[:1])
    assert waited == [f"bfloat16{program.tiles_of(torch.bfloat16)}", "common", "drafting"]


def test_without_numba_the_models_own_code_reads_prompts(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilation.common, "pending", [bool])
    monkeypatch.setattr(compilation.common, "failure", compilation.NumbaMissingError())
    plain = model.generate(prompt(), max_new_tokens=8, do_sample=False)
    ours = model.generate(
        prompt(), max_new_tokens=8, do_sample=False, speculative=config("recycling")
    )
    stats = lookahead_hf.last_stats(model)
    assert stats is not None and stats.fallback_reason is None and torch.equal(plain, ours)
    assert execution.NO_COMPILER in stats.own_code
