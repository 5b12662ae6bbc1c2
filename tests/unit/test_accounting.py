"""The one cost formula, against integers computed by hand."""

import numpy as np
import pytest

from prefixflow_verl.accounting import (
    Flops,
    ModelShape,
    dense_flops,
    forest_flops,
    reuse_ratio,
    span_flops,
)
from prefixflow_verl.forest import build_forest
from tests.reference import tiny_model

SMALL = ModelShape(
    num_layers=2, hidden=8, intermediate=16, num_heads=2, num_kv_heads=1, head_dim=4, vocab=32
)
QWEN3_8B = ModelShape(
    num_layers=36,
    hidden=4096,
    intermediate=12288,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab=151936,
)


def test_linear_parameters():
    # Per layer: q and o 8 x 8 each, k and v 8 x 4 each, three MLP matrices 8 x 16.
    assert SMALL.linear_parameters == 2 * (64 + 64 + 32 + 32 + 384) == 1152
    # The model card says 6.95 B parameters without embeddings.
    assert QWEN3_8B.linear_parameters == 6_945_767_424


def test_parameters_match_a_real_model():
    model = tiny_model("llama", num_heads=8, num_kv_heads=2)
    linear = sum(p.numel() for n, p in model.named_parameters() if "_proj" in n)
    assert ModelShape.from_config(model.config).linear_parameters == linear


def test_cache_bytes():
    # K and V, 36 layers, 8 heads of 128: 73,728 elements of 2 + 4 bytes.
    assert QWEN3_8B.cache_bytes_per_token(element_bytes=2, gradient_bytes=4) == 442_368


def test_a_whole_sequence():
    # 10 tokens; 1 + 2 + ... + 10 = 55 query-key pairs; 3 rows of logits.
    flops = dense_flops(SMALL, np.array([10]), num_logit_rows=3)
    assert flops == Flops(linear=23_040, attention=3_520, lm_head=1_536)
    assert flops.forward == 28_096
    assert flops.update() == 84_288
    assert flops.update(checkpointing=True) == 84_288 + 26_560


def test_a_span_pays_for_the_keys_before_it():
    # Positions 7, 8, 9 meet 8 + 9 + 10 = 27 keys.
    flops = span_flops(SMALL, np.array([7]), np.array([10]), num_logit_rows=0)
    assert flops == Flops(linear=6_912, attention=1_728, lm_head=0)


def test_long_sequences_do_not_overflow():
    flops = dense_flops(QWEN3_8B, np.array([1_000_000]), num_logit_rows=1_000_000)
    assert flops.attention == 294_912_294_912_000_000
    assert flops.linear == 13_891_534_848_000_000
    assert flops.lm_head == 1_244_659_712_000_000


def test_sharing_saves_what_is_computed_once():
    # Two rollouts of 7 input tokens that share 5: segments [0, 5), [5, 7), [5, 7).
    sequences = [np.array([1] * 5 + [2] * 3), np.array([1] * 5 + [3] * 3)]
    forest = build_forest(sequences)
    assert forest_flops(SMALL, forest, 4) == Flops(
        linear=20_736, attention=64 * (15 + 13 + 13), lm_head=2_048
    )
    assert dense_flops(SMALL, np.array([7, 7]), 4) == Flops(
        linear=32_256, attention=64 * (28 + 28), lm_head=2_048
    )


@pytest.mark.parametrize("logical, executed, ratio", [(39, 19, 39 / 19), (5, 5, 1.0), (0, 0, 1.0)])
def test_reuse_ratio(logical, executed, ratio):
    assert reuse_ratio(logical, executed) == ratio
