"""The arguments of a call of `generate`: transformers' and ours."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from transformers import GenerationMixin

from lookahead_hf.call.stopping import with_stop_strings
from lookahead_hf.config import SpeculativeConfig
from lookahead_hf.fallback import FallbackReason, Unserved
from lookahead_hf.model import compat

OURS = ("speculative", "prediction", "speculative_tokenizer")
"""Arguments that transformers does not know.

Our pipelines add the last one to every call. transformers would pass `tokenizer` on to the model's
forward in calls that do not need a tokenizer.
"""

CONFLICTS = ("prompt_lookup_num_tokens", "use_mtp", "assistant_early_exit", "custom_generate")
"""Settings of transformers that choose another decoding strategy.

In a call that asks for speculation itself, `use_mtp` names a drafter instead.
"""


class GenerateArguments:
    """The arguments of a call by transformers' names.

    Attributes:
        given: All arguments but `OURS`, by name.
        tokenizer: The target's tokenizer, if the caller or its pipeline gave one.
    """

    def __init__(
        self, model: Any, original: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> None:
        """Read the arguments; TypeError if `original`, `generate` without us, refuses them."""
        self._model, self._original = model, original
        theirs = {name: value for name, value in kwargs.items() if name not in OURS}
        self._signature = inspect.signature(original)
        self.given = _by_name(self._signature, args, theirs)
        self._asked, self._prediction, tokenizer = (kwargs.get(name) for name in OURS)
        given = self.given.get("tokenizer")
        self.tokenizer = tokenizer if given is None else given

    def wanted(self, default: Any = None) -> tuple[Any, SpeculativeConfig | None]:
        """Return how the call decides about speculation; see the function `wanted`."""
        return wanted(self._asked, self._generation_configs(), default)

    def setting(self, name: str) -> Any:
        """Return a generation setting as `generate` will see it."""
        if name in self.given:
            return self.given[name]
        for config in self._generation_configs():
            value = getattr(config, name, None)
            if value is not None:
                return value
        return True if name == "use_cache" else None

    def _generation_configs(self) -> tuple[Any, Any]:
        passed = self.given.get("generation_config")
        return passed, getattr(self._model, "generation_config", None)

    def check_conflicts(self, speculative: Any, is_default: bool) -> None:
        """Raise ValueError where the call asks for another decoding strategy too.

        It is Unserved where only a default of the process or of `enable` asks for speculation.
        """
        for name in CONFLICTS:
            value = self.setting(name)
            if value is None or value is False or (name == "use_mtp" and not is_default):
                continue
            if is_default:
                raise Unserved(FallbackReason.DECODING_METHOD, f"{name}={value!r}")
            raise ValueError(
                f"speculative={speculative!r} and {name}={value!r} both choose how to decode: "
                f"leave one of them out (speculative=False switches speculation off for a call)"
            )

    def check_original(self) -> None:
        """Raise Unserved where the original `generate` cannot be given a decoding strategy."""
        # transformers binds a repository's function to the model that it loads. A decoding loop of
        # its own would give arguments that it does not know to the model's forward.
        original: Any = self._original
        is_bound = isinstance(original, functools.partial)
        if is_bound and getattr(original.func, "speculative_passthrough", False) is not True:
            raise Unserved(
                FallbackReason.OWN_GENERATE,
                "its repository's",
                "set `speculative_passthrough = True` on the repository's function, if it passes "
                "its keyword arguments on to transformers' generate",
            )
        parameters = self._signature.parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        if not takes_any and "custom_generate" not in parameters:
            raise self.decodes_itself()

    def decodes_itself(self) -> Unserved:
        """Return the fallback of an original `generate` that decodes by itself."""
        own = getattr(self._original, "__func__", self._original)
        name = getattr(own, "__qualname__", None) or f"{type(self._model).__name__}.generate"
        return Unserved(FallbackReason.OWN_GENERATE, name)

    def prediction(self) -> list[np.ndarray] | None:
        """Return the caller's prediction as token ids per row; one row serves all."""
        if self._prediction is None:
            return None
        prediction = read_prediction(self._prediction, self.tokenizer)
        vocab_size = int(compat.text_config(self._model).vocab_size)
        for row in prediction:
            if row.size and int(row.max()) >= vocab_size:
                raise ValueError(
                    f"prediction holds the token id {int(row.max())}, but the model has the ids 0 "
                    f"to {vocab_size - 1}: use the tokenizer of this model"
                )
        return prediction

    def forwarded(self, strategy: Callable[..., Any], streamer: Any) -> dict[str, Any]:
        """Return the arguments, by name, of a call that decodes by `strategy`."""
        passed = {**self.given, "custom_generate": strategy}
        # With an assistant, `generate` refuses calls that our strategy serves.
        for name in ("assistant_model", "assistant_tokenizer"):
            passed.pop(name, None)
        if self.setting("use_mtp"):
            passed["use_mtp"] = False
        if streamer is not None:
            passed["streamer"] = streamer
        self._move_stop_strings(passed)
        return passed

    def _move_stop_strings(self, passed: dict[str, Any]) -> None:
        """Pass stop strings as a criterion, since `generate` drops the tokenizer for strategies."""
        strings, tokenizer = self.setting("stop_strings"), self.given.get("tokenizer")
        if strings is None or tokenizer is None:
            return  # without a tokenizer `generate` raises its own error
        criteria = with_stop_strings(passed.get("stopping_criteria"), strings, tokenizer)
        passed["stopping_criteria"] = criteria
        passed.pop("stop_strings", None)
        config, of_model = self._generation_configs()
        if getattr(config, "stop_strings", None) is not None:
            passed["generation_config"] = config = copy.deepcopy(config)
            config.stop_strings = None
        if getattr(of_model, "stop_strings", None) is not None:
            passed["stop_strings"] = None


def wanted(
    asked: Any, generation_configs: Sequence[Any], default: Any
) -> tuple[Any, SpeculativeConfig | None]:
    """Return the value that decides about speculation, and its configuration.

    The argument of a call comes first, then the generation config that was passed, the model's, and
    the default; None leaves it to the next. (None, None) means that nothing decides.
    """
    if asked is not None:
        return asked, SpeculativeConfig.resolve(asked)
    for config in generation_configs:
        value = getattr(config, "speculative", None)
        if value is not None:
            return value, SpeculativeConfig.resolve_stored(value)
    return default, SpeculativeConfig.resolve(default)


def _by_name(
    signature: inspect.Signature, args: Sequence[Any], kwargs: dict[str, Any]
) -> dict[str, Any]:
    bound = signature.bind(*args, **kwargs).arguments
    named: dict[str, Any] = {}
    for name, value in bound.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            stock = inspect.signature(GenerationMixin.generate).parameters.values()
            names = [p.name for p in stock if p.kind is p.POSITIONAL_OR_KEYWORD]
            first = 1 + len(named)  # 0 is self
            named |= zip(names[first : first + len(value)], value, strict=True)
        elif kind is inspect.Parameter.VAR_KEYWORD:
            named |= value
        else:
            named[name] = value
    return named


def read_prediction(prediction: Any, tokenizer: Any = None) -> list[np.ndarray]:
    """Turn the argument `prediction=` into token ids.

    Args:
        prediction: Token ids `[length]`, or a list of them per row (also as `[rows, length]`); or a
            text or one text per row, with a tokenizer.
        tokenizer: Turns texts into ids.

    Returns:
        The ids of each row, `[length]` int64; a single entry serves all rows.

    Raises:
        ValueError: Anything else.
    """
    rows: Any = prediction
    if isinstance(prediction, (torch.Tensor, np.ndarray)):
        rows = prediction if prediction.ndim > 1 else [prediction]
    elif isinstance(prediction, (str, list, tuple)):
        texts_or_rows = (str, list, tuple)
        has_rows = not isinstance(prediction, str) and any(
            isinstance(each, texts_or_rows) or getattr(each, "ndim", 0) for each in prediction
        )
        rows = prediction if has_rows else [prediction]
    else:
        raise _not_a_prediction(repr(prediction))
    return [_row_of_ids(row, tokenizer) for row in rows]


def _row_of_ids(row: Any, tokenizer: Any) -> np.ndarray:
    given = _tokenize(row, tokenizer) if isinstance(row, str) else row
    try:
        ids = np.asarray(given.detach().cpu() if isinstance(given, torch.Tensor) else given)
    except (ValueError, TypeError) as error:  # of several lengths; numpy knows no bfloat16
        raise _not_a_prediction(repr(row)) from error
    if ids.size == 0:
        return np.empty(0, np.int64)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise _not_a_prediction(f"a row of type {ids.dtype} and shape {list(ids.shape)}")
    for each in (int(ids.min()), int(ids.max())):
        if not 0 <= each < 2**63:
            raise _not_a_prediction(f"the id {each}")
    return ids.astype(np.int64)


def _tokenize(text: str, tokenizer: Any) -> Any:
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # a processor holds its tokenizer
    if not callable(tokenizer):
        raise ValueError(
            "prediction is a text, which needs a tokenizer to become token ids: pass `tokenizer=` "
            f"in the call, or pass the ids (tokenizer is {tokenizer!r})"
        )
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _not_a_prediction(what: str) -> ValueError:
    return ValueError(
        f"prediction holds {what}; it must be token ids [length], a list of them per row, or text "
        "(one or one per row) together with `tokenizer=`"
    )
