"""Tests of offcorr.rollout without TRL: the ring of weights, the precisions, the replica and the decoding loop."""

from __future__ import annotations

import math
import re

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import DynamicCache

from offcorr.rollout import OffPolicy, Sampling, decode, score
from offcorr.training import PRECISIONS, MissingVersion, Precision, Replica, SnapshotRing, changing_weights
from tests.rollout.rollout_models import EOS, fresh_model


def prompts_of(lengths, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(2, 17, (n,), generator=draw).tolist() for n in lengths]


def flat(rows):
    return torch.tensor([x for row in rows for x in row])


# ---- the ring


def weights_at(version):
    return {"w": torch.full((3,), float(version)), "b": torch.tensor([version + 0.1])}


@pytest.mark.parametrize("lag", [0, 1, 4])
def test_ring_holds_exactly_what_the_lag_reaches(lag):
    ring = SnapshotRing(lag)
    for version in range(12):
        ring.push(version, weights_at(version).items())
        assert ring.versions == list(range(max(0, version - lag), version + 1))
        assert len(ring) <= lag + 1
        for held in ring.versions:
            assert all(torch.equal(ring[held][n], w) for n, w in weights_at(held).items())


def test_ring_keeps_copies_not_views():
    weight = torch.ones(4)
    ring = SnapshotRing(2)
    ring.push(0, [("w", weight)])
    weight.zero_()  # as an optimizer step does
    assert torch.equal(ring[0]["w"], torch.ones(4))


def test_missing_version_names_the_versions_held():
    ring = SnapshotRing(2)
    for version in (5, 6, 7):
        ring.push(version, weights_at(version).items())
    with pytest.raises(MissingVersion, match=r"version 3 are not held; held: \[5, 6, 7\]"):
        ring[3]
    with pytest.raises(ValueError, match="version 4 pushed after version 7"):
        ring.push(4, weights_at(4).items())


def test_ring_state_round_trips_and_drops_what_a_shorter_lag_cannot_reach():
    ring = SnapshotRing(3)
    for version in range(6):
        ring.push(version, weights_at(version).items())
    for lag, versions in ((3, [2, 3, 4, 5]), (1, [4, 5])):
        other = SnapshotRing(lag)
        other.load_state_dict(ring.state_dict())
        assert other.versions == versions
        assert all(torch.equal(other[v]["w"], ring[v]["w"]) for v in versions)


@pytest.mark.parametrize(
    "setting",
    [
        *[{"lag": value} for value in (-1, 1.5, "16", True, None)],
        *[{"precision": value} for value in ("int7", 8, ["int8"])],
        *[{"temperature": value} for value in (0.0, "hot", True)],
        *[{"top_p": value} for value in (0.0, 1.1, "all")],
        *[{"top_k": value} for value in (-2, 1.5, "50")],
        *[{"seed": value} for value in (-1, 1.5, "0")],
    ],
    ids=str,
)
def test_a_setting_that_cannot_be_is_refused_by_name(setting):
    ((name, value),) = setting.items()
    with pytest.raises(ValueError, match=rf"{name} is {re.escape(repr(value))}, .*expected"):
        OffPolicy(**setting)
    assert OffPolicy(top_k=-1).top_k == -1  # off, as engines write it


# ---- the precisions


@pytest.mark.parametrize(("name", "largest"), [("int8", 127), ("int4", 7)])
def test_the_rows_of_integers_sit_on_their_own_grid(name, largest):
    weight = torch.randn(6, 50) * torch.logspace(-3, 3, 6)[:, None]
    weight[2] = 0
    quantised = PRECISIONS[name].quantise(weight)
    scale = weight.abs().amax(-1, keepdim=True) / largest
    steps = (quantised / scale)[[0, 1, 3, 4, 5]]
    assert torch.allclose(steps, steps.round(), atol=1e-3)
    assert torch.equal(quantised[2], weight[2])
    assert bool(((quantised - weight).abs() <= scale / 2 * 1.001).all())
    assert not torch.equal(quantised, weight)


@pytest.mark.parametrize(("name", "bits"), [("fp8_e4m3", 3), ("fp8_e5m2", 2)])
def test_fp8_keeps_the_row_maximum_and_its_mantissa_bits(name, bits):
    weight = torch.randn(6, 50) * torch.logspace(-3, 3, 6)[:, None]
    weight[2] = 0
    quantised = PRECISIONS[name].quantise(weight)
    assert torch.allclose(quantised.abs().amax(-1), weight.abs().amax(-1))
    assert torch.isfinite(quantised).all()
    large = weight.abs() > weight.abs().amax(-1, keepdim=True) / 16  # no subnormals there
    error = ((quantised - weight) / weight)[large].abs()
    half_a_step = 2.0 ** -(bits + 1)
    assert half_a_step / 2 < error.max() <= half_a_step * 1.001


def test_unknown_precision_and_a_torch_without_the_dtype(monkeypatch):
    with pytest.raises(ValueError, match="precision is 'int3', did you mean 'int4'.*expected one of fp32, bf16"):
        OffPolicy(precision="int3")
    monkeypatch.delattr(torch, "float8_e5m2")
    with pytest.raises(ValueError, match="needs torch.float8_e5m2"):
        OffPolicy(precision="fp8_e5m2")


# ---- the replica


def test_replica_is_the_model_and_never_writes_to_it():
    model = fresh_model()
    before = {n: p.clone() for n, p in model.named_parameters()}
    replica = Replica(model, "cpu")
    ids = torch.randint(2, 17, (3, 9))
    for name in ("int8", "bf16", "fp32"):
        module = replica.load(dict(changing_weights(model)), Precision.named(name))
    with torch.no_grad():
        assert torch.equal(module(input_ids=ids).logits, model(input_ids=ids).logits)
    assert module.lm_head.weight is module.model.embed_tokens.weight  # still tied
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert all(p.requires_grad for p in model.parameters())


def test_replica_uses_its_own_weights_where_the_model_is_patched_and_hooked():
    model = fresh_model()
    original = model.forward
    model.forward = lambda *args, **kwargs: original(*args, **kwargs)  # as trainers patch the model
    model.model.embed_tokens.register_forward_hook(lambda *_: pytest.fail("the model's own hook"))
    other = fresh_model(seed=1)
    module = Replica(model, "cpu").load(dict(changing_weights(other)))
    ids = torch.randint(2, 17, (3, 9))
    with torch.no_grad():
        assert torch.equal(module(input_ids=ids).logits, other(input_ids=ids).logits)


def test_int8_leaves_embeddings_head_and_norms_alone():
    model = fresh_model(tie_word_embeddings=False)
    weights = dict(changing_weights(model))
    module = Replica(model, "cpu").load(weights, Precision.named("int8"))
    moved = {n for n, p in module.named_parameters() if not torch.equal(p, weights[n])}
    assert moved == {n for n in weights if n.endswith("_proj.weight")}


def test_a_lora_snapshot_is_the_adapter_and_its_base_is_shared():
    model = get_peft_model(fresh_model(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    weights = dict(changing_weights(model))
    assert weights and all("lora_" in name for name in weights)
    replica = Replica(model, "cpu")
    base = {n: p for n, p in model.named_parameters() if n not in weights}
    shared = dict(replica.load(weights, Precision.named("fp32")).named_parameters())
    assert all(shared[n].data_ptr() == p.data_ptr() for n, p in base.items())
    quantised = dict(replica.load(weights, Precision.named("int8")).named_parameters())
    assert all(torch.equal(quantised[n], w) for n, w in weights.items())
    moved = {n for n, p in base.items() if not torch.equal(quantised[n], p)}
    assert moved and all("_proj." in n for n in moved)


def test_nothing_to_quantise_is_said():
    class Bare(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(4, 4)

    model = Bare()
    with pytest.raises(ValueError, match="no nn.Linear weight to quantise"):
        Replica(model, "cpu").load(dict(changing_weights(model)), Precision.named("int8"))


# ---- the distribution sampled from


def by_hand(logits, temperature, top_p, top_k):
    """The same distribution by float64 loops: sort, keep, renormalise."""
    p = [math.exp(x / temperature) for x in logits]
    order = sorted(range(len(p)), key=lambda i: -p[i])
    order = order[: top_k or len(p)]
    total, kept, mass = sum(p[i] for i in order), [], 0.0
    for i in order:
        if mass / total >= top_p:
            break
        kept.append(i)
        mass += p[i]
    return [math.log(p[i] / mass) if i in kept else -math.inf for i in range(len(p))]


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
@pytest.mark.parametrize("top_p", [0.3, 0.9, 1.0])
@pytest.mark.parametrize("top_k", [0, 1, 5])
def test_processed_logp_is_renormalised_over_what_is_kept(temperature, top_p, top_k):
    logits = torch.randn(4, 17, generator=torch.Generator().manual_seed(1)) * 2
    got = Sampling(temperature, top_p, top_k).logp(logits)
    wanted = [by_hand(row, temperature, top_p, top_k) for row in logits.double().tolist()]
    torch.testing.assert_close(got.double(), torch.tensor(wanted).double(), atol=1e-5, rtol=0)
    torch.testing.assert_close(got.exp().sum(-1), torch.ones(4))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.2}, "top_p is 1.2"),
    ],
)
def test_sampling_bounds_are_checked_at_the_door(options, message):
    with pytest.raises(ValueError, match=message):
        OffPolicy(**options)


# ---- the decode


def test_tokens_are_drawn_from_the_distribution_that_is_reported():
    model = fresh_model()
    prompt, copies = prompts_of([6])[0], 20_000
    sampling = Sampling(temperature=1.3, top_p=0.9)
    out = decode(
        model,
        [prompt] * copies,
        max_new_tokens=1,
        eos_token_ids=[EOS],
        sampling=sampling,
        generator=torch.Generator().manual_seed(0),
    )
    counts = torch.bincount(flat(out.completion_ids), minlength=17)
    with torch.no_grad():
        p = sampling.logp(model(input_ids=torch.tensor([prompt])).logits[0, -1]).exp()
    assert (p == 0).any() and counts[p == 0].sum() == 0
    spread = (copies * p * (1 - p)).sqrt().clamp_min(1.0)
    assert ((counts - copies * p).abs() < 4.5 * spread).all()
    for token, logp in zip(flat(out.completion_ids), flat(out.logp), strict=True):
        assert abs(float(p[token].log() - logp)) < 1e-5


@torch.no_grad()
def step_by_step(model, prompts, completions, sampling):
    """The same decode with given tokens: transformers' growing cache, left padding, and every row
    decoded to the end."""
    cache, width = DynamicCache(config=model.config), max(map(len, prompts))
    feed = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    real = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    positions, logps = (real.cumsum(-1) - 1).clamp_min(0), []
    for token in torch.tensor(completions).T[..., None]:
        logits = model(input_ids=feed, attention_mask=real, position_ids=positions, past_key_values=cache).logits[:, -1]
        logps.append(sampling.logp(logits).gather(-1, token)[:, 0])
        feed, positions = token, positions[:, -1:] + 1
        real = torch.cat([real, torch.ones_like(token)], dim=-1)
    return torch.stack(logps, dim=-1).tolist()


# A full forward sums in another order, which in 16 bits rounds differently at every layer.
FULL_FORWARD_TOLERANCE = {
    **dict.fromkeys(["fp32", "int8", "int4", "fp8_e4m3", "fp8_e5m2"], 1e-5),
    "bf16": 0.08,
    "fp16": 0.015,
}


@pytest.mark.parametrize("name", PRECISIONS)
def test_recorded_logp_is_that_of_the_same_decode_and_of_a_full_forward(name):
    model = fresh_model()
    sampler = Replica(model, "cpu").load(dict(changing_weights(model)), Precision.named(name))
    prompts = prompts_of([4, 11, 7, 11, 2, 9])
    sampling = Sampling(temperature=0.8)
    out = decode(sampler, prompts, max_new_tokens=20, eos_token_ids=[-1], sampling=sampling)
    forced = step_by_step(sampler, prompts, out.completion_ids, sampling)
    assert (flat(out.logp) - flat(forced)).abs().max() < 1e-5
    full = score(sampler, prompts, out.completion_ids, temperature=0.8)
    assert (flat(out.logp) - flat(full)).abs().max() < FULL_FORWARD_TOLERANCE[name]
    other = score(model, prompts, out.completion_ids, temperature=0.8)
    if name != "fp32":  # at another precision the same tokens have another log-prob
        assert (flat(out.logp) - flat(other)).abs().max() > 3e-3


def test_mismatch_grows_with_the_coarseness_of_the_sampler():
    model = fresh_model()
    replica = Replica(model, "cpu")
    prompts = prompts_of([8] * 64)
    gap = {}
    for name in PRECISIONS:
        sampler = replica.load(dict(changing_weights(model)), Precision.named(name))
        draw = torch.Generator().manual_seed(0)
        out = decode(sampler, prompts, max_new_tokens=16, eos_token_ids=[EOS], generator=draw)
        gap[name] = (flat(out.logp) - flat(score(model, prompts, out.completion_ids))).abs().mean()
    assert gap["fp32"] < 1e-6
    assert 1e-4 < gap["fp16"] < gap["int8"] < gap["fp8_e4m3"] < gap["fp8_e5m2"] < 1
    assert gap["fp16"] < gap["bf16"] < gap["fp8_e4m3"] and gap["fp8_e4m3"] < gap["int4"] < 1


@pytest.mark.parametrize("padding", [0, 9])
def test_padding_changes_no_logp(padding):
    model = fresh_model()
    short = prompts_of([3] * 5)
    longer = prompts_of([3 + padding], seed=1)
    out = decode(model, short + longer, max_new_tokens=12, eos_token_ids=[EOS])
    for prompt, ids, logp in zip(short, out.completion_ids, out.logp, strict=False):
        alone = score(model, [prompt], [ids])[0]
        assert max(abs(a - b) for a, b in zip(alone, logp, strict=True)) < 1e-5


def test_greedy_decode_is_transformers_greedy_generate_and_stops_at_eos():
    model = fresh_model(seed=5)
    prompts = prompts_of([2, 5, 9, 9, 3, 7, 4, 6, 8, 3, 12, 2, 2, 5])
    prompts += prompts[:5]  # equal prompts are prefilled once
    out = decode(model, prompts, max_new_tokens=24, eos_token_ids=[EOS, 9], sampling=Sampling(top_k=1))
    lengths = {len(ids) for ids in out.completion_ids}
    assert len(lengths) > 2  # some leave the batch early
    for prompt, ids, logp in zip(prompts, out.completion_ids, out.logp, strict=True):
        wanted = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=24, eos_token_id=[EOS, 9])[
            0, len(prompt) :
        ].tolist()
        assert ids == wanted
        assert logp == [0.0] * len(ids)


def test_same_generator_state_same_samples():
    model, prompts = fresh_model(), prompts_of([4, 6])

    def sample(seed):
        draw = torch.Generator().manual_seed(seed)
        return decode(model, prompts, max_new_tokens=16, eos_token_ids=[EOS], generator=draw)

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


@pytest.mark.parametrize("every", [1, 2])
def test_decode_of_a_model_in_training_with_gradient_checkpointing(every):
    model, prompts = fresh_model(), prompts_of([4, 11, 7])
    model.train()
    model.gradient_checkpointing_enable()
    model.model.layers[0].gradient_checkpointing = every == 1  # as with checkpoints of every second layer
    model.model.norm.eval()  # a frozen part
    before = [(module.training, getattr(module, "gradient_checkpointing", None)) for module in model.modules()]
    out = decode(model, prompts, max_new_tokens=12, eos_token_ids=[-1])
    after = [(module.training, getattr(module, "gradient_checkpointing", None)) for module in model.modules()]
    assert after == before and (True, True) in before and (False, None) in before
    full = score(model.eval(), prompts, out.completion_ids)
    assert (flat(out.logp) - flat(full)).abs().max() < 1e-5


def test_decode_refuses_a_model_that_ignores_the_cache():
    model = fresh_model()
    forward = model.forward

    def without_cache(**kwargs):
        return forward(**{**kwargs, "past_key_values": None, "use_cache": False})

    before = [module.training for module in model.train().modules()]
    model.forward = without_cache
    with pytest.raises(RuntimeError, match="holds 0 tokens after 3: the model ignored past_key_values"):
        decode(model, [[3, 4, 5]], max_new_tokens=4, eos_token_ids=[EOS])
    assert [module.training for module in model.modules()] == before
    model.model.gradient_checkpointing = True
    with pytest.raises(RuntimeError, match="holds 0 tokens after 3: .* Gradient checkpointing is on, .* without it"):
        decode(model, [[3, 4, 5]], max_new_tokens=4, eos_token_ids=[EOS])


def test_decode_refuses_what_it_cannot_do():
    model = fresh_model()
    with pytest.raises(ValueError, match=r"prompt_ids\[1\] is empty"):
        decode(model, [[3], []], max_new_tokens=2, eos_token_ids=[EOS])
    with pytest.raises(ValueError, match="max_new_tokens is 0"):
        decode(model, [[3]], max_new_tokens=0, eos_token_ids=[EOS])
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.inf)
    with pytest.raises(FloatingPointError, match="not finite"):
        decode(model, [[3]], max_new_tokens=2, eos_token_ids=[EOS])
