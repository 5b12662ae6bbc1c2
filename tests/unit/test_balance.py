"""Placement of rollouts: verl's constraints hold, costs are those of the formula, and it pays."""

import itertools
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixflow_verl.accounting import ModelShape, span_flops
from prefixflow_verl.balance import (
    Placement,
    PlacementError,
    RolloutLengths,
    dense_costs,
    evaluate,
    place,
    place_batch,
    verl_order,
    whole_group_mini_batches,
)

SHAPE = ModelShape(
    num_layers=2, hidden=64, intermediate=96, num_heads=4, num_kv_heads=2, head_dim=16, vocab=50
)


@st.composite
def workloads(draw) -> tuple[RolloutLengths, int, int]:
    """Nested prefixes, some rollouts of which continue an inner segment; ranks; mini-batches."""
    num_ranks, num_mini_batches = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    num_rollouts = num_ranks * num_mini_batches * draw(st.integers(1, 5))
    lengths = {}
    paths = []
    for _ in range(num_rollouts):
        names = draw(st.lists(st.integers(0, 2), min_size=1, max_size=3))
        path = []
        for depth, name in enumerate(names):
            length = lengths.setdefault(tuple(names[: depth + 1]), draw(st.integers(1, 200)))
            path.append((name, length))
        paths.append(path)
    responses = draw(st.lists(st.integers(1, 100), min_size=num_rollouts, max_size=num_rollouts))
    loss = [draw(st.integers(0, tokens)) for tokens in responses]
    return RolloutLengths.from_paths(paths, responses, loss), num_ranks, num_mini_batches


def cost_by_hand(rollouts: RolloutLengths, rows: list[int], checkpointing: bool = False) -> float:
    """FLOPs of one rank in one mini-batch, segment by segment, through accounting's formula."""
    ends, parent = rollouts.segment_end, rollouts.segment_parent
    segments, heads = set(), set()
    total = 0.0

    def span(start: int, end: int, num_logit_rows: int) -> float:
        flops = span_flops(SHAPE, np.array([start]), np.array([end]), num_logit_rows)
        return float(flops.update(checkpointing=checkpointing))

    for row in rows:
        head = int(rollouts.last_segment[row])
        heads.add(head)
        begin, length = int(ends[head]), int(rollouts.response_tokens[row])
        num_logit_rows = max(int(rollouts.loss_tokens[row]) - 1, 0)
        total += span(begin, begin + length - 1, num_logit_rows)
        while head >= 0:
            segments.add(head)
            head = int(parent[head])
    for segment in segments:
        end = int(ends[segment])
        total += span(end - int(rollouts.segment_tokens[segment]), end, int(segment in heads))
    return total


def prefixes_by_hand(rollouts: RolloutLengths, placement: Placement) -> int:
    """Further runs of a segment in the same mini-batch."""
    num_ranks, num_mini_batches = placement.costs.shape
    duplicated = 0
    for mini_batch in range(num_mini_batches):
        seen = []
        for rank in range(num_ranks):
            segments = set()
            for row in placement.rollouts(rank, mini_batch).tolist():
                head = int(rollouts.last_segment[row])
                while head >= 0:
                    segments.add(head)
                    head = int(rollouts.segment_parent[head])
            seen += segments
        duplicated += len(seen) - len(set(seen))
    return duplicated


@given(workloads(), st.booleans())
def test_a_placement_keeps_verls_constraints_and_costs_what_the_formula_says(workload, recompute):
    rollouts, num_ranks, num_mini_batches = workload
    placement = place(
        rollouts,
        SHAPE,
        num_ranks=num_ranks,
        num_mini_batches=num_mini_batches,
        checkpointing=recompute,
    )
    assert sorted(placement.order.tolist()) == list(range(rollouts.num_rollouts))
    size = rollouts.num_rollouts // num_mini_batches
    for mini_batch in range(num_mini_batches):
        rows = [placement.rollouts(rank, mini_batch) for rank in range(num_ranks)]
        assert len({len(own) for own in rows}) == 1
        # The optimizer step sees the rollouts that it would have seen.
        slice_ = range(mini_batch * size, (mini_batch + 1) * size)
        assert sorted(np.concatenate(rows).tolist()) == list(slice_)
        for rank, own in enumerate(rows):
            by_hand = cost_by_hand(rollouts, own.tolist(), recompute)
            assert placement.costs[rank, mini_batch] == pytest.approx(by_hand, rel=1e-9)
    assert placement.num_duplicated_prefixes == prefixes_by_hand(rollouts, placement)
    assert placement.lower_bound <= placement.imbalance * (1 + 1e-9)


@given(workloads())
def test_no_mini_batch_is_slower_than_in_verls_placement(workload):
    rollouts, num_ranks, num_mini_batches = workload
    rows = np.arange(rollouts.num_rollouts)[::-1].reshape(num_mini_batches, -1)
    options = {"num_ranks": num_ranks, "num_mini_batches": num_mini_batches}
    ours = place(rollouts, SHAPE, mini_batches=rows, **options)
    starts = [members[verl_order(rollouts.num_tokens[members], num_ranks)] for members in rows]
    order = np.stack([start.reshape(num_ranks, -1) for start in starts], axis=1).ravel()
    verls = evaluate(order, rollouts, SHAPE, **options)
    assert (ours.costs.max(axis=0) <= verls.costs.max(axis=0) * (1 + 1e-9)).all()
    for mini_batch, members in enumerate(rows):
        placed = [r for k in range(num_ranks) for r in ours.rollouts(k, mini_batch).tolist()]
        assert sorted(placed) == sorted(members.tolist())
    again = place(rollouts, SHAPE, mini_batches=rows, **options)
    assert again.order.tolist() == ours.order.tolist()


@given(workloads(), st.integers(0, 3))
def test_a_batch_is_never_slower_than_in_verls_placement(workload, num_padding):
    rollouts, num_ranks, num_mini_batches = workload
    options = {"num_ranks": num_ranks, "num_mini_batches": num_mini_batches}
    is_padding = np.arange(rollouts.num_rollouts) >= rollouts.num_rollouts - num_padding
    ours, theirs = place_batch(
        rollouts,
        SHAPE,
        group_ids=rollouts.last_segment.tolist(),
        is_padding=is_padding.tolist(),
        **options,
    )
    verls = evaluate(verl_order(rollouts.num_tokens, num_ranks), rollouts, SHAPE, **options)
    assert sorted(ours.order.tolist()) == list(range(rollouts.num_rollouts))
    assert ours.slowest_cost <= verls.slowest_cost * (1 + 1e-9)
    assert theirs.order.tolist() == verls.order.tolist()
    assert theirs.slowest_cost == verls.slowest_cost


def groups_cut(mini_batches: np.ndarray, group_ids: list, is_padding: list[bool]) -> int:
    """Further mini-batches that hold a group, summed over groups."""
    holders = {
        (group_ids[row], index)
        for index, rows in enumerate(mini_batches)
        for row in rows.tolist()
        if not is_padding[row]
    }
    return len(holders) - len({group for group, _ in holders})


@given(st.data())
def test_mini_batches_are_made_of_whole_groups(data):
    num_mini_batches = data.draw(st.integers(1, 4))
    sizes = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=12))
    group_ids = [group for group, size in enumerate(sizes) for _ in range(size)]
    num_padding = -len(group_ids) % num_mini_batches
    group_ids += ["pad"] * num_padding
    is_padding = [group == "pad" for group in group_ids]
    shuffled = data.draw(st.permutations(range(len(group_ids))))
    group_ids = [group_ids[row] for row in shuffled]
    is_padding = [is_padding[row] for row in shuffled]
    found = whole_group_mini_batches(group_ids, is_padding, num_mini_batches)
    assert sorted(found.ravel().tolist()) == list(range(len(group_ids)))
    assert groups_cut(found, group_ids, is_padding) < num_mini_batches


@pytest.mark.parametrize(
    "sizes, num_padding, num_mini_batches, num_cut, padding_rows",
    [
        ([4] * 8, 0, 4, 0, [0, 0, 0, 0]),
        ([4, 2, 3, 3], 4, 2, 0, [2, 2]),  # filtered groups
        ([5, 1, 1, 1], 0, 2, 1, [0, 0]),  # no half is made of whole groups
        ([2, 2], 4, 4, 2, [1, 1, 1, 1]),
        ([1, 7], 0, 1, 0, [0]),
    ],
)
def test_groups_are_cut_only_where_equal_sizes_demand_it(
    sizes, num_padding, num_mini_batches, num_cut, padding_rows
):
    group_ids = [group for group, size in enumerate(sizes) for _ in range(size)]
    group_ids += ["pad"] * num_padding
    is_padding = [group == "pad" for group in group_ids]
    found = whole_group_mini_batches(group_ids, is_padding, num_mini_batches)
    assert groups_cut(found, group_ids, is_padding) == num_cut
    assert [sum(is_padding[row] for row in rows.tolist()) for rows in found] == padding_rows


@given(workloads())
def test_the_bound_is_below_every_placement_and_the_search_near_the_best(workload):
    rollouts, _, _ = workload
    num_rollouts = min(rollouts.num_rollouts - rollouts.num_rollouts % 2, 8)
    if num_rollouts < 2:
        return
    few = RolloutLengths(
        segment_parent=rollouts.segment_parent,
        segment_tokens=rollouts.segment_tokens,
        last_segment=rollouts.last_segment[:num_rollouts],
        response_tokens=rollouts.response_tokens[:num_rollouts],
        loss_tokens=rollouts.loss_tokens[:num_rollouts],
    )
    found = place(few, SHAPE, num_ranks=2)
    best = min(
        max(cost_by_hand(few, list(own)), cost_by_hand(few, rest))
        for own in itertools.combinations(range(num_rollouts), num_rollouts // 2)
        if (rest := [row for row in range(num_rollouts) if row not in own])
    )
    assert found.least_costs[0] <= best * (1 + 1e-9)
    assert found.slowest_cost >= best * (1 - 1e-9)
    assert found.slowest_cost <= best * 1.25


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=60), st.integers(1, 8))
def test_verls_placement_is_verls(num_tokens, num_ranks):
    balancing = pytest.importorskip("verl.utils.seqlen_balancing")
    num_tokens = num_tokens * num_ranks
    work = balancing.calculate_workload(np.array(num_tokens)).tolist()
    parts = balancing.get_seqlen_balanced_partitions(work, num_ranks, equal_size=True)
    expected = [row for part in parts for row in sorted(part)]
    assert verl_order(num_tokens, num_ranks).tolist() == expected


def test_groups_stay_whole_and_related_groups_meet():
    paths = [[("repo", 900), (q, 100)] for q in "ab" for _ in range(4)]
    paths += [[("other", 900), (q, 100)] for q in "cd" for _ in range(4)]
    shuffled = np.random.default_rng(0).permutation(16)
    rollouts = RolloutLengths.from_paths([paths[i] for i in shuffled], [10] * 16)
    placement = place(rollouts, SHAPE, num_ranks=2)
    repos = [{paths[shuffled[row]][0][0] for row in placement.rollouts(k, 0)} for k in range(2)]
    assert sorted(map(sorted, repos)) == [["other"], ["repo"]]
    assert placement.num_duplicated_prefixes == 0
    assert placement.imbalance == pytest.approx(1)


def test_a_group_is_split_when_that_is_faster():
    # One group with nearly all the work, and more rows than a rank's share.
    rollouts = RolloutLengths.from_groups(["big"] * 6 + ["x", "y"], [10] * 8, [400] * 6 + [1, 1])
    placement = place(rollouts, SHAPE, num_ranks=4)
    num_big = [sum(row < 6 for row in placement.rollouts(k, 0).tolist()) for k in range(4)]
    assert sorted(num_big) in ([1, 1, 2, 2], [0, 2, 2, 2])
    assert placement.num_duplicated_prefixes == sum(n > 0 for n in num_big) - 1


@pytest.mark.parametrize("num_ranks, limit", [(8, 1.05), (64, 1.15)])
def test_heavy_tails_are_balanced_where_the_bound_allows_it(num_ranks, limit):
    generator = np.random.default_rng(3)
    prompts = np.exp(generator.uniform(np.log(200), np.log(4000), 256)).astype(int)
    typical = np.exp(generator.normal(6, 0.8, 256))
    responses = np.exp(generator.normal(0, 0.8, (256, 16))) * typical[:, None]
    responses = np.clip(responses.astype(int), 1, 16384)
    rollouts = RolloutLengths.from_groups(
        np.repeat(np.arange(256), 16).tolist(), np.repeat(prompts, 16), responses.ravel()
    )
    ours = place(rollouts, SHAPE, num_ranks=num_ranks)
    verls = evaluate(
        verl_order(rollouts.num_tokens, num_ranks), rollouts, SHAPE, num_ranks=num_ranks
    )
    assert ours.imbalance <= max(limit, ours.lower_bound)
    assert ours.slowest_cost * 1.2 < verls.slowest_cost
    assert ours.num_duplicated_prefixes * 10 < verls.num_duplicated_prefixes


def test_a_large_batch_is_placed_in_seconds():
    generator = np.random.default_rng(0)
    num_groups, group = 8192, 8
    rollouts = RolloutLengths.from_groups(
        np.repeat(np.arange(num_groups), group).tolist(),
        np.repeat(generator.integers(100, 4000, num_groups), group),
        np.clip(np.exp(generator.normal(6, 1, num_groups * group)).astype(int), 1, 16384),
    )
    began = time.process_time()
    place(rollouts, SHAPE, num_ranks=1024)
    # 3 s on a free core; the bound leaves room for a slow one.
    assert time.process_time() - began < 10


def test_a_rollout_by_itself_costs_as_much_as_accounting_says():
    rollouts = RolloutLengths.from_groups(["a", "b", "b"], [30, 20, 20], [5, 1, 9])
    for row, cost in enumerate(dense_costs(rollouts, SHAPE).tolist()):
        num_tokens = int(rollouts.num_tokens[row])
        flops = span_flops(SHAPE, np.array([0]), np.array([num_tokens]), num_tokens)
        assert cost == pytest.approx(float(flops.update(checkpointing=False)))


@pytest.mark.parametrize("num_ranks, num_mini_batches", [(3, 1), (2, 2), (0, 1), (1, 0)])
def test_rows_that_do_not_divide_are_refused_with_the_setting(num_ranks, num_mini_batches):
    rollouts = RolloutLengths.from_groups(["a"] * 2, [4, 4], [3, 3])
    with pytest.raises(PlacementError, match="mini-batches") as refused:
        place(rollouts, SHAPE, num_ranks=num_ranks, num_mini_batches=num_mini_batches)
    if num_ranks and num_mini_batches:
        assert "data.train_batch_size * actor_rollout_ref.rollout.n" in str(refused.value)


@pytest.mark.parametrize(
    "paths, responses, loss, sentence",
    [
        ([[("a", 3)], [("a", 4)]], [1, 1], None, "'a' has 3 tokens and 4"),
        ([[]], [1], None, "has no prompt"),
        ([[("a", 0)]], [1], None, "segment_tokens holds a length below 1"),
        ([[("a", 1)]], [0], None, "response_tokens holds a length below 1"),
        ([[("a", 1)]], [2], [3], "loss_tokens must be between 0 and response_tokens"),
    ],
)
def test_malformed_lengths_are_refused(paths, responses, loss, sentence):
    with pytest.raises(PlacementError, match=sentence):
        RolloutLengths.from_paths(paths, responses, loss)
