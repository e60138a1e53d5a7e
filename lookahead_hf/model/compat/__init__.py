"""Everything that depends on the internals of transformers.

A name is defined in one submodule; callers import `compat` and read it here.
"""

from __future__ import annotations

from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    StaticCache,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from lookahead_hf.model.compat.attention import *
from lookahead_hf.model.compat.caches import *
from lookahead_hf.model.compat.forwards import *
from lookahead_hf.model.compat.generation import *
from lookahead_hf.model.compat.torch import *
