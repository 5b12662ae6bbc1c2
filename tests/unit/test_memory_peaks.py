"""The memory counter on tensors whose sizes are known."""

import pytest
import torch
from torch.profiler import record_function

from prefixflow_verl.memory import _peaks, measure_peaks

CPU = torch.device("cpu")
KIB = 1024


def zeros(num_bytes: int) -> torch.Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8)


def test_peak_is_of_tensors_alive_together():
    kept = []

    def run():
        first, second = zeros(300 * KIB), zeros(500 * KIB)
        del first
        kept.append(zeros(200 * KIB))
        del second

    assert measure_peaks(run, CPU).peak_bytes == 800 * KIB


def test_tensors_from_before_do_not_count():
    before = [zeros(900 * KIB)]

    def run():
        zeros(100 * KIB)

    assert measure_peaks(run, CPU).peak_bytes == 100 * KIB
    assert measure_peaks(before.clear, CPU).peak_bytes == 0


def test_phases():
    def run():
        with record_function("prefixflow/prefix"):
            kept = zeros(100 * KIB)
        for size in (300, 200):
            with record_function("prefixflow/suffix"):
                zeros(size * KIB)
        with record_function("another/range"):
            zeros(700 * KIB)
        with record_function("prefixflow/quiet"):
            pass
        del kept

    peaks = measure_peaks(run, CPU)
    assert peaks.peak_bytes == 800 * KIB
    assert peaks.phase_bytes == {"prefix": 100 * KIB, "suffix": 400 * KIB, "quiet": 100 * KIB}


@pytest.mark.parametrize(
    ("changes", "peak"), [([], 0), ([(1, -5)], 0), ([(2, -5), (1, 7)], 7), ([(1, 4), (1, -4)], 4)]
)
def test_running_sum(changes, peak):
    assert _peaks(changes, []).peak_bytes == peak


def test_activations_of_a_graph_count():
    weight = torch.zeros(64, 64, requires_grad=True)

    def run():
        hidden = torch.ones(256, 64)
        for _ in range(4):
            hidden = (hidden @ weight).tanh()
        hidden.sum().backward()

    # Each tanh saves its output of 64 KiB; the first input is alive as well.
    assert measure_peaks(run, CPU).peak_bytes >= 5 * 64 * KIB
