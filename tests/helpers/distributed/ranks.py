"""Two processes of one gloo group, started as a test asks, and what they compare."""

from __future__ import annotations

import datetime
import os
import socket
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import lookahead_hf
from lookahead_hf.ngram_pool import compilation
from tests.helpers.caches import CACHE
from tests.helpers.models import VOCAB, left_padded, prompt

SECONDS = 400  # After that processes count as waiting for each other

SETTINGS: dict[str, Any] = {"max_new_tokens": 28, "pad_token_id": 0, "do_sample": False}
SAMPLED: dict[str, Any] = {**SETTINGS, "do_sample": True, "temperature": 0.3}
BUDGET = {"budget": 8}

Found = dict[str, Any]  # What the calls of one process returned, by name


Work = Callable[[int, Path], Found]
"""What a process does, given its rank and a folder; a function of a module."""


def run_both(works: tuple[Work, ...], folder: Path) -> list[list[Found]]:
    """Let two processes do some works one after the other; return what each found in both.

    If they hang, they are ended (TimeoutError).
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.start_processes(
        _process, (works, folder, port), nprocs=2, join=False, start_method="spawn"
    )
    end = time.monotonic() + SECONDS
    try:
        while not context.join(timeout=1):
            if time.monotonic() > end:
                raise TimeoutError("two processes wait for each other")
    finally:
        for process in context.processes:
            process.kill()
    found = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]
    return [list(of_both) for of_both in zip(*found, strict=True)]


def _process(rank: int, works: tuple[Work, ...], folder: Path, port: int) -> None:
    import lookahead_hf.drafting.session  # noqa: F401 (says what there is to compile)

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    limit = datetime.timedelta(seconds=SECONDS / 2)
    distributed.init_process_group("gloo", rank=rank, world_size=2, timeout=limit)
    compilation.wait([compilation.drafting])
    torch.save([work(rank, folder) for work in works], folder / f"{rank}.pt")
    distributed.barrier()
    distributed.destroy_process_group()


def compared(model: Any, *, speculative: Any = BUDGET, seed: int = 7, **settings: Any) -> Found:
    """A call plainly and speculatively: what it returns, and where the generator ends."""
    found: Found = {}
    for name, value in (("plain", None), ("ours", speculative)):
        torch.manual_seed(seed)
        found[name] = values(model.generate(**settings, speculative=value))
        found[f"{name} next"] = float(torch.rand(()))
    stats = lookahead_hf.last_stats(model)
    found["stats"] = None if stats is None else stats.to_dict()
    return found


def spread(path: Path, **shared: Any) -> Any:
    """A saved model, spread over the processes by transformers and enabled."""
    config = DistributedConfig(**shared)
    model: Any = AutoModelForCausalLM.from_pretrained(path, distributed_config=config).eval()
    model.generation_config.eos_token_id = None
    return lookahead_hf.enable(model)


def values(output: Any) -> Any:
    """What `generate` returned, as plain values."""
    if isinstance(output, torch.Tensor):
        return output.tolist()
    return {
        "sequences": output.sequences.tolist(),
        "scores": torch.stack(output.scores, 1),
        "columns": output[CACHE].get_seq_length(),
        "keys": [layer.keys for layer in output[CACHE].layers],
    }


def assert_speculated(found: Found) -> None:
    """The call was speculated, and its texts are plain's."""
    assert_same(found)
    assert found["stats"]["fallback_reason"] is None and found["stats"]["num_accepted"] > 0


def assert_same(found: Found) -> None:
    """The texts are plain's, and the random generator ends where plain's does."""
    plain, ours = found["plain"], found["ours"]
    if isinstance(plain, dict):
        columns = len(plain["sequences"][0]) - 1
        assert ours["columns"] == columns
        # Plain's cache goes on with what it was fed while other processes had not ended.
        kept = [keys[..., :columns, :] for keys in plain["keys"]]
        torch.testing.assert_close(ours["keys"], kept, atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(ours["scores"], plain["scores"], atol=1e-3, rtol=1e-3)
        plain, ours = plain["sequences"], ours["sequences"]
    assert ours == plain
    assert found["ours next"] == found["plain next"]


def one_row(seed: int = 0) -> dict[str, torch.Tensor]:
    """A prompt."""
    return {"input_ids": prompt(seed=seed)}


def two_rows() -> dict[str, torch.Tensor]:
    """Two prompts, one of them shorter."""
    return left_padded((0, 5))


def of_whole_batch(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A processor that looks at the batch as a whole, so that rows are verified in lockstep."""
    token = int(ids.sum()) % VOCAB
    scores[:, token] -= 1.0
    return scores
