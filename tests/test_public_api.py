"""What `import lookahead_hf` offers, and what it does not do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import lookahead_hf


def in_a_fresh_process(code: str) -> str:
    """Standard output of `code`; warnings are errors."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_importing_loads_no_other_module_and_prints_nothing() -> None:
    code = """
import __future__, importlib, sys, warnings
before = set(sys.modules)
import lookahead_hf
assert set(sys.modules) - before == {"lookahead_hf"}
"""
    assert in_a_fresh_process(code) == ""


def test_every_public_name_exists_and_is_documented() -> None:
    assert list(lookahead_hf.__all__) == sorted(lookahead_hf.__all__, key=_as_ruff_sorts)
    for name in lookahead_hf.__all__:
        value = getattr(lookahead_hf, name)
        assert value.__doc__, f"{name} is not documented"
        assert value.__name__ == name
    assert set(lookahead_hf.__all__) < set(dir(lookahead_hf))


def _as_ruff_sorts(name: str) -> tuple[int, str]:
    """Constants, then classes, then functions."""
    return (1 if name.isupper() else 2 if name[0].isupper() else 3, name)


def test_the_version_is_the_projects() -> None:
    project = Path(__file__).parent.parent / "pyproject.toml"
    assert f'\nversion = "{lookahead_hf.__version__}"\n' in project.read_text()
