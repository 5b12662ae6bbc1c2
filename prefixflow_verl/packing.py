"""Plan -> `PackLayout`: what one pack feeds to the model, attends to and predicts. Numpy only.

[Note: boundary predictions]
A prediction is (position, target token, temperature). Inside a segment every rollout has the same
target, but the last position of a shared segment predicts the first token of each child. So
predictions belong to segments, are kept once each, and every rollout gathers its log-probs along
its path. The gradient of a prediction is then the sum over all rollouts that use it.

[Note: runs]
In depth-first order a segment's first child follows it in the row, the first child of that comes
next, and so on. Such a run reads like one sequence, so it takes one causal attention over all of
it, and only what branches off later attends to its segments by parts of its own.

[Note: all packs in one row]
A batch may have a million segments, so tokens and segments are never looped over except to make
records. The rows of all packs are laid end to end and computed at once; a pack is a slice.

    passage  a rollout on its way through a segment; ordered by rollout, then root to leaf, so that
             passages tile the input tokens of all rollouts laid end to end
    lane     a segment with one of the temperatures of the rollouts through it
    slot     a row with one lane of its segment; a slot that some rollout wants is a scaled row

Sizes: S segments, R rollouts, E passages, L lanes, G rows of all packs, W wanted log-probs (a
shared one counts for each rollout).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from prefixflow_verl.forest import PrefixForest
from prefixflow_verl.plan import Plan

IN_PACK = -1
"""Value of `CrossPart.pack` for keys that lie in the same pack."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossPart:
    """Queries of a contiguous range attend, without a mask, to all keys of an ancestor range.

    ::

        keys      | ancestor k0..k1 |   other   | own segment |
        queries          .....                     q0..q1        every query sees every ancestor key
    """

    query_start: int
    query_end: int
    pack: int
    """Pack that holds the keys; `IN_PACK` for this one."""
    key_start: int
    key_end: int
    """Half-open range in that pack's row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A rollout whose last input token is in this pack, and where its log-probs come from."""

    rollout: int
    positions: np.ndarray
    """[n] int64. Positions whose next token is predicted, ascending."""
    sources: tuple[tuple[int, np.ndarray], ...]
    """(pack, [m] indices of its predictions) along the path; the m sum to n."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackLayout:
    """One packed row of T tokens."""

    token_ids: np.ndarray
    """[T] int64."""
    position_ids: np.ndarray
    """[T] int64. RoPE positions; rollouts start at 0."""
    self_parts: tuple[tuple[int, int], ...]
    """Row ranges with causal attention inside: one per run of segments."""
    cross_parts: tuple[CrossPart, ...]
    """Attention to ancestors. Together with `self_parts`: every query meets every earlier position
    once."""
    logit_rows: np.ndarray
    """[R] int64. Row positions on which the LM head runs, ascending; at least one."""
    scaled_rows: np.ndarray
    """[U] int64. Index into `logit_rows` of each distinct (row, temperature)."""
    row_temperatures: np.ndarray
    """[U] float64. Logits are divided by it."""
    prediction_rows: np.ndarray
    """[P] int64. Index into `scaled_rows` of each prediction."""
    targets: np.ndarray
    """[P] int64. Token ids."""
    completions: tuple[Completion, ...]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


class Packer:
    """Builds the `PackLayout` of every pack of a plan.

    Args:
        sequences: R integer arrays, prompt and response.
        predict: R bool arrays of `len(sequence) - 1`: entry p asks for the log-prob of token p + 1.
            None: all of them.
        temperatures: one value or R values; logits are divided by them. Must be positive.
    """

    def __init__(
        self,
        sequences: Sequence[np.ndarray],
        forest: PrefixForest,
        plan: Plan,
        *,
        predict: Sequence[np.ndarray] | None = None,
        temperatures: float | Sequence[float] = 1.0,
    ) -> None:
        if predict is not None:
            _check_predict(sequences, predict)
        given = np.asarray(temperatures, dtype=np.float64)
        if given.shape not in ((), (len(sequences),)):
            raise ValueError(
                f"temperatures have shape {given.shape}: give one value or {len(sequences)}"
            )
        if len(sequences) and not (given > 0).all():
            raise ValueError(f"temperatures must be positive, got {given.min()}")
        self._temperatures, self._temperature_of = np.unique(
            np.broadcast_to(given, (len(sequences),)), return_inverse=True
        )
        self._forest = forest
        self._pack_of = plan.pack_of
        self._tokens = np.concatenate([np.zeros(0), *sequences], dtype=np.int64, casting="unsafe")
        num_inputs = np.array([len(sequence) - 1 for sequence in sequences], dtype=np.int64)
        self._input_begin = _starts(num_inputs)
        # [W] int64: indices into the input tokens of all rollouts laid end to end.
        self._wanted = (
            np.arange(num_inputs.sum())
            if predict is None
            else np.flatnonzero(np.concatenate([np.zeros(0, dtype=bool), *predict]))
        )
        self._set_passages()
        # Segments in row order: by pack, then preorder.
        self._by_row = np.argsort(plan.pack_of, kind="stable")
        # [S] int64: row of each segment's first token.
        self._row = np.empty(forest.num_segments, dtype=np.int64)
        self._row[self._by_row] = _starts(forest.lengths[self._by_row])
        # [number of packs + 1] int64: each pack's slice of `_by_row` and of the rows.
        num_segments = np.bincount(plan.pack_of, minlength=len(plan.packs))
        self._pack_segment = np.append(0, np.cumsum(num_segments))
        rows = np.append(self._row[self._by_row], forest.executed_tokens)
        self._pack_row = rows[self._pack_segment]

    @cached_property
    def layouts(self) -> list[PackLayout]:
        """One layout per pack, in the order of `plan.packs`. Arrays are views of common ones."""
        token_ids, position_ids = self._inputs()
        self_parts = self._self_parts()
        cross_parts = self._cross_parts()
        predictions = self._predict(token_ids)
        is_new_row = _differs_from_last(predictions.row)
        logit_rows = predictions.row[is_new_row]
        scaled_rows = np.cumsum(is_new_row) - 1
        logit_begin = np.searchsorted(logit_rows, self._pack_row)
        scaled_begin = np.searchsorted(predictions.row, self._pack_row)
        prediction_begin = np.searchsorted(predictions.scaled_row, scaled_begin)
        completions = self._completions(predictions, prediction_begin)
        row_temperatures = self._temperatures[predictions.temperature]
        slices = zip(
            *(
                [slice(*bounds) for bounds in pairwise(begin.tolist())]
                for begin in (self._pack_row, logit_begin, scaled_begin, prediction_begin)
            ),
            strict=True,
        )
        layouts = []
        for pack, (rows, logits, scaled, predicted) in enumerate(slices):
            layouts.append(
                PackLayout(
                    token_ids=token_ids[rows],
                    position_ids=position_ids[rows],
                    self_parts=self_parts[pack],
                    cross_parts=cross_parts[pack],
                    # The forward's own output must be there for the delayed backward: at least
                    # one row.
                    logit_rows=logit_rows[logits] - rows.start
                    if logits.stop > logits.start
                    else np.array([rows.stop - rows.start - 1]),
                    scaled_rows=scaled_rows[scaled] - logits.start,
                    row_temperatures=row_temperatures[scaled],
                    prediction_rows=predictions.scaled_row[predicted] - scaled.start,
                    targets=predictions.target[predicted],
                    completions=completions[pack],
                )
            )
        return layouts

    def _set_passages(self) -> None:
        """Segment and rollout of each passage, and which wanted log-probs lie on it."""
        forest = self._forest
        num_through = forest.last - forest.first
        segment = np.repeat(np.arange(forest.num_segments), num_through)
        place = np.arange(len(segment)) + np.repeat(
            forest.first - _starts(num_through), num_through
        )
        rollout = forest.order[place]
        by_rollout = np.argsort(rollout, kind="stable")
        self._segment = segment[by_rollout]
        self._rollout = rollout[by_rollout]
        # [E + 1] int64: passages as slices of the input tokens, and of `_wanted`.
        self._passage_begin = np.append(0, np.cumsum(forest.lengths[self._segment]))
        self._wanted_begin = np.searchsorted(self._wanted, self._passage_begin)

    def _inputs(self) -> tuple[np.ndarray, np.ndarray]:
        """[G] int64 each: token ids and positions of all rows."""
        forest, by_row = self._forest, self._by_row
        lengths = forest.lengths[by_row]
        position_ids = np.arange(forest.executed_tokens)
        position_ids += np.repeat((forest.start - self._row)[by_row], lengths)
        owner = forest.order[forest.first[by_row]]
        # Each rollout before the owner has one token more than inputs.
        begin = self._input_begin[owner] + owner
        return self._tokens[position_ids + np.repeat(begin, lengths)], position_ids

    def _run_bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """[S] bool in row order: begins a run. [S] int64: row behind the run of each segment.

        See [Note: runs].
        """
        by_row, pack = self._by_row, self._pack_of[self._by_row]
        begins = np.ones(len(by_row), dtype=bool)
        begins[1:] = (self._forest.parent[by_row[1:]] != by_row[:-1]) | (pack[1:] != pack[:-1])
        first = np.flatnonzero(begins)
        last = by_row[np.append(first[1:], len(by_row)) - 1] if len(first) else first
        run_end = np.empty(len(by_row), dtype=np.int64)
        run_end[by_row] = (self._row + self._forest.lengths)[last][np.cumsum(begins) - 1]
        return begins, run_end

    def _self_parts(self) -> list[tuple[tuple[int, int], ...]]:
        """Per pack: row range of each run of segments."""
        begins, run_end = self._run_bounds()
        first = self._by_row[begins]
        start = self._pack_row[self._pack_of[first]]
        begin, end = self._row[first] - start, run_end[first] - start
        parts = list(zip(begin.tolist(), end.tolist(), strict=True))
        bounds = np.append(0, np.cumsum(begins))[self._pack_segment]
        return [tuple(parts[a:b]) for a, b in pairwise(bounds.tolist())]

    def _cross_parts(self) -> list[tuple[CrossPart, ...]]:
        """Per pack: every ancestor range that its queries read, adjacent ranges of one path
        merged."""
        forest, pack_of, by_row = self._forest, self._pack_of, self._by_row
        num_segments, num_packs = forest.num_segments, len(self._pack_row) - 1
        # Pairs (pack, ancestor of a segment in it), each as the number pack * S + ancestor.
        below = np.flatnonzero(forest.parent >= 0)
        pairs = np.unique(pack_of[below] * num_segments + forest.parent[below])
        found = [pairs]
        while len(pairs):
            pack, ancestor = np.divmod(pairs, num_segments)
            # What lies above an ancestor in the same pack is among the first pairs.
            above = np.where(pack_of[ancestor] == pack, -1, forest.parent[ancestor])
            pairs = np.unique((pack * num_segments + above)[above >= 0])
            found.append(pairs)
        pack, ancestor = np.divmod(np.unique(np.concatenate(found)), max(num_segments, 1))
        # Preorder keeps the segments below an ancestor contiguous in the row.
        in_row = pack_of[by_row] * num_segments + by_row
        first = by_row[np.searchsorted(in_row, pack * num_segments + ancestor + 1)]
        end = pack * num_segments + forest.subtree_end[ancestor]
        last = by_row[np.searchsorted(in_row, end) - 1]
        source = pack_of[ancestor]
        # A run's own queries are met by its causal part.
        _, run_end = self._run_bounds()
        query_begin = np.where(source == pack, run_end[ancestor], self._row[first])
        query_start = query_begin - self._pack_row[pack]
        query_end = self._row[last] + forest.lengths[last] - self._pack_row[pack]
        key_start = self._row[ancestor] - self._pack_row[source]
        key_end = key_start + forest.lengths[ancestor]
        is_read = query_start < query_end
        pack, source, query_start, query_end, key_start, key_end = (
            column[is_read] for column in (pack, source, query_start, query_end, key_start, key_end)
        )
        starts_part = _differs_from_last(pack, query_start, query_end, source)
        starts_part[1:] |= key_start[1:] != key_end[:-1]
        ends_part = np.roll(starts_part, -1)
        columns = (
            query_start[starts_part],
            query_end[starts_part],
            np.where(source == pack, IN_PACK, source)[starts_part],
            key_start[starts_part],
            key_end[ends_part],
        )
        parts = [
            CrossPart(query_start=q0, query_end=q1, pack=keys_of, key_start=k0, key_end=k1)
            for q0, q1, keys_of, k0, k1 in zip(*(c.tolist() for c in columns), strict=True)
        ]
        bounds = np.searchsorted(pack[starts_part], np.arange(num_packs + 1)).tolist()
        return [tuple(parts[a:b]) for a, b in pairwise(bounds)]

    def _predict(self, token_ids: np.ndarray) -> _Predictions:
        """Distinct predictions and scaled rows of all packs, whose tokens are `token_ids`."""
        forest, by_row, segment = self._forest, self._by_row, self._segment
        num_temperatures = max(len(self._temperatures), 1)
        lanes, lane = np.unique(
            segment * num_temperatures + self._temperature_of[self._rollout], return_inverse=True
        )
        num_lanes = np.bincount(lanes // num_temperatures, minlength=forest.num_segments)
        first_lane = _starts(num_lanes)
        num_slots = (forest.lengths * num_lanes)[by_row]
        first_slot = np.empty(forest.num_segments, dtype=np.int64)
        first_slot[by_row] = _starts(num_slots)

        # The slot of each wanted log-prob.
        num_wanted = np.diff(self._wanted_begin)
        stride = num_lanes[segment]
        end = self._passage_begin[1:]
        base = first_slot[segment] + lane - first_lane[segment]
        slot = np.repeat(stride, num_wanted)
        slot *= self._wanted
        slot += np.repeat(base - stride * self._passage_begin[:-1], num_wanted)

        # Inside a segment a slot has one target: the next token. At its end there may be several.
        is_used = np.zeros(num_slots.sum(), dtype=bool)
        is_used[slot] = True
        num_targets = is_used.astype(np.int64)
        at_end = np.flatnonzero(num_wanted)
        at_end = at_end[self._wanted[self._wanted_begin[at_end + 1] - 1] == end[at_end] - 1]
        last = self._wanted_begin[at_end + 1] - 1
        # A rollout and each one before it have one token more than inputs.
        last_target = self._tokens[end[at_end] + self._rollout[at_end]]
        rank = _rank_in_group(slot[last], last_target)
        np.maximum.at(num_targets, slot[last], rank + 1)
        of_wanted = _starts(num_targets)[slot]
        of_wanted[last] += rank

        used = np.flatnonzero(is_used)
        num_targets = num_targets[used]
        bounds = np.append(first_slot[by_row], len(is_used))
        num_used = np.diff(np.searchsorted(used, bounds))
        offset, used_lane = np.divmod(
            used - np.repeat(first_slot[by_row], num_used), np.repeat(num_lanes[by_row], num_used)
        )
        used_lane += np.repeat(first_lane[by_row], num_used)
        row = offset + np.repeat(self._row[by_row], num_used)
        target = np.repeat(np.take(token_ids, row + 1, mode="clip"), num_targets)
        target[of_wanted[last]] = last_target
        return _Predictions(
            row=row,
            temperature=(lanes % num_temperatures)[used_lane],
            scaled_row=np.repeat(np.arange(len(used)), num_targets),
            target=target,
            of_wanted=of_wanted,
        )

    def _completions(
        self, predictions: _Predictions, prediction_begin: np.ndarray
    ) -> list[tuple[Completion, ...]]:
        """Per pack: rollouts that end in it, by segment and then id."""
        forest, pack_of = self._forest, self._pack_of
        num_wanted = np.diff(self._wanted_begin)
        input_begin = np.repeat(self._input_begin[self._rollout], num_wanted)
        positions = self._wanted - input_begin
        pack = pack_of[self._segment]
        indices = predictions.of_wanted - np.repeat(prediction_begin[pack], num_wanted)
        begin, pack = self._wanted_begin.tolist(), pack.tolist()
        num_passages = np.bincount(self._rollout, minlength=forest.num_rollouts)
        first_passage = np.append(0, np.cumsum(num_passages)).tolist()
        ends = forest.end_segment
        rollouts = np.flatnonzero(ends >= 0)
        rollouts = rollouts[np.argsort(self._row[ends[rollouts]], kind="stable")]
        completions = []
        for rollout in rollouts.tolist():
            first, end = first_passage[rollout], first_passage[rollout + 1]
            completions.append(
                Completion(
                    rollout=rollout,
                    positions=positions[begin[first] : begin[end]],
                    sources=tuple(
                        [
                            (pack[passage], indices[begin[passage] : begin[passage + 1]])
                            for passage in range(first, end)
                            if begin[passage] < begin[passage + 1]
                        ]
                    ),
                )
            )
        packs = np.arange(len(self._pack_row))
        bounds = np.searchsorted(pack_of[ends[rollouts]], packs).tolist()
        return [tuple(completions[a:b]) for a, b in pairwise(bounds)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Predictions:
    """Distinct predictions of all packs, see [Note: all packs in one row]. U scaled rows."""

    row: np.ndarray
    """[U] int64. Row of each distinct (row, temperature), ascending."""
    temperature: np.ndarray
    """[U] int64. Index of its temperature, ascending within a row."""
    scaled_row: np.ndarray
    """[P] int64. Scaled row of each prediction, ascending."""
    target: np.ndarray
    """[P] int64. Token ids, ascending within a scaled row."""
    of_wanted: np.ndarray
    """[W] int64. Prediction of each wanted log-prob."""


def _check_predict(sequences: Sequence[np.ndarray], predict: Sequence[np.ndarray]) -> None:
    if len(predict) != len(sequences):
        raise ValueError(f"{len(predict)} predict arrays for {len(sequences)} sequences")
    for index, (sequence, wanted) in enumerate(zip(sequences, predict, strict=True)):
        if len(wanted) != len(sequence) - 1:
            raise ValueError(
                f"predict[{index}] has {len(wanted)} entries for {len(sequence)} tokens: "
                f"give {len(sequence) - 1}, one per predicted token"
            )


def _starts(sizes: np.ndarray) -> np.ndarray:
    """Where each of the pieces of these sizes begins when they are laid end to end."""
    return np.cumsum(sizes) - sizes


def _differs_from_last(*columns: np.ndarray) -> np.ndarray:
    """True for the first entry and each that differs from the one before in some column."""
    differs = np.ones(len(columns[0]), dtype=bool)
    differs[1:] = False
    for column in columns:
        differs[1:] |= column[1:] != column[:-1]
    return differs


def _rank_in_group(group: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Rank of each value among the distinct values of its group, from 0."""
    order = np.lexsort((value, group))
    new_group = _differs_from_last(group[order])
    number = np.cumsum(_differs_from_last(group[order], value[order]))
    rank = np.empty(len(group), dtype=np.int64)
    rank[order] = number - np.maximum.accumulate(np.where(new_group, number, 0))
    return rank
