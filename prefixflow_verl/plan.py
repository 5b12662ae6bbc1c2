"""PrefixForest -> `Plan`: which edges to cut, which segments share a pack, in which order packs
run.

[Note: heads and leaves]
A tree that fits the budget is *fused*: one pack, one forward, one backward. A larger tree is cut.
Then its packs are of two kinds:

    heads    hold only segments with a cut edge somewhere below. Their graphs stay alive and their
             keys and values go to the training-time KV cache until everything below has run.
    leaves   hold the rest. Each runs forward and backward at once and is forgotten.

A round runs: forward of every head (parents first), forward + backward of every leaf, backward of
every head (children first). Nothing but heads is alive while leaves run, so peak memory is the
heads of one round plus one leaf.

[Note: rank agreement]
Under FSDP2 every rank must run the same sequence of forwards and backwards. Because a round is
described by two counts (heads, leaves), agreeing means an element-wise maximum over ranks; a rank
with fewer packs runs dummy packs of one token and no loss.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from prefixflow_verl.accounting import reuse_ratio
from prefixflow_verl.forest import PrefixForest, build_forest

PlanMode = Literal["auto", "fused", "cut", "off"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackBudget:
    """What one pack and the live caches may hold. Exactly one of the first two is set."""

    max_tokens: int | None = None
    """Executed tokens per pack. One segment longer than this still runs, alone."""
    max_rollouts: int | None = None
    """Sequences (root-to-leaf paths) per pack, for fixed micro-batches."""
    max_cache_tokens: int | None = None
    """Cached tokens alive at once; None: no bound. A tree that needs more shares less."""
    cut_overhead_tokens: int = 0
    """A cut that saves fewer tokens than this is not worth its extra forward and backward."""

    def __post_init__(self) -> None:
        if (self.max_tokens is None) == (self.max_rollouts is None):
            raise ValueError("PackBudget: set exactly one of max_tokens and max_rollouts")
        for name in ("max_tokens", "max_rollouts", "max_cache_tokens"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"PackBudget.{name} is {value}: it must be an integer, 1 or more")

    @property
    def pack_limit(self) -> int:
        """The bound in force, in units of `_weights`."""
        return self.max_tokens if self.max_tokens is not None else self.max_rollouts


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """Segments laid out in depth-first order in one row and run in one model forward."""

    segments: tuple[int, ...]
    """Segment ids, ascending (preorder)."""
    is_head: bool
    """True if segments of other packs read its keys and values."""
    level: int
    """Cut edges above it, at most. Heads of level n run after those of level n - 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Trees whose caches are alive together. Indices into `Plan.packs`."""

    heads: tuple[int, ...]
    """Parents before children."""
    leaves: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Every segment of a forest in exactly one pack, every pack in exactly one round."""

    packs: tuple[Pack, ...]
    rounds: tuple[Round, ...]
    pack_of: np.ndarray
    """[S] int64. Pack of each segment."""
    num_cut_edges: int
    """Parent-child edges whose ends are in different packs."""
    num_dissolved_trees: int = 0
    """Shared roots that were run without sharing: too little to save or over the cache budget."""

    @property
    def counts(self) -> list[tuple[int, int]]:
        """(heads, leaves) of each round: what ranks agree on."""
        return [(len(round_.heads), len(round_.leaves)) for round_ in self.rounds]

    def describe(self, forest: PrefixForest) -> str:
        """The plan as a table for people: one line per pack."""
        lengths = forest.lengths
        lines = [
            f"{forest.num_rollouts} rollouts, {forest.num_segments} segments, "
            f"{forest.logical_tokens} logical / {forest.executed_tokens} executed tokens = "
            f"{reuse_ratio(forest.logical_tokens, forest.executed_tokens):.2f}x, "
            f"{len(self.packs)} packs, {self.num_cut_edges} cut edges"
        ]
        for number, round_ in enumerate(self.rounds):
            for index in (*round_.heads, *round_.leaves):
                pack = self.packs[index]
                kind = f"head, level {pack.level}" if pack.is_head else "leaf"
                tokens = int(lengths[list(pack.segments)].sum())
                lines.append(
                    f"  round {number}  pack {index}  {kind}: "
                    f"{len(pack.segments)} segments, {tokens} tokens"
                )
        return "\n".join(lines)


def make_plan(
    sequences: Sequence[np.ndarray],
    budget: PackBudget,
    *,
    mode: PlanMode = "auto",
    keys: Sequence[Hashable] | None = None,
    min_shared_tokens: int = 1,
) -> tuple[PrefixForest, Plan]:
    """Find shared prefixes and plan their execution.

    Args:
        sequences: R integer arrays, see `build_forest`.
        budget: bounds of packs and caches.
        mode: `auto` cuts where the budget asks for it; `fused` never cuts; `cut` cuts every edge
            below a shared segment; `off` shares nothing (plain packed micro-batches).
        keys, min_shared_tokens: see `build_forest`.
    """
    if mode == "off":
        forest = build_forest(sequences, keys=list(range(len(sequences))))
        return forest, plan_cuts(forest, np.zeros(forest.num_segments, dtype=bool), budget)
    keys = list(keys) if keys is not None else [None] * len(sequences)
    num_dissolved = 0
    while True:
        forest = build_forest(sequences, keys=keys, min_shared_tokens=min_shared_tokens)
        cut = _choose_cuts(forest, budget, mode)
        plan = plan_cuts(forest, cut, budget)
        dissolve = _roots_not_worth_it(forest, plan, budget) if mode != "cut" else []
        if not dissolve:
            return forest, replace(plan, num_dissolved_trees=num_dissolved)
        num_dissolved += len(dissolve)
        for root in dissolve:
            _separate_children(forest, root, keys)


def plan_cuts(forest: PrefixForest, cut: np.ndarray, budget: PackBudget) -> Plan:
    """Plan `forest` with the edges above the segments where `cut` ([S] bool) is True cut.

    More edges may be cut than asked for: see [Note: heads and leaves].
    """
    cut = cut & (forest.parent >= 0)
    is_head = _has_cut_below(forest, cut)
    # A segment without cut edges below it leaves its parent's head pack.
    cut = cut | ((forest.parent >= 0) & ~is_head & is_head[forest.parent])
    component, level = _components(forest, cut)
    rounds_of_components = _group_rounds(forest, component, is_head, budget)
    packs: list[Pack] = []
    rounds: list[Round] = []
    members: dict[int, list[int]] = {}
    for segment, top in enumerate(component.tolist()):
        members.setdefault(top, []).append(segment)
    for tops in rounds_of_components:
        heads: list[int] = []
        head_tops = [top for top in tops if is_head[top]]
        for depth in sorted({int(level[top]) for top in head_tops}):
            at_depth = [top for top in head_tops if level[top] == depth]
            for bin_ in _fill_bins(forest, at_depth, members, budget):
                heads.append(len(packs))
                packs.append(Pack(segments=bin_, is_head=True, level=depth))
        leaves: list[int] = []
        leaf_tops = [top for top in tops if not is_head[top]]
        for bin_ in _fill_bins(forest, leaf_tops, members, budget):
            leaves.append(len(packs))
            packs.append(Pack(segments=bin_, is_head=False, level=int(level[list(bin_)].max())))
        rounds.append(Round(heads=tuple(heads), leaves=tuple(leaves)))
    pack_of = np.full(forest.num_segments, -1, dtype=np.int64)
    for index, pack in enumerate(packs):
        pack_of[list(pack.segments)] = index
    return Plan(
        packs=tuple(packs), rounds=tuple(rounds), pack_of=pack_of, num_cut_edges=int(cut.sum())
    )


def _choose_cuts(forest: PrefixForest, budget: PackBudget, mode: PlanMode) -> np.ndarray:
    """[S] bool: cut the edge above this segment."""
    has_parent = forest.parent >= 0
    if mode == "cut":
        return has_parent
    cut = np.zeros(forest.num_segments, dtype=bool)
    if mode == "fused":
        return cut
    # Bottom-up: where a segment and what is still attached below it exceed the limit, detach the
    # heaviest children first. This minimises the number of pieces (Kundu and Misra, 1977).
    own = _own_weights(forest, budget)
    attached = own.copy()
    by_tokens = budget.max_tokens is not None
    for segment in range(forest.num_segments - 1, -1, -1):
        children = forest.children(segment)
        if not children:
            continue
        weights = sorted(((int(attached[child]), child) for child in children), reverse=True)
        total = sum(weight for weight, _ in weights) + (int(own[segment]) if by_tokens else 0)
        for weight, child in weights:
            if total <= budget.pack_limit:
                break
            cut[child] = True
            total -= weight
        attached[segment] = max(total, int(own[segment]))
    return cut


def _own_weights(forest: PrefixForest, budget: PackBudget) -> np.ndarray:
    """[S] int64: tokens of each segment, or one sequence each when the budget counts rollouts."""
    return forest.lengths if budget.max_tokens is not None else np.ones_like(forest.lengths)


def _has_cut_below(forest: PrefixForest, cut: np.ndarray) -> np.ndarray:
    """[S] bool: some edge below this segment is cut."""
    # Preorder: the edges below s are those above s + 1 .. subtree_end[s] - 1.
    count = np.concatenate([[0], np.cumsum(cut)])
    ids = np.arange(forest.num_segments)
    return count[forest.subtree_end] - count[ids + 1] > 0


def _components(forest: PrefixForest, cut: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Top segment of each segment's uncut component, and the number of cut edges above it."""
    top = np.arange(forest.num_segments)
    level = np.zeros(forest.num_segments, dtype=np.int64)
    for segment, parent in enumerate(forest.parent.tolist()):
        if parent >= 0:
            level[segment] = level[parent] + int(cut[segment])
            if not cut[segment]:
                top[segment] = top[parent]
    return top, level


def _group_rounds(
    forest: PrefixForest, component: np.ndarray, is_head: np.ndarray, budget: PackBudget
) -> list[list[int]]:
    """Component tops of each round: cut trees while their heads fit, fused trees with the last."""
    lengths = forest.lengths
    limit = budget.max_cache_tokens
    cut_rounds: list[list[int]] = []
    fused: list[int] = []
    live_tokens = live_weight = 0
    for root in forest.roots:
        below = slice(root, int(forest.subtree_end[root]))
        tops = np.unique(component[below]).tolist()
        if len(tops) == 1:
            fused += tops
            continue
        heads = np.flatnonzero(is_head[below]) + root
        tokens = int(lengths[heads].sum())
        weight = tokens if budget.max_tokens is not None else 1
        full = live_weight + weight > budget.pack_limit
        if not cut_rounds or full or (limit is not None and live_tokens + tokens > limit):
            cut_rounds.append([])
            live_tokens = live_weight = 0
        cut_rounds[-1] += tops
        live_tokens += tokens
        live_weight += weight
    if not fused:
        return cut_rounds
    if not cut_rounds:
        return [fused]
    cut_rounds[-1] += fused
    return cut_rounds


def _fill_bins(
    forest: PrefixForest, tops: list[int], members: dict[int, list[int]], budget: PackBudget
) -> list[tuple[int, ...]]:
    """Put whole components into packs: in preorder, or first-fit decreasing if that is fewer."""
    if not tops:
        return []
    lengths = forest.lengths
    if budget.max_tokens is not None:
        weights = {top: int(lengths[members[top]].sum()) for top in tops}
    else:
        weights = {top: _num_paths(forest, members[top]) for top in tops}
    in_order: list[list[int]] = []
    room = 0
    for top in sorted(tops):
        if not in_order or weights[top] > room:
            in_order.append([])
            room = budget.pack_limit
        in_order[-1].append(top)
        room -= weights[top]
    bins = in_order
    # A component over the limit fills one bin, however large it is.
    fill = sum(min(weight, budget.pack_limit) for weight in weights.values())
    if len(in_order) > -(-fill // budget.pack_limit):
        decreasing = _first_fit_decreasing(weights, budget.pack_limit)
        bins = decreasing if len(decreasing) < len(in_order) else in_order
    return [tuple(sorted(segment for top in bin_ for segment in members[top])) for bin_ in bins]


def _first_fit_decreasing(weights: dict[int, int], limit: int) -> list[list[int]]:
    bins: list[list[int]] = []
    rooms: list[int] = []
    for top in sorted(weights, key=lambda top: (-weights[top], top)):
        place = next((i for i, room in enumerate(rooms) if weights[top] <= room), None)
        if place is None:
            place = len(bins)
            bins.append([])
            rooms.append(limit)
        bins[place].append(top)
        rooms[place] -= weights[top]
    return bins


def _num_paths(forest: PrefixForest, segments: list[int]) -> int:
    """Root-to-leaf paths inside one component."""
    inside = set(segments)
    with_child = {int(forest.parent[segment]) for segment in segments} & inside
    return len(inside) - len(with_child)


def _roots_not_worth_it(forest: PrefixForest, plan: Plan, budget: PackBudget) -> list[int]:
    """Cut roots that save less than a cut costs, or whose tree needs more cache than allowed."""
    lengths = forest.lengths
    out = []
    for root in forest.roots:
        segments = range(root, int(forest.subtree_end[root]))
        head_tokens = sum(
            int(lengths[segment])
            for segment in segments
            if plan.packs[plan.pack_of[segment]].is_head
        )
        if not head_tokens:
            continue
        packs_below = {int(plan.pack_of[child]) for child in forest.children(root)}
        num_pieces = len(forest.children(root)) + int((forest.end_segment == root).any())
        saved = int(lengths[root]) * (num_pieces - 1)
        too_small = len(packs_below) > 1 and saved < budget.cut_overhead_tokens
        over = budget.max_cache_tokens is not None and head_tokens > budget.max_cache_tokens
        if too_small or over:
            out.append(root)
    return out


def _separate_children(forest: PrefixForest, root: int, keys: list[Hashable]) -> None:
    """Give the rollouts below each child of `root` a key of their own: none shares `root`."""
    for child in forest.children(root):
        for rollout in forest.rollouts_of(child).tolist():
            keys[rollout] = (keys[rollout], "below", child)
    for rollout in forest.rollouts_of(root).tolist():
        if forest.end_segment[rollout] == root:
            keys[rollout] = (keys[rollout], "ends at", root)
