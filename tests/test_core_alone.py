"""The core works without engines, optional sources, the queue, other processes and tools."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

OUTSIDE = ("distributed", "engines", "queue", "sources", "tools")

PROGRAM = """
import importlib.abc
import sys

def is_outside(name):
    return name.startswith(tuple(f"lookahead_hf.{each}" for each in OUTSIDE))

class Wall(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if is_outside(name):
            raise ModuleNotFoundError(f"{name} is hidden", name=name)

sys.meta_path.insert(0, Wall())

import pytest
from hypothesis import given, settings

import lookahead_hf
from lookahead_hf.call.execution import NO_ENGINE
from tests.helpers.agreement import Tally, compare
from tests.helpers.architectures import build
from tests.helpers.models import prompt
from tests.helpers.random_calls import HYBRIDS, REPEATABLE, calls, smallest

tally, ways = Tally(), set()

def is_of_core(call):
    is_plain = call.drafting != "pool" and call.model not in HYBRIDS and call.compiled is True
    return is_plain and call.way in ("call", "threads")

@settings(REPEATABLE, max_examples=40)
@given(call=calls().filter(is_of_core))
def agrees(call):
    compare(call, tally)
    stats = lookahead_hf.last_stats(call.target)
    ways.add((stats.execution, stats.own_code))

lookahead_hf.warm_up(smallest("llama"), seconds=None)
agrees()
assert tally.num_calls >= 40 and tally.num_accepted > 0
assert tally.num_moved > 0
assert {"walk", "lockstep"} <= {*tally.engines}
assert ways == {("model", (NO_ENGINE,))}

with pytest.warns(lookahead_hf.SpeculationFallbackWarning, match="engines.hybrid"):
    lookahead_hf.generate(build("jamba"), prompt(), max_new_tokens=4)
model = lookahead_hf.enable(smallest("llama"))
with pytest.raises(ModuleNotFoundError, match="sources is hidden"):
    model.generate(prompt(), speculative="pool")
with pytest.raises(ModuleNotFoundError, match="queue is hidden"):
    model.generate_batch([[1, 2]], speculative=True)
with pytest.raises(ModuleNotFoundError, match="tools is hidden"):
    lookahead_hf.trace.Trace().to_html()
assert not any(map(is_outside, sys.modules))
"""


def test_calls_are_plains_without_what_is_outside_of_the_core() -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"OUTSIDE = {OUTSIDE!r}\n{PROGRAM}"],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
