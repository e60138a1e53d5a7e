"""Medusa-1 heads draft from a file, and a file of anything else is refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import lookahead_hf
from lookahead_hf.config import SpeculativeConfig
from lookahead_hf.drafting.sources.heads.drafter import Heads
from lookahead_hf.drafting.sources.heads.medusa import MedusaDrafter
from lookahead_hf.model_state import kept
from tests.helpers.calls import GREEDY, padded
from tests.helpers.compared import compared
from tests.helpers.drafts import paths, rows_of
from tests.helpers.heads import medusa_heads, states_of
from tests.helpers.models import VOCAB, prompt, tiny

SAMPLED = {**GREEDY, "do_sample": True, "temperature": 0.3, "top_k": 5}


@pytest.fixture(scope="module")
def fitted() -> tuple[Any, dict[str, torch.Tensor]]:
    """A model, and heads that foresee some of its texts."""
    model = tiny("llama")
    texts = model.generate(**padded("left"), **GREEDY)
    return model, medusa_heads(model, [row[2 * at :].tolist() for at, row in enumerate(texts)], 3)


@pytest.fixture
def file(fitted: Any, tmp_path: Path) -> Path:
    save_file(fitted[1], tmp_path / "heads.safetensors")
    return tmp_path / "heads.safetensors"


@pytest.mark.parametrize("mode", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("others", [(), ("ngram", "recycling")])
def test_the_text_is_plains(
    fitted: Any, file: Path, mode: dict[str, Any], num_rows: int, others: tuple[str, ...]
) -> None:
    model, inputs = fitted[0], padded("left", num_rows)
    fields = {"drafters": (*others, "medusa"), "options": {"medusa": {"path": str(file)}}}
    stats = compared(model, lambda: {**inputs, **mode}, 14, **fields).stats
    assert stats.per_source["medusa"].accepted > 0


def test_the_candidates_of_a_place_follow_those_of_the_place_before(
    fitted: Any, tmp_path: Path
) -> None:
    model, tensors = fitted
    torch.manual_seed(0)
    for name, tensor in tensors.items():  # the names of a whole Medusa checkpoint
        tensors[name] = tensor + 0.1 * torch.randn_like(tensor)
    named = {f"medusa_head.{name}": tensor for name, tensor in tensors.items()}
    torch.save(named, tmp_path / "heads.pt")
    drafter = MedusaDrafter(model, path=tmp_path / "heads.pt", top_k=2, beam=2)
    texts = [prompt(1, length)[0].tolist() for length in (9, 5)]
    rows = rows_of(texts)
    last = torch.cat([states_of(model, text[:-1])[:, -1] for text in texts])
    drafter.hidden_states = last[:, None]
    drafter.begin(rows)
    tree = drafter.propose(rows, 64)
    for row, state in enumerate(last):
        best = []
        for head in range(3):
            weight, bias = (tensors[f"{head}.0.linear.{part}"] for part in ("weight", "bias"))
            block = state + torch.nn.functional.silu(weight @ state + bias)
            best.append((tensors[f"{head}.1.weight"] @ block).topk(2).indices.tolist())
        found = paths(tree, row)
        assert {(path[-1], len(path) - 1) for path in found} == {
            (token, depth) for depth, tokens in enumerate(best) for token in tokens
        }
        assert sorted(map(len, found)) == [1, 1, 2, 2, 2, 2, 3, 3, 3, 3]


def test_heads_are_read_once_and_anew_where_the_file_has_changed(fitted: Any, file: Path) -> None:
    model = fitted[0]
    MedusaDrafter(model, path=file)
    first = kept(model, Heads, Heads)["medusa"][1]
    MedusaDrafter(model, path=str(file))
    assert kept(model, Heads, Heads)["medusa"][1] is first
    os.utime(file, ns=(1, 1))
    MedusaDrafter(model, path=file)
    assert kept(model, Heads, Heads)["medusa"][1] is not first


HIDDEN = 48
WRONG = {
    "other names": ({"weight": torch.zeros(2, 2)}, r"'0\.0\.weight' is missing"),
    "nothing": ({}, r"'0\.0\.weight' is missing"),
    "another size": (
        {"0.0.linear.weight": torch.zeros(32, 32)},
        rf"has the shape \(32, 32\).*the shape \({HIDDEN}, {HIDDEN}\)",
    ),
    "another vocabulary": (
        {"0.0.weight": torch.zeros(VOCAB + 1, HIDDEN)},
        rf"'0\.0\.weight' has the shape \({VOCAB + 1}, {HIDDEN}\)",
    ),
    "a missing head": (
        {"0.0.weight": torch.zeros(VOCAB, HIDDEN), "2.0.weight": torch.zeros(VOCAB, HIDDEN)},
        r"'1\.0\.weight' is missing",
    ),
}


def refused(options: dict[str, Any], match: str) -> None:
    model, forwards = tiny("llama"), list[int]()
    model.register_forward_pre_hook(lambda *_: forwards.append(1))
    config = SpeculativeConfig(drafters=("medusa",), options={"medusa": options})
    with lookahead_hf.enabled(model), pytest.raises(ValueError, match=match):
        model.generate(prompt(), **GREEDY, speculative=config)
    assert not forwards


@pytest.mark.parametrize(("tensors", "match"), WRONG.values(), ids=WRONG)
def test_files_of_something_else_are_refused(
    tmp_path: Path, tensors: dict[str, torch.Tensor], match: str
) -> None:
    save_file(tensors, tmp_path / "heads.safetensors")
    refused({"path": tmp_path / "heads.safetensors"}, match)


def test_wrong_paths_and_options_are_refused(tmp_path: Path) -> None:
    refused({}, r"needs the file of its heads, not path=None")
    refused({"path": tmp_path}, "no such file")
    (tmp_path / "heads.pt").write_text("text")
    refused({"path": tmp_path / "heads.pt"}, "cannot be read as a dict of tensors")
    refused({"path": tmp_path / "heads.pt", "beam": 0}, "medusa: beam is 0")
    refused({"path": tmp_path / "heads.pt", "size": 0}, "'size'")
