"""The thread that decodes a run, and the OpenMP threads that compute for it.

OpenMP keeps a team of threads for every thread that computes. If two teams have more threads than
there are cores, they sleep between operations instead of spinning: with two cores a step of
SmolLM2-135M in bfloat16 took 57 ms in a second thread, and 34 ms once the first team had ended.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import sys
from collections.abc import Callable

import torch

_SOFT_PAUSE = 1
"""omp_pause_soft of OpenMP 5: the threads keep their data and can be started again."""

_PROCESS = os.getpid()
"""Id of the process that imported this module, to recognise forked ones."""


def end_team() -> None:
    """End the team of the calling thread, which gets a new one when it computes again.

    A manager calls it before its own thread starts. Only libgomp, the OpenMP of torch on Linux,
    keeps such teams. In a forked process it would wait forever for threads that the fork has not
    copied, so a process that may have been forked keeps its team.
    """
    is_forked = os.getpid() != _PROCESS or multiprocessing.parent_process() is not None
    if sys.platform != "linux" or is_forked or torch.get_num_threads() == 1:
        return
    pause = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)
    if pause is not None:  # of the OpenMP that torch has loaded
        pause(_SOFT_PAUSE)


class CallersThread:
    """A run that the caller's own thread decodes, with the methods of a thread."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run, self._is_alive = run, True

    def is_alive(self) -> bool:
        """Return whether the run has not begun."""
        return self._is_alive

    def run(self) -> None:
        """Decode, unless that was done or given up."""
        if self._is_alive:
            self._is_alive = False
            self._run()

    def join(self, timeout: float | None = None) -> None:
        """Give up a run that has not begun, since nobody has asked for a result."""
        self._is_alive = False
