"""Write docs/models.md: every model type that transformers can build tiny, run both ways here.

    python -m tests.models_table

It takes a few minutes and needs no network.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES

import lookahead_hf
from lookahead_hf.fallback import FallbackReason, Unserved
from tests.helpers import architectures, multimodal
from tests.helpers.compared import Compared, assert_same_logits, compared
from tests.helpers.device import taped
from tests.helpers.models import prompt

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
NEW = 24

TEXTS = "Decoders of text"
MULTIMODAL = "Pictures and sound"
ENCODER_DECODERS = "Encoder-decoders of text"

SECTIONS: dict[str, tuple[str, ...]] = {
    MULTIMODAL: tuple(sorted(multimodal.CLASSES)),
    TEXTS: tuple(sorted(architectures.MODEL_TYPES)),
    ENCODER_DECODERS: tuple(
        sorted(set(MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES) - set(multimodal.CLASSES))
    ),
}
"""The model types of every table."""

INTRODUCTION = """\
# Models

What `speculative=True` does for each model type (`model.config.model_type`) of transformers
{version}. A program wrote this page: it built a tiny random model of every type, ran it plainly and
speculatively on a CPU in float32 with a drafter that is partly right, and compared the token ids
and the logits of every step. `python -m tests.models_table` writes it anew.

* **one row**, **ragged batch**: calls with a batch of one, and of two prompts of different lengths,
  left-padded. "yes": speculated, with plain's text; "plain": `generate` runs without speculation,
  and the last column gives the reason.
* **drafts**: trees, or chains where the model cannot verify branches.
* **on a GPU**: "graphs" where a step can be captured as a CUDA graph, "steps" where it runs on the
  device operation by operation, "host" where the host verifies. A stand-in on the CPU shows this.
* **inputs**: the arguments beside the token ids that the model was given. Pictures and sound are
  read with the prompt; a batch has one in every row.

A type that this page lacks, for example one of a repository's own code, is tested by a few short
forwards before its first call, and served if they give plain's logits. So is a class with a forward
of its own, whatever its type, and each model around a text model: PaliGemma 2 is not served.

{counts}
"""


@dataclass(frozen=True)
class Line:
    """One model type."""

    model_type: str
    one: str = ""  # what a call with one row does
    ragged: str = ""  # what a call with two rows of different lengths does
    drafts: str = ""  # their shape
    device: str = ""  # how steps run on a GPU
    inputs: str = ""  # the arguments beside token ids
    reason: str = ""  # why some call runs plainly

    def __str__(self) -> str:
        last = "; ".join(filter(None, (self.inputs, self.reason)))
        cells = f"`{self.model_type}`", self.one, self.ragged, self.drafts, self.device, last
        return "| " + " | ".join(cells) + " |"


SERVED, PLAIN, UNTRIED, WRONG = "yes", "plain", "not tried", "**another text**"

Maker = Callable[[int], dict[str, Any]]  # Makes the arguments of a call with so many rows


def line(model_type: str, section: str) -> Line:
    """Run one model type both ways."""
    try:
        model, make = _built(model_type, section)
        if not isinstance(model, transformers.GenerationMixin):
            return Line(model_type, UNTRIED, UNTRIED, reason="it does not write token by token")
        model.generate(**make(1))
    except Exception as error:  # a configuration or a forward may object to sizes in any way
        return Line(model_type, UNTRIED, UNTRIED, reason=_why_untried(error))
    one, first, reason = _outcome(model, lambda: make(1))
    try:
        model.generate(**make(2))
    except Exception:
        ragged, second = UNTRIED, None
    else:
        ragged, second, other = _outcome(model, lambda: make(2))
        reason = reason or other
    last = second or first
    drafts = "" if last is None else "trees" if last.stats.num_moved else "chains"
    device = "" if last is None else _on_device(model, lambda: make(2 if second else 1))
    names = sorted(set(make(1)) - {*_SETTINGS, *_OF_TEXT})
    return Line(
        model_type, one, ragged, drafts, device, ", ".join(f"`{name}`" for name in names), reason
    )


_SETTINGS = ("max_new_tokens", "do_sample", "pad_token_id", "return_dict_in_generate")
_OF_TEXT = ("inputs", "input_ids", "attention_mask", "output_logits")


def _built(model_type: str, section: str) -> tuple[Any, Maker]:
    """Return a tiny model, and what makes the arguments of its calls."""
    settings = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    settings["return_dict_in_generate"] = True
    if section == TEXTS:
        model = architectures.build(model_type)
        if model is None:
            raise ValueError("no tiny model")
        ids = prompt(2, 10, seed=3)
        mask = torch.ones_like(ids)
        mask[1, :4] = 0
        return model, lambda rows: {
            **{"inputs": ids[:rows], "attention_mask": mask[:rows], "output_logits": True},
            **settings,
        }
    model = multimodal.build(model_type)
    return model, lambda rows: {
        **multimodal.call(model, (1,) * rows, (12, 7)[:rows]),
        **{"output_logits": True},
        **settings,
    }


def _why_untried(error: Exception) -> str:
    """Return why there is no tiny model that generates."""
    missing = str(error).partition(" requires the ")[2].partition(" library")[0]
    return f"needs {missing}" if missing else "no tiny model of it was made"


def _outcome(model: Any, call: Callable[[], dict[str, Any]]) -> tuple[str, Compared | None, str]:
    """Run a call both ways; return what happened, and the reason if plain `generate` ran."""
    try:
        found = compared(model, call, -NEW, on_fallback="error")
        assert_same_logits(found)
    except lookahead_hf.SpeculationFallbackError as error:
        unserved = error.__cause__
        assert isinstance(unserved, Unserved)
        return PLAIN, None, _why_plain(unserved)
    except AssertionError:
        return WRONG, None, ""
    return SERVED, found, ""


def _why_plain(unserved: Unserved) -> str:
    """Return the reason in one clause, without the name of a class or of the type."""
    if unserved.detail.startswith("model type "):
        return "its positions or biases do not follow from position ids and a mask"
    says_more = unserved.reason in (FallbackReason.MODEL, FallbackReason.ARGUMENT)
    return unserved.detail if says_more else unserved.reason.text


def _on_device(model: Any, call: Callable[[], dict[str, Any]]) -> str:
    """Return how steps run where the device engine can be used, which keeps no logits."""
    with pytest.MonkeyPatch.context() as patch, taped(patch):
        without_logits = lambda: {**call(), "output_logits": False}  # noqa: E731
        stats = compared(model, without_logits, -NEW, cuda_graphs=True).stats
    if stats.engine != "device":
        return "host"
    return "graphs" if stats.execution == "replayed" else "steps"


def counts(section: str, lines: Iterable[Line]) -> str:
    """Return how many types of a table are served, and how many were not tried."""
    lines = [*lines]
    tried = [each for each in lines if each.one != UNTRIED]
    untried = len(lines) - len(tried)
    one, ragged = (Counter(getattr(each, name) for each in tried) for name in ("one", "ragged"))
    return (
        f"* {section}: {one[SERVED]} of {len(tried)} types that were tried are speculated, "
        f"{ragged[SERVED]} of them also in ragged batches; {untried} were not tried."
    )


RECURRENT = """\
## Recurrent states

The modules that keep the states, *mixers*, get a block of tokens whole where the tests show that
they treat it as they treat single tokens. Others, such as those of an unknown type, get the tokens
of a block one by one. A model of each kind is tested on itself before its first call.

`tests/engines/hybrid/test_recurrent.py` measures each type over 80 tokens, with larger weights,
biases of time steps of -9, 0 and 9, and slow and fast decays, in float32: the logits differ from
those of plain's single tokens by at most 1e-4 standard deviations, those of `mamba2` by 1e-3. It
sums decays in float32: in float64 its difference is 1e-5.
"""


def page(tables: dict[str, list[Line]]) -> str:
    """Return the whole page."""
    summary = "\n".join(counts(section, lines) for section, lines in tables.items())
    parts = [INTRODUCTION.format(version=transformers.__version__, counts=summary)]
    for section, lines in tables.items():
        head = "| type | one row | ragged batch | drafts | on a GPU | inputs, or the reason |"
        rows = "\n".join(str(each) for each in lines)
        parts.append(f"## {section}\n\n{head}\n| --- | --- | --- | --- | --- | --- |\n{rows}\n")
    return "\n".join([*parts, RECURRENT])


def main() -> None:
    """Run every type and write the page."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    _compile()
    tables: dict[str, list[Line]] = {}
    for section, model_types in SECTIONS.items():
        tables[section] = []
        for model_type in model_types:
            tables[section].append(line(model_type, section))
            print(tables[section][-1], file=sys.stderr, flush=True)
    PAGE.write_text(page(tables), encoding="utf-8")
    wrong = [each.model_type for lines in tables.values() for each in lines if WRONG in str(each)]
    if wrong:
        sys.exit(f"these write another text than plain generate: {', '.join(wrong)}")


def _compile() -> None:
    """Wait for the compiled functions, without which no scripted drafter is asked."""
    import lookahead_hf.drafting.session  # noqa: F401 (says what there is to compile)
    from lookahead_hf.ngram_pool import compilation

    torch.set_num_threads(1)
    compilation.wait([compilation.drafting])


if __name__ == "__main__":
    main()
