"""`lookahead-hf pool`: build, look at, merge and check files of n-grams across requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lookahead_hf.cli.parsing import Arguments, Group, Run, command, examples_of
from lookahead_hf.cli.screen import CommandError, Screen

if TYPE_CHECKING:
    from lookahead_hf.ngram_pool import NgramPool, PoolInfo

DEFAULT_TOKENS = 10_000_000

PIECE = 1 << 16
"""Bytes of a text file, up to the end of a line, that are tokenised and held as one text."""

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


def _with_messages(run: Run) -> Run:
    """Let a file that is missing, damaged or of another tokenizer be one message."""

    def guarded(arguments: Arguments, screen: Screen) -> int:
        try:
            return run(arguments, screen)
        except (ImportError, OSError, ValueError) as error:
            raise CommandError(str(error)) from error

    return guarded


def _build(arguments: Arguments, screen: Screen) -> int:
    from lookahead_hf.drafting.sources.pool import fingerprint
    from lookahead_hf.ngram_pool import NgramPool

    total = sum(file.stat().st_size for file in arguments.files)
    with _quiet_transformers():
        with screen.task(f"loading the tokenizer {arguments.tokenizer}"):
            tokenizer = _load_tokenizer(arguments.tokenizer)
        pool = NgramPool(
            arguments.max_tokens,
            vocab_size=len(tokenizer),
            tokenizer_fingerprint=fingerprint(tokenizer),
        )
        with screen.task(f"reading {len(arguments.files)} files", total) as report:
            done = 0
            for file in arguments.files:
                for texts, num_bytes in _texts(file, arguments.field):
                    for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]:
                        pool.add(ids)
                    done += num_bytes
                    report(done)
    return _save(pool, arguments, screen)


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Do not hear that texts are longer than a model reads at once, which is no matter here."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _load_tokenizer(name: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise CommandError(
            f"The tokenizer {name!r} could not be loaded: {error}\n"
            "--tokenizer takes a folder that save_pretrained wrote, or OWNER/NAME of the Hugging "
            "Face hub."
        ) from error


def _texts(file: Path, field: str) -> Iterator[tuple[list[str], int]]:
    """The texts of a file, some at a time, and how many bytes of it they take."""
    with file.open("rb") as lines:
        if file.suffix == ".jsonl":
            yield from _records(file, lines, field)
            return
        piece: list[bytes] = []
        size = 0
        for line in lines:
            piece.append(line)
            size += len(line)
            if size >= PIECE:
                yield [_decoded(file, b"".join(piece))], size
                piece, size = [], 0
        if piece:
            yield [_decoded(file, b"".join(piece))], size


def _records(file: Path, lines: Any, field: str) -> Iterator[tuple[list[str], int]]:
    texts: list[str] = []
    size = 0
    for number, line in enumerate(lines, 1):
        size += len(line)
        if line.strip():
            texts.append(_field_of(line, field, f"{file}, line {number}"))
        if len(texts) == RECORDS:
            yield texts, size
            texts, size = [], 0
    if texts:
        yield texts, size


def _field_of(line: bytes, field: str, where: str) -> str:
    """A record's text."""
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: no JSON ({error})") from error
    for name in field.split("."):
        if not isinstance(value, dict) or name not in value:
            known = ", ".join(value) if isinstance(value, dict) else f"a {type(value).__name__}"
            raise ValueError(f"{where}: no field {name!r} but {known}; --field names another")
        value = value[name]
    if not isinstance(value, str):
        raise ValueError(f"{where}: the field {field!r} is no text; --field names another")
    return value


def _decoded(file: Path, content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is no text in UTF-8 ({error})") from error


def _info(arguments: Arguments, screen: Screen) -> int:
    from lookahead_hf.ngram_pool import NgramPool

    return _show(NgramPool.load(arguments.file), arguments.file, screen)


def _merge(arguments: Arguments, screen: Screen) -> int:
    from lookahead_hf.ngram_pool import NgramPool, store

    for file in arguments.files:
        with screen.task(f"checking {file}"):
            store.check(file)
    pools = [NgramPool.load(file) for file in arguments.files]
    infos = [pool.info for pool in pools]
    most = arguments.max_tokens
    if most is None:
        held = sum(info.num_tokens + info.num_texts for info in infos)
        most = max(held, *(info.max_tokens for info in infos))
    merged = NgramPool(most)  # what the pools say of their tokenizer becomes its own
    with screen.task(f"merging {len(pools)} pools"):
        for pool in pools:
            merged.merge(pool)
    return _save(merged, arguments, screen)


def _save(pool: NgramPool, arguments: Arguments, screen: Screen) -> int:
    with screen.task(f"writing {arguments.output}"):
        pool.save(arguments.output)
    return _show(pool, arguments.output, screen)


def _check(arguments: Arguments, screen: Screen) -> int:
    from lookahead_hf.ngram_pool import store

    with screen.task(f"reading {arguments.file}"):
        store.check(arguments.file)
    screen.result({"file": str(arguments.file), "intact": True})
    screen.line(f"{arguments.file} is intact")
    return 0


def _show(pool: NgramPool, file: Path, screen: Screen) -> int:
    screen.result({"file": str(file), **asdict(pool.info)})
    screen.line(str(file), "bold")
    for name, value in _readable(pool.info).items():
        screen.line(f"  {name}: {value}")
    return 0


def _readable(info: PoolInfo) -> dict[str, str]:
    return {
        "tokens": f"{info.num_tokens:,} of {info.max_tokens:,} at most",
        "texts": f"{info.num_texts:,}",
        "n-grams": f"{info.num_ngrams:,} (of 1, 2, 4 and 8 tokens)",
        "size": f"{info.nbytes / 1e6:,.1f} MB",
        "vocabulary": "not said" if info.vocab_size is None else f"{info.vocab_size:,} tokens",
        "tokenizer": info.tokenizer_fingerprint or "not said",
    }


_FILE = click.Path(path_type=Path)


def _action(name: str, text: str, run: Run, *params: click.Parameter) -> click.Command:
    about = f"{text[0].upper()}{text[1:]}."
    return command(
        name, _with_messages(run), help=text, about=about, examples=_EXAMPLES, params=params
    )


def _files() -> click.Parameter:
    return click.Argument(["files"], nargs=-1, required=True, type=_FILE)


def _max_tokens(default: int | None, text: str) -> click.Parameter:
    return click.Option(["--max-tokens"], type=int, default=default, metavar="N", help=text)


COMMAND = Group(
    "pool",
    short_help="build and look after files of n-grams to draft from",
    help="Builds, shows, merges and checks pools: n-grams of texts to draft from.",
    epilog=examples_of(_EXAMPLES),
    subcommand_metavar="ACTION [ARGUMENTS]...",
    no_args_is_help=False,
    commands=[
        _action(
            "build",
            "tokenise texts into a new pool; records where a name ends in .jsonl",
            _build,
            _files(),
            click.Option(["--tokenizer"], required=True, help="a folder or a name of the hub"),
            click.Option(["--output"], type=_FILE, default="pool.safetensors", show_default=True),
            click.Option(
                ["--field"],
                default="text",
                show_default=True,
                help="of each JSON record, dots lead inside",
            ),
            _max_tokens(DEFAULT_TOKENS, "beyond that the oldest leave (default: 10 million)"),
        ),
        _action("info", "print what a pool holds", _info, click.Argument(["file"], type=_FILE)),
        _action(
            "merge",
            "write several pools as one, in their order",
            _merge,
            click.Argument(["output"], type=_FILE),
            _files(),
            _max_tokens(None, "default: room for all of them"),
        ),
        _action(
            "check",
            "read all of a pool and compare its checksum",
            _check,
            click.Argument(["file"], type=_FILE),
        ),
    ],
)
