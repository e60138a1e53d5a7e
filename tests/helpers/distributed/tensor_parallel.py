"""Calls of a model whose matrices lie over two processes; run in both."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.tensor import parallel

import lookahead_hf
from lookahead_hf import SpeculativeConfig
from lookahead_hf.draft import DraftTree
from lookahead_hf.drafting.budget import KEPT_SAMPLES, SIZES, CostCurve
from lookahead_hf.drafting.drafter import Drafter
from lookahead_hf.drafting.rates import memory_of
from lookahead_hf.rows import Rows
from tests.helpers.compared import served
from tests.helpers.distributed.ranks import (
    BUDGET,
    SAMPLED,
    SETTINGS,
    Found,
    compared,
    of_whole_batch,
    one_row,
    spread,
    two_rows,
    values,
)
from tests.helpers.fakes import Recorder
from tests.helpers.models import tiny


class Tilts:
    """A processor by which the scores of one process differ from the other's."""

    def __init__(self, rank: int) -> None:
        self.token = 11 + rank

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, self.token] += 50.0 * (ids.shape[1] % 5 == 0)
        return scores


class EndsAt:
    """A criterion that ends the texts of this process at a length of its own."""

    def __init__(self, columns: int) -> None:
        self.columns = columns

    def __call__(self, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.full((len(ids),), ids.shape[1] >= self.columns)


class Fails(Drafter):
    """A drafter that fails when it is asked for the third time."""

    name = "fails"
    num_asked = 0

    def propose(self, rows: Rows, max_nodes: int) -> DraftTree:
        self.num_asked += 1
        if self.num_asked == 3:
            raise ValueError("as the test wants it")
        return DraftTree.from_chains([[[5, 6]]] * rows.num_rows)


class KnownCosts:
    """A cost model that learns nothing from this machine's clock."""

    num_observed = 0

    def __init__(self, of_node: float) -> None:
        """`of_node`: what a draft node costs, in plain steps."""
        self._curve = CostCurve()
        for size in SIZES:
            for _ in range(KEPT_SAMPLES):
                self._curve.observe(size, 0.02 * (1 + of_node * size))
        vars(self._curve)["observe"] = lambda *_: None

    def curve(self, *_: Any) -> CostCurve:
        return self._curve

    def kept(self) -> list[Any]:
        return []


def calls(rank: int, folder: Path) -> Found:
    """All calls, by name."""
    model = spread(folder / "model", tp_size=2, tp_plan="auto")
    lookahead_hf.warm_up(model, context_length=16, max_draft_nodes=1)
    found = {
        "greedy": compared(model, **one_row(), **SETTINGS),
        "greedy, two rows": compared(model, **two_rows(), **SETTINGS),
        "sampled": compared(model, **one_row(), **SAMPLED),
        "sampled, two rows": compared(model, **two_rows(), **SAMPLED),
    }
    eos = found["greedy, two rows"]["plain"][1][24]
    ends = {**two_rows(), **SETTINGS, "eos_token_id": eos}
    outputs = {"return_dict_in_generate": True, "output_scores": True}
    invariant = {"budget": 8, "draft_invariant": True}
    found |= {
        "one row ends": compared(model, **ends),
        "outputs": compared(model, **ends, **outputs),
        "invariant": compared(model, **two_rows(), **SETTINGS, speculative=invariant),
        "lockstep": compared(model, **ends, logits_processor=[of_whole_batch]),
        "lockstep, sampled": compared(
            model, **two_rows(), **SAMPLED, logits_processor=[of_whole_batch]
        ),
        "other seeds": compared(model, **two_rows(), **SAMPLED, seed=7 + rank),
        **apart(model, rank),
        **failures(model, rank),
        **unserved(model),
        "by torch": compared(parallelized(), **two_rows(), **SETTINGS),
    }
    return found


def pipeline_calls(rank: int, folder: Path) -> Found:
    """Calls of a model whose layers lie over two processes, by name."""
    model, silent = spread(folder / "model", pp_size=2), {"on_fallback": "silent"}
    return {
        "greedy": compared(model, **one_row(), **SETTINGS, speculative=silent),
        "sampled, two rows": compared(model, **two_rows(), **SAMPLED, speculative=silent),
    }


def apart(model: Any, rank: int) -> Found:
    """Calls in which the processes would decide differently."""
    found = {}
    for name, node_costs in (("cheap to decide", (0.0, 1.0)), ("dear to decide", (1.0, 0.0))):
        vars(memory_of(model))["costs"] = KnownCosts(node_costs[rank])
        found[name] = compared(model, **one_row(), **SETTINGS, speculative=True)
    settings = {**two_rows(), **SETTINGS}
    for name, given in (
        ("scores", {"logits_processor": [Tilts(rank)]}),
        ("ends", {"stopping_criteria": [EndsAt(28 + 5 * rank)]}),
    ):
        output = model.generate(**settings, **given, speculative=BUDGET)
        found[name] = {"ours": values(output), "stats": served(model).to_dict()}
    found["scores"]["plain"] = values(model.generate(**settings, logits_processor=[Tilts(0)]))
    found["ends"]["plain"] = values(model.generate(**settings, stopping_criteria=[EndsAt(28)]))
    return found


def failures(model: Any, rank: int) -> Found:
    """Calls in which something fails in one process."""
    fails = Fails()
    drafters = SpeculativeConfig(drafters=(fails, "ngram"), budget=8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = {"drafter fails": compared(model, **one_row(), **SETTINGS, speculative=drafters)}
    found["drafter fails"]["num_asked"] = fails.num_asked
    found["drafter fails"]["warned"] = any(
        "failed and is left out" in str(w.message) for w in caught
    )
    streamer = Recorder(-1 if rank else 8)
    try:
        model.generate(**one_row(), **SETTINGS, speculative=BUDGET, streamer=streamer)
        found["breaks off"] = "ended"
    except (ConnectionError, RuntimeError) as error:
        found["breaks off"] = f"{type(error).__name__}: {error}"
    streamer = Recorder()
    output = model.generate(**one_row(), **SETTINGS, speculative=BUDGET, streamer=streamer)
    found["afterwards"] = {"ours": values(output), "events": streamer.events}
    return found


def unserved(model: Any) -> Found:
    """Calls that run plainly in both processes."""
    rejects = {"verification": "rejection", "on_fallback": "silent"}
    silent = {"on_fallback": "silent"}
    greedy: dict[str, Any] = {**one_row(), **SETTINGS, "speculative": silent}
    return {
        "rejection": compared(model, **one_row(), **SAMPLED, speculative=rejects),
        "assistant": compared(model, **greedy, assistant_model=model),
        "synced": compared(model, **greedy, synced_gpus=True),
    }


def parallelized() -> Any:
    """The model, spread by torch instead of by transformers."""
    model = lookahead_hf.enable(tiny("llama", num_hidden_layers=2))
    mesh = distributed.init_device_mesh("cpu", (2,))
    plan: dict[str, Any] = {}
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if isinstance(module, torch.nn.Linear) and last in ("gate_proj", "up_proj"):
            plan[name] = parallel.ColwiseParallel()
        if last == "down_proj":
            plan[name] = parallel.RowwiseParallel()
    parallel.parallelize_module(model, mesh, plan)
    return model
