"""The model of most tests of continuous batching."""

from __future__ import annotations

from typing import Any

import pytest

import lookahead_hf
from tests.helpers import models
from tests.helpers.requests import DRAFTED


@pytest.fixture(scope="module")
def model() -> Any:
    return lookahead_hf.enable(models.tiny("llama"), default=DRAFTED)
