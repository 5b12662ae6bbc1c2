"""What a provenance ledger says: which policy fed which step, how far log-probs were off, and what
cannot be right.

`LedgerAnalysis` answers one question per method, over arrays; `make_report` asks all of them, and
the `Report` comes out as plain values for JSON or as tables of text for a terminal or a page.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from prefixflow_verl.ledger import Ledger
from prefixflow_verl.provenance import KINDS, PolicySpan, SpanKind

CLEAN, MIXED, MISSING, OBSERVATION = range(len(KINDS))

NUM_LAST_STEPS = 10
"""Steps in the table of steps; `--json` has all of them."""
NUM_FAULTS = 20
"""Faults in the table of faults; `--json` has all of them."""
NUM_CANDIDATES = 3
"""Uids that an ambiguous prefix is explained with."""


class QuestionError(ValueError):
    """The ledger holds no such step, version or uid; the message names the option."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgeCount:
    """Sampled tokens of one staleness; mixed ones are counted by their oldest version."""

    age: int
    """Versions."""
    num_clean_tokens: int
    num_mixed_tokens: int
    share: float
    """Of all sampled tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The whole ledger in numbers."""

    run_id: str | None
    num_launches: int
    num_superseded: int
    """Updates left out, see ledger.py [Note: launches]."""
    num_steps: int
    num_updates: int
    num_sequences: int
    num_trained_sequences: int
    """Those with a token in the loss after the rules."""
    num_response_tokens: int
    num_sampled_tokens: int
    """All response tokens of a sequence without a record count as sampled, and as missing."""
    num_mixed_tokens: int
    num_missing_tokens: int
    num_loss_tokens: int
    clean_fraction: float
    """Of sampled tokens; NaN without any. So are the next two."""
    mixed_fraction: float
    missing_fraction: float
    staleness: tuple[AgeCount, ...]
    """By age, ascending; ages that no token has are left out."""
    actions: dict[str, int]
    """Sequences by what the rules did to them."""
    reasons: dict[str, int]
    """Sequences by the rule they broke; one may break several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOrigin:
    """What one step was trained on."""

    step: int
    num_updates: int
    num_sequences: int
    num_sampled_tokens: int
    oldest_version: int | None
    """None if no version is known."""
    newest_version: int | None
    mean_staleness: float
    """Over sampled tokens of known version, each at its worst; NaN without any."""
    mixed_fraction: float
    missing_fraction: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What one policy version, or one mix of versions, gave to a step."""

    kind: SpanKind
    version_start: int | None
    version_end: int | None
    num_sampled_tokens: int
    num_sequences: int
    """With at least one of those tokens."""
    num_trained_sequences: int
    share: float
    """Of the step's sampled tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """What one policy version gave to one step."""

    step: int
    num_clean_tokens: int
    num_mixed_tokens: int
    """Tokens of a mix that the version may have had a part in."""
    num_sequences: int
    num_trained_sequences: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AgeMismatch:
    """Behaviour against old log-probs, over the sequences of one age; see provenance.Mismatch."""

    age: int | None
    """Staleness of the oldest sampled token; None if unknown."""
    num_sequences: int
    mean_k3: float
    """Weighted by sampled tokens."""
    worst_k3: float
    worst_max_ratio: float
    lowest_pearson: float
    """NaN where no sequence has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something a ledger must not hold."""

    kind: Literal["trained twice", "wrong version"]
    step: int
    uid: str
    session: int | None
    output: int | None
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """One sequence of a group, from its sampling to its update."""

    step: int
    trigger: int
    session: int | None
    output: int | None
    num_response_tokens: int
    num_loss_tokens: int
    spans: tuple[PolicySpan, ...] | None
    """None if it has no record."""
    mini_batches: tuple[int, ...] | None
    action: str
    reasons: tuple[str, ...]
    reward: float | None
    advantage_mean: float | None
    k3: float | None
    max_ratio: float | None
    pearson: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTable:
    """A table for people."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    """A sentence below it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything that was asked of a ledger."""

    summary: Summary
    steps: tuple[StepOrigin, ...]
    mismatch: tuple[AgeMismatch, ...]
    faults: tuple[Fault, ...]
    step: int | None = None
    sources: tuple[Source, ...] = ()
    """Of `step`."""
    version: int | None = None
    reach: tuple[Reach, ...] = ()
    """Of `version`."""
    uid: str | None = None
    lineage: tuple[Lineage, ...] = ()
    """Of `uid`."""

    def as_record(self) -> dict[str, Any]:
        """Plain values for JSON; what is not finite is None."""
        record = {
            "ok": not self.faults,
            "summary": self.summary,
            "steps": self.steps,
            "mismatch": self.mismatch,
            "faults": self.faults,
        }
        if self.step is not None:
            record["step"] = {"step": self.step, "sources": self.sources}
        if self.version is not None:
            record["version"] = {"version": self.version, "steps": self.reach}
        if self.uid is not None:
            record["group"] = {"uid": self.uid, "sequences": self.lineage}
        return _plain(record)

    def tables(self) -> list[TextTable]:
        """The same for people; what was asked by name comes last."""
        tables = [
            _summary_table(self.summary),
            _staleness_table(self.summary),
            _steps_table(self.steps),
            _mismatch_table(self.mismatch),
        ]
        if self.step is not None:
            tables.append(_sources_table(self.step, self.sources))
        if self.version is not None:
            tables.append(_reach_table(self.version, self.reach))
        if self.uid is not None:
            tables.append(lineage_table(self.uid, self.lineage))
        if self.faults:
            tables.append(_faults_table(self.faults))
        return tables


class LedgerAnalysis:
    """Answers questions about a ledger.

    Args:
        ledger: its table is turned into arrays once, here.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._table = ledger.table.combine_chunks()
        # [N] arrays over sequences.
        self._step = _floats(self._table, "step").astype(np.int64)
        self._trigger = _floats(self._table, "trigger").astype(np.int64)
        self._trainer_version = _floats(self._table, "trainer_version")
        self._is_trained = np.nan_to_num(_floats(self._table, "num_loss_tokens")) > 0
        self._has_record = ~self._table["spans"].is_null().to_numpy()
        # [S] arrays over the spans of all sequences.
        self._row, self._num_tokens, self._oldest, self._newest, self._kind = self._flat_spans()
        is_known = (self._kind == CLEAN) | (self._kind == MIXED)
        self._age = np.where(is_known, self._trainer_version[self._row] - self._oldest, np.nan)

    def summary(self) -> Summary:
        table = self._table
        num_clean, num_mixed, num_missing = (
            int(self._num_tokens[self._kind == kind].sum()) for kind in (CLEAN, MIXED, MISSING)
        )
        total = num_clean + num_mixed + num_missing
        launches = self._ledger.launches
        return Summary(
            run_id=launches[0].run_id if launches else None,
            num_launches=len(launches),
            num_superseded=self._ledger.num_superseded,
            num_steps=len(np.unique(self._step)),
            num_updates=len(np.unique(_pairs(self._step, self._trigger))),
            num_sequences=table.num_rows,
            num_trained_sequences=int(self._is_trained.sum()),
            num_response_tokens=_total(table, "num_response_tokens"),
            num_sampled_tokens=total,
            num_mixed_tokens=num_mixed,
            num_missing_tokens=num_missing,
            num_loss_tokens=_total(table, "num_loss_tokens"),
            clean_fraction=_share(num_clean, total),
            mixed_fraction=_share(num_mixed, total),
            missing_fraction=_share(num_missing, total),
            staleness=self._staleness(total),
            actions=_counts(table["action"]),
            reasons=_counts(pc.list_flatten(table["reasons"])),
        )

    def steps(self) -> tuple[StepOrigin, ...]:
        """In the order of training."""
        steps, step_of = np.unique(self._step, return_inverse=True)
        num_steps = len(steps)
        span_step = step_of[self._row]
        sampled, known = self._kind != OBSERVATION, ~np.isnan(self._age)

        def tokens(where: np.ndarray, weights: np.ndarray | float = 1.0) -> np.ndarray:
            values = np.where(where, self._num_tokens * weights, 0)
            return np.bincount(span_step, values, minlength=num_steps)

        _, first_rows = np.unique(_pairs(step_of, self._trigger), return_index=True)
        oldest = np.full(num_steps, np.nan)
        newest = np.full(num_steps, np.nan)
        np.fmin.at(oldest, span_step[known], self._oldest[known])
        np.fmax.at(newest, span_step[known], self._newest[known])
        num_sampled = tokens(sampled)
        totals = zip(
            steps.tolist(),
            np.bincount(step_of[first_rows], minlength=num_steps).tolist(),
            np.bincount(step_of, minlength=num_steps).tolist(),
            num_sampled.tolist(),
            oldest.tolist(),
            newest.tolist(),
            tokens(known, np.nan_to_num(self._age)).tolist(),
            tokens(known).tolist(),
            tokens(self._kind == MIXED).tolist(),
            tokens(self._kind == MISSING).tolist(),
            strict=True,
        )
        return tuple(
            StepOrigin(
                step=step,
                num_updates=num_updates,
                num_sequences=num_sequences,
                num_sampled_tokens=int(sampled_tokens),
                oldest_version=_integer(first),
                newest_version=_integer(last),
                mean_staleness=_share(age_sum, num_known),
                mixed_fraction=_share(mixed, sampled_tokens),
                missing_fraction=_share(missing, sampled_tokens),
            )
            for (
                step,
                num_updates,
                num_sequences,
                sampled_tokens,
                first,
                last,
                age_sum,
                num_known,
                mixed,
                missing,
            ) in totals
        )

    def staleness_by_step(self, max_age: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Steps [K], and name -> [K] share of each step's sampled tokens.

        Args:
            max_age: clean tokens of this age and older share a name.
        """
        steps, step_of = np.unique(self._step, return_inverse=True)
        span_step = step_of[self._row]

        def tokens(where: np.ndarray) -> np.ndarray:
            return np.bincount(span_step[where], self._num_tokens[where], minlength=len(steps))

        num_sampled = np.maximum(tokens(self._kind != OBSERVATION), 1)
        ages = np.clip(np.nan_to_num(self._age), 0, max_age)
        parts = {}
        for age in range(max_age + 1):
            name = f"age {age}" if age < max_age else f"age {age} or more"
            parts[name] = tokens((self._kind == CLEAN) & (ages == age)) / num_sampled
        parts["mixed"] = tokens(self._kind == MIXED) / num_sampled
        parts["missing"] = tokens(self._kind == MISSING) / num_sampled
        return steps, {name: share for name, share in parts.items() if share.any()}

    def sources(self, step: int) -> tuple[Source, ...]:
        """Which policy versions fed a step: clean ones, then mixed ones, then what is missing.

        Raises:
            QuestionError: the step is not in the ledger.
        """
        if not (self._step == step).any():
            held = f"{self._step.min()} to {self._step.max()}" if len(self._step) else "no step"
            raise QuestionError(f"--step={step} is not in the ledger, which holds {held}")
        spans = np.flatnonzero((self._step[self._row] == step) & (self._kind != OBSERVATION))
        # A missing span may know one of its versions; kinds are told apart first, so 0 is no clash.
        named = self._kind[spans] != MISSING
        origins = np.stack(
            [
                self._kind[spans],
                np.where(named, self._oldest[spans], 0),
                np.where(named, self._newest[spans], 0),
            ]
        ).astype(np.int64)
        origins, origin_of = np.unique(origins, axis=1, return_inverse=True)
        rows, num_tokens = self._row[spans], self._num_tokens[spans]
        total = int(num_tokens.sum())
        sources = []
        for index, (kind, start, end) in enumerate(origins.T.tolist()):
            own = origin_of.reshape(-1) == index
            num_own = int(num_tokens[own].sum())
            sources.append(
                Source(
                    kind=KINDS[kind],
                    version_start=start if kind != MISSING else None,
                    version_end=end if kind != MISSING else None,
                    num_sampled_tokens=num_own,
                    share=_share(num_own, total),
                    **self._num_sequences(rows[own]),
                )
            )
        return tuple(sources)

    def reach(self, version: int) -> tuple[Reach, ...]:
        """Which steps the rollouts of a policy version reached.

        Raises:
            QuestionError: no rollout is of that version.
        """
        clean = (self._kind == CLEAN) & (self._oldest == version)
        inside = (self._oldest <= version) & (self._newest >= version)
        mixed = (self._kind == MIXED) & inside
        steps = self._step[self._row]
        reached = np.unique(steps[clean | mixed])
        if not len(reached):
            known = self._oldest[~np.isnan(self._age)]
            held = f"versions {int(known.min())} to {int(known.max())}" if len(known) else "none"
            raise QuestionError(
                f"--version={version} sampled nothing in the ledger, which holds {held}"
            )
        found = []
        for step in reached.tolist():
            own = steps == step
            found.append(
                Reach(
                    step=step,
                    num_clean_tokens=int(self._num_tokens[own & clean].sum()),
                    num_mixed_tokens=int(self._num_tokens[own & mixed].sum()),
                    **self._num_sequences(self._row[own & (clean | mixed)]),
                )
            )
        return tuple(found)

    def mismatch(self) -> tuple[AgeMismatch, ...]:
        """By age, ascending, the unknown age last; ages without a measured sequence are left out.

        NaN counts as the worst there is, for k3 and for the ratio.
        """
        k3 = _floats(self._table, "k3")
        ratio, pearson = (_floats(self._table, name) for name in ("max_ratio", "pearson"))
        num_sampled = np.bincount(
            self._row,
            np.where(self._kind != OBSERVATION, self._num_tokens, 0),
            minlength=self._table.num_rows,
        )
        age_of = np.rint(_floats(self._table, "staleness_worst"))
        measured = self._table["k3"].is_valid().to_numpy()
        found = []
        for age in np.unique(age_of[measured]).tolist():
            own = measured & ((age_of == age) | (np.isnan(age_of) & np.isnan(age)))
            weights = np.maximum(num_sampled[own], 1)
            known = pearson[own][~np.isnan(pearson[own])]
            found.append(
                AgeMismatch(
                    age=_integer(age),
                    num_sequences=int(own.sum()),
                    mean_k3=float((k3[own] * weights).sum() / weights.sum()),
                    worst_k3=float(k3[own].max()),
                    worst_max_ratio=float(ratio[own].max()),
                    lowest_pearson=float(known.min()) if len(known) else math.nan,
                )
            )
        return tuple(found)

    def faults(self) -> tuple[Fault, ...]:
        """Everything that cannot be right, in the order of training.

        A sequence whose tokens were all taken out of the loss was consumed, but not trained.
        """
        faults = [*self._trained_twice(), *self._wrong_versions()]
        return tuple(sorted(faults, key=lambda fault: (fault.step, fault.sentence)))

    def resolve_uid(self, prefix: str) -> str:
        """The uid that is `prefix`, or the only one that begins with it.

        Raises:
            QuestionError: there is none, or more than one.
        """
        uids = pc.unique(self._table["uid"]).drop_null().to_pylist()
        if prefix in uids:
            return prefix
        found = sorted(uid for uid in uids if uid.startswith(prefix))
        if not found:
            raise QuestionError(f"--uid={prefix} is not in the ledger, nor begins a uid of it")
        if len(found) > 1:
            some = ", ".join(found[:NUM_CANDIDATES])
            rest = ", ..." if len(found) > NUM_CANDIDATES else ""
            raise QuestionError(f"--uid={prefix} begins {len(found)} uids ({some}{rest}): say more")
        return found[0]

    def lineage(self, uid: str) -> tuple[Lineage, ...]:
        """The sequences of a group, in the order of training, then by session and output."""
        rows = self._table.filter(pc.equal(self._table["uid"], uid)).to_pylist()
        copied = ("step", "trigger", "session", "output", "num_response_tokens", "num_loss_tokens")
        copied += ("action", "reward", "advantage_mean", "k3", "max_ratio", "pearson")
        found = []
        for row in rows:
            spans, mini_batches = row["spans"], row["mini_batches"]
            found.append(
                Lineage(
                    spans=None if spans is None else tuple(PolicySpan(**span) for span in spans),
                    mini_batches=None if mini_batches is None else tuple(mini_batches),
                    reasons=tuple(row["reasons"] or ()),
                    **{name: row[name] for name in copied},
                )
            )
        return tuple(
            sorted(found, key=lambda s: (s.step, s.trigger, s.session or 0, s.output or 0))
        )

    def group_of_most_versions(self) -> str | None:
        """Uid of the group with the most different policy versions, the first trained among equals;
        None for an empty ledger."""
        if not self._table.num_rows:
            return None
        uids = self._table["uid"].combine_chunks().dictionary_encode()
        codes = uids.indices.to_numpy(zero_copy_only=False)[self._row]
        codes, versions = np.tile(codes, 2), np.concatenate([self._oldest, self._newest])
        codes, versions = codes[~np.isnan(versions)], versions[~np.isnan(versions)]
        _, first = np.unique(_pairs(codes, versions), return_index=True)
        counts = np.bincount(codes[first], minlength=len(uids.dictionary))
        return uids.dictionary[int(counts.argmax())].as_py()

    def _flat_spans(self) -> tuple[np.ndarray, ...]:
        """Row, tokens, oldest and newest version (NaN if unknown) and kind of every span.

        A sequence without a record counts as one missing span.
        """
        spans = self._table["spans"].combine_chunks()
        flat = pc.list_flatten(spans)
        row = pc.list_parent_indices(spans).to_numpy(zero_copy_only=False)
        num_tokens, oldest, newest, is_sampled = (
            _array_floats(pc.struct_field(flat, name))
            for name in ("num_tokens", "version_start", "version_end", "is_sampled")
        )
        kind = np.select(
            [is_sampled == 0, np.isnan(oldest) | np.isnan(newest), oldest == newest],
            [OBSERVATION, MISSING, CLEAN],
            MIXED,
        )
        without = np.flatnonzero(~self._has_record)
        unknown = np.full(len(without), np.nan)
        lengths = np.nan_to_num(_floats(self._table, "num_response_tokens"))[without]
        return (
            np.concatenate([row, without]).astype(np.int64),
            np.concatenate([num_tokens, lengths]).astype(np.int64),
            np.concatenate([oldest, unknown]),
            np.concatenate([newest, unknown]),
            np.concatenate([kind, np.full(len(without), MISSING)]).astype(np.int8),
        )

    def _staleness(self, num_sampled: int) -> tuple[AgeCount, ...]:
        known = ~np.isnan(self._age) & ((self._kind == CLEAN) | (self._kind == MIXED))
        ages, age_of = np.unique(self._age[known], return_inverse=True)
        kinds, num_tokens = self._kind[known], self._num_tokens[known]
        clean, mixed = (
            np.bincount(age_of, np.where(kinds == kind, num_tokens, 0), minlength=len(ages))
            for kind in (CLEAN, MIXED)
        )
        return tuple(
            AgeCount(
                age=int(age),
                num_clean_tokens=int(num_clean),
                num_mixed_tokens=int(num_mixed),
                share=_share(num_clean + num_mixed, num_sampled),
            )
            for age, num_clean, num_mixed in zip(ages, clean, mixed, strict=True)
        )

    def _num_sequences(self, rows: np.ndarray) -> dict[str, int]:
        """Counts of the sequences that `rows` names, once or more often."""
        rows = np.unique(rows)
        return {
            "num_sequences": len(rows),
            "num_trained_sequences": int(self._is_trained[rows].sum()),
        }

    def _trained_twice(self) -> Iterable[Fault]:
        trained = pa.array(self._is_trained)
        names = ["uid", "session", "output", "digest"]
        sequences = (
            self._table.select(names)
            .append_column("row", pa.array(np.arange(self._table.num_rows)))
            .filter(trained)
            .group_by(names, use_threads=False)
            .aggregate([("row", "list")])
        )
        num_rows = pc.list_value_length(sequences["row_list"])
        for rows in sequences["row_list"].filter(pc.greater(num_rows, 1)).to_pylist():
            updates = [self._update_name(row) for row in rows]
            distinct = list(dict.fromkeys(updates))
            for update in distinct:
                if updates.count(update) > 1:
                    row = rows[updates.index(update)]
                    yield self._fault(
                        "trained twice",
                        row,
                        f"stands {updates.count(update)} times in the update of {update}",
                    )
            if len(distinct) > 1:
                yield self._fault(
                    "trained twice",
                    rows[0],
                    f"was trained in {len(distinct)} updates: {_listed(distinct)}",
                )
        yield from self._listed_too_often()

    def _listed_too_often(self) -> Iterable[Fault]:
        """Sequences that more mini-batches consumed than there are epochs, or one twice."""
        lists = self._table["mini_batches"].combine_chunks()
        length = _array_floats(pc.list_value_length(lists))
        num_epochs = _floats(self._table, "num_epochs")
        for row in np.flatnonzero(self._is_trained & (length > num_epochs)).tolist():
            listed = ", ".join(str(number) for number in lists[row].as_py())
            yield self._fault(
                "trained twice",
                row,
                f"was consumed by {int(length[row])} mini-batches ({listed}) of "
                f"{self._update_name(row)}, ppo_epochs is {int(num_epochs[row])}",
            )
        parents = pc.list_parent_indices(lists).to_numpy(zero_copy_only=False)
        numbers = pc.list_flatten(lists).to_numpy(zero_copy_only=False)
        _, first, counts = np.unique(
            _pairs(parents, numbers), return_index=True, return_counts=True
        )
        repeated = first[counts > 1]
        for row, number in zip(parents[repeated], numbers[repeated], strict=True):
            # Beyond num_epochs it has been said above.
            if self._is_trained[row] and not length[row] > num_epochs[row]:
                yield self._fault(
                    "trained twice",
                    row,
                    f"stands more than once in mini-batch {number} of {self._update_name(row)}",
                )

    def _wrong_versions(self) -> Iterable[Fault]:
        trainer_version = self._trainer_version[self._row]
        first = {}
        for wrong, what in (
            (self._newest > trainer_version, "of version {newest}, from after its trainer's"),
            (self._oldest > trainer_version, "of version {oldest}, from after its trainer's"),
            (self._oldest < 0, "of version {oldest}, which cannot be"),
            (self._newest < 0, "of version {newest}, which cannot be"),
            (self._oldest > self._newest, "of versions {oldest} to {newest}, which is backwards"),
        ):
            for span in np.flatnonzero(wrong).tolist():
                first.setdefault(int(self._row[span]), (span, what))
        for row, (span, what) in first.items():
            versions = {"oldest": self._oldest[span], "newest": self._newest[span]}
            said = what.format(**{name: _integer(value) for name, value in versions.items()})
            yield self._fault(
                "wrong version",
                row,
                f"has tokens {said} (trainer version {_integer(self._trainer_version[row])}, "
                f"{self._update_name(row)})",
            )
        for row in np.flatnonzero(self._differ(self._trainer_version, self._step - 1)).tolist():
            yield self._fault(
                "wrong version",
                row,
                f"says that {self._update_name(row)} started from version "
                f"{int(self._trainer_version[row])}, not {self._step[row] - 1}",
            )
        old_step = _floats(self._table, "old_log_prob_step")
        for row in np.flatnonzero(self._differ(old_step, self._step)).tolist():
            yield self._fault(
                "wrong version",
                row,
                f"was trained in {self._update_name(row)} against old log-probs of step "
                f"{int(old_step[row])}",
            )
        yield from self._wrong_sums()

    def _wrong_sums(self) -> Iterable[Fault]:
        """Records whose spans are not as long as their response, or its sampled part."""
        for where, column, said in (
            (True, "num_response_tokens", "cover {found} tokens, its response has {expected}"),
            (
                self._kind != OBSERVATION,
                "num_sampled_tokens",
                "cover {found} sampled tokens, the ledger counts {expected}",
            ),
        ):
            tokens = np.where(where, self._num_tokens, 0)
            found = np.bincount(self._row, tokens, minlength=self._table.num_rows)
            expected = _floats(self._table, column)
            for row in np.flatnonzero(self._has_record & self._differ(expected, found)).tolist():
                what = said.format(found=int(found[row]), expected=int(expected[row]))
                yield self._fault(
                    "wrong version", row, f"has spans that {what} ({self._update_name(row)})"
                )

    @staticmethod
    def _differ(known: np.ndarray, expected: np.ndarray) -> np.ndarray:
        """[N] bool; False where `known` is NaN."""
        return ~np.isnan(known) & (known != expected)

    def _update_name(self, row: int) -> str:
        trigger = f", update {self._trigger[row]}" if self._trigger[row] else ""
        return f"step {self._step[row]}{trigger}"

    def _fault(self, kind: Literal["trained twice", "wrong version"], row: int, what: str) -> Fault:
        uid, session, output = (
            self._table[name][row].as_py() for name in ("uid", "session", "output")
        )
        return Fault(
            kind=kind,
            step=int(self._step[row]),
            uid=uid,
            session=session,
            output=output,
            sentence=f"{uid}_{session}_{output} {what}",
        )


def make_report(
    analysis: LedgerAnalysis,
    *,
    step: int | None = None,
    version: int | None = None,
    uid: str | None = None,
) -> Report:
    """Everything there is to say, and what is asked by name.

    Args:
        step: whose sources are asked for.
        version: whose reach is asked for.
        uid: whose lineage is asked for; the beginning of it is enough.

    Raises:
        QuestionError: the ledger holds no such step, version or uid.
    """
    uid = None if uid is None else analysis.resolve_uid(uid)
    return Report(
        step=step,
        sources=() if step is None else analysis.sources(step),
        version=version,
        reach=() if version is None else analysis.reach(version),
        uid=uid,
        lineage=() if uid is None else analysis.lineage(uid),
        summary=analysis.summary(),
        steps=analysis.steps(),
        mismatch=analysis.mismatch(),
        faults=analysis.faults(),
    )


def lineage_table(uid: str, lineage: Sequence[Lineage]) -> TextTable:
    """One row per sequence of a group."""
    return TextTable(
        title=f"group {uid}",
        columns=(
            "step",
            "sequence",
            "sampled by",
            "batches",
            "rules",
            "reward",
            "advantage",
            "k3",
            "ratio",
        ),
        rows=tuple(
            (
                str(sequence.step) + (f", update {sequence.trigger}" if sequence.trigger else ""),
                f"{_text(sequence.session)}, {_text(sequence.output)}",
                _spans_text(sequence.spans),
                ", ".join(map(str, sequence.mini_batches or ())) or "-",
                " ".join((sequence.action or "-", *sequence.reasons)),
                _number(sequence.reward),
                _number(sequence.advantage_mean),
                _number(sequence.k3),
                _number(sequence.max_ratio),
            )
            for sequence in lineage
        ),
        note="sequence: session, output; batches: mini-batches that consumed it; 12 @3: twelve "
        "tokens by version 3; @3-4: sampled while 3 became 4",
    )


def version_name(start: int | None, end: int | None) -> str:
    """`3`, `3-4` for a mix, `unknown`."""
    if start is None or end is None:
        return "unknown"
    return str(start) if start == end else f"{start}-{end}"


def _summary_table(summary: Summary) -> TextTable:
    superseded = summary.num_superseded
    rows = (
        ("run", summary.run_id or "-"),
        ("launches", str(summary.num_launches)),
        ("steps", str(summary.num_steps)),
        ("updates", str(summary.num_updates)),
        ("updates trained again after a resume, left out", str(superseded)),
        ("sequences", str(summary.num_sequences)),
        ("sequences in the loss", str(summary.num_trained_sequences)),
        ("response tokens", str(summary.num_response_tokens)),
        ("sampled tokens", str(summary.num_sampled_tokens)),
        ("loss tokens", str(summary.num_loss_tokens)),
        *((f"sequences, rules: {name}", str(n)) for name, n in summary.actions.items()),
        *((f"sequences found {name}", str(n)) for name, n in summary.reasons.items()),
    )
    return TextTable(title="summary", columns=("", "total"), rows=rows)


def _staleness_table(summary: Summary) -> TextTable:
    rows = [
        (str(found.age), str(found.num_clean_tokens), str(found.num_mixed_tokens), found.share)
        for found in summary.staleness
    ]
    rows.append(("unknown", f"{summary.num_missing_tokens} missing", "", summary.missing_fraction))
    return TextTable(
        title="staleness of sampled tokens",
        columns=("versions behind", "clean tokens", "mixed tokens", "share"),
        rows=tuple((*numbers, _percent(share)) for *numbers, share in rows),
        note=f"mixed: {_percent(summary.mixed_fraction)}, counted by the oldest version",
    )


def _steps_table(steps: Sequence[StepOrigin]) -> TextTable:
    left_out = max(len(steps) - NUM_LAST_STEPS, 0)
    return TextTable(
        title="which versions fed which step",
        columns=("step", "updates", "sequences", "versions", "mean age", "mixed", "missing"),
        rows=tuple(
            (
                str(origin.step),
                str(origin.num_updates),
                str(origin.num_sequences),
                version_name(origin.oldest_version, origin.newest_version),
                _number(origin.mean_staleness),
                _percent(origin.mixed_fraction),
                _percent(origin.missing_fraction),
            )
            for origin in steps[left_out:]
        ),
        note=f"{left_out} earlier steps are not shown; --json has all" if left_out else "",
    )


def _mismatch_table(mismatch: Sequence[AgeMismatch]) -> TextTable:
    return TextTable(
        title="log-probs of the rollout engine against the trainer's, by age",
        columns=("age", "sequences", "k3, mean", "k3, worst", "worst max ratio", "lowest pearson"),
        rows=tuple(
            (
                "unknown" if found.age is None else str(found.age),
                str(found.num_sequences),
                _number(found.mean_k3),
                _number(found.worst_k3),
                _number(found.worst_max_ratio),
                _number(found.lowest_pearson),
            )
            for found in mismatch
        ),
        note="age of a sequence: versions that its oldest sampled token is behind the trainer",
    )


def _sources_table(step: int, sources: Sequence[Source]) -> TextTable:
    return TextTable(
        title=f"versions that fed step {step}",
        columns=("version", "", "sampled tokens", "share", "sequences", "in the loss"),
        rows=tuple(
            (
                version_name(source.version_start, source.version_end),
                source.kind,
                str(source.num_sampled_tokens),
                _percent(source.share),
                str(source.num_sequences),
                str(source.num_trained_sequences),
            )
            for source in sources
        ),
    )


def _reach_table(version: int, reach: Sequence[Reach]) -> TextTable:
    return TextTable(
        title=f"steps that version {version} reached",
        columns=("step", "clean tokens", "mixed tokens", "sequences", "in the loss"),
        rows=tuple(
            (
                str(found.step),
                str(found.num_clean_tokens),
                str(found.num_mixed_tokens),
                str(found.num_sequences),
                str(found.num_trained_sequences),
            )
            for found in reach
        ),
    )


def _faults_table(faults: Sequence[Fault]) -> TextTable:
    left_out = len(faults) - NUM_FAULTS
    return TextTable(
        title=f"faults: {len(faults)}",
        columns=("fault", "found"),
        rows=tuple((fault.kind, fault.sentence) for fault in faults[:NUM_FAULTS]),
        note=f"{left_out} more are not shown; --json has all" if left_out > 0 else "",
    )


def _spans_text(spans: Sequence[PolicySpan] | None) -> str:
    if spans is None:
        return "no record"
    return ", ".join(
        f"{span.num_tokens} observed"
        if not span.is_sampled
        else f"{span.num_tokens} @{version_name(span.version_start, span.version_end)}"
        for span in spans
    )


def _floats(table: pa.Table, name: str) -> np.ndarray:
    """[N] float64, NaN for null."""
    return table[name].cast(pa.float64(), safe=False).to_numpy()


def _array_floats(array: pa.Array) -> np.ndarray:
    """The same of an array."""
    numbers = array.cast(pa.int8()) if pa.types.is_boolean(array.type) else array
    return numbers.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)


def _pairs(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """[N] int64 numbers of the pairs of two [N] arrays of integers, equal where both are."""
    if not len(second):
        return np.zeros(0, dtype=np.int64)
    second = second.astype(np.int64) - int(second.min())
    return first.astype(np.int64) * (int(second.max()) + 1) + second


def _total(table: pa.Table, name: str) -> int:
    return pc.sum(table[name]).as_py() or 0


def _counts(column: pa.ChunkedArray) -> dict[str, int]:
    """How often each value stands in it, the most frequent first."""
    counts = {found["values"]: found["counts"] for found in pc.value_counts(column).to_pylist()}
    counts.pop(None, None)
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _share(part: float, whole: float) -> float:
    return float(part / whole) if whole else math.nan


def _integer(value: float) -> int | None:
    return None if math.isnan(value) else int(value)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:-1]) + f" and {names[-1]}"


def _text(value: int | None) -> str:
    return "-" if value is None else str(value)


def _number(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.3g}"


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{100 * share:.1f} %"


def _plain(value: Any) -> Any:
    """`value` as JSON has it: dataclasses as objects, what is not finite as null."""
    if is_dataclass(value):
        return _plain(asdict(value))
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
