"""PNG plots of a benchmark's record: heat maps over prompt length and group size, and capacity.

Needs matplotlib (extra `bench`), imported when something is drawn.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prefixflow_verl.bench_settings import BASELINES, DENSE, OURS, VERL
from prefixflow_verl.bench_workloads import GridCase

HATCHES = {"slower": "xxx", "same": "..."}
"""By verdict: where reuse does not pay, and where the runs of both sides overlap."""

CAPTION = "xxx slower: reuse does not pay    ... runs overlap: no difference shown"


def draw_heat_maps(record: Mapping[str, Any], directory: Path) -> list[str]:
    """Write `speedup.png`, `efficiency.png` and `peak_memory.png`; returns the file names.

    Each has one column per response length and number of prompts. Cells that were not measured stay
    empty. Cases that are no groups of equal lengths have no cell; without any other, nothing is
    drawn.
    """
    import matplotlib

    matplotlib.use("Agg")
    cases = [case for case in record["cases"] if case["kind"] == GridCase.kind]
    if not cases:
        return []
    baselines = [name for name in BASELINES if any(name in case["speedup"] for case in cases)]
    figures = {
        "speedup.png": (
            f"{record['settings']['what']}: speed-up of {OURS}",
            [
                (f"over {name}", [_cell(case["speedup"].get(name), case, name) for case in cases])
                for name in baselines
            ],
        ),
        "efficiency.png": (
            f"{record['settings']['what']}: speed-up over {DENSE} / FLOP ratio",
            [("efficiency", [_cell(case["efficiency"], case, DENSE) for case in cases])],
        ),
        "peak_memory.png": (
            f"{record['settings']['what']}: peak live bytes of {OURS} / those of",
            [
                (name, [_cell(_peak_ratio(case, name), case, None) for case in cases])
                for name in (VERL, DENSE)
            ],
        ),
    }
    for file, (title, rows) in figures.items():
        # Speed-ups: high is good. Memory: low is good.
        colours = "RdYlGn_r" if file == "peak_memory.png" else "RdYlGn"
        _draw(cases, title, rows, colours, directory / file)
    return list(figures)


def _cell(value: float | None, case: Mapping[str, Any], baseline: str | None) -> tuple:
    """(value, verdict) of one case; None where there is none."""
    return value, case["verdict"].get(baseline)


def _peak_ratio(case: Mapping[str, Any], baseline: str) -> float:
    return case["peak_bytes"][OURS] / case["peak_bytes"][baseline]


def _draw(cases, title: str, rows, colours: str, path: Path) -> None:
    """One heat map per row of values and per column of cases; colours are centred on 1."""
    import matplotlib.pyplot as plt
    from matplotlib.colors import LogNorm

    prompts = sorted({case["prompt"] for case in cases})
    groups = sorted({case["group"] for case in cases})
    columns = sorted({(case["response"], case["prompts"]) for case in cases})
    values = [value for _, cells in rows for value, _ in cells if value]
    reach = max([1.1, *values, *(1 / value for value in values)])
    figure, axes = plt.subplots(
        len(rows),
        len(columns),
        squeeze=False,
        figsize=(
            1.5 + len(columns) * (1 + 0.9 * len(groups)),
            1.2 + len(rows) * (1 + 0.6 * len(prompts)),
        ),
        layout="constrained",
    )
    colour = plt.get_cmap(colours)
    norm = LogNorm(1 / reach, reach)
    for row, (label, cells) in enumerate(rows):
        for column, key in enumerate(columns):
            axis = axes[row][column]
            axis.set(
                xlim=(0, len(groups)),
                ylim=(0, len(prompts)),
                xlabel="responses per prompt",
                ylabel=f"{label}\nprompt tokens" if not column else "",
                title=f"response {key[0]}, prompts {key[1]}" if not row else "",
            )
            axis.set_xticks([i + 0.5 for i in range(len(groups))], groups)
            axis.set_yticks([i + 0.5 for i in range(len(prompts))], prompts)
            axis.set_facecolor("0.93")
            for case, (value, verdict) in zip(cases, cells, strict=True):
                if value is None or (case["response"], case["prompts"]) != key:
                    continue
                x, y = groups.index(case["group"]), prompts.index(case["prompt"])
                axis.add_patch(
                    plt.Rectangle(
                        (x, y),
                        1,
                        1,
                        facecolor=colour(norm(value)),
                        edgecolor="0.35",
                        linewidth=0,
                        hatch=HATCHES.get(verdict),
                    )
                )
                axis.text(
                    x + 0.5,
                    y + 0.5,
                    f"{value:.2f}",
                    ha="center",
                    va="center",
                    bbox={"facecolor": "white", "alpha": 0.75, "linewidth": 0, "pad": 1.5},
                )
    figure.suptitle(title)
    if any(verdict in HATCHES for _, cells in rows for _, verdict in cells):
        figure.supxlabel(CAPTION, fontsize="small")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_capacity(record: Mapping[str, Any], directory: Path) -> str:
    """Write `capacity.png`: peak bytes of each arm over total length, and the budget; returns the
    file name."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6.5, 4), layout="constrained")
    for arm in record["capacity"]:
        points = [point for point in record["curve"] if point["arm"] == arm]
        axis.plot(
            [point["total"] for point in points],
            [point["peak_bytes"] / 2**20 for point in points],
            marker="o",
            markersize=3,
            label=arm,
        )
    axis.axhline(record["bytes"] / 2**20, color="0.3", linestyle="--", label="budget")
    axis.set(
        xlabel="prompt + response tokens",
        ylabel="peak live MiB",
        title="Longest sequence whose update fits",
        xlim=(0, None),
        ylim=(0, None),
    )
    axis.legend()
    figure.savefig(directory / "capacity.png", dpi=110)
    plt.close(figure)
    return "capacity.png"
