"""verl's TensorDict <-> rollout records: where verl's keys become this package's words.

verl hands an engine a TensorDict of B rows without padding: jagged `input_ids`, `position_ids`,
`loss_mask`, and (for RL) `prompts`, `responses`, `response_mask`. Outputs are jagged over prompt +
response and shifted by one: entry p of a row belongs to token p + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from prefixflow_verl.config import METRIC_PREFIX, OPTIONS_PATH
from prefixflow_verl.forest import PrefixForest
from prefixflow_verl.model_hook import UnsupportedModelError
from prefixflow_verl.phases import CompletedRollouts
from prefixflow_verl.provenance import (
    RECORD_KEY,
    PolicyRecord,
    ProvenanceError,
    check_record,
    digest_tokens,
)

STEP_KEY = "prefixflow_step"
"""Setting of a batch: the trainer step it belongs to."""

TRIGGER_KEY = "prefixflow_trigger"
"""Setting of a batch: which update of that step."""

LOG_PROB_KIND_KEY = "prefixflow_log_probs"
"""Setting of a batch in a log-prob pass: `old` or `ref`. The engine then adds, per row, the step
that asked for it as `old_log_prob_step` or `ref_log_prob_step`."""

CONSUMED_KEY = f"{METRIC_PREFIX}consumed"
"""Metric of an update that holds, per mini-batch and rank, what was consumed; see
`consumed_rows`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBatch:
    """The rollouts of one engine call."""

    token_ids: list[np.ndarray]
    """B int64 arrays: prompt and response of each rollout."""
    predict: list[np.ndarray]
    """B bool arrays of `len(token_ids) - 1`: entry p asks for the log-prob of token p + 1."""
    temperatures: np.ndarray
    """[B] float64. Logits are divided by it."""
    num_loss_tokens: np.ndarray
    """[B] int64. Response tokens that carry loss."""


def read_rollouts(data: TensorDict, *, loss_tokens_only: bool) -> RolloutBatch:
    """Read verl's rows.

    Args:
        data: B rows that passed `check_rows`.
        loss_tokens_only: ask only for tokens that carry loss (training); otherwise for every
            response token, which is what verl keeps of `compute_log_prob`.
    """
    token_ids = [row.cpu().numpy() for row in data["input_ids"].unbind()]
    loss_masks = _loss_masks(data, token_ids)
    predict = []
    for index, tokens in enumerate(token_ids):
        wanted = loss_masks[index]
        if not loss_tokens_only:
            wanted = np.zeros(len(tokens), dtype=bool)
            wanted[len(tokens) - _num_response_tokens(data, index, len(tokens)) :] = True
        predict.append(wanted[1:])
    temperature = data["temperature"]
    if isinstance(temperature, torch.Tensor):
        temperature = temperature.to(torch.float64).cpu().numpy()
    # verl clamps temperatures the same way before it divides.
    temperatures = np.maximum(
        np.broadcast_to(np.asarray(temperature, dtype=np.float64).reshape(-1), (len(token_ids),)),
        1e-8,
    )
    return RolloutBatch(
        token_ids=token_ids,
        predict=predict,
        temperatures=temperatures,
        num_loss_tokens=np.array([int(mask.sum()) for mask in loss_masks], dtype=np.int64),
    )


def check_rows(data: TensorDict) -> None:
    """Refuse rows whose keys and values depend on more than token ids and their index.

    Raises:
        UnsupportedModelError: naming what was found.
    """
    # A NonTensorStack of one dict per row, empty for text; it has no truth value.
    rows = data.get("multi_modal_inputs", None)
    for row in rows if rows is not None else ():
        inputs = getattr(row, "data", row)
        if inputs is not None and len(inputs):
            raise UnsupportedModelError(
                "multimodal",
                "the batch holds multi_modal_inputs (images, audio or video), which prefix reuse "
                f"does not support: use text-only data, or set {OPTIONS_PATH}.on_unsupported="
                "fallback",
            )
    position_ids = data["position_ids"]
    lengths = data["input_ids"].offsets().diff()
    expected = (
        torch.cat([torch.arange(int(length)) for length in lengths]) if len(lengths) else None
    )
    if position_ids.dim() != 2 or (
        expected is not None and not torch.equal(position_ids.values().cpu(), expected)
    ):
        raise UnsupportedModelError(
            "position_ids",
            "position_ids are not 0, 1, 2, ... in each row (multi-dimensional RoPE or shifted "
            "positions), so equal tokens need not have equal keys: use plain text positions, or "
            f"set {OPTIONS_PATH}.on_unsupported=fallback",
        )


def policy_records(data: TensorDict) -> list[PolicyRecord | None]:
    """The policy record of each row; None for rows without one.

    Raises:
        ProvenanceError: a record is malformed.
    """
    rows = data.get("extra_fields", None)
    records: list[PolicyRecord | None] = []
    for row in rows if rows is not None else [None] * data.batch_size[0]:
        fields = getattr(row, "data", row)
        wire = fields.get(RECORD_KEY) if isinstance(fields, dict) else None
        records.append(PolicyRecord.from_wire(wire) if wire is not None else None)
    return records


def check_provenance(data: TensorDict) -> list[PolicyRecord | None]:
    """Check that every row with loss is what its policy record says, and that old and reference
    log-probs belong to this step; rows without loss (padding, dropped groups) are not looked at.

    Returns:
        The records; None where a row has none, or no loss. verl's padding rows are copies of a row
        with its record, and no loss.

    Raises:
        ProvenanceError: naming the row and what does not fit.
    """
    records = policy_records(data)
    step = tu.get_non_tensor_data(data=data, key=STEP_KEY, default=None)
    if "responses" not in data:
        return records
    uids = data.get("uid", None)
    uids = [str(getattr(uid, "data", uid)) for uid in uids] if uids is not None else None
    responses = response_rows(data, "responses")
    masks = response_rows(data, "response_mask")
    for index, record in enumerate(records):
        mask = masks[index].cpu().numpy()
        if not mask.any():
            records[index] = None
            continue
        if record is not None:
            check_record(
                record,
                uid=uids[index] if uids is not None else None,
                response_ids=responses[index].cpu().numpy(),
                response_mask=mask,
                trainer_version=step - 1 if step is not None else None,
            )
        for kind in ("old", "ref"):
            computed_in = data.get(log_prob_step_key(kind), None)
            if computed_in is None or step is None:
                continue
            if int(computed_in[index]) != step:
                name = record.key if record is not None else f"row {index}"
                raise ProvenanceError(
                    f"the {kind} log-probs of {name} were computed in step "
                    f"{int(computed_in[index])}, this is the update of step {step}: compute them "
                    "again under the weights of this step"
                )
    return records


def log_prob_step_key(kind: str) -> str:
    """Name of the per-row step of `old` or `ref` log-probs."""
    return f"{kind}_log_prob_step"


def consumed_rows(
    records: Sequence[PolicyRecord | None],
    mini_batch: int,
    batch: RolloutBatch | None = None,
    forest: PrefixForest | None = None,
) -> dict[str, Any]:
    """What one rank consumed in one mini-batch, in plain values.

    Returns:
        `mini_batch`, `keys` of the sequences that have a record and loss, and for each of those
        `prefix_segments`: digests of the shared prefixes (all tokens from the first) it was run
        through, empty where nothing was reused.
    """
    prefixes: list[list[int]] = [[] for _ in records]
    if forest is not None:
        for segment in np.flatnonzero(forest.is_shared):
            rollouts = forest.rollouts_of(segment)
            end = int(forest.end[segment])
            digest = digest_tokens(batch.token_ids[rollouts[0]][:end])
            for rollout in rollouts:
                prefixes[rollout].append(digest)
    known = [index for index, record in enumerate(records) if record is not None]
    return {
        "mini_batch": mini_batch,
        "keys": [records[index].key for index in known],
        "prefix_segments": [prefixes[index] for index in known],
    }


def model_output_rows(
    rollouts: CompletedRollouts, batch: RolloutBatch, old_log_probs: Sequence[torch.Tensor] | None
) -> dict[str, torch.Tensor]:
    """verl's `model_output` of the completed rollouts: jagged `log_probs`, maybe `entropy`.

    Positions without a prediction hold 0, or in the response `old_log_probs` (B rows over the
    response) where given: a loss that masks late then sees a ratio of 1 there and never an
    overflow.
    """
    lengths = [len(batch.token_ids[index]) for index in rollouts.rollout_ids]
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    device = rollouts.log_probs[0].device
    where = torch.cat(
        [
            positions + int(offset)
            for positions, offset in zip(rollouts.positions, offsets, strict=False)
        ]
    )
    base = torch.zeros(int(offsets[-1]), dtype=torch.float32, device=device)
    if old_log_probs is not None:
        for row, index in enumerate(rollouts.rollout_ids):
            old = old_log_probs[index]
            end = int(offsets[row + 1]) - 1
            base[end - len(old) : end] = old.to(base)
    jagged_offsets = torch.from_numpy(offsets).to(device)
    outputs = {"log_probs": base.index_put((where,), torch.cat(rollouts.log_probs))}
    if rollouts.entropies is not None:
        zeros = torch.zeros_like(base)
        outputs["entropy"] = zeros.index_put((where,), torch.cat(rollouts.entropies))
    return {
        name: torch.nested.nested_tensor_from_jagged(values, jagged_offsets)
        for name, values in outputs.items()
    }


def response_rows(data: TensorDict, key: str) -> list[torch.Tensor] | None:
    """Rows of a response-aligned field, padding cut off; None if the field is absent."""
    if key not in data:
        return None
    field = data[key]
    if field.is_nested:
        return list(field.unbind())
    lengths = data["input_ids"].offsets().diff().tolist()
    return [row[: _num_response_tokens(data, i, lengths[i])] for i, row in enumerate(field)]


def _loss_masks(data: TensorDict, token_ids: list[np.ndarray]) -> list[np.ndarray]:
    """B bool arrays over prompt + response: tokens that carry loss."""
    has_responses = "responses" in data
    rows = response_rows(data, "response_mask") if has_responses else data["loss_mask"].unbind()
    masks = []
    for row, tokens in zip(rows, token_ids, strict=True):
        values = row.cpu().numpy().astype(bool)
        mask = np.zeros(len(tokens), dtype=bool)
        mask[len(tokens) - len(values) :] = values
        masks.append(mask)
    return masks


def _num_response_tokens(data: TensorDict, index: int, num_tokens: int) -> int:
    if "responses" not in data:
        return num_tokens - 1
    responses = data["responses"]
    if responses.is_nested:
        return int(responses.offsets()[index + 1] - responses.offsets()[index])
    num_prompt = data["prompts"].shape[1]
    return int(data["attention_mask"][index, num_prompt:].sum())


class OrderedRows:
    """Rows of a TensorDict in the order in which packs complete them.

    verl's own selection unbinds every jagged row at each call, which would cost rows x packs here.
    So rows are put in order once, and each pack takes a slice.

    Args:
        data: B rows of tensors, jagged or not, and non-tensor settings.
        order: row indices, packs one after the other; rows that no pack completes are left out.
    """

    def __init__(self, data: TensorDict, order: Sequence[int]) -> None:
        self._rows = tu.index_select_tensor_dict(data, list(order)) if len(order) else None
        self._place = {row: place for place, row in enumerate(order)}
        self._offsets = {
            key: value.offsets().tolist()
            for key, value in (self._rows.items() if len(order) else ())
            if isinstance(value, torch.Tensor) and value.is_nested and value.dim() == 2
        }

    def take(self, indices: Sequence[int]) -> TensorDict:
        """Rows `indices` of the original, which stand next to each other in `order`."""
        begin, count = self._place[indices[0]], len(indices)
        assert [self._place[index] for index in indices] == list(range(begin, begin + count))
        taken: dict[str, Any] = {}
        for key, value in self._rows.items():
            if key in self._offsets:
                offsets = self._offsets[key][begin : begin + count + 1]
                lengths = np.diff(offsets)
                # Without them torch pads every row to the length of all rows together.
                extremes = {"min_seqlen": int(lengths.min()), "max_seqlen": int(lengths.max())}
                taken[key] = torch.nested.nested_tensor_from_jagged(
                    value.values()[offsets[0] : offsets[-1]],
                    torch.tensor(offsets, device=value.device) - offsets[0],
                    **extremes,
                )
            elif isinstance(value, torch.Tensor) and value.is_nested:
                taken[key] = tu.nested_tensor_from_tensor_list(
                    list(value.unbind()[begin : begin + count]),
                    ragged_idx=getattr(value, "_ragged_idx", value.dim() - 1),
                )
            else:
                # Settings have no rows.
                taken[key] = value[begin : begin + count] if value.shape else value
        return TensorDict(taken, batch_size=count)
