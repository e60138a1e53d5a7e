"""Adds speculation to `generate`: of a model, of a class, or of every model at once."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any, TypeVar
from weakref import WeakSet

from transformers import GenerationMixin

from lookahead_hf.call import optional
from lookahead_hf.config import SpeculativeConfig
from lookahead_hf.drafting.rates import LearnedRate, memory_of
from lookahead_hf.generation.strategy import run
from lookahead_hf.model import compat
from lookahead_hf.model.state import state_of
from lookahead_hf.ngram_pool import compilation
from lookahead_hf.ngram_pool.compilation import Functions
from lookahead_hf.runner.host import groups_of
from lookahead_hf.utils import unwrap

_Model = TypeVar("_Model")

LOADING_SECONDS = 2.0
"""Longest time for which `enable` loads numba's functions; compiled ones take one second."""


BATCH_METHODS = ("generate_batch", "init_continuous_batching")
"""Methods of a model for continuous batching."""


class SpeculativeMixin(GenerationMixin):
    """Gives a model class speculation: `class Mine(SpeculativeMixin, LlamaForCausalLM)`."""

    @functools.wraps(GenerationMixin.generate)
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return run(self, super().generate, args, kwargs)


class Hook:
    """Replaces `generate` of one model object; a copy, also a pickled one, has its own hook."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._found = vars(model).get("generate")  # None: the class's method
        self.default: Any = None  # decides where neither a call nor a generation config does

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The model's `generate` without the hook; `inspect` follows it."""
        if self._found is not None:
            return self._found
        return type(self._model).generate.__get__(self._model)

    @property
    def __name__(self) -> str:
        return getattr(self.__wrapped__, "__name__", "generate")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        original = self.__wrapped__
        if kwargs.get("cache_implementation") == "paged":  # which calls `generate_batch`
            return _batching().run_paged(original, args, kwargs)
        if _speculates(original):
            return original(*args, **kwargs)
        return run(self._model, original, args, kwargs, self.default)

    def __getstate__(self) -> tuple[Any, ...]:
        # A method is pickled by its name, which would find this hook or the class's method again.
        is_method = isinstance(self._found, MethodType) and self._found.__self__ is self._model
        found = self._found.__func__ if is_method else self._found
        return self._model, found, is_method, _storable(self.default)

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        hook = Hook.__new__(Hook)
        memo[id(self)] = hook
        hook.__setstate__((*copy.deepcopy(self.__getstate__()[:3], memo), self.default))
        return hook

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._model, found, is_method, self.default = state
        self._found = MethodType(found, self._model) if is_method else found


def _batching() -> Any:
    return optional.load("continuous batching")


class BatchMethod:
    """Replaces one of `BATCH_METHODS` on a model object; a copy of the model gets its own."""

    def __init__(self, model: Any, name: str, hook: Any) -> None:
        """`hook`: replaces the model's `generate`, and has the default of both methods."""
        self._model, self._name, self._hook = model, name, hook

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The method of the model's class; `inspect` follows it."""
        method = getattr(type(self._model), self._name)
        own: Callable[..., Any] = getattr(method, "replaced", method)
        return MethodType(own, self._model)

    @property
    def __name__(self) -> str:
        return self._name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _batching().call(self._model, self.__wrapped__, self._hook.default, args, kwargs)


def _class_method(name: str) -> Callable[..., Any]:
    original = getattr(GenerationMixin, name)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _batching().call(self, MethodType(original, self), _default, args, kwargs)

    method.replaced = original  # type: ignore[attr-defined]
    return method


def _storable(default: Any) -> Any:
    """Return a default without what cannot be stored: None for one with a pool or a drafter."""
    try:
        if default:
            default.to_dict()
    except ValueError:
        return None
    return default


def _put(model: Any, generate: Any) -> None:
    """Set a model object's own `generate`; None removes it, which leaves the class's.

    The methods of continuous batching come and go with our hook.
    """
    own = vars(model)
    if generate is None:
        own.pop("generate", None)
    else:
        own["generate"] = generate
    for name in BATCH_METHODS:
        if isinstance(own.get(name), BatchMethod):
            del own[name]
        if isinstance(generate, Hook) and hasattr(type(model), name):
            own.setdefault(name, BatchMethod(model, name, generate))


def enable(model: _Model, default: Any = None) -> _Model:
    """Let `model.generate` take `speculative=`, or speculate without it (`default=True`).

    Copies made by `copy.deepcopy` and by pickle are enabled too, independently; one made by
    `copy.copy` shares the hook, so that its `generate` runs the model that was enabled.

    This loads the functions that numba compiled earlier, which takes a second. Where there are none
    yet, another process compiles them, which takes half a minute once per installation; calls
    decode plainly until then.

    Args:
        model: A transformers model that can generate, also inside `torch.compile`,
            DistributedDataParallel, PEFT or a quantiser's wrapper.
        default: What calls without `speculative=` do where no generation config sets it: any value
            that `speculative=` takes. None leaves the default as it is, at first plain `generate`.

    Returns:
        The same object.

    Raises:
        ValueError: `model` is not such a model and contains none, or the default is unknown.
    """
    default, target = _resolved(default), unwrap(model)
    if not isinstance(vars(target).get("generate"), Hook):
        _put(target, Hook(target))
    if default is not None:
        vars(target)["generate"].default = default
    _load(groups_of(target))
    return model


def _load(groups: Sequence[Functions]) -> None:
    """Load compiled functions that are on disk, and have another process compile the others."""
    compilation.request(groups, is_between_calls=True)
    end = time.monotonic() + LOADING_SECONDS
    for each in groups:
        each.ready(max(0.0, end - time.monotonic()))


def _resolved(default: Any) -> Any:
    """Turn a default into a configuration, False for plain `generate`; None stays None."""
    return None if default is None else SpeculativeConfig.resolve(default) or False


def disable(model: _Model) -> _Model:
    """Undo `enable`: `model.generate` is again exactly what it was.

    This frees what the library keeps for later calls on any model: programs of compiled layers with
    their buffers, and captured graphs with their K and V. A later speculative call makes them anew.
    Freed memory goes back to the system.

    Args:
        model: A model, enabled or not.

    Returns:
        The same object.
    """
    target = unwrap(model)
    hook = vars(target).get("generate")
    if isinstance(hook, Hook):
        _put(target, hook._found)
    state_of(target).free()
    return model


@contextmanager
def enabled(model: _Model) -> Iterator[_Model]:
    """Enable a model inside a `with` block, and restore it afterwards.

    Unless it was enabled before, the end of the block frees what was kept for later calls, as
    `disable` does. Use `enable` for a series of calls.
    """
    target = unwrap(model)
    found = vars(target).get("generate")
    default = getattr(found, "default", None)
    enable(target)
    try:
        yield model
    finally:
        _put(target, found)
        if isinstance(found, Hook):
            found.default = default
        else:
            state_of(target).free()


_everywhere: Callable[..., Any] | None = None
"""The function that `enable_everywhere` put into `GenerationMixin`, None while it is off."""

_default: Any = None  # The default of models that are reached through it
_reached: WeakSet[Any] = WeakSet()  # Models that were called through it


def enable_everywhere(default: Any = None) -> None:
    """Let every model of the process take `speculative=` in `generate`, also future ones.

    Args:
        default: As for `enable`.
    """
    global _everywhere, _default
    resolved = _resolved(default)
    _default = _default if resolved is None else resolved
    if _everywhere is None:
        _everywhere = _class_hook(GenerationMixin.generate)
        GenerationMixin.generate = _everywhere
        for name in BATCH_METHODS:
            setattr(GenerationMixin, name, _class_method(name))
        _load([compilation.drafting])


def disable_everywhere() -> None:
    """Undo `enable_everywhere`; models that were enabled one by one stay enabled.

    This frees what was kept of all other models, as `disable` does.
    """
    global _everywhere, _default
    hook, _everywhere, _default = _everywhere, None, None
    # If another library has wrapped our function since, it stays in place and passes calls on.
    if hook is not None and GenerationMixin.generate is hook:
        GenerationMixin.generate = hook.__wrapped__  # type: ignore[attr-defined]
        for name in BATCH_METHODS:
            if hasattr(vars(GenerationMixin).get(name), "replaced"):
                delattr(GenerationMixin, name)
    while _reached:
        model = _reached.pop()
        if not isinstance(vars(model).get("generate"), Hook):
            state_of(model).free()


def _class_hook(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _everywhere is not generate:
            return original(self, *args, **kwargs)
        _reached.add(self)
        if kwargs.get("cache_implementation") == "paged":
            return _batching().run_paged(MethodType(original, self), args, kwargs)
        return run(self, MethodType(original, self), args, kwargs, _default)

    return generate


def generate(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Generate speculatively without patching anything: `model.generate` with speculation on.

    What is kept of the model for later calls is freed with it, or by `disable(model)`.

    Args:
        model: As for `enable`.
        *args: Arguments of `model.generate`.
        **kwargs: Arguments of `model.generate`, and `speculative` and `prediction`. `speculative`
            is True where neither the call nor a generation config sets it.

    Returns:
        What `model.generate` returns.
    """
    target = unwrap(model)
    # A wrapper's own generate may prepare the call, as PEFT's does.
    original = model.generate if hasattr(model, "generate") else target.generate
    if _speculates(original):
        return original(*args, **kwargs)
    return run(target, original, args, kwargs, default=True, by_name=True)


def custom_generate(*args: Any, model: Any, **kwargs: Any) -> Any:
    """Generate speculatively as the `generate` of a repository's `custom_generate/generate.py`.

    transformers calls it for `model.generate(..., custom_generate=repository)`, and as the
    `generate` of models that it loads from such a repository.

    Args:
        *args: Arguments of `model.generate`.
        model: The model, as transformers passes it.
        **kwargs: As for `generate`.

    Returns:
        What `model.generate` returns.
    """
    stock = MethodType(type(model).generate, model)
    return run(model, stock, args, kwargs, default=True)


def _speculates(original: Callable[..., Any]) -> bool:
    """Whether a model's own `generate` is `custom_generate`, which needs no hook."""
    return isinstance(original, functools.partial) and original.func is custom_generate


def set_default(model: Any, value: Any) -> None:
    """Set the default for calls of `generate` without `speculative=`.

    The default is kept as `model.generation_config.speculative`, and so by `save_pretrained`. It
    takes effect while the model is enabled.

    Args:
        model: As for `enable`.
        value: True, False, a preset's name, a configuration without objects in it or its dict; None
            removes the default.

    Raises:
        ValueError: The value is unknown or cannot be stored, or there is no generation config.
    """
    config = unwrap(model).generation_config
    if config is None:
        raise ValueError(
            "the default is kept in the model's generation config, and this model has none: set "
            "model.generation_config = transformers.GenerationConfig() first"
        )
    if value is None:
        vars(config).pop("speculative", None)
        return
    stored = value.to_dict() if isinstance(value, SpeculativeConfig) else value
    SpeculativeConfig.resolve_stored(stored)
    config.speculative = stored
    compat.keep_unknown_settings(config)


def learned_rates(model: Any) -> list[LearnedRate]:
    """Return how often what each source proposes is accepted, as far as calls have learned it.

    Args:
        model: As for `enable`.

    Returns:
        One entry per class of proposals that was tested, by source; docs/drafting.md explains the
        classes. The next call on the model starts from them.
    """
    return memory_of(unwrap(model)).rates.table()
