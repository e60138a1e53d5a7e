"""One caller of `generate`: what it runs, and how its plain and its speculative text compare."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import lookahead_hf
from lookahead_hf import hook, stats
from tests.helpers.tiny_chat import save_tiny_chat

SPECULATIVE = {"budget": 8}
"""On a tiny model no draft is worth its cost; a budget drafts all the same."""

ENTRY = '`"speculative": true` in the model\'s generation_config.json'
"""What asks where a caller passes nothing on: `set_default` and `save_pretrained` write it."""

SPECULATES, NOT_REACHED = "speculates", "not reached"


class Room:
    """Where callers run: folders with a tiny chat model, without and with the default."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self._plain, self._speculative = scratch / "plain", scratch / "speculative"
        for folder, default in ((self._plain, None), (self._speculative, SPECULATIVE)):
            folder.mkdir(parents=True)
            model = AutoModelForCausalLM.from_pretrained(save_tiny_chat(folder))
            # Bytes that are no characters would make different texts look the same.
            model.generation_config.suppress_tokens = unprintable(self.tokenizer())
            lookahead_hf.set_default(model, default)
            model.save_pretrained(folder)
        lookahead_hf.warm_up(model)  # until the indexes are compiled, calls decode plainly

    def folder(self, speculative: Any) -> str:
        """A model's folder; with `speculative`, its generation config says so."""
        return str(self._speculative if speculative else self._plain)

    def wide_folder(self, speculative: Any) -> str:
        """The folder of a model like it with hidden states of 256."""
        folder = self.scratch / f"wide {bool(speculative)}"
        if not folder.exists():
            config = AutoConfig.from_pretrained(self._plain)
            config.update({"hidden_size": 256, "intermediate_size": 512, "head_dim": 64})
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config)
            model.generation_config.suppress_tokens = unprintable(self.tokenizer())
            lookahead_hf.set_default(model, speculative)
            model.save_pretrained(folder)
        return str(folder)

    def tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(self._plain, padding_side="left")

    def enabled(self, speculative: Any) -> Any:
        """The model without a default; with `speculative`, its calls can ask for speculation."""
        model = self.model(None)
        return lookahead_hf.enable(model) if speculative else model

    def model(self, speculative: Any, **kwargs: Any) -> Any:
        """The model; with `speculative`, enabled and speculating by default."""
        model = AutoModelForCausalLM.from_pretrained(self.folder(speculative), **kwargs).eval()
        return lookahead_hf.enable(model) if speculative else model


def asking(speculative: Any) -> dict[str, Any]:
    """The argument that asks for speculation, or none."""
    return {"speculative": speculative} if speculative else {}


def speculating(model: Any, speculative: Any) -> Any:
    """Enable a model and make speculation its default, if `speculative` is given."""
    if speculative:
        lookahead_hf.set_default(lookahead_hf.enable(model), speculative)
    return model


def unprintable(tokenizer: Any) -> list[int]:
    """Tokens that would make different texts look the same."""
    texts = map(tokenizer.decode, range(len(tokenizer)))
    return [
        index for index, text in enumerate(texts) if not (text.isascii() and text.isprintable())
    ]


@dataclass(frozen=True)
class Caller:
    """One line of the table.

    Attributes:
        name: Whose `generate` call it is.
        asks: What switches speculation on, `auto` aside.
        run: Given the room and what `speculative` is to be (None or a dict), returns the text; it
            does what `asks` says.
        needs: Packages that it imports.
        expects: SPECULATES, NOT_REACHED or the reason for plain generation.
        promises: Whether the text is to be plain's.
        note: What else there is to know.
        auto: Whether `import lookahead_hf.auto` is needed too: the caller loads its own model.
    """

    name: str
    asks: str
    run: Callable[[Room, Any], Any]
    needs: tuple[str, ...] = ()
    expects: str = SPECULATES
    promises: bool = True
    note: str = ""
    auto: bool = False

    @property
    def how(self) -> str:
        """All that switches speculation on."""
        return f"`import lookahead_hf.auto`, and {self.asks}" if self.auto else self.asks

    @property
    def missing(self) -> list[str]:
        return [name for name in self.needs if not _is_there(name)]

    @property
    def versions(self) -> str:
        return ", ".join(f"{name} {_version(name)}" for name in self.needs)


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of a package above it
        return False


def _version(name: str) -> str:
    """A package's version; several distributions can share a name, as plugins do."""
    known = _DISTRIBUTIONS.get(name)
    owners = [known] if known else metadata.packages_distributions().get(name, [name])
    return metadata.version(owners[0])


_DISTRIBUTIONS = {
    "PIL": "pillow",
    "llama_index.llms.huggingface": "llama-index-llms-huggingface",
    "haystack_integrations.components.generators.transformers": "transformers-haystack",
}


@dataclass
class Outcome:
    """What came of one caller."""

    status: str  # SPECULATES, NOT_REACHED or the reason
    is_equal: bool
    plain: Any = field(repr=False)


def try_out(caller: Caller, room: Room) -> Outcome:
    """Run a caller plainly and speculatively, with what it says is needed and nothing more."""
    assert hook._everywhere is None
    with torch.enable_grad():  # some callers switch gradients off for the whole process
        torch.manual_seed(0)
        plain = caller.run(room, None)
    switch = imported_auto() if caller.auto else nullcontext()
    with torch.enable_grad(), recorded() as records, switch:
        torch.manual_seed(0)
        ours = caller.run(room, SPECULATIVE)
    reasons = {str(each.fallback_reason) for each in records if each.fallback_reason}
    accepted = sum(each.num_accepted for each in records)
    status = ", ".join(sorted(reasons)) or (SPECULATES if accepted else NOT_REACHED)
    return Outcome(status, plain == ours, plain)


@contextmanager
def imported_auto() -> Iterator[None]:
    """What `import lookahead_hf.auto` does, undone afterwards."""
    sys.modules.pop("lookahead_hf.auto", None)
    importlib.import_module("lookahead_hf.auto")
    try:
        yield
    finally:
        lookahead_hf.disable_everywhere()


@contextmanager
def recorded() -> Iterator[list[stats.SpeculativeStats]]:
    """The record of every call that asked for speculation, from any thread."""
    records: list[stats.SpeculativeStats] = []
    whole = stats.publish

    def publish(model: Any, record: stats.SpeculativeStats | None) -> None:
        if record is not None and record not in records:
            records.append(record)
        whole(model, record)

    stats.publish = publish
    try:
        yield records
    finally:
        stats.publish = whole
