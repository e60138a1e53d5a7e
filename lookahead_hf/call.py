"""The state of one call of `generate`: its rows, target, drafts, stream and record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers.generation.utils import GenerateDecoderOnlyOutput

from lookahead_hf import compat, stats
from lookahead_hf.config import SpeculativeConfig
from lookahead_hf.drafting.session import DraftSession
from lookahead_hf.fallback import FallbackReason, Unserved
from lookahead_hf.rows import Rows
from lookahead_hf.steps import DraftTree, Verdict
from lookahead_hf.streaming import ColumnStream
from lookahead_hf.target import admission
from lookahead_hf.target.forward import Target


@dataclass(frozen=True, slots=True)
class Request:
    """What the caller of `generate` asked for beside transformers' own arguments.

    Attributes:
        config: How to speculate.
        streamer: Gets the prompt and every token, as plain `generate` feeds it.
        tokenizer: The caller's `tokenizer=`.
        assistant_model: The caller's `assistant_model=`.
        assistant_tokenizer: The caller's `assistant_tokenizer=`.
        synced_gpus: As `generate` computes it.
        prediction: The caller's guess of every row's text, token ids.
    """

    config: SpeculativeConfig
    streamer: Any = None
    tokenizer: Any = None
    assistant_model: Any = None
    assistant_tokenizer: Any = None
    synced_gpus: bool = False
    prediction: Sequence[np.ndarray] | None = None


class Call:
    """Everything that lives as long as one call; nothing of it is kept on the model."""

    def __init__(
        self,
        model: Any,
        input_ids: torch.Tensor,  # [rows, columns]
        generation_config: Any,
        model_kwargs: dict[str, Any],
        request: Request,
    ) -> None:
        """Raises Unserved where the target cannot serve the call."""
        admission.check(model, generation_config, model_kwargs)
        if request.synced_gpus:
            raise Unserved(FallbackReason.SYNCED_GPUS, "processes that must step together")
        self.model, self.input_ids = model, input_ids
        self.generation_config, self.model_kwargs = generation_config, model_kwargs
        self.pad = compat.pad_token(generation_config)
        self.target = Target(model, input_ids.shape[0])
        self.rows = self._rows()
        self.no_draft = DraftTree.empty(self.rows.num_rows)
        self.record = stats.StatsRecorder(self.rows.num_rows)
        self.stream = ColumnStream(request.streamer, self.rows.num_rows, self.pad)
        self.drafts = DraftSession(
            model,
            request.config,
            self.rows,
            do_sample=bool(generation_config.do_sample),
            vocab_size=int(compat.text_config(model).vocab_size),
            max_new_tokens=int(generation_config.max_length) - input_ids.shape[1],
            predictions=request.prediction,
        )
        self._returns_cache = self._is_cache_returned()

    def _is_cache_returned(self) -> bool:
        """Whether anybody sees the cache after the call."""
        cache = self.model_kwargs.get("past_key_values")
        return self.generation_config.return_dict_in_generate or compat.is_users_cache(cache)

    def _rows(self) -> Rows:
        ids = self.input_ids.to("cpu").numpy()
        mask = self.model_kwargs.get("attention_mask")
        attended = None if mask is None else mask[:, -ids.shape[1] :].to("cpu").numpy().astype(bool)
        return Rows(ids, attended)

    def prefill(self) -> torch.Tensor:
        """Stream the prompt, run it, return the logits after it, [rows, 1, vocab]."""
        self.stream.prompt(self.input_ids)
        with self.record.phase("prefill"):
            return self.target.prefill(self.input_ids, self.generation_config, self.model_kwargs)

    def emit(self, verdict: Verdict) -> None:
        """Hand the tokens of a verdict to the stream."""
        for row in np.flatnonzero(verdict.live).tolist():
            for token in verdict.emitted(row).tolist():
                self.stream.push(row, token)
            if verdict.finished[row]:
                self.stream.finish_row(row)

    def __enter__(self) -> Call:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.drafts.end(self.rows)
        if kind is not None and self._returns_cache and self.target.cache is not None:
            self.target.cache.hand_back(self.target.cache.num_columns + self.target.num_fed)

    def output(self, engine: str) -> Any:
        """Close the stream, hand the cache back and return what `generate` returns."""
        columns = self._num_columns()
        cache = self._hand_back(columns) if self._returns_cache else None
        record = self.record.finish(self.rows, engine, self.drafts)
        stats.publish(self.model, record)
        self.stream.end()
        sequences = self._sequences(columns)
        if not self.generation_config.return_dict_in_generate:
            return sequences
        output = GenerateDecoderOnlyOutput(sequences=sequences, past_key_values=cache)
        output.speculative_stats = record
        return output

    def _num_columns(self) -> int:
        """Columns that were generated; without a pad token the shortest row's."""
        emitted = self.rows.num_emitted
        return int(emitted.max() if self.pad is not None else emitted.min())

    def _sequences(self, columns: int) -> torch.Tensor:
        """Prompt and generated columns, [rows, columns], finished rows padded."""
        width = self.input_ids.shape[1]
        out = np.full((self.rows.num_rows, columns), self.pad or 0, np.int64)
        for row in range(self.rows.num_rows):
            emitted = self.rows.emitted(row)[:columns]
            out[row, : len(emitted)] = emitted
        new = torch.from_numpy(out).to(self.input_ids)
        return torch.cat([self.input_ids[:, :width], new], 1)

    def _hand_back(self, columns: int) -> Any:
        """The cache as plain leaves it: finished rows were fed pads until the last row ended."""
        assert self.target.cache is not None
        short = columns - self.rows.num_emitted
        if (short > 0).any():
            pads = [
                [self.rows.last_token(r)] + [self.pad or 0] * (n - 1) if n > 0 else []
                for r, n in enumerate(short.tolist())
            ]
            self.target.feed(pads, self.rows.num_emitted - 1)
        return self.target.cache.hand_back(self.target.cache.num_columns + columns - 1)
