"""docs/models.md is up to date."""

from __future__ import annotations

import pytest

from tests import models_table

QUICK = ("falcon", "gemma2", "git", "jetmoe", "roberta")
"""Decoders of text that the quick tests include, each for another reason."""


@pytest.mark.parametrize(
    ("section", "model_type"),
    [
        (section, each)
        if section == models_table.TEXTS and each in QUICK
        else pytest.param(section, each, marks=pytest.mark.slow)
        for section, types in models_table.SECTIONS.items()
        for each in types
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_the_page_says_what_a_type_does(section: str, model_type: str) -> None:
    lines = models_table.PAGE.read_text(encoding="utf-8").splitlines()
    assert str(models_table.line(model_type, section)) in lines


def test_no_type_writes_another_text() -> None:
    text = models_table.PAGE.read_text(encoding="utf-8")
    assert models_table.WRONG not in text
    assert all(f"\n## {section}\n" in text for section in models_table.SECTIONS)
    assert text.endswith(models_table.RECURRENT)
