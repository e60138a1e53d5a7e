"""Drafts from an assistant: a smaller model that reads along and writes a few tokens ahead.

Leviathan et al. (arXiv:2211.17192) draft a chain. Further likely tokens at each place cost the
assistant nothing, and continuing several of them makes the tree of SpecInfer (arXiv:2305.09781).
Learned acceptance rates decide how far to write.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from lookahead_hf.config import check_int
from lookahead_hf.distributed import coordinator
from lookahead_hf.draft import DraftTree
from lookahead_hf.drafting.drafter import BuiltInDrafter, TargetCall
from lookahead_hf.model import compat
from lookahead_hf.rows import Rows
from lookahead_hf.runner.patched import patched
from lookahead_hf.sources.assistant.growth import (
    NUM_BUCKETS,
    Drawn,
    Growth,
    Likeliest,
    prior_rates,
    tree_of,
)
from lookahead_hf.sources.assistant.model import AssistantModel, Branches
from lookahead_hf.sources.assistant.tokens import Bridge, SameTokens, check_sizes, differ

if TYPE_CHECKING:
    pass

NUM_DRAFT, TOP_K = 8, 3

MOST_DRAFTED = 64

NOT_SERVED = ("assistant_confidence_threshold", "num_assistant_tokens_schedule")
"""Settings of generation configs that learned acceptance rates replace."""


class AssistantDrafter(BuiltInDrafter):
    """Lets a smaller model write ahead, in ragged batches, from a cache of its own.

    The cache is rolled back to what the target accepted. An assistant with another vocabulary reads
    and writes text, and drafts chains only.
    """

    name: ClassVar[str] = "assistant"
    num_buckets = NUM_BUCKETS

    def __init__(
        self,
        model: Any,
        *,
        target_tokenizer: Any = None,
        assistant_tokenizer: Any = None,
        num_draft: int | None = None,
        top_k: int | None = None,
        beam: int = 1,
        min_reach: float = 0.1,
        call: TargetCall | None = None,
    ) -> None:
        """Draft with a model.

        Args:
            model: Any causal language model of transformers, in eval mode. For a target with an
                encoder it may have one too, which gets the same inputs.
            target_tokenizer: The target's tokenizer, if the assistant has another vocabulary.
            assistant_tokenizer: The assistant's tokenizer in that case.
            num_draft: Most tokens to write ahead. None is `num_assistant_tokens` of the call or of
                the assistant's generation config, up to 64, or else 8.
            top_k: Tokens to propose at each place, the likeliest first; None is 3, or 1 for an
                assistant of another vocabulary.
            beam: Places to go on from at each depth; 1 goes on from the likeliest alone.
            min_reach: Stop where a path is accepted less often than this.
            call: What is known of the call. Unless it draws, no random number is drawn.

        Raises:
            ValueError: An option is out of its range, `model` is no model, or its vocabulary is not
                the target's and the tokenizers are missing.
        """
        _check_model(model)
        call = call or TargetCall()
        num_draft = _num_draft(model, call.settings) if num_draft is None else num_draft
        bridges = differ(target_tokenizer, assistant_tokenizer)
        if top_k is None:
            top_k = 1 if bridges else TOP_K
        for option, value in (("num_draft", num_draft), ("top_k", top_k), ("beam", beam)):
            check_int(f"assistant: {option}", value, 1, MOST_DRAFTED)
        if type(min_reach) not in (int, float) or not 0.0 <= min_reach < 1.0:
            raise ValueError(f"assistant: min_reach is {min_reach!r}, but must lie in [0, 1)")
        self._tokenizers = None
        if bridges:
            if top_k > 1 or beam > 1:
                raise ValueError(
                    f"assistant: top_k={top_k} and beam={beam} ask for trees, but an assistant of "
                    "another vocabulary drafts chains: leave them out"
                )
            self._tokenizers = target_tokenizer, assistant_tokenizer
            call = replace(call, draws=False, vocab_size=None)
        elif call.vocab_size is not None and assistant_tokenizer is None:
            check_sizes(call.vocab_size, int(compat.text_config(model).vocab_size))
        picks = top_k, call.vocab_size
        self._picks = Drawn(*picks, call.processors) if call.draws else Likeliest(*picks)
        self._assistant, self._num_draft, self._beam = model, num_draft, beam
        self._encoder_inputs = call.encoder_inputs
        self._min_reach = min_reach
        self._model: AssistantModel | None = None
        self._patches = ExitStack()
        self.rates = self.prior()

    def prior(self) -> np.ndarray:
        return prior_rates()

    @property
    def kept_as(self) -> str:
        """Every assistant has rates of its own, by its path or, without one, by its object."""
        model = self._assistant
        return f"{type(model).__name__} {getattr(model, 'name_or_path', '') or id(model)}"

    def begin(self, rows: Rows) -> None:
        config = compat.text_config(self._assistant)
        table = compat.position_table(self._assistant)
        self._limit = int(table or getattr(config, "max_position_embeddings", None) or 2**31)
        self._texts = [
            Bridge(*self._tokenizers) if self._tokenizers else SameTokens(int(config.vocab_size))
            for _ in range(rows.num_rows)
        ]
        self._num_agreed = [0] * rows.num_rows
        contexts = [self._first_read(rows, row) for row in range(rows.num_rows)]
        self._is_served = np.array([len(context) > 0 for context in contexts])
        self._picks.begin(self._assistant.device)
        if self._is_served.any():
            patches = patched(self._assistant)
            self._patches.push(patches)  # before they are entered, for interrupts
            patches.__enter__()
            self._model = AssistantModel(self._assistant, contexts, self._encoder_inputs)

    def _first_read(self, rows: Rows, row: int) -> np.ndarray:
        """Return what the assistant reads once and for all; nothing of a text that is too long."""
        text = self._texts[row]
        text.extend(rows.context(row))
        fits = len(text.ids) + self._num_draft <= self._limit
        return np.array(text.ids[: text.num_settled if fits else 0], np.int64)

    def propose(self, rows: Rows, max_nodes: int) -> DraftTree:
        if self._model is None:
            return DraftTree.empty(rows.num_rows)
        chains = [self._unread(self._model, rows, row) for row in range(rows.num_rows)]
        growths = [Growth(chain) for chain in chains]
        branches: list[Branches] | None = None
        for _ in range(min(self._num_draft, max_nodes)):
            if not any(chains):
                break
            self._write(growths, self._model.feed(chains, branches))
            if self._beam == 1:
                self._model.keep(np.array([len(chain) for chain in chains]))
                chains = [growth.next_chain() for growth in growths]
            else:
                self._model.keep(np.array([max(len(chain) - 1, 0) for chain in chains]))
                following = [growth.next_branches() for growth in growths]
                chains, branches = [c for c, _ in following], [b for _, b in following]
        return tree_of([self._translated(rows, row, g) for row, g in enumerate(growths)])

    def _unread(self, model: AssistantModel, rows: Rows, row: int) -> list[int]:
        """Roll the row back to where it agrees with the text; return the text after that."""
        if rows.finished[row] or not self._is_served[row]:
            return []
        text = self._texts[row]
        unchanged = text.extend(rows.context(row))
        self._is_served[row] = len(text.ids) + self._num_draft <= self._limit
        read, last = model.read(row), len(text.ids) - 1
        agreed = min(self._num_agreed[row], unchanged, last)
        while agreed < min(len(read), last) and read[agreed] == text.ids[agreed]:
            agreed += 1
        model.forget(row, len(read) - agreed)
        self._num_agreed[row] = agreed
        return text.ids[agreed:] if self._is_served[row] else []

    def _write(self, growths: list[Growth], logits: torch.Tensor) -> None:
        """Pick tokens after every frontier and move on; logits are [rows, width, vocab]."""
        sizes = [len(growth.frontier) for growth in growths]
        places = [place for growth in growths for _, place in growth.frontier]
        rows = np.repeat(np.arange(len(growths)), sizes)
        tokens, classes, drawn_from = self._picks.pick(logits, rows, np.array(places))
        for growth, end in zip(growths, np.cumsum(sizes).tolist(), strict=True):
            of_row = slice(end - len(growth.frontier), end)
            drawn = None if drawn_from is None else drawn_from[of_row]
            picked = tokens[of_row], classes[of_row], drawn
            growth.extend(picked, self.rates, self._beam, self._min_reach)

    def _translated(self, rows: Rows, row: int, growth: Growth) -> Growth:
        text = self._texts[row]
        if isinstance(text, SameTokens) or not growth.tokens:
            return growth
        tokens = text.translate(growth.tokens, rows.context(row))
        return growth.rewritten(tokens, self.rates)

    def end(self, rows: Rows) -> None:
        self._model = None
        self._texts = []
        self._patches.close()


def _check_model(model: Any) -> None:
    if not (isinstance(model, torch.nn.Module) and hasattr(model, "config")):
        raise ValueError(f"assistant_model must be a model of transformers, not {model!r}")
    if coordinator.is_spread(model):
        raise ValueError("an assistant must be whole in the process that drafts, not sharded")


def _num_draft(model: Any, settings: Mapping[str, Any]) -> int:
    """Return the tokens to write ahead by generation configs; warn of unused settings."""
    stored = vars(getattr(model, "generation_config", None) or SimpleNamespace())

    def setting(name: str) -> Any:
        value = settings.get(name)
        return stored.get(name) if value is None else value

    for name in NOT_SERVED:
        if setting(name) not in (None, "constant"):
            warnings.warn(
                f"{name}={setting(name)!r} is not used: how far the assistant writes ahead is "
                "decided by how often its drafts are accepted. To bound it, give "
                '`num_assistant_tokens`, or options={"assistant": {"min_reach": ...}}',
                UserWarning,
                stacklevel=3,
            )
    asked = setting("num_assistant_tokens")
    if asked is None:
        return NUM_DRAFT
    check_int("num_assistant_tokens", asked, 1, 2**31)
    return min(asked, MOST_DRAFTED)
