"""The text is plain's on every tiny architecture; tests/test_properties.py varies the call."""

from __future__ import annotations

import pytest

from tests.helpers.calls import GREEDY, compare, padded
from tests.helpers.models import NAMES, tiny


@pytest.mark.parametrize(("attn", "kind"), [("sdpa", "left"), ("eager", "holes")])
@pytest.mark.parametrize("name", NAMES)
def test_an_architecture_writes_plains_text(name: str, attn: str, kind: str) -> None:
    stats = compare(tiny(name, attn), padded(kind), **GREEDY)
    assert stats.num_moved > 0
    assert len({row.row_steps for row in stats.row_stats}) > 1
