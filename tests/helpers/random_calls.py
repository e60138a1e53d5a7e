"""Random calls of `generate`, as plain data that prints readably, and what they are made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import transformers
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from packaging import version

from tests.helpers.architectures import build
from tests.helpers.models import VOCAB, characters, tiny
from tests.helpers.users_parts import CRITERIA, PROCESSORS, Allowed

MODELS = ("llama", "mistral", "gpt2", "gemma3")
SHARED = ("gemma3n", "gemma4")
"""Models whose last layers read the keys and values of earlier ones."""
HYBRIDS = ("lfm2",)
"""Models with states that cannot be rolled back by their length. They get no static caches."""
PAIRS = ("bart", "t5")
"""Encoder-decoder models."""

REPEATABLE = settings(
    derandomize=True,
    database=None,
    deadline=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
"""Draws the same examples in every run, however long they take."""

DRAFTING = ("scripted", "default", "pool", "prediction")
"""Who drafts: random trees around plain's text, or a drafter of ours."""

WAYS = ("call", "device", "graphs", "threads", "queue")
"""How a call runs: on the host, in the steps of a device, with graphs or without, on two threads at
once, or as requests of a queue."""

LONGEST = 128
"""Columns of a static cache of the caller's."""

device = torch.device("cpu")
"""Where the models of the calls lie; tests of a GPU set it, and `WIDE`."""

WIDE = "float64"
"""The type of models that compute neither in half precision nor under autocast."""


CHUNKS_BEHIND_A_TEXT = version.parse(transformers.__version__) >= version.parse("5.23")
"""Older versions write another text where a prompt in chunks goes on with an earlier one."""


@cache
def smallest(
    name: str,
    dtype: torch.dtype = torch.float64,
    attn: str = "sdpa",
    device: torch.device | None = None,
) -> Any:
    """A model of a few layers.

    In double precision a block and single tokens differ by so little that nothing is left of it in
    the float32 scores that tokens are chosen by: what differs in a random call is never a near tie.
    """
    if name in PAIRS:
        return tiny(name, attn).to(device, dtype)
    model = build(name) if name in HYBRIDS else tiny(name, attn)
    model.generation_config.pad_token_id = None
    return model.to(device, dtype)


@dataclass(frozen=True)
class RandomCall:
    """One call, or two turns on one cache.

    In half precision and under autocast a block rounds otherwise than single tokens do. Then the
    text must be that of the same blocks without drafts.
    """

    model: str  # one of `MODELS`, `SHARED`, `HYBRIDS` or `PAIRS`
    prompt: list[list[int]]  # token ids, rows of one length
    mask: list[list[int]] | None
    max_new_tokens: int
    settings: dict[str, Any]  # further arguments of `generate`
    own: list[str] = field(default_factory=list)  # names of `PROCESSORS`
    stop: tuple[str, list[int]] | None = None  # the name of one of `CRITERIA`, and its tokens
    stop_strings: list[str] | None = None  # one-character tokens make these
    embeds: bool = False  # whether the prompt is given as embeddings
    spacing: int = 0  # between the positions that the caller gives, 0 where it gives none
    turns: int = 0  # one or two on a cache of the caller's, 0 where the caller brings none
    is_static: bool = False  # the caller's cache
    attn: str = "sdpa"  # or "eager"
    half: str | None = None  # the type of a model in half precision
    compiled: bool | str = True  # which parts of such a model kernels may compute
    autocast: str | None = None  # the type that `torch.autocast` computes a float32 model in
    seed: int = 0  # of the sampling
    drafting: str = "scripted"  # one of `DRAFTING`
    drafts: int = 0  # seed of the draft trees
    budget: int = 8  # most draft tokens per row and step
    draft_invariant: bool = False
    trace: bool = False
    way: str = "call"  # one of `WAYS`

    @property
    def target(self) -> Any:
        wide = "float32" if self.autocast else WIDE
        return smallest(self.model, getattr(torch, self.half or wide), self.attn, device)

    @property
    def is_rounded(self) -> bool:
        """Whether a block is rounded otherwise than single tokens."""
        return self.half is not None or self.autocast is not None

    @property
    def max_slots(self) -> int:
        """Requests of a queue that are decoded at once."""
        return 1 + self.seed % 3

    def cast(self) -> Any:
        """What the call runs in."""
        kind = getattr(torch, self.autocast or "bfloat16")
        return torch.autocast(device.type, kind, enabled=self.autocast is not None)

    def columns(self, ids: torch.Tensor) -> int:
        """Columns of the output before the first generated one, of a prompt [rows, columns]."""
        if self.model in PAIRS:
            return 1
        return 0 if self.embeds else ids.shape[1]

    def arguments(self, ids: torch.Tensor) -> dict[str, Any]:
        """What `generate` gets for a prompt, [rows, columns]; nothing in it is used twice."""
        given: dict[str, Any] = {**self.settings, "max_new_tokens": self.max_new_tokens}
        if self.embeds:
            given["inputs_embeds"] = self.target.get_input_embeddings()(ids).detach()
        else:
            given["input_ids"] = ids.clone()  # which plain lets callers edit
        mask = torch.ones_like(ids)
        if self.mask is not None:
            first = torch.tensor(self.mask, device=device)
            mask[:, : first.shape[1]] = first
            given["attention_mask"] = mask
        if self.spacing:
            given["position_ids"] = self.spacing * (mask.cumsum(1) - 1).clamp(min=0)
        if given.pop("prefix_allowed_tokens", False):
            draws = self.settings["do_sample"] and self.way != "queue"
            given["prefix_allowed_tokens_fn"] = Allowed(draws)
        if self.own:
            made = [PROCESSORS[name]() for name in self.own]
            given["logits_processor"] = transformers.LogitsProcessorList(made)
        if self.stop is not None:
            kind, tokens = self.stop
            given["stopping_criteria"] = transformers.StoppingCriteriaList([CRITERIA[kind](tokens)])
        if self.stop_strings is not None:
            given |= {"stop_strings": self.stop_strings, "tokenizer": tokenizer()}
        return given

    def new_cache(self) -> transformers.DynamicCache | transformers.StaticCache | None:
        """The cache of a caller who brings one."""
        if not self.turns:
            return None
        config = self.target.config
        if self.is_static:
            return transformers.StaticCache(config, LONGEST)
        is_bare = self.model in ("llama", "gpt2") and self.seed % 2 == 1  # others have windows
        return transformers.DynamicCache() if is_bare else transformers.DynamicCache(config=config)


@cache
def tokenizer() -> Any:
    return characters()


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
    "remove_invalid_values": st.just(True),
    "renormalize_logits": st.just(True),
    "prefix_allowed_tokens": st.just(True),
    "watermarking_config": st.sampled_from(
        [{"bias": 3.0, "seeding_scheme": scheme} for scheme in ("selfhash", "lefthash")]
    ),
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
    "watermarking_config": st.builds(
        transformers.SynthIDTextWatermarkingConfig, st.just(3), st.just([7, 5, 11, 2])
    ),
}
_DECODER_ONLY: dict[str, st.SearchStrategy[Any]] = {
    "guidance_scale": st.just(1.5),
    "prefill_chunk_size": st.integers(1, 9),
    "cache_implementation": st.sampled_from(
        ["static", "sliding_window", "hybrid", "hybrid_chunked", "dynamic"]
    ),
}
_ON_DEVICE = (
    *("repetition_penalty", "suppress_tokens", "begin_suppress_tokens", "min_length"),
    *("min_new_tokens", "temperature", "top_k", "top_p", "min_p"),
)
"""Settings that a device can apply to the nodes of a tree."""
_ATTENTION = st.sampled_from(["sdpa"] * 4 + ["eager"])
_OUTPUT = ("output_scores", "output_logits", "output_hidden_states")


@st.composite
def calls(draw: st.DrawFn) -> RandomCall:
    """Any call that is served."""
    way = draw(st.sampled_from([*WAYS[:1] * 14, *WAYS]))
    if way == "queue":
        return draw(_requests())
    rows, length = draw(st.integers(1, 4)), draw(st.integers(1, 14))
    others = (*SHARED, *HYBRIDS, *PAIRS)
    model = draw(st.sampled_from([*sorted(MODELS) * 2, *others]))
    turns = 0 if model in PAIRS or way == "threads" else draw(st.sampled_from([0, 0, 0, 1, 2]))
    prompt = [draw(_text(length)) for _ in range(rows)]
    own = draw(st.lists(st.sampled_from(sorted(PROCESSORS)), max_size=2, unique=True))
    stops = st.tuples(st.sampled_from(sorted(CRITERIA)), _tokens)
    strings = st.lists(st.text([chr(33 + t) for t in range(3, 20)], min_size=1, max_size=2))
    settings = draw(_settings(rows if turns == 0 else 4, model, way))
    if turns:
        settings.pop("cache_implementation", None)  # which makes a cache
    if turns > 1 and not CHUNKS_BEHIND_A_TEXT:
        settings.pop("prefill_chunk_size", None)
    half = draw(st.sampled_from([None] * 7 + ["bfloat16", "float16"]))
    casts = st.sampled_from([None] * 6 + ["bfloat16", "float16"])
    autocast = None if half else draw(casts)
    drafting = draw(st.sampled_from([*DRAFTING[:1] * 20, *DRAFTING[1:]]))
    # Drafters of ours find something in longer texts only.
    most = st.one_of(st.integers(1, 8), st.integers(1, 24))
    lengths = most if drafting == "scripted" else st.integers(16, 24)
    has_positions = turns == 0 and model in MODELS and draw(st.integers(0, 7)) == 0
    on_device = way in ("device", "graphs")  # which is left for parts that nobody knows
    own = own if draw(st.integers(0, 3)) == 0 and not on_device else []
    stop = draw(stops) if draw(st.integers(0, 4)) == 0 and not on_device else None
    mask = draw(_mask(rows, length))
    return RandomCall(
        model=model,
        prompt=prompt,
        mask=mask,
        max_new_tokens=draw(lengths),
        settings=settings,
        own=[name for name in own if way != "threads" or name != "draws"],
        stop=stop,
        stop_strings=draw(strings) or None if draw(st.integers(0, 7)) == 0 else None,
        embeds=turns == 0 and model not in SHARED and draw(st.integers(0, 9)) == 0,
        spacing=draw(st.integers(1, 3)) if has_positions else 0,
        turns=turns,
        is_static=turns > 0 and model not in HYBRIDS and draw(st.integers(0, 2)) == 0,
        attn="sdpa" if model in SHARED or _hides(mask) else draw(_ATTENTION),
        half=half,
        compiled=draw(st.sampled_from([True, "everywhere", False])) if half else True,
        autocast=autocast,
        seed=draw(st.integers(0, 999)),
        drafting=drafting,
        drafts=draw(st.integers(0, 999)),
        budget=draw(st.sampled_from([8, 64])) if drafting == "scripted" else 8,
        draft_invariant=bool(half or autocast) or draw(st.integers(0, 5)) == 0,
        trace=drafting == "scripted" and draw(st.integers(0, 2)) == 0,
        way=way,
    )


@st.composite
def _requests(draw: st.DrawFn) -> RandomCall:
    """Requests of a queue, which have a prompt each."""
    rows, length = draw(st.integers(1, 5)), draw(st.integers(1, 14))
    own = draw(st.lists(st.sampled_from(sorted(set(PROCESSORS) - {"draws"})), max_size=1))
    return RandomCall(
        model=draw(st.sampled_from([*sorted(MODELS)])),
        prompt=[draw(_text(length)) for _ in range(rows)],
        mask=draw(_mask(rows, length)),
        max_new_tokens=draw(st.integers(12, 24)),
        settings=draw(_settings(4, "llama", "queue")),
        own=own,
        attn=draw(_ATTENTION),
        seed=draw(st.integers(0, 999)),
        drafting="default",
        budget=draw(st.integers(4, 9)),
        way="queue",
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


def _hides(mask: list[list[int]] | None) -> bool:
    """Whether a column is hidden, which plain's eager attention may make NaN in float64."""
    return mask is not None and not all(map(all, mask))


@st.composite
def _settings(draw: st.DrawFn, rows: int, model: str, way: str) -> dict[str, Any]:
    """Arguments of `generate` for at most four rows."""
    do_sample = draw(st.booleans()) and way != "threads"  # two would share the numbers
    known = {**_BOTH_WAYS, **(_SAMPLED if do_sample else {})}
    if way in ("device", "graphs"):
        known = {name: known[name] for name in _ON_DEVICE if name in known}
    elif way == "queue":
        known = {name: known[name] for name in known if "encoder" not in name}
    elif model not in PAIRS:
        known |= _DECODER_ONLY
    if model in HYBRIDS:
        known.pop("cache_implementation", None)
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
    if way not in ("device", "graphs", "queue") and draw(st.integers(0, 3)) == 0:
        settings["return_dict_in_generate"] = True
        settings |= dict.fromkeys(draw(st.sets(st.sampled_from(_OUTPUT))), True)
    return settings
