"""Provenance link, in the engine: rows that contradict their policy records are refused on every
rank before anything is trained, and the rules give the gradients of a batch made without what they
take out. Real FSDP2 on two gloo ranks.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from tests.dist import run_ranks
from tests.engines import make_rows, make_worker, save_tiny_model, tokens, use_cpu_platform

STEP = 7
RANKS = 2


def _rollouts(rank: int):
    """Two groups of three responses of 5 to 7 tokens; the same prompts on both ranks."""
    shared, own = torch.Generator().manual_seed(0), torch.Generator().manual_seed(rank + 1)
    prompts = [tokens(shared, 12) for _ in range(2)]
    return [(prompts[g], tokens(own, 5 + i)) for g in range(2) for i in range(3)]


def _uids() -> list[str]:
    return ["a", "a", "a", "b", "b", "b"]


def _records(rank: int, rollouts, spans=None):
    from prefixflow_verl.provenance import PolicyRecord, PolicySpan, digest_tokens

    records = []
    for index, (uid, (_, response)) in enumerate(zip(_uids(), rollouts, strict=True)):
        clean = (PolicySpan(num_tokens=len(response), version_start=6, version_end=6),)
        records.append(
            PolicyRecord(
                uid=uid,
                session=3 * rank + index % 3,
                output=0,
                digest=digest_tokens(response.numpy()),
                spans=spans[index] if spans else clean,
            )
        )
    return records


def _rows(rank: int, rollouts, wires, **settings: Any):
    from tensordict import NonTensorStack

    settings = {"prefixflow_step": STEP, "prefixflow_trigger": 0, **settings}
    steps = {key: settings.pop(key) for key in list(settings) if key.endswith("log_prob_step")}
    rows = make_rows(rollouts, global_batch_size=RANKS * len(rollouts), seed=rank, **settings)
    rows["uid"] = NonTensorStack(*_uids()[: len(rollouts)])
    rows["extra_fields"] = NonTensorStack(
        *({"policy_record": wire} if wire is not None else {} for wire in wires)
    )
    for key, step in steps.items():
        rows[key] = torch.full((len(rollouts),), step)
    return rows


def _off_by_one(wires):
    num_tokens, *rest = wires[0]["spans"][0]
    wires[0]["spans"] = [(num_tokens - 1, *rest)]


def _from_the_future(wires):
    num_tokens, *_ = wires[1]["spans"][0]
    wires[1]["spans"] = [(num_tokens, 6, STEP, True)]


def _shuffled(wires):
    wires[0], wires[3] = wires[3], wires[0]


def _shuffled_in_group(wires):
    wires[3]["digest"], wires[4]["digest"] = wires[4]["digest"], wires[3]["digest"]


def _malformed(wires):
    del wires[2]["spans"]


FAULTS = {
    "off_by_one": (_off_by_one, {}, "cover 4 tokens, its response has 5"),
    "future": (_from_the_future, {}, "name version 7, but the trainer is at version 6"),
    "shuffled": (_shuffled, {}, "is attached to a row of uid a"),
    "shuffled_in_group": (_shuffled_in_group, {}, "was made for other response tokens"),
    "malformed": (_malformed, {}, "not a policy record"),
    "old_step": (None, {"old_log_prob_step": 6}, "the old log-probs of a_3_0 were computed in st"),
    "ref_step": (None, {"ref_log_prob_step": 6}, "the ref log-probs of a_3_0 were computed in st"),
}
"""Name -> (change of the wires, columns, sentence); done on rank 1 alone."""


def _faults(rank: int, path: str) -> dict[str, Any]:
    from prefixflow_verl.provenance import ProvenanceError

    worker = make_worker(path, "prefixflow")
    rollouts = _rollouts(rank)
    found = {}
    for name, (spoil, columns, _) in FAULTS.items():
        wires = [record.to_wire() for record in _records(rank, rollouts)]
        if rank == 1 and spoil is not None:
            spoil(wires)
        steps = {key: STEP for key in columns} | (columns if rank == 1 else {})
        try:
            worker.train_batch(_rows(rank, rollouts, wires, **steps))
            found[name] = "trained"
        except ProvenanceError as error:
            found[name] = str(error)
    gradients = [p.grad for p in worker.engine.module.parameters() if p.grad is not None]
    found["num_gradients"] = sum(bool(g.to_local().abs().sum() > 0) for g in gradients)
    # Both ranks are still in step.
    wires = [record.to_wire() for record in _records(rank, rollouts)]
    rows = _rows(rank, rollouts, wires, old_log_prob_step=STEP)
    found["afterwards"] = worker.train_batch(rows)["metrics"]["grad_norm"]
    return found


def _unguarded(rank: int, path: str) -> dict[str, Any]:
    """Provenance off: nothing is checked; padding rows and rows without records never are."""
    rollouts = _rollouts(rank)
    wires = [record.to_wire() for record in _records(rank, rollouts)]
    _off_by_one(wires)
    off = make_worker(path, "prefixflow", options={"provenance": {"enabled": False}})
    metrics = {"off": off.train_batch(_rows(rank, rollouts, wires))["metrics"]}
    on = make_worker(path, "prefixflow")
    masks = [torch.ones(len(response), dtype=torch.int64) for _, response in rollouts]
    masks[0] = torch.zeros_like(masks[0])
    padded = _rows(rank, rollouts, wires, masks=masks)
    metrics["padding"] = on.train_batch(padded)["metrics"]
    nothing = [torch.zeros_like(mask) for mask in masks]
    emptied = _rows(rank, rollouts, wires, masks=nothing)
    metrics["emptied"] = on.train_batch(emptied)["metrics"]
    metrics["none"] = on.train_batch(_rows(rank, rollouts, [None] * 6))["metrics"]
    return {name: metric["grad_norm"] for name, metric in metrics.items()}


def _stamped_log_probs(rank: int, path: str) -> dict[str, Any]:
    worker = make_worker(path, "prefixflow")
    rollouts = _rollouts(rank)
    asked = {}
    for kind in ("old", "ref"):
        rows = _rows(rank, rollouts, [None] * 6, prefixflow_log_probs=kind)
        output = worker.infer_batch(rows)
        asked[kind] = output[f"{kind}_log_prob_step"].tolist()
    plain = worker.infer_batch(make_rows(rollouts))
    return asked | {"plain": sorted(filter(lambda key: key.endswith("step"), plain.keys()))}


def _consumed(rank: int, path: str) -> dict[str, Any]:
    from verl.utils import tensordict_utils as tu

    worker = make_worker(path, "prefixflow")
    rollouts = _rollouts(rank)
    reports = []
    for trigger in (0, 1):
        wires = [record.to_wire() for record in _records(rank, rollouts)]
        rows = _rows(
            rank,
            rollouts,
            wires,
            prefixflow_trigger=trigger,
            mini_batch_size=6,
            epochs=2,
            dataloader_kwargs={"shuffle": True},
        )
        metrics = tu.get(worker.train_mini_batch(rows), "metrics")
        reports.append(metrics["prefixflow/consumed"])
    prompts = [prompt for prompt, _ in rollouts]
    return {"reports": reports, "prompts": [prompts[0].tolist(), prompts[3].tolist()]}


def _gradients(rank: int, path: str) -> dict[str, Any]:
    """Every rule's action against the same batch made by hand, dense, without those tokens."""
    from prefixflow_verl.config import ProvenanceOptions
    from prefixflow_verl.provenance import PolicySpan, judge

    rollouts = _rollouts(rank)
    mixed = {}
    for index, (_, response) in enumerate(rollouts):
        mixed[index] = (PolicySpan(num_tokens=len(response), version_start=5, version_end=5),)
    # The last two tokens of two responses came after an update; one response is much older.
    for index in (0, 4):
        rest = len(rollouts[index][1]) - 2
        mixed[index] = (
            PolicySpan(num_tokens=rest, version_start=5, version_end=5),
            PolicySpan(num_tokens=2, version_start=5, version_end=6),
        )
    oldest = PolicySpan(num_tokens=len(rollouts[2][1]), version_start=1, version_end=1)
    mixed[2] = (oldest,)
    records = _records(rank, rollouts, spans=mixed)
    advantages = torch.randn(6, generator=torch.Generator().manual_seed(rank)).tolist()
    old = [-4.5 + 0.1 * torch.arange(len(response)) for _, response in rollouts]

    def gradient(strategy: str, keep: list[int], cut: dict[int, int], agg: str, masks=None):
        worker = make_worker(path, strategy, actor={"loss_agg_mode": agg, "entropy_coeff": 0.0})
        rows = [(p, r[: len(r) - cut.get(i, 0)]) for i, (p, r) in enumerate(rollouts) if i in keep]
        data = make_rows(
            rows,
            global_batch_size=RANKS * len(rollouts),
            advantages=[advantages[i] for i in keep],
            old_log_probs=[old[i][: len(old[i]) - cut.get(i, 0)] for i in keep],
            masks=masks,
            calculate_entropy=False,
        )
        worker.engine.optimizer_step = partial(_keep_gradient, worker)
        worker.train_batch(data)
        return torch.cat([g.flatten() for g in worker.kept])

    found = {}
    everything = list(range(6))
    for agg in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean"):
        for name, rules, keep, cut in (
            ("mask_mixed", {"on_mixed": "mask"}, everything, {0: 2, 4: 2}),
            ("mask_stale", {"on_stale": "mask", "max_staleness": 1}, [0, 1, 3, 4, 5], {}),
            ("drop_stale", {"on_stale": "drop_group", "max_staleness": 1}, [3, 4, 5], {}),
            ("warn", {"on_stale": "warn", "max_staleness": 0}, everything, {}),
        ):
            before = [torch.ones(len(response), dtype=torch.int64) for _, response in rollouts]
            verdicts = judge(records, before, _uids(), STEP - 1, ProvenanceOptions(**rules))
            masks = [
                mask * torch.from_numpy(verdict.keep)
                for mask, verdict in zip(before, verdicts, strict=True)
            ]
            ours = gradient("prefixflow", everything, {}, agg, masks)
            truth = gradient("fsdp2", keep, cut, agg)
            found[name, agg] = ((ours - truth).norm() / truth.norm()).item()
    return found


def _keep_gradient(worker) -> float:
    """In place of the optimizer's step."""
    parameters = worker.engine.module.parameters()
    worker.kept = [p.grad.full_tensor().clone() for p in parameters if p.grad is not None]
    worker.engine.optimizer.zero_grad()
    return 1.0


STUDIES = {
    "faults": _faults,
    "unguarded": _unguarded,
    "log_probs": _stamped_log_probs,
    "consumed": _consumed,
    "gradients": _gradients,
}


def _run_studies(rank: int, world_size: int, path: str) -> dict[str, Any]:
    use_cpu_platform()
    return {name: study(rank, path) for name, study in STUDIES.items()}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    path = save_tiny_model(tmp_path_factory.mktemp("model"), tied=False)
    return run_ranks(_run_studies, RANKS, path)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_on_one_rank_stops_both_with_one_sentence(results, fault) -> None:
    first, second = (result["faults"][fault] for result in results)
    assert first == second
    assert FAULTS[fault][2] in first


def test_a_refused_batch_leaves_nothing_behind(results) -> None:
    for result in results:
        assert result["faults"]["num_gradients"] == 0
        assert result["faults"]["afterwards"] > 0


def test_what_is_not_checked(results) -> None:
    norms = results[0]["unguarded"]
    # A batch of which the rules left nothing trains nothing.
    assert norms.pop("emptied") == 0
    assert all(norm > 0 for norm in norms.values())


def test_log_probs_say_which_step_asked_for_them(results) -> None:
    for result in results:
        assert result["log_probs"] == {"old": [STEP] * 6, "ref": [STEP] * 6, "plain": []}


def test_every_sequence_is_reported_once_per_epoch(results) -> None:
    from prefixflow_verl.provenance import digest_tokens

    result = results[0]["consumed"]
    prompts = dict(zip("ab", map(digest_tokens, result["prompts"]), strict=True))
    for reports in result["reports"]:
        # Two mini-batches per epoch of three sequences of each rank.
        assert sorted(report["mini_batch"] for report in reports) == [0, 0, 1, 1, 2, 2, 3, 3]
        for epoch in ((0, 1), (2, 3)):
            keys = [k for r in reports if r["mini_batch"] in epoch for k in r["keys"]]
            assert sorted(keys) == sorted(
                f"{uid}_{session}_0" for uid in "ab" for session in range(6)
            )
        for report in reports:
            groups = [key[0] for key in report["keys"]]
            for uid, prefixes in zip(groups, report["prefix_segments"], strict=True):
                assert (prompts[uid] in prefixes) == (groups.count(uid) > 1)


@pytest.mark.parametrize("agg", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
@pytest.mark.parametrize("rule", ["mask_mixed", "mask_stale", "drop_stale", "warn"])
def test_rules_give_the_gradient_of_the_batch_without(results, rule, agg) -> None:
    assert results[0]["gradients"][rule, agg] < 1e-5
