"""The file of a pool: round trips, refused files, killed writers, hostile bytes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from lookahead_hf.ngram_pool import NgramPool
from tests.helpers.ngrams import TEXT, assert_same_tree, grown, held, pool_of


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The file of a pool of one text."""
    pool = pool_of(TEXT, max_tokens=10_000, vocab_size=500, tokenizer_fingerprint="abc")
    pool.save(tmp_path / "pool.safetensors")
    return tmp_path / "pool.safetensors"


def metadata_of(path: Path) -> dict[str, str]:
    with safe_open(path, framework="numpy") as file:
        return file.metadata()


@pytest.mark.parametrize("max_tokens", [10_000, 5_000, 1_000])
def test_what_is_loaded_is_what_was_saved(tmp_path: Path, max_tokens: int) -> None:
    pool = pool_of(TEXT, max_tokens=max_tokens, vocab_size=500)
    pool.save(tmp_path / "pool")
    loaded = NgramPool.load(tmp_path / "pool")
    assert held(loaded) == held(pool)
    assert (loaded.vocab_size, loaded.info.max_tokens) == (500, max_tokens)
    again = NgramPool(max_tokens)
    again.add(held(pool)[:-1])
    for end in range(3_000, 4_000, 50):
        if max_tokens == 10_000:  # one half held all of it before, too
            assert_same_tree(grown(loaded, TEXT[:end], 32), grown(again, TEXT[:end], 32))
    loaded.add(TEXT[::-1])
    assert held(loaded)[-100:-1] == TEXT[::-1][-99:].tolist()


def test_other_programs_can_read_it(path: Path) -> None:
    tensors = load_file(path)
    assert tensors["text"].tolist() == [*TEXT.tolist(), -1]
    assert tensors["links"].shape == (4_001, 4)
    assert {str(array.dtype) for array in tensors.values()} == {"int32"}
    assert metadata_of(path)["tokenizer_fingerprint"] == "abc"


def test_what_is_added_to_a_loaded_pool_stays_out_of_the_file(path: Path) -> None:
    before = path.read_bytes()
    pool = NgramPool.load(path)
    pool.add([497, 498, 499])
    assert grown(pool, [497, 498]).token_ids.tolist() == [499]
    assert path.read_bytes() == before
    path.unlink()
    assert grown(pool, [497, 498]).token_ids.tolist() == [499]


NO_POOL = {
    "empty": b"",
    "text": b"Once upon a time there was a file that was not a pool.",
    "long header": (2**40).to_bytes(8, "little") + b"{}" * 50,
    "deep header": (50_000).to_bytes(8, "little") + b"[" * 50_000,
    "no metadata": (2).to_bytes(8, "little") + b"{}",
}


@pytest.mark.parametrize("content", NO_POOL.values(), ids=NO_POOL.keys())
def test_a_file_of_another_kind_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "pool").write_bytes(content)
    with pytest.raises(ValueError, match="is not a pool.*lookahead-hf pool build"):
        NgramPool.load(tmp_path / "pool")


def test_a_file_that_was_cut_short_is_refused(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="damaged"):
        NgramPool.load(path)


WRONG = [
    ("version", "1", "format version 1"),
    ("max_tokens", "3000", "number of tokens is out of range"),
    ("max_tokens", str(2**40), "max_tokens"),
    ("max_tokens", "many", "many"),
    ("vocab_size", "400", "a token is out of range"),
    ("text", (7, -2), "a token is out of range"),
    ("text", (7, 500), "a token is out of range"),
    ("links", ((7, 1), -2), "a link is out of range"),
    ("links", ((7, 1), 4_001), "a link is out of range"),
    ("heads", (7, -2), "an entry is out of range"),
    ("heads", (7, 4 * 4_001), "an entry is out of range"),
    ("heads", (slice(None), 0), "its table is full"),
    ("links", np.zeros((4_001, 3), np.int32), "shapes"),
    ("text", np.zeros(4_001, np.int64), "not int32"),
    ("text", np.zeros((), np.int32), "damaged"),
]


@pytest.mark.parametrize(("name", "value", "message"), WRONG)
def test_what_would_point_outside_is_refused(
    path: Path, name: str, value: Any, message: str
) -> None:
    arrays, metadata = load_file(path), metadata_of(path)
    if isinstance(value, str):
        metadata[name] = value
    elif isinstance(value, tuple):
        arrays[name][value[0]] = value[1]
    else:
        arrays[name] = value
    save_file(arrays, path, metadata)
    with pytest.raises(ValueError, match=message):
        NgramPool.load(path)


def test_a_changed_bit_is_found_on_demand(path: Path) -> None:
    NgramPool.load(path, verifies=True)
    content = bytearray(path.read_bytes())
    place = content.index(np.int32(TEXT[100:110]).tobytes())
    content[place] ^= 1
    path.write_bytes(content)
    NgramPool.load(path)
    with pytest.raises(ValueError, match="checksum"):
        NgramPool.load(path, verifies=True)


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
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=environment, check=True)


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
