"""Log-prob and entropy of the predictions of one pack, without a float32 softmax kept for backward.

Shape legend: R rows of logits, V vocabulary, U distinct (row, temperature), P predictions.

With z = logits / temperature and p = softmax(z):

    log p(t) = z_t - lse(z)            d log p(t) / dz_v = [v = t] - p_v
    H        = lse(z) - sum_v p_v z_v  dH / dz_v         = -p_v (log p_v + H)

Only the logits and one LSE and entropy per row are saved; softmax is rebuilt in row chunks.
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
        scaled_rows_U: int64, row of each distinct (row, temperature).
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
        lse = torch.empty(len(scaled_rows), dtype=wide, device=logits.device)
        entropy = torch.empty_like(lse)
        for rows in _chunks(len(scaled_rows), logits.shape[1]):
            z = logits[scaled_rows[rows]].to(wide) / temperatures[rows, None]
            lse[rows] = torch.logsumexp(z, dim=-1)
            if with_entropy:
                probs = (z - lse[rows, None]).exp()
                entropy[rows] = lse[rows] - (probs * z).sum(-1)
        target_logits = logits[scaled_rows[prediction_rows], targets].to(wide)
        log_probs = target_logits / temperatures[prediction_rows] - lse[prediction_rows]
        ctx.save_for_backward(
            logits, scaled_rows, temperatures, prediction_rows, targets, lse, entropy
        )
        return log_probs, entropy[prediction_rows] if with_entropy else None

    @staticmethod
    def backward(ctx, grad_log_probs, grad_entropy):
        logits, scaled_rows, temperatures, prediction_rows, targets, lse, entropy = (
            ctx.saved_tensors
        )
        if grad_log_probs is None:
            grad_log_probs = torch.zeros(len(targets), dtype=lse.dtype, device=lse.device)
        # Gradient of each scaled row's LSE and entropy: sums over the predictions that use it.
        lse_grad = torch.zeros_like(lse).index_add_(0, prediction_rows, -grad_log_probs)
        entropy_grad = None
        if grad_entropy is not None:
            entropy_grad = torch.zeros_like(lse).index_add_(0, prediction_rows, grad_entropy)
        one_temperature = len(scaled_rows) == logits.shape[0]
        # Rows used at several temperatures receive several terms: sum those in wide precision.
        dlogits = torch.zeros_like(logits, dtype=logits.dtype if one_temperature else lse.dtype)
        for rows in _chunks(len(scaled_rows), logits.shape[1]):
            z = logits[scaled_rows[rows]].to(lse.dtype) / temperatures[rows, None]
            log_p = z.sub_(lse[rows, None])
            grad = log_p.exp()
            if entropy_grad is None:
                grad *= lse_grad[rows, None]
            else:
                log_p.add_(entropy[rows, None]).mul_(-entropy_grad[rows, None])
                grad *= log_p.add_(lse_grad[rows, None])
            grad /= temperatures[rows, None]
            if one_temperature:
                dlogits[scaled_rows[rows]] = grad.to(dlogits.dtype)
            else:
                dlogits.index_add_(0, scaled_rows[rows], grad)
        target_grad = (grad_log_probs / temperatures[prediction_rows]).to(dlogits.dtype)
        dlogits.index_put_((scaled_rows[prediction_rows], targets), target_grad, accumulate=True)
        return dlogits.to(logits.dtype), None, None, None, None, None


def _chunks(num_rows: int, vocab: int) -> list[slice]:
    size = max(1, _CHUNK_ELEMENTS // vocab)
    return [slice(start, start + size) for start in range(0, num_rows, size)]
