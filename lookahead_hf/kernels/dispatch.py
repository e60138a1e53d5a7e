"""The one place that chooses between a Triton kernel and its torch twin."""

from __future__ import annotations

import os
import warnings
from functools import lru_cache
from importlib.util import find_spec

import numpy as np
import torch

from lookahead_hf.kernels import reference
from lookahead_hf.kernels.cpu import program
from lookahead_hf.kernels.data import PathTable, RowScan, TopRows, TreeWalk, Wanted
from lookahead_hf.ngram_pool import compilation

MAX_ATTENTION_NODES = 64
"""Nodes of a row in `tree_attention`, node 0 included: one bit each in the ancestor words."""

MAX_HEAD_DIM = 256
"""Largest head of `tree_attention`."""

MAX_FUSED_K = 64
"""Largest k of the kernel of `topk_rows`, a program of which holds k tiles at once."""

_VARIABLE = "LOOKAHEAD_HF_BACKEND"


def backend(device: torch.device) -> str:
    """Return what runs on a device: "triton" on CUDA and ROCm, "torch" elsewhere.

    It is "torch" also for NVIDIA's GPUs before Ampere, which Triton does not support, and where the
    first launch fails. The environment variable LOOKAHEAD_HF_BACKEND, "triton" or "torch",
    overrides it.

    Raises:
        ValueError: The variable holds anything else, or names Triton where it cannot run.
    """
    chosen = setting()
    if not chosen:
        return "triton" if device.type == "cuda" and _has_triton(device) else "torch"
    if chosen not in ("triton", "torch"):
        raise ValueError(f"{_VARIABLE} is {chosen!r}: set it to 'triton' or 'torch', or unset it")
    if chosen == "triton" and device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            f"{_VARIABLE} is 'triton', but the tensors are on the CPU: unset it, or start the "
            "process with TRITON_INTERPRET=1 to run the kernels in Triton's interpreter"
        )
    return chosen


def setting() -> str:
    """Return what the environment variable asks for, "" for nothing."""
    return os.environ.get(_VARIABLE, "")


def is_asked_for() -> bool:
    """Return whether the environment variable asks for the kernels."""
    return setting() == "triton"


@lru_cache
def _has_triton(device: torch.device) -> bool:
    """Return whether Triton is installed, supports the GPU and runs on it.

    Before its first launch Triton compiles code for the host, for which it needs a C compiler and
    Python's headers. Slim images have neither.
    """
    if find_spec("triton") is None:
        return False
    if not torch.version.hip and torch.cuda.get_device_capability(device) < (8, 0):
        return False
    try:
        from lookahead_hf.kernels import _common

        _common.try_launch(device)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        said = (str(error).splitlines() or [""])[0]
        warnings.warn(
            f"Triton cannot run on {device}, so torch takes its place, which is slower: "
            f"{type(error).__name__}: {said}. Triton needs a C compiler and Python's headers",
            RuntimeWarning,
            stacklevel=3,
        )
        return False
    return True


def verify_tree(
    scores: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    num_nodes: torch.Tensor,
    noise: torch.Tensor | None = None,
    depth: torch.Tensor | None = None,
    keep_scan: bool = False,
) -> TreeWalk:
    """Choose a token at every node of a draft tree, and walk down while a child holds it.

    Without `noise` the token at a node is `argmax(scores)`. With it, `scores` are probabilities and
    the token is `argmax(scores / noise[depth])`, as `torch.multinomial` computes it. NaN and ties
    are treated as in `torch.argmax`.

    Args:
        scores: Logits or probabilities after every node, [rows, 1 + nodes, vocab].
        tokens: Node 0 is the row's last token, then its drafted tokens, [rows, 1 + nodes] integers.
        parents: Parent of each node in the same numbering, before its children, -1 for node 0,
            [rows, 1 + nodes] integers.
        num_nodes: Drafted nodes of each row, node 0 not counted, [rows] integers.
        noise: One block of noise per depth, [rows, depths, vocab] float32.
        depth: Depth of each node, 0 for node 0, needed with `noise`, [rows, 1 + nodes] integers.
        keep_scan: Whether to keep what saves `topk_rows` its pass over the same scores; without
            noise only.

    Returns:
        The accepted paths. The bonus token is the one chosen at the last node of the path.
    """
    assert (noise is None) == (depth is None), "noise and depth go together"
    assert noise is None or not keep_scan, "scores divided by noise are of no use to topk_rows"
    given = scores, tokens, parents, num_nodes, noise, depth
    if backend(scores.device) == "triton":
        from lookahead_hf.kernels import verify

        return verify.verify_tree(*given, keep_scan)
    return reference.verify_tree(*given)


def reject_tree(
    probs: torch.Tensor,
    draft_probs: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    num_nodes: torch.Tensor,
    uniforms: torch.Tensor,
    noise: torch.Tensor,
) -> TreeWalk:
    """Walk down a draft tree by rejection sampling: what is emitted is distributed as `probs`.

    A child is accepted with probability `min(1, p / q)`. Where it is rejected, the next sibling is
    tried on the residual `max(p - q, 0)`; where none is left, the recovered token is drawn from it.
    Where the path ends in a leaf, the bonus token is drawn from the target's distribution there.

    Args:
        probs: The target's distribution after every node, [rows, 1 + nodes, vocab] float32.
        draft_probs: What each drafted node was drawn from, node `1 + i` at index `i`; one token at
            1.0 for a draft without probabilities, [rows, nodes, vocab] float32.
        tokens: As in `verify_tree`, and so are `parents` and `num_nodes`.
        parents: As there.
        num_nodes: As there.
        uniforms: A random number of [0, 1) for each drafted node, [rows, nodes] float32.
        noise: Exponential noise, which decides the last token of each row, [rows, vocab] float32.

    Returns:
        The accepted paths, without `best`; `bonus` holds the bonus or the recovered token.
    """
    given = probs, draft_probs, tokens, parents, num_nodes, uniforms, noise
    if backend(probs.device) == "triton":
        from lookahead_hf.kernels import reject

        return reject.reject_tree(*given)
    return reference.reject_tree(*given)


def compact_path(
    table: PathTable,
    lengths: torch.Tensor,
    path: torch.Tensor,
    num_kept: torch.Tensor,
) -> None:
    """Keep one path of every row's draft tree in the cache: move its tokens together, in place.

    For `i < num_kept[row]`, the token in slot `lengths[row] + path[row, i]` of every tensor moves
    to slot `lengths[row] + i`. A token whose slot stays the same keeps its value.

    Args:
        table: Keys and values of the layers, [batch, slot, ...] each.
        lengths: Slots of each row before node 0, [rows] integers.
        path: Node numbers as in `TreeWalk.path`, ascending, [rows, any] integers.
        num_kept: Entries of `path` that count, [rows] integers.
    """
    for part in table.by_device:
        device = part.tensors[0].device
        local = [tensor.to(device, non_blocking=True) for tensor in (lengths, path, num_kept)]
        if backend(device) == "triton":
            from lookahead_hf.kernels import compact

            compact.compact_path(part, *local)
        else:
            reference.compact_path(part, *local)


def compact_on_host(
    table: PathTable, lengths: np.ndarray, path: np.ndarray, num_kept: np.ndarray
) -> None:
    """Keep one path as `compact_path` does, given arrays of int64 on the host.

    On a CPU a compiled loop moves the tokens: for 60 tensors torch takes 0.6 ms.
    """
    is_ready = compilation.common.is_loaded()
    for part in table.by_device:
        device = part.tensors[0].device
        is_served = device.type == "cpu" and part.word_bytes > 1
        if is_ready and is_served and backend(device) == "torch":
            program.compact_path(part, lengths, path, num_kept)
        else:
            compact_path(part, *map(torch.from_numpy, (lengths, path, num_kept)))


def argmax(scores: torch.Tensor) -> int:
    """Return the index of the first largest of some scores, [vocab], as `torch.argmax`.

    On a CPU torch takes 60 us for 49,152 scores in float32 and 180 us in bfloat16.
    """
    if scores.device.type != "cpu":
        return int(scores.argmax())
    if program.chooses(scores.dtype) and scores.is_contiguous():
        return program.argmax(scores)
    return int(scores.float().numpy().argmax())


def topk_rows(
    logits: torch.Tensor, k: int, scan: RowScan | None = None, wanted: Wanted | None = None
) -> TopRows:
    """Find the `k` best entries of every row, best first, and the `logsumexp` of the row.

    Args:
        logits: Scores, [rows, vocab].
        k: How many, at most the size of the vocabulary.
        scan: `TreeWalk.scan` of these scores, if `verify_tree` kept it. Results for rows of
            padding are then undefined.
        wanted: Limits below `k` for rows that are the nodes of a step's trees. Entries beyond a
            row's limit are undefined, and a kernel skips them.

    Returns:
        Values, [rows, k] float32, token ids, [rows, k] int64, and sums, [rows] float32.
    """
    assert k <= logits.shape[1], "a row has fewer entries"
    if backend(logits.device) == "triton" and k <= MAX_FUSED_K:
        from lookahead_hf.kernels import topk

        return topk.topk_rows(logits, k, scan, wanted)
    return reference.topk_rows(logits, k)


def tree_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: torch.Tensor,
    ancestors: torch.Tensor,
    scale: float,
    window: int = 0,
    columns: torch.Tensor | None = None,
    pads: torch.Tensor | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    by_length: bool = False,
) -> torch.Tensor:
    """Attend from a draft tree's nodes to the prefix of their row and to their ancestors.

    Token `i` of a row's prefix is in slot `i`, node `i` in slot `lengths[row] + i`; later slots are
    not read. A node has the same bits in every tree, as long as the capacity `slots` and the number
    of nodes do not change, unless `by_length` is set. There is no twin: without Triton, attend
    under a mask.

    Args:
        q: Queries, [rows, heads, nodes, dim], last stride 1, nodes at most 64.
        k: Keys, [rows, kv_heads, slots, dim], last stride 1; `heads` is a multiple of `kv_heads`.
        v: Values, [rows, kv_heads, slots, v_dim], last stride 1.
        lengths: Slots of each row before node 0, [rows] integers.
        ancestors: Bit `j` of a node's word is set if node `j` is an ancestor of it, or itself,
            [rows, nodes] int64.
        scale: Factor of the scores.
        window: Read only keys whose column is less than this before the node's; 0 for all.
        columns: Columns of the first slots of each row if they are not `slot + pads`, ascending,
            [rows, any] integers.
        pads: Column less slot for all further tokens, needed with `columns`, [rows] integers.
        softcap: Limit c of the scores, `c * tanh(score / c)`; 0 for none.
        sinks: Score of each head that takes part in the softmax without a value, [heads].
        by_length: Whether programs share the prefix of each row, rather than its slots: as fast in
            a cache that is mostly empty.

    Returns:
        [rows, nodes, heads, v_dim] in the dtype of `q`.
    """
    assert (columns is None) or (pads is not None), "columns need pads"
    assert backend(q.device) == "triton", "without Triton, attend under a mask"
    assert q.shape[2] <= MAX_ATTENTION_NODES and max(q.shape[3], v.shape[3]) <= MAX_HEAD_DIM
    from lookahead_hf.kernels import attention

    return attention.tree_attention(
        q, k, v, lengths, ancestors, scale, window, columns, pads, softcap, sinks, by_length
    )
