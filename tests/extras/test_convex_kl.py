"""``convex_reference``: k3 to the mixture has the gradient of the convex combination of two penalties."""

from __future__ import annotations

import pytest
import torch

from offcorr.extras import convex_reference


@pytest.fixture
def policies():
    """Log-probs [3, V] of a policy, a base model and a precedent policy over one token."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, 7, generator=generator, dtype=torch.float64).log_softmax(-1)


def k3(reference, logp):
    return (reference - logp).exp() - 1 - (reference - logp)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_gradient_is_that_of_the_convex_combination(policies, share):
    logp, base, precedent = policies
    mixed, apart = logp.clone().requires_grad_(), logp.clone().requires_grad_()
    k3(convex_reference(base, precedent, share), mixed).sum().backward()
    (share * k3(base, apart) + (1 - share) * k3(precedent, apart)).sum().backward()
    torch.testing.assert_close(mixed.grad, apart.grad)
    assert mixed.grad.abs().max() > 0.1


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_it_is_a_distribution(policies, share):
    _, base, precedent = policies
    reference = convex_reference(base, precedent, share)
    torch.testing.assert_close(reference.exp().sum(), torch.ones((), dtype=torch.float64))
    torch.testing.assert_close(reference.exp(), share * base.exp() + (1 - share) * precedent.exp())


def test_impossible_tokens_stay_exact():
    never, always = torch.tensor([-torch.inf, -1.0]), torch.tensor([-2.0, -torch.inf])
    assert convex_reference(never, always, 0.5).exp().tolist() == pytest.approx([0.5 * 0.1353353, 0.5 * 0.3678794])


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_share_outside_its_range(policies, share):
    with pytest.raises(ValueError, match="share is .*, expected 0 <= share <= 1"):
        convex_reference(*policies[1:], share)


def test_shapes(policies):
    with pytest.raises(ValueError, match=r"precedent_logp has shape \(3,\), expected \(7,\)"):
        convex_reference(policies[0], policies[1, :3], 0.5)
