"""Compiled functions that learn from verdicts; `reference` says what each of them does."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import numpy as np

from lookahead_hf.ngram_pool.jit import jit


@jit
def tested_nodes(row_offsets, token_ids, parents, token_offsets, emitted):
    outcome = np.full(len(token_ids), -1, np.int8)
    after = np.full(len(token_ids), -1, np.int64)
    for row in range(len(row_offsets) - 1):
        first = row_offsets[row]
        start, end = token_offsets[row], token_offsets[row + 1]
        for node in range(first, row_offsets[row + 1]):
            parent = parents[node]
            step = after[first + parent] if parent >= 0 else 0
            if step < 0 or start + step >= end:
                continue
            outcome[node] = token_ids[node] == emitted[start + step]
            if outcome[node]:
                after[node] = step + 1
    return outcome


@jit
def learn_rates(
    outcome, entry_offsets, entry_source, entry_bucket, bucket_starts, prior, prior_weight, memory,
    counts, gained, rates,
):  # fmt: skip
    for node in range(len(outcome)):
        if outcome[node] < 0:
            continue
        for entry in range(entry_offsets[node], entry_offsets[node + 1]):
            bucket = bucket_starts[entry_source[entry]] + entry_bucket[entry]
            if counts[1, bucket] >= memory:
                keep = (memory - 1.0) / counts[1, bucket]
                counts[0, bucket] *= keep
                counts[1, bucket] *= keep
            counts[0, bucket] += outcome[node]
            counts[1, bucket] += 1.0
            gained[0, bucket] += outcome[node]
            gained[1, bucket] += 1.0
            weight = counts[1, bucket] + prior_weight
            rates[bucket] = (counts[0, bucket] + prior_weight * prior[bucket]) / weight


@jit
def count_sources(row_offsets, entry_offsets, entry_source, path_offsets, path, counts):
    for row in range(len(row_offsets) - 1):
        first = row_offsets[row]
        accepted = path[path_offsets[row] : path_offsets[row + 1]]
        for node in range(first, row_offsets[row + 1]):
            hit = False
            for step in range(len(accepted)):
                hit |= accepted[step] == node - first
            num_sources, begin, end = 0, entry_offsets[node], entry_offsets[node + 1]
            for entry in range(begin, end):
                num_sources += _is_first(entry_source, begin, entry)
            for entry in range(begin, end):
                if _is_first(entry_source, begin, entry):
                    source = entry_source[entry]
                    counts[0, source] += 1
                    counts[1, source] += hit
                    counts[2, source] += hit and num_sources == 1


@jit
def _is_first(entry_source, begin, entry):
    """Whether no earlier entry of the node is of the same source."""
    first = True
    for other in range(begin, entry):
        first &= entry_source[other] != entry_source[entry]
    return first
