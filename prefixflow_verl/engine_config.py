"""verl's FSDP engine config with the plugin's options beside verl's own fields.

A verl config selects it by `_target_` in `actor_rollout_ref.actor.fsdp_config`. That is optional:
with verl's plain `FSDPEngineConfig` the engine runs with default options.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig, OmegaConf
from verl.workers.config import EngineConfig, FSDPEngineConfig

from prefixflow_verl.config import (
    OPTIONS_PATH,
    STRATEGY,
    PrefixFlowOptions,
    ProvenanceOptions,
)


@dataclass
class PrefixFlowEngineConfig(FSDPEngineConfig):
    """`FSDPEngineConfig` plus `prefixflow`, the plugin's options.

    Raises:
        ValueError: a strategy other than prefixflow, fsdp2 or verl's default fsdp. verl copies
            `actor_rollout_ref.actor.strategy` over this field, so fsdp here means only "not set".
    """

    strategy: str = STRATEGY
    prefixflow: PrefixFlowOptions | dict[str, Any] = field(default_factory=PrefixFlowOptions)

    def __post_init__(self) -> None:
        # Not FSDPEngineConfig's check: it accepts verl's own strategy names only.
        EngineConfig.__post_init__(self)
        if self.strategy not in (STRATEGY, "fsdp2", "fsdp"):
            raise ValueError(
                f"actor_rollout_ref.actor.fsdp_config.strategy={self.strategy!r} is not supported: "
                f"set actor_rollout_ref.actor.strategy={STRATEGY} (or fsdp2)"
            )
        if isinstance(self.prefixflow, Mapping):
            options = PrefixFlowOptions.from_mapping(self.prefixflow)
            object.__setattr__(self, "prefixflow", options)


def options_of(engine_config: FSDPEngineConfig) -> PrefixFlowOptions:
    """The plugin's options in an engine config; defaults where it carries none."""
    if isinstance(engine_config, PrefixFlowEngineConfig):
        return engine_config.prefixflow
    return PrefixFlowOptions()


def as_fsdp2(engine_config: FSDPEngineConfig) -> FSDPEngineConfig:
    """A copy that verl's FSDP engine builds as FSDP2; the original keeps its strategy name."""
    built = copy.copy(engine_config)
    object.__setattr__(built, "strategy", "fsdp2")
    return built


def run_options(config: DictConfig) -> PrefixFlowOptions | None:
    """The options of a composed run config; None where the actor is not ours."""
    if OmegaConf.select(config, "actor_rollout_ref.actor.strategy") != STRATEGY:
        return None
    section = OmegaConf.select(config, OPTIONS_PATH)
    if section is None:
        return PrefixFlowOptions()
    return PrefixFlowOptions.from_mapping(OmegaConf.to_container(section, resolve=True))


def provenance_options(config: DictConfig) -> ProvenanceOptions | None:
    """The rules of a composed run config; None where they are off or the actor is not ours."""
    options = run_options(config)
    return options.provenance if options is not None and options.provenance.enabled else None
