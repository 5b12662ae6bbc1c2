"""Which weights a rollout engine holds, over time, and what that says about a request's tokens.

[Note: weights move under running requests]
Loading weights takes a while, and neither verl nor vLLM keeps requests out of that while in every
mode. So a `VersionTracker` knows three states: version v; on the way from v to w; version w. It is
told *before* the first weight moves and after the last one has, in the process that hands out
tokens. A token handed out before the move began was sampled by v alone: clean. Any token a request
hands out after the move began is mixed, even long after the move has ended, because it attends to
keys that v computed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from prefixflow_verl.provenance import PolicySpan, merge_spans


@dataclass(slots=True, kw_only=True)
class VersionTracker:
    """Versions that one rollout engine has held."""

    version: int | None = None
    """Version held now, or held before the move that is under way; None if never told."""
    target: int | None = None
    """Version the move will end with; None if there is no move, or its end is not known yet."""
    is_moving: bool = False
    num_changes: int = 0
    """Moves begun and ended so far."""

    @property
    def label(self) -> str:
        """Name of the state, unlike that of any other: `7`, or `7->8` during a move."""
        return f"{self.version}->{self.target}" if self.is_moving else str(self.version)

    def begin(self, target: int | None) -> None:
        """Weights are about to move; `target` is the version they will be, if known."""
        if self.is_moving and None in (self.target, target):
            # The same move, announced twice: once without its version.
            self.target = target if self.target is None else self.target
            return
        self.target = max(target, self.target) if self.is_moving else target
        self.is_moving = True
        self.num_changes += 1

    def finish(self, version: int) -> None:
        """All weights are those of `version`, unless a move to a newer one has begun since."""
        if self.is_moving and self.target is not None and self.target > version:
            self.version = version
            self.num_changes += 1
            return
        if not self.is_moving:
            if version == self.version:
                return
            # A relabelling without a move that was announced.
            self.num_changes += 1
        self.version, self.target, self.is_moving = version, None, False
        self.num_changes += 1


@dataclass(slots=True)
class RequestStamp:
    """Origin of the tokens of one running request.

    Args:
        tracker: of the engine that runs it; read when the stamp is made and at every `saw`.
    """

    tracker: VersionTracker
    _opened_at: int = field(init=False)
    _began_in_move: bool = field(init=False)
    _opened_with: int | None = field(init=False)
    _num_tokens: int = field(default=0, init=False)
    # Of runs of tokens: [first token, oldest version, newest]. A token costs no object.
    _runs: list[tuple[int, int | None, int | None]] = field(default_factory=list, init=False)
    _is_trusted: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        self._opened_at = self.tracker.num_changes
        self._began_in_move = self.tracker.is_moving
        self._opened_with = self.tracker.version

    def saw(self, num_tokens: int) -> None:
        """The engine has handed out `num_tokens` tokens in total."""
        versions = (self._opened_with, self._opened_with)
        if self._began_in_move or self.tracker.num_changes != self._opened_at:
            versions = self._versions_since()
        if num_tokens > self._num_tokens and (not self._runs or self._runs[-1][1:] != versions):
            self._runs.append((self._num_tokens, *versions))
        self._num_tokens = num_tokens

    def _versions_since(self) -> tuple[int | None, int | None]:
        """Oldest and newest version since the request began, now that weights have moved."""
        tracker = self.tracker
        now = tracker.target if tracker.is_moving else tracker.version
        if now is None or now == self._opened_with:
            # Where they were in between is not known.
            return self._opened_with if now is None else None, None
        if self._opened_with is None:
            return None, now
        return min(self._opened_with, now), max(self._opened_with, now)

    def distrust(self) -> None:
        """Something changed the weights that the tracker was not told of: nothing is known."""
        self._is_trusted = False

    def spans(self) -> tuple[PolicySpan, ...]:
        """Spans of the tokens seen so far."""
        if not self._is_trusted:
            return merge_spans([PolicySpan(num_tokens=self._num_tokens)])
        ends = [*(start for start, *_ in self._runs[1:]), self._num_tokens]
        return tuple(
            PolicySpan(num_tokens=end - start, version_start=oldest, version_end=newest)
            for (start, oldest, newest), end in zip(self._runs, ends, strict=True)
        )
