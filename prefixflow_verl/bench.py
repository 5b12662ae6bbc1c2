"""Times prefix reuse against other ways to train on the same rollouts: `prefixflow bench update`.

[Note: how the contest is run]
One process, one set of random weights, one mini-batch per case, the same number of threads and the
same token budget (or number of rollouts) per forward for every arm (`bench_arms.py`). After a
warm-up each, the arms take turns, in an order that moves on by one arm each round, so that a slow
spell of the machine meets all of them. Every result is compared: if an arm's gradient norm (or its
log-probs) is not that of dense training, nothing is reported.

Seconds are of a whole update: gradients cleared, forward, backward, clipping, AdamW. Peak memory is
taken in one more run after the timing; see memory.py [Note: which bytes].

`ideal` is the FLOP ratio to dense training with the LM head on trained tokens only, if every shared
token ran once; `efficiency` is the part of it that was reached.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers.utils import logging as transformers_logging

from prefixflow_verl.accounting import ModelShape, dense_flops, forest_flops
from prefixflow_verl.bench_report import describe_machine
from prefixflow_verl.bench_settings import (
    BASELINES,
    DENSE,
    GROUPER,
    GROUPER_SPLIT,
    OURS,
    SUFFIX_PHASE,
    VERL,
    Dtype,
    ForwardSize,
    Settings,
)
from prefixflow_verl.bench_workloads import Batch, Case, GridCase, forward_size, make_batch
from prefixflow_verl.config import METRIC_PREFIX, STRATEGY
from prefixflow_verl.memory import MemoryPeaks, measure_peaks
from prefixflow_verl.phases import pack_sequences
from prefixflow_verl.plan import PackBudget

if TYPE_CHECKING:
    from prefixflow_verl.bench_arms import Arm, Setup

NUM_SPLIT_PARTS = 4

TOLERANCES = {"float32": 1e-3, "bfloat16": 3e-2}
"""Largest difference between arms, relative to the largest value. bfloat16 keeps 8 bits."""

Verdict = Literal["faster", "slower", "same"]


class ArmsDisagreeError(RuntimeError):
    """Two arms did not compute the same thing, so their times cannot be compared."""


def run_benchmark(cases: Sequence[Case], settings: Settings, command: str) -> dict[str, Any]:
    """Time every case and return the JSON-ready record `{"machine", "settings", "cases"}`.

    On the first GPU, else on the CPU. Standard output stays clean; progress goes to stderr.

    Args:
        command: how to repeat this; goes into the record.

    Raises:
        ArmsDisagreeError: an arm's result is not that of dense training.
        ValueError: a case does not go with the settings; names the option.
    """
    with open_setup(settings) as setup, _progress() as progress:
        record = {
            "machine": describe_machine(setup.device, command),
            "settings": {**asdict(settings), "threads": torch.get_num_threads()},
            "cases": [],
        }
        contest = _Contest(settings, setup)
        for case in cases:
            record["cases"].append(contest.run(case, progress))
    return record


@contextlib.contextmanager
def open_setup(settings: Settings) -> Iterator[Setup]:
    """Where arms can be made and run: platform, threads, saved weights, a group of one rank.

    Standard output goes to stderr meanwhile.
    """
    if not torch.cuda.is_available():
        # veRL chooses its platform when it is imported.
        os.environ.setdefault("VERL_PLATFORM", "cpu")
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    transformers_logging.disable_progress_bar()
    with (
        contextlib.redirect_stdout(sys.stderr),
        tempfile.TemporaryDirectory() as directory,
    ):
        import prefixflow_verl.register  # noqa: F401
        from prefixflow_verl import bench_arms

        model_path = Path(directory) / "model"
        bench_arms.save_model(settings.sizes, model_path)
        with bench_arms.one_rank(Path(directory)):
            yield bench_arms.Setup(
                model_path=model_path,
                sizes=settings.sizes,
                dtype=settings.dtype,
                checkpointing=settings.checkpointing,
                options=settings.options,
                device=torch.device("cuda" if torch.cuda.is_available() else "cpu"),
            )


def warm_up(arms: Mapping[str, Arm], setup: Setup) -> dict[str, torch.Tensor]:
    """A tiny update of every arm, and its result.

    It makes optimizer state and whatever else is made once.
    """
    case = GridCase(prompt=8, response=8, group=2)
    batch = make_batch(case, ForwardSize(token_budget=64), setup.sizes.vocab)
    results = {}
    for name, arm in arms.items():
        results[name] = arm.prepare(batch, "update")()
        arm.release()
    return results


class _Contest:
    """The arms of one process, and how they are run on a case."""

    def __init__(self, settings: Settings, setup: Setup) -> None:
        from prefixflow_verl import bench_arms

        self._settings = settings
        self._setup = setup
        self._arms: dict[str, Arm] = {
            OURS: bench_arms.EngineArm(setup, STRATEGY),
            DENSE: bench_arms.DenseArm(bench_arms.load_model(setup)),
        }
        self._verl: dict[str, Arm] = {
            name: bench_arms.EngineArm(setup, "fsdp2", use_remove_padding=packed)
            for name, packed in (("padded", False), ("packed", True))
        }
        if importlib.util.find_spec("prefix_grouper") is not None:
            model = bench_arms.PrefixGrouperArm.load(setup)
            for name, parts in ((GROUPER, 1), (GROUPER_SPLIT, NUM_SPLIT_PARTS)):
                self._arms[name] = bench_arms.PrefixGrouperArm(model, num_parts=parts)
        warm_up({**self._arms, **self._verl}, setup)

    def run(self, case: Case, progress: Progress) -> dict[str, Any]:
        """Time one case; see [Note: how the contest is run]."""
        settings = self._settings
        forward = forward_size(case, settings)
        batch = make_batch(case, forward, settings.sizes.vocab)
        arms, skipped = self._contestants(case)
        truth, _ = self._timed(arms[DENSE], batch)
        arms[VERL], variants = self._best_verl(batch, truth)

        task = progress.add_task(str(case), total=len(arms) * (settings.repeats + 2))
        differences = {}
        seconds: dict[str, list[float]] = {name: [] for name in arms}
        for round_ in range(settings.repeats + 1):
            names = list(arms)
            first = round_ % len(names)
            for name in names[first:] + names[:first]:
                result, elapsed_s = self._timed(arms[name], batch)
                differences[name] = check_agreement(name, result, truth, settings.dtype)
                if round_:  # the first one warms up
                    seconds[name].append(elapsed_s)
                progress.advance(task)
        peaks = {}
        for name, arm in arms.items():
            peaks[name] = measure_peaks(arm.prepare(batch, settings.what), self._setup.device)
            arm.release()
            progress.advance(task)
        logical_tokens = sum(len(rollout.tokens) - 1 for rollout in batch.rollouts)
        return {
            "what": settings.what,
            **case.record(),
            "token_budget": forward.token_budget,
            "rollouts_per_forward": forward.rollouts,
            "logical_tokens": logical_tokens,
            "executed_tokens": self._executed_tokens(batch),
            **case_figures(seconds, ideal=ideal_speedup(batch, settings)),
            "peak_bytes": {name: found.peak_bytes for name, found in peaks.items()},
            "phase_bytes": {name: found.phase_bytes for name, found in peaks.items()},
            "memory": memory_figures(peaks),
            "verl_variants": variants,
            "skipped": skipped,
            "relative_difference": differences,
        }

    def _contestants(self, case: Case) -> tuple[dict[str, Arm], dict[str, str]]:
        """Arms that take part, and why others do not."""
        arms, skipped = dict(self._arms), {}
        for name in (GROUPER, GROUPER_SPLIT):
            if name not in arms:
                skipped[name] = "the package prefix_grouper is not installed"
            elif (refusal := case.grouper_refusal()) is not None:
                skipped[name] = refusal
                del arms[name]
        return arms, skipped

    def _best_verl(self, batch: Batch, truth: torch.Tensor) -> tuple[Arm, dict[str, Any]]:
        """veRL's engine in its fastest correct setting, and what each setting did."""
        dtype = self._settings.dtype
        dense_log_probs = self._arms[DENSE].prepare(batch, "log_prob")()
        variants: dict[str, Any] = {}
        for name, arm in self._verl.items():
            try:
                log_probs = arm.prepare(batch, "log_prob")()
                check_agreement(f"{VERL} {name}", log_probs, dense_log_probs, dtype)
            except ArmsDisagreeError as error:
                variants[name] = {"rejected": str(error)}
                continue
            result, elapsed_s = self._timed(arm, batch)
            check_agreement(f"{VERL} {name}", result, truth, dtype)
            variants[name] = {"trial_s": elapsed_s}
        trials = {name: found["trial_s"] for name, found in variants.items() if "trial_s" in found}
        if not trials:
            raise ArmsDisagreeError(f"no setting of {VERL} agrees with dense training: {variants}")
        best = min(trials, key=trials.__getitem__)
        variants[best]["chosen"] = True
        return self._verl[best], variants

    def _executed_tokens(self, batch: Batch) -> int | None:
        """What the engine says that it ran; None if it trained without reuse."""
        engine = self._arms[OURS]
        engine.prepare(batch, "update")()
        engine.release()
        # Metrics of a log-prob pass ride on the next update.
        part = "log_prob/" if self._settings.what == "log_prob" else ""
        values = engine.metrics.get(f"{METRIC_PREFIX}{part}executed_tokens")
        return None if values is None else int(np.ravel(values)[0])  # one rank

    def _timed(self, arm: Arm, batch: Batch) -> tuple[torch.Tensor, float]:
        """One run: its result, and seconds."""
        step = arm.prepare(batch, self._settings.what)
        gc.collect()
        _synchronize(self._setup.device)
        began = time.perf_counter()
        result = step()
        _synchronize(self._setup.device)
        elapsed_s = time.perf_counter() - began
        arm.release()
        return result, elapsed_s


def check_agreement(name: str, result: torch.Tensor, truth: torch.Tensor, dtype: Dtype) -> float:
    """Largest difference of an arm's result from dense training's, relative to the largest value.

    Raises:
        ArmsDisagreeError: it is beyond `TOLERANCES[dtype]`, or not a number.
    """
    result, truth = result.detach().double().cpu(), truth.detach().double().cpu()
    difference = ((result - truth).abs().max() / truth.abs().max()).item()
    if not difference <= TOLERANCES[dtype]:
        raise ArmsDisagreeError(
            f"{name} differs from {DENSE} by {difference:.1e} (relative), more than "
            f"{TOLERANCES[dtype]:.0e}: its time means nothing, so no result is reported"
        )
    return difference


def case_figures(seconds: Mapping[str, Sequence[float]], *, ideal: float) -> dict[str, Any]:
    """What follows from the timed runs of each arm; speed-ups are ratios of medians."""
    spreads = {
        name: {"median": statistics.median(runs), "min": min(runs), "max": max(runs)}
        for name, runs in seconds.items()
    }
    speedup = {
        name: spreads[name]["median"] / spreads[OURS]["median"]
        for name in BASELINES
        if name in spreads
    }
    return {
        "seconds": spreads,
        "speedup": speedup,
        "verdict": {name: verdict(spreads[OURS], spreads[name]) for name in speedup},
        "ideal": ideal,
        "efficiency": speedup[DENSE] / ideal,
    }


def memory_figures(peaks: Mapping[str, MemoryPeaks]) -> dict[str, float | None]:
    """By which part the peaks of `prefixflow` are below that of dense training.

    `suffix_phase_below_dense` is None if the engine trained without reuse: no such phase ran.
    """
    dense = peaks[DENSE].peak_bytes
    suffix = peaks[OURS].phase_bytes.get(SUFFIX_PHASE)
    return {
        "suffix_phase_below_dense": None if suffix is None else 1 - suffix / dense,
        "whole_below_dense": 1 - peaks[OURS].peak_bytes / dense,
    }


def verdict(ours: Mapping[str, float], baseline: Mapping[str, float]) -> Verdict:
    """`same` unless every run of one side beats every run of the other."""
    if ours["max"] < baseline["min"]:
        return "faster"
    return "slower" if ours["min"] > baseline["max"] else "same"


def ideal_speedup(batch: Batch, settings: Settings) -> float:
    """FLOPs of dense training with the LM head on trained tokens / those with every shared token
    run once."""
    shape = ModelShape.from_config(settings.sizes.config())
    rollouts = batch.rollouts
    # The last token of a rollout is a target only.
    lengths = np.array([len(rollout.tokens) - 1 for rollout in rollouts], dtype=np.int64)
    num_wanted = sum(int(rollout.wanted(settings.what).sum()) for rollout in rollouts)
    dense = dense_flops(shape, lengths, num_wanted)
    predict = []
    for rollout in rollouts:
        before = np.zeros(len(rollout.prompt) - 1, dtype=bool)
        predict.append(np.concatenate([before, rollout.wanted(settings.what).numpy()]))
    packed = pack_sequences(
        [rollout.tokens.numpy() for rollout in rollouts],
        PackBudget(max_tokens=int(lengths.sum())),
        predict=predict,
        mode="fused",
    )
    num_logit_rows = sum(len(layout.logit_rows) for layout in packed.layouts)
    reuse = forest_flops(shape, packed.forest, num_logit_rows)
    if settings.what == "log_prob":
        return dense.forward / reuse.forward
    checkpointing = settings.checkpointing
    return dense.update(checkpointing=checkpointing) / reuse.update(checkpointing=checkpointing)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    )
