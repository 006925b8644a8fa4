"""``ConvexKL``: a mixture of KL divergences, with its gradient, whose share follows a schedule."""

from __future__ import annotations

import pytest
import torch

from offcorr.extras import ConvexKL
from offcorr.training import Linear


@pytest.fixture
def policies():
    """Log-probs [3, V] of a policy, a base model and a precedent policy over one token."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, 7, generator=generator, dtype=torch.float64).log_softmax(-1)


@pytest.mark.parametrize("lam", [0.0, 0.3, 1.0])
def test_the_expectation_is_the_mixture_of_kl_divergences(policies, lam):
    """Every token once, weighted by its probability: the sum over tokens of p k3 is KL(p || reference)."""
    logp, base, precedent = policies
    p = logp.exp()
    values = torch.stack([ConvexKL(lam)(*(row[i : i + 1] for row in policies), p[:1] > 0).loss for i in range(7)])
    wanted = lam * (p * (logp - base)).sum() + (1 - lam) * (p * (logp - precedent)).sum()
    torch.testing.assert_close((p * values).sum(), wanted)


def test_the_coefficient_is_the_gradient(policies):
    logp, base, precedent = policies
    logp = logp.clone().requires_grad_()
    mask = torch.tensor([1, 1, 0, 1, 0, 1, 1]).bool()
    penalty = ConvexKL(0.3)(logp, base, precedent, mask, denominator=11.0)
    penalty.loss.backward()
    torch.testing.assert_close(logp.grad, penalty.coefficient)
    assert (penalty.coefficient[~mask] == 0).all() and not penalty.coefficient.requires_grad


def test_garbage_under_the_mask_and_far_references_stay_finite():
    logp = torch.tensor([[-1.0, float("nan"), -90.0]], requires_grad=True)
    base = torch.tensor([[-2.0, -1.0, -0.1]])
    penalty = ConvexKL(0.5)(logp, base, base.masked_fill(base == -1, torch.nan), torch.tensor([[True, False, True]]))
    penalty.loss.backward()
    assert penalty.loss.isfinite() and logp.grad.isfinite().all() and logp.grad[0, 1] == 0
    torch.testing.assert_close(logp.grad, penalty.coefficient)


def test_a_scheduled_share(policies):
    mask = torch.ones(7).bool()
    scheduled = ConvexKL(Linear(1.0, 0.0))
    for done, fixed in ((0.0, 1.0), (0.25, 0.75), (1.0, 0.0)):
        changed, constant = scheduled(*policies, mask, done=done), ConvexKL(fixed)(*policies, mask)
        assert changed.loss == constant.loss
    penalty = scheduled(*policies, mask)
    torch.testing.assert_close(penalty.base, penalty.loss)
    assert penalty.precedent != penalty.base


@pytest.mark.parametrize("lam", [-0.1, 1.1, float("nan"), "0.5", True, Linear(0.5, 2.0)])
def test_a_share_outside_its_range(lam):
    with pytest.raises(ValueError, match="lam is .*, expected 0 <= lam <= 1"):
        ConvexKL(lam)


def test_shapes_and_denominator(policies):
    logp, base, precedent = policies
    mask = torch.ones(7).bool()
    with pytest.raises(ValueError, match=r"base_logp has shape \(3,\), expected \(7,\)"):
        ConvexKL()(logp, base[:3], precedent, mask)
    with pytest.raises(ValueError, match=r"mask has shape \(3,\), expected \(7,\)"):
        ConvexKL()(logp, base, precedent, mask[:3])
    with pytest.raises(ValueError, match="denominator"):
        ConvexKL()(logp, base, precedent, mask, denominator=0.0)
