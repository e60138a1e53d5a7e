"""transformers' `pipeline` with speculation on by default."""

from __future__ import annotations

from typing import Any

import transformers

from lookahead_hf.call.arguments import OURS
from lookahead_hf.config import SpeculativeConfig
from lookahead_hf.hook import enable
from lookahead_hf.model import compat

SERVED: dict[str, type[Any]] = {
    "text-generation": transformers.TextGenerationPipeline,
    "image-text-to-text": transformers.ImageTextToTextPipeline,
    "any-to-any": transformers.AnyToAnyPipeline,
    "automatic-speech-recognition": transformers.AutomaticSpeechRecognitionPipeline,
}
"""The tasks whose pipelines pass a caller's arguments on to `generate`."""


def pipeline(
    task: str | None = None, model: Any = None, *args: Any, speculative: Any = True, **kwargs: Any
) -> Any:
    """Build a pipeline that generates speculatively.

    Pass `pipe(..., speculative=False)` to switch speculation off for one call. The default belongs
    to the pipeline: other callers of the same model object keep the model's own default.

    Args:
        task: As in `transformers.pipeline`.
        model: As in `transformers.pipeline`.
        *args: As in `transformers.pipeline`.
        speculative: The argument `speculative=` of `generate`.
        **kwargs: As in `transformers.pipeline`.

    Returns:
        The pipeline.

    Raises:
        ValueError: The pipeline does not generate text, or `speculative` has a wrong value.
    """
    SpeculativeConfig.resolve(speculative)
    pipe = transformers.pipeline(task, model, *args, **kwargs)
    if not issubclass(type(pipe), tuple(SERVED.values())):
        raise ValueError(
            f"a {pipe.task} pipeline does not generate text: speculation supports the tasks "
            f"{', '.join(SERVED)}; build other pipelines with transformers.pipeline"
        )
    enable(pipe.model)
    pipe.__class__ = _NESTING.get(type(pipe), type(pipe))
    compat.set_forward_parameter(pipe, "speculative", speculative)
    # A call needs it to check a pool's fingerprint, and to encode a prediction.
    compat.set_forward_parameter(pipe, "speculative_tokenizer", _tokenizer(pipe))
    return pipe


def _tokenizer(pipe: Any) -> Any:
    if pipe.tokenizer is not None:
        return pipe.tokenizer
    return getattr(getattr(pipe, "processor", None), "tokenizer", None)


class _Nesting(transformers.Pipeline):
    """Lets the calls of a pipeline take `speculative=`, which it passes to `generate`.

    These pipelines accept arguments of `generate` only as `generate_kwargs`. All other arguments of
    a call go to the processor, which ignores them, and the `generate_kwargs` of a call replace
    those of the pipeline.
    """

    def _sanitize_parameters(self, speculative: Any = None, **kwargs: Any) -> Any:
        preprocess, forward, postprocess = super()._sanitize_parameters(**kwargs)
        if speculative is not None:
            forward = {**forward, "speculative": speculative}
        return preprocess, forward, postprocess

    def _forward(self, model_inputs: Any, **kwargs: Any) -> Any:
        ours = {name: kwargs.pop(name) for name in OURS if name in kwargs}
        given = {**ours, **(kwargs.pop("generate_kwargs", None) or {})}  # whose entries win
        return super()._forward(model_inputs, **kwargs, generate_kwargs=given)


class SpeculativeImageTextToTextPipeline(_Nesting, transformers.ImageTextToTextPipeline):
    """An image-text-to-text pipeline whose calls take `speculative=`."""


class SpeculativeAnyToAnyPipeline(_Nesting, transformers.AnyToAnyPipeline):
    """An any-to-any pipeline whose calls take `speculative=`."""


_NESTING = {
    transformers.ImageTextToTextPipeline: SpeculativeImageTextToTextPipeline,
    transformers.AnyToAnyPipeline: SpeculativeAnyToAnyPipeline,
}
