"""The state of one call of `generate`: its rows, target, drafts, stream and record."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from lookahead_hf import compat, stats
from lookahead_hf.distributed import coordinator
from lookahead_hf.draft import DraftTree, Verdict
from lookahead_hf.drafting.drafter import Drafter
from lookahead_hf.drafting.session import INVARIANT_WIDTH, DraftSession
from lookahead_hf.generation import prompts
from lookahead_hf.generation.finalize import Ending, observe
from lookahead_hf.generation.outputs import Records
from lookahead_hf.generation.request import Request, sources
from lookahead_hf.generation.streaming import ColumnStream
from lookahead_hf.runner import positions, self_test, support
from lookahead_hf.runner.compiled import CompiledRunner
from lookahead_hf.runner.cuda.runner import CudaRunner
from lookahead_hf.runner.host import BlockShape, Runner
from lookahead_hf.runner.torch_compile import is_compiled
from lookahead_hf.verification import device
from lookahead_hf.verification.select import Engine


class Call:
    """Everything that lives as long as one call; nothing of it is kept on the model.

    Attributes:
        rows: The texts.
        target: What runs the model.
        engine: What verifies drafts.
        drafts: What proposes them.
        record: What the call did so far.
        processes: Who decides where several processes run the model.
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
        self._num_new = int(generation_config.max_length) - input_ids.shape[1]
        # What forbids the call, then what is wrong with it; both before anything runs the model.
        self.processes = self._together()
        self._position_ids = self._admitted_positions()
        drafters = sources(
            model,
            request,
            len(input_ids),
            bool(generation_config.do_sample),
            self._encoder_inputs(),
            logits_processor,
        )
        support.check_trial(model)
        shape = self._shape()

        mask = model_kwargs.get(compat.decoder_names(model).mask)
        self.rows = prompts.rows_of(input_ids, mask, self._encoder_inputs())
        self.records = Records(
            generation_config, self.rows.num_rows, model_kwargs.get("encoder_outputs")
        )
        self.pad = compat.pad_token(generation_config)
        self.stream = ColumnStream(request.streamer, self.rows.num_rows, self.pad)
        self.engine = Engine(
            logits_processor,
            stopping_criteria,
            generation_config,
            input_ids,
            self.pad,
            self.records,
            self.stream,
            request.config.verification,
            on_device=self._is_on_device(),
            processes=self.processes,
        )
        self.target = self._target(shape)
        self.target.prompt.wanted = self.processes.is_alone
        self.drafts = self._session(drafters)
        self.record = stats.StatsRecorder(self.rows.num_rows)
        self._ending = self._how_to_end()

    def _admitted_positions(self) -> torch.Tensor:
        """The prompt's positions, [..., rows, columns]; raises Unserved where a call has to."""
        model, given = self.model, (self.generation_config, self.model_kwargs)
        support.check_call(model, *given)
        support.check_room(model, self.input_ids, *given)
        position_ids = positions.of_prompt(model, self.input_ids, self.model_kwargs)
        assert position_ids is not None
        positions.check_length(model, position_ids, self.input_ids.shape[1], self._num_new)
        return position_ids

    def _together(self) -> coordinator.Alone:
        """Who decides where several processes run the model."""
        request, num_rows = self.request, len(self.input_ids)
        return coordinator.of_call(
            self.model,
            self.input_ids.device,
            num_rows,
            request.config.max_draft_nodes,
            synced=request.synced_gpus,
            draws=request.draws(bool(self.generation_config.do_sample)),
            assistant=request.assistant_model,
        )

    def _is_on_device(self) -> bool:
        """Whether steps can stay on a device that can walk by itself."""
        served = self.processes.is_alone and device.serves(self.input_ids.device)
        return served and support.on_device(self.model, self.input_ids)

    def _target(self, shape: BlockShape | None) -> Runner:
        """What runs the model; its steps stay on the device where the engine does."""
        num_rows = self.rows.num_rows
        if self.engine.name != device.Device.name:
            if shape is None and is_compiled(self.model):
                return CompiledRunner(self.model, num_rows)
            return Runner(self.model, num_rows, shape)
        return CudaRunner(
            self.model,
            num_rows,
            shape,
            scoring=self.engine.scoring,
            room=self._num_new,
            cuda_graphs=self.request.config.cuda_graphs,
        )

    def _encoder_inputs(self) -> prompts.EncoderInputs | None:
        """What each row's encoder was given; None without one."""
        texts, mask = self.request.encoder_inputs, self.model_kwargs.get("attention_mask")
        return prompts.of_encoder(texts, len(self.input_ids), mask)

    def _shape(self) -> BlockShape | None:
        """The shape of all blocks, where the text may not depend on what is drafted."""
        self.by_kernel = False
        if not self.request.config.draft_invariant:
            return None
        support.check_invariance(self.model)
        # The kernel has no weights to show.
        shows = self.model_kwargs.get("output_attentions")
        self.by_kernel = not shows and self_test.keeps_bits_in_trees(self.model, INVARIANT_WIDTH)
        return BlockShape(INVARIANT_WIDTH, self._num_new + INVARIANT_WIDTH)

    def _session(self, drafters: list[Drafter]) -> DraftSession:
        request, num_new = self.request, self._num_new
        return DraftSession(
            self.model,
            request.config,
            self.rows,
            drafters,
            do_sample=bool(self.generation_config.do_sample),
            vocab_size=int(compat.text_config(self.model).vocab_size),
            max_new_tokens=positions.num_draftable(self.model, self._position_ids, num_new),
            target=self.target,
            chains=request.config.draft_invariant and not self.by_kernel,
        )

    def _how_to_end(self) -> Ending:
        returns = bool(self.generation_config.return_dict_in_generate)
        returns |= compat.is_users_cache(self.model_kwargs.get("past_key_values"))
        parts = self.rows, self.target, self.engine, self.records, self.processes
        return Ending(*parts, self.pad, returns)

    def prefill(self, decoding: ExitStack) -> torch.Tensor:
        """Stream the prompt, run it, return the logits after it, [rows, 1, vocab].

        Args:
            decoding: What ends with the call; the model is set up for its steps behind the prompt.
        """
        self.stream.prompt(self.input_ids)
        with self.record.phase("prefill"):
            outputs = self.target.prefill(
                self.input_ids,
                self.generation_config,
                self.model_kwargs,
                lambda: decoding.enter_context(compat.set_up_for_decoding(self.model)),
            )
        self.records.prefill(outputs)
        return outputs.logits[:, -1:]

    def begin_drafts(self) -> None:
        """Show the texts to the sources of the process that drafts."""
        if self.processes.decides:
            self.drafts.begin(self.rows)

    def propose(self) -> DraftTree:
        """The draft of a step, the same in all processes that run these rows."""
        return self.processes.draft(lambda: self.drafts.propose(self.rows))

    def unspoiled(self, draft: DraftTree, outputs: Any) -> tuple[DraftTree, Any]:
        """The step, run again without its draft where that has made NaN of a row's logits."""
        with self.record.phase("verify"):
            is_spoiled = self.target.is_spoiled(outputs, self.rows.live)
        if not is_spoiled:
            return draft, outputs
        with self.record.phase("forward"):
            self.processes.step()
            outputs = self.target.repeat_alone(self.rows)
        with self.record.phase("draft"):
            self.drafts.spoiled(outputs)
        return DraftTree.empty(self.rows.num_rows), outputs

    def verify(self, draft: DraftTree, outputs: Any) -> Verdict:
        """Decide a step and let the caller see its tokens; what a streamer takes is not counted."""
        streamed = self.stream.seconds
        with self.record.phase("verify"):
            verdict = self.engine.verify(self.rows, draft, outputs)
        self.record.leave_out("verify", self.stream.seconds - streamed)
        return verdict

    def observe(self, verdict: Verdict, outputs: Any) -> None:
        """Keep what the caller asked to see of a step, before its verdict is committed."""
        if self.records.observes:
            for row in np.flatnonzero(verdict.num_emitted).tolist():
                kept = [0, *(verdict.accepted(row) + 1).tolist()]
                observe(self.records, self.target, row, kept, outputs)

    def __enter__(self) -> Call:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is not None:
                self._ending.broke_off()
        finally:
            try:
                self.target.end()
            finally:
                self.drafts.end(self.rows)

    def output(self) -> Any:
        """Hand the cache back, close the stream and return what `generate` returns."""
        engine, execution = self.engine.name, self.target.execution
        record = self.record.finish(self.rows, engine, self.drafts, execution)
        columns = self._ending.num_columns
        cache = self._ending.reached()
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

    def _sequences(self, columns: int) -> torch.Tensor:
        """Prompt and generated columns, [rows, columns] int64, finished rows padded."""
        columns += self.rows.prompt_columns
        out = np.full((self.rows.num_rows, columns), self.pad or 0, np.int64)
        for row in range(self.rows.num_rows):
            ids = self.rows.ids(row)[:columns]  # of the prompt too, which a processor may edit
            out[row, : len(ids)] = ids
        return torch.from_numpy(out).to(self.input_ids.device)
