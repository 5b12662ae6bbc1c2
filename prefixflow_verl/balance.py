"""Rollouts -> data-parallel ranks: equal rows everywhere, the slowest rank as fast as can be.

verl gives every rank the same number of rows, chosen by length alone, so the rollouts of a prompt
scatter and each rank they land on runs the prompt again. Here a rank's cost is what prefix reuse
makes of it: every shared segment once per mini-batch (an optimizer step ends a cache), every
response once, by the formula of `accounting`.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from prefixflow_verl.accounting import ModelShape, dense_flops
from prefixflow_verl.balance_search import PrefixTree, place_mini_batch

NUM_HEAVY = 8
"""Most expensive rollouts that a lower bound looks at one by one."""


class PlacementError(ValueError):
    """Rollouts that verl could not divide over ranks and mini-batches, or malformed lengths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutLengths:
    """Lengths of R rollouts and of the N segments they share, as parent pointers.

    Example:
        # a system prompt of 50 tokens, prompts of 20 and 30 after it, two responses to each
        RolloutLengths(
            segment_parent=[-1, 0, 0], segment_tokens=[50, 20, 30],
            last_segment=[1, 1, 2, 2], response_tokens=[5, 6, 7, 8], loss_tokens=[5, 6, 7, 8],
        )

    Raises:
        PlacementError: lengths below 1, or indices that point nowhere.
    """

    segment_parent: np.ndarray
    """[N] int64. Segment that each one continues, -1 for a root. `segment_parent[s] < s`."""
    segment_tokens: np.ndarray
    """[N] int64. Tokens, 1 or more."""
    last_segment: np.ndarray
    """[R] int64. Segment that each response continues."""
    response_tokens: np.ndarray
    """[R] int64. Tokens after it, 1 or more; the last one is a target only."""
    loss_tokens: np.ndarray
    """[R] int64. Response tokens that carry loss: the LM head runs for these."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            object.__setattr__(self, name, np.asarray(getattr(self, name), dtype=np.int64))
        num_segments = len(self.segment_tokens)
        for name in ("segment_tokens", "response_tokens"):
            if (getattr(self, name) < 1).any():
                raise PlacementError(f"{name} holds a length below 1")
        if ((self.loss_tokens < 0) | (self.loss_tokens > self.response_tokens)).any():
            raise PlacementError("loss_tokens must be between 0 and response_tokens")
        if ((self.last_segment < 0) | (self.last_segment >= num_segments)).any():
            raise PlacementError("last_segment holds an index of no segment")
        is_before = self.segment_parent < np.arange(num_segments)
        if not (is_before & (self.segment_parent >= -1)).all():
            raise PlacementError("segment_parent must hold -1 or the index of an earlier segment")

    @classmethod
    def from_groups(
        cls,
        group_ids: Sequence[Hashable],
        prompt_tokens: Sequence[int],
        response_tokens: Sequence[int],
        loss_tokens: Sequence[int] | None = None,
    ) -> RolloutLengths:
        """Rollouts that share prompts and nothing else.

        Args:
            group_ids: R ids, e.g. verl's `uid`.
            prompt_tokens: R lengths, equal within a group.
            response_tokens: R lengths.
            loss_tokens: R numbers of response tokens that carry loss; None: all of them.
        """
        paths = [[(group, int(n))] for group, n in zip(group_ids, prompt_tokens, strict=True)]
        return cls.from_paths(paths, response_tokens, loss_tokens)

    @classmethod
    def from_paths(
        cls,
        paths: Sequence[Sequence[tuple[Hashable, int]]],
        response_tokens: Sequence[int],
        loss_tokens: Sequence[int] | None = None,
    ) -> RolloutLengths:
        """Rollouts by their paths: R lists of (id, tokens), e.g. system prompt, repository, prompt.

        Two rollouts share a segment if their ids up to and including it are equal.

        Raises:
            PlacementError: an empty path, or one segment with two lengths.
        """
        index: dict[tuple[int, Hashable], int] = {}
        parents: list[int] = []
        tokens: list[int] = []
        last = []
        for path in paths:
            if not path:
                raise PlacementError("a rollout has no prompt: its path is empty")
            above = -1
            for name, length in path:
                segment = index.setdefault((above, name), len(tokens))
                if segment == len(tokens):
                    parents.append(above)
                    tokens.append(length)
                elif tokens[segment] != length:
                    raise PlacementError(f"{name!r} has {tokens[segment]} tokens and {length}")
                above = segment
            last.append(above)
        return cls(
            segment_parent=parents,
            segment_tokens=tokens,
            last_segment=last,
            response_tokens=response_tokens,
            loss_tokens=response_tokens if loss_tokens is None else loss_tokens,
        )

    @property
    def num_rollouts(self) -> int:
        return len(self.last_segment)

    @property
    def segment_end(self) -> np.ndarray:
        """[N] int64. One past the last position of each segment."""
        ends = np.zeros(len(self.segment_tokens), dtype=np.int64)
        for segment, parent in enumerate(self.segment_parent.tolist()):
            ends[segment] = self.segment_tokens[segment] + (ends[parent] if parent >= 0 else 0)
        return ends

    @property
    def num_tokens(self) -> np.ndarray:
        """[R] int64. Prompt and response of each rollout, what verl places by."""
        return self.segment_end[self.last_segment] + self.response_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Which rank trains on which rollouts in which of M mini-batches, and what it costs K ranks.

    Costs are FLOPs of forward and backward, so seconds up to a constant.
    """

    order: np.ndarray
    """[R] int64. What verl's `batch.reorder` takes. Rank k gets the k-th of K equal slices, and its
    m-th mini-batch is the m-th of M equal slices of that, provided that
    `actor_rollout_ref.actor.shuffle` is false."""
    costs: np.ndarray
    """[K, M] float64. Of each rank in each mini-batch."""
    executed_tokens: np.ndarray
    """[K, M] int64. Tokens that the rank runs."""
    num_duplicated_prefixes: int
    """Further ranks that run a segment in the same mini-batch, summed over segments."""
    num_duplicated_tokens: int
    """Tokens of these."""
    least_costs: np.ndarray
    """[M] float64. In no placement with these mini-batches does the slowest rank cost less."""

    @property
    def rank_costs(self) -> np.ndarray:
        """[K] float64. Of each rank over all mini-batches, without waiting."""
        return self.costs.sum(axis=1)

    @property
    def slowest_cost(self) -> float:
        """Of the update: the slowest rank of each mini-batch, summed."""
        return float(self.costs.max(axis=0).sum())

    @property
    def imbalance(self) -> float:
        """`slowest_cost` / the same if the ranks shared the work equally: max / mean."""
        return self.slowest_cost / float(self.costs.mean(axis=0).sum())

    @property
    def lower_bound(self) -> float:
        """Of `imbalance`, for as much work in all as here; 1.0 or more."""
        return max(1.0, float(self.least_costs.sum() / self.costs.mean(axis=0).sum()))

    def rollouts(self, rank: int, mini_batch: int) -> np.ndarray:
        """[R / (K * M)] int64. Rows of `rank` in `mini_batch`, in their order."""
        return self.order.reshape(*self.costs.shape, -1)[rank, mini_batch]


def verl_order(num_tokens: Sequence[int], num_ranks: int) -> np.ndarray:
    """The row order of verl's own placement, by length alone: R indices.

    verl 0.9, `PPOTrainer._balance_batch`: `get_seqlen_balanced_partitions` with `equal_size` on
    `24576 * L + L**2`, which is the largest differencing method on tuples of one row per rank. Rows
    of a rank stay in ascending order, so mini-batches mix prompts.

    Raises:
        PlacementError: R is no multiple of `num_ranks`.
    """
    num_tokens = [int(n) for n in num_tokens]
    _require_divisible(len(num_tokens), num_ranks, 1)
    work = sorted((24576 * n + n * n, row) for row, n in enumerate(num_tokens))
    heap = [
        _Tuple([(cost, [row]) for cost, row in work[begin : begin + num_ranks]])
        for begin in range(0, len(work), num_ranks)
    ]
    heapq.heapify(heap)
    while len(heap) > 1:
        heaviest = heapq.heappop(heap)
        heapq.heapreplace(heap, heaviest.merged(heap[0]))
    return np.array([row for _, rows in heap[0].sets for row in sorted(rows)], dtype=np.int64)


class _Tuple:
    """One set of rows per rank, heaviest first: [(work, rows)]. Orders as in verl's heap."""

    def __init__(self, sets: list[tuple[int, list[int]]]) -> None:
        self.sets = sorted(sets, reverse=True)
        self.spread = self.sets[0][0] - self.sets[-1][0]

    def merged(self, other: _Tuple) -> _Tuple:
        pairs = zip(self.sets, reversed(other.sets), strict=True)
        return _Tuple([(a + b, rows + more) for (a, rows), (b, more) in pairs])

    def __lt__(self, other: _Tuple) -> bool:
        if self.spread != other.spread:
            return self.spread > other.spread
        (work, rows), (other_work, other_rows) = self.sets[0], other.sets[0]
        return (work, len(rows), rows) > (other_work, len(other_rows), other_rows)


def dense_costs(
    rollouts: RolloutLengths, shape: ModelShape, *, checkpointing: bool = False
) -> np.ndarray:
    """[R] float64. Cost of each rollout by itself, LM head on every token, as in verl's engine."""
    lengths, rows = np.unique(rollouts.num_tokens, return_inverse=True)
    costs = [
        dense_flops(shape, np.array([n]), int(n)).update(checkpointing=checkpointing)
        for n in lengths
    ]
    return np.array(costs, dtype=np.float64)[rows]


def evaluate(
    order: np.ndarray,
    rollouts: RolloutLengths,
    shape: ModelShape,
    *,
    num_ranks: int,
    num_mini_batches: int = 1,
    checkpointing: bool = False,
) -> Placement:
    """What the row order `order` ([R], a permutation) costs with prefix reuse; see `Placement`.

    Raises:
        PlacementError: R is no multiple of `num_ranks * num_mini_batches`.
    """
    _require_divisible(rollouts.num_rollouts, num_ranks, num_mini_batches)
    return _evaluate(order, PrefixTree(rollouts, shape, checkpointing), num_ranks, num_mini_batches)


def place(
    rollouts: RolloutLengths,
    shape: ModelShape,
    *,
    num_ranks: int,
    num_mini_batches: int = 1,
    mini_batches: np.ndarray | None = None,
    checkpointing: bool = False,
) -> Placement:
    """Place rollouts so that the slowest rank is as fast as can be; balance_search.py says how.

    Args:
        rollouts: R rollouts; rows that pad the batch are rollouts too.
        shape: sizes of the model.
        num_ranks: data-parallel ranks.
        num_mini_batches: optimizer steps per update.
        mini_batches: [M, R / M] rows of each mini-batch, e.g. of `whole_group_mini_batches`.
            Default: slices of the rows as they come.
        checkpointing: count the recomputation of activation checkpointing.

    Returns:
        No mini-batch is slower than with its rows placed by `verl_order`.

    Raises:
        PlacementError: R is no multiple of `num_ranks * num_mini_batches`.
    """
    _require_divisible(rollouts.num_rollouts, num_ranks, num_mini_batches)
    tree = PrefixTree(rollouts, shape, checkpointing)
    if mini_batches is None:
        mini_batches = np.arange(rollouts.num_rollouts)
    mini_batches = np.asarray(mini_batches).reshape(num_mini_batches, -1)
    return _place(tree, _starts(mini_batches, rollouts, num_ranks))


def place_batch(
    rollouts: RolloutLengths,
    shape: ModelShape,
    *,
    group_ids: Sequence[Hashable],
    is_padding: Sequence[bool],
    num_ranks: int,
    num_mini_batches: int = 1,
    checkpointing: bool = False,
) -> tuple[Placement, Placement]:
    """Place a trainer's batch: `place` with mini-batches of whole groups, or with those of verl's
    own placement where these are faster. So it is never slower than verl's.

    Args:
        rollouts: R rollouts.
        shape: sizes of the model.
        group_ids: R ids, e.g. verl's `uid`.
        is_padding: R flags: rows that pad the batch.
        num_ranks, num_mini_batches, checkpointing: see `place`.

    Returns:
        This placement, and verl's own with the same reuse.

    Raises:
        PlacementError: R is no multiple of `num_ranks * num_mini_batches`.
    """
    _require_divisible(rollouts.num_rollouts, num_ranks, num_mini_batches)
    tree = PrefixTree(rollouts, shape, checkpointing)
    whole = whole_group_mini_batches(group_ids, is_padding, num_mini_batches)
    placed = _place(tree, _starts(whole, rollouts, num_ranks))
    order = verl_order(rollouts.num_tokens, num_ranks)
    theirs = _evaluate(order, tree, num_ranks, num_mini_batches)
    if placed.slowest_cost > theirs.slowest_cost:
        cells = order.reshape(num_ranks, num_mini_batches, -1)
        placed = _place(tree, [cells[:, index] for index in range(num_mini_batches)])
    return placed, theirs


def _starts(mini_batches: np.ndarray, rollouts: RolloutLengths, num_ranks: int) -> list[np.ndarray]:
    """M placements by length, [K, R / (K * M)] rows, of mini-batches [M, R / M]."""
    num_tokens = rollouts.num_tokens
    return [
        rows[verl_order(num_tokens[rows], num_ranks)].reshape(num_ranks, -1)
        for rows in mini_batches
    ]


def _place(tree: PrefixTree, starts: Sequence[np.ndarray]) -> Placement:
    """Improve M placements of one mini-batch each, [K, R / (K * M)] rows."""
    num_ranks = len(starts[0])
    placed = [
        place_mini_batch(tree, start, _least_cost(tree, start.ravel(), num_ranks))
        for start in starts
    ]
    order = np.stack(placed, axis=1).ravel()
    return _evaluate(order, tree, num_ranks, len(starts))


def whole_group_mini_batches(
    group_ids: Sequence[Hashable], is_padding: Sequence[bool], num_mini_batches: int
) -> np.ndarray:
    """[M, R / M] int64. Rows of each mini-batch: groups in the order in which they come, none in
    two mini-batches unless equal sizes demand it; rows that pad the batch fill the rest evenly.

    Args:
        group_ids: R ids, e.g. verl's `uid`.
        is_padding: R flags.
        num_mini_batches: M.

    Raises:
        PlacementError: R is no multiple of M.
    """
    _require_divisible(len(group_ids), 1, num_mini_batches)
    capacity = len(group_ids) // num_mini_batches
    padding = np.asarray(is_padding, dtype=bool)
    first = {}
    group = np.array([first.setdefault(name, len(first)) for name in group_ids], dtype=np.int64)
    real = np.flatnonzero(~padding)
    real = real[np.argsort(group[real], kind="stable")]
    group_ends = np.append(np.flatnonzero(np.diff(group[real])) + 1, len(real))
    cuts = [0]
    for done in range(1, num_mini_batches):
        num_later = num_mini_batches - done
        # What the later ones can take must be left for them, and none is padding alone if there
        # are rows for all.
        lowest = max(cuts[-1] + 1, len(real) - num_later * capacity)
        highest = max(lowest, min(cuts[-1] + capacity, len(real) - num_later))
        lowest, highest = min(lowest, len(real)), min(highest, len(real))
        even = min(max(round(len(real) * done / num_mini_batches), lowest), highest)
        whole = group_ends[(group_ends >= lowest) & (group_ends <= highest)]
        cuts.append(int(whole[np.argmin(np.abs(whole - even))]) if len(whole) else even)
    cuts.append(len(real))
    fillers = iter(np.flatnonzero(padding).tolist())
    mini_batches = []
    for begin, end in itertools.pairwise(cuts):
        rows = real[begin:end].tolist()
        mini_batches.append(rows + [next(fillers) for _ in range(capacity - len(rows))])
    return np.array(mini_batches, dtype=np.int64)


def _require_divisible(num_rollouts: int, num_ranks: int, num_mini_batches: int) -> None:
    if num_ranks < 1 or num_mini_batches < 1:
        raise PlacementError(f"{num_ranks} ranks x {num_mini_batches} mini-batches: 1 at least")
    if num_rollouts % (num_ranks * num_mini_batches) or not num_rollouts:
        raise PlacementError(
            f"{num_rollouts} rollouts do not divide into {num_ranks} ranks x {num_mini_batches} "
            "mini-batches of equal rows: make data.train_batch_size * actor_rollout_ref.rollout.n "
            "a multiple of the data-parallel ranks (trainer.nnodes * trainer.n_gpus_per_node) times"
            " the mini-batches (data.train_batch_size / "
            "actor_rollout_ref.actor.ppo_mini_batch_size)"
        )


def _evaluate(
    order: np.ndarray, tree: PrefixTree, num_ranks: int, num_mini_batches: int
) -> Placement:
    order = np.asarray(order, dtype=np.int64)
    num_cells = num_ranks * num_mini_batches
    cells = np.repeat(np.arange(num_cells), len(order) // num_cells)
    run_cells, run_nodes = tree.runs(cells, order)

    def sums(of_nodes: np.ndarray, of_rows: np.ndarray) -> np.ndarray:
        below = np.bincount(cells, weights=of_rows[order], minlength=num_cells)
        above = np.bincount(run_cells, weights=of_nodes[run_nodes], minlength=num_cells)
        return (below + above).reshape(num_ranks, num_mini_batches)

    # Cells are numbered by rank, then mini-batch.
    in_mini_batch = run_cells % num_mini_batches * len(tree.parent) + run_nodes
    once, num_runs = np.unique(in_mini_batch, return_counts=True)
    tokens = tree.tokens[once % len(tree.parent)]
    mini_batches = order.reshape(num_ranks, num_mini_batches, -1).transpose(1, 0, 2)
    return Placement(
        order=order,
        costs=sums(tree.costs, tree.responses),
        executed_tokens=sums(tree.tokens, tree.response_tokens).astype(np.int64),
        num_duplicated_prefixes=int((num_runs - 1)[tokens > 0].sum()),
        num_duplicated_tokens=int(((num_runs - 1) * tokens).sum()),
        least_costs=np.array([_least_cost(tree, cell.ravel(), num_ranks) for cell in mini_batches]),
    )


def _least_cost(tree: PrefixTree, rows: np.ndarray, num_ranks: int) -> float:
    """Below this the slowest rank of a mini-batch of `rows` cannot be. Each rank has C rows."""
    capacity = len(rows) // num_ranks
    _, nodes = tree.runs(np.zeros_like(rows), rows)
    num_below = np.bincount(tree.node[rows], minlength=len(tree.parent))
    for node in nodes[::-1].tolist():
        if tree.parent[node] >= 0:
            num_below[tree.parent[node]] += num_below[node]
    # The mean, if every segment is run by as few ranks as have the rows for it.
    num_runs = -(-num_below[nodes] // capacity)
    mean = (tree.responses[rows].sum() + (tree.costs[nodes] * num_runs).sum()) / num_ranks
    # A rollout's part of its prefixes, at least: so many rows of one rank share them at most. A
    # rank costs the sum over its rows, or more.
    parts = np.zeros(len(tree.parent))
    parts[nodes] = tree.costs[nodes] / np.minimum(num_below[nodes], capacity)
    weights = tree.responses[rows] + tree.sum_paths(parts, nodes)[tree.node[rows]]
    whole = tree.responses[rows] + tree.sum_paths(tree.costs, nodes)[tree.node[rows]]
    # An expensive rollout with all of its prefixes, and the C - 1 cheapest beside it.
    singles = []
    for heavy in np.argsort(-whole, kind="stable")[:NUM_HEAVY].tolist():
        beside = parts.copy()
        beside[tree.path(tree.node[rows[heavy]])] = 0
        others = tree.responses[rows] + tree.sum_paths(beside, nodes)[tree.node[rows]]
        others = np.delete(others, heavy)
        cheapest = (
            np.partition(others, capacity - 2)[: capacity - 1] if capacity > 1 else others[:0]
        )
        singles.append(whole[heavy] + cheapest.sum())
    return float(max([mean, *singles, *_crowding(np.sort(weights)[::-1], num_ranks)]))


def _crowding(weights: np.ndarray, num_ranks: int) -> np.ndarray:
    """Least weights of the heaviest of `num_ranks` sets of C of `weights` ([R], descending)."""
    capacity = len(weights) // num_ranks
    if capacity == 1:
        return weights[:1]
    heaviest = np.concatenate([[0.0], np.cumsum(weights)])
    lightest = np.concatenate([[0.0], np.cumsum(weights[::-1])])
    # Of the j * num_ranks + 1 heaviest, j + 1 are in one set.
    j = np.arange(1, capacity)
    pigeons = heaviest[j * num_ranks + 1] - heaviest[j * num_ranks - j] + lightest[capacity - 1 - j]
    # Two of the m heaviest are in one set, or each has C - 1 others beside it: then one set has the
    # mean of these m * (C - 1), and one has the heaviest of them.
    m = np.arange(1, num_ranks + 1)
    num_others = m * (capacity - 1)
    mth, rest = weights[m - 1], lightest[capacity - 2]
    others = np.maximum(lightest[num_others] / m, weights[-num_others] + rest)
    return np.maximum(pigeons.max(), mth + np.minimum(mth + rest, others))
