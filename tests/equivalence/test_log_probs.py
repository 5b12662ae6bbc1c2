"""Log-prob link of the proof chain: log-probs and entropies == log_softmax under autograd."""

import pytest
import torch

from prefixflow_verl import log_probs as module
from prefixflow_verl.log_probs import ChunkLimits, log_probs_and_entropy

ROWS, HIDDEN, VOCAB = 7, 5, 23
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


heads = pytest.mark.parametrize("head", ["logits", "linear", "linear with bias"])


def of_logits(logits, *arguments, with_entropy: bool):
    """`log_probs_and_entropy` of given logits, as (log-probs, entropies or None)."""
    return of_head(logits, None, None, *arguments, with_entropy=with_entropy)


def of_head(hidden, weight, bias, scaled_rows, temperatures, *arguments, with_entropy: bool):
    every_row = torch.equal(scaled_rows, ALL_ROWS)
    values = log_probs_and_entropy(
        hidden,
        weight,
        bias,
        None if every_row else scaled_rows,
        None if (temperatures == 1).all() else temperatures,
        *arguments,
        with_entropy=with_entropy,
    )
    return values[:, 0], values[:, 1] if with_entropy else None


def by_autograd(logits, scaled_rows, temperatures, prediction_rows, targets, *, with_entropy):
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    z = logits[scaled_rows].to(wide) / temperatures[:, None].to(wide)
    log_p = torch.log_softmax(z, dim=-1)[prediction_rows]
    entropy = -(log_p.exp() * log_p).sum(-1) if with_entropy else None
    return log_p.gather(-1, targets[:, None])[:, 0], entropy


def head_by_autograd(hidden, weight, bias, *arguments, with_entropy):
    logits = torch.nn.functional.linear(hidden, weight, bias)
    return by_autograd(logits, *arguments, with_entropy=with_entropy)


def run(function, case: str, dtype: torch.dtype, with_entropy: bool, *, head="logits", exact=False):
    """Values, and gradients of the inputs under random weights of every value.

    `exact` widens inputs of `dtype` to float64.
    """
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        tensor = torch.randn(shape, generator=generator).to(dtype)
        return (tensor.double() if exact else tensor).requires_grad_()

    if head == "logits":
        inputs = [(3 * normal(ROWS, VOCAB)).detach().requires_grad_()]
    else:
        inputs = [normal(ROWS, HIDDEN), normal(VOCAB, HIDDEN)]
        inputs.append(normal(VOCAB) if head == "linear with bias" else None)
    scaled_rows, temperatures, prediction_rows = CASES[case]
    count = len(prediction_rows)
    targets = torch.randint(0, VOCAB, (count,), generator=generator)
    weights = torch.randn(2, count, generator=generator).double()
    values = function(
        *inputs, scaled_rows, temperatures, prediction_rows, targets, with_entropy=with_entropy
    )
    loss = (values[0].double() * weights[0]).sum()
    if with_entropy:
        loss = loss + (values[1].double() * weights[1]).sum()
    loss.backward()
    found = [value.detach() for value in values if value is not None]
    return found + [tensor.grad for tensor in inputs if tensor is not None]


def functions(head: str):
    return (of_logits, by_autograd) if head == "logits" else (of_head, head_by_autograd)


def limit(monkeypatch, chunk_rows: int, kept_rows: int) -> None:
    limits = ChunkLimits(chunk=chunk_rows * VOCAB, kept=kept_rows * VOCAB)
    monkeypatch.setitem(module.LIMITS, "cpu", limits)


@cases
@heads
@pytest.mark.parametrize("with_entropy", [True, False])
@pytest.mark.parametrize("chunk_rows", [1, 3, 100])
@pytest.mark.parametrize("kept_rows", [0, 100])
def test_values_and_gradients_fp64(case, head, with_entropy, chunk_rows, kept_rows, monkeypatch):
    limit(monkeypatch, chunk_rows, kept_rows)
    ours, truth = (run(f, case, torch.float64, with_entropy, head=head) for f in functions(head))
    for a, b in zip(ours, truth, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("kept_rows", [0, 100])
def test_logits_are_made_twice_only_when_too_large_to_keep(kept_rows, monkeypatch):
    limit(monkeypatch, 2, kept_rows)
    made = []
    make = module._logits
    monkeypatch.setattr(module, "_logits", lambda *a: made.append(len(a[0])) or make(*a))
    run(of_head, "one temperature", torch.float32, True, head="linear")
    assert made == [2, 2, 2, 1] * (1 if kept_rows else 2)


def test_a_frozen_head_gets_no_gradient():
    hidden = torch.randn(ROWS, HIDDEN, requires_grad=True)
    weight = torch.randn(VOCAB, HIDDEN)
    values = log_probs_and_entropy(
        hidden, weight, None, None, None, ALL_ROWS, ALL_ROWS, with_entropy=False
    )
    values.sum().backward()
    assert hidden.grad.any() and weight.grad is None


def test_a_second_backward_is_an_error():
    """The first one overwrites what it needed."""
    hidden = torch.randn(ROWS, VOCAB, requires_grad=True)
    values = log_probs_and_entropy(
        hidden, None, None, None, None, ALL_ROWS, ALL_ROWS, with_entropy=False
    )
    values.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        values.sum().backward()


def test_a_masked_vocabulary_entry_adds_nothing():
    logits = torch.randn(ROWS, VOCAB, dtype=torch.float64)
    logits[:, -1] = float("-inf")
    logits.requires_grad_()
    values = log_probs_and_entropy(
        logits, None, None, None, None, ALL_ROWS, ALL_ROWS, with_entropy=True
    )
    values.sum().backward()
    truth = of_logits(
        logits[:, :-1].detach(), ALL_ROWS, ONES, ALL_ROWS, ALL_ROWS, with_entropy=True
    )
    torch.testing.assert_close(values.detach(), torch.stack(truth, -1), atol=1e-12, rtol=1e-12)
    assert logits.grad.isfinite().all() and not logits.grad[:, -1].any()


@cases
@heads
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kept_rows", [0, 100])
def test_narrow_inputs_err_no_more_than_twice_autograd(case, head, dtype, kept_rows, monkeypatch):
    """Against float64 on the same inputs; values are wide, gradients have the inputs' dtype."""
    limit(monkeypatch, 3, kept_rows)
    ours, naive = (run(f, case, dtype, True, head=head) for f in functions(head))
    truth = run(functions(head)[1], case, dtype, True, head=head, exact=True)
    assert [value.dtype for value in ours[:2]] == [torch.float32, torch.float32]
    assert {value.dtype for value in ours[2:]} == {dtype}
    floor = torch.finfo(torch.float32).eps
    for a, b, c in zip(ours, naive, truth, strict=True):
        our_error, error = ((x.double() - c.double()).abs().max() for x in (a, b))
        assert our_error <= 2 * error + 8 * floor * c.abs().max().clamp(min=1)


def test_chunks_cover_rows_and_predictions():
    rows = torch.tensor([0, 0, 1, 4, 4, 4])
    assert module._chunks(rows, 5, 2) == [
        (slice(0, 2), slice(0, 3)),
        (slice(2, 4), slice(3, 3)),
        (slice(4, 5), slice(3, 6)),
    ]


@pytest.mark.parametrize("used", [0, 1])
def test_a_loss_may_use_one_output_only(used):
    logits = torch.randn(ROWS, VOCAB, dtype=torch.float64, requires_grad=True)
    arguments = (ALL_ROWS, ONES, ALL_ROWS, torch.arange(ROWS))
    gradients = []
    for function in (of_logits, by_autograd):
        values = function(logits, *arguments, with_entropy=True)
        gradients += torch.autograd.grad(values[used].sum(), logits)
    torch.testing.assert_close(*gradients, atol=1e-12, rtol=1e-12)


def test_no_entropy_is_computed_unless_asked_for():
    values = log_probs_and_entropy(
        torch.zeros(ROWS, VOCAB), None, None, None, None, ALL_ROWS, ALL_ROWS, with_entropy=False
    )
    assert values.shape == (ROWS, 1)


def test_a_certain_token():
    """Logits as far apart as they get: log-prob 0, entropy 0, finite gradients."""
    logits = torch.full((ROWS, VOCAB), -1e4)
    logits[:, 3] = 1e4
    logits.requires_grad_()
    log_probs, entropy = of_logits(
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
    log_probs = log_probs_and_entropy(
        logits, None, None, None, None, zero, zero, with_entropy=False
    )[:, 0]
    log_probs.backward(torch.ones(1))
    truth = 1 - torch.sigmoid(torch.tensor(7.0))
    torch.testing.assert_close(
        logits.grad[0].float(), torch.stack([truth, -truth]), rtol=4e-3, atol=0
    )
