"""Peak of live tensor bytes while something runs, the same way on every device.

[Note: which bytes]
PyTorch's profiler is told by the allocator of every allocation and every release: on CUDA by the
caching allocator, on the CPU by the tensor allocator. Their running sum is what tensors occupy:
activations that autograd saved, caches, gradients, temporaries of kernels that come from the
allocator. Tensors that exist before the run (parameters, optimizer state) do not count; memory that
one of them gives back during the run counts as negative, so clear old gradients first. Memory that
libraries take from the system by themselves does not show, nor does what the allocator keeps for
later.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

PHASE_PREFIX = "prefixflow/"
"""Ranges of `torch.profiler.record_function` with this prefix are reported as phases."""

_MEMORY_EVENT = "[memory]"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPeaks:
    """Bytes above what was allocated when the run began. See [Note: which bytes]."""

    peak_bytes: int
    phase_bytes: dict[str, int]
    """The same within each phase, over all its ranges; keys without `PHASE_PREFIX`."""


def measure_peaks(run: Callable[[], object], device: torch.device) -> MemoryPeaks:
    """Call `run` once under the profiler and report the peak of live bytes on `device`.

    A profiled run is slower: measure time elsewhere.
    """
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, profile_memory=True, acc_events=False) as profiler:
        run()
    changes, ranges = [], []
    for event in profiler.profiler.kineto_results.events():
        if event.name() == _MEMORY_EVENT:
            if event.device_type().name == device.type.upper():
                changes.append((event.start_ns(), event.nbytes()))
        elif event.name().startswith(PHASE_PREFIX):
            name = event.name().removeprefix(PHASE_PREFIX)
            ranges.append((name, event.start_ns(), event.end_ns()))
    return _peaks(changes, ranges)


def _peaks(changes: list[tuple[int, int]], ranges: list[tuple[str, int, int]]) -> MemoryPeaks:
    """Peaks of a running sum.

    Args:
        changes: (time, bytes), bytes negative for a release.
        ranges: (name, begin, end), half-open.
    """
    # Stable: changes at the same time stay in the order in which they were reported.
    changes = sorted(changes, key=lambda change: change[0])
    live, levels = 0, []
    for time, num_bytes in changes:
        live += num_bytes
        levels.append((time, live))
    phase_bytes: dict[str, int] = {}
    for name, begin, end in ranges:
        inside = [level for time, level in levels if begin <= time < end]
        before = [level for time, level in levels if time < begin][-1:] or [0]
        phase_bytes[name] = max(phase_bytes.get(name, 0), *before, *inside)
    return MemoryPeaks(
        peak_bytes=max([0, *(level for _, level in levels)]), phase_bytes=phase_bytes
    )
