"""The drafters' benchmark: its recording, its replay, and the peers' published behaviour."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from lookahead_hf.draft import DraftTree

TOP = 64


def module(name: str) -> ModuleType:
    return importlib.import_module(name)


def text_of(tokens: list[int], num_prompt: int, tops: dict[int, list[int]] | None = None) -> Any:
    """A text whose next token is the target's likeliest one, except where `tops` lists others."""
    ids = np.full((len(tokens) - 1, TOP), 900, np.int32) + np.arange(TOP, dtype=np.int32)
    ids[:, 0] = tokens[1:]
    for place, best in (tops or {}).items():
        ids[place, : len(best)] = best
    probs = np.full(ids.shape, 0.01, np.float32)
    prompt, output = np.array(tokens[:num_prompt]), np.array(tokens[num_prompt:])
    return module("replay").Text("made up", 0, prompt, output, ids, probs)


def begun(contender: Any, text: Any) -> Any:
    """Begin a text with its prompt and the first token of its output; return the contender."""
    length = len(text.prompt) + 1
    contender.begin(text.tokens[:length], module("replay").seen(text, 0, length - 1))
    return contender


def paths_of(tree: DraftTree) -> set[tuple[int, ...]]:
    """All paths from the root to a leaf."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.token_ids.tolist(), tree.parents.tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return {path for node, path in enumerate(paths) if node not in set(tree.parents.tolist())}


def test_what_is_recorded_is_what_generate_writes(folder: str, tmp_path: Path) -> None:
    model, tokenizer = module("common").load(folder, "float32", "cpu")
    (text,) = [
        text
        for text in module("record").recorded(lambda: (model, tokenizer), slice(0, 1), 12, tmp_path)
        if text.family == "qa"
    ]
    prompt = torch.from_numpy(text.prompt)[None]
    plain = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False
    )
    assert plain[0].tolist() == text.tokens.tolist()
    probs = model(plain[:, :-1]).logits[0].softmax(-1)
    held = torch.from_numpy(text.top_probs)
    torch.testing.assert_close(held, probs.gather(1, torch.from_numpy(text.top_ids).long()))
    torch.testing.assert_close(held[:, 0], probs.amax(1))


def test_tokens_per_step_count_accepted_and_bonus_tokens() -> None:
    replay = module("replay")

    class Knows(replay.Contender):  # type: ignore[misc, name-defined]
        """Always drafts the next two tokens and a wrong one."""

        name, settings = "knows", ""

        def __init__(self, right: bool) -> None:
            self.right = right

        def begin(self, tokens: np.ndarray, prompt: Any) -> None:
            self.last = int(tokens[-1])
            assert prompt.last.tolist() == [1, 2]

        def propose(self) -> DraftTree:
            chain = [self.last + 1, self.last + 2] if self.right else [self.last + 2]
            return DraftTree.from_chains([[[0], chain]])

        def observe(self, draft: DraftTree, path: list[int], emitted: Any, seen: Any) -> None:
            # After the last token and every accepted one the target named the next.
            assert seen.top_ids[:, 0].tolist() == emitted.tolist()
            assert seen.last.tolist() == [self.last, *emitted.tolist()[:-1]]
            self.last = int(emitted[-1])

    text = text_of(list(range(1, 12)), 2)
    (right,) = replay.replay([text], Knows(True))
    # The prefill emits 3; the steps emit 4 5 6, then 7 8 9, then 10 and the bonus token 11.
    assert (right.emitted, right.steps, right.drafted) == (8, 3, 9)
    (wrong,) = replay.replay([text], Knows(False))
    assert (wrong.emitted, wrong.steps) == (8, 8)


def test_on_the_model_rejected_nodes_are_seen_as_in_a_text_of_their_own(
    folder: str, tmp_path: Path
) -> None:
    replay = module("replay")
    model, tokenizer = module("common").load(folder, "float32", "cpu")
    texts = module("record").recorded(lambda: (model, tokenizer), slice(0, 1), 12, tmp_path)
    text = texts[0]
    tokens, length = text.tokens, len(text.prompt) + 2
    right = tokens[length : length + 2].tolist()
    wrong = [int(token) for token in text.top_ids[length - 1, 5:8]]
    draft = DraftTree.from_chains([[wrong[:2], right, [right[0], wrong[2]]]])
    path = replay.accepted_path(draft, tokens[length:-1])
    assert draft.token_ids[path].tolist() == right
    target = module("on_model").OnModel(model)
    target.begin(text)
    seen = target.seen(text, length, draft, path)
    assert seen.last.tolist() == [*wrong, tokens[length - 1], *right]
    assert seen.before[:3].tolist() == [tokens[length - 1], wrong[0], right[0]]
    chains = [[wrong[0]], wrong[:2], [right[0], wrong[2]], [], right[:1], right]
    for place, chain in enumerate(chains):
        ids = torch.tensor([[*tokens[:length].tolist(), *chain]])
        probs = model(ids).logits[0, -1].softmax(-1)
        torch.testing.assert_close(
            torch.from_numpy(seen.top_probs[place]),
            probs[torch.from_numpy(seen.top_ids[place]).long()],
        )


def test_prompt_lookup_copies_after_the_first_longest_match() -> None:
    text = text_of([1, 2, 7, 8, 3, 2, 5, 1, 2, 9], 8)
    drafted = begun(module("peers").PromptLookup(num_tokens=3), text).propose()
    assert paths_of(drafted) == {(7, 8, 3)}


def test_token_recycling_follows_the_newest_best_tokens() -> None:
    text = text_of([1, 2, 3, 4, 3], 2, {2: [4, 50, 51], 3: [3, 60]})
    contender = begun(module("peers").TokenRecycling(), text)
    assert contender.propose().num_nodes == 0  # the prompt is not recycled
    contender.observe(DraftTree.empty(1), [], np.array([4, 3]), module("replay").seen(text, 2, 4))
    tree = contender.propose()
    assert tree.token_ids[:3].tolist() == [4, 50, 51]
    assert {(4, 3, 4, 3, 4, 3), (4, 60)} <= paths_of(tree)


def test_sam_decoding_copies_from_five_tokens_on() -> None:
    peers = module("peers")
    story = [*range(10, 60)]
    copied = begun(peers.SamDecoding(), text_of([*story, 1, *story[:5], 0], 55)).propose()
    assert paths_of(copied) == {tuple(range(15, 54))}
    too_short = begun(peers.SamDecoding(), text_of([*story, 1, *story[:4], 0], 54)).propose()
    assert too_short.max_nodes > len(paths_of(too_short)) > 1  # the tree of recycled logits


def test_racer_halves_the_breadth_of_its_tree_of_logits() -> None:
    peers = module("peers")
    # The best tokens after x are 8 x + 1, 8 x + 2, ..., so a path says the rank of each token.
    tops = {place: [8 * place + rank for rank in range(1, 9)] for place in range(10)}
    contender = begun(peers.Racer(capacity=22), text_of([*range(10), 0, 0], 10, tops))
    paths = paths_of(contender.propose())
    firsts = [sum(path[0] == first for path in paths) for first in range(1, 9)]
    assert firsts == [8, 4, 1, 1, 1, 1, 1, 1]  # 8, 4, 2, 1, ... until 21 nodes are used
    assert (1, 16) in paths and (2, 20) in paths and (3, 25) in paths


def test_racer_prefers_frequent_continuations_and_forgets_old_ones() -> None:
    peers = module("peers")
    tokens = [1, 2, 3, 8, 1, 2, 4, 9, 1, 2, 4, 7, 6, 5, 1, 2, 0]
    text = text_of(tokens, 15)
    drafted = begun(peers.Racer(capacity=4, ngram_size=4), text).propose()
    assert paths_of(drafted) == {(4,), (3, 8)}  # two of three, one of three, one of one
    # The four prefixes of the newest n-gram are all that is left, so the logits fill the room.
    drafted = begun(peers.Racer(capacity=4, ngram_size=4, trie=4), text).propose()
    assert paths_of(drafted) == {(4,), (901,), (902,)}


def test_suffix_decoding_weighs_continuations_by_frequency() -> None:
    peers = module("peers")
    tokens = [1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 4, 9, 5, 1, 2, 0]
    text = text_of(tokens, 14)
    chain = begun(peers.SuffixDecoding(), text).propose()
    assert paths_of(chain) == {(3, 9)}  # two of four, then one of two
    tree = begun(peers.SuffixDecoding(tree=True, factor=4.0, depth=64), text).propose()
    assert tree.num_nodes == 8  # four times the match
    assert {path[:2] for path in paths_of(tree)} == {(3, 9), (3, 8), (4, 9)}
