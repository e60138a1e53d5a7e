"""The step on the device: packed drafts, the walk and the compaction without a word to the host."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from lookahead_hf.draft import DraftTree
from lookahead_hf.rows import Rows
from lookahead_hf.runner import masks
from lookahead_hf.runner.cuda.step import DraftViews, pack
from lookahead_hf.runner.cuda.transfer import HostCopy

VOCAB = 7  # few tokens: siblings often hold the same one, and drafts are often right


def random_draft(rng: random.Random, num_rows: int, most: int) -> DraftTree:
    trees = []
    for _ in range(num_rows):
        nodes = rng.randint(0, most)
        parents = [rng.randint(-1, node - 1) for node in range(nodes)]
        trees.append(([rng.randrange(VOCAB) for _ in range(nodes)], parents))
    return DraftTree.from_rows(trees)


def views(draft: DraftTree, width: int) -> tuple[DraftViews, Rows]:
    """The draft as a step sees it."""
    rows = Rows(np.full((draft.num_rows, 2), 3))
    for row in range(draft.num_rows):
        rows.emit(row, row)
    lengths = np.arange(draft.num_rows)
    flat = torch.from_numpy(pack(rows, draft, lengths, width))
    fields = flat[: 4 * draft.num_rows * width].view(4, draft.num_rows, width)
    sizes = flat[4 * draft.num_rows * width :].view(3, draft.num_rows)
    return DraftViews(*fields.unbind(0), *sizes.unbind(0)), rows


@pytest.mark.parametrize("width", [1, 8, 64])
def test_a_packed_draft_holds_every_node_and_its_ancestors(width: int) -> None:
    rng = random.Random(width)
    draft = random_draft(rng, 3, width - 1)
    packed, rows = views(draft, width)
    assert packed.tokens[:, 0].tolist() == [rows.last_token(row) for row in range(3)]
    assert packed.num_nodes.tolist() == np.diff(draft.row_offsets).tolist()
    assert packed.live.tolist() == [1, 1, 1]
    assert packed.kept.tolist() == [0, 1, 2]
    for row in range(3):
        seen = packed.bits[row][:, None] >> torch.arange(width) & 1
        assert torch.equal(seen.bool(), torch.from_numpy(masks.ancestors(draft, row, width)))
        nodes = draft.row(row)
        count = nodes.stop - nodes.start
        assert packed.tokens[row, 1 : 1 + count].tolist() == draft.token_ids[nodes].tolist()
        assert packed.depth[row, 1 : 1 + count].tolist() == draft.depth[nodes].tolist()
        assert packed.parents[row, 1 : 1 + count].tolist() == (draft.parents[nodes] + 1).tolist()
    assert (packed.depth == torch.from_numpy(draft.padded(width)[2])).all()


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
