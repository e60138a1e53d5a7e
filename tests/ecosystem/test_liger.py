"""Liger-Kernel's fused kernels, in the classes of a model or in one model: graphs hold them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("liger_kernel")

ROOT = Path(__file__).parents[2]

ON_CLASSES = """
apply_liger_kernel_to_llama(fused_linear_cross_entropy=False)
model = tiny("llama")
"""
ON_A_MODEL = """
model = tiny("llama")
apply_liger_kernel_to_llama(fused_linear_cross_entropy=False, model=model)
"""
PROGRAM = """
from liger_kernel.transformers import apply_liger_kernel_to_llama
from transformers.models.llama import modeling_llama

from lookahead_hf.runner.watch import blockers
from tests.helpers.models import tiny
{recipe}
layer = model.model.layers[0]
used = [each.forward for each in (layer.mlp, layer.input_layernorm, model.model.norm)]
print(*(each.__module__ for each in (*used, modeling_llama.apply_rotary_pos_emb)))
print(blockers(model, {{}}))
"""


@pytest.mark.parametrize("recipe", [ON_CLASSES, ON_A_MODEL], ids=["classes", "model"])
def test_graphs_hold_its_kernels(recipe: str) -> None:
    """In a process of its own, since it changes transformers' own module."""
    code = PROGRAM.format(recipe=recipe)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    used, blockers = done.stdout.splitlines() or pytest.fail(done.stderr)
    kernels = [f"liger_kernel.transformers.{name}" for name in ["swiglu", "rms_norm", "rms_norm"]]
    assert used.split() == [*kernels, "liger_kernel.transformers.rope"]
    assert blockers == "[]"


def test_the_documentation_names_the_recipe() -> None:
    assert ON_CLASSES.strip().splitlines()[0] in (ROOT / "docs" / "performance.md").read_text()
