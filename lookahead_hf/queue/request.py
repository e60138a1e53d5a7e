"""Requests of a queue, prepared as calls of one row, and their probabilities."""

from __future__ import annotations

import copy
import hashlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import StoppingCriteriaList

from lookahead_hf.call import admission
from lookahead_hf.call.emitter import ColumnStream, RequestedOutputs, build_emitter
from lookahead_hf.call.prepared import PreparedCall, Request
from lookahead_hf.call.stopping import knows_criterion, with_stop_strings
from lookahead_hf.config import check_int, drafter_name
from lookahead_hf.engines.cuda.graphs import WORTHWHILE
from lookahead_hf.fallback import FallbackReason, Unserved, check_settings
from lookahead_hf.generation.decode import build_drafters
from lookahead_hf.logits.constraints import Constraint
from lookahead_hf.logits.row_processors import knows_processor
from lookahead_hf.model import compat
from lookahead_hf.model.compat.generation import GenerationOutput, RequestState
from lookahead_hf.runner.host import Runner, StepOptions, choose
from lookahead_hf.stats import SpeculativeStats
from lookahead_hf.verification import select
from lookahead_hf.verification.noise import OwnGenerators
from lookahead_hf.verification.walk import Rules


@dataclass
class LogProbs:
    """The log probabilities of a text."""

    of_tokens: list[float] = field(default_factory=list)  # one per new token
    top: list[dict[int, float]] = field(default_factory=list)  # the likeliest tokens of each place

    def add(self, num_top: int, scores: Iterable[torch.Tensor], tokens: list[int]) -> None:
        """Add tokens, which were chosen by scores, [vocab] each."""
        for each, token in zip(scores, tokens, strict=True):
            log_probs = each.log_softmax(-1)
            self.of_tokens.append(float(log_probs[token]))
            if num_top:
                best = log_probs.topk(min(num_top, len(log_probs)))
                pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
                self.top.append(dict(pairs))


class KeptScores(RequestedOutputs):
    """Keeps the scores that the tokens of a step were chosen by, until they are taken."""

    def __init__(self, generation_config: Any) -> None:
        super().__init__(generation_config, 1)
        self.chooses = True
        self._latest: list[torch.Tensor] = []

    def choose(self, row: int, scores: torch.Tensor, logits: torch.Tensor) -> None:
        super().choose(row, scores, logits)
        self._latest.append(scores)

    def take(self) -> list[torch.Tensor]:
        """Return the scores since the last time."""
        latest, self._latest = self._latest, []
        return latest


_STEP = 0x9E3779B1  # Odd, so that the seeds of 2^32 texts differ: a CPU's generator reads 32 bits

OBJECTS = ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn")
"""Arguments of `generate` that a request may bring beside settings."""


def request_seed(seed: int, index: int) -> int:
    """Return the seed for `torch.manual_seed` with which `generate` writes text number `index`.

    Texts are numbered from 0 in the order in which requests were added. The texts of one request
    (`num_return_sequences`) follow each other.
    """
    digest = hashlib.blake2b(str(seed).encode(), digest_size=4).digest()
    return (int.from_bytes(digest, "little") + index * _STEP) % 2**32


MOST_TOP = 1024  # The upper limit of `top_logprobs`


def request_state(
    input_ids: Iterable[int],
    request_id: str,
    num_children: int = 0,
    max_new_tokens: int | None = None,
    streaming: bool = False,
    record_timestamps: bool = False,
    eos_token_id: int | list[int] | None = None,
    **own: Any,
) -> RequestState:
    """Return a request from the arguments of `add_request`."""
    given = request_id, list(input_ids), streaming, record_timestamps, max_new_tokens
    return RequestState(*given, eos_token_id, num_children, own)


def text_ids(state: RequestState) -> list[str]:
    """Return the ids of a request's texts, its own last."""
    children = (f"{state.request_id}__child#{child}" for child in range(state.num_children))
    return [*children, state.request_id]


def own_objects(state: RequestState) -> frozenset[int]:
    """Return the ids of a request's objects that may keep state between tokens.

    Processors and criteria of known classes do not. A method counts as its owner.
    """
    given = (state.logit_processor_kwargs.get(name) for name in OBJECTS)
    lists = (each if isinstance(each, (list, tuple)) else [each] for each in given)
    found = (each for own in lists for each in own if each is not None)
    unknown = (each for each in found if not (knows_processor(each) or knows_criterion(each)))
    return frozenset(id(getattr(each, "__self__", each)) for each in unknown)


@dataclass(eq=False)
class Group:
    """Requests whose texts wait in turn with those of other groups, such as those of one client."""

    turn: int = 0  # of its last text; a round has two


@dataclass(eq=False)
class QueuedRequest:
    """One text of a run; what follows `objects` is None before it has a row."""

    state: RequestState
    seed: int
    turn: int = 0  # waiting texts with lower ones come first
    names: frozenset[str] = frozenset()  # ids that cancel it: its own and that of its request
    objects: frozenset[int] = frozenset()  # see `own_objects`
    is_cancelled: bool = False  # whether nobody wants it any more
    # How many of the likeliest tokens have log probabilities, too; None if no token has
    num_top: int | None = None
    error: BaseException | None = None  # what it failed by, unless the whole run has failed
    call: PreparedCall | None = None
    rules: Rules | None = None
    constraint: Constraint | None = None
    log_probs: LogProbs = field(default_factory=LogProbs)

    def note_tokens(self, count: int) -> None:
        """Note that the text has so many new tokens."""
        if (times := self.state.timestamps) is not None:
            times += [time.perf_counter()] * count

    def output(self, record: SpeculativeStats | None = None) -> GenerationOutput:
        """Return the text so far, with its statistics at the end."""
        output, found = self.state.to_generation_output(), self.log_probs
        output.logprobs, output.top_logprobs = list(found.of_tokens), list(found.top)
        output.speculative_stats, output.exception = record, self.error
        return output


@dataclass(frozen=True)
class RequestBuilder:
    """Turns requests into calls of `generate`."""

    model: Any
    generation_config: Any  # the settings of requests that do not say otherwise
    request: Request  # how to speculate
    returns_log_probs: bool = False  # whether tokens have some if a request does not say

    def num_top(self, job: QueuedRequest) -> int | None:
        """Take the wish for log probabilities out of a request; ValueError if it is wrong."""
        own = job.state.logit_processor_kwargs
        num_top = own.pop("top_logprobs", 0)
        check_int("top_logprobs", num_top, 0, MOST_TOP)
        is_wanted = own.pop("return_logprobs", self.returns_log_probs) or num_top
        return num_top if is_wanted else None

    def settings(self, job: QueuedRequest) -> dict[str, Any]:
        """Return the arguments of the call of `generate` that writes the text of a job.

        ValueError if the prompt is no list of token ids, or a setting is unknown or the run's.
        """
        state, config = job.state, copy.deepcopy(self.generation_config)
        prompt = state.initial_tokens
        if len(prompt) == 0 or isinstance(prompt[0], (str, list)):
            raise ValueError(f"a prompt must be a non-empty list of token ids, got {prompt!r}")
        ids = torch.tensor([state.initial_tokens], dtype=torch.long, device=self.model.device)
        own = dict(state.logit_processor_kwargs)
        objects = {name: own.pop(name) for name in OBJECTS if name in own}
        if own.pop("num_return_sequences", 1) != 1:
            raise ValueError(
                "num_return_sequences is the same for all requests of a run: set it in the "
                "generation config of the manager"
            )
        unknown = config.update(num_return_sequences=1, **own)
        if unknown:
            names = ", ".join(map(repr, unknown))
            raise ValueError(f"unknown generation setting {names}: remove it")
        if state.max_new_tokens is not None:
            config.max_new_tokens = state.max_new_tokens
        if state.eos_token_id is not None:
            config.eos_token_id = state.eos_token_id
        objects |= self._stop_strings(config, objects)
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **objects}
        return {**given, "generation_config": config}

    def _stop_strings(self, config: Any, objects: dict[str, Any]) -> dict[str, Any]:
        """Turn the stop strings of a request into a criterion; `generate` would lose the tokenizer.

        Returns the arguments of `generate` that this changes.
        """
        strings, tokenizer = config.stop_strings, self.request.tokenizer
        of_model = self.model.generation_config.stop_strings
        strings = of_model if strings is None else strings
        if strings is None or tokenizer is None:
            return {}  # without a tokenizer `generate` raises its own error
        config.stop_strings = None
        criteria = with_stop_strings(objects.get("stopping_criteria"), strings, tokenizer)
        changed: dict[str, Any] = {"stopping_criteria": criteria}
        return changed if of_model is None else {**changed, "stop_strings": None}

    def call(self, job: QueuedRequest) -> PreparedCall:
        """Return the call of `generate` that writes the text of a job, prepared by transformers.

        Unserved if it cannot be decoded together with others; and whatever `generate` raises.
        """
        call = self._prepared(job)
        limit, last = compat.most_positions(self.model), call.generation_config.max_length - 1
        if limit is not None and last > limit:
            detail = f"positions up to {last}, where those of the model change or end at {limit}"
            raise Unserved(FallbackReason.MODEL, detail)
        return call

    def _prepared(self, job: QueuedRequest) -> PreparedCall:
        calls: list[PreparedCall] = []
        settings = self.settings(job)

        def keep(model: Any, input_ids: torch.Tensor, **given: Any) -> torch.Tensor:
            names = "logits_processor", "stopping_criteria", "generation_config"
            processors, criteria, config = map(given.pop, names)
            call = PreparedCall(model, input_ids, processors, criteria, config, given, self.request)
            calls.append(call)
            return input_ids

        compat.plain_generate(self.model, **settings, custom_generate=keep)
        (call,) = calls
        asked = vars(call.generation_config).items()
        check_settings({name: value for name, value in asked if value != "paged"}.get)
        admission.admit_call(call)
        admission.warn_of_rounding(self.model)
        return call

    def rules(self, call: PreparedCall, seed: int, keeps_scores: bool = False) -> Rules:
        """Return how the text of a call gets its tokens; its log probabilities need the scores.

        Unserved if its samples would depend on drafts, and so on the texts decoded beside it.
        """
        if self.request.draws(call.do_sample):
            detail = f"verification={self.request.config.verification!r} of samples"
            raise Unserved(FallbackReason.CONTINUOUS_BATCHING, detail, "leave it out")
        config = call.generation_config
        outputs = KeptScores(config) if keeps_scores else RequestedOutputs(config, 1)
        emitter = build_emitter(call, outputs, ColumnStream(None, 1, call.pad))
        return select.rules_of(call, emitter, seed)

    def check(self) -> None:
        """Check the model and the settings of the run: Unserved, or ValueError for a drafter."""
        model = self.model
        self._check_drafters()
        admission.admit(model, admission.Purpose.REQUESTS)
        if self.request.config.draft_invariant:
            raise Unserved(FallbackReason.CONTINUOUS_BATCHING, "draft_invariant=True")
        where, is_cpu = model.device, model.device.type == "cpu"
        serves = is_cpu or (select.serves(where) and admission.on_device(model, where))
        if not serves or not (self.rules(self.trial(), 0).takes_likeliest or is_cpu):
            detail = "an accelerator, unless tokens are the likeliest and all of the model is there"
            raise Unserved(FallbackReason.CONTINUOUS_BATCHING, detail, "call generate with a batch")

    def _check_drafters(self) -> None:
        heads = {"mtp", "medusa"} & {*map(str, self.request.config.drafters or ())}
        if not heads:
            do_sample = bool(self.generation_config.do_sample)
            built = build_drafters(self.model, self.request, None, do_sample)
            of_states = (each for each in built if "hidden_states" in each.traits.needs)
            heads = {*map(drafter_name, of_states)}
        if heads:
            raise ValueError(
                f"the drafter {min(heads)!r} reads hidden states, which continuous batching does "
                "not keep: leave it out, or call generate"
            )

    def runner(self, num_rows: int, max_batch_tokens: int | None) -> Runner:
        """Return what runs the steps of the run."""
        config = self.request.config
        options = StepOptions(
            self.model,
            num_rows,
            WORTHWHILE,
            lambda reads_prompts: admission.takes_packed(self.trial()),
            compiled_layers=config.compiled_layers,
            cuda_graphs=config.cuda_graphs,
        )
        runner = choose(select.engine_of(self.model.device), options)
        if max_batch_tokens is not None:
            fits, most = max_batch_tokens // num_rows - 1, runner.most_nodes
            runner.most_nodes = fits if most is None else min(most, fits)
        return runner

    def trial(self) -> PreparedCall:
        """Return the call of a made-up request of one token, which writes another without beams."""
        own = {"max_new_tokens": 1, "logit_processor_kwargs": {"num_beams": 1}}
        return self._prepared(QueuedRequest(RequestState("trial", [0], **own), 0))


def ending(on_token: Callable[[], bool]) -> Callable[..., torch.Tensor]:
    """Return a criterion; `on_token`, called after each token, says whether to end all texts."""
    return lambda ids, scores, **given: torch.full((len(ids),), on_token(), device=ids.device)


def write_alone(
    model: Any, settings: dict[str, Any], seed: int, on_token: Callable[[], bool]
) -> list[int]:
    """Return the new tokens of a request; `on_token`, called after each, says whether to stop."""
    criteria = [*(settings.get("stopping_criteria") or ()), ending(on_token)]
    given = {**settings, "stopping_criteria": StoppingCriteriaList(criteria)}
    given["generation_config"].return_dict_in_generate = False
    with OwnGenerators(model.device, seed).in_place():
        output = compat.plain_generate(model, **given)
    tokens: list[int] = output[0, settings["input_ids"].shape[1] :].tolist()
    return tokens
