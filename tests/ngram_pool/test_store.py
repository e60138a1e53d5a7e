"""The file of a pool: round trips, refused files, killed writers, hostile bytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from lookahead_hf.ngram_pool import NgramPool, store
from tests.helpers.ngrams import EVEN, TEXT, held, pool_of, tree_of


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The file of a pool whose log is not full."""
    pool = pool_of(TEXT, max_tokens=10_000, vocab_size=500, tokenizer_fingerprint="abc")
    pool.save(tmp_path / "pool.safetensors")
    return tmp_path / "pool.safetensors"


def header_of(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    return json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])


def with_header(path: Path, header: Any) -> None:
    """Replace the header of the file; the data stay as they are."""
    content = path.read_bytes()
    data = content[8 + int.from_bytes(content[:8], "little") :]
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def child(code: str, path: Path) -> list[str]:
    """Command that runs code in another process; `sys.argv[1]` is the path."""
    return [sys.executable, "-c", code, str(path)]


@pytest.mark.parametrize("max_tokens", [10_000, 1_000])
def test_what_is_loaded_is_what_was_saved(tmp_path: Path, max_tokens: int) -> None:
    pool = pool_of(TEXT, max_tokens=max_tokens, vocab_size=500)
    pool.save(tmp_path / "pool")
    loaded = NgramPool.load(tmp_path / "pool", vocab_size=500)
    assert loaded.info == pool.info
    assert len(loaded) == min(len(TEXT), max_tokens - 1)
    assert [tree_of(loaded, end) for end in range(3_000, 4_000, 50)] == [
        tree_of(pool, end) for end in range(3_000, 4_000, 50)
    ]
    # Both behave alike afterwards.
    for each in (pool, loaded):
        each.add(TEXT[::-1])
    assert held(loaded) == held(pool)
    assert tree_of(loaded, 3_000) == tree_of(pool, 3_000)


def test_other_programs_can_read_it(path: Path) -> None:
    tensors = load_file(path)
    assert tensors["text"].tolist() == [*TEXT.tolist(), -1]
    assert tensors["links"].shape == (4_001, 4)
    assert {str(array.dtype) for array in tensors.values()} == {"int32"}
    assert header_of(path)["__metadata__"]["tokenizer_fingerprint"] == "abc"


def test_what_is_added_to_a_loaded_pool_stays_out_of_the_file(path: Path) -> None:
    before = path.read_bytes()
    one, other = NgramPool.load(path), NgramPool.load(path)
    one.add([497, 498, 499])
    assert one.grow([497, 498], EVEN, 1, min_ngram=2).token_ids.tolist() == [499]
    assert len(other.grow([497, 498], EVEN, 1, min_ngram=2).token_ids) == 0
    assert path.read_bytes() == before


@pytest.mark.parametrize("expected", [{"vocab_size": 501}, {"tokenizer_fingerprint": "abd"}])
def test_a_pool_of_another_tokenizer_is_refused(path: Path, expected: dict[str, Any]) -> None:
    (name,) = expected
    with pytest.raises(ValueError, match=f"has {name}=.*build a pool with the tokenizer"):
        NgramPool.load(path, **expected)
    NgramPool.load(path, vocab_size=500, tokenizer_fingerprint="abc")


NO_POOL = {
    "empty": b"",
    "text": b"Once upon a time there was a file that was not a pool.",
    "long header": (2**40).to_bytes(8, "little") + b"{}" * 50,
    "deep header": (50_000).to_bytes(8, "little") + b"[" * 50_000,
    "list": (2).to_bytes(8, "little") + b"[]",
    "no metadata": (2).to_bytes(8, "little") + b"{}",
}


@pytest.mark.parametrize("content", NO_POOL.values(), ids=NO_POOL.keys())
def test_a_file_of_another_kind_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "pool").write_bytes(content)
    with pytest.raises(ValueError, match="is not a pool.*lookahead-hf pool build"):
        NgramPool.load(tmp_path / "pool")


def test_another_format_is_distinguished_from_damage(path: Path) -> None:
    header = header_of(path)
    header["__metadata__"]["version"] = "1"
    with_header(path, header)
    with pytest.raises(ValueError, match="format version 1"):
        NgramPool.load(path)


@pytest.mark.parametrize("cut", [1, 100_000])
def test_a_file_that_was_cut_short_is_refused(path: Path, cut: int) -> None:
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(ValueError, match="damaged.*restore the file, or build it again"):
        NgramPool.load(path)


WRONG = [
    ("__metadata__", "max_tokens", "3000"),
    ("__metadata__", "max_tokens", str(2**40)),
    ("__metadata__", "num_tokens", "many"),
    ("__metadata__", "num_tokens", float("inf")),
    ("__metadata__", "num_slots", "-1"),
    ("__metadata__", "vocab_size", [5]),
    ("__metadata__", "vocab_size", "400"),  # the text has larger ids
    *(("heads", "shape", shape) for shape in ([1500.5], [-1500], [2**70, 0], "ab", None)),
]


@pytest.mark.parametrize(("part", "name", "value"), WRONG, ids=map(str, WRONG))
def test_a_header_that_does_not_fit_the_data_is_refused(
    path: Path, part: str, name: str, value: Any
) -> None:
    header = header_of(path)
    header[part][name] = value
    with_header(path, header)
    with pytest.raises(ValueError, match="damaged"):
        NgramPool.load(path)


OUTSIDE = [(0, -2), (0, 500), (1, -2), (1, 4_001), (2, -2), (2, 4 * 4_001)]


@pytest.mark.parametrize(("array", "value"), OUTSIDE)
def test_a_number_that_points_outside_is_refused(path: Path, array: int, value: int) -> None:
    contents = store.read(path)
    contents.arrays[array].flat[7] = value
    store.write(path, contents)
    with pytest.raises(ValueError, match="damaged.*is out of range"):
        NgramPool.load(path)


def test_a_full_table_is_refused(path: Path) -> None:
    contents = store.read(path)
    contents.arrays[2][:] = 0
    store.write(path, contents)
    with pytest.raises(ValueError, match="damaged.*its table is full"):
        NgramPool.load(path)


def test_a_changed_bit_is_found_on_demand(path: Path) -> None:
    store.read(path, verifies=True)
    content = bytearray(path.read_bytes())
    place = content.index(np.int32(TEXT[100:110]).tobytes())
    content[place] ^= 1
    path.write_bytes(content)
    NgramPool.load(path)
    with pytest.raises(ValueError, match="checksum"):
        store.read(path, verifies=True)


def test_a_file_that_is_deleted_or_replaced_stays_as_it_was(path: Path) -> None:
    pool = NgramPool.load(path)
    before = tree_of(pool, 2_000)
    NgramPool(10_000).save(path)
    path.unlink()
    assert tree_of(pool, 2_000) == before
    assert pool.info.num_tokens == len(TEXT)


METHODS: dict[str, Callable[[NgramPool, Path], object]] = {
    "grow": lambda pool, path: pool.grow([1, 2], EVEN, 4),
    "add": lambda pool, path: pool.add([1, 2]),
    "save": lambda pool, path: pool.save(path),
    "info": lambda pool, path: pool.info,
    "merge": lambda pool, path: NgramPool().merge(pool),
    "be merged into": lambda pool, path: pool.merge(NgramPool()),
    "be counted": lambda pool, path: len(pool),
}


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
def test_a_pool_whose_file_was_written_into_says_to_load_it_again(
    path: Path, method: Callable[[NgramPool, Path], object]
) -> None:
    pool = NgramPool.load(path)
    content = path.read_bytes()
    path.write_bytes(content)
    os.utime(path, ns=(0, 0))
    with pytest.raises(ValueError, match="was written into while it was open.*load the pool again"):
        method(pool, path)
    assert path.read_bytes() == content
    assert len(NgramPool.load(path)) == len(TEXT)


def test_a_file_that_is_cut_short_while_open_does_not_end_the_process(path: Path) -> None:
    code = """
import sys
from lookahead_hf.ngram_pool import NgramPool
from tests.helpers.ngrams import tree_of
pool = NgramPool.load(sys.argv[1])
tree_of(pool, 2_000)
with open(sys.argv[1], "wb") as file:
    file.write(b"short")
try:
    tree_of(pool, 3_000)
except ValueError as error:
    print(error)
"""
    done = subprocess.run(child(code, path), capture_output=True, text=True, check=True)
    assert "was written into while it was open" in done.stdout


@pytest.mark.slow
def test_nothing_outside_the_arrays_is_touched(tmp_path: Path) -> None:
    # In a process of its own, where numba checks every index; it compiles once more for that.
    environment = {
        **os.environ,
        "NUMBA_BOUNDSCHECK": "1",
        "NUMBA_CACHE_DIR": str(tmp_path / "cache"),
        "PYTHONPATH": os.getcwd(),
    }
    code = """
import pathlib, sys
from tests.helpers.ngrams import use_files_of_nonsense
use_files_of_nonsense(pathlib.Path(sys.argv[1]), 200)
"""
    subprocess.run(child(code, tmp_path), env=environment, check=True)


def test_a_writer_that_fails_leaves_the_old_file(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = path.read_bytes()

    def fail(_: int) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="the disk is full"):
        NgramPool.load(path).save(path)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]
