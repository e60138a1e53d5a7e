"""A process ends although the thread of a queue has not been stopped."""

from __future__ import annotations

import subprocess
import sys

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
