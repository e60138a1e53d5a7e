"""Pictures of the documentation are readable on a light and on a dark page."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

PROGRAM = "svg"
IMAGES = Path(__file__).parents[2] / "docs" / "images"


def test_a_picture_without_a_background_has_colours_for_both(benchmark: ModuleType) -> None:
    clear, dark = (
        benchmark.document(9, 9, "", "", {}, "#000", paper) for paper in ("none", "#111")
    )
    assert "prefers-color-scheme:dark" in clear and "prefers-color-scheme" not in dark


@pytest.mark.parametrize("name", ["drafters", "families", "nodes"])
def test_those_of_the_documentation_have_them(name: str, benchmark: ModuleType) -> None:
    assert benchmark._ON_BLACK in (IMAGES / f"{name}.svg").read_text()
