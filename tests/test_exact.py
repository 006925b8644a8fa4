"""offcorr.exact: bitwise equality where it is promised, torch's numbers and gradients, and what its errors say."""

from __future__ import annotations

import copy
import threading
from contextlib import ExitStack, nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offcorr import exact
from offcorr.exact.invariant import on_cpu
from tests import tiny

SIZES = (1, 2, 3, 5, 8, 17, 33, 100)


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# ---------------------------------------------------------------------------------------------- log-probs, the head


def test_logprob_is_log_softmax_at_the_token():
    logits, tokens = numbers(3, 4, 11, dtype=torch.bfloat16), torch.arange(12).view(3, 4) % 11
    wanted = (logits.double() / 0.7).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    found = exact.logprob(logits, tokens, temperature=0.7)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=1e-6)
    wide = numbers(2, 5).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: exact.logprob(x, torch.tensor([4, 0]), 0.5), (wide,))


@pytest.mark.parametrize("temperature", [0, -1.0, True, "1"])
def test_a_wrong_temperature_is_an_error(temperature):
    with pytest.raises(ValueError, match="temperature is .* expected a number > 0"):
        exact.log_probs(numbers(2, 3), temperature)


def test_tokens_must_fit_the_logits():
    with pytest.raises(ValueError, match=r"tokens has shape \(2, 4\), expected \(2, 3\)"):
        exact.logprob(numbers(2, 3, 5), torch.zeros(2, 4, dtype=torch.long))


def test_the_sampler_reports_log_probs_of_the_same_function():
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from offcorr.rollout import Sampling

    logits = numbers(4, 30, dtype=torch.bfloat16) * 5
    assert torch.equal(Sampling(temperature=0.7).logp(logits), exact.log_probs(logits, 0.7))
    kept = Sampling(temperature=0.7, top_k=3).logp(logits)
    assert (kept.isfinite().sum(-1) == 3).all()
    torch.testing.assert_close(kept.exp().sum(-1), torch.ones(4))


class Headed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lm_head = nn.Linear(8, 5).bfloat16()

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden)


def test_the_head_computes_in_float32_and_is_restored():
    model, hidden = Headed(), numbers(3, 8, dtype=torch.bfloat16)
    wrapped = nn.Sequential()
    wrapped.module = model
    with exact.fp32_head(wrapped), torch.autocast("cpu", dtype=torch.bfloat16):
        found = model(hidden)
        wanted = hidden.double() @ model.lm_head.weight.double().T + model.lm_head.bias.double()
        torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=1e-6)
        found.sum().backward()
    assert model.lm_head.weight.grad.dtype == torch.bfloat16
    assert model(hidden).dtype == torch.bfloat16 and "forward" not in vars(model.lm_head)


def test_a_head_is_restored_in_the_order_of_the_handles():
    model = Headed()
    outer = exact.fp32_head(model)
    with exact.fp32_head(model):
        pass
    assert model(numbers(1, 8, dtype=torch.bfloat16)).dtype == torch.float32
    outer.remove()
    assert "forward" not in vars(model.lm_head)


def test_a_copy_of_the_model_computes_with_its_own_weights():
    model, hidden = Headed(), numbers(3, 8, dtype=torch.bfloat16)
    with exact.fp32_head(model):
        other = copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight.zero_()
        other.lm_head.bias.zero_()
    assert not other(hidden).any() and other(hidden).dtype == torch.float32


def test_a_head_that_is_no_linear_layer_is_an_error():
    with pytest.raises(TypeError, match="the head of Sequential is Sequential, expected a torch.nn.Linear"):
        exact.fp32_head(nn.Sequential(nn.Linear(2, 2)))


# ---------------------------------------------------------------------------------------------------- operators

OPERATORS = {
    "linear": lambda x: F.linear(x, WEIGHT.to(x.dtype)),
    "linear with bias": lambda x: F.linear(x, WEIGHT.to(x.dtype), WEIGHT[:, 0].to(x.dtype)),
    "product": lambda x: x @ WEIGHT.to(x.dtype).T.contiguous(),
    "matrix times vector": lambda x: x @ WEIGHT[0].to(x.dtype),
    "mean": lambda x: x.mean(-1),
    "rms_norm": lambda x: F.rms_norm(x, (x.shape[-1],)),
    "layer_norm": lambda x: F.layer_norm(x, (x.shape[-1],)),
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "exp": torch.exp,
    "cos": torch.cos,
    "tanh": torch.tanh,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "softplus": lambda x: F.softplus(x, beta=2.0),
    "mish": F.mish,
    "elu": lambda x: F.elu(x, alpha=0.5),
    "exp2": torch.exp2,
    "rsqrt": lambda x: x.abs().rsqrt(),
    "silu_": lambda x: F.silu(x.clone(), inplace=True),
    "sigmoid_": lambda x: x.clone().sigmoid_(),
    "gelu_": lambda x: torch.ops.aten.gelu_(x.clone()),
    "mish_": lambda x: F.mish(x.clone(), inplace=True),
    "elu_": lambda x: F.elu(x.clone(), inplace=True),
    "exp2_": lambda x: x.clone().exp2_(),
    "rsqrt_": lambda x: x.abs().rsqrt_(),
}
WEIGHT = (numbers(37, 177, seed=1) / 13).bfloat16().float()


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def differing(operator, x: Tensor) -> list[int]:
    """The sizes of a batch in which the first rows get another result than in the whole one."""
    whole = operator(x)
    return [size for size in SIZES if not torch.equal(operator(x[:size].clone()), whole[:size])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_a_row_does_not_depend_on_the_batch(name, dtype, threads):
    x = numbers(300, 177, dtype=dtype) * 3
    operator = OPERATORS[name]
    with exact.batch_invariant():
        assert differing(operator, x) == []
        order = torch.randperm(300, generator=torch.Generator().manual_seed(2))
        assert torch.equal(operator(x[order]), operator(x)[order])


def test_the_parts_of_three_threads_have_no_ends():
    """A third of the array is no multiple of a vector."""
    before, x = torch.get_num_threads(), numbers(700, 177) * 3
    torch.set_num_threads(3)
    try:
        with exact.batch_invariant():
            assert torch.equal(F.silu(x), torch.cat([F.silu(part) for part in x.split(7)]))
    finally:
        torch.set_num_threads(before)


def test_the_test_can_fail():
    """Some of torch's own operators do; which ones depends on the processor."""
    x = numbers(300, 177) * 3
    assert [name for name, operator in OPERATORS.items() if differing(operator, x)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_the_numbers_are_torchs(name, dtype):
    x = numbers(7, 177, dtype=dtype)
    wanted = OPERATORS[name](x.double())
    with exact.batch_invariant():
        found = OPERATORS[name](x)
    assert found.dtype == dtype
    tolerance = {torch.float32: 2e-6, torch.float64: 1e-12, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance)


def test_options_of_the_products():
    x, y, bias = numbers(2, 5, 9), numbers(2, 9, 4, seed=1), numbers(2, 5, 4, seed=2)
    with exact.batch_invariant():
        found = [
            torch.baddbmm(bias, x, y, beta=0.5, alpha=2.0),
            torch.baddbmm(bias * torch.nan, x, y, beta=0),
            torch.addmm(bias[0], x[0], y[0], beta=-1),
            x[:, :0] @ y,
            x[..., :0] @ y[:, :0],
            (x * 10).long() @ (y * 10).long(),
        ]
    wanted = [
        torch.baddbmm(bias, x, y, beta=0.5, alpha=2.0),
        x @ y,
        torch.addmm(bias[0], x[0], y[0], beta=-1),
        x[:, :0] @ y,
        torch.zeros(2, 5, 4),
        (x * 10).long() @ (y * 10).long(),
    ]
    torch.testing.assert_close(found, wanted)


def test_a_wrong_shape_is_torchs_error():
    with exact.batch_invariant(), pytest.raises(RuntimeError, match="mat1|cannot be multiplied"):
        numbers(2, 3) @ numbers(4, 5)


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="torch has no grouped product")
def test_the_products_of_experts_are_those_of_each_alone():
    x, experts = numbers(40, 16), numbers(4, 16, 24, seed=1)
    ends = torch.tensor([3, 3, 20, 40], dtype=torch.int32)
    with exact.batch_invariant():
        found = torch._grouped_mm(x, experts, offs=ends)
        alone = torch.cat([x[:3] @ experts[0], x[3:20] @ experts[2], x[20:] @ experts[3]])
        weights = torch._grouped_mm(x.T.contiguous(), found, offs=ends)
    assert torch.equal(found, alone)
    assert weights.shape == (4, 16, 24) and not weights[1].any()
    torch.testing.assert_close(weights[2], x[3:20].T @ found[3:20])


def test_gradients_are_torchs():
    def loss(x: Tensor, weight: Tensor) -> Tensor:
        heads = F.silu(F.linear(F.rms_norm(x, (24,)), weight)).view(2, 5, 3, 8).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return mixed.transpose(1, 2).reshape(2, 5, 24).log_softmax(-1)[..., 0].sum()

    x, weight = numbers(2, 5, 24).requires_grad_(), numbers(24, 24, seed=1).requires_grad_()
    wanted = torch.autograd.grad(loss(x.double(), weight.double()), (x, weight))
    with exact.batch_invariant():
        found = torch.autograd.grad(loss(x, weight), (x, weight))
        wide = [t.detach().double().requires_grad_() for t in (x, weight)]
        assert torch.autograd.gradcheck(loss, wide, fast_mode=True)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------------------------------------- attention


def heads(length: int = 70, *, batch: int = 3, count: int = 2, size: int = 24, seed: int = 0) -> Tensor:
    return numbers(batch, count, length, size, seed=seed)


@pytest.fixture
def attend():
    with exact.batch_invariant():
        yield F.scaled_dot_product_attention


def test_attention_is_torchs():
    q, k, v = heads(10), heads(10, seed=1), heads(10, seed=2)
    allowed = torch.ones(3, 1, 10, 10, dtype=torch.bool).tril()
    allowed[1, :, :, :4] = False  # padding on the left; its first four queries attend to nothing
    added = torch.zeros(3, 1, 10, 10).masked_fill(~allowed, torch.finfo(torch.float32).min) + numbers(10, seed=3)
    calls = [
        ((q, k, v), {}),
        ((q, k, v), {"is_causal": True, "scale": 0.3}),
        ((q[:, :, :4], k, v), {"is_causal": True}),
        ((q, k[:, :1], v[:, :1]), {"enable_gqa": True}),
        ((q, k, v), {"attn_mask": allowed}),
        ((q, k, v), {"attn_mask": added}),
        ((q, k, v[..., :7]), {"attn_mask": allowed[0, 0]}),
        ((q.bfloat16(), k.bfloat16(), v.bfloat16()), {"is_causal": True}),
    ]
    for arguments, options in calls:
        wanted = F.scaled_dot_product_attention(*arguments, **options)
        with exact.batch_invariant():
            found = F.scaled_dot_product_attention(*arguments, **options)
        assert found.dtype == wanted.dtype
        tolerance = 2e-2 if found.dtype == torch.bfloat16 else 1e-5
        real = slice(4, None) if options.get("attn_mask") is added else slice(None)
        torch.testing.assert_close(found[:, :, real], wanted[:, :, real], rtol=tolerance, atol=tolerance)


def test_a_token_alone_gets_what_it_gets_in_its_sequence(attend):
    q, k, v = heads(), heads(seed=1), heads(seed=2)
    whole = attend(q, k, v, is_causal=True)
    for t in range(70):
        assert torch.equal(attend(q[:, :, t : t + 1], k[:, :, : t + 1], v[:, :, : t + 1]), whole[:, :, t : t + 1]), t


def test_neither_batch_nor_length_nor_padding_changes_attention(attend):
    q, k, v = heads(), heads(seed=1), heads(seed=2)
    whole = attend(q, k, v, is_causal=True)
    assert torch.equal(attend(q[1:2], k[1:2], v[1:2], is_causal=True), whole[1:2])
    assert torch.equal(attend(*(x[:, :, :31] for x in (q, k, v)), is_causal=True), whole[:, :, :31])
    for left in (1, 5, 66):
        padded = [torch.cat([heads(left, seed=9), x], 2) for x in (q, k, v)]
        mask = torch.ones(3, 1, 70 + left, 70 + left, dtype=torch.bool).tril()
        mask[1:, :, :, :left] = False
        padded[0][0], padded[1][0], padded[2][0] = (F.pad(x[0], (0, 0, 0, left)) for x in (q, k, v))
        found = attend(*padded, attn_mask=mask)
        assert torch.equal(found[1:, :, left:], whole[1:])
        assert torch.equal(found[0, :, :70], whole[0])
        assert not found[1:, :, :left].any()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"dropout_p": 0.1}, "dropout_p is 0.1, expected 0"),
        ({"attn_mask": torch.eye(6).bool()}, "row 0 has queries that start at different keys"),
        ({"attn_mask": torch.ones(6, 6).bool(), "is_causal": True}, "both given"),
    ],
)
def test_attention_refuses_what_it_cannot_keep_equal(attend, options, message):
    with pytest.raises(ValueError, match=message):
        attend(*[heads(6)] * 3, **options)


def test_attention_wants_four_dimensions(attend):
    with pytest.raises(ValueError, match="expected four dimensions"):
        attend(*[numbers(2, 6, 8)] * 3)


# ------------------------------------------------------------------------------------------------- the context


def test_the_operators_are_restored(recwarn):
    x = numbers(40, 24)
    before = x[:1] @ x.T
    with pytest.raises(KeyError), exact.batch_invariant():
        with exact.batch_invariant():
            inside = x[:1] @ x.T
        assert torch.equal(inside, x[:1] @ x.T)
        assert torch.equal(inside, (x @ x.T)[:1])
        raise KeyError
    assert torch.equal(x[:1] @ x.T, before)
    assert not torch.equal(x[:1] @ x.T, (x @ x.T)[:1])
    assert not recwarn.list


def test_it_holds_in_other_threads():
    x, found = numbers(40, 24), []
    with exact.batch_invariant():
        thread = threading.Thread(target=lambda: found.append(torch.equal(x[:1] @ x.T, (x @ x.T)[:1])))
        thread.start()
        thread.join()
    assert found == [True]


# ------------------------------------------------------------------------------------------------------- models

PROMPTS = [[3 + i * i % 19 for i in range(length)] for length in (27, 1, 13)] * 3
TOKENS = 3 * (5 + 2 + 30)
COMPLETIONS = [[4 + i * i * i % 17 for i in range(length)] for length in (5, 2, 30)] * 3


def model(**changes) -> nn.Module:
    return tiny.qwen3(23, head_dim=32, hidden_size=48, intermediate_size=80, **changes).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_model_agrees_with_its_cached_self_only_inside(dtype):
    network = model().to(dtype)
    outside = exact.check(network, PROMPTS, COMPLETIONS, temperature=0.7)
    assert not outside.exact and outside.mean > 0 and outside.tokens == TOKENS
    # The attention's own sums differ; with several threads, products of few rows before them, too.
    assert outside.first_difference.split(" of ")[1].startswith("model.layers.0.self_attn.")
    with exact.batch_invariant():
        inside = exact.check(network, PROMPTS, COMPLETIONS, temperature=0.7)
    assert inside == exact.Agreement(0.0, 0.0, TOKENS, 0, None)


@pytest.mark.parametrize(
    "name, changes",
    [
        ("Llama", {}),
        ("Gemma3Text", {"head_dim": 16, "sliding_window": 64}),
        ("Phi3", {}),
        ("GPT2", {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64}),
        ("Qwen3Moe", {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}),
    ],
)
def test_other_architectures_agree_too(name, changes):
    transformers = pytest.importorskip("transformers")
    common = {
        "vocab_size": 23,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.3,
        "pad_token_id": 0,
        "attn_implementation": "sdpa",
    }
    config = getattr(transformers, f"{name}Config")
    sizes = {"vocab_size": 23, "initializer_range": 0.3} if name == "GPT2" else common
    torch.manual_seed(0)
    causal = {"Gemma3Text": "Gemma3ForCausalLM", "GPT2": "GPT2LMHeadModel"}.get(name, f"{name}ForCausalLM")
    network = getattr(transformers, causal)(config(**{**sizes, **changes})).eval()
    assert not exact.check(network, PROMPTS, COMPLETIONS, locate=False).exact
    for dtype in (torch.float32, torch.bfloat16):
        with exact.batch_invariant():
            found = exact.check(network.to(dtype), PROMPTS, COMPLETIONS)
        assert found.exact, found


def test_the_number_of_threads_does_not_matter():
    network, found = model(), []
    before = torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        try:
            with exact.batch_invariant(), torch.no_grad():
                found.append(exact.score(network, PROMPTS, COMPLETIONS)[0])
        finally:
            torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_a_forward_pass_for_training_gives_the_same_numbers_and_torchs_gradient():
    network = model()
    with exact.batch_invariant():
        cached = exact.score(network, PROMPTS, COMPLETIONS, cached=True)[0]
        logp, mask = exact.score(network, PROMPTS[1:3], COMPLETIONS[1:3])
        logp.sum().backward()
    assert mask.sum(-1).tolist() == [2, 30]
    assert torch.equal(logp, cached[1:3])
    found = [p.grad.clone() for p in network.parameters()]
    network.zero_grad()
    exact.score(network, PROMPTS[1:3], COMPLETIONS[1:3])[0].sum().backward()
    torch.testing.assert_close(found, [p.grad for p in network.parameters()], rtol=1e-3, atol=1e-4)


def test_score_is_a_plain_forward_pass():
    network = model()
    logp, mask = exact.score(network, PROMPTS[:3], COMPLETIONS[:3], temperature=0.5)
    for row in range(3):
        ids = torch.tensor([PROMPTS[row] + COMPLETIONS[row]])
        wanted = (network(ids).logits[0, :-1] / 0.5).log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        torch.testing.assert_close(logp[row][mask[row]], wanted[len(PROMPTS[row]) - 1 :], rtol=1e-4, atol=1e-5)
    assert not logp[~mask].any()


@pytest.mark.parametrize("both", [False, True], ids=["one side", "both sides"])
def test_what_differs_first_is_found(both):
    """Another weight in the sampler, in its second layer; or the same in both."""
    network, sampler = model(), model()
    for changed in (sampler, network) if both else (sampler,):
        with torch.no_grad():
            changed.model.layers[1].mlp.up_proj.weight[0] += 0.1
    sampler.train()
    with exact.batch_invariant():
        found = exact.check(network, PROMPTS, COMPLETIONS, sampler=sampler)
    assert found.exact == both
    assert found.first_difference == (None if both else "output of model.layers.1.mlp.up_proj")
    assert sampler.training and not network.training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in sampler.modules())


def test_reported_log_probs_are_compared_as_they_are():
    network = model()
    with exact.batch_invariant():
        logp, mask = exact.score(network, PROMPTS, COMPLETIONS)
        reported = [row[kept].tolist() for row, kept in zip(logp, mask, strict=True)]
        assert exact.check(network, PROMPTS, COMPLETIONS, reported).exact
        reported[2][3] += 0.25
        found = exact.check(network, PROMPTS, COMPLETIONS, reported)
    assert (found.differing, found.max) == (1, pytest.approx(0.25))
    assert found.metrics()["train_rollout_logprob_abs_diff"] == pytest.approx(0.25 / TOKENS)
    assert "log-probs themselves" in str(found)


@pytest.mark.parametrize(
    "change, error, message",
    [
        (lambda p, c, r: r.pop(), ValueError, "rollout_logp has 8 sequences, expected 9"),
        (lambda p, c, r: r[1].pop(), ValueError, r"rollout_logp\[1\] has 1 log-probs, expected 2"),
        (lambda p, c, r: p[4].clear(), ValueError, r"prompt_ids\[4\] is empty"),
        (lambda p, c, r: p.pop(), ValueError, "8 prompts came with 9 completions"),
        (lambda p, c, r: [x.clear() for x in c], ValueError, "completion_ids holds no token"),
        (
            lambda p, c, r: r[2].__setitem__(1, float("nan")),
            FloatingPointError,
            "rollout_logp: sequence 2, token 1 is nan",
        ),
    ],
)
def test_bad_input_is_named(change, error, message):
    prompts, completions = [list(row) for row in PROMPTS], [list(row) for row in COMPLETIONS]
    reported = [[-1.0] * len(completion) for completion in completions]
    change(prompts, completions, reported)
    with pytest.raises(error, match=message):
        exact.check(model(), prompts, completions, reported)


def test_every_replacement_on_a_cpu_has_a_test():
    """By name of the operator, against the table above and the tests of attention and experts."""
    covered = {"mm", "addmm", "mv", "bmm", "baddbmm", "_softmax", "_grouped_mm"}
    assert set(on_cpu()) <= covered | set(OPERATORS)


def test_sampling_through_the_decoder_agrees():
    """A batch that shrinks, repeated prompts, a KV cache; log-probs as the sampler reported them."""
    pytest.importorskip("accelerate")
    from offcorr.rollout import Sampling, decode

    for dtype, invariant in ((torch.float32, False), (torch.float32, True), (torch.bfloat16, True)):
        network = model().to(dtype)
        with ExitStack() as contexts:
            contexts.enter_context(exact.batch_invariant() if invariant else nullcontext())
            contexts.enter_context(exact.fp32_head(network))
            sampled = decode(
                network,
                PROMPTS,
                max_new_tokens=40,
                eos_token_ids=[2, 5],
                sampling=Sampling(temperature=0.8),
                generator=torch.Generator().manual_seed(0),
            )
            found = exact.check(network, PROMPTS, sampled.completion_ids, sampled.logp, temperature=0.8)
        assert len({len(ids) for ids in sampled.completion_ids}) > 2
        assert found.exact == invariant, found
