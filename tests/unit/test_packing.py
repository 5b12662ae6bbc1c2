"""Third link of the proof chain: each query meets its past once, each prediction is made once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixflow_verl.forest import build_forest, split_segments
from prefixflow_verl.packing import IN_PACK, Packer
from prefixflow_verl.plan import PackBudget, make_plan, plan_cuts

rollouts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=8)
BUDGET = PackBudget(max_tokens=1000)


def arrays(sequences):
    return [np.array(sequence, dtype=np.int64) for sequence in sequences]


def pack(sequences, budget=BUDGET, mode="auto", **settings):
    forest, plan = make_plan(sequences, budget, mode=mode)
    return plan, Packer(sequences, forest, plan, **settings).layouts


def draw_plan(sequences, data):
    """A forest of `sequences`, whole or in pieces, cut at random, with a random budget."""
    forest = build_forest(sequences)
    if data.draw(st.booleans()):
        forest = split_segments(forest, data.draw(st.integers(1, 5)))
    size = forest.num_segments
    cut = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
    budget = PackBudget(max_tokens=data.draw(st.integers(1, 30)))
    return forest, plan_cuts(forest, np.array(cut, dtype=bool), budget)


def visible_keys(layouts, index):
    """Per query row of a pack: (token, position) of every key it meets, with repeats."""
    layout = layouts[index]
    met = [[] for _ in range(layout.num_tokens)]
    for start, end in layout.self_parts:
        for row in range(start, end):
            met[row] += [(index, key) for key in range(start, row + 1)]
    for part in layout.cross_parts:
        source = index if part.pack == IN_PACK else part.pack
        for row in range(part.query_start, part.query_end):
            met[row] += [(source, key) for key in range(part.key_start, part.key_end)]
    return [
        [(layouts[p].token_ids[k], layouts[p].position_ids[k]) for p, k in keys] for keys in met
    ]


@given(rollouts, st.data())
def test_every_query_meets_its_past_once(sequences, data):
    sequences = arrays(sequences)
    forest, plan = draw_plan(sequences, data)
    layouts = Packer(sequences, forest, plan).layouts
    for index, layout in enumerate(layouts):
        owners = [
            forest.owner(segment)
            for segment in plan.packs[index].segments
            for _ in range(forest.lengths[segment])
        ]
        for row, keys in enumerate(visible_keys(layouts, index)):
            position = layout.position_ids[row]
            past = sequences[owners[row]][: position + 1]
            assert sorted(position for _, position in keys) == list(range(position + 1))
            assert all(past[position] == token for token, position in keys)


@given(rollouts, st.data())
def test_every_wanted_prediction_reaches_its_rollout(sequences, data):
    sequences = arrays(sequences)
    forest, plan = draw_plan(sequences, data)
    predict = [
        np.array(data.draw(st.lists(st.booleans(), min_size=len(s) - 1, max_size=len(s) - 1)), bool)
        for s in sequences
    ]
    temperatures = [data.draw(st.sampled_from([0.5, 1.0])) for _ in sequences]
    layouts = Packer(sequences, forest, plan, predict=predict, temperatures=temperatures).layouts
    completed = [c for layout in layouts for c in layout.completions]
    assert sorted(c.rollout for c in completed) == [
        r for r, sequence in enumerate(sequences) if len(sequence) > 1
    ]
    for completion in completed:
        sequence = sequences[completion.rollout]
        assert completion.positions.tolist() == np.flatnonzero(predict[completion.rollout]).tolist()
        found = []
        for index, predictions in completion.sources:
            layout = layouts[index]
            scaled = layout.prediction_rows[predictions]
            rows = layout.logit_rows[layout.scaled_rows[scaled]]
            assert (layout.row_temperatures[scaled] == temperatures[completion.rollout]).all()
            found += zip(layout.position_ids[rows], layout.targets[predictions], strict=True)
        assert found == [(position, sequence[position + 1]) for position in completion.positions]


@given(rollouts, st.data())
def test_nothing_is_predicted_twice(sequences, data):
    sequences = arrays(sequences)
    forest, plan = draw_plan(sequences, data)
    for layout in Packer(sequences, forest, plan).layouts:
        rows = layout.logit_rows[layout.scaled_rows[layout.prediction_rows]]
        predictions = list(zip(rows.tolist(), layout.targets.tolist(), strict=True))
        assert len(set(predictions)) == len(predictions)
        assert sorted(set(layout.scaled_rows.tolist())) == list(range(len(layout.logit_rows)))


def test_the_last_position_of_a_prompt_predicts_each_first_token():
    sequences = arrays([[1, 2, 3, 7, 7], [1, 2, 3, 8, 8], [1, 2, 3, 9]])
    plan, (head, leaf) = pack(sequences, mode="cut")
    assert head.token_ids.tolist() == [1, 2, 3]
    assert head.targets.tolist() == [2, 3, 7, 8, 9]
    assert head.logit_rows[head.prediction_rows].tolist() == [0, 1, 2, 2, 2]
    assert (leaf.token_ids.tolist(), leaf.position_ids.tolist()) == ([7, 8], [3, 3])
    assert leaf.targets.tolist() == [7, 8]
    assert [completion.rollout for completion in head.completions] == [2]


def test_logits_only_where_something_is_predicted():
    sequences = arrays([[1, 2, 3, 7, 7, 7], [1, 2, 3, 8, 8]])
    predict = [np.arange(len(sequence) - 1) >= 2 for sequence in sequences]
    _, (layout,) = pack(sequences, predict=predict)
    assert layout.token_ids.tolist() == [1, 2, 3, 7, 7, 8]
    assert layout.logit_rows.tolist() == [2, 3, 4, 5]


def test_a_pack_without_predictions_keeps_one_row():
    sequences = arrays([[1, 2, 3], [1, 2, 4]])
    _, (layout,) = pack(sequences, predict=[np.zeros(2, bool)] * 2)
    assert layout.logit_rows.tolist() == [1]
    assert len(layout.targets) == len(layout.scaled_rows) == 0
    assert [(c.positions.tolist(), c.sources) for c in layout.completions] == [([], ())] * 2


def test_two_temperatures_share_one_row_of_logits():
    sequences = arrays([[1, 2, 3], [1, 2, 3], [1, 2, 4]])
    _, (layout,) = pack(sequences, temperatures=[0.5, 1.0, 0.5])
    assert layout.logit_rows.tolist() == [0, 1]
    rows = layout.logit_rows[layout.scaled_rows]
    assert list(zip(rows, layout.row_temperatures, strict=True)) == [
        (0, 0.5), (0, 1.0), (1, 0.5), (1, 1.0),
    ]  # fmt: skip
    # Rollouts 0 and 2 share the prediction of token 2 at 0.5, and differ after it.
    assert layout.targets.tolist() == [2, 2, 3, 4, 3]


def test_turns_of_one_conversation_are_one_causal_part():
    """A sample per turn: each is a prefix of the next, so the tree is one path."""
    conversation = np.arange(40)
    _, (layout,) = pack([conversation[:10], conversation[:25], conversation])
    assert layout.self_parts == ((0, 39),) and layout.cross_parts == ()


def test_the_first_response_continues_its_prompt():
    prompt = np.arange(6)
    responses = ([10, 11, 12], [20, 21, 22], [30, 31, 32])
    _, (layout,) = pack([np.concatenate([prompt, response]) for response in responses])
    assert layout.self_parts == ((0, 8), (8, 10), (10, 12))
    (part,) = layout.cross_parts
    assert (part.query_start, part.query_end) == (8, 12)
    assert (part.key_start, part.key_end) == (0, 6)


def test_ancestors_that_lie_side_by_side_are_read_as_one():
    # A chain of three nested segments in one head pack, read by leaves of another pack.
    sequences = arrays([[1, 2], [1, 2, 3, 4], [1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 8, 8]])
    forest = build_forest(sequences)
    cut = np.zeros(forest.num_segments, bool)
    cut[-1] = True
    plan = plan_cuts(forest, cut, BUDGET)
    leaf = Packer(sequences, forest, plan).layouts[-1]
    assert [(part.key_start, part.key_end) for part in leaf.cross_parts] == [(0, 6)]


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"predict": [np.ones(3, bool)]}, r"predict\[0\] has 3 entries for 3 tokens: give 2"),
        ({"temperatures": 0.0}, "temperatures must be positive"),
        ({"temperatures": [-1.0]}, "temperatures must be positive"),
    ],
)
def test_malformed_input_is_named(settings, message):
    with pytest.raises(ValueError, match=message):
        pack(arrays([[1, 2, 3]]), **settings)
