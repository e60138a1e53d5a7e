"""The reasons for which a call runs plain `generate` instead, and the warning about them."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

from lookahead_hf.model.state import state_of
from lookahead_hf.utils import warn_caller

TRANSFORMERS = ">=5.17,<5.25"
"""The versions of transformers from the oldest to the newest that the tests run with."""


class FallbackReason(str, Enum):
    """Every reason for which a call is not speculated.

    The reason is known before the call's first token, with one exception: a custom `generate` that
    never calls our decoding is noticed only when its first token arrives.

    Attributes:
        text: The obstacle, as a clause.
        fix: The remedy; it completes the sentence "To speculate, ...".
    """

    text: str
    fix: str

    def __new__(cls, value: str, text: str, fix: str) -> FallbackReason:
        member = str.__new__(cls, value)
        member._value_ = value
        member.text, member.fix = text, fix
        return member

    def __str__(self) -> str:
        return str(self.value)

    BEAMS = "beams", "beam search keeps several texts per row", "pass num_beams=1"
    DECODING_METHOD = (
        "decoding_method",
        "another decoding method was asked for",
        "leave out the setting that asks for it",
    )
    CONTINUOUS_BATCHING = (
        "continuous_batching",
        "continuous batching cannot be speculated here",
        "leave cache_implementation out, or call generate",
    )
    NO_CACHE = "no_cache", "decoding without a cache was asked for", "pass use_cache=True"
    CACHE_IMPLEMENTATION = (
        "cache_implementation",
        "this cache implementation is not supported",
        "leave cache_implementation out",
    )
    MEMORY = "memory", "memory ran out while the cache was taken over", "free some memory"
    CACHE = (
        "cache",
        "this cache cannot be rolled back row by row",
        "pass a DynamicCache, or no cache",
    )
    MODEL = (
        "model",
        "this architecture is not supported",
        "load another model: no argument of the call helps",
    )
    VERSION = (
        "version",
        "the installed transformers works in a way that this version of lookahead-hf does not know",
        f"install a version that was tested: pip install 'transformers{TRANSFORMERS}'",
    )
    OWN_GENERATE = (
        "own_generate",
        "the model has its own generate",
        "let it pass custom_generate= to the generate of transformers, or remove it",
    )
    OWN_LOOP = (
        "own_loop",
        "the model has its own decoding loop",
        "load a class that does not override _sample: no argument of the call helps",
    )
    STATEFUL = (
        "stateful",
        "the model keeps a recurrent state that cannot be rolled back in this call",
        "load an architecture whose states are layers of a DynamicCache, such as Qwen3.5",
    )
    ENCODER_DECODER = (
        "encoder_decoder",
        "this encoder-decoder architecture is not supported",
        "load a T5, a BART, a TrOCR or a related model: no argument of the call helps",
    )
    ATTENTION = (
        "attention",
        "this attention implementation does not accept the mask of a draft",
        'load the model with attn_implementation="sdpa"',
    )
    ADAPTER = (
        "adapter",
        "an adapter changes the model's inputs in every forward",
        "disable the adapter, or use one that can be merged into the weights",
    )
    DROPOUT = "dropout", "the model is in training mode and uses dropout", "call model.eval()"
    CHECKPOINTING = (
        "checkpointing",
        "gradient checkpointing in training mode keeps no cache",
        "call model.eval()",
    )
    TOKEN_HEALING = "token_healing", "token healing changes the prompt", "pass token_healing=False"
    ARGUMENT = "argument", "this argument of the model is not supported", "leave it out"
    INVARIANCE = (
        "invariance",
        "in a mixture of experts, a token's rounding depends on the other tokens of its expert",
        "leave draft_invariant out",
    )
    SYNCED_GPUS = (
        "synced_gpus",
        "processes that share the weights must run equally many forwards",
        "pass synced_gpus=True in every process",
    )
    TENSOR_PARALLEL = (
        "tensor_parallel",
        "this way of splitting a model over processes is not supported",
        "split its matrices over one dimension of processes, and nothing else",
    )


class Unserved(Exception):
    """This call cannot be speculated. It is raised before the first token; users never see it."""

    def __init__(self, reason: FallbackReason, detail: str = "", fix: str = "") -> None:
        """Take the reason; `detail` names the culprit, `fix` replaces the reason's remedy."""
        super().__init__(reason, detail, fix)
        self.reason, self.detail, self.fix = reason, detail, fix or reason.fix

    @property
    def cause(self) -> str:
        """Why, without advice."""
        return f"{self.reason.text} ({self.detail})" if self.detail else self.reason.text

    def __str__(self) -> str:
        return f"{self.cause} [{self.reason}]. To speculate, {self.fix}"


class SpeculationFallbackWarning(UserWarning):
    """A call asked for speculation and ran plain `generate`."""


class SpeculationFallbackError(ValueError):
    """A call with `on_fallback="error"` asked for speculation and could not be speculated."""


def report(
    model: Any, unserved: Unserved, on_fallback: str, instead: str = "plain generate"
) -> None:
    """Report that a call is not speculated, as the configuration chose by `on_fallback`.

    "warn" warns of each reason once per model, and says what runs `instead`; "error" raises
    SpeculationFallbackError.
    """
    if on_fallback == "error":
        raise SpeculationFallbackError(f"this call cannot be speculated: {unserved}") from unserved
    if on_fallback == "warn" and state_of(model).is_first(unserved.reason):
        message = f"{type(model).__name__} runs {instead}: {unserved}"
        warn_caller(message, SpeculationFallbackWarning)


def check_settings(setting: Callable[[str], Any]) -> None:
    """Raise Unserved if a generation setting asks for decoding that cannot be speculated.

    `setting` returns the value of a generation setting by name, as `generate` will see it.
    """
    for is_met, reason, name in _SETTINGS:
        value = setting(name)
        if is_met(value):
            raise Unserved(reason, f"{name}={value!r}")
    if (setting("penalty_alpha") or 0) > 0 and not setting("do_sample"):
        raise Unserved(FallbackReason.DECODING_METHOD, "contrastive search")


SERVED_CACHES = ("dynamic", "static", "sliding_window", "hybrid", "hybrid_chunked")
"""The names of caches that stay on one device and do not quantise."""

_SETTINGS: tuple[tuple[Callable[[Any], bool], FallbackReason, str], ...] = (
    (lambda value: value == "paged", FallbackReason.CONTINUOUS_BATCHING, "cache_implementation"),
    (lambda value: value is not None, FallbackReason.DECODING_METHOD, "constraints"),
    (lambda value: value is not None, FallbackReason.DECODING_METHOD, "force_words_ids"),
    (lambda value: value is not None, FallbackReason.DECODING_METHOD, "dola_layers"),
    (lambda value: value is not None and value > 1, FallbackReason.BEAMS, "num_beams"),
    (lambda value: not value, FallbackReason.NO_CACHE, "use_cache"),
    (
        lambda value: value is not None and value not in SERVED_CACHES,
        FallbackReason.CACHE_IMPLEMENTATION,
        "cache_implementation",
    ),
    (bool, FallbackReason.TOKEN_HEALING, "token_healing"),
    (bool, FallbackReason.ARGUMENT, "output_attentions"),
)
