"""First link of the provenance chain: spans of a response, checks of a record and the rules, each
against a token-by-token account of the same thing.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixflow_verl.config import ProvenanceOptions
from prefixflow_verl.provenance import (
    KINDS,
    MAX_LOG_RATIO,
    Generation,
    PolicyRecord,
    PolicySpan,
    ProvenanceError,
    check_record,
    digest_tokens,
    judge,
    merge_spans,
    mismatch,
    spans_of_response,
    token_kinds,
    token_staleness,
)

TRAINER_VERSION = 9


def span(num_tokens: int, start: int | None = None, end: int | None = None) -> PolicySpan:
    return PolicySpan(
        num_tokens=num_tokens, version_start=start, version_end=start if end is None else end
    )


def observed(num_tokens: int) -> PolicySpan:
    return PolicySpan(num_tokens=num_tokens, is_sampled=False)


def origins(spans) -> list[tuple]:
    """The spans, one entry per token."""
    return [
        (s.version_start, s.version_end, s.is_sampled) for s in spans for _ in range(s.num_tokens)
    ]


def record_of(spans, response_ids=None, uid="u") -> PolicyRecord:
    num_tokens = sum(s.num_tokens for s in spans)
    response_ids = range(num_tokens) if response_ids is None else response_ids
    return PolicyRecord(
        uid=uid, session=2, output=0, digest=digest_tokens(response_ids), spans=tuple(spans)
    )


versions = st.integers(0, TRAINER_VERSION)
sampled_spans = st.one_of(
    st.builds(span, st.integers(1, 4)),
    st.builds(span, st.integers(1, 4), versions),
    st.builds(
        lambda n, ends: span(n, *sorted(ends)), st.integers(1, 4), st.tuples(versions, versions)
    ),
)
all_spans = st.one_of(sampled_spans, st.builds(observed, st.integers(1, 4)))


@pytest.mark.parametrize(
    "one, kind",
    [
        (span(1, 3), "clean"),
        (span(1, 3, 4), "mixed"),
        (span(1), "missing"),
        (PolicySpan(num_tokens=1, version_start=3), "missing"),
        (PolicySpan(num_tokens=1, version_end=3), "missing"),
        (observed(1), "observation"),
        (span(1, 0), "clean"),
    ],
)
def test_kind_of_a_span(one, kind):
    assert one.kind == kind


@given(st.lists(st.one_of(all_spans, st.just(span(0, 3)))))
def test_merging_keeps_every_token_and_joins_what_is_alike(spans):
    merged = merge_spans(spans)
    assert origins(merged) == origins(spans)
    assert all(s.num_tokens > 0 for s in merged)
    for left, right in zip(merged, merged[1:], strict=False):
        assert replace(left, num_tokens=1) != replace(right, num_tokens=1)


@st.composite
def trajectories(draw):
    """(generations, response ids, mask, origin of each token): turns with tool results, cut to a
    length. Token ids are all different, so that there is one right answer."""
    token = iter(range(1000))
    generations, ids, mask, truth = [], [], [], []
    for spans in draw(st.lists(st.lists(sampled_spans, min_size=1, max_size=3), max_size=4)):
        num_tokens = sum(s.num_tokens for s in spans)
        token_ids = tuple(next(token) for _ in range(num_tokens))
        generations.append(Generation(token_ids=token_ids, spans=tuple(spans)))
        observation = [next(token) for _ in range(draw(st.integers(0, 2)))]
        ids += [*token_ids, *observation]
        mask += [1] * num_tokens + [0] * len(observation)
        truth += origins(spans) + [(None, None, False)] * len(observation)
    length = draw(st.integers(0, len(ids)))
    return generations, ids[:length], mask[:length], truth[:length]


@given(trajectories())
def test_a_response_gets_the_origin_of_every_token(trajectory):
    generations, ids, mask, truth = trajectory
    spans = spans_of_response(ids, mask, generations)
    assert origins(spans) == truth
    assert spans == merge_spans(spans)


@given(trajectories(), st.data())
def test_a_rewritten_token_leaves_versions_unknown(trajectory, data):
    generations, ids, mask, _ = trajectory
    sampled = [place for place, is_sampled in enumerate(mask) if is_sampled]
    if not sampled:
        return
    ids[data.draw(st.sampled_from(sampled))] = 5000
    found = origins(spans_of_response(ids, mask, generations))
    assert found == [(None, None, bool(is_sampled)) for is_sampled in mask]


def test_an_agent_may_hand_in_its_last_turns_only():
    first = Generation(token_ids=(5, 6), spans=(span(2, 1),))
    second = Generation(token_ids=(7, 8), spans=(span(2, 2),))
    assert spans_of_response([7, 8], [1, 1], [first, second]) == (span(2, 2),)
    # Not a run of whole generations: nobody knows which 6 this is.
    assert spans_of_response([6, 7, 8], [1, 1, 1], [first, second]) == (span(3),)
    assert spans_of_response([5, 6, 7, 8, 9], [1] * 5, [first, second]) == (span(5),)


def test_an_aborted_generation_without_tokens_is_passed_over():
    generations = [
        Generation(token_ids=(5,), spans=(span(1, 1),)),
        Generation(token_ids=(), spans=()),
        Generation(token_ids=(6,), spans=(span(1, 2),)),
    ]
    assert spans_of_response([5, 6], [1, 1], generations) == (span(1, 1), span(1, 2))


def test_a_response_of_observations_needs_no_generation():
    assert spans_of_response([5, 6], [0, 0], []) == (observed(2),)
    assert spans_of_response([], [], []) == ()
    assert spans_of_response([5], [1], []) == (span(1),)


GOOD = record_of([span(3, 4), observed(2), span(1, 4, 5)])


def check(record=GOOD, **changed):
    arguments = {
        "uid": "u",
        "response_ids": np.arange(6),
        "response_mask": np.array([1, 1, 1, 0, 0, 1]),
        "trainer_version": 5,
    }
    check_record(record, **arguments | changed)


def test_a_good_record_passes():
    check()
    check(uid=None)
    check(response_mask=np.array([0, 1, 0, 0, 0, 0]))
    check(record_of([span(6)]), trainer_version=0)


@pytest.mark.parametrize(
    "record, changed, sentence",
    [
        (GOOD, {"uid": "v"}, "the policy record of u_2_0 is attached to a row of uid v"),
        (GOOD, {"response_ids": np.arange(7)}, "cover 6 tokens, its response has 7"),
        (GOOD, {"response_ids": np.arange(6)[::-1]}, "was made for other response tokens"),
        (GOOD, {"trainer_version": 4}, "name version 5, but the trainer is at version 4"),
        (record_of([span(6, 7)]), {}, "name version 7, but the trainer is at version 5"),
        (record_of([span(6, -1)]), {}, "name version -1 < 0"),
        (record_of([span(6, -1)]), {"trainer_version": None}, "name version -1 < 0"),
        (GOOD, {"response_mask": np.ones(6)}, "response_mask of u_2_0 trains on tokens that"),
    ],
)
def test_a_record_that_contradicts_its_row(record, changed, sentence):
    with pytest.raises(ProvenanceError, match=sentence):
        check(record, **changed)


def test_without_a_trainer_version_none_is_too_new():
    check(record_of([span(6, 70)]), trainer_version=None)


@given(st.lists(all_spans))
def test_kinds_and_staleness_of_every_token(spans):
    record = record_of(spans)
    kinds, (best, worst) = token_kinds(record), token_staleness(record, TRAINER_VERSION)
    expected = [s for s in spans for _ in range(s.num_tokens)]
    assert len(kinds) == len(best) == len(worst) == len(expected)
    for kind, youngest, oldest, one in zip(kinds, best, worst, expected, strict=True):
        assert KINDS[kind] == one.kind
        if one.kind in ("missing", "observation"):
            assert math.isnan(youngest) and math.isnan(oldest)
        else:
            assert youngest == TRAINER_VERSION - one.version_end
            assert oldest == TRAINER_VERSION - one.version_start
            assert youngest <= oldest


@given(st.lists(all_spans))
def test_a_record_survives_the_wire(spans):
    record = record_of(spans)
    wire = record.to_wire()
    assert PolicyRecord.from_wire(wire) == record
    # Msgpack and JSON make lists of tuples.
    assert PolicyRecord.from_wire(wire | {"spans": [list(s) for s in wire["spans"]]}) == record


@pytest.mark.parametrize(
    "change",
    [{"spans": [(1, 2)]}, {"spans": None}, {"session": "x"}, {"digest": None}, {"session": None}],
)
def test_what_is_no_record_is_refused(change):
    with pytest.raises(ProvenanceError, match="not a policy record"):
        PolicyRecord.from_wire(GOOD.to_wire() | change)


@given(st.lists(st.integers(0, 2**31), max_size=20))
def test_a_digest_fits_a_signed_column_whatever_the_integers_are(token_ids):
    digest = digest_tokens(token_ids)
    assert 0 <= digest < 2**63
    assert digest == digest_tokens(np.asarray(token_ids, dtype=np.uint32))
    assert digest != digest_tokens([*token_ids, 0])
    assert (digest == digest_tokens(token_ids[::-1])) == (token_ids == token_ids[::-1])


RULES = ("stale", "mixed", "missing")


def breaks(rule: str, one: PolicySpan, options: ProvenanceOptions) -> bool:
    """Whether a token of this span is what a rule is about."""
    if rule != "stale":
        return one.kind == rule
    known = one.kind != "observation" and one.version_start is not None
    limit = options.max_staleness
    return known and limit is not None and TRAINER_VERSION - one.version_start > limit


@st.composite
def updates(draw):
    """(records, masks, uids, options) of up to five rows of two groups."""
    records, masks, uids = [], [], []
    for _ in range(draw(st.integers(1, 5))):
        spans = draw(st.lists(all_spans, min_size=1, max_size=4))
        uid = draw(st.sampled_from("ab"))
        records.append(draw(st.sampled_from([record_of(spans, uid=uid), None])))
        is_sampled = [s.is_sampled for s in spans for _ in range(s.num_tokens)]
        size = len(is_sampled)
        in_loss = draw(st.lists(st.booleans(), min_size=size, max_size=size))
        masks.append(np.logical_and(is_sampled, in_loss).astype(np.int64))
        uids.append(uid)
    actions = {
        f"on_{rule}": draw(st.sampled_from(["mask", "drop_group", "warn"])) for rule in RULES
    }
    limit = draw(st.one_of(st.none(), versions))
    return records, masks, uids, ProvenanceOptions(max_staleness=limit, **actions)


@given(updates())
def test_rules_against_an_account_token_by_token(update):
    records, masks, uids, options = update
    verdicts = judge(records, masks, uids, TRAINER_VERSION, options)
    broken, named = [], []
    for record, mask in zip(records, masks, strict=True):
        spans = (span(len(mask)),) if record is None else record.spans
        tokens = [one for one in spans for _ in range(one.num_tokens)]
        found = {rule: [breaks(rule, one, options) for one in tokens] for rule in RULES}
        broken.append({rule for rule in RULES if any(np.array(found[rule]) & (mask > 0))})
        named.append(found)
    dropped = {
        uid
        for uid, rules in zip(uids, broken, strict=True)
        if any(options.action_of(rule) == "drop_group" for rule in rules)
    }
    for verdict, uid, rules, found in zip(verdicts, uids, broken, named, strict=True):
        assert set(verdict.reasons) == rules
        masking = [rule for rule in rules if options.action_of(rule) == "mask"]
        keep = ~np.any([np.zeros(len(verdict.keep), bool), *(found[r] for r in masking)], axis=0)
        if uid in dropped:
            assert verdict.action == "drop_group"
            assert not verdict.keep.any()
            continue
        assert verdict.keep.tolist() == keep.tolist()
        assert verdict.action == ("mask" if masking else "warn" if rules else "train")


def test_the_oldest_version_of_a_mix_counts_and_the_limit_itself_is_allowed():
    options = ProvenanceOptions(max_staleness=2, on_stale="mask")
    records = [record_of([span(2, 7)]), record_of([span(2, 6, 9)]), record_of([span(2, 6)])]
    verdicts = judge(records, [np.ones(2)] * 3, ["a"] * 3, TRAINER_VERSION, options)
    assert [verdict.keep.tolist() for verdict in verdicts] == [[True] * 2, [False] * 2, [False] * 2]
    assert "stale" in verdicts[1].reasons and "mixed" in verdicts[1].reasons


@pytest.mark.parametrize(
    "rule, bad, sentence",
    [
        ("stale", [span(3, 4)], "3 loss tokens of u_2_0 were sampled more than 2 versions ago"),
        ("mixed", [span(3, 8, 9)], "3 loss tokens of u_2_0 were sampled while the weights changed"),
        ("missing", [span(3)], "3 loss tokens of u_2_0 do not say which policy version"),
        ("missing", None, "3 loss tokens of a row of uid u do not say which policy version"),
    ],
)
def test_an_error_rule_names_tokens_row_and_setting(rule, bad, sentence):
    options = ProvenanceOptions(max_staleness=2, **{f"on_{rule}": "error"})
    record = None if bad is None else record_of(bad)
    with pytest.raises(ProvenanceError, match=sentence) as error:
        judge([record], [np.ones(3)], ["u"], TRAINER_VERSION, options)
    assert f"prefixflow.provenance.on_{rule}=error stops the run" in str(error.value)
    # A token without loss breaks no rule.
    (verdict,) = judge([record], [np.zeros(3)], ["u"], TRAINER_VERSION, options)
    assert verdict.action == "train" and verdict.keep.all()


log_probs = st.floats(-30, 0, allow_nan=False)


@given(st.lists(st.tuples(log_probs, log_probs), min_size=1, max_size=12))
def test_mismatch_is_the_formula(pairs):
    behaviour, old = (list(column) for column in zip(*pairs, strict=True))
    found = mismatch(np.array(behaviour), np.array(old))
    differences = [
        max(-MAX_LOG_RATIO, min(MAX_LOG_RATIO, o - b)) for b, o in zip(behaviour, old, strict=True)
    ]
    k3 = sum(math.exp(d) - d - 1 for d in differences) / len(pairs)
    assert found.k3 == pytest.approx(k3, rel=1e-9, abs=1e-12)
    assert found.k3 >= 0
    assert found.max_ratio == pytest.approx(max(math.exp(abs(d)) for d in differences))


def test_mismatch_by_hand():
    found = mismatch(np.log([0.5, 0.25, 0.5]), np.log([0.25, 0.5, 0.5]))
    k3 = ((0.5 + math.log(2) - 1) + (2 - math.log(2) - 1) + 0) / 3
    assert found.k3 == pytest.approx(k3)
    assert found.max_ratio == pytest.approx(2)
    assert found.pearson == pytest.approx(-0.5)


def test_mismatch_where_there_is_little_to_measure():
    assert mismatch(np.array([]), np.array([])) is None
    assert math.isnan(mismatch(np.array([-1.0]), np.array([-2.0])).pearson)
    assert math.isnan(mismatch(np.array([-1.0, -1.0]), np.array([-2.0, -3.0])).pearson)
    same = mismatch(np.array([-1.0, -2.0]), np.array([-1.0, -2.0]))
    assert (same.k3, same.max_ratio, same.pearson) == (0, 1, pytest.approx(1))
    # float32 in, and far apart: clamped, not infinite.
    far = mismatch(np.array([-200.0], np.float32), np.array([0.0], np.float32))
    assert far.max_ratio == pytest.approx(math.exp(MAX_LOG_RATIO))


@pytest.mark.parametrize("second", [1, 2])
def test_a_response_that_two_generations_fit_is_guessed_from_neither(second):
    generations = [
        Generation(token_ids=(5, 5), spans=(span(2, 1, 1),)),
        Generation(token_ids=(5, 5, 7), spans=(span(3, second, second),)),
    ]
    found = spans_of_response([5, 5], [1, 1], generations)
    assert found == (span(2, 1, 1) if second == 1 else span(2),)


def test_a_generation_is_covered_by_its_spans():
    with pytest.raises(ProvenanceError, match="3 tokens do not cover a generation of 2"):
        Generation(token_ids=(1, 2), spans=(span(3, 0, 0),))


def test_a_half_known_span_has_no_staleness():
    half = PolicySpan(num_tokens=2, version_start=1)
    _, worst = token_staleness(record_of([half, span(1, 1, 1)]), 4)
    assert np.isnan(worst[:2]).all() and worst[2] == 3


def test_a_span_that_goes_backwards_is_refused():
    with pytest.raises(ProvenanceError, match="goes back from version 2 to 1"):
        backwards = record_of([span(3, 2, 1)])
        check_record(
            backwards,
            uid=None,
            response_ids=np.arange(3),
            response_mask=np.ones(3),
            trainer_version=4,
        )


@pytest.mark.parametrize(
    "wire",
    [[0, 1, 1, True], [-1, 1, 1, True], [1, 1.5, 1, True], [1, "3", 1, True], [1, 1, 1, "False"]]
    + [[1, float("nan"), 1, True], [1, 2**64, 2**64, True]],
)
def test_a_span_of_other_values_is_refused(wire):
    record = record_of([span(1, 1, 1)]).to_wire() | {"spans": [wire]}
    with pytest.raises(ProvenanceError, match="not a policy record"):
        PolicyRecord.from_wire(record)
