"""Second link of the proof chain: a plan runs each segment once, in order and in budget."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixflow_verl.forest import build_forest
from prefixflow_verl.plan import PackBudget, _first_fit_decreasing, make_plan, plan_cuts

rollouts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), max_size=10)
limits = st.integers(1, 30)
budgets = st.one_of(
    st.builds(
        PackBudget,
        max_tokens=limits,
        max_cache_tokens=st.none() | limits,
        cut_overhead_tokens=st.integers(0, 10),
    ),
    st.builds(PackBudget, max_rollouts=limits, max_cache_tokens=st.none() | limits),
)
modes = st.sampled_from(["auto", "fused", "cut", "off"])


def arrays(sequences):
    return [np.array(sequence, dtype=np.int64) for sequence in sequences]


def group(prompt, *responses, first=0):
    """Rollouts of a prompt of `prompt` tokens; responses of these lengths differ in every token."""
    start = [first] * prompt
    return [
        np.array(start + [100 * first + 10 * index + 1] * length)
        for index, length in enumerate(responses)
    ]


def tokens_of(forest, plan, pack):
    return int(forest.lengths[list(plan.packs[pack].segments)].sum())


def assert_runs_in_order(forest, plan):
    """Every segment once, every pack once, and each key read from an earlier pack of the round."""
    assert sorted(s for pack in plan.packs for s in pack.segments) == list(
        range(forest.num_segments)
    )
    order = [(n, i) for n, round_ in enumerate(plan.rounds) for i in round_.heads + round_.leaves]
    assert sorted(index for _, index in order) == list(range(len(plan.packs)))
    place = {index: (number, step) for step, (number, index) in enumerate(order)}
    cut_edges, read = 0, set()
    for segment, parent in enumerate(forest.parent.tolist()):
        pack = int(plan.pack_of[segment])
        assert segment in plan.packs[pack].segments
        if parent < 0 or plan.pack_of[parent] == pack:
            continue
        cut_edges += 1
        above = int(plan.pack_of[parent])
        read.add(above)
        assert plan.packs[above].is_head
        assert plan.packs[above].level < plan.packs[pack].level
        assert place[above][0] == place[pack][0], "a cache lives for one round"
        assert place[above][1] < place[pack][1]
    assert plan.num_cut_edges == cut_edges
    assert read == {index for index, pack in enumerate(plan.packs) if pack.is_head}
    assert all(plan.packs[index].is_head for round_ in plan.rounds for index in round_.heads)
    assert not any(plan.packs[index].is_head for round_ in plan.rounds for index in round_.leaves)


@given(rollouts, budgets, modes, st.integers(1, 4))
def test_every_plan_runs_everything_in_order(sequences, budget, mode, min_shared_tokens):
    forest, plan = make_plan(
        arrays(sequences), budget, mode=mode, min_shared_tokens=min_shared_tokens
    )
    assert_runs_in_order(forest, plan)
    assert plan.counts == [(len(r.heads), len(r.leaves)) for r in plan.rounds]


@given(rollouts, budgets, st.data())
def test_any_choice_of_cuts_runs_everything_in_order(sequences, budget, data):
    forest = build_forest(arrays(sequences))
    size = forest.num_segments
    cut = np.array(data.draw(st.lists(st.booleans(), min_size=size, max_size=size)), dtype=bool)
    plan = plan_cuts(forest, cut, budget)
    assert_runs_in_order(forest, plan)
    asked = cut & (forest.parent >= 0)
    assert all(plan.pack_of[s] != plan.pack_of[forest.parent[s]] for s in np.flatnonzero(asked))


@given(rollouts, budgets)
def test_packs_and_caches_stay_in_budget(sequences, budget):
    forest, plan = make_plan(arrays(sequences), budget)
    for index, pack in enumerate(plan.packs):
        if budget.max_tokens is not None:
            size = tokens_of(forest, plan, index)
        else:
            parents = {int(forest.parent[segment]) for segment in pack.segments}
            size = len(set(pack.segments) - parents)
        assert size <= budget.pack_limit or len(pack.segments) == 1
    for round_ in plan.rounds:
        live = sum(tokens_of(forest, plan, index) for index in round_.heads)
        assert budget.max_cache_tokens is None or live <= budget.max_cache_tokens


@given(rollouts, budgets)
def test_modes_do_what_they_say(sequences, budget):
    sequences = arrays(sequences)
    forest, plan = make_plan(sequences, budget, mode="off")
    assert forest.executed_tokens == forest.logical_tokens and not plan.num_cut_edges
    forest, plan = make_plan(sequences, budget, mode="fused")
    assert not plan.num_cut_edges and not any(pack.is_head for pack in plan.packs)
    forest, plan = make_plan(sequences, budget, mode="cut")
    assert plan.num_cut_edges == (forest.parent >= 0).sum()


def test_a_tree_that_fits_is_one_pack():
    forest, plan = make_plan(group(10, 4, 4, 4), PackBudget(max_tokens=10 + 3 * 3))
    assert [pack.segments for pack in plan.packs] == [(0, 1, 2, 3)]
    assert plan.counts == [(0, 1)]


def test_a_tree_one_token_too_large_is_cut():
    forest, plan = make_plan(group(10, 4, 4, 4), PackBudget(max_tokens=10 + 3 * 3 - 1))
    # The prompt becomes a head; responses without cuts below them leave its pack.
    assert plan.counts == [(1, 1)]
    assert [(pack.segments, pack.is_head) for pack in plan.packs] == [
        ((0,), True),
        ((1, 2, 3), False),
    ]
    assert plan.num_cut_edges == 3


def test_a_segment_over_budget_runs_alone():
    forest, plan = make_plan(group(50, 4, 40, 4), PackBudget(max_tokens=16))
    assert sorted(tokens_of(forest, plan, index) for index in range(len(plan.packs))) == [6, 39, 50]


def test_first_fit_decreasing_only_where_it_needs_fewer_packs():
    # In order: 5 | 6 | 5 + ... Sorted by size 6 + 4 and 5 + 5 fill two packs of 10.
    lengths = (5, 6, 5, 4)
    sequences = [np.array([100 + index] * (length + 1)) for index, length in enumerate(lengths)]
    _, plan = make_plan(sequences, PackBudget(max_tokens=10))
    assert [pack.segments for pack in plan.packs] == [(1, 3), (0, 2)]
    _, plan = make_plan(sequences, PackBudget(max_tokens=11))
    assert [pack.segments for pack in plan.packs] == [(0, 1), (2, 3)]


@given(st.lists(st.integers(1, 12), max_size=30), st.integers(1, 10))
def test_first_fit_decreasing_takes_the_first_bin_with_room(weights, limit):
    rooms, bins = [], [0] * len(weights)
    for item in sorted(range(len(weights)), key=lambda item: -weights[item]):
        with_room = [place for place, room in enumerate(rooms) if weights[item] <= room]
        if not with_room:
            rooms.append(limit)
        bins[item] = with_room[0] if with_room else len(rooms) - 1
        rooms[bins[item]] -= weights[item]
    assert _first_fit_decreasing(weights, limit) == bins


def test_rollout_budgets_count_sequences():
    forest, plan = make_plan(group(10, 4, 4, 4, 4, 4), PackBudget(max_rollouts=2))
    assert [pack.segments for pack in plan.packs] == [(0,), (1, 2), (3, 4), (5,)]


def test_a_round_holds_heads_of_one_pack_and_fused_trees_join_the_last():
    sequences = [*group(6, 9, 9, first=1), *group(6, 9, 9, first=2), *group(6, 9, 9, first=3)]
    forest, plan = make_plan([*sequences, np.array([9, 9, 9])], PackBudget(max_tokens=12))
    assert [len(round_.heads) for round_ in plan.rounds] == [1, 1]
    stranger = int(plan.pack_of[forest.end_segment[-1]])
    assert stranger in plan.rounds[-1].leaves
    first_heads = plan.packs[plan.rounds[0].heads[0]].segments
    assert len(first_heads) == 2, "heads of equal level share a pack"


@pytest.mark.parametrize("limit, num_heads", [(11, [1, 1, 1]), (12, [2, 1]), (None, [2, 1])])
def test_a_round_holds_the_caches_of_its_budget(limit, num_heads):
    sequences = [row for first in (1, 2, 3) for row in group(6, 9, 9, first=first)]
    _, plan = make_plan(sequences, PackBudget(max_tokens=12, max_cache_tokens=limit))
    roots = [
        sum(len(plan.packs[index].segments) for index in round_.heads) for round_ in plan.rounds
    ]
    assert roots == num_heads


@pytest.mark.parametrize(
    "budget, reason",
    [
        (PackBudget(max_tokens=16, cut_overhead_tokens=21), "a cut saves 2 x 10 tokens"),
        (PackBudget(max_tokens=16, max_cache_tokens=9), "the prompt needs 10 cached tokens"),
    ],
)
def test_trees_not_worth_their_cut_are_dissolved(budget, reason):
    forest, plan = make_plan(group(10, 8, 8, 8), budget)
    assert plan.num_dissolved_trees == 1 and not forest.is_shared.any(), reason
    assert forest.executed_tokens == 3 * 17


@pytest.mark.parametrize(
    "budget",
    [
        PackBudget(max_tokens=16, cut_overhead_tokens=20),
        PackBudget(max_tokens=16, max_cache_tokens=10),
    ],
)
def test_trees_at_the_bound_are_kept(budget):
    forest, plan = make_plan(group(10, 8, 8, 8), budget)
    assert plan.num_dissolved_trees == 0 and plan.num_cut_edges == 3


def test_dissolving_a_root_keeps_what_is_shared_below_it():
    # One system token, two prompts of 20: the root saves one token, the prompts 20 each.
    sequences = [
        np.concatenate([[7], row]) for row in (*group(20, 5, 5, first=1), *group(20, 5, 5, first=2))
    ]
    forest, plan = make_plan(sequences, PackBudget(max_tokens=24, cut_overhead_tokens=5))
    assert plan.num_dissolved_trees == 1
    assert forest.lengths[forest.is_shared].tolist() == [21, 21]


def test_rollouts_that_end_at_a_dissolved_root_stay_together():
    prompt = np.arange(10)
    sequences = [prompt, prompt, *(np.append(prompt[:9], [90 + i] * 6) for i in range(2))]
    forest, plan = make_plan(sequences, PackBudget(max_tokens=9, max_cache_tokens=8))
    assert plan.num_dissolved_trees == 1
    assert forest.executed_tokens == 9 + 14 + 14


def test_a_tree_is_not_dissolved_when_one_pack_holds_all_below_its_root():
    # Root 10 and responses 4 + 5 + 6 need two packs of 16, with or without sharing more.
    forest, plan = make_plan(
        group(10, 5, 6, 7), PackBudget(max_tokens=16, cut_overhead_tokens=1000)
    )
    assert plan.num_dissolved_trees == 0 and plan.counts == [(1, 1)]


@given(
    rollouts,
    st.builds(
        PackBudget,
        max_tokens=st.integers(1, 6),
        max_cache_tokens=st.none() | limits,
        cut_overhead_tokens=st.integers(0, 10),
        split_segments=st.just(True),
    ),
    st.sampled_from(["auto", "cut", "off"]),
    st.integers(1, 4),
)
def test_no_pack_exceeds_its_budget_when_segments_are_split(
    sequences, budget, mode, min_shared_tokens
):
    forest, plan = make_plan(
        arrays(sequences), budget, mode=mode, min_shared_tokens=min_shared_tokens
    )
    assert_runs_in_order(forest, plan)
    for index in range(len(plan.packs)):
        assert tokens_of(forest, plan, index) <= budget.max_tokens
    for round_ in plan.rounds:
        heads = [s for index in round_.heads for s in plan.packs[index].segments]
        live = int(forest.lengths[heads].sum())
        if budget.max_cache_tokens is not None and live > budget.max_cache_tokens and mode != "cut":
            through = {(int(forest.first[s]), int(forest.last[s])) for s in heads}
            assert len(through) == 1, "more than one rollout, or equal ones"


@pytest.mark.parametrize("mode, copies", [("auto", 1), ("auto", 2), ("off", 1)])
def test_a_lone_rollout_over_budget_runs_in_pieces(mode, copies):
    budget = PackBudget(max_tokens=16, split_segments=True, cut_overhead_tokens=99)
    forest, plan = make_plan(
        [np.arange(51)] * copies, replace(budget, max_cache_tokens=20), mode=mode
    )
    assert forest.lengths.tolist() == [12, 13, 12, 13]
    assert plan.counts == [(3, 1)] and plan.num_dissolved_trees == 0
    assert [pack.level for pack in plan.packs] == [0, 1, 2, 3]


def test_splitting_changes_nothing_where_all_segments_fit():
    sequences = group(10, 4, 40, 4)
    for settings in ({"max_tokens": 39}, {"max_tokens": 64}):
        plain, split = (
            make_plan(sequences, PackBudget(**settings, split_segments=on)) for on in (False, True)
        )
        assert split[1].packs == plain[1].packs and split[1].rounds == plain[1].rounds
    forest, plan = make_plan(sequences, PackBudget(max_tokens=38, split_segments=True))
    assert forest.lengths.tolist() == [10, 3, 19, 20, 3]


def test_fused_trees_are_not_split():
    budget = PackBudget(max_tokens=4, split_segments=True)
    forest, plan = make_plan(group(10, 4, 4), budget, mode="fused")
    assert forest.lengths.tolist() == [10, 3, 3] and plan.num_cut_edges == 0


def test_dissolving_a_root_in_pieces_separates_all_below_it():
    # The prompt of 40 needs more cache than 30: each response then runs it alone, in pieces of 16.
    budget = PackBudget(max_tokens=16, max_cache_tokens=30, split_segments=True)
    forest, plan = make_plan(group(40, 8, 8, 8), budget)
    assert plan.num_dissolved_trees == 1 and not forest.is_shared.any()
    assert forest.executed_tokens == 3 * 47
    assert forest.lengths.tolist() == [15, 16, 16] * 3
    # A saving of 2 x 40 tokens is measured over the whole prompt, not over its first piece.
    for overhead, num_dissolved in ((80, 0), (81, 1)):
        budget = PackBudget(max_tokens=16, cut_overhead_tokens=overhead, split_segments=True)
        _, plan = make_plan(group(40, 8, 8, 8), budget)
        assert plan.num_dissolved_trees == num_dissolved


def test_a_plan_prints():
    forest, plan = make_plan(group(10, 4, 4, 4), PackBudget(max_tokens=14))
    assert plan.describe(forest).splitlines() == [
        "3 rollouts, 4 segments, 39 logical / 19 executed tokens = 2.05x, 2 packs, 3 cut edges",
        "  round 0  pack 0  head, level 0: 1 segments, 10 tokens",
        "  round 0  pack 1  leaf: 3 segments, 9 tokens",
    ]


@pytest.mark.parametrize(
    "settings, message",
    [
        ({}, "exactly one of max_tokens and max_rollouts"),
        ({"max_tokens": 4, "max_rollouts": 4}, "exactly one of max_tokens and max_rollouts"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_rollouts": -1}, "max_rollouts is -1"),
        ({"max_tokens": 4, "max_cache_tokens": 0}, "max_cache_tokens is 0"),
        ({"max_rollouts": 4, "split_segments": True}, "set max_tokens instead of max_rollouts"),
    ],
)
def test_budgets_out_of_range_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        PackBudget(**settings)


@pytest.mark.parametrize(
    "max_kept_tokens, activations, num_dissolved",
    [(None, "keep", 0), (10, "keep", 0), (9, "recompute", 0)],
)
def test_activations_are_kept_unless_sharing_would_suffer(
    max_kept_tokens, activations, num_dissolved
):
    """A prompt of 10 tokens under four responses: cut by the budget of 12 tokens."""
    prompt = np.arange(10)
    sequences = [np.concatenate([prompt, 100 * index + np.arange(9)]) for index in range(1, 5)]
    budget = PackBudget(
        max_tokens=12,
        max_cache_tokens=10,
        max_kept_tokens=max_kept_tokens,
        prefix_activations="auto",
    )
    forest, plan = make_plan(sequences, budget)
    assert (plan.prefix_activations, plan.num_dissolved_trees) == (activations, num_dissolved)
    assert forest.executed_tokens == 10 + 4 * 8
    # Asked to keep them, the tree shares less instead.
    _, kept = make_plan(sequences, replace(budget, prefix_activations="keep"))
    assert kept.num_dissolved_trees == (activations == "recompute")


def test_recomputing_does_not_help_a_tree_over_the_cache():
    prompt = np.arange(10)
    sequences = [np.concatenate([prompt, 100 * index + np.arange(9)]) for index in range(1, 5)]
    budget = PackBudget(
        max_tokens=12, max_cache_tokens=9, max_kept_tokens=3, prefix_activations="auto"
    )
    _, plan = make_plan(sequences, budget)
    assert (plan.prefix_activations, plan.num_dissolved_trees) == ("keep", 1)


def test_only_recomputed_segments_are_split_by_themselves():
    sequences = [np.arange(21)]
    budget = PackBudget(max_tokens=5, split_segments=True, prefix_activations="auto")
    assert make_plan(sequences, budget)[0].num_segments == 1
    forest, _ = make_plan(sequences, replace(budget, prefix_activations="recompute"))
    assert forest.num_segments == 4
