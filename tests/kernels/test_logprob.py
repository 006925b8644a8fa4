"""Tests of the log-probabilities under a linear head, on a CPU, against the naive definition in float64."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.utils.checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from offcorr.kernels.logprob import LogProbs, linear_logprob, logits_logprob, naive_logprob, out_of_vocabulary
from offcorr.stages.checks import quietly

SIZES = [(1, 1, 1), (1, 63, 65), (63, 7, 1000), (65, 16, 8193), (600, 5, 3), (2, 64, 20000)]
"""(tokens, hidden size, vocabulary): odd sizes, a vocabulary of one entry, several tiles, several chunks."""

OPTIONS = [
    pytest.param({}, id="plain"),
    pytest.param({"temperature": 0.7, "logit_scale": 1.3}, id="scaled"),
    pytest.param({"soft_cap": 3.0, "temperature": 1.5, "logit_scale": -0.5}, id="capped"),
]


def problem(tokens, size, vocabulary, dtype=torch.float64, *, bias=True, scale=2.0, seed=0):
    """Returns hidden, weight and bias that require gradients, and targets."""
    draw = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, size, generator=draw, dtype=torch.float64) * scale
    weight = torch.randn(vocabulary, size, generator=draw, dtype=torch.float64) / size**0.5
    offset = torch.randn(vocabulary, generator=draw, dtype=torch.float64) if bias else None
    target = torch.randint(vocabulary, (tokens,), generator=draw)
    leaves = [x if x is None else x.to(dtype).requires_grad_() for x in (hidden, weight, offset)]
    return *leaves, target


def upstream(tokens, seed=1):
    """Returns incoming gradients of logp and entropy; about a third of each is zero."""
    draw = torch.Generator().manual_seed(seed)
    d = torch.randn(2, tokens, generator=draw, dtype=torch.float64)
    return torch.where(torch.rand(2, tokens, generator=draw) < 0.3, 0, d)


def grads(found: LogProbs, leaves, d_logp, d_entropy=None):
    loss = (found.logp.double() * d_logp).sum()
    if d_entropy is not None:
        loss = loss + (found.entropy.double() * d_entropy).sum()
    return torch.autograd.grad(loss, leaves)


def close(got, want, tolerance=1e-10):
    torch.testing.assert_close(got.double(), want.double(), rtol=tolerance, atol=tolerance)


# -- against the definition ----------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_agrees_with_the_definition(size, options):
    hidden, weight, bias, target = problem(*size)
    want = naive_logprob(hidden, weight, target, bias=bias, **options)
    got = linear_logprob(
        hidden, weight, target, bias=bias, entropy=True, sum_sq_probs=True, frozen_head=False, chunk=128, **options
    )
    for mine, theirs in zip(got, want, strict=True):
        close(mine, theirs)
    assert not got.sum_sq_probs.requires_grad
    d_logp, d_entropy = upstream(size[0])
    leaves = [hidden, weight, bias]
    for mine, theirs in zip(grads(got, leaves, d_logp), grads(want, leaves, d_logp), strict=True):
        close(mine, theirs)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_entropy_gradient(size, options):
    hidden, weight, bias, target = problem(*size)
    d_logp, d_entropy = upstream(size[0])
    leaves = [hidden, weight, bias]
    want = grads(naive_logprob(hidden, weight, target, bias=bias, **options), leaves, d_logp, d_entropy)
    found = linear_logprob(hidden, weight, target, bias=bias, entropy=True, chunk=128, **options)
    for mine, theirs in zip(grads(found, leaves, d_logp, d_entropy), want, strict=True):
        close(mine, theirs)


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_frozen_head(size, options, with_entropy):
    hidden, weight, bias, target = problem(*size)
    d_logp, d_entropy = upstream(size[0])
    d_entropy = d_entropy if with_entropy else None
    want = grads(naive_logprob(hidden, weight, target, bias=bias, **options), [hidden], d_logp, d_entropy)
    found = linear_logprob(
        hidden, weight, target, bias=bias, entropy=with_entropy, frozen_head=True, chunk=128, **options
    )
    close(grads(found, [hidden], d_logp, d_entropy)[0], want[0])
    assert all(
        x is None for x in torch.autograd.grad(found.logp.sum(), [weight, bias], retain_graph=True, allow_unused=True)
    )


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_gradcheck(frozen, soft_cap):
    hidden, weight, bias, target = problem(5, 3, 7)
    mask = torch.tensor([1, 1, 0, 1, 1])

    def run(*leaves):
        if frozen:
            leaves = leaves[0], weight.detach(), bias.detach()
        found = linear_logprob(*leaves[:2], target, bias=leaves[2], mask=mask, soft_cap=soft_cap, entropy=True, chunk=2)
        return found.logp, found.entropy

    assert torch.autograd.gradcheck(run, [hidden] if frozen else [hidden, weight, bias])
    logits = (hidden @ weight.T).detach().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: logits_logprob(x, target, mask=mask, soft_cap=soft_cap, entropy=True)[:2], [logits]
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS)
def test_from_logits(options, dtype):
    hidden, weight, bias, target = problem(63, 7, 1000)
    logits = (hidden @ weight.T + bias).detach().to(dtype).requires_grad_()
    eye, exact = torch.eye(1000, dtype=torch.float64), logits.detach().double().requires_grad_()
    want = naive_logprob(exact, eye, target, **options)
    got = logits_logprob(logits, target, entropy=True, sum_sq_probs=True, **options)
    tolerance = {torch.float64: 1e-10, torch.float32: 2e-6, torch.bfloat16: 2e-6}[dtype]
    for mine, theirs in zip(got, want, strict=True):
        close(mine, theirs, tolerance)
    d = upstream(63)
    mine, theirs = grads(got, [logits], *d)[0], grads(want, [exact], *d)[0]
    assert mine.dtype == dtype
    close(mine, theirs, 2**-8 if dtype == torch.bfloat16 else tolerance)
    transposed = logits.detach().T.contiguous().T
    assert torch.equal(logits_logprob(transposed, target, **options).logp, got.logp)


def test_shapes_and_dtypes():
    hidden, weight, bias, target = problem(6, 4, 9, torch.float32)
    flat = linear_logprob(hidden, weight, target, bias=bias)
    shaped = linear_logprob(hidden.view(2, 3, 4), weight, target.view(2, 3).int(), bias=bias)
    assert shaped.logp.shape == (2, 3) and torch.equal(shaped.logp.flatten(), flat.logp)
    assert flat.entropy is None and flat.sum_sq_probs is None
    strided = torch.stack([hidden, hidden], 2)[..., 0]
    turned = weight.detach().T.contiguous().T
    assert not strided.is_contiguous() and not turned.is_contiguous()
    close(linear_logprob(strided, turned, target, bias=bias).logp, flat.logp, 1e-6)
    half = [x.detach().bfloat16() for x in (hidden, weight)]
    assert linear_logprob(*half, target).logp.dtype == torch.float32


# -- accuracy ------------------------------------------------------------------------------------------------


def test_log_probs_of_bf16_inputs_keep_float32_logits():
    hidden, weight, _, target = problem(256, 64, 3000, torch.bfloat16, bias=False, scale=8)
    exact = naive_logprob(hidden.double(), weight.double(), target).logp
    rounded = torch.log_softmax((hidden @ weight.T).float(), -1).gather(1, target[:, None])[:, 0]
    ours = linear_logprob(hidden, weight, target).logp
    assert (rounded - exact).abs().max() > 0.01
    assert (ours - exact).abs().max() * 5 <= (rounded - exact).abs().max()
    assert (ours - exact).abs().max() < 2e-5


@pytest.mark.parametrize("frozen", [False, True])
def test_confident_tokens_keep_their_gradient(frozen):
    """At p(target) = .9999999, W_y - sum_v p_v W_v loses all its digits to cancellation; (1 - p) W_y - ... does not."""
    hidden, weight, _, _ = problem(50, 64, 300, torch.float32, bias=False)
    target = torch.arange(50)
    with torch.no_grad():
        hidden.copy_(torch.linspace(16, 24, 50)[:, None] * weight[:50] / weight[:50].square().sum(1, keepdim=True))
    leaf = hidden.detach().double().requires_grad_()
    want = naive_logprob(leaf, weight.double(), target)
    assert (want.logp > -1e-4).sum() > 5
    found = linear_logprob(hidden, weight, target, frozen_head=frozen)
    assert ((found.logp - want.logp) / want.logp).abs().max() < 1e-4
    (mine,) = grads(found, [hidden], torch.ones(50))
    (theirs,) = grads(want, [leaf], torch.ones(50))
    error = (mine - theirs).norm(dim=1) / theirs.norm(dim=1)
    assert error.max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("frozen", [False, True])
def test_half_precision_gradients_are_no_worse_than_their_rounding(dtype, frozen):
    hidden, weight, bias, target = problem(100, 32, 3000, dtype)
    leaves = [hidden] if frozen else [hidden, weight, bias]
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight, bias)]
    d = upstream(100)[0] * 1e-2  # p d underflows in float16
    found = linear_logprob(hidden, weight, target, bias=bias, frozen_head=frozen)
    want = grads(naive_logprob(*exact[:2], target, bias=exact[2]), exact[: len(leaves)], d)
    for mine, theirs in zip(grads(found, leaves, d), want, strict=True):
        assert mine.dtype == dtype
        assert (mine - theirs).norm() / theirs.norm() < torch.finfo(dtype).eps / 2


def test_banned_tokens_and_extreme_logits():
    hidden, weight, bias, target = problem(20, 8, 40)
    with torch.no_grad():
        bias[::3] = -torch.inf
        hidden[:5] *= 1e3
    target = target // 3 * 3 + 1
    leaves = [hidden, weight, bias]
    want, d = naive_logprob(hidden, weight, target, bias=bias), upstream(20)
    (theirs,) = grads(want, leaves[:1], d[0])
    for frozen in (False, True):
        got = linear_logprob(
            hidden, weight, target, bias=bias, entropy=True, sum_sq_probs=True, frozen_head=frozen, chunk=7
        )
        for one, other in zip(got, want, strict=True):
            close(one, other)
        close(grads(got, leaves[:1], d[0])[0], theirs)
    for gradient in grads(linear_logprob(hidden, weight, target, bias=bias, entropy=True), leaves, *d):
        assert gradient.isfinite().all()
    banned = linear_logprob(hidden, weight, torch.zeros_like(target), bias=bias, entropy=True)
    assert (banned.logp == -torch.inf).all() and banned.entropy.isfinite().all()


# -- work that is skipped ------------------------------------------------------------------------------------


def flops(work) -> int:
    with FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()


def test_backward_flops_are_proportional_to_the_tokens_with_a_gradient():
    hidden, weight, _, target = problem(400, 8, 100, torch.float32, bias=False)
    product = 2 * 8 * 100
    for active in (400, 160, 1, 0):
        d = torch.zeros(400)
        d[torch.randperm(400)[:active]] = 1.0
        found = linear_logprob(hidden, weight, target)
        loss = (found.logp * d).sum()
        assert flops(lambda loss=loss: loss.backward()) == 3 * active * product
        assert (hidden.grad[d == 0] == 0).all() and weight.grad.isfinite().all()
        hidden.grad = weight.grad = None


def test_a_backward_pass_without_gradients_does_not_read_the_head():
    class HeadSized(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            made.extend(str(func) for x in tree_leaves(out) if isinstance(x, torch.Tensor) and x.numel() == 8000)
            return out

    hidden, weight, _, target = problem(20, 8, 1000, torch.bfloat16, bias=False)
    loss = (linear_logprob(hidden, weight, target).logp * 0).sum()
    made: list[str] = []
    with HeadSized():
        (gradient,) = torch.autograd.grad(loss, weight)
    assert made == ["aten.zeros_like.default"] and not gradient.any()


def test_masked_tokens_are_not_computed_on_a_cpu():
    hidden, weight, _, target = problem(400, 8, 100, torch.float32, bias=False)
    mask = torch.arange(400) < 100
    assert flops(lambda: linear_logprob(hidden, weight, target, mask=mask)) == 100 * 2 * 8 * 100


def test_frozen_head_does_two_products_and_an_entropy_gradient_one_more_pass():
    hidden, weight, _, target = problem(400, 8, 100, torch.float32, bias=False)
    weight.requires_grad_(False)
    product, found = 400 * 2 * 8 * 100, []
    assert flops(lambda: found.append(linear_logprob(hidden, weight, target, entropy=True))) == 2 * product
    assert flops(lambda: found[0].logp.sum().backward()) == 0
    with_entropy = linear_logprob(hidden, weight, target, entropy=True)
    assert flops(lambda: (with_entropy.logp + with_entropy.entropy).sum().backward()) == 2 * product
    with torch.no_grad():
        assert flops(lambda: linear_logprob(hidden, weight, target)) == product


def test_no_tensor_of_tokens_by_vocabulary():
    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            new = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor) and x.data_ptr() != logits.data_ptr()]
            self.size = max(self.size, *(x.numel() for x in new), 0)
            return out

    logits = torch.zeros(1000, 10_000)

    hidden, weight, _, target = problem(1000, 4, 10_000, torch.float32, bias=False)
    with Largest() as largest:
        found = linear_logprob(hidden, weight, target, entropy=True, sum_sq_probs=True, chunk=64)
        (found.logp + found.entropy).sum().backward()
    assert largest.size <= 64 * 8192
    with Largest() as largest:
        logits_logprob(logits, target, entropy=True)
    assert largest.size <= 2**20


# -- masks, targets, batches ---------------------------------------------------------------------------------


@pytest.fixture
def poisoned_memory():
    """Fills the memory that ``torch.empty`` returns with NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory and torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_garbage_under_the_mask_goes_nowhere(frozen, dtype, batch_invariant, poisoned_memory):
    hidden, weight, bias, target = problem(130, 6, 3000, dtype)
    mask = torch.rand(130, generator=torch.Generator().manual_seed(2)) < 0.5
    options = dict(bias=bias, entropy=True, sum_sq_probs=True, frozen_head=frozen, chunk=32)
    clean = linear_logprob(hidden[mask], weight, target[mask], **options)
    d = upstream(130)
    leaves = [hidden] if frozen else [hidden, weight, bias]
    want = grads(clean, leaves, *d[:, mask])

    garbage = hidden.detach().clone()
    garbage[~mask] = torch.nan
    garbage.requires_grad_()
    wild = torch.where(mask, target, -100)
    before = out_of_vocabulary()
    found = linear_logprob(garbage, weight, wild, mask=mask.int(), batch_invariant=batch_invariant, **options)
    assert out_of_vocabulary() == before
    for mine, theirs in zip(found, clean, strict=True):
        assert (mine[~mask] == 0).all()
        close(mine[mask], theirs, 1e-6)
    got = grads(found, [garbage, *leaves[1:]], *d)
    assert (got[0][~mask] == 0).all()
    for mine, theirs in zip(got, want, strict=True):
        close(mine, theirs, 1e-5 if dtype == torch.float32 else 0.02)

    logits = (hidden @ weight.T).detach()
    clean = logits_logprob(logits[mask], target[mask], entropy=True)
    logits[~mask] = torch.nan
    found = logits_logprob(logits.requires_grad_(), wild, mask=mask, entropy=True)
    assert (found.logp[~mask] == 0).all() and torch.equal(found.logp[mask], clean.logp)
    (gradient,) = grads(found, [logits], *d)
    assert (gradient[~mask] == 0).all() and gradient[mask].isfinite().all()


@pytest.mark.parametrize("frozen", [False, True])
def test_a_target_outside_the_vocabulary_is_never_silent(frozen):
    hidden, weight, _, target = problem(9, 4, 11, torch.float32, bias=False)
    good = linear_logprob(hidden, weight, target, entropy=True)
    bad = torch.zeros(9, dtype=torch.bool)
    bad[[2, 5, 7]] = True
    wild = target.clone()
    wild[bad] = torch.tensor([-100, 11, 2**40])
    out_of_vocabulary(reset=True)
    with quietly():
        pass  # forgets what was warned of
    with pytest.warns(RuntimeWarning, match="3 targets, such as -100, are outside the vocabulary of 11"):
        found = linear_logprob(hidden, weight, wild, entropy=True, sum_sq_probs=True, frozen_head=frozen)
    assert out_of_vocabulary() == 3
    assert all(torch.equal(x.isnan(), bad) for x in found)
    close(found.logp[~bad], good.logp[~bad], 1e-6)
    (gradient,) = grads(found, [hidden], torch.ones(9))
    assert gradient[bad].isnan().all() and gradient[~bad].isfinite().all()
    # Without an incoming gradient, such a token contributes none.
    found = linear_logprob(hidden, weight, wild, frozen_head=frozen)
    (gradient,) = grads(LogProbs(torch.where(bad, 0, found.logp), None, None), [hidden], torch.ones(9))
    assert (gradient[bad] == 0).all() and gradient.isfinite().all()

    logits = (hidden @ weight.T).detach().requires_grad_()
    found = logits_logprob(logits, wild)
    assert torch.equal(found.logp.isnan(), bad)
    assert torch.equal(grads(found, [logits], torch.ones(9))[0].isnan().any(1), bad)
    assert out_of_vocabulary(reset=True) == 3 + 3 + 3 and out_of_vocabulary() == 0


@pytest.mark.parametrize("size", [37, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batch_invariant_to_the_bit(size, dtype):
    hidden, weight, bias, target = (x.detach() for x in problem(300, size, 5001, dtype))
    options = dict(bias=bias, entropy=True, sum_sq_probs=True, batch_invariant=True, chunk=64)
    whole = linear_logprob(hidden, weight, target, **options)
    draw = torch.Generator().manual_seed(3)
    for tokens in (1, 2, 63, 64, 65, 299):
        chosen = torch.randperm(300, generator=draw)[:tokens]
        part = linear_logprob(hidden[chosen], weight, target[chosen], **options)
        for mine, theirs in zip(part, whole, strict=True):
            assert torch.equal(mine, theirs[chosen])
    mask = torch.rand(300, generator=draw) < 0.3
    masked = linear_logprob(hidden, weight, target, mask=mask, **options)
    assert torch.equal(masked.logp[mask], whole.logp[mask])
    shifted = torch.empty(300 * size + 1, dtype=dtype)[1:].view(300, size).copy_(hidden)  # at an odd address
    assert torch.equal(linear_logprob(shifted, weight, target, **options).logp, whole.logp)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("chunk, size", [(1, 5), (7, 64), (16, 5), (64, 37), (100, 64)])
@pytest.mark.parametrize("vocabulary", [1, 2, 3, 4, 10, 1001])
def test_every_place_in_a_batch_gives_the_same_bits(vocabulary, chunk, size, dtype):
    """One token at every position: kernels treat the tail of an odd size differently from the rest."""
    hidden, weight, bias, target = (x.detach() for x in problem(1, size, vocabulary, dtype))
    options = dict(bias=bias, entropy=True, sum_sq_probs=True, batch_invariant=True, chunk=chunk, temperature=0.9)
    for found in linear_logprob(hidden.repeat(135, 1), weight, target.expand(135), **options):
        assert (found == found[0]).all()


def test_batch_invariance_has_the_gradients_of_the_definition():
    hidden, weight, bias, target = problem(70, 5, 90)  # rows of 5 numbers are padded
    d = upstream(70)
    leaves = [hidden, weight, bias]
    want = grads(naive_logprob(hidden, weight, target, bias=bias), leaves, *d)
    for frozen in (False, True):
        found = linear_logprob(
            hidden, weight, target, bias=bias, entropy=True, batch_invariant=True, frozen_head=frozen, chunk=10
        )
        for mine, theirs in zip(grads(found, leaves[:1] if frozen else leaves, *d), want, strict=False):
            close(mine, theirs)


def test_empty_batches():
    hidden, weight, bias, _ = problem(0, 4, 11, torch.float32)
    none = torch.zeros(0, dtype=torch.long)
    for frozen in (False, True):
        found = linear_logprob(hidden, weight, none, bias=bias, entropy=True, frozen_head=frozen)
        assert found.logp.shape == found.entropy.shape == (0,)
        gradient = torch.autograd.grad(found.logp.sum(), [hidden] if frozen else [hidden, weight, bias])
        assert all((g == 0).all() for g in gradient)
    assert linear_logprob(hidden.view(2, 0, 4), weight, none.view(2, 0)).logp.shape == (2, 0)
    assert logits_logprob(torch.zeros(2, 0, 5), none.view(2, 0)).logp.shape == (2, 0)
    hidden, weight, bias, target = problem(5, 4, 11, torch.float32)
    found = linear_logprob(hidden, weight, target, bias=bias, mask=torch.zeros(5, dtype=torch.bool))
    assert (found.logp == 0).all()
    assert all((g == 0).all() for g in torch.autograd.grad(found.logp.sum(), [hidden, weight, bias]))


def test_autocast_rounds_the_inputs_as_a_linear_layer_does():
    hidden, weight, _, target = problem(20, 8, 50, torch.float32, bias=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = linear_logprob(hidden.bfloat16(), weight, target)
    want = linear_logprob(hidden.detach().bfloat16(), weight.detach().bfloat16(), target)
    assert torch.equal(found.logp, want.logp)
    found.logp.sum().backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.float32


def test_inference_mode_leaves_nothing_behind(monkeypatch):
    """The counter of targets outside the vocabulary is made in the first call, which may run in inference mode."""
    monkeypatch.setattr("offcorr.kernels.logprob.linear._OUT_OF_VOCABULARY", {})
    hidden, weight, _, target = problem(5, 4, 9, torch.float32, bias=False)
    target[0] = 9
    with torch.inference_mode():
        assert linear_logprob(hidden, weight, target).logp.isnan().sum() == 1
    linear_logprob(hidden, weight, target).logp[1:].sum().backward()
    assert hidden.grad.isfinite().all() and out_of_vocabulary() == 2


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_under_gradient_checkpointing(frozen, reentrant):
    hidden, weight, _, target = problem(9, 4, 11, torch.float32, bias=False)
    weight.requires_grad_(not frozen)
    leaves = [hidden] if frozen else [hidden, weight]

    def twice(hidden):
        return linear_logprob(hidden, weight, target).logp + linear_logprob(hidden.flip(0), weight, target).logp

    want = torch.autograd.grad(twice(hidden).sum(), leaves)
    torch.utils.checkpoint.checkpoint(twice, hidden, use_reentrant=reentrant).sum().backward()
    for leaf, gradient in zip(leaves, want, strict=True):
        assert torch.equal(leaf.grad, gradient)


# -- refusals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("frozen", [False, True])
def test_second_derivatives_are_refused(frozen):
    """Otherwise autograd would treat a penalty on the gradient as a constant."""
    hidden, weight, _, target = problem(5, 4, 9, torch.float32, bias=False)
    found = linear_logprob(hidden, weight, target, frozen_head=frozen)
    with pytest.raises(RuntimeError, match="first derivatives only.*create_graph"):
        torch.autograd.grad(found.logp.sum(), hidden, create_graph=True)
    logits = (hidden @ weight.T).detach().requires_grad_()
    with pytest.raises(RuntimeError, match="first derivatives only.*create_graph"):
        torch.autograd.grad(logits_logprob(logits, target).logp.sum(), logits, create_graph=True)


def test_a_head_that_is_sharded_before_the_backward_pass_is_refused():
    hidden, weight, _, target = problem(5, 4, 9, torch.float32, bias=False)
    weight.requires_grad_(False)
    found = linear_logprob(hidden, weight, target, frozen_head=False)
    weight.data = torch.empty(0)
    with pytest.raises(RuntimeError, match=r"weight has shape \(0,\) in the backward pass, expected \(9, 4\)"):
        found.logp.sum().backward()


def refused(error, message, **changes):
    given = dict(hidden=torch.zeros(2, 3, 4), weight=torch.zeros(7, 4), target=torch.zeros(2, 3, dtype=torch.long))
    given |= changes
    with pytest.raises(error, match=message):
        linear_logprob(given.pop("hidden"), given.pop("weight"), given.pop("target"), **given)


@pytest.mark.parametrize(
    "error, message, changes",
    [
        (ValueError, r"weight has shape \(7, 5\), expected \(V, 4\)", {"weight": torch.zeros(7, 5)}),
        (ValueError, r"weight has shape \(0,\).*ZeRO-3", {"weight": torch.zeros(0)}),
        (ValueError, r"weight has shape \(0, 4\)", {"weight": torch.zeros(0, 4)}),
        (ValueError, r"bias has shape \(4,\), expected \(7,\)", {"bias": torch.zeros(4)}),
        (ValueError, r"target has shape \(2, 1\), expected \(2, 3\)", {"target": torch.zeros(2, 1).long()}),
        (ValueError, r"mask has shape \(3,\), expected \(2, 3\)", {"mask": torch.ones(3).bool()}),
        (ValueError, "weight is on meta, expected cpu", {"weight": torch.zeros(7, 4, device="meta")}),
        (
            ValueError,
            "weight is on cpu, expected meta, where hidden is",
            {"hidden": torch.zeros(2, 3, 4, device="meta")},
        ),
        (ValueError, "target is on meta", {"target": torch.zeros(2, 3, device="meta").long()}),
        (ValueError, "mask is on meta", {"mask": torch.ones(2, 3, device="meta").bool()}),
        (TypeError, "weight is torch.bfloat16, expected torch.float32", {"weight": torch.zeros(7, 4).bfloat16()}),
        (TypeError, "hidden is torch.int64", {"hidden": torch.zeros(2, 3, 4).long()}),
        (TypeError, "target is torch.float32, expected integers", {"target": torch.zeros(2, 3)}),
        (TypeError, "mask is torch.float32, expected integers or bool", {"mask": torch.ones(2, 3)}),
        (ValueError, "temperature is 0", {"temperature": 0.0}),
        (ValueError, r"temperature is a tensor of shape \[3\], expected one", {"temperature": torch.ones(3)}),
        (ValueError, "temperature is nan", {"temperature": float("nan")}),
        (ValueError, "soft_cap is -1", {"soft_cap": -1.0}),
        (ValueError, "logit_scale is 0", {"logit_scale": 0.0}),
        (ValueError, "chunk is 0", {"chunk": 0}),
    ],
)
def test_refusals(error, message, changes):
    refused(error, message, **changes)


def test_a_sharded_head_is_refused():
    from torch.distributed import HashStore, destroy_process_group, init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    init_process_group("gloo", rank=0, world_size=1, store=HashStore())
    try:
        head = distribute_tensor(torch.zeros(8, 4), init_device_mesh("cpu", (1,)), [Shard(0)])
        refused(ValueError, r"weight is a DTensor .*Shard.*expected a plain tensor: .*group=", weight=head)
    finally:
        destroy_process_group()


# -- ahead-of-time compilation of the kernels ----------------------------------------------------------------


def aot():
    path = Path(__file__).resolve().parents[2] / "benchmarks" / "aot_logprob.py"
    spec = importlib.util.spec_from_file_location("aot_logprob", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module, path.parent / "results" / "aot_logprob.json"


COMPILE_THE_LARGEST = """
import json, sys
import aot_logprob as aot
variants = ("soft-cap entropy squares U", "soft-cap entropy")
reads = ("fp32 tile, bias", "fp32 tile, bias, support")
chosen = [one for one in aot.variants() if one["reads"] in reads and one["variant"] in variants]
rows = [{"target": target, **aot.compile_for(target, one)} for target in sys.argv[1:] for one in chosen]
print(json.dumps([len(rows), aot.bad(rows)]))
"""


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_the_largest_variants_compile_without_spills(target):
    # In a process of its own: where triton was imported to interpret, it cannot compile.
    benchmarks = Path(__file__).resolve().parents[2] / "benchmarks"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(benchmarks), str(benchmarks.parent)])
    command = [sys.executable, "-c", COMPILE_THE_LARGEST, target]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    count, bad = json.loads(done.stdout)
    assert count == 6 and not bad, bad


def test_the_committed_table_covers_every_variant():
    module, results = aot()
    rows = json.loads(results.read_text())["rows"]
    wanted = {(v["kernel"].__name__, v["variant"], v["reads"], t) for v in module.variants() for t in module.TARGETS}
    assert {(r["kernel"], r["variant"], r["reads"], r["target"]) for r in rows} == wanted
    assert not module.bad(rows)
