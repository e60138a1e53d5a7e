"""Jobs of Ray Data: what is refused before any model is loaded, and what decides about a seed."""

from __future__ import annotations

from typing import Any

import pytest

from lookahead_hf.ray import Job, row_seed


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"max_slots": 0}, "max_slots is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"speculative": "fast"}, "speculative"),
        ({"speculative": {"budgets": 3}}, "no argument 'budgets'; known: drafters"),
        ({"generation": {"temperatur": 0.7}}, "generation configs have no temperatur"),
        ({"generation": {"do_sample": True, "num_return_sequences": 2}}, "a row gets one text"),
    ],
)
def test_a_wrong_job_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Job("nobody/has-this-model", **{"max_new_tokens": 8, **given})


class Rows:
    """Stands for a data set, of which only the names of the columns are asked."""

    def __init__(self, *columns: str) -> None:
        self._columns = columns

    def columns(self) -> list[str]:
        return [*self._columns]


@pytest.mark.parametrize(
    ("columns", "given", "message"),
    [
        (("question",), {}, "no column 'prompt', only question"),
        (("prompt",), {"key": "id"}, "no column 'id', only prompt"),
        (("prompt", "output_text"), {}, "rename output_text"),
        (("prompt",), {"concurrency": 0}, "concurrency is 0"),
        (("prompt",), {"concurrency": (3, 2)}, r"concurrency is 3.* in 1\.\.2"),
        (("prompt",), {"block_size": 0}, "block_size is 0"),
    ],
)
def test_rows_that_do_not_suit_are_refused(
    columns: tuple[str, ...], given: dict[str, Any], message: str
) -> None:
    pytest.importorskip("ray.data")
    job = Job("nobody/has-this-model", 8, key=given.pop("key", None))
    with pytest.raises(ValueError, match=message):
        job.run(Rows(*columns), **given)  # type: ignore[arg-type]


def test_a_row_decides_about_its_seed() -> None:
    seeds = {row_seed(seed, key) for seed in range(10) for key in (*range(99), "a", [5, 6], [5, 7])}
    assert len(seeds) == 10 * 102
    assert all(0 <= each < 2**32 for each in seeds)
    assert row_seed(7, "row-3") == 2_298_780_396  # of every version
