"""Memory side of the phases link: nothing of a pack stays alive once its backward has run.

Live graphs are counted from outside: autograd asks a hook for a handle whenever it saves a tensor,
and drops the handle with the graph. Layer outputs are watched through weak references, which also
see what activation checkpointing keeps; segment contexts and caches are counted among the garbage
collector's objects.
"""

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import pytest
import torch

from prefixflow_verl.accounting import ModelShape
from prefixflow_verl.attention import BACKENDS, SegmentContext
from prefixflow_verl.kv_cache import PackCache
from prefixflow_verl.memory import measure_peaks
from prefixflow_verl.phases import PhaseRunner, pack_sequences
from prefixflow_verl.plan import PackBudget
from tests.reference import (
    VOCAB,
    gradients,
    max_relative_error,
    nested_rollouts,
    rollout_loss,
    sum_losses,
    tiny_model,
)

checkpointing = pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])


class Handle:
    """Stands for one tensor saved in a graph."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def num_carriers() -> int:
    """Segment contexts and caches: what carries tensors from pack to pack."""
    return sum(type(thing) in (SegmentContext, PackCache) for thing in gc.get_objects())


@dataclass
class Live:
    """What is alive of all graphs made under `watching`."""

    saved: list[weakref.ref] = field(default_factory=list)
    outputs: list[weakref.ref] = field(default_factory=list)
    num_earlier_carriers: int = field(default_factory=num_carriers)

    def counts(self) -> tuple[int, int, int]:
        """Tensors saved in graphs, outputs of layers, contexts and caches."""
        return (
            sum(reference() is not None for reference in self.saved),
            sum(reference() is not None for reference in self.outputs),
            num_carriers() - self.num_earlier_carriers,
        )


@contextmanager
def watching(model: torch.nn.Module, *, count_saved: bool = True) -> Iterator[Live]:
    """Watch every graph made inside, with the garbage collector off: cycles would stay.

    Handles of saved tensors make cycles of their own in a graph whose backward never runs:
    `count_saved=False` leaves them out.
    """
    gc.collect()
    live = Live()

    def save(tensor: torch.Tensor) -> Handle:
        handle = Handle(tensor)
        live.saved.append(weakref.ref(handle))
        return handle

    def watch_output(module, arguments, output) -> None:
        for tensor in output if isinstance(output, tuple) else (output,):
            if isinstance(tensor, torch.Tensor):
                live.outputs.append(weakref.ref(tensor))

    handles = [module.register_forward_hook(watch_output) for module in model.modules()]
    gc.disable()
    try:
        hooks = torch.autograd.graph.saved_tensors_hooks(save, lambda handle: handle.tensor)
        with hooks if count_saved else nullcontext():
            yield live
    finally:
        gc.enable()
        for handle in handles:
            handle.remove()


def equal_groups(num_groups: int, prompt: int, num_responses: int, response: int):
    """Rollouts of groups that look alike in everything but their tokens."""
    generator = torch.Generator().manual_seed(0)
    sequences = []
    for first in range(num_groups):
        tokens = torch.randint(0, VOCAB, (prompt,), generator=generator)
        for second in range(num_responses):
            own = torch.randint(0, VOCAB, (response,), generator=generator)
            tokens[0], own[0] = first, second
            sequences.append(torch.cat([tokens, own]))
    return sequences


def run_and_count(
    model,
    sequences,
    budget: PackBudget,
    mode: str,
    with_entropy: bool = True,
    activations: str = "keep",
):
    """What is alive whenever the loss of a pack is asked for, and after everything has run."""
    batch = pack_sequences(
        [row.numpy() for row in sequences],
        replace(budget, prefix_activations=activations),
        mode=mode,
    )
    runner = PhaseRunner(model=model, backend=BACKENDS["sdpa_cpu"])
    loss = sum_losses(rollout_loss(len(sequences)))
    counts, kept = [], []
    with watching(model) as live:

        def counting_loss(rollouts) -> torch.Tensor:
            assert all(reference() is None for reference in kept), "outputs of an earlier pack"
            kept[:] = [weakref.ref(row) for row in rollouts.log_probs]
            counts.append(live.counts())
            return loss(rollouts)

        stats = runner.backward(batch, counting_loss, with_entropy=with_entropy)
        after = live.counts()
    assert counts and counts[0][1] and counts[0][2], "the watch sees graphs"
    return counts, after, stats


@checkpointing
@pytest.mark.parametrize("mode", ["auto", "fused", "cut", "off"])
def test_nothing_survives_a_run(mode, checkpointing):
    """Reference cycles included: the garbage collector is off."""
    model = tiny_model(num_layers=2, checkpointing=checkpointing)
    counts, after, _ = run_and_count(model, nested_rollouts(), PackBudget(max_tokens=30), mode)
    assert after == (0, 0, 0)


@checkpointing
@pytest.mark.parametrize("mode", ["fused", "off"])
def test_every_pack_without_cuts_finds_the_same_memory(mode, checkpointing):
    """Packs of one shape: what is alive while the loss of one is computed never grows."""
    sequences = equal_groups(5, prompt=12, num_responses=3, response=6)
    size = 12 + 3 * 5 if mode == "fused" else 17
    model = tiny_model(num_layers=2, checkpointing=checkpointing)
    counts, after, stats = run_and_count(model, sequences, PackBudget(max_tokens=size), mode)
    assert len(counts) == stats.num_packs == (5 if mode == "fused" else 15)
    assert len(set(counts)) == 1
    assert after == (0, 0, 0)


@checkpointing
def test_leaves_leave_only_heads_alive(checkpointing):
    """Rounds of one prompt and four equal leaves: heads of one round and one leaf, never more."""
    num_groups, num_leaves = 3, 4
    sequences = equal_groups(num_groups, prompt=12, num_responses=num_leaves, response=13)
    model = tiny_model(num_layers=2, checkpointing=checkpointing)
    counts, after, stats = run_and_count(model, sequences, PackBudget(max_tokens=12), "auto")
    assert stats.num_packs == num_groups * (1 + num_leaves)
    assert stats.num_cut_edges == num_groups * num_leaves
    assert len(counts) == num_groups * num_leaves
    assert {carriers for _, _, carriers in counts} == {3}, "two contexts and the head's cache"
    assert len(set(counts)) == 1, "no growth over leaves, nor over rounds"
    assert after == (0, 0, 0)


@checkpointing
def test_recomputed_heads_keep_no_graph_while_leaves_run(checkpointing):
    """A head costs about as much as a leaf without its LM head: half of the graph is there."""
    sequences = equal_groups(1, prompt=12, num_responses=4, response=13)
    model = tiny_model(num_layers=2, checkpointing=checkpointing)
    budget = PackBudget(max_tokens=12)
    kept, _, _ = run_and_count(model, sequences, budget, "auto")
    counts, after, stats = run_and_count(model, sequences, budget, "auto", activations="recompute")
    assert len(set(counts)) == len(set(kept)) == 1 and len(counts) == len(kept) == 4
    (saved, outputs, _), (kept_saved, kept_outputs, _) = counts[0], kept[0]
    assert outputs < 0.7 * kept_outputs
    assert saved < 0.7 * kept_saved
    assert after == (0, 0, 0)


@checkpointing
@pytest.mark.parametrize("family, least", [("qwen3", 0.9), ("llama", 0.7)])
def test_the_formula_of_kept_activations_bounds_what_is_kept(family, least, checkpointing):
    """By the allocator, from two prompt lengths, while the one suffix of each runs."""
    model = tiny_model(family, num_layers=4, num_heads=8, checkpointing=checkpointing)
    lengths = (256, 512)

    def suffix_peak(prompt: int) -> int:
        sequences = [row.numpy() for row in equal_groups(1, prompt, 2, 2)]
        batch = pack_sequences(
            sequences,
            PackBudget(max_tokens=prompt),
            mode="cut",
            predict=[np.arange(1, len(row)) >= prompt for row in sequences],
        )
        runner = PhaseRunner(model=model, backend=BACKENDS["sdpa_cpu"])
        loss = sum_losses(rollout_loss(len(sequences)))
        runner.backward(batch, loss, with_entropy=True)
        peaks = measure_peaks(
            lambda: runner.backward(batch, loss, with_entropy=True), torch.device("cpu")
        )
        return peaks.phase_bytes["suffix"]

    measured = (suffix_peak(lengths[1]) - suffix_peak(lengths[0])) / (lengths[1] - lengths[0])
    shape = ModelShape.from_config(model.config)
    predicted = shape.activation_bytes_per_token(element_bytes=4, checkpointing=checkpointing)
    predicted += shape.cache_bytes_per_token(element_bytes=4, gradient_bytes=4)
    assert least * predicted < measured <= 1.01 * predicted


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@checkpointing
def test_offloaded_activations_leave_the_device(checkpointing):
    """Same gradients; while suffixes run, the device holds less than if activations were kept."""
    device = torch.device("cuda")
    model = tiny_model(num_layers=4, num_heads=8, checkpointing=checkpointing).to(device)
    sequences = equal_groups(1, 512, 4, 8)
    loss = sum_losses(rollout_loss(len(sequences)))
    suffix_bytes, found = {}, {}
    for activations in ("keep", "offload"):
        batch = pack_sequences(
            [row.numpy() for row in sequences],
            PackBudget(max_tokens=512, prefix_activations=activations),
        )
        runner = PhaseRunner(model=model, backend=BACKENDS["reference"])
        model.zero_grad()
        runner.backward(batch, loss, with_entropy=True)
        found[activations] = gradients(model)
        model.zero_grad(set_to_none=False)
        run = partial(runner.backward, batch, loss, with_entropy=True)
        suffix_bytes[activations] = measure_peaks(run, device).phase_bytes["suffix"]
    assert max_relative_error(found["offload"], found["keep"])[0] < 1e-5
    assert suffix_bytes["offload"] < (1.0 if checkpointing else 0.7) * suffix_bytes["keep"]


@checkpointing
def test_a_failed_loss_leaves_nothing_alive_but_its_traceback(checkpointing):
    model = tiny_model(num_layers=2, checkpointing=checkpointing)
    batch = pack_sequences(
        [row.numpy() for row in nested_rollouts()], PackBudget(max_tokens=30), mode="cut"
    )
    runner = PhaseRunner(model=model, backend=BACKENDS["sdpa_cpu"])

    def broken(rollouts):
        raise KeyError("the user's own mistake")

    with watching(model, count_saved=False) as live:
        try:
            runner.backward(batch, broken)
        except KeyError as error:
            error.__traceback__ = None
        assert live.counts() == (0, 0, 0)


@pytest.mark.parametrize("mode", ["auto", "cut"])
def test_forward_makes_no_graph(mode):
    model = tiny_model(num_layers=2)
    batch = pack_sequences(
        [row.numpy() for row in nested_rollouts()], PackBudget(max_tokens=30), mode=mode
    )
    runner = PhaseRunner(model=model, backend=BACKENDS["sdpa_cpu"])
    with watching(model) as live:
        runner.forward(batch, lambda rollouts: None)
        assert live.counts() == (0, 0, 0)
    assert not live.saved
