"""The provenance ledger: which sequences every update consumed, on disk.

    DIR/launches/0001.json                  one per start of the trainer
    DIR/step=00000012/0001-00.parquet       launch 1, first update of step 12

Files are written beside their place and linked into it, so a file that has its name is whole; a
leftover of a killed writer has another name and is never read. Nothing is changed or deleted.

[Note: launches]
A run that is killed after step 13 and resumes from a checkpoint of step 10 trains steps 11 to 13
again. Its second launch says that it begins with step 11, and for every step the reader takes what
the last launch that begins at or before it has written: the first launch's 11 to 13 led to weights
that nothing was built on. `read_ledger` reports how many updates it left out for that. A launch
that wrote no update supersedes nothing.
"""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

FORMAT_VERSION = 1

SPANS = pa.list_(
    pa.struct(
        [
            ("num_tokens", pa.int32()),
            ("version_start", pa.int64()),
            ("version_end", pa.int64()),
            ("is_sampled", pa.bool_()),
        ]
    )
)

COLUMNS: tuple[tuple[str, pa.DataType, str], ...] = (
    ("run_id", pa.string(), "identifies the run over all its launches"),
    ("launch", pa.int32(), "which start of the trainer, from 1"),
    ("step", pa.int32(), "trainer step that consumed the sequence, from 1"),
    ("trigger", pa.int32(), "which update of the step, from 0; above 0 in separate_async only"),
    ("trainer_version", pa.int64(), "version of the weights that the step started from"),
    ("uid", pa.string(), "prompt, shared by the group"),
    ("session", pa.int32(), "rollout of the prompt"),
    ("output", pa.int32(), "training sequence of the rollout"),
    ("digest", pa.int64(), "of the response tokens"),
    ("num_prompt_tokens", pa.int32(), ""),
    ("num_response_tokens", pa.int32(), "observations included"),
    ("num_sampled_tokens", pa.int32(), "null where the sequence has no record"),
    ("num_loss_tokens", pa.int32(), "in the loss after the rules"),
    ("spans", SPANS, "null where the sequence has no record"),
    ("staleness_best", pa.float64(), "of the freshest sampled token; null if none is known"),
    ("staleness_worst", pa.float64(), "of the oldest sampled token; null if none is known"),
    ("staleness_mean", pa.float64(), "over sampled tokens of known version, each at its worst"),
    ("num_mixed_tokens", pa.int32(), ""),
    ("num_missing_tokens", pa.int32(), ""),
    ("verl_min_version", pa.int64(), "verl's own label: min_global_steps"),
    ("verl_max_version", pa.int64(), "verl's own label: max_global_steps"),
    ("prefix_segments", pa.list_(pa.int64()), "digests of the shared prefixes it was run through"),
    ("mini_batches", pa.list_(pa.int32()), "optimizer steps of the update that consumed it"),
    ("num_epochs", pa.int32(), "ppo_epochs: how many mini-batches are meant to consume it"),
    ("old_log_prob_step", pa.int64(), "step under which old log-probs were computed"),
    ("reward", pa.float64(), "sum of its token scores"),
    ("advantage_mean", pa.float64(), "over its loss tokens before the rules"),
    ("advantage_min", pa.float64(), ""),
    ("advantage_max", pa.float64(), ""),
    ("k3", pa.float64(), "behaviour against old log-probs, see provenance.Mismatch"),
    ("max_ratio", pa.float64(), ""),
    ("pearson", pa.float64(), ""),
    ("action", pa.string(), "train, warn, mask or drop_group"),
    ("reasons", pa.list_(pa.string()), "of stale, mixed and missing, those found"),
)
"""Name, type and meaning of every column; values are null where they are not known."""

SCHEMA = pa.schema(
    [pa.field(name, type_, metadata={"meaning": meaning}) for name, type_, meaning in COLUMNS],
    metadata={"prefixflow_ledger": str(FORMAT_VERSION)},
)

_STEP_DIRECTORY = re.compile(r"step=(\d+)")
_UPDATE_FILE = re.compile(r"(\d+)-(\d+)\.parquet")
_LAUNCH_FILE = re.compile(r"(\d+)\.json")


class LedgerError(ValueError):
    """A directory is not a ledger, or one of its files cannot be read."""


class LedgerWriter:
    """Appends the updates of one launch of the trainer.

    Args:
        directory: of the ledger; made if missing.
        first_step: the first step this launch trains.

    Raises:
        OSError: the directory cannot be written.
        LedgerError: it holds a launch that cannot be read.
    """

    def __init__(self, directory: Path, first_step: int) -> None:
        self._directory = Path(directory)
        launches_directory = self._directory / "launches"
        launches_directory.mkdir(parents=True, exist_ok=True)
        launches = _read_launches(self._directory)
        self.run_id = launches[0].run_id if launches else uuid.uuid4().hex
        self.launch = max((launch.number for launch in launches), default=0)
        is_written = False
        while not is_written:
            # Another trainer may be starting: the number is taken by whoever writes the file.
            self.launch += 1
            record = {
                "format": FORMAT_VERSION,
                "run_id": self.run_id,
                "launch": self.launch,
                "first_step": first_step,
            }
            content = json.dumps(record, indent=2).encode() + b"\n"
            is_written = _write_whole(launches_directory / f"{self.launch:04d}.json", content)

    def write(self, step: int, trigger: int, rows: Sequence[Mapping[str, Any]]) -> Path:
        """Write the sequences of one update; returns the file.

        Args:
            rows: values by column name; `run_id`, `launch`, `step` and `trigger` are filled in,
                other absent columns are null.

        Raises:
            LedgerError: this launch has written that update before.
        """
        stamp = {"run_id": self.run_id, "launch": self.launch, "step": step, "trigger": trigger}
        table = pa.Table.from_pylist([{**row, **stamp} for row in rows], schema=SCHEMA)
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, write_page_checksum=True)
        directory = self._directory / f"step={step:08d}"
        directory.mkdir(exist_ok=True)
        file = directory / f"{self.launch:04d}-{trigger:02d}.parquet"
        if not _write_whole(file, sink.getvalue().to_pybytes()):
            raise LedgerError(f"{file} is there already: an update is written once")
        return file


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One start of the trainer."""

    number: int
    """From 1."""
    run_id: str
    first_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """What a run trained on."""

    directory: Path
    table: pa.Table
    """`SCHEMA`, ordered by step and update; see [Note: launches]."""
    launches: tuple[Launch, ...]
    num_superseded: int
    """Updates left out because a later launch resumed before them."""


def read_ledger(directory: Path) -> Ledger:
    """Read the ledger of a run.

    Args:
        directory: of the ledger, or a run directory with `provenance` somewhere below it.

    Raises:
        LedgerError: there is no ledger, or more than one, or a file is damaged.
    """
    directory = _find_ledger(Path(directory))
    launches = _read_launches(directory)
    files = _update_files(directory)
    writers = {launch for _, launch, _ in files}
    tables, num_superseded = [], 0
    for step, launch, file in files:
        current = max(
            known.number
            for known in launches
            if known.number in writers and known.first_step <= step
        )
        if launch != current:
            num_superseded += 1
            continue
        try:
            table = pq.read_table(
                file, schema=SCHEMA, partitioning=None, page_checksum_verification=True
            )
            _check_origin(table, pq.read_schema(file), step, launch)
        except (pa.ArrowException, OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise LedgerError(
                f"{file} is damaged ({reason}): remove it to read the rest"
            ) from error
        tables.append(table)
    table = pa.concat_tables(tables) if tables else SCHEMA.empty_table()
    return Ledger(
        directory=directory,
        table=table,
        launches=tuple(launches),
        num_superseded=num_superseded,
    )


def _check_origin(table: pa.Table, schema: pa.Schema, step: int, launch: int) -> None:
    """Raise ValueError if this is not the file of `step` and `launch`."""
    if schema.remove_metadata() != SCHEMA.remove_metadata():
        raise ValueError("it has other columns than a ledger's")
    for name, expected in (("step", step), ("launch", launch)):
        found = table[name].unique().to_pylist()
        if found not in ([], [expected]):
            raise ValueError(f"its {name} is {found}, its name says {expected}")


def _find_ledger(directory: Path) -> Path:
    if (directory / "launches").is_dir():
        return directory
    found = sorted(path.parent for path in directory.glob("**/provenance/launches"))
    if not found:
        raise LedgerError(f"{directory} holds no provenance ledger: name a run's directory")
    if len(found) > 1:
        names = ", ".join(str(path) for path in found)
        raise LedgerError(f"{directory} holds more than one provenance ledger: name one of {names}")
    return found[0]


def _read_launches(directory: Path) -> list[Launch]:
    """In order of their numbers; a launch whose file is gone begins with its first update."""
    launches = []
    for file in sorted((directory / "launches").iterdir()):
        if not _LAUNCH_FILE.fullmatch(file.name):
            continue
        try:
            record = json.loads(file.read_text())
            if record["format"] != FORMAT_VERSION:
                raise LedgerError(
                    f"{file} has format {record['format']}, this version reads {FORMAT_VERSION}"
                )
            number, first_step = record["launch"], record["first_step"]
            if number != int(file.stem) or not isinstance(first_step, int):
                raise ValueError(f"launch {number} from step {first_step}")
            launches.append(
                Launch(number=number, run_id=str(record["run_id"]), first_step=first_step)
            )
        except LedgerError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise LedgerError(
                f"{file} is damaged ({error!r}): remove it, and the launch counts from its first "
                "update"
            ) from error
    known = {launch.number for launch in launches}
    first_steps: dict[int, int] = {}
    for step, number, _ in _update_files(directory):
        first_steps.setdefault(number, step)
    run_id = launches[0].run_id if launches else uuid.uuid4().hex
    for number in first_steps.keys() - known:
        launches.append(Launch(number=number, run_id=run_id, first_step=first_steps[number]))
    return sorted(launches, key=lambda launch: launch.number)


def _update_files(directory: Path) -> list[tuple[int, int, Path]]:
    """(step, launch, file) of every whole file, in the order of training."""
    found = []
    for step_directory in directory.iterdir():
        step = _STEP_DIRECTORY.fullmatch(step_directory.name)
        for file in step_directory.iterdir() if step else ():
            update = _UPDATE_FILE.fullmatch(file.name)
            if update:
                found.append((int(step[1]), int(update[1]), int(update[2]), file))
    return [(step, launch, file) for step, launch, _, file in sorted(found)]


def _write_whole(file: Path, content: bytes) -> bool:
    """Write so that `file` either does not exist or is whole, even after a power cut.

    Returns:
        False, and nothing is written, if `file` exists.
    """
    part = file.with_name(f".{file.name}.{os.getpid()}")
    with part.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    try:
        os.link(part, file)
    except FileExistsError:
        return False
    finally:
        part.unlink()
    directory = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
    return True
