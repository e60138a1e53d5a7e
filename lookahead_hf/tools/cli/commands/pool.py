"""`lookahead-hf pool`: build, show, merge and check pools, files of n-grams to draft from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lookahead_hf.tools.cli.loading import load_tokenizer
from lookahead_hf.tools.cli.parsing import Arguments, as_written, command
from lookahead_hf.tools.cli.prompts import text_of
from lookahead_hf.tools.cli.screen import CommandError, Screen

if TYPE_CHECKING:
    from lookahead_hf.ngram_pool import NgramPool

DEFAULT_TOKENS = 10_000_000

PIECE = 1 << 16
"""Bytes of a text file that become one text of the pool; the last line of it stays whole."""

RECORDS = 256
"""Records of a JSON lines file that are tokenised at once."""

_EXAMPLES = """\
examples:
  lookahead-hf pool build --tokenizer Qwen/Qwen3-0.6B --output code.safetensors src/*.py
  lookahead-hf pool build --tokenizer ./model --field answer answers.jsonl
  lookahead-hf pool info code.safetensors
  lookahead-hf pool merge both.safetensors code.safetensors answers.safetensors
  lookahead-hf pool check both.safetensors

Drafting from it:
  model.generate(..., speculative=SpeculativeConfig(drafters=("ngram", "recycling", "pool"),
                                                    pool="code.safetensors"))
"""


_FILE = click.Path(path_type=Path)
_FILES = click.argument("files", nargs=-1, required=True, type=_FILE)


@command("build", _EXAMPLES)
@_FILES
@click.option("--tokenizer", required=True, help="a folder or a hub name")
@click.option(
    "--output", type=_FILE, default="pool.safetensors", show_default=True, help="the new pool"
)
@click.option(
    "--field", default="text", show_default=True, help="of each JSON record; dots lead inside"
)
@click.option(
    "--max-tokens",
    type=int,
    default=DEFAULT_TOKENS,
    metavar="N",
    help="beyond that the oldest leave (default: 10 million)",
)
def _build(arguments: Arguments, screen: Screen) -> None:
    """Tokenise texts into a new pool.

    A file is one text, or one JSON record with a text per line where its name ends in .jsonl.
    """
    from lookahead_hf.ngram_pool import NgramPool
    from lookahead_hf.sources.pool import fingerprint

    _check_folder(arguments.output)
    files = arguments.files
    total = sum(file.stat().st_size for file in files)
    with screen.task(f"loading the tokenizer {arguments.tokenizer}"):
        tokenizer = load_tokenizer(arguments.tokenizer, "--tokenizer")
    pool = NgramPool(
        arguments.max_tokens,
        vocab_size=len(tokenizer),
        tokenizer_fingerprint=fingerprint(tokenizer),
    )
    with screen.task(f"reading {len(files)} files", total, unit="bytes") as report:
        done = 0
        for texts, num_bytes in chain.from_iterable(_texts(f, arguments.field) for f in files):
            for ids in tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]:
                pool.add(ids)
            done += num_bytes
            report(done)
    _save(pool, arguments.output, screen)


def _texts(file: Path, field: str) -> Iterator[tuple[list[str], int]]:
    """Yield portions of a file: some texts, and how many bytes of the file they take."""
    with file.open("rb") as lines:
        if file.suffix == ".jsonl":
            numbered = enumerate(lines, 1)
            while portion := list(islice(numbered, RECORDS)):
                texts = [
                    text_of(line, field, f"{file}, line {number}")
                    for number, line in portion
                    if line.strip()
                ]
                yield texts, sum(len(line) for _, line in portion)
        else:
            while piece := b"".join(lines.readlines(PIECE)):
                try:
                    yield [piece.decode()], len(piece)
                except UnicodeDecodeError as error:
                    raise ValueError(f"{file} is not a text in UTF-8 ({error})") from error


@command("info", _EXAMPLES)
@click.argument("file", type=_FILE)
def _info(arguments: Arguments, screen: Screen) -> None:
    """Print what a pool holds."""
    from lookahead_hf.ngram_pool import NgramPool

    _show(NgramPool.load(arguments.file), arguments.file, screen)


@command("merge", _EXAMPLES)
@click.argument("output", type=_FILE)
@_FILES
@click.option("--max-tokens", type=int, metavar="N", help="default: room for all of them")
def _merge(arguments: Arguments, screen: Screen) -> None:
    """Write several pools as one, in their order."""
    from lookahead_hf.ngram_pool import NgramPool

    _check_folder(arguments.output)
    pools = []
    for file in arguments.files:
        with screen.task(f"checking {file}"):
            pools.append(NgramPool.load(file, verifies=True))
    infos = [pool.info for pool in pools]
    most = arguments.max_tokens
    if most is None:
        held = sum(info.num_tokens + info.num_texts for info in infos)
        most = max(held, *(info.max_tokens for info in infos))
    merged = NgramPool(most)  # it takes over what the pools record about their tokenizer
    with screen.task(f"merging {len(pools)} pools"):
        for pool in pools:
            merged.merge(pool)
    _save(merged, arguments.output, screen)


@command("check", _EXAMPLES)
@click.argument("file", type=_FILE)
def _check(arguments: Arguments, screen: Screen) -> None:
    """Read all of a pool and compare its checksum."""
    from lookahead_hf.ngram_pool import NgramPool

    with screen.task(f"reading {arguments.file}"):
        NgramPool.load(arguments.file, verifies=True)
    screen.result({"file": str(arguments.file), "intact": True})
    screen.line(f"{arguments.file} is intact")


def _check_folder(file: Path) -> None:
    """Raise CommandError if a new file would have no folder, before any work is done."""
    if not file.parent.is_dir():
        raise CommandError(f"{file} cannot be written: there is no folder {file.parent}")


def _save(pool: NgramPool, file: Path, screen: Screen) -> None:
    with screen.task(f"writing {file}"):
        pool.save(file)
    _show(pool, file, screen)


def _show(pool: NgramPool, file: Path, screen: Screen) -> None:
    info = pool.info
    screen.result({"file": str(file), **asdict(info)})
    vocabulary = "unknown" if info.vocab_size is None else f"{info.vocab_size:,} tokens"
    screen.line(str(file), "bold")
    screen.line(f"  tokens: {info.num_tokens:,} of {info.max_tokens:,} at most")
    screen.line(f"  texts: {info.num_texts:,}")
    screen.line(f"  n-grams: {info.num_ngrams:,} (of 1, 2, 4 and 8 tokens)")
    screen.line(f"  size: {info.nbytes / 1e6:,.1f} MB")
    screen.line(f"  vocabulary: {vocabulary}")
    screen.line(f"  tokenizer: {info.tokenizer_fingerprint or 'unknown'}")


COMMAND = click.Group(
    "pool",
    commands=[_build, _info, _merge, _check],
    help="Build, show, merge and check files of n-grams to draft from.",
    epilog=as_written(_EXAMPLES),
    subcommand_metavar="build|info|merge|check [ARGUMENTS]...",
    no_args_is_help=False,
)
