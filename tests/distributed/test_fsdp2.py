"""Phases link under real FSDP2: gradients == the mean over ranks of dense gradients.

Two gloo ranks run every case in one spawn. A rank that ran one forward or backward more than the
other would hang there, so finishing is part of the proof; collectives are counted besides.
"""

from collections import Counter
from itertools import product

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from prefixflow_verl import PackBudget, StaleCacheError
from prefixflow_verl.attention import BACKENDS
from prefixflow_verl.phases import PhaseRunner, pack_sequences
from tests.dist import run_ranks
from tests.reference import (
    VOCAB,
    dense_backward,
    gradients,
    max_relative_error,
    nested_rollouts,
    rollout_loss,
    sum_losses,
    tiny_model,
)

WORLD_SIZE = 2
TOLERANCE = 1e-5


def group(seed: int, prompt: int, *responses: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shared = torch.randint(0, VOCAB, (prompt,), generator=generator)
    return [
        torch.cat([shared, torch.randint(0, VOCAB, (length,), generator=generator)])
        for length in responses
    ]


def strangers(*lengths: int) -> list[torch.Tensor]:
    return [row for seed, length in enumerate(lengths) for row in group(50 + seed, length, 0)]


# Rollouts of the two ranks. The budget is 40 tokens.
CASES = {
    "uneven": (nested_rollouts(), group(1, 10, 4, 5)),
    "one rank shares nothing": (nested_rollouts(), strangers(9, 30, 14)),
    "one rank has no rollouts": (nested_rollouts(), []),
    "the first rank has no rollouts": ([], group(1, 30, 12, 15, 8)),
    "different rounds, heads and leaves": (
        [row for seed in range(3) for row in group(seed, 30, 12, 15, 8)],
        [*nested_rollouts(), *group(7, 38, 20, 20, 20, 20)],
    ),
    "one fused, one cut": (group(1, 10, 4, 5), group(2, 30, 20, 20, 20)),
    "heads that predict nothing": (group(1, 30, 12, 15, 8), group(2, 30, 20, 20, 20)),
    "nobody has rollouts": ([], []),
}
FIRST_TARGET = {"heads that predict nothing": 31}
"""First token whose log-prob is asked for, where that is not token 1."""
RECOMPUTED_CASES = (
    "different rounds, heads and leaves",
    "one fused, one cut",
    "one rank has no rollouts",
    "heads that predict nothing",
)
SETTINGS = list(product((False, True), (False, True), (False, True)))
SETTING_NAMES = ("checkpointing", "reshard", "once")


def sharded_model(checkpointing: bool, reshard: bool, tied: bool = True) -> torch.nn.Module:
    model = tiny_model(num_layers=2, checkpointing=checkpointing, tied=tied)
    for layer in model.model.layers:
        fully_shard(layer, reshard_after_forward=reshard)
    return fully_shard(model, reshard_after_forward=reshard)


class CountCollectives(TorchDispatchMode):
    """Counts the collectives that run inside, by operator name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            self.counts[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


def run_case(
    model, case: str, rank: int, *, once: bool, mode: str = "auto", activations: str = "keep"
):
    """Run this rank's share; returns what ran and the collectives by name."""
    sequences = CASES[case][rank]
    batch = pack_sequences(
        [row.numpy() for row in sequences],
        PackBudget(max_tokens=40, prefix_activations=activations),
        mode=mode,
        predict=[np.arange(1, len(row)) >= FIRST_TARGET.get(case, 1) for row in sequences],
    )
    runner = PhaseRunner(
        model=model,
        backend=BACKENDS["sdpa_cpu"],
        process_group=dist.group.WORLD,
        reduce_gradients_once=once,
    )
    loss = sum_losses(rollout_loss(len(sequences), seed=rank))
    with CountCollectives() as collectives:
        stats = runner.backward(batch, loss, with_entropy=True)
    return stats, collectives.counts


def mean_dense_gradients(case: str, rank: int) -> dict[str, torch.Tensor]:
    """The mean over ranks of dense gradients, from a model of one's own."""
    model = tiny_model(num_layers=2)
    sequences = CASES[case][rank]
    skipped = FIRST_TARGET.get(case, 1) - 1
    loss = rollout_loss(len(sequences), seed=rank)

    def wanted_loss(index, log_probs, entropies) -> torch.Tensor:
        return loss(index, log_probs[skipped:], entropies[skipped:])

    dense_backward(model, sequences, wanted_loss)
    mean = gradients(model)
    for gradient in mean.values():
        dist.all_reduce(gradient)
        gradient /= WORLD_SIZE
    return mean


def full_gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Unsharded gradients; zeros where there is none."""
    return {
        name: torch.zeros(parameter.shape)
        if parameter.grad is None
        else parameter.grad.full_tensor()
        for name, parameter in model.named_parameters()
    }


def step_in_the_middle(rank: int, optimizer_settings: dict) -> str:
    """Name of the error when a loss steps the optimizer while caches are alive."""
    model = sharded_model(checkpointing=False, reshard=True)
    optimizer = torch.optim.AdamW(model.parameters(), **optimizer_settings)
    run_case(model, "different rounds, heads and leaves", rank, once=True)
    runner = PhaseRunner(model=model, backend=BACKENDS["sdpa_cpu"], process_group=dist.group.WORLD)
    sequences = group(rank, 30, 12, 15, 8)
    batch = pack_sequences([row.numpy() for row in sequences], PackBudget(max_tokens=40))
    assert batch.plan.num_cut_edges

    def loss(rollouts):
        optimizer.step()
        return sum(log_probs.sum() for log_probs in rollouts.log_probs)

    try:
        runner.backward(batch, loss)
    except StaleCacheError:
        return "StaleCacheError"
    return "no error"


def all_cases(rank: int, world_size: int) -> dict:
    found = {}
    for case in CASES:
        truth = mean_dense_gradients(case, rank)
        for setting in SETTINGS:
            checkpointing, reshard, once = setting
            model = sharded_model(checkpointing, reshard)
            stats, collectives = run_case(model, case, rank, once=once)
            error, worst = max_relative_error(full_gradients(model), truth)
            found[case, setting] = {
                "error": error,
                "worst": worst,
                "stats": stats,
                "collectives": collectives,
            }
    for mode in ("cut", "off"):
        model = sharded_model(checkpointing=True, reshard=True)
        run_case(model, "uneven", rank, once=True, mode=mode)
        truth = mean_dense_gradients("uneven", rank)
        found[mode] = max_relative_error(full_gradients(model), truth)
    for case in RECOMPUTED_CASES:
        model = sharded_model(checkpointing=False, reshard=True)
        activations = ("recompute", "keep")[rank]
        stats, collectives = run_case(model, case, rank, once=True, activations=activations)
        error = max_relative_error(full_gradients(model), mean_dense_gradients(case, rank))
        found["recompute", case] = (error, stats.prefix_activations, collectives)
    for name, settings in (
        ("plain", {"foreach": False}),
        ("foreach", {"foreach": True}),
        ("fused", {"fused": True}),
    ):
        found["stale", name] = step_in_the_middle(rank, settings)
    return found


@pytest.fixture(scope="module")
def results() -> list[dict]:
    """What each rank found."""
    return run_ranks(all_cases, WORLD_SIZE)


@pytest.mark.parametrize(
    "setting",
    SETTINGS,
    ids=lambda s: (
        "-".join(name for name, is_on in zip(SETTING_NAMES, s, strict=True) if is_on) or "plain"
    ),
)
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_the_mean_of_dense_ones(results, case, setting):
    for rank, result in enumerate(results):
        found = result[case, setting]
        assert found["error"] < TOLERANCE, f"rank {rank}: {found['worst']}"
    first, second = (result[case, setting] for result in results)
    assert first["collectives"] == second["collectives"]
    stats = first["stats"], second["stats"]
    num_run = {rank.num_packs + rank.num_dummy_packs for rank in stats}
    assert len(num_run) == 1


@pytest.mark.parametrize("mode", ["cut", "off"])
def test_forced_plans(results, mode):
    for error, worst in (result[mode] for result in results):
        assert error < TOLERANCE, worst


@pytest.mark.parametrize("case", RECOMPUTED_CASES)
def test_one_rank_that_recomputes_makes_all_recompute(results, case):
    kept = results[0][case, (False, True, True)]["collectives"]
    for (error, worst), activations, collectives in (r["recompute", case] for r in results):
        assert error < TOLERANCE, worst
        assert activations == "recompute"
        assert collectives == results[0]["recompute", case][2]
        assert collectives.total() > kept.total(), "heads run forward twice"


def test_ranks_differ_where_they_should(results):
    """The cases are what their names say."""
    stats = {case: [result[case, SETTINGS[0]]["stats"] for result in results] for case in CASES}
    assert stats["one rank shares nothing"][1].reuse_ratio == 1.0
    assert stats["one rank has no rollouts"][1].num_packs == 0
    assert stats["one rank has no rollouts"][1].num_dummy_packs > 0
    assert all(rank.num_cut_edges for rank in stats["different rounds, heads and leaves"])
    assert all(rank.num_dummy_packs for rank in stats["different rounds, heads and leaves"])
    assert [bool(rank.num_cut_edges) for rank in stats["one fused, one cut"]] == [False, True]
    assert all(rank.num_cut_edges for rank in stats["heads that predict nothing"])


def test_reducing_once_reduces_once(results):
    """One reduce-scatter per sharded module in all, against one per pack."""

    def num_reductions(setting) -> int:
        counts = results[0]["uneven", setting]["collectives"]
        return sum(count for name, count in counts.items() if "reduce_scatter" in name)

    for checkpointing, reshard in product((False, True), repeat=2):
        once = num_reductions((checkpointing, reshard, True))
        always = num_reductions((checkpointing, reshard, False))
        stats = results[0]["uneven", (checkpointing, reshard, True)]["stats"]
        assert once == 3, "two layers and the root"
        assert always == 3 * (stats.num_packs + stats.num_dummy_packs)


def test_resharding_gathers_again(results):
    def num_gathers(setting) -> int:
        counts = results[0]["uneven", setting]["collectives"]
        return sum(count for name, count in counts.items() if "allgather" in name)

    assert num_gathers((False, True, False)) > num_gathers((False, False, False))


@pytest.mark.parametrize("optimizer", ["plain", "foreach", "fused"])
def test_a_step_in_the_middle_raises_on_sharded_parameters(results, optimizer):
    assert [result["stale", optimizer] for result in results] == ["StaleCacheError"] * WORLD_SIZE
