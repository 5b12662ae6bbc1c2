"""Planning and packing stay near-linear: no loop over pairs of segments hides in them."""

import time

import numpy as np
import pytest

from prefixflow_verl.packing import Packer
from prefixflow_verl.plan import PackBudget, make_plan


def best_cpu_s(function, repeats=3):
    """Least CPU seconds of `repeats` calls: other processes on the machine hardly count."""
    times = []
    for _ in range(repeats):
        began = time.process_time()
        function()
        times.append(time.process_time() - began)
    return min(times)


def groups(count, rng):
    """Prompts of 24 tokens with 16 responses of 4 to 11 tokens each."""
    sequences = []
    for _ in range(count):
        prompt = rng.integers(0, 1000, 24)
        sequences += [
            np.append(prompt, rng.integers(0, 1000, rng.integers(4, 12))) for _ in range(16)
        ]
    return sequences


def dialogs(count, rng):
    """Chains of 8 turns of 6 tokens, two other continuations at each."""
    sequences = []
    for _ in range(count):
        turns = [rng.integers(0, 1000, 6) for _ in range(9)]
        for turn in range(1, 9):
            prefix = np.concatenate(turns[:turn])
            sequences += [np.append(prefix, rng.integers(0, 1000, 6)) for _ in range(2)]
        sequences.append(np.concatenate(turns))
    return sequences


@pytest.mark.parametrize(
    "workload, budget",
    [
        pytest.param(groups, PackBudget(max_tokens=4096), id="whole trees"),
        pytest.param(groups, PackBudget(max_tokens=100), id="cut trees"),
        pytest.param(groups, PackBudget(max_rollouts=4), id="cut by rollouts"),
        pytest.param(
            groups, PackBudget(max_tokens=100, max_cache_tokens=20), id="trees over the cache"
        ),
        pytest.param(
            dialogs, PackBudget(max_tokens=64, cut_overhead_tokens=1000), id="deep, dissolved"
        ),
    ],
)
def test_eight_times_the_rollouts_take_eight_times_as_long(workload, budget):
    def seconds_per_rollout(count):
        sequences = workload(count, np.random.default_rng(0))

        def plan_and_pack():
            forest, plan = make_plan(sequences, budget)
            assert len(Packer(sequences, forest, plan).layouts) == len(plan.packs)

        return best_cpu_s(plan_and_pack) / len(sequences)

    assert seconds_per_rollout(1200) < 2.5 * seconds_per_rollout(150)


def test_512_rollouts_of_8192_tokens_plan_in_a_second():
    rng = np.random.default_rng(0)
    sequences = []
    for _ in range(64):
        prompt = rng.integers(0, 150_000, 4096)
        sequences += [np.append(prompt, rng.integers(0, 150_000, 4096)) for _ in range(8)]
    assert best_cpu_s(lambda: make_plan(sequences, PackBudget(max_tokens=32768))) < 1
