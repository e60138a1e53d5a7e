"""Other architectures and DeepSpeed over two processes: plain's text in both."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.helpers.distributed import families
from tests.helpers.distributed.ranks import assert_speculated, run_both


@pytest.mark.slow
def test_architectures(tmp_path: Path) -> None:
    families.save(tmp_path)
    ((first, second),) = run_both((families.calls,), tmp_path)
    assert len(first) == 2 * len(families.NAMES)
    for found in (*first.values(), *second.values()):
        assert_speculated(found)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="no extra installs deepspeed")
def test_zero_3(tmp_path: Path) -> None:
    (of_both,) = run_both((families.of_deepspeed,), tmp_path)
    for of_rank in of_both:
        for found in of_rank.values():
            assert_speculated(found)
