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
`order`. A segment on the way is a node `(end, first, last)`: everything else follows from those.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

_MAX_WINDOW = 4096
"""Tokens of a pair of rollouts that are compared at once, at most."""
_TOKENS_PER_STEP = 1 << 20
"""Tokens that all pairs compare at once, about: bounds the memory of the comparison."""


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

    `build_forest` returns a compressed trie: a segment with one child has rollouts that end at it.
    After `split_segments` a segment may be a chain of pieces, each the only child of the one before
    and passed by the same rollouts.

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
    # All sequences in one row; the zeros let a window reach beyond the last one.
    tokens = np.concatenate([*sequences, np.zeros(_MAX_WINDOW, dtype=np.uint8)])
    begin = np.cumsum(num_inputs + 1) - (num_inputs + 1)
    order = _lexicographic_order(tokens, begin, num_inputs, key_rank)
    common = _adjacent_lcp(tokens, begin, num_inputs, key_rank, order)
    shared = _shared_prefixes(common)
    if min_shared_tokens > 1:
        shared = _drop_short(shared, min_shared_tokens)
    # Each rollout gets a node of its own below them; an empty one if it ends where one of them
    # does.
    place = np.arange(num_rollouts)
    nodes = np.concatenate([shared, np.stack([num_inputs[order], place, place + 1])], axis=1)
    return _link(nodes[:, _preorder(nodes)], order)


def split_segments(forest: PrefixForest, max_tokens: int) -> PrefixForest:
    """`forest` with each segment longer than `max_tokens` as a chain of pieces, nearly equal.

    Each piece is the only child of the one before; what was below the segment is below the last.

    Example:
        # a segment of 7 tokens with max_tokens=3 becomes pieces of 2, 2 and 3

    Raises:
        ValueError: `max_tokens` is below 1.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}: give an integer, 1 or more")
    num_pieces = -(-forest.lengths // max_tokens)
    end_piece = np.cumsum(num_pieces)
    segment = np.repeat(np.arange(forest.num_segments), num_pieces)
    index = np.arange(len(segment))
    nth = index - (end_piece - num_pieces)[segment]
    lengths, num_pieces = forest.lengths[segment], num_pieces[segment]
    # One more entry, so that -1 stays -1.
    last_piece = np.append(end_piece - 1, -1)
    return PrefixForest(
        start=forest.start[segment] + lengths * nth // num_pieces,
        end=forest.start[segment] + lengths * (nth + 1) // num_pieces,
        parent=np.where(nth > 0, index - 1, last_piece[forest.parent[segment]]),
        subtree_end=end_piece[forest.subtree_end[segment] - 1],
        first=forest.first[segment],
        last=forest.last[segment],
        order=forest.order,
        end_segment=last_piece[forest.end_segment],
    )


def separate_trees(forest: PrefixForest, roots: np.ndarray) -> PrefixForest:
    """`forest` without sharing of the segments `roots` ([n] int64, none has a parent).

    Each child becomes the root of its own tree and runs the tokens of the old root itself.
    Rollouts that end at the old root stay together on it. `order` stays as it is.
    """
    is_separated = np.zeros(forest.num_segments + 1, dtype=bool)
    is_separated[roots] = True
    num_ending = np.bincount(forest.end_segment + 1, minlength=forest.num_segments + 1)[1:]
    last = forest.last.copy()
    # Rollouts that end at a segment come first among those that pass through it.
    last[roots] = forest.first[roots] + num_ending[roots]
    kept = last > forest.first
    num_kept_before = np.concatenate([[0], np.cumsum(kept)])
    parent = np.where(is_separated[forest.parent], -1, forest.parent)
    subtree_end = forest.subtree_end.copy()
    subtree_end[roots] = roots + 1
    return PrefixForest(
        start=np.where(parent < 0, 0, forest.start)[kept],
        end=forest.end[kept],
        parent=np.where(parent < 0, -1, num_kept_before[parent])[kept],
        subtree_end=num_kept_before[subtree_end[kept]],
        first=forest.first[kept],
        last=last[kept],
        order=forest.order,
        end_segment=np.where(forest.end_segment < 0, -1, num_kept_before[forest.end_segment]),
    )


def _rank_keys(keys: Sequence[Hashable] | None, num_rollouts: int) -> np.ndarray:
    """[R] int64: keys numbered in the order in which they appear."""
    if keys is None:
        return np.zeros(num_rollouts, dtype=np.int64)
    ranks: dict[Hashable, int] = {}
    return np.array([ranks.setdefault(key, len(ranks)) for key in keys], dtype=np.int64)


def _lexicographic_order(
    tokens: np.ndarray, begin: np.ndarray, num_inputs: np.ndarray, key_rank: np.ndarray
) -> np.ndarray:
    """[R] int64: rollouts by key rank, then input tokens `tokens[begin:begin + num_inputs]`."""
    # Big-endian bytes of unsigned ids compare like the ids themselves: one memcmp per comparison.
    token_bytes = tokens.astype(">u4").tobytes()
    bounds = zip((4 * begin).tolist(), (4 * (begin + num_inputs)).tolist(), strict=True)
    sort_keys = [token_bytes[start:end] for start, end in bounds]
    order = np.array(sorted(range(len(begin)), key=sort_keys.__getitem__), dtype=np.int64)
    return order[np.argsort(key_rank[order], kind="stable")]


def _adjacent_lcp(
    tokens: np.ndarray,
    begin: np.ndarray,
    num_inputs: np.ndarray,
    key_rank: np.ndarray,
    order: np.ndarray,
) -> np.ndarray:
    """[R - 1] int64: equal leading input tokens of each pair of neighbours in `order`.

    `tokens` reaches `_MAX_WINDOW` beyond the last sequence.
    """
    left, right = order[:-1], order[1:]
    common = np.minimum(num_inputs[left], num_inputs[right])
    common[key_rank[left] != key_rank[right]] = 0
    # All undecided pairs advance together, by windows of growing width.
    pairs = np.flatnonzero(common)
    done, width = 0, 16
    while len(pairs):
        windows = np.lib.stride_tricks.sliding_window_view(tokens, width)
        undecided = []
        for some in np.array_split(pairs, len(pairs) * width // _TOKENS_PER_STEP + 1):
            different = windows[begin[left[some]] + done] != windows[begin[right[some]] + done]
            where = different.argmax(axis=1)
            is_found = different[np.arange(len(some)), where]
            found = some[is_found]
            common[found] = np.minimum(common[found], done + where[is_found])
            undecided.append(some[~is_found & (common[some] > done + width)])
        pairs = np.concatenate(undecided)
        done += width
        width = min(2 * width, _MAX_WINDOW)
    return common


def _shared_prefixes(common: np.ndarray) -> np.ndarray:
    """[3, n] int64 nodes (end, first, last): each run of neighbours that share `end` tokens."""
    ends: list[int] = []
    firsts: list[int] = []
    lasts: list[int] = []
    stack = [(0, 0)]  # (LCP, first place in `order`) of the runs still open
    for last, lcp in enumerate([*common.tolist(), 0], start=1):
        first = last - 1
        while stack[-1][0] > lcp:
            open_lcp, first = stack.pop()
            ends.append(open_lcp)
            firsts.append(first)
            lasts.append(last)
        if stack[-1][0] < lcp:
            stack.append((lcp, first))
    return np.array([ends, firsts, lasts], dtype=np.int64)


def _drop_short(nodes: np.ndarray, min_tokens: int) -> np.ndarray:
    """Nodes at least `min_tokens` longer than the nearest one around them that stays."""
    kept: list[int] = []
    nodes = nodes[:, _preorder(nodes)]
    open_: list[tuple[int, int]] = []  # (end, last) of the nodes around the present one
    for index, (end, first, last) in enumerate(nodes.T.tolist()):
        while open_ and open_[-1][1] <= first:
            open_.pop()
        if end - (open_[-1][0] if open_ else 0) >= min_tokens:
            kept.append(index)
            open_.append((end, last))
    return nodes[:, kept]


def _preorder(nodes: np.ndarray) -> np.ndarray:
    """Indices that sort nodes (end, first, last) depth first, a rollout's own node last."""
    end, first, last = nodes
    return np.lexsort((end, -last, first))


def _link(nodes: np.ndarray, order: np.ndarray) -> PrefixForest:
    """Forest of preorder-sorted nodes that hold one for each rollout alone; empty ones go."""
    end, first, last = nodes
    parent = _parents(_subtree_ends(first, last))
    start = np.where(parent < 0, 0, end[parent])
    kept = end > start
    number = np.append(np.cumsum(kept) - 1, -1)
    own = np.searchsorted(first, np.arange(len(order)), side="right") - 1
    end_segment = np.empty(len(order), dtype=np.int64)
    end_segment[order] = number[np.where(kept[own], own, parent[own])]
    return PrefixForest(
        start=start[kept],
        end=end[kept],
        parent=number[parent[kept]],
        subtree_end=_subtree_ends(first[kept], last[kept]),
        first=first[kept],
        last=last[kept],
        order=order,
        end_segment=end_segment,
    )


def _subtree_ends(first: np.ndarray, last: np.ndarray) -> np.ndarray:
    """One past the last node below each node, in preorder."""
    return np.searchsorted(first, last)


def _parents(subtree_end: np.ndarray) -> np.ndarray:
    """Parent of each node in preorder, -1 for a root."""
    size = len(subtree_end)
    ids = np.arange(size)
    depth = ids - np.cumsum(np.bincount(subtree_end, minlength=size + 1))[:size]
    # The parent is the last node before it that lies one level higher.
    by_depth = np.argsort(depth, kind="stable")
    position = (depth * size + ids)[by_depth]
    below = by_depth[np.count_nonzero(depth == 0) :]
    parent = np.full(size, -1, dtype=np.int64)
    parent[below] = by_depth[np.searchsorted(position, (depth[below] - 1) * size + below) - 1]
    return parent
