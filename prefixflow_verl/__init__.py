"""PrefixFlow for veRL: exact prefix reuse in the actor update of GRPO-style training.

Rollouts that share a prefix are trained with that prefix computed once: forward into a training-
time KV cache, suffix packs that read it and accumulate gradients into it, one delayed backward
through it. The update equals full-sequence training.

Reading order: `forest` (what is shared), `plan` (what runs together, in which order), `packing`
(what one forward sees), `attention` and `kv_cache` (how a suffix reads a prefix), `phases` (how
gradients get back), `engine` (how veRL calls it). `accounting` holds the one cost formula, by which
`balance` places rollouts on ranks (`placement` asks it to) and `simulate` predicts what that buys.
Ranks that fail: `lockstep` (out of memory), `failures` (everything else).

Which policy version sampled a token: `provenance` (words, checks, rules), `version_stamps` and
`vllm_stamps` (where versions come from), `trajectories` (one record per sequence), `update_gate`
(rules before the update), `ledger` (what was trained on), `ledger_report` (what that says).

Import layers: `forest`, `plan`, `packing`, `accounting`, `balance`, `simulate`, `provenance` need
numpy only;
`activations`, `attention`, `failures`, `kv_cache`, `lockstep`, `log_probs`, `model_hook`, `phases`
need torch and transformers and know nothing of veRL; the rest is the veRL side.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prefixflow_verl.forest import PrefixForest, Segment, build_forest
    from prefixflow_verl.kv_cache import StaleCacheError
    from prefixflow_verl.model_hook import UnsupportedModelError, check_model
    from prefixflow_verl.phases import CompletedRollouts, PrefixFlow, RunStats
    from prefixflow_verl.plan import PackBudget, Plan, make_plan

__version__ = "0.1.0"

_HOME = {
    "PrefixForest": "forest",
    "Segment": "forest",
    "build_forest": "forest",
    "PackBudget": "plan",
    "Plan": "plan",
    "make_plan": "plan",
    "StaleCacheError": "kv_cache",
    "UnsupportedModelError": "model_hook",
    "check_model": "model_hook",
    "CompletedRollouts": "phases",
    "PrefixFlow": "phases",
    "RunStats": "phases",
}

__all__ = [
    "CompletedRollouts",
    "PackBudget",
    "Plan",
    "PrefixFlow",
    "PrefixForest",
    "RunStats",
    "Segment",
    "StaleCacheError",
    "UnsupportedModelError",
    "build_forest",
    "check_model",
    "make_plan",
]


def __getattr__(name: str) -> Any:
    """Import public names on first use, so that the pure layer needs no torch."""
    if name in _HOME:
        return getattr(import_module(f"prefixflow_verl.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
