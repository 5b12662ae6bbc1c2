"""Routes a Hugging Face causal LM's attention through `attention.py`, and refuses models it cannot
serve.

Nothing of the model is replaced: transformers looks its attention function up by name in a registry
at every call, so registering one function and switching the name for the duration of a run is
enough. The pack's `SegmentContext` travels as one extra keyword argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from prefixflow_verl.attention import segment_attention

ATTENTION_NAME = "prefixflow"
CONTEXT_KWARG = "prefixflow_context"


class UnsupportedModelError(ValueError):
    """The model or a setting asks for something prefix reuse cannot reproduce.

    Args:
        feature: short name for metrics, lower case with underscores.
        message: names the setting and says what to do.
    """

    def __init__(self, feature: str, message: str) -> None:
        super().__init__(message)
        self.feature = feature


_RANDOM_WORDS = ("dropout", "pdrop", "layerdrop", "jitter")
"""A numeric config field above 0 with one of these in its name makes a forward random."""

_UNUSED_PREFIXES = ("classifier", "summary")
"""Fields of heads that a causal LM does not have."""


def _attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention interface of transformers: q [1, N, T, D], k and v [1, M, T, D] -> [1, T, N,
    D]."""
    context = kwargs.get(CONTEXT_KWARG)
    if context is None:
        raise RuntimeError(
            f"{type(module).__name__} did not pass `{CONTEXT_KWARG}` on to its attention: this "
            "model cannot run with prefix reuse"
        )
    if attention_mask is not None:
        # `_no_mask` builds none, so the model made this one itself.
        raise UnsupportedModelError(
            "attention_mask",
            f"{type(module).__name__} masks attention by rules of its own, which prefix reuse does "
            "not support",
        )
    if dropout:
        raise UnsupportedModelError(
            "attention_dropout",
            f"attention dropout is {dropout}: set attention_dropout=0 in the model config",
        )
    if sliding_window is not None:
        _check_window(sliding_window, int(context.layout.position_ids.max()) + 1)
    if softcap is not None or s_aux is not None:
        raise UnsupportedModelError(
            "softcap_or_sinks",
            "the model uses attention logit soft-capping or attention sinks, which prefix reuse "
            "does not support",
        )
    if value.shape[-1] != query.shape[-1]:
        raise UnsupportedModelError(
            "value_head_dim",
            f"values have head dimension {value.shape[-1]} and queries {query.shape[-1]} (latent "
            "attention), which prefix reuse does not support",
        )
    layer = module.layer_idx
    if not context.capture(layer, key, value):
        raise UnsupportedModelError(
            "repeated_layer",
            f"the model runs attention layer {layer} twice in one forward (recurrent depth or a "
            "wrong layer_idx), which prefix reuse does not support",
        )
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    out = segment_attention(query, key, value, scale=scale, context=context, layer=layer)
    return out, None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """The layout says who attends to whom; no mask tensor is built."""


ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _attention_forward)
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _no_mask)


def pretrained_model(module: torch.nn.Module) -> PreTrainedModel:
    """The Hugging Face causal LM inside `module` (itself, or below PEFT and other wrappers).

    Raises:
        UnsupportedModelError: there is none.
    """
    for candidate in module.modules():
        if isinstance(candidate, PreTrainedModel):
            return candidate
    raise UnsupportedModelError(
        "not_transformers",
        f"{type(module).__name__} holds no Hugging Face PreTrainedModel: prefix reuse needs one",
    )


@contextmanager
def routed(module: torch.nn.Module) -> Iterator[None]:
    """While open, attention of `module` is segment attention.

    Keep it open over forward *and* backward: activation checkpointing runs the layers again.
    """
    configs = {id(m.config): m.config for m in module.modules() if isinstance(m, PreTrainedModel)}
    before = {key: config._attn_implementation for key, config in configs.items()}
    for config in configs.values():
        config._attn_implementation = ATTENTION_NAME
    try:
        yield
    finally:
        for key, config in configs.items():
            config._attn_implementation = before[key]


class LmHead:
    """The LM head of a model, made to give log-probs in place of logits.

    [Note: log-probs inside the LM head]
    Chunks need the head's inputs and weight. Under FSDP2 the weight is there only while the root
    module runs, so what is computed from them has to be computed in the head's place: for one
    forward of the model its `forward` is another function, and the model returns that function's
    result as its logits. This is right only if nothing follows the head (a scale, a cast), which
    the first forward shows; where something follows, logits are made as ever.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        head = pretrained_model(module).get_output_embeddings()
        # A LoRA or quantised head computes more than a product.
        is_linear = isinstance(head, torch.nn.Linear) and (
            type(head).forward is torch.nn.Linear.forward and "forward" not in vars(head)
        )
        self._linear: torch.nn.Linear | None = head if is_linear else None
        self._output: torch.Tensor | None = None
        self.can_replace: bool | None = None if is_linear else False
        """None: a forward under `observed` has to show it."""

    @contextmanager
    def replaced(
        self, compute: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
    ) -> Iterator[None]:
        """While open, logits are `compute(hidden [R, H], weight [V, H], bias [V] or None)`."""
        linear = self._linear

        def forward(hidden_1RH: torch.Tensor) -> torch.Tensor:
            # FSDP2 hooks its backward to a module's output, which must not be a view.
            return torch.stack([compute(hidden_1RH[0], linear.weight, linear.bias)])

        with _forward_of(linear, forward):
            yield

    @contextmanager
    def observed(self) -> Iterator[None]:
        """While open, the head's output is remembered for `saw`."""
        linear = self._linear

        def forward(hidden: torch.Tensor) -> torch.Tensor:
            self._output = torch.nn.Linear.forward(linear, hidden)
            return self._output

        with _forward_of(linear, forward):
            yield

    def saw(self, logits_RV: torch.Tensor) -> None:
        """Set `can_replace`: are the model's logits of its one row just what the head put out?"""
        output, self._output = self._output, None
        self.can_replace = (
            output is not None
            and output.data_ptr() == logits_RV.data_ptr()
            and (output.numel(), output.dtype) == (logits_RV.numel(), logits_RV.dtype)
            and output._version == 0
        )


@contextmanager
def _forward_of(linear: torch.nn.Linear, forward: Callable) -> Iterator[None]:
    linear.forward = forward
    try:
        yield
    finally:
        del linear.forward


def check_model(module: torch.nn.Module) -> None:
    """Refuse, by name and with the remedy, what prefix reuse cannot reproduce exactly.

    Raises:
        UnsupportedModelError: naming the setting and what to do.
    """
    model = pretrained_model(module)
    config = model.config
    name = type(model).__name__
    if not getattr(model, "_supports_attention_backend", False):
        raise UnsupportedModelError(
            "attention_interface",
            f"{name} does not route its attention through the transformers attention interface; "
            "use a model that does (Llama, Qwen2, Qwen3, Mistral, ...)",
        )
    if getattr(config, "vision_config", None) or getattr(config, "audio_config", None):
        raise UnsupportedModelError("multimodal", f"{name} is multimodal: use a text-only model")
    for field, value in config.to_dict().items():
        is_random = any(word in field for word in _RANDOM_WORDS)
        if not is_random or field.startswith(_UNUSED_PREFIXES):
            continue
        if isinstance(value, (int, float)) and value > 0:
            raise UnsupportedModelError(
                "dropout",
                f"{field}={value} in the model config: set it to 0, a shared prefix has one random "
                "mask where separate rollouts have many",
            )
    for submodule_name, submodule in module.named_modules():
        if isinstance(submodule, torch.nn.Dropout) and submodule.p > 0:
            raise UnsupportedModelError(
                "dropout",
                f"dropout p={submodule.p} at {submodule_name}: set lora_dropout (or the model's "
                "dropout) to 0",
            )
    layer_types = set(getattr(config, "layer_types", None) or ())
    other = layer_types - {"full_attention", "sliding_attention"}
    if other:
        raise UnsupportedModelError(
            "layer_types",
            f"{name} has layers of type {sorted(other)}: only softmax attention over all "
            "positions is supported",
        )
    if any(hasattr(submodule, "sinks") for submodule in module.modules()):
        raise UnsupportedModelError(
            "softcap_or_sinks", f"{name} uses attention sinks, which prefix reuse does not support"
        )
    for field in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, field, None):
            raise UnsupportedModelError(
                "softcap", f"{field} is set in the model config: soft-capping is not supported"
            )
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        rope_type = parameters.get("rope_type", parameters.get("type", "default"))
        if rope_type in ("dynamic", "longrope"):
            raise UnsupportedModelError(
                "rope_type",
                f"rope_type={rope_type} depends on the total length, so keys of a shared prefix "
                "would differ between rollouts: use default, linear, llama3 or yarn",
            )
    if getattr(config, "output_router_logits", False):
        raise UnsupportedModelError(
            "router_loss",
            "output_router_logits=True adds a router loss that counts tokens: set it to False in "
            "the model config",
        )
    _check_checkpointing(module)


def check_length(module: torch.nn.Module, num_tokens: int) -> None:
    """Refuse sequences of `num_tokens` tokens that reach past a sliding window.

    Raises:
        UnsupportedModelError: some layer would not see the start of such a sequence.
    """
    config = pretrained_model(module).config
    layer_types = getattr(config, "layer_types", None)
    slides = layer_types is None or "sliding_attention" in layer_types
    window = getattr(config, "sliding_window", None)
    if slides and window is not None:
        _check_window(window, num_tokens)


def _check_window(window: int, num_tokens: int) -> None:
    if window < num_tokens:
        raise UnsupportedModelError(
            "sliding_window",
            f"sliding_window={window} in the model config is shorter than a sequence of "
            f"{num_tokens} tokens: use shorter sequences or a model without a sliding window",
        )


def _check_checkpointing(module: torch.nn.Module) -> None:
    for submodule in module.modules():
        function = getattr(submodule, "_gradient_checkpointing_func", None)
        keywords = getattr(function, "keywords", {})
        if getattr(submodule, "gradient_checkpointing", False) and keywords.get(
            "use_reentrant", False
        ):
            raise UnsupportedModelError(
                "reentrant_checkpointing",
                "gradient checkpointing is reentrant, which hides keys and values from the delayed "
                "backward: enable it with gradient_checkpointing_kwargs={'use_reentrant': False}",
            )
