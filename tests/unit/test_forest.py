"""First link of the proof chain: the forest holds every shared run of input tokens once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixflow_verl.forest import Segment, build_forest, separate_trees, split_segments

rollouts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), max_size=9)


def arrays(sequences):
    return [np.array(sequence, dtype=np.int64) for sequence in sequences]


def tokens_along(forest, sequences, segment):
    """Tokens from the root through `segment`, each taken from the segment's own owner."""
    parts = [
        sequences[forest.owner(part)][forest.start[part] : forest.end[part]]
        for part in forest.path(segment)
    ]
    return np.concatenate(parts).tolist() if parts else []


def test_the_documented_example():
    forest = build_forest(arrays([[7, 8, 9, 1], [7, 8, 9, 2, 3], [5, 6]]))
    assert [forest.segment(index) for index in range(3)] == [
        Segment(start=0, end=1, parent=None, rollout_ids=(2,)),
        Segment(start=0, end=3, parent=None, rollout_ids=(0, 1)),
        Segment(start=3, end=4, parent=1, rollout_ids=(1,)),
    ]
    assert forest.end_segment.tolist() == [1, 2, 0]
    assert (forest.roots, forest.children(1), forest.path(2)) == ([0, 1], [2], [1, 2])
    assert forest.is_shared.tolist() == [False, True, False]
    assert (forest.logical_tokens, forest.executed_tokens) == (3 + 4 + 1, 1 + 3 + 1)


@given(rollouts)
def test_every_distinct_prefix_is_one_executed_token(sequences):
    forest = build_forest(arrays(sequences))
    prefixes = {tuple(sequence[:end]) for sequence in sequences for end in range(1, len(sequence))}
    assert forest.executed_tokens == len(prefixes)
    assert forest.logical_tokens == sum(len(sequence) - 1 for sequence in sequences)


def assert_paths_spell_rollouts(forest, sequences):
    for rollout, segment in enumerate(forest.end_segment.tolist()):
        assert tokens_along(forest, sequences, segment) == sequences[rollout][:-1].tolist()
        assert all(rollout in forest.rollouts_of(part) for part in forest.path(segment))


def assert_preorder(forest):
    assert (forest.lengths > 0).all()
    assert (forest.parent < np.arange(forest.num_segments)).all()
    for segment in range(forest.num_segments):
        below = [
            other
            for other in range(forest.num_segments)
            if other != segment and segment in forest.path(other)
        ]
        assert below == list(range(segment + 1, forest.subtree_end[segment]))
        assert forest.children(segment) == [s for s in below if forest.parent[s] == segment]
        parent = forest.parent[segment]
        assert forest.start[segment] == (forest.end[parent] if parent >= 0 else 0)


@given(rollouts, st.integers(1, 5), st.data())
def test_a_path_spells_its_rollout(sequences, min_shared_tokens, data):
    keys = data.draw(st.lists(st.integers(0, 1), min_size=len(sequences), max_size=len(sequences)))
    sequences = arrays(sequences)
    forest = build_forest(sequences, keys=keys, min_shared_tokens=min_shared_tokens)
    assert_paths_spell_rollouts(forest, sequences)
    for segment in range(forest.num_segments):
        through = forest.rollouts_of(segment)
        assert len({keys[rollout] for rollout in through}) == 1
        if forest.is_shared[segment]:
            assert forest.lengths[segment] >= min_shared_tokens


@given(rollouts)
def test_segments_are_numbered_in_preorder(sequences):
    assert_preorder(build_forest(arrays(sequences)))


@given(rollouts, st.randoms(use_true_random=False))
def test_the_order_of_rollouts_does_not_matter(sequences, random):
    shuffled = random.sample(sequences, len(sequences))
    ours, theirs = (build_forest(arrays(rows)) for rows in (sequences, shuffled))
    for field in ("start", "end", "parent", "subtree_end", "first", "last"):
        assert np.array_equal(getattr(ours, field), getattr(theirs, field))


@pytest.mark.parametrize(
    "sequences, segments",
    [
        pytest.param([], [], id="no rollouts"),
        pytest.param([[4]], [], id="one token is a target only"),
        pytest.param([[4, 5], [4, 5], [4, 5]], [(0, 1, 3)], id="duplicates"),
        pytest.param([[4, 5, 6], [4, 5, 6, 7, 8]], [(0, 2, 2), (2, 4, 1)], id="nested"),
        pytest.param([[4, 1], [4, 2], [4, 3]], [(0, 1, 3)], id="one-token responses"),
        pytest.param([[1, 2, 3], [4, 2, 3]], [(0, 2, 1), (0, 2, 1)], id="strangers"),
        pytest.param([[300, 1, 9], [255, 1, 9]], [(0, 2, 1), (0, 2, 1)], id="ids beyond a byte"),
    ],
)
def test_shapes_by_hand(sequences, segments):
    forest = build_forest(arrays(sequences))
    found = zip(forest.start, forest.end, forest.last - forest.first, strict=True)
    assert [tuple(map(int, segment)) for segment in found] == segments


def test_short_shared_runs_stay_with_their_children():
    sequences = arrays([[1, 2, 3, 4, 5, 8, 8], [1, 2, 3, 4, 6, 8, 8], [1, 2, 7, 7, 7]])
    assert build_forest(sequences, min_shared_tokens=2).lengths.tolist() == [2, 2, 2, 2, 2]
    # The outer run of two is too short; the inner one then counts from the start and has four.
    assert build_forest(sequences, min_shared_tokens=3).lengths.tolist() == [4, 2, 2, 4]
    assert not build_forest(sequences, min_shared_tokens=5).is_shared.any()


def test_keys_keep_equal_tokens_apart():
    forest = build_forest(arrays([[1, 2, 3]] * 3), keys=["adapter a", "adapter b", "adapter a"])
    assert sorted(forest.segment(s).rollout_ids for s in forest.roots) == [(0, 2), (1,)]


def test_prefixes_longer_than_a_window_are_found():
    # Windows of the comparison end after 16, 48, 112, ... tokens and stop growing at 4096.
    for length in (15, 16, 17, 48, 8176, 12_300):
        prompt = np.arange(length)
        forest = build_forest([np.append(prompt, [1, 1, 1]), np.append(prompt, [2, 2, 2])])
        assert forest.lengths.tolist() == [length, 2, 2]
        assert build_forest([np.append(prompt, 1), prompt]).lengths.tolist() == [length - 1, 1]


@given(rollouts, st.integers(1, 5))
def test_long_segments_become_chains_of_pieces(sequences, max_tokens):
    sequences = arrays(sequences)
    forest = build_forest(sequences)
    split = split_segments(forest, max_tokens)
    assert_preorder(split)
    assert_paths_spell_rollouts(split, sequences)
    assert split.executed_tokens == forest.executed_tokens
    assert split.logical_tokens == forest.logical_tokens
    assert (split.lengths <= max_tokens).all()
    pieces = iter(split.lengths.tolist())
    for length in forest.lengths.tolist():
        sizes = [next(pieces) for _ in range(-(-length // max_tokens))]
        assert sum(sizes) == length and max(sizes) - min(sizes) <= 1
    assert not list(pieces)


def test_a_chain_of_pieces_by_hand():
    forest = split_segments(build_forest(arrays([[7] * 8 + [1, 1], [7] * 8 + [2], [5, 6]])), 3)
    assert [forest.segment(index) for index in range(5)] == [
        Segment(start=0, end=1, parent=None, rollout_ids=(2,)),
        Segment(start=0, end=2, parent=None, rollout_ids=(0, 1)),
        Segment(start=2, end=5, parent=1, rollout_ids=(0, 1)),
        Segment(start=5, end=8, parent=2, rollout_ids=(0, 1)),
        Segment(start=8, end=9, parent=3, rollout_ids=(0,)),
    ]
    assert forest.end_segment.tolist() == [4, 3, 0]
    assert forest.subtree_end.tolist() == [1, 5, 5, 5, 5]


@given(rollouts, st.data())
def test_separated_trees_share_nothing_at_their_roots(sequences, data):
    sequences = arrays(sequences)
    forest = build_forest(sequences)
    roots = [root for root in forest.roots if data.draw(st.booleans())]
    separated = separate_trees(forest, np.array(roots, dtype=np.int64))
    assert_preorder(separated)
    assert_paths_spell_rollouts(separated, sequences)
    added = 0
    for root in roots:
        num_runs = len(forest.children(root)) + int((forest.end_segment == root).any())
        added += int(forest.lengths[root]) * (num_runs - 1)
    assert separated.executed_tokens == forest.executed_tokens + added
    assert separated.logical_tokens == forest.logical_tokens


@pytest.mark.parametrize(
    "sequences, keys, message",
    [
        ([np.zeros(0, dtype=np.int64)], None, "sequence 0 has shape"),
        ([np.zeros((2, 2), dtype=np.int64)], None, "one dimension"),
        (arrays([[1, 2]]), ["a", "b"], "2 keys for 1 sequences"),
    ],
)
def test_malformed_input_is_named(sequences, keys, message):
    with pytest.raises(ValueError, match=message):
        build_forest(sequences, keys=keys)
