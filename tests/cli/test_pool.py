"""Pools from the command line: built from files, told apart, checked."""

from __future__ import annotations

from pathlib import Path

import pytest

from lookahead_hf.cli import main
from lookahead_hf.ngram_pool import NgramPool
from tests.cli.tiny_chat import byte_tokenizer


@pytest.fixture
def built(tmp_path: Path) -> Path:
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    texts = [tmp_path / name for name in ("one.txt", "two.txt")]
    texts[0].write_text("abcabc")
    texts[1].write_text("xyz")
    file = tmp_path / "texts.pool"
    words = ["pool", "build", str(file), *map(str, texts), "--model", str(tmp_path / "tokenizer")]
    assert main(words) == 0
    return file


def test_a_pool_holds_the_tokens_of_its_files(built: Path) -> None:
    info = NgramPool.load(built).info
    assert (info.num_tokens, info.num_texts) == (9, 2)
    assert info.vocab_size == len(byte_tokenizer())


def test_info_says_what_a_pool_holds(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["pool", "info", str(built), "--check"]) == 0
    assert "num_tokens: 9" in capsys.readouterr().out.splitlines()


def test_a_changed_bit_is_found(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = bytearray(built.read_bytes())
    content[-1] ^= 1
    built.write_bytes(content)
    assert main(["pool", "info", str(built), "--check"]) == 1
    assert str(built) in capsys.readouterr().err


def test_a_file_that_is_not_there_is_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pool", "info", str(tmp_path / "nothing.pool")]) == 1
    assert "nothing.pool" in capsys.readouterr().err
