"""The count of statements that keeps rooms from growing."""

from __future__ import annotations

import pytest

from tests import size


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ('"""A docstring."""\n', 0),
        ("x = 1\n", 1),
        ("x = 1; y = 2\n", 2),
        ("a, b = x, y\n", 2),
        ("pair = x, y\n", 1),
        ('def f():\n    """Say."""\n    return 1\n', 2),
        ("if x:\n    pass\nelse:\n    pass\n", 3),
    ],
)
def test_statements(source: str, count: int) -> None:
    assert size.statements(source) == count


def test_what_has_grown_is_named() -> None:
    assert size.grown({"cache": 3, "call": 1}, {"cache": 2, "call": 1}) == [
        "cache: 3, and at most 2"
    ]
    assert size.grown({"new": 1}, {}) == ["new: 1, and at most 0"]


def test_the_ledger_knows_every_room() -> None:
    kept = size.ledger()["committed"]
    assert {*size.measured()} == {*kept}
