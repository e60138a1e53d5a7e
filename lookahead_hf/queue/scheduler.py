"""Which requests get rows, and which ones are decoded alone."""

from __future__ import annotations

from collections.abc import Callable, Set
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from transformers import StoppingCriteriaList

from lookahead_hf.fallback import Unserved
from lookahead_hf.model import compat
from lookahead_hf.queue.request import OBJECTS, LogProbOptions, LogProbs, QueuedRequest
from lookahead_hf.verification.noise import OwnGenerators

CHUNK = 128
"""Most tokens of prompts that a step reads beside the rows that decode.

With SmolLM2-135M in bfloat16 on one core, a prompt of 1,418 tokens held other rows up for 1.2 s. In
such chunks they wait 0.17 s, and the queue takes as long as before.
"""


MOST_OVERTAKING = 64
"""Most requests that are completed before one that was put aside."""


class Scheduler:
    """Gives rows to requests, and the tokens of a step to the prompts that are being read.

    Attributes:
        jobs: The requests in progress by row.
        alone: Why plain `generate` writes the requests of some rows while the others wait, and how
            many had been completed when they were put aside.
        reading: Prompts that are read beside the steps of other rows, by row, [tokens] int64.
        max_batch_tokens: Most tokens of a step, None for any number.
    """

    def __init__(
        self,
        num_rows: int,
        waiting: Callable[[Set[int]], QueuedRequest | None],
        max_batch_tokens: int | None = None,
    ) -> None:
        """`waiting`: returns the next request that brings none of these objects."""
        self.jobs: dict[int, QueuedRequest] = {}
        self.alone: dict[int, tuple[Unserved, int]] = {}
        self._num_done = 0
        self.reading: dict[int, np.ndarray] = {}
        self.max_batch_tokens = max_batch_tokens
        self._num_rows, self._waiting = num_rows, waiting

    @property
    def free_rows(self) -> list[int]:
        """Rows without a request."""
        return [row for row in range(self._num_rows) if row not in self.jobs]

    def next_job(self) -> QueuedRequest | None:
        """Return the next request that can be decoded beside those in progress."""
        in_use = frozenset[int]().union(*(job.objects for job in self.jobs.values()))
        return self._waiting(in_use)

    def put_aside(self, row: int, unserved: Unserved) -> None:
        """Let a request keep its row until it is written alone."""
        self.alone[row] = unserved, self._num_done

    def next_alone(self) -> int | None:
        """Return a row whose request is to be written alone now, None if there is none.

        It is, once nobody else would wait for it, or too many requests have overtaken it.
        """
        for row, (_, num_done) in self.alone.items():
            overtaking = self._num_done - num_done
            if len(self.alone) == len(self.jobs) or overtaking >= MOST_OVERTAKING:
                return row
        return None

    def is_reading(self, prompt_ids: np.ndarray) -> bool:
        """Return whether some row is in the middle of this prompt, [tokens] int64."""
        return any(np.array_equal(ids, prompt_ids) for ids in self.reading.values())

    def budget(self, num_decoding: int) -> int:
        """Return how many tokens of prompts a step may read beside those that decode."""
        return CHUNK if self.max_batch_tokens is None else self.max_batch_tokens - num_decoding

    def schedule(self, token_budget: int, num_read: np.ndarray) -> dict[int, np.ndarray]:
        """Return the next chunk of each prompt, by row, [tokens] int64; the first read come first.

        Args:
            token_budget: Most tokens of all chunks.
            num_read: Tokens of each row that are in the cache, [rows].
        """
        chunks = {}
        for row, ids in self.reading.items():
            first = int(num_read[row])
            chunks[row] = ids[first : first + token_budget]
            token_budget -= len(chunks[row])
        return chunks

    def free(self, row: int) -> None:
        """End the request of a row."""
        self._num_done += row in self.jobs
        by_row: tuple[dict[int, Any], ...] = self.jobs, self.alone, self.reading
        for rows in by_row:
            rows.pop(row, None)


def write_alone(
    model: Any,
    settings: dict[str, Any],
    seed: int,
    on_token: Callable[[], bool],
    wanted: LogProbOptions,
) -> tuple[list[int], LogProbs]:
    """Return the new tokens of a request, and their log probabilities if these are wanted.

    Args:
        model: The model.
        settings: The arguments that `RequestBuilder.settings` returns.
        seed: The seed of the request.
        on_token: Called after every token; returns whether to stop.
        wanted: The log probabilities to return.
    """

    def given_up(input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), on_token(), device=input_ids.device)

    criteria = [*(settings.get("stopping_criteria") or ()), given_up]
    config = settings["generation_config"]
    config.return_dict_in_generate, config.output_scores = True, wanted.of_tokens
    own = OwnGenerators(model.device, seed)
    with own.in_place() if _may_draw(model, settings) else nullcontext():
        given = {**settings, "stopping_criteria": StoppingCriteriaList(criteria)}
        output = compat.plain_generate(model, **given)
    tokens: list[int] = output.sequences[0, settings["input_ids"].shape[1] :].tolist()
    found = LogProbs()
    if wanted.of_tokens:
        beams = output.get("beam_indices", torch.zeros(1, len(tokens), dtype=torch.long))
        chosen = zip(output.scores, beams[0, : len(tokens)].tolist(), strict=False)
        found.add(wanted, [scores[beam] for scores, beam in chosen], tokens)
    return tokens, found


def _may_draw(model: Any, settings: dict[str, Any]) -> bool:
    """Return whether a call may draw random numbers: it samples, or calls objects of a user."""
    do_sample = settings["generation_config"].do_sample
    if do_sample is None:
        do_sample = model.generation_config.do_sample
    return bool(do_sample) or any(settings.get(name) is not None for name in OBJECTS)
