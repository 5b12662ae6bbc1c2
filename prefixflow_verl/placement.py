"""The batch of verl's trainer -> an order of its rows that keeps shared prefixes on one rank.

Lives in the process of verl's V1 trainer. compat.py calls it right after verl has padded the batch
and ordered it by length. verl gives rank k the k-th of equal slices, for the log-prob passes as for
the update, so an order is a placement. `balance` finds it from lengths alone; what prompts share is
found here, from one prompt of each group.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import numpy as np
import transfer_queue as tq
from omegaconf import DictConfig
from transfer_queue import KVBatchMeta
from transformers import AutoConfig
from verl.utils.fs import copy_to_local
from verl.utils.seqlen_balancing import log_seqlen_unbalance

from prefixflow_verl.accounting import ModelShape
from prefixflow_verl.balance import PlacementError, RolloutLengths, place_batch
from prefixflow_verl.config import METRIC_PREFIX, PrefixFlowOptions
from prefixflow_verl.forest import build_forest

logger = logging.getLogger(__name__)

METRICS = f"{METRIC_PREFIX}placement/"


class BatchPlacer:
    """Places the batches of one trainer.

    Args:
        config: of the run.
        options: of its actor.
    """

    def __init__(self, config: DictConfig, options: PrefixFlowOptions) -> None:
        self._actor = config.actor_rollout_ref.actor
        self._num_responses = int(config.actor_rollout_ref.rollout.n)
        self._model = config.actor_rollout_ref.model
        self._options = options
        self._shape: ModelShape | None = None
        self._reuses = options.placement == "prefix" and options.plan != "off"
        self._fell_back = False

    def observe(self, metrics: dict[str, Any]) -> None:
        """Take notice of an update's metrics: an engine that fell back to dense training shares no
        prefixes, so the next batch keeps verl's own order."""
        fallback = metrics.get(f"{METRIC_PREFIX}fallback")
        if fallback is not None and bool(fallback) != self._fell_back:
            self._fell_back = bool(fallback)
            name = "length" if self._fell_back else "prefix"
            logger.warning("prefixflow: rollouts are placed by %s from now on", name)

    def place(
        self,
        batch: KVBatchMeta,
        arrived: list[str],
        num_ranks: int,
        metrics: dict[str, Any],
        logging_prefix: str,
    ) -> None:
        """Reorder `batch`, which verl has padded and ordered by length, in place.

        Args:
            arrived: keys of the rows before that. Mini-batches take groups in this order.
            metrics: gets predictions, and verl's own length statistics anew.
            logging_prefix: of the latter.

        Raises:
            PlacementError: verl could not divide a mini-batch over the ranks; names the settings.
        """
        if not self._reuses or self._fell_back:
            return
        began = time.perf_counter()
        position = {key: index for index, key in enumerate(arrived)}
        # Padding rows come last.
        rows = sorted(range(len(batch)), key=lambda row: position.get(batch.keys[row], len(batch)))
        keys = [batch.keys[row] for row in rows]
        tags = [batch.tags[row] for row in rows]
        is_padding = [bool(tag.get("is_padding", False)) for tag in tags]
        groups = [_group_of(key) for key in keys]
        rollouts = self._lengths(batch.partition_id, keys, groups, tags, is_padding)
        if self._shape is None:
            self._shape = self._read_shape()
        ours, theirs = place_batch(
            rollouts,
            self._shape,
            group_ids=groups,
            is_padding=is_padding,
            num_ranks=num_ranks,
            num_mini_batches=self._num_mini_batches(len(batch), num_ranks),
            checkpointing=bool(self._model.enable_gradient_checkpointing),
        )
        batch.reorder([rows[row] for row in ours.order.tolist()])
        lengths = [tag["seq_len"] for tag in tags]
        parts = ours.order.reshape(num_ranks, -1).tolist()
        metrics.update(log_seqlen_unbalance(lengths, parts, prefix=logging_prefix))
        metrics.update(
            {
                f"{METRICS}imbalance": ours.imbalance,
                f"{METRICS}least_imbalance": ours.lower_bound,
                f"{METRICS}speedup_over_verl": theirs.slowest_cost / ours.slowest_cost,
                f"{METRICS}duplicated_prefixes": float(ours.num_duplicated_prefixes),
                f"{METRICS}duplicated_tokens": float(ours.num_duplicated_tokens),
                f"{METRICS}seconds": time.perf_counter() - began,
            }
        )

    def _num_mini_batches(self, num_rows: int, num_ranks: int) -> int:
        """Slices that verl makes of a rank's rows; 1 where it shuffles them or does not update."""
        num_prompts = int(self._actor.ppo_mini_batch_size)
        mini_batch_rows = num_prompts * self._num_responses
        if mini_batch_rows % num_ranks:
            raise PlacementError(
                f"actor_rollout_ref.actor.ppo_mini_batch_size={num_prompts} x "
                f"actor_rollout_ref.rollout.n={self._num_responses} rows do not divide over "
                f"{num_ranks} ranks: make their product a multiple of {num_ranks}"
            )
        if self._actor.shuffle or num_rows % mini_batch_rows:
            return 1
        return num_rows // mini_batch_rows

    def _lengths(
        self,
        partition_id: str,
        keys: list[str],
        groups: list[str],
        tags: list[dict[str, Any]],
        is_padding: list[bool],
    ) -> RolloutLengths:
        """Lengths of the rows; every response token counts as one that carries loss."""
        names = [(group, tag["prompt_len"]) for group, tag in zip(groups, tags, strict=True)]
        holder: dict[tuple[str, int], str] = {}
        for name, key in zip(names, keys, strict=True):
            holder.setdefault(name, key)
        data = tq.kv_batch_get(
            keys=list(holder.values()), partition_id=partition_id, select_fields=["prompts"]
        )
        # A forest is over inputs, which the last token of a sequence is not.
        prompts = [np.append(prompt.numpy(), 0) for prompt in data["prompts"].unbind()]
        forest = build_forest(prompts, min_shared_tokens=self._options.min_shared_tokens)
        segment_of = dict(zip(holder, forest.end_segment.tolist(), strict=True))
        responses = np.array([tag["response_len"] for tag in tags], dtype=np.int64)
        return RolloutLengths(
            segment_parent=forest.parent,
            segment_tokens=forest.lengths,
            last_segment=[segment_of[name] for name in names],
            response_tokens=responses,
            loss_tokens=np.where(is_padding, 0, responses),
        )

    def _read_shape(self) -> ModelShape:
        directory = copy_to_local(self._model.path, use_shm=self._model.get("use_shm", False))
        config = AutoConfig.from_pretrained(
            directory, trust_remote_code=self._model.get("trust_remote_code", False)
        )
        return ModelShape.from_config(config)


def _group_of(key: str) -> str:
    """The uid in a TransferQueue key, `<uid>_<session>_<output>`."""
    return key.rsplit("_", 2)[0]
