"""Keeps a rank that ran out of memory in step with the others, until all of them can give up.

[Note: a rank without memory]
Under FSDP2 a pass through the model is a sequence of collectives, and the other ranks wait in the
next one when a rank stops. So that rank frees what it holds and takes part to the end of the
mini-batch without computing anything: it gathers, and drops at once, the parameters of every module
that the others gather. Gradients are not reduced before the end, and by then all ranks know of the
failure: they discard the gradients together, and the mini-batch can run again in smaller packs.

Which module is gathered when is known as long as every module is gathered by its own hooks alone,
so prefetching is switched off: in forward a module gathers when it is entered, unless it still is;
in backward the same, when the gradient of its output arrives, in the reverse order of leaving.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

Pass = Literal["forward", "backward"]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that an allocation failed, on any device."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "not enough memory" in str(error)


class PackMemoryError(RuntimeError):
    """A pack did not fit into memory on some rank. Raised on every rank; the gradients of the
    mini-batch are gone."""

    def __init__(self, num_tokens: int, cause: str) -> None:
        super().__init__(f"a pack of {num_tokens} tokens does not fit into memory: {cause}")
        self.num_tokens = num_tokens
        """Executed tokens of the smallest pack that failed."""
        self.cause = cause


class Lockstep:
    """Follows the passes through an FSDP2 model, and can do the rest of one without computing.

    Args:
        root: the module that `fully_shard` was applied to last.
    """

    def __init__(self, root: FSDPModule) -> None:
        self._root = root
        self._modules = [module for module in root.modules() if isinstance(module, FSDPModule)]
        self._parameter_of = {module: _own_parameter(module) for module in self._modules}
        self._order: list[FSDPModule] = []
        """By entering, of the last whole forward."""
        self._leaving_order: list[FSDPModule] = []
        self._stays: set[FSDPModule] = set()
        """Modules that a forward leaves gathered."""
        self._pass: Pass | None = None
        self._reached: list[FSDPModule] = []
        self._left: list[FSDPModule] = []
        self._gathered: set[FSDPModule] = set()
        """By what the other ranks do, once this one has failed."""
        for module in self._modules:
            module.set_modules_to_forward_prefetch([module])
            module.set_modules_to_backward_prefetch([module])
            # After FSDP2's own hooks: what is entered has been gathered.
            module.register_forward_pre_hook(self._enter)
            module.register_forward_hook(self._leave)

    def begin(self, pass_: Pass) -> None:
        """The next pass through the model starts."""
        self._pass = pass_
        self._reached, self._left = [], []
        self._gathered = {module for module in self._modules if self._is_gathered(module)}

    def finish(self) -> None:
        """Take part in the rest of the pass that has just failed."""
        order = self._order if self._pass == "forward" else self._leaving_order[::-1]
        reached = set(self._reached)
        missing = [module for module in order if module not in reached | self._gathered]
        if missing:
            # The failed one may have begun to gather; this waits for it, or begins.
            missing[0].unshard()
        self._root.reset_iter_state()
        for module in missing[1:]:
            _gather_and_drop(module)
        self._end(self._pass)

    def replay(self, pass_: Pass) -> None:
        """Take part in a whole pass."""
        order = self._order if pass_ == "forward" else self._leaving_order[::-1]
        for module in order:
            if module not in self._gathered:
                _gather_and_drop(module)
        self._end(pass_)

    def reset(self) -> None:
        """Leave nothing gathered: a pass that a rank only took part in leaves nothing there."""
        self._root.reset_iter_state()

    def _end(self, pass_: Pass) -> None:
        if pass_ == "forward":
            self._gathered |= self._stays
        else:
            self._gathered = set()

    def _enter(self, module: FSDPModule, _arguments: Any) -> None:
        if self._pass == "backward":  # activation checkpointing runs layers again
            return
        if module is self._root:
            self._reached, self._left = [], []
        self._reached.append(module)

    def _leave(self, module: FSDPModule, _arguments: Any, output: Any) -> None:
        if self._pass == "backward":
            return
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                # After FSDP2's own hook, which gathers.
                tensor.register_hook(partial(self._arrive, module))
        self._left.append(module)
        if module is self._root:
            self._order, self._leaving_order = list(self._reached), list(self._left)
            self._stays = {module for module in self._modules if self._is_gathered(module)}

    def _arrive(self, module: FSDPModule, _gradient: torch.Tensor) -> None:
        if self._pass == "backward":
            self._reached.append(module)

    def _is_gathered(self, module: FSDPModule) -> bool:
        owner, name = self._parameter_of[module]
        return not isinstance(owner._parameters[name], DTensor)


def _own_parameter(module: FSDPModule) -> tuple[torch.nn.Module, str]:
    """A parameter that `module` gathers itself: (its direct owner, its name there)."""
    pending: list[torch.nn.Module] = [module]
    while pending:
        owner = pending.pop()
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                return owner, name
        pending += [child for child in owner.children() if not isinstance(child, FSDPModule)]
    raise ValueError(f"{type(module).__name__} has no parameter of its own")


def _gather_and_drop(module: FSDPModule) -> None:
    module.unshard()
    module.reshard()
