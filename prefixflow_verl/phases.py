"""Runs a plan: prefix forward, suffix forward + backward, one delayed prefix backward.

[Note: boundary tensors]
What the rest of the computation sees of a pack are its boundary tensors: K and V of every layer,
and the log-prob and entropy of each prediction. Each boundary tensor has a leaf twin. Losses and
packs below use the twins only; their gradients add up there. Backward of a pack is then one call,

    torch.autograd.backward([log_probs, entropies, K_0, V_0, K_1, ...], [gradients of the twins])

for leaf packs at once and for head packs after everything below them. The gradient that reaches a
twin is the exact sum over all its uses, so the parameter gradient is that of full-sequence
training, for any loss.

[Note: delayed backward under FSDP2]
FSDP2 gathers a layer's parameters for backward when a gradient reaches the layer's *output*. Keys
and values are no outputs. The log-probs come from the root module's own output, so having them
among the roots, with a zero gradient if need be, makes every layer's hook fire before its K and V
gradients arrive. A pack without any prediction therefore still keeps one row of logits.

This is the only file that calls backward.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.profiler import record_function

from prefixflow_verl.accounting import reuse_ratio
from prefixflow_verl.activations import ORDER, PrefixActivations, saved_on_cpu
from prefixflow_verl.attention import AttentionBackend, SegmentContext, choose_backend
from prefixflow_verl.forest import PrefixForest
from prefixflow_verl.kv_cache import STALE_MESSAGE, PackCache, StaleCacheError, WeightsVersion
from prefixflow_verl.lockstep import Lockstep, PackMemoryError, Pass, is_out_of_memory
from prefixflow_verl.log_probs import log_probs_and_entropy
from prefixflow_verl.memory import PHASE_PREFIX
from prefixflow_verl.model_hook import (
    CONTEXT_KWARG,
    LmHead,
    UnsupportedModelError,
    check_length,
    check_model,
    pretrained_model,
    routed,
)
from prefixflow_verl.packing import Completion, Packer, PackLayout
from prefixflow_verl.plan import PackBudget, Plan, PlanMode, make_plan
from prefixflow_verl.provenance import digest_tokens

_DUMMY_LAYOUT = PackLayout(
    token_ids=np.zeros(1, dtype=np.int64),
    position_ids=np.zeros(1, dtype=np.int64),
    self_parts=((0, 1),),
    cross_parts=(),
    logit_rows=np.zeros(1, dtype=np.int64),
    scaled_rows=np.zeros(0, dtype=np.int64),
    row_temperatures=np.zeros(0),
    prediction_rows=np.zeros(0, dtype=np.int64),
    targets=np.zeros(0, dtype=np.int64),
    completions=(),
)
"""A pack of one token and no loss, for a rank that has fewer packs than others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletedRollouts:
    """Rollouts whose log-probs are complete: what a loss function receives.

    Under training the tensors require grad; the loss function must not keep them.
    """

    rollout_ids: tuple[int, ...]
    """Indices into the sequences of the call."""
    positions: tuple[torch.Tensor, ...]
    """Per rollout [n] int64: entry i says that `log_probs[i]` is of token `positions[i] + 1`."""
    log_probs: tuple[torch.Tensor, ...]
    """Per rollout [n] float32: log-prob of each predicted token under its temperature."""
    entropies: tuple[torch.Tensor, ...] | None
    """Per rollout [n] float32, nats; None unless asked for."""


LossFunction = Callable[[CompletedRollouts], torch.Tensor]


class ScheduleMismatchError(RuntimeError):
    """Ranks were about to run different sequences of forwards and backwards. Raised on every rank,
    before the first of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStats:
    """What one run did on this rank."""

    logical_tokens: int
    executed_tokens: int
    num_rollouts: int
    num_shared_groups: int
    """Trees in which two or more rollouts share a segment."""
    num_packs: int
    num_dummy_packs: int
    num_cut_edges: int
    num_dissolved_trees: int
    planning_s: float
    max_cache_bytes: int
    """Largest sum of live cache bytes (K, V and accumulators)."""
    prefix_activations: PrefixActivations
    """What the ranks agreed on."""

    @property
    def reuse_ratio(self) -> float:
        return reuse_ratio(self.logical_tokens, self.executed_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """Sequences, their forest, their plan and the layout of every pack. No tensors."""

    forest: PrefixForest
    plan: Plan
    layouts: list[PackLayout]
    planning_s: float

    @property
    def completion_order(self) -> list[int]:
        """Rollouts in the order in which a run completes them."""
        return [
            completion.rollout
            for round_ in self.plan.rounds
            for pack in (*round_.heads, *round_.leaves)
            for completion in self.layouts[pack].completions
        ]


def pack_sequences(
    sequences: Sequence[np.ndarray],
    budget: PackBudget,
    *,
    predict: Sequence[np.ndarray] | None = None,
    temperatures: float | Sequence[float] = 1.0,
    mode: PlanMode = "auto",
    keys: Sequence[Hashable] | None = None,
    min_shared_tokens: int = 1,
) -> PackedBatch:
    """Plan `sequences` and lay out every pack; see `make_plan` and `Packer` for the arguments."""
    began = time.perf_counter()
    forest, plan = make_plan(
        sequences, budget, mode=mode, keys=keys, min_shared_tokens=min_shared_tokens
    )
    layouts = Packer(sequences, forest, plan, predict=predict, temperatures=temperatures).layouts
    return PackedBatch(
        forest=forest,
        plan=plan,
        layouts=layouts,
        planning_s=time.perf_counter() - began,
    )


@dataclass(slots=True, kw_only=True)
class _PackRun:
    """Live tensors of one pack between its forward and its backward."""

    index: int | None
    """Pack index; None for a dummy."""
    roots: list[torch.Tensor]
    """In-graph log-probs (or one row of logits) and entropies; without a graph under
    `recompute`."""
    twins: list[torch.Tensor]
    """Leaf twins of `roots`."""
    captured: dict[int, tuple[torch.Tensor, torch.Tensor]] | None
    """In-graph K and V of a head pack, by layer."""
    weights_version: int
    """Version of the weights at the forward; a backward under another one is an error."""


@dataclass(slots=True, kw_only=True)
class PhaseRunner:
    """Runs packed batches through a model.

    Args:
        model: the root module (FSDP2, PEFT and activation checkpointing are fine).
        backend: attention kernel.
        weights: guards the caches; None: over `model.parameters()`.
        device: where inputs go; None: that of the first parameter.
        cache_gradient_dtype: accumulators of dK and dV; None: the dtype of K.
        process_group: ranks that must run the same number of packs; None: this rank alone.
        reduce_gradients_once: skip gradient reduction for all but the last backward.
        scale_loss: applied to each loss before its backward (a loss scaler's `scale`).
        forward_context: entered around every model forward (autocast).
        survives_out_of_memory: raise `PackMemoryError` on every rank if a pack does not fit on one,
            instead of leaving the others waiting; see lockstep.py. Costs FSDP2's prefetching and,
            on several ranks, one more pass of one token, which reduces the gradients.
    """

    model: torch.nn.Module
    backend: AttentionBackend
    weights: WeightsVersion | None = None
    device: torch.device | None = None
    cache_gradient_dtype: torch.dtype | None = torch.float32
    process_group: dist.ProcessGroup | None = None
    reduce_gradients_once: bool = True
    scale_loss: Callable[[torch.Tensor], torch.Tensor] | None = None
    forward_context: Callable[[], AbstractContextManager] = nullcontext
    survives_out_of_memory: bool = False
    _caches: dict[int, PackCache] = field(default_factory=dict, init=False)
    _twins: dict[int, _PackRun] = field(default_factory=dict, init=False)
    _captured: list[dict] = field(default_factory=list, init=False)
    _max_cache_bytes: int = field(default=0, init=False)
    _with_entropy: bool = field(default=False, init=False)
    _head_runs: list[_PackRun | None] = field(default_factory=list, init=False)
    _failure: tuple[int, str] | None = field(default=None, init=False)
    _lockstep: Lockstep | None = field(default=None, init=False)
    _lm_head: LmHead = field(init=False)

    def __post_init__(self) -> None:
        if self.weights is None:
            self.weights = WeightsVersion(self.model.parameters())
        if self.device is None:
            self.device = next(self.model.parameters()).device
        self._lm_head = LmHead(self.model)
        if self.survives_out_of_memory and isinstance(self.model, FSDPModule):
            self._lockstep = Lockstep(self.model)

    def backward(
        self, batch: PackedBatch, loss_function: LossFunction, *, with_entropy: bool = False
    ) -> RunStats:
        """Accumulate the gradient of the summed losses into the parameters.

        `loss_function` is called once per pack that completes rollouts and returns a scalar; the
        losses add up, so each must already carry the mini-batch's denominator.

        Raises:
            RuntimeError: gradients are switched off, or no parameter wants one.
            ValueError: the loss is no scalar tensor, or depends on no log-prob.
            ScheduleMismatchError: ranks called different things, or are set up differently.
            PackMemoryError: a pack does not fit into memory, under `survives_out_of_memory`.
        """
        if not torch.is_grad_enabled():
            raise RuntimeError(
                "backward was called under torch.no_grad() or inference_mode(): no gradient would "
                "be accumulated"
            )
        if not any(parameter.requires_grad for parameter in self.model.parameters()):
            raise RuntimeError("no parameter of the model requires a gradient")
        return self._run(batch, loss_function, training=True, with_entropy=with_entropy)

    def forward(
        self,
        batch: PackedBatch,
        receive: Callable[[CompletedRollouts], None],
        *,
        with_entropy: bool = False,
    ) -> RunStats:
        """Compute log-probs without gradients; `receive` gets each pack's completed rollouts."""
        with torch.no_grad():
            return self._run(batch, receive, training=False, with_entropy=with_entropy)

    def _run(
        self,
        batch: PackedBatch,
        consume: Callable[[CompletedRollouts], torch.Tensor | None],
        *,
        training: bool,
        with_entropy: bool,
    ) -> RunStats:
        plan = batch.plan
        agreed, activations = self._agree(plan.counts, plan.prefix_activations, training)
        recomputes = training and activations == "recompute"
        self._with_entropy = with_entropy
        self._max_cache_bytes = 0
        self._failure = None
        num_agreed = sum(heads + leaves for heads, leaves in agreed)
        # See lockstep.py [Note: a rank without memory]: gradients wait until all ranks have come
        # through.
        reduces_apart = training and self._lockstep is not None and self._num_ranks > 1
        num_backwards_left = num_agreed + reduces_apart if training else 0

        def start(index: int | None, context: AbstractContextManager) -> _PackRun:
            with context:
                run = self._forward_pack(batch, index, training)
            self._complete(batch, index, consume, training)
            return run

        def finish(run: _PackRun | None) -> None:
            nonlocal num_backwards_left
            num_backwards_left -= 1
            with self._gradient_sync(is_last=num_backwards_left == 0):
                self._backward_pack(run)

        def attempt(pass_: Pass, index: int | None, action: Callable[[], Any]) -> Any:
            return self._attempt(pass_, batch, index, action)

        try:
            with routed(self.model):
                self._observe_head()
                for number, (num_heads, num_leaves) in enumerate(agreed):
                    round_ = plan.rounds[number] if number < len(plan.rounds) else None
                    heads = _pad(round_.heads if round_ else (), num_heads)
                    leaves = _pad(round_.leaves if round_ else (), num_leaves)
                    for index in heads:
                        with _phase("prefix", batch, index):
                            saving = saved_on_cpu() if activations == "offload" else nullcontext()
                            context = torch.no_grad() if recomputes else saving
                            run = attempt("forward", index, partial(start, index, context))
                            self._head_runs.append(run)
                            del run
                    for index in leaves:
                        with _phase("suffix", batch, index):
                            run = attempt("forward", index, partial(start, index, nullcontext()))
                            if training:
                                attempt("backward", index, partial(finish, run))
                            del run
                            self._twins.pop(index, None)
                    live_bytes = sum(cache.num_bytes for cache in self._caches.values())
                    self._max_cache_bytes = max(self._max_cache_bytes, live_bytes)
                    while self._head_runs:
                        run, index = self._head_runs.pop(), heads[len(self._head_runs)]
                        if training:
                            with _phase("delayed_backward", batch, index):
                                if recomputes:
                                    again = partial(self._forward_again, batch, run)
                                    attempt("forward", index, again)
                                attempt("backward", index, partial(finish, run))
                        self._caches.pop(index, None)
                        self._twins.pop(index, None)
                        del run
                failure = self._agree_on_failure() if self._lockstep is not None else None
                if reduces_apart or (training and failure is not None):
                    with self._gradient_sync(is_last=True):
                        self._backward_pack(self._forward_pack(batch, None, training))
                if failure is not None:
                    # Reduced above, because FSDP2 would keep what it has accumulated otherwise.
                    self.model.zero_grad()
                    self._lockstep.reset()
                    raise failure
        finally:
            self._release()
            self._head_runs = []
        return RunStats(
            logical_tokens=batch.forest.logical_tokens,
            executed_tokens=batch.forest.executed_tokens,
            num_rollouts=batch.forest.num_rollouts,
            num_shared_groups=int(batch.forest.is_shared[batch.forest.roots].sum()),
            num_packs=len(plan.packs),
            num_dummy_packs=num_agreed - len(plan.packs) + reduces_apart,
            num_cut_edges=plan.num_cut_edges,
            num_dissolved_trees=plan.num_dissolved_trees,
            planning_s=batch.planning_s,
            max_cache_bytes=self._max_cache_bytes,
            prefix_activations=activations,
        )

    def _attempt(
        self, pass_: Pass, batch: PackedBatch, index: int | None, action: Callable[[], Any]
    ) -> Any:
        """Do one pass through the model; if memory runs out, or ran out before, only take part in
        it and return None."""
        if self._failure is not None:
            self._lockstep.replay(pass_)
            return None
        if self._lockstep is not None:
            self._lockstep.begin(pass_)
        try:
            return action()
        except Exception as error:
            if not self.survives_out_of_memory or not is_out_of_memory(error):
                raise
            reason = str(error).partition("\n")[0]
            num_tokens = batch.layouts[index].num_tokens if index is not None else 1
            self._failure = (num_tokens, f"{type(error).__name__}: {reason}")
        del action
        # The exception is gone by now, and with it the frames that held tensors.
        self._release()
        if self._lockstep is None:
            self.model.zero_grad()
            raise PackMemoryError(*self._failure)
        self._lockstep.finish()
        return None

    def _agree_on_failure(self) -> PackMemoryError | None:
        """The same on every rank: the smallest pack for which memory ran out, if it did on any."""
        none = torch.iinfo(torch.int64).max
        num_tokens, cause = self._failure or (none, None)
        smallest = torch.tensor(num_tokens, device=self.device)
        if self._num_ranks > 1:
            dist.all_reduce(smallest, op=dist.ReduceOp.MIN, group=self.process_group)
        if smallest == none:
            return None
        if self._num_ranks > 1:
            causes = [None] * self._num_ranks
            own = cause and f"rank {dist.get_rank()}: {cause}"
            dist.all_gather_object(causes, own, group=self.process_group)
            cause = "; ".join(filter(None, causes))
        return PackMemoryError(int(smallest), cause)

    def _release(self) -> None:
        """Let go of everything that packs have left."""
        self._head_runs = [None] * len(self._head_runs)
        self._caches.clear()
        self._twins.clear()
        for captured in self._captured:
            captured.clear()
        self._captured.clear()

    @property
    def _num_ranks(self) -> int:
        return 1 if self.process_group is None else dist.get_world_size(self.process_group)

    def _agree(
        self, counts: list[tuple[int, int]], activations: PrefixActivations, training: bool
    ) -> tuple[list[tuple[int, int]], PrefixActivations]:
        """(heads, leaves) per round and the prefix activations that every rank will use; see
        plan.py [Note: rank agreement].

        Raises:
            ScheduleMismatchError: on every rank, if the ranks would run different passes.
        """
        if self._num_ranks == 1:
            return counts, activations
        own = [len(counts), ORDER.index(activations)]
        largest = torch.tensor(own, dtype=torch.int64, device=self.device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.process_group)
        num_rounds, order = largest.tolist()
        table = torch.zeros(num_rounds, 2, dtype=torch.int64, device=self.device)
        if counts:
            table[: len(counts)] = torch.tensor(counts, device=self.device)
        dist.all_reduce(table, op=dist.ReduceOp.MAX, group=self.process_group)
        agreed, activations = [(heads, leaves) for heads, leaves in table.tolist()], ORDER[order]
        self._require_same(
            {
                "pass": "backward" if training else "forward",
                "heads and leaves": agreed,
                "prefix_activations": activations,
                "reduce_gradients_once": self.reduce_gradients_once,
                "survives_out_of_memory": self.survives_out_of_memory,
                "activation checkpointing": pretrained_model(self.model).is_gradient_checkpointing,
                "LM head was observed": self._lm_head.can_replace is not None,
            }
        )
        return agreed, activations

    def _require_same(self, schedule: dict[str, Any]) -> None:
        """Compare a digest of what decides the collectives that follow."""
        digest = hashlib.blake2b(repr(schedule).encode(), digest_size=6).digest()
        own = int.from_bytes(digest, "big")
        ends = torch.tensor([own, -own], dtype=torch.int64, device=self.device)
        dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=self.process_group)
        largest, smallest = ends[0].item(), -ends[1].item()
        if largest == smallest:
            return
        schedules: list[Any] = [None] * self._num_ranks
        dist.all_gather_object(schedules, schedule, group=self.process_group)
        differing = [name for name in schedule if any(s[name] != schedule[name] for s in schedules)]
        values = [f"{name}: {[s[name] for s in schedules]}" for name in differing]
        raise ScheduleMismatchError(
            "the ranks are about to run different forwards and backwards and would wait for each "
            f"other forever; by rank, {'; '.join(values)}. Give every rank the same call and "
            "the same settings."
        )

    def _observe_head(self) -> None:
        """See model_hook.py [Note: log-probs inside the LM head]; once, the same on every rank."""
        if self._lm_head.can_replace is None:
            with torch.no_grad(), self._lm_head.observed():
                (logits,), _ = self._run_model(None, None, False)
            self._lm_head.saw(logits)

    def _forward_pack(self, batch: PackedBatch, index: int | None, training: bool) -> _PackRun:
        """First forward of a pack: fills its cache, if it is a head, and makes its twins."""
        is_head = index is not None and batch.plan.packs[index].is_head
        roots, captured = self._run_model(batch, index, is_head)
        if is_head:
            cache = PackCache(
                self.weights,
                self.cache_gradient_dtype,
                content=digest_tokens(batch.layouts[index].token_ids),
                backend=self.backend.name,
            )
            for layer, (key, value) in captured.items():
                cache.store(layer, key, value)
            self._caches[index] = cache
        run = _PackRun(
            index=index,
            roots=roots,
            twins=[root.detach().requires_grad_(training) for root in roots],
            captured=captured,
            weights_version=self.weights.current(),
        )
        if index is not None:
            self._twins[index] = run
        return run

    def _forward_again(self, batch: PackedBatch, run: _PackRun) -> None:
        """Give a head that ran without a graph its graph, for the backward that follows."""
        cache = self._caches.get(run.index)
        if cache is not None:
            # Everything that reads it has run.
            cache.drop_keys()
        if run.captured is not None:
            run.captured.clear()
        run.roots, run.captured = self._run_model(batch, run.index, cache is not None)

    def _run_model(
        self, batch: PackedBatch | None, index: int | None, capture: bool
    ) -> tuple[list[torch.Tensor], dict[int, tuple[torch.Tensor, torch.Tensor]] | None]:
        """Boundary tensors of one pack: log-probs and entropies (or one row of logits), and K and V
        by layer if asked for. Index None is a dummy, of no batch."""
        layout = batch.layouts[index] if index is not None else _DUMMY_LAYOUT
        reads = {part.pack for part in layout.cross_parts if part.pack in self._caches}
        for pack in reads:
            content = digest_tokens(batch.layouts[pack].token_ids)
            self._caches[pack].check_origin(content=content, backend=self.backend.name)
        captured = {} if capture else None
        if captured is not None:
            self._captured.append(captured)
        context = SegmentContext(
            layout=layout,
            backend=self.backend,
            caches={pack: self._caches[pack] for pack in reads},
            captured=captured,
        )
        head, predicts = self._lm_head, len(layout.targets) > 0

        def predictions(hidden, weight=None, bias=None) -> torch.Tensor:
            return self._predictions(layout, hidden, weight, bias)

        in_head = bool(head.can_replace) and predicts
        with self.forward_context(), head.replaced(predictions) if in_head else nullcontext():
            outputs = self.model(
                input_ids=self._to_device(layout.token_ids)[None],
                position_ids=self._to_device(layout.position_ids)[None],
                attention_mask=None,
                use_cache=False,
                logits_to_keep=self._to_device(layout.logit_rows),
                **{CONTEXT_KWARG: context},
            ).logits
        context.seal()
        outputs = outputs[0]
        if predicts and not in_head:
            outputs = predictions(outputs)
        return (list(outputs.unbind(-1)) if predicts else [outputs]), captured

    def _predictions(
        self,
        layout: PackLayout,
        hidden: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """Log-probs, and entropies if asked for, of one pack: [P, 1 or 2]."""
        has_all_rows = len(layout.scaled_rows) == len(layout.logit_rows)
        has_temperatures = bool((layout.row_temperatures != 1.0).any())
        return log_probs_and_entropy(
            hidden,
            weight,
            bias,
            None if has_all_rows else self._to_device(layout.scaled_rows),
            self._to_device(layout.row_temperatures) if has_temperatures else None,
            torch.from_numpy(layout.prediction_rows),
            torch.from_numpy(layout.targets),
            with_entropy=self._with_entropy,
        )

    def _complete(
        self,
        batch: PackedBatch,
        index: int | None,
        consume: Callable[[CompletedRollouts], torch.Tensor | None],
        training: bool,
    ) -> None:
        """Hand the rollouts that end in this pack to the loss; its gradients land in the twins."""
        if index is None or not batch.layouts[index].completions:
            return
        completions = batch.layouts[index].completions
        loss = consume(
            CompletedRollouts(
                rollout_ids=tuple(completion.rollout for completion in completions),
                positions=tuple(
                    self._to_device(completion.positions) for completion in completions
                ),
                log_probs=tuple(self._gather(completion, 0) for completion in completions),
                entropies=tuple(self._gather(completion, 1) for completion in completions)
                if self._with_entropy
                else None,
            )
        )
        if not training:
            return
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise ValueError(f"the loss function must return a scalar tensor, not {loss!r}")
        if loss.requires_grad:
            (self.scale_loss(loss) if self.scale_loss else loss).backward()
        elif any(len(completion.positions) for completion in completions) and loss != 0:
            # Without any prediction (all masked out) there is no graph and no gradient; here there
            # is one, and the loss has lost it.
            raise ValueError(
                "the loss does not depend on the log-probs it was given (detached?): it would "
                "train nothing"
            )

    def _gather(self, completion: Completion, output: int) -> torch.Tensor:
        """One rollout's log-probs (output 0) or entropies (output 1) from the twins along its
        path."""
        parts = [
            self._twins[pack].twins[output].index_select(0, self._to_device(indices))
            for pack, indices in completion.sources
        ]
        if not parts:
            return torch.zeros(0, dtype=torch.float32, device=self.device)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _backward_pack(self, run: _PackRun) -> None:
        """The only backward through the model: all boundary tensors of one pack at once."""
        if self.weights.current() != run.weights_version:
            raise StaleCacheError(STALE_MESSAGE)
        roots, gradients = [], []
        for root, twin in zip(run.roots, run.twins, strict=True):
            if root.requires_grad:
                roots.append(root)
                gradients.append(twin.grad if twin.grad is not None else torch.zeros_like(root))
        cache = self._caches.get(run.index) if run.captured else None
        if cache is not None:
            for layer, (key, value) in run.captured.items():
                grads = cache.gradients(layer)
                for tensor, gradient in zip((key, value), grads or (), strict=False):
                    if tensor.requires_grad:
                        roots.append(tensor)
                        gradients.append(gradient)
        if roots:
            torch.autograd.backward(roots, gradients)
        if run.captured:
            # Break the cycle: the graph holds the context, the context K and V, K and V the graph.
            run.captured.clear()

    @contextmanager
    def _gradient_sync(self, *, is_last: bool) -> Iterator[None]:
        if is_last or not self.reduce_gradients_once or not isinstance(self.model, FSDPModule):
            yield
            return
        self.model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.model.set_requires_gradient_sync(True)

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)


def check_reuse(runner: PhaseRunner) -> None:
    """Run two tiny rollouts with and without reuse; refuse the model if log-probs differ.

    Catches what no config field tells: positions that a model computes itself, masks that it adds,
    layers that mix tokens outside attention. Under FSDP2 every rank must call it.

    Raises:
        UnsupportedModelError: the log-probs differ by more than rounding.
    """
    try:
        difference, limit = _reuse_difference(runner)
    finally:
        # Parameters are handed back as they came: a forward alone leaves FSDP2's root gathered.
        for module in runner.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
    if not difference <= limit:
        raise UnsupportedModelError(
            "self_check",
            f"{type(pretrained_model(runner.model)).__name__} gives other log-probs when a prefix "
            f"is reused (they differ by {difference:.1e}): something besides token ids, RoPE "
            "positions and attention over earlier tokens enters its forward",
        )


def _reuse_difference(runner: PhaseRunner) -> tuple[float, float]:
    """Typical difference of log-probs after a shared prefix, and what rounding may explain."""
    vocab = pretrained_model(runner.model).config.get_text_config().vocab_size
    prefix = np.arange(1, 9) % vocab
    rollouts = [np.concatenate([prefix, np.arange(1, 8) * step % vocab]) for step in (2, 3)]
    batch = pack_sequences(rollouts, PackBudget(max_tokens=64), mode="cut")
    found: dict[int, torch.Tensor] = {}
    runner.forward(
        batch, lambda done: found.update(zip(done.rollout_ids, done.log_probs, strict=True))
    )
    differences = []
    for index, rollout in enumerate(rollouts):
        token_ids = torch.from_numpy(rollout).to(runner.device)
        positions = torch.arange(len(rollout) - 1, device=runner.device)
        with torch.no_grad(), runner.forward_context():
            logits = runner.model(
                input_ids=token_ids[None, :-1], position_ids=positions[None], use_cache=False
            ).logits[0]
        dense = torch.log_softmax(logits.float(), dim=-1).gather(-1, token_ids[1:, None])[:, 0]
        differences.append((dense - found[index].float()).abs()[len(prefix) :])
    # Log-probs are as exact as the logits they come from.
    rounding = 2 * torch.finfo(logits.dtype).eps * logits.abs().max().item()
    limit = max(1e-4 if logits.dtype in (torch.float32, torch.float64) else 0.05, rounding)
    # The median: a router near a tie may send single tokens elsewhere in half precision.
    return torch.cat(differences).median().item(), limit


@contextmanager
def _phase(name: str, batch: PackedBatch, index: int | None) -> Iterator[None]:
    """A range of the profiler; memory.py reports peaks by it. Exceptions say where they were."""
    try:
        with record_function(PHASE_PREFIX + name):
            yield
    except Exception as error:
        pack = "a dummy pack"
        if index is not None:
            num_tokens = batch.layouts[index].num_tokens
            pack = f"pack {index} of {len(batch.layouts)}, {num_tokens} tokens"
        error.add_note(f"in phase {name}, {pack}")
        raise


def _pad(indices: Sequence[int], count: int) -> list[int | None]:
    return [*indices, *[None] * (count - len(indices))]


class PrefixFlow:
    """Prefix reuse for any training loop over a Hugging Face causal LM.

    Args:
        model: a causal LM whose attention goes through the transformers attention interface.
        max_tokens_per_pack: executed tokens in one forward; larger trees are cut, and with
            `prefix_activations="recompute"` a longer prefix or response runs in pieces.
        attention_backend: `auto`, `reference` or `sdpa_cpu`.
        min_shared_tokens: shorter shared runs are computed by each rollout itself.
        prefix_activations: `keep`, `offload` or `recompute`, see activations.py.
        process_group: under FSDP2, the ranks that shard the model.
        self_check: run `check_reuse` now, five forwards of at most 15 tokens.

    Raises:
        UnsupportedModelError: the model uses something that cannot be reproduced exactly.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        max_tokens_per_pack: int = 16384,
        attention_backend: str = "auto",
        min_shared_tokens: int = 1,
        prefix_activations: PrefixActivations = "keep",
        process_group: dist.ProcessGroup | None = None,
        self_check: bool = True,
    ) -> None:
        check_model(model)
        device = next(model.parameters()).device
        if prefix_activations not in ORDER:
            raise ValueError(
                f"prefix_activations={prefix_activations!r} must be one of {', '.join(ORDER)}"
            )
        self._budget = PackBudget(
            max_tokens=max_tokens_per_pack,
            prefix_activations=prefix_activations,
            split_segments=prefix_activations == "recompute",
        )
        self._min_shared_tokens = min_shared_tokens
        self._runner = PhaseRunner(
            model=model,
            backend=choose_backend(attention_backend, device),
            process_group=process_group,
        )
        if self_check:
            check_reuse(self._runner)

    def backward(
        self,
        sequences: Sequence[Sequence[int] | np.ndarray | torch.Tensor],
        loss_function: LossFunction,
        *,
        predict: Sequence[np.ndarray] | None = None,
        temperatures: float | Sequence[float] = 1.0,
        with_entropy: bool = False,
    ) -> tuple[float, RunStats]:
        """Accumulate gradients of the summed losses; returns the sum and what was run.

        Args:
            sequences: R token id sequences, prompt and response together.
            loss_function: receives `CompletedRollouts`, possibly a few times, and returns a scalar.
            predict: R bool arrays of `len(sequence) - 1`; entry p asks for the log-prob of token p
                + 1.
            temperatures: one value or R; logits are divided by them.
            with_entropy: also compute entropies.
        """
        total = 0.0

        def add_loss(rollouts: CompletedRollouts) -> torch.Tensor:
            nonlocal total
            loss = loss_function(rollouts)
            if isinstance(loss, torch.Tensor) and loss.numel() == 1:
                total += loss.item()
            return loss

        batch = self._pack(sequences, predict, temperatures)
        stats = self._runner.backward(batch, add_loss, with_entropy=with_entropy)
        return total, stats

    def log_probs(
        self,
        sequences: Sequence[Sequence[int] | np.ndarray | torch.Tensor],
        *,
        predict: Sequence[np.ndarray] | None = None,
        temperatures: float | Sequence[float] = 1.0,
    ) -> list[torch.Tensor]:
        """Log-probs without gradients: R float32 tensors, one entry per predicted token."""
        found: dict[int, torch.Tensor] = {}

        def keep(rollouts: CompletedRollouts) -> None:
            found.update(zip(rollouts.rollout_ids, rollouts.log_probs, strict=True))

        self._runner.forward(self._pack(sequences, predict, temperatures), keep)
        empty = torch.zeros(0)
        return [found.get(index, empty) for index in range(len(sequences))]

    def _pack(self, sequences, predict, temperatures) -> PackedBatch:
        arrays = [
            np.ascontiguousarray(sequence.cpu() if isinstance(sequence, torch.Tensor) else sequence)
            for sequence in sequences
        ]
        vocab = pretrained_model(self._runner.model).config.get_text_config().vocab_size
        for index, array in enumerate(arrays):
            if not np.issubdtype(array.dtype, np.integer):
                raise ValueError(
                    f"sequence {index} has dtype {array.dtype}: give integer token ids"
                )
            if array.size and not (array.min() >= 0 and array.max() < vocab):
                raise ValueError(
                    f"sequence {index} has token ids {array.min()} .. {array.max()}: the model "
                    f"knows 0 .. {vocab - 1}"
                )
        check_length(self._runner.model, max((len(array) for array in arrays), default=0))
        return pack_sequences(
            arrays,
            self._budget,
            predict=predict,
            temperatures=temperatures,
            min_shared_tokens=self._min_shared_tokens,
        )
