"""Medusa-1 heads draft from a file, and a file of anything else is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import lookahead_hf
from lookahead_hf import SpeculativeConfig
from lookahead_hf.sources.heads import MedusaDrafter
from tests.helpers.calls import GREEDY, padded
from tests.helpers.compared import compared
from tests.helpers.drafts import paths, rows_of
from tests.helpers.heads import medusa_heads, states_of
from tests.helpers.models import prompt, tiny


@pytest.fixture(scope="module")
def fitted() -> tuple[Any, dict[str, torch.Tensor]]:
    """A model, and heads that foresee some of its texts."""
    model = tiny("llama")
    texts = model.generate(**padded("left"), **GREEDY)
    return model, medusa_heads(model, [row[2 * at :].tolist() for at, row in enumerate(texts)], 3)


@pytest.mark.parametrize("others", [(), ("ngram", "recycling")])
def test_the_text_is_plains(fitted: Any, tmp_path: Path, others: tuple[str, ...]) -> None:
    save_file(fitted[1], tmp_path / "a.safetensors")
    options = {"medusa": {"path": str(tmp_path / "a.safetensors")}}
    fields = {"drafters": (*others, "medusa"), "options": options}
    stats = compared(fitted[0], lambda: {**padded("left"), **GREEDY}, 14, **fields).stats
    assert stats.fallback_reason is None
    assert stats.per_source["medusa"].accepted > 0


def test_the_candidates_of_a_place_follow_all_of_the_place_before(
    fitted: Any, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    tensors = {name: each + 0.1 * torch.randn_like(each) for name, each in fitted[1].items()}
    torch.save({f"medusa_head.{name}": each for name, each in tensors.items()}, tmp_path / "a.pt")
    drafter = MedusaDrafter(fitted[0], path=tmp_path / "a.pt", top_k=2)
    texts = [prompt(1, length)[0].tolist() for length in (9, 5)]
    rows = rows_of(texts)
    last = torch.cat([states_of(fitted[0], text[:-1])[:, -1] for text in texts])
    rows.prompt_states = last[:, None]
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
        assert sorted(map(len, found)) == [1] * 2 + [2] * 4 + [3] * 8


WRONG = {
    "other names": ({"weight": torch.zeros(2, 2)}, r"'0\.0\.weight' is missing"),
    "another size": ({"0.0.linear.weight": torch.zeros(32, 32)}, r"has the shape \(32, 32\)"),
    "a missing head": ({"0.0.weight": torch.zeros(100, 48)} | {"2.0.weight": torch.zeros(1)}, "1"),
}


@pytest.mark.parametrize(("tensors", "match"), WRONG.values(), ids=WRONG)
def test_files_of_something_else_are_refused(
    fitted: Any, tmp_path: Path, tensors: dict[str, torch.Tensor], match: str
) -> None:
    save_file(tensors, tmp_path / "heads.safetensors")
    with pytest.raises(ValueError, match=match):
        MedusaDrafter(fitted[0], path=tmp_path / "heads.safetensors")


def test_wrong_paths_are_refused_before_any_forward(tmp_path: Path) -> None:
    model, forwards = tiny("llama"), list[int]()
    model.register_forward_pre_hook(lambda *_: forwards.append(1))
    (tmp_path / "heads.pt").write_text("text")
    wrong = ({}, "needs the file"), ({"path": tmp_path}, "no such file")
    for options, match in (*wrong, ({"path": tmp_path / "heads.pt"}, "cannot be read as a dict")):
        config = SpeculativeConfig("medusa", options={"medusa": options})
        with lookahead_hf.enabled(model), pytest.raises(ValueError, match=match):
            model.generate(prompt(), **GREEDY, speculative=config)
    assert not forwards
