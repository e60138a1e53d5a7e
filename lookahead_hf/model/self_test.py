"""A self test for unknown models: do ragged draft trees, or chains, give plain logits?"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from typing import Any
from weakref import WeakKeyDictionary, ref

import numpy as np
import torch

from lookahead_hf.draft import DraftTree, Verdict
from lookahead_hf.fallback import Unserved
from lookahead_hf.model import compat
from lookahead_hf.model.facts import facts_of, numerics_of
from lookahead_hf.model.state import state_of
from lookahead_hf.rows import Rows
from lookahead_hf.runner.host import Runner
from lookahead_hf.runner.patched import patched
from lookahead_hf.runner.prefill import start
from lookahead_hf.runner.watch import watcher

TRIED = frozenset(
    {"cohere", "cohere2", "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "gptj", "granite"}
    | {"llama", "mistral", "mixtral", "olmo", "olmo2", "olmo3", "olmoe", "opt", "phi", "phi3"}
    | {"qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3", "stablelm", "starcoder2"}
)
"""Types of text models that our tests over all architectures cover; a model that wraps one has
another type, and its own way with masks."""

PROMPT = 6

TOLERANCE, TOLERANCE_HALF = 0.01, 0.15
"""Largest difference allowed, in standard deviations of the logits; a wrong mask gives about 1."""

TOLERANCE_CHAINS = 1e-3
"""The same for recurrent states. In a tiny Jamba rounding gives 1e-5, an ignored state 2e-2."""

TREES = ((2, 0), (1, 2))
"""Right tokens in the drafts of two rows, step by step; a wrong token is drafted beside them."""

CHAINS = ((3, 0, 2, 0, 1, 3, 2, 3), (1, 2, 0, 3, 0, 2, 3, 3))
"""The same in a model with recurrent states, more than `MOST_PENDING` in all. From the second step
on a wrong token follows the right ones."""

passed: WeakKeyDictionary[type, set[Hashable]] = WeakKeyDictionary()
"""Kinds of models that have passed, by their class: the next one of a kind need not be tested."""

logger = logging.getLogger(__name__)


def refusal(model: Any, is_packed: bool = False) -> tuple[str, str]:
    """Return why draft trees over ragged rows give other logits than plain forwards, and a remedy.

    Both may be empty. A model is trusted if its own type and that of its text model are in `TRIED`,
    transformers' own methods run it, and every layer of the cache has one place. Any other model is
    tested once for each of its numerics, with ten forwards over a dozen tokens, packed if asked. A
    fault that hooks may have caused is not remembered.
    """
    if facts_of(model).is_stock and (
        {model.config.model_type, compat.text_config(model).model_type} <= TRIED
    ):
        return "", ""
    tests, key = state_of(model).self_tests, (numerics_of(model), is_packed)
    if key in tests:
        return tests[key], ""
    kind, alike = _kind(model, key), passed.setdefault(type(model), set())
    try:
        found = "" if kind in alike else fault(model, is_packed)
    except OSError as error:  # not the model's fault, and it may be over soon
        return f"the self test failed: {error}", "call again"
    except (RuntimeError, MemoryError):
        return "there was no memory for the self test", "free some and call again"
    if not found or not (facts_of(model).is_hooked or watcher()):
        tests[key] = found
    if not found and kind is not None:
        alike.add(kind)
    return found, ""


def _kind(model: Any, key: Hashable) -> Hashable | None:
    """Return what is equal of models that share a verdict, None if this one may differ."""
    modules = list(model.named_modules(remove_duplicate=False))
    if facts_of(model).is_hooked or watcher() or any("forward" in vars(m) for _, m in modules):
        return None
    weights = frozenset((type(each), each.dtype) for each in model.parameters())
    kinds = tuple((name, ref(type(module))) for name, module in modules)
    return key, str(model.config.to_dict()), weights, kinds


def fault(model: Any, is_packed: bool) -> str:
    """Run the self test of a model; return the fault, empty for none.

    Exceptions count, as a call would meet them too; lack of memory and system errors are raised.
    """
    name = type(model).__name__
    try:
        difference = _differs_by(model, is_packed)
    except OSError:  # a kernel of the hub that cannot be loaded
        raise
    except Exception as error:
        if isinstance(error, Unserved):
            return error.detail
        # A CPU's allocator raises a plain RuntimeError, whose text alone tells.
        if isinstance(error, (RuntimeError, MemoryError)) and "memory" in f"{error!r}".lower():
            raise
        logger.info("the self test of %s failed, so it is not served", name, exc_info=True)
        return f"a block of tokens fails in {name}: {type(error).__name__}: {error}"
    logger.info("in its self test %s differed by %.2g standard deviations", name, difference)
    exact = TOLERANCE_CHAINS if facts_of(model).mixers else TOLERANCE
    is_same = difference < (exact if numerics_of(model).is_exact else TOLERANCE_HALF)
    return "" if is_same else f"{name} gives other logits for blocks"


@torch.no_grad()
def _differs_by(model: Any, is_packed: bool) -> float:
    """Return the largest difference from plain logits, in their standard deviations."""
    has_states, vocab = bool(facts_of(model).mixers), compat.text_config(model).vocab_size
    counts = CHAINS if has_states else TREES
    length = PROMPT + 2 + max(sum(each) + len(each) for each in counts)
    # Without the first ones, which may be special.
    text = np.random.default_rng(0).integers(vocab // 8, vocab, length)
    ids = torch.from_numpy(text)[None].repeat(2, 1).to(model.device)
    mask = torch.ones_like(ids)
    if not has_states:
        mask[1, :2] = 0
    expected = _plain_by_steps(model, ids, mask)
    runner, worst = Runner(model, 2, is_packed=is_packed), 0.0
    with patched(model):
        found = _ragged(runner, text, counts, ids[:, :PROMPT], mask[:, :PROMPT])
    for at, logits in found:
        difference = float((logits.float() - expected[at]).abs().max())
        worst = float(np.maximum(worst, difference))  # NaN stays NaN
    return worst / float(expected.std())


def _plain_by_steps(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the plain logits behind a prompt, [rows, tokens, vocab], computed token by token.

    The inputs of each step are prepared as in `generate`, which a class may override. One forward
    reads the first `PROMPT` columns of the text.
    """
    given: dict[str, Any] = {"use_cache": True, "attention_mask": mask[:, :PROMPT]}
    names = compat.decoder_names(model)
    given[names.prepared_cache] = compat.DynamicCache(config=model.config)
    if not compat.counts_positions(model):
        given["position_ids"] = compat.positions_by_mask(mask[:, :PROMPT])
    logits = []
    for count in range(PROMPT, ids.shape[1] + 1):
        outputs, given = compat.plain_step(model, ids[:, :count], count == PROMPT, given)
        logits.append(outputs.logits[:, -1:].float())
    return torch.cat(logits[1:], 1)


Logits = list[tuple[tuple[int, int], torch.Tensor]]
"""Logits, [vocab], each with its row and place behind the prompt."""


def _ragged(
    runner: Runner,
    text: np.ndarray,
    counts: tuple[tuple[int, ...], ...],
    prompt: torch.Tensor,  # [rows, columns]
    mask: torch.Tensor,  # [rows, columns]
) -> Logits:
    """Return the logits of rows of one text that advance by these counts of right tokens."""
    rows, every, got = Rows(prompt.to("cpu").numpy()), range(len(prompt)), Logits()
    begun = slice(0, -2) if runner.is_packed else slice(None)
    start(runner, prompt[:, begun], mask[:, begun])
    if runner.is_packed:
        runner.run(list(prompt[:, -2:].cpu().numpy()), DraftTree.empty(len(rows.live)))
        runner.keep(np.ones(len(rows.live), np.int64))
    for row in every:
        rows.emit(row, int(text[PROMPT]))
    for step, right in enumerate(zip(*counts, strict=True)):
        emitted, paths, drafts = [], [], []
        ends = (PROMPT + rows.num_emitted).tolist()  # of the text so far
        for end, count in zip(ends, right, strict=True):
            emitted.append(text[end : end + count + 1].tolist())
            wrong = (emitted[-1][-1 if runner.only_chains else 0] + 1) % int(text.max())
            own = emitted[-1][:-1]
            chain = [*own, *([wrong] if step else [])]
            drafts.append([chain] if runner.only_chains else [[wrong], own])
            paths.append(range(len(own)) if runner.only_chains else range(1, 1 + len(own)))
        logits = runner.launch(rows, DraftTree.from_chains(drafts)).logits
        for row in every:
            places = enumerate([0, *(node + 1 for node in paths[row])], ends[row] - 1 - PROMPT)
            got += [((row, behind), logits[row, place]) for behind, place in places]
            for token in emitted[row]:
                rows.emit(row, token)
        runner.commit(Verdict.from_rows(emitted, paths))
    if runner.recurrent is not None:
        runner.recurrent.settle()
    last = runner.launch(rows, DraftTree.empty(len(rows.live))).logits
    return got + [((row, int(n) - 1), last[row, 0]) for row, n in enumerate(rows.num_emitted)]
