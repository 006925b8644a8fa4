"""Tests of the log-prob kernels against their torch twins, and of the whole function against float64.

Calls use the layout of a GPU: padded chunks, half-precision factors, masked tokens computed too.  The tiles come from
torch.mm, since the kernels do no matrix product.
"""

import pytest
import torch

from offcorr.kernels.dispatch import use
from offcorr.kernels.logprob import fold as triton_tiles
from offcorr.kernels.logprob import linear_logprob, logits_logprob, naive_logprob, out_of_vocabulary
from offcorr.kernels.logprob import tiles as torch_tiles
from offcorr.kernels.logprob.tiles import Transform
from tests.waits import Waits

TRANSFORMS = [
    pytest.param(Transform(), id="plain"),
    pytest.param(Transform(1.3, None, 0.7), id="scaled"),
    pytest.param(Transform(0.5, 3.0, 1.5), id="capped"),
]
COLUMNS = [1, 63, 65, 1000, 5000]


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Fills the memory that ``torch.empty`` returns with NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory and torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def problem(tokens, size, vocabulary, dtype=torch.float32, seed=0):
    draw = torch.Generator().manual_seed(seed)
    hidden = 2 * torch.randn(tokens, size, generator=draw)
    weight = torch.randn(vocabulary, size, generator=draw) / size**0.5
    bias = torch.randn(vocabulary, generator=draw)
    target = torch.randint(vocabulary, (tokens,), generator=draw)
    leaves = [x.to(dtype).requires_grad_() for x in (hidden, weight, bias)]
    return *leaves, target, torch.randn(2, tokens, generator=draw)


# -- one tile ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("entropy, squares", [(False, False), (True, True)])
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("columns", COLUMNS)
def test_tiles_agree_with_their_twin(columns, transform, entropy, squares, biased):
    tokens, first = 5, 300
    draw = torch.Generator().manual_seed(columns)
    products = [4 * torch.randn(tokens, columns, generator=draw) for _ in range(2)]
    bias = torch.randn(columns, generator=draw).bfloat16() if biased else None
    if biased and columns > 1:
        bias[columns // 2] = -torch.inf
    target = torch.tensor([0, first, first + columns // 3, first + columns - 1, first + columns])
    products[1][2, columns // 3 - 1] = 30  # the largest logit is the target's, which no maximum includes
    states, written = [], []
    for tiles in (torch_tiles, triton_tiles):
        state = torch_tiles.start(tokens, products[0])
        for number, product in enumerate(products):
            weights = torch.full((tokens, columns), torch.nan) if number else None
            tiles.fold_tile(
                *(product.clone(), bias, target - number, state, transform, first, weights),
                entropy=entropy,
                squares=squares,
            )
        states.append(state)
        written.append(weights)
    torch.testing.assert_close(states[1], states[0], rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(written[1], written[0], rtol=2e-5, atol=1e-6)
    assert (written[1][torch.arange(2, 4), target[2:4] - 1 - first] == 0).all() or columns == 1

    rows = torch.randn(5, tokens, generator=draw)
    rows[0] += transform(products[0].clone(), bias)[0].logsumexp(1) + 1
    if not entropy:
        rows[3] = 0
    outs = []
    for tiles in (torch_tiles, triton_tiles):
        tile = products[0].clone()
        tiles.grad_tile(*(tile, bias, target, rows, transform, first, tile), entropy=entropy)
        outs.append(tile)
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-4, atol=1e-5)
    assert outs[1][1, 0] == rows[4, 1]


def test_a_row_without_a_gradient_is_not_read():
    products = torch.full((2, 70), torch.nan)
    rows = torch.tensor([[1.0, 1.0], [0, 0], [0, 1], [0, 0], [3, 4]])
    out = torch.full((2, 70), torch.nan)
    triton_tiles.grad_tile(products, None, torch.zeros(2, dtype=torch.long), rows, Transform(), 0, out, entropy=True)
    assert (out[0] == 0).all() and out[1, 0] == 4 and out[1, 1:].isnan().all()


# -- the whole -----------------------------------------------------------------------------------------------


def run(function, leaves, d, frozen=False, with_entropy=True, **options):
    found = function(**options)
    loss = (found.logp.double() * d[0]).sum()
    if with_entropy:
        loss = loss + (found.entropy.double() * d[1]).sum()
    return found, torch.autograd.grad(loss, leaves[:1] if frozen else leaves)


@pytest.mark.parametrize("frozen, with_entropy", [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize("options", [{}, {"soft_cap": 3.0, "temperature": 0.8, "logit_scale": 1.2}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [(1, 63, 65), (19, 5, 1000)], ids=str)
def test_error_budget(size, dtype, options, frozen, with_entropy):
    """|kernel - float64| <= |naive in the inputs' precision - float64| + tiny, forward and every gradient."""
    hidden, weight, bias, target, d = problem(*size, dtype)
    d[:, ::4] = 0
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight, bias)]
    naive = [x.detach().clone().requires_grad_() for x in (hidden, weight, bias)]

    def definition(leaves):
        return run(
            lambda: naive_logprob(leaves[0], leaves[1], target, bias=leaves[2], **options),
            *(leaves, d, frozen, with_entropy),
        )

    (want, want_grads), (low, low_grads) = definition(exact), definition(naive)
    with use("triton"):
        got, got_grads = run(
            lambda: linear_logprob(
                *(hidden, weight, target),
                bias=bias,
                entropy=True,
                sum_sq_probs=True,
                frozen_head=frozen,
                chunk=8,
                **options,
            ),
            *([hidden, weight, bias], d, frozen, with_entropy),
        )
    for mine, theirs, true in zip(got, low, want, strict=True):
        assert mine.dtype == torch.float32
        budget = (theirs - true).abs().max() + 4e-6
        assert (mine - true).abs().max() <= budget
        assert (mine - true).abs().max() <= 1e-5
    for mine, theirs, true in zip(got_grads, low_grads, want_grads, strict=True):
        assert mine.dtype == dtype
        # A half-precision result is rounded to half an ulp at best, so that much error is always allowed.
        rounding = torch.finfo(dtype).eps / 2 * true.norm()
        assert (mine - true).norm() <= torch.maximum((theirs - true).norm(), 1.2 * rounding) + 4e-6 * true.norm()


def test_several_vocabulary_tiles(monkeypatch):
    from offcorr.kernels.logprob import linear

    layout = linear._tiles_for
    monkeypatch.setattr(linear, "_tiles_for", lambda *given: layout(*given) | {"columns": 96})
    hidden, weight, bias, target, d = problem(11, 6, 300, torch.bfloat16)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight, bias)]
    for frozen in (False, True):
        want, want_grads = run(
            lambda: naive_logprob(exact[0], exact[1], target, bias=exact[2]), exact, d, frozen, with_entropy=False
        )
        with use("triton"):
            got, got_grads = run(
                lambda frozen=frozen: linear_logprob(
                    hidden, weight, target, bias=bias, entropy=True, frozen_head=frozen, chunk=4
                ),
                *([hidden, weight, bias], d, frozen, False),
            )
        torch.testing.assert_close(got.logp.double(), want.logp, rtol=1e-6, atol=1e-5)
        torch.testing.assert_close(got.entropy.double(), want.entropy, rtol=1e-6, atol=1e-5)
        for mine, true in zip(got_grads, want_grads, strict=True):
            assert (mine - true).norm() < 2**-8 * true.norm()


@pytest.mark.parametrize("frozen", [False, True])
def test_confident_tokens_keep_their_gradient_in_bf16(frozen):
    hidden, weight, _, _, _ = problem(12, 64, 200, torch.bfloat16)
    target = torch.arange(12)
    with torch.no_grad():
        norms = weight[:12].float().square().sum(1, keepdim=True)
        hidden.copy_(torch.linspace(12, 20, 12)[:, None] * weight[:12].float() / norms)
    exact = hidden.detach().double().requires_grad_()
    want = naive_logprob(exact, weight.double(), target)
    assert (want.logp > -1e-3).sum() > 3
    (theirs,) = torch.autograd.grad(want.logp.sum(), exact)
    with use("triton"):
        found = linear_logprob(hidden, weight, target, frozen_head=frozen)
    (mine,) = torch.autograd.grad(found.logp.sum(), hidden)
    assert ((found.logp - want.logp) / want.logp).abs().max() < 1e-4
    assert ((mine - theirs).norm(dim=1) / theirs.norm(dim=1)).max() < 2**-7


def test_float16_keeps_gradients_that_would_underflow():
    """Every p d underflows in float16, and a common offset of the head cancels only if none of them is lost."""
    hidden, weight, _, target, d = problem(9, 16, 1000, torch.float16)
    with torch.no_grad():
        weight += 4
        hidden /= 8
    d = d[0].sign() * 1e-4
    exact = hidden.detach().double().requires_grad_()
    (want,) = torch.autograd.grad((naive_logprob(exact, weight.double(), target).logp * d).sum(), exact)
    with use("triton"):
        found = linear_logprob(hidden, weight, target, chunk=4)
    (mine,) = torch.autograd.grad((found.logp * d).sum(), hidden)
    assert (mine - want).norm() < 0.02 * want.norm()


@pytest.mark.parametrize("incoming", [1e-3, 1e-30, 1e-42, 1e-45])
def test_float16_stays_finite_however_small_the_gradient(incoming):
    hidden, weight, _, target, _ = problem(5, 8, 65, torch.float16)
    with use("triton"):
        found = linear_logprob(hidden, weight, target, chunk=4)
    gradients = torch.autograd.grad((found.logp * torch.tensor(incoming)).sum(), [hidden, weight])
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_the_target_is_not_rounded_with_the_tile():
    """Where only the target's row of the head is not zero, dlogp/dhidden is (1 - p) W_y, rounded once and not twice."""
    weight = torch.zeros(300, 8, dtype=torch.bfloat16)
    weight[5] = torch.linspace(0.7, 1.9, 8)
    hidden = (torch.arange(1, 40)[:, None] / 16).expand(39, 8).bfloat16().requires_grad_()
    target = torch.full((39,), 5)
    with use("triton"):
        found = linear_logprob(hidden, weight.requires_grad_(), target, chunk=4)
    (mine,) = torch.autograd.grad(found.logp.sum(), [hidden])
    want = -torch.expm1(naive_logprob(hidden.double(), weight.double(), target).logp)[:, None] * weight[5].double()
    assert (mine != want.bfloat16()).sum() <= 3  # of 312: near a tie, float32 may round the other way


@pytest.mark.parametrize("frozen", [False, True])
def test_masks_and_targets_outside_the_vocabulary(frozen):
    hidden, weight, bias, target, d = problem(21, 6, 130)
    mask = torch.arange(21) % 3 > 0
    with torch.no_grad():
        hidden[~mask] = torch.nan
    target = torch.where(mask, target, -100)
    target[4] = 130
    bad = torch.arange(21) == 4
    out_of_vocabulary(reset=True)
    with use("triton"):
        found = linear_logprob(
            *(hidden, weight, target), bias=bias, mask=mask, entropy=True, frozen_head=frozen, chunk=8
        )
    assert out_of_vocabulary(reset=True) == 1
    fine = mask & ~bad
    want = naive_logprob(hidden[fine], weight, target[fine], bias=bias)
    for mine, theirs in zip(found[:2], want[:2], strict=True):
        assert (mine[~mask] == 0).all() and mine[bad].isnan().all()
        torch.testing.assert_close(mine[fine], theirs, rtol=1e-5, atol=1e-5)
    leaves = [hidden] if frozen else [hidden, weight, bias]
    without_bad = torch.where(bad, 0, found.logp)
    got = torch.autograd.grad((without_bad * d[0]).sum(), leaves, retain_graph=True)
    wanted = torch.autograd.grad((want.logp * d[0, fine]).sum(), leaves)
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    (poisoned,) = torch.autograd.grad(found.logp.sum(), [hidden])
    assert poisoned[bad].isnan().all() and (poisoned[~mask] == 0).all() and poisoned[fine].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [1, 63, 2100])
def test_from_logits(vocabulary, dtype):
    *_, target, d = problem(7, 3, vocabulary)
    logits = (3 * torch.randn(7, vocabulary, generator=torch.Generator().manual_seed(1))).to(dtype)
    mask = torch.arange(7) != 2
    logits[2] = torch.nan
    logits.requires_grad_()
    results = []
    for choice in ("reference", "triton"):
        with use(choice):
            found = logits_logprob(logits, target, mask=mask, temperature=0.9, entropy=True, sum_sq_probs=True)
            (gradient,) = torch.autograd.grad((found.logp * d[0] + found.entropy * d[1]).sum(), logits)
        assert (gradient[2] == 0).all() and gradient.isfinite().all() and gradient.dtype == dtype
        results.append((*found, gradient))
    for mine, theirs in zip(*results, strict=True):
        tolerance = 2**-7 if mine.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=1e-5)


def test_batch_invariant_and_the_same_bits_twice():
    hidden, weight, bias, target, d = problem(20, 16, 300)
    options = dict(bias=bias, entropy=True, sum_sq_probs=True, batch_invariant=True, chunk=8)
    with use("triton"):
        whole = linear_logprob(hidden, weight, target, **options)
        for chosen in ([13], [19, 2, 5], list(range(19))):
            part = linear_logprob(hidden[chosen], weight, target[chosen], **options)
            assert all(torch.equal(mine, theirs[chosen]) for mine, theirs in zip(part, whole, strict=True))
        again = linear_logprob(hidden, weight, target, **options)
        leaves = [hidden, weight, bias]
        grads = [torch.autograd.grad((x.logp * d[0]).sum(), leaves) for x in (whole, again)]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(lambda x: x[:1].expand(6, -1), id="expanded"),
        pytest.param(lambda x: x.T.contiguous().T, id="column by column"),
        pytest.param(lambda x: torch.cat([x, x], 1)[:, 3:73], id="part of each row"),
        pytest.param(lambda x: torch.cat([x.flatten(), x[0]]).as_strided((74, 70), (1, 1)), id="overlapping"),
    ],
)
def test_logits_in_any_layout(layout):
    draw = torch.Generator().manual_seed(0)
    logits = layout(torch.randn(6, 70, generator=draw))
    target = torch.randint(70, (len(logits),), generator=draw)
    results = []
    for choice in ("reference", "triton"):
        leaf = logits.detach().requires_grad_()
        with use(choice):
            found = logits_logprob(leaf, target, entropy=True)
            results.append([*found[:2], *torch.autograd.grad((found.logp + 0.3 * found.entropy).sum(), leaf)])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


# -- what a GPU would wait for ---------------------------------------------------------------------------------


def waits(work):
    with Waits() as waited:
        work()
    return waited.waits


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_host_waits_once_in_a_backward_pass_and_never_in_a_forward_pass(dtype, frozen):
    hidden, weight, bias, target, d = problem(9, 8, 65, dtype)
    mask, every = torch.arange(9) % 3 > 0, dict(entropy=True, sum_sq_probs=True, soft_cap=3.0)
    logits = (hidden @ weight.T).detach().requires_grad_()
    options = dict(bias=bias, mask=mask, frozen_head=frozen, chunk=4, **every)
    found = []
    with use("triton"):
        assert waits(lambda: found.append(linear_logprob(hidden, weight, target, **options))) == []
        assert waits(lambda: found.append(logits_logprob(logits, target, mask=mask, **every))) == []
    logp, entropy = found[0].logp * d[0], found[0].entropy * d[1]
    once = ["aten.nonzero.default"]
    assert waits(lambda: logp.sum().backward(retain_graph=True)) == ([] if frozen else once)
    assert waits(lambda: (logp + entropy).sum().backward()) == once
    assert waits(lambda: (found[1].logp + found[1].entropy).sum().backward()) == []
