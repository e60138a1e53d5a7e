"""Decode attention of a draft tree over cache slots; a node's bits do not depend on the tree.

    for row, node, head:
        text = [*range(lengths[row]), *(lengths[row] + a for a in ancestors_of(node))]   # slots
        text = [slot for slot in text if column(node) - column(slot) < window]
        score = [softcap * tanh(q[node] @ k[slot] * scale / softcap) for slot in text]
        out[row, node, head] = softmax([*score, sink[head]])[:-1] @ v[text]

A node reads the text that it continues in text order: the prefix, then its ancestors by depth. The
text is cut at multiples of 64 keys. What ends 64 to 127 keys before the node lies in the prefix
whatever the tree, and the keys of a tile serve all nodes there (`_prefix_kernel`, split over keys).
The rest is gathered for each node by itself (`_node_kernel`, which also merges the splits). So the
cuts and the order of all sums depend on the node's place in the text alone: a token accepted from
any tree has the bits that it has in a chain, or as the last token. With `by_length` the splits
share what the row holds, however large the cache is: the cuts depend on the prefix's length, too.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from lookahead_hf.kernels._common import launch
from lookahead_hf.kernels.data import MAX_ATTENTION_NODES, MAX_HEAD_DIM

# mypy: allow-untyped-defs, allow-incomplete-defs


LEAST_KEYS = 128  # Fewest keys that a program reads

TAIL = tl.constexpr(64)
"""Keys are cut into tiles at multiples of this; a row has as many nodes at most."""

_LOG2E = tl.constexpr(1.4426950408889634)


def tile_sizes(queries: int, dim: int, dtype: torch.dtype, is_rdna: bool = False) -> dict[str, int]:
    """Queries, keys and warps per tile, as many as fit into registers for up to 256 dimensions.

    float32 is multiplied without tensor cores and takes a register per operand. RDNA holds the
    operands of a product twice.
    """
    keys = 16 if dtype == torch.float32 else 32 if dim > 128 else 64
    if is_rdna:
        keys = max(16, keys // 2)
    return {
        "WARPS": 8 if is_rdna else 4,
        "QUERIES": min(keys, max(16, triton.next_power_of_2(queries))),
        "KEYS": keys,
    }


def keys_per_split(slots: int, programs: int, device: torch.device) -> int:
    """Keys of one program: two programs per processor where the cache is long enough.

    It depends on the capacity and not on the lengths, so that no bit changes in mid-text.
    """
    splits = max(1, min(64, 2 * _processors(device) // programs))
    return max(LEAST_KEYS, triton.cdiv(triton.cdiv(slots, splits), 64) * 64)


@lru_cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 128
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@lru_cache
def is_rdna(device: torch.device) -> bool:
    """Return whether a device is an AMD GPU with 32 lanes in a warp: all but data-centre ones."""
    if device.type != "cuda" or not torch.version.hip:
        return False
    return int(torch.cuda.get_device_properties(device).warp_size) == 32


@lru_cache
def num_stages(device: torch.device, dim: int) -> int:
    """Tiles in flight on a device; see `stages`."""
    if device.type != "cuda" or torch.version.hip:
        return stages(dim, 0)
    return stages(dim, torch.cuda.get_device_capability(device)[0])


def stages(dim: int, major: int) -> int:
    """Three tiles in flight where they fit: up to 128 dimensions, on GPUs with 227 KB per program.

    Those are of compute capability 9.0 and 10.x; 12.x has 99 KB. `major` is 0 for AMD.
    """
    return 3 if dim <= 128 and major in (9, 10) else 2


@triton.jit
def load_vectors(base, offset, inside, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """The vectors of `DIM` values that begin at `base + offset`, zero where not inside."""
    dim = tl.arange(0, BLOCK)
    mask = inside[:, None] & (dim < DIM)[None, :]
    return tl.load(base + offset[:, None] + dim[None, :], mask=mask, other=0.0)


@triton.jit
def store_vectors(base, offset, values, inside, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Write what `load_vectors` reads."""
    dim = tl.arange(0, BLOCK)
    mask = inside[:, None] & (dim < DIM)[None, :]
    tl.store(base + offset[:, None] + dim[None, :], values.to(base.dtype.element_ty), mask=mask)


@triton.jit
def depth_of(bits):
    """Ancestors in a 64-bit word, the node itself not counted."""
    pairs = bits - ((bits >> 1) & 0x5555555555555555)
    fours = (pairs & 0x3333333333333333) + ((pairs >> 2) & 0x3333333333333333)
    total = (fours + (fours >> 4)) & 0x0F0F0F0F0F0F0F0F
    total += total >> 8
    total += total >> 16
    total += total >> 32
    return (total & 0x7F).to(tl.int32) - 1


@triton.jit
def ancestor_at(bits, depth):
    """The ancestor at each of some depths; 0 where a node has none.

    A depth is the rank among the set bits, because parents come before their children.
    """
    node = tl.arange(0, TAIL)
    member = ((bits >> node.to(tl.int64)) & 1).to(tl.int32)
    rank = tl.where(member == 1, tl.cumsum(member, axis=0) - 1, -1)
    return tl.sum(tl.where(rank[None, :] == depth[:, None], node[None, :], 0), axis=1)


@triton.jit
def tail_start(place):
    """First key that a node at a place in the text reads for itself."""
    return tl.maximum(place + 1 - TAIL, 0) // TAIL * TAIL


@triton.jit
def keys_of_split(length, splits, least):
    """An equal share of the prefix in whole tiles, but no fewer keys than `least`."""
    return tl.maximum(tl.cdiv(tl.cdiv(length, splits), TAIL) * TAIL, least)


@triton.jit
def in_window(place, index, length, columns_ptr, pads_ptr, row, window, num_columns, COLUMNS):
    """Whether nodes at `place` and keys at `index` are less than `window` columns apart."""
    column = index
    if COLUMNS:
        # Columns less the row's pads: from the end of the list on this is the index in the text.
        known = index < tl.minimum(length, num_columns)
        column = tl.load(columns_ptr + row * num_columns + index, mask=known, other=0)
        pads = tl.load(pads_ptr + row).to(tl.int32)
        column = tl.where(known, column.to(tl.int32) - pads, index)
    return place[:, None] - column[None, :] < window


@triton.jit
def first_in_window(length, window, KEYS: tl.constexpr):
    """A tile before which no key is in the window of any node."""
    return tl.maximum(length - window + 1, 0) // KEYS * KEYS


@triton.jit
def attend(q, k, v, seen, top, total, acc, scale, softcap, SOFTCAP: tl.constexpr):
    """Add a tile of keys to a running softmax in base 2; a tile that is not seen changes no bit."""
    # The default precision for float32 is TF32 on NVIDIA, which keeps 10 bits.
    score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if SOFTCAP:
        score = softcap * (1 - 2 / (tl.exp2(score * (2 * _LOG2E / softcap)) + 1))
    score = tl.where(seen, score * _LOG2E, float("-inf"))
    above = tl.maximum(top, tl.max(score, axis=1))
    # A row that has seen nothing yet: minus infinity less itself would be NaN.
    shift = tl.where(above == float("-inf"), 0.0, above)
    weight = tl.exp2(score - shift[:, None])
    fade = tl.exp2(top - shift)
    total = total * fade + tl.sum(weight, axis=1)
    mixed = tl.dot(weight.to(v.dtype), v, input_precision="ieee")
    return above, total, acc * fade[:, None] + mixed


@triton.jit
def merge(top, total, acc, other_top, other_total, other_acc):
    """One running softmax of two."""
    above = tl.maximum(top, other_top)
    shift = tl.where(above == float("-inf"), 0.0, above)
    fade, other_fade = tl.exp2(top - shift), tl.exp2(other_top - shift)
    total = total * fade + other_total * other_fade
    return above, total, acc * fade[:, None] + other_acc * other_fade[:, None]


@triton.jit
def add_sink(top, total, acc, sink):
    """A score of each head that takes its share of the softmax and has no value."""
    sink = sink.to(tl.float32) * _LOG2E
    return merge(top, total, acc, sink, tl.full(sink.shape, 1.0, tl.float32), tl.zeros_like(acc))


@triton.jit(do_not_specialize=["nodes", "window", "num_columns"])
def _prefix_kernel(
    acc_ptr,  # [rows, kv_heads, splits, nodes * GROUP, DIM_V]
    stats_ptr,  # [rows, kv_heads, splits, nodes * GROUP, 2]
    q_ptr,  # [rows, heads, nodes, DIM]
    k_ptr,  # [rows, kv_heads, slots, DIM]
    v_ptr,  # [rows, kv_heads, slots, DIM_V]
    lengths_ptr,  # [rows]
    ancestors_ptr,  # [rows, nodes]
    columns_ptr,  # [rows, num_columns]
    pads_ptr,  # [rows]
    scale,
    softcap,
    q_stride_row,
    q_stride_head,
    q_stride_node,
    k_stride_row,
    k_stride_head,
    k_stride_slot,
    v_stride_row,
    v_stride_head,
    v_stride_slot,
    nodes,
    kv_heads,
    least_keys,
    window,
    num_columns,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    WINDOW: tl.constexpr,
    COLUMNS: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    split = tl.program_id(0)
    kv_head = (tl.program_id(1) % kv_heads).to(tl.int64)
    row = tl.program_id(2).to(tl.int64)
    query = tl.program_id(1) // kv_heads * QUERIES + tl.arange(0, QUERIES)
    live = query < nodes * GROUP
    node = query // GROUP
    head = kv_head * GROUP + query % GROUP
    length = tl.load(lengths_ptr + row).to(tl.int32)
    bits = tl.load(ancestors_ptr + row * nodes + node, mask=live, other=1)
    place = length + depth_of(bits)
    tail = tail_start(place)

    keys = keys_of_split(length, tl.num_programs(0), least_keys)
    first = split * keys
    # The greatest tail of all nodes still begins inside the prefix.
    last = tl.minimum(first + keys, tl.max(tail, axis=0))
    if WINDOW:
        first = tl.maximum(first, first_in_window(length, window, KEYS))
    if first < last:
        offset = head * q_stride_head + node * q_stride_node
        q = load_vectors(q_ptr + row * q_stride_row, offset, live, DIM, BLOCK_D)
        k_head = k_ptr + row * k_stride_row + kv_head * k_stride_head
        v_head = v_ptr + row * v_stride_row + kv_head * v_stride_head
        top = tl.full([QUERIES], float("-inf"), tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
        acc = tl.zeros([QUERIES, BLOCK_V], tl.float32)
        for start in range(first, last, KEYS):
            index = start + tl.arange(0, KEYS)
            slot = index.to(tl.int64)
            k = load_vectors(k_head, slot * k_stride_slot, index < last, DIM, BLOCK_D)
            v = load_vectors(v_head, slot * v_stride_slot, index < last, DIM_V, BLOCK_V)
            seen = index[None, :] < tail[:, None]
            if WINDOW:
                seen = seen & in_window(
                    place, index, length, columns_ptr, pads_ptr, row, window, num_columns, COLUMNS
                )
            top, total, acc = attend(q, k, v, seen, top, total, acc, scale, softcap, SOFTCAP)
        entry = ((row * kv_heads + kv_head) * tl.num_programs(0) + split) * nodes * GROUP + query
        tl.store(stats_ptr + entry * 2, top, mask=live)
        tl.store(stats_ptr + entry * 2 + 1, total, mask=live)
        store_vectors(acc_ptr, entry * DIM_V, acc, live, DIM_V, BLOCK_V)


@triton.jit(do_not_specialize=["splits", "window", "num_columns"])
def _node_kernel(
    out_ptr,  # [rows, nodes, heads, DIM_V]
    acc_ptr,  # [rows, kv_heads, splits, nodes * GROUP, DIM_V]
    stats_ptr,  # [rows, kv_heads, splits, nodes * GROUP, 2]
    q_ptr,  # [rows, heads, nodes, DIM]
    k_ptr,  # [rows, kv_heads, slots, DIM]
    v_ptr,  # [rows, kv_heads, slots, DIM_V]
    lengths_ptr,  # [rows]
    ancestors_ptr,  # [rows, nodes]
    columns_ptr,  # [rows, num_columns]
    pads_ptr,  # [rows]
    sinks_ptr,  # [heads]
    scale,
    softcap,
    q_stride_row,
    q_stride_head,
    q_stride_node,
    k_stride_row,
    k_stride_head,
    k_stride_slot,
    v_stride_row,
    v_stride_head,
    v_stride_slot,
    splits,
    least_keys,
    window,
    num_columns,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    WINDOW: tl.constexpr,
    COLUMNS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
):
    node = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2).to(tl.int64)
    nodes, kv_heads = tl.num_programs(0), tl.num_programs(1)
    group = tl.arange(0, QUERIES)
    live = group < GROUP
    head = kv_head * GROUP + group
    length = tl.load(lengths_ptr + row).to(tl.int32)
    bits = tl.load(ancestors_ptr + row * nodes + node)
    place = length + depth_of(bits)
    tail = tail_start(place)

    offset = head * q_stride_head + node * q_stride_node
    q = load_vectors(q_ptr + row * q_stride_row, offset, live, DIM, BLOCK_D)
    k_head = k_ptr + row * k_stride_row + kv_head * k_stride_head
    v_head = v_ptr + row * v_stride_row + kv_head * v_stride_head
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, BLOCK_V], tl.float32)
    for start in range(tail, place + 1, KEYS):
        index = start + tl.arange(0, KEYS)
        inside = index <= place
        drafted = length + ancestor_at(bits, index - length)
        slot = tl.where(index < length, index, drafted).to(tl.int64)
        k = load_vectors(k_head, slot * k_stride_slot, inside, DIM, BLOCK_D)
        v = load_vectors(v_head, slot * v_stride_slot, inside, DIM_V, BLOCK_V)
        seen = inside[None, :] & live[:, None]
        if WINDOW:
            places = place + tl.zeros_like(group)
            seen = seen & in_window(
                places, index, length, columns_ptr, pads_ptr, row, window, num_columns, COLUMNS
            )
        top, total, acc = attend(q, k, v, seen, top, total, acc, scale, softcap, SOFTCAP)

    # The splits that `_prefix_kernel` wrote for this node, in text order.
    keys = keys_of_split(length, splits, least_keys)
    first = tail * 0
    used = tl.cdiv(tail, keys)
    if WINDOW:
        reached = first_in_window(length, window, KEYS)
        first = reached // keys
        used = tl.where(reached < tail, used, first)
    for split in range(first, used):
        entry = ((row * kv_heads + kv_head) * splits + split) * nodes * GROUP + node * GROUP + group
        split_top = tl.load(stats_ptr + entry * 2, mask=live, other=float("-inf"))
        split_total = tl.load(stats_ptr + entry * 2 + 1, mask=live, other=0.0)
        split_acc = load_vectors(acc_ptr, entry * DIM_V, live, DIM_V, BLOCK_V)
        top, total, acc = merge(top, total, acc, split_top, split_total, split_acc)
    if SINKS:
        sink = tl.load(sinks_ptr + head, mask=live, other=0.0)
        top, total, acc = add_sink(top, total, acc, sink)
    out = acc / tl.where(total > 0, total, 1.0)[:, None]
    entry = (row * nodes + node) * kv_heads * GROUP + head
    store_vectors(out_ptr, entry * DIM_V, out, live, DIM_V, BLOCK_V)


def tree_attention(
    q: torch.Tensor,  # [rows, heads, nodes, dim]
    k: torch.Tensor,  # [rows, kv_heads, slots, dim]
    v: torch.Tensor,  # [rows, kv_heads, slots, v_dim]
    lengths: torch.Tensor,  # [rows]
    ancestors: torch.Tensor,  # [rows, nodes]
    scale: float,
    window: int = 0,
    columns: torch.Tensor | None = None,  # [rows, num_columns]
    pads: torch.Tensor | None = None,  # [rows]
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,  # [heads]
    by_length: bool = False,
) -> torch.Tensor:
    """Attend from a draft tree's nodes to the prefix of their row and to their ancestors.

    Token `i` of a row's prefix is in slot `i`, node `i` in slot `lengths[row] + i`; later slots are
    not read. A node has the same bits in every tree, as long as the capacity `slots` and the number
    of nodes do not change, unless `by_length` is set.

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
    rows, heads, nodes, dim = q.shape
    kv_heads, slots, v_dim = v.shape[1:]
    assert (columns is None) or (pads is not None), "columns need pads"
    assert nodes <= MAX_ATTENTION_NODES and max(dim, v_dim) <= MAX_HEAD_DIM
    group, device = heads // kv_heads, q.device
    tile = tile_sizes(nodes * group, max(dim, v_dim), q.dtype, is_rdna(device))
    tiles = triton.cdiv(nodes * group, tile["QUERIES"])
    split_keys = keys_per_split(slots, rows * kv_heads * tiles, device)
    splits = triton.cdiv(slots, split_keys)
    partial = rows, kv_heads, splits, nodes * group
    out = torch.empty(rows, nodes, heads, v_dim, dtype=q.dtype, device=q.device)
    shared = {
        "acc_ptr": torch.empty(*partial, v_dim, dtype=torch.float32, device=q.device),
        "stats_ptr": torch.empty(*partial, 2, dtype=torch.float32, device=q.device),
        "lengths_ptr": lengths.contiguous(),
        "ancestors_ptr": ancestors.contiguous(),
        "columns_ptr": lengths if columns is None else columns.contiguous(),
        "pads_ptr": lengths if pads is None else pads.contiguous(),
        "num_columns": 0 if columns is None else columns.shape[1],
        "COLUMNS": columns is not None,
        "window": window,
        "WINDOW": window > 0,
        "softcap": softcap,
        "SOFTCAP": softcap > 0,
        "scale": scale,
        # A prefix has no more keys than there are slots, so its share is never larger than theirs.
        "least_keys": LEAST_KEYS if by_length else split_keys,
        "KEYS": tile["KEYS"],
        **_layout(q, k, v),
    }
    launch(
        _prefix_kernel,
        (splits, kv_heads * tiles, rows),
        q,
        nodes=nodes,
        kv_heads=kv_heads,
        QUERIES=tile["QUERIES"],
        num_stages=num_stages(device, max(dim, v_dim)),
        num_warps=tile["WARPS"],
        **shared,
    )
    launch(
        _node_kernel,
        (nodes, kv_heads, rows),
        q,
        out_ptr=out,
        sinks_ptr=lengths if sinks is None else sinks.contiguous(),
        splits=splits,
        SINKS=sinks is not None,
        QUERIES=max(16, triton.next_power_of_2(group)),
        num_stages=1,
        num_warps=4,
        **shared,
    )
    return out


def _layout(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, Any]:
    """The arguments that tell where queries, keys and values lie."""
    assert q.stride(3) == k.stride(3) == v.stride(3) == 1
    arguments: dict[str, Any] = {
        "GROUP": q.shape[1] // k.shape[1],
        "DIM": k.shape[3],
        "DIM_V": v.shape[3],
        "BLOCK_D": max(16, triton.next_power_of_2(k.shape[3])),
        "BLOCK_V": max(16, triton.next_power_of_2(v.shape[3])),
    }
    for name, tensor, token in (("q", q, "node"), ("k", k, "slot"), ("v", v, "slot")):
        arguments[f"{name}_ptr"] = tensor
        for axis, unit in enumerate(("row", "head", token)):
            arguments[f"{name}_stride_{unit}"] = tensor.stride(axis)
    return arguments
