"""Makes the drafters of a call, from names and from objects of the user."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lookahead_hf.config import BUILT_IN_DRAFTERS, DEFAULT_DRAFTERS, drafter_name
from lookahead_hf.draft import Verdict
from lookahead_hf.drafting.calibration import Calibration
from lookahead_hf.drafting.drafter import Drafter
from lookahead_hf.drafting.ensemble import Ensemble
from lookahead_hf.drafting.tree import head
from lookahead_hf.drafting.user_drafter import Adapted
from lookahead_hf.ngram_pool.compilation import register
from lookahead_hf.rows import Rows

_CLASSES = {
    "ngram": "NgramDrafter",
    "recycling": "RecyclingDrafter",
    "prediction": "PredictionDrafter",
    "pool": "PoolDrafter",
    "assistant": "AssistantDrafter",
    "lookahead": "LookaheadDrafter",
    "mtp": "MtpDrafter",
    "medusa": "MedusaDrafter",
}


@dataclass(frozen=True)
class Resources:
    """What the drafters of one call can use.

    Attributes:
        predictions: Token ids that the caller expects of each row.
        assistant: The model that the caller passed to draft with.
        tokenizers: The target's and the assistant's tokenizer, if the caller passed them.
        encoder_inputs: Inputs of the target's encoder by row, and their attention mask.
        vocab_size: Token ids of the target.
        processors: The call's logits processors.
        draws: Whether rejection sampling verifies drafts by the probabilities of their draws.
        pool: The pool of n-grams that "pool" drafts from, or its path; None: the model's own.
        own_pool: Returns the pool that is kept with the model.
        learn: Whether generated texts are added to the pool.
        settings: Settings of the call for assistants, by their names in generation configs.
        target: The model, whose heads may draft.
        use_mtp: Whether the caller asks for its multi-token-prediction layers.
    """

    predictions: Sequence[np.ndarray] | None = None
    assistant: Any = None
    tokenizers: tuple[Any, Any] = (None, None)
    encoder_inputs: tuple[Any, Any] | None = None
    vocab_size: int | None = None
    processors: Sequence[Any] = ()
    draws: bool = False
    pool: Any = None
    own_pool: Callable[[], Any] | None = None
    learn: bool = False
    settings: Mapping[str, Any] | None = None
    target: Any = None
    use_mtp: bool = False


def build(
    drafters: Sequence[str | Drafter] | None,
    options: Mapping[str, Mapping[str, Any]],
    resources: Resources = Resources(),  # noqa: B008 (frozen)
) -> list[Drafter]:
    """Make the drafters of one call.

    Args:
        drafters: Names and objects; None is the default set. Predictions, an assistant, a pool and
            `use_mtp` add the drafters of their names; without predictions, "prediction" is left
            out.
        options: Options by drafter name, checked by the drafter.
        resources: What the drafters can use.

    Returns:
        The drafters in order.

    Raises:
        NumbaMissingError: A pool cannot be opened, since numba is missing or does not work.
        ValueError: An unknown name or option, or "assistant" without one.
    """
    wanted = list(DEFAULT_DRAFTERS if drafters is None else drafters)
    if resources.predictions is not None and "prediction" not in wanted:
        wanted.insert(0, "prediction")
    given = {"assistant": resources.assistant, "pool": resources.pool}
    given["mtp"] = resources.use_mtp or None
    wanted += [name for name, what in given.items() if what is not None and name not in wanted]
    built: list[Drafter] = []
    for drafter in wanted:
        if not isinstance(drafter, str):
            built += _adapted(drafter, resources)
        elif drafter != "prediction" or resources.predictions is not None:
            built.append(_by_name(drafter, options, resources))
    return built


def _adapted(drafter: Any, resources: Resources) -> list[Drafter]:
    """Wrap the caller's object; return nothing if reading its properties fails."""
    if type(drafter).__module__.startswith(__package__ + "."):
        return [drafter]
    try:
        return [Adapted(drafter, resources.vocab_size, resources.draws)]
    except Exception as error:
        warnings.warn(
            f"the drafter {drafter_name(drafter)!r} failed and is left out of this call: "
            f"{type(error).__name__}: {error}",
            RuntimeWarning,
            stacklevel=3,
        )
        return []


def _by_name(name: str, options: Mapping[str, Mapping[str, Any]], resources: Resources) -> Drafter:
    """Make a drafter from its name."""
    if name not in _CLASSES:
        raise ValueError(
            f"there is no drafter {name!r}; use {', '.join(BUILT_IN_DRAFTERS)}, or Drafter objects "
            "of your own"
        )
    arguments, own = _given(name, resources)
    make = getattr(importlib.import_module("lookahead_hf.drafting"), _CLASSES[name])
    given = dict(options.get(name, {}))
    if clash := given.keys() & own.keys():
        raise ValueError(f"options of the drafter {name!r} cannot set {', '.join(sorted(clash))}")
    if given.get("keep") is True:
        raise ValueError(
            f"options of the drafter {name!r} cannot set keep=True: given by name, a drafter ends "
            "with its call. Give an object that lives longer, such as "
            "drafters=(NgramDrafter(keep=True), RecyclingDrafter(keep=True))"
        )
    try:
        drafter: Drafter = make(*arguments, **own, **given)
    except TypeError as error:
        raise ValueError(f"options of the drafter {name!r}: {given!r}: {error}") from error
    return drafter


def _given(name: str, resources: Resources) -> tuple[list[Any], dict[str, Any]]:
    """What a call gives a drafter: positional arguments, and options that users cannot set."""
    target_tokenizer, assistant_tokenizer = resources.tokenizers
    if name == "prediction":
        return [resources.predictions], {}
    if name == "pool":
        from lookahead_hf.drafting.sources.pool import open_pool

        pool = resources.pool
        if pool is None:
            assert resources.own_pool is not None
            pool = resources.own_pool()
        return [open_pool(pool)], {
            "learn": resources.learn,
            "vocab_size": resources.vocab_size,
            "tokenizer": target_tokenizer,
        }
    if name in ("mtp", "medusa"):
        return [resources.target], {"vocab_size": resources.vocab_size}
    if name != "assistant":
        return [], {}
    if resources.assistant is None:
        raise ValueError(
            'the drafter "assistant" needs a model to draft with: pass assistant_model= in the call'
        )
    return [resources.assistant], {
        "target_tokenizer": target_tokenizer,
        "assistant_tokenizer": assistant_tokenizer,
        "encoder_inputs": resources.encoder_inputs,
        "vocab_size": resources.vocab_size,
        "processors": resources.processors,
        "probs": resources.draws,
        "settings": resources.settings,
    }


def _warm_up() -> None:
    """Run all compiled functions of drafting once, on logits of both widths."""
    import torch

    from lookahead_hf.drafting.sources.recycling import RecyclingDrafter

    for dtype in (torch.bfloat16, torch.float32):
        source = RecyclingDrafter(top_k=2, capacity=4)
        ensemble = Ensemble([source], Calibration([source]))
        rows = Rows(np.zeros((1, 2), np.int64))
        rows.emit(0, 0)
        ensemble.begin(rows)
        for _ in range(2):
            draft = head(ensemble.propose(rows, 2), 1)
            rows.emit(0, 1)
            logits = torch.zeros(1, 1 + draft.num_nodes, 3, dtype=dtype)
            ensemble.observe(rows, draft, Verdict.from_rows([[1]], [[]]), logits)
        ensemble.end(rows)


register(_warm_up)
