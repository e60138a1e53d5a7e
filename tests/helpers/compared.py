"""One call of `generate`, plain and speculated from plain's own text: both are the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

import lookahead_hf
from tests.helpers.scripted import RandomTrees, Tree, continuations, scripted


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
    **fields: Any,
) -> Compared:
    """Run a call both ways; assert the same text, the same generator state, and speculation.

    Args:
        model: The target.
        call: Makes the arguments; called once for each way, so that nothing is shared.
        columns: Columns of the sequences before the first generated one.
        script: What to draft from plain's text; random trees around it by default.
        **fields: Fields of the configuration that differ.
    """
    random_state = torch.cuda.get_rng_state if model.device.type == "cuda" else torch.get_rng_state
    torch.manual_seed(7)
    plain = model.generate(**call())
    after = random_state()
    truths = continuations(_ids(plain), columns)
    torch.manual_seed(7)
    config = replace(scripted(truths, script or RandomTrees()), **fields)
    with lookahead_hf.enabled(model):
        ours = model.generate(**call(), speculative=config)
    assert _ids(ours).tolist() == _ids(plain).tolist()
    assert torch.equal(random_state(), after)
    return Compared(plain, ours, speculated(model))


def assert_same_logits(outputs: Any) -> None:
    """Assert that plain's and our steps had the same logits, up to rounding.

    Wrong positions or masks may leave a text of few tokens as it is, but not the logits.

    Args:
        outputs: What plain `generate` and ours returned, first of all; both with logits.
    """
    plain, ours = (torch.stack(output.logits) for output in outputs[:2])
    tolerance = 1e-3 * float(plain[plain.isfinite()].std())
    torch.testing.assert_close(ours, plain, rtol=0.0, atol=tolerance)


def speculated(model: Any) -> lookahead_hf.SpeculativeStats:
    """The statistics of this model's last call, which accepted draft tokens."""
    stats = lookahead_hf.last_stats(model)
    assert stats is not None
    assert stats.fallback_reason is None
    assert stats.num_accepted > 0
    return stats


def _ids(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output.sequences
