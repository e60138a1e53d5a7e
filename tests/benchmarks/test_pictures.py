"""The pictures of the README show what was measured, as SVG that a reader of XML accepts."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from lookahead_hf.drafting.budget import SLOPE, CostCurve
from tests.helpers.tiny_chat import save_looping_chat

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def race() -> ModuleType:
    return importlib.import_module("race")


def test_a_race_shows_the_same_text_twice_and_colours_what_was_drafted(
    race: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture = tmp_path / "race.svg"
    words = [
        "--model",
        str(save_looping_chat(tmp_path / "model")),
        "--family",
        "qa",
        "--prompt",
        "1",
    ]
    monkeypatch.setattr(sys, "argv", ["race.py", str(picture), *words, "--new-tokens", "48"])
    # On a tiny model no draft is worth its measured cost, so a node costs what is assumed first.
    observe = CostCurve.observe
    monkeypatch.setattr(CostCurve, "observe", lambda curve, n, _: observe(curve, n, 1 + SLOPE * n))
    race.main()
    shown = ElementTree.parse(picture).getroot().findall(f"{SVG}g/{SVG}text")
    story = [text for text in shown if "big" not in text.get("class", "")]
    sides = [dict[tuple[str, int], str](), dict[tuple[str, int], str]()]
    for text in story:
        side, x = divmod(float(text.attrib["x"]), race.SIDE)
        column = round((x - 18) / race.svg.CHARACTER)
        for at, character in enumerate(text.text or ""):
            sides[int(side)][text.attrib["y"], column + at] = character
    left, right = ({at: each for at, each in side.items() if each != " "} for side in sides)
    assert left and left == right
    assert "s0" in {text.get("class") for text in story}


def test_something_moves_only_until_its_end(race: ModuleType) -> None:
    (shown,) = ElementTree.fromstring(f"<a>{race.svg.between(1, 2, 4, '<b/>')}</a>")
    keyframes = shown.findtext("style") or ""
    assert "{0%{opacity:0}25.00%{opacity:1}50.00%{opacity:0}}" in keyframes
    assert shown.get("opacity") == "0"
    assert shown.get("style", "").removeprefix("animation-name:") in keyframes


def test_bars_are_as_long_as_the_speeds() -> None:
    bars = importlib.import_module("bars")
    speeds = {"plain": 20.0, "HF prompt lookup": 30.0, "speculative": 50.0, "budget 0": 25.0}
    lines = [
        {"family": "qa", "system": name, "tokens_per_second": speed, "ratio": speed / 20}
        for name, speed in speeds.items()
    ]
    root = ElementTree.fromstring(bars.draw(lines))
    widths = [float(each.attrib["width"]) for each in root.findall(f"{SVG}rect[@class]")]
    assert widths[-3:] == pytest.approx([0.4 * bars.BARS, 0.6 * bars.BARS, bars.BARS])
    assert "2.50 x plain" in "".join(root.itertext())
