"""Provenance link, in the trainer: rows go through verl's real TransferQueue, are filtered,
reordered and padded by verl's own functions, and every record stays with its sequence.
"""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.queue_process import run_in_queue, serve

STEP = 5
TRAINER_VERSION = STEP - 1

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, Any]:
    return run_in_queue("tests.integration.test_update_gate", tmp_path_factory.mktemp("gate"))


def test_every_record_stays_with_its_sequence(found):
    for round_ in found["rounds"]:
        assert round_["num_padding"] > 0
        assert round_["order"] != sorted(round_["order"]), "the batch was reordered"
        assert sorted(round_["ledger_keys"]) == sorted(round_["expected"])
        for key, row in round_["ledger"].items():
            expected = round_["expected"][key]
            for name, value in expected.items():
                assert row[name] == value, (key, name)


def test_rules_reach_both_masks_of_the_stored_rows(found):
    masked = found["masked"]
    assert Counter(masked["kinds"]) == {"mask": 3, "train": 3}
    for masks in (masked["response_mask"], masked["loss_mask"]):
        assert masks == masked["expected"]
    assert masked["removed_tokens"] == sum(8 - sum(mask) for mask in masked["expected"])


def test_a_dropped_group_loses_every_token(found):
    dropped = found["dropped"]
    assert dropped["masks"] == {"a": 0, "b": 24}
    assert dropped["actions"] == {"a": "drop_group", "b": "train"}
    assert dropped["metric"] == 1


def test_an_error_rule_stops_and_names_its_setting(found):
    assert "provenance.on_missing=error" in found["error"]
    assert "b_2_0" in found["error"] or "uid b" in found["error"]


def test_a_record_of_another_row_stops_the_update(found):
    assert "the policy record of x_1_0 is attached to x_0_0" in found["swapped"]


def test_a_record_that_is_too_short_stops_the_update_by_name(found):
    assert "the policy spans of y_1_0 cover 7 tokens, its response has 8" in found["short"]


def test_a_ledger_that_cannot_be_written_stops_before_training(found):
    assert "provenance.ledger_dir=" in found["unwritable"]
    assert "cannot be written" in found["unwritable"]


def test_a_large_batch_costs_little(found):
    """A bound that only a per-token loop breaks; benchmarks/LOG.md has the figure."""
    assert found["large"]["seconds"] < 10
    assert found["large"]["num_rows"] == 1024


def _main(directory: Path) -> dict[str, Any]:
    import numpy as np
    import torch
    import transfer_queue as tq
    from omegaconf import OmegaConf
    from transfer_queue import KVBatchMeta
    from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict

    from prefixflow_verl.config import ProvenanceOptions
    from prefixflow_verl.ledger import read_ledger
    from prefixflow_verl.provenance import (
        RECORD_KEY,
        PolicyRecord,
        PolicySpan,
        ProvenanceError,
        digest_tokens,
    )
    from prefixflow_verl.update_gate import UpdateGate

    generator = np.random.default_rng(0)

    def gate(name: str, **rules: Any) -> UpdateGate:
        config = OmegaConf.create(
            {
                "trainer": {"default_local_dir": str(directory / name)},
                "actor_rollout_ref": {"actor": {"ppo_epochs": 1}},
            }
        )
        return UpdateGate(config, ProvenanceOptions(**rules))

    def row(uid: str, session: int, spans: list[PolicySpan] | None) -> tuple[str, dict, dict]:
        num_tokens = sum(span.num_tokens for span in spans) if spans else 8
        response = torch.from_numpy(generator.integers(0, 99, num_tokens))
        prompt = torch.arange(4)
        fields = {}
        if spans is not None:
            fields[RECORD_KEY] = PolicyRecord(
                uid=uid,
                session=session,
                output=0,
                digest=digest_tokens(response.numpy()),
                spans=tuple(spans),
            ).to_wire()
        mask = torch.ones(num_tokens, dtype=torch.int64)
        log_probs = torch.from_numpy(generator.normal(-2, 0.1, num_tokens)).float()
        return (
            f"{uid}_{session}_0",
            {
                "uid": uid,
                "session_id": session,
                "prompts": prompt,
                "responses": response,
                "input_ids": torch.cat([prompt, response]),
                "position_ids": torch.arange(4 + num_tokens),
                "response_mask": mask,
                "loss_mask": mask,
                "rm_scores": torch.full((num_tokens,), 0.5),
                "rollout_log_probs": log_probs,
                "old_log_probs": log_probs,
                "advantages": torch.full((num_tokens,), float(session)),
                "extra_fields": fields,
            },
            {
                "prompt_len": 4,
                "response_len": num_tokens,
                "seq_len": 4 + num_tokens,
                "min_global_steps": 1,
                "max_global_steps": 2,
            },
        )

    def stored(rows: list[tuple[str, dict, dict]]) -> KVBatchMeta:
        keys, fields, tags = (list(column) for column in zip(*rows, strict=True))
        tq.kv_batch_put(
            keys=keys, fields=list_of_dict_to_tensordict(fields), tags=tags, partition_id="train"
        )
        return KVBatchMeta(keys=keys, tags=tags, partition_id="train")

    def span(num_tokens: int, start: int | None, end: int | None = None) -> PolicySpan:
        return PolicySpan(
            num_tokens=num_tokens, version_start=start, version_end=start if end is None else end
        )

    def masks_of(batch: KVBatchMeta, name: str) -> list[list[int]]:
        data = tq.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=[name])
        return [mask.tolist() for mask in data[name].unbind()]

    def ledger_rows(name: str) -> dict[str, dict[str, Any]]:
        rows = read_ledger(directory / name).table.to_pylist()
        return {f"{r['uid']}_{r['session']}_{r['output']}": r for r in rows}

    found: dict[str, Any] = {"rounds": []}
    for round_ in range(3):
        rows = []
        for group in range(4):
            # Filtering leaves groups uneven.
            for session in generator.permutation(6)[: generator.integers(1, 6)].tolist():
                versions = sorted(generator.integers(0, TRAINER_VERSION + 1, 2).tolist())
                first = span(int(generator.integers(1, 9)), versions[0])
                second = span(int(generator.integers(1, 9)), *versions)
                rows.append(row(f"u{round_}{group}", session, [first, second]))
        expected = {
            key: {
                "digest": fields["extra_fields"][RECORD_KEY]["digest"],
                "num_response_tokens": len(fields["responses"]),
                "advantage_mean": float(fields["session_id"]),
                "num_loss_tokens": len(fields["responses"]),
            }
            for key, fields, _ in rows
        }
        batch = stored(rows)
        multiple = len(rows) + 3
        batch = upsample_batch_to_divisible_size(batch, multiple, eos_token_id=1)
        order = generator.permutation(len(batch)).tolist()
        batch.reorder(order)
        own = gate(f"round{round_}")
        own.apply_rules(batch, {}, STEP)
        real = [key for key in batch.keys if not key.startswith("pad")]
        report = {"mini_batch": 0, "keys": real, "prefix_segments": [[1]] * len(real)}
        own.record({}, STEP, 0, [report])
        rows_written = ledger_rows(f"round{round_}")
        found["rounds"].append(
            {
                "num_padding": len(batch) - len(rows),
                "order": order,
                "expected": expected,
                "ledger_keys": list(rows_written),
                "ledger": {
                    key: {name: r[name] for name in expected[key]}
                    for key, r in rows_written.items()
                },
            }
        )

    fresh, old = [span(8, TRAINER_VERSION)], [span(3, 0), span(5, TRAINER_VERSION)]
    batch = stored([row("m", i, old if i % 2 else fresh) for i in range(6)])
    metrics: dict[str, Any] = {}
    masking = gate("masked", max_staleness=1, on_stale="mask")
    masking.apply_rules(batch, metrics, STEP)
    masking.record(metrics, STEP, 0, [])
    found["masked"] = {
        "kinds": [r["action"] for r in ledger_rows("masked").values()],
        "response_mask": masks_of(batch, "response_mask"),
        "loss_mask": masks_of(batch, "loss_mask"),
        "expected": [[0] * 3 + [1] * 5 if i % 2 else [1] * 8 for i in range(6)],
        "removed_tokens": metrics["prefixflow/provenance/removed_tokens"],
    }

    mixed = [span(8, 2, 3)]
    batch = stored(
        [row("a", i, mixed if i == 1 else fresh) for i in range(3)]
        + [row("b", i, fresh) for i in range(3)]
    )
    metrics = {}
    dropping = gate("dropped", on_mixed="drop_group")
    dropping.apply_rules(batch, metrics, STEP)
    dropping.record(metrics, STEP, 0, [])
    sums = Counter()
    for key, mask in zip(batch.keys, masks_of(batch, "response_mask"), strict=True):
        sums[key[0]] += sum(mask)
    found["dropped"] = {
        "masks": {"a": sums["a"], "b": sums["b"]},
        "actions": {key[0]: r["action"] for key, r in ledger_rows("dropped").items()},
        "metric": metrics["prefixflow/provenance/dropped_groups"],
    }

    batch = stored([row("b", i, None if i == 2 else fresh) for i in range(3)])
    try:
        gate("error", on_missing="error").apply_rules(batch, {}, STEP)
        found["error"] = "went on"
    except ProvenanceError as error:
        found["error"] = str(error)

    rows = [row("x", i, fresh) for i in range(2)]
    first, second = (fields for _, fields, _ in rows)
    swapped = second["extra_fields"], first["extra_fields"]
    first["extra_fields"], second["extra_fields"] = swapped
    try:
        gate("swapped").apply_rules(stored(rows), {}, STEP)
        found["swapped"] = "went on"
    except ProvenanceError as error:
        found["swapped"] = str(error)

    rows = [row("y", i, fresh) for i in range(2)]
    wire = rows[1][1]["extra_fields"][RECORD_KEY]
    wire["spans"] = [[7, *wire["spans"][0][1:]]]
    try:
        gate("short", max_staleness=0, on_stale="mask").apply_rules(stored(rows), {}, STEP)
        found["short"] = "went on"
    except ProvenanceError as error:
        found["short"] = str(error)

    (directory / "file").write_text("")
    try:
        gate("unused", ledger_dir=str(directory / "file" / "ledger")).apply_rules(batch, {}, STEP)
        found["unwritable"] = "went on"
    except ValueError as error:
        found["unwritable"] = str(error)

    batch = stored(
        [row(f"l{i // 16}", i % 16, [span(700, 1), span(300, 1, 2)]) for i in range(1024)]
    )
    large = gate("large", max_staleness=0, on_stale="mask")
    began = time.perf_counter()
    large.apply_rules(batch, {}, STEP)
    large.record({}, STEP, 0, [])
    found["large"] = {
        "seconds": time.perf_counter() - began,
        "num_rows": len(ledger_rows("large")),
    }
    print(found["large"])
    return found


if __name__ == "__main__":
    serve(_main)
