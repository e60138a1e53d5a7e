"""The report as one web page that needs no other file."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from lookahead_hf.cli.analysis.report import Expectation, Finding, basis

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --bar: #2a7de1; --soft: #8881 }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 56rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; width: 100%; margin: 1rem 0 }
th, td { text-align: right; padding: .3rem .6rem; border-bottom: 1px solid var(--line) }
th:first-child, td:first-child { text-align: left }
tr.best td { font-weight: 600 }
code { font-family: ui-monospace, monospace; font-size: .9em }
pre { background: var(--soft); padding: .6rem .8rem; overflow-x: auto; border-radius: .3rem }
.bar { display: flex; height: 1.1rem; border-radius: .3rem; overflow: hidden; background: var(--soft) }
.key { font-size: .85rem } .key i { display: inline-block; width: .8em; height: .8em; margin: 0 .3em 0 1em }
.a { background: #2a7de1 } .b { background: #21a179 } .c { background: #e0a030 } .d { background: #8886 }
.note { opacity: .7; font-size: .9rem }
"""
_PLACES = {"a": "prompt", "b": "output", "c": "earlier_texts", "d": "new"}
_LABELS = {"a": "the prompt", "b": "the text itself", "c": "earlier texts", "d": "new"}


def page(found: Sequence[Finding], about: dict[str, Any]) -> str:
    """Return the page."""
    key = "".join(f'<i class="{place}"></i>{label}' for place, label in _LABELS.items())
    title = "What speculation will bring"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width">'
        f"<style>{_STYLE}</style><h1>{title}</h1>"
        f"<p>{escape(about['file'])}</p>{_overview(found)}"
        f'<p class="key">Where the output\'s tokens stand already:{key}</p>'
        + "".join(map(_section, found))
        + f"<h2>To measure it</h2><pre>{escape(about['command'])}</pre>"
        f'<p class="note">{escape(basis(about))}</p></html>\n'
    )


def _overview(found: Sequence[Finding]) -> str:
    rows = [
        [
            escape(finding.group),
            str(finding.texts),
            f"{finding.best.speed_up:.2f} &times;",
            f"{finding.best.lowest:.2f} to {finding.best.highest:.2f}",
            f"{finding.best.tokens_per_step:.2f}",
            finding.verdict,
        ]
        for finding in found
    ]
    return _table(["prompts", "texts", "speed-up", "of texts", "tokens per step", ""], rows)


def _section(finding: Finding) -> str:
    shares = vars(finding.repeats) | {"new": finding.repeats.new}
    bar = "".join(
        f'<div class="{place}" style="width:{shares[name]:.1%}" title="{_LABELS[place]}: '
        f'{shares[name]:.0%}"></div>'
        for place, name in _PLACES.items()
    )
    headers = ["setting", "speed-up", "tokens per step", "tokens/s"]
    rows = [_row(each) for each in finding.expected]
    best = [each is finding.best for each in finding.expected].index(True)
    return (
        f"<h2>{escape(finding.group)}: {finding.verdict}</h2>"
        f"<p>{finding.texts} texts; on average {finding.prompt_tokens:.0f} tokens of prompt and "
        f'{finding.output_tokens:.0f} of output.</p><div class="bar">{bar}</div>'
        f"<p>{escape(finding.why)}</p><pre>{escape(finding.best.config)}</pre>"
        + _table(headers, rows, best)
    )


def _row(each: Expectation) -> list[str]:
    speed = each.tokens_per_second
    return [
        escape(each.setting),
        f"{each.speed_up:.2f} &times;",
        f"{each.tokens_per_step:.2f}",
        "" if speed is None else f"{speed:.1f}",
    ]


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]], best: int | None = None) -> str:
    head = "".join(f"<th>{header}</th>" for header in headers)
    body = "".join(
        f"<tr{' class=best' if at == best else ''}>"
        + "".join(f"<td>{cell}</td>" for cell in row)
        + "</tr>"
        for at, row in enumerate(rows)
    )
    return f"<table><tr>{head}</tr>{body}</table>"
