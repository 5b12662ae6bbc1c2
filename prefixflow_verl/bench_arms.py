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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tensordict import TensorDict
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

from prefixflow_verl.config import STRATEGY
from prefixflow_verl.engine_config import PrefixFlowEngineConfig

if TYPE_CHECKING:
    from prefixflow_verl.bench import Dtype, ModelSizes, What

MAX_GRADIENT_NORM = 1.0
VERL_DTYPES = {"float32": "fp32", "bfloat16": "bf16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What all arms and cases of one process have in common."""

    model_path: Path
    sizes: ModelSizes
    dtype: Dtype
    """Of parameters, activations and gradient reduction."""
    checkpointing: bool
    device: torch.device


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One mini-batch: `num_prompts` prompts, `group` responses each, all of equal length."""

    prompts: torch.Tensor
    """[prompts, P] int64."""
    responses: torch.Tensor
    """[prompts, group, R] int64."""
    advantages: torch.Tensor
    """[prompts, group] float32."""
    token_budget: int
    """Tokens of one forward, at most."""

    @property
    def sequences(self) -> torch.Tensor:
        """[prompts * group, P + R]: prompt and response of every rollout."""
        repeated = self.prompts[:, None].expand(-1, self.responses.shape[1], -1)
        return torch.cat([repeated, self.responses], dim=-1).flatten(0, 1)


class Arm(Protocol):
    """One way to train on a batch."""

    def prepare(self, batch: Batch, what: What) -> Callable[[], torch.Tensor]:
        """The step to time, once; the batch is already in the trainer's own form.

        `update` returns the gradient norm before clipping, a scalar; `log_prob` the log-probs of
        response tokens, [prompts * group, R], without gradients.
        """

    def release(self) -> None:
        """Drop the gradients."""


def make_batch(
    *,
    num_prompts: int,
    group: int,
    prompt: int,
    response: int,
    token_budget: int,
    setup: Setup,
    seed: int = 0,
) -> Batch:
    """Random tokens, normal advantages."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(*shape: int) -> torch.Tensor:
        drawn = torch.randint(0, setup.sizes.vocab, shape, generator=generator)
        return drawn.to(setup.device)

    return Batch(
        prompts=tokens(num_prompts, prompt),
        responses=tokens(num_prompts, group, response),
        advantages=torch.randn(num_prompts, group, generator=generator).to(setup.device),
        token_budget=token_budget,
    )


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
        strategy: `prefixflow` with the options a user gets by default, or veRL's `fsdp2`.
        use_remove_padding: veRL's packed rows instead of padded ones; `prefixflow` ignores it.
    """

    def __init__(self, setup: Setup, strategy: str, *, use_remove_padding: bool = False) -> None:
        dtype = VERL_DTYPES[setup.dtype]
        engine_config = {STRATEGY: PrefixFlowEngineConfig}.get(strategy, FSDPEngineConfig)
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
        rows, size = _rows(batch), batch.responses.shape[-1]
        return (
            partial(self._infer, rows, size) if what == "log_prob" else partial(self._train, rows)
        )

    def _infer(self, rows: TensorDict, size: int) -> torch.Tensor:
        jagged = self._worker.infer_batch(rows)["log_probs"]
        return torch.stack([row[-size - 1 : -1] for row in jagged.unbind()])

    def _train(self, rows: TensorDict) -> torch.Tensor:
        return torch.tensor(tu.get(self._worker.train_batch(rows), key="metrics")["grad_norm"])

    def release(self) -> None:
        self._worker.engine.optimizer_zero_grad()


class ModelArm:
    """A plain Hugging Face model under a hand-written training step."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)

    def prepare(self, batch: Batch, what: What) -> Callable[[], torch.Tensor]:
        return partial(self._infer if what == "log_prob" else self._train, batch)

    def _infer(self, batch: Batch) -> torch.Tensor:
        with torch.no_grad():
            return torch.cat([log_probs for log_probs, _ in self._forwards(batch)])

    def _train(self, batch: Batch) -> torch.Tensor:
        self.release()
        for log_probs, advantages in self._forwards(batch):
            loss = -(log_probs * advantages[:, None]).sum() / batch.responses.numel()
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), MAX_GRADIENT_NORM)
        self._optimizer.step()
        return norm

    def release(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    def _forwards(self, batch: Batch) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Log-probs [n, R] and advantages [n] of one micro-batch after the other."""
        raise NotImplementedError


class DenseArm(ModelArm):
    """Every rollout by itself, LM head on rows that predict a response token only."""

    def _forwards(self, batch: Batch) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        sequences, size = batch.sequences, batch.responses.shape[-1]
        count = max(1, batch.token_budget // sequences.shape[1])
        advantages = batch.advantages.flatten()
        for first in range(0, len(sequences), count):
            micro = sequences[first : first + count]
            # The last token is a target only.
            logits = self._model(
                input_ids=micro[:, :-1], use_cache=False, logits_to_keep=size
            ).logits
            yield _log_probs(logits, micro[:, -size:]), advantages[first : first + count]


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

    def _forwards(self, batch: Batch) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        from prefix_grouper import PrefixGrouper

        device, size = batch.prompts.device, batch.responses.shape[-1]
        num_prompt = batch.prompts.shape[1]
        count = -(-batch.responses.shape[1] // self._num_parts)
        for prompt, responses, advantages in zip(
            batch.prompts, batch.responses, batch.advantages, strict=True
        ):
            for first in range(0, len(responses), count):
                suffixes = responses[first : first + count]
                prefix_mask = torch.ones_like(prompt, dtype=torch.bool)[None]
                suffix_mask = torch.ones_like(suffixes, dtype=torch.bool)
                grouper = PrefixGrouper.from_ungrouped_masks(
                    prefix_mask=prefix_mask,
                    suffix_mask=suffix_mask,
                    group_sizes=[len(suffixes)],
                    device=device,
                )
                positions = torch.arange(num_prompt + size, device=device)
                logits = self._model(
                    input_ids=grouper.concat_input(
                        prompt[None], prefix_mask, suffixes, suffix_mask
                    ),
                    position_ids=torch.cat(
                        [positions[:num_prompt], positions[num_prompt:].repeat(len(suffixes))]
                    )[None],
                    attention_mask=grouper.padding_mask,
                    use_cache=False,
                    prefix_grouper=grouper,
                ).logits
                _, _, rows, _ = grouper.split_output(logits, include_prefix_last=1)
                yield _log_probs(rows[:, :-1], suffixes), advantages[first : first + count]


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


def _log_probs(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """[n, R] float32 from logits [n, R, vocab]."""
    losses = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
    return -losses.view(targets.shape)


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


def _rows(batch: Batch) -> TensorDict:
    """The mini-batch as veRL's trainer hands it to an engine."""
    sequences, responses = batch.sequences, batch.responses.flatten(0, 1)
    prompts = sequences[:, : batch.prompts.shape[1]]
    ones = torch.ones_like(responses)

    def jagged(rows: torch.Tensor) -> torch.Tensor:
        return torch.nested.as_nested_tensor(list(rows.unbind()), layout=torch.jagged)

    return tu.get_tensordict(
        tensor_dict={
            "input_ids": jagged(sequences),
            "position_ids": jagged(
                torch.arange(sequences.shape[1], device=sequences.device).expand_as(sequences)
            ),
            "prompts": jagged(prompts),
            "responses": jagged(responses),
            "response_mask": jagged(ones),
            "loss_mask": jagged(ones),
            "advantages": jagged(batch.advantages.flatten()[:, None].expand(responses.shape)),
        },
        non_tensor_dict={
            "temperature": 1.0,
            "calculate_entropy": False,
            "compute_loss": False,
            "global_batch_size": len(sequences),
            "global_token_num": [sequences.shape[1]] * len(sequences),
            "use_dynamic_bsz": True,
            "max_token_len_per_gpu": batch.token_budget,
        },
    )
