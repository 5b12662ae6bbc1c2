"""Between verl's advantages and its update: rules, metrics and the ledger.

Lives in the process of verl's V1 trainer. compat.py calls it around four methods of `PPOTrainer`:
log-probs are told which step they belong to, loss masks are changed as the rules say once the
advantages are there, and what an update has consumed is written down when it has ended.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transfer_queue as tq
from omegaconf import DictConfig
from tensordict import TensorDict
from transfer_queue import KVBatchMeta

from prefixflow_verl.config import METRIC_PREFIX, PROVENANCE_PATH, ProvenanceOptions
from prefixflow_verl.ledger import LedgerWriter
from prefixflow_verl.provenance import (
    KINDS,
    RECORD_KEY,
    PolicyRecord,
    ProvenanceError,
    Verdict,
    check_record,
    judge,
    mismatch,
    token_kinds,
    token_staleness,
)
from prefixflow_verl.rollouts import CONSUMED_KEY, LOG_PROB_KIND_KEY, STEP_KEY, TRIGGER_KEY

logger = logging.getLogger(__name__)

METRICS = f"{METRIC_PREFIX}provenance/"
MAX_AGE_METRIC = 8
"""Ages from here on share one metric."""

OLD_STEP_KEY = "old_log_prob_step"
_NUMBERS = ["rm_scores", "advantages", "old_log_probs", "rollout_log_probs", OLD_STEP_KEY]
_FIELDS = ["uid", "extra_fields", "responses", "response_mask", "loss_mask", *_NUMBERS]


@dataclass(slots=True, kw_only=True)
class _Row:
    """One sequence of an update, on its way to the ledger."""

    values: dict[str, Any]
    """By ledger column."""
    kinds: np.ndarray
    """[n] int8: index into `KINDS`, of every response token."""
    worst: np.ndarray
    """[n] float64: staleness of each response token at worst, NaN if unknown."""
    in_loss: np.ndarray
    """[n] bool, before the rules."""


class UpdateGate:
    """Provenance of one trainer's updates.

    Args:
        config: of the run.
        options: its rules.
    """

    def __init__(self, config: DictConfig, options: ProvenanceOptions) -> None:
        self._options = options
        default = Path(config.trainer.default_local_dir) / "provenance"
        self._directory = Path(options.ledger_dir or default)
        self._num_epochs = int(config.actor_rollout_ref.actor.ppo_epochs)
        self._writer: LedgerWriter | None = None
        self._rows: dict[str, _Row] = {}
        self._warned: set[str] = set()

    def stamp(
        self, batch: KVBatchMeta, step: int, trigger: int, log_probs: str | None = None
    ) -> None:
        """Tell the workers which update the rows belong to.

        Args:
            log_probs: `old` or `ref` before a log-prob pass; the engine then says with its output
                under which step it was computed.
        """
        batch.extra_info.update(
            {STEP_KEY: step, TRIGGER_KEY: trigger, LOG_PROB_KIND_KEY: log_probs or ""}
        )

    def apply_rules(self, batch: KVBatchMeta, metrics: dict[str, Any], step: int) -> None:
        """Judge the rows, and take out of the loss what the rules take out.

        Raises:
            ProvenanceError: a rule is `error` and a token breaks it, or a record is not of its row.
            ValueError: the ledger cannot be written.
        """
        began = time.perf_counter()
        self._open_ledger(step)
        trainer_version = step - 1
        data = _fetch(batch, _FIELDS)
        uids = [str(uid) for uid in _values(data["uid"])]
        records = [_record_of(fields) for fields in _values(data["extra_fields"])]
        masks = _rows_of(data["response_mask"])
        self._rows = {}
        is_real = [not tag.get("is_padding", False) for tag in batch.tags]
        # verl's padding rows are copies of a row, record and all, with nothing in the loss.
        records = [r if real else None for r, real in zip(records, is_real, strict=True)]
        for key, record in zip(batch.keys, records, strict=True):
            if record is not None and record.key != key:
                raise ProvenanceError(
                    f"the policy record of {record.key} is attached to {key}: rows and their "
                    "extra_fields were reordered separately"
                )
        responses = _rows_of(data["responses"])
        for record, uid, response, mask in zip(records, uids, responses, masks, strict=True):
            if record is not None:
                check_record(
                    record,
                    uid=uid,
                    response_ids=response,
                    response_mask=mask,
                    trainer_version=trainer_version,
                )
        verdicts = judge(records, masks, uids, trainer_version, self._options)
        self._warn(verdicts)
        if not all(verdict.keep.all() for verdict in verdicts):
            _mask_loss(batch, data, verdicts)
        columns = {name: _rows_of(data[name]) for name in _NUMBERS if name in data}
        for index, key in enumerate(batch.keys):
            if is_real[index]:
                row = _describe(
                    key, uids[index], records[index], masks[index], verdicts[index], trainer_version
                )
                row.values |= _numbers_of(columns, index, row.in_loss)
                tag = batch.tags[index]
                row.values |= {
                    "num_prompt_tokens": tag.get("prompt_len"),
                    "verl_min_version": tag.get("min_global_steps"),
                    "verl_max_version": tag.get("max_global_steps"),
                    "num_epochs": self._num_epochs,
                }
                self._rows[key] = row
        metrics.update(_summarize(self._rows.values(), trainer_version))
        metrics[f"{METRICS}rules_s"] = time.perf_counter() - began

    def record(
        self,
        metrics: dict[str, Any],
        step: int,
        trigger: int,
        consumed: Sequence[dict[str, Any]],
    ) -> None:
        """Write the update that has just ended to the ledger.

        Args:
            consumed: what the engine said about each mini-batch of each rank; empty for others.
        """
        began = time.perf_counter()
        mini_batches, segments = defaultdict(list), defaultdict(set)
        for report in consumed:
            for key, prefixes in zip(report["keys"], report["prefix_segments"], strict=True):
                mini_batches[key].append(report["mini_batch"])
                segments[key].update(prefixes)
        for key, row in self._rows.items():
            if consumed:
                row.values["mini_batches"] = sorted(mini_batches[key])
                row.values["prefix_segments"] = sorted(segments[key])
        self._writer.write(step, trigger, [row.values for row in self._rows.values()])
        self._rows = {}
        metrics[f"{METRICS}ledger_s"] = time.perf_counter() - began

    def _open_ledger(self, first_step: int) -> None:
        """Before anything is trained, so that a run does not find out later."""
        if self._writer is not None:
            return
        try:
            self._writer = LedgerWriter(self._directory, first_step)
        except OSError as error:
            raise ValueError(
                f"{PROVENANCE_PATH}.ledger_dir={self._directory} cannot be written ({error}): name "
                f"a directory that can, or set {PROVENANCE_PATH}.enabled=false"
            ) from error

    def _warn(self, verdicts: Sequence[Verdict]) -> None:
        """Log each broken rule once; the metrics say how often."""
        broken = {rule for verdict in verdicts for rule in verdict.reasons}
        for rule in sorted(broken - self._warned):
            self._warned.add(rule)
            logger.warning(
                "prefixflow: this update has %s tokens (%s.on_%s=%s); see %s*",
                rule,
                PROVENANCE_PATH,
                rule,
                self._options.action_of(rule),
                METRICS,
            )


def _mask_loss(batch: KVBatchMeta, data: TensorDict, verdicts: Sequence[Verdict]) -> None:
    """See provenance.py [Note: denominators]."""
    masks = {}
    for name in ("response_mask", "loss_mask"):
        if name not in data:
            continue
        rows = [
            mask * torch.from_numpy(verdict.keep).to(mask)
            for mask, verdict in zip(data[name].unbind(), verdicts, strict=True)
        ]
        masks[name] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    rows = TensorDict(masks, batch_size=len(batch.keys))
    tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=rows)


def take_consumed(metrics: dict[str, Any]) -> list[dict[str, Any]]:
    """Remove from verl's metrics what the engine reported about its mini-batches, and return it."""
    return metrics.pop(CONSUMED_KEY, [])


def _fetch(batch: KVBatchMeta, fields: list[str]) -> TensorDict:
    """Those of `fields` that exist."""
    return tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)


def _values(field: Any) -> list[Any]:
    """Per-row Python values of a non-tensor field."""
    return [getattr(value, "data", value) for value in field]


def _rows_of(field: torch.Tensor) -> list[np.ndarray]:
    return [row.numpy() for row in field.unbind()]


def _record_of(extra_fields: Any) -> PolicyRecord | None:
    wire = extra_fields.get(RECORD_KEY) if isinstance(extra_fields, dict) else None
    return PolicyRecord.from_wire(wire) if wire is not None else None


def _sequence_of(key: str, uid: str) -> tuple[int | None, int | None]:
    """(session, output) of a TransferQueue key, `<uid>_<session>_<output>`."""
    session, _, output = key.removeprefix(f"{uid}_").partition("_")
    is_named = session.isdecimal() and output.isdecimal()
    return (int(session), int(output)) if is_named else (None, None)


def _describe(
    key: str,
    uid: str,
    record: PolicyRecord | None,
    mask: np.ndarray,
    verdict: Verdict,
    trainer_version: int,
) -> _Row:
    """What a row's record and verdict say of it."""
    kinds = np.full(len(mask), KINDS.index("missing"), dtype=np.int8)
    worst = np.full(len(mask), np.nan)
    session, output = _sequence_of(key, uid)
    values = {
        "trainer_version": trainer_version,
        "uid": uid,
        "session": session,
        "output": output,
        "num_response_tokens": len(mask),
        "num_loss_tokens": int((mask.astype(bool) & verdict.keep).sum()),
        "action": verdict.action,
        "reasons": list(verdict.reasons),
    }
    if record is not None:
        kinds = token_kinds(record)
        _, worst = token_staleness(record, trainer_version)
        values["digest"] = record.digest
        values["num_sampled_tokens"] = int((kinds != KINDS.index("observation")).sum())
        values["spans"] = [asdict(span) for span in record.spans]
        values |= _staleness_of(record, trainer_version)
    values["num_mixed_tokens"] = int((kinds == KINDS.index("mixed")).sum())
    values["num_missing_tokens"] = int((kinds == KINDS.index("missing")).sum())
    return _Row(values=values, kinds=kinds, worst=worst, in_loss=mask.astype(bool))


def _staleness_of(record: PolicyRecord, trainer_version: int) -> dict[str, float]:
    """Best, worst and token-weighted staleness of a response; nothing if no version is known."""
    known = [span for span in record.spans if span.kind in ("clean", "mixed")]
    if not known:
        return {}
    num_tokens = sum(span.num_tokens for span in known)
    weighted = sum(span.num_tokens * (trainer_version - span.version_start) for span in known)
    return {
        "staleness_best": float(trainer_version - max(span.version_end for span in known)),
        "staleness_worst": float(trainer_version - min(span.version_start for span in known)),
        "staleness_mean": weighted / num_tokens,
    }


def _numbers_of(
    columns: dict[str, list[np.ndarray]], index: int, in_loss: np.ndarray
) -> dict[str, float]:
    """Reward, advantages and mismatch of one row, as far as the trainer has them."""
    row = {name: rows[index] for name, rows in columns.items()}
    numbers: dict[str, float] = {}
    if "rm_scores" in row:
        numbers["reward"] = float(row["rm_scores"].sum())
    if OLD_STEP_KEY in row:
        numbers[OLD_STEP_KEY] = int(row[OLD_STEP_KEY])
    if not in_loss.any():
        return numbers
    if "advantages" in row:
        advantages = row["advantages"][in_loss]
        numbers["advantage_mean"] = float(advantages.mean())
        numbers["advantage_min"] = float(advantages.min())
        numbers["advantage_max"] = float(advantages.max())
    if "old_log_probs" in row and "rollout_log_probs" in row:
        found = mismatch(row["rollout_log_probs"][in_loss], row["old_log_probs"][in_loss])
        numbers |= asdict(found)
    return numbers


def _summarize(rows: Any, trainer_version: int) -> dict[str, float]:
    """Metrics of one update; shares are of the tokens that carried loss before the rules."""
    rows = list(rows)
    metrics = {f"{METRICS}trainer_version": float(trainer_version)}
    if not rows:
        return metrics
    kinds = np.concatenate([row.kinds[row.in_loss] for row in rows])
    ages = np.concatenate([row.worst[row.in_loss] for row in rows])
    num_tokens = max(len(kinds), 1)
    for kind in ("clean", "mixed", "missing"):
        share = (kinds == KINDS.index(kind)).sum() / num_tokens
        metrics[f"{METRICS}{kind}_fraction"] = float(share)
    known = ages[~np.isnan(ages)]
    if len(known):
        metrics[f"{METRICS}staleness/mean"] = float(known.mean())
        metrics[f"{METRICS}staleness/max"] = float(known.max())
    for age, share in zip(*_histogram(known, num_tokens), strict=True):
        metrics[f"{METRICS}staleness/fraction_age_{age}"] = share
    by_age = defaultdict(list)
    for row in rows:
        if "k3" in row.values:
            by_age[_age_name(row.values.get("staleness_worst"))].append(row.values)
    for age, found in by_age.items():
        metrics[f"{METRICS}mismatch/k3_age_{age}"] = float(np.mean([v["k3"] for v in found]))
        metrics[f"{METRICS}mismatch/max_ratio_age_{age}"] = float(
            np.max([v["max_ratio"] for v in found])
        )
    removed = sum(int(row.in_loss.sum()) - row.values["num_loss_tokens"] for row in rows)
    metrics[f"{METRICS}removed_tokens"] = float(removed)
    dropped = {row.values["uid"] for row in rows if row.values["action"] == "drop_group"}
    metrics[f"{METRICS}dropped_groups"] = float(len(dropped))
    warned = sum(row.values["action"] == "warn" for row in rows)
    metrics[f"{METRICS}warned_sequences"] = float(warned)
    return metrics


def _histogram(known: np.ndarray, num_tokens: int) -> tuple[list[str], list[float]]:
    """Age -> share of tokens, for every age up to the oldest."""
    capped = np.clip(known, 0, MAX_AGE_METRIC).astype(np.int64)
    counts = np.bincount(capped)
    return [_age_name(age) for age in range(len(counts))], (counts / num_tokens).tolist()


def _age_name(age: float | None) -> str:
    if age is None:
        return "unknown"
    return f"{int(age)}" if age < MAX_AGE_METRIC else f"{MAX_AGE_METRIC}_or_more"
