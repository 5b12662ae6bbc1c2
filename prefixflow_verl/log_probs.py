"""Log-prob and entropy of the predictions of one pack, from hidden states, in chunks of rows.

Shape legend: R rows, H hidden size, V vocabulary, U distinct (row, temperature), C rows of one
chunk, P predictions.

With z = hidden @ weight.T / temperature and p = softmax(z):

    log p(t) = z_t - lse(z)            d log p(t) / dz_v = [v = t] - p_v
    H        = - sum_v p_v log p_v     dH / dz_v         = -p_v (log p_v + H)

[Note: no logits of all rows]
Logits exist for one chunk of rows at a time. Where log p of all rows together is small it is kept,
and backward turns it into the gradient in place; otherwise backward computes the logits of each
chunk once more. That costs a third of the LM head's FLOPs again; with a vocabulary of 152k it is
the difference between 0.6 MB of float32 per row and nothing.

verl's `FusedLinearForPPO` goes the same way for one target and one temperature per row; the last
row of a shared prefix has several.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkLimits:
    """Sizes in float32 elements of logits."""

    chunk: int
    """Of one chunk."""
    kept: int
    """Kept for backward, all chunks of a pack together; above it they are computed again."""


LIMITS = {"cpu": ChunkLimits(chunk=1 << 20, kept=1 << 24)}
"""By device type. A chunk that fits a CPU's cache is faster than a large one."""

DEFAULT_LIMITS = ChunkLimits(chunk=1 << 27, kept=1 << 27)
"""Any other device: 512 MiB, rows enough to keep it busy."""


def log_probs_and_entropy(
    hidden_RH: torch.Tensor,
    weight_VH: torch.Tensor | None,
    bias_V: torch.Tensor | None,
    scaled_rows_U: torch.Tensor | None,
    temperatures_U: torch.Tensor | None,
    prediction_rows_P: torch.Tensor,
    targets_P: torch.Tensor,
    *,
    with_entropy: bool,
) -> torch.Tensor:
    """Log-prob, and entropy if asked for, of each prediction: float32 [P, 1 or 2].

    Float64 inputs give float64. Backward may run once.

    Args:
        hidden_RH: inputs of the LM head in any floating dtype; if `weight_VH` is None, its outputs
            [R, V] before temperature.
        weight_VH, bias_V: the LM head.
        scaled_rows_U: int64, row of each distinct (row, temperature); None: every row, in order.
        temperatures_U: logits of that row are divided by it; None: all 1.
        prediction_rows_P: int64 on the CPU, index into `scaled_rows_U`, ascending.
        targets_P: int64 token ids on the CPU.
        with_entropy: append a second column, in nats.
    """
    if scaled_rows_U is not None:
        hidden_RH = hidden_RH.index_select(0, scaled_rows_U)
    keep = torch.is_grad_enabled()
    return _LogProbs.apply(
        hidden_RH,
        weight_VH,
        bias_V,
        temperatures_U,
        prediction_rows_P,
        targets_P,
        with_entropy,
        keep,
    )


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, hidden, weight, bias, temperatures, prediction_rows, targets, with_entropy, keep
    ):
        vocab = hidden.shape[1] if weight is None else weight.shape[0]
        limits = LIMITS.get(hidden.device.type, DEFAULT_LIMITS)
        chunks = _chunks(prediction_rows, len(hidden), max(1, limits.chunk // vocab))
        keep = keep and len(hidden) * vocab <= max(limits.kept, limits.chunk)
        prediction_rows = prediction_rows.to(hidden.device, non_blocking=True)
        targets = targets.to(hidden.device, non_blocking=True)
        values, entropies, kept = [], [], []
        for rows, predictions in chunks:
            logits = _logits(hidden[rows], weight, bias)
            log_p = _log_softmax(logits, temperatures, rows)
            local_rows = prediction_rows[predictions] - rows.start
            values.append(log_p[local_rows, targets[predictions]])
            if with_entropy:
                # A token of probability 0 adds nothing; 0 times -inf would.
                log_p.clamp_min_(torch.finfo(log_p.dtype).min)
                entropies.append(log_p.exp().mul_(log_p).sum(-1).neg_())
            if keep:
                kept.append(log_p)
        entropy = torch.cat(entropies) if with_entropy else None
        ctx.save_for_backward(
            hidden, weight, bias, temperatures, prediction_rows, targets, entropy, *kept
        )
        ctx.chunks, ctx.logits_dtype = chunks, logits.dtype
        columns = [torch.cat(values)]
        if with_entropy:
            columns.append(entropy[prediction_rows])
        return torch.stack(columns, dim=-1)

    @staticmethod
    def backward(ctx, grad_outputs):
        hidden, weight, bias, temperatures, prediction_rows, targets, entropy, *kept = (
            ctx.saved_tensors
        )
        grad_log_probs = grad_outputs[:, 0]
        # Gradient of each row's LSE and entropy: sums over the predictions that use the row.
        zeros = grad_outputs.new_zeros(len(hidden))
        lse_grad = zeros.index_add(0, prediction_rows, -grad_log_probs)
        entropy_grad = None
        if entropy is not None:
            entropy_grad = zeros.index_add(0, prediction_rows, grad_outputs[:, 1])
        sums = _HeadGradients(hidden, weight, bias, ctx.needs_input_grad, len(ctx.chunks))
        kept.reverse()
        for rows, predictions in ctx.chunks:
            if kept:
                log_p = kept.pop()
            else:
                # The dtype of the first time: autocast is over when backward runs.
                dtype = ctx.logits_dtype
                logits = _logits(*(_cast(t, dtype) for t in (hidden[rows], weight, bias)))
                log_p = _log_softmax(logits, temperatures, rows)
                if entropy is not None:
                    log_p.clamp_min_(torch.finfo(log_p.dtype).min)
            if entropy_grad is None:
                grad = log_p.exp_().mul_(lse_grad[rows, None])
            else:
                grad = log_p.exp()
                log_p.add_(entropy[rows, None]).mul_(-entropy_grad[rows, None])
                grad.mul_(log_p.add_(lse_grad[rows, None]))
            # Before rounding: for a likely token 1 - p is far smaller than p.
            local_rows = prediction_rows[predictions] - rows.start
            where = local_rows * grad.shape[1] + targets[predictions]
            grad.view(-1).index_add_(0, where, grad_log_probs[predictions])
            if temperatures is not None:
                grad /= temperatures[rows, None]
            sums.add(rows, grad.to(ctx.logits_dtype))
        return *sums.result(), None, None, None, None, None


class _HeadGradients:
    """Sums of dlogits @ weight, dlogits.T @ hidden and dlogits over chunks of rows."""

    def __init__(self, hidden, weight, bias, needs_input_grad, num_chunks) -> None:
        self._hidden, self._weight = hidden, weight
        needs_hidden, needs_weight, needs_bias, *_ = needs_input_grad
        self._dhidden = torch.empty_like(hidden) if needs_hidden else None
        # bfloat16 sums over many chunks would lose bits.
        wide = torch.promote_types(hidden.dtype, torch.float32) if num_chunks > 1 else None
        self._dweight = torch.zeros_like(weight, dtype=wide) if needs_weight else None
        self._dbias = torch.zeros_like(bias, dtype=wide) if needs_bias else None
        self._dtypes = [tensor.dtype if tensor is not None else None for tensor in (weight, bias)]

    def add(self, rows: slice, dlogits_CV: torch.Tensor) -> None:
        dtype = dlogits_CV.dtype
        if self._dhidden is not None:
            if self._weight is None:
                self._dhidden[rows] = dlogits_CV
            else:
                self._dhidden[rows] = dlogits_CV @ self._weight.to(dtype)
        if self._dweight is not None:
            hidden = self._hidden[rows].to(dtype)
            if self._dweight.dtype == dtype:
                self._dweight.addmm_(dlogits_CV.t(), hidden)
            else:
                self._dweight += dlogits_CV.t() @ hidden
        if self._dbias is not None:
            self._dbias += dlogits_CV.sum(0, dtype=self._dbias.dtype)

    def result(self) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        weight_dtype, bias_dtype = self._dtypes
        return self._dhidden, _cast(self._dweight, weight_dtype), _cast(self._dbias, bias_dtype)


def _logits(
    hidden_CH: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    return hidden_CH if weight is None else F.linear(hidden_CH, weight, bias)


def _log_softmax(
    logits_CV: torch.Tensor, temperatures_U: torch.Tensor | None, rows: slice
) -> torch.Tensor:
    """A new tensor: float32, or float64 for float64 logits."""
    wide = torch.promote_types(logits_CV.dtype, torch.float32)
    z = logits_CV.to(wide)
    if temperatures_U is not None:
        z = z / temperatures_U[rows, None].to(wide)
    return torch.log_softmax(z, dim=-1)


def _cast(tensor: torch.Tensor | None, dtype: torch.dtype | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.to(dtype)


def _chunks(
    prediction_rows_P: torch.Tensor, num_rows: int, chunk_rows: int
) -> list[tuple[slice, slice]]:
    """(rows, predictions on them) of each chunk."""
    starts = range(0, num_rows, chunk_rows)
    edges = torch.tensor([*starts, num_rows])
    bounds = torch.searchsorted(prediction_rows_P, edges).tolist()
    return [
        (slice(start, min(start + chunk_rows, num_rows)), slice(first, last))
        for start, first, last in zip(starts, bounds, bounds[1:], strict=False)
    ]
