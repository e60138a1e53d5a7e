"""More than one machine, on Ray: texts for a data set (`Job`), and servers with sessions."""

from __future__ import annotations

from lookahead_hf.ray.data import Job, Worker, row_seed
from lookahead_hf.ray.serving import application

__all__ = ["Job", "Worker", "application", "row_seed"]
