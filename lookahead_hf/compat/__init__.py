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

from lookahead_hf.compat.attention import (
    attention_configs,
    attention_function,
    attention_name,
    eager_attention,
    has_only_flash_beside_eager,
    has_stock_masks,
    is_stock_attention,
    layer_masks,
    mask_kinds,
    register_attention,
    registry_configs,
    set_attention_name,
    takes_mask_dict,
    window,
)
from lookahead_hf.compat.caches import (
    CACHES,
    EmptyLayer,
    empty_cache,
    is_users_cache,
    self_attention,
    with_self_attention,
)
from lookahead_hf.compat.forwards import (
    PROMPT_ONLY,
    TOKEN_TYPES,
    DecoderNames,
    captures_outputs,
    decoder_names,
    encoded,
    encodes,
    forward_arguments,
    has_experts,
    text_config,
    unreadable_forward,
)
from lookahead_hf.compat.generation import (
    are_unfinished,
    has_own_generate,
    has_own_loop,
    is_stateful,
    known_mask_length,
    num_pipeline,
    num_tensor_parallel,
    pad_token,
    prefill,
    set_up_for_decoding,
    synced_gpus,
)
from lookahead_hf.compat.positions import (
    counted_tables,
    counts_by_mask,
    counts_positions,
    entries_of_columns,
    grows,
    position_table,
    reads_lengths,
    relative_biases,
    rope_limits,
)
