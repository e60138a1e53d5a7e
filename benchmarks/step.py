"""Time one step of decoding by nodes, batch and context, for shapes of models with random weights.

A step is what lies between two drafts: layout, forward of the last token and its nodes, choice of
tokens, and the result on the host. Systems:

    eager           transformers with a DynamicCache, a chain of nodes as in assisted decoding
    eager no cudnn  the same without cuDNN's attention, on a GPU
    ours            our cache, masks, walk and compaction, one operation after the other
    ours graphs     the same replayed as a CUDA graph
    ours compiled   the same with layers that compiled kernels compute, on a CPU

`floor` is the time to read the weights once, but for an embedding that is no head, by the bandwidth
of a large copy in the same run. The context of transformers' eager steps grows by a token from
round to round, as in a text: cuDNN plans anew for every length. Times are the fastest of
`--rounds`, in milliseconds. `ran` says whether steps were replayed, or why not, whose attention it
was, and whether Triton's kernels or their twins verified.

    python benchmarks/step.py --json step.json
    python benchmarks/step.py --shapes 0.1B --nodes 0,8,32 --context 1500 --dtype float32
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import common
import numpy as np
import torch
from common import Report
from kernel_times import bandwidth
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from lookahead_hf import kernels
from lookahead_hf.call import admission, execution
from lookahead_hf.draft import DraftTree
from lookahead_hf.engines.cpu.layers import CompiledSteps
from lookahead_hf.engines.cuda.runner import CudaRunner
from lookahead_hf.model.compat import GENERATE_CACHE
from lookahead_hf.model.facts import facts_of
from lookahead_hf.model.state import state_of
from lookahead_hf.rows import Rows
from lookahead_hf.runner import attention
from lookahead_hf.runner.host import Runner
from lookahead_hf.runner.outputs import DeviceOutputs
from lookahead_hf.runner.patched import patched
from lookahead_hf.runner.prefill import start

SHAPES = {
    "tiny": (64, 128, 2, 4, 2, 512),  # to rehearse with
    "0.1B": (576, 1536, 30, 9, 3, 49152),  # SmolLM2-135M
    "1B": (2048, 8192, 16, 32, 8, 128256),  # Llama-3.2-1B
    "8B": (4096, 14336, 32, 32, 8, 128256),  # Llama-3.1-8B
}
"""Hidden size, intermediate size, layers, heads, heads of K and V, vocabulary."""


@dataclass(frozen=True)
class Line:
    """One step of one system."""

    shape: str
    system: str
    rows: int
    context: int
    nodes: int
    floor: float
    milliseconds: float | None = None
    ran: str = ""


def load(
    shape: str,
    folder: str | None,
    dtype: torch.dtype,
    device: torch.device,
    model_type: str = "llama",
) -> Any:
    """A model of this shape and type with random weights, or the one in a folder."""
    if folder:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    hidden, intermediate, layers, heads, kv_heads, vocab = SHAPES[shape]
    width, names = hidden // heads, ("linear_num_key_heads", "linear_num_value_heads")
    linear = dict.fromkeys(names, heads) | {"linear_key_head_dim": width}
    linear |= {"linear_value_head_dim": width, "head_dim": width}
    config = CONFIG_MAPPING[model_type](
        **(linear if model_type != "llama" else {}),
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocab,
        max_position_embeddings=65536,
        tie_word_embeddings=shape != "8B",
    )
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


@contextmanager
def cudnn(enabled: bool) -> Iterator[None]:
    """Let torch's attention use cuDNN, or not."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(enabled)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


@contextmanager
def counted() -> Iterator[list[str]]:
    """Yield a list with an entry for each attention that our kernel has been asked for."""
    attend, asked = attention.attend_by_kernel, list[str]()

    def noting(*given: Any) -> torch.Tensor:
        asked.append("")
        return attend(*given)

    with patch.object(attention, "attend_by_kernel", noting):
        yield asked


def said(how: str | None, asked: list[str], device: torch.device) -> str:
    """What ran: how steps were run, whose attention it was, and what verified."""
    whose = "our attention" if asked else "torch's attention"
    return f"{how or execution.MODEL}, {whose}, {kernels.backend(device)}"


def fastest(step: Callable[[int], Any], rounds: int) -> float:
    """Milliseconds; every step ends with its result on the host."""
    step(0), step(1)
    best = float("inf")
    for index in range(2, 2 + rounds):
        start = time.perf_counter()
        step(index)
        best = min(best, time.perf_counter() - start)
    return best * 1e3


class Bench:
    """One model, one batch, one context."""

    def __init__(self, model: Any, rows: int, context: int, rounds: int) -> None:
        self.model, self.rows, self.context, self.rounds = model, rows, context, rounds
        vocab = model.config.vocab_size
        self.prompt = torch.randint(vocab, (rows, context), device=model.device)

    def eager(self, nodes: int) -> dict[str, Any]:
        """Transformers with its growing cache."""
        cache = DynamicCache(config=self.model.config)
        self.model(self.prompt, **{GENERATE_CACHE: cache}, logits_to_keep=1)
        block = self.prompt[:, : 1 + nodes]

        def step(_: int) -> None:
            self.model(block, **{GENERATE_CACHE: cache}).logits.argmax(-1).tolist()
            if nodes:
                cache.crop(-nodes)

        return {"milliseconds": fastest(step, self.rounds), "ran": "eager"}

    def ours(self, nodes: int, cuda_graphs: bool = False, compiled: bool = False) -> dict[str, Any]:
        """Our step."""
        with counted() as asked, self.stepping(nodes, cuda_graphs, compiled) as work:
            whole, target = fastest(lambda _: work.step(), self.rounds), work.target
            ran = said(target.execution, asked, self.model.device)
        return {"milliseconds": whole, "ran": ran}

    @contextmanager
    def stepping(
        self,
        nodes: int,
        cuda_graphs: bool = False,
        compiled: bool = False,
        on_device: bool | None = None,
    ) -> Iterator[_OnDevice | _OnHost]:
        """Yield our step, which runs and waits for its result.

        The device verifies the step on a GPU, or by `on_device`, which a CPU can stand for.
        """
        if on_device is None:
            on_device = self.model.device.type == "cuda"
        with patched(self.model):
            while compiled and execution.COMPILING in CompiledSteps(self.model).reasons:
                time.sleep(0.1)
            given: dict[str, Any] = {"steps": CompiledSteps(self.model, compiled)}
            if on_device:
                # With room for one token no step follows, and none tries what layers read.
                given = {"room": max(2, 1 + nodes), "cuda_graphs": cuda_graphs}
            target: Any = (CudaRunner if on_device else Runner)(self.model, self.rows, **given)
            start(target, self.prompt)
            texts, draft = self._texts(), self._draft(nodes)
            try:
                if on_device:
                    texts.end(np.ones(self.rows, bool))  # so that steps keep nothing
                    yield _OnDevice(target, texts, draft)
                else:
                    yield _OnHost(target, texts, draft)
            finally:
                target.end()

    def _texts(self) -> Rows:
        """Return texts with a last token."""
        texts = Rows(self.prompt.to("cpu").numpy())
        for row in range(self.rows):
            texts.emit(row, 5)
        return texts

    def _draft(self, nodes: int) -> DraftTree:
        chain = list(range(10, 10 + nodes))
        return DraftTree.from_rows([(chain, list(range(-1, nodes - 1)))] * self.rows)


@dataclass
class _OnDevice:
    """A step that the device verifies."""

    target: CudaRunner
    texts: Rows
    draft: DraftTree

    def step(self) -> None:
        step = self.target.launch(self.texts, self.draft)
        assert isinstance(step, DeviceOutputs)
        step.walk.take()


class _OnHost:
    """A step that is verified and compacted on the CPU."""

    def __init__(self, target: Runner, texts: Rows, draft: DraftTree) -> None:
        self.target, self.texts, self.draft = target, texts, draft
        rows, width = texts.num_rows, 1 + draft.max_nodes
        self.tokens = torch.zeros(rows, width, dtype=torch.long)
        for row in range(rows):
            self.tokens[row, 1:] = torch.from_numpy(draft.token_ids[draft.row(row)].astype(int))
        self.parents = torch.arange(-1, width - 1).repeat(rows, 1)
        self.num_nodes = torch.full((rows,), width - 1)
        # Half of the nodes, each a slot too far behind: all of them move.
        kept = 1 + (width - 1) // 2
        self.path = torch.tensor([0, *range(2, 1 + kept)])[:kept].repeat(rows, 1)
        self.kept = torch.full((rows,), kept)

    def step(self) -> None:
        inputs = self.target.layout(self.texts, self.draft)
        logits = self.target.forward(inputs).logits
        kernels.verify_tree(logits, self.tokens, self.parents, self.num_nodes)
        assert self.target.cache is not None
        for group in self.target.cache.slots.each_group():
            path = self.path.numpy(), self.kept.numpy()
            kernels.compact_on_host(group.path_table, group.lengths, *path)


def bytes_read(model: Any) -> int:
    """Bytes of the weights that a step reads, each once: all but an embedding that is no head."""
    weights = {p.data_ptr(): p.nbytes for p in model.parameters()}
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    if embedding is not head:
        del weights[embedding.data_ptr()]
    return sum(weights.values())


def measure(report: Report, model: Any, place: Line, options: argparse.Namespace) -> None:
    """Add all lines of one model."""
    cuda = model.device.type == "cuda"
    admission.admit(model, admission.Purpose.WARM_UP)  # decides how recurrent layers run blocks
    best = {"cuda_graphs": True} if cuda else {"compiled": True}
    for rows, context in product(options.batch, options.context):
        bench = Bench(model, rows, context, options.rounds)
        place = replace(place, rows=rows, context=context)
        for nodes in options.nodes:
            line = replace(place, nodes=nodes)
            if not (nodes and facts_of(model).mixers):  # which cannot be rolled back
                for enabled in (True, False) if cuda else (True,):
                    name = "eager" if enabled else "eager no cudnn"
                    with cudnn(enabled):
                        report.add(replace(line, system=name), partial(bench.eager, nodes))
            report.add(replace(line, system="ours"), partial(bench.ours, nodes))
            line = replace(line, system="ours graphs" if cuda else "ours compiled")
            report.add(line, partial(bench.ours, nodes, **best))
        state_of(model).free()


def shapes_parser(
    description: str | None, shapes: list[str], **numbers: int
) -> argparse.ArgumentParser:
    """A command line that says which shapes run, or which model, where and in which dtype."""
    parser = common.parser(description, **numbers)
    parser.add_argument("--shapes", type=common.words, default=shapes)
    parser.set_defaults(dtype="bfloat16")
    return parser


@torch.no_grad()
def main() -> None:
    """Measure, print a table, write the files."""
    cuda = torch.cuda.is_available()
    parser = shapes_parser(__doc__, ["0.1B", "1B", "8B"] if cuda else ["0.1B"], rounds=10)
    parser.add_argument("--model-type", default="llama", help="as in transformers; sizes as shapes")
    parser.add_argument("--nodes", type=common.numbers, default=[0, 7, 15, 31, 63])
    parser.add_argument("--batch", type=common.numbers, default=[1, 8] if cuda else [1])
    parser.add_argument("--context", type=common.numbers, default=[512, 4096] if cuda else [512])
    options = common.parsed(parser, context=[64])
    if max(options.nodes) + options.rounds + 3 > min(options.context):
        parser.error("--context is shorter than nodes and rounds: take a longer one")
    torch.manual_seed(0)
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    per_microsecond = bandwidth(device, options.rounds)
    about = {"device": options.device, "dtype": options.dtype}
    report = Report(options, **about, gigabytes_per_second=per_microsecond / 1e3)
    for shape in [Path(options.model).name] if options.model else options.shapes:
        model = load(shape, options.model, dtype, device, options.model_type)
        floor = bytes_read(model) / per_microsecond / 1e3
        measure(report, model, Line(shape, "", 0, 0, 0, floor), options)
        del model
    report.end()


if __name__ == "__main__":
    main()
