"""Part of the provenance link: tokens are labelled with the weights they depend on."""

from prefixflow_verl.provenance import PolicySpan
from prefixflow_verl.version_stamps import RequestStamp, VersionTracker


def span(num_tokens: int, start: int | None, end: int | None) -> PolicySpan:
    return PolicySpan(num_tokens=num_tokens, version_start=start, version_end=end)


def tracker_at(version: int | None) -> VersionTracker:
    tracker = VersionTracker()
    if version is not None:
        tracker.finish(version)
    return tracker


def test_a_request_between_moves_is_clean():
    stamp = RequestStamp(tracker_at(0))
    stamp.saw(3)
    stamp.saw(5)
    assert stamp.spans() == (span(5, 0, 0),)


def test_tokens_from_the_moves_begin_on_are_mixed():
    tracker = tracker_at(3)
    stamp = RequestStamp(tracker)
    stamp.saw(4)
    tracker.begin(4)
    stamp.saw(6)
    tracker.finish(4)
    # Sampled by version 4 alone, but over keys of version 3.
    stamp.saw(9)
    assert stamp.spans() == (span(4, 3, 3), span(5, 3, 4))


def test_a_request_that_starts_during_a_move_is_mixed_to_its_end():
    tracker = tracker_at(3)
    tracker.begin(4)
    stamp = RequestStamp(tracker)
    stamp.saw(2)
    tracker.finish(4)
    stamp.saw(5)
    assert stamp.spans() == (span(5, 3, 4),)
    after = RequestStamp(tracker)
    after.saw(1)
    assert after.spans() == (span(1, 4, 4),)


def test_two_moves_under_one_request():
    tracker = tracker_at(1)
    stamp = RequestStamp(tracker)
    for version in (2, 3):
        tracker.begin(version)
        tracker.finish(version)
        stamp.saw(10 * version)
    assert stamp.spans() == (span(20, 1, 2), span(10, 1, 3))


def test_nothing_is_known_before_the_first_version_or_of_an_unannounced_move():
    tracker = tracker_at(None)
    stamp = RequestStamp(tracker)
    stamp.saw(2)
    tracker.finish(7)
    assert stamp.spans() == (span(2, None, None),)
    tracker.begin(None)
    during = RequestStamp(tracker)
    during.saw(3)
    assert [s.kind for s in during.spans()] == ["missing"]
    tracker.begin(8)
    during.saw(4)
    assert during.spans()[1] == span(1, 7, 8)


def test_labels_tell_every_state_apart():
    tracker = tracker_at(7)
    labels = [tracker.label]
    tracker.begin(8)
    labels.append(tracker.label)
    tracker.finish(8)
    assert [*labels, tracker.label] == ["7", "7->8", "8"]


def test_salts_change_at_both_ends_of_a_move_and_never_repeat():
    tracker = tracker_at(0)
    salts = [tracker.num_changes]
    for version in (1, 1, 2):
        tracker.begin(version)
        salts.append(tracker.num_changes)
        tracker.finish(version)
        salts.append(tracker.num_changes)
    tracker.finish(3)
    salts.append(tracker.num_changes)
    assert len(set(salts)) == len(salts)


def test_the_same_version_again_is_a_move_too():
    tracker = tracker_at(5)
    stamp = RequestStamp(tracker)
    tracker.finish(6)
    stamp.saw(1)
    assert stamp.spans() == (span(1, 5, 6),)


def test_distrust_forgets_every_version():
    stamp = RequestStamp(tracker_at(2))
    stamp.saw(3)
    stamp.distrust()
    assert stamp.spans() == (span(3, None, None),)


def test_weights_that_came_back_leave_versions_unknown():
    """Keys of the version in between may still be there, and nobody knows how far it got."""
    tracker = tracker_at(3)
    stamp = RequestStamp(tracker)
    stamp.saw(2)
    for version in (4, 3):
        tracker.begin(version)
        tracker.finish(version)
    stamp.saw(5)
    assert stamp.spans() == (span(2, 3, 3), span(3, None, None))


def test_older_weights_give_a_span_from_old_to_new():
    tracker = tracker_at(5)
    stamp = RequestStamp(tracker)
    tracker.begin(3)
    tracker.finish(3)
    stamp.saw(4)
    assert stamp.spans() == (span(4, 3, 5),)


def test_a_move_that_ends_inside_another_does_not_end_it():
    tracker = tracker_at(3)
    tracker.begin(4)
    tracker.begin(5)
    tracker.finish(4)
    assert tracker.is_moving
    stamp = RequestStamp(tracker)
    stamp.saw(2)
    tracker.finish(5)
    assert stamp.spans() == (span(2, 4, 5),)
    assert not tracker.is_moving


def test_the_same_label_again_changes_nothing():
    tracker = tracker_at(3)
    stamp = RequestStamp(tracker)
    tracker.finish(3)
    stamp.saw(2)
    assert stamp.spans() == (span(2, 3, 3),)
