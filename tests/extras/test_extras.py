"""Tests of ALP, CHORD and distillation advantages, on a small Qwen3."""

import itertools

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

import offcorr
from offcorr import Batch
from offcorr.extras import CHORD, LayerPerturbation, distillation_advantages, scheduled_mu
from tests.tiny import qwen3


@pytest.fixture
def model():
    return qwen3(vocab_size=11, num_hidden_layers=3).train()


@pytest.fixture
def ids():
    return torch.randint(0, 11, (2, 7), generator=torch.Generator().manual_seed(1))


def token_logp(policy, ids, **kwargs):
    logits = policy(input_ids=ids, use_cache=False, **kwargs).logits[:, :-1]
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


# -- ALP -----------------------------------------------------------------------------------------------------


def test_noise_is_in_the_numerator_alone(model, ids):
    """Without a seed the wrapped model equals the model bit for bit; a seed gives one perturbed policy."""
    plain = token_logp(model, ids)
    policy = LayerPerturbation(model, std=0.1)
    assert torch.equal(token_logp(policy, ids), plain)
    once, again, other = (token_logp(policy, ids, noise_seed=seed) for seed in (5, 5, 6))
    assert torch.equal(once, again)
    assert (once - plain).abs().max() > 1e-3
    assert not torch.equal(once, other)
    batch = Batch(logp=once, old_logp=token_logp(policy, ids).detach(), advantages=torch.ones(2), mask=once < 1)
    assert offcorr.get("ppo")(batch).metrics.compute()["offcorr/staleness/abs_mean"] > 1e-3


def test_noise_is_added_to_the_input_of_each_layer(model, ids):
    """Every layer's input is the output of the layer before plus std times unit noise."""
    policy = LayerPerturbation(model, std=0.2)
    clean, noisy, given = [], [], []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda _, args: noisy.append(args[0].detach()))  # after the perturbation
        layer.register_forward_hook(lambda _, args, out: given.append(out.detach()))
    policy(input_ids=ids, noise_seed=3)
    clean = [model.model.embed_tokens(ids).detach(), *given[:-1]]
    for place, (before, after) in enumerate(zip(clean, noisy, strict=True)):
        torch.testing.assert_close(after - before, 0.2 * policy.noise(place, 3, before), atol=1e-5, rtol=1e-5)
    different = [policy.noise(place, seed, clean[0]) for place, seed in itertools.product(range(3), (3, 4))]
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(different, 2))


def test_starts_at_the_papers_std_and_learns_it(model, ids):
    policy = LayerPerturbation(model)
    torch.testing.assert_close(policy.log_std.exp(), torch.full((3,), 1e-6))
    with torch.no_grad():
        policy.log_std.fill_(-2.0)
    parameters = dict(policy.named_parameters())
    assert "log_std" in parameters and len(parameters) == 1 + len(dict(model.named_parameters()))

    def loss():
        return -token_logp(policy, ids, noise_seed=2).mean()

    loss().backward()
    step = 1e-2
    for place in range(3):
        moved = []
        for sign in (1, -1):
            with torch.no_grad():
                policy.log_std[place] += sign * step
                moved.append(float(loss()))
                policy.log_std[place] -= sign * step
        assert float(policy.log_std.grad[place]) == pytest.approx(
            (moved[0] - moved[1]) / (2 * step), rel=0.03, abs=1e-5
        )


@pytest.mark.parametrize("by", ["transformers", "wrapper", "reentrant wrapper"])
def test_gradient_checkpointing_replays_the_noise(model, ids, by):
    """Gradients are those without checkpointing, although other seeds and other random draws come in between.

    transformers 5 recomputes a layer's forward without its hooks; the wrapper of FSDP and transformers 4 recompute the
    hooks too.
    """
    policy = LayerPerturbation(model, std=0.3)
    ran = []
    model.model.layers[1].register_forward_pre_hook(lambda *_: ran.append(1))

    def gradients():
        policy.zero_grad()
        state = torch.get_rng_state()
        loss = token_logp(policy, ids, noise_seed=7).sum()
        assert torch.equal(torch.get_rng_state(), state)
        with torch.no_grad():
            token_logp(policy, ids, noise_seed=8)  # another forward in between
        torch.rand(3)
        loss.backward()
        named = {name.replace("_checkpoint_wrapped_module.", ""): p for name, p in policy.named_parameters()}
        return loss.item(), {name: p.grad.clone() for name, p in named.items()}

    wanted_loss, wanted = gradients()
    assert len(ran) == 2
    if by == "transformers":
        model.gradient_checkpointing_enable()
    else:
        how = CheckpointImpl.REENTRANT if by == "reentrant wrapper" else CheckpointImpl.NO_REENTRANT
        for index, layer in enumerate(model.model.layers):
            model.model.layers[index] = checkpoint_wrapper(layer, checkpoint_impl=how)
    loss, found = gradients()
    assert by == "transformers" or len(ran) == 2 + 3  # the layer's hooks ran again in the backward
    assert loss == pytest.approx(wanted_loss, rel=1e-6)
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, msg=lambda m, name=name: f"{name}: {m}")


def test_refuses_what_it_could_not_perturb(model, ids):
    with pytest.raises(ValueError, match="std is 0"):
        LayerPerturbation(model, std=0.0)
    with pytest.raises(ValueError, match="expected indices below 3"):
        LayerPerturbation(model, layers=[0, 3])
    LayerPerturbation(model, layers=[0])
    with pytest.raises(ValueError, match="layer 0 is perturbed already"):
        LayerPerturbation(model)
    with pytest.raises(ValueError, match="no decoder"):
        LayerPerturbation(torch.nn.Linear(2, 2))

    model = type(model)(model.config)

    class IgnoresTheSeed(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def get_decoder(self):
            return self.inner.get_decoder()

        def forward(self, input_ids, noise_seed=None):
            return self.inner(input_ids=input_ids)

    with pytest.raises(RuntimeError, match="reached 0 of 3 layers: IgnoresTheSeed"):
        LayerPerturbation(IgnoresTheSeed(model))(ids, noise_seed=1)


# -- CHORD ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phi", [True, False])
@pytest.mark.parametrize("mu", [0.0, 0.3, 1.0])
def test_chord_against_its_formula(model, ids, mu, phi):
    """The model's gradient is (1 - mu) that of the correction plus mu that of the weighted cross-entropy."""
    loss_fn, mask = offcorr.get("dapo"), torch.ones(2, 6, dtype=torch.bool)
    advantages = torch.tensor([1.0, -0.5])
    expert = ids.flip(0).roll(2, 1)
    expert_mask = torch.tensor([[1, 1, 1, 0, 0, 0], [0, 1, 1, 1, 1, 1]]).bool()

    def gradients(loss):
        return torch.autograd.grad(loss, list(model.parameters()))

    sampled_logp, expert_logp = token_logp(model, ids), token_logp(model, expert)
    poisoned = torch.where(expert_mask, expert_logp, torch.nan)
    out = loss_fn(Batch(logp=sampled_logp, advantages=advantages, mask=mask))
    mixed = CHORD(mu=mu, phi=phi)(out, poisoned, expert_mask, denominator=16.0)
    found = gradients(mixed.loss)

    policy = gradients(loss_fn(Batch(logp=token_logp(model, ids), advantages=advantages, mask=mask)).loss)
    expert_logp = token_logp(model, expert)
    p = expert_logp.detach().exp()
    terms = (p * (1 - p) if phi else 1.0) * expert_logp
    sft_loss = -(terms * expert_mask).sum() / 16
    torch.testing.assert_close(mixed.loss, (1 - mu) * out.loss + mu * sft_loss)
    supervised = gradients(sft_loss)
    for got, rl, sft in zip(found, policy, supervised, strict=True):
        torch.testing.assert_close(got, (1 - mu) * rl + mu * sft)
    expected = -mu * (p * (1 - p) if phi else torch.ones_like(p)) * expert_mask / 16
    torch.testing.assert_close(mixed.sft_coefficient, expected)
    torch.testing.assert_close(mixed.coefficient, (1 - mu) * out.coefficient)


def test_chord_does_not_depend_on_the_split():
    """Micro-batches with the global denominators add up to the full batch."""
    generator = torch.Generator().manual_seed(0)
    logp = torch.rand(4, 5, generator=generator).log()
    expert = torch.rand(4, 5, generator=generator).log()
    mask = torch.rand(4, 5, generator=generator) < 0.7
    chord, loss_fn = CHORD(0.4), offcorr.get("reinforce")

    def mixed(rows):
        batch = Batch(logp=logp[rows], advantages=torch.ones(len(logp[rows])), mask=mask[rows])
        return chord(loss_fn(batch, denominator=mask.sum()), expert[rows], mask[rows], denominator=mask.sum())

    whole, parts = mixed(slice(0, 4)), [mixed(slice(0, 1)), mixed(slice(1, 4))]
    torch.testing.assert_close(sum(part.loss for part in parts), whole.loss)
    torch.testing.assert_close(torch.cat([part.sft_coefficient for part in parts]), whole.sft_coefficient)


def test_chord_refuses():
    out = offcorr.get("ppo")(Batch(logp=torch.zeros(1, 2), advantages=torch.ones(1), mask=torch.ones(1, 2).bool()))
    with pytest.raises(ValueError, match="mu is 1.5"):
        CHORD(mu=1.5)
    with pytest.raises(ValueError, match=r"sft_mask has shape \(3,\)"):
        CHORD()(out, torch.zeros(1, 3), torch.ones(3).bool())
    with pytest.raises(ValueError, match="denominator"):
        CHORD()(out, torch.zeros(1, 3), torch.ones(1, 3).bool(), denominator=0)
    assert scheduled_mu(0, warmup=0, decay=10, peak=0.5, valley=0.1) == 0.5


# -- distillation --------------------------------------------------------------------------------------------


def enumerated(model, ids):
    """Log-probs of every next token in every state, [states, V], with a graph."""
    return model(input_ids=ids, use_cache=False).logits.log_softmax(-1).flatten(0, 1)


@pytest.mark.parametrize("behaviour", ["on-policy", "off-policy"])
def test_distillation_is_the_gradient_of_the_reverse_kl(model, ids, behaviour):
    """The expectation over the vocabulary is exact: the mean policy gradient is grad KL(pi || nu) at fixed states.

    Off-policy, the tokens come from a third distribution, and the token ratio corrects for it.
    """
    model = model.double()
    generator = torch.Generator().manual_seed(4)
    logp = enumerated(model, ids)
    teacher, sampler = (torch.randn(logp.shape, generator=generator).double().log_softmax(-1) for _ in range(2))
    exact = torch.autograd.grad((logp.exp() * (logp - teacher)).sum(), list(model.parameters()))

    logp = enumerated(model, ids)
    sampled_from = logp.detach() if behaviour == "on-policy" else sampler
    # One single-token sequence per state and token; the probability of sampling it multiplies its advantage.
    advantages = distillation_advantages(logp, teacher) * sampled_from.exp()
    assert not advantages.requires_grad
    batch = Batch(
        logp=logp.reshape(-1, 1),
        old_logp=sampled_from.reshape(-1, 1),
        advantages=advantages.reshape(-1, 1),
        mask=torch.ones(logp.numel(), 1, dtype=torch.bool),
    )
    loss = offcorr.get("token_is")(batch, denominator=1).loss
    for found, wanted in zip(torch.autograd.grad(loss, list(model.parameters())), exact, strict=True):
        torch.testing.assert_close(found, wanted)


def test_distillation_reads_nothing_under_the_mask():
    logp, teacher = torch.tensor([[-1.0, torch.nan]]), torch.tensor([[-0.5, torch.inf]])
    mask = torch.tensor([[True, False]])
    torch.testing.assert_close(distillation_advantages(logp, teacher, mask), torch.tensor([[0.5, 0.0]]))
    with pytest.raises(ValueError, match=r"teacher_logp has shape \(1,\)"):
        distillation_advantages(logp, torch.zeros(1))
