"""Rejection sampling emits plain's distribution, whatever the drafts were drawn from."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.generation import logits_process as hf

import lookahead_hf
from lookahead_hf import SpeculativeConfig, kernels
from lookahead_hf.call.emitter import ColumnStream, Emitter, RequestedOutputs
from lookahead_hf.call.stopping import RowStopping
from lookahead_hf.draft import ROOT, DraftTree, Evidence, Verdict
from lookahead_hf.drafting.drafter import Drafter, Traits
from lookahead_hf.drafting.ensemble import Ensemble, head
from lookahead_hf.drafting.rates import Calibration
from lookahead_hf.drafting.sources.user import UserDrafter
from lookahead_hf.logits.row_processors import RowProcessors
from lookahead_hf.rows import Rows
from lookahead_hf.sources.growth import Drawn
from lookahead_hf.verification import rejection
from lookahead_hf.verification.rejection import rejecting
from lookahead_hf.verification.walk import Rules, Walk
from tests.helpers.compared import speculated
from tests.helpers.models import prompt, tiny

VOCAB, TEXTS, LENGTH = 4, 1500, 3
CRITICAL = 103.4  # Of 63 degrees of freedom; exceeded by one seed in a thousand

_GENERATOR = torch.Generator().manual_seed(1)
TARGET = 1.5 * torch.randn(VOCAB, VOCAB, generator=_GENERATOR)
ASSISTANT = 1.5 * torch.randn(VOCAB, VOCAB, generator=_GENERATOR)
"""Logits by the token before: texts are Markov chains."""

WARPERS = [hf.TemperatureLogitsWarper(0.7), hf.TopKLogitsWarper(3)]


def engine(
    num_rows: int, length: int = 1 + LENGTH, processors: Any = (), eos: int | None = None
) -> Walk:
    criteria = transformers.StoppingCriteriaList([transformers.MaxLengthCriteria(length)])
    if eos is not None:
        criteria.append(transformers.EosTokenCriteria(eos))
    names = "scores", "logits", "hidden_states", "attentions"
    silent = SimpleNamespace(
        return_dict_in_generate=False, **{f"output_{name}": False for name in names}
    )
    processed = RowProcessors(hf.LogitsProcessorList(processors), num_rows)
    emitter = Emitter(
        RowStopping(criteria, num_rows),
        RequestedOutputs(silent, num_rows),
        ColumnStream(None, num_rows, None),
        torch.zeros(num_rows, 1, dtype=torch.long),
    )
    rules = Rules(processed, emitter, True, True)
    return Walk(rules, decide=rejecting(rules), name="rejection")


class MarkovDrafter(Drafter):
    """Draws drafts of one shape from the assistant's chain.

    Args:
        depth: Levels.
        siblings: Tokens per level; the first is drawn and gone on from, the others are certain.
        hides: Whether to keep the probabilities to itself.
    """

    def __init__(self, depth: int, siblings: int, processors: Any = (), hides: bool = False):
        self.depth, self.siblings, self.hides = depth, siblings, hides
        self.drawn = Drawn(VOCAB, processors)

    def propose(self, rows: Rows, max_nodes: int) -> DraftTree:
        last = torch.tensor([rows.last_token(row) for row in range(rows.num_rows)])
        levels, chances = [], []
        every = np.arange(len(last))
        for _ in range(self.depth):
            tokens, _, drawn_from = self.drawn.pick(ASSISTANT[last][None], every * 0, every)
            levels.append((tokens + np.arange(self.siblings)) % VOCAB)
            chances += [drawn_from] * self.siblings  # only those of drawn tokens may count
            last = torch.from_numpy(tokens[:, 0]).long()
        tokens = np.concatenate(levels, 1)  # [rows, nodes]
        stems = [ROOT, *range(0, self.siblings * (self.depth - 1), self.siblings)]
        parents = np.repeat(stems, self.siblings).tolist()
        live = rows.live
        tree = DraftTree.from_rows(
            (row.tolist(), parents) if live[i] else ([], []) for i, row in enumerate(tokens)
        )
        probs = torch.stack(chances, 1)[torch.from_numpy(live)].flatten(0, 1)
        return DraftTree(
            tree.row_offsets, tree.token_ids, tree.parents, tree.depth, tree.score,
            probs=None if self.hides else probs,
        )  # fmt: skip


def logits_of(rows: Rows, tree: DraftTree) -> torch.Tensor:
    """The target's logits behind every last token and node, [rows, 1 + nodes, vocab]."""
    tokens = np.zeros((rows.num_rows, 1 + tree.max_nodes), np.int64)
    for row in range(rows.num_rows):
        drafted = tree.token_ids[tree.row(row)]
        tokens[row, 0] = rows.last_token(row)
        tokens[row, 1 : 1 + len(drafted)] = drafted
    return TARGET[torch.from_numpy(tokens)]


def generate(*drafters: Drafter, processors: Any = (), nodes: int = 64) -> tuple[np.ndarray, float]:
    """Many texts of the target, [texts, LENGTH], and how many tokens a step emitted."""
    rows = Rows(np.zeros((TEXTS, 1), np.int64))
    verifier = engine(TEXTS, processors=processors)
    ensemble = Ensemble(drafters, Calibration(drafters), TEXTS)
    ensemble.begin(rows)
    row_steps = 0
    while rows.live.any():
        tree = head(ensemble.propose(rows, 64), nodes)
        logits = logits_of(rows, tree)
        verdict: Verdict = verifier.verify(rows, tree, logits)
        row_steps += int(verdict.live.sum())
        ensemble.observe(rows, tree, verdict, logits)
    texts = np.stack([rows.emitted(row) for row in range(TEXTS)])
    return texts, TEXTS * LENGTH / row_steps


def expected_counts(processors: Any = ()) -> np.ndarray:
    """How often each text is expected, [VOCAB ** LENGTH]."""
    texts, counts = torch.zeros(1, 1, dtype=torch.long), torch.full((1,), TEXTS).double()
    for _ in range(LENGTH):
        scores = hf.LogitsProcessorList(processors)(texts, TARGET[texts[:, -1]].clone())
        counts = (counts[:, None] * scores.softmax(-1).double()).reshape(-1)
        following = torch.arange(VOCAB).repeat(len(texts))[:, None]
        texts = torch.cat([texts.repeat_interleave(VOCAB, 0), following], 1)
    return counts.numpy()


def chi_square(texts: np.ndarray, expected: np.ndarray) -> float:
    """Pearson's statistic of the texts; texts that cannot occur must not."""
    codes = texts @ (VOCAB ** np.arange(LENGTH)[::-1])
    seen = np.bincount(codes, minlength=VOCAB**LENGTH)
    possible = expected > 0
    assert not seen[~possible].any()
    return float(((seen - expected)[possible] ** 2 / expected[possible]).sum())


@pytest.fixture(params=[False, True], ids=["node by node", "at once"])
def at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether whole trees are asked for, as where Triton runs, though here by the twin."""
    if request.param:
        monkeypatch.setattr(kernels, "backend", lambda _: "triton")
    return bool(request.param)


@pytest.mark.parametrize(
    ("depth", "siblings", "processors", "nodes"),
    [
        pytest.param(3, 1, (), 64, id="chain"),
        pytest.param(3, 1, WARPERS, 2, id="warped chain, cut"),
        pytest.param(2, 3, WARPERS, 64, id="warped tree"),
        pytest.param(2, 2, [hf.RepetitionPenaltyLogitsProcessor(1.5)], 64, id="by prefix"),
        pytest.param(2, 3, (), 64, id="tree"),
        pytest.param(2, 3, (), 3, id="tree, cut"),
    ],
)
def test_texts_are_distributed_as_plain_samples(
    depth: int, siblings: int, processors: Any, nodes: int, at_once: bool
) -> None:
    drafter = MarkovDrafter(depth, siblings, processors)
    texts, tokens_per_step = generate(drafter, processors=processors, nodes=nodes)
    assert chi_square(texts, expected_counts(processors)) < CRITICAL
    assert tokens_per_step > 1.3


def test_drafts_whose_probabilities_are_unknown_count_as_certain() -> None:
    texts, tokens_per_step = generate(MarkovDrafter(2, 2, hides=True))
    assert chi_square(texts, expected_counts()) < CRITICAL
    assert tokens_per_step > 1.3


class Guesses(Drafter):
    """Is certain of what follows: the same two tokens and one more after every token."""

    traits = Traits(prior=0.9)

    def propose(self, rows: Rows, max_nodes: int) -> DraftTree:
        draft = [2, 1, 3], [ROOT, ROOT, 0]
        return DraftTree.from_rows(draft if live else ([], []) for live in rows.live)


@pytest.mark.parametrize("at_once", [True], indirect=True)
@pytest.mark.parametrize(("nodes", "least"), [(2, 1.5), (4, 1.7)])
def test_what_was_drawn_keeps_its_chances(nodes: int, least: float, at_once: bool) -> None:
    texts, tokens_per_step = generate(Guesses(), MarkovDrafter(2, 1), nodes=nodes)
    assert chi_square(texts, expected_counts()) < CRITICAL
    assert tokens_per_step > least  # the drafter alone has 1.57


class Sorting(MarkovDrafter):
    """Says of what it drew which is good and which is not, by its own two buckets."""

    traits = Traits(2, (0.05, 0.9))

    def propose(self, rows: Rows, max_nodes: int) -> DraftTree:
        tree = super().propose(rows, max_nodes)
        each = np.arange(tree.num_nodes + 1)
        return replace(tree, evidence=Evidence(each, each[1:] * 0, tree.token_ids % 2))


OTHERS = [((1, 3), 1, ()), ((2, 2), 2, ()), ((2, 2), 2, [MarkovDrafter(1, 1)])]


@pytest.mark.parametrize(("shape", "nodes", "others"), OTHERS)
def test_neither_buckets_nor_others_that_draw_matter(shape: Any, nodes: int, others: Any) -> None:
    texts, tokens_per_step = generate(UserDrafter(Sorting(*shape), VOCAB), *others, nodes=nodes)
    assert chi_square(texts, expected_counts()) < CRITICAL
    assert tokens_per_step > 1.3


class Picky(MarkovDrafter):
    """Breaks the rule: whether it drafts a token depends on the token."""

    def propose(self, rows: Rows, max_nodes: int) -> DraftTree:
        tree = super().propose(rows, max_nodes)
        kept = tree.token_ids % 2 == 0
        return replace(
            tree,
            row_offsets=np.concatenate([[0], kept.cumsum()])[tree.row_offsets],
            **{name: getattr(tree, name)[kept] for name in ("token_ids", "parents", "depth")},
            probs=tree.probs[torch.from_numpy(kept)],  # type: ignore[index]
        )


@pytest.mark.parametrize("at_once", [True], indirect=True)
def test_the_statistic_finds_tokens_that_were_cut_for_what_they_are(at_once: bool) -> None:
    texts, _ = generate(Picky(1, 1))
    assert chi_square(texts, expected_counts()) > CRITICAL


def test_a_step_emits_the_path_and_stops_in_it() -> None:
    rows = Rows(np.zeros((2, 1), np.int64))
    certain = torch.full((2, 4, VOCAB), -torch.inf)
    for place, token in enumerate((2, 3, 1, 2)):
        certain[:, place, token] = 0.0
    draft = DraftTree.from_rows([([1, 2, 3], [-1, -1, 1]), ([2, 3, 1], [-1, 0, 1])])
    verdict = engine(2, 9, eos=3).verify(rows, draft, certain[:, [0, 3, 1, 2]])
    # Row 0: 2 is accepted as the second child, 3 ends the text. Row 1 is told 2 after its first.
    assert verdict.emitted(0).tolist() == [2, 3] and verdict.accepted(0).tolist() == [1]
    assert verdict.emitted(1).tolist() == [2, 2] and verdict.accepted(1).tolist() == [0]
    assert verdict.finished.tolist() == [True, False] and verdict.live.all()


def test_what_rounding_leaves_empty_is_drawn_from_the_target() -> None:
    probs = torch.tensor([0.0, 1.0, 0.0])
    token = rejection.choose(probs, np.zeros(1, np.int64), torch.tensor([[1e-9, 1.0, 0.0]]))
    assert token == (None, 1)


def test_what_is_no_distribution_is_refused_as_plain_does(at_once: bool) -> None:
    rows = Rows(np.zeros((1, 1), np.int64))
    draft = DraftTree.from_rows([([1], [-1])])
    logits = torch.zeros(1, 2, VOCAB)
    logits[0, 0, 2] = torch.nan
    with pytest.raises(RuntimeError, match="probability tensor contains"):
        engine(1).verify(rows, draft, logits)


def chances_of(model: Any, ids: torch.Tensor, warper: Any, length: int) -> dict[Any, float]:
    """Probability of every continuation of `length` tokens."""
    if not length:
        return {(): 1.0}
    with torch.no_grad():
        probs = warper(None, model(input_ids=ids).logits[:, -1]).softmax(-1)[0]
    found = {}
    for token in probs.nonzero().flatten().tolist():
        longer = torch.cat([ids, torch.tensor([[token]])], 1)
        for rest, chance in chances_of(model, longer, warper, length - 1).items():
            found[(token, *rest)] = float(probs[token]) * chance
    return found


@pytest.mark.parametrize("beside", [(), ("ngram", "recycling")], ids=["alone", "beside others"])
def test_generate_with_an_assistant_samples_as_plain_does(beside: tuple[str, ...]) -> None:
    model, assistant, ids, texts = tiny("llama"), tiny("llama", scale=4.0), prompt(), 700
    warper = hf.LogitsProcessorList([hf.TemperatureLogitsWarper(3.0), hf.TopKLogitsWarper(3)])
    expected = {text: texts * p for text, p in chances_of(model, ids, warper, 3).items()}
    config = SpeculativeConfig(
        drafters=(*beside, "assistant"), verification="rejection", budget=16,
        options={"assistant": {"min_reach": 0.0, "num_draft": 2}},
    )  # fmt: skip
    call = {"do_sample": True, "temperature": 3.0, "top_k": 3, "max_new_tokens": 3}
    call |= {"num_return_sequences": texts, "pad_token_id": 0, "assistant_model": assistant}
    outputs = []
    for _ in range(2):
        torch.manual_seed(5)
        with lookahead_hf.enabled(model):
            outputs.append(model.generate(ids, **call, speculative=config)[:, ids.shape[1] :])
    assert torch.equal(*outputs)
    stats = speculated(model)
    assert stats.engine == "rejection" and stats.num_accepted > 0.3 * texts
    seen = Counter(map(tuple, outputs[0].tolist()))
    assert set(seen) <= set(expected)
    statistic = sum((seen[text] - count) ** 2 / count for text, count in expected.items())
    assert len(expected) == 27 and statistic < 54.1  # one seed in a thousand
