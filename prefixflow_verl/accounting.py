"""FLOPs, bytes and reuse: the one formula that planner, metrics and predictor share.

Counting rules (multiply-add = 2 FLOPs; the usual transformer count, e.g. Kaplan et al. 2020,
section 2.1, with the quadratic part kept apart):

- linear layers: `2 * linear_parameters` per executed token;
- attention: a query at position p meets p + 1 keys: `4 * num_heads * head_dim * (p + 1)` per layer
  (scores and weighted sum);
- LM head: `2 * hidden * vocab` per row of logits, only rows that predict something;
- backward costs twice the forward; activation checkpointing adds one more forward of the layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from prefixflow_verl.forest import PrefixForest


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder-only transformer that the formulas need."""

    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int

    @property
    def linear_parameters(self) -> int:
        """Weights of the linear layers of all decoder layers (attention projections, gated MLP)."""
        attention = self.hidden * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        return self.num_layers * (attention + 3 * self.hidden * self.intermediate)

    def cache_bytes_per_token(self, *, element_bytes: int, gradient_bytes: int) -> int:
        """Bytes of one cached token: K and V of every layer and their gradients."""
        elements = 2 * self.num_layers * self.num_kv_heads * self.head_dim
        return elements * (element_bytes + gradient_bytes)

    def activation_bytes_per_token(self, *, element_bytes: int, checkpointing: bool) -> int:
        """Bytes that autograd keeps of one token of a prefix, besides keys and values.

        Counts what eager Hugging Face code saves for backward: of a norm its input in float32, its
        normalised input and its output (of norms of queries and keys, which not every model has,
        the first two); queries and attention outputs; four activations of the gated MLP; cosines
        and sines. Activation checkpointing keeps a layer's input alone.
        """
        norm = self.hidden * (4 + 2 * element_bytes)
        outside = norm + 2 * self.head_dim * element_bytes
        if checkpointing:
            return self.num_layers * self.hidden * element_bytes + outside
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        head_norms = (queries + keys) * (4 + element_bytes)
        rest = (2 * queries + 4 * self.intermediate) * element_bytes
        return self.num_layers * (2 * norm + head_norms + rest) + outside

    def max_prefix_tokens(
        self,
        max_bytes: int,
        *,
        element_bytes: int,
        gradient_bytes: int,
        kept_activations: bool,
        checkpointing: bool,
    ) -> int:
        """Prefix tokens, at least 1, whose caches (and activations, if kept) fit `max_bytes`."""
        per_token = self.cache_bytes_per_token(
            element_bytes=element_bytes, gradient_bytes=gradient_bytes
        )
        if kept_activations:
            per_token += self.activation_bytes_per_token(
                element_bytes=element_bytes, checkpointing=checkpointing
            )
        return max(1, max_bytes // per_token)

    @classmethod
    def from_config(cls, config: Any) -> ModelShape:
        """Read the sizes from a Hugging Face config of a Llama-like model."""
        heads = config.num_attention_heads
        return cls(
            num_layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            num_heads=heads,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            vocab=config.vocab_size,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Flops:
    """Forward FLOPs of a set of tokens, by part."""

    linear: int
    attention: int
    lm_head: int

    @property
    def forward(self) -> int:
        return self.linear + self.attention + self.lm_head

    def update(self, *, checkpointing: bool = False) -> int:
        """FLOPs of forward and backward; with checkpointing the layers run forward once more."""
        recompute = self.linear + self.attention if checkpointing else 0
        return 3 * self.forward + recompute


def span_flops(shape: ModelShape, start: np.ndarray, end: np.ndarray, num_logit_rows: int) -> Flops:
    """Forward FLOPs of token spans `[start, end)` of their sequences.

    Args:
        start, end: [S] int64 positions; a span's queries attend to every position before them.
        num_logit_rows: rows on which the LM head runs.
    """
    tokens = int((end - start).sum())
    # sum of (p + 1) for p in [start, end)
    pairs = int((end * (end + 1) // 2 - start * (start + 1) // 2).sum())
    return Flops(
        linear=2 * shape.linear_parameters * tokens,
        attention=4 * shape.num_layers * shape.num_heads * shape.head_dim * pairs,
        lm_head=2 * shape.hidden * shape.vocab * num_logit_rows,
    )


def forest_flops(shape: ModelShape, forest: PrefixForest, num_logit_rows: int) -> Flops:
    """Forward FLOPs of running every segment of `forest` once."""
    return span_flops(shape, forest.start, forest.end, num_logit_rows)


def dense_flops(shape: ModelShape, num_tokens: np.ndarray, num_logit_rows: int) -> Flops:
    """Forward FLOPs of running rollouts of `num_tokens` [R] tokens one by one.

    Pass `num_tokens.sum()` as `num_logit_rows` for a trainer that runs the LM head on every token.
    """
    return span_flops(shape, np.zeros_like(num_tokens), num_tokens, num_logit_rows)


def reuse_ratio(logical_tokens: int, executed_tokens: int) -> float:
    """Logical / executed tokens; 1.0 when nothing is shared or nothing is run."""
    return logical_tokens / executed_tokens if executed_tokens else 1.0
