"""Log-prob link of the proof chain: log-probs and entropies == log_softmax under autograd."""

import pytest
import torch

from prefixflow_verl import log_probs as module
from prefixflow_verl.log_probs import log_probs_and_entropy

ROWS, VOCAB = 7, 23
ALL_ROWS = torch.arange(ROWS)
ONES = torch.ones(ROWS, dtype=torch.float64)

# (scaled_rows, temperatures, prediction_rows)
CASES = {
    "one prediction per row": (ALL_ROWS, ONES, ALL_ROWS),
    "one temperature": (ALL_ROWS, 0.6 * ONES, ALL_ROWS),
    "a temperature per row": (ALL_ROWS, torch.linspace(0.3, 2.0, ROWS).double(), ALL_ROWS),
    "several targets per row": (ALL_ROWS, ONES, torch.tensor([0, 0, 0, 1, 2, 3, 3, 4, 5, 6, 6])),
    "several temperatures per row": (
        torch.tensor([0, 0, 1, 2, 2, 2, 3, 4, 5, 6]),
        torch.linspace(0.3, 2.0, 10).double(),
        torch.tensor([0, 1, 1, 2, 3, 3, 4, 5, 6, 7, 8, 9, 9]),
    ),
    "rows in any order": (ALL_ROWS.flip(0), torch.linspace(0.5, 1.5, ROWS).double(), ALL_ROWS),
}
cases = pytest.mark.parametrize("case", CASES)


def run(function, case: str, dtype: torch.dtype, with_entropy: bool, exact=False):
    """Values, and the gradient of the logits under random weights of every value.

    `exact` widens logits of `dtype` to float64.
    """
    generator = torch.Generator().manual_seed(0)
    scaled_rows, temperatures, prediction_rows = CASES[case]
    count = len(prediction_rows)
    logits = (3 * torch.randn(ROWS, VOCAB, generator=generator)).to(dtype)
    if exact:
        logits = logits.double()
    logits.requires_grad_()
    targets = torch.randint(0, VOCAB, (count,), generator=generator)
    weights = torch.randn(2, count, generator=generator).double()
    values = function(
        logits, scaled_rows, temperatures, prediction_rows, targets, with_entropy=with_entropy
    )
    loss = (values[0].double() * weights[0]).sum()
    if with_entropy:
        loss = loss + (values[1].double() * weights[1]).sum()
    loss.backward()
    return *(value.detach() for value in values if value is not None), logits.grad


def by_autograd(logits, scaled_rows, temperatures, prediction_rows, targets, *, with_entropy):
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    z = logits[scaled_rows].to(wide) / temperatures[:, None].to(wide)
    log_p = torch.log_softmax(z, dim=-1)[prediction_rows]
    entropy = -(log_p.exp() * log_p).sum(-1) if with_entropy else None
    return log_p.gather(-1, targets[:, None])[:, 0], entropy


@cases
@pytest.mark.parametrize("with_entropy", [True, False])
@pytest.mark.parametrize("chunk_rows", [1, 3, 100])
def test_values_and_gradients_fp64(case, with_entropy, chunk_rows, monkeypatch):
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", chunk_rows * VOCAB)
    ours = run(log_probs_and_entropy, case, torch.float64, with_entropy)
    truth = run(by_autograd, case, torch.float64, with_entropy)
    for a, b in zip(ours, truth, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


@cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_logits_err_no_more_than_twice_autograd(case, dtype):
    """Against float64 on the same logits; values are wide, the gradient has the logits' dtype."""
    ours, naive = (run(f, case, dtype, True) for f in (log_probs_and_entropy, by_autograd))
    truth = run(by_autograd, case, dtype, True, exact=True)
    assert [value.dtype for value in ours] == [torch.float32, torch.float32, dtype]
    floor = torch.finfo(torch.float32).eps
    for a, b, c in zip(ours, naive, truth, strict=True):
        our_error, error = ((x.double() - c.double()).abs().max() for x in (a, b))
        assert our_error <= 2 * error + 8 * floor


def test_chunks_cover_every_row(monkeypatch):
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", 100)
    assert [(s.start, s.stop) for s in module._chunks(5, 40)] == [(0, 2), (2, 4), (4, 6)]
    assert len(module._chunks(5, 1000)) == 5, "one row may exceed the bound"


@pytest.mark.parametrize("used", [0, 1])
def test_a_loss_may_use_one_output_only(used):
    logits = torch.randn(ROWS, VOCAB, dtype=torch.float64, requires_grad=True)
    arguments = (ALL_ROWS, ONES, ALL_ROWS, torch.arange(ROWS))
    gradients = []
    for function in (log_probs_and_entropy, by_autograd):
        values = function(logits, *arguments, with_entropy=True)
        gradients += torch.autograd.grad(values[used].sum(), logits)
    torch.testing.assert_close(*gradients, atol=1e-12, rtol=1e-12)


def test_no_entropy_is_computed_unless_asked_for():
    values = log_probs_and_entropy(
        torch.zeros(ROWS, VOCAB), ALL_ROWS, ONES, ALL_ROWS, ALL_ROWS, with_entropy=False
    )
    assert values[1] is None


def test_a_certain_token():
    """Logits as far apart as they get: log-prob 0, entropy 0, finite gradients."""
    logits = torch.full((ROWS, VOCAB), -1e4)
    logits[:, 3] = 1e4
    logits.requires_grad_()
    log_probs, entropy = log_probs_and_entropy(
        logits, ALL_ROWS, ONES, ALL_ROWS, torch.full((ROWS,), 3), with_entropy=True
    )
    (log_probs.sum() + entropy.sum()).backward()
    assert not log_probs.any() and not entropy.any() and not logits.grad.any()


def test_a_likely_token_keeps_its_small_gradient_in_bf16():
    """At p = 0.999 the target's logit has a gradient of 1 - p, which bfloat16(1) - bfloat16(p)
    loses."""
    logits = torch.zeros(1, 2, dtype=torch.bfloat16)
    logits[0, 0] = 7.0
    logits.requires_grad_()
    zero = torch.zeros(1, dtype=torch.int64)
    log_probs, _ = log_probs_and_entropy(
        logits, zero, torch.ones(1), zero, zero, with_entropy=False
    )
    log_probs.backward(torch.ones(1))
    truth = 1 - torch.sigmoid(torch.tensor(7.0))
    torch.testing.assert_close(
        logits.grad[0].float(), torch.stack([truth, -truth]), rtol=4e-3, atol=0
    )
