"""The file of a pool: what is kept, what is refused, what a killed writer leaves, hostile bytes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from lookahead_hf.ngram_pool import NgramPool, store
from lookahead_hf.ngram_pool.suffix_index import NUM_BUCKETS

EVEN = np.full(NUM_BUCKETS, 0.5)
TEXT = np.random.default_rng(0).zipf(1.3, 4_000) % 500


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of a pool that has not yet come round."""
    pool = NgramPool(10_000, vocab_size=500, tokenizer_fingerprint="abc")
    pool.add(TEXT)
    pool.save(tmp_path / "pool.safetensors")
    return tmp_path / "pool.safetensors"


def header_of(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    return json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])


def with_header(path: Path, header: Any) -> None:
    """Give the file another header, the data as they were."""
    content = path.read_bytes()
    data = content[8 + int.from_bytes(content[:8], "little") :]
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def tree_of(pool: NgramPool, end: int) -> list[list[float]]:
    tree = pool.grow(TEXT[:end], EVEN, 32)
    return [tree.token_ids.tolist(), tree.parents.tolist(), tree.score.tolist()]


@pytest.mark.parametrize("max_tokens", [10_000, 1_000])
def test_what_is_loaded_is_what_was_saved(tmp_path: Path, max_tokens: int) -> None:
    pool = NgramPool(max_tokens, vocab_size=500)
    pool.add(TEXT)
    pool.save(tmp_path / "pool")
    loaded = NgramPool.load(tmp_path / "pool", vocab_size=500)
    assert len(loaded) == len(pool) == min(len(TEXT), max_tokens - 1)
    assert [tree_of(loaded, end) for end in range(3_000, 4_000, 50)] == [
        tree_of(pool, end) for end in range(3_000, 4_000, 50)
    ]
    # Both go on alike.
    for each in (pool, loaded):
        each.add(TEXT[::-1])
    for name, array in pool._contents.arrays().items():
        np.testing.assert_array_equal(loaded._contents.arrays()[name], array)


def test_an_empty_pool_can_be_kept(tmp_path: Path) -> None:
    NgramPool().save(tmp_path / "pool")
    pool = NgramPool.load(tmp_path / "pool")
    store.check(tmp_path / "pool")
    pool.add([1, 2])
    assert pool.grow([1], EVEN, 1).token_ids.tolist() == [2]


def test_other_programs_can_read_it(path: Path) -> None:
    tensors = load_file(path)
    assert tensors["log"].tolist() == [*TEXT.tolist(), -1]
    assert tensors["links"].shape == (4_001, 4)
    assert tensors["table"].shape == (1_500, 16)
    assert tensors["table"].dtype == np.uint32
    assert header_of(path)["__metadata__"]["tokenizer_fingerprint"] == "abc"


def test_what_is_added_to_a_loaded_pool_stays_out_of_the_file(path: Path) -> None:
    before = path.read_bytes()
    one, other = NgramPool.load(path), NgramPool.load(path)
    one.add([497, 498, 499])
    assert one.grow([497, 498], EVEN, 1, min_ngram=2).token_ids.tolist() == [499]
    assert len(other.grow([497, 498], EVEN, 1, min_ngram=2).token_ids) == 0
    assert path.read_bytes() == before


def test_a_full_pool_from_a_file_is_overwritten_in_memory_only(tmp_path: Path) -> None:
    pool = NgramPool(1_000)
    pool.add(TEXT)
    pool.save(tmp_path / "pool")
    before = (tmp_path / "pool").read_bytes()
    loaded = NgramPool.load(tmp_path / "pool")
    loaded.add(TEXT[:2_000])
    assert len(loaded) == 999
    assert (tmp_path / "pool").read_bytes() == before
    loaded.save(tmp_path / "pool")
    store.check(tmp_path / "pool")
    assert tree_of(NgramPool.load(tmp_path / "pool"), 1_900) == tree_of(loaded, 1_900)


@pytest.mark.parametrize("expected", [{"vocab_size": 501}, {"tokenizer_fingerprint": "abd"}])
def test_a_pool_of_another_tokenizer_is_refused(path: Path, expected: dict[str, Any]) -> None:
    (name,) = expected
    with pytest.raises(ValueError, match=f"has {name}=.*build a pool with the tokenizer"):
        NgramPool.load(path, **expected)
    NgramPool.load(path, vocab_size=500, tokenizer_fingerprint="abc")


def test_a_missing_file_is_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        NgramPool.load(tmp_path / "nothing")


NO_POOL = {
    "empty": b"",
    "text": b"Once upon a time there was a file that was no pool.",
    "long header": (2**40).to_bytes(8, "little") + b"{}" * 50,
    "deep header": (50_000).to_bytes(8, "little") + b"[" * 50_000,
    "list": (2).to_bytes(8, "little") + b"[]",
    "no metadata": (2).to_bytes(8, "little") + b"{}",
}


@pytest.mark.parametrize("content", NO_POOL.values(), ids=NO_POOL.keys())
def test_what_is_no_pool_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "pool").write_bytes(content)
    with pytest.raises(ValueError, match="is no pool.*lookahead-hf pool build"):
        NgramPool.load(tmp_path / "pool")


def test_a_newer_format_is_told_from_damage(path: Path) -> None:
    header = header_of(path)
    header["__metadata__"]["version"] = "2"
    with_header(path, header)
    with pytest.raises(ValueError, match="format version 2"):
        NgramPool.load(path)


@pytest.mark.parametrize("cut", [1, 1000, 100_000])
def test_a_file_that_was_cut_short_is_refused(path: Path, cut: int) -> None:
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(ValueError, match="damaged.*restore the file, or build it again"):
        NgramPool.load(path)


WRONG = {
    "max_tokens": ("max_tokens", "3000"),
    "no number": ("num_added", "many"),
    "infinite": ("num_added", float("inf")),
    "more than the log": ("num_added", "5000"),
    "negative": ("num_texts", "-1"),
    "too large a pool": ("max_tokens", str(2**40)),
    "vocabulary": ("vocab_size", "0"),
    "vocabulary of a list": ("vocab_size", [5]),
}


@pytest.mark.parametrize(("name", "value"), WRONG.values(), ids=WRONG.keys())
def test_numbers_that_do_not_fit_are_refused(path: Path, name: str, value: Any) -> None:
    header = header_of(path)
    header["__metadata__"][name] = value
    with_header(path, header)
    with pytest.raises(ValueError, match="damaged"):
        NgramPool.load(path)


SHAPES = [[1500.0, 16], [-1500, -16], [1500, 16, 1], [2**70, 0], "ab", 24000, [24000], None]


@pytest.mark.parametrize("shape", SHAPES, ids=map(str, SHAPES))
def test_shapes_that_do_not_fit_are_refused(path: Path, shape: Any) -> None:
    header = header_of(path)
    header["table"]["shape"] = shape
    with_header(path, header)
    with pytest.raises(ValueError, match="damaged"):
        NgramPool.load(path)


def test_a_changed_bit_is_found_on_demand(path: Path) -> None:
    store.check(path)
    content = bytearray(path.read_bytes())
    content[-5_000] ^= 1
    path.write_bytes(content)
    NgramPool.load(path)
    with pytest.raises(ValueError, match="checksum"):
        store.check(path)


def test_a_file_that_is_deleted_or_replaced_stays_as_it_was(path: Path) -> None:
    pool = NgramPool.load(path)
    before = tree_of(pool, 2_000)
    NgramPool(10_000).save(path)
    path.unlink()
    assert tree_of(pool, 2_000) == before
    assert pool.info.num_tokens == len(TEXT)


def test_a_file_that_was_written_into_is_not_read_on(path: Path) -> None:
    pool = NgramPool.load(path)
    content = path.read_bytes()
    path.write_bytes(content)
    os.utime(path, ns=(0, 0))
    methods = {
        "grow": lambda: pool.grow([1, 2], EVEN, 4),
        "add": lambda: pool.add([1, 2]),
        "save": lambda: pool.save(path),
        "info": lambda: pool.info,
        "merge": lambda: NgramPool().merge(pool),
        "be merged into": lambda: pool.merge(NgramPool()),
    }
    for name, call in methods.items():
        with pytest.raises(ValueError, match="was written into while it was open"):
            call()
            pytest.fail(name)
    assert path.read_bytes() == content


def test_a_file_that_was_cut_short_does_not_end_the_process(path: Path) -> None:
    code = (
        "import sys; from tests.ngram_pool.test_store import EVEN, NgramPool, TEXT\n"
        "pool = NgramPool.load(sys.argv[1]); pool.grow(TEXT[:2_000], EVEN, 4)\n"
        "with open(sys.argv[1], 'wb') as file: file.write(b'short')\n"
        "try: pool.grow(TEXT[:3_000], EVEN, 4)\n"
        "except ValueError as error: print(error)"
    )
    command = [sys.executable, "-c", code, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "was written into while it was open" in done.stdout


def mutated(content: bytes, rng: np.random.Generator) -> bytes:
    """The file with bytes of its header or its data changed, a piece cut out or overwritten."""
    changed = bytearray(content)
    header = 8 + int.from_bytes(content[:8], "little")
    kind = rng.integers(4)
    if kind == 0:
        for place in rng.integers(0, header, rng.integers(1, 4)):
            changed[place] = rng.integers(256)
    elif kind == 1:
        for place in rng.integers(header, len(content), rng.integers(1, 5_000)):
            changed[place] = rng.integers(256)
    elif kind == 2:
        start, size = rng.integers(0, len(content)), rng.integers(1, 5_000)
        del changed[start : start + size]
    else:
        start, size = rng.integers(header, len(content)), 4 * rng.integers(1, 20_000)
        value = rng.choice([b"\xff", b"\x00", b"\x7f", b"\x80", b"\x01"])
        changed[start : start + size] = value * len(changed[start : start + size])
    return bytes(changed)


def use(path: Path, rng: np.random.Generator) -> None:
    """Look up, add and merge, as far as the file is not refused."""
    try:
        pool = NgramPool.load(path)
    except ValueError as error:
        assert "pool" in str(error)
        return
    for end in rng.integers(1, len(TEXT), 5):
        tree = pool.grow(TEXT[:end], EVEN, 64)
        assert ((tree.token_ids >= 0) & (tree.token_ids < 2**31)).all()
        assert (tree.parents < np.arange(len(tree.parents))).all()
        assert (tree.bucket < NUM_BUCKETS).all()
    pool.add(TEXT[:1_500] % (pool.info.vocab_size or 500))
    pool.grow(TEXT[:100], EVEN, 64)
    try:
        NgramPool(3_000).merge(pool)
    except ValueError as error:
        assert "damaged" in str(error)


def use_mutations(folder: Path, num_mutations: int) -> None:
    """Use damaged files of a pool with room and of a full one."""
    rng = np.random.default_rng(0)
    target = folder / "mutated"
    for max_tokens in (10_000, 2_000):
        pool = NgramPool(max_tokens, vocab_size=500)
        pool.add(TEXT)
        pool.save(target)
        content = target.read_bytes()
        for _ in range(num_mutations // 2):
            target.write_bytes(mutated(content, rng))
            use(target, rng)


def test_a_thousand_damaged_files_do_no_harm(tmp_path: Path) -> None:
    use_mutations(tmp_path, 1_000)


@pytest.mark.slow
def test_nothing_outside_the_arrays_is_touched(tmp_path: Path) -> None:
    # In a process of its own, where numba checks every index; it compiles once more for that.
    environment = {
        **os.environ,
        "NUMBA_BOUNDSCHECK": "1",
        "NUMBA_CACHE_DIR": str(tmp_path / "cache"),
        "PYTHONPATH": os.getcwd(),
    }
    code = (
        "import pathlib, sys; from tests.ngram_pool import test_store; "
        "test_store.use_mutations(pathlib.Path(sys.argv[1]), 200)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=environment, check=True)


def test_a_killed_writer_leaves_the_old_file(path: Path) -> None:
    code = (
        "import sys, numpy as np; from lookahead_hf.ngram_pool import NgramPool\n"
        "pool = NgramPool(400_000, vocab_size=500, tokenizer_fingerprint='abc')\n"
        "pool.add(np.random.default_rng(0).integers(0, 500, 300_000))\n"
        "print('ready', flush=True)\n"
        "pool.save(sys.argv[1])\n"
    )
    command = [sys.executable, "-c", code, str(path)]

    def sizes() -> dict[str, int]:
        return {entry.name: entry.stat().st_size for entry in os.scandir(path.parent)}

    before = sizes()
    with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None and writer.stdout.readline() == b"ready\n"
        while sizes() == before:
            assert writer.poll() is None
        os.kill(writer.pid, signal.SIGKILL)
    assert sizes() != before
    assert store.check(path).num_added == len(TEXT) + 1


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


def test_two_processes_read_one_file(path: Path) -> None:
    code = (
        "import sys; from tests.ngram_pool.test_store import NgramPool, tree_of\n"
        "pool = NgramPool.load(sys.argv[1]); pool.add([497, 498, 499])\n"
        "print(tree_of(pool, 2_000), flush=True); sys.stdin.readline()\n"
    )
    ours = NgramPool.load(path)
    ours.add([497, 498, 499])
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as reader:
        assert reader.stdout is not None
        assert json.loads(reader.stdout.readline()) == tree_of(ours, 2_000)
        assert len(NgramPool.load(path)) == len(TEXT)
        reader.communicate(b"\n")
    assert reader.returncode == 0
