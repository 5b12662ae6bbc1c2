"""What a user can hand over wrongly ends in one sentence, never in a silent no-op."""

import numpy as np
import pytest
import torch

from prefixflow_verl import PackBudget, PrefixFlow, UnsupportedModelError, build_forest, check_model
from tests.reference import VOCAB, gradients, tiny_model

SEQUENCES = [[1, 2, 3, 4], [1, 2, 3, 5, 6]]


def loss(rollouts) -> torch.Tensor:
    return sum(log_probs.sum() for log_probs in rollouts.log_probs)


@pytest.fixture(scope="module")
def flow() -> PrefixFlow:
    return PrefixFlow(tiny_model(num_layers=1))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_backward_without_gradients(flow, context) -> None:
    with context(), pytest.raises(RuntimeError, match="no gradient would be accumulated"):
        flow.backward(SEQUENCES, loss)


def test_nothing_to_train() -> None:
    model = tiny_model(num_layers=1).requires_grad_(False)
    with pytest.raises(RuntimeError, match="no parameter of the model requires a gradient"):
        PrefixFlow(model).backward(SEQUENCES, loss)


@pytest.mark.parametrize(
    "wrong, message",
    [
        (lambda rollouts: 1.0, "scalar tensor"),
        (lambda rollouts: None, "scalar tensor"),
        (lambda rollouts: rollouts.log_probs[0], "scalar tensor"),
        (lambda rollouts: loss(rollouts).detach(), "detached"),
    ],
)
def test_wrong_losses(flow, wrong, message) -> None:
    with pytest.raises(ValueError, match=message):
        flow.backward(SEQUENCES, wrong)


def test_a_loss_of_zero_may_be_constant(flow) -> None:
    flow.backward(SEQUENCES, lambda rollouts: torch.zeros(()))


@pytest.mark.parametrize(
    "sequence, message",
    [
        ([1, 2, -5], "token ids -5"),
        ([1, 2, VOCAB], f"knows 0 .. {VOCAB - 1}"),
        ([1, 2, 2**32 + 1], "token ids"),
        ([1.5, 2.0], "integer token ids"),
    ],
)
def test_wrong_token_ids(flow, sequence, message) -> None:
    with pytest.raises(ValueError, match=message):
        flow.log_probs([[1, 2, 3], sequence])


def test_reversed_views_are_read_as_they_are(flow) -> None:
    sequence = np.arange(6)[::-1]
    torch.testing.assert_close(flow.log_probs([sequence]), flow.log_probs([sequence.tolist()]))


def test_wrong_counts(flow) -> None:
    with pytest.raises(ValueError, match="1 predict arrays for 2 sequences"):
        flow.log_probs(SEQUENCES, predict=[np.ones(3, dtype=bool)])
    with pytest.raises(ValueError, match=r"temperatures have shape \(3,\): give one value or 2"):
        flow.log_probs(SEQUENCES, temperatures=[1.0, 1.0, 1.0])


@pytest.mark.parametrize("value", [0, -1, 2.5])
def test_wrong_bounds(value) -> None:
    with pytest.raises(ValueError, match="max_tokens"):
        PackBudget(max_tokens=value)
    with pytest.raises(ValueError, match="min_shared_tokens"):
        build_forest([np.arange(4)], min_shared_tokens=value)


def test_wrong_prefix_activations() -> None:
    with pytest.raises(ValueError, match="prefix_activations='drop' must be one of keep, offload"):
        PrefixFlow(tiny_model(num_layers=1), prefix_activations="drop")


def test_dropout_under_any_name_is_refused() -> None:
    model = tiny_model(num_layers=1)
    check_model(model)
    model.config.classifier_dropout = 0.1
    check_model(model)
    model.config.residual_dropout = 0.1
    with pytest.raises(UnsupportedModelError, match="residual_dropout=0.1"):
        check_model(model)


def test_a_mask_of_the_models_own_is_refused() -> None:
    model = tiny_model(num_layers=1)
    layer = model.model.layers[0]
    forward = layer.forward

    def with_mask(hidden, *args, **kwargs):
        size = hidden.shape[1]
        return forward(hidden, *args, **{**kwargs, "attention_mask": torch.zeros(1, 1, size, size)})

    layer.forward = with_mask
    with pytest.raises(UnsupportedModelError, match="rules of its own"):
        PrefixFlow(model)


def test_the_self_check_leaves_no_gradient(flow) -> None:
    model = tiny_model(num_layers=1)
    PrefixFlow(model)
    assert not any(gradient.any() for gradient in gradients(model).values())
