"""Simulated updates: seconds, balance and bytes are those of the formulas, and placement pays."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from prefixflow_verl.accounting import ModelShape, dense_flops, span_flops
from prefixflow_verl.cli import app
from prefixflow_verl.lengths import GroupLengths, read_groups, read_trace
from prefixflow_verl.plan import PackBudget
from prefixflow_verl.simulate import NO_REUSE, OURS, VERL, Cluster, simulate

SHAPE = ModelShape(
    num_layers=2, hidden=64, intermediate=96, num_heads=4, num_kv_heads=2, head_dim=16, vocab=50
)


def cluster(num_ranks: int, **changes) -> Cluster:
    settings = {"budget": PackBudget(max_tokens=1 << 20), "rank_flops_per_s": 1e9, **changes}
    return Cluster(shape=SHAPE, num_ranks=num_ranks, **settings)


def heavy_tailed(num_groups: int, seed: int = 0) -> list[GroupLengths]:
    """Many short prompts and a few ten times as long; responses likewise."""
    generator = np.random.default_rng(seed)
    prompts = np.minimum(200 * (1 + generator.pareto(1.5, num_groups)), 2000).astype(int)
    responses = np.minimum(100 * (1 + generator.pareto(1.5, (num_groups, 8))), 1000).astype(int)
    return [
        GroupLengths(prompt=int(prompt), responses=tuple(map(int, lengths)))
        for prompt, lengths in zip(prompts, responses, strict=True)
    ]


def update_s(*spans: tuple[int, int], num_logit_rows: int) -> float:
    start, end = np.array(spans).T
    return span_flops(SHAPE, start, end, num_logit_rows).update() / 1e9


def test_seconds_are_flops_of_what_each_rank_runs():
    groups = [GroupLengths(prompt=100, responses=(11, 21))] * 2
    simulation = simulate([("step", groups)], cluster(2))
    # A response's last token is a target only; its first is predicted by the prompt.
    shared = update_s((0, 100), (100, 110), (100, 120), num_logit_rows=1 + 10 + 20)
    assert simulation.slowest_s(OURS) == pytest.approx(shared)
    assert simulation.imbalance(OURS) == pytest.approx(1)
    dense = dense_flops(SHAPE, np.array([111, 121]), 232).update() / 1e9
    assert simulation.slowest_s(NO_REUSE) == pytest.approx(dense)
    # By length alone a rank gets a short and a long response, not always of one prompt.
    record = simulation.as_record()
    assert record["duplicated_prefixes"][OURS] == 0
    assert record["speedup_over_no_reuse"] == pytest.approx(dense / shared)


def test_only_loss_tokens_pay_the_lm_head():
    runs = (((1, 6), (0, 4), (1, 1)),)
    groups = [GroupLengths(prompt=100, responses=(11,), loss_runs=runs)]
    simulation = simulate([("step", groups)], cluster(1))
    expected = update_s((0, 100), (100, 110), num_logit_rows=7)
    assert simulation.slowest_s(OURS) == pytest.approx(expected)


def test_peak_bytes_are_those_of_the_largest_round():
    group = [GroupLengths(prompt=100, responses=(11,) * 4)]
    cached = SHAPE.cache_bytes_per_token(element_bytes=2, gradient_bytes=4)
    active = SHAPE.activation_bytes_per_token(element_bytes=2, checkpointing=False)

    def peaks(budget: PackBudget) -> dict[str, int]:
        simulation = simulate([("step", group)], cluster(1, budget=budget))
        return simulation.as_record()["peak_bytes"]

    fused = peaks(PackBudget(max_tokens=1000))
    assert fused[OURS] == (100 + 4 * 10) * active
    assert fused[NO_REUSE] == 4 * 111 * active
    # Cut: the prompt is kept with its cache while packs of two responses run.
    cut = peaks(PackBudget(max_tokens=100))
    assert cut[OURS] == 100 * (cached + active) + 100 * active
    assert cut[NO_REUSE] == 111 * active  # longer than the budget: alone
    recomputed = peaks(PackBudget(max_tokens=100, prefix_activations="recompute"))
    assert recomputed[OURS] == 100 * cached + 100 * active


def test_a_batch_is_padded_to_equal_rows():
    groups = [GroupLengths(prompt=50, responses=(10, 10, 10))] * 3
    step = simulate([("step", groups)], cluster(4, num_mini_batches=2)).steps[0]
    assert (step.num_rollouts, step.num_padding_rows) == (9, 7)
    assert step.arms[OURS].rank_s.shape == (4, 2)


@given(
    st.lists(
        st.builds(
            GroupLengths,
            prompt=st.integers(1, 3000),
            responses=st.lists(st.integers(1, 500), min_size=1, max_size=8).map(tuple),
        ),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 8),
    st.integers(1, 3),
)
def test_placement_is_never_slower_than_verls(groups, num_ranks, num_mini_batches):
    simulation = simulate([("s", groups)], cluster(num_ranks, num_mini_batches=num_mini_batches))
    ours, verls = simulation.slowest_s(OURS), simulation.slowest_s(VERL)
    assert ours <= verls * (1 + 1e-9)
    assert simulation.imbalance(OURS) >= 1 - 1e-9


@pytest.mark.parametrize("num_ranks, limit", [(8, 1.05), (64, 1.15)])
def test_heavy_tails_are_balanced(num_ranks, limit):
    simulation = simulate([("step", heavy_tailed(512))], cluster(num_ranks))
    assert simulation.lower_bound < limit
    assert simulation.imbalance(OURS) <= limit
    assert simulation.slowest_s(VERL) / simulation.slowest_s(OURS) > 1.2


def test_means_over_steps():
    steps = [("a", heavy_tailed(8, seed=1)), ("b", heavy_tailed(8, seed=2))]
    both = simulate(steps, cluster(4))
    alone = [simulate([step], cluster(4)) for step in steps]
    for arm in (NO_REUSE, VERL, OURS):
        assert both.slowest_s(arm) == pytest.approx(np.mean([s.slowest_s(arm) for s in alone]))
    assert both.as_record()["peak_bytes"][OURS] == max(
        simulation.as_record()["peak_bytes"][OURS] for simulation in alone
    )


def test_traces_are_files_or_directories(tmp_path):
    (tmp_path / "deep").mkdir()
    line = '{"prompt": 20, "responses": [5, 6]}\n'
    (tmp_path / "b.jsonl").write_text(line)
    (tmp_path / "deep" / "a.jsonl").write_text(line * 2)
    (tmp_path / "notes.txt").write_text("no lengths")
    named = read_trace(tmp_path)
    assert [(name, len(groups)) for name, groups in named] == [("b.jsonl", 1), ("deep/a.jsonl", 2)]
    [(name, groups)] = read_trace(tmp_path / "b.jsonl")
    assert (name, groups) == ("b.jsonl", read_groups(tmp_path / "b.jsonl"))


def run(*options: object):
    return CliRunner().invoke(app, ["simulate", *map(str, options)])


@pytest.fixture
def trace(tmp_path):
    file = tmp_path / "lengths.jsonl"
    lines = [{"prompt": g.prompt, "responses": list(g.responses)} for g in heavy_tailed(16)]
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


def test_command_prints_json_and_writes_files(trace, tmp_path):
    out = tmp_path / "out"
    finished = run("--trace", trace, "--ranks", 8, "--json", "--out", out)
    assert finished.exit_code == 0, finished.output
    record = json.loads(finished.stdout)
    for key in ("imbalance", "slowest_rank_s", "peak_bytes"):
        assert {"verl", "prefixflow", "no_reuse"} == set(record[key])
    seconds = record["slowest_rank_s"]
    assert record["speedup_over_verl_placement"] == seconds["verl"] / seconds["prefixflow"]
    assert json.loads((out / "simulation.json").read_text()) == record
    assert (out / "simulation.png").read_bytes().startswith(b"\x89PNG")
    faster = json.loads(run("--trace", trace, "--ranks", 8, "--json", "--tflops", 800).stdout)
    assert faster["slowest_rank_s"]["verl"] == pytest.approx(seconds["verl"] / 2)


def test_repeat_makes_a_larger_batch(trace):
    steps = [
        json.loads(run("--trace", trace, "--ranks", 4, "--json", "--repeat", repeat).stdout)[
            "steps"
        ]
        for repeat in (1, 3)
    ]
    assert steps[1][0]["rollouts"] == 3 * steps[0][0]["rollouts"]


def test_command_for_people(trace):
    finished = run("--trace", trace, "--ranks", 4, "--mini-batches", 2, "--repeat", 2)
    assert finished.exit_code == 0, finished.output
    assert "steps: 1, ranks: 4, mini-batches: 2" in finished.stdout
    assert "x faster than with veRL's placement" in " ".join(finished.stdout.split())


@pytest.mark.parametrize(
    "options, reason",
    [
        (("--trace", "{dir}/none.jsonl", "--ranks", 8), "none.jsonl cannot be read"),
        (("--trace", "{dir}/empty", "--ranks", 8), "holds no file that ends in .jsonl"),
        (("--trace", "{trace}", "--ranks", 8, "--tflops", "nan"), "--tflops=nan must be a number"),
        (("--trace", "{trace}", "--ranks", 8, "--out", "{trace}"), "lengths.jsonl cannot be writ"),
    ],
)
def test_bad_options_are_named(trace, tmp_path, options, reason):
    (tmp_path / "empty").mkdir()
    finished = run(*(str(o).format(dir=tmp_path, trace=trace) for o in options))
    assert finished.exit_code == 2
    assert reason in finished.output.replace("\n", "")
