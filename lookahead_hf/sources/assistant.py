"""Drafts from an assistant: a smaller model that reads along and writes a few tokens ahead.

As in Leviathan et al. (arXiv:2211.17192), each row's draft is a chain. Learned acceptance rates
decide how far to write.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch

from lookahead_hf import distributed
from lookahead_hf.call import admission
from lookahead_hf.call.admission import Purpose
from lookahead_hf.call.prepared import prompt_call
from lookahead_hf.config import check_int
from lookahead_hf.draft import DraftTree
from lookahead_hf.drafting.drafter import Drafter, TargetCall, Traits
from lookahead_hf.fallback import Unserved
from lookahead_hf.model import compat
from lookahead_hf.rows import EncoderInputs, Rows
from lookahead_hf.runner.host import Runner
from lookahead_hf.runner.patched import patched
from lookahead_hf.runner.prefill import prefill
from lookahead_hf.sources.growth import NUM_BUCKETS, Drawn, Growth, Likeliest, prior_rates, tree_of
from lookahead_hf.sources.tokens import Bridge, SameTokens, check_sizes, differ


class AssistantModel:
    """A model that has read every row up to some token, and can forget the newest ones."""

    def __init__(
        self, model: Any, contexts: Sequence[np.ndarray], encoder_inputs: EncoderInputs | None
    ) -> None:
        """Read the rows' first tokens, [tokens] int64 each, in one forward; some may have none.

        ValueError if the model cannot run such rows, or lacks the input of its encoder.
        """
        ids, attended = _left_padded(contexts)
        mask = torch.from_numpy(attended).to(model.device)
        prompt, further = torch.from_numpy(ids).to(model.device), dict[str, Any]()
        try:
            admission.admit(model, Purpose.ASSISTANT)
            if model.config.is_encoder_decoder:
                further = _decoder_arguments(model, encoder_inputs)
            call = prompt_call(model, prompt, mask, **further)
            admission.admit_call(call)
            self._rows = Rows(ids, attended)
            self._runner = Runner(model, len(contexts))
            with torch.no_grad():
                prefill(self._runner, call)
        except Unserved as error:
            name = type(model).__name__
            raise ValueError(f"{name} cannot be an assistant here: {error.cause}") from error

    def read(self, row: int) -> np.ndarray:
        """Return the tokens of a row that were read and kept, [tokens] int64 (a view)."""
        return self._rows.context(row)

    def forget(self, row: int, num_tokens: int) -> None:
        """Forget the newest tokens of a row that were kept; the first ones it read stay."""
        counts = np.zeros(self._rows.num_rows, np.int64)
        counts[row] = num_tokens
        assert num_tokens <= self._rows.num_emitted[row]
        self._rows.num_emitted -= counts
        self._runner.keep(-counts)

    def read_on(self, chains: Sequence[Sequence[int]]) -> torch.Tensor:
        """Read each row's next tokens; return the logits behind each, [rows, width, vocab]."""
        for row, chain in enumerate(chains):
            if chain:
                self._rows.emit(row, chain[0])
        draft = DraftTree.from_chains([chain[1:]] for chain in chains)
        with torch.no_grad():
            outputs = self._runner.forward(self._runner.layout(self._rows, draft))
        for row, chain in enumerate(chains):
            for token in chain[1:]:
                self._rows.emit(row, token)
        self._runner.keep(np.array([len(chain) for chain in chains]))
        return outputs.logits


def _left_padded(contexts: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    width = max(map(len, contexts))
    ids = np.zeros((len(contexts), width), np.int64)
    attended = np.zeros((len(contexts), width), bool)
    for row, context in enumerate(contexts):
        ids[row, width - len(context) :] = context
        attended[row, width - len(context) :] = True
    return ids, attended


def _decoder_arguments(model: Any, encoder_inputs: EncoderInputs | None) -> dict[str, Any]:
    if encoder_inputs is None:
        raise ValueError("an encoder-decoder model cannot assist a decoder-only model")
    inputs, mask = encoder_inputs
    inputs = inputs.to(model.device, model.dtype if inputs.is_floating_point() else None)
    kwargs: dict[str, Any] = {}
    if mask is not None:
        kwargs["attention_mask"] = mask = mask.to(model.device)
    with torch.no_grad():
        kwargs["encoder_outputs"] = compat.encoded(model, inputs, mask)
    return kwargs


NUM_DRAFT = 8

MOST_DRAFTED = 64


class AssistantDrafter(Drafter):
    """Lets a smaller model write ahead, in ragged batches, from a cache of its own.

    The cache is rolled back to what the target accepted. An assistant with another vocabulary reads
    and writes text.
    """

    name: ClassVar[str] = "assistant"
    traits = Traits(NUM_BUCKETS, prior_rates())

    def __init__(
        self,
        model: Any,
        *,
        target_tokenizer: Any = None,
        assistant_tokenizer: Any = None,
        num_draft: int | None = None,
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
            min_reach: Stop where the draft is accepted less often than this.
            call: What is known of the call. Unless it draws, no random number is drawn.

        Raises:
            ValueError: An option is out of its range, `model` is no model, or its vocabulary is not
                the target's and the tokenizers are missing.
        """
        _check_model(model)
        call = call or TargetCall()
        num_draft = _num_draft(model, call.settings) if num_draft is None else num_draft
        bridges = differ(target_tokenizer, assistant_tokenizer)
        check_int("assistant: num_draft", num_draft, 1, MOST_DRAFTED)
        if type(min_reach) not in (int, float) or not 0.0 <= min_reach < 1.0:
            raise ValueError(f"assistant: min_reach is {min_reach!r}, but must lie in [0, 1)")
        self._tokenizers = None
        if bridges:
            self._tokenizers = target_tokenizer, assistant_tokenizer
            call = replace(call, draws=False, vocab_size=None)
        elif call.vocab_size is not None and assistant_tokenizer is None:
            check_sizes(call.vocab_size, int(compat.text_config(model).vocab_size))
        self._picks: Drawn | Likeliest = Likeliest(1, call.vocab_size)
        if call.draws:
            self._picks = Drawn(call.vocab_size, call.processors)
        self._assistant, self._num_draft = model, num_draft
        self._encoder_inputs = call.encoder_inputs
        self._min_reach = min_reach
        self._model: AssistantModel | None = None
        self._patches = ExitStack()

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
        if self._is_served.any():
            patches = patched(self._assistant)
            self._patches.push(patches)  # before they are entered, for interrupts
            patches.__enter__()
            self._model = AssistantModel(self._assistant, contexts, self._encoder_inputs)

    def _first_read(self, rows: Rows, row: int) -> np.ndarray:
        text = self._texts[row]
        text.extend(rows.context(row))
        fits = len(text.ids) + self._num_draft <= self._limit
        return np.array(text.ids[: text.num_settled if fits else 0], np.int64)

    def propose(self, rows: Rows, max_nodes: int) -> DraftTree:
        if self._model is None:
            return DraftTree.empty(rows.num_rows)
        chains = [self._unread(self._model, rows, row) for row in range(rows.num_rows)]
        growths = [Growth(bool(chain)) for chain in chains]
        for _ in range(min(self._num_draft, max_nodes)):
            if not any(chains):
                break
            self._write(growths, self._model.read_on(chains), [len(chain) for chain in chains])
            chains = [[growth.tokens[node] for node in growth.ends] for growth in growths]
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

    def _write(self, growths: list[Growth], logits: torch.Tensor, lengths: list[int]) -> None:
        """Write on after the tokens that the rows have read, by logits, [rows, width, vocab]."""
        rows = np.flatnonzero(lengths)
        tokens, classes, drawn_from = self._picks.pick(logits, rows, np.array(lengths)[rows] - 1)
        for index, row in enumerate(rows.tolist()):
            picked = tokens[index], classes[index], self.rates
            growths[row].extend(*picked, min_reach=self._min_reach)
            if drawn_from is not None:
                growths[row].drawn_from.append(drawn_from[index])

    def _translated(self, rows: Rows, row: int, growth: Growth) -> Growth:
        text = self._texts[row]
        if isinstance(text, SameTokens) or not growth.tokens:
            return growth
        return growth.rewritten(text.translate(growth.tokens, rows.context(row)), self.rates)

    def end(self, rows: Rows) -> None:
        self._model = None
        self._texts = []
        self._patches.close()


def _check_model(model: Any) -> None:
    if not (isinstance(model, torch.nn.Module) and hasattr(model, "config")):
        raise ValueError(f"assistant_model must be a model of transformers, not {model!r}")
    if distributed.is_spread(model):
        raise ValueError("an assistant must be whole in the process that drafts, not sharded")


def _num_draft(model: Any, settings: Mapping[str, Any]) -> int:
    name, stored = "num_assistant_tokens", getattr(model, "generation_config", None)
    asked = settings.get(name)
    asked = getattr(stored, name, None) if asked is None else asked
    if asked is None:
        return NUM_DRAFT
    check_int(name, asked, 1, 2**31)
    return min(asked, MOST_DRAFTED)
