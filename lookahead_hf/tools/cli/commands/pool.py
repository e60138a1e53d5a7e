"""`lookahead-hf pool`: build, show and merge pools, files of n-grams to draft from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import click

from lookahead_hf.tools.cli.models import loading
from lookahead_hf.tools.cli.options import as_written, command, records
from lookahead_hf.tools.cli.screen import CommandError, Screen

if TYPE_CHECKING:
    from lookahead_hf.ngram_pool import NgramPool

PIECE = 1 << 16
"""Bytes of a text file that become one text of the pool; the last line of it stays whole."""

_EXAMPLES = """\
examples:
  lookahead-hf pool build --tokenizer Qwen/Qwen3-0.6B --output code.safetensors src/*.py
  lookahead-hf pool build --tokenizer ./model --field answer answers.jsonl
  lookahead-hf pool info code.safetensors
  lookahead-hf pool merge both.safetensors code.safetensors answers.safetensors

Drafting from it:
  model.generate(..., speculative=SpeculativeConfig(drafters=("ngram", "recycling", "pool"),
                                                    pool="code.safetensors"))
"""


def _in_a_folder(context: click.Context, option: click.Parameter, file: Path) -> Path:
    """Return the path of a new file whose folder exists, so that no work is lost in the end."""
    if not file.parent.is_dir():
        raise click.BadParameter(f"there is no folder {file.parent}: make it first")
    return file


_FILE = click.Path(path_type=Path)
_FILES = click.argument("files", nargs=-1, required=True, type=_FILE)


@command("build", _EXAMPLES)
@_FILES
@click.option("--tokenizer", required=True, help="a folder or a hub name")
@click.option(
    "--output",
    type=_FILE,
    callback=_in_a_folder,
    default="pool.safetensors",
    show_default=True,
    help="the new pool",
)
@click.option("--field", default="text", show_default=True, help="of each JSON record")
@click.option(
    "--max-tokens",
    type=int,
    default=10_000_000,
    metavar="N",
    help="beyond that the oldest leave (default: 10 million)",
)
def _build(arguments: SimpleNamespace, screen: Screen) -> None:
    """Tokenise texts into a new pool.

    A file is one text, or one JSON record with a text per line where its name ends in .jsonl.
    """
    from transformers import AutoTokenizer

    from lookahead_hf.ngram_pool import NgramPool
    from lookahead_hf.sources.pool import fingerprint

    with loading(arguments.tokenizer, "--tokenizer", screen):
        tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
    pool = NgramPool(
        arguments.max_tokens,
        vocab_size=len(tokenizer),
        tokenizer_fingerprint=fingerprint(tokenizer),
    )
    with screen.task("reading the files", len(arguments.files)) as advance:
        for file in arguments.files:
            for text in _texts(file, arguments.field):
                pool.add(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
            advance()
    _save(pool, arguments.output, screen)


def _texts(file: Path, field: str) -> Iterator[str]:
    """Yield the texts of a file: a field of its records, or pieces of some lines."""
    if file.suffix == ".jsonl":
        for where, record in records(file):
            if not isinstance(record.get(field), str):
                raise CommandError(f"{where}: no text {field!r}; --field names another field")
            yield record[field]
        return
    with file.open("rb") as lines:
        while piece := b"".join(lines.readlines(PIECE)):
            try:
                yield piece.decode()
            except UnicodeDecodeError as error:
                raise ValueError(f"{file} is not a text in UTF-8 ({error})") from error


@command("info", _EXAMPLES)
@click.argument("file", type=_FILE)
def _info(arguments: SimpleNamespace, screen: Screen) -> None:
    from lookahead_hf.ngram_pool import NgramPool

    _show(NgramPool.load(arguments.file, verifies=True), arguments.file, screen)


@command("merge", _EXAMPLES)
@click.argument("output", type=_FILE, callback=_in_a_folder)
@_FILES
@click.option("--max-tokens", type=int, metavar="N", help="default: room for all of them")
def _merge(arguments: SimpleNamespace, screen: Screen) -> None:
    """Write several pools as one, in their order."""
    from lookahead_hf.ngram_pool import NgramPool

    pools = []
    for file in arguments.files:
        with screen.task(f"checking {file}"):
            pools.append(NgramPool.load(file, verifies=True))
    infos = [pool.info for pool in pools]
    most = arguments.max_tokens
    if most is None:
        most = max(
            sum(info.num_tokens + info.num_texts for info in infos),
            *(info.max_tokens for info in infos),
        )
    merged = NgramPool(most)  # it takes over what the pools record about their tokenizer
    with screen.task(f"merging {len(pools)} pools"):
        for pool in pools:
            merged.merge(pool)
    _save(merged, arguments.output, screen)


def _save(pool: NgramPool, file: Path, screen: Screen) -> None:
    with screen.task(f"writing {file}"):
        pool.save(file)
    _show(pool, file, screen)


def _show(pool: NgramPool, file: Path, screen: Screen) -> None:
    info = pool.info
    screen.result({"file": str(file), **asdict(info)})
    vocabulary = "unknown" if info.vocab_size is None else f"{info.vocab_size:,} tokens"
    screen.line(str(file), bold=True)
    screen.line(f"  tokens: {info.num_tokens:,} of {info.max_tokens:,} at most")
    screen.line(f"  texts: {info.num_texts:,}")
    screen.line(f"  n-grams: {info.num_ngrams:,} (of 1, 2, 4 and 8 tokens)")
    screen.line(f"  size: {info.nbytes / 1e6:,.1f} MB")
    screen.line(f"  vocabulary: {vocabulary}")
    screen.line(f"  tokenizer: {info.tokenizer_fingerprint or 'unknown'}")


COMMAND = click.Group(
    "pool",
    commands=[_build, _info, _merge],
    help="Build, show and merge files of n-grams to draft from.",
    epilog=as_written(_EXAMPLES),
    subcommand_metavar="build|info|merge [ARGUMENTS]...",
    no_args_is_help=False,
)
