"""A rank that runs out of memory anywhere in a mini-batch: every rank is told, none waits forever,
and the same mini-batch then gives the gradients of full-sequence training.

Memory "runs out" at every place of a run in turn: before an MLP, when the gradient of its output
arrives, in the loss, before FSDP2 gathers and while it copies out what it has gathered. A rank that
took part in one collective more or fewer than the others would hang in this test.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from prefixflow_verl import PackBudget
from prefixflow_verl.attention import BACKENDS
from prefixflow_verl.lockstep import PackMemoryError
from prefixflow_verl.phases import PhaseRunner, pack_sequences
from tests.dist import run_ranks
from tests.distributed.test_fsdp2 import (
    CASES,
    full_gradients,
    mean_dense_gradients,
    sharded_model,
)
from tests.reference import max_relative_error, rollout_loss, sum_losses

TOLERANCE = 1e-5
STRIDE = 3
"""Every third place, to be done in a minute; 1 tries them all."""
SETTINGS = {
    "kept": {"case": "different rounds, heads and leaves", "activations": "keep"},
    "recomputed": {"case": "one fused, one cut", "activations": "recompute"},
    "checkpointed": {"case": "one fused, one cut", "checkpointing": True},
    "root gathered anew": {"case": "one fused, one cut", "reshard": True},
    "nothing on one rank": {"case": "one rank has no rollouts", "activations": "recompute"},
}


class Trouble:
    """Counts places where memory could run out, and makes it run out at one of them."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.count = 0
        self.place: int | None = None
        for layer in model.model.layers:
            layer.mlp.register_forward_pre_hook(lambda *_: self.pass_by())
            layer.mlp.register_forward_hook(self._watch_gradient)

    def _watch_gradient(self, _module, _arguments, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda _: self.pass_by())

    def pass_by(self) -> None:
        if self.count == self.place:
            self.count += 1
            raise torch.OutOfMemoryError("simulated: no memory left")
        self.count += 1

    @contextmanager
    def around_gathering(self) -> Iterator[None]:
        originals = {}
        for name in ("foreach_all_gather", "foreach_all_gather_copy_out"):
            originals[name] = getattr(_fsdp_param_group, name)

            def passing(*args: Any, original=originals[name]) -> Any:
                self.pass_by()
                return original(*args)

            setattr(_fsdp_param_group, name, passing)
        try:
            yield
        finally:
            for name, original in originals.items():
                setattr(_fsdp_param_group, name, original)


class CountingRunner(PhaseRunner):
    """Counts the places before the last pass of a run: that one is not survived."""

    trouble: Trouble
    num_places = 0

    def _agree_on_failure(self) -> PackMemoryError | None:
        self.num_places = self.trouble.count
        return super()._agree_on_failure()


def run_setting(
    rank: int,
    case: str,
    activations: str = "keep",
    checkpointing: bool = False,
    reshard: bool = False,
) -> dict[str, Any]:
    model = sharded_model(checkpointing, reshard)
    if not reshard:
        for layer in model.model.layers:
            layer.set_reshard_after_forward(True)
    runner = CountingRunner(
        model=model,
        backend=BACKENDS["sdpa_cpu"],
        process_group=dist.group.WORLD,
        survives_out_of_memory=True,
    )
    trouble = runner.trouble = Trouble(model)
    sequences = CASES[case][rank]
    batch = pack_sequences(
        [row.numpy() for row in sequences],
        PackBudget(max_tokens=40, prefix_activations=activations),
    )
    wanted = sum_losses(rollout_loss(len(sequences), seed=rank))

    def loss(done):
        trouble.pass_by()
        return wanted(done)

    def gradient_error() -> float:
        model.zero_grad()
        trouble.count = 0
        stats = runner.backward(batch, loss, with_entropy=True)
        assert stats.num_dummy_packs >= 1, "gradients are reduced by a pass of their own"
        return max_relative_error(full_gradients(model), expected)[0]

    expected = mean_dense_gradients(case, rank)
    outcome: dict[str, Any] = {"errors": [], "messages": [], "left": 0}
    with trouble.around_gathering():
        # The first run looks at the LM head besides.
        outcome["errors"] += [gradient_error(), gradient_error()]
        places = torch.tensor(runner.num_places)
        counts = [torch.zeros_like(places) for _ in range(dist.get_world_size())]
        dist.all_gather(counts, places)
        outcome["num_places"] = [int(count) for count in counts]
        for failing, num_places in enumerate(outcome["num_places"]):
            for place in range(failing, num_places, STRIDE):
                trouble.count = 0
                trouble.place = place if rank == failing else None
                try:
                    runner.backward(batch, loss, with_entropy=True)
                    outcome["messages"].append("nothing was raised")
                except PackMemoryError as error:
                    outcome["messages"].append(str(error))
                trouble.place = None
                outcome["left"] += sum(p.grad is not None for p in model.parameters())
                if place % 5 == 0:
                    outcome["errors"].append(gradient_error())
        outcome["errors"].append(gradient_error())
        trouble.place = 0 if rank == 0 else None
        trouble.count = 0
        try:
            runner.forward(batch, lambda _: None)
            outcome["forward"] = "nothing was raised"
        except PackMemoryError as error:
            outcome["forward"] = str(error)
        trouble.place = None
        outcome["errors"].append(gradient_error())
    return outcome


def _run_settings(rank: int, world_size: int) -> dict[str, Any]:
    return {name: run_setting(rank, **setting) for name, setting in SETTINGS.items()}


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, Any]]:
    return run_ranks(_run_settings, 2)


@pytest.mark.parametrize("name, rank", list(product(SETTINGS, range(2))))
def test_memory_may_run_out_anywhere(outcomes, name, rank) -> None:
    outcome = outcomes[rank][name]
    assert min(outcome["num_places"]) > 20
    num_tries = [len(range(rank, num, STRIDE)) for rank, num in enumerate(outcome["num_places"])]
    assert len(outcome["messages"]) == sum(num_tries)
    for message in outcome["messages"]:
        assert "does not fit into memory" in message
        assert "simulated: no memory left" in message
    assert outcome["left"] == 0, "no gradient of a failed try is left"
    assert max(outcome["errors"]) < TOLERANCE
    assert "rank 0: OutOfMemoryError" in outcome["forward"]


@pytest.mark.parametrize("name", SETTINGS)
def test_every_rank_is_told_the_same(outcomes, name) -> None:
    first, second = (outcome[name] for outcome in outcomes)
    assert first["messages"] == second["messages"]
