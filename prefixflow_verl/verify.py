"""Compares prefix reuse with full-sequence training of one model: `prefixflow verify`.

The full-sequence side runs one rollout at a time through the untouched Hugging Face model and
shares no code with the rest of the package. Both sides see the same rollouts, the same loss and the
same weights.

[Note: relative error of a gradient]
The error of a parameter is `|ours - truth| / max(|truth|, floor)` in 2-norms. Where the true
gradient is zero or nearly so (an expert that no token reaches, a bias that softmax cancels), truth
is rounding noise and dividing by it says nothing. The floor is 1e-2 of the norm of the whole
gradient: a parameter below it is judged by what its error does to the update.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, Qwen3Config

from prefixflow_verl.attention import choose_backend
from prefixflow_verl.model_hook import check_model
from prefixflow_verl.phases import CompletedRollouts, PrefixFlow, RunStats

TOLERANCES = {"float64": 1e-6, "float32": 1e-5}
"""Largest error by dtype. In float64 transformers still computes norms and RoPE in float32."""

BFLOAT16_FACTOR = 2.0
"""In bfloat16 our error against float32 may be this many times that of full-sequence bfloat16."""

GRADIENT_FLOOR = 1e-2
"""See [Note: relative error of a gradient]."""

_UNLIMITED_TOKENS = 1 << 60

RolloutLoss = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]


class ModelPathError(ValueError):
    """The directory holds no model that transformers can load; the message is one sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The rollouts to compare on.

    Every shared segment above the last level has two branches, and `group` responses hang below
    each segment of the last level, so there are `group * 2 ** (depth - 1)` rollouts. Everything
    after the prompt is predicted and carries loss, also turns that branches share.
    """

    prompt: int = 64
    """Tokens that all rollouts share. 1 or more."""
    response: int = 16
    """Tokens of a shared turn and of the longest response; others have at least half. 1 or more."""
    group: int = 4
    """Responses below each shared segment of the last level. 1 or more."""
    depth: int = 1
    """Levels of sharing: 1 shares the prompt, each further level a turn. 1 or more."""

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest rollout."""
        return self.prompt + self.depth * self.response

    def rollouts(self, vocab: int, rng: np.random.Generator) -> list[np.ndarray]:
        """Sequences of random token ids below `vocab`."""
        stems = [rng.integers(0, vocab, self.prompt)]
        for _ in range(self.depth - 1):
            stems = [
                np.concatenate([stem, rng.integers(0, vocab, self.response)])
                for stem in stems
                for _ in range(2)
            ]
        sequences = []
        for stem in stems:
            for member in range(self.group):
                shorter = int(rng.integers(0, self.response // 2 + 1)) if member else 0
                tail = rng.integers(0, vocab, self.response - shorter)
                sequences.append(np.concatenate([stem, tail]))
        return sequences


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Distance of one run from the truth."""

    max_abs_logprob_error: float
    """Nats."""
    max_abs_entropy_error: float
    """Nats."""
    loss_error: float
    """Absolute."""
    total_rel_grad_error: float
    """Norm of the difference of the whole gradient / norm of the true one."""
    by_parameter: dict[str, float]
    """Relative error of each parameter's gradient; see [Note: relative error of a gradient]."""

    @property
    def worst_parameter(self) -> str:
        return max(self.by_parameter, key=self.by_parameter.__getitem__)

    @property
    def max_rel_grad_error(self) -> float:
        return self.by_parameter[self.worst_parameter]

    @property
    def figures(self) -> dict[str, float]:
        """The errors that have a limit."""
        return {
            "max_abs_logprob_error": self.max_abs_logprob_error,
            "max_abs_entropy_error": self.max_abs_entropy_error,
            "loss_error": self.loss_error,
            "total_rel_grad_error": self.total_rel_grad_error,
            "max_rel_grad_error": self.max_rel_grad_error,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    """Reuse under one plan."""

    name: str
    """`fused` (nothing cut), `cut` (every shared edge cut) or `budget` (as asked for)."""
    stats: RunStats
    errors: Errors
    limits: dict[str, float]
    """Largest value of each of `errors.figures`."""

    @property
    def ok(self) -> bool:
        return all(value <= self.limits[name] for name, value in self.errors.figures.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What `verify` found."""

    model: str
    device: str
    dtype: str
    attention_backend: str
    plans: tuple[PlanResult, ...]

    @property
    def ok(self) -> bool:
        return all(plan.ok for plan in self.plans)

    def as_record(self) -> dict[str, Any]:
        """A JSON-ready record; its top level is the worst over plans.

        None stands for a number that is not finite.
        """
        worst = max(self.plans, key=lambda plan: plan.errors.max_rel_grad_error)
        figures = {
            name: max(plan.errors.figures[name] for plan in self.plans)
            for name in worst.errors.figures
        }
        return {
            "ok": self.ok,
            "model": self.model,
            "device": self.device,
            "dtype": self.dtype,
            "attention_backend": self.attention_backend,
            "tolerance": _finite(worst.limits["max_rel_grad_error"]),
            **{name: _finite(value) for name, value in figures.items()},
            "worst_parameter": worst.errors.worst_parameter,
            "logical_tokens": worst.stats.logical_tokens,
            "executed_tokens": worst.stats.executed_tokens,
            "reuse_ratio": worst.stats.reuse_ratio,
            "plans": [
                {
                    "name": plan.name,
                    "ok": plan.ok,
                    "num_packs": plan.stats.num_packs,
                    "num_cut_edges": plan.stats.num_cut_edges,
                    "max_cache_bytes": plan.stats.max_cache_bytes,
                    **{name: _finite(value) for name, value in plan.errors.figures.items()},
                    "worst_parameter": plan.errors.worst_parameter,
                    "limits": {name: _finite(value) for name, value in plan.limits.items()},
                    "parameters": {
                        name: _finite(value) for name, value in plan.errors.by_parameter.items()
                    },
                }
                for plan in self.plans
            ],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Training:
    """Outcome of one forward and backward over all rollouts."""

    loss: float
    log_probs: list[torch.Tensor]
    """Per rollout, of its predicted tokens, detached."""
    entropies: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]


def read_config(path: Path) -> PretrainedConfig:
    """The config of the model in directory `path`.

    Raises:
        ModelPathError: no such directory, no `config.json`, or one that transformers cannot read.
    """
    if not path.is_dir():
        raise ModelPathError(f"{path} does not exist: name the directory of a Hugging Face model")
    if not (path / "config.json").is_file():
        raise ModelPathError(
            f"{path} has no config.json: name the directory of a Hugging Face model"
        )
    try:
        return AutoConfig.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise ModelPathError(f"{path}/config.json cannot be used: {_one_line(error)}") from error


def check_architecture(config: PretrainedConfig) -> None:
    """Check the model that `config` describes, without weights and without allocating any.

    Raises:
        UnsupportedModelError: prefix reuse cannot reproduce it; names the setting and the remedy.
        ModelPathError: it is not a causal LM.
    """
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except ValueError as error:
        raise ModelPathError(
            f"model_type={config.model_type} is not a causal LM of transformers: {_one_line(error)}"
        ) from error
    check_model(model)


def verify(
    *,
    model_path: Path | None,
    workload: Workload,
    dtype: Literal["float32", "float64", "bfloat16"] = "float32",
    token_budget: int | None = None,
    checkpointing: bool = False,
    attention_backend: str = "auto",
    seed: int = 0,
) -> Verification:
    """Compute one step's gradient both ways and compare; on the first GPU, else on the CPU.

    Args:
        model_path: directory of the model; None: a tiny random Qwen3.
        workload: the rollouts.
        dtype: of the parameters.
        token_budget: executed tokens per pack; None runs a plan without cuts and one that cuts all.
        checkpointing: activation checkpointing, on both sides.
        attention_backend: see `choose_backend`.
        seed: of weights (tiny model), tokens and loss.

    Raises:
        ModelPathError: the model cannot be loaded.
        UnsupportedModelError: prefix reuse cannot reproduce the model.
        ValueError: the backend cannot serve the device, or the rollouts are too long for the model.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    backend = choose_backend(attention_backend, device)
    torch.manual_seed(seed)
    config = _tiny_config() if model_path is None else read_config(model_path)
    check_architecture(config)
    max_positions = getattr(config, "max_position_embeddings", None)
    if max_positions is not None and workload.max_tokens > max_positions:
        raise ValueError(
            f"rollouts of {workload.max_tokens} tokens exceed the model's max_position_embeddings="
            f"{max_positions}: lower --prompt, --response or --depth"
        )
    model = _load_model(config, model_path).to(device).train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    rng = np.random.default_rng(seed)
    sequences = workload.rollouts(config.vocab_size, rng)
    # Entry p asks for token p + 1: everything after the prompt.
    predict = [np.arange(len(sequence) - 1) >= workload.prompt - 1 for sequence in sequences]
    loss = _rollout_loss(rng.standard_normal(len(sequences)))

    is_bfloat16 = dtype == "bfloat16"
    _cast_parameters(model, torch.float32 if is_bfloat16 else getattr(torch, dtype))
    truth = _train_dense(model, sequences, predict, loss)
    if not _is_finite(truth):
        raise ValueError(
            f"full-sequence training of this model in {dtype} gives log-probs or gradients that "
            "are not finite: nothing can be compared with them"
        )
    if is_bfloat16:
        _cast_parameters(model, torch.bfloat16)
        dense = _compare(_train_dense(model, sequences, predict, loss), truth)
        limits = _bfloat16_limits(dense, truth)
    else:
        limits = _limits(truth, TOLERANCES[dtype])

    budgets = {"budget": token_budget}
    if token_budget is None:
        # One token per pack cuts every edge below a shared segment.
        budgets = {"fused": _UNLIMITED_TOKENS, "cut": 1}
    plans = []
    for name, max_tokens in budgets.items():
        flow = PrefixFlow(
            model,
            max_tokens_per_pack=max_tokens,
            attention_backend=attention_backend,
            self_check=False,  # this comparison says more
        )
        ours, stats = _train_with_reuse(flow, model, sequences, predict, loss)
        plans.append(
            PlanResult(name=name, stats=stats, errors=_compare(ours, truth), limits=limits)
        )
    return Verification(
        model="tiny random Qwen3" if model_path is None else str(model_path),
        device=str(device),
        dtype=dtype,
        attention_backend=backend.name,
        plans=tuple(plans),
    )


def _tiny_config() -> PretrainedConfig:
    return Qwen3Config(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1 << 20,
        tie_word_embeddings=True,
        # Large enough for attention to differ between positions.
        initializer_range=0.1,
    )


def _load_model(config: PretrainedConfig, path: Path | None) -> torch.nn.Module:
    if path is None:
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    try:
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelPathError(f"{path} cannot be loaded: {_one_line(error)}") from error


def _cast_parameters(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Cast parameters only: `model.to` would also round RoPE frequencies, which stay in float32."""
    for parameter in model.parameters():
        parameter.grad = None
        parameter.data = parameter.data.to(dtype)


def _rollout_loss(advantages: np.ndarray) -> RolloutLoss:
    """A loss whose gradient depends on the advantage, the log-prob's own value and the entropy."""
    num_rollouts = len(advantages)

    def loss(rollout: int, log_probs: torch.Tensor, entropies: torch.Tensor) -> torch.Tensor:
        policy = -float(advantages[rollout]) * log_probs.mean()
        return (policy + 0.05 * (log_probs**2).mean() - 0.01 * entropies.mean()) / num_rollouts

    return loss


def _train_dense(
    model: torch.nn.Module,
    sequences: list[np.ndarray],
    predict: list[np.ndarray],
    loss: RolloutLoss,
) -> _Training:
    """One rollout at a time through the untouched model."""
    device = next(model.parameters()).device
    total, all_log_probs, all_entropies = 0.0, [], []
    model.zero_grad(set_to_none=True)
    for rollout, (sequence, wanted) in enumerate(zip(sequences, predict, strict=True)):
        tokens = torch.from_numpy(sequence).to(device)
        logits = model(input_ids=tokens[None, :-1], use_cache=False).logits[0]
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        where = torch.from_numpy(wanted).to(device)
        log_p = torch.log_softmax(logits[where].to(wide), dim=-1)
        log_probs = log_p.gather(-1, tokens[1:][where][:, None])[:, 0]
        entropies = -(log_p.exp() * log_p).sum(-1)
        value = loss(rollout, log_probs, entropies)
        value.backward()
        total += value.item()
        all_log_probs.append(log_probs.detach())
        all_entropies.append(entropies.detach())
    return _Training(
        loss=total,
        log_probs=all_log_probs,
        entropies=all_entropies,
        gradients=_take_gradients(model),
    )


def _train_with_reuse(
    flow: PrefixFlow,
    model: torch.nn.Module,
    sequences: list[np.ndarray],
    predict: list[np.ndarray],
    loss: RolloutLoss,
) -> tuple[_Training, RunStats]:
    log_probs: dict[int, torch.Tensor] = {}
    entropies: dict[int, torch.Tensor] = {}

    def pack_loss(rollouts: CompletedRollouts) -> torch.Tensor:
        rows = list(zip(rollouts.rollout_ids, rollouts.log_probs, rollouts.entropies, strict=True))
        log_probs.update({rollout: values.detach() for rollout, values, _ in rows})
        entropies.update({rollout: values.detach() for rollout, _, values in rows})
        return torch.stack([loss(*row) for row in rows]).sum()

    model.zero_grad(set_to_none=True)
    total, stats = flow.backward(sequences, pack_loss, predict=predict, with_entropy=True)
    training = _Training(
        loss=total,
        log_probs=[log_probs[rollout] for rollout in range(len(sequences))],
        entropies=[entropies[rollout] for rollout in range(len(sequences))],
        gradients=_take_gradients(model),
    )
    return training, stats


def _take_gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter's gradient, zeros where there is none; the model is left without."""
    gradients = {
        name: parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        for name, parameter in model.named_parameters()
    }
    model.zero_grad(set_to_none=True)
    return gradients


def _is_finite(training: _Training) -> bool:
    tensors = [*training.log_probs, *training.entropies, *training.gradients.values()]
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


def _compare(ours: _Training, truth: _Training) -> Errors:
    true_norms = {name: _norm(gradient) for name, gradient in truth.gradients.items()}
    differences = {
        name: _norm(ours.gradients[name].to(gradient.dtype) - gradient)
        for name, gradient in truth.gradients.items()
    }
    true_norm = math.hypot(*true_norms.values())
    # All gradients zero: any difference is an infinite error.
    floor = max(GRADIENT_FLOOR * true_norm, 1e-300)
    return Errors(
        max_abs_logprob_error=_max_difference(ours.log_probs, truth.log_probs),
        max_abs_entropy_error=_max_difference(ours.entropies, truth.entropies),
        loss_error=_or_infinity(abs(ours.loss - truth.loss)),
        total_rel_grad_error=math.hypot(*differences.values()) / max(true_norm, 1e-300),
        by_parameter={
            name: differences[name] / max(true_norms[name], floor) for name in differences
        },
    )


def _limits(truth: _Training, tolerance: float) -> dict[str, float]:
    """`tolerance` for gradients; for values it is relative to the largest, but absolute below 1."""
    largest_log_prob = max(values.abs().max().item() for values in truth.log_probs)
    largest_entropy = max(values.abs().max().item() for values in truth.entropies)
    return {
        "max_abs_logprob_error": tolerance * max(1.0, largest_log_prob),
        "max_abs_entropy_error": tolerance * max(1.0, largest_entropy),
        "loss_error": tolerance * max(1.0, abs(truth.loss)),
        "total_rel_grad_error": tolerance,
        "max_rel_grad_error": tolerance,
    }


def _bfloat16_limits(dense: Errors, truth: _Training) -> dict[str, float]:
    """Twice what full-sequence bfloat16 is off by, and never tighter than in float32."""
    figures = dense.figures
    # A loss sums errors of both signs and may hit the truth by luck; its terms do not.
    figures["loss_error"] = max(dense.loss_error, dense.max_abs_logprob_error)
    return {
        name: max(limit, BFLOAT16_FACTOR * figures[name])
        for name, limit in _limits(truth, TOLERANCES["float32"]).items()
    }


def _max_difference(ours: list[torch.Tensor], truth: list[torch.Tensor]) -> float:
    return max(
        _or_infinity((mine - true).abs().max().item())
        for mine, true in zip(ours, truth, strict=True)
    )


def _norm(tensor: torch.Tensor) -> float:
    return _or_infinity(torch.linalg.vector_norm(tensor, dtype=torch.float64).item())


def _or_infinity(value: float) -> float:
    """NaN compares false with everything, so it would never be the worst error."""
    return math.inf if math.isnan(value) else value


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _one_line(error: Exception) -> str:
    """The first line of an exception's message."""
    return (str(error) or type(error).__name__).splitlines()[0]
