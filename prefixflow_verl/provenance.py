"""Which policy version sampled each token of a response, and whether it may still be trained on.

[Note: versions]
A *version* names one set of weights: the trainer step after which they were sent to the rollout
engine, 0 for the initial ones. It is the number that verl passes to `update_weights`, not the step
at which a prompt was submitted. The *trainer version* at step k is k - 1: the weights the step
starts from. The *staleness* of a token is the trainer version minus the version that sampled it.

Sampled tokens are *clean* if one known version computed everything they depend on, *mixed* if
weights may have changed while they were sampled or under the keys they attended to, *missing* if
nothing is known. A mixed span has the oldest version involved as `version_start` and the newest as
`version_end`, and its staleness is counted from the oldest. Tokens that the policy did not sample
(tool results inside a response) are *observations* and have no version.

A response's spans cover it from its first token to its last. They travel in a `PolicyRecord`, which
names its sequence and carries a digest of its tokens, so that a record that got attached to another
row is found out.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal

import numpy as np

from prefixflow_verl.config import PROVENANCE_PATH, ProvenanceOptions

SpanKind = Literal["clean", "mixed", "missing", "observation"]
KINDS: tuple[SpanKind, ...] = ("clean", "mixed", "missing", "observation")

RECORD_KEY = "policy_record"
"""Where a record stands in verl's per-row `extra_fields`."""

SPANS_KEY = "policy_spans"
"""Where a request's spans stand in `TokenOutput.extra_fields` of verl's rollout server."""

MAX_VERSION = 2**31 - 1
"""Versions are trainer steps; a larger number is none."""

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this before exp, as verl's own KL estimator does."""


class ProvenanceError(ValueError):
    """A record contradicts its row, or a rule with `error` found tokens it forbids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySpan:
    """A run of response tokens with the same origin.

    Example:
        # 12 tokens by version 3, then 4 sampled while version 4 was being loaded
        PolicySpan(num_tokens=12, version_start=3, version_end=3)
        PolicySpan(num_tokens=4, version_start=3, version_end=4)
    """

    num_tokens: int
    """1 or more."""
    version_start: int | None = None
    """Oldest version that may have had a part in it; None if unknown, or not sampled."""
    version_end: int | None = None
    """Newest version that may have had a part in it; None if unknown, or not sampled."""
    is_sampled: bool = True
    """False for observations."""

    @property
    def kind(self) -> SpanKind:
        if not self.is_sampled:
            return "observation"
        if self.version_start is None or self.version_end is None:
            return "missing"
        return "clean" if self.version_start == self.version_end else "mixed"


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRecord:
    """Origin of one response."""

    uid: str
    """verl's id of the prompt, shared by the group."""
    session: int
    """Which of the prompt's rollouts."""
    output: int
    """Which of the rollout's training sequences; 0 unless an agent returns several."""
    digest: int
    """`digest_tokens` of the response."""
    spans: tuple[PolicySpan, ...]
    """Cover the response without a gap."""

    @property
    def key(self) -> str:
        """Name of the sequence, the same as its key in verl's TransferQueue."""
        return f"{self.uid}_{self.session}_{self.output}"

    @property
    def num_tokens(self) -> int:
        return sum(span.num_tokens for span in self.spans)

    def to_wire(self) -> dict[str, Any]:
        """Plain Python values, for a field of verl's rows; `from_wire` reads it."""
        return {
            "uid": self.uid,
            "session": self.session,
            "output": self.output,
            "digest": self.digest,
            "spans": spans_to_wire(self.spans),
        }

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> PolicyRecord:
        """Raises ProvenanceError if `wire` is not what `to_wire` gives."""
        try:
            return cls(
                uid=str(wire["uid"]),
                session=int(wire["session"]),
                output=int(wire["output"]),
                digest=int(wire["digest"]),
                spans=spans_from_wire(wire["spans"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ProvenanceError(f"not a policy record ({error!r}): {wire!r}") from error


def spans_to_wire(
    spans: Iterable[PolicySpan],
) -> list[tuple[int, int | None, int | None, bool]]:
    """Spans as plain values: (num_tokens, version_start, version_end, is_sampled) of each."""
    return [(s.num_tokens, s.version_start, s.version_end, s.is_sampled) for s in spans]


def spans_from_wire(wire: Iterable[Sequence[Any]]) -> tuple[PolicySpan, ...]:
    """Inverse of `spans_to_wire`; raises TypeError or ValueError for anything else."""
    spans = []
    for num_tokens, version_start, version_end, is_sampled in wire:
        if not isinstance(is_sampled, bool):
            raise TypeError(f"is_sampled={is_sampled!r} is not a bool")
        if operator.index(num_tokens) < 1:
            raise ValueError(f"a span of {num_tokens} tokens")
        versions = [
            None if version is None else operator.index(version)
            for version in (version_start, version_end)
        ]
        if any(version is not None and abs(version) > MAX_VERSION for version in versions):
            raise ValueError(f"versions {versions} beyond {MAX_VERSION}")
        spans.append(
            PolicySpan(
                num_tokens=operator.index(num_tokens),
                version_start=versions[0],
                version_end=versions[1],
                is_sampled=is_sampled,
            )
        )
    return tuple(spans)


def digest_tokens(token_ids: Sequence[int] | np.ndarray) -> int:
    """63-bit BLAKE2b digest of token ids, in a range that every int64 column holds."""
    values = np.ascontiguousarray(token_ids, dtype="<i8")
    return int.from_bytes(blake2b(values.tobytes(), digest_size=8).digest(), "little") >> 1


def merge_spans(spans: Iterable[PolicySpan]) -> tuple[PolicySpan, ...]:
    """The same tokens as a run-length list: no empty span, no two alike next to each other."""
    merged: list[PolicySpan] = []
    for span in spans:
        if span.num_tokens == 0:
            continue
        last = merged[-1] if merged else None
        if last is not None and _origin(last) == _origin(span):
            merged[-1] = _resized(last, last.num_tokens + span.num_tokens)
        else:
            merged.append(span)
    return tuple(merged)


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What one request to the rollout engine sampled."""

    token_ids: tuple[int, ...]
    spans: tuple[PolicySpan, ...]
    """Cover `token_ids`."""

    def __post_init__(self) -> None:
        num_tokens = sum(span.num_tokens for span in self.spans)
        if num_tokens != len(self.token_ids):
            raise ProvenanceError(
                f"spans of {num_tokens} tokens do not cover a generation of {len(self.token_ids)}"
            )


def spans_of_response(
    response_ids: Sequence[int], response_mask: Sequence[int], generations: Sequence[Generation]
) -> tuple[PolicySpan, ...]:
    """Spans of one response, from the generations of its trajectory.

    The sampled tokens of a response must be a run of whole generations, the last of which may be
    cut short (verl truncates responses). Where no run fits, as when an agent rewrites what was
    sampled, or where runs of different versions fit, the response's sampled tokens are missing
    rather than guessed.

    Args:
        response_ids: token ids of the response, observations included.
        response_mask: 1 for sampled tokens, 0 for observations.
        generations: of the trajectory, in order.
    """
    is_sampled = np.asarray(response_mask, dtype=bool)
    # Index into `origins` of every response token.
    origins = [PolicySpan(num_tokens=1, is_sampled=False), PolicySpan(num_tokens=1)]
    origin_of = np.zeros(len(is_sampled), dtype=np.int64)
    sampled = np.asarray(response_ids, dtype=np.int64)[is_sampled]
    runs = {
        _first_spans(generations[first:], len(sampled)) for first in _runs(sampled, generations)
    }
    if len(runs) != 1:
        origin_of[is_sampled] = 1
    else:
        (spans,) = runs
        sizes = [span.num_tokens for span in spans]
        origin_of[is_sampled] = np.repeat(np.arange(len(spans)) + len(origins), sizes)
        origins += spans
    starts = np.flatnonzero(np.diff(origin_of, prepend=-1))
    sizes = np.diff(starts, append=len(origin_of))
    return merge_spans(
        _resized(origins[origin], int(size))
        for origin, size in zip(origin_of[starts], sizes, strict=True)
    )


def check_record(
    record: PolicyRecord,
    *,
    uid: str | None,
    response_ids: np.ndarray,
    response_mask: np.ndarray,
    trainer_version: int | None,
) -> None:
    """Raise ProvenanceError if `record` cannot be of this row.

    Args:
        uid: of the row; None where the rows carry none.
        response_ids: [n] token ids.
        response_mask: [n], nonzero where a loss reads the token.
        trainer_version: None where the trainer did not say.
    """
    name = record.key
    if uid is not None and record.uid != uid:
        raise ProvenanceError(
            f"the policy record of {name} is attached to a row of uid {uid}: rows and their "
            "extra_fields were reordered separately"
        )
    if record.num_tokens != len(response_ids):
        raise ProvenanceError(
            f"the policy spans of {name} cover {record.num_tokens} tokens, its response has "
            f"{len(response_ids)}"
        )
    if record.digest != digest_tokens(response_ids):
        raise ProvenanceError(
            f"the policy record of {name} was made for other response tokens: rows and their "
            "extra_fields were reordered separately, or a response was edited afterwards"
        )
    for span in record.spans:
        for version in (span.version_start, span.version_end):
            if version is None:
                continue
            if version < 0:
                raise ProvenanceError(f"the policy spans of {name} name version {version} < 0")
            if version < (span.version_start or 0):
                raise ProvenanceError(
                    f"a policy span of {name} goes back from version {span.version_start} to "
                    f"{version}"
                )
            if trainer_version is not None and version > trainer_version:
                raise ProvenanceError(
                    f"the policy spans of {name} name version {version}, but the trainer is at "
                    f"version {trainer_version}: the rollout engine cannot be ahead of it"
                )
    observed = token_kinds(record) == KINDS.index("observation")
    if (np.asarray(response_mask).astype(bool) & observed).any():
        raise ProvenanceError(
            f"response_mask of {name} trains on tokens that the policy did not sample"
        )


def token_kinds(record: PolicyRecord) -> np.ndarray:
    """[n] int8: index into `KINDS` of each response token."""
    kinds = [KINDS.index(span.kind) for span in record.spans]
    sizes = [span.num_tokens for span in record.spans]
    return np.repeat(np.asarray(kinds, dtype=np.int8), sizes)


def token_staleness(record: PolicyRecord, trainer_version: int) -> tuple[np.ndarray, np.ndarray]:
    """Staleness of each response token at best and at worst, two [n] float64; NaN unless the token
    is clean or mixed."""
    sizes = [span.num_tokens for span in record.spans]
    ages = [
        (trainer_version - span.version_end, trainer_version - span.version_start)
        if span.kind in ("clean", "mixed")
        else (np.nan, np.nan)
        for span in record.spans
    ]
    best, worst = np.array(ages, dtype=np.float64).reshape(-1, 2).T
    return np.repeat(best, sizes), np.repeat(worst, sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the rules say about one row."""

    keep: np.ndarray
    """[n] bool: False for response tokens that the rules take out, in the loss or not."""
    action: Literal["train", "warn", "mask", "drop_group"]
    """The strongest thing done to the row."""
    reasons: tuple[str, ...]
    """Which of `stale`, `mixed` and `missing` were found among its loss tokens."""


def judge(
    records: Sequence[PolicyRecord | None],
    response_masks: Sequence[np.ndarray],
    uids: Sequence[str],
    trainer_version: int,
    options: ProvenanceOptions,
) -> list[Verdict]:
    """Apply the rules to the rows of one update.

    A rule is broken by a token that carries loss. `mask` then takes all tokens of the row that it
    names out of the loss, and `drop_group` every token of every row with that uid.

    [Note: denominators]
    Both are done by zeros in verl's `response_mask` and `loss_mask`. `token-mean` divides by the
    `loss_mask` tokens of the mini-batch, so by what remains. The `seq-mean` modes divide by verl's
    `global_batch_size`, a constant: a sequence that lost all its tokens adds zero, as verl's own
    padding rows do, and one that lost some is averaged (`seq-mean-token-mean`) or summed over the
    rest. Advantages are those of the whole group: they were computed before.

    Args:
        records: None where a row has none.
        response_masks: per row [n], nonzero where a loss reads the token.
        uids: of the rows.
        trainer_version: see [Note: versions].

    Raises:
        ProvenanceError: a rule is `error` and a token breaks it; names the setting.
    """
    found: list[dict[str, np.ndarray]] = []
    dropped: set[str] = set()
    for record, response_mask, uid in zip(records, response_masks, uids, strict=True):
        in_loss = np.asarray(response_mask).astype(bool)
        broken = _broken_rules(record, in_loss, trainer_version, options)
        for rule, tokens in broken.items():
            action = options.action_of(rule)
            if action == "error":
                name = record.key if record is not None else f"a row of uid {uid}"
                num_tokens = int((tokens & in_loss).sum())
                raise ProvenanceError(_complaint(rule, name, num_tokens, record, options))
            if action == "drop_group":
                dropped.add(uid)
        found.append(broken)
    verdicts = []
    for response_mask, uid, broken in zip(response_masks, uids, found, strict=True):
        keep = np.ones(len(response_mask), dtype=bool)
        action = "warn" if broken else "train"
        for rule, tokens in broken.items():
            if options.action_of(rule) == "mask":
                keep &= ~tokens
                action = "mask"
        if uid in dropped:
            keep[:] = False
            action = "drop_group"
        verdicts.append(Verdict(keep=keep, action=action, reasons=tuple(broken)))
    return verdicts


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """How far the trainer's log-probs of a response are from those it was sampled with.

    With d = old log-prob - behaviour log-prob of each sampled token:
    """

    k3: float
    """Mean of exp(d) - d - 1, an estimate of KL(behaviour || old) that is never negative
    (Schulman, "Approximating KL Divergence", 2020). Nats per token."""
    max_ratio: float
    """Largest exp(|d|)."""
    pearson: float
    """Correlation of the two probabilities; NaN below two tokens or without variance."""


def mismatch(behaviour_log_probs: np.ndarray, old_log_probs: np.ndarray) -> Mismatch | None:
    """Measures over n tokens (two [n] arrays, nats); None for n = 0."""
    behaviour = np.asarray(behaviour_log_probs, dtype=np.float64)
    old = np.asarray(old_log_probs, dtype=np.float64)
    if not len(behaviour):
        return None
    difference = np.clip(old - behaviour, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    centred = [p - p.mean() for p in (np.exp(behaviour), np.exp(old))]
    scale = np.sqrt(np.prod([p @ p for p in centred])) if np.ptp(behaviour) * np.ptp(old) else 0.0
    pearson = float(np.clip(centred[0] @ centred[1] / scale, -1, 1)) if scale > 0 else np.nan
    return Mismatch(
        k3=float(np.mean(np.exp(difference) - difference - 1)),
        max_ratio=float(np.exp(np.abs(difference).max())),
        pearson=pearson,
    )


def _broken_rules(
    record: PolicyRecord | None,
    in_loss: np.ndarray,
    trainer_version: int,
    options: ProvenanceOptions,
) -> dict[str, np.ndarray]:
    """Rule -> [n] bool, tokens that it names; only rules that a loss token breaks."""
    if record is None:
        tokens = {"missing": np.ones(len(in_loss), dtype=bool)}
    else:
        kinds = token_kinds(record)
        tokens = {kind: kinds == KINDS.index(kind) for kind in ("mixed", "missing")}
        if options.max_staleness is not None:
            _, worst = token_staleness(record, trainer_version)
            # Comparisons with NaN are false.
            tokens["stale"] = worst > options.max_staleness
    return {rule: named for rule, named in tokens.items() if (named & in_loss).any()}


def _complaint(
    rule: str,
    name: str,
    num_tokens: int,
    record: PolicyRecord | None,
    options: ProvenanceOptions,
) -> str:
    what = {
        "stale": f"were sampled more than {options.max_staleness} versions ago",
        "mixed": "were sampled while the weights changed",
        "missing": "do not say which policy version sampled them",
    }[rule]
    spans = f" (spans {record.to_wire()['spans']})" if record is not None else ""
    return (
        f"{num_tokens} loss tokens of {name} {what}{spans}: {PROVENANCE_PATH}.on_{rule}=error "
        "stops the run; mask, drop_group or warn go on"
    )


def _runs(sampled: np.ndarray, generations: Sequence[Generation]) -> Iterable[int]:
    """First generations of the runs whose tokens begin with all of `sampled`."""
    if not len(sampled):
        yield 0
        return
    for first in range(len(generations)):
        begin = 0
        for generation in generations[first:]:
            expected = sampled[begin : begin + len(generation.token_ids)]
            if not np.array_equal(expected, generation.token_ids[: len(expected)]):
                break
            begin += len(expected)
            if begin == len(sampled):
                yield first
                break


def _first_spans(generations: Sequence[Generation], num_tokens: int) -> tuple[PolicySpan, ...]:
    """Spans of the first `num_tokens` tokens of a run."""
    spans = []
    for span in (span for generation in generations for span in generation.spans):
        spans.append(_resized(span, min(span.num_tokens, num_tokens)))
        num_tokens -= spans[-1].num_tokens
    return merge_spans(spans)


def _origin(span: PolicySpan) -> tuple[int | None, int | None, bool]:
    return span.version_start, span.version_end, span.is_sampled


def _resized(span: PolicySpan, num_tokens: int) -> PolicySpan:
    return PolicySpan(
        num_tokens=num_tokens,
        version_start=span.version_start,
        version_end=span.version_end,
        is_sampled=span.is_sampled,
    )
