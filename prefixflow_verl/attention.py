"""Segment attention: backends, LSE merge, and the autograd function over one packed row.

Shape legend: B = 1 batch, N query heads, M key/value heads (N a multiple of M), T row tokens, Q
queries and K keys of one part, D head dimension.

[Note: one LSE for all parts]
A query's keys are split into parts: its own segment (causal) and each ancestor range (no mask). A
kernel returns the part's output and LSE, the natural-log sum-exp of its scaled scores. Softmax over
the union is

    lse = logaddexp(lse_a, lse_b)        out = out_a exp(lse_a - lse) + out_b exp(lse_b - lse)

In backward every part's kernel is handed the *merged* out and lse. The kernel rebuilds its
probabilities as exp(score - lse), which are then the probabilities of the whole softmax, and its
delta = rowsum(dout * out) is that of the whole row. So dQ is the sum over parts, dK and dV of each
part are right by themselves, and no prefix key is ever copied per response.
"""

from __future__ import annotations

from typing import Protocol

import torch

from prefixflow_verl.kv_cache import PackCache
from prefixflow_verl.packing import IN_PACK, CrossPart, PackLayout


class AttentionBackend(Protocol):
    """One attention kernel over contiguous queries and keys."""

    name: str

    def forward(
        self,
        q_BNQD: torch.Tensor,
        k_BMKD: torch.Tensor,
        v_BMKD: torch.Tensor,
        causal: bool,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output [B, N, Q, D] in q's dtype and LSE [B, N, Q] in float32 (float64 for float64)."""

    def backward(
        self,
        dout_BNQD: torch.Tensor,
        q_BNQD: torch.Tensor,
        k_BMKD: torch.Tensor,
        v_BMKD: torch.Tensor,
        out_BNQD: torch.Tensor,
        lse_BNQ: torch.Tensor,
        causal: bool,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """dQ [B, N, Q, D], dK and dV [B, M, K, D], given merged out and LSE."""


class ReferenceBackend:
    """Plain mathematics in any dtype on any device; the truth for other backends."""

    name = "reference"

    def forward(self, q_BNQD, k_BMKD, v_BMKD, causal, scale):
        scores = _scores(q_BNQD, k_BMKD, causal, scale)
        lse_BNQ = torch.logsumexp(scores, dim=-1)
        probs = (scores - lse_BNQ.unsqueeze(-1)).exp()
        return (probs @ _per_query_head(v_BMKD, q_BNQD).to(probs.dtype)).to(q_BNQD.dtype), lse_BNQ

    def backward(self, dout_BNQD, q_BNQD, k_BMKD, v_BMKD, out_BNQD, lse_BNQ, causal, scale):
        num_kv_heads = k_BMKD.shape[1]
        probs = (_scores(q_BNQD, k_BMKD, causal, scale) - lse_BNQ.unsqueeze(-1)).exp()
        dout, out = dout_BNQD.to(probs.dtype), out_BNQD.to(probs.dtype)
        dprobs = dout @ _per_query_head(v_BMKD, q_BNQD).to(probs.dtype).mT
        dscores = probs * (dprobs - (dout * out).sum(-1, keepdim=True)) * scale
        dq = dscores @ _per_query_head(k_BMKD, q_BNQD).to(probs.dtype)
        dk = _sum_query_heads(dscores.mT @ q_BNQD.to(probs.dtype), num_kv_heads)
        dv = _sum_query_heads(probs.mT @ dout, num_kv_heads)
        return dq.to(q_BNQD.dtype), dk.to(k_BMKD.dtype), dv.to(v_BMKD.dtype)


class SdpaCpuBackend:
    """PyTorch's CPU flash attention: returns the LSE, accepts N > M without copies."""

    name = "sdpa_cpu"

    def forward(self, q_BNQD, k_BMKD, v_BMKD, causal, scale):
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q_BNQD, k_BMKD, v_BMKD, 0.0, causal, scale=scale
        )

    def backward(self, dout_BNQD, q_BNQD, k_BMKD, v_BMKD, out_BNQD, lse_BNQ, causal, scale):
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout_BNQD, q_BNQD, k_BMKD, v_BMKD, out_BNQD, lse_BNQ, 0.0, causal, scale=scale
        )


BACKENDS: dict[str, AttentionBackend] = {
    backend.name: backend for backend in (ReferenceBackend(), SdpaCpuBackend())
}


def choose_backend(name: str, device: torch.device) -> AttentionBackend:
    """The backend called `name`, or for `auto` the fastest one that serves `device`.

    Raises:
        ValueError: no such backend, or it cannot serve the device.
    """
    if name == "auto":
        return BACKENDS["sdpa_cpu" if device.type == "cpu" else "reference"]
    if name not in BACKENDS:
        raise ValueError(
            f"attention_backend={name!r} is not known: use auto or one of {sorted(BACKENDS)}"
        )
    if name == "sdpa_cpu" and device.type != "cpu":
        raise ValueError(
            f"attention_backend=sdpa_cpu cannot serve device {device}: use auto or reference"
        )
    return BACKENDS[name]


class SegmentContext:
    """What the attention of one pack needs, passed through the model's keyword arguments.

    [Note: context through keyword arguments]
    A delayed backward with activation checkpointing runs layers again long after other packs ran.
    Keyword arguments are saved with the checkpoint, so the second run sees this pack's context; a
    global would hold another pack's. It is an ordinary class on purpose: FSDP2 rebuilds
    dataclasses, dicts and tuples among a module's arguments to cast the tensors inside, and a
    rebuilt context would capture into a copy.

    Args:
        layout: the pack's row.
        backend: kernel for each part.
        caches: caches of the head packs that `layout.cross_parts` reads, by pack.
        captured: layer -> in-graph (K, V) of a head pack, filled by the first forward only; None
            for a leaf.
    """

    __slots__ = ("backend", "caches", "captured", "is_sealed", "layout")

    def __init__(
        self,
        *,
        layout: PackLayout,
        backend: AttentionBackend,
        caches: dict[int, PackCache],
        captured: dict[int, tuple[torch.Tensor, torch.Tensor]] | None,
    ) -> None:
        self.layout = layout
        self.backend = backend
        self.caches = caches
        self.captured = captured
        self.is_sealed = False

    def capture(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> bool:
        """Record K and V of `layer`; a checkpoint's second forward records nothing.

        Returns:
            False if one forward runs the layer twice: its keys then have no single place.
        """
        if self.captured is None or self.is_sealed:
            return True
        if layer in self.captured:
            return False
        self.captured[layer] = (key, value)
        return True

    def seal(self) -> None:
        """The first forward is over: what follows are recomputations."""
        self.is_sealed = True


def segment_attention(
    q_BNTD: torch.Tensor,
    k_BMTD: torch.Tensor,
    v_BMTD: torch.Tensor,
    *,
    scale: float,
    context: SegmentContext,
    layer: int,
) -> torch.Tensor:
    """Attention of one packed row over its segments and their ancestors: [1, T, N, D].

    Gradients of cached keys and values go straight to their `PackCache` accumulators.
    """
    num_tokens = context.layout.num_tokens
    if q_BNTD.shape[0] != 1 or q_BNTD.shape[2] != num_tokens or k_BMTD.shape[2] != num_tokens:
        raise RuntimeError(
            f"attention of layer {layer} got queries {tuple(q_BNTD.shape)} and keys "
            f"{tuple(k_BMTD.shape)} for a pack of {num_tokens} tokens: the model changed the "
            "sequence (a past_key_values cache, padding or sequence parallelism), which prefix "
            "reuse cannot follow"
        )
    return _SegmentAttention.apply(q_BNTD, k_BMTD, v_BMTD, scale, context, layer)


def merge_part(
    out: torch.Tensor, lse: torch.Tensor, part_out: torch.Tensor, part_lse: torch.Tensor
) -> None:
    """Merge a part into `out` [..., Q, D] and `lse` [..., Q] in place.

    See [Note: one LSE for all parts].
    """
    # exp(part_lse - logaddexp(lse, part_lse)) is a sigmoid, and the two weights sum to one.
    weight = torch.sigmoid(part_lse - lse).unsqueeze(-1)
    out.lerp_(part_out.to(out.dtype), weight.to(out.dtype))
    torch.logaddexp(lse, part_lse, out=lse)


def forward_parts(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    context: SegmentContext,
    layer: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merged output [1, N, T, D] (memory order T, N, D) and LSE [1, N, T]."""
    layout, backend = context.layout, context.backend
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    # Parts are merged in float32 and rounded once.
    merge_dtype = wide if layout.cross_parts else q.dtype
    batch, heads, tokens, dim = q.shape
    out = torch.empty(batch, tokens, heads, dim, dtype=merge_dtype, device=q.device).transpose(1, 2)
    lse = torch.empty(batch, heads, tokens, dtype=wide, device=q.device)
    for start, end in layout.self_parts:
        rows = slice(start, end)
        out[:, :, rows], lse[:, :, rows] = backend.forward(
            q[:, :, rows], k[:, :, rows], v[:, :, rows], True, scale
        )
    for part in layout.cross_parts:
        rows = slice(part.query_start, part.query_end)
        part_out, part_lse = backend.forward(
            q[:, :, rows], *_part_keys(part, k, v, context, layer), False, scale
        )
        merge_part(out[:, :, rows], lse[:, :, rows], part_out, part_lse.to(wide))
    return out.to(q.dtype), lse


def backward_parts(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    context: SegmentContext,
    layer: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dQ, dK, dV of the row; gradients of cached keys and values go to their caches."""
    layout, backend = context.layout, context.backend
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    sum_dtype = wide if layout.cross_parts else q.dtype
    dq = torch.empty_like(q, dtype=sum_dtype)
    dk, dv = torch.empty_like(k, dtype=sum_dtype), torch.empty_like(v, dtype=sum_dtype)

    def part_gradients(rows: slice, keys: torch.Tensor, values: torch.Tensor, causal: bool):
        return backend.backward(
            dout[:, :, rows],
            q[:, :, rows],
            keys,
            values,
            out[:, :, rows],
            lse[:, :, rows],
            causal,
            scale,
        )

    for start, end in layout.self_parts:
        rows = slice(start, end)
        dq[:, :, rows], dk[:, :, rows], dv[:, :, rows] = part_gradients(
            rows, k[:, :, rows], v[:, :, rows], True
        )
    for part in layout.cross_parts:
        rows = slice(part.query_start, part.query_end)
        part_dq, part_dk, part_dv = part_gradients(
            rows, *_part_keys(part, k, v, context, layer), False
        )
        dq[:, :, rows] += part_dq
        keys = slice(part.key_start, part.key_end)
        if part.pack == IN_PACK:
            dk[:, :, keys] += part_dk
            dv[:, :, keys] += part_dv
        else:
            context.caches[part.pack].add_gradient(
                layer, part.key_start, part.key_end, part_dk, part_dv
            )
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


class _SegmentAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, scale, context, layer):
        out, lse = forward_parts(q, k, v, scale, context, layer)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scale, ctx.context, ctx.layer = scale, context, layer
        return out.transpose(1, 2)

    @staticmethod
    def backward(ctx, dout_BTND):
        q, k, v, out, lse = ctx.saved_tensors
        dout = dout_BTND.contiguous().transpose(1, 2)
        grads = backward_parts(dout, q, k, v, out, lse, ctx.scale, ctx.context, ctx.layer)
        return *grads, None, None, None


def _part_keys(
    part: CrossPart, k: torch.Tensor, v: torch.Tensor, context: SegmentContext, layer: int
) -> tuple[torch.Tensor, torch.Tensor]:
    if part.pack == IN_PACK:
        keys = slice(part.key_start, part.key_end)
        return k[:, :, keys], v[:, :, keys]
    return context.caches[part.pack].read(layer, part.key_start, part.key_end, k.dtype)


def _scores(q: torch.Tensor, k: torch.Tensor, causal: bool, scale: float) -> torch.Tensor:
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    scores = (q.to(wide) @ _per_query_head(k, q).to(wide).mT) * scale
    if causal:
        masked = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(masked, float("-inf"))
    return scores


def _per_query_head(kv_BMKD: torch.Tensor, q_BNQD: torch.Tensor) -> torch.Tensor:
    return kv_BMKD.repeat_interleave(q_BNQD.shape[1] // kv_BMKD.shape[1], dim=1)


def _sum_query_heads(grad_BNKD: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    return grad_BNKD.unflatten(1, (num_kv_heads, -1)).sum(2)
