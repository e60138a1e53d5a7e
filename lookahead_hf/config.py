"""The options of a speculative call: `SpeculativeConfig` and its presets."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from lookahead_hf.utils import known_names

BUILT_IN_DRAFTERS = (
    *("ngram", "recycling", "prediction", "pool", "assistant", "mtp"),
    *("medusa", "lookahead"),
)
"""The drafters that a configuration can name."""

DEFAULT_DRAFTERS = ("ngram", "recycling")  # The drafters of a configuration that names none

PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "default": {},
        "prompt_lookup": {"drafters": ("ngram",)},
        "lookahead": {"drafters": ("lookahead",), "budget": 64},
    }
)
"""Names for settings that are often used, and the fields that each name sets."""

STRATEGIES = tuple(dict.fromkeys((*PRESETS, *BUILT_IN_DRAFTERS)))
"""The presets, and the drafters that `speculative=` takes alone by their names."""

MOST_DRAFT_NODES = 4096
"""The upper limit of `max_draft_nodes`: drafts grow in arrays of that many nodes."""

CHOICES: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "verification": ("exact", "rejection"),
        "draft_invariant": (True, False),
        "cuda_graphs": ("auto", True, False),
        "compiled_layers": (True, False, "everywhere"),
        "learn": (True, False),
        "trace": (True, False),
        "on_fallback": ("warn", "error", "silent"),
    }
)
"""The fields that take one of a few values."""


@dataclass(frozen=True)
class SpeculativeConfig:
    """How to speculate: which drafters, how many draft tokens, and what to do about a fallback.

    Attributes:
        drafters: Names of built-in drafters or Drafter objects, or a single one; None takes the
            default drafters.
        max_draft_nodes: The most draft tokens per row and step, up to 4,096.
        budget: "auto" measures what draft tokens cost and drafts as many as pay. An int drafts up
            to that many tokens per row in every step, whatever they cost.
        verification: "exact" writes the text of plain `generate`, and with a seed its sample.
            "rejection" samples from the same distribution; it accepts more drafts of an assistant.
        draft_invariant: If True, the text does not depend on the drafts, bit for bit, in half
            precision too. Every step is then one block of the same shape. Drafts are chains, or
            trees where the package's own kernel computes the attention. This costs time in every
            step, and from the start the memory for the longest text that the call may write.
        cuda_graphs: Whether steps on a CUDA device are captured once and replayed: "auto" captures
            if the text may become long enough for that to pay off, True always, False never.
            Captured graphs stay with the model, and so do their K and V. If steps cannot be
            captured, the statistics give the reason.
        compiled_layers: Whether compiled kernels compute layers whose code they know, in steps on a
            CPU, and in prompts where they are faster (float16, or bfloat16 with AMX or without
            AVX-512). They read the model's own weights. Their sums have an order of their own, the
            same in every block: float32 results agree with the model's up to rounding, and texts of
            16 bits differ only at near ties. "everywhere" waits until they are compiled, and lets
            them read all prompts: a greedy text then does not depend on the other texts of a batch,
            on padding or on the number of threads, bit for bit.
        pool: The pool of the drafter "pool": an `NgramPool` or the path of one. A pool adds the
            drafter. If `drafters` names "pool" and this is None, the model keeps an empty pool.
        learn: Whether generated texts are added to the pool. The default is False, so that the
            speed of one user's text reveals nothing about another's.
        trace: Whether the statistics hold a `Trace` of the call: every draft, what was accepted,
            who foresaw each token, and the times of every step. It takes memory for every draft.
        on_fallback: What happens if a call cannot be speculated: "warn" (once per model and
            reason), "error" or "silent".
        options: Options of drafters given by name, `{drafter name: {option: value}}`.
    """

    drafters: Sequence[Any] | None = None
    max_draft_nodes: int = 64
    budget: str | int = "auto"
    verification: str = "exact"
    draft_invariant: bool = False
    cuda_graphs: str | bool = "auto"
    compiled_layers: bool | str = True
    pool: Any = None
    learn: bool = False
    trace: bool = False
    on_fallback: str = "warn"
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.drafters is not None:
            object.__setattr__(self, "drafters", _checked_drafters(self.drafters))
        check_int("max_draft_nodes", self.max_draft_nodes, 1, MOST_DRAFT_NODES)
        if not _is_one_of(self.budget, ("auto",)):
            check_int("budget", self.budget, 0, self.max_draft_nodes, '"auto" or ')
        for name, allowed in CHOICES.items():
            _check_choice(name, getattr(self, name), allowed)
        if self.draft_invariant and self.verification == "rejection":
            raise ValueError(
                'draft_invariant=True needs verification="exact": with "rejection" the drafts '
                "decide which sample is drawn"
            )
        is_pool = hasattr(self.pool, "grow") and not isinstance(self.pool, type)
        if not (is_pool or isinstance(self.pool, (str, os.PathLike, type(None)))):
            raise ValueError(f"pool must be an NgramPool or the path of one, not {self.pool!r}")
        named = self._names()
        if self.learn and "pool" not in named:
            raise ValueError(
                "learn=True adds generated texts to a pool, but this configuration has none: pass "
                'pool= too, or name the drafter "pool"'
            )
        object.__setattr__(self, "options", _checked_options(self.options, named))

    def _names(self) -> set[str]:
        given = DEFAULT_DRAFTERS if self.drafters is None else self.drafters
        named = {drafter for drafter in given if isinstance(drafter, str)}
        named |= {"prediction", "assistant", "mtp"}  # the call's arguments bring these three
        return named | ({"pool"} if self.pool is not None else set())

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values, for a generation config or a file.

        Raises:
            ValueError: A field holds an object, which only the argument of a call can be.
        """
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {name: _as_json(value, name) for name, value in fields.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SpeculativeConfig:
        """Build a configuration from the dict that `to_dict` returned.

        Raises:
            ValueError: A field is unknown, holds an object instead of a JSON value, or has a value
                that is not allowed.
        """
        if not isinstance(values, Mapping):
            raise ValueError(f"a speculative configuration is built from a dict, not {values!r}")
        names = [each.name for each in dataclasses.fields(cls)]
        for name, value in values.items():
            if name not in names:
                raise ValueError(f"speculative has no argument {name!r}; {known_names(names)}")
            _as_json(value, name)
        return cls(**values)

    @classmethod
    def resolve(cls, value: Any) -> SpeculativeConfig | None:
        """Turn the argument `speculative=` into a configuration; None means plain `generate`.

        Args:
            value: A bool, None, a preset's or drafter's name, a dict of fields, or a configuration.

        Raises:
            ValueError: `value` is anything else.
        """
        if value is None or value is False:
            return None
        if value is True:
            return cls()
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            _check_choice("speculative", value, STRATEGIES)
            return cls(**PRESETS.get(value, {"drafters": value}))
        if isinstance(value, Mapping):
            return cls.from_dict(value)
        raise ValueError(
            f"speculative={value!r} is not understood: give True, False, one of "
            f"{', '.join(STRATEGIES)}, a SpeculativeConfig, or a dict of its fields"
        )

    @classmethod
    def resolve_stored(cls, value: Any) -> SpeculativeConfig | None:
        """Turn the `speculative` entry of a generation config into a configuration.

        Raises:
            ValueError: The entry is an object, or `resolve` refuses it. transformers saves an
                object as null without a warning, and copies it in every call.
        """
        if not isinstance(value, (bool, str, dict, type(None))):
            raise ValueError(
                f"a generation config holds speculative={value!r}: there it must be True, False, "
                "a preset's name or a dict of JSON values, such as `config.to_dict()` returns; "
                "pass an object in the call, as in `generate(..., speculative=config)`"
            )
        return cls.resolve(value)


def drafter_name(drafter: Any) -> str:
    """Return the name of a drafter that was given by name or as an object."""
    if isinstance(drafter, str):
        return drafter
    try:
        return str(getattr(drafter, "name", "custom"))
    except Exception:  # an object's own property may raise anything
        return "custom"


def check_int(name: str, value: Any, least: int, most: int, others: str = "") -> None:
    """Raise ValueError, which names `others` too, if an option is no int from `least` to `most`."""
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if not is_int or not least <= value <= most:
        raise ValueError(f"{name} is {value!r}, but must be {others}an int in {least}..{most}")


def _checked_drafters(drafters: Any) -> tuple[Any, ...]:
    drafters = tuple(drafters) if isinstance(drafters, (list, tuple)) else (drafters,)
    if not drafters:
        raise ValueError("drafters is empty: name at least one, or pass speculative=False")
    for drafter in drafters:
        _check_drafter(drafter)
    names = [drafter for drafter in drafters if isinstance(drafter, str)]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"drafters contains a duplicate: {name!r}")
    return drafters


def _check_drafter(drafter: Any) -> None:
    if isinstance(drafter, str):
        if drafter not in BUILT_IN_DRAFTERS:
            raise ValueError(
                f"there is no drafter {drafter!r}; {known_names(BUILT_IN_DRAFTERS)}, or "
                "a Drafter object of your own"
            )
    elif isinstance(drafter, type) or not callable(getattr(drafter, "propose", None)):
        raise ValueError(
            f"drafters holds {drafter!r}, which is neither a drafter's name nor a Drafter object "
            "(an object with a method `propose`)"
        )


def _check_choice(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if not _is_one_of(value, allowed):
        raise ValueError(f"{name} cannot be {value!r}; {known_names(allowed)}")


def _is_one_of(value: Any, allowed: tuple[Any, ...]) -> bool:
    """Return whether a value is allowed; 1 is not True."""
    return any(isinstance(value, type(each)) and value == each for each in allowed)


def _checked_options(options: Any, named: set[str]) -> dict[str, dict[str, Any]]:
    """Return a private copy of the options; the drafters check the values."""
    if not isinstance(options, Mapping):
        raise ValueError(f"options must be a dict {{drafter name: dict}}, not {options!r}")
    for name, values in options.items():
        if name not in named:
            raise ValueError(f"options names {name!r}, but {_why_not(name)}")
        if not isinstance(values, Mapping) or not all(isinstance(key, str) for key in values):
            raise ValueError(f"options[{name!r}] must be a dict with names as keys, not {values!r}")
    return {name: dict(values) for name, values in options.items()}


def _why_not(name: Any) -> str:
    if name in BUILT_IN_DRAFTERS:
        return f"this configuration does not draft with it: add it, as drafters=(..., {name!r})"
    return (
        f"there is no such drafter; {known_names(BUILT_IN_DRAFTERS)}; a Drafter object gets "
        "its options when you create it"
    )


def _as_json(value: Any, where: str) -> Any:
    """Return a value with tuples as lists; raise ValueError if a part is no JSON value."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_as_json(each, f"{where}[{index}]") for index, each in enumerate(value)]
    if isinstance(value, Mapping):
        return {key: _as_json(each, f"{where}[{key!r}]") for key, each in value.items()}
    raise ValueError(
        f"{where} holds an object ({type(value).__name__}), which cannot be stored; pass the "
        "configuration in the call instead, as in `generate(..., speculative=config)`"
    )
