"""Flat blocks give every row the logits of its own text, whatever the other rows are fed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lookahead_hf.block.flat import runs_of
from lookahead_hf.call import admission
from lookahead_hf.call.prepared import PreparedCall
from lookahead_hf.draft import DraftTree, Verdict
from lookahead_hf.model.facts import read
from lookahead_hf.runner.host import Runner
from lookahead_hf.runner.patched import patched
from lookahead_hf.runner.prefill import start
from tests.helpers.models import VOCAB, tiny

PROMPT = 12
TREE = ([5, 6, 7], [-1, 0, -1])


def own_logits(model: Any, text: list[int]) -> torch.Tensor:
    """Logits after the last token of a text alone, [vocab]."""
    logits: torch.Tensor = model(torch.tensor([text])).logits[0, -1]
    return logits


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "gpt2", "mixtral"])
@torch.no_grad()
def test_rows_that_read_and_rows_that_decode_share_a_block(name: str) -> None:
    model = tiny(name)
    texts = np.random.default_rng(0).integers(3, VOCAB, (4, PROMPT + 40))
    told = [row[:PROMPT].tolist() for row in texts]
    # Of each row in each block: how many tokens it reads, and whether it has a draft.
    blocks = [(5, 1, 0, 1), (3, 1, 1, 1), (1, 9, 0, 1), (1, 1, 1, 1), (1, 1, 1, 1)]
    drafted = [(0, 1, 0, 1), (0, 0, 1, 1), (1, 0, 0, 1), (0, 1, 0, 1), (0, 0, 0, 0)]
    runner = Runner(model, 4, flat=True)
    with patched(model):
        start(runner, torch.tensor(told))
        for counts, has_draft in zip(blocks, drafted, strict=True):
            fed = [
                texts[row, len(told[row]) : len(told[row]) + count]
                for row, count in enumerate(counts)
            ]
            draft = DraftTree.from_rows([TREE if has else ((), ()) for has in has_draft])
            before = runner.num_fed
            logits = runner.run(fed, draft).logits
            assert runner.num_fed - before == sum(counts) + 3 * sum(has_draft)
            for row, tokens in enumerate(fed):
                told[row] += tokens.tolist()
                ends = [[], [5], [5, 6], [7]][: 4 if has_draft[row] else 1] if len(tokens) else []
                for place, path in enumerate(ends):
                    expected = own_logits(model, told[row] + path)
                    torch.testing.assert_close(logits[row, place], expected, atol=2e-4, rtol=2e-4)
            # Rows with a draft accept its last node, so that its slot has to be moved.
            accepts = [[2] if has else [] for has in has_draft]
            emits = [
                [*[7] * has, 1] if len(t) else [] for has, t in zip(has_draft, fed, strict=True)
            ]
            runner.commit(Verdict.from_rows(emits, accepts))
            for row, has in enumerate(has_draft):
                told[row] += [7] * has
    assert runner.cache.slots.lengths.tolist() == [len(text) for text in told]


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
    return admission.takes_flat(PreparedCall(model, ids, (), (), None, kwargs, None))  # type: ignore[arg-type]


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
