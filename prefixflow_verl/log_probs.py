"""Log-prob and entropy of the predictions of one pack, without a float32 softmax kept for backward.

Shape legend: R rows of logits, V vocabulary, U distinct (row, temperature), P predictions.

With z = logits / temperature and p = softmax(z):

    log p(t) = z_t - lse(z)            d log p(t) / dz_v = [v = t] - p_v
    H        = lse(z) - sum_v p_v z_v  dH / dz_v         = -p_v (log p_v + H)

Only the logits and three numbers per row are saved; softmax is rebuilt in row chunks. lse(z) is
kept as max z and the logarithm of the sum after subtracting it: the differences above are then
those of small numbers, where lse(z) is as large as the logits and its rounding would show.
"""

from __future__ import annotations

import torch

_CHUNK_ELEMENTS = 1 << 24
"""Largest float32 scratch of one chunk, in elements (64 MiB)."""


def log_probs_and_entropy(
    logits_RV: torch.Tensor,
    scaled_rows_U: torch.Tensor,
    temperatures_U: torch.Tensor,
    prediction_rows_P: torch.Tensor,
    targets_P: torch.Tensor,
    *,
    with_entropy: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-prob and entropy of each prediction: two float32 [P] tensors (float64 for float64
    logits).

    Args:
        logits_RV: logits in any floating dtype, before temperature.
        scaled_rows_U: int64, row of each distinct (row, temperature); every row at least once.
        temperatures_U: logits of that row are divided by it.
        prediction_rows_P: int64, index into `scaled_rows_U`.
        targets_P: int64 token ids.
        with_entropy: False returns None in place of the entropy.
    """
    log_probs, entropy = _LogProbs.apply(
        logits_RV, scaled_rows_U, temperatures_U, prediction_rows_P, targets_P, with_entropy
    )
    return log_probs, entropy if with_entropy else None


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, scaled_rows, temperatures, prediction_rows, targets, with_entropy):
        ctx.set_materialize_grads(False)
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        temperatures = temperatures.to(wide)
        top = torch.empty(len(scaled_rows), dtype=wide, device=logits.device)
        log_sum, entropy = torch.empty_like(top), torch.empty_like(top)
        for rows in _chunks(len(scaled_rows), logits.shape[1]):
            z = logits[scaled_rows[rows]].to(wide) / temperatures[rows, None]
            top[rows] = z.amax(-1)
            z -= top[rows, None]
            weights = z.exp()
            total = weights.sum(-1)
            log_sum[rows] = total.log()
            if with_entropy:
                entropy[rows] = log_sum[rows] - weights.mul_(z).sum(-1) / total
        target_logits = logits[scaled_rows[prediction_rows], targets].to(wide)
        target_z = target_logits / temperatures[prediction_rows] - top[prediction_rows]
        log_probs = target_z - log_sum[prediction_rows]
        ctx.save_for_backward(
            logits, scaled_rows, temperatures, prediction_rows, targets, top, log_sum, entropy
        )
        return log_probs, entropy[prediction_rows] if with_entropy else None

    @staticmethod
    def backward(ctx, grad_log_probs, grad_entropy):
        logits, scaled_rows, temperatures, prediction_rows, targets, top, log_sum, entropy = (
            ctx.saved_tensors
        )
        if grad_log_probs is None:
            grad_log_probs = torch.zeros(len(targets), dtype=top.dtype, device=top.device)
        # Gradient of each scaled row's LSE and entropy: sums over the predictions that use it.
        lse_grad = torch.zeros_like(top).index_add_(0, prediction_rows, -grad_log_probs)
        entropy_grad = None
        if grad_entropy is not None:
            entropy_grad = torch.zeros_like(top).index_add_(0, prediction_rows, grad_entropy)
        one_temperature = len(scaled_rows) == logits.shape[0]
        # Rows used at several temperatures receive several terms: sum those in wide precision.
        dlogits = torch.zeros_like(logits, dtype=logits.dtype if one_temperature else top.dtype)
        target_grad = grad_log_probs / temperatures[prediction_rows]
        for rows in _chunks(len(scaled_rows), logits.shape[1]):
            z = logits[scaled_rows[rows]].to(top.dtype) / temperatures[rows, None]
            log_p = z.sub_(top[rows, None]).sub_(log_sum[rows, None])
            grad = log_p.exp()
            if entropy_grad is None:
                grad *= lse_grad[rows, None]
            else:
                log_p.add_(entropy[rows, None]).mul_(-entropy_grad[rows, None])
                grad *= log_p.add_(lse_grad[rows, None])
            grad /= temperatures[rows, None]
            # Before rounding: for a likely token 1 - p is far smaller than p.
            _add_at(grad, prediction_rows - rows.start, targets, target_grad)
            if one_temperature:
                dlogits[scaled_rows[rows]] = grad.to(dlogits.dtype)
            else:
                dlogits.index_add_(0, scaled_rows[rows], grad)
        return dlogits.to(logits.dtype), None, None, None, None, None


def _add_at(
    grad_CV: torch.Tensor, rows_P: torch.Tensor, columns_P: torch.Tensor, values_P: torch.Tensor
) -> None:
    """Add each value at (row, column); rows outside of this chunk of C rows add nothing.

    Adding zero somewhere instead of selecting keeps the host from waiting for the device.
    """
    is_inside = (rows_P >= 0) & (rows_P < len(grad_CV))
    rows = rows_P.clamp(0, len(grad_CV) - 1)
    values = torch.where(is_inside, values_P, torch.zeros_like(values_P))
    grad_CV.view(-1).index_add_(0, rows * grad_CV.shape[1] + columns_P, values)


def _chunks(num_rows: int, vocab: int) -> list[slice]:
    size = max(1, _CHUNK_ELEMENTS // vocab)
    return [slice(start, start + size) for start in range(0, num_rows, size)]
