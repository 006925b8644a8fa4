"""Tests of log-probs over the tokens that a sampler kept, against a dense masked softmax in float64."""

import pytest
import torch

from offcorr.kernels.dispatch import use
from offcorr.kernels.logprob import (
    LogProbs,
    fold,
    linear,
    linear_logprob,
    naive_logprob,
    out_of_support,
    out_of_vocabulary,
    tiles,
)
from offcorr.kernels.logprob.tiles import Transform
from tests.waits import Waits

SIZES = [(1, 1, 1), (7, 3, 65), (65, 16, 8193), (130, 5, 3), (3, 64, 20000)]
"""(tokens, hidden size, vocabulary): odd sizes, a vocabulary of one entry, several tiles, several chunks."""

OPTIONS = [
    pytest.param({}, id="plain"),
    pytest.param({"soft_cap": 3.0, "temperature": 1.5, "logit_scale": -0.5}, id="capped"),
]
FORMS = ["ids", "ragged", "mask"]


def problem(tokens, size, vocabulary, dtype=torch.float64, seed=0):
    """Returns hidden, weight and bias that require gradients, the kept tokens [N, V] and targets among them.

    A third of the positions keeps few tokens, the first of the others only the target, and the last every token.
    """
    draw = torch.Generator().manual_seed(seed)
    hidden = 2 * torch.randn(tokens, size, generator=draw, dtype=torch.float64)
    weight = torch.randn(vocabulary, size, generator=draw, dtype=torch.float64) / size**0.5
    bias = torch.randn(vocabulary, generator=draw, dtype=torch.float64)
    target = torch.randint(vocabulary, (tokens,), generator=draw)
    share = torch.where(torch.arange(tokens) % 3 == 0, min(1, 4 / vocabulary), 0.3)
    kept = torch.rand(tokens, vocabulary, generator=draw) < share[:, None]
    kept[tokens // 2] = False
    kept[torch.arange(tokens), target] = True
    kept[-1] = True
    return *(x.to(dtype).requires_grad_() for x in (hidden, weight, bias)), kept, target


def in_form(kept, form, seed=1):
    """The kept tokens as the argument ``support``; ids come in no order, with repetitions and garbage as padding.

    Positions that keep every token have no id.
    """
    if form == "mask":
        return kept
    tokens, vocabulary = kept.shape
    ids = [row.nonzero()[:, 0] if not row.all() else torch.empty(0, dtype=torch.long) for row in kept]
    if form == "ragged":
        offsets = torch.tensor([0, *(len(x) for x in ids)]).cumsum(0)
        return torch.cat(ids).int(), offsets
    draw = torch.Generator().manual_seed(seed)
    width = max(len(x) for x in ids) + 3
    padded = -torch.randint(1, 2**31 - 1, (tokens, width), generator=draw)
    for row, own in zip(padded, ids, strict=True):
        row[: len(own)] = own
        if len(own):
            row[len(own)] = own[0]
            row[len(own) + 1] = vocabulary
        row.copy_(row[torch.randperm(width, generator=draw)])
    return padded


def dense(hidden, weight, bias, kept, target, temperature=1.0, logit_scale=1.0, soft_cap=None):
    """Log-prob, entropy and sum of squares of softmax(logits) renormalised over ``kept``, by autograd."""
    logits = (hidden @ weight.T + bias) * logit_scale
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    p = torch.softmax(logits / temperature, -1)
    p = p * kept / (p * kept).sum(-1, keepdim=True)
    log_p = torch.where(kept, p, 1).log()
    return LogProbs(log_p[torch.arange(len(target)), target], -(p * log_p).sum(-1), (p * p).sum(-1))


def upstream(tokens, seed=2):
    draw = torch.Generator().manual_seed(seed)
    d = torch.randn(2, tokens, generator=draw, dtype=torch.float64)
    return torch.where(torch.rand(2, tokens, generator=draw) < 0.3, 0, d)


def grads(found, leaves, d, with_entropy=True):
    loss = (found.logp.double() * d[0]).sum()
    if with_entropy:
        loss = loss + (found.entropy.double() * d[1]).sum()
    return torch.autograd.grad(loss, leaves, retain_graph=True)


def close(got, want, tolerance=1e-10):
    torch.testing.assert_close(got.double(), want.double(), rtol=tolerance, atol=tolerance)


@pytest.fixture
def poisoned_memory():
    """Fills the memory that ``torch.empty`` returns with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


# -- against the dense masked softmax ------------------------------------------------------------------------


@pytest.mark.parametrize("frozen, with_entropy", [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_agrees_with_a_dense_masked_softmax(size, options, frozen, with_entropy, poisoned_memory):
    hidden, weight, bias, kept, target = problem(*size)
    d, leaves = upstream(size[0]), [hidden] if frozen else [hidden, weight, bias]
    want = dense(hidden, weight, bias, kept, target, **options)
    want_grads = grads(want, leaves, d, with_entropy)
    more = dict(bias=bias, entropy=True, sum_sq_probs=True, frozen_head=frozen, chunk=32)
    for form in FORMS:
        got = linear_logprob(hidden, weight, target, support=in_form(kept, form), **more, **options)
        for mine, theirs in zip(got, want, strict=True):
            close(mine, theirs)
        for mine, theirs in zip(grads(got, leaves, d, with_entropy), want_grads, strict=True):
            close(mine, theirs)


@pytest.mark.parametrize("form", FORMS)
def test_the_definition_agrees_too(form):
    hidden, weight, bias, kept, target = problem(7, 3, 65)
    d, leaves = upstream(7), [hidden, weight, bias]
    want = dense(hidden, weight, bias, kept, target)
    got = naive_logprob(hidden, weight, target, bias=bias, support=in_form(kept, form))
    for mine, theirs in zip(got, want, strict=True):
        close(mine, theirs)
    for mine, theirs in zip(grads(got, leaves, d), grads(want, leaves, d), strict=True):
        close(mine, theirs)


@pytest.mark.parametrize("choice", ["reference", "triton"])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_budget(dtype, frozen, choice):
    """|ours - float64| <= |dense in the inputs' precision - float64| + tiny, forward and every gradient."""
    hidden, weight, bias, kept, target = problem(19, 5, 300, dtype)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight, bias)]
    low = [x.detach().clone().requires_grad_() for x in (hidden, weight, bias)]
    d, some = upstream(19), slice(0, 1 if frozen else 3)
    want, rounded = (dense(*leaves, kept, target) for leaves in (exact, low))
    want_grads, rounded_grads = (grads(x, leaves[some], d) for x, leaves in ((want, exact), (rounded, low)))
    options = dict(bias=bias, entropy=True, sum_sq_probs=True, frozen_head=frozen, chunk=8)
    for form in FORMS:
        with use(choice):
            got = linear_logprob(hidden, weight, target, support=in_form(kept, form), **options)
            got_grads = grads(got, [hidden, weight, bias][some], d)
        for mine, theirs, true in zip(got, rounded, want, strict=True):
            assert mine.dtype == torch.float32
            assert (mine - true).abs().max() <= min((theirs - true).abs().max() + 4e-6, 1e-5)
        for mine, theirs, true in zip(got_grads, rounded_grads, want_grads, strict=True):
            assert mine.dtype == dtype
            rounding = torch.finfo(dtype).eps / 2 * true.norm()
            assert (mine - true).norm() <= max((theirs - true).norm(), 1.2 * rounding) + 4e-6 * true.norm()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("frozen", [False, True])
def test_several_tiles_of_the_kernel(form, frozen, monkeypatch, poisoned_memory):
    layout = linear._tiles_for
    monkeypatch.setattr(linear, "_tiles_for", lambda *given: layout(*given) | {"columns": 96})
    hidden, weight, bias, kept, target = problem(11, 6, 300, torch.float32)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight, bias)]
    d, leaves = upstream(11), [hidden, weight, bias][: 1 if frozen else 3]
    want = dense(*exact, kept, target)
    options = dict(bias=bias, entropy=True, frozen_head=frozen, chunk=4)
    with use("triton"):
        got = linear_logprob(hidden, weight, target, support=in_form(kept, form), **options)
        got_grads = grads(got, leaves, d)
    close(got.logp, want.logp, 1e-5)
    close(got.entropy, want.entropy, 1e-5)
    for mine, theirs in zip(got_grads, grads(want, exact[: len(leaves)], d), strict=True):
        close(mine, theirs, 1e-5)


@pytest.mark.parametrize("soft_cap", [None, 3.0])
@pytest.mark.parametrize("columns", [1, 63, 1000])
def test_kernels_agree_with_their_twin(columns, soft_cap):
    tokens, first, transform = 5, 300, Transform(1.3, soft_cap, 0.7)
    draw = torch.Generator().manual_seed(columns)
    products = 4 * torch.randn(tokens, columns, generator=draw)
    wide = torch.rand(tokens, columns + 7, generator=draw) < torch.tensor([0, 0.1, 0.5, 1, 0.5])[:, None]
    kept = wide[:, :columns]
    target = torch.tensor([0, first, first + columns // 3, first + columns - 1, -1])
    rows = torch.randn(5, tokens, generator=draw)
    rows[0] += 12
    found = []
    for one in (tiles, fold):
        state, written = tiles.start(tokens, products), torch.full((tokens, columns), torch.nan)
        given = (None, target, state, transform, first, written)
        one.fold_tile(products.clone(), *given, kept=kept, entropy=True, squares=True)
        out = products.clone()
        one.grad_tile(*(out, None, target, rows, transform, first, out), kept=kept, entropy=True)
        assert (written[~kept] == 0).all()
        at = first + torch.arange(columns)
        assert (out[~kept & (at != target[:, None])] == 0).all()
        found.append((state, written, out))
    for mine, theirs in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_gradcheck():
    hidden, weight, bias, kept, target = problem(5, 3, 7)

    def run(*leaves):
        support = in_form(kept, "ids")
        found = linear_logprob(
            *leaves[:2], target, bias=leaves[2], support=support, soft_cap=2.0, entropy=True, chunk=2
        )
        return found.logp, found.entropy

    assert torch.autograd.gradcheck(run, [hidden, weight, bias])


@pytest.mark.parametrize("choice", ["reference", "triton"])
def test_a_support_of_everything_changes_nothing(choice):
    hidden, weight, bias, _, target = problem(9, 4, 70, torch.float32)
    d, every = upstream(9), torch.ones(9, 70, dtype=torch.bool)
    options = dict(bias=bias, entropy=True, sum_sq_probs=True, chunk=4)
    with use(choice):
        plain = linear_logprob(hidden, weight, target, **options)
        want = grads(plain, [hidden, weight, bias], d)
        none = torch.zeros(0, dtype=torch.long), torch.zeros(10, dtype=torch.long)
        for support in (every, torch.arange(70).expand(9, 70), torch.full((9, 2), -1), torch.zeros(9, 0).long(), none):
            found = linear_logprob(hidden, weight, target, support=support, **options)
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, plain, strict=True))
            mine = grads(found, [hidden, weight, bias], d)
            assert all(torch.equal(a, b) for a, b in zip(mine, want, strict=True))


def test_a_token_that_no_position_keeps_gets_no_gradient():
    hidden, weight, bias, kept, target = problem(8, 4, 50)
    kept[-1] = kept[0]
    target[-1] = target[0]
    unused = ~kept.any(0)
    assert unused.sum() > 2
    found = linear_logprob(hidden, weight, target, bias=bias, support=kept, entropy=True)
    _, of_weight, of_bias = grads(found, [hidden, weight, bias], torch.ones(2, 8))
    assert (of_weight[unused] == 0).all() and (of_bias[unused] == 0).all()
    assert (of_weight[~unused] != 0).any(1).all()
    alone = len(target) // 2  # a position that keeps its target alone
    assert kept[alone].sum() == 1 and found.logp[alone] == 0 and found.entropy[alone] == 0


@pytest.mark.parametrize("choice", ["reference", "triton"])
@pytest.mark.parametrize("form", FORMS)
def test_shapes_masks_and_batch_invariance(form, choice):
    hidden, weight, bias, kept, target = (x.detach() for x in problem(12, 4, 70, torch.float32))
    support = in_form(kept, form)
    options = dict(bias=bias, entropy=True, sum_sq_probs=True, batch_invariant=True, chunk=8)
    with use(choice):
        flat = linear_logprob(hidden, weight, target, support=support, **options)
        shaped = support if form == "ragged" else support.view(3, 4, -1)
        folded = linear_logprob(hidden.view(3, 4, 4), weight, target.view(3, 4), support=shaped, **options)
        assert all(torch.equal(a.flatten(), b) for a, b in zip(folded, flat, strict=True))

        mask = torch.arange(12) % 3 > 0
        if form == "ids":  # garbage under the mask: neither a target's absence nor wild ids matter there
            support = torch.where(mask[:, None], support, 2**40)
        elif form == "mask":
            support = support & mask[:, None]
        masked = linear_logprob(hidden, weight, target, support=support, mask=mask, **options)
        for mine, theirs in zip(masked, flat, strict=True):
            assert (mine[~mask] == 0).all() and torch.equal(mine[mask], theirs[mask])


def test_empty_batches():
    hidden, weight, bias, *_ = problem(1, 4, 11, torch.float32)
    none = torch.zeros(0, dtype=torch.long)
    for support in (torch.zeros(0, 3).long(), torch.zeros(0, 11).bool(), (none, torch.zeros(1).long())):
        found = linear_logprob(hidden[:0], weight, none, bias=bias, support=support, entropy=True)
        assert found.logp.shape == found.entropy.shape == (0,)
        assert not torch.autograd.grad(found.logp.sum(), weight)[0].any()


# -- what it is for ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("top_p", [0.5, 0.9])
def test_ratio_means_of_truncated_sampling_are_one(top_p):
    """E over the sampler of pi_new / pi_sampled, every token enumerated: 1 over the support, its mass without."""
    vocabulary, contexts = 40, 6
    hidden, weight, bias, _, _ = problem(contexts, 8, vocabulary)
    new = weight + 0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    probs = torch.softmax(hidden @ weight.T + bias, -1)
    ordered, order = probs.sort(descending=True)
    kept = torch.zeros(contexts, vocabulary, dtype=torch.bool)
    kept.scatter_(1, order, ordered.cumsum(1) - ordered < top_p)
    sampler = torch.where(kept, probs, 0) / torch.where(kept, probs, 0).sum(1, keepdim=True)

    context, token = kept.nonzero().T  # every token that the sampler can draw
    support = in_form(kept, "ids")[context]
    logp = linear_logprob(hidden[context], new, token, bias=bias, support=support).logp
    over_vocabulary = linear_logprob(hidden[context], new, token, bias=bias).logp
    drawn = sampler[context, token]

    def mean_of_ratios(log_p):
        return torch.zeros(contexts, dtype=torch.float64).index_add(0, context, drawn * (log_p - drawn.log()).exp())

    close(mean_of_ratios(logp), torch.ones(contexts))
    mass = torch.where(kept, torch.softmax(hidden @ new.T + bias, -1), 0).sum(1)
    close(mean_of_ratios(over_vocabulary), mass)
    assert (mass < 0.99).any()
    # Under the weights that sampled, trainer and sampler agree token for token.
    same = linear_logprob(hidden[context], weight, token, bias=bias, support=support).logp
    close(same, drawn.log())


# -- targets outside the support -----------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_a_target_outside_its_support_is_refused_on_a_cpu(form):
    hidden, weight, bias, kept, target = (x.detach().cpu() for x in problem(12, 4, 70, torch.float32))
    kept[4] = kept[9] = False
    kept[4, (target[4] + 1) % 70] = kept[9, (target[9] + 1) % 70] = True
    support = tuple(x.cpu() for x in in_form(kept, form)) if form == "ragged" else in_form(kept, form).cpu()
    with use("reference"):
        with pytest.raises(ValueError, match=rf"target\[4\] is {target[4]} \(and 1 more\), expected one of the tokens"):
            linear_logprob(hidden, weight, target, support=support)
        shaped = support if form == "ragged" else support.view(3, 4, -1)
        with pytest.raises(ValueError, match=r"target\[1, 0\] is .* that support\[1, 0\] keeps"):
            linear_logprob(hidden.view(3, 4, 4), weight, target.view(3, 4), support=shaped)
        mask = torch.ones(12).bool()
        mask[[4, 9]] = False
        assert linear_logprob(hidden, weight, target, support=support, mask=mask).logp.isfinite().all()


def test_an_empty_row_of_a_mask_keeps_nothing():
    with use("reference"), pytest.raises(ValueError, match=r"target\[1\] is 0, expected one of the tokens"):
        kept = torch.tensor([[True, False], [False, False]], device="cpu")
        zeros = torch.zeros(2, 3, device="cpu")
        linear_logprob(zeros, zeros, torch.zeros(2, dtype=torch.long, device="cpu"), support=kept)


@pytest.mark.parametrize("form", ["ids", "mask"])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_target_outside_its_support_is_counted_on_a_gpu(form, frozen):
    hidden, weight, _, kept, target = problem(12, 4, 70, torch.float32)
    kept[4] = torch.arange(70) == (target[4] + 1) % 70
    kept[6] = torch.arange(70) == (target[6] + 1) % 70
    mask, bad = torch.arange(12) != 6, torch.arange(12) == 4
    support, options = in_form(kept, form), dict(mask=mask, entropy=True, frozen_head=frozen, chunk=4)
    out_of_support(reset=True)
    out_of_vocabulary(reset=True)
    with use("triton"):
        with Waits() as waits:
            found = linear_logprob(hidden, weight, target, support=support, **options)
        assert waits.waits == []
        (gradient,) = torch.autograd.grad(found.logp.sum(), hidden, retain_graph=True)
        without = torch.where(bad, 0, found.logp)
        (fine,) = torch.autograd.grad(without.sum(), hidden)
    assert out_of_support(reset=True) == 1 and out_of_support() == out_of_vocabulary() == 0
    assert all(torch.equal(x.isnan(), bad) for x in found[:2])
    assert torch.equal(gradient.isnan().any(1), bad) and fine.isfinite().all() and (fine[bad] == 0).all()


# -- refusals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error, message, support",
    [
        (ValueError, r"support has shape \(3, 2\), expected \(2, 3\) and one dimension more", torch.zeros(3, 2).long()),
        (ValueError, r"support has shape \(2, 1, 5\), expected \(2, 3\)", torch.zeros(2, 1, 5).long()),
        (ValueError, r"support has 6 columns, expected 7: one for each token", torch.ones(2, 3, 6).bool()),
        (ValueError, r"support has 8 columns, expected 7: one for each token", torch.ones(2, 3, 8).bool()),
        (ValueError, "support is on meta, expected", torch.zeros(2, 3, 5, device="meta").long()),
        (TypeError, "support is torch.float32, expected integers or bool", torch.zeros(2, 3, 5)),
        (
            ValueError,
            r"token ids \(4,\) and offsets \(6,\), expected shapes \(M,\) and \(7,\) to go with 6 targets",
            (torch.zeros(4).long(), torch.zeros(6).long()),
        ),
        (
            ValueError,
            "offsets run from 0 to 3, expected 0 to 4",
            (torch.zeros(4).long(), torch.tensor([0, 1, 1, 1, 1, 1, 3])),
        ),
        (
            ValueError,
            "offsets run from 0 to 4, expected 0 to 4, the number of token ids, without a step back",
            (torch.zeros(4).long(), torch.tensor([0, 3, 2, 2, 2, 2, 4])),
        ),
        (
            TypeError,
            r"support\[0\] \(token ids\) is torch.bool, expected integers$",
            (torch.zeros(4).bool(), torch.zeros(7).long()),
        ),
        (
            TypeError,
            r"support\[1\] \(offsets\) is torch.float32, expected integers$",
            (torch.zeros(4).long(), torch.zeros(7)),
        ),
    ],
)
def test_refusals(error, message, support):
    here = torch.zeros(()).device
    move = (lambda x: x) if "meta" in message else (lambda x: x.to(here))
    support = tuple(map(move, support)) if isinstance(support, tuple) else move(support)
    with pytest.raises(error, match=message):
        linear_logprob(torch.zeros(2, 3, 4), torch.zeros(7, 4), torch.zeros(2, 3, dtype=torch.long), support=support)
