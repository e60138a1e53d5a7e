"""Random calls on a GPU return, stream, raise and leave behind the same as plain `generate`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import Phase, given, settings

import lookahead_hf
from tests.helpers import agreement, random_calls
from tests.helpers.agreement import Ran, Tally, compare
from tests.helpers.random_calls import REPEATABLE, RandomCall, calls

pytestmark = pytest.mark.gpu


def assert_same_text(ours: Ran, plain: Ran, call: RandomCall) -> None:
    """In float32 scores and caches differ by rounding."""
    assert ours.sequences.tolist() == plain.sequences.tolist()
    assert ours.streamed == plain.streamed
    assert torch.equal(ours.generator, plain.generator)


@pytest.mark.parametrize(
    ("wide", "same"), [("float64", agreement.assert_same), ("float32", assert_same_text)]
)
def test_every_call_gets_what_plain_gives_it(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    device: torch.device,
    wide: str,
    same: Callable[[Ran, Ran, RandomCall], None],
) -> None:
    caplog.set_level("ERROR", "transformers")
    monkeypatch.setattr(agreement, "assert_same", same)
    monkeypatch.setattr(random_calls, "WIDE", wide)
    monkeypatch.setattr(random_calls, "device", device)  # back to the CPU for other tests
    monkeypatch.setattr(torch.backends.cuda.matmul, "fp32_precision", "ieee")
    tally, failed = Tally(), list[str]()

    @settings(REPEATABLE, max_examples=300, phases=[Phase.generate])
    @given(call=calls())
    def agrees(call: RandomCall) -> None:
        if call.way == "queue" and (call.own or call.settings != {"do_sample": False}):
            call = replace(call, way="call")  # on a GPU a queue writes the likeliest tokens alone
        try:
            # What plain refuses on a CPU may end all kernels of a process on a GPU.
            random_calls.device, on_cpu = torch.device("cpu"), Tally()
            compare(call, on_cpu)
            random_calls.device = device
            if not on_cpu.num_raised:
                compare(call, tally)
        except Exception as error:
            failed.append(f"{call}\n{type(error).__name__}: {error}"[:2500])
            print(failed[-1], flush=True)  # the next call may be the last one

    lookahead_hf.warm_up(random_calls.smallest("llama", device=device))
    agrees()
    assert not failed, f"{len(failed)} of {tally.num_calls}"
    assert tally.num_raised == 0
    assert tally.num_accepted > tally.num_calls > 250
    assert tally.engines["device"] > tally.num_calls / 20
