"""The step on the device: packed drafts, the walk and the compaction without a word to the host."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lookahead_hf.block.block import ancestor_words
from lookahead_hf.draft import DraftTree
from lookahead_hf.engines.cuda.step import DraftViews, _views, pack
from lookahead_hf.rows import Rows
from lookahead_hf.runner.outputs import HostCopy


def test_a_packed_draft_holds_every_node_and_its_ancestors() -> None:
    parents = [-1, 0, 0, 1, *range(3, 62)]
    draft = DraftTree.from_rows([([*range(1, 64)], parents), ([7, 7], [-1, -1])])
    rows = Rows(np.full((2, 2), 3))
    for row in range(2):
        rows.emit(row, row)
    fields = DraftViews(*_views(pack(rows, draft, np.array([5, 6]), 64), 2, 64))
    assert np.array_equal(fields[:3], draft.padded(64, rows.last_tokens))
    assert [each.tolist() for each in fields[4:]] == [[63, 2], [1, 1], [5, 6]]
    assert np.array_equal(fields.bits, ancestor_words(fields.parents))
    assert fields.bits[0, 63] < 0  # the 64th token's own bit is the sign


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 1), (2, 8)])
def test_fields_of_a_draft_begin_where_kernels_expect_them(rows: int, width: int) -> None:
    """At multiples of 16 bytes; Triton compiles others for other addresses."""
    drafted = DraftTree.from_chains([[[1] * (width - 1)]] * rows)
    texts = Rows(np.full((rows, 2), 3))
    for row in range(rows):
        texts.emit(row, 3)
    packed = torch.from_numpy(pack(texts, drafted, np.full(rows, 2), width))
    begins = [each.data_ptr() - packed.data_ptr() for each in _views(packed, rows, width)[:5]]
    assert not any(begin % 16 for begin in begins)


def test_tensors_come_in_one_copy_each_time_that_some_are_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copies = []
    to = torch.Tensor.to

    def counted(tensor: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        copies.append(tensor.shape)
        return to(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", counted)
    sent = [
        torch.arange(6).view(2, 3),
        torch.randn(3),
        torch.arange(5, dtype=torch.int32)[::2],
        torch.tensor([-1, 2**62]),
    ]
    copy = HostCopy()
    tickets = [copy.add(tensor) for tensor in sent]
    copy.send()
    late = copy.add(torch.arange(3))
    assert len(copies) == 1
    assert late.take().tolist() == [0, 1, 2]
    copy.send()
    assert len(copies) == 2
    for ticket, tensor in zip(tickets, sent, strict=True):
        assert np.array_equal(ticket.take(), tensor.numpy())
