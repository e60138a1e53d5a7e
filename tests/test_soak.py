"""Calls of every kind, one after another and in threads, leave memory as it is.

`SOAK_SECONDS=3600 pytest -m slow -s tests/test_soak.py` makes it an hour and prints what it found.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

SECONDS = os.environ.get("SOAK_SECONDS", "120")

MOST_GROWTH = 16_384
"""Bytes per call that count as noise. A model that is not let go takes 600,000, K and V 50,000."""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's /proc")
def test_memory_stays_flat() -> None:
    # oneDNN keeps up to 1,024 kernels, one for every shape that it meets.
    env = {**os.environ, "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0"}
    command = [sys.executable, "-m", "tests.helpers.soak", SECONDS]
    printed = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True).stdout
    print(printed)
    found = json.loads(printed)
    assert found["num_accepted"] > found["num_calls"]
    assert found["bytes_per_call"] < MOST_GROWTH
