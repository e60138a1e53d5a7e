"""Runs the prompts of a runner, and lets it go on behind them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from lookahead_hf.block.block import mask_kinds
from lookahead_hf.block.layout import PromptState
from lookahead_hf.cache import hf_layers
from lookahead_hf.cache.adopt import AdoptedCache
from lookahead_hf.call.prepared import PreparedCall, prompt_call
from lookahead_hf.draft import DraftTree
from lookahead_hf.model import compat
from lookahead_hf.runner.host import Runner
from lookahead_hf.runner.outputs import StepOutputs


def prefill(
    runner: Runner,
    call: PreparedCall,
    before_steps: Callable[[], object] = lambda: None,
    shown: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    """Run the prompt as plain `generate` does, and let the runner take over its cache.

    `before_steps` is called after the forward, before the steps are prepared. `shown` are arguments
    of all forwards, which return more by them. Returns the forward's outputs.
    """
    passed, position_ids = {**shown, **call.passed}, call.position_ids  # of the empty cache
    if _may_be_fed(runner, call, passed):
        _take_over(runner, call.names, call.cache, call.seen, position_ids, passed, is_fed=True)
        outputs: Any = _read(runner, call.input_ids.numpy(), call.seen)
        before_steps()
        return outputs
    if runner.steps is not None:
        runner.steps.leave_prompt()
    is_counted = call.cache is not None and not call.names.has_states_alone
    before = int(call.cache.get_seq_length()) if is_counted else 0
    given = {**shown, **call.model_kwargs}
    outputs = compat.prefill(call.model, call.input_ids, call.generation_config, given)
    before_steps()
    cache = compat.returned_cache(outputs, call.cache)
    returned = compat.is_users_cache(cache) or bool(call.generation_config.return_dict_in_generate)
    _take_over(runner, call.names, cache, call.attended, position_ids, passed, returned)
    runner.num_fed += runner.num_rows * (runner.cache.num_columns - before)
    return outputs


def start(runner: Runner, input_ids: torch.Tensor, mask: torch.Tensor | None = None) -> None:
    """Run a prompt outside of `generate`; see `prompt_call`."""
    prefill(runner, prompt_call(runner.model, input_ids, mask))


def _read(runner: Runner, ids: np.ndarray, attended: np.ndarray) -> StepOutputs:
    """Read prompts, [rows, columns], without their pads, into an empty cache."""
    runner.cache.slots.reserve(int(attended.sum(1).max()))
    rows = [row[seen] for row, seen in zip(ids, attended, strict=True)]
    lengths = attended.sum(1)
    starts, total = lengths.cumsum() - lengths, int(lengths.sum())  # among the tokens of all rows
    by_kernels = runner.reads_prompts(int(lengths.max()))
    steps = runner.steps if by_kernels else None
    most = total if steps is None else steps.most_tokens
    logits: list[Any] = [None] * len(rows)
    for first in range(0, total, most):
        fed = [
            row[max(first - start, 0) : max(first + most - start, 0)]
            for row, start in zip(rows, starts.tolist(), strict=True)
        ]
        step = runner.run(fed, DraftTree.empty(runner.num_rows), is_prompt=not by_kernels)
        runner.keep(np.array([min(1, len(tokens)) for tokens in fed]))
        for row in (row for row, tokens in enumerate(fed) if len(tokens)):
            logits[row] = step.logits[row]
    return StepOutputs(logits=torch.stack(logits))


def _take_over(
    runner: Runner,
    names: compat.DecoderNames,
    given: compat.Cache,
    attended: np.ndarray | None,  # [rows, columns]
    position_ids: torch.Tensor,  # [..., rows, columns], or a single row for all
    passed: dict[str, Any],
    returned: bool = False,
    is_fed: bool = False,
) -> None:
    """Let a runner go on behind a prompt, in a cache of transformers that it takes over."""
    model, num_rows = runner.model, runner.num_rows
    by_columns = is_fed or names.has_states_alone
    cache = AdoptedCache(
        *(given, attended, num_rows, compat.layer_masks(model), not runner.has_one_shape),
        returned=returned,
        num_columns=position_ids.shape[-1] if by_columns else None,
        is_fed=is_fed,
    )
    kinds = [kind.within(cache.seen[kind.name]) for kind in mask_kinds(model)]
    position_ids = position_ids.expand(*position_ids.shape[:-2], num_rows, -1)
    of_prompt = position_ids.numpy() if runner.is_packed else None
    runner.begin(PromptState(names, cache, kinds, passed, position_ids[..., -1:] + 1, of_prompt))


def _may_be_fed(runner: Runner, call: PreparedCall, passed: Mapping[str, Any]) -> bool:
    """Return whether prompts are to be read in packed blocks instead of a padded batch.

    The block fills a cache of our own, which holds nothing for pads, so the caller must not see the
    cache. No window may be shorter than the prompt: it would move while the prompt is read.
    """
    seen = call.seen
    if not runner.is_packed or not seen.size:
        return False
    if seen.all() and not runner.reads_prompts(seen.shape[1]):
        return False
    if not seen[:, -1].all():
        return False  # plain generation goes on from a pad at the end of a row
    newest = int(call.position_ids.max())
    if any(newest >= limit for limit in compat.rope_limits(call.model).values()):
        return False  # the frequencies of a block would follow from its own longest position
    is_shown = call.returns_cache or passed.get("output_hidden_states")
    in_chunks = call.generation_config.prefill_chunk_size is not None
    # Embeddings or pictures.
    has_more = any(call.model_kwargs.get(name) is not None for name in compat.PROMPT_ONLY)
    cache, kind = call.cache, compat.DynamicCache
    is_new = type(cache) is kind and cache.layers and not cache.get_seq_length()
    if is_shown or in_chunks or has_more or not is_new:
        return False
    windows = [hf_layers.window(layer) for layer in cache.layers]
    shares = getattr(compat.text_config(call.model), "num_kv_shared_layers", None)
    return not shares and all(each is None or each >= seen.shape[1] for each in windows)
