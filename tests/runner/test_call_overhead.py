"""What a call costs beside its forwards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lookahead_hf
from tests.helpers.models import prompt, tiny


def test_a_call_walks_over_the_modules_few_times() -> None:
    model = lookahead_hf.enable(tiny("llama"))
    walks: list[int] = []
    modules = model.modules

    def counted() -> Iterator[Any]:
        walks.append(1)
        return modules()

    def walks_of(**call: Any) -> int:
        walks.clear()
        model.generate(prompt(), max_new_tokens=24, do_sample=False, **call)
        return len(walks)

    walks_of(speculative=True)  # what never changes is looked up once
    model.modules = counted
    plain = walks_of()
    # Training mode and adapters once; the configurations to name our attention in, there and back.
    assert walks_of(speculative=True) - plain <= 3
