"""The attributes of transformers' manager that our factory fills, against its own constructor."""

from __future__ import annotations

import ast
import inspect
import textwrap
from types import SimpleNamespace
from typing import Any

import pytest

from lookahead_hf.model.compat import batching

pytestmark = pytest.mark.skipif(not batching.IS_KNOWN, reason="another manager, never inherited")


def set_by(function: Any, owner: str) -> set[str]:
    """Attributes of an object that a function sets, by the object's name in it."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == owner
    }


def test_our_factory_fills_what_transformers_constructor_sets() -> None:
    theirs = set_by(batching.ContinuousBatchingManager.__init__, "self")
    manager: Any = object.__new__(batching.QueueManager)
    config = SimpleNamespace(num_return_sequences=2)
    batching.fill(manager, "model", config, "requests", batching.OutputRouter())
    assert vars(manager).keys() == theirs - {"logit_processor"}
    assert manager.num_return_sequences == 2 and not manager.is_running()


def test_an_attribute_that_a_constructor_adds_is_found() -> None:
    def constructor(self: Any) -> None:
        self.known = other = 1
        self.new, self.pair = other, 2
        other.of_another = 3

    assert set_by(constructor, "self") == {"known", "new", "pair"}
