"""Checks of a run's config that need no worker: made in the driver, before Ray starts.

verl finds a missing model or an unreadable data file only after a minute of start-up, inside a
worker. These checks say the same in one sentence that names the setting. They look only at what
would stop the run anyway; a run on verl's own strategies on an accelerator is checked for the
strategy's name and nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from prefixflow_verl.compat import is_cpu_selected
from prefixflow_verl.config import OPTIONS_PATH, PROVENANCE_PATH, STRATEGY
from prefixflow_verl.refusals import ACTOR_PATH, find_refusal

VERL_STRATEGIES = (
    "fsdp",
    "fsdp2",
    "fsdp_turbo",
    "megatron",
    "veomni",
    "torchtitan",
    "automodel",
)
"""Strategy names of verl 0.9.1. Other plugins may add more, so the registry is asked as well."""

ACTOR_STRATEGY_PATH = f"{ACTOR_PATH}.strategy"


def check_run(config: DictConfig) -> None:
    """Raises ValueError or FileNotFoundError, naming the setting and the remedy, if it cannot run.

    Args:
        config: the composed config of `verl.trainer.main_ppo`, before verl validates it.
    """
    strategy = OmegaConf.select(config, ACTOR_STRATEGY_PATH)
    on_cpu = OmegaConf.select(config, "trainer.device") == "cpu"
    _check_strategy(config, strategy)
    if strategy != STRATEGY and not on_cpu:
        return
    if on_cpu:
        _check_cpu(config, strategy)
    if strategy == STRATEGY:
        _check_reuse(config)
        _check_ranks(config)
        _check_provenance(config)
    _check_model(config)
    for setting in ("data.train_files", "data.val_files"):
        _check_data_files(setting, OmegaConf.select(config, setting))


def _check_strategy(config: DictConfig, strategy: str) -> None:
    known = {STRATEGY, *VERL_STRATEGIES}
    if strategy not in known and strategy not in _registered_strategies():
        raise ValueError(
            f"{ACTOR_STRATEGY_PATH}={strategy} is not a strategy: use one of "
            f"{', '.join(sorted(known))}"
        )
    critic_strategy = OmegaConf.select(config, "critic.strategy")
    if critic_strategy == STRATEGY:
        raise ValueError(
            f"critic.strategy={STRATEGY} is not supported, value models share no prefixes: "
            "set critic.strategy=fsdp2"
        )
    engine_path = "actor_rollout_ref.actor.fsdp_config"
    engine_config = OmegaConf.select(config, engine_path) or {}
    has_options = engine_config.get("_target_", "").startswith("prefixflow_verl.")
    if has_options and strategy == "fsdp":
        raise ValueError(
            f"{ACTOR_STRATEGY_PATH}=fsdp is FSDP1, whose flat parameters cannot serve a delayed "
            f"backward, but {engine_path} asks for prefix reuse: set "
            f"{ACTOR_STRATEGY_PATH}={STRATEGY}"
        )
    if "prefixflow" in engine_config and not has_options:
        raise ValueError(
            f"{engine_path}.prefixflow needs "
            f"{engine_path}._target_=prefixflow_verl.engine_config.PrefixFlowEngineConfig"
        )
    named_in_engine = engine_config.get("strategy") == STRATEGY
    if named_in_engine and not has_options:
        raise ValueError(
            f"{engine_path}.strategy={STRATEGY} is the wrong place: leave it out and set "
            f"{ACTOR_STRATEGY_PATH}={STRATEGY}"
        )


def _check_reuse(config: DictConfig) -> None:
    """Settings that prefix reuse cannot honour, unless on_unsupported=fallback."""
    options = OmegaConf.select(config, OPTIONS_PATH) or {}
    if options.get("on_unsupported") == "fallback":
        return
    found = find_refusal(lambda path: OmegaConf.select(config, path))
    if found is not None:
        refusal, value = found
        raise ValueError(refusal.message(value))
    if OmegaConf.select(config, f"{ACTOR_PATH}.policy_loss.loss_mode") == "geo_mean":
        raise ValueError(
            f"{ACTOR_PATH}.policy_loss.loss_mode=geo_mean averages inside each micro-batch, so the "
            "update grows with the number of packs: use another policy loss, or set "
            f"{OPTIONS_PATH}.on_unsupported=fallback to train without reuse"
        )
    mode = OmegaConf.select(config, f"{ACTOR_PATH}.loss_agg_mode")
    factor = OmegaConf.select(config, f"{ACTOR_PATH}.loss_scale_factor")
    if mode == "seq-mean-token-sum-norm" and factor is None:
        raise ValueError(
            f"{ACTOR_PATH}.loss_agg_mode={mode} without {ACTOR_PATH}.loss_scale_factor divides "
            "by the longest response of each micro-batch, so the update depends on how rows are "
            f"packed: set {ACTOR_PATH}.loss_scale_factor to data.max_response_length"
        )


def _check_ranks(config: DictConfig) -> None:
    """Mini-batches that verl could not divide over the ranks, which it says at the first update."""
    settings = (
        f"{ACTOR_PATH}.ppo_mini_batch_size",
        "actor_rollout_ref.rollout.n",
        "trainer.nnodes",
        "trainer.n_gpus_per_node",
    )
    sizes = {setting: OmegaConf.select(config, setting) for setting in settings}
    if None in sizes.values():
        return
    prompts, responses, nodes, ranks = sizes.values()
    if (prompts * responses) % (nodes * ranks):
        given = ", ".join(f"{setting}={size}" for setting, size in sizes.items())
        raise ValueError(
            f"a mini-batch of {prompts * responses} rollouts does not divide over {nodes * ranks} "
            f"ranks ({given}): make the product of the first two a multiple of that of the others"
        )


def _check_provenance(config: DictConfig) -> None:
    """Rules that no run with these rollouts could keep."""
    rules = OmegaConf.select(config, PROVENANCE_PATH) or {}
    if not rules.get("enabled", True) or rules.get("on_missing") != "error":
        return
    rollout_path = "actor_rollout_ref.rollout"
    name = OmegaConf.select(config, f"{rollout_path}.name")
    setting = f"{rollout_path}.name={name}" if name != "vllm" else None
    if OmegaConf.select(config, f"{rollout_path}.disaggregation.enabled"):
        setting = f"{rollout_path}.disaggregation.enabled=True"
    if setting is not None:
        raise ValueError(
            f"{PROVENANCE_PATH}.on_missing=error with {setting} would stop the first update, only "
            "vLLM's ordinary server stamps tokens: use it, or set on_missing to warn"
        )


def _registered_strategies() -> Iterable[str]:
    from verl.workers.engine import EngineRegistry

    return EngineRegistry._engines.get("language_model", {}).keys()


def _check_cpu(config: DictConfig, strategy: str) -> None:
    if not is_cpu_selected():
        raise ValueError(
            "trainer.device=cpu needs the environment variable VERL_PLATFORM=cpu, "
            "which every process of the run must inherit"
        )
    if strategy == "fsdp":
        raise ValueError(
            f"{ACTOR_STRATEGY_PATH}=fsdp cannot run on a CPU: set it to {STRATEGY} or fsdp2"
        )
    model_path = "actor_rollout_ref.model"
    for setting in (f"{model_path}.lora_rank", f"{model_path}.lora.rank"):
        rank = OmegaConf.select(config, setting) or 0
        if rank > 0 and not OmegaConf.select(config, f"{model_path}.lora.merge"):
            raise ValueError(
                f"{setting}={rank} on a CPU needs {model_path}.lora.merge=True: "
                "vLLM's CPU build cannot swap adapters"
            )


def _check_model(config: DictConfig) -> None:
    setting = "actor_rollout_ref.model.path"
    path = OmegaConf.select(config, setting)
    if path is None:
        raise ValueError(f"{setting} is not set: name a model directory or a Hugging Face model id")
    directory = Path(path).expanduser()
    if directory.is_dir():
        if not (directory / "config.json").is_file():
            raise FileNotFoundError(
                f"{setting}={path} has no config.json: name the directory that holds the model"
            )
        return
    if not _may_be_hub_id(path):
        raise FileNotFoundError(f"{setting}={path} does not exist: name a model directory")


def _may_be_hub_id(path: str) -> bool:
    """True for `name`, `organisation/name` and remote addresses such as `hdfs://...`."""
    if "://" in path:
        return True
    return not path.startswith((".", "~", os.sep)) and path.count("/") <= 1


def _check_data_files(setting: str, files: Any) -> None:
    if files is None:
        return
    for file in [files] if isinstance(files, str) else files:
        path = Path(file).expanduser()
        if "://" in file:
            continue
        if not path.is_file():
            raise FileNotFoundError(f"{setting}={file} does not exist: name a data file")
        if path.suffix == ".parquet":
            _check_parquet(setting, path)


def _check_parquet(setting: str, path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    try:
        pyarrow.parquet.read_schema(path)
    except (pyarrow.ArrowInvalid, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"{setting}={path} is not a readable parquet file ({reason}): write it again"
        ) from error
