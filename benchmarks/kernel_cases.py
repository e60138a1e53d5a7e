"""What the kernels' benchmark times: one model's step, kernel by kernel."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from lookahead_hf import kernels
from lookahead_hf.target import attention


@dataclass(frozen=True)
class Case:
    """One kernel on one shape."""

    name: str
    num_bytes: int  # that must be read or written
    ours: Callable[[], Any]
    plain: Callable[[], Any]


class Bench:
    """The tensors of one model's step: a chain of drafted tokens, half of which are accepted."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = torch.device(options.device)
        self.dtype = getattr(torch, options.dtype)
        self.width = 1 + options.nodes
        shape = options.rows, self.width, options.vocab
        self.logits = torch.randn(shape, device=self.device).to(self.dtype)
        self.probs = self.logits.float().softmax(-1)
        self.tokens = self.logits.argmax(-1).roll(1, 1)
        self.tokens[:, self.width // 2 + 1 :] = 0
        self.parents = self._of_rows(torch.arange(-1, options.nodes))
        self.depth = self.parents + 1
        self.num_nodes = self._of_rows(torch.tensor(options.nodes))
        self.lengths = self._of_rows(torch.tensor(options.context))

    def _of_rows(self, values: torch.Tensor) -> torch.Tensor:
        shape = self.options.rows, *values.shape
        return values.to(self.device).expand(shape).contiguous()

    def cases(self) -> Iterator[Case]:
        """All cases, one after the other, so that their tensors need not stand side by side."""
        yield self.verify_greedy()
        yield self.verify_sampled()
        yield self.reject()
        yield self.topk()
        yield self.compact()
        yield self.attention()
        yield self.folded()

    def verify_greedy(self) -> Case:
        def plain() -> int:
            chosen = self.logits.to(dtype=torch.float32, copy=True).argmax(-1)
            equal = self.tokens[:, 1:] == chosen[:, :-1]
            return int((~equal).cumsum(-1).lt(1).sum())

        def ours() -> Any:
            return kernels.verify_tree(self.logits, self.tokens, self.parents, self.num_nodes)

        return Case("verify_tree greedy", _num_bytes(self.logits), ours, plain)

    def verify_sampled(self) -> Case:
        noise = torch.empty_like(self.probs).exponential_()

        def plain() -> int:
            chosen = torch.multinomial(self.probs.flatten(0, 1), 1).view(self.tokens.shape)
            equal = self.tokens[:, 1:] == chosen[:, :-1]
            return int((~equal).cumsum(-1).lt(1).sum())

        def ours() -> Any:
            return kernels.verify_tree(
                self.probs, self.tokens, self.parents, self.num_nodes, noise, self.depth
            )

        return Case("verify_tree sampled", _num_bytes(self.probs, noise), ours, plain)

    def reject(self) -> Case:
        draft = self.probs[:, :-1].roll(1, 0).contiguous()
        uniforms = torch.rand(draft.shape[:2], device=self.device)
        noise = torch.empty_like(self.probs[:, 0]).exponential_()
        drafted = self.tokens[:, 1:, None]

        def plain() -> torch.Tensor:
            ratio = self.probs[:, :-1].gather(2, drafted) / draft.gather(2, drafted)
            kept = int((uniforms > ratio[..., 0]).cumsum(-1).lt(1).sum(-1).min())
            left = self.probs[:, kept]
            if kept < draft.shape[1]:
                left = (left - draft[:, kept]).clamp(min=0)
                left = left / left.sum(-1, keepdim=True).clamp(min=1e-9) + 1e-12
            return torch.multinomial(left, 1)

        def ours() -> Any:
            return kernels.reject_tree(
                self.probs, draft, self.tokens, self.parents, self.num_nodes, uniforms, noise
            )

        return Case("reject_tree", 4 * _num_bytes(noise), ours, plain)

    def topk(self) -> Case:
        rows = self.logits.flatten(0, 1)
        k = self.options.top_k
        return Case(
            f"topk_rows k={k}",
            _num_bytes(rows),
            lambda: kernels.topk_rows(rows, k),
            lambda: rows.topk(k, dim=1),
        )

    def compact(self) -> Case:
        o = self.options
        slots = o.context + self.width
        shape = o.rows, slots, o.kv_heads, o.head_dim
        layers = [
            torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(2 * o.layers)
        ]
        table = kernels.PathTable(layers)
        moved = max(1, self.width // 4)
        path = self._of_rows(torch.tensor([0, *range(2, 2 + moved)]))
        kept = self._of_rows(torch.tensor(1 + moved))
        sources = o.context + path[0]
        targets = slice(o.context, o.context + 1 + moved)

        def plain() -> None:
            for layer in layers:
                layer[:, targets] = layer.index_select(1, sources)

        token_bytes = o.kv_heads * o.head_dim * self.logits.element_size()
        return Case(
            f"compact_path {moved} tokens",
            2 * moved * token_bytes * len(layers) * o.rows,
            lambda: kernels.compact_path(table, self.lengths, path, kept),
            plain,
        )

    def attention(self) -> Case:
        o, (q, k, v) = self.options, self._layer()
        # A chain: all nodes up to a node are its ancestors. The 64th is the sign bit.
        words = [(1 << (node + 1)) - 1 if node < 63 else -1 for node in range(self.width)]
        ancestors = self._of_rows(torch.tensor(words))
        scale = o.head_dim**-0.5
        return Case(
            f"tree_attention {o.context} keys",
            _num_bytes(q, q, k, v),
            lambda: kernels.tree_attention(q, k, v, self.lengths, ancestors, scale),
            lambda: self._repeated(q, k, v),
        )

    def folded(self) -> Case:
        """Attention inside our forward where no kernel of ours serves it."""
        o, (q, k, v) = self.options, self._layer()
        groups = o.heads // o.kv_heads
        mask = self._mask(k).repeat(1, 1, groups, 1)
        return Case(
            f"folded attention {o.context} keys",
            _num_bytes(q, q, k, v),
            lambda: attention.fold(q, k, v, mask, groups, None),
            lambda: self._repeated(q, k, v),
        )

    def _layer(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries of a block, and keys and values as they lie in the cache."""
        o = self.options
        slots = o.context + self.width
        q = torch.randn(o.rows, o.heads, self.width, o.head_dim, device=self.device).to(self.dtype)
        k, v = (
            torch.randn(o.rows, slots, o.kv_heads, o.head_dim, device=self.device)
            .to(self.dtype)
            .transpose(1, 2)
            for _ in range(2)
        )
        return q, k, v

    def _mask(self, k: torch.Tensor) -> torch.Tensor:
        """What a chain sees, as transformers' masks say it, [rows, 1, width, slots]."""
        shape = self.options.rows, 1, self.width, k.shape[2]
        seen = torch.ones(shape, dtype=torch.bool, device=self.device).tril(self.options.context)
        lowest = torch.finfo(self.dtype).min
        return torch.zeros(shape, dtype=self.dtype, device=self.device).masked_fill(~seen, lowest)

    def _repeated(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """As transformers does under a mask: K and V copied for every query head."""
        if not hasattr(self, "mask"):
            self.mask = self._mask(k)
        group = q.shape[1] // k.shape[1]
        keys, values = (x.repeat_interleave(group, 1) for x in (k, v))
        out = scaled_dot_product_attention(q, keys, values, attn_mask=self.mask)
        return out.transpose(1, 2).contiguous()


def _num_bytes(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
