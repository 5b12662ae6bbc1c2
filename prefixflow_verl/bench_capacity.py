"""How long a sequence may be whose update fits: `prefixflow bench capacity`.

[Note: how capacity is found]
For every arm, the longest prompt is searched whose update keeps the peak of live tensor bytes
(memory.py [Note: which bytes]) within the budget: doubling or halving until the budget lies between
two prompts, then bisection down to the granularity. The peak depends on lengths, not on values, so
each length is measured once. All arms run the same number of rollouts per forward. The search takes
for granted that a longer prompt needs no fewer bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from prefixflow_verl.bench import check_agreement, open_setup, warm_up
from prefixflow_verl.bench_report import describe, describe_machine, mib
from prefixflow_verl.bench_settings import DENSE, OURS, VERL_PADDED, Settings
from prefixflow_verl.bench_workloads import GridCase, forward_size, make_batch
from prefixflow_verl.config import STRATEGY
from prefixflow_verl.memory import measure_peaks

if TYPE_CHECKING:
    from prefixflow_verl.bench_arms import Arm, Setup

ARMS = (OURS, DENSE, VERL_PADDED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """What is looked for, and where.

    Raises:
        ValueError: no prompt is within the limits; names the options.
    """

    num_bytes: int | None
    """Budget; None: the peak of dense training at `dense_prompt`."""
    dense_prompt: int
    response: int
    group: int
    granularity: int
    """Prompts that are tried are multiples of so many tokens."""
    max_prompt: int
    """Longest prompt to try."""

    def __post_init__(self) -> None:
        if self.max_prompt < self.granularity:
            raise ValueError(
                f"--max-prompt={self.max_prompt} is less than --granularity={self.granularity}: "
                "there is no prompt to try"
            )

    def case(self, prompt: int) -> GridCase:
        return GridCase(prompt=prompt, response=self.response, group=self.group)


def run_capacity(search: Search, settings: Settings, command: str) -> dict[str, Any]:
    """Search every arm's capacity; see [Note: how capacity is found]. Progress goes to stderr.

    Returns:
        The JSON-ready record: `bytes`; `capacity`, the largest total length (prompt and response)
        of each arm, None where not even the shortest prompt fits; `ratio`, that of `prefixflow`
        over each baseline's; `curve`, every measured `{"arm", "total", "peak_bytes"}`; `limited`,
        arms that were not tried beyond `--max-prompt`; `machine` and `settings`.

    Raises:
        ArmsDisagreeError: an arm's update is not that of dense training.
        ValueError: the sizes do not go together; names the option.
    """
    console = Console(stderr=True, highlight=False, markup=False)
    with open_setup(settings) as setup:
        meter = _Meter(search, settings, setup, console)
        num_bytes = search.num_bytes
        if num_bytes is None:
            num_bytes = meter.peak_bytes(DENSE, search.dense_prompt)
        capacity, limited = {}, []
        for arm in ARMS:
            steps = largest(
                lambda count, arm=arm: (
                    meter.peak_bytes(arm, count * search.granularity) <= num_bytes
                ),
                first=max(1, search.dense_prompt // search.granularity),
                limit=search.max_prompt // search.granularity,
            )
            capacity[arm] = steps * search.granularity + search.response if steps else None
            if steps == search.max_prompt // search.granularity:
                limited.append(arm)
        machine = describe_machine(setup.device, command)
    return {
        "machine": machine,
        "settings": {**asdict(settings), **asdict(search), "threads": torch.get_num_threads()},
        "bytes": num_bytes,
        "capacity": capacity,
        "ratio": {
            arm: capacity[OURS] / capacity[arm] if capacity[OURS] and capacity[arm] else None
            for arm in ARMS[1:]
        },
        "limited": limited,
        "curve": meter.curve(),
    }


def largest(fits: Callable[[int], bool], *, first: int, limit: int) -> int:
    """The largest number from 1 to `limit` that fits, if all below one that fits do; else 0.

    Args:
        first: where to begin.
    """
    low, high = 0, limit + 1
    guess = min(first, limit)
    while high - low > 1:
        if fits(guess):
            low = guess
        else:
            high = guess
        if high > limit and low:
            guess = min(2 * low, limit)  # nothing too large is known yet
        elif not low:
            guess = max(1, high // 2)
        else:
            guess = (low + high) // 2
    return low


class _Meter:
    """Peaks of the arms, each length measured once."""

    def __init__(self, search: Search, settings: Settings, setup: Setup, console: Console) -> None:
        from prefixflow_verl import bench_arms

        self._search = search
        self._settings = settings
        self._setup = setup
        self._console = console
        self._arms: dict[str, Arm] = {
            OURS: bench_arms.EngineArm(setup, STRATEGY),
            DENSE: bench_arms.DenseArm(bench_arms.load_model(setup)),
            VERL_PADDED: bench_arms.EngineArm(setup, "fsdp2"),
        }
        self._found: dict[tuple[str, int], int] = {}
        results = warm_up(self._arms, setup)
        for name, result in results.items():
            check_agreement(name, result, results[DENSE], settings.dtype)

    def peak_bytes(self, name: str, prompt: int) -> int:
        key = (name, prompt + self._search.response)
        if key not in self._found:
            case = self._search.case(prompt)
            batch = make_batch(case, forward_size(case, self._settings), self._setup.sizes.vocab)
            arm = self._arms[name]
            step = arm.prepare(batch, "update")
            self._found[key] = measure_peaks(step, self._setup.device).peak_bytes
            arm.release()
            self._console.print(f"{name}: {key[1]} tokens, {mib(self._found[key])} MiB")
        return self._found[key]

    def curve(self) -> list[dict[str, Any]]:
        """Everything measured, by arm and length."""
        order = sorted(self._found, key=lambda key: (ARMS.index(key[0]), key[1]))
        return [
            {"arm": arm, "total": total, "peak_bytes": self._found[arm, total]}
            for arm, total in order
        ]


def report_capacity(record: Mapping[str, Any], images: tuple[str, ...] = ()) -> str:
    """The record as Markdown: one table, and `images` (file names)."""
    settings = record["settings"]
    lines = [
        "# capacity: the longest sequence whose update fits",
        "",
        f"`{record['machine']['command']}`",
        "",
        *describe(record),
        "",
        f"{settings['group']} responses of {settings['response']} tokens to one prompt, "
        f"{settings['rollouts_per_forward']} per forward, prompts in steps of "
        f"{settings['granularity']} tokens. Peaks are of live tensor bytes above parameters and "
        f"optimizer state; the budget is {mib(record['bytes'])} MiB.",
        "",
        f"| arm | largest prompt + response | `{OURS}` / arm | peak MiB there |",
        "|---|---|---|---|",
    ]
    peaks = {(point["arm"], point["total"]): point["peak_bytes"] for point in record["curve"]}
    for arm, total in record["capacity"].items():
        ratio = record["ratio"].get(arm)
        lines.append(
            f"| {arm} | {_total(total, arm in record['limited'])} "
            f"| {'' if ratio is None else f'{ratio:.2f}'} | {mib(peaks.get((arm, total)))} |"
        )
    lines += ["", *(f"![{Path(image).stem}]({image})" for image in images)]
    return "\n".join(lines).rstrip() + "\n"


def write_capacity(record: Mapping[str, Any], directory: Path) -> None:
    """Write `capacity.json`, `capacity.md` and `capacity.png` into `directory`, made if missing."""
    from prefixflow_verl.bench_plots import draw_capacity

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "capacity.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    image = draw_capacity(record, directory)
    (directory / "capacity.md").write_text(report_capacity(record, (image,)), encoding="utf-8")


def _total(total: int | None, is_limit: bool) -> str:
    if total is None:
        return "none fits"
    return f"{total} or more" if is_limit else str(total)
