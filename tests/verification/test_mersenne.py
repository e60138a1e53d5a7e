"""A few places of a CPU generator's exponential noise equal those of the whole draw."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lookahead_hf.verification import mersenne


@pytest.mark.parametrize("elements", [1, 311, 312, 313, 624, 49152])
@pytest.mark.parametrize("before", [0, 1, 623, 624, 625])
def test_noise_and_state_are_those_of_torch(elements: int, before: int):
    theirs, ours = (torch.Generator().manual_seed(before) for _ in range(2))
    for generator in (theirs, ours):
        torch.rand(before, generator=generator)
    twister = mersenne.Twister()
    for _ in range(3):
        whole = torch.empty(elements).exponential_(generator=theirs).numpy()
        places = np.unique(np.linspace(0, elements - 1, 60).astype(np.int64))
        assert np.array_equal(twister.draw(ours, elements).exponential(places), whole[places])
        assert torch.equal(theirs.get_state(), ours.get_state())


def test_noise_is_never_below_its_uniform_number():
    raw = mersenne.Twister().draw(torch.Generator().manual_seed(0), 5000)
    uniform, noise = raw.uniform(slice(0, 5000)), raw.exponential(np.arange(5000))
    assert (noise >= uniform * (1 - 1e-7)).all() and (uniform < 1).all()
    assert np.array_equal(uniform[[7, 9]], raw.uniform(np.array([7, 9])))


def test_a_cached_normal_number_is_kept():
    theirs, ours = (torch.Generator().manual_seed(3) for _ in range(2))
    for generator in (theirs, ours):
        torch.randn(1, generator=generator)
    torch.empty(10).exponential_(generator=theirs)
    mersenne.Twister().draw(ours, 10)
    assert torch.equal(torch.randn(3, generator=theirs), torch.randn(3, generator=ours))


def test_this_torch_draws_as_written():
    assert mersenne.is_exact()


def test_another_torch_would_be_noticed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mersenne.math, "log1p", lambda u: np.log1p(u) * (1 + 1e-6))
    assert not mersenne.is_exact.__wrapped__()
