"""verl settings that prefix reuse cannot honour: one table, read by the driver and by every engine.

The driver asks before Ray starts, with the composed config; an engine asks at construction, with
the config objects it was given (other trainers than `main_ppo` build engines too). What depends on
the model itself is in `model_hook.check_model`, what depends on the rows of a batch in
`rollouts.check_rows`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from prefixflow_verl.config import OPTIONS_PATH

ACTOR_PATH = "actor_rollout_ref.actor"
ENGINE_PATH = f"{ACTOR_PATH}.fsdp_config"
MODEL_PATH = "actor_rollout_ref.model"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """One setting that cannot be honoured."""

    feature: str
    """Short name, used in the metric `prefixflow/fallback_reason/<feature>`."""
    setting: str
    """Full config path."""
    is_refused: Callable[[Any], bool]
    """True for values that cannot be honoured; not asked where the setting is absent or null."""
    why: str
    remedy: str
    """Value to set instead."""

    def message(self, value: Any) -> str:
        return (
            f"{self.setting}={value} is not supported with prefix reuse ({self.why}): set it to "
            f"{self.remedy}, or set {OPTIONS_PATH}.on_unsupported=fallback to train without reuse"
        )


def _more_than_one(value: Any) -> bool:
    return value > 1


REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        feature="ulysses",
        setting=f"{ACTOR_PATH}.ulysses_sequence_parallel_size",
        is_refused=_more_than_one,
        why="sequence parallelism splits packed rows across ranks",
        remedy="1",
    ),
    Refusal(
        feature="ulysses",
        setting=f"{ENGINE_PATH}.ulysses_sequence_parallel_size",
        is_refused=_more_than_one,
        why="sequence parallelism splits packed rows across ranks",
        remedy="1",
    ),
    Refusal(
        feature="fused_kernels",
        setting=f"{MODEL_PATH}.use_fused_kernels",
        is_refused=bool,
        why="the fused LM head expects one target per token, a shared last token has several",
        remedy="False",
    ),
    Refusal(
        feature="pad_to_length",
        setting=f"{ENGINE_PATH}.pad_to_length",
        is_refused=bool,
        why="packs of unique tokens are not padded to buckets",
        remedy="False",
    ),
    Refusal(
        feature="activation_offload",
        setting=f"{MODEL_PATH}.enable_activation_offload",
        is_refused=bool,
        why="it expects every forward to be followed by its own backward",
        remedy="False",
    ),
    Refusal(
        feature="qat",
        setting=f"{ENGINE_PATH}.qat.enable",
        is_refused=bool,
        why="quantisation observers would see shared tokens once",
        remedy="False",
    ),
    Refusal(
        feature="router_replay",
        setting=f"{ENGINE_PATH}.router_replay.mode",
        is_refused=lambda mode: mode != "disabled",
        why="recorded routes are per rollout, not per shared token",
        remedy="disabled",
    ),
    Refusal(
        feature="mtp",
        setting=f"{MODEL_PATH}.mtp.enable",
        is_refused=bool,
        why="its extra heads predict beyond a segment",
        remedy="False",
    ),
    Refusal(
        feature="sum_pi_squared",
        setting=f"{ACTOR_PATH}.calculate_sum_pi_squared",
        is_refused=bool,
        why="it needs the whole distribution of every token",
        remedy="False",
    ),
    Refusal(
        feature="prefix_grouper",
        setting=f"{ACTOR_PATH}.use_prefix_grouper",
        is_refused=bool,
        why="verl no longer reads this flag and this engine replaces it",
        remedy="False",
    ),
    Refusal(
        feature="distillation_topk",
        setting="distillation.distillation_loss.loss_settings.use_topk",
        is_refused=bool,
        why="it needs the logits of every token",
        remedy="False",
    ),
)


def find_refusal(select: Callable[[str], Any]) -> tuple[Refusal, Any] | None:
    """The first setting that cannot be honoured and its value.

    Args:
        select: value of a full config path; None where it is absent.
    """
    for refusal in REFUSALS:
        value = select(refusal.setting)
        if value is not None and refusal.is_refused(value):
            return refusal, value
    return None
