"""One HTML page about a ledger: its tables, and pictures of staleness, mismatch and one group.

The page holds everything it shows. Text from the ledger is escaped in the page, and pictures have
none of it but numbers. Needs matplotlib (extra `bench`).
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterable, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from prefixflow_verl.ledger_report import (
    AgeMismatch,
    LedgerAnalysis,
    Lineage,
    Report,
    TextTable,
    lineage_table,
    version_name,
)
from prefixflow_verl.provenance import KINDS, PolicySpan

MAX_AGE = 8
"""Ages from here on share one colour."""
MAX_BARS = 64
"""Sequences in the picture of a group."""

LOOKS: dict[str, dict[str, Any]] = {
    "mixed": {"facecolor": "#d9772b", "hatch": "///", "edgecolor": "white"},
    "missing": {"facecolor": "#b3261e", "hatch": "xxx", "edgecolor": "white"},
    "observation": {"facecolor": "#e4e4e4", "edgecolor": "#bdbdbd"},
}
"""What is not of one version, by kind. A mix in a group has the colour of its oldest version."""

STYLE = """
body { font: 15px/1.5 sans-serif; color: #222; max-width: 70em; margin: 2em auto; padding: 0 1em; }
table { border-collapse: collapse; margin: 0.5em 0; }
th, td { border-bottom: 1px solid #ccc; padding: 0.15em 0.8em 0.15em 0; text-align: left;
  vertical-align: top; overflow-wrap: anywhere; }
img { max-width: 100%; }
.good { color: #1b6e2c; } .bad { color: #b3261e; font-weight: bold; }
""".strip()


def render_page(analysis: LedgerAnalysis, report: Report) -> str:
    """The page as text.

    The group shown is the one that was asked for, or else the one with the most different policy
    versions, the first trained among equals.
    """
    uid = report.uid if report.uid is not None else analysis.group_of_most_versions()
    tables = report.tables()
    if report.uid is None and uid is not None:
        tables.append(lineage_table(uid, analysis.lineage(uid)))
    pictures = []
    if uid is not None:
        steps, shares = analysis.staleness_by_step(MAX_AGE)
        pictures = [
            _picture("Staleness over steps", draw_staleness(steps, shares)),
            _picture(
                "Mismatch against age",
                draw_mismatch(report.mismatch) if report.mismatch else None,
                "No sequence has both behaviour and old log-probs.",
            ),
            _picture(f"Versions in group {uid}", draw_lineage(analysis.lineage(uid))),
        ]
    num_faults = len(report.faults)
    verdict = (
        f'<p class="bad">faults: {num_faults}</p>'
        if num_faults
        else '<p class="good">no faults</p>'
    )
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            '<head><meta charset="utf-8"><title>Policy-version provenance</title>',
            f"<style>{STYLE}</style></head>",
            "<body>",
            "<h1>Policy-version provenance</h1>",
            verdict,
            *pictures,
            *(_table(table) for table in tables),
            "</body>",
            "</html>",
            "",
        ]
    )


def draw_staleness(steps: np.ndarray, shares: dict[str, np.ndarray]) -> bytes:
    """PNG: for each step the sampled tokens by age, then mixed and missing ones; steps that the
    ledger lacks stay empty.

    Args:
        steps: [K] ascending.
        shares: name -> [K] share, from 0 to 1.
    """
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    axis = figure.subplots()
    edges = np.arange(steps[0], steps[-1] + 2) - 0.5
    below = np.zeros(len(edges) - 1)
    colours = matplotlib.colormaps["viridis_r"]
    for index, (name, share) in enumerate(shares.items()):
        above = below.copy()
        above[steps - steps[0]] += share
        look = LOOKS.get(name, {"facecolor": colours(min(index / MAX_AGE, 1.0))})
        axis.stairs(above, edges, baseline=below, fill=True, label=name, **look)
        below = above
    axis.set(xlabel="step", ylabel="share of sampled tokens", ylim=(0, 1))
    axis.set_xlim(edges[0], edges[-1])
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return _png(figure)


def draw_mismatch(mismatch: Sequence[AgeMismatch]) -> bytes:
    """PNG: k3, largest ratio and correlation by age, with the number of sequences."""
    figure = Figure(figsize=(12, 3.4), layout="constrained")
    axes = figure.subplots(1, 3)
    places = np.arange(len(mismatch))
    names = [
        f"{'unknown' if found.age is None else found.age}\nn={found.num_sequences}"
        for found in mismatch
    ]
    drawn = (
        ("k3, nats per token", (("worst", "worst_k3", "v"), ("mean", "mean_k3", "o"))),
        ("largest ratio", (("worst", "worst_max_ratio", "v"),)),
        ("pearson of probabilities", (("lowest", "lowest_pearson", "^"),)),
    )
    for axis, (title, lines) in zip(axes, drawn, strict=True):
        for label, field, marker in lines:
            values = [getattr(found, field) for found in mismatch]
            axis.plot(places, values, marker=marker, label=label)
        axis.set(title=title, xlabel="age, versions")
        axis.set_xticks(places, names)
        axis.legend()
    for axis, field in ((axes[0], "worst_k3"), (axes[1], "worst_max_ratio")):
        above = [getattr(found, field) for found in mismatch if getattr(found, field) > 0]
        if above and max(above) > 10 * min(above):
            # Logarithmic, and 0 can be drawn.
            axis.set_yscale("symlog", linthresh=min(above))
    return _png(figure)


def draw_lineage(lineage: Sequence[Lineage]) -> bytes:
    """PNG: one bar per sequence, its response from left to right, coloured by policy version."""
    drawn = lineage[:MAX_BARS]
    named = [span for s in drawn for span in _spans_of(s) if span.kind in ("clean", "mixed")]
    versions = sorted({span.version_start for span in named})
    colours = matplotlib.colormaps["viridis_r"]
    scale = max(len(versions) - 1, 1)
    colour_of = {version: colours(index / scale) for index, version in enumerate(versions)}

    def look_of(span: PolicySpan) -> dict[str, Any]:
        if span.kind not in ("clean", "mixed"):
            return LOOKS[span.kind]
        colour = {"facecolor": colour_of[span.version_start], "edgecolor": "white"}
        return LOOKS.get(span.kind, {}) | colour

    figure = Figure(figsize=(10, 1.2 + 0.3 * len(drawn)), layout="constrained")
    axis = figure.subplots()
    names: dict[str, PolicySpan] = {}
    for place, sequence in enumerate(drawn):
        begin = 0
        for span in _spans_of(sequence):
            look = look_of(span)
            axis.barh(place, span.num_tokens, left=begin, height=0.8, linewidth=0.5, **look)
            names.setdefault(_span_name(span), span)
            begin += span.num_tokens
    axis.set_yticks(
        range(len(drawn)),
        [f"step {s.step}: session {s.session}, output {s.output}" for s in drawn],
    )
    axis.invert_yaxis()
    left_out = len(lineage) - len(drawn)
    more = f"; {left_out} more sequences are not shown" if left_out else ""
    axis.set(xlabel=f"response tokens{more}")
    axis.legend(
        handles=[
            Patch(label=name, **look_of(span))
            for name, span in sorted(names.items(), key=lambda item: _legend_order(item[1]))
        ],
        loc="center left",
        bbox_to_anchor=(1, 0.5),
    )
    return _png(figure)


def _spans_of(sequence: Lineage) -> Iterable[PolicySpan]:
    if sequence.spans is None:
        return (PolicySpan(num_tokens=sequence.num_response_tokens),)
    return sequence.spans


def _legend_order(span: PolicySpan) -> tuple[int, int, int]:
    return KINDS.index(span.kind), span.version_start or 0, span.version_end or 0


def _span_name(span: PolicySpan) -> str:
    if span.kind in ("missing", "observation"):
        return span.kind
    return f"{span.kind} {version_name(span.version_start, span.version_end)}"


def _png(figure: Figure) -> bytes:
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=110)
    return stream.getvalue()


def _picture(title: str, png: bytes | None, otherwise: str = "") -> str:
    """A heading and a picture, or a sentence where there is none."""
    heading = f"<h2>{html.escape(title)}</h2>"
    if png is None:
        return f"{heading}\n<p>{html.escape(otherwise)}</p>"
    encoded = base64.b64encode(png).decode()
    source = f"data:image/png;base64,{encoded}"
    return f'{heading}\n<img alt="{html.escape(title)}" src="{source}">'


def _table(table: TextTable) -> str:
    def row(cells: Iterable[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

    return "\n".join(
        [
            f"<h2>{html.escape(table.title)}</h2>",
            "<table>",
            row(table.columns, "th"),
            *(row(cells, "td") for cells in table.rows),
            "</table>",
            f"<p>{html.escape(table.note)}</p>" if table.note else "",
        ]
    )
