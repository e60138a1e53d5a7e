"""What a grammar prunes and grows, by hand."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from lookahead_hf import structured
from lookahead_hf.draft import DraftTree
from lookahead_hf.drafting.drafter import Drafter
from lookahead_hf.drafting.ensemble import Ensemble
from lookahead_hf.drafting.rates import Calibration
from lookahead_hf.logits import constraints
from lookahead_hf.logits.grammars import XGrammar
from lookahead_hf.rows import Rows
from lookahead_hf.sources import grammar as probe
from lookahead_hf.sources.grammar import GrammarDrafter, Growth, Probe, Vocabulary, Whitespace
from tests.helpers import grammars
from tests.helpers.grammars import END, LEVEL, NUMBER, SCHEMAS, schema, text


def ids(words: str) -> list[int]:
    return list(grammars.tokenizer().encode(words, add_special_tokens=False))


def shadow(own: dict[str, Any], is_strict: bool = True) -> XGrammar:
    return XGrammar(grammars.compiled(json.dumps(own), is_strict))


class Scripted(Drafter):
    """Proposes given continuations, however many are asked for."""

    def __init__(self, *words: str) -> None:
        self.words = words

    def propose(self, rows: Rows, max_nodes: int) -> DraftTree:
        return DraftTree.from_chains([[ids(each) for each in self.words]] * rows.num_rows)


def drafted(
    written: str, own: dict[str, Any], *words: str, max_nodes: int = 16, is_strict: bool = True
) -> set[str]:
    """The texts of all paths that are drafted after a text, beside others' continuations."""
    sources = [Scripted(*words), GrammarDrafter(lambda row: shadow(own, is_strict), {})]
    ensemble = Ensemble(sources, Calibration(sources), 1)
    rows = Rows(np.full((1, 2), 5))
    for token in ids(written):
        rows.emit(0, token)
    ensemble.begin(rows)
    tree = ensemble.propose(rows, max_nodes)
    assert tree.num_nodes <= max_nodes and tree.evidence is not None
    assert (np.diff(tree.score) <= 1e-6).all()
    paths: list[list[int]] = []
    for token, parent in zip(tree.token_ids.tolist(), tree.parents.tolist(), strict=True):
        paths.append([*(paths[parent] if parent >= 0 else []), token])
    return {grammars.tokenizer().decode(path) for path in paths}


ODD = schema(**{"größe": NUMBER, 'a"b': NUMBER})
FREE = {"type": "string"}

# What is written, its schema, what others propose; paths of the draft, beginnings of none.
CASES: dict[str, tuple[str, Any, list[str], set[str], str]] = {
    "a forbidden node goes with all below": (
        '{"level": "', schema(level=LEVEL), ['debug"', "country", "info"],
        {'debug"}', 'info"}'}, "c",
    ),
    "a refused node does not hide its sibling": (
        '{"level": ', schema(level=LEVEL), ["12", '"info"'], {'"info"}'}, "1",
    ),
    "what is forced grows below a guess": (
        '{"name": "', schema(name=text(9), country=text(9)), ["Ada"], {'Ada", "country": "'}, "0",
    ),
    "values that begin alike": (
        '{"level": "', schema(level=LEVEL), [], {'debug"}', 'default"}', 'info"}'}, "x",
    ),
    "a number ends with its object": ('{"size": 12', schema(size=NUMBER), [], {"}"}, ","),
    "a number ends before the next": (
        '{"a": 12', schema(a=NUMBER, b=NUMBER), [], {', "b":'}, "}",
    ),
    "a key beyond ASCII": ("{", ODD, [], {'"größe":'}, "a"),
    "a key with a quote": ('{"größe": 1', ODD, [","], {', "a\\"b":'}, "}"),
    "an escaped quote": ('{"name": "say \\"no\\', schema(name=FREE), ['""}'], {'""}'}, '"}'),
}  # fmt: skip


@pytest.mark.parametrize(("written", "own", "words", "paths", "none"), CASES.values(), ids=CASES)
def test_what_is_drafted(
    written: str, own: Any, words: list[str], paths: set[str], none: str
) -> None:
    found = drafted(written, own, *words)
    assert paths <= found
    assert not any(each.startswith(none) for each in found)


def test_a_used_up_text_drafts_its_end_token() -> None:
    own = schema(level=LEVEL)
    sources = [GrammarDrafter(lambda row: shadow(own), {})]
    ensemble = Ensemble(sources, Calibration(sources), 1)
    rows = Rows(np.full((1, 2), 5))
    for token in ids('{"level": "info"}'):
        rows.emit(0, token)
    ensemble.begin(rows)
    assert ensemble.propose(rows, 8).token_ids.tolist() == [END]
    rows.emit(0, END)
    assert ensemble.propose(rows, 8).num_nodes == 0


@pytest.mark.parametrize(
    ("written", "follows"),
    [
        ('{"name":"a","level":', '"'),
        ('{"name": "a", "level":', ' "'),
        ('{\n  "name": "a",', '\n  "level": "'),
        ('{\n\t"name"  :  "a",', '\n\t"level":'),
    ],
)
def test_the_usual_whitespace_of_the_text(written: str, follows: str) -> None:
    assert follows in drafted(written, schema(name=text(9), level=LEVEL), is_strict=False)


def test_whitespace_depends_on_the_depth_and_may_change() -> None:
    usual = Whitespace()
    usual.learn(b'{"a": [1,\n  2], "b":1,"c":"x, y:z"')
    assert usual.before(ord('"'), b",") == b""
    assert usual.before(ord("1"), b"[1,") == b"\n  "
    assert usual.before(ord("1"), b'"d":') == b""
    usual.learn(b', "d": "')
    assert usual.before(ord("1"), b'x":') == b" "
    pretty = Whitespace()
    pretty.learn(b'{\n  "a": {\n    "b": 1\n  },\n  "c": {\n    "d": 2')
    assert pretty.before(ord("}"), b"") == b"\n  "
    assert pretty.before(ord('"'), b",") == b"\n    "
    assert pretty.before(ord('"'), b"},") == b"\n  "


def test_texts_have_their_usual_tokens() -> None:
    tokenizer = grammars.tokenizer()
    texts = shadow(SCHEMAS[0]).texts()
    vocabulary = Vocabulary(texts)
    for words in ('{"name": "Ada', '{\n  "level": "info",\n  "country"', 'is_open": true, "x'):
        assert vocabulary.encode(words.encode()) == tokenizer.encode(words)
    assert vocabulary.encode(b"") == []


def shadow_of(library: str, own: dict[str, Any]) -> Any:
    """The grammar of a schema as another library has it."""
    given = constraints.recognise(grammars.processor(library, [own]), 1)
    assert given is not None
    return given.shadow(0)


RECORDED = (
    '{"name": "Ada Lovelace", "country": "Great Britain", "level": "debug", "is_open": true}',
    '{"name": "Wangari", "country": "Kenya", "level": "default", "is_open": false}',
    '{"name": "nobody", "country": "", "level": "info", "is_open": false}',
)
RECORD = schema(name=FREE, country=FREE, level=LEVEL, is_open={"type": "boolean"})


@pytest.mark.parametrize(
    ("library", "most"),
    [
        ("xgrammar strict", 21),
        ("xgrammar default", 21),
        ("llguidance strict", 18),
        ("llguidance default", 21),
    ],
)
def test_steps_of_recorded_texts(library: str, most: int) -> None:
    """The grammar alone drafts 16 nodes in each step."""
    tokens = steps = 0
    for written in RECORDED:
        if library == "llguidance strict":  # which puts no space behind a comma or colon
            written = json.dumps(json.loads(written), separators=(",", ":"))
        sources = [GrammarDrafter(lambda row: shadow_of(library, RECORD), {})]
        ensemble = Ensemble(sources, Calibration(sources), 1)
        left = [*ids(written), END]
        rows = Rows(np.full((1, 2), 5))
        rows.emit(0, left.pop(0))
        ensemble.begin(rows)
        tokens += len(left)
        while left:
            tree, node = ensemble.propose(rows, 16), -1
            while len(left) > 1 and (node := tree.child_of(0, node, left[0])) is not None:
                rows.emit(0, left.pop(0))
            rows.emit(0, left.pop(0))
            steps += 1
    assert tokens >= 80 and steps <= most


def sentencepiece_like() -> Any:
    """A tokenizer that puts a mark for spaces before a text, and loses what it normalises."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += [*map(chr, range(33, 127)), "▁", '▁"', '":', "le", "ve", "leve", "level", "in", "fo"]
    merges = [("▁", '"'), ('"', ":"), ("l", "e"), ("v", "e"), ("le", "ve"), ("leve", "l")]
    merges += [("i", "n"), ("f", "o")]
    vocabulary = {word: number for number, word in enumerate(words)}
    own = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    steps = [normalizers.NFKC(), normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    own.normalizer = normalizers.Sequence(steps)
    own.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()])
    return PreTrainedTokenizerFast(tokenizer_object=own, unk_token="<unk>", eos_token="</s>")


def test_a_tokenizer_that_normalises() -> None:
    tokenizer = sentencepiece_like()
    own = schema(**{"level": {"enum": ["info", "ﬁne"]}})
    processor = structured.json_schema(own, tokenizer)
    grammar = XGrammar(processor.compiled_grammars[0])
    vocabulary = Vocabulary(grammar.texts())
    nodes: list[int] = []

    def add(parent: int, token: int, bucket: int) -> int:
        nodes.append(token)
        return len(nodes) - 1

    Growth(Probe(grammar), Whitespace(), vocabulary, add).below(-1, b"")
    drafted = b"".join(vocabulary.texts[token] for token in nodes)
    assert drafted.startswith(b'{"level": "')
    assert {"level", '":'} <= set(tokenizer.convert_ids_to_tokens(nodes))
    for written in ('{"level": "ﬁne"}', '{"level": "info"}'):  # NFKC would make "fine" of it
        state = XGrammar(processor.compiled_grammars[0])
        encoded = vocabulary.encode(written.encode())
        assert b"".join(vocabulary.texts[token] for token in encoded) == written.encode()
        assert all(map(state.advance, encoded)) and state.advance(2) and state.ended()


@pytest.mark.parametrize("library", ["xgrammar strict", *grammars.LIBRARIES[3:]])
def test_a_long_forced_text_is_grown_in_parts(
    monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    own = {"type": "string", "pattern": "^((a{50}){50})$"}
    monkeypatch.setitem(globals(), "shadow", lambda own, is_strict: shadow_of(library, own))
    sizes: list[int] = []
    run = probe.Refinement.run

    def counted(self: Any, *given: Any) -> None:
        run(self, *given)
        sizes.append(len(self.tokens))

    monkeypatch.setattr(probe.Refinement, "run", counted)
    assert any(len(each) > 8 for each in drafted('"', own))
    assert 8 < sizes[-1] < 10 * probe.MOST_BYTES < 50 * 50


def test_a_grammar_that_takes_too_long_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "MOST_SECONDS", -1)
    with pytest.warns(RuntimeWarning, match="'grammar' failed.*more than -1 s per step"):
        assert drafted('{"level": "', schema(level=LEVEL), "info") == {"info"}
