"""Every caller that is installed: speculated with plain's text, or plain for a known reason."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lookahead_hf
from lookahead_hf import stats
from tests.ecosystem.callers import CALLERS, pipe_out_of_reach
from tests.ecosystem.room import Room
from tests.helpers.served import save_ascii_chat

# Libraries warn of each other's future, and import one another's private names.
pytestmark = pytest.mark.filterwarnings("ignore")

PAGE = Path(__file__).parents[2] / "docs" / "ecosystem.md"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_ascii_chat(tmp_path_factory.mktemp("ecosystem"))


@pytest.fixture
def contained() -> Iterator[None]:
    """Some callers change settings of the whole process, or leave sockets and loops behind."""
    count, has_grad = torch.get_num_threads(), torch.is_grad_enabled()
    yield
    lookahead_hf.disable_everywhere()
    torch.set_num_threads(count)
    torch.set_grad_enabled(has_grad)
    gc.collect()  # while their warnings are ignored


@pytest.mark.parametrize("name", CALLERS)
def test_caller(
    name: str, folder: str, tmp_path: Path, contained: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller = CALLERS[name]
    for package in caller.needs:
        pytest.importorskip(package)
    plain = written(caller.run, Room(folder, tmp_path, asks=False))
    room = Room(folder, tmp_path, asks=True)
    lookahead_hf.warm_up(room.model())  # until the indexes are compiled, calls decode plainly
    records: list[stats.SpeculativeStats] = []
    whole = stats.publish

    def publish(model: Any, record: stats.SpeculativeStats | None) -> None:
        if record is not None:
            records.append(record)
        whole(model, record)

    monkeypatch.setattr(stats, "publish", publish)
    if caller.auto:
        lookahead_hf.enable_everywhere()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours = written(caller.run, room)
    assert plain
    assert {each.fallback_reason for each in records} == {caller.expects}
    assert (sum(each.num_accepted for each in records) > 0) is (caller.expects is None)
    assert ours == plain or not caller.promises


def written(run: Any, room: Room) -> Any:
    torch.manual_seed(0)
    with torch.enable_grad():  # some callers switch gradients off for the whole process
        return run(room)


def test_the_page_has_every_caller() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert [name for name in CALLERS if f"\n| {name} |" not in page] == []


def test_an_argument_alone_is_refused_and_an_entry_alone_does_nothing(
    folder: str, tmp_path: Path
) -> None:
    room = Room(folder, tmp_path, asks=True)
    with pytest.raises(ValueError, match="speculative"):
        pipe_out_of_reach(room)
    model = type(room.model()).from_pretrained(room.folder)
    assert model.generation_config.speculative
    room.texts(model)
    assert lookahead_hf.last_stats(model) is None
