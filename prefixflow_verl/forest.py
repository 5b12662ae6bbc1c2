"""Token ids -> `PrefixForest`: every run of tokens that rollouts share, found by exact comparison.

[Note: one trie over input tokens]
A rollout of L tokens feeds L - 1 tokens to the model; its last token is a target only. The forest
is a compressed trie over those *input* tokens. Two rollouts share a segment exactly when all their
input tokens up to its end are equal, so sharing never depends on a prompt id: drifting chat
templates split by themselves, one system prompt under different prompts is found by itself, and
rows that merely carry the same id share nothing.

The trie comes from one lexicographic sort and the longest common prefix (LCP) of each adjacent
pair. Segments are numbered in depth-first preorder, so the segments below any segment are the
contiguous ids that follow it, and the rollouts that pass through it are a contiguous range of
`order`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A run of tokens computed once for every rollout below it.

    Example:
        # rollouts [7, 8, 9, 1] and [7, 8, 9, 2, 3] share the input tokens [7, 8, 9]
        Segment(start=0, end=3, parent=None, rollout_ids=(0, 1))
    """

    start: int
    """First position in the rollout, inclusive; also the first RoPE position. Tokens."""
    end: int
    """One past the last position. Tokens."""
    parent: int | None
    """Index of the segment this one continues; None for a root."""
    rollout_ids: tuple[int, ...]
    """Rollouts that pass through, ascending. Two or more make it a prefix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixForest:
    """Compressed trie of the input tokens of R rollouts: S segments in depth-first preorder.

    Example:
        # rollouts [7, 8, 9, 1], [7, 8, 9, 2, 3], [5, 6]
        #   segment 0: [5]        root, rollout 2
        #   segment 1: [7, 8, 9]  root, rollouts 0 and 1; rollout 0 ends here (1 is a target only)
        #   segment 2: [2]        child of 1, rollout 1
    """

    start: np.ndarray
    """[S] int64. First position of each segment, inclusive. Tokens."""
    end: np.ndarray
    """[S] int64. One past its last position. Tokens."""
    parent: np.ndarray
    """[S] int64. Segment that it continues, -1 for a root. `parent[s] < s`."""
    subtree_end: np.ndarray
    """[S] int64. The segments below s are `s + 1 .. subtree_end[s] - 1`."""
    first: np.ndarray
    """[S] int64. Rollouts through s are `order[first[s]:last[s]]`."""
    last: np.ndarray
    """[S] int64. See `first`."""
    order: np.ndarray
    """[R] int64. Rollout ids in lexicographic order of their input tokens."""
    end_segment: np.ndarray
    """[R] int64. Segment of each rollout's last input token; -1 for a rollout of one token."""

    @property
    def num_segments(self) -> int:
        return len(self.start)

    @property
    def num_rollouts(self) -> int:
        return len(self.order)

    @property
    def lengths(self) -> np.ndarray:
        """[S] int64. Tokens in each segment."""
        return self.end - self.start

    @property
    def executed_tokens(self) -> int:
        """Input tokens that are run: each segment once."""
        return int(self.lengths.sum())

    @property
    def logical_tokens(self) -> int:
        """Input tokens that per-rollout training would run."""
        return int((self.lengths * (self.last - self.first)).sum())

    @property
    def is_shared(self) -> np.ndarray:
        """[S] bool. True where two or more rollouts pass through."""
        return self.last - self.first > 1

    def rollouts_of(self, segment: int) -> np.ndarray:
        """Ids of the rollouts that pass through `segment`, in lexicographic order."""
        return self.order[self.first[segment] : self.last[segment]]

    def owner(self, segment: int) -> int:
        """A rollout that holds the tokens of `segment`."""
        return int(self.order[self.first[segment]])

    def path(self, segment: int) -> list[int]:
        """Segments from the root down to `segment`, both included; empty for -1."""
        out = []
        while segment >= 0:
            out.append(segment)
            segment = int(self.parent[segment])
        return out[::-1]

    def children(self, segment: int) -> list[int]:
        """Direct children of `segment`, ascending."""
        out, child = [], segment + 1
        while child < self.subtree_end[segment]:
            out.append(child)
            child = int(self.subtree_end[child])
        return out

    @property
    def roots(self) -> list[int]:
        return np.flatnonzero(self.parent < 0).tolist()

    def segment(self, index: int) -> Segment:
        """Segment `index` as a record."""
        parent = int(self.parent[index])
        return Segment(
            start=int(self.start[index]),
            end=int(self.end[index]),
            parent=None if parent < 0 else parent,
            rollout_ids=tuple(sorted(self.rollouts_of(index).tolist())),
        )


def build_forest(
    sequences: Sequence[np.ndarray],
    *,
    keys: Sequence[Hashable] | None = None,
    min_shared_tokens: int = 1,
) -> PrefixForest:
    """Find every shared prefix among `sequences`.

    Args:
        sequences: R one-dimensional integer arrays, prompt and response together, at least one
            token each.
        keys: R hashable values, anything besides token ids that changes keys and values (adapter,
            images).
            Rollouts with different keys share nothing. None: all equal.
        min_shared_tokens: a shared segment shorter than this is not split off; each child runs
            those tokens itself. 1 keeps every one.

    Raises:
        ValueError: a sequence is empty or not one-dimensional, or the number of keys differs.
    """
    num_rollouts = len(sequences)
    if keys is not None and len(keys) != num_rollouts:
        raise ValueError(
            f"{len(keys)} keys for {num_rollouts} sequences: give one key per sequence"
        )
    if not isinstance(min_shared_tokens, int) or min_shared_tokens < 1:
        raise ValueError(f"min_shared_tokens is {min_shared_tokens}: give an integer, 1 or more")
    for index, sequence in enumerate(sequences):
        if sequence.ndim != 1 or len(sequence) == 0:
            raise ValueError(
                f"sequence {index} has shape {sequence.shape}: need one dimension and a token"
            )
    num_inputs = np.array([len(sequence) - 1 for sequence in sequences], dtype=np.int64)
    key_rank = _rank_keys(keys, num_rollouts)
    # Big-endian bytes of unsigned ids compare like the ids themselves: one memcmp sort.
    sort_keys = [
        (key_rank[index], np.asarray(sequence[:-1]).astype(">u4").tobytes(), index)
        for index, sequence in enumerate(sequences)
    ]
    order = np.array([key[2] for key in sorted(sort_keys)], dtype=np.int64)
    common = _adjacent_lcp(sequences, order, key_rank)
    prefixes = _shared_intervals(common, min_shared_tokens)

    # Deepest kept prefix around each rollout; one that reads further gets its own segment.
    depth = np.zeros(num_rollouts, dtype=np.int64)
    for prefix_end, first, last in prefixes:
        depth[first:last] = np.maximum(depth[first:last], prefix_end)
    own = np.flatnonzero(num_inputs[order] > depth)
    nodes = np.array(
        prefixes + [(int(num_inputs[order[index]]), int(index), int(index) + 1) for index in own],
        dtype=np.int64,
    ).reshape(-1, 3)
    nodes = nodes[np.lexsort((nodes[:, 0], -nodes[:, 2], nodes[:, 1]))]
    return _number_segments(nodes, order, num_inputs)


def _rank_keys(keys: Sequence[Hashable] | None, num_rollouts: int) -> list[int]:
    if keys is None:
        return [0] * num_rollouts
    ranks: dict[Hashable, int] = {}
    return [ranks.setdefault(key, len(ranks)) for key in keys]


def _adjacent_lcp(
    sequences: Sequence[np.ndarray], order: np.ndarray, key_rank: list[int]
) -> list[int]:
    """Number of equal leading input tokens of each pair of neighbours in `order`; R - 1 values."""
    common = []
    for left, right in zip(order[:-1].tolist(), order[1:].tolist(), strict=True):
        if key_rank[left] != key_rank[right]:
            common.append(0)
            continue
        size = min(len(sequences[left]), len(sequences[right])) - 1
        different = sequences[left][:size] != sequences[right][:size]
        where = int(different.argmax()) if size else 0
        common.append(where if size and different[where] else size)
    return common


def _shared_intervals(common: list[int], min_shared_tokens: int) -> list[tuple[int, int, int]]:
    """Shared prefixes as (end, first, last) over sorted rollouts, short segments dropped."""
    found: list[tuple[int, int, int]] = []
    stack = [(0, 0)]  # (LCP, first sorted rollout) of the intervals still open
    for right, lcp in enumerate([*common, 0], start=1):
        first = right - 1
        while stack[-1][0] > lcp:
            open_lcp, first = stack.pop()
            found.append((open_lcp, first, right))
        if stack[-1][0] < lcp:
            stack.append((lcp, first))
    found.sort(key=lambda interval: (interval[1], -interval[2], interval[0]))
    kept: list[tuple[int, int, int]] = []
    open_: list[tuple[int, int, int]] = []
    for interval in found:
        while open_ and open_[-1][2] <= interval[1]:
            open_.pop()
        start = open_[-1][0] if open_ else 0
        if interval[0] - start >= min_shared_tokens:
            kept.append(interval)
            open_.append(interval)
    return kept


def _number_segments(nodes: np.ndarray, order: np.ndarray, num_inputs: np.ndarray) -> PrefixForest:
    """Link preorder-sorted (end, first, last) nodes into a forest."""
    num_segments = len(nodes)
    start = np.zeros(num_segments, dtype=np.int64)
    parent = np.full(num_segments, -1, dtype=np.int64)
    subtree_end = np.full(num_segments, num_segments, dtype=np.int64)
    end_segment = np.full(len(order), -1, dtype=np.int64)
    ends, firsts, lasts = (nodes[:, column].tolist() for column in range(3))
    stack: list[int] = []
    for index in range(num_segments):
        while stack and lasts[stack[-1]] <= firsts[index]:
            subtree_end[stack.pop()] = index
        if stack:
            parent[index] = stack[-1]
            start[index] = ends[stack[-1]]
        stack.append(index)
    for index in range(num_segments):
        through = order[firsts[index] : lasts[index]]
        end_segment[through[num_inputs[through] == ends[index]]] = index
    return PrefixForest(
        start=start,
        end=nodes[:, 0].copy(),
        parent=parent,
        subtree_end=subtree_end,
        first=nodes[:, 1].copy(),
        last=nodes[:, 2].copy(),
        order=order,
        end_segment=end_segment,
    )
