"""What all cases of one benchmark have in common, and the names of the contestants."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from transformers import Qwen3Config

from prefixflow_verl.config import PrefixFlowOptions

OURS = "prefixflow"
DENSE = "dense-head-only"
VERL = "verl"
VERL_PADDED = "verl-padded"
GROUPER = "prefix-grouper"
GROUPER_SPLIT = "prefix-grouper-split"
BASELINES = (VERL, DENSE, GROUPER, GROUPER_SPLIT)

SUFFIX_PHASE = "suffix"
"""Name in `MemoryPeaks.phase_bytes`: the phase that runs every pack whose keys and values no other
pack reads. Where no prefix is cut off, that is all of them."""

What = Literal["update", "log_prob"]
Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """A Qwen3 with random weights.

    Raises:
        ValueError: sizes that do not divide; names the option.
    """

    layers: int = 4
    hidden: int = 256
    heads: int = 4
    kv_heads: int = 2
    vocab: int = 4096

    def __post_init__(self) -> None:
        if self.hidden % (2 * self.heads):
            raise ValueError(
                f"--hidden={self.hidden} must be an even multiple of --heads={self.heads}"
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"--heads={self.heads} must be a multiple of --kv-heads={self.kv_heads}"
            )

    def config(self) -> Qwen3Config:
        return Qwen3Config(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=3 * self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.hidden // self.heads,
            max_position_embeddings=1 << 20,
            # Large enough for log-probs to show when a token attends to the wrong sequence.
            initializer_range=0.05,
            tie_word_embeddings=False,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What all cases of one benchmark have in common.

    Raises:
        ValueError: two sizes of a forward at once; names the options.
    """

    what: What = "update"
    sizes: ModelSizes = ModelSizes()
    dtype: Dtype = "float32"
    token_budget: int | None = None
    """Tokens of one forward; None: see bench_workloads.py `forward_size`."""
    rollouts_per_forward: int | None = None
    """Rollouts of one forward, however long they are, instead of a token budget."""
    options: PrefixFlowOptions = PrefixFlowOptions()
    """Of the engine with prefix reuse."""
    checkpointing: bool = False
    repeats: int = 5
    """Timed runs of each arm, after one warm-up."""
    threads: int | None = None
    """Intra-op threads; None: as PyTorch has them."""

    def __post_init__(self) -> None:
        if self.token_budget is not None and self.rollouts_per_forward is not None:
            raise ValueError(
                "--token-budget contradicts --rollouts-per-forward: leave one of them out"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardSize:
    """What one forward holds at most, for every arm alike; one of the two is set."""

    token_budget: int | None = None
    """Tokens, as with veRL's `use_dynamic_bsz=true`."""
    rollouts: int | None = None
    """Rollouts, as with veRL's `use_dynamic_bsz=false`."""
