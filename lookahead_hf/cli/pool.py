"""`lookahead-hf pool`: build, look at, merge and check files of n-grams across requests."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lookahead_hf.cli.parsing import add_command
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


def add_parser(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "pool",
        help="build and look after files of n-grams to draft from",
        description="Builds, shows, merges and checks pools: n-grams of texts to draft from.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    _add_build(actions)
    info = _add_action(actions, "info", "print what a pool holds", _info)
    info.add_argument("file", type=Path)
    merge = _add_action(actions, "merge", "write several pools as one, in their order", _merge)
    merge.add_argument("output", type=Path)
    merge.add_argument("files", nargs="+", type=Path)
    _add_max_tokens(merge, None, "default: room for all of them")
    check = _add_action(actions, "check", "read all of a pool and compare its checksum", _check)
    check.add_argument("file", type=Path)


def _add_build(actions: Any) -> None:
    build = _add_action(actions, "build", "tokenise texts into a new pool", _build)
    build.add_argument(
        "files", nargs="+", type=Path, help="text, or records where the name ends in .jsonl"
    )
    build.add_argument("--tokenizer", required=True, help="a folder or a name of the hub")
    build.add_argument(
        "--output", type=Path, default=Path("pool.safetensors"), help="default: %(default)s"
    )
    build.add_argument(
        "--field", default="text", help="of each JSON record, dots lead inside (default: text)"
    )
    _add_max_tokens(build, DEFAULT_TOKENS, "beyond that the oldest leave (default: 10 million)")


def _add_action(actions: Any, name: str, text: str, run: Callable[..., int]) -> Any:
    about = f"{text[0].upper()}{text[1:]}."
    return add_command(
        actions, name, _with_messages(run), help=text, about=about, examples=_EXAMPLES
    )


def _add_max_tokens(parser: Any, default: int | None, text: str) -> None:
    parser.add_argument("--max-tokens", type=int, default=default, metavar="N", help=text)


def _with_messages(run: Callable[..., int]) -> Callable[..., int]:
    """Let a file that is missing, damaged or of another tokenizer be one message."""

    def guarded(arguments: argparse.Namespace, screen: Screen) -> int:
        try:
            return run(arguments, screen)
        except (ImportError, OSError, ValueError) as error:
            raise CommandError(str(error)) from error

    return guarded


def _build(arguments: argparse.Namespace, screen: Screen) -> int:
    from lookahead_hf.drafting.pool import fingerprint
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


def _info(arguments: argparse.Namespace, screen: Screen) -> int:
    from lookahead_hf.ngram_pool import NgramPool

    return _show(NgramPool.load(arguments.file), arguments.file, screen)


def _merge(arguments: argparse.Namespace, screen: Screen) -> int:
    from lookahead_hf.ngram_pool import NgramPool

    pools = [NgramPool.load(file) for file in arguments.files]
    infos = [pool.info for pool in pools]
    most = arguments.max_tokens
    if most is None:
        held = sum(info.num_tokens + info.num_texts for info in infos)
        most = max(held, *(info.max_tokens for info in infos))
    merged = NgramPool(
        most,
        vocab_size=infos[0].vocab_size,
        tokenizer_fingerprint=infos[0].tokenizer_fingerprint,
    )
    with screen.task(f"merging {len(pools)} pools"):
        for pool in pools:
            merged.merge(pool)
    return _save(merged, arguments, screen)


def _save(pool: NgramPool, arguments: argparse.Namespace, screen: Screen) -> int:
    with screen.task(f"writing {arguments.output}"):
        pool.save(arguments.output)
    return _show(pool, arguments.output, screen)


def _check(arguments: argparse.Namespace, screen: Screen) -> int:
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
