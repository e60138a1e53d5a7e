"""Which calls of continuous batching speculate: by defaults, by settings, by other callers."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import GenerationMixin

import lookahead_hf
from lookahead_hf.hook import BATCH_METHODS
from lookahead_hf.model.compat.generation import WorkloadHints, bytes_per_token
from lookahead_hf.queue.manager import SpeculativeBatchingManager
from lookahead_hf.queue.methods import default_slots
from tests.helpers import models
from tests.helpers.requests import DRAFTED, alone, prompts, seeded, settings, speculated


@pytest.fixture
def model() -> Any:
    return models.tiny("llama")


@pytest.fixture
def everywhere() -> Iterator[None]:
    lookahead_hf.enable_everywhere(default=DRAFTED)
    yield
    lookahead_hf.disable_everywhere()


def test_generate_with_a_paged_cache(model: Any) -> None:
    config, (text,) = settings(model), prompts(1)
    given = {"max_new_tokens": 24, "do_sample": False, "cache_implementation": "paged"}
    lookahead_hf.enable(model)
    (found,) = model.generate(torch.tensor([text]), speculative=DRAFTED, **given).tolist()
    assert found[0][len(text) :] == alone(model, text, config)
    stats = lookahead_hf.totals(model)
    assert not stats.fallbacks and stats.stats.num_accepted > 0
    model.generation_config.cache_implementation = "paged"
    speculated(model.generate_batch([text], config, speculative=DRAFTED).values())


def test_a_generation_config_decides_if_the_call_does_not(model: Any) -> None:
    lookahead_hf.enable(model)
    config = settings(model)
    config.speculative = {"budget": 6}
    speculated(model.generate_batch(prompts(2), config).values())
    model.generation_config.speculative = {"budget": 6}
    speculated(model.generate_batch(prompts(2), settings(model)).values())


def test_every_model_of_a_process(model: Any, everywhere: None) -> None:
    config, (text,) = settings(model), prompts(1)
    speculated(model.generate_batch([text], config).values())
    out = model.generate(torch.tensor([text]), max_new_tokens=8, cache_implementation="paged")
    assert out.shape == (1, 1, len(text) + 8)
    assert lookahead_hf.totals(model).num_calls == 2
    lookahead_hf.enable(model)  # the object's own hook has no default
    small = seeded(num_blocks=2)
    assert not isinstance(model.init_continuous_batching(config, small), SpeculativeBatchingManager)
    assert set(BATCH_METHODS) <= set(vars(GenerationMixin))
    lookahead_hf.disable_everywhere()
    assert not set(BATCH_METHODS) & set(vars(GenerationMixin))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_batches_its_own_model(model: Any, copied: Any) -> None:
    lookahead_hf.enable(model, default=DRAFTED)
    other, config = copied(model), settings(model)
    speculated(other.generate_batch(prompts(2), config).values())
    assert lookahead_hf.totals(other).num_calls == 2
    assert lookahead_hf.totals(model).num_calls == 0


def test_every_call_has_a_manager_of_its_own(model: Any) -> None:
    lookahead_hf.enable(model, default=DRAFTED)
    texts, kept = prompts(2), {"persistent_manager": True}
    for config in settings(model, max_new_tokens=9), settings(model):
        found = model.generate_batch(texts, config, **kept).values()
        assert [each.generated_tokens for each in found] == [
            alone(model, text, config) for text in texts
        ]
        speculated(found)
    model.generate_batch(texts, settings(model), seeded(num_blocks=4), speculative=False, **kept)
    assert not isinstance(model._cached_continuous_batching_manager, SpeculativeBatchingManager)
    speculated(model.generate_batch(texts, settings(model), **kept).values())


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("speculativ", "did you mean speculative=?"),
        ("max_slot", "did you mean max_slots=?"),
        ("num_slots", "did you mean max_slots=?"),
        ("pool", "pass speculative=SpeculativeConfig(pool=...)"),
        ("drafter", "pass speculative=SpeculativeConfig(drafters=...)"),
        ("prediction", "leave it out, or call generate"),
        ("max_batch_token", "pass ContinuousBatchingConfig(max_batch_"),
    ],
)
@pytest.mark.parametrize("method", BATCH_METHODS)
def test_what_resembles_an_option_is_refused(model: Any, method: str, name: str, fix: str) -> None:
    lookahead_hf.enable(model)
    given = (prompts(1),) if method == "generate_batch" else ()
    with pytest.raises(ValueError, match=re.escape(f"{method} has no argument '{name}': {fix}")):
        getattr(model, method)(*given, **{name: 3})
    for ignored in ("seed", "streamer", "assistant_model", "logits_processor"):
        with pytest.raises(ValueError, match=f"no argument '{ignored}': "):
            model.generate_batch(prompts(1), speculative=True, **{ignored: 0})


def test_no_argument_of_transformers_is_refused(model: Any) -> None:
    lookahead_hf.enable(model)
    config, texts = settings(model), prompts(2)
    known = {**inspect.signature(GenerationMixin.generate).parameters}
    known |= inspect.signature(model.forward).parameters | vars(model.generation_config)
    known |= dict.fromkeys(("progres_bar", "slice_inputs", "anything"))  # which it ignores
    given = dict.fromkeys(known.keys() - {"self", "inputs", "generation_config", "speculative"})
    found = model.generate_batch(texts, config, speculative=DRAFTED, **given, max_slots=1)
    assert [output.generated_tokens for output in found.values()] == [
        alone(model, text, config) for text in texts
    ]
    with pytest.raises(TypeError, match="unexpected keyword argument 'anything'"):
        model.init_continuous_batching(anything=1)


def test_a_generation_config_brings_the_settings_of_the_run(model: Any) -> None:
    lookahead_hf.enable(model, default=DRAFTED)
    config, texts = settings(model, do_sample=True), prompts(2)
    config.continuous_batching_config = seeded()
    found = model.generate_batch(texts, config).values()
    assert [output.generated_tokens for output in found] == [
        alone(model, text, settings(model, do_sample=True), index)
        for index, text in enumerate(texts)
    ]
    speculated(found)


@pytest.mark.parametrize(
    "wrong",
    [{"pool": "no/such/pool"}, {"drafters": ("assistant",)}, {"options": {"ngram": {"x": 1}}}],
)
def test_what_is_wrong_with_a_drafter_is_said_before_a_run(model: Any, wrong: Any) -> None:
    lookahead_hf.enable(model)
    with pytest.raises(ValueError, match="pool|assistant|ngram"):
        model.generate_batch([[5]], speculative=lookahead_hf.SpeculativeConfig(**wrong))


def test_an_accelerator_keeps_transformers_own(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose steps need no word from the host."""
    lookahead_hf.enable(model, default=DRAFTED)
    kind = type(model)
    monkeypatch.setattr(kind, "device", property(lambda _: torch.device("cuda")))
    with pytest.warns(UserWarning, match="an accelerator"):
        manager = model.init_continuous_batching(settings(model), seeded())
    assert not isinstance(manager, SpeculativeBatchingManager)
    assert lookahead_hf.last_stats(model).fallback_reason == "continuous_batching"
    assert lookahead_hf.totals(model).fallbacks == {"continuous_batching": 1}


@pytest.mark.parametrize(
    ("prompt", "generated", "count", "slots"),
    [(0, 0, 0, 16), (0, 0, 5, 5), (900, 100, 99, 16), (600_000, 200_000, 99, 3), (10**9, 0, 0, 1)],
)
def test_texts_that_are_decoded_together_by_default(
    model: Any, prompt: int, generated: int, count: int, slots: int
) -> None:
    """1 GiB holds K and V of 2.8 million tokens of the tiny model."""
    assert bytes_per_token(model) == 384
    assert default_slots(model, WorkloadHints(prompt, generated, count)) == slots
    assert default_slots(model, None) == 16
