"""The contestants of `prefixflow bench update`: one workload, one set of weights, several trainers.

An arm does what a trainer does with one mini-batch: clear gradients, forward and backward of every
rollout, clip, AdamW step. The learning rate is zero, so that every run of every arm sees the same
weights. All arms get the same tokens, the same loss and the same token budget per forward, and run
in this process with the same number of threads.

Importing this module imports veRL, which chooses its platform at that moment.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tensordict import TensorDict
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    PreTrainedModel,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine_workers import TrainingWorker, TrainingWorkerConfig

from prefixflow_verl.bench_settings import Dtype, ModelSizes, What
from prefixflow_verl.bench_workloads import Batch, Rollout, similar_lengths
from prefixflow_verl.config import STRATEGY, PrefixFlowOptions
from prefixflow_verl.engine_config import PrefixFlowEngineConfig

MAX_GRADIENT_NORM = 1.0
IGNORED = -100
"""A target that is none."""

FORWARD_OVERHEAD_TOKENS = {"cpu": 16, "cuda": 1024}
"""Tokens that run in the time that one more forward and backward takes by itself."""

VERL_DTYPES = {"float32": "fp32", "bfloat16": "bf16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What all arms and cases of one process have in common."""

    model_path: Path
    sizes: ModelSizes
    dtype: Dtype
    """Of parameters, activations and gradient reduction."""
    checkpointing: bool
    options: PrefixFlowOptions
    """Of the engine with prefix reuse."""
    device: torch.device


class Arm(Protocol):
    """One way to train on a batch."""

    def prepare(self, batch: Batch, what: What) -> Callable[[], torch.Tensor]:
        """The step to time, once; the batch is already in the trainer's own form.

        `update` returns the gradient norm before clipping, a scalar; `log_prob` the log-probs of
        all response tokens, of one rollout after the other in one row, without gradients.
        """

    def release(self) -> None:
        """Drop the gradients."""


@contextmanager
def one_rank(directory: Path) -> Iterator[None]:
    """A process group of this process alone; `directory` holds its rendezvous file."""
    # veRL's workers read from the environment where Ray placed them.
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group(
        "cpu:gloo" if get_device_name() == "cpu" else "cpu:gloo,cuda:nccl",
        init_method=f"file://{directory / 'rendezvous'}",
        rank=0,
        world_size=1,
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


class EngineArm:
    """A veRL engine, driven by veRL's own `TrainingWorker` as its trainer drives it.

    Args:
        strategy: `prefixflow` with the options of `setup`, or veRL's `fsdp2`.
        use_remove_padding: veRL's packed rows instead of padded ones; `prefixflow` ignores it.

    Attributes:
        metrics: what the engine reported of its last update.
    """

    def __init__(self, setup: Setup, strategy: str, *, use_remove_padding: bool = False) -> None:
        dtype = VERL_DTYPES[setup.dtype]
        engine_config = FSDPEngineConfig
        if strategy == STRATEGY:
            engine_config = partial(PrefixFlowEngineConfig, prefixflow=setup.options)
        self._device = setup.device
        self.metrics: dict[str, Any] = {}
        self._worker = TrainingWorker(
            TrainingWorkerConfig(
                model_type="language_model",
                model_config=HFModelConfig(
                    path=str(setup.model_path),
                    load_tokenizer=False,
                    use_remove_padding=use_remove_padding,
                    enable_gradient_checkpointing=setup.checkpointing,
                    override_config={"attn_implementation": _best_attention(setup)},
                ),
                engine_config=engine_config(
                    strategy=strategy,
                    use_dynamic_bsz=True,
                    use_torch_compile=False,
                    model_dtype=dtype,
                    mixed_precision={
                        "param_dtype": dtype,
                        "reduce_dtype": dtype,
                        "buffer_dtype": "fp32",
                    },
                ),
                optimizer_config=FSDPOptimizerConfig(
                    lr=0.0,
                    weight_decay=0.0,
                    clip_grad=MAX_GRADIENT_NORM,
                    total_training_steps=1,
                ),
                checkpoint_config=CheckpointConfig(),
            )
        )
        self._worker.reset()
        self._worker.set_loss_fn(_jagged_loss)

    def prepare(self, batch: Batch, what: What) -> Callable[[], torch.Tensor]:
        rows = _rows(batch, self._device)
        if what == "update":
            return partial(self._train, rows)
        return partial(self._infer, rows, [len(rollout.response) for rollout in batch.rollouts])

    def _infer(self, rows: TensorDict, num_responses: list[int]) -> torch.Tensor:
        jagged = self._worker.infer_batch(rows)["log_probs"].unbind()
        return torch.cat(
            [row[-size - 1 : -1] for row, size in zip(jagged, num_responses, strict=True)]
        )

    def _train(self, rows: TensorDict) -> torch.Tensor:
        self.metrics = tu.get(self._worker.train_batch(rows), key="metrics")
        return torch.tensor(self.metrics["grad_norm"])

    def release(self) -> None:
        self._worker.engine.optimizer_zero_grad()


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One forward of a `ModelArm`."""

    rollouts: tuple[int, ...]
    """Which of `Batch.rollouts` it runs, n of them."""
    counts: tuple[int, ...]
    """How many log-probs are asked for of each; K in all."""
    advantages: torch.Tensor
    """[K] float32: each rollout's, once for each of its log-probs."""
    log_probs: Callable[[], torch.Tensor]
    """Runs the model: [K] float32, one rollout after the other."""


class ModelArm:
    """A plain Hugging Face model under a hand-written training step."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)

    def prepare(self, batch: Batch, what: What) -> Callable[[], torch.Tensor]:
        steps = self._steps(batch, what)
        if what == "log_prob":
            return partial(self._infer, steps)
        return partial(self._train, steps, batch.num_loss_tokens)

    def _infer(self, steps: list[Step]) -> torch.Tensor:
        found = {}
        with torch.no_grad():
            for step in steps:
                parts = step.log_probs().split(step.counts)
                found.update(zip(step.rollouts, parts, strict=True))
        return torch.cat([found[index] for index in sorted(found)])

    def _train(self, steps: list[Step], num_loss_tokens: int) -> torch.Tensor:
        self.release()
        for step in steps:
            (-(step.log_probs() * step.advantages).sum() / num_loss_tokens).backward()
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), MAX_GRADIENT_NORM)
        self._optimizer.step()
        return norm

    def release(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    def _steps(self, batch: Batch, what: What) -> list[Step]:
        """What to run, one forward after the other; inputs are on the device."""
        raise NotImplementedError


class DenseArm(ModelArm):
    """Every rollout by itself, LM head on rows that predict a token with loss only.

    Rollouts of similar length share a forward, padded on the right. Causal attention keeps the
    padding out of sight, so no mask is passed and the fastest kernel runs.
    """

    def _steps(self, batch: Batch, what: What) -> list[Step]:
        device = self._model.device
        sizes = [len(rollout.tokens) for rollout in batch.rollouts]
        steps = []
        for indices in similar_lengths(
            sizes, batch.forward, overhead_tokens=FORWARD_OVERHEAD_TOKENS[device.type]
        ):
            rollouts = [batch.rollouts[index] for index in indices]
            wanted = [rollout.wanted(what) for rollout in rollouts]
            # The last token is a target only.
            token_ids = pad_sequence([r.tokens[:-1] for r in rollouts], batch_first=True)
            rows = [
                row * token_ids.shape[1] + len(rollout.prompt) - 1 + mask.nonzero()[:, 0]
                for row, (rollout, mask) in enumerate(zip(rollouts, wanted, strict=True))
            ]
            targets = [r.response[mask] for r, mask in zip(rollouts, wanted, strict=True)]
            steps.append(
                _step(
                    indices,
                    rollouts,
                    wanted,
                    partial(
                        self._log_probs,
                        token_ids.to(device),
                        torch.cat(rows).to(device),
                        torch.cat(targets).to(device),
                    ),
                    device,
                )
            )
        return steps

    def _log_probs(
        self, token_ids: torch.Tensor, rows: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        """[K] from token ids [n, T], output rows [K] in n * T, and the tokens [K] they predict."""
        hidden = self._model.base_model(input_ids=token_ids, use_cache=False).last_hidden_state
        logits = self._model.get_output_embeddings()(hidden.flatten(0, 1).index_select(0, rows))
        return _log_probs(logits, targets)


class PrefixGrouperArm(ModelArm):
    """The package `prefix_grouper`: a prompt and some of its responses in one row.

    Used as its documentation shows, with the LM head on every token. The package makes masks for
    flash attention; the ones for SDPA are made here, and where plain causal attention is the same,
    no mask is passed.

    Args:
        num_parts: micro-batches over which each group is split. A whole group is 1, however many
            tokens that is: the package computes the prompt again for each part.
    """

    ATTENTION = "prefixflow_bench_prefix_grouper"

    def __init__(self, model: PreTrainedModel, *, num_parts: int) -> None:
        super().__init__(model)
        self._num_parts = num_parts

    @classmethod
    def load(cls, setup: Setup) -> PreTrainedModel:
        """The model with attention that goes through the package."""
        AttentionInterface.register(cls.ATTENTION, _prefix_grouper_attention)
        AttentionMaskInterface.register(cls.ATTENTION, lambda *args, **kwargs: None)
        return load_model(setup, attention=cls.ATTENTION)

    def _steps(self, batch: Batch, what: What) -> list[Step]:
        def real(rollout: Rollout) -> torch.Tensor:
            return torch.ones(len(rollout.response), dtype=torch.bool)

        device = self._model.device
        steps, begin = [], 0
        for group in batch.groups:
            count = -(-len(group) // self._num_parts)
            for first in range(0, len(group), count):
                part = group[first : first + count]
                indices = range(begin + first, begin + first + len(part))
                wanted = [rollout.wanted(what) for rollout in part]
                targets = [
                    rollout.response.where(mask, torch.tensor(IGNORED))
                    for rollout, mask in zip(part, wanted, strict=True)
                ]
                run = partial(
                    self._log_probs,
                    part[0].prompt[None].to(device),
                    pad_sequence([r.response for r in part], batch_first=True).to(device),
                    pad_sequence([real(r) for r in part], batch_first=True).to(device),
                    pad_sequence(targets, batch_first=True, padding_value=IGNORED).to(device),
                )
                steps.append(_step(indices, part, wanted, run, device))
            begin += len(group)
        return steps

    def _log_probs(
        self,
        prompt: torch.Tensor,
        suffixes: torch.Tensor,
        suffix_mask: torch.Tensor,
        targets: torch.Tensor,
    ) -> torch.Tensor:
        """[K] from a prompt [1, P], its responses [n, R] and those of their tokens that are asked
        for; the others are `IGNORED` in `targets` [n, R]."""
        from prefix_grouper import PrefixGrouper

        prefix_mask = torch.ones_like(prompt, dtype=torch.bool)
        grouper = PrefixGrouper.from_ungrouped_masks(
            prefix_mask=prefix_mask,
            suffix_mask=suffix_mask,
            group_sizes=[len(suffixes)],
            device=prompt.device,
        )
        num_prompt = prompt.shape[1]
        positions = torch.arange(num_prompt + suffixes.shape[1], device=prompt.device)
        suffix_positions = positions[num_prompt:].expand_as(suffixes)[suffix_mask]
        logits = self._model(
            input_ids=grouper.concat_input(prompt, prefix_mask, suffixes, suffix_mask),
            position_ids=torch.cat([positions[:num_prompt], suffix_positions])[None],
            attention_mask=grouper.padding_mask,
            use_cache=False,
            prefix_grouper=grouper,
        ).logits
        _, _, rows, _ = grouper.split_output(logits, include_prefix_last=1)
        log_probs = _log_probs(rows[:, :-1].flatten(0, 1), targets.flatten())
        return log_probs[targets.flatten() != IGNORED]


def load_model(setup: Setup, *, attention: str | None = None) -> PreTrainedModel:
    """The benchmark's model in training mode; `attention` None: the fastest for the device."""
    model = AutoModelForCausalLM.from_pretrained(
        setup.model_path,
        dtype=getattr(torch, setup.dtype),
        attn_implementation=attention or _best_attention(setup),
    ).to(setup.device)
    if setup.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def save_model(sizes: ModelSizes, path: Path) -> None:
    """Write the random weights that every arm loads."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(sizes.config()).save_pretrained(path)


def _best_attention(setup: Setup) -> str:
    """flash-attn where it is installed and takes the dtype."""
    fits = setup.device.type == "cuda" and setup.dtype == "bfloat16"
    has_flash = fits and importlib.util.find_spec("flash_attn") is not None
    return "flash_attention_2" if has_flash else "sdpa"


def _step(
    indices: Iterable[int],
    rollouts: Sequence[Rollout],
    wanted: Sequence[torch.Tensor],
    log_probs: Callable[[], torch.Tensor],
    device: torch.device,
) -> Step:
    counts = [int(mask.sum()) for mask in wanted]
    advantages = torch.tensor([rollout.advantage for rollout in rollouts])
    return Step(
        rollouts=tuple(indices),
        counts=tuple(counts),
        advantages=advantages.repeat_interleave(torch.tensor(counts)).to(device),
        log_probs=log_probs,
    )


def _log_probs(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """[K] float32 from logits [K, vocab]; 0 where the target is `IGNORED`."""
    return -F.cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="none")


def _prefix_grouper_attention(
    module, query, key, value, attention_mask, *args, prefix_grouper, **kwargs
):
    """`query` [1, heads, tokens, D] of a grouped row -> ([1, tokens, heads, D], None)."""

    def attend(q, k, v, mask, *args, **kwargs):
        num_queries, num_keys = q.shape[2], k.shape[2]
        visible = None
        if num_queries != num_keys:
            ones = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q.device)
            visible = ones.tril(num_keys - num_queries)[None, None]
        return sdpa_attention_forward(module, q, k, v, visible, *args, **kwargs)[0]

    return prefix_grouper.forward(attend, query, key, value, *args, **kwargs), None


def _jagged_loss(
    model_output: dict[str, torch.Tensor], data: TensorDict, dp_group: Any = None
) -> tuple[torch.Tensor, dict[str, Any]]:
    """The policy-gradient loss of `ModelArm`, as a veRL loss function."""
    terms = []
    for row, advantages in zip(
        model_output["log_probs"].unbind(), data["advantages"].unbind(), strict=True
    ):
        terms.append((row[-len(advantages) - 1 : -1] * advantages).sum())
    return -torch.stack(terms).sum() / data["batch_num_tokens"], {}


def _rows(batch: Batch, device: torch.device) -> TensorDict:
    """The mini-batch as veRL's trainer hands it to an engine."""
    rollouts = batch.rollouts
    masks = [rollout.loss_mask.long() for rollout in rollouts]

    def jagged(rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor([row.to(device) for row in rows], layout=torch.jagged)

    settings = {"use_dynamic_bsz": True, "max_token_len_per_gpu": batch.forward.token_budget}
    if batch.forward.rollouts is not None:
        settings = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": batch.forward.rollouts}
    return tu.get_tensordict(
        tensor_dict={
            "input_ids": jagged([rollout.tokens for rollout in rollouts]),
            "position_ids": jagged([torch.arange(len(rollout.tokens)) for rollout in rollouts]),
            "prompts": jagged([rollout.prompt for rollout in rollouts]),
            "responses": jagged([rollout.response for rollout in rollouts]),
            "response_mask": jagged(masks),
            "loss_mask": jagged(masks),
            "advantages": jagged([rollout.advantage * rollout.loss_mask for rollout in rollouts]),
        },
        non_tensor_dict={
            "temperature": 1.0,
            "calculate_entropy": False,
            "compute_loss": False,
            "global_batch_size": len(rollouts),
            "global_token_num": [len(rollout.tokens) for rollout in rollouts],
            **settings,
        },
    )
