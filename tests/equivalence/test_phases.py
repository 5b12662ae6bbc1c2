"""Phases link of the proof chain: a plan's gradients == full-sequence autograd, every parameter.

The truth runs each rollout alone through the untouched model (`tests/reference.py`). Tolerances are
relative 2-norms per parameter: 1e-5 in fp32, and 1e-6 in fp64 because Hugging Face norms and RoPE
compute in fp32.
"""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from prefixflow_verl import PackBudget, PrefixFlow, build_forest
from prefixflow_verl.attention import BACKENDS
from prefixflow_verl.packing import Packer
from prefixflow_verl.phases import PackedBatch, PhaseRunner, pack_sequences
from prefixflow_verl.plan import plan_cuts
from tests.reference import (
    VOCAB,
    dense_backward,
    dense_log_probs,
    gradients,
    max_relative_error,
    nested_rollouts,
    rollout_loss,
    sum_losses,
    tiny_model,
)

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-6}
ROLLOUTS = nested_rollouts()
SMALL = PackBudget(max_tokens=40)
LARGE = PackBudget(max_tokens=10_000)
# What runs each plan: small budgets make `auto` cut.
PLANS = {
    "auto": {"mode": "auto", "budget": SMALL},
    "fused": {"mode": "fused", "budget": LARGE},
    "cut": {"mode": "cut", "budget": SMALL},
    "off": {"mode": "off", "budget": SMALL},
    "recompute": {
        "mode": "cut",
        "budget": PackBudget(max_tokens=40, prefix_activations="recompute"),
    },
    "pieces": {
        "mode": "auto",
        "budget": PackBudget(max_tokens=7, split_segments=True, prefix_activations="recompute"),
    },
    "offload": {
        "mode": "auto",
        "budget": PackBudget(max_tokens=40, prefix_activations="offload"),
    },
}
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=["fp32", "fp64"])
checkpointing = pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])


def tokens(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed))


def group(prompt: int, *responses: int, seed: int = 0) -> list[torch.Tensor]:
    """Rollouts of one prompt with responses of these lengths."""
    shared = tokens(prompt, seed)
    return [
        torch.cat([shared, tokens(length, 100 * seed + index + 1)])
        for index, length in enumerate(responses)
    ]


def arrays(sequences) -> list[np.ndarray]:
    return [sequence.numpy() for sequence in sequences]


def responses_only(sequences, prompt: int) -> list[np.ndarray]:
    """Ask for the predictions of tokens from `prompt` on."""
    return [np.arange(1, len(sequence)) >= prompt for sequence in sequences]


def cut_at_random(sequences, seed: int, budget: PackBudget) -> PackedBatch:
    sequences = arrays(sequences)
    forest = build_forest(sequences)
    cut = np.random.default_rng(seed).random(forest.num_segments) < 0.5
    plan = plan_cuts(forest, cut, budget)
    layouts = Packer(sequences, forest, plan).layouts
    return PackedBatch(forest=forest, plan=plan, layouts=layouts, planning_s=0.0)


def run(model, batch: PackedBatch, loss, *, backend: str = "sdpa_cpu", with_entropy=True):
    """Gradients of every parameter, and what was run."""
    model.zero_grad()
    runner = PhaseRunner(model=model, backend=BACKENDS[backend])
    stats = runner.backward(batch, sum_losses(loss), with_entropy=with_entropy)
    return gradients(model), stats


def dense_gradients(model, sequences, loss, temperatures=None):
    model.zero_grad()
    dense_backward(model, sequences, loss, temperatures)
    return gradients(model)


def assert_close(ours, truth, tolerance: float) -> None:
    error, worst = max_relative_error(ours, truth)
    assert error < tolerance, f"{worst} is off by {error:.2e}"


@cache
def truth_for(family: str, tied: bool, num_kv_heads: int, dtype: torch.dtype):
    model = tiny_model(
        family, tied=tied, num_heads=8, num_kv_heads=num_kv_heads, dtype=dtype, num_layers=2
    )
    return dense_gradients(model, ROLLOUTS, rollout_loss(len(ROLLOUTS)))


def check(family, tied, num_kv_heads, dtype, checkpointing, batch, **settings):
    """Compare `batch` of ROLLOUTS with the truth for this model."""
    model = tiny_model(
        family,
        tied=tied,
        num_heads=8,
        num_kv_heads=num_kv_heads,
        dtype=dtype,
        num_layers=2,
        checkpointing=checkpointing,
    )
    ours, stats = run(model, batch, rollout_loss(len(ROLLOUTS)), **settings)
    assert_close(ours, truth_for(family, tied, num_kv_heads, dtype), TOLERANCE[dtype])
    return stats


@dtypes
@checkpointing
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_models_and_plans(family, tied, plan, checkpointing, dtype):
    batch = pack_sequences(arrays(ROLLOUTS), **PLANS[plan])
    stats = check(family, tied, 4, dtype, checkpointing, batch)
    assert stats.num_rollouts == len(ROLLOUTS)
    if plan == "off":
        assert stats.executed_tokens == stats.logical_tokens
    else:
        assert stats.reuse_ratio > 3
    assert bool(stats.num_cut_edges) == (plan not in ("fused", "off"))
    assert bool(stats.max_cache_bytes) == (plan not in ("fused", "off"))


@dtypes
@pytest.mark.parametrize("plan", ["fused", "cut"])
@pytest.mark.parametrize("num_kv_heads", [8, 4, 2, 1])
def test_query_heads_that_share_keys(num_kv_heads, plan, dtype):
    batch = pack_sequences(arrays(ROLLOUTS), **PLANS[plan])
    check("qwen3", True, num_kv_heads, dtype, False, batch)


@checkpointing
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("budget", [PackBudget(max_tokens=30), LARGE], ids=["small", "large"])
def test_any_choice_of_cuts(seed, budget, checkpointing):
    batch = cut_at_random(ROLLOUTS, seed, budget)
    check("qwen3", True, 4, torch.float32, checkpointing, batch)


@pytest.mark.parametrize(
    "budget",
    [PackBudget(max_tokens=count) for count in (1, 17, 30, 64, 130)]
    + [PackBudget(max_rollouts=count) for count in (1, 2, 3, 7)]
    + [PackBudget(max_tokens=30, max_cache_tokens=40)],
    ids=lambda budget: f"{budget.max_tokens}-{budget.max_rollouts}-{budget.max_cache_tokens}",
)
def test_budgets_change_the_order_never_the_result(budget):
    batch = pack_sequences(arrays(ROLLOUTS), budget)
    assert len(batch.plan.packs) > 1
    check("qwen3", True, 4, torch.float32, False, batch)


@pytest.mark.parametrize("plan", ["fused", "cut"])
def test_the_reference_backend(plan):
    batch = pack_sequences(arrays(ROLLOUTS), **PLANS[plan])
    check("qwen3", True, 4, torch.float32, False, batch, backend="reference")


@pytest.mark.parametrize("plan", PLANS)
def test_each_rollout_has_a_temperature_of_its_own(plan):
    temperatures = [0.5 + 0.1 * (index % 4) for index in range(len(ROLLOUTS))]
    model = tiny_model(num_layers=2)
    loss = rollout_loss(len(ROLLOUTS))
    batch = pack_sequences(arrays(ROLLOUTS), temperatures=temperatures, **PLANS[plan])
    truth = dense_gradients(model, ROLLOUTS, loss, temperatures)
    assert_close(run(model, batch, loss)[0], truth, 1e-5)


def masked_loss(predict, loss):
    """`loss` over the wanted predictions; a rollout without any contributes nothing."""

    def of_rollout(index, log_probs, entropies):
        wanted = torch.from_numpy(predict[index])
        if not wanted.any():
            return log_probs.sum() * 0
        return loss(index, log_probs[wanted], entropies[wanted])

    return of_rollout


def loss_or_nothing(loss):
    """`loss`, and zero for a rollout without predictions."""

    def of_rollout(index, log_probs, entropies):
        if not len(log_probs):
            return log_probs.sum()
        return loss(index, log_probs, entropies)

    return of_rollout


PROMPT = 12
MASKS = {
    "responses only": lambda s: responses_only(s, PROMPT),
    "not the first token": lambda s: responses_only(s, PROMPT + 1),
    "prompts only": lambda s: [np.arange(1, len(row)) < PROMPT for row in s],
    "every other token": lambda s: [np.arange(1, len(row)) % 2 == 0 for row in s],
    "some rollouts not at all": lambda s: [
        np.full(len(row) - 1, i % 2 > 0) for i, row in enumerate(s)
    ],
    "one rollout": lambda s: [np.full(len(row) - 1, i == 1) for i, row in enumerate(s)],
    "nothing": lambda s: [np.zeros(len(row) - 1, bool) for row in s],
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("mask", MASKS)
def test_only_wanted_predictions(mask, plan):
    sequences = [*group(PROMPT, 6, 1, 9, 4), *group(PROMPT, 3, 8, seed=1)]
    sequences.append(sequences[0].clone())
    predict = MASKS[mask](sequences)
    model = tiny_model(num_layers=2)
    loss = rollout_loss(len(sequences))
    truth = dense_gradients(model, sequences, masked_loss(predict, loss))
    settings = {**PLANS[plan], "budget": replace(PLANS[plan]["budget"], max_tokens=18)}
    batch = pack_sequences(arrays(sequences), predict=predict, **settings)
    ours, _ = run(model, batch, loss_or_nothing(loss))
    if mask == "nothing":
        assert not any(gradient.any() for gradient in ours.values())
    assert_close(ours, truth, 1e-5)


SHAPES = {
    "one-token responses": group(10, 1, 1, 1, 1),
    "two tokens in all": [tokens(2), tokens(2).flip(0), tokens(1).repeat(2), tokens(9, seed=1)],
    "duplicates": group(10, 5, 5)[:1] * 3 + group(10, 5, 5),
    "a response that is a prefix of another": [group(10, 9)[0], group(10, 9)[0][:14]],
    "a prompt that is a rollout": [group(10, 9)[0], group(10, 9)[0][:10], *group(10, 4, 6)],
    "each a prefix of the next": [tokens(60)[:size] for size in (9, 20, 33, 60)],
    "rollouts of one token": [tokens(1), tokens(1), *group(10, 5, 5), tokens(1, seed=3)],
    "strangers": [tokens(9, seed=1), tokens(14, seed=2), tokens(5, seed=3)],
    "one rollout": [tokens(20)],
    "one longer than the budget": [*group(10, 50, 3), tokens(70, seed=5)],
    "a group larger than the budget": group(30, *[12] * 9),
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("shape", SHAPES)
def test_rollouts_of_every_shape(shape, plan):
    sequences = SHAPES[shape]
    # In fp64: two keys give gradients so small that fp32 rounding shows.
    model = tiny_model(num_layers=2, dtype=torch.float64)
    loss = rollout_loss(len(sequences))
    truth = dense_gradients(model, sequences, loss_or_nothing(loss))
    seen = []

    def loss_seen(index, *outputs):
        seen.append(index)
        return loss(index, *outputs)

    settings = {**PLANS[plan], "budget": replace(PLANS[plan]["budget"], max_tokens=24)}
    ours, _ = run(model, pack_sequences(arrays(sequences), **settings), loss_seen)
    assert_close(ours, truth, TOLERANCE[torch.float64])
    # A rollout of one token predicts nothing and meets no loss; every other one exactly one.
    assert sorted(seen) == [index for index, row in enumerate(sequences) if len(row) > 1]


def test_nothing_to_run():
    flow = PrefixFlow(tiny_model(num_layers=1))
    for sequences in ([], [tokens(1), tokens(1)]):
        total, stats = flow.backward(sequences, sum_losses(rollout_loss(2)))
        assert (total, stats.num_packs, stats.reuse_ratio) == (0.0, 0, 1.0)
        assert [len(row) for row in flow.log_probs(sequences)] == [0] * len(sequences)


# Channels into a prefix: each must matter, or a test that passes proves nothing.

CHANNELS = ("dK", "dV", "log-probs", "entropies")


def cut_channel(monkeypatch, channel: str, batch: PackedBatch) -> None:
    """Lose one of the gradients that suffixes send into shared segments, in any plan."""
    if channel in ("dK", "dV"):
        whole = BACKENDS["sdpa_cpu"].backward

        def backward(*arguments):
            grads = list(whole(*arguments))
            is_ancestor = not arguments[-2]
            if is_ancestor:
                lost = 1 if channel == "dK" else 2
                grads[lost] = torch.zeros_like(grads[lost])
            return grads

        monkeypatch.setattr(type(BACKENDS["sdpa_cpu"]), "backward", lambda self, *a: backward(*a))
        return
    output = CHANNELS.index(channel) - 2
    whole_pack = PhaseRunner._backward_pack

    def backward_pack(self, pack_run):
        lost = boundary_predictions(batch, pack_run.index)
        gradient = pack_run.twins[output].grad if output < len(pack_run.twins) else None
        if gradient is not None and len(lost) == len(gradient):
            gradient[lost] = 0
        whole_pack(self, pack_run)

    monkeypatch.setattr(PhaseRunner, "_backward_pack", backward_pack)


def boundary_predictions(batch: PackedBatch, index: int) -> torch.Tensor:
    """[P] bool: the prediction is made by a shared segment."""
    layout = batch.layouts[index]
    segments = list(batch.plan.packs[index].segments)
    is_shared = np.repeat(batch.forest.is_shared[segments], batch.forest.lengths[segments])
    rows = layout.logit_rows[layout.scaled_rows[layout.prediction_rows]]
    return torch.from_numpy(is_shared[rows])


@checkpointing
@pytest.mark.parametrize("plan", ["fused", "cut", "recompute"])
@pytest.mark.parametrize("channel", ["none", *CHANNELS])
def test_each_channel_into_a_prefix_matters(channel, plan, checkpointing, monkeypatch):
    """Loss on responses only: all that a prompt learns comes through these channels."""
    sequences = [*group(PROMPT, 6, 7, 9, 4), *group(PROMPT, 5, 8, seed=1)]
    predict = responses_only(sequences, PROMPT)
    loss = rollout_loss(len(sequences))
    model = tiny_model(num_layers=2, checkpointing=checkpointing)
    truth = dense_gradients(model, sequences, masked_loss(predict, loss))
    batch = pack_sequences(arrays(sequences), predict=predict, **PLANS[plan])
    assert sum(boundary_predictions(batch, i).sum() for i in range(len(batch.layouts))) == 6
    if channel != "none":
        cut_channel(monkeypatch, channel, batch)
    error, _ = max_relative_error(run(model, batch, loss)[0], truth)
    assert error < 1e-5 if channel == "none" else error > 1e-3


@pytest.mark.parametrize("channel", [0, 1], ids=["dK", "dV"])
def test_each_gradient_of_the_cache_matters(channel, monkeypatch):
    from prefixflow_verl.kv_cache import PackCache

    whole = PackCache.gradients

    def without(self, layer):
        grads = list(whole(self, layer))
        grads[channel] = torch.zeros_like(grads[channel])
        return tuple(grads)

    monkeypatch.setattr(PackCache, "gradients", without)
    model = tiny_model(num_heads=8, num_kv_heads=4, num_layers=2)
    batch = pack_sequences(arrays(ROLLOUTS), **PLANS["cut"])
    ours, _ = run(model, batch, rollout_loss(len(ROLLOUTS)))
    assert max_relative_error(ours, truth_for("qwen3", True, 4, torch.float32))[0] > 1e-3


# Values.


@pytest.mark.parametrize("plan", PLANS)
def test_log_probs_and_entropies(plan):
    model = tiny_model(num_layers=2)
    found = {}

    def keep(rollouts):
        for index, *values in zip(
            rollouts.rollout_ids,
            rollouts.positions,
            rollouts.log_probs,
            rollouts.entropies,
            strict=True,
        ):
            found[index] = values

    runner = PhaseRunner(model=model, backend=BACKENDS["sdpa_cpu"])
    runner.forward(pack_sequences(arrays(ROLLOUTS), **PLANS[plan]), keep, with_entropy=True)
    for index, sequence in enumerate(ROLLOUTS):
        positions, log_probs, entropies = found[index]
        assert positions.tolist() == list(range(len(sequence) - 1))
        assert log_probs.dtype == torch.float32 and not log_probs.requires_grad
        truth = dense_log_probs(model, sequence)
        torch.testing.assert_close((log_probs, entropies), truth, atol=1e-5, rtol=1e-5)


def test_the_first_response_token_under_a_temperature():
    sequences = group(PROMPT, 5, 6, 7)
    model = tiny_model(num_layers=2)
    found = PrefixFlow(model, max_tokens_per_pack=16).log_probs(
        sequences, predict=responses_only(sequences, PROMPT), temperatures=0.6
    )
    for ours, sequence in zip(found, sequences, strict=True):
        logits = model(input_ids=sequence[None]).logits[0, PROMPT - 1]
        truth = torch.log_softmax(logits / 0.6, dim=-1)[sequence[PROMPT]]
        torch.testing.assert_close(ours[0], truth, atol=1e-5, rtol=1e-5)
        assert abs(ours[0] - torch.log_softmax(logits, dim=-1)[sequence[PROMPT]]) > 1e-3


def test_a_ratio_of_one_whatever_the_budgets():
    """Old log-probs under one budget, the update under another: exp(new - old) is 1."""
    model = tiny_model(num_layers=2)
    old = PrefixFlow(model, max_tokens_per_pack=30).log_probs(ROLLOUTS)
    for budget in (17, 64, 10_000):
        seen = []

        def loss(index, log_probs, entropies, seen=seen):
            ratio = (log_probs - old[index]).exp()
            torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=1e-5, rtol=0)
            seen.append(index)
            return ratio.sum()

        PrefixFlow(model, max_tokens_per_pack=budget).backward(ROLLOUTS, sum_losses(loss))
        assert sorted(seen) == list(range(len(ROLLOUTS)))


def test_token_mean_over_unequal_packs():
    """Rollouts of 100 and 900 tokens with losses 2.0 and 0.5: the mean over tokens is 0.65."""
    prompt = 8
    sequences = group(prompt, 100, 900)
    predict = responses_only(sequences, prompt)
    model = tiny_model(num_layers=1)
    per_token = (2.0, 0.5)

    def loss(index, log_probs, entropies):
        ratio = (log_probs - log_probs.detach()).exp()
        return (per_token[index] * ratio).sum() / 1000

    def dense_loss(index, log_probs, entropies):
        return loss(index, log_probs[prompt - 1 :], entropies)

    truth = dense_gradients(model, sequences, dense_loss)
    for budget in (64, 500, 2000):
        model.zero_grad()
        flow = PrefixFlow(model, max_tokens_per_pack=budget)
        total, stats = flow.backward(sequences, sum_losses(loss), predict=predict)
        assert total == pytest.approx(0.65, rel=1e-6)
        assert stats.num_packs == (1 if budget == 2000 else 3)
        assert_close(gradients(model), truth, 1e-5)


# Properties.


@pytest.mark.parametrize("plan", PLANS)
def test_zero_advantage_gives_exactly_zero_gradient(plan):
    def loss(index, log_probs, entropies):
        return 0.0 * (log_probs - log_probs.detach()).exp().sum()

    model = tiny_model(num_layers=2)
    runner = PhaseRunner(model=model, backend=BACKENDS["sdpa_cpu"])
    runner.backward(pack_sequences(arrays(ROLLOUTS), **PLANS[plan]), sum_losses(loss))
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name


def test_permuting_rollouts_permutes_outputs():
    flow = PrefixFlow(tiny_model(num_layers=2), max_tokens_per_pack=40)
    order = torch.randperm(len(ROLLOUTS), generator=torch.Generator().manual_seed(0)).tolist()
    found = flow.log_probs(ROLLOUTS)
    permuted = flow.log_probs([ROLLOUTS[index] for index in order])
    # The same packs run, so not even rounding differs.
    assert all(torch.equal(ours, found[i]) for ours, i in zip(permuted, order, strict=True))


def test_disjoint_rollouts_run_every_token():
    sequences = [torch.cat([torch.tensor([index]), tokens(9, seed=index)]) for index in range(6)]
    _, stats = PrefixFlow(tiny_model(num_layers=1)).backward(
        sequences, sum_losses(rollout_loss(6)), with_entropy=True
    )
    assert stats.executed_tokens == stats.logical_tokens == 6 * 9
    assert (stats.reuse_ratio, stats.num_shared_groups, stats.num_cut_edges) == (1.0, 0, 0)


def test_short_runs_are_not_worth_sharing():
    model = tiny_model(num_layers=2)
    loss = rollout_loss(len(ROLLOUTS))
    batch = pack_sequences(arrays(ROLLOUTS), SMALL, min_shared_tokens=15)
    ours, stats = run(model, batch, loss)
    full = pack_sequences(arrays(ROLLOUTS), SMALL).forest
    assert full.executed_tokens < stats.executed_tokens < stats.logical_tokens
    assert_close(ours, dense_gradients(model, ROLLOUTS, loss), 1e-5)


def test_a_loss_scale_scales_every_channel():
    model = tiny_model(num_heads=8, num_kv_heads=4, num_layers=2)
    runner = PhaseRunner(
        model=model, backend=BACKENDS["sdpa_cpu"], scale_loss=lambda loss: loss * 1024
    )
    batch = pack_sequences(arrays(ROLLOUTS), **PLANS["cut"])
    runner.backward(batch, sum_losses(rollout_loss(len(ROLLOUTS))), with_entropy=True)
    ours = {name: gradient / 1024 for name, gradient in gradients(model).items()}
    assert_close(ours, truth_for("qwen3", True, 4, torch.float32), 1e-5)


def test_gradients_accumulate_over_calls():
    model = tiny_model(num_layers=2)
    halves = (ROLLOUTS[::2], ROLLOUTS[1::2])
    losses = [rollout_loss(len(half), seed) for seed, half in enumerate(halves)]
    flow = PrefixFlow(model, max_tokens_per_pack=40)
    for half, loss in zip(halves, losses, strict=True):
        flow.backward(half, sum_losses(loss), with_entropy=True)
    ours = gradients(model)
    model.zero_grad()
    for half, loss in zip(halves, losses, strict=True):
        dense_backward(model, half, loss)
    assert_close(ours, gradients(model), 1e-5)


def test_frozen_parameters_stay_without_gradient():
    """A frozen bottom: keys of the first layer need no gradient, those above do."""
    model = tiny_model(num_layers=2, tied=False)
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    loss = rollout_loss(len(ROLLOUTS))
    truth = dense_gradients(model, ROLLOUTS, loss)
    ours, _ = run(model, pack_sequences(arrays(ROLLOUTS), **PLANS["cut"]), loss)
    assert model.model.layers[0].self_attn.k_proj.weight.grad is None
    assert_close(ours, truth, 1e-5)


@checkpointing
@pytest.mark.parametrize("plan", ["fused", "cut"])
def test_bf16_errs_no_more_than_twice_dense(plan, checkpointing):
    """Both against fp32 on the same (rounded) weights."""
    loss = rollout_loss(len(ROLLOUTS))
    model = tiny_model(num_layers=2, dtype=torch.bfloat16, checkpointing=checkpointing)
    wide = tiny_model(num_layers=2)
    wide.load_state_dict(model.state_dict())
    truth = dense_gradients(wide, ROLLOUTS, loss)
    naive = dense_gradients(model, ROLLOUTS, loss)
    ours, _ = run(model, pack_sequences(arrays(ROLLOUTS), **PLANS[plan]), loss)
    for name in truth:
        our_error, error = ((grads[name] - truth[name]).norm() for grads in (ours, naive))
        assert our_error <= 2 * error, name


@pytest.mark.parametrize("plan", ["fused", "recompute"])
def test_logits_that_do_not_end_at_the_lm_head(plan):
    """Granite divides its logits after the LM head: they are made as ever, and are right."""
    model = tiny_model("granite", num_layers=2, logits_scaling=3.0)
    ours, _ = run(
        model, pack_sequences(arrays(ROLLOUTS), **PLANS[plan]), rollout_loss(len(ROLLOUTS))
    )
    truth = dense_gradients(model, ROLLOUTS, rollout_loss(len(ROLLOUTS)))
    assert_close(ours, truth, TOLERANCE[torch.float32])


def test_twenty_adamw_steps_stay_together():
    models = [tiny_model(num_layers=2) for _ in range(2)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in models]
    flow = PrefixFlow(models[0], max_tokens_per_pack=40)
    for step in range(20):
        sequences = nested_rollouts(seed=step)
        loss = rollout_loss(len(sequences), seed=step)
        total, stats = flow.backward(sequences, sum_losses(loss), with_entropy=True)
        assert stats.num_cut_edges
        assert total == pytest.approx(dense_backward(models[1], sequences, loss), rel=1e-4)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    ours, truth = ({n: p.detach() for n, p in model.named_parameters()} for model in models)
    start = dict(tiny_model(num_layers=2).named_parameters())
    assert max_relative_error(truth, start)[0] > 1e-2, "the steps must move the weights"
    assert_close(ours, truth, 1e-4)
