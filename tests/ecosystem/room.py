"""Where callers run: with a tiny chat model in a folder, with or without speculation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

import lookahead_hf
from tests.helpers.tiny_chat import DRAFTING

NEW_TOKENS = 24
PROMPTS = ["abc abc abc", "abcd", "xyz xyz xyz"]
GREEDY = {"max_new_tokens": NEW_TOKENS, "do_sample": False}


class Room:
    """One run of a caller: with speculation where it `asks`, else without."""

    def __init__(self, plain_folder: str, scratch: Path, asks: bool) -> None:
        self.plain_folder, self.scratch, self.asks = plain_folder, scratch, asks
        self.tokenizer = AutoTokenizer.from_pretrained(self.plain_folder, padding_side="left")
        self.argument = {"speculative": DRAFTING} if asks else {}
        """The argument that asks for speculation, or none."""

    @property
    def folder(self) -> str:
        """The model's folder, whose generation config asks for speculation."""
        folder = str(self.scratch / "asking")
        for each in (self.speculating(self.model()), self.tokenizer):
            each.save_pretrained(folder)
        return folder

    def model(self, **kwargs: Any) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.plain_folder, **kwargs).eval()

    def enabled(self, model: Any = None) -> Any:
        """A model whose calls can ask for speculation."""
        model = model or self.model()
        return lookahead_hf.enable(model) if self.asks else model

    def speculating(self, model: Any = None) -> Any:
        """A model whose calls speculate by default."""
        model = self.enabled(model)
        lookahead_hf.set_default(model, self.argument.get("speculative"))
        return model

    def texts(self, model: Any) -> Any:
        inputs = self.tokenizer(PROMPTS, return_tensors="pt", padding=True)
        return model.generate(**inputs, **GREEDY).tolist()
