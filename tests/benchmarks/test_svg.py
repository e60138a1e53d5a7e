"""Pictures of the documentation are readable on a light and on a dark page."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

IMAGES = Path(__file__).parents[2] / "docs" / "images"


@pytest.fixture
def svg() -> ModuleType:
    return importlib.import_module("svg")


def test_a_picture_without_a_background_has_colours_for_both(svg: ModuleType) -> None:
    clear, dark = (svg.document(9, 9, "", "", {}, "#000", paper) for paper in ("none", "#111"))
    assert "prefers-color-scheme:dark" in clear and "prefers-color-scheme" not in dark


@pytest.mark.parametrize("name", ["drafters", "families", "nodes"])
def test_those_of_the_documentation_have_them(name: str, svg: ModuleType) -> None:
    assert svg._ON_BLACK in (IMAGES / f"{name}.svg").read_text()
