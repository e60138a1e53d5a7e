"""Multi-token-prediction layers draft in ragged batches what they write on a single text."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, modeling_layers

import lookahead_hf
from lookahead_hf.call import execution
from lookahead_hf.draft import DraftTree, Verdict
from lookahead_hf.drafting.drafter import Step
from lookahead_hf.fallback import FallbackReason
from lookahead_hf.model import compat
from lookahead_hf.model.state import state_of
from lookahead_hf.sources import heads
from lookahead_hf.sources.heads import KeptLayers, MtpDrafter
from tests.helpers.caches import CACHE
from tests.helpers.calls import GREEDY, padded
from tests.helpers.compared import compared, reason_of, speculated
from tests.helpers.device import taped
from tests.helpers.drafts import emit, rows_of
from tests.helpers.heads import fit, save_with_layers, states_of, with_layers, written
from tests.helpers.models import enlarged, prompt, tiny

SAMPLED = {**GREEDY, "do_sample": True, "temperature": 0.3, "top_k": 5}
NUM_COLUMNS = 14


def block_states(model: Any, texts: list[list[int]], counts: list[int]) -> torch.Tensor:
    """Hidden states of the last tokens of texts as a step returns them, [rows, most, hidden]."""
    most = max(counts)
    rows = [states_of(model, text)[0, -count:] for text, count in zip(texts, counts, strict=True)]
    padding = [(0, 0, 0, most - count) for count in counts]
    return torch.stack([torch.nn.functional.pad(*each) for each in zip(rows, padding, strict=True)])


@pytest.mark.parametrize(
    ("model_type", "num_layers", "num_draft", "piece"),
    [
        *[("glm4_moe", 1, 3, 512), ("glm4_moe", 3, 5, 3), ("mellum", 1, 2, 4)],
        *[("deepseek_v3", 3, 3, 512), ("deepseek_v3", 2, 1, 1)],
    ],
)
def test_drafts_are_what_the_layers_write_in_every_step(
    monkeypatch: pytest.MonkeyPatch, model_type: str, num_layers: int, num_draft: int, piece: int
) -> None:
    monkeypatch.setattr(heads, "PIECE", piece)
    model, layers = with_layers(model_type, num_layers)
    enlarged(layers.layers, 8.0)  # so that attention decides
    served = compat.serving_batches(copy.deepcopy(layers), "sdpa")
    monkeypatch.setattr(compat, "load_mtp", lambda _: served)
    runs: list[int] = []
    run = served.forward_layer
    served.forward_layer = lambda layer, *args, **kwargs: (
        runs.append(layer) or run(layer, *args, **kwargs)
    )
    drafter = MtpDrafter(model, num_draft=num_draft, top_k=1)
    texts = [each.tolist() for each in prompt(3, 15)]
    texts = [texts[0], texts[1][:9], texts[2][:4]]
    rows = rows_of(texts)
    before = [states_of(model, text[:-1])[0] for text in texts]
    left = [torch.nn.functional.pad(each, (0, 0, 14 - len(each), 0)) for each in before]
    rows.prompt_states = torch.stack(left)
    drafter.begin(rows)
    drawn = torch.Generator().manual_seed(1)
    for step in range(6):
        texts = [rows.context(row).tolist() for row in range(3)]
        chains: list[list[int]] = [[], [], []]
        tree = DraftTree.empty(3)
        if step != 2:  # it may rest, and reads all that it has missed
            runs.clear()
            tree = drafter.propose(rows, 64)
            assert len(runs) == num_draft or piece < 512
            chains = [tree.token_ids[tree.row(row)].tolist() for row in range(3)]
            known = [states_of(model, text)[:, :-1] for text in texts]
            assert chains == [
                written(layers, *each, num_draft) for each in zip(known, texts, strict=True)
            ]
        # Row 0 accepts everything, row 1 one token, row 2 nothing.
        accepted = [chains[0], chains[1][:1], []]
        bonus = torch.randint(3, 99, (3, 1), generator=drawn).tolist()
        emitted = [[*kept, *token] for kept, token in zip(accepted, bonus, strict=True)]
        counts = [1 + len(chain) for chain in chains]
        blocks = [text + chain for text, chain in zip(texts, chains, strict=True)]
        states = block_states(model, blocks, counts)
        emit(rows, emitted)
        verdict = Verdict.from_rows(emitted, [range(len(kept)) for kept in accepted])
        drafter.observe(Step(rows, tree, verdict, torch.empty(0), states))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Any]:
    """Loads models whose layers foresee some of the texts of `padded`."""
    made: dict[tuple[str, int], Path] = {}

    def load(model_type: str, num_layers: int) -> Any:
        folder = made.get((model_type, num_layers))
        if folder is None:
            made[model_type, num_layers] = folder = tmp_path_factory.mktemp(model_type)
            model, layers = with_layers(model_type, num_layers)
            texts = model.generate(**padded("left"), **GREEDY)
            fit(model, layers, [row[2 * at :].tolist() for at, row in enumerate(texts)])
            save_with_layers(model, layers, folder)
        kind = type(with_layers(model_type)[0])
        with pytest.MonkeyPatch.context() as patch:  # published ones have their layers' numbers
            names = [r"^mtp\.", r"model\.layers\.[2-9]\..*"]
            patch.setattr(kind, "_keys_to_ignore_on_load_unexpected", names)
            model = AutoModelForCausalLM.from_pretrained(folder).eval()
        model.generation_config.eos_token_id = None
        return model

    return load


@pytest.mark.parametrize(
    ("model_type", "num_layers", "num_rows", "mode"),
    [
        *[("glm4_moe", 1, 3, GREEDY), ("glm4_moe", 2, 1, SAMPLED)],
        *[("mellum", 1, 3, GREEDY), ("deepseek_v3", 1, 3, SAMPLED)],
    ],
)
def test_the_text_is_plains(
    checkpoint: Any, model_type: str, num_layers: int, num_rows: int, mode: dict[str, Any]
) -> None:
    model = checkpoint(model_type, num_layers)
    inputs = padded("left", num_rows)
    stats = compared(model, lambda: {**inputs, **mode}, NUM_COLUMNS, drafters=("mtp",)).stats
    assert stats.per_source["mtp"].exclusive == stats.num_accepted
    assert mode["do_sample"] or stats.tokens_per_step > 1.3
    if num_rows > 1:
        assert len({row.row_steps for row in stats.row_stats}) > 1


def test_beside_other_sources_and_on_a_device(
    checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = checkpoint("glm4_moe", 2)
    names = ("ngram", "recycling", "mtp")
    call = {**padded("left"), **GREEDY}
    with taped(monkeypatch) as recorders:
        stats = compared(model, lambda: call, NUM_COLUMNS, drafters=names, cuda_graphs=True).stats
    assert stats.engine == "device" and stats.execution == execution.REPLAYED
    assert any(recording.num_replays for each in recorders for recording in each.recordings)
    assert set(stats.per_source) == set(names)
    assert stats.per_source["mtp"].exclusive > 0


def kept_layers(model: Any) -> Any:
    kept = state_of(model).get(KeptLayers)
    return kept and kept["mtp"][1]


def test_use_mtp_adds_the_drafter(checkpoint: Any) -> None:
    model = checkpoint("mellum", 1)
    call = {**padded("left"), **GREEDY}
    plain = model.generate(**call)
    config = {"budget": 8, "options": {"mtp": {"num_draft": 2}}}
    with lookahead_hf.enabled(model):
        assert model.generate(**call, speculative=config, use_mtp=True).tolist() == plain.tolist()
        assert set(speculated(model).per_source) == {"ngram", "recycling", "mtp"}
        loaded = kept_layers(model)
        model.generation_config.use_mtp = True
        alone = {"drafters": "mtp", "options": {"mtp": {"num_draft": 2}}}
        assert model.generate(**call, speculative=alone).tolist() == plain.tolist()
        assert set(speculated(model).per_source) == {"mtp"}
        assert kept_layers(model) is loaded
        # A call that falls back is plain's, which takes batches.
        beams = {**call, "num_beams": 2, "max_new_tokens": 4}
        expected = model.generate(**beams, use_mtp=False)
        silent = {"on_fallback": "silent"}
        assert model.generate(**beams, speculative=silent).tolist() == expected.tolist()
    assert kept_layers(model) is None
    model.generation_config.use_mtp = None
    lookahead_hf.enable(model, default=silent)  # a mere default leaves it to transformers
    one = {**padded("left", 1), **GREEDY, "use_mtp": True}
    assert model.generate(**one).tolist() == plain[:1].tolist()
    assert reason_of(model) == FallbackReason.DECODING_METHOD


def test_a_cache_of_earlier_turns(checkpoint: Any) -> None:
    model = checkpoint("glm4_moe", 1)
    first = padded("left", 1)["input_ids"]
    caches = iter(
        model.generate(first[:, :6], max_new_tokens=1, return_dict_in_generate=True)
        for _ in range(2)
    )
    call = {"input_ids": first, **GREEDY}
    stats = compared(
        model, lambda: {**call, CACHE: next(caches)[CACHE]}, NUM_COLUMNS, drafters=("mtp",)
    ).stats
    assert stats.per_source["mtp"].accepted > 0


def test_layers_follow_the_type_of_the_model(checkpoint: Any) -> None:
    model = checkpoint("glm4_moe", 1)
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        MtpDrafter(model.to(dtype))
        assert kept_layers(model).layers[0].eh_proj.weight.dtype == dtype


def refused(model: Any, match: str) -> None:
    """Assert that a call with the drafter raises an error before any forward."""
    forwards: list[int] = []
    model.register_forward_pre_hook(lambda *_: forwards.append(1))
    with lookahead_hf.enabled(model), pytest.raises(ValueError, match=match):
        model.generate(prompt(), **GREEDY, speculative={"drafters": ["ngram", "mtp"]})
    assert not forwards


def test_models_and_versions_without_layers_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    refused(tiny("llama"), "LlamaForCausalLM has no `num_mtp_layers`")
    model, layers = with_layers("glm4_moe")
    refused(model, "layers of this Glm4MoeForCausalLM cannot be loaded from ''")
    model.save_pretrained(tmp_path)  # the configuration names a layer, the files lack it
    model.config.name_or_path = str(tmp_path)
    refused(model, "layers of this Glm4MoeForCausalLM cannot be loaded from '/")
    layers.config.layer_types = ["linear_attention"]
    with pytest.raises(ValueError, match="predicts with linear_attention"):
        compat.serving_batches(layers, "sdpa")
    monkeypatch.delattr(modeling_layers.MtpModel, "forward_layer")
    refused(model, r"needs transformers 5\.20 or newer, but this is transformers 5\.")
