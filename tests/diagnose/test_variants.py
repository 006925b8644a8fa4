"""``rescore`` and ``informed``: what the tokens were drawn from, rounded caches, and adapters."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

import torch

from offcorr.diagnose import Record, adapters, hypotheses, variants
from offcorr.diagnose.diagnosis import diagnose
from offcorr.diagnose.informed import informed
from offcorr.diagnose.rescore import described, rescore
from offcorr.lab.mismatch.decode import decode, score
from tests.rollout.rollout_models import fresh_model

LENGTH = 48
PROMPT = 8


@pytest.fixture(scope="module")
def model():
    return fresh_model(0).eval()


def dump(trainer, sampler=None, *, seed=0, raw=False, sequences=24, temperature=1.0, **how):
    """Records of completions that ``sampler`` drew; ``raw``: it logs log-probs from before ``how``'s transforms.

    ``temperature`` is the trainer's.
    """
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(2, 17, PROMPT).tolist() for _ in range(sequences)]
    drawn = decode(
        [sampler or trainer],
        prompts,
        max_new_tokens=LENGTH,
        generator=torch.Generator().manual_seed(seed),
        **how,
    )
    old, entropy = score(trainer, prompts, drawn.completion_ids, temperature=temperature)
    return [
        Record.of(
            {
                "prompt_ids": prompt,
                "completion_ids": ids,
                "rollout_logp": logp,
                "old_logp": old[row].double().numpy(),
                "entropy": entropy[row].double().numpy(),
            }
        )
        for row, (prompt, ids, logp) in enumerate(
            zip(prompts, drawn.completion_ids, drawn.raw if raw else drawn.processed, strict=True)
        )
    ]


def heat(temperature):
    return lambda logits, seen: logits / temperature


def top_k(kept):
    return lambda logits, seen: logits.masked_fill(logits < logits.topk(kept).values[:, -1:], -torch.inf)


def presence(size):
    def transform(logits, seen):
        penalty = torch.zeros_like(logits)
        for row, ids in enumerate(seen):
            penalty[row, sorted(set(ids[PROMPT:]))] = size
        return logits - penalty

    return transform


def repetition(size):
    def transform(logits, seen):
        changed = torch.where(logits > 0, logits / size, logits * size)
        told = torch.zeros_like(logits, dtype=torch.bool)
        for row, ids in enumerate(seen):
            told[row, sorted(set(ids))] = True
        return torch.where(told, changed, logits)

    return transform


SILENT = {
    "temperature 0.8": ("temperature_silent", heat(0.8)),
    "temperature 1.2": ("temperature_silent", heat(1.2)),
    "top_k 6": ("top_p_silent", top_k(6)),
    "presence_penalty 0.8": ("penalty_silent", presence(0.8)),
    "repetition_penalty 1.3": ("penalty_silent", repetition(1.3)),
}


@pytest.mark.parametrize("words", SILENT)
def test_the_draws_show_a_transform_that_neither_side_logged(model, words):
    cause, transform = SILENT[words]
    records = dump(model, transforms=[transform], raw=True)
    rescored = rescore(records, model)
    assert rescored.gap < 1e-5  # the log-probs agree
    assert max(rescored.hypotheses, key=lambda one: one.drawn).words == words
    assert informed(diagnose(records), rescored).verdict == cause


@pytest.mark.parametrize("words", SILENT)
def test_a_transform_that_the_sampler_logged_is_not_called_silent(model, words):
    _, transform = SILENT[words]
    records = dump(model, transforms=[transform])
    rescored = rescore(records, model)
    best = rescored.hypotheses[0]
    assert (best.words, best.share > 0.99) == (words, True)
    assert best.drawn == pytest.approx(rescored.drawn_as_logged, abs=0.002 * LENGTH * len(records))
    found = informed(diagnose(records), rescored)
    assert found.verdict == best.cause and not [one for one in found.causes if one.cause.endswith("_silent")]


@pytest.mark.parametrize("seed", range(4))
def test_older_weights_that_are_logged_are_not_called_silent(model, seed):
    """The sampler's weights are further away than any transform, and its log-probs are those of its draws."""
    older = fresh_model(0).eval()
    with torch.no_grad():
        for parameter in older.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)))
    records = dump(model, older, seed=seed, sequences=8)
    rescored = rescore(records, model)
    assert rescored.gap > 0.05 and rescored.drawn_as_logged > 0
    assert not [one for one in informed(diagnose(records), rescored).causes if one.cause.endswith("_silent")]


def test_a_dump_without_entropies_is_not_asked_for_them(model):
    records = [dataclasses.replace(one, entropy=None) for one in dump(model, transforms=[presence(0.8)], raw=True)]
    report = diagnose(records)
    found = informed(report, rescore(records, model))
    assert report.verdict == "clean" and any("log entropy" in said for said in report.cannot_tell)
    assert found.verdict == "penalty_silent" and not any("log entropy" in said for said in found.cannot_tell)


def test_a_silent_cause_that_the_draws_do_not_bear_out_is_taken_back(model):
    """Wrong entropies make the tokens look too surprising; a model shows that they were drawn as they were logged."""
    records = [dataclasses.replace(one, entropy=0.7 * one.entropy) for one in dump(model)]
    report = diagnose(records)
    assert report.verdict.endswith("_silent")
    found = informed(report, rescore(records, model))
    assert (found.verdict, list(found.causes)) == ("clean", [])


def test_older_weights_whose_versions_are_wrong(model):
    """Equal versions speak for an adapter that never arrived; the model has none."""
    older = fresh_model(0).eval()
    with torch.no_grad():
        for parameter in older.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    records = [dataclasses.replace(one, rollout_version=3, trainer_version=3) for one in dump(model, older)]
    report = diagnose(records)
    assert report.verdict == "adapter_not_synced"
    found = informed(report, rescore(records, model))
    assert found.verdict == "stale_weights" and "the model has no adapter apart" in found.causes[0].evidence
    assert "so this is no lag on purpose" in found.causes[0].evidence
    found = informed(report, rescore(records, model, checkpoints=[("older", older)]))
    assert found.verdict == "stale_weights" and "'the weights of older'" in found.causes[0].evidence
    assert "so this is no lag on purpose" in found.causes[0].evidence


@pytest.mark.parametrize(("size", "verdict"), [(0.02, "stale_weights"), (0.001, "precision")])
def test_a_model_that_is_given_is_not_asked_for(model, size, verdict):
    other = fresh_model(0).eval()
    with torch.no_grad():
        for parameter in other.model.layers.parameters():
            parameter.add_(size * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)))
    records = dump(model, other)
    report = diagnose(records)
    assert report.verdict == verdict and any("give --model" in said for said in report.cannot_tell)
    found = informed(report, rescore(records, model))
    assert found.verdict == verdict and not any("give --model" in said for said in found.cannot_tell)
    assert any(f"whether the cause is {verdict} or" in said for said in found.cannot_tell)


@pytest.mark.parametrize("temperature", [0.83, 1.0, 1.4])
def test_the_trainers_temperature_is_found(model, temperature):
    """Beside a gap of the sampler's own."""
    records = dump(model, fresh_model(1).eval(), sequences=6, temperature=temperature)
    rescored = rescore(records, model)
    assert (rescored.temperature, rescored.trainer < 1e-5) == (temperature, True)
    assert rescore(records, model, temperature=1.1).temperature == 1.1


def test_the_trainers_temperature_is_found_beside_dropout(model):
    """The trainer's log-probs are noisy; the model agrees with the sampler at the trainer's temperature."""
    noise = np.random.default_rng(0)
    records = [
        dataclasses.replace(one, old_logp=one.old_logp + 0.15 * noise.standard_normal(len(one)))
        for one in dump(model, transforms=[heat(0.8)], temperature=0.8)
    ]
    rescored = rescore(records, model)
    assert abs(rescored.temperature - 0.8) < 0.03 and not rescored.other_model
    assert informed(diagnose(records), rescored).verdict != "temperature"


def test_no_temperature_is_said_for_another_model(model):
    rescored = rescore(dump(fresh_model(1).eval(), sequences=3), model)
    assert rescored.other_model and not any("at a temperature of" in said for said in described(rescored))


def test_penalties_by_hand():
    """Every token's logits changed one by one, in pieces of a completion, against the sums over seen tokens alone."""
    generator = torch.Generator().manual_seed(0)
    raw = torch.randn(7, 12, generator=generator) * 2
    prompt, completion = np.array([1, 4, 4]), np.array([2, 4, 2, 9, 9, 2, 0])
    first = hypotheses.transformed(raw[:3], torch.from_numpy(completion[:3]), 0.7, prompt, completion[:0])
    rest = hypotheses.transformed(raw[3:], torch.from_numpy(completion[3:]), 0.7, prompt, completion[:3])
    for size, kind in [(1.2, "repetition"), (0.5, "presence"), (0.5, "frequency")]:
        name = ("repetition_penalty", f"{kind}_penalty {size:g}")
        wanted = []
        for t, token in enumerate(completion):
            logits = raw[t].clone().double()
            for id in range(12):
                count = int((completion[:t] == id).sum())
                if kind == "repetition" and (count or id in prompt):
                    logits[id] = logits[id] / size if logits[id] > 0 else logits[id] * size
                if kind == "presence":
                    logits[id] -= size * (count > 0)
                if kind == "frequency":
                    logits[id] -= size * count
            wanted.append(float((logits / 0.7).log_softmax(-1)[int(token)]))
        np.testing.assert_allclose(np.r_[first[name], rest[name]], wanted, rtol=1e-6, err_msg=kind)


def cut(values, digits):
    """Without the last digits of the mantissa."""
    return (values.float().view(torch.int32) & -(1 << (23 - digits))).view(torch.float32)


def test_cutting_digits_off():
    """As integer arithmetic cuts them, for numbers that are no subnormal ones; never away from zero."""
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 30
    for storage, digits in (("float8_e4m3fn", 3), ("float8_e5m2", 2)):
        rounded = variants._cut(values, storage)
        normal = values.abs() > 0.02
        assert torch.equal(rounded[normal], cut(values, digits)[normal])
        assert (rounded.abs() <= values.abs()).all()


@pytest.mark.parametrize(
    "words, rounded",
    [
        ("fp8_e4m3", lambda x: x.to(torch.float8_e4m3fn).to(x.dtype)),
        ("fp8_e5m2", lambda x: x.to(torch.float8_e5m2).to(x.dtype)),
        ("fp8_e4m3 by cutting digits off", lambda x: cut(x, 3)),
    ],
)
def test_a_rounded_cache(model, words, rounded):
    records = dump(model, stored=rounded)
    rescored = rescore(records, model)
    best = rescored.hypotheses[0]
    assert best.cause == "kv_cache" and f"keys and values in {words}" in best.words and best.share > 0.6, best
    assert informed(diagnose(records), rescored).verdict == "kv_cache"


def test_a_cache_that_is_not_rounded_changes_nothing(model, monkeypatch):
    """The prompt is read first, and its keys and values are rounded afterwards; without rounding, all is as before."""
    from functools import partial

    from offcorr.diagnose import rescore as module
    from offcorr.diagnose.variants import _rounded_cache

    caches = {f"exact {exact}": partial(_rounded_cache, lambda x: x, exact) for exact in (True, False)}
    monkeypatch.setattr(module, "rounded_caches", lambda: caches)
    rescored = rescore(dump(model, fresh_model(1).eval(), sequences=3), model)
    for one in rescored.hypotheses:
        if one.cause == "kv_cache":
            assert one.gap == pytest.approx(rescored.gap, abs=1e-5)


@pytest.mark.parametrize("wrapped", [True, False])
def test_an_adapter_that_is_not_synced(wrapped):
    peft = pytest.importorskip("peft")
    base, trained = fresh_model(0).eval(), fresh_model(0).eval()
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    if wrapped:
        trained = peft.get_peft_model(trained, config).eval()
    else:
        trained.add_adapter(config)
        trained.eval()
    records = dump(trained, base, sequences=6)
    ids = torch.arange(2, 12)[None]
    before = trained(input_ids=ids).logits
    rescored = rescore(records, trained)
    assert rescored.gap > 0.05 and rescored.trainer < 1e-5
    assert rescored.hypotheses[0].words == "the weights without the adapter" and rescored.hypotheses[0].share > 0.99
    assert informed(diagnose(records), rescored).verdict == "adapter_not_synced"
    assert torch.equal(trained(input_ids=ids).logits, before)  # the adapter is on again


def with_adapter(peft, seed, wrapped):
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    made = fresh_model(0)
    torch.manual_seed(seed)
    if wrapped:
        return peft.get_peft_model(made, config).eval()
    made.add_adapter(config)
    return made.eval()


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_checkpoint_with_another_adapter(wrapped):
    """Where the adapter is all that differs, equal versions say that it was not synced, and others that it is older."""
    peft = pytest.importorskip("peft")
    trained, older = with_adapter(peft, 0, wrapped), with_adapter(peft, 1, not wrapped)
    records = dump(trained, older, sequences=6)
    for version, cause in ((3, "adapter_not_synced"), (1, "stale_weights"), (None, "stale_weights")):
        logged = [dataclasses.replace(one, rollout_version=version, trainer_version=3) for one in records]
        rescored = rescore(logged, trained, checkpoints=[("older", older)])
        best = rescored.hypotheses[0]
        assert (best.words, best.cause) == ("the weights of older", cause) and best.share > 0.99
        assert informed(diagnose(logged), rescored).verdict == cause


def test_weights_that_differ_in_the_adapter_alone():
    peft = pytest.importorskip("peft")
    trained, base, merged = with_adapter(peft, 0, True), fresh_model(0), with_adapter(peft, 0, True).merge_and_unload()
    assert adapters.adapter_alone(trained, base)  # it lacks the adapter
    assert not adapters.adapter_alone(trained, merged)  # its adapter is in its weights
    twice = with_adapter(peft, 0, True)
    weights = trained.state_dict()
    outer = {name: value for name, value in weights.items() if "lora_" in name}
    inner = {re.sub("(?=base_layer|lora_)", "base_layer.", name): value for name, value in weights.items()}
    twice.state_dict = lambda: outer | inner
    assert adapters.adapter_alone(twice, base)  # peft wraps the experts of a layer so
    assert not adapters.adapter_alone(trained, fresh_model(3)) and not adapters.adapter_alone(base, merged)


@pytest.mark.parametrize("first, last", [(3, 0), (0, 2), (2, 3)])
def test_another_template(model, first, last):
    """The trainer reads tokens around every prompt that the sampler did not read."""
    around = np.array([14, 3, 9, 12, 5, 11, 2, 8])
    records = []
    for record in dump(model, sequences=8):
        prompt = np.concatenate([around[:first], record.prompt_ids, around[first : first + last]])
        (old,), _ = score(model, [prompt.tolist()], [record.completion_ids.tolist()])
        records.append(dataclasses.replace(record, prompt_ids=prompt, old_logp=old.double().numpy()))
    rescored = rescore(records, model)
    best = rescored.hypotheses[0]
    assert best.cause == "chat_template" and best.gap < 1e-4 < rescored.gap
    assert best.words == f"the prompt without its first {first} and last {last} tokens"
    assert informed(diagnose(records), rescored).verdict == "chat_template"
