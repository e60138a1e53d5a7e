"""The text is plain's: greedy and sampled, alone and ragged, on every tiny architecture."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.calls import GREEDY, WARPERS, compare, padded
from tests.helpers.models import NAMES, prompt, tiny


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("name", NAMES)
def test_greedy_alone(name: str, attn: str) -> None:
    stats = compare(tiny(name, attn), {"input_ids": prompt()}, **GREEDY)
    assert stats.num_moved > 0
    assert stats.max_width > 1


@pytest.mark.parametrize("kind", ["none", "left", "right", "holes"])
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore:.*right-padding.*")
def test_greedy_ragged(name: str, attn: str, kind: str) -> None:
    stats = compare(tiny(name, attn), padded(kind), **GREEDY)
    assert len({row.row_steps for row in stats.row_stats}) > 1


@pytest.mark.parametrize("warpers", [*WARPERS.values(), {"top_k": 0, "num_return_sequences": 3}])
@pytest.mark.parametrize("kind", ["alone", "left"])
def test_same_seed_same_text(kind: str, warpers: dict[str, Any]) -> None:
    inputs = {"input_ids": prompt()} if kind == "alone" else padded(kind)
    compare(tiny("llama"), inputs, **{**GREEDY, "do_sample": True, **warpers})


@pytest.mark.parametrize("do_sample", [False, True])
def test_rows_end_at_their_own_eos(do_sample: bool) -> None:
    ends = {**GREEDY, "do_sample": do_sample, "eos_token_id": list(range(3, 12))}
    compare(tiny("llama"), padded("left", rows=4), **{**ends, "max_new_tokens": 60})
