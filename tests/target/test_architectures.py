"""Every architecture that is served writes plain's text from captured steps, or says why not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import lookahead_hf
from lookahead_hf.target import graphs
from tests.architectures import MODEL_TYPES, build
from tests.device import taped
from tests.models import prompt
from tests.scripted import RandomTrees, continuations, scripted


@pytest.mark.slow
@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.filterwarnings("ignore")
def test_captured_steps_write_plains_text(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(model_type)
    if model is None:
        pytest.skip("not built")
    ids = prompt(2, 10, seed=3)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    call = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 24, "pad_token_id": 0}
    try:
        plain = model.generate(ids, **call)
    except Exception as error:  # a config with sizes of its own may build and not run
        pytest.skip(f"plain generate fails: {error}")
    trees = scripted(continuations(plain, 10), RandomTrees())
    config = replace(trees, cuda_graphs=True, on_fallback="silent")
    monkeypatch.setattr(graphs, "WIDTHS", (32, 1))
    with taped(monkeypatch), lookahead_hf.enabled(model):
        ours = model.generate(ids, **call, speculative=config)
    stats = lookahead_hf.last_stats(model)
    assert stats is not None
    assert ours.tolist() == plain.tolist()
    if stats.fallback_reason is not None:
        pytest.skip(f"falls back: {stats.fallback_reason}")
    assert stats.num_accepted > 0
    if stats.graphs != "replayed":
        pytest.skip(f"not captured: {stats.graphs}")
