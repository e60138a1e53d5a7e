"""Every caller that is installed: speculated with plain's text, or plain for a known reason."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator

import pytest
import torch
import transformers

from tests.ecosystem import callers, servers
from tests.ecosystem.room import (
    SPECULATIVE,
    Caller,
    Room,
    imported_auto,
    recorded,
    try_out,
)
from tests.ecosystem.table import every_caller

# Libraries warn of each other's future, and import one another's private names.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Room:
    return Room(tmp_path_factory.mktemp("ecosystem") / "room")


@pytest.fixture(autouse=True)
def contained() -> Iterator[None]:
    """Some callers change settings of the whole process, or leave sockets and loops behind."""
    count, has_grad = torch.get_num_threads(), torch.is_grad_enabled()
    yield
    torch.set_num_threads(count)
    torch.set_grad_enabled(has_grad)
    gc.collect()  # while their warnings are ignored


@pytest.mark.parametrize("caller", every_caller(), ids=lambda caller: caller.name)
def test_caller(caller: Caller, room: Room) -> None:
    for package in caller.needs:
        pytest.importorskip(package)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outcome = try_out(caller, room)
    assert outcome.status == caller.expects
    assert outcome.plain
    if caller.promises:
        assert outcome.is_equal
    said = [str(each.message) for each in caught]
    assert any("quantises activations" in message for message in said) is not caller.promises


def test_usage_counts_every_token(room: Room) -> None:
    for package in servers.NEEDS:
        pytest.importorskip(package)
    with recorded() as records, imported_auto():
        _, finish, usage = servers.chat(room, SPECULATIVE)
        text, streamed_finish, streamed_usage = servers.chat_in_pieces(room, SPECULATIVE)
    assert usage["completion_tokens"] == callers.NEW_TOKENS
    assert [each["completion_tokens"] for each in streamed_usage] == [callers.NEW_TOKENS]
    assert finish == streamed_finish == "length"
    assert text
    assert len(records) == 2
    assert all(each.fallback_reason is None and each.num_accepted > 0 for each in records)


def test_the_models_are_small_and_speculate(room: Room) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(room.folder(SPECULATIVE))
    assert model.num_parameters() < 1_000_000
    assert model.generation_config.speculative == SPECULATIVE


def test_an_argument_alone_is_refused_and_an_entry_alone_does_nothing(room: Room) -> None:
    with pytest.raises(ValueError, match="speculative"):
        callers.text_generation_out_of_reach(room, SPECULATIVE)
    model = transformers.AutoModelForCausalLM.from_pretrained(room.folder(SPECULATIVE)).eval()
    inputs = room.tokenizer()(callers.PROMPT, return_tensors="pt")
    with recorded() as records:
        model.generate(**inputs, **callers.GREEDY)
    assert not records
