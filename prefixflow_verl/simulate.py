"""Recorded lengths and a number of ranks -> how long an actor update would take. Numpy only.

Three arms on the same padded batch:

    no_reuse     verl's placement, every rollout by itself, LM head on every token: verl's engine
    verl         verl's placement, shared prefixes once per rank and mini-batch
    prefixflow   the placement of `balance.place_batch`, shared prefixes likewise

Seconds are FLOPs by the formula of `accounting` over a fixed rate per rank. Communication, the
optimizer and kernels that are less efficient on short packs are left out, so ratios say more than
seconds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from prefixflow_verl.accounting import ModelShape
from prefixflow_verl.balance import (
    Placement,
    RolloutLengths,
    dense_costs,
    place_batch,
)
from prefixflow_verl.lengths import GroupLengths
from prefixflow_verl.plan import PackBudget, make_plan

NO_REUSE, VERL, OURS = "no_reuse", "verl", "prefixflow"

PADDING_PROMPT, PADDING_RESPONSE = 127, 1
"""Tokens of a row that pads the batch, as verl's `upsample_batch_to_divisible_size` makes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to run one step on K ranks and M mini-batches."""

    rank_s: np.ndarray
    """[K, M] float64. Predicted seconds of each rank in each mini-batch, without waiting."""
    peak_bytes: np.ndarray
    """[K] int64. Largest sum of caches and activations that the rank holds at once."""
    num_duplicated_prefixes: int
    """Further ranks that run a shared segment in the same mini-batch, summed over segments."""
    num_duplicated_tokens: int
    """Tokens of these."""

    @property
    def slowest_s(self) -> float:
        """Predicted seconds of the update: the slowest rank of each mini-batch, summed."""
        return float(self.rank_s.max(axis=0).sum())

    @property
    def mean_s(self) -> float:
        """The same if the ranks shared this work equally."""
        return float(self.rank_s.mean(axis=0).sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of a trace under every arm."""

    name: str
    num_rollouts: int
    num_padding_rows: int
    arms: dict[str, Arm]
    least_s: float
    """With reuse, no placement with these mini-batches makes the update faster than this."""
    placement_s: float
    """Measured seconds that finding the placement took on this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """Steps of a trace on a number of ranks."""

    num_ranks: int
    num_mini_batches: int
    steps: tuple[Step, ...]

    def slowest_s(self, arm: str) -> float:
        """Predicted seconds of an update, mean over steps."""
        return float(np.mean([step.arms[arm].slowest_s for step in self.steps]))

    def imbalance(self, arm: str) -> float:
        """Max / mean over ranks: summed over mini-batches and steps, then divided."""
        slowest = sum(step.arms[arm].slowest_s for step in self.steps)
        return slowest / sum(step.arms[arm].mean_s for step in self.steps)

    @property
    def lower_bound(self) -> float:
        """Below this `imbalance` with reuse cannot be, for as much work in all; 1.0 or more."""
        mean = sum(step.arms[OURS].mean_s for step in self.steps)
        return max(1.0, sum(step.least_s for step in self.steps) / mean)

    def as_record(self) -> dict[str, Any]:
        """Everything as JSON types. Per arm: means over steps, bytes the largest."""
        arms = (NO_REUSE, VERL, OURS)
        placed = (VERL, OURS)
        slowest = {arm: self.slowest_s(arm) for arm in arms}
        return {
            "ranks": self.num_ranks,
            "mini_batches": self.num_mini_batches,
            "imbalance": {arm: self.imbalance(arm) for arm in arms},
            "lower_bound": self.lower_bound,
            "slowest_rank_s": slowest,
            "speedup_over_verl_placement": slowest[VERL] / slowest[OURS],
            "speedup_over_no_reuse": slowest[NO_REUSE] / slowest[OURS],
            "duplicated_prefixes": {
                arm: float(np.mean([step.arms[arm].num_duplicated_prefixes for step in self.steps]))
                for arm in placed
            },
            "duplicated_tokens": {
                arm: float(np.mean([step.arms[arm].num_duplicated_tokens for step in self.steps]))
                for arm in placed
            },
            "peak_bytes": {
                arm: max(int(step.arms[arm].peak_bytes.max()) for step in self.steps)
                for arm in arms
            },
            "placement_s": float(np.mean([step.placement_s for step in self.steps])),
            "steps": [
                {
                    "name": step.name,
                    "rollouts": step.num_rollouts,
                    "padding_rows": step.num_padding_rows,
                    "slowest_rank_s": {arm: step.arms[arm].slowest_s for arm in arms},
                    "mean_rank_s": {arm: step.arms[arm].mean_s for arm in arms},
                    "least_s": step.least_s,
                    "peak_bytes": {arm: step.arms[arm].peak_bytes.tolist() for arm in arms},
                    "placement_s": step.placement_s,
                }
                for step in self.steps
            ],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """What a trace is simulated on.

    Raises:
        ValueError: a number that is not above 0.
    """

    shape: ModelShape
    budget: PackBudget
    num_ranks: int
    num_mini_batches: int = 1
    checkpointing: bool = False
    rank_flops_per_s: float = 4e14
    element_bytes: int = 2
    gradient_bytes: int = 4

    def __post_init__(self) -> None:
        for name in ("num_ranks", "num_mini_batches", "rank_flops_per_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be above 0")


def simulate_step(name: str, groups: Sequence[GroupLengths], cluster: Cluster) -> Step:
    """Place one step's rollouts under every arm and count what each rank pays."""
    group_ids = [index for index, group in enumerate(groups) for _ in group.responses]
    prompts = [groups[index].prompt for index in group_ids]
    responses = [tokens for group in groups for tokens in group.responses]
    loss = [int(group.loss_mask(i).sum()) for group in groups for i in range(len(group.responses))]
    num_rollouts = len(responses)
    num_padding_rows = -num_rollouts % (cluster.num_ranks * cluster.num_mini_batches)
    rollouts = RolloutLengths.from_groups(
        group_ids + [-1] * num_padding_rows,
        prompts + [PADDING_PROMPT] * num_padding_rows,
        responses + [PADDING_RESPONSE] * num_padding_rows,
        loss + [0] * num_padding_rows,
    )
    begin = time.perf_counter()
    ours, theirs = place_batch(
        rollouts,
        cluster.shape,
        group_ids=rollouts.last_segment.tolist(),
        is_padding=np.arange(rollouts.num_rollouts) >= num_rollouts,
        num_ranks=cluster.num_ranks,
        num_mini_batches=cluster.num_mini_batches,
        checkpointing=cluster.checkpointing,
    )
    placement_s = time.perf_counter() - begin
    dense = dense_costs(rollouts, cluster.shape, checkpointing=cluster.checkpointing)
    dense = dense[theirs.order].reshape(*theirs.costs.shape, -1).sum(axis=2)
    return Step(
        name=name,
        num_rollouts=num_rollouts,
        num_padding_rows=num_padding_rows,
        arms={
            NO_REUSE: Arm(
                rank_s=dense / cluster.rank_flops_per_s,
                peak_bytes=_dense_peaks(theirs, rollouts, cluster),
                num_duplicated_prefixes=0,
                num_duplicated_tokens=0,
            ),
            VERL: _arm(theirs, rollouts, cluster),
            OURS: _arm(ours, rollouts, cluster),
        },
        least_s=float(ours.least_costs.sum()) / cluster.rank_flops_per_s,
        placement_s=placement_s,
    )


def _arm(placement: Placement, rollouts: RolloutLengths, cluster: Cluster) -> Arm:
    num_ranks, num_mini_batches = placement.costs.shape
    peaks = [
        max(
            _planned_peak(placement.rollouts(rank, mini_batch), rollouts, cluster)
            for mini_batch in range(num_mini_batches)
        )
        for rank in range(num_ranks)
    ]
    return Arm(
        rank_s=placement.costs / cluster.rank_flops_per_s,
        peak_bytes=np.array(peaks, dtype=np.int64),
        num_duplicated_prefixes=placement.num_duplicated_prefixes,
        num_duplicated_tokens=placement.num_duplicated_tokens,
    )


def _planned_peak(rows: np.ndarray, rollouts: RolloutLengths, cluster: Cluster) -> int:
    """Bytes of the most expensive round of a rank's plan: its heads, and its largest leaf."""
    segments, first = np.unique(rollouts.last_segment[rows], return_index=True)
    begin = 0
    sequences: list[np.ndarray] = []
    prompts = {}
    for segment in segments[np.argsort(first)].tolist():
        length = int(rollouts.segment_end[segment])
        prompts[segment] = np.arange(begin, begin + length)
        begin += length
    for row in rows.tolist():
        length = int(rollouts.response_tokens[row])
        response = np.arange(begin, begin + length)
        sequences.append(np.concatenate([prompts[int(rollouts.last_segment[row])], response]))
        begin += length
    forest, plan = make_plan(sequences, cluster.budget)
    tokens = np.bincount(plan.pack_of, weights=forest.lengths, minlength=len(plan.packs))
    cached = cluster.shape.cache_bytes_per_token(
        element_bytes=cluster.element_bytes, gradient_bytes=cluster.gradient_bytes
    )
    active = _activation_bytes(cluster)
    kept = active if plan.prefix_activations == "keep" else 0
    return int(
        max(
            sum(tokens[pack] for pack in round_.heads) * (cached + kept)
            + max((tokens[pack] for pack in (*round_.leaves, *round_.heads)), default=0) * active
            for round_ in plan.rounds
        )
    )


def _dense_peaks(placement: Placement, rollouts: RolloutLengths, cluster: Cluster) -> np.ndarray:
    """[K] int64. Bytes of a rank's largest micro-batch; a longer rollout runs alone."""
    num_ranks, num_mini_batches = placement.costs.shape
    num_tokens = rollouts.num_tokens
    peaks = []
    for rank in range(num_ranks):
        cells = [placement.rollouts(rank, index) for index in range(num_mini_batches)]
        totals = [min(int(num_tokens[cell].sum()), cluster.budget.max_tokens) for cell in cells]
        largest = max(*totals, *(int(num_tokens[cell].max()) for cell in cells))
        peaks.append(largest * _activation_bytes(cluster))
    return np.array(peaks, dtype=np.int64)


def _activation_bytes(cluster: Cluster) -> int:
    return cluster.shape.activation_bytes_per_token(
        element_bytes=cluster.element_bytes, checkpointing=cluster.checkpointing
    )


def simulate(trace: Sequence[tuple[str, Sequence[GroupLengths]]], cluster: Cluster) -> Simulation:
    """Simulate every step of a trace; see the module's docstring for the arms."""
    return Simulation(
        num_ranks=cluster.num_ranks,
        num_mini_batches=cluster.num_mini_batches,
        steps=tuple(simulate_step(name, groups, cluster) for name, groups in trace),
    )
