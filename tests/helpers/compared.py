"""One call of `generate`, plain and speculated from plain's own text: both are the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

import lookahead_hf
from tests.helpers.scripted import RandomTrees, Tree, continuations, scripted

ALL = {
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
    "output_hidden_states": True,
}
"""What a call can be asked to return beside its text."""


class Compared(NamedTuple):
    """What both calls returned, and what speculation did."""

    plain: Any
    ours: Any
    stats: lookahead_hf.SpeculativeStats


def compared(
    model: Any,
    call: Callable[[], dict[str, Any]],
    columns: int,
    script: Callable[[list[int]], Tree] | None = None,
    config: lookahead_hf.SpeculativeConfig | None = None,
    brought: dict[str, Any] | None = None,
    **fields: Any,
) -> Compared:
    """Run a call both ways; assert the same text, the same generator state, and speculation.

    `call` makes the arguments of each way, so that nothing is shared; ours gets those `brought`,
    too. Its sequences have `columns` before the first generated one. What is drafted from plain's
    text is random trees around it, or what a script says, unless a configuration drafts otherwise.
    """
    random_state = torch.cuda.get_rng_state if model.device.type == "cuda" else torch.get_rng_state
    torch.manual_seed(7)
    plain = model.generate(**call())
    after = random_state()
    truths = continuations(_ids(plain), columns)
    torch.manual_seed(7)
    config = replace(config or scripted(truths, script or RandomTrees()), **fields)
    with lookahead_hf.enabled(model):
        ours = model.generate(**call(), **(brought or {}), speculative=config)
    assert _ids(ours).tolist() == _ids(plain).tolist()
    assert torch.equal(random_state(), after)
    return Compared(plain, ours, speculated(model))


def assert_same_logits(outputs: Any) -> None:
    """Assert that plain's and our steps had the same logits, up to rounding.

    Wrong positions or masks may leave a text of few tokens as it is, but not the logits. `outputs`
    begins with what plain `generate` and ours returned.
    """
    plain, ours = (torch.stack(output.logits) for output in outputs[:2])
    tolerance = 1e-3 * float(plain[plain.isfinite()].std())
    torch.testing.assert_close(ours, plain, rtol=0.0, atol=tolerance)


def assert_close(ours: Any, plain: Any, atol: float = 2e-3, rtol: float = 1e-3) -> None:
    """Assert that tensors, or tuples of them, are equal up to rounding and infinite alike."""
    if plain is None or isinstance(plain, torch.Tensor):
        assert type(ours) is type(plain)
        if plain is not None:
            assert ours.shape == plain.shape
            assert torch.allclose(ours, plain, atol=atol, rtol=rtol, equal_nan=True)
        return
    assert len(ours) == len(plain)
    for a, b in zip(ours, plain, strict=True):
        assert_close(a, b, atol, rtol)


def left_to_plain(
    model: Any, call: Callable[[], dict[str, Any]], match: str
) -> pytest.WarningsRecorder:
    """Assert that a call writes plain's text and warns why; return the warnings."""
    plain = model.generate(**call())
    warns = pytest.warns(lookahead_hf.SpeculationFallbackWarning, match=match)
    with lookahead_hf.enabled(model), warns as warned:
        ours = model.generate(**call(), speculative=True)
    assert _ids(ours).tolist() == _ids(plain).tolist()
    return warned


def reason_of(model: Any) -> Any:
    """Why this model's last call ran plainly; None if it did not."""
    stats = lookahead_hf.last_stats(model)
    assert stats is not None
    return stats.fallback_reason


def served(model: Any) -> lookahead_hf.SpeculativeStats:
    """The statistics of this model's last call, which did not run plainly."""
    stats = lookahead_hf.last_stats(model)
    assert stats is not None and stats.fallback_reason is None
    return stats


def speculated(model: Any) -> lookahead_hf.SpeculativeStats:
    """The statistics of this model's last call, which accepted draft tokens."""
    stats = served(model)
    assert stats.num_accepted > 0
    return stats


def _ids(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output["sequences"]
