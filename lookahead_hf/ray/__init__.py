"""More than one machine, on Ray: texts for a data set (`Job`), and servers with sessions."""

from __future__ import annotations

from lookahead_hf.tools.ray import Job, Worker, application, row_seed

__all__ = ["Job", "Worker", "application", "row_seed"]
