"""Provenance chain, on disk: what is written is read, whatever happens to the writer; what was
trained again counts once; what is damaged is named.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")

import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from prefixflow_verl.ledger import (  # noqa: E402
    COLUMNS,
    FORMAT_VERSION,
    SCHEMA,
    LedgerError,
    LedgerWriter,
    read_ledger,
)

STAMPED = ("run_id", "launch", "step", "trigger")
VALUES = {
    pa.string(): st.text(max_size=8),
    pa.int32(): st.integers(-(2**31), 2**31 - 1),
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.bool_(): st.booleans(),
    pa.float64(): st.floats(allow_nan=False),
}


def values_of(type_: pa.DataType) -> st.SearchStrategy:
    """Anything that a column of this type may hold, null included."""
    if pa.types.is_list(type_):
        return st.none() | st.lists(values_of(type_.value_type), max_size=3)
    if pa.types.is_struct(type_):
        return st.fixed_dictionaries({field.name: values_of(field.type) for field in type_})
    return st.none() | VALUES[type_]


row_values = st.fixed_dictionaries(
    {}, optional={name: values_of(type_) for name, type_, _ in COLUMNS if name not in STAMPED}
)


@settings(max_examples=25)
@given(st.lists(st.lists(row_values, max_size=3), max_size=3))
def test_what_is_written_is_read(updates):
    with tempfile.TemporaryDirectory() as directory:
        writer = LedgerWriter(Path(directory), first_step=1)
        expected = []
        for step, rows in enumerate(updates, start=1):
            writer.write(step, 0, rows)
            stamp = {"run_id": writer.run_id, "launch": 1, "step": step, "trigger": 0}
            expected += [dict.fromkeys(SCHEMA.names) | row | stamp for row in rows]
        ledger = read_ledger(Path(directory))
    assert ledger.table.to_pylist() == expected
    assert ledger.table.schema.equals(SCHEMA)
    assert ledger.num_superseded == 0


def test_every_column_says_what_it_means(tmp_path):
    file = LedgerWriter(tmp_path, 1).write(1, 0, [{"uid": "a"}])
    stored = pq.read_schema(file)
    assert stored.metadata[b"prefixflow_ledger"] == str(FORMAT_VERSION).encode()
    for name, type_, meaning in COLUMNS:
        assert stored.field(name).type == type_
        assert stored.field(name).metadata[b"meaning"] == meaning.encode()


def test_a_value_of_the_wrong_type_writes_nothing(tmp_path):
    writer = LedgerWriter(tmp_path, 1)
    with pytest.raises((pa.ArrowException, TypeError)):
        writer.write(1, 0, [{"uid": "a", "digest": "not a number"}])
    assert read_ledger(tmp_path).table.num_rows == 0


def uids(directory: Path) -> list[str]:
    return read_ledger(directory).table["uid"].to_pylist()


def write_steps(writer: LedgerWriter, steps) -> None:
    for step in steps:
        writer.write(step, 0, [{"uid": f"launch {writer.launch} step {step}"}])


def test_rows_come_in_the_order_of_training(tmp_path):
    writer = LedgerWriter(tmp_path, 9)
    for step, trigger in ((9, 1), (100, 0), (9, 10), (9, 0), (10, 0), (9, 2)):
        writer.write(step, trigger, [{"uid": f"{step}.{trigger}"}])
    assert uids(tmp_path) == ["9.0", "9.1", "9.2", "9.10", "10.0", "100.0"]


def test_a_step_trained_again_counts_once(tmp_path):
    first = LedgerWriter(tmp_path, 1)
    write_steps(first, range(1, 14))
    second = LedgerWriter(tmp_path, 11)
    assert (second.launch, second.run_id) == (2, first.run_id)
    write_steps(second, [11, 12])
    ledger = read_ledger(tmp_path)
    # Step 13 led to weights that nothing was built on; it has not been trained again yet.
    assert ledger.table["uid"].to_pylist() == [
        *(f"launch 1 step {step}" for step in range(1, 11)),
        "launch 2 step 11",
        "launch 2 step 12",
    ]
    assert ledger.num_superseded == 3
    assert [(launch.number, launch.first_step) for launch in ledger.launches] == [(1, 1), (2, 11)]


def test_a_launch_that_resumes_earlier_supersedes_all_before_it(tmp_path):
    for first_step, last_step in ((1, 6), (5, 8), (3, 4)):
        write_steps(LedgerWriter(tmp_path, first_step), range(first_step, last_step + 1))
    assert uids(tmp_path) == [f"launch {n} step {s}" for n, s in ((1, 1), (1, 2), (3, 3), (3, 4))]
    assert read_ledger(tmp_path).num_superseded == 8


def test_every_update_of_a_superseded_step_goes(tmp_path):
    first = LedgerWriter(tmp_path, 1)
    for trigger in range(3):
        first.write(1, trigger, [{"uid": f"old {trigger}"}])
    second = LedgerWriter(tmp_path, 1)
    second.write(1, 0, [{"uid": "new 0"}])
    assert uids(tmp_path) == ["new 0"]
    assert read_ledger(tmp_path).num_superseded == 3


def test_a_ledger_is_found_below_its_run(tmp_path):
    directory = tmp_path / "run" / "checkpoints" / "provenance"
    write_steps(LedgerWriter(directory, 1), [1])
    for named in (tmp_path, tmp_path / "run", directory):
        ledger = read_ledger(named)
        assert ledger.directory == directory
        assert ledger.table.num_rows == 1


def test_no_ledger_and_two_ledgers_are_errors(tmp_path):
    with pytest.raises(LedgerError, match="holds no provenance ledger: name a run's directory"):
        read_ledger(tmp_path)
    with pytest.raises(LedgerError, match="holds no provenance ledger"):
        read_ledger(tmp_path / "missing")
    for name in ("one", "two"):
        LedgerWriter(tmp_path / name / "provenance", 1)
    with pytest.raises(LedgerError, match="holds more than one provenance ledger") as error:
        read_ledger(tmp_path)
    for name in ("one", "two"):
        assert str(tmp_path / name / "provenance") in str(error.value)


def test_an_empty_ledger(tmp_path):
    LedgerWriter(tmp_path, 1)
    ledger = read_ledger(tmp_path)
    assert ledger.table.num_rows == 0
    assert ledger.table.schema.equals(SCHEMA)
    assert len(ledger.launches) == 1


def test_a_ledger_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        LedgerWriter(tmp_path / "file" / "ledger", 1)


def test_leftovers_and_foreign_files_are_no_updates(tmp_path):
    file = LedgerWriter(tmp_path, 1).write(1, 0, [{"uid": "a"}])
    whole = file.read_bytes()
    for name in (".0001-01.parquet.77", "0001-01.parquet.tmp", "0001.parquet", "notes.txt"):
        (file.parent / name).write_bytes(whole)
    (tmp_path / "launches" / ".0002.json.77").write_text("{")
    (tmp_path / "README").write_text("")
    (tmp_path / "step=00000002.old").mkdir()
    (tmp_path / "step=00000002.old" / file.name).write_bytes(whole)
    assert uids(tmp_path) == ["a"]
    assert len(read_ledger(tmp_path).launches) == 1


@pytest.mark.parametrize("kept", [0.0, 0.001, 0.3, 0.9, 0.999])
def test_a_truncated_update_is_named(tmp_path, kept):
    writer = LedgerWriter(tmp_path, 1)
    write_steps(writer, [1, 2, 3])
    file = tmp_path / "step=00000002" / "0001-00.parquet"
    content = file.read_bytes()
    file.write_bytes(content[: int(kept * len(content))])
    with pytest.raises(LedgerError) as error:
        read_ledger(tmp_path)
    assert f"{file} is damaged" in str(error.value)
    assert len(str(error.value).splitlines()) == 1
    file.unlink()
    assert uids(tmp_path) == ["launch 1 step 1", "launch 1 step 3"]


def test_flipped_bytes_in_an_update_are_found(tmp_path):
    """One letter of a value, which Parquet alone would read as another value."""
    uids = ("0f6e3c", "81a9d2")
    file = LedgerWriter(tmp_path, 1).write(1, 0, [{"uid": uid} for uid in uids])
    content = file.read_bytes()
    # The first place holds the value, later ones statistics.
    file.write_bytes(content.replace(b"0f6e3c", b"0f6e3d", 1))
    assert file.read_bytes() != content
    with pytest.raises(LedgerError, match="0001-00.parquet is damaged"):
        read_ledger(tmp_path)


@pytest.mark.parametrize(
    "content, reason",
    [
        (b"{", "is damaged"),
        (b"", "is damaged"),
        (b"\xff\xfe", "is damaged"),
        (b"[]", "is damaged"),
        (b'{"format": 1, "run_id": "r"}', "is damaged"),
        (b'{"format": 1, "run_id": "r", "launch": "x", "first_step": 1}', "is damaged"),
        (b'{"format": 99}', "has format 99, this version reads 1"),
    ],
)
def test_a_launch_that_cannot_be_read_is_named(tmp_path, content, reason):
    LedgerWriter(tmp_path, 1)
    file = tmp_path / "launches" / "0001.json"
    file.write_bytes(content)
    with pytest.raises(LedgerError, match=f"0001.json {reason}"):
        read_ledger(tmp_path)


def test_a_launch_is_plain_json(tmp_path):
    writer = LedgerWriter(tmp_path, 7)
    record = json.loads((tmp_path / "launches" / "0001.json").read_text())
    assert record == {
        "format": FORMAT_VERSION,
        "run_id": writer.run_id,
        "launch": 1,
        "first_step": 7,
    }


WRITER = """
import os, signal, sys
from pathlib import Path
from prefixflow_verl.ledger import LedgerWriter

directory, first_step, call, number = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
writer = LedgerWriter(Path(directory), first_step)
if call:
    real, calls = getattr(os, call), []

    def die(*arguments):
        calls.append(1)
        if len(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments)

    setattr(os, call, die)
span = {"num_tokens": 5, "version_start": 0, "version_end": 0, "is_sampled": True}
step = first_step
while True:
    writer.write(step, 0, [{"uid": f"{step}", "session": i, "spans": [span]} for i in range(300)])
    print(step, flush=True)
    step += 1
"""
"""Writes steps until it is killed, or kills itself in its `number`-th call of os.`call`."""


def start_writer(directory: Path, first_step: int, call: str = "", number: int = 0):
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(directory), str(first_step), call, str(number)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def steps_and_sizes(directory: Path) -> tuple[list[int], set[int]]:
    """Steps in the ledger, and the numbers of sequences they have."""
    steps = read_ledger(directory).table["step"].to_pylist()
    return sorted(set(steps)), {steps.count(step) for step in set(steps)}


def test_a_writer_killed_at_any_time_loses_the_step_in_flight_at_most(tmp_path):
    generator = random.Random(0)
    next_step = 1
    for launch in range(1, 6):
        writer = start_writer(tmp_path, next_step)
        first = int(writer.stdout.readline())
        time.sleep(generator.uniform(0, 0.05))
        writer.send_signal(signal.SIGKILL)
        reported = [first, *(int(line) for line in writer.stdout.read().splitlines())]
        assert writer.wait() == -signal.SIGKILL
        writer.stdout.close()
        steps, sizes = steps_and_sizes(tmp_path)
        assert steps == list(range(1, steps[-1] + 1))
        assert sizes == {300}
        # The last one may have been killed between writing a step and saying so.
        assert steps[-1] in (reported[-1], reported[-1] + 1)
        assert len(read_ledger(tmp_path).launches) == launch
        next_step = steps[-1] + 1


@pytest.mark.parametrize("call, number, num_whole", [("fsync", 3, 1), ("link", 2, 1)])
def test_a_writer_killed_before_its_file_is_in_place(tmp_path, call, number, num_whole):
    """The third fsync is that of the second step's content: file and directory take one each."""
    writer = start_writer(tmp_path, 1, call, number)
    output, _ = writer.communicate(timeout=60)
    assert writer.returncode == -signal.SIGKILL
    assert output.split() == [str(step + 1) for step in range(num_whole)]
    (leftover,) = tmp_path.glob("step=*/.*")
    assert leftover.parent.name == f"step={num_whole + 1:08d}"
    steps, sizes = steps_and_sizes(tmp_path)
    assert (steps, sizes) == (list(range(1, num_whole + 1)), {300})
    # The next launch trains that step again, and the leftover stays unread.
    again = LedgerWriter(tmp_path, num_whole + 1)
    again.write(num_whole + 1, 0, [{"uid": "again"}])
    assert uids(tmp_path)[-1] == "again"


def test_writers_that_start_together_are_two_launches(tmp_path, monkeypatch):
    import prefixflow_verl.ledger as module

    with monkeypatch.context() as patched:
        patched.setattr(module, "_read_launches", lambda directory: [])
        first, second = LedgerWriter(tmp_path, 1), LedgerWriter(tmp_path, 1)
    assert (first.launch, second.launch) == (1, 2)
    first.write(1, 0, [{"uid": "first"}])
    second.write(1, 0, [{"uid": "second"}])
    assert uids(tmp_path) == ["second"]
    with pytest.raises(LedgerError, match="an update is written once"):
        first.write(1, 0, [{"uid": "again"}])


def test_a_launch_that_wrote_nothing_supersedes_nothing(tmp_path):
    first = LedgerWriter(tmp_path, 1)
    for step in range(1, 6):
        first.write(step, 0, [{"uid": str(step)}])
    LedgerWriter(tmp_path, 3)
    LedgerWriter(tmp_path, 6).write(6, 0, [{"uid": "6"}])
    assert uids(tmp_path) == ["1", "2", "3", "4", "5", "6"]


def test_a_launch_without_its_file_counts_from_its_first_update(tmp_path):
    first = LedgerWriter(tmp_path, 1)
    for step in (1, 2, 3):
        first.write(step, 0, [{"uid": f"a{step}"}])
    LedgerWriter(tmp_path, 3).write(3, 0, [{"uid": "b3"}])
    for file in (tmp_path / "launches").iterdir():
        file.unlink()
    assert uids(tmp_path) == ["a1", "a2", "b3"]
    assert LedgerWriter(tmp_path, 4).launch == 3


@pytest.mark.parametrize("what", ["moved", "foreign"])
def test_a_file_that_is_not_of_its_place_is_named(tmp_path, what):
    file = LedgerWriter(tmp_path, 1).write(1, 0, [{"uid": "a"}])
    if what == "moved":
        file.parent.rename(tmp_path / "step=00000002")
    else:
        pq.write_table(pa.table({"loss": [1.0]}), file)
    sentence = "its step is" if what == "moved" else "other columns"
    with pytest.raises(LedgerError, match=sentence):
        read_ledger(tmp_path)
