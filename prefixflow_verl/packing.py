"""Plan -> `PackLayout`: what one pack feeds to the model, attends to and predicts. Numpy only.

[Note: boundary predictions]
A prediction is (position, target token, temperature). Inside a segment every rollout has the same
target, but the last position of a shared segment predicts the first token of each child. So
predictions belong to segments, are kept once each, and every rollout gathers its log-probs along
its path. The gradient of a prediction is then the sum over all rollouts that use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

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
    """Row range of each segment: causal attention inside it."""
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
        self.sequences = sequences
        self.forest = forest
        self.plan = plan
        if predict is None:
            predict = [np.ones(len(sequence) - 1, dtype=bool) for sequence in sequences]
        if len(predict) != len(sequences):
            raise ValueError(f"{len(predict)} predict arrays for {len(sequences)} sequences")
        for index, (sequence, wanted) in enumerate(zip(sequences, predict, strict=True)):
            if len(wanted) != len(sequence) - 1:
                raise ValueError(
                    f"predict[{index}] has {len(wanted)} entries for {len(sequence)} tokens: "
                    f"give {len(sequence) - 1}, one per predicted token"
                )
        self.predict = predict
        given = np.asarray(temperatures, dtype=np.float64)
        if given.shape not in ((), (len(sequences),)):
            raise ValueError(
                f"temperatures have shape {given.shape}: give one value or {len(sequences)}"
            )
        self.temperatures = np.broadcast_to(given, (len(sequences),))
        if len(sequences) and not (self.temperatures > 0).all():
            raise ValueError(f"temperatures must be positive, got {self.temperatures.min()}")
        self._distinct_temperatures, self._temperature_index = np.unique(
            self.temperatures, return_inverse=True
        )
        self._row_start = np.zeros(forest.num_segments, dtype=np.int64)
        for pack in plan.packs:
            lengths = forest.lengths[list(pack.segments)]
            self._row_start[list(pack.segments)] = np.cumsum(lengths) - lengths
        self._ending: dict[int, list[int]] = {}
        for rollout, segment in enumerate(forest.end_segment.tolist()):
            self._ending.setdefault(segment, []).append(rollout)
        # (segment, rollout) -> positions and indices into the segment's predictions
        self._lookup: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}
        self._predictions: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        self._first_prediction = np.zeros(forest.num_segments, dtype=np.int64)

    @cached_property
    def layouts(self) -> list[PackLayout]:
        """One layout per pack, in the order of `plan.packs`."""
        for pack in self.plan.packs:
            count = 0
            for segment in pack.segments:
                self._first_prediction[segment] = count
                self._predictions[segment] = self._collect_predictions(segment)
                count += len(self._predictions[segment][0])
        return [self._build(index) for index in range(len(self.plan.packs))]

    def _collect_predictions(self, segment: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Distinct (position, target, temperature index) of `segment`; fills the lookup."""
        start, end = int(self.forest.start[segment]), int(self.forest.end[segment])
        rollouts = self.forest.rollouts_of(segment).tolist()
        found = []
        for rollout in rollouts:
            positions = start + np.flatnonzero(self.predict[rollout][start:end])
            targets = self.sequences[rollout][positions + 1].astype(np.int64)
            found.append((positions, targets, self._temperature_index[rollout]))
        if len(rollouts) == 1:
            positions, targets, temperature = found[0]
            self._lookup[segment, rollouts[0]] = positions, np.arange(len(positions))
            return positions, targets, np.full(len(positions), temperature)
        # One sortable key per prediction: position first, then temperature, then target.
        num_temperatures = len(self._distinct_temperatures)
        keys = np.concatenate(
            [
                (((positions - start) * num_temperatures + temperature) << 32) | targets
                for positions, targets, temperature in found
            ]
        )
        distinct, inverse = np.unique(keys, return_inverse=True)
        offset = 0
        for rollout, (positions, _, _) in zip(rollouts, found, strict=True):
            self._lookup[segment, rollout] = positions, inverse[offset : offset + len(positions)]
            offset += len(positions)
        row, target = distinct >> 32, distinct & 0xFFFFFFFF
        return start + row // num_temperatures, target, row % num_temperatures

    def _build(self, index: int) -> PackLayout:
        pack = self.plan.packs[index]
        forest = self.forest
        token_ids, position_ids, self_parts = [], [], []
        rows, targets, temperatures, completions = [], [], [], []
        for segment in pack.segments:
            start, end = int(forest.start[segment]), int(forest.end[segment])
            row = int(self._row_start[segment])
            token_ids.append(self.sequences[forest.owner(segment)][start:end].astype(np.int64))
            position_ids.append(np.arange(start, end))
            self_parts.append((row, row + end - start))
            positions, segment_targets, segment_temperatures = self._predictions[segment]
            rows.append(row + positions - start)
            targets.append(segment_targets)
            temperatures.append(segment_temperatures)
            completions += [self._complete(r) for r in self._ending.get(segment, ())]
        tokens = np.concatenate(token_ids)
        all_rows = np.concatenate(rows)
        num_temperatures = len(self._distinct_temperatures)
        # Predictions come in row order, within a row in temperature order.
        scaled, prediction_rows = _distinct_sorted(
            all_rows * num_temperatures + np.concatenate(temperatures)
        )
        if len(scaled):
            logit_rows, scaled_rows = _distinct_sorted(scaled // num_temperatures)
        else:
            # The forward's own output must be there for the delayed backward: keep one row.
            logit_rows, scaled_rows = np.array([len(tokens) - 1]), np.zeros(0, dtype=np.int64)
        return PackLayout(
            token_ids=tokens,
            position_ids=np.concatenate(position_ids),
            self_parts=tuple(self_parts),
            cross_parts=tuple(self._cross_parts(index)),
            logit_rows=logit_rows,
            scaled_rows=scaled_rows,
            row_temperatures=self._distinct_temperatures[scaled % num_temperatures],
            prediction_rows=prediction_rows,
            targets=np.concatenate(targets),
            completions=tuple(completions),
        )

    def _complete(self, rollout: int) -> Completion:
        positions, sources = [], []
        for segment in self.forest.path(int(self.forest.end_segment[rollout])):
            where, indices = self._lookup[segment, rollout]
            if len(where):
                positions.append(where)
                first = self._first_prediction[segment]
                sources.append((int(self.plan.pack_of[segment]), first + indices))
        return Completion(
            rollout=rollout,
            positions=np.concatenate(positions) if positions else np.zeros(0, dtype=np.int64),
            sources=tuple(sources),
        )

    def _cross_parts(self, index: int) -> list[CrossPart]:
        """Every ancestor range that queries of this pack read, adjacent ranges of one path
        merged."""
        forest, pack_of = self.forest, self.plan.pack_of
        ranges: dict[int, list[int]] = {}
        for segment in self.plan.packs[index].segments:
            row = int(self._row_start[segment])
            row_end = row + int(forest.end[segment] - forest.start[segment])
            for ancestor in forest.path(int(forest.parent[segment])):
                # Preorder keeps the segments below an ancestor contiguous in the row.
                ranges.setdefault(ancestor, [row, row_end])[1] = row_end
        parts: list[CrossPart] = []
        for ancestor, (query_start, query_end) in sorted(ranges.items()):
            key_start = int(self._row_start[ancestor])
            key_end = key_start + int(forest.end[ancestor] - forest.start[ancestor])
            pack = int(pack_of[ancestor])
            part = CrossPart(
                query_start=query_start,
                query_end=query_end,
                pack=IN_PACK if pack == index else pack,
                key_start=key_start,
                key_end=key_end,
            )
            last = parts[-1] if parts else None
            if (
                last is not None
                and (last.query_start, last.query_end, last.pack)
                == (part.query_start, part.query_end, part.pack)
                and last.key_end == part.key_start
            ):
                parts[-1] = CrossPart(
                    query_start=query_start,
                    query_end=query_end,
                    pack=part.pack,
                    key_start=last.key_start,
                    key_end=key_end,
                )
            else:
                parts.append(part)
        return parts


def _distinct_sorted(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Distinct entries of a non-decreasing array, and for each entry the index of its value."""
    is_new = np.ones(len(values), dtype=bool)
    is_new[1:] = values[1:] != values[:-1]
    return values[is_new], np.cumsum(is_new) - 1
