"""PNG picture of a simulation. Needs matplotlib (extra `bench`), imported when it is drawn."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from prefixflow_verl.simulate import NO_REUSE, OURS, VERL, Simulation

LABELS = {
    NO_REUSE: "no reuse, veRL's placement",
    VERL: "reuse, veRL's placement",
    OURS: "reuse, prefix-aware placement",
}
COLOURS = {NO_REUSE: "0.6", VERL: "tab:orange", OURS: "tab:blue"}

MAX_STEPS = 40
"""Steps that the picture shows one by one, the first of the trace."""


def draw_simulation(simulation: Simulation, file: Path) -> None:
    """Write `file`: seconds of every rank, slowest first, and of the update by step."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (by_rank, by_step) = plt.subplots(1, 2, figsize=(12, 4.2), layout="constrained")
    ranks = np.arange(1, simulation.num_ranks + 1)
    steps = simulation.steps[:MAX_STEPS]
    for index, (arm, label) in enumerate(LABELS.items()):
        # Ranks of different mini-batches and steps wait for the slowest, so they are ranked anew.
        sorted_s = [np.sort(step.arms[arm].rank_s, axis=0)[::-1].sum(axis=1) for step in steps]
        mean_s = np.mean(sorted_s, axis=0)
        by_rank.step(ranks, mean_s, where="mid", color=COLOURS[arm], label=label)
        by_rank.axhline(mean_s.mean(), color=COLOURS[arm], linestyle=":", linewidth=1)
        places = np.arange(len(steps)) + 0.27 * (index - 1)
        seconds = [step.arms[arm].slowest_s for step in steps]
        by_step.bar(places, seconds, width=0.25, color=COLOURS[arm], label=label)
    for place, step in enumerate(steps):
        by_step.hlines(
            step.least_s,
            place - 0.42,
            place + 0.42,
            color="black",
            linewidth=1,
            label="no placement with reuse is faster" if not place else None,
        )
    by_rank.set(
        xlabel="ranks, slowest first (dotted: mean)",
        ylabel="predicted seconds of an update",
        title=f"{simulation.num_ranks} ranks, {simulation.num_mini_batches} mini-batches",
        ylim=(0, None),
    )
    by_step.set(
        xlabel="step of the trace",
        ylabel="predicted seconds of the slowest rank",
        title=f"{simulation.slowest_s(VERL) / simulation.slowest_s(OURS):.2f}x faster than with "
        "veRL's placement",
    )
    by_step.set_xticks(range(len(steps)))
    by_step.set_ylim(0, 1.4 * by_step.get_ylim()[1])
    by_rank.legend(fontsize="small")
    by_step.legend(fontsize="small", loc="upper left", ncols=2)
    figure.savefig(file, dpi=110)
    plt.close(figure)
