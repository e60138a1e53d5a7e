"""Random calls of `generate`, as plain data that prints readably, and what they are made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from hypothesis import strategies as st
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from tests.models import VOCAB, characters, tiny

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 2},
    "mistral": {"num_hidden_layers": 2},
    "gpt2": {"n_layer": 2},
    "gemma3": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
}


@cache
def smallest(name: str) -> Any:
    """A model of two layers, in double precision.

    There a block and single tokens differ by so little that nothing is left of it in the float32
    scores that tokens are chosen by: what differs in a random call is never a near tie.
    """
    model = tiny(name, **MODELS[name]).double()
    model.generation_config.pad_token_id = None
    return model


@dataclass(frozen=True)
class RandomCall:
    """One call, or two turns on one cache.

    Attributes:
        model: One of `MODELS`.
        prompt: Token ids, rows of one length.
        mask: The attention mask, None for none.
        max_new_tokens: As in `generate`.
        settings: Further arguments of `generate`.
        own: Names of `PROCESSORS`, the caller's own.
        stop: The name of one of `CRITERIA` and its tokens, the caller's own.
        stop_strings: One-character tokens make these.
        embeds: Whether the prompt is given as embeddings.
        turns: On a cache of the caller's, one or two; 0 where the caller brings none.
        seed: Of the sampling.
        drafts: Seed of the draft trees.
        budget: Most draft tokens per row and step.
        draft_invariant: Whether all blocks have one shape.
    """

    model: str
    prompt: list[list[int]]
    mask: list[list[int]] | None
    max_new_tokens: int
    settings: dict[str, Any]
    own: list[str] = field(default_factory=list)
    stop: tuple[str, list[int]] | None = None
    stop_strings: list[str] | None = None
    embeds: bool = False
    turns: int = 0
    seed: int = 0
    drafts: int = 0
    budget: int = 8
    draft_invariant: bool = False

    def arguments(self, ids: torch.Tensor) -> dict[str, Any]:
        """What `generate` gets for a prompt, [rows, columns]; nothing in it is used twice."""
        given: dict[str, Any] = {**self.settings, "max_new_tokens": self.max_new_tokens}
        if self.embeds:
            given["inputs_embeds"] = smallest(self.model).get_input_embeddings()(ids).detach()
        else:
            given["input_ids"] = ids
        if self.mask is not None:
            mask = torch.tensor(self.mask)
            given["attention_mask"] = torch.cat(
                [mask, mask.new_ones(len(mask), ids.shape[1] - mask.shape[1])], 1
            )
        if given.pop("prefix_allowed_tokens", False):
            given["prefix_allowed_tokens_fn"] = allowed_tokens
        if self.own:
            made = [PROCESSORS[name]() for name in self.own]
            given["logits_processor"] = LogitsProcessorList(made)
        if self.stop is not None:
            kind, tokens = self.stop
            given["stopping_criteria"] = StoppingCriteriaList([CRITERIA[kind](tokens)])
        if self.stop_strings is not None:
            given |= {"stop_strings": self.stop_strings, "tokenizer": tokenizer()}
        return given

    def new_cache(self) -> DynamicCache | None:
        """The cache of a caller who brings one."""
        return DynamicCache(config=smallest(self.model).config) if self.turns else None


@cache
def tokenizer() -> Any:
    return characters()


def allowed_tokens(row: int, ids: torch.Tensor) -> list[int]:
    """Tokens that may follow, by row and prefix."""
    return [token for token in range(VOCAB) if (token + int(ids.sum()) + row) % 3]


class Leans(LogitsProcessor):
    """Prefers tokens by the row's whole prefix."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        liked = (input_ids.sum(1, keepdim=True) + torch.arange(scores.shape[1])) % 4 == 0
        return scores + 2.0 * liked


class Counts(LogitsProcessor):
    """Acts on every third call only: it must be called once per token, in order."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return scores if self.calls % 3 else scores.roll(1, 1)


class Mixes(LogitsProcessor):
    """Lets the rows of a batch look at each other."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + 0.3 * scores.flip(0)


class Draws(LogitsProcessor):
    """Draws from the default generator itself."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + 3.0 * torch.rand(scores.shape)


PROCESSORS: dict[str, type[LogitsProcessor]] = {
    "leans": Leans,
    "counts": Counts,
    "mixes": Mixes,
    "draws": Draws,
}


class Criterion(StoppingCriteria):
    """Ends texts at some tokens."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = torch.tensor(tokens)

    def ended(self, input_ids: torch.Tensor) -> torch.Tensor:
        return torch.isin(input_ids[:, -1], self.tokens)


class EndsRow(Criterion):
    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return self.ended(input_ids)


class EndsAll(Criterion):
    """Ends all rows with the first that ends."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        ended = self.ended(input_ids)
        return ended.any().expand(len(ended))


class AnswersBool(Criterion):
    """Answers for all rows at once, by a Python bool."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> bool:
        return bool(self.ended(input_ids).any())


CRITERIA: dict[str, type[Criterion]] = {
    "row": EndsRow,
    "all": EndsAll,
    "bool": AnswersBool,
}

_token = st.integers(3, VOCAB - 1)
_tokens = st.lists(_token, min_size=1, max_size=8, unique=True)
_words = st.lists(st.lists(_token, min_size=1, max_size=2), min_size=1, max_size=4)

_BOTH_WAYS: dict[str, st.SearchStrategy[Any]] = {
    "repetition_penalty": st.sampled_from([0.6, 1.1, 1.8]),
    "encoder_repetition_penalty": st.sampled_from([0.7, 1.4]),
    "no_repeat_ngram_size": st.integers(1, 3),
    "encoder_no_repeat_ngram_size": st.integers(1, 3),
    "bad_words_ids": _words,
    "sequence_bias": _words.map(lambda words: [[word, 3.0 - 2 * len(word)] for word in words]),
    "suppress_tokens": _tokens,
    "begin_suppress_tokens": _tokens,
    "forced_bos_token_id": _token,
    "forced_eos_token_id": st.one_of(_token, _tokens),
    "min_length": st.integers(1, 30),
    "min_new_tokens": st.integers(1, 20),
    "exponential_decay_length_penalty": st.tuples(st.integers(0, 8), st.sampled_from([1.1, 2.0])),
    "guidance_scale": st.just(1.5),
    "remove_invalid_values": st.just(True),
    "renormalize_logits": st.just(True),
    "prefix_allowed_tokens": st.just(True),
    "watermarking_config": st.just({"bias": 3.0, "seeding_scheme": "selfhash"}),
}
_SAMPLED: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.sampled_from([0.3, 0.7, 1.5]),
    "top_k": st.integers(1, 20),
    "top_p": st.sampled_from([0.2, 0.6, 0.95]),
    "min_p": st.sampled_from([0.02, 0.2]),
    "top_h": st.sampled_from([0.3, 0.8]),
    "typical_p": st.sampled_from([0.2, 0.7]),
    "epsilon_cutoff": st.sampled_from([0.001, 0.05]),
    "eta_cutoff": st.sampled_from([0.001, 0.05]),
}
_OUTPUT = ("output_scores", "output_logits", "output_hidden_states")


@st.composite
def calls(draw: st.DrawFn) -> RandomCall:
    """Any call that is served."""
    rows, length = draw(st.integers(1, 4)), draw(st.integers(1, 14))
    turns = draw(st.sampled_from([0, 0, 0, 1, 2]))
    prompt = [draw(_text(length)) for _ in range(rows)]
    own = draw(st.lists(st.sampled_from(sorted(PROCESSORS)), max_size=2, unique=True))
    stops = st.tuples(st.sampled_from(sorted(CRITERIA)), _tokens)
    strings = st.lists(st.text([chr(33 + t) for t in range(3, 20)], min_size=1, max_size=2))
    settings = draw(_settings(rows if turns == 0 else 4))
    return RandomCall(
        model=draw(st.sampled_from(sorted(MODELS))),
        prompt=prompt,
        mask=draw(_mask(rows, length)),
        max_new_tokens=draw(st.one_of(st.integers(1, 8), st.integers(1, 24))),
        settings=settings,
        own=own if draw(st.integers(0, 3)) == 0 else [],
        stop=draw(stops) if draw(st.integers(0, 4)) == 0 else None,
        stop_strings=draw(strings) or None if draw(st.integers(0, 7)) == 0 else None,
        embeds=turns == 0 and draw(st.integers(0, 9)) == 0,
        turns=turns,
        seed=draw(st.integers(0, 999)),
        drafts=draw(st.integers(0, 999)),
        budget=draw(st.sampled_from([8, 64])),
        draft_invariant=draw(st.integers(0, 5)) == 0,
    )


@st.composite
def _text(draw: st.DrawFn, length: int) -> list[int]:
    """A text that repeats itself."""
    motif = draw(st.lists(_token, min_size=1, max_size=6))
    return (motif * length)[:length]


@st.composite
def _mask(draw: st.DrawFn, rows: int, length: int) -> list[list[int]] | None:
    """Padding on the left or right, or holes; every row keeps a token."""
    kind = draw(st.sampled_from(["none", "ones", "left", "right", "holes"]))
    if kind == "none":
        return None
    mask = []
    for _ in range(rows):
        gone = 0 if kind == "ones" else draw(st.integers(0, length - 1))
        kept = [1] * (length - gone)
        first = {"right": length - gone, "holes": draw(st.integers(0, length - gone))}.get(kind, 0)
        mask.append([*kept[:first], *[0] * gone, *kept[first:]])
    return mask


@st.composite
def _settings(draw: st.DrawFn, rows: int) -> dict[str, Any]:
    """Arguments of `generate` for at most four rows."""
    do_sample = draw(st.booleans())
    known = {**_BOTH_WAYS, **(_SAMPLED if do_sample else {})}
    settings: dict[str, Any] = {"do_sample": do_sample}
    if do_sample:
        settings["top_k"] = 0
        settings["num_return_sequences"] = draw(st.integers(1, 4 // rows))
    for name in draw(st.lists(st.sampled_from(sorted(known)), max_size=4, unique=True)):
        settings[name] = draw(known[name])
    eos = draw(st.sampled_from(["none", "one", "several"]))
    if eos == "none":
        settings.pop("exponential_decay_length_penalty", None)  # which needs one
    else:
        settings["eos_token_id"] = draw(_token if eos == "one" else _tokens)
    if draw(st.booleans()):
        settings["pad_token_id"] = 0
    if draw(st.integers(0, 3)) == 0:
        settings["return_dict_in_generate"] = True
        settings |= dict.fromkeys(draw(st.sets(st.sampled_from(_OUTPUT))), True)
    return settings
