"""The plugin's own settings. Importable without torch or verl.

They live at `actor_rollout_ref.actor.fsdp_config.prefixflow` of a verl config; every error message
below names that path, because that is what a user can change. `engine_config.py` puts them into
verl's engine config.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

STRATEGY = "prefixflow"
"""The value of `actor_rollout_ref.actor.strategy` that selects this plugin."""

OPTIONS_PATH = "actor_rollout_ref.actor.fsdp_config.prefixflow"
"""Where the options stand in a verl config."""

PROVENANCE_PATH = f"{OPTIONS_PATH}.provenance"
"""Where the provenance rules stand in a verl config."""

METRIC_PREFIX = "prefixflow/"
"""Namespace of every metric the plugin reports."""

ON_UNSUPPORTED = ("error", "fallback")
ATTENTION_BACKENDS = ("auto", "reference", "sdpa_cpu")
CACHE_GRAD_DTYPES = ("float32", "param")
PREFIX_ACTIVATIONS = ("auto", "keep", "offload", "recompute")
PLANS = ("auto", "fused", "cut", "off")
PLACEMENTS = ("prefix", "length")
PROVENANCE_ACTIONS = ("error", "mask", "drop_group", "warn")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvenanceOptions:
    """Rules for tokens by the policy version that sampled them; words in provenance.py.

    Raises:
        ValueError: a value outside its range; the message names the setting's full config path.
    """

    enabled: bool = True
    """Stamp every sampled token with its policy version, check, apply the rules and keep the
    ledger."""
    max_staleness: int | None = None
    """Most versions between the weights that sampled a token and those that are trained, counted
    for the oldest a token may be from. Versions, 0 or more; None sets no limit."""
    on_stale: str = "warn"
    """What happens to loss tokens above `max_staleness`: `error` stops the run, `mask` takes them
    out of the loss, `drop_group` takes out every response to the same prompt, `warn` trains on them
    and counts them."""
    on_mixed: str = "warn"
    """The same for tokens sampled while the weights changed."""
    on_missing: str = "warn"
    """The same for tokens of which no version is known."""
    ledger_dir: str | None = None
    """Where the ledger goes, one Parquet file per update; None: `provenance` in
    `trainer.default_local_dir`."""

    def __post_init__(self) -> None:
        if not isinstance(self.enabled, bool):
            raise ValueError(f"{PROVENANCE_PATH}.enabled={self.enabled!r} must be true or false")
        if self.max_staleness is not None:
            _require_at_least("provenance.max_staleness", self.max_staleness, 0)
        for name in ("on_stale", "on_mixed", "on_missing"):
            _require_one_of(f"provenance.{name}", getattr(self, name), PROVENANCE_ACTIONS)

    def action_of(self, rule: str) -> str:
        """What the setting `on_<rule>` says."""
        return getattr(self, f"on_{rule}")

    @classmethod
    def from_mapping(cls, settings: Mapping[str, Any]) -> ProvenanceOptions:
        """Options from a plain mapping; errors as for `PrefixFlowOptions.from_mapping`."""
        _refuse_unknown(cls, settings, PROVENANCE_PATH)
        return cls(**settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixFlowOptions:
    """Settings of one prefix-reusing engine.

    Raises:
        ValueError: a value outside its range; the message names the setting's full config path.

    Example:
        PrefixFlowOptions(on_unsupported="fallback", max_tokens_per_pack=8192)
    """

    on_unsupported: str = "error"
    """What to do when the model or a setting cannot be trained with prefix reuse: `error` stops
    before the first step and says why, `fallback` trains densely with a warning and a metric."""
    attention_backend: str = "auto"
    """Kernel of the segment attention: `auto` chooses the fastest usable one and logs it,
    `reference` is plain math in any dtype, `sdpa_cpu` is PyTorch's CPU flash attention."""
    max_tokens_per_pack: int | None = None
    """Most executed tokens in one model forward. Tokens, 1 or more; None takes verl's budget
    (`ppo_max_token_len_per_gpu` and `log_prob_max_token_len_per_gpu`)."""
    max_cache_bytes: int | None = None
    """Most bytes that shared prefixes may hold while their suffixes run: keys, values, gradients of
    both, and activations where those are kept. Bytes per rank, 1 or more; None sets no limit."""
    prefix_activations: str = "auto"
    """What happens to the activations of a prefix while its suffixes run: `keep`; `offload` to the
    CPU; `recompute` by one more forward of the prefix, and segments longer than one forward may
    hold run in pieces; `auto` keeps them unless a prefix would then have to give up sharing for
    `max_cache_bytes`, and recomputes in that case."""
    cache_grad_dtype: str = "float32"
    """Dtype in which gradients of cached keys and values are summed over a group: `float32`, or
    `param` for the dtype of the keys themselves (half the memory in bf16, less exact)."""
    plan: str = "auto"
    """How shared prefixes are laid out: `auto` decides by estimated cost, `fused` never cuts a
    tree, `cut` cuts every shared edge, `off` packs without reuse. All give the same update."""
    min_shared_tokens: int = 8
    """Shortest run of tokens that is computed once for the rollouts that share it. Tokens, 1 or
    more; shorter runs cost more in kernel calls than they save."""
    cut_overhead_tokens: int = 256
    """Tokens that cutting a tree must save to be worth one more forward and backward. Tokens, 0 or
    more; a tree that saves less is run with less sharing."""
    oom_retry: bool = False
    """If a pack does not fit into memory on some rank, discard the mini-batch's gradients on all of
    them and run it once more in smaller packs, instead of ending the job. Costs FSDP2's
    prefetching, and a pass of one token per mini-batch."""
    failure_timeout_s: float = 60.0
    """A rank that still waits for others this long after one has failed is ended. Seconds, above
    0."""
    placement: str = "prefix"
    """Which rank trains on which rollouts: `prefix` keeps rollouts that share a prefix on one rank
    as long as that makes the slowest rank faster, `length` is verl's own placement by length."""
    provenance: ProvenanceOptions = field(default_factory=ProvenanceOptions)
    """Which policy versions may be trained on, and the ledger of what was."""

    def __post_init__(self) -> None:
        _require_one_of("on_unsupported", self.on_unsupported, ON_UNSUPPORTED)
        _require_one_of("attention_backend", self.attention_backend, ATTENTION_BACKENDS)
        _require_one_of("cache_grad_dtype", self.cache_grad_dtype, CACHE_GRAD_DTYPES)
        _require_one_of("prefix_activations", self.prefix_activations, PREFIX_ACTIVATIONS)
        _require_one_of("plan", self.plan, PLANS)
        _require_one_of("placement", self.placement, PLACEMENTS)
        if not isinstance(self.oom_retry, bool):
            raise ValueError(f"{OPTIONS_PATH}.oom_retry={self.oom_retry!r} must be true or false")
        if not _is_number(self.failure_timeout_s) or not 0 < self.failure_timeout_s < math.inf:
            raise ValueError(
                f"{OPTIONS_PATH}.failure_timeout_s={self.failure_timeout_s!r} must be a number of "
                "seconds above 0"
            )
        _require_positive_or_none("max_tokens_per_pack", self.max_tokens_per_pack)
        _require_positive_or_none("max_cache_bytes", self.max_cache_bytes)
        _require_at_least("min_shared_tokens", self.min_shared_tokens, 1)
        _require_at_least("cut_overhead_tokens", self.cut_overhead_tokens, 0)

    @classmethod
    def from_mapping(cls, settings: Mapping[str, Any]) -> PrefixFlowOptions:
        """Options from a plain mapping, such as a section of a Hydra config.

        Raises:
            ValueError: a key that is not a setting, or a value outside its range.
        """
        _refuse_unknown(cls, settings, OPTIONS_PATH)
        settings = dict(settings)
        provenance = settings.pop("provenance", None)
        if isinstance(provenance, Mapping):
            provenance = ProvenanceOptions.from_mapping(provenance)
        return cls(**settings, provenance=provenance or ProvenanceOptions())


def _refuse_unknown(options: type, settings: Mapping[str, Any], path: str) -> None:
    known = [field.name for field in fields(options)]
    unknown = sorted(set(settings) - set(known))
    if unknown:
        raise ValueError(
            f"{path}.{unknown[0]} is not a setting; the settings are {', '.join(known)}"
        )


def _require_one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{OPTIONS_PATH}.{name}={value!r} must be one of {', '.join(allowed)}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _require_positive_or_none(name: str, value: object) -> None:
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(
            f"{OPTIONS_PATH}.{name}={value!r} must be an integer of 1 or more, or null"
        )


def _require_at_least(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{OPTIONS_PATH}.{name}={value!r} must be an integer of {least} or more")
