"""transformers' `pipeline` with speculation on by default."""

from __future__ import annotations

import importlib
from typing import Any

import transformers
from transformers import (
    AnyToAnyPipeline,
    AutomaticSpeechRecognitionPipeline,
    ImageTextToTextPipeline,
    TextGenerationPipeline,
)
from transformers.pipelines import check_task

from lookahead_hf.config import SpeculativeConfig
from lookahead_hf.generation.options import OURS
from lookahead_hf.hook import enable

SERVED: dict[str, type[Any]] = {
    "text-generation": TextGenerationPipeline,
    "image-text-to-text": ImageTextToTextPipeline,
    "any-to-any": AnyToAnyPipeline,
    "automatic-speech-recognition": AutomaticSpeechRecognitionPipeline,
}
"""Tasks whose pipelines hand `generate` what their caller asks of it."""


def pipeline(
    task: str | None = None, model: Any = None, *args: Any, speculative: Any = True, **kwargs: Any
) -> Any:
    """Build a pipeline whose texts are generated speculatively.

    A single call decides otherwise by `pipe(..., speculative=False)`. The default belongs to the
    pipeline: a model object that is given keeps its own for other callers.

    Args:
        task: As in `transformers.pipeline`.
        model: As in `transformers.pipeline`.
        *args: As in `transformers.pipeline`.
        speculative: What `generate` takes as `speculative=`.
        **kwargs: As in `transformers.pipeline`.

    Returns:
        The pipeline.

    Raises:
        ValueError: The pipeline does not generate text, or `speculative` is not understood.
    """
    SpeculativeConfig.resolve(speculative)
    kind = kwargs.get("pipeline_class") or _kind_of(task)
    if kind is not None:
        _check(task, kind)  # before anything is loaded
    pipe = transformers.pipeline(task, model, *args, **kwargs)
    _check(pipe.task, type(pipe))
    enable(pipe.model)
    pipe.__class__ = _NESTING.get(type(pipe), type(pipe))
    pipe._forward_params["speculative"] = speculative
    # It tells whether a pool of n-grams is of this model, and reads a prediction.
    pipe._forward_params["speculative_tokenizer"] = _tokenizer(pipe)
    return pipe


def _kind_of(task: str | None) -> type[Any] | None:
    """The class of a task's pipelines; None where transformers has to find that out."""
    if task is None:
        return None
    try:
        _, description, _ = check_task(task)
    except KeyError:  # no task, or a repository's own
        return None
    kind = description["impl"]
    if isinstance(kind, str):  # where it would be imported
        module, _, name = kind.rpartition(".")
        kind = getattr(importlib.import_module(module), name)
    found: type[Any] = kind
    return found


def _check(task: str | None, kind: type[Any]) -> None:
    if not issubclass(kind, tuple(SERVED.values())):
        raise ValueError(
            f"a {task or kind.__name__} pipeline does not generate text: speculation is for the "
            f"tasks {', '.join(SERVED)}; build the others with transformers.pipeline"
        )


def _tokenizer(pipe: Any) -> Any:
    if pipe.tokenizer is not None:
        return pipe.tokenizer
    return getattr(getattr(pipe, "processor", None), "tokenizer", None)


# These two kinds of pipelines take arguments of `generate` as `generate_kwargs` only: what else a
# call names goes to the processor, which ignores it, and a call's `generate_kwargs` replace the
# pipeline's.


class SpeculativeImageTextToTextPipeline(ImageTextToTextPipeline):
    """An image-text-to-text pipeline whose calls take `speculative=`."""

    def _sanitize_parameters(self, speculative: Any = None, **kwargs: Any) -> Any:
        return _with_speculative(super()._sanitize_parameters(**kwargs), speculative)

    def _forward(self, model_inputs: Any, **kwargs: Any) -> Any:
        return super()._forward(model_inputs, **_nested(kwargs))


class SpeculativeAnyToAnyPipeline(AnyToAnyPipeline):
    """An any-to-any pipeline whose calls take `speculative=`."""

    def _sanitize_parameters(self, speculative: Any = None, **kwargs: Any) -> Any:
        return _with_speculative(super()._sanitize_parameters(**kwargs), speculative)

    def _forward(self, model_inputs: Any, **kwargs: Any) -> Any:
        return super()._forward(model_inputs, **_nested(kwargs))


def _with_speculative(parameters: tuple[Any, Any, Any], speculative: Any) -> tuple[Any, Any, Any]:
    """A call's parameters for preprocess, forward and postprocess, `speculative` to the forward."""
    preprocess, forward, postprocess = parameters
    if speculative is not None:
        forward = {**forward, "speculative": speculative}
    return preprocess, forward, postprocess


def _nested(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Parameters of the forward with ours where `generate` gets them, unless they are there."""
    ours = {name: kwargs.pop(name) for name in OURS if name in kwargs}
    return {**kwargs, "generate_kwargs": {**ours, **(kwargs.get("generate_kwargs") or {})}}


_NESTING = {
    ImageTextToTextPipeline: SpeculativeImageTextToTextPipeline,
    AnyToAnyPipeline: SpeculativeAnyToAnyPipeline,
}
