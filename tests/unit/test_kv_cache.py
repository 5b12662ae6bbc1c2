"""Part of the phases link: a cache sums gradients widely and never outlives its weights."""

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_post_hooks as hooks

from prefixflow_verl import PrefixFlow, StaleCacheError
from prefixflow_verl.kv_cache import CacheOrigin, PackCache, WeightsVersion
from tests.reference import dense_log_probs, nested_rollouts, tiny_model

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "adamw foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=True),
    "adamw fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
}


def filled_cache(
    model: torch.nn.Module, dtype: torch.dtype = torch.float32, gradient_dtype=torch.float32
) -> PackCache:
    weights = WeightsVersion(model.parameters())
    cache = PackCache(weights, gradient_dtype, content=7, backend="reference")
    cache.store(0, torch.ones(1, 2, 6, 4, dtype=dtype), torch.ones(1, 2, 6, 4, dtype=dtype))
    return cache


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_cache_is_stale_after_an_optimizer_step(optimizer):
    model = torch.nn.Linear(3, 2)
    cache = filled_cache(model)
    cache.read(0, 0, 6, torch.float32)
    model(torch.ones(1, 3)).sum().backward()
    cache.read(0, 0, 6, torch.float32)
    OPTIMIZERS[optimizer](model.parameters()).step()
    with pytest.raises(StaleCacheError, match="weights changed"):
        cache.read(0, 0, 6, torch.float32)
    filled_cache(model).read(0, 0, 6, torch.float32)


def test_the_step_of_another_model_changes_nothing():
    cache = filled_cache(torch.nn.Linear(3, 2))
    other = torch.nn.Linear(3, 2)
    other(torch.ones(1, 3)).sum().backward()
    torch.optim.AdamW(other.parameters(), fused=True).step()
    cache.read(0, 0, 6, torch.float32)


def test_watching_optimizers_ends_with_the_watcher():
    before = len(hooks)
    weights = WeightsVersion(torch.nn.Linear(3, 2).parameters())
    assert len(hooks) == before + 1
    del weights
    assert len(hooks) == before


def test_a_cache_is_stale_after_a_checkpoint_load():
    model = torch.nn.Linear(3, 2)
    cache = filled_cache(model)
    model.load_state_dict(model.state_dict())
    with pytest.raises(StaleCacheError):
        cache.check_fresh()


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("when", ["a rollout ends in a head pack", "a leaf pack", "the last pack"])
def test_a_step_in_the_middle_of_backward_raises(when, checkpointing):
    model = tiny_model(num_layers=2, checkpointing=checkpointing)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    flow = PrefixFlow(model, max_tokens_per_pack=8)
    calls = []

    def loss(rollouts):
        calls.append(rollouts.rollout_ids)
        return sum(log_probs.sum() for log_probs in rollouts.log_probs)

    sequences = nested_rollouts()
    _, stats = flow.backward(sequences, loss)
    assert stats.num_cut_edges
    turns = [ids for ids in calls if 0 in ids]
    step_at = {
        "a rollout ends in a head pack": calls.index(turns[0]),
        "a leaf pack": len(calls) // 2,
        "the last pack": len(calls) - 1,
    }[when]
    calls.clear()

    def loss_that_steps(rollouts):
        value = loss(rollouts)
        if len(calls) == step_at + 1:
            optimizer.step()
        return value

    with pytest.raises(StaleCacheError):
        flow.backward(sequences, loss_that_steps)

    # The failed run leaves nothing behind: the next one is right under the new weights.
    found = flow.log_probs(sequences)
    for ours, sequence in zip(found, sequences, strict=True):
        torch.testing.assert_close(ours, dense_log_probs(model, sequence)[0], atol=1e-4, rtol=0)


def test_a_step_in_the_middle_of_forward_raises():
    model = tiny_model(num_layers=2)
    flow = PrefixFlow(model, max_tokens_per_pack=24)
    batch = flow._pack(nested_rollouts(), None, 1.0)

    def step(_):
        with torch.no_grad():
            model.model.norm.weight.mul_(1.0)

    with pytest.raises(StaleCacheError):
        flow._runner.forward(batch, step)


@pytest.mark.parametrize(
    "gradient_dtype, total",
    [
        pytest.param(torch.float32, 1 + 64 * 2**-8, id="float32 keeps small terms"),
        pytest.param(None, 1.0, id="the keys' bfloat16 loses them"),
    ],
)
def test_accumulator_dtype(gradient_dtype, total):
    cache = filled_cache(torch.nn.Linear(1, 1), torch.bfloat16, gradient_dtype)
    term = torch.full((1, 2, 2, 4), 2.0**-9, dtype=torch.bfloat16)
    cache.add_gradient(0, 2, 4, torch.ones_like(term), torch.ones_like(term))
    for _ in range(128):
        cache.add_gradient(0, 2, 4, term, term)
    for gradient in cache.gradients(0):
        assert gradient.dtype == torch.bfloat16
        assert (gradient[:, :, 2:4] == total).all()
        assert not gradient[:, :, :2].any() and not gradient[:, :, 4:].any()


def test_a_cache_knows_what_it_was_computed_for():
    model = torch.nn.Linear(3, 2)
    cache = filled_cache(model, torch.bfloat16)
    weights_version = WeightsVersion(model.parameters()).current()
    assert cache.origin == CacheOrigin(
        weights_version=weights_version, content=7, dtype=torch.bfloat16, backend="reference"
    )
    cache.check_origin(content=7, backend="reference")
    with pytest.raises(StaleCacheError, match="other tokens"):
        cache.check_origin(content=8, backend="reference")
    with pytest.raises(StaleCacheError, match="another attention backend"):
        cache.check_origin(content=7, backend="sdpa_cpu")
    with pytest.raises(StaleCacheError, match="dtype torch.bfloat16 were read by .* torch.float32"):
        cache.read(0, 0, 6, torch.float32)
    with torch.no_grad():
        model.weight.add_(1)
    with pytest.raises(StaleCacheError, match="weights changed"):
        cache.check_origin(content=7, backend="reference")


def test_a_layer_that_nothing_read_has_no_gradient():
    assert filled_cache(torch.nn.Linear(1, 1)).gradients(0) is None


def test_bytes():
    cache = filled_cache(torch.nn.Linear(1, 1), torch.bfloat16)
    assert cache.num_bytes == 2 * 48 * 2
    cache.add_gradient(0, 0, 1, torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1, 4))
    assert cache.num_bytes == 2 * 48 * (2 + 4)


def test_stored_keys_carry_no_graph():
    keys = torch.ones(1, 2, 6, 4, requires_grad=True) * 2
    cache = PackCache(WeightsVersion([]), None, content=7, backend="reference")
    cache.store(3, keys, keys)
    assert not any(tensor.requires_grad for tensor in cache.read(3, 0, 6, torch.float32))
