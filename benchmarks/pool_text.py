"""Token ids for benchmarks that need neither a model nor a tokenizer."""

from __future__ import annotations

import random
import re
import site
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

VOCABULARY = 49_152


def read_text(num_tokens: int) -> np.ndarray:
    """Return up to `num_tokens` token ids of Python source, [num_tokens] int32."""
    words: list[str] = []
    for source in _sources():
        words += re.findall(r"\w+|\s+|[^\w\s]", source)
        if len(words) > num_tokens:
            break
    letters = sorted({letter for word in words[:1_000_000] for letter in word})
    frequent = [word for word, _ in Counter(words).most_common(VOCABULARY) if len(word) > 1]
    known = {token: id for id, token in enumerate((letters + frequent)[:VOCABULARY])}
    ids: list[int] = []
    for word in words:
        if word in known:
            ids.append(known[word])
        else:
            ids.extend(known.get(letter, 0) for letter in word)
    return np.array(ids[:num_tokens], np.int32)


def _sources() -> Iterator[str]:
    folders = [sysconfig.get_path("stdlib"), *site.getsitepackages()]
    files = sorted(file for folder in folders for file in Path(folder).rglob("*.py"))
    random.Random(0).shuffle(files)
    for file in files:
        if file.stat().st_size < 200_000:
            yield file.read_text(encoding="utf-8", errors="replace")
