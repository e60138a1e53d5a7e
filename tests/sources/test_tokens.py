"""A text goes to another vocabulary and a draft comes back, wherever the two cut their tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors, trainers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from lookahead_hf.sources import tokens
from lookahead_hf.sources.tokens import BROKEN, Bridge, differ

TEXT = (
    "A drafter proposes, the target verifies, the cache rolls back, the streamer speaks. "
    "Where the drafter and the target cut a sentence into different tokens, the draft goes "
    "through text: äöü, naïve, 東京 and 🙂 take several bytes each, and    spaces\n\n  vary. "
)
OTHER = "Tokens of another kind: the sentence is cut at the draft's own places, spaces kept apart. "


def byte_level(corpus: str, size: int) -> PreTrainedTokenizerFast:
    """Bytes and their merges, as in GPT-2 and Llama 3."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, show_progress=False, special_tokens=["<end>"]
    )
    tokenizer.train_from_iterator([corpus], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def sentence_piece(corpus: str, size: int) -> PreTrainedTokenizerFast:
    """Words that carry their space in front, as in Llama 2, with a token that begins a text."""
    tokenizer = Tokenizer(BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<unk>", "<s>"], show_progress=False
    )
    tokenizer.train_from_iterator([corpus], trainer)
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="<unk>"
    )


KINDS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "bytes": lambda: byte_level(TEXT, 300),
    "longer": lambda: byte_level(OTHER + TEXT, 420),
    "words": lambda: sentence_piece(TEXT + OTHER, 220),
}
PAIRS = [(a, b) for a in KINDS for b in KINDS if a != b]


def decoded(tokenizer: Any, ids: Any) -> str:
    return tokenizer.decode(ids, clean_up_tokenization_spaces=False, skip_special_tokens=True)


def stepwise(ids: np.ndarray, seed: int = 0) -> list[int]:
    """Lengths of a text that gains 1 to 4 tokens at a time."""
    return np.cumsum(np.random.default_rng(seed).integers(1, 5, len(ids) // 3)).tolist()


@pytest.mark.parametrize(("target", "assistant"), PAIRS)
def test_the_assistant_reads_the_targets_text(target: str, assistant: str) -> None:
    theirs, ours = KINDS[target](), KINDS[assistant]()
    ids = np.array(theirs.encode(TEXT * 2, add_special_tokens=False))
    bridge, most_open = Bridge(theirs, ours), 0
    for length in stepwise(ids):
        before = list(bridge.ids)
        unchanged = bridge.extend(ids[:length])
        assert bridge.ids[:unchanged] == before[:unchanged]
        assert unchanged <= len(before) and bridge.num_settled <= len(bridge.ids)
        text = decoded(theirs, ids[:length].tolist())
        read = decoded(ours, bridge.ids)
        assert text.endswith(BROKEN) or read.strip() == text.strip()
        most_open = max(most_open, len(bridge.ids) - bridge.num_settled)
    assert most_open <= tokens.KEPT  # however long the text grows


@pytest.mark.parametrize(("target", "assistant"), PAIRS)
def test_a_right_draft_comes_back_as_the_targets_tokens(target: str, assistant: str) -> None:
    theirs, ours = KINDS[target](), KINDS[assistant]()
    ids = np.array(theirs.encode(TEXT * 4, add_special_tokens=False))
    whole = decoded(theirs, ids.tolist())
    bridge = Bridge(theirs, ours)
    num_right = num_translated = 0
    for length in stepwise(ids)[:-8]:
        bridge.extend(ids[:length])
        known = decoded(ours, bridge.ids).lstrip()
        before = whole.lstrip()[max(0, len(known) - 30) : len(known)]
        ahead = whole.lstrip()[len(known) : len(known) + 60]
        head = ours.encode(before, add_special_tokens=False)
        draft = ours.encode(before + ahead, add_special_tokens=False)
        if draft[: len(head)] != head:
            continue  # the assistant's own tokens do not end where the text does
        translated = bridge.translate(draft[len(head) : len(head) + 16], ids[:length])
        same = translated == ids[length : length + len(translated)]
        num_right += len(translated) if np.all(same) else int(np.argmin(same))
        num_translated += len(translated)
    assert num_translated > 100
    # The last token of a draft may be cut short: what follows would have joined it.
    assert num_right > 0.7 * num_translated


def test_a_draft_that_ends_inside_a_character_stops_before_it() -> None:
    theirs, ours = KINDS["bytes"](), byte_level("x", 257)
    context = np.array(theirs.encode("to ", add_special_tokens=False))
    bridge = Bridge(theirs, ours)
    bridge.extend(context)
    draft = ours.encode("go 京", add_special_tokens=False)
    assert len(draft) == 6
    translated = bridge.translate(draft[:-1], context)
    assert decoded(theirs, translated) == "go "
    assert bridge.translate(draft[-3:-1], context) == []


def test_a_character_is_read_when_it_is_whole_or_stays_broken() -> None:
    theirs, ours = byte_level("x", 257), KINDS["longer"]()
    ids = theirs.encode("a 京", add_special_tokens=False)
    bridge = Bridge(theirs, ours)
    for length, text in ((2, "a "), (3, "a "), (4, "a "), (5, "a 京")):
        bridge.extend(np.array(ids[:length]))
        assert decoded(ours, bridge.ids) == text
    broken = ids + ids[2:3] * (tokens.HELD_BACK + 1)
    bridge.extend(np.array(broken[:-1]))
    assert decoded(ours, bridge.ids) == "a 京"
    bridge.extend(np.array(broken))
    assert decoded(ours, bridge.ids).startswith("a 京" + BROKEN)


def test_a_target_that_cuts_a_word_where_its_tokenizer_would_not() -> None:
    theirs, ours = KINDS["longer"](), KINDS["bytes"]()
    (whole,) = theirs.encode(" the", add_special_tokens=False)
    pieces = [theirs.convert_tokens_to_ids(piece) for piece in ("Ġ", "t", "h")]
    bridge = Bridge(theirs, ours)
    bridge.extend(np.array(pieces))
    draft = ours.encode("e draft", add_special_tokens=False)
    translated = bridge.translate(draft, np.array(pieces))
    assert decoded(theirs, translated) == "e draft"
    assert whole not in translated


def test_special_tokens_are_not_text() -> None:
    theirs, ours = KINDS["bytes"](), KINDS["words"]()
    words = theirs.encode("the draft", add_special_tokens=False)
    context = np.array([theirs.eos_token_id, *words, theirs.eos_token_id])
    bridge = Bridge(theirs, ours)
    bridge.extend(context)
    assert bridge.ids[0] == ours.bos_token_id
    assert decoded(ours, bridge.ids) == "the draft"
    silent = Bridge(theirs, KINDS["longer"]())
    assert silent.extend(context[:1]) == 0 and silent.ids == []


def test_tokenizers_differ_where_their_vocabularies_do() -> None:
    ours = KINDS["bytes"]()
    assert not differ(None, None) and not differ(ours, None) and not differ(ours, ours)
    assert not differ(ours, KINDS["bytes"]())
    assert differ(ours, KINDS["longer"]())
    with pytest.raises(ValueError, match="needs tokenizer="):
        differ(None, ours)
