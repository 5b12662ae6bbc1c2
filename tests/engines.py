"""Drives verl's real `TrainingWorker` for an engine, inside a process group that already exists.

Used by the engine links of the proof chain; nothing here is mocked: real FSDP2 on gloo, verl's own
loss.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.reference import VOCAB, tiny_model

FP32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
MAX_TOKENS = 256


def use_cpu_platform() -> None:
    """Make this process one of verl's CPU processes; call before anything imports verl."""
    os.environ["VERL_PLATFORM"] = "cpu"
    import prefixflow_verl.register  # noqa: F401


def save_tiny_model(directory: Path, **model: Any) -> str:
    """Write a random model that `HFModelConfig` can load; returns its path."""
    tiny_model(**model).save_pretrained(directory)
    return str(directory)


def make_worker(
    path: str,
    strategy: str,
    *,
    options: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    engine: dict[str, Any] | None = None,
    actor: dict[str, Any] | None = None,
    lr: float = 2e-4,
):
    """A verl `TrainingWorker` with its model built and verl's `ppo_loss` set."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine_workers import TrainingWorker, TrainingWorkerConfig

    from prefixflow_verl.engine_config import PrefixFlowEngineConfig

    settings: dict[str, Any] = {
        "strategy": strategy,
        "forward_only": False,
        "use_dynamic_bsz": True,
        "max_token_len_per_gpu": MAX_TOKENS,
        "infer_max_token_len_per_gpu": MAX_TOKENS,
        "use_torch_compile": False,
        "model_dtype": "fp32",
        "mixed_precision": FP32,
        **(engine or {}),
    }
    if strategy == "prefixflow":
        exact = {"min_shared_tokens": 1, "cut_overhead_tokens": 0}
        engine_config = PrefixFlowEngineConfig(**settings, prefixflow={**exact, **(options or {})})
    else:
        engine_config = FSDPEngineConfig(**settings)
    model_settings: dict[str, Any] = {
        "path": path,
        "load_tokenizer": False,
        "use_remove_padding": False,
        "override_config": {"attn_implementation": "sdpa"},
        "enable_gradient_checkpointing": False,
        **(model or {}),
    }
    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=HFModelConfig(**model_settings),
            engine_config=engine_config,
            optimizer_config=FSDPOptimizerConfig(
                lr=lr, total_training_steps=100, weight_decay=0.01
            ),
            checkpoint_config=CheckpointConfig(),
        )
    )
    # Adapters are drawn here; the update of an entry whose gradient is near zero is noise times a
    # learning rate, so they are the same in every run.
    torch.manual_seed(0)
    worker.reset()
    set_loss(worker, **(actor or {}))
    return worker


def set_loss(worker, **actor: Any) -> None:
    """Give `worker` verl's `ppo_loss` with these actor settings."""
    from verl.workers.config import ActorConfig
    from verl.workers.utils.losses import ppo_loss

    settings = {"entropy_coeff": 0.01, "calculate_entropy": True, **actor}
    config = ActorConfig(strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **settings)
    worker.set_loss_fn(partial(ppo_loss, config=config))


def make_rows(
    rollouts: Sequence[tuple[torch.Tensor, torch.Tensor]],
    *,
    seed: int = 0,
    masks: Sequence[torch.Tensor] | None = None,
    advantages: Sequence[float] | None = None,
    temperature: float | Sequence[float] = 1.0,
    global_batch_size: int | None = None,
    calculate_entropy: bool = True,
    old_log_probs: Sequence[torch.Tensor] | None = None,
    **settings: Any,
):
    """verl's TensorDict of (prompt, response) rows, as the V1 trainer hands it to an engine."""
    from verl.utils import tensordict_utils as tu

    generator = torch.Generator().manual_seed(seed)
    sequences = [torch.cat(rollout) for rollout in rollouts]
    responses = [response for _, response in rollouts]
    if masks is None:
        masks = [torch.ones(len(response), dtype=torch.int64) for response in responses]

    def noise(response: torch.Tensor, mean: float) -> torch.Tensor:
        return mean + 0.3 * torch.randn(len(response), generator=generator)

    if advantages is None:
        advantages = torch.randn(len(responses), generator=generator).tolist()

    def jagged(rows: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)

    tensors = {
        "input_ids": jagged(sequences),
        "position_ids": jagged([torch.arange(len(sequence)) for sequence in sequences]),
        "prompts": jagged([prompt for prompt, _ in rollouts]),
        "responses": jagged(responses),
        "response_mask": jagged(masks),
        "loss_mask": jagged(masks),
        "old_log_probs": jagged(old_log_probs or [noise(response, -4.5) for response in responses]),
        "ref_log_prob": jagged([noise(response, -4.5) for response in responses]),
        "advantages": jagged(
            [
                torch.full((len(response),), advantage)
                for response, advantage in zip(responses, advantages, strict=True)
            ]
        ),
    }
    if not isinstance(temperature, float):
        tensors["temperature"] = torch.tensor(temperature)
        non_tensors = {}
    else:
        non_tensors = {"temperature": temperature}
    return tu.get_tensordict(
        tensor_dict=tensors,
        non_tensor_dict={
            **non_tensors,
            "calculate_entropy": calculate_entropy,
            "global_batch_size": global_batch_size or len(rollouts),
            "compute_loss": False,
            "global_token_num": [len(sequence) for sequence in sequences],
            **settings,
        },
    )


def response_values(output: torch.Tensor, rows) -> torch.Tensor:
    """Response entries of a jagged, shifted engine output, concatenated over rows."""
    values = []
    for row, response in zip(output.unbind(), rows["responses"].unbind(), strict=True):
        values.append(row[len(row) - len(response) - 1 : len(row) - 1])
    return torch.cat(values)


def parameters_of(worker) -> dict[str, torch.Tensor]:
    """Full copies of every parameter."""
    return {
        name: (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter)
        .detach()
        .clone()
        for name, parameter in worker.engine.module.named_parameters()
    }


def tokens(generator: torch.Generator, count: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (count,), generator=generator)
