"""Reward of the arithmetic recipe, in the form verl's `reward.custom_reward_function` calls."""

from __future__ import annotations

from typing import Any

LONGEST_REWARDED = 8
"""Characters; an answer this long or longer earns nothing for brevity."""


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict | None = None,
    **kwargs: Any,
) -> dict[str, float]:
    """1 for exactly the right number; else 0.2 for a leading digit and up to 0.3 for brevity.

    A random model is almost never right, so it needs a slope to climb: within a group some
    responses start with a digit, and some of those end sooner, long before any is right.
    """
    answer = solution_str.strip()
    accuracy = float(answer == ground_truth)
    if accuracy or not answer[:1].isdigit():
        return {"score": accuracy, "acc": accuracy}
    excess = min(len(answer), LONGEST_REWARDED) - 1
    return {"score": 0.2 + 0.3 * (1 - excess / (LONGEST_REWARDED - 1)), "acc": accuracy}
