"""Times prefix reuse against other ways to train on the same rollouts: `prefixflow bench update`.

[Note: how the contest is run]
One process, one set of random weights, one mini-batch per case, the same number of threads and the
same token budget per forward for every arm (`bench_arms.py`). After a warm-up each, the arms take
turns, in an order that moves on by one arm each round, so that a slow spell of the machine meets
all of them. Every result is compared: if an arm's gradient norm (or its log-probs) is not that of
dense training, nothing is reported.

Seconds are of a whole update: gradients cleared, forward, backward, clipping, AdamW. Peak memory is
taken in one more run after the timing; see memory.py [Note: which bytes].

`ideal` is the FLOP ratio to dense training with the LM head on response tokens only, if every
shared token ran once; `efficiency` is the part of it that was reached.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import importlib.util
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import Qwen3Config
from transformers.utils import logging as transformers_logging

from prefixflow_verl.accounting import ModelShape, dense_flops, forest_flops
from prefixflow_verl.config import STRATEGY, PrefixFlowOptions
from prefixflow_verl.memory import measure_peaks
from prefixflow_verl.phases import PackedBatch, pack_sequences
from prefixflow_verl.plan import PackBudget

if TYPE_CHECKING:
    from prefixflow_verl.bench_arms import Arm, Batch, Setup

OURS = "prefixflow"
DENSE = "dense-head-only"
VERL = "verl"
GROUPER = "prefix-grouper"
GROUPER_SPLIT = "prefix-grouper-split"
BASELINES = (VERL, DENSE, GROUPER, GROUPER_SPLIT)

NUM_SPLIT_PARTS = 4
SEQUENCES_PER_BUDGET = 4
"""Whole sequences in the default token budget."""

TOLERANCES = {"float32": 1e-3, "bfloat16": 3e-2}
"""Largest difference between arms, relative to the largest value. bfloat16 keeps 8 bits."""

What = Literal["update", "log_prob"]
Dtype = Literal["float32", "bfloat16"]
Verdict = Literal["faster", "slower", "same"]


class ArmsDisagreeError(RuntimeError):
    """Two arms did not compute the same thing, so their times cannot be compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """A Qwen3 with random weights.

    Raises:
        ValueError: sizes that do not divide; names the option.
    """

    layers: int = 4
    hidden: int = 256
    heads: int = 4
    kv_heads: int = 2
    vocab: int = 4096

    def __post_init__(self) -> None:
        if self.hidden % (2 * self.heads):
            raise ValueError(
                f"--hidden={self.hidden} must be an even multiple of --heads={self.heads}"
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"--heads={self.heads} must be a multiple of --kv-heads={self.kv_heads}"
            )

    def config(self) -> Qwen3Config:
        return Qwen3Config(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=3 * self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.hidden // self.heads,
            max_position_embeddings=1 << 20,
            # Large enough for log-probs to show when a token attends to the wrong sequence.
            initializer_range=0.05,
            tie_word_embeddings=False,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One workload: `prompts` groups of `group` responses, all lengths equal."""

    prompt: int
    """Tokens of each prompt."""
    response: int
    """Tokens of each response."""
    group: int
    """Responses per prompt; 1 shares nothing."""
    prompts: int = 1

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Case:
        """The workload of one entry of a result's `cases`."""
        return cls(**{field.name: record[field.name] for field in fields(cls)})

    def __str__(self) -> str:
        return f"{self.prompt}, {self.response}, {self.group} x {self.prompts}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What all cases of one benchmark have in common."""

    what: What = "update"
    sizes: ModelSizes = ModelSizes()
    dtype: Dtype = "float32"
    token_budget: int | None = None
    """Tokens of one forward; None: four sequences of the case."""
    checkpointing: bool = False
    repeats: int = 5
    """Timed runs of each arm, after one warm-up."""
    threads: int | None = None
    """Intra-op threads; None: as PyTorch has them."""


def run_benchmark(cases: Sequence[Case], settings: Settings, command: str) -> dict[str, Any]:
    """Time every case and return the JSON-ready record `{"machine", "settings", "cases"}`.

    On the first GPU, else on the CPU. Standard output stays clean; progress goes to stderr.

    Args:
        command: how to repeat this; goes into the record.

    Raises:
        ArmsDisagreeError: an arm's result is not that of dense training.
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
        _progress() as progress,
    ):
        import prefixflow_verl.register  # noqa: F401
        from prefixflow_verl import bench_arms

        model_path = Path(directory) / "model"
        bench_arms.save_model(settings.sizes, model_path)
        setup = bench_arms.Setup(
            model_path=model_path,
            sizes=settings.sizes,
            dtype=settings.dtype,
            checkpointing=settings.checkpointing,
            device=torch.device("cuda" if torch.cuda.is_available() else "cpu"),
        )
        record = {
            "machine": describe_machine(setup.device, command),
            "settings": {**asdict(settings), "threads": torch.get_num_threads()},
            "cases": [],
        }
        with bench_arms.one_rank(Path(directory)):
            contest = _Contest(settings, setup)
            for case in cases:
                record["cases"].append(contest.run(case, progress))
    return record


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
        self._warm_up()

    def _warm_up(self) -> None:
        """A tiny update of every arm: it makes optimizer state and whatever else is made once."""
        from prefixflow_verl.bench_arms import make_batch

        batch = make_batch(
            num_prompts=1, group=2, prompt=8, response=8, token_budget=64, setup=self._setup
        )
        for arm in (*self._arms.values(), *self._verl.values()):
            arm.prepare(batch, "update")()
            arm.release()

    def run(self, case: Case, progress: Progress) -> dict[str, Any]:
        """Time one case; see [Note: how the contest is run]."""
        from prefixflow_verl.bench_arms import make_batch

        settings = self._settings
        budget = settings.token_budget or SEQUENCES_PER_BUDGET * (case.prompt + case.response)
        batch = make_batch(
            num_prompts=case.prompts,
            group=case.group,
            prompt=case.prompt,
            response=case.response,
            token_budget=budget,
            setup=self._setup,
        )
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
        peak_bytes, phase_bytes = {}, {}
        for name, arm in arms.items():
            peaks = measure_peaks(arm.prepare(batch, settings.what), self._setup.device)
            arm.release()
            peak_bytes[name], phase_bytes[name] = peaks.peak_bytes, peaks.phase_bytes
            progress.advance(task)
        forest = _pack(batch, PrefixFlowOptions()).forest
        return {
            "what": settings.what,
            **asdict(case),
            "token_budget": budget,
            "logical_tokens": forest.logical_tokens,
            "executed_tokens": forest.executed_tokens,
            **case_figures(seconds, ideal=ideal_speedup(batch, settings)),
            "peak_bytes": peak_bytes,
            "phase_bytes": phase_bytes,
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
            elif case.group == 1:
                skipped[name] = "a group of one response has nothing to share"
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


def verdict(ours: Mapping[str, float], baseline: Mapping[str, float]) -> Verdict:
    """`same` unless every run of one side beats every run of the other."""
    if ours["max"] < baseline["min"]:
        return "faster"
    return "slower" if ours["min"] > baseline["max"] else "same"


def ideal_speedup(batch: Batch, settings: Settings) -> float:
    """FLOPs of dense training with the LM head on response tokens / those with every shared token
    run once."""
    shape = ModelShape.from_config(settings.sizes.config())
    packed = _pack(batch, PrefixFlowOptions(plan="fused", min_shared_tokens=1))
    num_rollouts, num_tokens = batch.sequences.shape
    # The last token of a rollout is a target only.
    lengths = np.full(num_rollouts, num_tokens - 1, dtype=np.int64)
    dense = dense_flops(shape, lengths, batch.responses.numel())
    num_logit_rows = sum(len(layout.logit_rows) for layout in packed.layouts)
    reuse = forest_flops(shape, packed.forest, num_logit_rows)
    if settings.what == "log_prob":
        return dense.forward / reuse.forward
    checkpointing = settings.checkpointing
    return dense.update(checkpointing=checkpointing) / reuse.update(checkpointing=checkpointing)


def describe_machine(device: torch.device, command: str) -> dict[str, Any]:
    """What a reader needs to judge or repeat the figures."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **{
            package: importlib.metadata.version(package)
            for package in ("torch", "transformers", "verl")
        },
        "command": command,
    }


def report(record: Mapping[str, Any], images: Sequence[str] = ()) -> str:
    """The record as Markdown: one table, where reuse does not pay, and `images` (file names)."""
    machine, settings = record["machine"], record["settings"]
    sizes = settings["sizes"]
    lines = [
        f"# {settings['what']}: prefix reuse against other ways to train",
        "",
        f"`{machine['command']}`",
        "",
        f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads, device "
        f"{machine['device']}; torch {machine['torch']}, transformers {machine['transformers']}, "
        f"veRL {machine['verl']}.",
        f"Qwen3 with random weights: {sizes['layers']} layers, hidden {sizes['hidden']}, "
        f"{sizes['heads']} heads, {sizes['kv_heads']} key heads, vocabulary {sizes['vocab']}, "
        f"{settings['dtype']}, activation checkpointing "
        f"{'on' if settings['checkpointing'] else 'off'}.",
        "",
        f"Seconds are medians of {settings['repeats']} runs (fastest to slowest); `x` is the "
        "speed-up of `prefixflow`; peak is of live tensor bytes above parameters and optimizer "
        "state.",
        "",
        "| prompt, response, group x prompts | tokens logical / executed | arm | seconds | x "
        "| of the ideal | peak MiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for case in record["cases"]:
        label = str(Case.from_record(case))
        tokens = f"{case['logical_tokens']} / {case['executed_tokens']}"
        for arm in (OURS, *BASELINES):
            if arm not in case["seconds"]:
                continue
            spread = case["seconds"][arm]
            speedup, part = "", ""
            if arm != OURS:
                speedup = f"{case['speedup'][arm]:.2f}"
            if arm == DENSE:
                part = f"{case['efficiency']:.2f} of {case['ideal']:.2f}"
            lines.append(
                f"| {label} | {tokens} | {arm} | {spread['median']:.3f} "
                f"({spread['min']:.3f} to {spread['max']:.3f}) | {speedup} | {part} "
                f"| {case['peak_bytes'][arm] / 2**20:.1f} |"
            )
            label = tokens = ""
    lines += ["", "## Where reuse does not pay", ""]
    words = {"same": "no faster or slower than", "slower": "slower than"}
    lines += [
        f"- {Case.from_record(case)}: {words[found]} {arm} ({case['speedup'][arm]:.2f}x)"
        for case in record["cases"]
        for arm, found in case["verdict"].items()
        if found != "faster"
    ] or ["Nowhere in these cases."]
    lines += ["", *(f"![{Path(image).stem}]({image})" for image in images)]
    return "\n".join(lines).rstrip() + "\n"


def write_results(record: Mapping[str, Any], directory: Path) -> None:
    """Write `results.json`, `report.md` and the heat maps into `directory`, made if missing."""
    from prefixflow_verl.bench_plots import draw_heat_maps

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "results.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    images = draw_heat_maps(record, directory)
    (directory / "report.md").write_text(report(record, images), encoding="utf-8")


def _pack(batch: Batch, options: PrefixFlowOptions) -> PackedBatch:
    """The plan of an engine with these options."""
    sequences = list(batch.sequences.cpu().numpy())
    num_prompt = batch.prompts.shape[1]
    return pack_sequences(
        sequences,
        PackBudget(max_tokens=batch.token_budget, cut_overhead_tokens=options.cut_overhead_tokens),
        predict=[np.arange(len(sequence) - 1) >= num_prompt - 1 for sequence in sequences],
        mode=options.plan,
        min_shared_tokens=options.min_shared_tokens,
    )


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


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
