"""Lengths of prompts and responses -> a plan and what it costs. Numpy only.

Which tokens rollouts consist of does not matter to a plan, only which of them are shared. So
lengths are enough to see how a workload would be laid out and what reuse could save on it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from prefixflow_verl.accounting import ModelShape, dense_flops, forest_flops, reuse_ratio
from prefixflow_verl.forest import PrefixForest
from prefixflow_verl.packing import Packer
from prefixflow_verl.plan import PackBudget, Plan, PlanMode, make_plan

_KEYS = (("prompt", "responses"), ("input", "output"))
"""Accepted names of (prompt length, response lengths) in a line of a file."""

_PROMPT, _RUNS, _GROUP = "prompt_len", "response_loss_mask_rle", "prompt_group_id"
"""Names in a line of a multi-turn trace, which holds one rollout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLengths:
    """Lengths of one prompt and of the responses sampled for it.

    Example:
        # {"prompt": 120, "responses": [30, 40]}
        GroupLengths(prompt=120, responses=(30, 40))
        # A response of two turns with 50 tokens of a tool in between.
        GroupLengths(prompt=120, responses=(95,), loss_runs=(((1, 30), (0, 50), (1, 15)),))
    """

    prompt: int
    """Tokens, 1 or more."""
    responses: tuple[int, ...]
    """Tokens of each response, 1 or more; at least one response."""
    loss_runs: tuple[tuple[tuple[int, int], ...], ...] | None = None
    """Of each response: runs of (1 if they carry loss else 0, tokens), which add up to its length;
    None: every response token carries loss."""

    def loss_mask(self, index: int) -> np.ndarray:
        """[R] bool: which tokens of response `index` carry loss."""
        if self.loss_runs is None:
            return np.ones(self.responses[index], dtype=bool)
        values, counts = zip(*self.loss_runs[index], strict=True)
        return np.repeat(np.array(values, dtype=bool), counts)

    def scaled(self, factor: float) -> GroupLengths:
        """All lengths multiplied by `factor`, above 0, and rounded up."""

        def scale(length: int) -> int:
            return math.ceil(length * factor)

        if self.loss_runs is None:
            return GroupLengths(
                prompt=scale(self.prompt), responses=tuple(scale(r) for r in self.responses)
            )
        runs = [[(value, scale(length)) for value, length in runs] for runs in self.loss_runs]
        return _masked_group(scale(self.prompt), runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCost:
    """What a plan costs next to training every rollout by itself. FLOPs of forward and backward."""

    logical_tokens: int
    executed_tokens: int
    num_packs: int
    num_cut_edges: int
    dense_flops: int
    """One rollout at a time, LM head on every token (what verl's own engine does)."""
    dense_response_logits_flops: int
    """The same with the LM head only where a response token is predicted."""
    reuse_flops: int
    """The plan."""
    max_cache_bytes: int
    """Largest sum of keys, values and gradient accumulators of one round's heads."""

    @property
    def reuse_ratio(self) -> float:
        """Logical / executed tokens."""
        return reuse_ratio(self.logical_tokens, self.executed_tokens)

    @property
    def ideal_speedup(self) -> float:
        """`dense_flops / reuse_flops`: the speed-up if every FLOP took the same time."""
        return self.dense_flops / self.reuse_flops

    @property
    def ideal_speedup_over_response_logits(self) -> float:
        """The same against `dense_response_logits_flops`."""
        return self.dense_response_logits_flops / self.reuse_flops


def read_groups(path: Path) -> list[GroupLengths]:
    """Groups of a JSON-lines file: one `{"prompt": 120, "responses": [30, 40]}` per line.

    The names `input` and `output` of published length traces are understood too, and so are lines
    of published multi-turn traces: `{"prompt_len": 120, "response_loss_mask_rle": [[1, 30], [0,
    50], [1, 15]], "prompt_group_id": 0}`, one per rollout; those of a group follow each other.
    Other keys and empty lines are skipped.

    Raises:
        ValueError: the file holds no group, or a line is not one; names file, line and reason.
        OSError: the file cannot be read.
    """
    groups: list[GroupLengths] = []
    last_id = None
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            group, group_id = _parse_line(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        if group_id is None or group_id != last_id:
            groups.append(group)
        elif group.prompt != groups[-1].prompt:
            raise ValueError(
                f"{path}, line {number}: {_PROMPT} is {group.prompt} in a group of prompts of "
                f"{groups[-1].prompt} tokens"
            )
        else:
            runs = (*groups[-1].loss_runs, *group.loss_runs)
            groups[-1] = _masked_group(group.prompt, runs)
        last_id = group_id
    if not groups:
        raise ValueError(f"{path} holds no lengths: give one JSON object per line")
    return groups


def read_trace(path: Path) -> list[tuple[str, list[GroupLengths]]]:
    """(name, groups) of a file, or of each file below a directory that ends in .jsonl.

    Raises:
        ValueError: no such files, or a line is not understood; names file, line and reason.
        OSError: a file cannot be read.
    """
    files = sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"{path} holds no file that ends in .jsonl")
    return [
        (str(file.relative_to(path)) if path.is_dir() else file.name, read_groups(file))
        for file in files
    ]


def estimate(
    groups: Sequence[GroupLengths],
    shape: ModelShape,
    budget: PackBudget,
    *,
    mode: PlanMode = "auto",
    min_shared_tokens: int = 1,
    checkpointing: bool = False,
    element_bytes: int = 2,
    gradient_bytes: int = 4,
) -> tuple[PrefixForest, Plan, PlanCost]:
    """Plan one mini-batch of `groups` and count its cost.

    Args:
        groups: prompts that share nothing with each other.
        shape: sizes of the model.
        budget, mode, min_shared_tokens: see `make_plan`.
        checkpointing: count the recomputation of activation checkpointing, on both sides.
        element_bytes, gradient_bytes: of one cached key or value and of its gradient accumulator.
    """
    sequences, predict = _rollouts(groups)
    forest, plan = make_plan(sequences, budget, mode=mode, min_shared_tokens=min_shared_tokens)
    layouts = Packer(sequences, forest, plan, predict=predict).layouts
    num_tokens = np.array([len(sequence) for sequence in sequences], dtype=np.int64)
    num_predicted = int(sum(wanted.sum() for wanted in predict))
    num_logit_rows = sum(len(layout.logit_rows) for layout in layouts)
    max_cached_tokens = max(
        sum(layouts[pack].num_tokens for pack in round_.heads) for round_ in plan.rounds
    )
    dense = dense_flops(shape, num_tokens, int(num_tokens.sum()))
    dense_response_logits = dense_flops(shape, num_tokens, num_predicted)
    reuse = forest_flops(shape, forest, num_logit_rows)
    cost = PlanCost(
        logical_tokens=forest.logical_tokens,
        executed_tokens=forest.executed_tokens,
        num_packs=len(plan.packs),
        num_cut_edges=plan.num_cut_edges,
        dense_flops=dense.update(checkpointing=checkpointing),
        dense_response_logits_flops=dense_response_logits.update(checkpointing=checkpointing),
        reuse_flops=reuse.update(checkpointing=checkpointing),
        max_cache_bytes=max_cached_tokens
        * shape.cache_bytes_per_token(element_bytes=element_bytes, gradient_bytes=gradient_bytes),
    )
    return forest, plan, cost


def _parse_line(line: str) -> tuple[GroupLengths, Any]:
    """The lengths in a line, and which group they belong to; None: a group by themselves."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at column {error.colno})") from None
    if not isinstance(record, Mapping):
        raise ValueError("not a JSON object")
    for prompt_key, responses_key in _KEYS:
        if prompt_key in record and responses_key in record:
            responses = record[responses_key]
            if not isinstance(responses, list) or not responses:
                raise ValueError(f"{responses_key} must be a list of one length or more")
            group = GroupLengths(
                prompt=_require_length(prompt_key, record[prompt_key]),
                responses=tuple(_require_length(responses_key, length) for length in responses),
            )
            return group, None
    if _PROMPT in record and _RUNS in record:
        runs = _require_runs(record[_RUNS])
        group = _masked_group(_require_length(_PROMPT, record[_PROMPT]), [runs])
        return group, record.get(_GROUP)
    raise ValueError('needs the keys "prompt" and "responses" (or "input" and "output")')


def _require_length(key: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{key} holds {value!r}: lengths are integers of 1 or more")
    return value


def _require_runs(value: Any) -> list[tuple[int, int]]:
    """Checked `response_loss_mask_rle` of one rollout."""
    if not isinstance(value, list) or not all(
        isinstance(run, list) and len(run) == 2 and run[0] in (0, 1) for run in value
    ):
        raise ValueError(f"{_RUNS} must be a list of runs: [1, tokens with loss] or [0, without]")
    if not any(has_loss for has_loss, _ in value):
        raise ValueError(f"{_RUNS} has no token that carries loss")
    return [(int(has_loss), _require_length(_RUNS, length)) for has_loss, length in value]


def _masked_group(prompt: int, runs: Sequence[Sequence[tuple[int, int]]]) -> GroupLengths:
    return GroupLengths(
        prompt=prompt,
        responses=tuple(sum(length for _, length in response) for response in runs),
        loss_runs=tuple(tuple(response) for response in runs),
    )


def _rollouts(groups: Sequence[GroupLengths]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Sequences of fresh token ids, shared by prompts only, and the predictions that carry loss."""
    sequences, predict = [], []
    next_id = 0

    def fresh(count: int) -> np.ndarray:
        nonlocal next_id
        next_id += count
        return np.arange(next_id - count, next_id)

    for group in groups:
        prompt = fresh(group.prompt)
        for index, response in enumerate(group.responses):
            sequences.append(np.concatenate([prompt, fresh(response)]))
            before = np.zeros(group.prompt - 1, dtype=bool)
            predict.append(np.concatenate([before, group.loss_mask(index)]))
    return sequences, predict
