"""Compiled layers: decoder layers and linear layers that kernels compute in our steps on a CPU."""

from __future__ import annotations

from lookahead_hf.engines.cpu.layers.steps import CompiledSteps

__all__ = ["CompiledSteps"]
