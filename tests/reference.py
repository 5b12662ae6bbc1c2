"""The slow, obvious truth: one rollout at a time through the untouched Hugging Face model.

Tests compare with it and benchmarks import it. Nothing here shares code with the package.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers import AutoModelForCausalLM
from transformers.models.granite import GraniteConfig
from transformers.models.llama import LlamaConfig
from transformers.models.mistral import MistralConfig
from transformers.models.qwen2 import Qwen2Config
from transformers.models.qwen3 import Qwen3Config

CONFIGS = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "mistral": MistralConfig,
    "granite": GraniteConfig,
}
VOCAB = 97


def tiny_model(
    family: str = "qwen3",
    *,
    dtype: torch.dtype = torch.float32,
    tied: bool = True,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    num_layers: int = 3,
    checkpointing: bool = False,
    seed: int = 0,
    **config: object,
) -> torch.nn.Module:
    """A random causal LM of a few ten thousand parameters, in training mode."""
    torch.manual_seed(seed)
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": 16 * num_heads,
        "intermediate_size": 96,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": tied,
        "initializer_range": 0.1,
    }
    if family == "mistral":
        settings["sliding_window"] = None
    if family not in ("qwen2", "granite"):
        settings["head_dim"] = 16
    model = AutoModelForCausalLM.from_config(
        CONFIGS[family](**{**settings, **config}), attn_implementation="sdpa"
    ).to(dtype)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def dense_log_probs(
    model: torch.nn.Module, sequence: torch.Tensor, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of tokens 1 .. L-1 and entropy at positions 0 .. L-2 of one rollout: two [L - 1]."""
    logits = model(input_ids=sequence[None, :-1], use_cache=False).logits[0]
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    log_p = torch.log_softmax(logits.to(wide) / temperature, dim=-1)
    log_probs = log_p.gather(-1, sequence[1:, None])[:, 0]
    return log_probs, -(log_p.exp() * log_p).sum(-1)


def dense_backward(
    model: torch.nn.Module,
    sequences: Sequence[torch.Tensor],
    loss: Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor],
    temperatures: Sequence[float] | None = None,
) -> float:
    """Accumulate gradients of `sum_i loss(i, log_probs_i, entropies_i)`; returns the sum."""
    total = 0.0
    for index, sequence in enumerate(sequences):
        if len(sequence) == 1:
            continue  # one token predicts nothing
        temperature = 1.0 if temperatures is None else temperatures[index]
        value = loss(index, *dense_log_probs(model, sequence, temperature))
        value.backward()
        total += value.item()
    return total


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy of every parameter's gradient; zeros where there is none."""
    return {
        name: (
            parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        ).clone()
        for name, parameter in model.named_parameters()
    }


def max_relative_error(
    ours: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]
) -> tuple[float, str]:
    """Largest `|ours - truth| / |truth|` (2-norms) over parameters, and the parameter's name."""
    errors = {
        name: ((ours[name] - truth[name]).norm() / truth[name].norm().clamp_min(1e-12)).item()
        for name in truth
    }
    worst = max(errors, key=errors.__getitem__)
    return errors[worst], worst


def nested_rollouts(seed: int = 1, vocab: int = VOCAB) -> list[torch.Tensor]:
    """Rollouts of a three-level forest with every odd case: duplicates, prefixes, strangers.

    A system prompt of 17 tokens, two prompts of 13 below it, two turns of 9 below each, three
    responses of 1 to 11 tokens below each; inner turns are rollouts of their own.
    """
    generator = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> torch.Tensor:
        return torch.randint(0, vocab, (count,), generator=generator)

    system, sequences = tokens(17), []
    for _ in range(2):
        prompt = torch.cat([system, tokens(13)])
        for _ in range(2):
            turn = torch.cat([prompt, tokens(9)])
            sequences.append(turn)
            for _ in range(3):
                size = int(torch.randint(1, 12, (1,), generator=generator))
                sequences.append(torch.cat([turn, tokens(size)]))
    return [*sequences, tokens(8), sequences[0].clone(), sequences[3][:20]]


def rollout_loss(num_rollouts: int, seed: int = 0) -> Callable[..., torch.Tensor]:
    """A nonlinear loss per rollout over log-probs and entropies, different for each rollout."""
    weights = torch.randn(num_rollouts, generator=torch.Generator().manual_seed(seed))

    def loss(index: int, log_probs: torch.Tensor, entropies: torch.Tensor) -> torch.Tensor:
        weight = weights[index].to(log_probs.dtype)
        policy = weight * (log_probs.exp() * log_probs).mean() + 0.1 * log_probs.sum().tanh()
        return policy + 0.05 * weight * (entropies * entropies).mean()

    return loss


def sum_losses(loss: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`loss(i, log_probs_i, entropies_i)` as a loss over completed rollouts."""

    def of_completed(completed) -> torch.Tensor:
        entropies = completed.entropies or (None,) * len(completed.rollout_ids)
        rollouts = zip(completed.rollout_ids, completed.log_probs, entropies, strict=True)
        return torch.stack([loss(*rollout) for rollout in rollouts]).sum()

    return of_completed


def masked_attention(
    q_BNQD: torch.Tensor,
    k_BMKD: torch.Tensor,
    v_BMKD: torch.Tensor,
    visible_QK: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Softmax attention in the dtype of its inputs: [B, N, Q, D]; query heads share M key heads."""
    repeats = q_BNQD.shape[1] // k_BMKD.shape[1]
    k, v = k_BMKD.repeat_interleave(repeats, dim=1), v_BMKD.repeat_interleave(repeats, dim=1)
    scores = (q_BNQD @ k.mT * scale).masked_fill(~visible_QK, float("-inf"))
    return torch.softmax(scores, dim=-1) @ v
