"""One mini-batch of rollouts -> ranks: the search behind `balance.place`.

[Note: how rollouts are placed]
Mini-batches are barriers: ranks meet at each optimizer step, so an update takes the sum over
mini-batches of the slowest rank. Each mini-batch is placed by itself:

    units    Subtrees of the prefix tree are cut, bottom-up, into units that fit a rank's rows and a
             share of its cost. Within these limits a group, or groups of a longer prefix, are one
             unit.
    seats    Units go, most expensive first, to a rank that has their prefix already and is not too
             expensive by that, else to the cheapest rank. A unit for which no rank has enough free
             rows is split.
    swaps    The slowest rank swaps equal numbers of rows with a cheaper one while that helps.

This is done for several sizes of units, and the swaps are also tried on the placement to be beaten;
the best is taken. So groups are whole unless splitting is faster, and the result is never slower
than that placement. Nothing is random: ties go to the first row and the first rank.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from prefixflow_verl.accounting import Flops, ModelShape, span_flops

if TYPE_CHECKING:
    from prefixflow_verl.balance import RolloutLengths

UNIT_SHARES = (math.inf, 1.0, 0.5, 0.25, 0.1)
"""Sizes of units that are tried, as shares of the cost that the slowest rank has at least."""

MANY_ROLLOUTS = 8192
"""From so many rollouts in a mini-batch on, one size of units is tried."""

MAX_CHUNKS = 192
"""Sets of rows of one rank that a swap looks at, about, at most."""

MAX_PARTNERS = 64
"""Ranks with which the slowest rank tries to swap before it counts as stuck, at most."""

MAX_LOOK = 32
"""Ranks that are looked at to seat a unit, at most."""

MAX_DISTANCE = 1.1
"""Swaps are tried on the placement to be beaten if its slowest rank costs at most so many times
what the best placement so far does."""

TOLERANCE = 1e-3
"""Swaps end when the slowest rank is so close, relatively, to what it costs at least, or when about
as many tries as there are ranks gained less."""

LEAST_GAIN = 1e-9
"""Relative; smaller differences may be rounding."""

Rows = list[int]


class PrefixTree:
    """Costs of segments and responses, in FLOPs of forward and backward.

    A node is a segment or, without tokens, the LM head on the last token of a segment that
    responses continue as well as segments. `parent[node] < node`.
    """

    def __init__(self, rollouts: RolloutLengths, shape: ModelShape, checkpointing: bool) -> None:
        unit = span_flops(shape, np.array([0]), np.array([1]), 1)

        def price(**part: int) -> float:
            flops = Flops(**{"linear": 0, "attention": 0, "lm_head": 0, **part})
            return float(flops.update(checkpointing=checkpointing))

        per_token = price(linear=unit.linear)
        per_pair = price(attention=unit.attention)
        per_logit_row = price(lm_head=unit.lm_head)

        def span_costs(start: np.ndarray, end: np.ndarray) -> np.ndarray:
            pairs = end * (end + 1) // 2 - start * (start + 1) // 2
            return per_token * (end - start) + per_pair * pairs

        ends, last = rollouts.segment_end, rollouts.last_segment
        tokens, parent = rollouts.segment_tokens, rollouts.segment_parent
        heads = np.unique(last)
        mixed = np.intersect1d(heads, parent)
        node_of = np.arange(len(ends))
        node_of[mixed] = len(ends) + np.arange(len(mixed))
        begin = ends[last]
        self.node = node_of[last]
        """[R] int64. Node that each response continues."""
        self.parent = np.append(parent, mixed)
        """[N] int64. -1 for a root."""
        self.tokens = np.append(tokens, np.zeros_like(mixed))
        """[N] int64."""
        self.costs = np.append(span_costs(ends - tokens, ends), np.zeros(len(mixed)))
        """[N] float64."""
        self.costs[node_of[heads]] += per_logit_row
        self.response_tokens = rollouts.response_tokens - 1
        """[R] int64. Tokens of each response that are run."""
        self.responses = span_costs(begin, begin + self.response_tokens)
        """[R] float64. Cost of each response, its first prediction apart."""
        self.responses += per_logit_row * np.maximum(rollouts.loss_tokens - 1, 0)

    def runs(self, cells: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Distinct (cell, node) pairs of rollouts `rows` in `cells`, sorted: two [P] int64."""
        num_nodes = len(self.parent)
        pairs = np.unique(cells * num_nodes + self.node[rows])
        found = [pairs]
        while len(pairs):
            above = self.parent[pairs % num_nodes]
            pairs = np.unique((pairs - pairs % num_nodes + above)[above >= 0])
            found.append(pairs)
        pairs = np.unique(np.concatenate(found))
        return pairs // num_nodes, pairs % num_nodes

    def path(self, node: int) -> list[int]:
        """`node` and all above it, the root last."""
        out = []
        while node >= 0:
            out.append(int(node))
            node = self.parent[node]
        return out

    def sum_paths(self, values: np.ndarray, nodes: np.ndarray) -> np.ndarray:
        """[N] float64. Sum of `values` ([N]) from the root to each of `nodes`, which are ascending
        and hold all their parents; 0 elsewhere."""
        sums = [0.0] * (len(self.parent) + 1)  # the last entry is that of parent -1
        above = self.parent[nodes].tolist()
        for node, parent, value in zip(nodes.tolist(), above, values[nodes].tolist(), strict=True):
            sums[node] = value + sums[parent]
        return np.array(sums[:-1])


def place_mini_batch(tree: PrefixTree, start: np.ndarray, least_cost: float) -> np.ndarray:
    """Rows of each rank, [K, C] int64, ascending; [Note: how rollouts are placed].

    Args:
        tree: costs.
        start: [K, C] rows of each rank in the placement to be beaten.
        least_cost: no placement makes the slowest rank cheaper.
    """
    num_ranks, capacity = start.shape
    rows = np.sort(start.ravel()).tolist()
    best = _Ranks(tree, start.tolist())
    shares = UNIT_SHARES if len(rows) < MANY_ROLLOUTS else UNIT_SHARES[-1:]
    for share in (*shares, None):
        if max(best.costs) <= least_cost * (1 + TOLERANCE):
            break
        if share is None:
            ranks = _Ranks(tree, start.tolist())
            if max(ranks.costs) > max(best.costs) * MAX_DISTANCE:
                break
        else:
            ranks = _Ranks(tree, [[] for _ in range(num_ranks)])
            _seat(ranks, _cut_units(tree, rows, least_cost, share, capacity), capacity, least_cost)
        ranks.swap(least_cost)
        if max(ranks.costs) < max(best.costs) * (1 - LEAST_GAIN):
            best = ranks
    return np.sort(np.array(best.seats(), dtype=np.int64), axis=1)


def _cut_units(
    tree: PrefixTree, rows: Rows, least_cost: float, share: float, capacity: int
) -> list[tuple[float, Rows]]:
    """(cost, rows) with at most `capacity` rows that cost about `share * least_cost` or less with
    their prefixes; more where they would otherwise consist of little but prefix."""
    cells, nodes = tree.runs(np.zeros(len(rows), dtype=np.int64), np.array(rows))
    path_costs = tree.sum_paths(tree.costs, nodes)
    parts: dict[int, list[tuple[float, Rows]]] = {node: [] for node in nodes.tolist()}
    units: list[tuple[float, Rows]] = []
    for row, node in zip(rows, tree.node[rows].tolist(), strict=True):
        parts[node].append((float(tree.responses[row]), [row]))
    for node in reversed(nodes.tolist()):
        path = float(path_costs[node])
        room = max(share * least_cost - path, min(path, least_cost - path), 0.0)
        own, parent = float(tree.costs[node]), int(tree.parent[node])
        above = parts[parent] if parent >= 0 else units
        above += [(cost + own, below) for cost, below in _merge(parts[node], room, capacity)]
    return units


def _merge(parts: list[tuple[float, Rows]], room: float, capacity: int) -> list[tuple[float, Rows]]:
    """`parts`, (cost, rows) each, joined to as few as fit in `room` and `capacity` rows, about."""
    if len(parts) == 1:
        return parts
    total = sum([cost for cost, _ in parts])
    size = sum([len(rows) for _, rows in parts])
    if total <= room and size <= capacity:
        return [(total, sorted([row for _, rows in parts for row in rows]))]
    by_cost = min(len(parts), int(-(-total // room))) if room > 0 else len(parts)
    num_bins = max(by_cost, -(-size // capacity))
    bins: list[Rows] = [[] for _ in range(num_bins)]
    cheapest = [(0.0, index) for index in range(num_bins)]
    full = []
    for cost, rows in sorted(parts, key=lambda part: (-part[0], part[1])):
        while cheapest and len(bins[cheapest[0][1]]) + len(rows) > capacity:
            full.append(heapq.heappop(cheapest))
        if not cheapest:
            cheapest.append((0.0, len(bins)))
            bins.append([])
        before, index = cheapest[0]
        bins[index] += rows
        heapq.heapreplace(cheapest, (before + cost, index))
    return [(cost, sorted(bins[index])) for cost, index in full + cheapest if bins[index]]


def _seat(ranks: _Ranks, units: list[tuple[float, Rows]], capacity: int, least_cost: float) -> None:
    """Give every unit, (cost, rows), to ranks, which have no rows so far."""
    queue = [(-cost, unit) for cost, unit in units]
    heapq.heapify(queue)
    free = [capacity] * len(ranks.costs)
    cheapest = [(0.0, rank) for rank in range(len(free))]
    holders: dict[int, list[int]] = {}
    """Ranks that run each node, in the order in which they came by it."""

    def holder_of(unit: Rows) -> int | None:
        for node in ranks.path(ranks.node[unit[0]]):
            fitting = [
                (cost, rank)
                for rank in holders.get(node, ())[-MAX_LOOK:]
                if free[rank] >= len(unit)
                and (cost := ranks.costs[rank] + ranks.cost_of(unit, rank)) <= least_cost
            ]
            if fitting:
                return min(fitting)[1]
        return None

    def cheapest_of(unit: Rows) -> int:
        """The cheapest rank with room for `unit`; if none is near, the cheapest with any room."""
        looked_at = []
        while cheapest and len(looked_at) < MAX_LOOK:
            cost, rank = heapq.heappop(cheapest)
            if not free[rank]:
                continue
            if cost != ranks.costs[rank]:
                heapq.heappush(cheapest, (ranks.costs[rank], rank))
                continue
            looked_at.append((cost, rank))
            if free[rank] >= len(unit):
                break
        for entry in looked_at:
            heapq.heappush(cheapest, entry)
        rank = looked_at[-1][1]
        return rank if free[rank] >= len(unit) else looked_at[0][1]

    while queue:
        _, unit = heapq.heappop(queue)
        rank = holder_of(unit)
        if rank is None:
            rank = cheapest_of(unit)
            unit, rest = unit[: free[rank]], unit[free[rank] :]
            if rest:
                heapq.heappush(queue, (-ranks.cost_of(rest), rest))
        for node in ranks.add(rank, unit):
            holders.setdefault(node, []).append(rank)
        free[rank] -= len(unit)


@dataclass(frozen=True, slots=True)
class _Chunks:
    """Sets of rows of one rank, for swaps: rows alone, and all that are below a node."""

    rows: list[Rows]
    sizes: np.ndarray
    """[C] int64. Rows in each."""
    responses: np.ndarray
    """[C] float64. Cost of their responses."""
    savings: np.ndarray
    """[C] float64. What the rank saves without each, prefixes included."""
    key: np.ndarray
    """[C] int64. Index into `nodes`."""
    nodes: list[list[int]]
    """Node sets that occur."""


class _Ranks:
    """Rows on K ranks, with the cost of each."""

    def __init__(self, tree: PrefixTree, seats: list[Rows]) -> None:
        self.node: list[int] = tree.node.tolist()
        self.counts: list[dict[int, int]] = [{} for _ in seats]
        """Of each rank: rows below each node that it runs."""
        self.costs = [0.0] * len(seats)
        self._parent: list[int] = tree.parent.tolist()
        self._node_costs: list[float] = tree.costs.tolist()
        self._responses: list[float] = tree.responses.tolist()
        self._rows: list[dict[int, Rows]] = [{} for _ in seats]
        self._chunks: dict[int, _Chunks] = {}
        self._paths: dict[int, list[int]] = {}
        for rank, rows in enumerate(seats):
            self.add(rank, rows)

    def seats(self) -> list[Rows]:
        """Rows of each rank."""
        return [[row for rows in by_node.values() for row in rows] for by_node in self._rows]

    def path(self, node: int) -> list[int]:
        """`node` and all above it, the root last."""
        if node not in self._paths:
            above = self._parent[node]
            self._paths[node] = [node, *(self.path(above) if above >= 0 else ())]
        return self._paths[node]

    def nodes_of(self, rows: Rows) -> list[int]:
        """Distinct nodes that `rows` run."""
        heads = dict.fromkeys([self.node[row] for row in rows])
        if len(heads) == 1:
            return self.path(*heads)
        return list(dict.fromkeys([node for head in heads for node in self.path(head)]))

    def cost_of(self, rows: Rows, rank: int | None = None) -> float:
        """Cost of `rows` alone, or what they add to `rank`."""
        has = self.counts[rank] if rank is not None else ()
        prefixes = sum([self._node_costs[n] for n in self.nodes_of(rows) if n not in has])
        return prefixes + sum([self._responses[row] for row in rows])

    def add(self, rank: int, rows: Rows) -> list[int]:
        """Give `rows` to `rank`; returns the nodes that it did not run before."""
        counts, by_node = self.counts[rank], self._rows[rank]
        new = [node for node in self.nodes_of(rows) if node not in counts]
        self.costs[rank] += sum([self._node_costs[node] for node in new])
        self.costs[rank] += sum([self._responses[row] for row in rows])
        for row in rows:
            head = self.node[row]
            by_node.setdefault(head, []).append(row)
            for node in self.path(head):
                counts[node] = counts.get(node, 0) + 1
        self._chunks.pop(rank, None)
        return new

    def remove(self, rank: int, rows: Rows) -> None:
        counts, by_node = self.counts[rank], self._rows[rank]
        for row in rows:
            head = self.node[row]
            by_node[head].remove(row)
            if not by_node[head]:
                del by_node[head]
            for node in self.path(head):
                counts[node] -= 1
                if not counts[node]:
                    del counts[node]
        self.costs[rank] -= self.cost_of(rows, rank)
        self._chunks.pop(rank, None)

    def swap(self, least_cost: float) -> None:
        """Swap rows of the slowest rank while that makes it faster and none as slow as it was."""
        num_tries, target = 0, np.inf
        while True:
            costs = np.array(self.costs)
            slowest = int(costs.argmax())
            if costs[slowest] <= least_cost * (1 + TOLERANCE):
                return
            if num_tries >= MAX_PARTNERS + len(costs) or target == np.inf:
                if costs[slowest] > target:
                    return
                num_tries, target = 0, costs[slowest] * (1 - TOLERANCE)
            for partner in np.argsort(costs, kind="stable")[:MAX_PARTNERS].tolist():
                num_tries += 1
                if partner != slowest and self._try_swap(slowest, partner):
                    break
            else:
                return

    def _try_swap(self, slow: int, fast: int) -> bool:
        """Make the swap that leaves the slower of both ranks fastest; False: none helps."""
        mine, theirs = self._chunks_of(slow), self._chunks_of(fast)
        to_fast = self._additions(mine, fast)[:, None] - theirs.savings
        to_slow = self._additions(theirs, slow) - mine.savings[:, None]
        slower = np.maximum(self.costs[slow] + to_slow, self.costs[fast] + to_fast)
        slower[mine.sizes[:, None] != theirs.sizes] = np.inf
        give, take = np.unravel_index(slower.argmin(), slower.shape)
        limit = self.costs[slow] * (1 - LEAST_GAIN)
        if slower[give, take] >= limit:
            return False
        self._exchange(slow, mine.rows[give], fast, theirs.rows[take])
        # Where both sides hold rows below one node, the estimate may have been wrong.
        if max(self.costs[slow], self.costs[fast]) < limit:
            return True
        self._exchange(slow, theirs.rows[take], fast, mine.rows[give])
        return False

    def _exchange(self, a: int, from_a: Rows, b: int, from_b: Rows) -> None:
        self.remove(a, from_a)
        self.remove(b, from_b)
        self.add(a, from_b)
        self.add(b, from_a)

    def _additions(self, chunks: _Chunks, rank: int) -> np.ndarray:
        """[C] float64. What each chunk would add to `rank`."""
        has, costs = self.counts[rank], self._node_costs
        prefixes = [sum([costs[n] for n in nodes if n not in has]) for nodes in chunks.nodes]
        return chunks.responses + np.array(prefixes)[chunks.key]

    def _chunks_of(self, rank: int) -> _Chunks:
        if rank not in self._chunks:
            self._chunks[rank] = self._make_chunks(rank)
        return self._chunks[rank]

    def _make_chunks(self, rank: int) -> _Chunks:
        by_node, counts = self._rows[rank], self.counts[rank]
        below: dict[int, list[int]] = {}
        """Heads below each node."""
        for head in by_node:
            for node in self.path(head):
                below.setdefault(node, []).append(head)
        nodes: list[list[int]] = []
        listed: list[tuple[Rows, int]] = []
        for node, heads in below.items():
            if len(heads) == 1 and node not in by_node:
                continue
            rows = [row for head in heads for row in by_node[head]]
            if node in by_node:
                listed += [([row], len(nodes)) for row in rows]
            if len(rows) > 1:
                listed.append((rows, len(nodes)))
            nodes.append(self.nodes_of(rows))
        if len(listed) > MAX_CHUNKS:
            listed = listed[:: -(-len(listed) // MAX_CHUNKS)]
        # A node goes with a chunk if no more rows than these are below it.
        prefixes = [
            sum([self._node_costs[n] for n in nodes[key] if counts[n] <= len(rows)])
            for rows, key in listed
        ]
        responses = np.array([sum([self._responses[row] for row in rows]) for rows, _ in listed])
        return _Chunks(
            rows=[rows for rows, _ in listed],
            sizes=np.array([len(rows) for rows, _ in listed]),
            responses=responses,
            savings=responses + prefixes,
            key=np.array([key for _, key in listed]),
            nodes=nodes,
        )
