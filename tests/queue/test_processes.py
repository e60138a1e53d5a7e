"""Queues in processes that end before them, and in processes that were forked."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import threading
import lookahead_hf
from tests.helpers import models

model = lookahead_hf.enable(models.tiny("llama"), default=True)
for tokens in (4, 1_000_000):  # an idle queue, and one that decodes
    manager = model.init_continuous_batching()
    manager.start()
    manager.add_request([1, 2, 3], max_new_tokens=tokens, streaming=True)
    print(len(manager.get_result().generated_tokens))
threading.Thread(target=lambda: print("a thread of the program is waited for")).start()
"""


def test_a_process_ends_with_its_main_thread() -> None:
    given = [sys.executable, "-c", PROGRAM]
    run = subprocess.run(given, capture_output=True, text=True, timeout=200, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == "a thread of the program is waited for"


FORKED = """
import os
import signal
import torch
from tests.helpers import models, requests
import lookahead_hf
import lookahead_hf.engines.cpu.layers
import lookahead_hf.queue.manager
import lookahead_hf.drafting.session
from lookahead_hf.ngram_pool import compilation

# A process that is forked while numba loads has no indexes to draft from.
compilation.wait([compilation.drafting, compilation.common, compilation.kernels["float32"]])
model = lookahead_hf.enable(models.tiny("llama"), default=requests.DRAFTED)
torch.set_num_threads(2)
torch.ones(10**6).exp()
child = os.fork()
if child == 0:
    signal.alarm(120)  # ends it where it hangs
    torch.set_num_threads(1)
    if {more_threads}:
        lookahead_hf.queue.manager.torch.get_num_threads = lambda: 2
    with requests.running(model, requests.settings(model)) as manager:
        manager.add_request([5, 6, 7], request_id="text")
        found = requests.results(manager, 1)
    requests.speculated(found.values())
    os._exit(0)
_, status = os.waitpid(child, 0)
os._exit(int(status != 0))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="libgomp keeps the threads of a fork's parent")
@pytest.mark.parametrize("more_threads", [False, True])
def test_a_forked_process_starts_a_manager(more_threads: bool) -> None:
    program = FORKED.format(more_threads=more_threads)
    subprocess.run([sys.executable, "-c", program], check=True, timeout=240)
