"""Attention link of the proof chain: segment attention == dense masked attention, with gradients.

The truth is one softmax over all tokens of a forest with an ancestor mask. Its keys come twice,
once for queries of the same pack and once for queries of others, so that autograd separates the
gradients that must arrive in a pack from those that must arrive in its cache.

Shape legend: N query heads, M key heads, T tokens of the forest, D head dimension.
"""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixflow_verl.attention import (
    BACKENDS,
    SegmentContext,
    choose_backend,
    merge_part,
    segment_attention,
)
from prefixflow_verl.forest import PrefixForest, build_forest
from prefixflow_verl.kv_cache import PackCache, WeightsVersion
from prefixflow_verl.packing import Packer
from prefixflow_verl.plan import PackBudget, Plan, plan_cuts
from tests.reference import masked_attention, nested_rollouts

CPU = torch.device("cpu")
backends = pytest.mark.parametrize("backend", sorted(BACKENDS))


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A forest, its plan, and the tokens of each pack as indices into the forest's T tokens."""

    forest: PrefixForest
    plan: Plan
    layouts: list
    tokens: list[torch.Tensor]

    @property
    def num_tokens(self) -> int:
        return self.forest.executed_tokens

    def masks(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, T] bool: the query sees the key, and their packs are the same."""
        lengths = self.forest.lengths
        segment = np.repeat(np.arange(len(lengths)), lengths)
        position = np.concatenate(
            [np.arange(a, b) for a, b in zip(self.forest.start, self.forest.end, strict=True)]
        )
        above = np.zeros((len(lengths), len(lengths)), dtype=bool)
        for index in range(len(lengths)):
            above[index, self.forest.path(index)] = True
        visible = above[segment[:, None], segment] & (position[:, None] >= position)
        pack = self.plan.pack_of[segment]
        return torch.from_numpy(visible), torch.from_numpy(pack[:, None] == pack)


def planned(sequences, cut="none", max_tokens: int = 10_000) -> Planned:
    sequences = [np.asarray(sequence) for sequence in sequences]
    forest = build_forest(sequences)
    if isinstance(cut, str):
        cut = [cut == "all"] * forest.num_segments
    cut = np.array(cut[: forest.num_segments], dtype=bool)
    plan = plan_cuts(forest, cut, PackBudget(max_tokens=max_tokens))
    begin = np.cumsum(forest.lengths) - forest.lengths
    tokens = [
        torch.cat([begin[s] + torch.arange(forest.lengths[s]) for s in pack.segments])
        for pack in plan.packs
    ]
    layouts = Packer(sequences, forest, plan).layouts
    return Planned(forest=forest, plan=plan, layouts=layouts, tokens=tokens)


def random_inputs(tree: Planned, heads: tuple[int, int], dim: int, dtype=torch.float64, seed=0):
    """q [1, N, T, D], k and v [1, M, T, D] and dout [1, N, T, D]."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(1, count, tree.num_tokens, dim, generator=generator, dtype=torch.float64).to(
            dtype
        )
        for count in (heads[0], heads[1], heads[1], heads[0])
    )


def by_packs(tree: Planned, backend: str, q, k, v, dout, gradient_dtype=None):
    """out, dq, dk and dv inside the packs, dk and dv in the caches; each over T tokens."""
    caches, runs = {}, []
    for index, layout in enumerate(tree.layouts):
        row = [x[:, :, tree.tokens[index]].requires_grad_() for x in (q, k, v)]
        if tree.plan.packs[index].is_head:
            caches[index] = PackCache(
                WeightsVersion([]), gradient_dtype, content=index, backend=backend
            )
            caches[index].store(0, row[1], row[2])
        context = SegmentContext(
            layout=layout, backend=BACKENDS[backend], caches=dict(caches), captured=None
        )
        out = segment_attention(*row, scale=0.3, context=context, layer=0)
        runs.append((out, row))
    out, dq, dk, dv, cache_dk, cache_dv = (torch.zeros_like(x) for x in (q, q, k, v, k, v))
    for index, (row_out, row) in reversed(list(enumerate(runs))):
        rows = tree.tokens[index]
        out[:, :, rows] = row_out.detach().transpose(1, 2)
        dq[:, :, rows], dk[:, :, rows], dv[:, :, rows] = torch.autograd.grad(
            row_out, row, dout[:, :, rows].transpose(1, 2)
        )
        if index in caches:
            cache_dk[:, :, rows], cache_dv[:, :, rows] = caches[index].gradients(0)
    return out, dq, dk, dv, cache_dk, cache_dv


def dense(tree: Planned, q, k, v, dout):
    """The same six tensors from one masked softmax."""
    visible, same_pack = tree.masks()
    mask = torch.cat([visible & same_pack, visible & ~same_pack], dim=1)
    leaves = [x.clone().requires_grad_() for x in (q, k, v, k, v)]
    query, own_k, own_v, read_k, read_v = leaves
    out = masked_attention(
        query, torch.cat([own_k, read_k], 2), torch.cat([own_v, read_v], 2), mask, 0.3
    )
    return out.detach(), *torch.autograd.grad(out, leaves, dout)


def errors(ours, truth) -> list[float]:
    """Largest difference of each tensor, relative to the largest true value."""
    return [
        ((a.double() - b.double()).abs().max() / b.double().abs().max().clamp_min(1e-30)).item()
        if b.abs().max() > 0
        else a.double().abs().max().item()
        for a, b in zip(ours, truth, strict=True)
    ]


@backends
@pytest.mark.parametrize("cut", ["none", "all"])
@pytest.mark.parametrize("dim", [8, 16, 24, 64])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (8, 2), (8, 1), (6, 2)])
def test_heads_and_dimensions_fp64(backend, cut, dim, heads):
    tree = planned(nested_rollouts(), cut)
    inputs = random_inputs(tree, heads, dim)
    assert max(errors(by_packs(tree, backend, *inputs), dense(tree, *inputs))) < 1e-12


@backends
@settings(max_examples=60)
@given(
    sequences=st.lists(
        st.lists(st.integers(0, 1), min_size=2, max_size=10), min_size=1, max_size=7
    ),
    cut=st.lists(st.booleans(), min_size=100, max_size=100),
    max_tokens=st.integers(1, 40),
    heads=st.sampled_from([(2, 2), (2, 1), (4, 2)]),
    seed=st.integers(0, 1000),
)
def test_any_tree_and_any_cut_fp64(backend, sequences, cut, max_tokens, heads, seed):
    tree = planned(sequences, cut, max_tokens)
    inputs = random_inputs(tree, heads, 8, seed=seed)
    assert max(errors(by_packs(tree, backend, *inputs), dense(tree, *inputs))) < 1e-12


LONG = [np.concatenate([np.zeros(700, int), np.full(300, i)]) for i in (1, 2)]


@backends
@pytest.mark.parametrize("cut", ["none", "all"])
def test_segments_longer_than_a_kernel_block_fp64(backend, cut):
    tree = planned(LONG, cut)
    inputs = random_inputs(tree, (2, 1), 16)
    assert max(errors(by_packs(tree, backend, *inputs), dense(tree, *inputs))) < 1e-12


@backends
@pytest.mark.parametrize("cut", ["none", "all"])
def test_fp32(backend, cut):
    tree = planned(nested_rollouts(), cut)
    inputs = random_inputs(tree, (8, 2), 32, torch.float32)
    truth = dense(tree, *(x.double() for x in inputs))
    assert max(errors(by_packs(tree, backend, *inputs), truth)) < 2e-6


@backends
@pytest.mark.parametrize("cut", ["none", "all"])
def test_bf16_errs_no_more_than_twice_dense(backend, cut):
    tree = planned(nested_rollouts(), cut)
    inputs = random_inputs(tree, (8, 2), 32, torch.bfloat16)
    truth = dense(tree, *(x.double() for x in inputs))
    ours = errors(by_packs(tree, backend, *inputs, gradient_dtype=torch.float32), truth)
    naive = errors(dense(tree, *inputs), truth)
    assert all(a <= 2 * b for a, b in zip(ours, naive, strict=True)), (ours, naive)


@backends
@pytest.mark.parametrize("size", [1e-3, 30.0])
def test_scores_of_any_size_merge_fp64(backend, size):
    """Parts whose LSE differ by hundreds: the smaller one must vanish, not overflow."""
    tree = planned(nested_rollouts(), "all")
    q, k, v, dout = random_inputs(tree, (4, 2), 16)
    inputs = (q * size, k * size, v, dout)
    ours = by_packs(tree, backend, *inputs)
    assert all(torch.isfinite(tensor).all() for tensor in ours)
    assert max(errors(ours, dense(tree, *inputs))) < 1e-9 * max(size, 1) ** 2


@backends
@pytest.mark.parametrize("channel", ["dk", "dv"])
@pytest.mark.parametrize("cut", ["none", "all"])
def test_a_missing_prefix_gradient_shows(backend, channel, cut, monkeypatch):
    """The comparison would catch a kernel whose dK or dV of an ancestor range is lost."""
    tree = planned(nested_rollouts(), cut)
    inputs = random_inputs(tree, (4, 2), 16)
    kernel = BACKENDS[backend]
    whole = type(kernel).backward

    def without_channel(self, *arguments):
        dq, dk, dv = whole(self, *arguments)
        causal = arguments[-2]
        if not causal:
            (dk if channel == "dk" else dv).zero_()
        return dq, dk, dv

    monkeypatch.setattr(type(kernel), "backward", without_channel)
    assert max(errors(by_packs(tree, backend, *inputs), dense(tree, *inputs))) > 1e-3


def test_merging_parts_is_the_softmax_of_the_union():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, 2, size, 8, generator=generator, dtype=torch.float64) for size in (5, 9, 9)
    )
    kernel = BACKENDS["reference"]
    out, lse = kernel.forward(q, k[:, :, :4], v[:, :, :4], False, 0.3)
    merge_part(out, lse, *kernel.forward(q, k[:, :, 4:], v[:, :, 4:], False, 0.3))
    torch.testing.assert_close(out, masked_attention(q, k, v, torch.ones(5, 9).bool(), 0.3))
    torch.testing.assert_close(lse, torch.logsumexp(q @ k.mT * 0.3, -1))


@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_sequence_the_plan_does_not_know_is_refused(num_rows):
    """What a past_key_values cache or padding would look like from inside attention."""
    tree = planned([[1, 2, 3]])
    context = SegmentContext(
        layout=tree.layouts[0], backend=BACKENDS["reference"], caches={}, captured=None
    )
    q, k = torch.zeros(1, 2, 2, 8), torch.zeros(1, 2, num_rows, 8)
    with pytest.raises(RuntimeError, match="for a pack of 2 tokens"):
        segment_attention(q, k, k, scale=1.0, context=context, layer=0)


def test_a_recompute_captures_nothing():
    context = SegmentContext(layout=None, backend=None, caches={}, captured={})
    first = torch.zeros(1)
    context.capture(0, first, first)
    context.capture(0, torch.ones(1), torch.ones(1))
    assert context.captured[0][0] is first


def test_backends_are_chosen_by_name_and_device():
    assert choose_backend("auto", CPU).name == "sdpa_cpu"
    assert choose_backend("reference", CPU).name == "reference"
    assert choose_backend("auto", torch.device("cuda")).name == "reference"
    with pytest.raises(ValueError, match="attention_backend='flash' is not known"):
        choose_backend("flash", CPU)
    with pytest.raises(ValueError, match="sdpa_cpu cannot serve device cuda"):
        choose_backend("sdpa_cpu", torch.device("cuda"))
