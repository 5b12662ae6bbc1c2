"""Engine link of the proof chain: `prefixflow` == verl's FSDP2 engine on the same TensorDict.

Two real gloo ranks build both engines once; every scenario starts them from the same weights and a
fresh AdamW, runs `infer_batch` and `train_batch` through verl's own worker, and reports the
differences.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch

from tests.dist import run_ranks
from tests.engines import (
    make_rows,
    make_worker,
    parameters_of,
    response_values,
    save_tiny_model,
    set_loss,
    tokens,
    use_cpu_platform,
)

TOLERANCE = 1e-5
Rollout = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Rows of one rank, and settings that differ from the defaults."""

    rollouts: list[Rollout]
    rows: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of `make_rows`."""
    actor: dict[str, Any] = field(default_factory=dict)
    ours: dict[str, Any] = field(default_factory=dict)
    """Non-tensor settings of our rows only, such as a smaller budget."""
    is_cut: bool = False
    """The plan must have cut edges."""


def group(generator: torch.Generator, prompt: int, *responses: int) -> list[Rollout]:
    """Rollouts of one prompt of `prompt` tokens with responses of these lengths."""
    shared = tokens(generator, prompt)
    return [(shared, tokens(generator, count)) for count in responses]


def ragged(g: torch.Generator) -> Scenario:
    return Scenario(rollouts=group(g, 20, 5, 9, 1, 14))


def group_sizes_and_singletons(g: torch.Generator) -> Scenario:
    return Scenario(rollouts=group(g, 16, 4, 6, 8) + group(g, 11, 5, 5) + group(g, 9, 7))


def members_not_adjacent(g: torch.Generator) -> Scenario:
    first, second = group(g, 18, 4, 6, 8), group(g, 13, 5, 7, 3)
    return Scenario(rollouts=[row for pair in zip(first, second, strict=True) for row in pair])


def identical_responses(g: torch.Generator) -> Scenario:
    rollouts = group(g, 15, 6, 9)
    return Scenario(rollouts=[rollouts[0], rollouts[1], rollouts[0], rollouts[0]])


def response_is_prefix_of_another(g: torch.Generator) -> Scenario:
    (prompt, response), *others = group(g, 15, 12, 5)
    return Scenario(rollouts=[(prompt, response), (prompt, response[:4]), *others])


def shared_system_prompt(g: torch.Generator) -> Scenario:
    system, rollouts = tokens(g, 17), []
    for size in (4, 7, 9):
        for prompt, response in group(g, size, 5, 8):
            rollouts.append((torch.cat([system, prompt]), response))
    return Scenario(rollouts=rollouts)


def no_sharing(g: torch.Generator) -> Scenario:
    return Scenario(rollouts=[group(g, size, size + 2)[0] for size in (5, 8, 11)])


def no_sharing_on_one_rank(g: torch.Generator) -> Scenario:
    if g.initial_seed() == 0:
        return Scenario(rollouts=group(g, 40, 9, 9, 9, 9, 9, 9), ours={"max_token_len_per_gpu": 60})
    return Scenario(rollouts=[group(g, 6, 3)[0], group(g, 8, 4)[0]])


def one_token_responses(g: torch.Generator) -> Scenario:
    return Scenario(rollouts=group(g, 15, 1, 1, 1) + group(g, 1, 1, 2))


def group_larger_than_budget(g: torch.Generator) -> Scenario:
    rollouts = group(g, 30, *range(8, 20))
    return Scenario(rollouts=rollouts, ours={"max_token_len_per_gpu": 64}, is_cut=True)


def sequence_longer_than_budget(g: torch.Generator) -> Scenario:
    rollouts = group(g, 50, 60, 10, 12) + group(g, 5, 6)
    return Scenario(rollouts=rollouts, ours={"max_token_len_per_gpu": 40}, is_cut=True)


def multi_turn_masks(g: torch.Generator) -> Scenario:
    rollouts = group(g, 20, 12, 15, 9, 7)
    masks = [torch.ones(len(response), dtype=torch.int64) for _, response in rollouts]
    for start, mask in enumerate(masks):
        mask[2 + start : 5 + start] = 0
    return Scenario(rollouts=rollouts, rows={"masks": masks})


def some_rows_all_masked(g: torch.Generator) -> Scenario:
    rollouts = group(g, 20, 12, 5, 9)
    masks = [torch.ones(len(response), dtype=torch.int64) for _, response in rollouts]
    masks[1][:] = 0
    return Scenario(rollouts=rollouts, rows={"masks": masks})


def every_row_masked(g: torch.Generator) -> Scenario:
    rollouts = group(g, 20, 12, 5, 9)
    masks = [torch.zeros(len(response), dtype=torch.int64) for _, response in rollouts]
    # A token mean over no tokens is 0 / 0 in verl as well; sequence modes are defined.
    return Scenario(
        rollouts=rollouts, rows={"masks": masks}, actor={"loss_agg_mode": "seq-mean-token-mean"}
    )


def no_loss_token_in_a_token_mean(g: torch.Generator) -> Scenario:
    """verl's loss is 0 / 0, ours 0, and the gradient zero in both."""
    base = every_row_masked(g)
    return Scenario(rollouts=base.rollouts, rows=base.rows)


def zero_advantages(g: torch.Generator) -> Scenario:
    rollouts = group(g, 20, 12, 5, 9)
    return Scenario(rollouts=rollouts, rows={"advantages": [0.0] * 3}, actor={"entropy_coeff": 0.0})


def padding_rows(g: torch.Generator) -> Scenario:
    end = torch.full((127,), 2)
    padding = (end, end[:1])
    rollouts = [*group(g, 20, 12, 5), padding, padding]
    masks = [torch.ones(len(response), dtype=torch.int64) for _, response in rollouts]
    masks[2][:] = masks[3][:] = 0
    return Scenario(rollouts=rollouts, rows={"masks": masks})


def inner_segments_carry_loss(g: torch.Generator) -> Scenario:
    """Three levels: a turn shared by branches carries loss in every branch."""
    rollouts, masks = [], []
    prompt = tokens(g, 18)
    for _ in range(2):
        turn, observation = tokens(g, 9), tokens(g, 4)
        for size in (3, 7, 5):
            rollouts.append((prompt, torch.cat([turn, observation, tokens(g, size)])))
            masks.append(torch.tensor([1] * 9 + [0] * 4 + [1] * size))
    return Scenario(rollouts=rollouts, rows={"masks": masks})


def inner_segments_carry_loss_cut(g: torch.Generator) -> Scenario:
    base = inner_segments_carry_loss(g)
    return Scenario(
        rollouts=base.rollouts, rows=base.rows, ours={"max_token_len_per_gpu": 32}, is_cut=True
    )


def prompts_of_one_trajectory(g: torch.Generator) -> Scenario:
    """Each prompt continues the one before: one rollout per turn of an agent."""
    rollouts, context = [], tokens(g, 12)
    for size in (5, 8, 3, 6):
        response = tokens(g, size)
        rollouts.append((context, response))
        context = torch.cat([context, response, tokens(g, 4)])
    return Scenario(rollouts=rollouts, ours={"max_token_len_per_gpu": 30}, is_cut=True)


def fixed_micro_batches(g: torch.Generator) -> Scenario:
    settings = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2}
    return Scenario(
        rollouts=group(g, 25, 8, 9, 10, 11, 12, 13) + group(g, 9, 4, 5),
        rows=settings,
        is_cut=True,
    )


def scalar_temperature(g: torch.Generator) -> Scenario:
    return Scenario(rollouts=group(g, 20, 6, 9, 4), rows={"temperature": 0.6})


def per_sample_temperature(g: torch.Generator) -> Scenario:
    rollouts = group(g, 20, 6, 9, 4)
    return Scenario(rollouts=[*rollouts, rollouts[0]], rows={"temperature": [0.6, 1.0, 1.3, 0.8]})


def kl_loss(g: torch.Generator) -> Scenario:
    return Scenario(
        rollouts=group(g, 20, 6, 9, 4), actor={"use_kl_loss": True, "kl_loss_coef": 0.1}
    )


def gspo(g: torch.Generator) -> Scenario:
    return Scenario(
        rollouts=group(g, 20, 6, 9, 4),
        actor={"policy_loss": {"loss_mode": "gspo"}, "loss_agg_mode": "seq-mean-token-mean"},
    )


def no_entropy(g: torch.Generator) -> Scenario:
    return Scenario(rollouts=group(g, 20, 6, 9), rows={"calculate_entropy": False})


def _agg_mode(mode: str) -> Callable[[torch.Generator], Scenario]:
    def scenario(g: torch.Generator) -> Scenario:
        return Scenario(
            rollouts=group(g, 20, 6, 9, 4) + group(g, 5, 8),
            actor={"loss_agg_mode": mode, "loss_scale_factor": 16},
            ours={"max_token_len_per_gpu": 30},
        )

    return scenario


SCENARIOS: dict[str, Callable[[torch.Generator], Scenario]] = {
    function.__name__: function
    for function in (
        ragged,
        group_sizes_and_singletons,
        members_not_adjacent,
        identical_responses,
        response_is_prefix_of_another,
        shared_system_prompt,
        no_sharing,
        no_sharing_on_one_rank,
        one_token_responses,
        group_larger_than_budget,
        sequence_longer_than_budget,
        multi_turn_masks,
        some_rows_all_masked,
        every_row_masked,
        no_loss_token_in_a_token_mean,
        zero_advantages,
        padding_rows,
        inner_segments_carry_loss,
        inner_segments_carry_loss_cut,
        prompts_of_one_trajectory,
        fixed_micro_batches,
        scalar_temperature,
        per_sample_temperature,
        kl_loss,
        gspo,
        no_entropy,
    )
} | {
    f"agg_{mode}": _agg_mode(mode)
    for mode in (
        "token-mean",
        "token-sum",
        "seq-mean-token-sum",
        "seq-mean-token-mean",
        "seq-mean-token-sum-norm",
    )
}

CUT_INDEPENDENT = ("actor/pg_loss", "actor/entropy_loss", "kl_loss", "kl_coef")
"""Metrics of `ppo_loss` that are sums over the mini-batch, however it is cut."""


def _reset(worker, initial: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in worker.engine.module.named_parameters():
            parameter.to_local().copy_(initial[name])
    worker.engine.optimizer.state.clear()


def _relative(ours: torch.Tensor, truth: torch.Tensor, floor: float = 1e-12) -> float:
    return ((ours - truth).norm() / truth.norm().clamp_min(floor)).item()


def _metric(metrics: dict[str, Any], name: str) -> float:
    from verl.utils.metric import Metric

    value = metrics[name]
    if isinstance(value, list):
        return Metric.aggregate_dp(value) if isinstance(value[0], Metric) else value[0][0]
    return float(value)


def _compare(rank: int, world_size: int, path: str) -> dict[str, dict[str, Any]]:
    use_cpu_platform()
    from verl.utils import tensordict_utils as tu

    dense, ours = make_worker(path, "fsdp2"), make_worker(path, "prefixflow")
    initial = {
        name: parameter.to_local().detach().clone()
        for name, parameter in dense.engine.module.named_parameters()
    }
    results: dict[str, dict[str, Any]] = {}
    for name, make in SCENARIOS.items():
        scenario = make(torch.Generator().manual_seed(rank))
        outputs, metrics, parameters = [], [], []
        for worker in (dense, ours):
            rows = partial(
                make_rows,
                scenario.rollouts,
                **{
                    "global_batch_size": 2 * len(scenario.rollouts),
                    **scenario.rows,
                    **(scenario.ours if worker is ours else {}),
                },
            )
            _reset(worker, initial)
            set_loss(worker, **scenario.actor)
            output = worker.infer_batch(rows())
            keys = ["log_probs", "entropy"]
            if scenario.rows.get("calculate_entropy") is False:
                keys.remove("entropy")
            outputs.append({key: response_values(tu.get(output, key), rows()) for key in keys})
            metrics.append(tu.get(worker.train_batch(rows()), "metrics"))
            parameters.append(parameters_of(worker))
        moved = {name: parameters[0][name] - full for name, full in _full(initial, dense).items()}
        results[name] = {
            "outputs": max(
                (outputs[1][key] - outputs[0][key]).abs().max().item() for key in outputs[0]
            ),
            "loss": (metrics[0]["loss"], metrics[1]["loss"]),
            "grad_norm": (metrics[0]["grad_norm"], metrics[1]["grad_norm"]),
            "parameters": max(
                _relative(parameters[1][name], truth) for name, truth in parameters[0].items()
            ),
            "moved": max(change.abs().max().item() for change in moved.values()),
            "metrics": {
                key: (_metric(metrics[0], key), _metric(metrics[1], key))
                for key in CUT_INDEPENDENT
                if key in metrics[0]
            },
            "reuse": {
                key.removeprefix("prefixflow/"): _metric(metrics[1], key)
                for key in metrics[1]
                if key.startswith("prefixflow/")
            },
            "is_cut": scenario.is_cut,
        }
    return results


def _full(shards: dict[str, torch.Tensor], worker) -> dict[str, torch.Tensor]:
    """Full initial parameters, gathered by putting the shards into the worker once more."""
    _reset(worker, shards)
    return parameters_of(worker)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    path = save_tiny_model(tmp_path_factory.mktemp("model"))
    return run_ranks(_compare, 2, path)


def _assert_close(pair: tuple[float, float], what: str) -> None:
    truth, ours = pair
    # verl's mean over no token is 0 / 0; ours is 0.
    truth = 0.0 if math.isnan(truth) else truth
    assert ours == pytest.approx(truth, rel=TOLERANCE, abs=1e-6), what


@pytest.mark.parametrize("name", SCENARIOS)
def test_same_update_as_verl(results, name: str) -> None:
    for result in (ranks[name] for ranks in results):
        assert result["outputs"] < 1e-5
        _assert_close(result["loss"], "loss")
        _assert_close(result["grad_norm"], "grad_norm")
        for metric, pair in result["metrics"].items():
            _assert_close(pair, metric)
        assert result["parameters"] < TOLERANCE
        assert result["reuse"]["fallback"] == 0
        if result["is_cut"]:
            assert result["reuse"]["cut_edges"] > 0


def test_updates_are_not_trivial(results) -> None:
    """The comparison above would be empty if nothing moved."""
    still = {"zero_advantages", "every_row_masked", "no_loss_token_in_a_token_mean"}
    for name, result in results[0].items():
        if name not in still:
            assert result["moved"] > 1e-4, name
            assert result["grad_norm"][1] > 1e-3, name


def test_zero_advantage_gives_exactly_zero_gradient(results) -> None:
    assert results[0]["zero_advantages"]["grad_norm"][1] == 0.0


def test_reuse_happens(results) -> None:
    assert results[0]["ragged"]["reuse"]["reuse_ratio"] > 1.5
    assert results[0]["no_sharing"]["reuse"]["reuse_ratio"] == 1.0
    assert results[0]["ragged"]["reuse"]["log_prob/reuse_ratio"] > 1.5
    assert results[0]["no_sharing_on_one_rank"]["reuse"]["dummy_packs"] > 0
