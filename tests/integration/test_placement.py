"""The trainer's batch is placed by prefix: verl's own `_balance_batch`, on rows in its
TransferQueue, with the ledger applied."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.queue_process import run_in_queue, serve

NUM_RANKS = 4
GROUP = 6

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, Any]:
    return run_in_queue("tests.integration.test_placement", tmp_path_factory.mktemp("placement"))


def ranks_of(keys: list[str], num_ranks: int = NUM_RANKS) -> dict[str, set[int]]:
    """Ranks that hold rows of each group."""
    ranks: dict[str, set[int]] = {}
    for index, key in enumerate(keys):
        rank = index * num_ranks // len(keys)
        ranks.setdefault(key.rsplit("_", 2)[0], set()).add(rank)
    return ranks


def test_groups_stay_whole_where_that_is_fastest(found):
    case = found["prefix"]
    assert all(len(ranks) == 1 for ranks in ranks_of(case["keys"]).values())
    assert sorted(case["keys"]) == sorted(case["arrived"])
    metrics = case["metrics"]
    assert metrics["prefixflow/placement/duplicated_prefixes"] == 0
    assert metrics["prefixflow/placement/speedup_over_verl"] > 1.5
    assert 1 <= metrics["prefixflow/placement/imbalance"] < 1.2
    assert metrics["prefixflow/placement/least_imbalance"] >= 1


def test_tags_follow_their_keys(found):
    for case in (found["prefix"], found["padded"], found["mini_batches"]):
        assert case["tags_match"]


def test_length_metrics_are_those_of_the_new_order(found):
    case = found["prefix"]
    sums = np.array(case["lengths"]).reshape(NUM_RANKS, -1).sum(axis=1)
    assert case["metrics"]["global_seqlen/balanced_max"] == sums.max()
    assert case["metrics"]["global_seqlen/balanced_min"] == sums.min()


def test_verls_order_is_kept_for_other_strategies_and_by_length(found):
    verls = found["fsdp2"]
    assert not any(name.startswith("prefixflow/") for name in verls["metrics"])
    assert max(len(ranks) for ranks in ranks_of(verls["keys"]).values()) > 1
    for name in ("length", "plan_off", "fell_back"):
        assert found[name]["keys"] == verls["keys"], name


def test_reuse_that_comes_back_is_placed_again(found):
    assert found["reuses_again"]["keys"] == found["prefix"]["keys"]


def test_groups_with_a_common_system_prompt_attract_each_other(found):
    """Two families of prompts; each begins with a long text of its own."""
    ranks = ranks_of(found["families"]["keys"], 2)
    families: dict[str, set[int]] = {}
    for group, holders in ranks.items():
        families.setdefault(group[0], set()).update(holders)
    assert sorted(families.values(), key=min) == [{0}, {1}]
    assert found["families"]["metrics"]["prefixflow/placement/duplicated_tokens"] == 0


def test_mini_batches_are_whole_groups_in_their_order(found):
    case = found["mini_batches"]
    cells = np.array(case["keys"]).reshape(NUM_RANKS, 2, -1)
    for index, groups in enumerate(({"g0", "g1", "g2", "g3"}, {"g4", "g5", "g6", "g7"})):
        assert {key.rsplit("_", 2)[0] for key in cells[:, index].ravel()} == groups


def test_uneven_groups_are_padded_and_placed(found):
    case = found["padded"]
    assert len(case["keys"]) % NUM_RANKS == 0
    assert sum(key.startswith("pad") for key in case["keys"]) == case["num_padding"] > 0


def test_more_ranks_than_groups(found):
    case = found["one_group"]
    assert ranks_of(case["keys"]) == {"g0": {0, 1, 2, 3}}


def test_rows_that_do_not_divide_are_refused_by_name(found):
    assert "actor_rollout_ref.actor.ppo_mini_batch_size=1 x" in found["indivisible"]
    assert "make their product a multiple of 4" in found["indivisible"]


def test_a_large_batch_is_placed_fast(found):
    """A bound that only a per-token loop breaks; benchmarks/LOG.md has the figure."""
    assert found["large"]["metrics"]["prefixflow/placement/seconds"] < 5


def _main(directory: Path) -> dict[str, Any]:
    import torch
    import transfer_queue as tq
    from omegaconf import OmegaConf
    from transfer_queue import KVBatchMeta
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict

    from prefixflow_verl.balance import PlacementError
    from tests.engines import save_tiny_model

    model_path = save_tiny_model(directory / "model", tied=False)
    generator = np.random.default_rng(0)

    class Trainer(PPOTrainer):
        """verl's trainer, as far as it balances and updates."""

        def __init__(self, num_ranks: int, strategy: str, mini_batch: int, **options: Any) -> None:
            self.config = OmegaConf.create(
                {
                    "trainer": {"critic_warmup": 0},
                    "actor_rollout_ref": {
                        "actor": {
                            "strategy": strategy,
                            "ppo_mini_batch_size": mini_batch,
                            "shuffle": False,
                            "fsdp_config": {"prefixflow": options},
                        },
                        "rollout": {"n": GROUP},
                        "model": {"path": model_path, "enable_gradient_checkpointing": False},
                    },
                }
            )
            self.actor_rollout_wg = SimpleNamespace(
                _dispatch_info={"actor": list(range(num_ranks))}
            )
            self.tokenizer = SimpleNamespace(eos_token_id=1)
            self.use_critic = False
            self.global_steps = 1

        on_step_end = None

    Trainer.__abstractmethods__ = frozenset()

    def stored(name: str, prompts: list[list[int]], sizes: list[int], names=None) -> KVBatchMeta:
        rows = []
        for group, (prompt, size) in enumerate(zip(prompts, sizes, strict=True)):
            uid = names[group] if names else f"g{group}"
            for session in range(size):
                num_tokens = int(generator.integers(2, 12))
                response = torch.from_numpy(generator.integers(0, 90, num_tokens))
                prompt_ids = torch.tensor(prompt)
                tokens = torch.cat([prompt_ids, response])
                tag = {
                    "prompt_len": len(prompt),
                    "response_len": num_tokens,
                    "seq_len": len(tokens),
                }
                fields = {
                    "uid": uid,
                    "prompts": prompt_ids,
                    "responses": response,
                    "input_ids": tokens,
                    "position_ids": torch.arange(len(tokens)),
                    "response_mask": torch.ones(num_tokens, dtype=torch.int64),
                }
                rows.append((f"{uid}_{session}_0", fields, tag))
        # Rows arrive as their generation ends, not by group.
        rows = [rows[index] for index in generator.permutation(len(rows))]
        if name == "mini_batches":
            rows.sort(key=lambda row: row[0])
        keys, fields, tags = (list(column) for column in zip(*rows, strict=True))
        tq.kv_batch_put(
            keys=keys, fields=list_of_dict_to_tensordict(fields), tags=tags, partition_id=name
        )
        return KVBatchMeta(keys=keys, tags=tags, partition_id=name)

    def balanced(trainer: Trainer, batch: KVBatchMeta) -> dict[str, Any]:
        arrived = list(batch.keys)
        before = dict(zip(batch.keys, batch.tags, strict=True))
        batch = KVBatchMeta(keys=arrived, tags=batch.tags, partition_id=batch.partition_id)
        metrics: dict[str, Any] = {}
        placed = trainer._balance_batch(batch, metrics)
        return {
            "keys": placed.keys,
            "arrived": arrived,
            "lengths": [tag["seq_len"] for tag in placed.tags],
            "num_padding": len(placed.keys) - len(arrived),
            "tags_match": all(
                before.get(key, tag) == tag
                for key, tag in zip(placed.keys, placed.tags, strict=True)
            ),
            "metrics": {name: float(value) for name, value in metrics.items()},
        }

    def prompt(length: int) -> list[int]:
        return generator.integers(0, 90, length).tolist()

    found = {}
    eight = [prompt(length) for length in (400, 380, 410, 390, 405, 395, 385, 400)]
    batch = stored("eight", eight, [GROUP] * 8)
    found["prefix"] = balanced(Trainer(NUM_RANKS, "prefixflow", 8), batch)
    found["fsdp2"] = balanced(Trainer(NUM_RANKS, "fsdp2", 8), batch)
    found["length"] = balanced(Trainer(NUM_RANKS, "prefixflow", 8, placement="length"), batch)
    found["plan_off"] = balanced(Trainer(NUM_RANKS, "prefixflow", 8, plan="off"), batch)

    trainer = Trainer(NUM_RANKS, "prefixflow", 8)
    balanced(trainer, batch)
    trainer.prefixflow_placer.observe({"prefixflow/fallback": 1.0})
    found["fell_back"] = balanced(trainer, batch)
    trainer.prefixflow_placer.observe({"prefixflow/fallback": 0.0})
    found["reuses_again"] = balanced(trainer, batch)

    systems = {"a": prompt(900), "b": prompt(900)}
    names = [f"{'ab'[index % 2]}{index}" for index in range(8)]
    prompts = [systems[name[0]] + prompt(60) for name in names]
    found["families"] = balanced(
        Trainer(2, "prefixflow", 8), stored("families", prompts, [GROUP] * 8, names)
    )

    batch = stored("mini_batches", eight, [GROUP] * 8)
    found["mini_batches"] = balanced(Trainer(NUM_RANKS, "prefixflow", 4), batch)
    batch = stored("padded", eight, [5, 1, 6, 3, 2, 6, 4, 2])
    found["padded"] = balanced(Trainer(NUM_RANKS, "prefixflow", 8), batch)
    batch = stored("one_group", eight[:1], [GROUP * 2])
    found["one_group"] = balanced(Trainer(NUM_RANKS, "prefixflow", 2), batch)
    try:
        balanced(Trainer(NUM_RANKS, "prefixflow", 1), stored("few", eight[:2], [GROUP] * 2))
        found["indivisible"] = "went on"
    except PlacementError as error:
        found["indivisible"] = str(error)

    many = [prompt(1000) for _ in range(128)]
    batch = stored("large", many, [8] * 128)
    # verl asks for a multiple of mini-batch x n rows.
    trainer = Trainer(8, "prefixflow", 128)
    trainer.config.actor_rollout_ref.rollout.n = 8
    found["large"] = balanced(trainer, batch)
    print("large", found["large"]["metrics"])
    del found["large"]["keys"], found["large"]["arrived"], found["large"]["lengths"]
    return found


if __name__ == "__main__":
    serve(_main)
