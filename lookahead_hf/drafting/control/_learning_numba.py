"""Compiled functions that learn from verdicts; `tests/oracles/drafting.py` has them in Python."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import numpy as np

from lookahead_hf.ngram_pool.jit import jit


@jit
def tested_nodes(row_offsets, token_ids, parents, token_offsets, emitted):
    """Return what the text says about each node, [nodes] int8: 1 right, 0 wrong, -1 untested.

    Children of the root and of right nodes are tested, verified or not, by the token after their
    parent.
    """
    outcome = np.full(len(token_ids), -1, np.int8)
    after = np.full(len(token_ids), -1, np.int64)
    for row in range(len(row_offsets) - 1):
        first = row_offsets[row]
        start, end = token_offsets[row], token_offsets[row + 1]
        for node in range(first, row_offsets[row + 1]):
            parent = parents[node]
            place = after[first + parent] if parent >= 0 else 0
            if place < 0 or start + place >= end:
                continue
            outcome[node] = token_ids[node] == emitted[start + place]
            if outcome[node]:
                after[node] = place + 1
    return outcome


@jit
def learn_rates(
    outcome, entry_offsets, entry_source, entry_bucket, bucket_starts, prior, prior_weight, memory,
    counts, gained, rates,
):  # fmt: skip
    """Count each tested node in all its buckets and update their rates.

    After `memory` tests, a bucket forgets as much as it learns, and so follows the text. `counts`,
    `gained` and `rates`, those of `Calibration`, change in place.
    """
    for node in range(len(outcome)):
        if outcome[node] < 0:
            continue
        for entry in range(entry_offsets[node], entry_offsets[node + 1]):
            bucket = bucket_starts[entry_source[entry]] + entry_bucket[entry]
            if counts[1, bucket] >= memory:
                keep = (memory - 1.0) / counts[1, bucket]
                counts[0, bucket] *= keep
                counts[1, bucket] *= keep
            for total in (counts, gained):
                total[0, bucket] += outcome[node]
                total[1, bucket] += 1.0
            weight = counts[1, bucket] + prior_weight
            rates[bucket] = (counts[0, bucket] + prior_weight * prior[bucket]) / weight


@jit
def count_sources(row_offsets, entry_offsets, entry_source, path_offsets, path, counts):
    """Add up what each source drafted, what was accepted, and what of that only it proposed.

    `counts`, [rows, 3, sources] int64, changes in place. Returns the third count of this step over
    all rows, [sources] int64.
    """
    num_sources = counts.shape[2]
    proposed = np.empty(num_sources, np.bool_)
    exclusive = np.zeros(num_sources, np.int64)
    for row in range(len(row_offsets) - 1):
        first = row_offsets[row]
        accepted = path[path_offsets[row] : path_offsets[row + 1]]
        for node in range(first, row_offsets[row + 1]):
            hit = False
            for place in accepted:
                hit |= place == node - first
            proposed[:] = False
            num_proposing = 0
            for entry in range(entry_offsets[node], entry_offsets[node + 1]):
                num_proposing += not proposed[entry_source[entry]]
                proposed[entry_source[entry]] = True
            is_alone = num_proposing == 1
            for source in range(num_sources):
                counts[row, 0, source] += proposed[source]
                counts[row, 1, source] += hit and proposed[source]
                counts[row, 2, source] += hit and proposed[source] and is_alone
                exclusive[source] += hit and proposed[source] and is_alone
    return exclusive
