"""Runs a training command: writes all its output to a log, prints its progress, ends it when stuck.

    python watch_run.py --log run.log --timeout-s 1800 -- python -m verl.trainer.main_ppo ...

An exception inside a vLLM worker leaves verl's trainer waiting for ever, so the command is also
ended a short while after such a failure shows up in its output. If the command fails, the last line
printed is its cause.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

FATAL_MARKS = (
    "Worker failed with error",
    "WorkerProc hit an exception",
    "EngineCore encountered a fatal error",
)
"""Output after which the trainer waits for a reply that will not come."""

GRACE_S = 20.0
"""Time a failing run gets to end by itself and report."""

PROGRESS = re.compile(r"step:(\d+) - (.*)")
SHOWN_METRICS = (
    "critic/score/mean",
    "actor/grad_norm",
    "training/rollout_probs_diff_max",
    "prefixflow/reuse_ratio",
    "timing_s/step",
    "timing_s/gen",
    "timing_s/old_log_prob",
    "timing_s/update_actor",
)
NOTABLE = re.compile(r"(prefixflow: |Resuming from|Training from scratch)")
EXCEPTION = re.compile(r"^(?:\([^)]*\)\s*)?((?:\w+\.)*\w*(?:Error|Exception)(?:\(\w+\))?: .+)$")
ANSI_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--timeout-s", type=float, required=True)
    parser.add_argument("--verbose", type=int, default=0, help="1 prints every line")
    parser.add_argument("command", nargs="+")
    arguments = parser.parse_args()

    print(f"log: {arguments.log}", flush=True)
    process = subprocess.Popen(
        arguments.command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, lambda number, frame: sys.exit(128 + number))
    watch = _Watch(process, arguments.timeout_s)
    try:
        with arguments.log.open("w") as log:
            for line in process.stdout:
                log.write(line)
                log.flush()
                watch.see(line)
                shown = line.rstrip("\n") if arguments.verbose else _digest(line)
                if shown:
                    print(shown, flush=True)
        status = process.wait()
    finally:
        watch.stop()
        _end(process)
    if watch.ended_because:
        status = 124
        print(f"error: {watch.ended_because}; the log is {arguments.log}", file=sys.stderr)
    if status != 0 and watch.last_exception:
        print(f"error: the run failed: {watch.last_exception}", file=sys.stderr)
    elif status != 0:
        print(f"error: the run ended with status {status}, see {arguments.log}", file=sys.stderr)
    return status


class _Watch:
    """Ends the process at its time limit, or some time after a failure it will not report."""

    def __init__(self, process: subprocess.Popen, timeout_s: float):
        self.ended_because: str | None = None
        self.last_exception: str | None = None
        self._process = process
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._failure: str | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def see(self, line: str) -> None:
        text = ANSI_ESCAPE.sub("", line).strip()
        exception = EXCEPTION.match(text)
        if exception:
            self.last_exception = exception.group(1)
        if self._failure is None and any(mark in text for mark in FATAL_MARKS):
            self._failure = text
            self._deadline = min(self._deadline, time.monotonic() + GRACE_S)

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(0.5):
            if time.monotonic() < self._deadline:
                continue
            if self._failure is not None:
                self.ended_because = f"a worker failed: {self._failure}"
            else:
                self.ended_because = f"the run took longer than {self._timeout_s:.0f} s"
            _end(self._process)
            return


def _end(process: subprocess.Popen) -> None:
    """Ends the command and everything it started; it leads a session of its own."""
    for signum, wait_s in ((signal.SIGTERM, 15.0), (signal.SIGKILL, 5.0)):
        if process.poll() is not None:
            return
        os.killpg(process.pid, signum)
        try:
            process.wait(wait_s)
        except subprocess.TimeoutExpired:
            continue


def _digest(line: str) -> str | None:
    """What a reader wants of one line of output: a step's key metrics, or a notable event."""
    text = ANSI_ESCAPE.sub("", line).rstrip()
    step = PROGRESS.search(text)
    if step is None:
        return text if NOTABLE.search(text) else None
    metrics = dict(item.split(":", 1) for item in step.group(2).split(" - ") if ":" in item)
    shown = [f"{name} {float(metrics[name]):.4g}" for name in SHOWN_METRICS if name in metrics]
    return f"step {step.group(1)} | " + " | ".join(shown)


if __name__ == "__main__":
    sys.exit(main())
