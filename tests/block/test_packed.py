"""Which rows of a packed block attend together, and what keeps padded blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from lookahead_hf.block.packed import runs_of
from lookahead_hf.call import admission
from lookahead_hf.call.prepared import PreparedCall
from lookahead_hf.model.facts import read
from tests.helpers.models import tiny


def test_adjacent_rows_of_like_widths_and_lengths_attend_together() -> None:
    counts, lengths = np.array([2, 2, 0, 2, 3, 3, 3]), np.array([9, 8, 9, 9, 9, 50, 60])
    runs = runs_of(counts, lengths, may_pad=np.zeros(7, bool))
    found = [(run.rows.start, run.rows.stop, run.width) for run in runs]
    assert found == [(0, 2, 2), (3, 4, 2), (4, 5, 3), (5, 7, 3)]


def test_a_few_queries_of_padding_join_rows_of_other_widths() -> None:
    counts = np.array([1, 3, 2, 17, 1, 1, 4])
    first, alone, last, read = runs_of(counts, np.full(7, 9), may_pad=np.arange(7) < 6)
    assert (first.rows, first.width, alone.width, read.counts) == (slice(0, 3), 3, 17, [4])
    assert first.padded is not None
    assert first.padded.tolist() == [[0, 0, 0], [1, 2, 3], [4, 5, 5]]
    assert last.rows == slice(4, 6) and last.padded is None
    block = torch.randn(1, 2, int(counts.sum()), 4)
    for run in (first, alone, last, read):
        own, queries = block[:, :, run.tokens], run.by_row(block)
        for row, of_row in enumerate(own.split(run.counts.tolist(), 2)):
            repeated = of_row[0, :, -1:].expand(-1, run.width - of_row.shape[2], -1)
            assert torch.equal(queries[row], torch.cat([of_row[0], repeated], 1))
        assert torch.equal(run.by_token(queries.transpose(1, 2)), own.transpose(1, 2))


def serves(model: Any, **kwargs: Any) -> bool:
    read(model)  # as a call does when it begins
    ids = torch.zeros(2, 3, dtype=torch.long)
    kwargs |= {"position_ids": ids}
    return admission.takes_packed(PreparedCall(model, ids, (), (), None, kwargs, None))  # type: ignore[arg-type]


def test_what_sees_whole_batches_keeps_padded_blocks() -> None:
    model = tiny("llama")
    assert serves(model)
    assert not serves(model, adapter_names=["one", "two"])
    assert not serves(tiny("llama", "eager"))
    hook = model.model.layers[0].register_forward_hook(lambda *_: None)
    assert not serves(model)
    hook.remove()
    hook = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert not serves(model)
    hook.remove()
    assert serves(model)
