"""What the kernels' benchmark times: one model's step, kernel by kernel."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from lookahead_hf import kernels
from lookahead_hf.kernels.data import PathTable
from lookahead_hf.runner import attention
from lookahead_hf.runner.forward import ForwardContext, running

_MOST_COPIES = 64

_PART = 256
"""Logits that `topk_rows` reads again for each of the k."""


@dataclass(frozen=True)
class Case:
    """One kernel on one shape, with several sets of inputs where one would stay in a cache.

    Attributes:
        name: What is printed.
        num_bytes: Bytes that must be read or written.
        copies: Sets of inputs; the functions take the number of one.
        ours: The kernel, or its twin where no Triton runs.
        plain: What one would write without it.
        fallback: What runs instead of a kernel without a twin.
        bits: Whether the first token of a block has the bits that it has alone.
    """

    name: str
    num_bytes: int
    copies: int
    ours: Callable[[int], Any]
    plain: Callable[[int], Any]
    fallback: Callable[[int], Any] | None = None
    bits: Callable[[], bool] | None = None


class Bench:
    """The tensors of one model's step: a chain of drafted tokens, half of which are accepted.

    Each of the functions named `kinds` builds its tensors when it is called.
    """

    kinds = (
        "verify_greedy",
        "verify_sampled",
        "reject",
        "topk",
        "topk_after_verification",
        "compact",
        "attention",
    )

    def __init__(self, options: argparse.Namespace, rotated: int) -> None:
        """`rotated`: bytes of inputs after which one set may come again."""
        self.options, self.rotated = options, rotated
        self.device = torch.device(options.device)
        self.dtype = getattr(torch, options.dtype)
        self.width = 1 + options.nodes
        self.parents = self._of_rows(torch.arange(-1, options.nodes))
        self.depth = self.parents + 1
        self.num_nodes = self._of_rows(torch.tensor(options.nodes))
        self.lengths = self._of_rows(torch.tensor(options.context))

    def _of_rows(self, values: torch.Tensor) -> torch.Tensor:
        shape = self.options.rows, *values.shape
        return values.to(self.device).expand(shape).contiguous()

    def _copies(self, num_bytes: int) -> int:
        return max(1, min(_MOST_COPIES, -(-self.rotated // num_bytes)))

    def _logits(self) -> list[torch.Tensor]:
        shape = self.options.rows, self.width, self.options.vocab
        one = torch.randn(shape, device=self.device).to(self.dtype)
        return [one, *(one.clone() for _ in range(self._copies(_num_bytes(one)) - 1))]

    def _probs(self) -> list[torch.Tensor]:
        shape = self.options.rows, self.width, self.options.vocab
        one = torch.randn(shape, device=self.device).softmax(-1)
        return [one, *(one.clone() for _ in range(self._copies(_num_bytes(one)) - 1))]

    def _tokens(self, scores: torch.Tensor) -> torch.Tensor:
        """The likeliest chain as far as its half."""
        tokens = scores.argmax(-1).roll(1, 1)
        tokens[:, self.width // 2 + 1 :] = 0
        return tokens

    def verify_greedy(self) -> Case:
        logits = self._logits()
        tokens = self._tokens(logits[0])

        def plain(copy: int) -> int:
            chosen = logits[copy].to(dtype=torch.float32, copy=True).argmax(-1)
            return self._accepted(tokens, chosen)

        def ours(copy: int) -> Any:
            tree = tokens, self.parents, self.num_nodes
            return kernels.verify_tree(logits[copy], *tree, keep_scan=True)

        return Case("verify_tree greedy", _num_bytes(logits[0]), len(logits), ours, plain)

    def verify_sampled(self) -> Case:
        probs = self._probs()
        noise = torch.empty_like(probs[0]).exponential_()
        tokens = self._tokens(probs[0])

        def plain(copy: int) -> int:
            chosen = torch.multinomial(probs[copy].flatten(0, 1), 1).view(tokens.shape)
            return self._accepted(tokens, chosen)

        def ours(copy: int) -> Any:
            tree = tokens, self.parents, self.num_nodes
            return kernels.verify_tree(probs[copy], *tree, noise, self.depth)

        num_bytes = _num_bytes(probs[0], noise)
        return Case("verify_tree sampled", num_bytes, len(probs), ours, plain)

    def _accepted(self, tokens: torch.Tensor, chosen: torch.Tensor) -> int:
        """As assisted decoding in transformers counts them."""
        equal = tokens[:, 1:] == chosen[:, :-1]
        return int((~equal).cumsum(-1).lt(1).sum())

    def reject(self) -> Case:
        probs = self._probs()
        tokens = self._tokens(probs[0])
        draft = probs[0][:, :-1].roll(1, 0).contiguous()
        uniforms = torch.rand(draft.shape[:2], device=self.device)
        noise = torch.empty_like(probs[0][:, 0]).exponential_()
        drafted = tokens[:, 1:, None]

        def plain(copy: int) -> torch.Tensor:
            of_target = probs[copy]
            ratio = of_target[:, :-1].gather(2, drafted) / draft.gather(2, drafted)
            kept = int((uniforms > ratio[..., 0]).cumsum(-1).lt(1).sum(-1).min())
            left = of_target[:, kept]
            if kept < draft.shape[1]:
                left = (left - draft[:, kept]).clamp(min=0)
                left = left / left.sum(-1, keepdim=True).clamp(min=1e-9) + 1e-12
            return torch.multinomial(left, 1)

        def ours(copy: int) -> Any:
            tree = tokens, self.parents, self.num_nodes
            return kernels.reject_tree(probs[copy], draft, *tree, uniforms, noise)

        return Case("reject_tree", 4 * _num_bytes(noise), len(probs), ours, plain)

    def topk(self) -> Case:
        rows, k = [logits.flatten(0, 1) for logits in self._logits()], self.options.top_k
        return Case(
            f"topk_rows k={k}",
            _num_bytes(rows[0]),
            len(rows),
            lambda copy: kernels.topk_rows(rows[copy], k),
            lambda copy: _topk_and_sum(rows[copy], k),
        )

    def topk_after_verification(self) -> Case:
        logits, k = self._logits(), self.options.top_k
        rows = [each.flatten(0, 1) for each in logits]
        tokens = self._tokens(logits[0])
        tree = tokens, self.parents, self.num_nodes
        scans = [kernels.verify_tree(each, *tree, keep_scan=True).scan for each in logits]
        read = 0 if scans[0] is None else _num_bytes(*scans[0])
        return Case(
            f"topk_rows k={k} behind verify_tree",
            read + len(rows[0]) * min(k * _PART, self.options.vocab) * rows[0].element_size(),
            len(rows),
            lambda copy: kernels.topk_rows(rows[copy], k, scans[copy]),
            lambda copy: _topk_and_sum(rows[copy], k),
        )

    def compact(self) -> Case:
        o = self.options
        slots = o.context + self.width
        shape = o.rows, slots, o.kv_heads, o.head_dim
        layers = [
            torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(2 * o.layers)
        ]
        table = PathTable(layers)
        moved = max(1, self.width // 4)
        path = self._of_rows(torch.tensor([0, *range(2, 2 + moved)]))
        kept = self._of_rows(torch.tensor(1 + moved))
        token_bytes = o.kv_heads * o.head_dim * layers[0].element_size()
        num_bytes = 2 * moved * token_bytes * len(layers) * o.rows
        # Every time the path lies elsewhere in the cache.
        copies = min(self._copies(num_bytes), max(1, o.context // self.width))
        lengths = [self.lengths - copy * self.width for copy in range(copies)]

        def plain(copy: int) -> None:
            start = o.context - copy * self.width
            targets = slice(start, start + 1 + moved)
            for layer in layers:
                layer[:, targets] = layer.index_select(1, start + path[0])

        def ours(copy: int) -> None:
            kernels.compact_path(table, lengths[copy], path, kept)

        return Case(f"compact_path {moved} tokens", num_bytes, copies, ours, plain)

    def attention(self) -> Case:
        """Without Triton the heads of a group are folded into rows of one masked attention."""
        o, layers = self.options, self._layers()
        # A chain: all nodes up to a node are its ancestors. The 64th is the sign bit.
        words = [(1 << (node + 1)) - 1 if node < 63 else -1 for node in range(self.width)]
        ancestors = self._of_rows(torch.tensor(words))
        mask, groups = self._mask(layers[0][1]), o.heads // o.kv_heads
        wide, scale = mask.repeat(1, 1, groups, 1), o.head_dim**-0.5

        def ours(copy: int, width: int = self.width) -> torch.Tensor:
            q, k, v = layers[copy]
            tree = self.lengths, ancestors[:, :width]
            return kernels.tree_attention(q[:, :, :width], k, v, *tree, scale)

        return Case(
            f"tree_attention {o.context} keys",
            _num_bytes(layers[0][0], *layers[0]),
            len(layers),
            ours,
            lambda copy: _repeated(*layers[copy], mask),
            lambda copy: self._folded(*layers[copy], wide, groups),
            lambda: torch.equal(ours(0)[:, :1], ours(0, 1)),
        )

    def _folded(self, *given: Any) -> torch.Tensor:
        """What steps fall back to, without cuDNN as there."""
        with running(ForwardContext(), self.device):
            return attention.fold(*given, None)

    def _layers(self) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Queries of a block, and keys and values as they lie in the cache, for some layers."""
        o = self.options
        slots = o.context + self.width

        def layer() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            q = torch.randn(o.rows, o.heads, self.width, o.head_dim, device=self.device)
            k, v = (
                torch.randn(o.rows, slots, o.kv_heads, o.head_dim, device=self.device)
                .to(self.dtype)
                .transpose(1, 2)
                for _ in range(2)
            )
            return q.to(self.dtype), k, v

        first = layer()
        return [first, *(layer() for _ in range(self._copies(_num_bytes(*first)) - 1))]

    def _mask(self, k: torch.Tensor) -> torch.Tensor:
        """What a chain sees, as transformers' masks say it, [rows, 1, width, slots]."""
        shape = self.options.rows, 1, self.width, k.shape[2]
        seen = torch.ones(shape, dtype=torch.bool, device=self.device).tril(self.options.context)
        lowest = torch.finfo(self.dtype).min
        return torch.zeros(shape, dtype=self.dtype, device=self.device).masked_fill(~seen, lowest)


def _repeated(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """As transformers does under a mask: K and V copied for every query head."""
    group = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(group, 1) for x in (k, v))
    out = scaled_dot_product_attention(q, keys, values, attn_mask=mask)
    return out.transpose(1, 2).contiguous()


def _topk_and_sum(rows: torch.Tensor, k: int) -> tuple[torch.Tensor, ...]:
    best = rows.topk(k, dim=1)
    return best.values, best.indices, rows.float().logsumexp(1)


def _num_bytes(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
