"""The streamer is fed as plain `generate` feeds it."""

from __future__ import annotations

import pytest
import torch

from lookahead_hf.generation.streaming import ColumnStream
from tests.helpers.fakes import Recorder


def test_columns_go_out_in_order_once_every_row_has_them() -> None:
    seen = Recorder()
    stream = ColumnStream(seen, 3, pad_token_id=0)
    stream.prompt(torch.tensor([[1, 2], [3, 4], [5, 6]]))
    for token in (10, 11, 12):
        stream.push(1, token)
    assert seen.events == [[[1, 2], [3, 4], [5, 6]]]
    stream.push(0, 20)
    stream.push(2, 30)
    assert seen.events[1:] == [[20, 10, 30]]
    stream.push(0, 21, is_last=True)
    assert seen.events[2:] == []
    stream.push(2, 31, is_last=True)
    assert seen.events[2:] == [[21, 11, 31], [0, 12, 0]]
    assert stream.num_begun == 3
    stream.end()
    assert seen.events[4:] == ["end"]


def test_one_row_streams_every_token_at_once() -> None:
    seen = Recorder()
    stream = ColumnStream(seen, 1, pad_token_id=None)
    stream.push(0, 5)
    assert seen.events == [[5]]


def test_without_a_streamer_nothing_is_kept() -> None:
    stream = ColumnStream(None, 2, pad_token_id=0)
    stream.prompt(torch.zeros(2, 2, dtype=torch.long))
    stream.push(0, 1, is_last=True)
    stream.end()
    assert not any(stream._waiting)


def test_an_exception_of_the_streamer_escapes() -> None:
    stream = ColumnStream(Recorder(fail_at=0), 1, pad_token_id=0)
    with pytest.raises(ConnectionError):
        stream.push(0, 1)
    assert stream.num_begun == 1
