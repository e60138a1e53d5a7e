"""The state of one call of `generate`: its rows, target, drafts, stream and record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from lookahead_hf import compat, stats
from lookahead_hf.config import SpeculativeConfig
from lookahead_hf.drafting.registry import Resources
from lookahead_hf.drafting.session import INVARIANT_WIDTH, DraftSession, sources_of
from lookahead_hf.processes import together
from lookahead_hf.records import Records
from lookahead_hf.rows import Rows
from lookahead_hf.steps import DraftTree, Verdict
from lookahead_hf.streaming import ColumnStream
from lookahead_hf.target import admission, positions, probe
from lookahead_hf.target.compilation import is_compiled
from lookahead_hf.target.compiled import CompiledTarget
from lookahead_hf.target.device import DeviceTarget
from lookahead_hf.target.forward import BlockShape, Target
from lookahead_hf.target.recorded import Wanted
from lookahead_hf.target.views import seen_slots
from lookahead_hf.verification import device
from lookahead_hf.verification.engine import Engine


@dataclass(frozen=True, slots=True)
class Request:
    """What the caller of `generate` asked for beside transformers' own arguments.

    Attributes:
        config: How to speculate.
        streamer: Gets the prompt and every token, as plain `generate` feeds it.
        tokenizer: The caller's `tokenizer=`.
        assistant_model: The caller's `assistant_model=`.
        assistant_tokenizer: The caller's `assistant_tokenizer=`.
        assistant_settings: What the caller asks of assistants, by generation setting.
        synced_gpus: As `generate` computes it.
        prediction: The caller's guess of every row's text, token ids.
        encoder_inputs: What an encoder was given, [texts, ...].
    """

    config: SpeculativeConfig
    streamer: Any = None
    tokenizer: Any = None
    assistant_model: Any = None
    assistant_tokenizer: Any = None
    assistant_settings: Mapping[str, Any] = field(default_factory=dict)
    synced_gpus: bool = False
    prediction: Sequence[np.ndarray] | None = None
    encoder_inputs: torch.Tensor | None = None


class Call:
    """Everything that lives as long as one call; nothing of it is kept on the model.

    Attributes:
        by_kernel: Whether all attention is our kernel's, whatever else would be faster.
    """

    def __init__(
        self,
        model: Any,
        input_ids: torch.Tensor,  # [rows, columns]
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        request: Request,
    ) -> None:
        """Raises Unserved where the call cannot be served, ValueError where options are wrong."""
        self.model, self.input_ids, self.request = model, input_ids, request
        self.generation_config, self.model_kwargs = generation_config, model_kwargs
        self.processes = self._together()
        admission.check_call(model, generation_config, model_kwargs)
        num_new = int(generation_config.max_length) - input_ids.shape[1]
        position_ids = positions.of_prompt(model, input_ids, model_kwargs)
        assert position_ids is not None
        admission.check_room(model, input_ids, generation_config, model_kwargs)
        positions.check_length(model, position_ids, input_ids.shape[1], num_new)
        resources = self._resources(logits_processor)
        sources = sources_of(model, request.config, len(input_ids), resources)
        admission.check_trial(model)  # after all that can be wrong without a forward
        self.pad = compat.pad_token(generation_config)
        mask = model_kwargs.get(compat.decoder_names(model).mask)
        self.rows = _rows(input_ids, mask, self._encoder_ids())
        encoder_outputs = model_kwargs.get("encoder_outputs")
        self.records = Records(generation_config, self.rows.num_rows, encoder_outputs)
        self.engine = Engine(
            logits_processor,
            stopping_criteria,
            generation_config,
            input_ids,
            self.pad,
            self.records,
            request.config.verification,
            on_device=self._is_on_device(),
            processes=self.processes,
        )
        self.by_kernel = False
        self.target = self._target(num_new)
        self.target.prompt.wanted = self.processes.is_alone
        self.stream = ColumnStream(request.streamer, self.rows.num_rows, self.pad)
        self.drafts = DraftSession(
            model,
            request.config,
            self.rows,
            sources,
            do_sample=bool(generation_config.do_sample),
            vocab_size=int(compat.text_config(model).vocab_size),
            max_new_tokens=positions.num_draftable(model, position_ids, num_new),
            target=self.target,
            chains=request.config.draft_invariant and not self.by_kernel,
        )
        self.record = stats.StatsRecorder(self.rows.num_rows)
        cache = model_kwargs.get("past_key_values")
        returns = bool(generation_config.return_dict_in_generate)
        self._returns_cache = returns or compat.is_users_cache(cache)

    def _together(self) -> together.Alone:
        """Who decides where several processes run the model."""
        request, num_rows = self.request, len(self.input_ids)
        return together.of_call(
            self.model,
            self.input_ids.device,
            num_rows,
            request.config.max_draft_nodes,
            synced=request.synced_gpus,
            draws=self._draws,
            assistant=request.assistant_model,
        )

    @property
    def _draws(self) -> bool:
        """Whether drafts are drawn from a distribution, and so are verdicts on them."""
        rejects = self.request.config.verification == "rejection"
        return rejects and bool(self.generation_config.do_sample)

    def _is_on_device(self) -> bool:
        """Whether steps can stay on a device that can walk by itself."""
        served = self.processes.is_alone and device.serves(self.input_ids.device)
        return served and admission.on_device(self.model, self.input_ids)

    def _target(self, num_new: int) -> Target:
        """What runs the model; its steps stay on the device where the engine does."""
        shape, num_rows = self._shape(num_new), self.rows.num_rows
        if self.engine.name != device.Device.name:
            if shape is None and is_compiled(self.model):
                return CompiledTarget(self.model, num_rows)
            return Target(self.model, num_rows, shape, self._recording())
        return DeviceTarget(
            self.model,
            num_rows,
            shape,
            scoring=self.engine.scoring,
            room=num_new,
            cuda_graphs=self.request.config.cuda_graphs,
        )

    def _recording(self) -> Wanted | None:
        """How the steps may be recorded; a recording has no outputs but the logits."""
        if self.records.observes or not self.processes.is_alone:
            return None
        config = self.request.config
        rounds = config.draft_invariant and self.model.dtype == torch.float32
        return Wanted(config.recorded_steps, False if rounds else config.packed_weights)

    def _encoder_inputs(self) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """What each row's encoder was given, and its mask; several rows may share one text."""
        texts = self.request.encoder_inputs
        if texts is None:
            return None
        rows = texts.repeat_interleave(len(self.input_ids) // len(texts), 0)
        return rows, self.model_kwargs.get("attention_mask")

    def _encoder_ids(self) -> list[np.ndarray] | None:
        """Token ids that each row's encoder has read, without pads; None where it read none."""
        inputs, mask = self._encoder_inputs() or (None, None)
        if inputs is None or inputs.dim() != 2 or inputs.is_floating_point():
            return None
        ids = inputs.to("cpu").numpy()
        if mask is None or mask.dim() != 2:
            return list(ids)
        read = mask.to("cpu").numpy().astype(bool)
        return [ids[row][read[row]] for row in range(len(ids))]

    def _shape(self, num_new: int) -> BlockShape | None:
        """The shape of all blocks, where the text may not depend on what is drafted."""
        if not self.request.config.draft_invariant:
            return None
        admission.check_invariance(self.model)
        self.by_kernel = probe.keeps_bits_in_trees(self.model, INVARIANT_WIDTH)
        return BlockShape(INVARIANT_WIDTH, num_new + INVARIANT_WIDTH)

    def _resources(self, processors: Any) -> Resources:
        """What the drafters of this call can draw on."""
        request = self.request
        return Resources(
            predictions=request.prediction,
            assistant=request.assistant_model,
            tokenizers=(request.tokenizer, request.assistant_tokenizer),
            encoder_inputs=self._encoder_inputs(),
            vocab_size=int(compat.text_config(self.model).vocab_size),
            processors=processors,
            draws=self._draws,
            pool=request.config.pool,
            learn=request.config.learn,
            settings=request.assistant_settings,
        )

    def prefill(self) -> torch.Tensor:
        """Stream the prompt, run it, return the logits after it, [rows, 1, vocab]."""
        self.stream.prompt(self.input_ids)
        with self.record.phase("prefill"):
            run = self.target.prefill
            outputs = run(self.input_ids, self.generation_config, self.model_kwargs)
        self.records.prefill(outputs)
        return outputs.logits[:, -1:]

    def begin_drafts(self) -> None:
        """Show the texts to the sources of the process that drafts."""
        if self.processes.decides:
            self.drafts.begin(self.rows)

    def propose(self) -> DraftTree:
        """The draft of a step, the same in all processes that run these rows."""
        return self.processes.draft(lambda: self.drafts.propose(self.rows))

    def emit(self, verdict: Verdict) -> None:
        """Hand the tokens of a verdict to the stream."""
        if self.request.streamer is None:
            return
        for row in np.flatnonzero(verdict.num_emitted).tolist():
            for token in verdict.emitted(row).tolist():
                self.stream.push(row, token)
            if verdict.finished[row] and not self.engine.feeds_pads:
                self.stream.finish_row(row)

    def observe(self, verdict: Verdict, outputs: Any) -> None:
        """Keep what the caller asked to see of a step, before its verdict is committed."""
        if self.records.observes:
            for row in np.flatnonzero(verdict.num_emitted).tolist():
                self._observe(row, [0, *(verdict.accepted(row) + 1).tolist()], outputs)

    def _observe(self, row: int, kept: list[int], outputs: Any) -> None:
        assert self.target.cache is not None
        self.records.observe(row, kept, outputs, seen_slots(self.target.cache, row, kept))

    def __enter__(self) -> Call:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is not None:
                self._break_off()
        finally:
            try:
                self.target.end()
            finally:
                self.drafts.end(self.rows)

    def _break_off(self) -> None:
        try:
            if self._returns_cache and self.target.cache is not None:
                self.target.cache.hand_back(self.target.cache.num_columns + self.target.num_fed)
        finally:
            self.processes.broke_off()

    def output(self) -> Any:
        """Hand the cache back, close the stream and return what `generate` returns."""
        columns = self._num_columns()
        graphs = self.target.graphs
        record = self.record.finish(self.rows, self.engine.name, self.drafts, graphs)
        if self._returns_cache or self.records or self.processes.runs_same:
            self._catch_up(columns)
        while self.processes.others_go_on():
            self._run_for_others()
        cache = self._hand_back(columns) if self._returns_cache else None
        stats.publish(self.model, record)  # before the end, at which a reader may look for it
        self.stream.end()
        sequences = self._sequences(columns)
        if not self.generation_config.return_dict_in_generate:
            return sequences
        fields = self.records.fields(columns)
        has_encoder = self.model.config.is_encoder_decoder
        kind = GenerateEncoderDecoderOutput if has_encoder else GenerateDecoderOnlyOutput
        output = kind(sequences=sequences, past_key_values=cache, **fields)
        output.speculative_stats = record
        return output

    def _num_columns(self) -> int:
        """Columns that were generated; without a pad token the shortest row's."""
        emitted = self.rows.num_emitted
        return int(emitted.max() if self.pad is not None else emitted.min())

    def _catch_up(self, columns: int) -> None:
        """Feed finished rows pads until the last row's end, as plain does at every step."""
        short = np.maximum(columns - self.rows.num_emitted, 0)
        if not short.any():
            return
        pads = [
            [self.rows.last_token(row), *[self.pad or 0] * (count - 1)][:count]
            for row, count in enumerate(short.tolist())
        ]
        self.processes.step()
        longest_fed = columns - 2
        ahead = np.minimum(self.rows.num_emitted - 1, longest_fed)
        outputs = self.target.feed(pads, ahead)
        for row in np.flatnonzero(short).tolist():
            if self.records.observes:
                self._observe(row, list(range(short[row])), outputs)
            for index in range(short[row]):
                self.engine.feed_pad(self.rows, row, outputs.logits[row, index])
        self.target.keep(short)

    def _run_for_others(self) -> None:
        """A forward of which nothing is kept."""
        last = [[self.rows.last_token(row)] for row in range(self.rows.num_rows)]
        self.target.feed(last, self.rows.num_emitted - 1)

    def _hand_back(self, columns: int) -> Any:
        assert self.target.cache is not None
        return self.target.cache.hand_back(self.target.cache.num_columns + columns - 1)

    def _sequences(self, columns: int) -> torch.Tensor:
        """Prompt and generated columns, [rows, columns], finished rows padded."""
        out = np.full((self.rows.num_rows, columns), self.pad or 0, np.int64)
        for row in range(self.rows.num_rows):
            emitted = self.rows.emitted(row)[:columns]
            out[row, : len(emitted)] = emitted
        return torch.cat([self.input_ids, torch.from_numpy(out).to(self.input_ids)], 1)


def _rows(
    input_ids: torch.Tensor,  # [rows, columns]
    mask: torch.Tensor | None,  # [rows, columns]
    encoder_ids: list[np.ndarray] | None,
) -> Rows:
    ids = input_ids.to("cpu").numpy()
    if mask is None or not ids.shape[1]:
        return Rows(ids, None, encoder_ids)
    attended = mask[:, -ids.shape[1] :].to("cpu").numpy().astype(bool)
    return Rows(ids, attended, encoder_ids)
