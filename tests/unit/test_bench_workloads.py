"""What a benchmark trains on: recorded lengths, samples of a conversation, micro-batches."""

import json

import numpy as np
import pytest
import torch

from prefixflow_verl.bench_cli import _engine_options
from prefixflow_verl.bench_settings import ForwardSize, Settings
from prefixflow_verl.bench_workloads import (
    GridCase,
    TraceCase,
    TurnsCase,
    forward_size,
    make_batch,
    similar_lengths,
)
from prefixflow_verl.lengths import GroupLengths, read_groups

FORWARD = ForwardSize(token_budget=1000)


def trajectory(group, runs, prompt=20):
    return {"prompt_len": prompt, "prompt_group_id": group, "response_loss_mask_rle": runs}


def write(path, *records):
    path.write_text("\n".join(json.dumps(record) for record in records))
    return path


def test_multi_turn_lines_make_groups(tmp_path):
    file = write(
        tmp_path / "a.jsonl",
        trajectory(0, [[1, 3], [0, 5], [1, 2]]),
        trajectory(0, [[1, 4]]),
        trajectory(1, [[1, 6], [0, 1]]),
        {"prompt": 7, "responses": [8, 9]},
    )
    groups = read_groups(file)
    assert groups == [
        GroupLengths(prompt=20, responses=(10, 4), loss_runs=(((1, 3), (0, 5), (1, 2)), ((1, 4),))),
        GroupLengths(prompt=20, responses=(7,), loss_runs=(((1, 6), (0, 1)),)),
        GroupLengths(prompt=7, responses=(8, 9)),
    ]
    assert groups[0].loss_mask(0).tolist() == [True] * 3 + [False] * 5 + [True] * 2
    assert groups[2].loss_mask(1).all()


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (trajectory(0, [[1, 3]], prompt=19), "prompt_len is 19 in a group of prompts of 20"),
        (trajectory(0, [[0, 3]]), "response_loss_mask_rle has no token that carries loss"),
        (trajectory(0, [[1, 0]]), "response_loss_mask_rle holds 0"),
        (trajectory(0, [[2, 1]]), "must be a list of runs"),
        (trajectory(0, 5), "must be a list of runs"),
    ],
)
def test_malformed_multi_turn_line_is_named(tmp_path, record, reason):
    file = write(tmp_path / "a.jsonl", trajectory(0, [[1, 4]]), record)
    with pytest.raises(ValueError, match=f"a.jsonl, line 2: .*{reason}"):
        read_groups(file)


def test_scaled_lengths_are_rounded_up():
    plain = GroupLengths(prompt=10, responses=(1, 25)).scaled(0.1)
    assert plain == GroupLengths(prompt=1, responses=(1, 3))
    runs = (((1, 3), (0, 25)),)
    masked = GroupLengths(prompt=10, responses=(28,), loss_runs=runs).scaled(0.1)
    assert masked == GroupLengths(prompt=1, responses=(4,), loss_runs=(((1, 1), (0, 3)),))


def test_trace_of_a_directory(tmp_path):
    (tmp_path / "b").mkdir()
    write(tmp_path / "b" / "two.jsonl", {"prompt": 4, "responses": [2]})
    write(tmp_path / "one.jsonl", *({"prompt": n, "responses": [n, 10]} for n in range(1, 9)))
    write(tmp_path / "notes.txt", "no trace")
    deep, flat = TraceCase.read(tmp_path, num_groups=3, scale=1.0)
    assert str(deep) == "b/two.jsonl, 1 groups"
    assert str(flat) == "one.jsonl, 3 groups"
    # Evenly spaced.
    assert [group.prompt for group in flat.groups] == [1, 3, 6]
    assert flat.record() == {
        "label": "one.jsonl, 3 groups",
        "kind": "trace",
        "prompt": pytest.approx(10 / 3),
        "response": pytest.approx(40 / 6),
        "group": 2.0,
        "prompts": 3,
    }
    (single,) = TraceCase.read(tmp_path / "one.jsonl", num_groups=1, scale=0.5)
    assert str(single) == "one.jsonl, 1 groups, lengths x 0.5"
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no file that ends in .jsonl"):
        TraceCase.read(tmp_path / "empty", num_groups=1, scale=1.0)


def test_batch_of_a_trace():
    groups = (
        GroupLengths(prompt=3, responses=(5,), loss_runs=(((0, 1), (1, 4)),)),
        GroupLengths(prompt=2, responses=(1, 4)),
    )
    batch = make_batch(TraceCase(name="a", groups=groups), FORWARD, vocab=50)
    first, second, third = batch.rollouts
    assert [len(rollout.tokens) for rollout in batch.rollouts] == [8, 3, 6]
    assert batch.num_loss_tokens == 4 + 1 + 4
    assert first.wanted("update").tolist() == [False] + [True] * 4
    assert first.wanted("log_prob").all()
    assert second.prompt is third.prompt
    assert len({rollout.advantage for rollout in batch.rollouts}) == 3


def test_batch_of_equal_lengths():
    batch = make_batch(GridCase(prompt=5, response=2, group=3, prompts=2), FORWARD, vocab=1000)
    assert [len(group) for group in batch.groups] == [3, 3]
    assert {len(rollout.tokens) for rollout in batch.rollouts} == {7}
    (one, *_), (other, *_) = batch.groups
    assert not torch.equal(one.prompt, other.prompt)


def test_contexts_hold_the_turns_before_them():
    case = TurnsCase(turns=4, context=(6, 30), response=5)
    assert case.contexts == [6, 14, 22, 30]
    rollouts = make_batch(case, FORWARD, vocab=1000).rollouts
    assert [len(rollout.prompt) for rollout in rollouts] == case.contexts
    for before, after in zip(rollouts, rollouts[1:], strict=False):
        assert torch.equal(after.prompt[: len(before.tokens)], before.tokens)
    assert all(rollout.loss_mask.all() for rollout in rollouts)
    # As tight as can be: nothing between a response and the next.
    assert TurnsCase(turns=3, context=(8, 18), response=5).contexts == [8, 13, 18]


def test_forward_sizes():
    ragged = TraceCase(name="a", groups=(GroupLengths(prompt=10, responses=(10, 10, 10, 10)),))
    long = TraceCase(name="a", groups=(GroupLengths(prompt=10, responses=(1, 1, 1, 990)),))
    single = TraceCase(name="a", groups=(GroupLengths(prompt=10, responses=(30,)),) * 2)
    assert forward_size(ragged, Settings()) == ForwardSize(token_budget=80)
    assert forward_size(long, Settings()) == ForwardSize(token_budget=4 * 1033 // 4)
    assert forward_size(single, Settings()) == ForwardSize(token_budget=160)
    assert forward_size(ragged, Settings(token_budget=20)) == ForwardSize(token_budget=20)
    assert forward_size(ragged, Settings(rollouts_per_forward=2)) == ForwardSize(rollouts=2)
    with pytest.raises(ValueError, match="--token-budget=19 is less than the 20 tokens"):
        forward_size(ragged, Settings(token_budget=19))


def padded_tokens(sizes, forwards):
    assert sorted(index for forward in forwards for index in forward) == list(range(len(sizes)))
    return [len(forward) * max(sizes[index] for index in forward) for forward in forwards]


def test_similar_lengths_share_a_forward():
    sizes = [10, 100, 12, 96, 11, 98]
    wide = ForwardSize(token_budget=1000)
    forwards = similar_lengths(sizes, wide, overhead_tokens=16)
    assert forwards == [[1, 5, 3], [2, 4, 0]]
    assert padded_tokens(sizes, forwards) == [300, 36]
    # Padding is cheaper than a forward that takes as long as many tokens do.
    assert len(similar_lengths(sizes, wide, overhead_tokens=1000)) == 1
    narrow = similar_lengths(sizes, ForwardSize(token_budget=200), overhead_tokens=16)
    assert max(padded_tokens(sizes, narrow)) <= 200
    # One that is too long runs by itself.
    assert similar_lengths([30, 5], ForwardSize(token_budget=20), overhead_tokens=1) == [[0], [1]]
    fixed = similar_lengths(sizes, ForwardSize(rollouts=2), overhead_tokens=16)
    assert fixed == [[1, 5], [3, 2], [4, 0]]


def test_equal_lengths_fill_forwards_in_order():
    forwards = similar_lengths([7] * 10, ForwardSize(token_budget=28), overhead_tokens=16)
    assert forwards == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_engine_options_are_yaml():
    options = _engine_options(["plan=off", "min_shared_tokens=3", "max_cache_bytes=null"])
    assert (options.plan, options.min_shared_tokens, options.max_cache_bytes) == ("off", 3, None)


def test_plan_counts_loss_tokens_of_multi_turn_lines(tmp_path):
    from prefixflow_verl.lengths import _rollouts

    file = write(tmp_path / "a.jsonl", trajectory(0, [[1, 3], [0, 5], [1, 2]], prompt=4))
    (sequence,), (predict,) = _rollouts(read_groups(file))
    assert len(sequence) == 14
    assert np.flatnonzero(predict).tolist() == [3, 4, 5, 11, 12]
