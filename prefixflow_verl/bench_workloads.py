"""What a benchmark trains on: cases of three kinds, the mini-batch of one, and its micro-batches.

    GridCase     groups of responses to a prompt, all lengths equal
    TraceCase    groups of recorded lengths, whose tokens may be masked out of the loss
    TurnsCase    one conversation, a sample per turn

[Note: a sample per turn]
A conversation of N turns is trained as N samples. The input of sample t is everything said so far,
its response is turn t. So its context begins with the context and the response of sample t - 1,
followed by tokens of the environment:

    sample 0    c c c c r r
    sample 1    c c c c r r o o r r
    sample 2    c c c c r r o o r r o o r r

Only `r` at the end of a sample carries loss in that sample. All samples are prefixes of the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import torch

from prefixflow_verl.bench_settings import ForwardSize, Settings, What
from prefixflow_verl.lengths import GroupLengths, read_trace

SEQUENCES_PER_BUDGET = 4
"""Whole sequences of mean length in the default token budget."""


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One sequence of a mini-batch, tokens on the CPU."""

    prompt: torch.Tensor
    """[P] int64: what the response was sampled for."""
    response: torch.Tensor
    """[R] int64."""
    loss_mask: torch.Tensor
    """[R] bool: response tokens that are trained on."""
    advantage: float

    @cached_property
    def tokens(self) -> torch.Tensor:
        """[P + R] int64."""
        return torch.cat([self.prompt, self.response])

    def wanted(self, what: What) -> torch.Tensor:
        """[R] bool: response tokens whose log-prob is asked for."""
        return self.loss_mask if what == "update" else torch.ones_like(self.loss_mask)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One mini-batch."""

    groups: tuple[tuple[Rollout, ...], ...]
    """Rollouts of each prompt."""
    forward: ForwardSize

    @cached_property
    def rollouts(self) -> tuple[Rollout, ...]:
        """All rollouts; results of arms have this order."""
        return tuple(rollout for group in self.groups for rollout in group)

    @property
    def num_loss_tokens(self) -> int:
        return sum(int(rollout.loss_mask.sum()) for rollout in self.rollouts)


class Case(Protocol):
    """One workload."""

    kind: ClassVar[str]
    """`grid`, `trace` or `turns`."""

    def __str__(self) -> str:
        """The label."""

    def record(self) -> dict[str, Any]:
        """JSON-ready `label`, `kind`, `prompt`, `response`, `group`, `prompts`; means where they
        differ, None where there is no such number."""

    def lengths(self) -> list[list[tuple[int, int]]]:
        """(prompt, response) tokens of every rollout of every group."""

    def draw(self, tokens: TokenSource) -> list[list[tuple[torch.Tensor, ...]]]:
        """(prompt, response, loss mask) of the same."""

    def grouper_refusal(self) -> str | None:
        """Why the package prefix_grouper cannot train on it, if so."""


class TokenSource:
    """Random token ids and advantages."""

    def __init__(self, vocab: int, seed: int = 0) -> None:
        self._vocab = vocab
        self._generator = torch.Generator().manual_seed(seed)

    def tokens(self, count: int) -> torch.Tensor:
        return torch.randint(0, self._vocab, (count,), generator=self._generator)

    def advantage(self) -> float:
        return torch.randn((), generator=self._generator).item()


def make_batch(case: Case, forward: ForwardSize, vocab: int) -> Batch:
    """The mini-batch of a case: random tokens, normal advantages."""
    source = TokenSource(vocab)
    return Batch(
        groups=tuple(
            tuple(
                Rollout(
                    prompt=prompt,
                    response=response,
                    loss_mask=loss_mask,
                    advantage=source.advantage(),
                )
                for prompt, response, loss_mask in group
            )
            for group in case.draw(source)
        ),
        forward=forward,
    )


def forward_size(case: Case, settings: Settings) -> ForwardSize:
    """What a forward of this case may hold.

    Without a setting: as many tokens as four rollouts of mean length, and as the longest.

    Raises:
        ValueError: the setting does not go with the case; names the option.
    """
    sizes = [prompt + response for group in case.lengths() for prompt, response in group]
    if settings.rollouts_per_forward is not None:
        if len(sizes) % settings.rollouts_per_forward:
            raise ValueError(
                f"--rollouts-per-forward={settings.rollouts_per_forward} must divide the "
                f"{len(sizes)} rollouts of the case {case}: veRL makes equal micro-batches"
            )
        return ForwardSize(rollouts=settings.rollouts_per_forward)
    longest = max(sizes)
    if settings.token_budget is None:
        usual = SEQUENCES_PER_BUDGET * sum(sizes) // len(sizes)
        return ForwardSize(token_budget=max(longest, usual))
    if settings.token_budget < longest:
        raise ValueError(
            f"--token-budget={settings.token_budget} is less than the {longest} tokens of the "
            f"longest rollout of the case {case}: veRL does not split rollouts"
        )
    return ForwardSize(token_budget=settings.token_budget)


def similar_lengths(
    sizes: Sequence[int], forward: ForwardSize, *, overhead_tokens: int
) -> list[list[int]]:
    """Rollouts of each forward, longest first, with as little padding as pays.

    Among all ways to cut the sorted list, the one with the fewest tokens, padding included, if a
    forward costs as much as `overhead_tokens`.

    Args:
        sizes: tokens of each rollout.
        forward: what a forward may hold; a token budget counts padding. With a number of rollouts,
            every forward gets exactly so many.
    """
    order = sorted(range(len(sizes)), key=lambda index: -sizes[index])
    if forward.rollouts is not None:
        starts = range(0, len(order), forward.rollouts)
        return [order[start : start + forward.rollouts] for start in starts]
    # costs[n], cuts[n]: least cost of the n longest, and where the last of their forwards begins.
    costs, cuts = [0], [0]
    for end in range(1, len(order) + 1):
        best_cost, best_start = None, end - 1
        for start in range(end - 1, -1, -1):
            num_tokens = (end - start) * sizes[order[start]]
            if num_tokens > forward.token_budget and end - start > 1:
                break
            cost = costs[start] + num_tokens + overhead_tokens
            if best_cost is None or cost < best_cost:
                best_cost, best_start = cost, start
        costs.append(best_cost)
        cuts.append(best_start)
    forwards, end = [], len(order)
    while end:
        forwards.append(order[cuts[end] : end])
        end = cuts[end]
    return forwards[::-1]


class _GroupCase:
    """A case whose rollouts share prompts and nothing else."""

    groups: Sequence[GroupLengths]

    def lengths(self) -> list[list[tuple[int, int]]]:
        return [[(group.prompt, response) for response in group.responses] for group in self.groups]

    def draw(self, tokens: TokenSource) -> list[list[tuple[torch.Tensor, ...]]]:
        drawn = []
        for group in self.groups:
            prompt = tokens.tokens(group.prompt)
            drawn.append(
                [
                    (prompt, tokens.tokens(response), torch.from_numpy(group.loss_mask(index)))
                    for index, response in enumerate(group.responses)
                ]
            )
        return drawn

    def grouper_refusal(self) -> str | None:
        if any(len(group.responses) > 1 for group in self.groups):
            return None
        return "a group of one response has nothing to share"


@dataclass(frozen=True, kw_only=True)
class GridCase(_GroupCase):
    """`prompts` groups of `group` responses, all lengths equal."""

    kind: ClassVar[str] = "grid"

    prompt: int
    """Tokens of each prompt."""
    response: int
    """Tokens of each response."""
    group: int
    """Responses per prompt; 1 shares nothing."""
    prompts: int = 1

    def __str__(self) -> str:
        return f"{self.prompt}, {self.response}, {self.group} x {self.prompts}"

    def record(self) -> dict[str, Any]:
        return {
            "label": str(self),
            "kind": self.kind,
            "prompt": self.prompt,
            "response": self.response,
            "group": self.group,
            "prompts": self.prompts,
        }

    @property
    def groups(self) -> list[GroupLengths]:
        group = GroupLengths(prompt=self.prompt, responses=(self.response,) * self.group)
        return [group] * self.prompts


@dataclass(frozen=True, kw_only=True)
class TraceCase(_GroupCase):
    """Groups of a file of recorded lengths; see `lengths.read_groups`."""

    kind: ClassVar[str] = "trace"

    name: str
    """Of the file."""
    groups: tuple[GroupLengths, ...]
    scale: float = 1.0
    """By which the lengths were multiplied; told to the reader only."""

    @classmethod
    def read(cls, path: Path, *, num_groups: int, scale: float) -> list[TraceCase]:
        """A case from each JSON-lines file at `path`, a file or a directory.

        Args:
            num_groups: groups to take, evenly spaced over the file; all, if it has fewer.
            scale: factor of every length; the products are rounded up.

        Raises:
            ValueError: no such files, or a line is not understood; names file, line and reason.
            OSError: a file cannot be read.
        """
        cases = []
        for name, groups in read_trace(path):
            count = min(num_groups, len(groups))
            taken = [groups[i * len(groups) // count].scaled(scale) for i in range(count)]
            cases.append(cls(name=name, groups=tuple(taken), scale=scale))
        return cases

    def __str__(self) -> str:
        scaled = "" if self.scale == 1 else f", lengths x {self.scale:g}"
        return f"{self.name}, {len(self.groups)} groups{scaled}"

    def record(self) -> dict[str, Any]:
        responses = [length for group in self.groups for length in group.responses]
        return {
            "label": str(self),
            "kind": self.kind,
            "prompt": float(np.mean([group.prompt for group in self.groups])),
            "response": float(np.mean(responses)),
            "group": len(responses) / len(self.groups),
            "prompts": len(self.groups),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnsCase:
    """[Note: a sample per turn], with contexts that grow linearly.

    Raises:
        ValueError: contexts that do not hold the turns before them; names the option.
    """

    kind: ClassVar[str] = "turns"

    turns: int
    """Samples, 2 or more."""
    context: tuple[int, int]
    """Tokens of the first and of the last context."""
    response: int
    """Tokens of each response."""

    def __post_init__(self) -> None:
        contexts = self.contexts
        if any(
            after < before + self.response
            for before, after in zip(contexts, contexts[1:], strict=False)
        ):
            first, last = self.context
            raise ValueError(
                f"--context={first},{last} grows too slowly: over {self.turns} turns with "
                f"--response={self.response} the last context needs "
                f"{first + (self.turns - 1) * self.response} tokens or more"
            )

    @property
    def contexts(self) -> list[int]:
        """Tokens of the context of each sample."""
        first, last = self.context
        return [first + (last - first) * i // (self.turns - 1) for i in range(self.turns)]

    def __str__(self) -> str:
        first, last = self.context
        return f"{self.turns} turns, context {first} to {last}, response {self.response}"

    def record(self) -> dict[str, Any]:
        return {
            "label": str(self),
            "kind": self.kind,
            "prompt": float(np.mean(self.contexts)),
            "response": self.response,
            "group": None,
            "prompts": None,
        }

    def lengths(self) -> list[list[tuple[int, int]]]:
        return [[(context, self.response)] for context in self.contexts]

    def draw(self, tokens: TokenSource) -> list[list[tuple[torch.Tensor, ...]]]:
        loss_mask = torch.ones(self.response, dtype=torch.bool)
        spoken = tokens.tokens(0)
        samples = []
        for context in self.contexts:
            spoken = torch.cat([spoken, tokens.tokens(context - len(spoken))])
            response = tokens.tokens(self.response)
            samples.append([(spoken, response, loss_mask)])
            spoken = torch.cat([spoken, response])
        return samples

    def grouper_refusal(self) -> str | None:
        return "its groups share one prompt; contexts that continue each other are no such group"
