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
from heapq import heappop, heappush
from typing import Literal

import numpy as np

from prefixflow_verl.accounting import reuse_ratio
from prefixflow_verl.forest import PrefixForest, build_forest, separate_trees, split_segments

PlanMode = Literal["auto", "fused", "cut", "off"]

PrefixActivations = Literal["keep", "offload", "recompute"]
"""What happens to the activations of a prefix while its suffixes run; see activations.py."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackBudget:
    """What one pack and the live caches may hold. Exactly one of the first two is set."""

    max_tokens: int | None = None
    """Executed tokens per pack. One segment longer than this still runs, alone, unless
    `split_segments` is set."""
    max_rollouts: int | None = None
    """Sequences (root-to-leaf paths) per pack, for fixed micro-batches."""
    max_cache_tokens: int | None = None
    """Prefix tokens whose keys and values are alive at once; None: no bound. A tree that needs more
    shares less."""
    max_kept_tokens: int | None = None
    """The same where activations are kept as well; None: `max_cache_tokens` holds there too."""
    prefix_activations: PrefixActivations | Literal["auto"] = "keep"
    """`auto` keeps them, unless a tree would then have to share less: then it recomputes."""
    cut_overhead_tokens: int = 0
    """A cut that saves fewer tokens than this is not worth its extra forward and backward."""
    split_segments: bool = False
    """Run a segment longer than `max_tokens` in pieces of at most that many tokens; each piece
    continues the one before it through the cache. The cache of a rollout in pieces may exceed
    `max_cache_tokens`: sharing less would not make it smaller."""

    def __post_init__(self) -> None:
        if (self.max_tokens is None) == (self.max_rollouts is None):
            raise ValueError("PackBudget: set exactly one of max_tokens and max_rollouts")
        if self.split_segments and self.max_tokens is None:
            raise ValueError(
                "PackBudget.split_segments splits by tokens: set max_tokens instead of max_rollouts"
            )
        for name in ("max_tokens", "max_rollouts", "max_cache_tokens", "max_kept_tokens"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"PackBudget.{name} is {value}: it must be an integer, 1 or more")

    def with_activations(self, activations: PrefixActivations) -> PackBudget:
        """This budget with the bound that holds for `activations`, which are decided thereby."""
        limit = self.max_cache_tokens
        if activations == "keep" and self.max_kept_tokens is not None:
            limit = self.max_kept_tokens
        # Pieces save memory only if their graphs do not wait for each other.
        splits = self.split_segments and (
            activations == "recompute" or self.prefix_activations == activations
        )
        return replace(
            self,
            max_cache_tokens=limit,
            max_kept_tokens=None,
            prefix_activations=activations,
            split_segments=splits,
        )

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
    prefix_activations: PrefixActivations = "keep"
    """Decided by the budget."""

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
        mode: `auto` cuts where the budget asks for it; `fused` never cuts, so it never splits a
            segment either; `cut` cuts every edge; `off` shares nothing (plain packed
            micro-batches).
        keys, min_shared_tokens: see `build_forest`.
    """
    if mode == "off":
        keys = range(len(sequences))
    trie = build_forest(sequences, keys=keys, min_shared_tokens=min_shared_tokens)
    if budget.prefix_activations != "auto":
        return _plan_trie(trie, budget.with_activations(budget.prefix_activations), mode)
    kept = _plan_trie(trie, budget.with_activations("keep"), mode)
    if budget.max_kept_tokens is None or not kept[1].num_dissolved_trees:
        return kept
    recomputed = _plan_trie(trie, budget.with_activations("recompute"), mode)
    shares_more = recomputed[1].num_dissolved_trees < kept[1].num_dissolved_trees
    return recomputed if shares_more else kept


def _plan_trie(trie: PrefixForest, budget: PackBudget, mode: PlanMode) -> tuple[PrefixForest, Plan]:
    """Plan an unsplit forest; returns the forest that the plan is of."""
    num_dissolved = 0
    while True:
        split = budget.split_segments and mode != "fused"
        forest = split_segments(trie, budget.max_tokens) if split else trie
        cut = _choose_cuts(forest, budget, mode)
        trees = _trees_not_worth_it(forest, cut, budget) if mode != "cut" else ()
        if not len(trees):
            break
        num_dissolved += len(trees)
        trie = separate_trees(trie, np.flatnonzero(trie.parent < 0)[trees])
    plan = plan_cuts(forest, cut, budget)
    return forest, replace(
        plan,
        num_dissolved_trees=num_dissolved,
        prefix_activations=budget.prefix_activations,
    )


def plan_cuts(forest: PrefixForest, cut: np.ndarray, budget: PackBudget) -> Plan:
    """Plan `forest` with the edges above the segments where `cut` ([S] bool) is True cut.

    More edges may be cut than asked for: see [Note: heads and leaves].
    """
    cut, is_head = _heads_apart(forest, cut)
    level = _levels(forest, cut)
    component = _components(forest, cut)
    tops = np.flatnonzero(cut | (forest.parent < 0))
    round_ = _group_rounds(forest, is_head, budget)[tops]
    # One bin packing per round and level of heads, and one per round for its leaves.
    kind = np.where(is_head[tops], level[tops], forest.num_segments)
    by_kind = np.lexsort((kind, round_))
    weights = _component_weights(forest, component, cut, budget)[by_kind].tolist()
    is_next = (np.diff(round_[by_kind]) != 0) | (np.diff(kind[by_kind]) != 0)
    ends = [*(np.flatnonzero(is_next) + 1).tolist(), len(tops)]
    packs: list[int] = []
    num_packs = 0
    for begin, end in zip([0, *ends], ends, strict=False):
        bins = _fill_bins(weights[begin:end], budget.pack_limit)
        packs += [num_packs + bin_ for bin_ in bins]
        num_packs += max(bins, default=-1) + 1
    pack_of_component = np.empty(len(tops), dtype=np.int64)
    pack_of_component[by_kind] = packs
    pack_of = pack_of_component[component]
    round_of_pack = np.empty(num_packs, dtype=np.int64)
    round_of_pack[pack_of_component] = round_
    pack_is_head = np.zeros(num_packs, dtype=bool)
    pack_is_head[pack_of_component] = is_head[tops]
    pack_level = np.zeros(num_packs, dtype=np.int64)
    np.maximum.at(pack_level, pack_of_component, level[tops])
    return Plan(
        packs=_make_packs(pack_of, pack_is_head, pack_level),
        rounds=_make_rounds(round_of_pack, pack_is_head),
        pack_of=pack_of,
        num_cut_edges=int(cut.sum()),
    )


def _heads_apart(forest: PrefixForest, cut: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[S] bool each: edges to cut, and segments with a cut edge somewhere below.

    See [Note: heads and leaves] for the edges that join `cut`.
    """
    has_parent = forest.parent >= 0
    cut = cut & has_parent
    is_head = _subtree_sums(forest, cut) - cut > 0
    # A segment without cut edges below it leaves its parent's head pack.
    return cut | (has_parent & ~is_head & is_head[forest.parent]), is_head


def _make_packs(pack_of: np.ndarray, is_head: np.ndarray, level: np.ndarray) -> tuple[Pack, ...]:
    """Packs from the pack of each segment and the kind and level of each pack."""
    segments = np.argsort(pack_of, kind="stable").tolist()
    ends = np.cumsum(np.bincount(pack_of, minlength=len(is_head))).tolist()
    return tuple(
        Pack(segments=tuple(segments[begin:end]), is_head=head, level=depth)
        for begin, end, head, depth in zip(
            [0, *ends], ends, is_head.tolist(), level.tolist(), strict=False
        )
    )


def _make_rounds(round_of_pack: np.ndarray, is_head: np.ndarray) -> tuple[Round, ...]:
    """Rounds of packs that are numbered by round, heads first."""
    num_packs = np.bincount(round_of_pack)
    num_heads = np.bincount(round_of_pack[is_head], minlength=len(num_packs))
    ends = np.cumsum(num_packs)
    bounds = np.stack([ends - num_packs, ends - num_packs + num_heads, ends], axis=1)
    return tuple(
        Round(heads=tuple(range(begin, first_leaf)), leaves=tuple(range(first_leaf, end)))
        for begin, first_leaf, end in bounds.tolist()
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
    # heaviest children first. This minimises the number of pieces (Kundu and Misra, 1977). A
    # segment whose whole subtree fits needs no look.
    is_leaf = forest.subtree_end == np.arange(forest.num_segments) + 1
    by_tokens = budget.max_tokens is not None
    weight = _subtree_sums(forest, forest.lengths if by_tokens else is_leaf)
    is_heavy = weight > budget.pack_limit
    children = np.flatnonzero(has_parent & is_heavy[forest.parent])
    children = children[np.argsort(forest.parent[children], kind="stable")]
    heavy, begin = np.unique(forest.parent[children], return_index=True)
    own = forest.lengths[heavy] if by_tokens else np.zeros_like(heavy)
    attached = weight.tolist()
    children = children.tolist()
    detached: list[int] = []
    end = len(children)
    for segment, total, first in np.stack([heavy, own, begin])[:, ::-1].T.tolist():
        weights = sorted([(attached[child], child) for child in children[first:end]], reverse=True)
        end = first
        total += sum([child_weight for child_weight, _ in weights])
        for child_weight, child in weights:
            if total <= budget.pack_limit:
                break
            detached.append(child)
            total -= child_weight
        attached[segment] = max(total, 1)
    cut[detached] = True
    return cut


def _subtree_sums(forest: PrefixForest, values: np.ndarray) -> np.ndarray:
    """[S] int64: sum of `values` ([S] integers or bool) over each segment and all below it."""
    sums = np.concatenate([[0], np.cumsum(values, dtype=np.int64)])
    return sums[forest.subtree_end] - sums[:-1]


def _levels(forest: PrefixForest, cut: np.ndarray) -> np.ndarray:
    """[S] int64: cut edges above each segment."""
    # In preorder a cut edge counts from its lower end to the end of that subtree.
    ended = np.bincount(forest.subtree_end[cut], minlength=forest.num_segments + 1)[:-1]
    return np.cumsum(cut - ended)


def _components(forest: PrefixForest, cut: np.ndarray) -> np.ndarray:
    """[S] int64: number of each segment's uncut component, counted by their top segments."""
    is_top = cut | (forest.parent < 0)
    above = np.where(is_top, np.arange(forest.num_segments), forest.parent)
    while True:
        # Each step doubles the distance to the segment above.
        further = above[above]
        if np.array_equal(further, above):
            return np.cumsum(is_top)[above] - 1
        above = further


def _component_weights(
    forest: PrefixForest, component: np.ndarray, cut: np.ndarray, budget: PackBudget
) -> np.ndarray:
    """[number of components] int64: executed tokens, or root-to-leaf paths inside it."""
    if budget.max_tokens is not None:
        values = forest.lengths
    else:
        values = np.ones(forest.num_segments, dtype=np.int64)
        values[forest.parent[~cut & (forest.parent >= 0)]] = 0
    weights = np.zeros(component.max(initial=-1) + 1, dtype=np.int64)
    np.add.at(weights, component, values)
    return weights


def _group_rounds(forest: PrefixForest, is_head: np.ndarray, budget: PackBudget) -> np.ndarray:
    """[S] int64: round of each segment's tree.

    Cut trees share a round while their heads fit, fused trees go with the last.
    """
    roots = np.flatnonzero(forest.parent < 0)
    head_tokens = _subtree_sums(forest, forest.lengths * is_head)[roots]
    limit = budget.max_cache_tokens
    num_rounds = live_tokens = live_weight = 0
    rounds: list[int] = []
    for tokens in head_tokens[is_head[roots]].tolist():
        weight = tokens if budget.max_tokens is not None else 1
        full = live_weight + weight > budget.pack_limit
        if not num_rounds or full or (limit is not None and live_tokens + tokens > limit):
            num_rounds += 1
            live_tokens = live_weight = 0
        rounds.append(num_rounds - 1)
        live_tokens += tokens
        live_weight += weight
    round_of_tree = np.full(len(roots), max(num_rounds - 1, 0), dtype=np.int64)
    round_of_tree[is_head[roots]] = rounds
    return np.repeat(round_of_tree, forest.subtree_end[roots] - roots)


def _fill_bins(weights: list[int], limit: int) -> list[int]:
    """Bin of each item: in the given order, or first-fit decreasing if that needs fewer bins."""
    in_order: list[int] = []
    place, room = -1, 0
    for weight in weights:
        if place < 0 or weight > room:
            place, room = place + 1, limit
        room -= weight
        in_order.append(place)
    # An item over the limit fills one bin, however large it is.
    fill = sum([min(weight, limit) for weight in weights])
    if place + 1 > -(-fill // limit):
        decreasing = _first_fit_decreasing(weights, limit)
        if max(decreasing) < place:
            return decreasing
    return in_order


def _first_fit_decreasing(weights: list[int], limit: int) -> list[int]:
    """Bin of each item; items by falling weight, each in the first bin that has room."""
    bins = [0] * len(weights)
    num_bins = 0
    # Items get smaller, so a bin without room for one may have room for a later one.
    roomy: list[int] = []  # heap: bins with room for the present item
    short: list[tuple[int, int]] = []  # heap: (-room, bin) of the others
    rooms: list[int] = []
    for item in sorted(range(len(weights)), key=lambda item: -weights[item]):
        weight = weights[item]
        while short and -short[0][0] >= weight:
            heappush(roomy, heappop(short)[1])
        if not roomy:
            roomy.append(num_bins)
            rooms.append(limit)
            num_bins += 1
        place = roomy[0]
        bins[item] = place
        rooms[place] -= weight
        if rooms[place] < weight:
            heappush(short, (-rooms[place], heappop(roomy)))
    return bins


def _trees_not_worth_it(forest: PrefixForest, cut: np.ndarray, budget: PackBudget) -> np.ndarray:
    """Numbers of the trees whose shared root saves less than a cut costs, or that need more cache
    than allowed.

    A cut costs nothing extra where one pack holds everything right below it.
    """
    cut, is_head = _heads_apart(forest, cut)
    component = _components(forest, cut)
    weight = _component_weights(forest, component, cut, budget)[component]
    roots = np.flatnonzero(forest.parent < 0)
    # A root may be in pieces: what it shares ends with the last one.
    last_piece = _last_pieces(forest)[roots]
    is_last_piece = np.zeros(forest.num_segments, dtype=bool)
    is_last_piece[last_piece] = True
    children = np.flatnonzero((forest.parent >= 0) & is_last_piece[forest.parent])
    above = forest.parent[children]
    # Rollouts that end at the root would run it once more, together.
    num_runs = np.zeros(forest.num_segments, dtype=np.int64)
    num_runs[forest.end_segment[forest.end_segment >= 0]] = 1
    np.add.at(num_runs, above, 1)
    saved = forest.end[last_piece] * (num_runs[last_piece] - 1)
    # Children take several packs if they differ from the first in kind or are too much for one.
    kind = 2 * is_head + cut
    is_spread = np.zeros(forest.num_segments, dtype=bool)
    is_spread[above[kind[children] != kind[above + 1]]] = True
    weight_below = np.zeros(forest.num_segments, dtype=np.int64)
    np.add.at(weight_below, above, weight[children] * cut[children])
    has_siblings = forest.subtree_end[above + 1] < forest.subtree_end[above]
    above = above[has_siblings]
    is_spread[above] |= weight_below[above] > budget.pack_limit
    not_worth_it = is_spread[last_piece] & (saved < budget.cut_overhead_tokens)
    if budget.max_cache_tokens is not None:
        head_tokens = _subtree_sums(forest, forest.lengths * is_head)[roots]
        not_worth_it |= head_tokens > budget.max_cache_tokens
    # One rollout, or equal ones, in pieces: there is nothing to separate.
    return np.flatnonzero(not_worth_it & is_head[roots] & (num_runs[last_piece] > 1))


def _last_pieces(forest: PrefixForest) -> np.ndarray:
    """[S] int64: last piece of the split segment that each segment is a piece of."""
    # A piece has the rollouts of its parent, which is then the segment before it.
    is_piece = (forest.parent >= 0) & (forest.first == forest.first[forest.parent])
    is_piece &= forest.last == forest.last[forest.parent]
    ends = np.append(np.flatnonzero(~is_piece)[1:], forest.num_segments) - 1
    return ends[np.cumsum(~is_piece) - 1]
