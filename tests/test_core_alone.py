"""The core works without engines, optional sources, the queue, other processes and tools."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

OUTSIDE = ("distributed", "engines", "queue", "sources", "tools")

VISIBLE = """
engines engines.cpu engines.cpu.kernels engines.cpu.kernels.* engines.cpu.layers
engines.cpu.layers.code engines.cpu.layers.compiled engines.cpu.layers.descriptions
engines.cpu.layers.programs engines.cpu.layers.room engines.cpu.layers.step
engines.cpu.layers.steps engines.cpu.layers.trial
"""
"""Modules that a call of the core still needs; which kernels it needs depends on the processor.

This list only gets shorter.
"""

PROGRAM = """
import importlib.abc
import sys

OUTSIDE = tuple(f"lookahead_hf.{each}" for each in OUTSIDE)
VISIBLE = {f"lookahead_hf.{each}" for each in VISIBLE}

def is_outside(name):
    return name.startswith(OUTSIDE)

class Wall(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        of_folder = name.rpartition(".")[0] + ".*"
        if is_outside(name) and VISIBLE.isdisjoint({name, of_folder}):
            raise ImportError(f"{name} is hidden")

sys.meta_path.insert(0, Wall())

from hypothesis import given, settings

import lookahead_hf
from tests.helpers.agreement import Tally, compare
from tests.helpers.random_calls import REPEATABLE, calls, smallest

tally = Tally()

@settings(REPEATABLE, max_examples=40)
@given(call=calls().filter(lambda call: call.drafting != "pool"))
def agrees(call):
    compare(call, tally)

lookahead_hf.warm_up(smallest("llama"), seconds=None)
agrees()
assert tally.num_calls >= 40 and tally.num_accepted > 0
assert tally.num_moved > 0
assert {"walk", "lockstep"} <= {*tally.engines}
print(*sorted(name for name in sys.modules if is_outside(name)))
"""


def test_calls_are_plains_without_what_is_outside_of_the_core() -> None:
    values = f"OUTSIDE = {OUTSIDE!r}\nVISIBLE = {VISIBLE.split()!r}\n"
    done = subprocess.run(
        [sys.executable, "-c", values + PROGRAM],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    loaded = {each.removeprefix("lookahead_hf.") for each in done.stdout.split()}
    stale = {each for each in VISIBLE.split() if not each.endswith(".*")} - loaded
    assert not stale
