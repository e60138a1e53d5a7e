"""A trial on a model that nobody tried: does a ragged draft tree give plain's logits?"""

from __future__ import annotations

import logging
import threading
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from lookahead_hf import compat
from lookahead_hf.draft import DraftTree, Verdict
from lookahead_hf.rows import Rows
from lookahead_hf.runner import attention, tree_attention
from lookahead_hf.runner.host import BlockShape, Runner

TRIED = frozenset(
    {"cohere", "cohere2", "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "gptj", "granite"}
    | {"llama", "mistral", "mixtral", "olmo", "olmo2", "olmo3", "olmoe", "opt", "phi", "phi3"}
    | {"qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3", "stablelm", "starcoder2"}
)
"""Text model types whose texts the sweep over all architectures has shown to be equal."""

PROMPT, TEXT = 6, 12
TOLERANCE = {torch.float32: 0.01}
TOLERANCE_HALF = 0.15
"""Largest difference allowed, in standard deviations of the logits; a wrong mask gives about 1."""

logger = logging.getLogger(__name__)
_lock = threading.Lock()
_verdicts: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
_by_kernel: WeakKeyDictionary[Any, tuple[Any, bool]] = WeakKeyDictionary()


def refusal(model: Any) -> tuple[str, str]:
    """Why blocks of draft trees over ragged rows cannot stand for the model's own forwards.

    Types that the sweep covers are taken at its word; any other model is tried once, with four
    forwards over a dozen tokens.

    Returns:
        What was found, empty where they can; and what to do about it, empty where nothing helps.
    """
    if compat.text_config(model).model_type in TRIED:
        return "", ""
    with _lock:
        known = _verdicts.get(model)
    if known is None:
        try:
            known = _try(model)
        except (RuntimeError, MemoryError):  # which says nothing of the model, and may be over soon
            return "no memory was left for the forwards of its trial", "free some and call again"
        with _lock:
            _verdicts[model] = known
    return known, ""


def keeps_bits_in_trees(model: Any, width: int) -> bool:
    """Whether a token has the same bits in any draft tree, in blocks of `width` tokens.

    That is so where our kernel does all attention, which a forward over a few tokens shows, once.
    """
    if compat.counts_positions(model) or not tree_attention.serves(model.device, width):
        return False
    names = tuple(compat.attention_name(config) for config in compat.attention_configs(model))
    with _lock:
        known = _by_kernel.get(model)
    if known is None or known[0] != names:
        known = names, _is_all_by_kernel(model, width)
        with _lock:
            _by_kernel[model] = known
    return known[1]


@torch.no_grad()
def _is_all_by_kernel(model: Any, width: int) -> bool:
    ids = torch.arange(PROMPT, device=model.device)[None]
    target, rows = Runner(model, 1, BlockShape(width, width)), Rows(ids.to("cpu").numpy())
    with attention.laid_under(model), attention.left_to_kernel() as counts:
        target.start(ids, compat.DynamicCache(config=model.config))
        rows.emit(0, PROMPT)
        target.forward(target.layout(rows, DraftTree.empty(1)))
    assert target.cache is not None
    return counts[True] >= len(target.cache.slots.layers) and not counts[False]


def _try(model: Any) -> str:
    """What was found, empty for no fault.

    Any exception counts, as what goes wrong here would go wrong in a call; but where memory ran out
    that is raised.
    """
    name = type(model).__name__
    try:
        difference = _differs_by(model)
    except Exception as error:
        # A CPU's allocator raises a plain RuntimeError, whose text alone tells.
        if isinstance(error, (RuntimeError, MemoryError)) and "memory" in f"{error!r}".lower():
            raise
        logger.info("the trial of %s failed, so it is not served", name, exc_info=True)
        return f"a block of tokens fails in {name}: {type(error).__name__}: {error}"
    logger.info("in its trial %s differed by %.2g deviations of its logits", name, difference)
    is_same = difference < TOLERANCE.get(model.dtype, TOLERANCE_HALF)
    return "" if is_same else f"{name} gives other logits for blocks"


@torch.no_grad()
def _differs_by(model: Any) -> float:
    """Largest difference to plain's logits, in standard deviations of these."""
    vocab = compat.text_config(model).vocab_size
    text = np.random.default_rng(0).integers(vocab // 8, vocab, TEXT)
    ids = torch.from_numpy(text)[None].to(model.device)
    positions = torch.arange(TEXT, device=ids.device)[None]  # as plain `generate` gives them
    given = {"input_ids": ids, "position_ids": positions}
    expected = model(**given, use_cache=False, return_dict=True).logits[0].float()
    got = _ragged(model, text, ids[:, :PROMPT].repeat(2, 1))
    worst = max(float((logits.float() - expected[at]).abs().max()) for at, logits in got)
    return worst / float(expected.std())


def _ragged(model: Any, text: np.ndarray, prompt: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    """Logits of two rows that advance by different counts, each with its place in the text."""
    target, rows = Runner(model, 2), Rows(prompt.to("cpu").numpy())
    decoy = int(text[0])
    with attention.laid_under(model):
        target.start(prompt, compat.DynamicCache(config=model.config))
        for row in range(2):
            rows.emit(row, int(text[PROMPT]))
        after = text[PROMPT + 1 : PROMPT + 4].tolist()
        draft = DraftTree.from_rows([(after, [-1, 0, 1]), ([decoy, after[0]], [-1, -1])])
        first = target.forward(target.layout(rows, draft)).logits
        got = [(PROMPT + i, first[0, i]) for i in range(4)]
        got += [(PROMPT, first[1, 0]), (PROMPT + 1, first[1, 2])]
        paths = [[0, 1, 2], [1]]
        target.commit(_verdict(rows, text, paths))
        ends = rows.num_emitted + PROMPT - 1
        second = target.forward(target.layout(rows, DraftTree.empty(2))).logits
    return got + [(int(ends[row]), second[row, 0]) for row in range(2)]


def _verdict(rows: Rows, text: np.ndarray, paths: list[list[int]]) -> Verdict:
    """Accept the paths and emit the text behind them."""
    for row, path in enumerate(paths):
        for token in text[PROMPT + 1 : PROMPT + 2 + len(path)]:
            rows.emit(row, int(token))
    return Verdict.from_rows(paths, paths, np.ones(len(paths), bool))
