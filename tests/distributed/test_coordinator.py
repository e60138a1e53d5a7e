"""Models that lie over two processes: both write plain's text, and neither waits in vain."""

from __future__ import annotations

from typing import Any

import pytest
from torch import distributed

from tests.helpers.distributed import sharded, tensor_parallel
from tests.helpers.distributed.ranks import Found, assert_same, assert_speculated, run_both
from tests.helpers.models import tiny

if not distributed.is_available() or not distributed.is_gloo_available():
    pytest.skip("torch is built without gloo", allow_module_level=True)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[list[Found]]:
    """What both processes found: tensor parallel, sharded, and in a pipeline."""
    folder = tmp_path_factory.mktemp("processes")
    tiny("llama", num_hidden_layers=2).save_pretrained(folder / "model")
    works = tensor_parallel.calls, sharded.calls, tensor_parallel.pipeline_calls
    return run_both(works, folder)


@pytest.fixture(scope="module")
def parallel(found: list[list[Found]]) -> list[Found]:
    return found[0]


@pytest.fixture(scope="module")
def shards(found: list[list[Found]]) -> list[Found]:
    return found[1]


def decisions(found: Found) -> list[Any]:
    """How many nodes each step drafted, and how many were accepted."""
    names = ("num_steps", "budget_histogram", "accepted_histogram", "num_moved", "row_stats")
    return [found["stats"][name] for name in names]


@pytest.mark.parametrize(
    "name",
    ["greedy", "greedy, two rows", "sampled", "sampled, two rows", "one row ends", "outputs"]
    + ["invariant", "lockstep", "lockstep, sampled", "cheap to decide", "by torch"],
)
def test_tensor_parallel_writes_plains_text(parallel: list[Found], name: str) -> None:
    for of_rank in parallel:
        assert_speculated(of_rank[name])
        assert of_rank[name]["stats"]["engine"] == ("lockstep" if "lockstep" in name else "walk")
    assert decisions(parallel[0][name]) == decisions(parallel[1][name])


def test_one_clock_decides(parallel: list[Found]) -> None:
    """What drafts cost differs between the processes: the first one's counts."""
    cheap, dear = "cheap to decide", "dear to decide"
    for of_rank in parallel:
        assert_same(of_rank[dear])
        assert of_rank[dear]["stats"]["fallback_reason"] is None
        assert 2 * of_rank[dear]["stats"]["num_drafted"] < of_rank[cheap]["stats"]["num_drafted"]
    assert decisions(parallel[0][dear]) == decisions(parallel[1][dear])


@pytest.mark.parametrize("name", ["scores", "ends"])
def test_one_process_decides_where_scores_and_ends_differ(parallel: list[Found], name: str) -> None:
    """One's processor or criterion says something else: the text is the first one's in both."""
    for of_rank in parallel:
        assert of_rank[name]["ours"] == of_rank[name]["plain"]
        assert of_rank[name]["stats"]["num_accepted"] > 0
    assert decisions(parallel[0][name]) == decisions(parallel[1][name])


def test_one_seed_decides(parallel: list[Found]) -> None:
    for of_rank in parallel:
        assert of_rank["other seeds"]["ours"] == parallel[0]["sampled, two rows"]["plain"]


def test_a_drafter_that_fails_in_one_process(parallel: list[Found], shards: list[Found]) -> None:
    for found in (parallel, shards):
        for of_rank in found:
            assert_speculated(of_rank["drafter fails"])
    failed = [
        (each["drafter fails"]["num_asked"], each["drafter fails"]["warned"]) for each in parallel
    ]
    assert failed == [(3, True), (0, False)]


def test_a_call_that_is_broken_off_ends_in_both(parallel: list[Found]) -> None:
    first, second = (of_rank["breaks off"] for of_rank in parallel)
    assert first == "ConnectionError: the client went away"
    assert second.startswith("RuntimeError: process 0, which decides for all")
    for of_rank in parallel:
        assert of_rank["afterwards"]["ours"] == of_rank["greedy"]["plain"]
        prompt, *tokens, end = of_rank["afterwards"]["events"]
        assert [*prompt[0], *(token for (token,) in tokens)] == of_rank["greedy"]["plain"][0]
        assert end == "end"


@pytest.mark.parametrize(
    ("name", "reason"),
    [("rejection", "tensor_parallel"), ("synced", "tensor_parallel"), ("assistant", "synced_gpus")],
)
def test_tensor_parallel_that_runs_plainly(parallel: list[Found], name: str, reason: str) -> None:
    for of_rank in parallel:
        assert of_rank[name]["stats"]["fallback_reason"] == reason
        assert_same(of_rank[name])


@pytest.mark.parametrize(
    "name",
    ["greedy", "greedy, two rows", "sampled", "sampled, two rows", "outputs", "untried"]
    + ["by itself"],
)
def test_sharded_models_write_plains_text(shards: list[Found], name: str) -> None:
    """The processes' texts end at different steps."""
    for of_rank in shards:
        assert_speculated(of_rank[name])


def test_each_process_of_a_sharded_model_drafts_by_its_own_costs(shards: list[Found]) -> None:
    cheap, dear = (of_rank["own costs"] for of_rank in shards)
    assert_speculated(cheap)
    assert_same(dear)
    assert dear["stats"]["fallback_reason"] is None
    assert 2 * dear["stats"]["num_drafted"] < cheap["stats"]["num_drafted"]


def test_plain_and_speculative_decoding_side_by_side(shards: list[Found]) -> None:
    ours, plain = (of_rank["one is plain"] for of_rank in shards)
    assert_speculated(ours)
    assert_same(plain)
    assert plain["stats"] is None


def test_sharded_models_that_are_not_told_to_keep_step(shards: list[Found]) -> None:
    for of_rank in shards:
        assert of_rank["not told"]["stats"]["fallback_reason"] == "synced_gpus"
        assert_same(of_rank["not told"])


@pytest.mark.parametrize("name", ["greedy", "sampled, two rows"])
def test_a_pipeline_of_processes_runs_plainly(found: list[list[Found]], name: str) -> None:
    for of_rank in found[2]:
        assert of_rank[name]["stats"]["fallback_reason"] == "tensor_parallel"
        assert_same(of_rank[name])
