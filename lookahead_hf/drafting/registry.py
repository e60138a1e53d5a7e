"""Builds the drafters of a call from names and from the user's objects."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from lookahead_hf.call import optional
from lookahead_hf.config import DEFAULT_DRAFTERS, drafter_name
from lookahead_hf.draft import Verdict
from lookahead_hf.drafting.drafter import Drafter, TargetCall, warn_of_failure
from lookahead_hf.drafting.ensemble import Ensemble, head
from lookahead_hf.drafting.rates import Calibration, memory_of
from lookahead_hf.drafting.sources.user import UserDrafter
from lookahead_hf.ngram_pool.compilation import drafting
from lookahead_hf.ngram_pool.pool import open_pool
from lookahead_hf.rows import Rows
from lookahead_hf.utils import known_names

if TYPE_CHECKING:
    from lookahead_hf.call.prepared import Request
    from lookahead_hf.logits.grammars import Grammar
    from lookahead_hf.rows import EncoderInputs


def build(
    request: Request,
    model: Any = None,
    *,
    vocab_size: int | None = None,
    encoder_inputs: EncoderInputs | None = None,
    processors: Sequence[Any] = (),
    grammar_of: Callable[[int], Grammar | None] | None = None,
    draws: bool = False,
) -> list[Drafter]:
    """Make the drafters of one call.

    A prediction, an assistant, a pool, `use_mtp` and a grammar add their drafters to those that the
    configuration names. Without a prediction, "prediction" is left out. `grammar_of` makes the
    grammar of a row, None if it has none; `draws` says whether rejection sampling verifies by
    probabilities.

    Raises:
        NumbaMissingError: A pool cannot be opened because numba is missing or broken.
        ValueError: An option is unknown or wrong, or "assistant" is named without a model.
    """
    config = request.config
    wanted = list(DEFAULT_DRAFTERS if config.drafters is None else config.drafters)
    if request.prediction is not None and "prediction" not in wanted:
        wanted.insert(0, "prediction")
    is_asked = {
        "assistant": request.assistant_model is not None,
        "pool": config.pool is not None,
        "mtp": request.use_mtp,
    }
    wanted += [name for name, asked in is_asked.items() if asked and name not in wanted]
    call = TargetCall(vocab_size, encoder_inputs, processors, draws, request.assistant_settings)
    built: list[Drafter] = []
    for drafter in wanted:
        if not isinstance(drafter, str):
            built += _user_drafters(drafter, vocab_size, draws)
        elif drafter != "prediction" or request.prediction is not None:
            built.append(_by_name(drafter, request, model, call))
    # Rejection compares drafts with what they were drawn from, which a grammar would change.
    source = optional.find("grammar") if grammar_of is not None and wanted and not draws else None
    if source is not None:
        built.append(source.GrammarDrafter(grammar_of, memory_of(model).vocabularies))
    return built


def _user_drafters(drafter: Any, vocab_size: int | None, draws: bool) -> list[Drafter]:
    """Wrap the caller's object; return nothing if reading its properties fails."""
    if type(drafter).__module__.startswith("lookahead_hf."):
        return [drafter]
    try:
        return [UserDrafter(drafter, vocab_size, draws)]
    except Exception as error:
        warn_of_failure(drafter_name(drafter), error)
        return []


def _by_name(name: str, request: Request, model: Any, call: TargetCall) -> Drafter:
    first, own = _given(name, request, model, call)
    make = getattr(importlib.import_module("lookahead_hf.drafting"), f"{name.capitalize()}Drafter")
    options = request.config.options.get(name, {})
    if clash := options.keys() & own.keys():
        raise ValueError(f"options of the drafter {name!r} cannot set {', '.join(sorted(clash))}")
    if options.get("keep") is True:
        raise ValueError(
            f"options of the drafter {name!r} cannot set keep=True: given by name, a drafter ends "
            "with its call. Give an object that lives longer, such as "
            'drafters=("ngram", RecyclingDrafter(keep=True))'
        )
    try:
        drafter: Drafter = make(*first, **own, **options)
    except TypeError as error:
        allowed = [*inspect.signature(make).parameters][len(first) :] or ["none"]
        wrong = next((each for each in options if each not in allowed), None)
        why = f"there is no {wrong!r}; {known_names(allowed)}" if wrong else str(error)
        raise ValueError(f"options of the drafter {name!r}: {why}") from error
    return drafter


def _given(
    name: str, request: Request, model: Any, call: TargetCall
) -> tuple[list[Any], dict[str, Any]]:
    """Return what a call passes to a drafter: positional arguments, and options closed to users."""
    vocab_size, config = call.vocab_size, request.config
    if name == "prediction":
        return [request.prediction], {}
    if name == "pool":
        pool = memory_of(model).own_pool() if config.pool is None else config.pool
        own = {"learn": config.learn, "vocab_size": vocab_size, "tokenizer": request.tokenizer}
        return [open_pool(pool)], own
    if name in ("mtp", "medusa"):
        return [model], {"vocab_size": vocab_size}
    if name != "assistant":
        return [], {}
    if request.assistant_model is None:
        raise ValueError(
            'the drafter "assistant" needs a model to draft with: pass assistant_model= in the call'
        )
    return [request.assistant_model], {
        "target_tokenizer": request.tokenizer,
        "assistant_tokenizer": request.assistant_tokenizer,
        "call": call,
    }


def _load(bits: int) -> None:
    """Call the functions of a step, on logits of so many bits."""
    import torch

    from lookahead_hf.drafting.sources.recycling import RecyclingDrafter

    source = RecyclingDrafter(top_k=2, capacity=4)
    ensemble = Ensemble([source], Calibration([source]), 1)
    rows = Rows(np.zeros((1, 2), np.int64))
    rows.emit(0, 0)
    ensemble.begin(rows)
    for _ in range(2):
        draft = head(ensemble.propose(rows, 2), 1)
        rows.emit(0, 1)
        dtype = torch.bfloat16 if bits == 16 else torch.float32
        logits = torch.zeros(1, 1 + draft.num_nodes, 3, dtype=dtype)
        ensemble.observe(rows, draft, Verdict.from_rows([[1]], [[]]), logits)
    ensemble.end(rows)


drafting.register(partial(_load, 16), partial(_load, 32))
