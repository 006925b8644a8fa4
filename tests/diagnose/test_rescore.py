"""``rescore``: the hypothesis under which a dump was made explains the gap, and the model is as it was afterwards."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

import torch

from offcorr.diagnose import CAUSES, Finding, Record, hypotheses, passes
from offcorr.diagnose import rescore as module
from offcorr.diagnose.diagnosis import diagnose
from offcorr.diagnose.informed import EXPLAINS, informed
from offcorr.diagnose.rescore import Hypothesis, Rescored, described, rescore
from offcorr.rollout.decode import Sampling, decode
from offcorr.training.precision import Precision
from offcorr.training.replica import Replica
from offcorr.training.snapshots import changing_weights
from tests.diagnose.simulated import world
from tests.rollout.rollout_models import fresh_model

LENGTH = 16
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model():
    return fresh_model(0).eval()


def logp_of(model, prompt, completion):
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(completion)[:, None])[:, 0].double().numpy()


def dump(trainer, sampler=None, *, sampling=None, read=lambda ids: ids, sequences=12):
    """Records of completions that ``sampler`` drew after ``read(prompt)``, scored by ``trainer`` after the prompt."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, 17, int(rng.integers(6, 12))).tolist() for _ in range(sequences)]
    drawn = decode(
        sampler or trainer,
        [read(prompt) for prompt in prompts],
        max_new_tokens=LENGTH,
        eos_token_ids=[],
        sampling=sampling,
        generator=torch.Generator().manual_seed(0),
    )
    return [
        Record.of(
            {
                "prompt_ids": prompt,
                "completion_ids": ids,
                "rollout_logp": logp,
                "old_logp": logp_of(trainer, prompt, ids),
            },
            f"row {row}",
        )
        for row, (prompt, ids, logp) in enumerate(zip(prompts, drawn.completion_ids, drawn.logp, strict=True), 1)
    ]


def in_precision(model, name):
    weights = dict(model.named_parameters())
    replica = Replica(model, "cpu")
    return replica.load({key: weights[key] for key, _ in changing_weights(model)}, Precision.named(name))


@pytest.mark.parametrize(
    "words, cause, made",
    [
        ("temperature 0.7", "temperature", {"sampling": Sampling(temperature=0.7)}),
        ("top_p 0.8", "top_p", {"sampling": Sampling(top_p=0.8)}),
        ("top_k 4", "top_k", {"sampling": Sampling(top_k=4)}),
        ("the later half of the prompt alone", "truncated_prompt", {"read": lambda ids: ids[len(ids) // 2 :]}),
        ("the prompt without its first token", "chat_template", {"read": lambda ids: ids[1:]}),
        ("the prompt with its first token twice", "chat_template", {"read": lambda ids: [ids[0], *ids]}),
    ],
)
def test_the_hypothesis_under_which_the_dump_was_made_comes_first(model, words, cause, made):
    found = rescore(dump(model, **made), model)
    best = found.hypotheses[0]
    assert (best.words, best.cause) == (words, cause)
    assert best.share > 0.9, found
    assert found.trainer < 1e-5 and found.gap > 0.01


@pytest.mark.parametrize("name", ["int4", "int8", "fp8_e5m2"])
def test_a_precision(model, name):
    records = dump(model, in_precision(model, name))
    found = rescore(records, model)
    assert found.hypotheses[0].words == f"weights in {name}" and found.hypotheses[0].share > 0.6, found
    assert informed(diagnose(records), found).verdict == "precision"

    draw = np.random.default_rng(0)
    trained = [dataclasses.replace(one, logp=one.old_logp + draw.standard_normal(len(one))) for one in records]
    report = diagnose(trained)
    causes = [one.cause for one in informed(report, found).causes]
    assert causes == ["policy_updates", "precision"] and report.verdict == "policy_updates"  # the larger gap


def test_an_earlier_checkpoint(model):
    older, other = fresh_model(0).eval(), fresh_model(3).eval()
    with torch.no_grad():
        for parameter in older.parameters():
            parameter.add_(0.03 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    found = rescore(dump(model, older), model, checkpoints=[("other", other), ("older", older)])
    assert found.hypotheses[0].words == "the weights of older" and found.hypotheses[0].share > 0.99
    assert next(one for one in found.hypotheses if one.words == "the weights of other").share < 0


def test_a_checkpoint_that_explains_nothing(model):
    """The report says which version the sampler had, and says nothing of the kind where a checkpoint fits."""
    older = moved_weights(0.03)
    records = [dataclasses.replace(one, rollout_version=4, trainer_version=8) for one in dump(model, older)]
    told = "no --checkpoint explains more than 60% of it"
    held = ". The sequences that were scored were sampled by version 4 (rollout_version, in optimizer steps: "
    wrong = described(rescore(records, model, checkpoints=[("other", fresh_model(3).eval())]))
    assert any(said.startswith(told + held) for said in wrong)
    unversioned = [dataclasses.replace(one, rollout_version=None) for one in records]
    assert told in described(rescore(unversioned, model, checkpoints=[("other", fresh_model(3).eval())]))
    for fine in ({}, {"checkpoints": [("older", older)]}):
        assert not any(told in said for said in described(rescore(records, model, **fine)))


def moved_weights(size):
    """The model with weights that lie ``size`` away in one direction."""
    older = fresh_model(0).eval()
    with torch.no_grad():
        for parameter in older.parameters():
            parameter.add_(size * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    return older


def test_a_checkpoint_that_is_older_than_the_samplers_weights(model):
    found = rescore(dump(model, moved_weights(0.002)), model, checkpoints=[("old", moved_weights(0.004))])
    best = found.hypotheses[0]
    assert best.words == "the weights of old, 50% of the way there" and best.cause == "stale_weights"
    assert 0.8 < best.share < 1


@pytest.mark.parametrize("block", [1, 16])
def test_a_prompt_that_was_read_with_older_weights(model, block):
    """The completion is drawn by the model after the older weights' keys and values."""
    older = moved_weights(0.03)
    records = []
    for one in dump(model, sequences=6):
        prompt = np.tile(one.prompt_ids, 4)[:36]
        cut = (len(prompt) - 1) // block * block
        records.append(scored_after(older, model, prompt, one.completion_ids, cut))
    found = rescore(records, model, checkpoints=[("old", older)])
    best = found.hypotheses[0]
    assert best.cause == "stale_prefix_cache" and f"{block}-token blocks" in best.words and best.share > 0.99
    assert informed(diagnose(records), found).verdict == "stale_prefix_cache"


@pytest.mark.parametrize("trainer_is_new", [True, False])
def test_weights_that_change_within_the_sequences(model, trainer_is_new):
    older = moved_weights(0.01)
    first, last = (older, model) if trainer_is_new else (model, older)
    records = [
        scored_after(first, last, one.prompt_ids, one.completion_ids, len(one.prompt_ids) + 3 + row % 8, model)
        for row, one in enumerate(dump(model, sequences=8))
    ]
    found = rescore(records, model, checkpoints=[("old", older)])
    best = found.hypotheses[0]
    said = "the weights of old, then the model's" if trainer_is_new else "the model's weights, then those of old"
    assert (best.cause, best.words) == ("weights_swapped", said) and best.share > 0.75
    stale = rescore(dump(model, older, sequences=8), model, checkpoints=[("old", older)])
    assert stale.hypotheses[0].cause == "stale_weights"


def test_whole_sequences_of_older_weights_did_not_change_within(model):
    older = moved_weights(0.01)
    mixed = [
        old if row % 2 else new
        for row, (old, new) in enumerate(zip(dump(model, older, sequences=8), dump(model, sequences=8), strict=True))
    ]
    found = rescore(mixed, model, checkpoints=[("old", older)])
    best = found.hypotheses[0]
    assert (best.cause, best.words) == ("stale_weights", "the weights of old in 4 of 8 sequences") and best.share > 0.9


def test_what_a_checkpoint_explains_leaves_no_room_for_a_temperature(model):
    records = dump(model, moved_weights(0.01), sequences=8)
    found = rescore(records, model, checkpoints=[("old", moved_weights(0.01))])
    report = diagnose(world("temperature", "stale_weights").records())
    assert "temperature" in {one.cause for one in report.causes}
    assert [one.cause for one in informed(report, found).causes] == ["stale_weights"]
    half = dataclasses.replace(found, hypotheses=[dataclasses.replace(found.hypotheses[0], share=0.65)])
    assert {one.cause for one in informed(report, half).causes} == {"stale_weights", "temperature"}


def scored_after(first, last, prompt, completion, cut, trainer=None):
    """A record whose sampler read ``cut`` tokens with ``first`` and the rest with ``last``."""
    ids = torch.tensor([[*prompt, *completion]])
    with torch.no_grad():
        before = first(input_ids=ids[:, :cut], use_cache=True)
        after = last(input_ids=ids[:, cut:], past_key_values=before.past_key_values, use_cache=True)
    logits = torch.cat([before.logits, after.logits], 1)[0, len(prompt) - 1 : -1]
    logp = logits.log_softmax(-1).gather(-1, torch.tensor(completion)[:, None])[:, 0].double().numpy()
    old = logp_of(trainer or last, prompt.tolist(), completion.tolist())
    return Record(np.asarray(prompt), np.asarray(completion), logp, old)


def test_a_checkpoint_of_another_vocabulary_is_not_tried(model):
    from transformers import LlamaConfig, LlamaForCausalLM

    small = LlamaForCausalLM(
        LlamaConfig(vocab_size=4, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    )
    found = rescore(dump(model, moved_weights(0.02), sequences=4), model, checkpoints=[("small", small)])
    assert any(one.startswith("the weights of small: ") for one in found.left_out)


def test_rounding_is_nobodys_fault(model):
    """Two differences that float32 makes say nothing about the trainer, however far apart their sizes are."""
    records = [dataclasses.replace(one, old_logp=one.old_logp + 2e-5) for one in dump(model, sequences=4)]
    found = rescore(records, model)
    assert not found.as_the_model
    assert "how the trainer computes" not in " ".join(described(found))


def test_a_silent_transform_is_not_what_the_model_does(model):
    """Log-probs of the plain model, tokens of another distribution, and a trainer that is off a little."""
    drawn = dump(model, sampling=Sampling(temperature=0.4), sequences=32)
    records = [
        Record(one.prompt_ids, one.completion_ids, one.old_logp, one.old_logp + 2e-4 * (-1) ** row)
        for row, one in enumerate(drawn)
    ]
    found = rescore(records, model, temperature=1.0)
    assert found.as_the_model and found.best_drawn[1] > found.threshold
    assert "how the trainer computes" not in " ".join(described(found))


@pytest.mark.parametrize("text", [[], [7], [7, 8, 9, 10]])
def test_tokens_that_were_not_sampled_fit_no_transform(model, text):
    """Both sides scored a text that stands at the end of each completion, and that a high temperature fits best."""
    records = []
    for one in dump(model, sequences=32):
        ids = [*one.completion_ids[: LENGTH - len(text)], *text]
        logp = logp_of(model, one.prompt_ids.tolist(), [int(id) for id in ids])
        records.append(dataclasses.replace(one, completion_ids=np.array(ids), rollout_logp=logp, old_logp=logp))
    found = rescore(records, model)
    report = informed(diagnose(records), found)
    assert bool(found.misfit) == bool(text) and (report.confidence == 0.5 or not text)
    assert any("tokens that the model did not sample" in one for one in report.cannot_tell) == bool(text)


def test_distributions_are_those_of_the_hypotheses(model):
    (record,) = dump(model, sequences=1)
    ids = torch.tensor(record.completion_ids)
    with torch.no_grad():
        raw = model(input_ids=torch.tensor([[*record.prompt_ids, *record.completion_ids]])).logits
    raw = 3 * raw[0, len(record.prompt_ids) - 1 : -1]
    for at in (0, 5):
        rest = raw[at:], ids[at:], 0.9, record.prompt_ids, record.completion_ids[:at]
        for (_, words), logp in hypotheses.transformed(*rest).items():
            logq = hypotheses.distributions(words, *rest)
            assert torch.allclose(logq.exp().sum(-1), torch.ones(len(logq))), words
            own = logq.gather(-1, ids[at:, None])[:, 0].double().numpy()
            assert np.allclose(own, logp, atol=1e-5), words


def test_a_clean_verdict_is_no_surer_with_a_model_that_does_not_speak_against_a_transform(model):
    clean = diagnose(dump(model))
    unsure = dataclasses.replace(clean, confidence=0.5)
    warm = Hypothesis("temperature", "temperature 0.7", 0.0, 0.0, 0.0, drawn=2.0)
    for drawn, sure in ((2.0, 0.5), (-2.0, 0.9)):
        found = Rescored(12, 0.0, 0.0, 0.0, [dataclasses.replace(warm, drawn=drawn)])
        assert informed(unsure, found).confidence == pytest.approx(sure)
    banned = Rescored(12, 0.0, 0.0, 0.0, [warm], misfit="token id 7 was drawn 0 times, where 36 are expected")
    report = informed(clean, banned)
    assert report.confidence == 0.5 and any("why token id 7 was drawn 0 times" in one for one in report.cannot_tell)


def test_what_the_trainer_does_is_named_where_the_sampler_does_what_the_model_does(model):
    records = dump(model, sequences=8)
    noisy = [
        dataclasses.replace(
            one,
            old_logp=one.old_logp + 0.5 * np.random.default_rng(row).standard_normal(len(one)),
            rollout_version=1,
            trainer_version=1,
        )
        for row, one in enumerate(records)
    ]
    found = rescore(noisy, model, temperature=1.0)
    without = dataclasses.replace(diagnose(noisy), verdict="unknown", confidence=0.5, causes=())
    assert informed(without, found).verdict == "dropout"
    unversioned = [dataclasses.replace(one, rollout_version=None) for one in noisy]
    report = dataclasses.replace(diagnose(unversioned), verdict="unknown", confidence=0.5, causes=())
    assert informed(report, found).verdict == "unknown"  # the checkpoint may be the sampler's, and not the trainer's
    padded = [one if row % 2 else same for row, (one, same) in enumerate(zip(noisy, records, strict=True))]
    found = rescore(padded, model, temperature=1.0)
    report = dataclasses.replace(diagnose(padded), verdict="unknown", confidence=0.5, causes=())
    report = informed(report, found)
    assert report.verdict == "position" and report.confidence == 0.5  # or the others were read with other prompts


@pytest.mark.parametrize("certain, verdict", [(False, "position"), (True, "unknown")])
def test_first_tokens_that_agree_tell_unless_they_are_certain(model, certain, verdict):
    """A trainer that is the model at the first token of each completion alone; about a certain one any trainer is."""
    records = []
    for row, one in enumerate(dump(model, sequences=8)):
        noise = 0.5 * np.random.default_rng(row).standard_normal(len(one))
        noise[0] = 0.0
        mine, theirs = one.old_logp + noise, one.rollout_logp.copy()
        if certain:
            mine[0] = theirs[0] = -1e-4
        records.append(dataclasses.replace(one, old_logp=mine, rollout_logp=theirs))
    report = dataclasses.replace(diagnose(records), verdict="unknown", confidence=0.5, causes=())
    found = dataclasses.replace(rescore(records, model, temperature=1.0), gap=0.0)
    assert informed(report, found).verdict == verdict


@pytest.mark.parametrize(
    "by, words", [(-1, "the log-probs of the next token"), (1, "the log-probs of the previous token")]
)
def test_a_shift_stays_within_its_sequence(model, by, words):
    records = dump(model)
    shifted = [
        Record(one.prompt_ids, one.completion_ids, np.roll(one.rollout_logp, by), one.old_logp, where=one.where)
        for one in records
    ]
    found = rescore(shifted, model)
    assert found.hypotheses[0].words == words and found.hypotheses[0].share > 0.85
    # Only the token at the end of each sequence is unexplained: the hypothesis takes no value of a neighbour's.
    ends = [abs(one.rollout_logp[-1 if by < 0 else 0] - one.old_logp[-1 if by < 0 else 0]) for one in shifted]
    left = np.minimum(ends, module.FARTHEST).sum() / (LENGTH * len(records))
    assert found.hypotheses[0].gap == pytest.approx(left, abs=1e-5)


def test_a_mask_leaves_tokens_out(model):
    records = dump(model, sampling=Sampling(temperature=0.7), sequences=4)
    mask = np.arange(LENGTH) % 3 > 0
    odd = [
        Record(
            one.prompt_ids,
            one.completion_ids,
            np.where(mask, one.rollout_logp, -9999.0),
            one.old_logp,
            mask=mask,
        )
        for one in records
    ]
    best = rescore(odd, model).hypotheses[0]
    assert best.words == "temperature 0.7" and best.share > 0.99


def test_the_trainers_temperature(model):
    """The trainer divides by 0.7 and the engine logs without it: temperature 1 explains what it logged."""
    records = dump(model)
    found = rescore(records, model, temperature=0.7)
    assert found.hypotheses[0].words == "temperature 1" and found.hypotheses[0].share > 0.99


def test_dropout_in_the_trainer_is_told_by_the_model_that_has_it():
    model = fresh_model(0, attention_dropout=0.3).eval()
    records = dump(model)
    torch.manual_seed(0)
    model.train()
    noisy = [
        Record(
            one.prompt_ids,
            one.completion_ids,
            one.rollout_logp,
            logp_of(model, one.prompt_ids.tolist(), one.completion_ids.tolist()),
        )
        for one in records
    ]
    found = rescore(noisy, model)
    assert model.training
    assert (found.hypotheses[0].words, found.hypotheses[0].cause) == ("dropout off", "dropout")
    assert found.gap < 1e-5 and found.hypotheses[0].share > 0.99
    assert informed(diagnose(noisy), found).verdict == "dropout"
    # The same log without a dropout in the model is another matter.
    found = rescore(noisy, fresh_model(0).eval())
    assert all(one.cause != "dropout" for one in found.hypotheses)
    assert any("how the trainer computes log-probs" in said for said in described(found))


@pytest.mark.parametrize("far", [0.1, 0.03])
def test_older_weights_beside_dropout_explain_their_own_share(far):
    """Dropout stays, as repeated contexts show it; what it leaves of d is not put down to the sampler.

    The model is then nearer to the sampler than the trainer's log-probs are, and is not what sampled.
    """
    model, older = fresh_model(0, attention_dropout=0.3).eval(), fresh_model(3).eval()
    close = {
        name: (1 - far) * value + far * older.state_dict()[name] if value.is_floating_point() else value
        for name, value in model.state_dict().items()
    }
    older.load_state_dict(close)
    twice = [one for one in dump(model, older) for _ in range(2)]  # samples of one prompt, which begin alike
    torch.manual_seed(0)
    noisy = read_otherwise(twice, model.train(), list)
    model.eval()
    report = diagnose(noisy)
    assert [one.cause for one in report.causes] == ["dropout"]
    found = rescore(noisy, model, checkpoints=[("older", older)])
    assert found.gap > 0.1 * found.logged and found.trainer > 0.1 * found.logged
    told = informed(report, found)
    (stale,) = [one for one in told.causes if one.cause == "stale_weights"]
    assert "dropout" in {one.cause for one in told.causes}
    assert stale.share == pytest.approx(max(0, 1 - found.trainer / found.logged), abs=0.02) and stale.share < 0.6
    assert stale.confidence > 0.9 and "which no change of the sampler removes" in stale.evidence


def read_otherwise(records, model, read):
    """The records with the log-probs of a trainer that read other prompts."""
    pairs = [(read(one.prompt_ids.tolist()), one.completion_ids.tolist()) for one in records]
    return [dataclasses.replace(one, old_logp=logp_of(model, *pair)) for one, pair in zip(records, pairs, strict=True)]


@pytest.mark.parametrize(
    "words, cause, read",
    [
        ("the later half of the prompt alone", "truncated_prompt", lambda ids: ids[len(ids) // 2 :]),
        ("the prompt with its first token twice", "chat_template", lambda ids: [ids[0], *ids]),
    ],
)
def test_what_the_trainer_read_is_told_by_the_model(model, words, cause, read):
    records = read_otherwise(dump(model), model, read)
    found = rescore(records, model)
    assert found.temperature == 1 and found.gap < 1e-5
    assert (found.of_trainer[0].words, found.of_trainer[0].cause) == (words, cause)
    report = informed(diagnose(records), found)
    assert report.verdict == cause and report.confidence > 0.9
    assert "under the hypothesis" in report.causes[0].evidence
    assert any(f"{words} [{cause}], of the trainer, explains 100%" in said for said in described(found))


def test_a_trainer_with_the_weights_of_the_checkpoint_is_no_sampler_that_is_behind(model):
    """The model and the checkpoint may have been exchanged."""
    other = fresh_model(3).eval()
    records = read_otherwise(dump(model), other, list)
    report = informed(diagnose(records), rescore(records, model, checkpoints=[("old", other)]))
    assert report.verdict == "stale_weights" and report.confidence > 0.9
    assert report.causes[0].title == "the trainer's log-probs are of other weights than the sampler's"
    assert "as --model" in report.causes[0].advice


@pytest.mark.parametrize("groups", [False, True])
def test_what_a_trainer_does_that_no_hypothesis_has_is_not_named_for_sure(groups):
    """Log-probs that are off by as much as dropout makes them, with another spread: no temperature of the trainer's."""
    model = fresh_model(0, attention_dropout=0.3).eval()
    records = dump(model)
    if groups:  # samples of one prompt, which begin alike, and get the same log-probs there
        records = [one for one in records for _ in range(2)]
    other = read_otherwise(records, fresh_model(3).eval(), list)
    mixed = [
        dataclasses.replace(one, old_logp=0.7 * one.rollout_logp + 0.3 * off.old_logp)
        for one, off in zip(records, other, strict=True)
    ]
    found = rescore(mixed, model)
    assert found.temperature == 1 and any(one.cause == "dropout" for one in found.hypotheses)
    cause = CAUSES["stale_weights"]
    older = Finding(cause.id, 0.77, 1.0, 0.1, 0.5, 1.0, cause.title, "older", cause.advice)
    from_logs = dataclasses.replace(diagnose(mixed), verdict=cause.id, causes=(older,))
    (named,) = informed(from_logs, found).causes
    if groups:
        assert (named.cause, named.confidence) == (cause.id, 0.5) and "look at the trainer's" in named.evidence
    else:
        assert (named.cause, named.confidence) == ("dropout", 0.65)


@pytest.mark.parametrize("cap", [0.5, 0.8, None])
def test_a_temperature_of_a_trainer_whose_logits_are_changed_otherwise_is_not_sure(model, cap):
    """Its log-probs are far from the model's at every temperature, while the sampler's are the model's at 1."""
    records = dump(model)

    def changed(prompt, completion):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
        logits = logits / 1.4 if cap is None else cap * torch.tanh(logits / cap)
        return logits.log_softmax(-1).gather(-1, torch.tensor(completion)[:, None])[:, 0].double().numpy()

    records = [
        dataclasses.replace(one, old_logp=changed(one.prompt_ids.tolist(), one.completion_ids.tolist()))
        for one in records
    ]
    found = rescore(records, model)
    report = informed(diagnose(records), found)
    asked = [question for question in report.cannot_tell if "softcap" in question]
    assert found.temperature > 1
    if cap is None:
        assert report.verdict == "temperature" and not asked
    else:
        assert found.trainer > 0.25 * found.logged
        assert report.verdict != "temperature" or (report.confidence <= 0.65 and asked)


def test_a_model_without_experts_routes_to_none(model):
    records = dump(model, in_precision(model, "int8"))
    found = rescore(records, model)
    assert not found.experts
    cause = CAUSES["moe_routing"]
    routed = Finding(cause.id, 0.94, 1.0, 0.1, 0.5, 1.0, cause.title, "few", cause.advice)
    report = dataclasses.replace(diagnose(records), verdict=cause.id, causes=(routed,))
    assert "moe_routing" not in {one.cause for one in informed(report, found).causes}
    told = dataclasses.replace(found, hypotheses=(), experts=True)
    assert "moe_routing" in {one.cause for one in informed(report, told).causes}


def test_agreement_has_nothing_to_explain(model):
    found = rescore(dump(model), model)
    assert found.gap < 1e-5
    assert {one.share for one in found.hypotheses} == {0.0}


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_as_it_was(model, fails):
    records = dump(model, sequences=2)
    model.train()
    model.model.layers[0].eval()
    modes = [part.training for part in model.modules()]
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    calls = []

    def report(words, done, of):
        calls.append(words)
        if fails and "int8" in words:
            raise KeyboardInterrupt

    if fails:
        with pytest.raises(KeyboardInterrupt):
            rescore(records, model, report=report)
    else:
        rescore(records, model, report=report)
    assert calls[:2] == ["as it is"] * 2 and "weights in int8" in calls
    assert [part.training for part in model.modules()] == modes
    assert all(value.equal(weights[name]) for name, value in model.state_dict().items())
    model.eval()


def test_a_failure_in_training_mode_leaves_the_mode(model):
    def report(words, done, of):
        if words == "dropout on":
            assert model.training
            raise OSError

    with pytest.raises(OSError):
        rescore(dump(model, sequences=2), model, report=report)
    assert not any(part.training for part in model.modules())


def test_pieces_give_the_same(model, monkeypatch):
    """A long sequence is scored in pieces of 5 tokens, with the keys and values of those before."""
    records = dump(model, sampling=Sampling(temperature=0.7, top_k=6), sequences=3)
    whole = rescore(records, model)
    sizes = []
    hook = model.register_forward_pre_hook(
        lambda module, args, given: sizes.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    monkeypatch.setattr(passes, "PIECE", 5 * passes.COPIES * 17)
    pieces = rescore(records, model)
    hook.remove()
    assert max(sizes) == 5
    assert {
        one.words: pytest.approx(one.gap, abs=0.003 if "16" in one.words else 1e-4) for one in whole.hypotheses
    } == {one.words: one.gap for one in pieces.hypotheses}


PEAK = """
import numpy
import torch
from offcorr.diagnose import draws, hypotheses, passes

def resident(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))

vocabulary = 150_000
rows = passes.PIECE // 8 // (passes.COPIES * vocabulary)
assert rows > 10
raw = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(0))
before = resident("VmRSS")
of = raw, torch.arange(rows), 1.0, numpy.arange(5), numpy.arange(0)
hypotheses.transformed(*of)
for words in ("temperature 0.7", "top_p 0.9", "repetition_penalty 1.1"):
    draws.Draws().add(hypotheses.distributions(words, *of), torch.arange(rows), torch.arange(rows))
print(resident("VmHWM") - before)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="the peak of the memory is read from /proc")
def test_a_large_vocabulary_stays_within_a_gigabyte():
    """The arrays of one piece, at an eighth of the size, with every row sorted in full.

    In a process of its own, which returns freed arrays at once: the peak is then that of the living ones.
    """
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(
        [sys.executable, "-c", PEAK], env=environment, cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert 0 < int(done.stdout) < 1e9 / 8


@pytest.mark.parametrize("sharp", [1.0, 6.0])
def test_truncation_among_the_likeliest_tokens_is_exact(sharp, monkeypatch):
    """Rows whose mass the likeliest tokens hold need no full sort, and give the same."""
    generator = torch.Generator().manual_seed(0)
    logp = (sharp * torch.randn(40, 3000, generator=generator)).log_softmax(-1)
    ids = torch.multinomial(logp.exp(), 1, generator=generator)[:, 0]
    found = hypotheses._truncated(logp, ids)
    monkeypatch.setattr(hypotheses, "LIKELIEST", 3000)
    for name, wanted in hypotheses._truncated(logp, ids).items():
        np.testing.assert_allclose(found[name], wanted, rtol=1e-4, atol=1e-4, err_msg=str(name))
    for share in (0.5, 0.9):
        np.testing.assert_allclose(
            found["top_p", f"top_p {share:g}"],
            Sampling(top_p=share).logp(logp).gather(-1, ids[:, None])[:, 0],
            rtol=1e-4,
            atol=1e-4,
        )


@pytest.mark.parametrize(
    "change, said",
    [
        ({"completion_ids": np.full(LENGTH, 99)}, "row 1: token id 99 is not in the model's vocabulary of 17"),
        ({"prompt_ids": np.empty(0, int)}, "row 1: prompt_ids is empty"),
        ({"rollout_logp": np.full(LENGTH, np.nan)}, "no token of the sequences to score again has a finite log-prob"),
    ],
)
def test_records_that_cannot_be_scored(model, change, said):
    import dataclasses

    with pytest.raises(ValueError, match=said):
        rescore([dataclasses.replace(dump(model, sequences=1)[0], **change)], model)


def test_bounds(model):
    with pytest.raises(ValueError, match="there is no sequence"):
        rescore([], model)
    with pytest.raises(ValueError, match="temperature is 0"):
        rescore(dump(model, sequences=1), model, temperature=0)


# ------------------------------------------------------------------------------------------------- the verdict


def outcome(share, cause="stale_weights"):
    return Rescored(32, 0.1, 0.1, 0.0, [Hypothesis(cause, "the weights of older", 0.1 * (1 - share), 0.1, share)])


def test_a_verdict_is_replaced_only_by_what_explains_more():
    report = diagnose(world("precision").records())
    for nothing in (outcome(EXPLAINS), Rescored(32, 0.1, 0.1, 0.0, [])):
        assert informed(report, nothing).causes == report.causes and report.verdict == "precision"
    found = informed(report, outcome(EXPLAINS + 0.01))
    assert found.verdict == "stale_weights" and found.confidence == EXPLAINS + 0.01
    assert [one.cause for one in found.causes] == ["stale_weights"]  # the same gap, which has one name now
    assert any("precision or" in said for said in report.cannot_tell)
    assert not any("precision or" in said for said in found.cannot_tell)
    assert "'the weights of older'" in found.causes[0].evidence and found.causes[0].threshold == EXPLAINS


def of_steps(*causes):
    """A dump of as many optimizer steps, the sampler of each with its cause."""
    return [
        dataclasses.replace(record, step=step)
        for step, cause in enumerate(causes, start=1)
        for record in world(cause, seed=step).records()
    ]


@pytest.mark.parametrize("steps", [[], [1]])
def test_what_explains_the_step_that_the_model_fits_is_a_part_of_the_dump(steps):
    """A coarse sampler that gets no updates: in the first step only its precision shows."""
    records = of_steps("precision", *3 * ["stale_weights"])
    report = diagnose(records)
    assert report.verdict == "stale_weights"
    small = diagnose(records[: len(records) // 4]).evidence.gap
    found = dataclasses.replace(outcome(0.9, "precision"), gap=small, logged=small, steps=steps)
    said = informed(report, found)
    if not steps:
        assert [one.cause for one in said.causes] == ["precision"] and said.causes[0].share == 0.9
        return
    assert [one.cause for one in said.causes] == ["stale_weights", "precision"]
    assert said.verdict == "stale_weights" and said.confidence == report.confidence
    assert (
        said.causes[1].share == pytest.approx(0.9 * small / report.evidence.gap) and said.causes[1].confidence == 0.65
    )
    assert "this is of step 1, which alone the model fits: mean |d| is" in said.causes[1].evidence
    assert any("in the other steps" in question for question in said.cannot_tell)
    assert described(found)[0].startswith("the model's log-probs of 32 sequences of step 1 differ")


def test_what_the_logs_say_of_all_steps_is_no_less_where_the_model_fits_one():
    records = of_steps("precision", *3 * ["stale_weights"])
    report = diagnose(records)
    said = informed(report, dataclasses.replace(outcome(0.9), steps=[1]))
    assert [(one.cause, one.share) for one in said.causes] == [(one.cause, one.share) for one in report.causes]
    assert said.confidence == 0.9


def test_steps_that_differ_as_much_as_the_others_speak_for_the_dump():
    report = diagnose(of_steps("stale_weights", "stale_weights"))
    said = informed(report, dataclasses.replace(outcome(0.9, "precision"), steps=[1]))
    assert [(one.cause, one.share) for one in said.causes] == [("precision", 0.9)]


def test_a_hypothesis_is_less_sure_where_another_explains_nearly_as_much():
    records = world("stale_weights").records()

    def sure(second, cause="chat_template"):
        found = [
            Hypothesis("truncated_prompt", "half", 0.1, 1.0, 0.9),
            Hypothesis(cause, "another", second, 1.0, 1 - second),
        ]
        report = informed(diagnose(records), Rescored(32, 1.0, 1.0, 0.0, found))
        assert ("under 'another' [chat_template]" in report.causes[0].evidence) == (report.confidence < 0.9)
        return report.confidence

    assert (sure(0.1), sure(0.15), sure(0.25), sure(0.15, "truncated_prompt")) == (0.5, 0.75, 0.9, 0.9)


@pytest.mark.parametrize(("share", "left"), [(0.99, []), (0.65, ["stale_weights"])])
def test_a_temperature_that_explains_the_gap_leaves_none_to_older_weights(share, left):
    """Without entropy the logs alone take a temperature for older weights."""
    report = diagnose(world("stale_weights").records())
    assert report.causes[0].share > 0.9
    found = informed(report, outcome(share, "temperature"))
    assert [one.cause for one in found.causes] == ["temperature", *left]


@pytest.mark.parametrize(("by_log", "sure"), [(0.5, 0.5), (0.8, 0.95)])
def test_a_temperature_keeps_the_name_that_the_log_gave_it(by_log, sure):
    """And is no surer where the log does not tell at which temperature the tokens were drawn."""
    report = diagnose(world("raw_logprobs").records())
    logged = [dataclasses.replace(one, confidence=by_log) for one in report.causes]
    found = informed(dataclasses.replace(report, causes=logged), outcome(0.95, "temperature"))
    assert [one.cause for one in found.causes] == ["raw_logprobs"] and found.confidence == pytest.approx(sure)
    assert ("these tokens do not tell" in found.causes[0].evidence) == (by_log == 0.5)


@pytest.mark.parametrize("cause", ["stale_prefix_cache", "stale_weights"])
def test_a_cause_whose_hypothesis_was_tried_in_vain_is_less_sure(cause):
    report = diagnose(world(cause).records())
    assert report.verdict == cause and report.confidence >= 0.5
    found = informed(report, outcome(0.04, cause))
    assert found.verdict == cause and found.confidence == found.causes[0].confidence <= 0.5
    assert found.causes[0].evidence.endswith("; scored again, neither the model nor the checkpoint explains it")
    assert not any("--checkpoint" in said or "--model and" in said for said in found.cannot_tell)
    alone = informed(report, outcome(0.04, "precision"))
    assert alone.causes == report.causes and not any("--model and" in said for said in alone.cannot_tell)


def test_open_questions_ask_for_no_model_and_no_checkpoint_that_was_tried():
    report = diagnose(world("stale_prefix_cache").records())
    question = "whether the cause is stale_prefix_cache or a shorter or other prompt on one side. To find out, "
    for tried, left in (
        ("precision", "give an earlier --checkpoint"),
        ("stale_weights", "give a checkpoint of other weights, or compare the prompt ids that each side read"),
    ):
        assert question + "give --model and an earlier --checkpoint" in report.cannot_tell
        assert question + left in informed(report, outcome(0.04, tried)).cannot_tell


def test_a_shorter_prompt_that_was_tried_in_vain_is_less_sure():
    report = diagnose(world("truncated_prompt").records())
    found = informed(report, outcome(0.04, "truncated_prompt"))
    assert found.verdict == "truncated_prompt" and found.confidence <= 0.5
    assert found.causes[0].evidence.endswith("; scored again, the model does not explain it")


@pytest.mark.parametrize(("share", "sure"), [(0.88, 0.5), (0.94, 0.5), (0.96, 0.96)])
def test_a_transform_that_leaves_more_than_a_twentieth_may_be_another(share, sure):
    """A top_p of .3 is nearly a temperature of .3, and both may lie between the values that are tried."""
    report = diagnose(world("repetition_penalty").records())
    found = informed(report, outcome(share, "repetition_penalty"))
    assert found.verdict == "repetition_penalty" and found.confidence == sure
    assert any("which may fit better: a softcap" in one for one in found.cannot_tell) == (sure == 0.5)
