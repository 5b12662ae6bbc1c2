"""Provenance chain, its end: what `prefixflow provenance` says of a ledger, counted by hand and
against a token-by-token account, and that it finds what cannot be right.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

pytest.importorskip("pyarrow")

import pyarrow as pa  # noqa: E402

from prefixflow_verl.cli import app  # noqa: E402
from prefixflow_verl.ledger import SCHEMA, Ledger, LedgerWriter, read_ledger  # noqa: E402
from prefixflow_verl.ledger_report import (  # noqa: E402
    AgeCount,
    AgeMismatch,
    LedgerAnalysis,
    QuestionError,
    Reach,
    Source,
    StepOrigin,
    make_report,
)
from prefixflow_verl.provenance import PolicySpan  # noqa: E402


def span(num_tokens: int, start: int | None, end: int | None = None) -> dict[str, Any]:
    return {
        "num_tokens": num_tokens,
        "version_start": start,
        "version_end": start if end is None else end,
        "is_sampled": True,
    }


def observed(num_tokens: int) -> dict[str, Any]:
    return {**span(num_tokens, None), "is_sampled": False}


def sequence(uid: str, session: int, step: int, *spans: dict, **values: Any) -> dict[str, Any]:
    """A row as the update gate writes it, for a response that is trained in all sampled tokens."""
    sampled = [one for one in spans if one["is_sampled"]]
    num_sampled = sum(one["num_tokens"] for one in sampled)
    ages = [step - 1 - s["version_start"] for s in sampled if s["version_start"] is not None]
    return {
        "trainer_version": step - 1,
        "uid": uid,
        "session": session,
        "output": 0,
        "digest": 1000 * step + session,
        "num_response_tokens": sum(one["num_tokens"] for one in spans),
        "num_sampled_tokens": num_sampled,
        "num_loss_tokens": num_sampled,
        "spans": list(spans),
        "staleness_worst": float(max(ages)) if ages else None,
        "mini_batches": [0],
        "num_epochs": 1,
        "old_log_prob_step": step,
        "action": "train",
        "reasons": [],
        **values,
    }


def no_record(uid: str, session: int, step: int, num_tokens: int, **values: Any) -> dict[str, Any]:
    return sequence(uid, session, step) | {
        "digest": None,
        "num_response_tokens": num_tokens,
        "num_sampled_tokens": None,
        "num_loss_tokens": num_tokens,
        "spans": None,
        "mini_batches": [],
        **values,
    }


MEASURED = {"k3": 0.5, "max_ratio": 2.0, "pearson": 0.9}

STEPS = {
    1: [sequence("a", session, 1, span(10, 0)) for session in range(2)],
    2: [
        sequence(
            "b0",
            0,
            2,
            span(6, 0),
            observed(2),
            span(4, 0, 1),
            action="warn",
            reasons=["mixed"],
            reward=1.5,
            advantage_mean=-0.25,
            **MEASURED,
        ),
        sequence(
            "b0",
            1,
            2,
            span(5, 1),
            span(3, None),
            action="warn",
            reasons=["missing"],
            k3=0.1,
            max_ratio=1.5,
            pearson=float("nan"),
        ),
    ],
    3: [
        no_record("b1", 0, 3, 7, action="mask", reasons=["missing"], k3=0.3, max_ratio=1.1),
        sequence("b1", 1, 3, span(8, 0), num_loss_tokens=0, action="drop_group", reasons=["stale"]),
    ],
}
"""By step; six sequences, 55 response tokens of which 2 are observed."""


def write(directory: Path, steps=None) -> Path:
    writer = LedgerWriter(directory, 1)
    for step, rows in (STEPS if steps is None else steps).items():
        writer.write(step, 0, rows)
    return directory


@pytest.fixture
def ledger(tmp_path) -> Path:
    return write(tmp_path / "provenance")


@pytest.fixture
def analysis(ledger) -> LedgerAnalysis:
    return LedgerAnalysis(read_ledger(ledger))


def test_summary(analysis):
    summary = analysis.summary()
    assert (summary.num_launches, summary.num_superseded) == (1, 0)
    assert (summary.num_steps, summary.num_updates) == (3, 3)
    assert (summary.num_sequences, summary.num_trained_sequences) == (6, 5)
    assert summary.num_response_tokens == 20 + 12 + 8 + 7 + 8
    assert summary.num_sampled_tokens == 53
    assert (summary.num_mixed_tokens, summary.num_missing_tokens) == (4, 3 + 7)
    assert summary.num_loss_tokens == 20 + 10 + 8 + 7
    assert summary.clean_fraction == 39 / 53
    assert summary.mixed_fraction == 4 / 53
    assert summary.missing_fraction == 10 / 53
    assert summary.staleness == (
        AgeCount(age=0, num_clean_tokens=25, num_mixed_tokens=0, share=25 / 53),
        AgeCount(age=1, num_clean_tokens=6, num_mixed_tokens=4, share=10 / 53),
        AgeCount(age=2, num_clean_tokens=8, num_mixed_tokens=0, share=8 / 53),
    )
    assert summary.actions == {"train": 2, "warn": 2, "mask": 1, "drop_group": 1}
    assert summary.reasons == {"missing": 2, "mixed": 1, "stale": 1}


def test_steps(analysis):
    assert analysis.steps()[1:] == (
        StepOrigin(
            step=2,
            num_updates=1,
            num_sequences=2,
            num_sampled_tokens=18,
            oldest_version=0,
            newest_version=1,
            mean_staleness=10 / 15,
            mixed_fraction=4 / 18,
            missing_fraction=3 / 18,
        ),
        StepOrigin(
            step=3,
            num_updates=1,
            num_sequences=2,
            num_sampled_tokens=15,
            oldest_version=0,
            newest_version=0,
            mean_staleness=2,
            mixed_fraction=0,
            missing_fraction=7 / 15,
        ),
    )


def test_which_versions_fed_a_step(analysis):
    one = {"num_sequences": 1, "num_trained_sequences": 1}
    assert analysis.sources(2) == (
        Source(
            kind="clean", version_start=0, version_end=0, num_sampled_tokens=6, share=6 / 18, **one
        ),
        Source(
            kind="clean", version_start=1, version_end=1, num_sampled_tokens=5, share=5 / 18, **one
        ),
        Source(
            kind="mixed", version_start=0, version_end=1, num_sampled_tokens=4, share=4 / 18, **one
        ),
        Source(
            kind="missing",
            version_start=None,
            version_end=None,
            num_sampled_tokens=3,
            share=3 / 18,
            **one,
        ),
    )
    dropped = analysis.sources(3)[0]
    assert (dropped.version_start, dropped.num_sequences, dropped.num_trained_sequences) == (
        0,
        1,
        0,
    )


def test_which_steps_a_version_reached(analysis):
    assert analysis.reach(0) == (
        Reach(
            step=1,
            num_clean_tokens=20,
            num_mixed_tokens=0,
            num_sequences=2,
            num_trained_sequences=2,
        ),
        Reach(
            step=2, num_clean_tokens=6, num_mixed_tokens=4, num_sequences=1, num_trained_sequences=1
        ),
        Reach(
            step=3, num_clean_tokens=8, num_mixed_tokens=0, num_sequences=1, num_trained_sequences=0
        ),
    )
    (reached,) = analysis.reach(1)
    assert (reached.num_clean_tokens, reached.num_mixed_tokens, reached.num_sequences) == (5, 4, 2)


def test_a_version_inside_a_mix_may_have_had_a_part_in_it(tmp_path):
    directory = write(tmp_path, {6: [sequence("a", 0, 6, span(4, 1, 5))]})
    (reached,) = LedgerAnalysis(read_ledger(directory)).reach(3)
    assert (reached.num_clean_tokens, reached.num_mixed_tokens) == (0, 4)


def test_mismatch_by_age(tmp_path):
    steps = {
        5: [
            sequence("a", 0, 5, span(30, 4), k3=0.1, max_ratio=1.2, pearson=0.99),
            sequence("a", 1, 5, span(10, 4), observed(5), k3=0.5, max_ratio=3.0, pearson=0.7),
            sequence("a", 2, 5, span(9, 4)),
            sequence("a", 3, 5, span(2, 2), span(2, 4), k3=0.7, max_ratio=1.1),
            no_record("a", 4, 5, 3, k3=0.2, max_ratio=1.3),
        ]
    }
    found = LedgerAnalysis(read_ledger(write(tmp_path, steps))).mismatch()
    assert [(f.age, f.num_sequences, f.worst_k3, f.worst_max_ratio) for f in found] == [
        (0, 2, 0.5, 3.0),
        (2, 1, 0.7, 1.1),
        (None, 1, 0.2, 1.3),
    ]
    assert found[0].mean_k3 == pytest.approx((30 * 0.1 + 10 * 0.5) / 40)
    assert found[0].lowest_pearson == 0.7
    assert np.isnan(found[1].lowest_pearson)
    assert isinstance(found[0], AgeMismatch)


def test_lineage(analysis):
    first, second = analysis.lineage("b0")
    assert (first.step, first.session, first.output, first.mini_batches) == (2, 0, 0, (0,))
    assert first.spans == (
        PolicySpan(num_tokens=6, version_start=0, version_end=0),
        PolicySpan(num_tokens=2, is_sampled=False),
        PolicySpan(num_tokens=4, version_start=0, version_end=1),
    )
    assert (first.action, first.reasons) == ("warn", ("mixed",))
    assert (first.reward, first.advantage_mean, first.k3) == (1.5, -0.25, 0.5)
    assert (second.session, second.reward) == (1, None)
    assert analysis.lineage("b1")[0].spans is None


def test_a_uid_may_be_given_by_its_beginning(analysis):
    assert analysis.resolve_uid("a") == "a"
    assert analysis.resolve_uid("b1") == "b1"
    for prefix, sentence in (
        ("b", r"--uid=b begins 2 uids \(b0, b1\): say more"),
        ("c", "--uid=c is not in the ledger, nor begins a uid of it"),
    ):
        with pytest.raises(QuestionError, match=sentence):
            analysis.resolve_uid(prefix)


def test_a_whole_uid_goes_before_longer_ones(tmp_path):
    rows = [sequence(uid, 0, 1, span(1, 0)) for uid in ("aa", "a", "ab")]
    analysis = LedgerAnalysis(read_ledger(write(tmp_path, {1: rows})))
    assert analysis.resolve_uid("a") == "a"


def test_the_group_of_most_versions(analysis, tmp_path):
    assert analysis.group_of_most_versions() == "b0"
    rows = [sequence(uid, 0, 5, span(3, 1), span(3, 4)) for uid in ("z", "a")]
    tied = LedgerAnalysis(read_ledger(write(tmp_path / "tied", {5: rows})))
    assert tied.group_of_most_versions() == "z"


# Faults


def faults(directory: Path) -> list[tuple[str, int, str]]:
    found = LedgerAnalysis(read_ledger(directory)).faults()
    return [(fault.kind, fault.step, fault.sentence) for fault in found]


def test_a_good_ledger_has_no_faults(ledger):
    assert faults(ledger) == []


def test_what_is_unusual_but_right_is_no_fault(tmp_path):
    writer = LedgerWriter(tmp_path, 1)
    for step in (1, 2):
        emptied = {"num_loss_tokens": 0, "action": "mask", "digest": 5, "mini_batches": [0, 0]}
        for trigger in range(2):
            writer.write(
                step,
                trigger,
                [
                    # Nothing of it was trained, however often it stands there.
                    sequence("dropped", 0, step, span(4, 0), **emptied),
                    sequence("dropped", 0, step, span(4, 0), **emptied),
                    # Another session, another output, another response.
                    sequence(f"{step}{trigger}", 0, step, span(4, 0), digest=5),
                    sequence(f"{step}{trigger}", 1, step, span(4, 0), digest=5),
                    sequence(f"{step}{trigger}", 1, step, span(4, 0), digest=5, output=1),
                    sequence(
                        f"{step}{trigger}", 2, step, span(4, 0), mini_batches=[0, 3], num_epochs=2
                    ),
                    sequence(f"{step}{trigger}", 3, step, span(4, 0), mini_batches=None),
                    sequence(f"{step}{trigger}", 4, step, span(4, 0), old_log_prob_step=None),
                    no_record(f"{step}{trigger}", 5, step, 4),
                ],
            )
    assert faults(tmp_path) == []


def test_a_resume_is_no_fault(tmp_path):
    for first_step in (1, 2):
        writer = LedgerWriter(tmp_path, first_step)
        for step in range(first_step, 4):
            writer.write(step, 0, [sequence(f"u{step}", 0, step, span(4, 0))])
    assert faults(tmp_path) == []


GOOD = {"uid": "u", "session": 3, "step": 4}


@pytest.mark.parametrize(
    "change, sentence",
    [
        (
            {"mini_batches": [0, 2]},
            "u_3_0 was consumed by 2 mini-batches (0, 2) of step 4, ppo_epochs is 1",
        ),
        (
            {"mini_batches": [1, 1], "num_epochs": 2},
            "u_3_0 stands more than once in mini-batch 1 of step 4",
        ),
        (
            {"mini_batches": [1, 1], "num_epochs": 1},
            "u_3_0 was consumed by 2 mini-batches (1, 1) of step 4, ppo_epochs is 1",
        ),
    ],
)
def test_consumed_too_often_by_one_update(tmp_path, change, sentence):
    rows = [
        sequence("other", 0, 4, span(4, 3), mini_batches=[0]),
        sequence("u", 3, 4, span(4, 3), **change),
    ]
    assert faults(write(tmp_path, {4: rows})) == [("trained twice", 4, sentence)]


def test_trained_by_several_updates(tmp_path):
    again = sequence("u", 3, 2, span(4, 0), digest=77)
    writer = LedgerWriter(tmp_path, 1)
    for step, trigger in ((1, 0), (2, 0), (2, 1)):
        row = {**again, "trainer_version": step - 1, "old_log_prob_step": step}
        writer.write(step, trigger, [sequence(f"v{step}{trigger}", 0, step, span(4, 0)), row])
    sentence = "u_3_0 was trained in 3 updates: step 1, step 2 and step 2, update 1"
    assert faults(tmp_path) == [("trained twice", 1, sentence)]


def test_twice_in_one_update(tmp_path):
    row = sequence("u", 3, 4, span(4, 3))
    sentence = "u_3_0 stands 2 times in the update of step 4"
    assert faults(write(tmp_path, {4: [row, row]})) == [("trained twice", 4, sentence)]
    # The same sequence with and without loss was trained once.
    other = tmp_path / "other"
    assert faults(write(other, {4: [row, {**row, "num_loss_tokens": 0}]})) == []


def test_without_a_record_a_sequence_is_still_known(tmp_path):
    row = no_record("u", 3, 4, 5)
    assert faults(write(tmp_path, {4: [row, row]})) == [
        ("trained twice", 4, "u_3_0 stands 2 times in the update of step 4")
    ]


@pytest.mark.parametrize(
    "spans, change, sentence",
    [
        (
            [span(2, 3), span(2, 4)],
            {},
            "u_3_0 has tokens of version 4, from after its trainer's (trainer version 3, step 4)",
        ),
        (
            [span(2, 2, 4)],
            {},
            "u_3_0 has tokens of version 4, from after its trainer's (trainer version 3, step 4)",
        ),
        (
            [span(2, 3), span(2, -1)],
            {},
            "u_3_0 has tokens of version -1, which cannot be (trainer version 3, step 4)",
        ),
        (
            [span(2, 3, 1)],
            {},
            "u_3_0 has tokens of versions 3 to 1, which is backwards (trainer version 3, step 4)",
        ),
        (
            [span(2, 2)],
            {"trainer_version": 2},
            "u_3_0 says that step 4 started from version 2, not 3",
        ),
        (
            [span(2, 3)],
            {"old_log_prob_step": 3},
            "u_3_0 was trained in step 4 against old log-probs of step 3",
        ),
        (
            [span(2, 3), observed(3)],
            {"num_response_tokens": 6},
            "u_3_0 has spans that cover 5 tokens, its response has 6 (step 4)",
        ),
        (
            [span(2, 3), observed(3)],
            {"num_sampled_tokens": 3},
            "u_3_0 has spans that cover 2 sampled tokens, the ledger counts 3 (step 4)",
        ),
    ],
)
def test_wrong_versions(tmp_path, spans, change, sentence):
    rows = [
        sequence("other", 0, 4, span(4, 3)),
        no_record("other", 1, 4, 5),
        sequence("u", 3, 4, *spans, **change),
    ]
    assert faults(write(tmp_path, {4: rows})) == [("wrong version", 4, sentence)]


def test_later_updates_of_a_step_start_from_the_same_version(tmp_path):
    """[Note: versions]: the trainer version is that of the step, whichever of its updates it is."""
    writer = LedgerWriter(tmp_path, 4)
    for trigger in range(3):
        writer.write(4, trigger, [sequence(f"u{trigger}", 0, 4, span(4, 3))])
    assert faults(tmp_path) == []
    summary = LedgerAnalysis(read_ledger(tmp_path)).summary()
    assert (summary.num_steps, summary.num_updates) == (1, 3)
    writer.write(5, 2, [sequence("late", 0, 5, span(4, 3), trainer_version=5)])
    (fault,) = faults(tmp_path)
    assert fault[2] == "late_0_0 says that step 5, update 2 started from version 5, not 4"


# A token-by-token account

sampled_spans = st.builds(
    lambda n, ends: span(n, *ends),
    st.integers(1, 3),
    st.one_of(st.just((None,)), st.tuples(st.integers(0, 3), st.integers(0, 3)).map(sorted)),
)
span_lists = st.lists(sampled_spans | st.builds(observed, st.integers(1, 3)), max_size=3)


@st.composite
def tables(draw) -> list[dict[str, Any]]:
    rows = []
    for step in sorted(draw(st.lists(st.integers(4, 7), min_size=1, max_size=6))):
        spans = draw(span_lists)
        loss = draw(st.sampled_from([{}, {"num_loss_tokens": 0}]))
        row = sequence("u", len(rows), step, *spans, **loss)
        if draw(st.booleans()):
            row = no_record("u", len(rows), step, 4, **loss)
        rows.append({**row, "step": step, "trigger": draw(st.integers(0, 1))})
    return rows


def tokens_of(rows) -> list[dict[str, Any]]:
    """One entry per sampled token."""
    found = []
    for row in rows:
        spans = row["spans"] if row["spans"] is not None else [span(4, None)]
        for one in spans:
            start, end = one["version_start"], one["version_end"]
            token = {"step": row["step"], "session": row["session"], "start": start, "end": end}
            token["age"] = None if start is None else row["step"] - 1 - start
            token["trained"] = row["num_loss_tokens"] > 0
            found += [token] * (one["num_tokens"] if one["is_sampled"] else 0)
    return found


@settings(max_examples=60)
@given(tables())
def test_counts_against_an_account_token_by_token(rows):
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    analysis = LedgerAnalysis(
        Ledger(directory=Path("."), table=table, launches=(), num_superseded=0)
    )
    tokens = tokens_of(rows)
    summary = analysis.summary()
    assert summary.num_sampled_tokens == len(tokens)
    ages = Counter(token["age"] for token in tokens)
    assert summary.num_missing_tokens == ages.pop(None, 0)
    counted = {c.age: c.num_clean_tokens + c.num_mixed_tokens for c in summary.staleness}
    assert counted == ages
    assert summary.num_updates == len({(row["step"], row["trigger"]) for row in rows})
    assert [origin.step for origin in analysis.steps()] == sorted({row["step"] for row in rows})
    for origin in analysis.steps():
        own = [token for token in tokens if token["step"] == origin.step]
        known = [token for token in own if token["age"] is not None]
        assert origin.num_sampled_tokens == len(own)
        assert origin.num_updates == len({r["trigger"] for r in rows if r["step"] == origin.step})
        assert origin.num_sequences == sum(row["step"] == origin.step for row in rows)
        assert origin.oldest_version == min((t["start"] for t in known), default=None)
        assert origin.newest_version == max((t["end"] for t in known), default=None)
        if known:
            assert origin.mean_staleness == pytest.approx(np.mean([t["age"] for t in known]))
        sources = analysis.sources(origin.step)
        assert {(s.version_start, s.version_end): s.num_sampled_tokens for s in sources} == Counter(
            (token["start"], token["end"]) for token in own
        )
        for source in sources:
            pair = source.version_start, source.version_end
            using = {(t["session"], t["trained"]) for t in own if (t["start"], t["end"]) == pair}
            assert source.num_sequences == len(using)
            assert source.num_trained_sequences == sum(trained for _, trained in using)
    for version in range(4):
        part = [t for t in tokens if t["age"] is not None and t["start"] <= version <= t["end"]]
        if not part:
            with pytest.raises(QuestionError, match=f"--version={version} sampled nothing"):
                analysis.reach(version)
            continue
        reach = analysis.reach(version)
        assert {r.step: r.num_clean_tokens + r.num_mixed_tokens for r in reach} == Counter(
            token["step"] for token in part
        )
        assert sum(r.num_sequences for r in reach) == len({t["session"] for t in part})
    steps, shares = analysis.staleness_by_step(2)
    for index, step in enumerate(steps.tolist()):
        own = [token for token in tokens if token["step"] == step]
        if own:
            assert sum(share[index] for share in shares.values()) == pytest.approx(1)
    kinds = Counter(
        "missing" if t["age"] is None else "mixed" if t["start"] < t["end"] else min(t["age"], 2)
        for t in tokens
    )
    names = {0: "age 0", 1: "age 1", 2: "age 2 or more"}
    assert set(shares) == {names.get(kind, kind) for kind in kinds}


def test_a_long_run_is_summarised_in_seconds():
    """A bound that only a loop over sequences breaks."""
    num_rows = 200 * 1024
    numbers = np.arange(num_rows)
    base = pa.Table.from_pylist(
        [sequence("u", i, 1, span(90, 0), observed(9), span(9, 0, 0)) for i in range(64)],
        schema=SCHEMA,
    ).take(numbers % 64)
    steps = 1 + numbers // 1024
    for name, values in (
        ("uid", pa.array([f"{number:032x}" for number in (numbers // 16).tolist()])),
        ("step", pa.array(steps, pa.int32())),
        ("trigger", pa.array(steps * 0, pa.int32())),
        ("trainer_version", pa.array(steps - 1, pa.int64())),
        ("old_log_prob_step", pa.array(steps, pa.int64())),
    ):
        base = base.set_column(base.schema.get_field_index(name), SCHEMA.field(name), values)
    ledger = Ledger(directory=Path("."), table=base, launches=(), num_superseded=0)
    began = time.perf_counter()
    report = make_report(LedgerAnalysis(ledger), step=7, version=0)
    assert time.perf_counter() - began < 10
    assert report.summary.num_sequences == num_rows
    assert report.faults == ()


# The command


def invoke(*arguments):
    return CliRunner().invoke(app, ["provenance", *(str(argument) for argument in arguments)])


def as_json(*arguments, status: int = 0) -> dict[str, Any]:
    result = invoke(*arguments, "--json")
    assert result.exit_code == status, result.output

    def refuse(name: str):
        raise AssertionError(f"{name} is not JSON")

    return json.loads(result.stdout, parse_constant=refuse)


def refusal(*arguments) -> str:
    """The one sentence in which the command ends when it cannot be carried out."""
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    return line


def test_json(ledger):
    record = as_json(ledger)
    assert set(record) == {"ok", "summary", "steps", "mismatch", "faults"}
    assert record["ok"] is True and record["faults"] == []
    assert record["summary"]["num_sampled_tokens"] == 53
    assert [step["step"] for step in record["steps"]] == [1, 2, 3]
    # Where nothing could be measured.
    assert record["mismatch"][0]["lowest_pearson"] is None
    record = as_json(ledger.parent, "--step", 2, "--version", 1, "--uid", "b0")
    assert record["step"]["step"] == 2 and len(record["step"]["sources"]) == 4
    assert record["version"]["version"] == 1 and len(record["version"]["steps"]) == 1
    assert record["group"]["uid"] == "b0"
    first = record["group"]["sequences"][0]
    assert first["spans"][2] == {
        "num_tokens": 4,
        "version_start": 0,
        "version_end": 1,
        "is_sampled": True,
    }
    assert (first["session"], first["mini_batches"], first["action"]) == (0, [0], "warn")
    assert record["group"]["sequences"][1]["pearson"] is None


def test_for_people(ledger):
    result = invoke(ledger, "--step", "2", "--version", "1", "--uid", "b0")
    assert result.exit_code == 0
    for text in (
        "staleness of sampled tokens",
        "which versions fed which step",
        "versions that fed step 2",
        "steps that version 1 reached",
        "group b0",
        "ok: no faults",
    ):
        assert text in result.stdout
    assert result.stdout.isascii()


def test_a_group_of_several_updates_is_in_order(tmp_path):
    writer = LedgerWriter(tmp_path, 4)
    for trigger in (1, 0):
        writer.write(4, trigger, [sequence("u", 5 * trigger + i, 4, span(4, 3)) for i in (1, 0)])
    lineage = as_json(tmp_path, "--uid", "u")["group"]["sequences"]
    assert [(s["trigger"], s["session"]) for s in lineage] == [(0, 0), (0, 1), (1, 5), (1, 6)]


def test_faults_have_a_status_of_their_own(tmp_path):
    rows = [sequence(f"u{i}", 0, 4, span(4, 9)) for i in range(30)]
    write(tmp_path, {4: rows})
    record = as_json(tmp_path, status=1)
    assert record["ok"] is False
    assert len(record["faults"]) == 30
    assert record["faults"][0] == {
        "kind": "wrong version",
        "step": 4,
        "uid": "u0",
        "session": 0,
        "output": 0,
        "sentence": "u0_0_0 has tokens of version 9, from after its trainer's (trainer version 3, "
        "step 4)",
    }
    result = invoke(tmp_path)
    assert result.exit_code == 1
    assert "FAILED: faults: 30" in result.stdout
    assert "10 more are not shown" in result.stdout


def test_a_long_run_shows_its_last_steps(tmp_path):
    write(tmp_path, {step: [sequence(f"u{step}", 0, step, span(4, 0))] for step in range(1, 15)})
    result = invoke(tmp_path)
    assert "4 earlier steps are not shown" in result.stdout
    assert len(as_json(tmp_path)["steps"]) == 14


def test_an_empty_ledger(tmp_path):
    LedgerWriter(tmp_path, 1)
    record = as_json(tmp_path, "--html", tmp_path / "page.html")
    assert record["summary"]["num_sequences"] == 0
    assert record["summary"]["clean_fraction"] is None
    assert record["steps"] == record["mismatch"] == []
    assert "<img" not in (tmp_path / "page.html").read_text()
    assert "ok: no faults" in invoke(tmp_path).stdout
    assert "which holds no step" in refusal(tmp_path, "--step", 1)
    assert "which holds none" in refusal(tmp_path, "--version", 1)


def test_what_cannot_be_carried_out(ledger, tmp_path):
    LedgerWriter(tmp_path / "two" / "provenance", 1)
    for arguments, message in (
        (("/no/such",), "/no/such holds no provenance ledger"),
        ((tmp_path,), "holds more than one provenance ledger"),
        ((ledger, "--step", 9), "--step=9 is not in the ledger, which holds 1 to 3"),
        ((ledger, "--version", 7), "--version=7 sampled nothing in the ledger, which holds versi"),
        ((ledger, "--uid", "b"), "--uid=b begins 2 uids (b0, b1): say more"),
        ((ledger, "--uid", "x"), "--uid=x is not in the ledger"),
        ((ledger, "--html", tmp_path / "no" / "page.html"), "page.html cannot be written"),
        ((ledger, "--html", tmp_path), "cannot be written (Is a directory): name a file"),
    ):
        assert message in refusal(*arguments)
    file = next(ledger.glob("step=*/*.parquet"))
    file.write_bytes(file.read_bytes()[:100])
    assert f"{file} is damaged" in refusal(ledger)


def test_a_missing_library_is_named(ledger, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "prefixflow_verl.ledger_pages", raising=False)
    assert "pip install prefixflow_verl[bench]" in refusal(ledger, "--html", tmp_path / "page.html")
    assert invoke(ledger).exit_code == 0
    for name in ("ledger", "ledger_report"):
        monkeypatch.delitem(sys.modules, f"prefixflow_verl.{name}")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "pip install pyarrow" in refusal(ledger)


# The page


class Tags(HTMLParser):
    """Every tag with its attributes, and all text outside of style sheets."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.text: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text.append(data)


def page_of(directory: Path, *arguments, status: int = 0) -> str:
    file = directory.parent / "page.html"
    result = invoke(directory, "--html", file, *arguments)
    assert result.exit_code == status, result.output
    return file.read_text(encoding="utf-8")


def test_a_page_needs_nothing_else(ledger):
    page = page_of(ledger)
    tags = Tags(page).tags
    images = [attributes for tag, attributes in tags if tag == "img"]
    assert len(images) == 3
    for attributes in images:
        assert attributes["src"].startswith("data:image/png;base64,iVBORw0KGgo")
    assert {tag for tag, _ in tags}.isdisjoint({"script", "link", "iframe", "object", "embed"})
    without_images = re.sub(r"data:image/png;base64,[A-Za-z0-9+/=]*", "", page)
    for outside in ("http", "//", "url(", "@import"):
        assert outside not in without_images


def test_a_page_shows_the_group_that_was_asked_for(ledger):
    text = Tags(page_of(ledger)).text
    assert "Versions in group b0" in text and "group b0" in text
    text = Tags(page_of(ledger, "--uid", "a")).text
    assert "Versions in group a" in text and "group a" in text
    assert not any("group b0" in part for part in text)


HOSTILE = '<script>alert("1")</script> & $x^{$ \' \\ <img src=x>'


def test_text_of_the_ledger_stays_text(tmp_path):
    directory = tmp_path / "provenance"
    rows = [
        sequence(HOSTILE, 0, 4, span(4, 9), action="<b>", reasons=["<i>"], **MEASURED),
        sequence(HOSTILE, 1, 4, span(4, 3), **MEASURED),
    ]
    write(directory, {4: rows})
    page = page_of(directory, status=1)
    tags = Tags(page)
    assert {tag for tag, _ in tags.tags} <= {
        *("html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "img"),
        *("table", "tr", "th", "td"),
    }
    assert all(attributes.get("src") != "x" for _, attributes in tags.tags)
    assert f"group {HOSTILE}" in tags.text
    assert f"{HOSTILE}_0_0 has tokens of version 9" in "".join(tags.text)
    assert "<b> <i>" in tags.text


def test_a_page_of_odd_ledgers(tmp_path):
    """No mismatch, gaps between steps, sequences without tokens, more of them than fit."""
    rows = [sequence("u", i, 40, span(i, 3)) for i in range(70)]
    write(tmp_path / "odd", {1: [no_record("v", 0, 1, 5)], 40: rows})
    page = page_of(tmp_path / "odd")
    assert page.count("<img") == 2
    assert "No sequence has both behaviour and old log-probs." in page
