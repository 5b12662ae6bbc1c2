"""The verl engine that trains with prefix reuse.

Everything verl's FSDP2 engine does stays: building, sharding, offload, checkpoints, weight export.
Only `forward_backward_batch`, through which `update_actor`, `compute_log_prob` and the reference
log-probs all pass, runs a prefix plan instead of padded or packed micro-batches.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id, get_device_name
from verl.utils.metric import AggregationType, Metric
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine import EngineRegistry, FSDPEngineWithLMHead
from verl.workers.engine.utils import detach_tree

from prefixflow_verl.accounting import ModelShape, forest_flops, reuse_ratio
from prefixflow_verl.attention import choose_backend
from prefixflow_verl.config import METRIC_PREFIX, OPTIONS_PATH, STRATEGY
from prefixflow_verl.engine_config import as_fsdp2, options_of
from prefixflow_verl.failures import FailureBoard
from prefixflow_verl.forest import PrefixForest
from prefixflow_verl.lockstep import PackMemoryError
from prefixflow_verl.model_hook import (
    UnsupportedModelError,
    check_length,
    check_model,
    pretrained_model,
)
from prefixflow_verl.phases import (
    CompletedRollouts,
    PackedBatch,
    PhaseRunner,
    RunStats,
    ScheduleMismatchError,
    check_reuse,
    pack_sequences,
)
from prefixflow_verl.plan import PackBudget
from prefixflow_verl.provenance import PolicyRecord, ProvenanceError
from prefixflow_verl.refusals import ENGINE_PATH, MODEL_PATH, find_refusal
from prefixflow_verl.rollouts import (
    CONSUMED_KEY,
    LOG_PROB_KIND_KEY,
    STEP_KEY,
    TRIGGER_KEY,
    OrderedRows,
    RolloutBatch,
    check_provenance,
    check_rows,
    consumed_rows,
    log_prob_step_key,
    model_output_rows,
    read_rollouts,
    response_rows,
)

logger = logging.getLogger(__name__)


COMMON_ERRORS = (ProvenanceError, UnsupportedModelError, ScheduleMismatchError, PackMemoryError)
"""Raised by every rank together."""


@EngineRegistry.register(model_type="language_model", backend=STRATEGY, device=["cuda", "cpu"])
class PrefixFlowEngine(FSDPEngineWithLMHead):
    """verl's FSDP2 language-model engine with prefix reuse; strategy `prefixflow`.

    Attributes:
        options: the plugin's settings for this engine.

    Raises:
        UnsupportedModelError: at construction or while the model is built, if a setting or the
            model cannot be reproduced exactly and `on_unsupported=error`.
    """

    def __init__(
        self,
        model_config: HFModelConfig,
        engine_config: FSDPEngineConfig,
        optimizer_config: FSDPOptimizerConfig,
        checkpoint_config: CheckpointConfig,
    ):
        self.options = options_of(engine_config)
        self._fallback: UnsupportedModelError | None = None
        self._warned: set[str] = set()
        self._log_prob_totals: dict[str, float] | None = None
        # (step, trigger) of the last mini-batch, and how many of its update came before it.
        self._update: tuple[int, int] | None = None
        self._mini_batch = 0
        self._runner: PhaseRunner | None = None
        self._failures: FailureBoard | None = None
        self._max_tokens_that_fit: int | None = None
        self._unless_supported(lambda: check_settings(model_config, engine_config))
        # verl's builder knows the strategies fsdp and fsdp2 only.
        super().__init__(
            model_config=model_config,
            engine_config=as_fsdp2(engine_config),
            optimizer_config=optimizer_config,
            checkpoint_config=checkpoint_config,
        )

    def _build_model_optimizer(self) -> None:
        super()._build_model_optimizer()
        if self._fallback is None:
            self._unless_supported(lambda: check_model(self.module))
        if self._fallback is not None:
            return
        device = _compute_device()
        gradient_dtype = torch.float32 if self.options.cache_grad_dtype == "float32" else None
        self._runner = PhaseRunner(
            model=self.module,
            backend=choose_backend(self.options.attention_backend, device),
            device=device,
            cache_gradient_dtype=gradient_dtype,
            process_group=self.get_data_parallel_group(),
            reduce_gradients_once=self.engine_config.use_no_sync_for_gradient_accumulation,
            scale_loss=self.scaler.scale if self.scaler is not None else None,
            forward_context=self._autocast,
            survives_out_of_memory=self.options.oom_retry,
        )
        self._unless_supported(lambda: check_reuse(self._runner))
        if self._fallback is None and self.rank == 0:
            logger.warning(
                "prefixflow: reusing prefixes, attention backend %s", self._runner.backend.name
            )
            if self.options.prefix_activations == "offload" and device.type == "cpu":
                logger.warning(
                    "prefixflow: %s.prefix_activations=offload moves nothing on a CPU, use "
                    "recompute to save memory",
                    OPTIONS_PATH,
                )

    def forward_backward_batch(
        self, data: TensorDict, loss_function: Callable | None, forward_only: bool = False
    ) -> dict[str, Any]:
        """Run every row of `data` once per shared prefix; see `FSDPEngine.forward_backward_batch`.

        Returns:
            verl's dict: `model_output` (jagged `log_probs`, `entropy`; forward only, or if asked
            for), `loss` (a list that sums to the rank's loss), `metrics`.
        """
        if self._failures is None:
            self._failures = FailureBoard(self.options.failure_timeout_s)
        with self._failures.watched(common=COMMON_ERRORS):
            return self._run_batch(data, loss_function, forward_only)

    def _run_batch(
        self, data: TensorDict, loss_function: Callable | None, forward_only: bool
    ) -> dict[str, Any]:
        num_loss_tokens, refusal, records = self._agree_on_batch(data, forward_only)
        if refusal is not None:
            output = self._run_dense(data, loss_function, forward_only, refusal)
            self._add_provenance(output, data, forward_only, records)
            return output
        tu.assign_non_tensor(
            data,
            sp_size=1,
            batch_num_tokens=num_loss_tokens,
            dp_size=self.get_data_parallel_size(),
        )
        batch = read_rollouts(data, loss_tokens_only=not forward_only)
        run, failed = None, None
        try:
            run = self._run_packs(data, batch, loss_function, forward_only)
        except PackMemoryError as error:
            # The exception itself would keep the failed try in memory.
            failed = (error.num_tokens, error.cause)
        if failed is not None:
            self._shrink_packs(*failed)
            try:
                run = self._run_packs(data, batch, loss_function, forward_only)
            except PackMemoryError as error:
                raise PackMemoryError(
                    error.num_tokens,
                    f"{error.cause} (nor did one of {failed[0]} tokens); lower "
                    f"{OPTIONS_PATH}.max_tokens_per_pack, set {OPTIONS_PATH}.max_cache_bytes, or "
                    "use more ranks",
                ) from None
        packed, stats, output = run
        output["metrics"].update(self._reuse_metrics(packed, stats, forward_only))
        if not forward_only:
            output["metrics"][f"{METRIC_PREFIX}oom_retries"] = [float(failed is not None)]
        self._add_provenance(output, data, forward_only, records, batch, packed.forest)
        return output

    def _run_packs(
        self,
        data: TensorDict,
        batch: RolloutBatch,
        loss_function: Callable | None,
        forward_only: bool,
    ) -> tuple[PackedBatch, RunStats, dict[str, Any]]:
        """Plan a mini-batch and run it: plan, statistics, verl's output dict."""
        packed = pack_sequences(
            batch.token_ids,
            self._budget(data, forward_only),
            predict=batch.predict,
            temperatures=batch.temperatures,
            mode=self.options.plan,
            min_shared_tokens=self.options.min_shared_tokens,
        )
        keep_output = forward_only or tu.get_non_tensor_data(
            data=data, key="return_model_output", default=False
        )
        collector = _PackCollector(
            data=data,
            batch=batch,
            order=packed.completion_order,
            loss_function=loss_function,
            dp_group=self.get_data_parallel_group(),
            loss_context=self._autocast,
            keep_output=keep_output,
        )
        with_entropy = tu.get_non_tensor_data(data=data, key="calculate_entropy", default=False)
        run = self._runner.forward if forward_only else self._runner.backward
        stats = run(packed, collector.add, with_entropy=with_entropy)
        return packed, stats, collector.result(with_entropy)

    def _shrink_packs(self, num_tokens: int, cause: str) -> None:
        """Plan with half the tokens that did not fit, now and later."""
        self._max_tokens_that_fit = max(1, num_tokens // 2)
        logger.warning(
            "prefixflow: a pack of %d tokens did not fit into memory (%s). Its mini-batch runs "
            "again without the gradients so far, and from now on packs have %d tokens at most: set "
            "%s.max_tokens_per_pack to that",
            num_tokens,
            cause,
            self._max_tokens_that_fit,
            OPTIONS_PATH,
        )

    def _add_provenance(
        self,
        output: dict[str, Any],
        data: TensorDict,
        forward_only: bool,
        records: list[PolicyRecord | None],
        batch: RolloutBatch | None = None,
        forest: PrefixForest | None = None,
    ) -> None:
        """Tell a trainer that asks under which step log-probs were computed, or which sequences
        this mini-batch consumed."""

        def setting(key: str) -> Any:
            return tu.get_non_tensor_data(data=data, key=key, default=None)

        step, trigger, kind = setting(STEP_KEY), setting(TRIGGER_KEY), setting(LOG_PROB_KIND_KEY)
        if step is None:
            return
        if forward_only:
            if kind:
                steps = torch.full((data.batch_size[0],), step)
                output["model_output"][log_prob_step_key(kind)] = steps
            return
        if records:
            is_next = (step, trigger) == self._update
            self._mini_batch = self._mini_batch + 1 if is_next else 0
            self._update = step, trigger
            report = consumed_rows(records, self._mini_batch, batch, forest)
            output["metrics"][CONSUMED_KEY] = [report]

    def _budget(self, data: TensorDict, forward_only: bool) -> PackBudget:
        """verl's micro-batch settings and the options as a pack budget."""
        max_tokens, max_rollouts = self.options.max_tokens_per_pack, None
        if max_tokens is None:
            if tu.get_non_tensor_data(data=data, key="use_dynamic_bsz", default=True):
                max_tokens = int(data["max_token_len_per_gpu"])
            else:
                max_rollouts = int(data["micro_batch_size_per_gpu"])
        if self._max_tokens_that_fit is not None:
            max_tokens = min(max_tokens or self._max_tokens_that_fit, self._max_tokens_that_fit)
            max_rollouts = None
        activations = self.options.prefix_activations
        return PackBudget(
            max_tokens=max_tokens,
            max_rollouts=max_rollouts,
            max_cache_tokens=self._max_prefix_tokens(forward_only, kept_activations=False),
            max_kept_tokens=self._max_prefix_tokens(
                forward_only, kept_activations=not forward_only
            ),
            prefix_activations=activations,
            cut_overhead_tokens=self.options.cut_overhead_tokens,
            split_segments=activations in ("auto", "recompute") and max_tokens is not None,
        )

    def _max_prefix_tokens(self, forward_only: bool, *, kept_activations: bool) -> int | None:
        """Prefix tokens that `max_cache_bytes` holds; a forward alone needs no gradients."""
        if self.options.max_cache_bytes is None:
            return None
        element_bytes = torch.finfo(self._autocast_dtype).bits // 8
        gradient_bytes = 4 if self.options.cache_grad_dtype == "float32" else element_bytes
        model = pretrained_model(self.module)
        return ModelShape.from_config(model.config).max_prefix_tokens(
            self.options.max_cache_bytes,
            element_bytes=element_bytes,
            gradient_bytes=0 if forward_only else gradient_bytes,
            kept_activations=kept_activations,
            checkpointing=model.is_gradient_checkpointing,
        )

    def _autocast(self) -> AbstractContextManager:
        """The autocast verl's own engine runs the model and the loss under."""
        if self._autocast_dtype == torch.float32:
            return nullcontext()
        return torch.autocast(device_type=get_device_name(), dtype=self._autocast_dtype)

    def _agree_on_batch(
        self, data: TensorDict, forward_only: bool
    ) -> tuple[float, UnsupportedModelError | None, list[PolicyRecord | None]]:
        """Loss tokens over all ranks; why this batch has to run densely, if any reason; policy
        records of the rows.

        Raises:
            ScheduleMismatchError: on every rank, if only some train.
            ProvenanceError: on every rank, if any rank's rows contradict their records.
            UnsupportedModelError: on every rank, if any rank must refuse and
                `on_unsupported=error`.
        """
        fault, refusal, records = None, self._fallback, []
        if self.options.provenance.enabled and not forward_only:
            try:
                records = check_provenance(data)
            except ProvenanceError as error:
                fault = str(error)
        if refusal is None:
            try:
                check_request(data)
                check_rows(data)
                check_length(self.module, int(data["input_ids"].offsets().diff().max()))
            except UnsupportedModelError as error:
                refusal = error
        # One collective of one shape, whatever the rank was called for.
        own = [
            float(data["loss_mask"].sum()),
            float(refusal is not None),
            float(fault is not None),
            float(forward_only),
        ]
        totals = torch.tensor(own, dtype=torch.float64, device=_compute_device())
        torch.distributed.all_reduce(totals, group=self.get_data_parallel_group())
        # A float: masks may hold weights.
        num_loss_tokens, num_refusing, num_faults, num_forward_only = totals.tolist()
        if num_forward_only not in (0, self.get_data_parallel_size()):
            raise ScheduleMismatchError(
                f"{num_forward_only:.0f} of {self.get_data_parallel_size()} ranks were called for "
                "log-probs and the others for an update: call all ranks for the same"
            )
        if num_faults:
            raise ProvenanceError(self._first_of_ranks(fault))
        # Nothing to train on is a loss of zero, not zero divided by zero.
        num_loss_tokens = num_loss_tokens or 1.0
        if num_refusing:
            # Every rank reports the same reason: that of the first rank that has one.
            reason = None if refusal is None else (refusal.feature, str(refusal))
            refusal = UnsupportedModelError(*self._first_of_ranks(reason))
            if self.options.on_unsupported == "error":
                raise refusal
        return num_loss_tokens, refusal, records

    def _first_of_ranks(self, value: Any) -> Any:
        """The first rank's value that is not None, the same on every rank."""
        group = self.get_data_parallel_group()
        values = [None] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(values, value, group=group)
        return next(value for value in values if value is not None)

    def _run_dense(
        self,
        data: TensorDict,
        loss_function: Callable | None,
        forward_only: bool,
        refusal: UnsupportedModelError,
    ) -> dict[str, Any]:
        """verl's own FSDP2 path, with a warning (once per reason) and a metric."""
        if refusal.feature not in self._warned:
            self._warned.add(refusal.feature)
            logger.warning("prefixflow: training without prefix reuse, because %s", refusal)
        output = super().forward_backward_batch(data, loss_function, forward_only=forward_only)
        output["metrics"][f"{METRIC_PREFIX}fallback"] = [1.0]
        output["metrics"][f"{METRIC_PREFIX}fallback_reason/{refusal.feature}"] = [1.0]
        return output

    def _reuse_metrics(
        self, packed: PackedBatch, stats: RunStats, forward_only: bool
    ) -> dict[str, list[float]]:
        """`prefixflow/` metrics: counts summed over ranks, seconds and bytes of the largest rank.

        verl averages them over mini-batches. It reports no metrics of log-prob passes, so those of
        the last one ride on the next update.
        """
        counts = {
            "logical_tokens": stats.logical_tokens,
            "executed_tokens": stats.executed_tokens,
            "groups_engaged": stats.num_shared_groups,
            "packs": stats.num_packs,
            "dummy_packs": stats.num_dummy_packs,
            "cut_edges": stats.num_cut_edges,
            "dissolved_trees": stats.num_dissolved_trees,
            "flops": self._update_flops(packed),
        }
        slowest = {
            "planning_s": stats.planning_s,
            "cache_bytes": stats.max_cache_bytes,
            "largest_flops": counts["flops"],
        }
        values = {
            **self._over_ranks(counts, torch.distributed.ReduceOp.SUM),
            **self._over_ranks(slowest, torch.distributed.ReduceOp.MAX),
        }
        mean_flops = values.pop("flops") / self.get_data_parallel_size()
        largest_flops = values.pop("largest_flops")
        values["imbalance"] = largest_flops / mean_flops if mean_flops else 1.0
        values["prefixes_recomputed"] = float(stats.prefix_activations == "recompute")
        values["reuse_ratio"] = reuse_ratio(values["logical_tokens"], values["executed_tokens"])
        if forward_only:
            self._log_prob_totals = values
            return {}
        metrics = {f"{METRIC_PREFIX}{name}": [value] for name, value in values.items()}
        metrics[f"{METRIC_PREFIX}fallback"] = [0.0]
        if self._log_prob_totals is not None:
            for name in ("logical_tokens", "executed_tokens", "reuse_ratio", "packs"):
                metrics[f"{METRIC_PREFIX}log_prob/{name}"] = [self._log_prob_totals[name]]
        return metrics

    def _update_flops(self, packed: PackedBatch) -> int:
        model = pretrained_model(self.module)
        num_logit_rows = sum(len(layout.logit_rows) for layout in packed.layouts)
        flops = forest_flops(ModelShape.from_config(model.config), packed.forest, num_logit_rows)
        return flops.update(checkpointing=model.is_gradient_checkpointing)

    def _over_ranks(
        self, values: dict[str, float], operation: torch.distributed.ReduceOp
    ) -> dict[str, float]:
        reduced = torch.tensor(list(values.values()), dtype=torch.float64, device=_compute_device())
        torch.distributed.all_reduce(reduced, op=operation, group=self.get_data_parallel_group())
        return dict(zip(values, reduced.tolist(), strict=True))

    def _unless_supported(self, check: Callable[[], None]) -> None:
        """Run `check`; on a refusal raise it or remember it, as `on_unsupported` says."""
        try:
            check()
        except UnsupportedModelError as error:
            if self.options.on_unsupported == "error":
                raise
            self._fallback = error


class _PackCollector:
    """Turns completed rollouts into verl's loss calls and gathers what comes back."""

    def __init__(
        self,
        *,
        data: TensorDict,
        batch: RolloutBatch,
        order: list[int],
        loss_function: Callable | None,
        dp_group: torch.distributed.ProcessGroup,
        loss_context: Callable[[], AbstractContextManager],
        keep_output: bool,
    ) -> None:
        self._rows = OrderedRows(data, order) if loss_function is not None else None
        self._batch = batch
        self._loss_function = loss_function
        self._dp_group = dp_group
        self._loss_context = loss_context
        self._keep_output = keep_output
        self._old_log_probs = response_rows(data, "old_log_probs")
        self._outputs: dict[str, dict[int, torch.Tensor]] = {}
        self._losses: list[float] = []
        self._metrics: list[dict[str, Any]] = []
        self._weights: list[int] = []

    def add(self, rollouts: CompletedRollouts) -> torch.Tensor | None:
        """Loss of one pack's completed rollouts; None if there is no loss function."""
        model_output = model_output_rows(rollouts, self._batch, self._old_log_probs)
        if self._keep_output:
            for name, jagged in detach_tree(model_output).items():
                rows = self._outputs.setdefault(name, {})
                rows.update(zip(rollouts.rollout_ids, jagged.unbind(), strict=True))
        if self._loss_function is None:
            return None
        rows = self._rows.take(rollouts.rollout_ids).to(get_device_id())
        with self._loss_context():
            loss, metrics = self._loss_function(
                model_output=model_output, data=rows, dp_group=self._dp_group
            )
        self._losses.append(loss.detach().item())
        self._metrics.append(metrics)
        ids = list(rollouts.rollout_ids)
        self._weights.append(int(self._batch.num_loss_tokens[ids].sum()))
        return loss

    def result(self, with_entropy: bool) -> dict[str, Any]:
        """verl's output dict for the whole batch, rows in their original order."""
        model_output = {}
        if self._keep_output:
            for name in ("log_probs", "entropy") if with_entropy else ("log_probs",):
                found = self._outputs.get(name, {})
                rows = [
                    found.get(index, torch.zeros(len(tokens), device=_compute_device()))
                    for index, tokens in enumerate(self._batch.token_ids)
                ]
                model_output[name] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        # Without a loss function verl reports a loss of one per micro-batch; nothing reads it.
        losses = self._losses or [0.0]
        return {"model_output": model_output, "loss": losses, "metrics": self._merge_metrics()}

    def _merge_metrics(self) -> dict[str, Any]:
        """One value per metric and rank: verl asks for equally many on every rank.

        Sums add up over packs. Means are weighted with the packs' loss tokens, which gives the mean
        over the rank's tokens however the rows were packed.
        """
        merged: dict[str, Any] = {}
        for name in dict.fromkeys(name for metrics in self._metrics for name in metrics):
            values = [metrics[name] for metrics in self._metrics if name in metrics]
            if not isinstance(values[0], Metric):
                merged[name] = values
                continue
            aggregation = values[0].aggregation
            numbers = [value.aggregate() for value in values]
            if aggregation is AggregationType.MEAN and sum(self._weights):
                number = float(np.average(numbers, weights=self._weights))
            else:
                together = Metric(aggregation)
                together.extend(numbers)
                number = float(together.aggregate())
            merged[name] = Metric(aggregation, number)
        return merged


def check_settings(model_config: HFModelConfig, engine_config: FSDPEngineConfig) -> None:
    """Refuse verl settings that prefix reuse cannot honour, before a model is built.

    Raises:
        UnsupportedModelError: naming the setting's config path and what to set it to.
    """

    def select(path: str) -> Any:
        for prefix, value in ((ENGINE_PATH, engine_config), (MODEL_PATH, model_config)):
            if path.startswith(f"{prefix}."):
                for name in path.removeprefix(f"{prefix}.").split("."):
                    value = getattr(value, name, None)
                return value
        return None

    found = find_refusal(select)
    if found is not None:
        refusal, value = found
        raise UnsupportedModelError(refusal.feature, refusal.message(value))


def check_request(data: TensorDict) -> None:
    """Refuse calls that need more of the model than log-probs and entropies.

    Raises:
        UnsupportedModelError: naming what was asked for.
    """
    for key, setting in (
        ("distillation_use_topk", "distillation.distillation_loss.loss_settings.use_topk"),
        ("distillation_only", "distillation without a policy loss"),
        ("calculate_sum_pi_squared", "calculate_sum_pi_squared"),
    ):
        if tu.get_non_tensor_data(data=data, key=key, default=False):
            raise UnsupportedModelError(
                key,
                f"{setting} needs full logits, which prefix reuse does not keep: turn it off, or "
                f"set {OPTIONS_PATH}.on_unsupported=fallback to train without reuse",
            )


def _compute_device() -> torch.device:
    name = get_device_name()
    return torch.device(name) if name == "cpu" else torch.device(name, get_device_id())
