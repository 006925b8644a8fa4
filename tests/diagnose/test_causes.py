"""Every cause, simulated with a known one, is named; so are two at once, and fewer data are no wrong name."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
import torch

from offcorr.diagnose import CAUSES, Cause, Evidence, Found, Record, diagnose, questions
from offcorr.diagnose.causes import policies, sampling, values
from offcorr.diagnose.causes.base import confidence
from offcorr.diagnose.causes.grids import few_values
from offcorr.diagnose.causes.other_tokens import _slip
from offcorr.diagnose.causes.over_steps import growth
from offcorr.diagnose.causes.truncation import COLDER, TRUNCATIONS
from offcorr.diagnose.diagnosis import BY_SIZE
from offcorr.diagnose.evidence import mean_by_sequence
from offcorr.diagnose.questions import of_one_side, open_questions
from offcorr.diagnose.steps import differing_sequences
from offcorr.diagnose.text import headline, to_do
from offcorr.lab import mismatch
from tests.diagnose import simulated
from tests.diagnose.simulated import World, min_p, noise, nucleus, top_k, world

IDS = """clean precision kv_cache moe_routing stale_weights adapter_not_synced policy_updates dropout temperature
temperature_silent raw_logprobs unnormalised top_p top_p_silent top_k min_p repetition_penalty penalty_silent
logit_mask logit_bias shift mask sentinel other_quantity appended_eos stored_bf16 stored_rounded retokenised
chat_template truncated_prompt weights_swapped stale_prefix_cache position unknown""".split()


def test_every_cause_has_a_class_a_simulation_and_a_generator():
    verdicts = {"clean", "unknown"}
    assert set(CAUSES) == set(IDS) - verdicts
    assert set(simulated.CAUSES) == set(IDS) - {"unknown", "penalty_silent"}
    assert set(mismatch.CAUSES) == set(IDS) - {"unknown", "other_quantity", "stored_rounded", "logit_bias"}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("cause", simulated.CAUSES)
def test_a_single_cause_is_named_and_nothing_else(cause, seed):
    report = diagnose(world(cause, seed=seed).records())
    assert report.verdict == cause
    assert [finding.cause for finding in report.causes] == ([] if cause == "clean" else [cause])
    assert 0.5 <= report.confidence <= 1


@pytest.mark.parametrize(
    ("side", "amount", "few"),
    [
        ("sampler", -2.0, "above"),
        ("sampler", 2.0, "below"),
        ("sampler", 5.0, "below"),
        ("trainer", -5.0, "below"),
        ("trainer", -2.0, "below"),
        ("trainer", 2.0, "above"),
        ("trainer", 5.0, "above"),
    ],
)
def test_a_bias_on_a_few_token_ids_is_named_with_them(side, amount, few):
    def change(logits, world):
        return logits + amount * np.isin(np.arange(simulated.VOCABULARY), [7, 27, 47])

    first = diagnose(World(sequences=64, **{side: change}).records()).causes[0]
    assert first.cause == "logit_bias"
    assert f"d is {few} that of the other ids at tokens with the id 7 or 27 or 47, on average" in first.evidence


def signs(of_id, ids=30, tokens=1200, logp=None):
    """A dump with one d for each token id, by a rule on random number generator and ids."""
    rng = np.random.default_rng(0)
    drawn = rng.integers(0, ids, tokens)
    trainer = -1.0 - rng.random(tokens) if logp is None else logp(drawn)
    columns = {
        "completion_ids": drawn,
        "old_logp": trainer,
        "rollout_logp": trainer - of_id(rng, drawn) + rng.normal(0, 0.002, tokens),
    }
    rows = [{name: column[at : at + 40] for name, column in columns.items()} for at in range(0, tokens, 40)]
    return [Record.of({"prompt_ids": [row], **columns}) for row, columns in enumerate(rows)]


def two_levels(rng, ids):
    return np.where(ids < 3, 0.9, -0.1)


@pytest.mark.parametrize(
    ("is_one", "options"),
    [
        (True, {"of_id": two_levels}),
        # Two ids up and one down, beside others whose d is small and of both signs.
        (True, {"of_id": lambda rng, ids: np.where(ids < 3, 0.9 * (-1.0) ** ids, rng.normal(0, 0.05, len(ids)))}),
        # Rounding besides, to both sides of 0.
        (
            True,
            {
                "of_id": lambda rng, ids: (
                    two_levels(rng, ids) + np.where(ids < 20, 0.08, 0) * (ids > 2) + rng.normal(0, 0.02, len(ids))
                )
            },
        ),
        # Rounding of one id's row of the head is no bias.
        (False, {"of_id": lambda rng, ids: 0.2 * two_levels(rng, ids)}),
        # A tenth of the tokens has the other sign: other weights.
        (False, {"of_id": lambda rng, ids: two_levels(rng, ids) * np.where(rng.random(len(ids)) < 0.1, -1, 1)}),
        # Each id has an amount of its own.
        (False, {"of_id": lambda rng, ids: np.where(ids < 3, 0.9, -0.06 * (ids - 2))}),
        # Too few tokens to tell.
        (False, {"of_id": two_levels, "tokens": 60}),
        # A temperature of a policy without regard to the context.
        (
            False,
            {
                "of_id": lambda rng, ids: np.where(ids < 3, 0.9, -0.1 - 0.005 * ids),
                "logp": lambda ids: np.where(ids < 3, -0.5, -2.5 - 0.01 * ids),
            },
        ),
    ],
)
def test_a_bias_is_one_amount_at_few_ids_and_none_at_the_others(is_one, options):
    assert ("logit_bias" in [one.cause for one in diagnose(signs(**options)).causes]) == is_one


@pytest.mark.parametrize("drift", [0.0, 0.2, 1.0])
@pytest.mark.parametrize(
    "cause", ["temperature", "top_k", "stale_weights", "repetition_penalty", "moe_routing", "min_p"]
)
@pytest.mark.parametrize("seed", range(4))
def test_no_other_policy_is_a_bias(cause, drift, seed):
    made = world(cause, seed=seed)
    if drift:
        made.trainer = noise(drift, shared=True)
    assert "logit_bias" not in [one.cause for one in diagnose(made.records()).causes]


def test_a_bias_of_which_updates_may_be_the_reason_is_unsure():
    sure = {}
    for version in (None, 3, 4):
        records = world("logit_bias", seed=1).records()
        logged = {} if version is None else {"rollout_version": 3, "trainer_version": version}
        sure[version] = diagnose([dataclasses.replace(one, **logged) for one in records]).confidence
    assert sure == {None: 0.5, 3: 0.5, 4: 0.5}


def test_end_tokens_under_another_id_are_asked_about():
    """A client that writes its own end token leaves a d of that id alone, as a bias does."""
    rng, ended = np.random.default_rng(0), []
    plain = world(sequences=64, tokens=40).records()
    end = 1 + max(int(one.completion_ids.max()) for one in plain)
    for at, one in enumerate(plain):
        ids, logp = one.completion_ids.copy(), one.old_logp.copy()
        if at % 2:
            ids[-1], logp[-1] = end, logp[-1] + rng.uniform(-4, -1)
        ended.append(dataclasses.replace(one, completion_ids=ids, old_logp=logp))
    asked = CAUSES["logit_bias"].not_told_from[-1]
    assert asked.words.startswith("ids that the sampler did not draw, as an end token")
    assert not asked.settled(Evidence.of(ended))
    assert asked.settled(Evidence.of(world("logit_bias").records()))
    assert any(asked.words in one for one in questions.open_questions(Evidence.of(ended), ["logit_bias"]))


def _capped(values):
    return np.maximum(values, -2.0)


@pytest.mark.parametrize("side", ["rollout_logp", "old_logp"])
@pytest.mark.parametrize(
    ("quantity", "said"),
    [
        (np.negative, "the negatives of log-probs"),
        (np.exp, "probabilities, not their logarithms"),
        (np.cumsum, "sums over the tokens so far"),
        (lambda values: values / np.log(2), "logarithms to base 2"),
        (lambda values: values / np.log(10), "logarithms to base 10"),
        (_capped, "cut off at -2, where"),
        (lambda values: np.log(np.exp(values) + 0.02), "log(p + 0.02), where p"),
    ],
)
@pytest.mark.parametrize("beside", ["clean", "precision"])
def test_another_quantity_than_the_log_prob_is_named(side, quantity, said, beside):
    def edit(columns, world):
        columns[side] = np.apply_along_axis(quantity, 1, columns[side])

    made = world(beside)
    made.edits = [*made.edits, edit]
    found = diagnose(made.records()).causes
    assert found[0].cause == "other_quantity" and found[0].confidence == 1
    assert found[0].evidence.startswith(f"the {'sampler' if side == 'rollout_logp' else 'trainer'}'s values are {said}")
    if quantity is not _capped:  # it hides the unlikely tokens, which tell precision from a change of routing
        assert [one.cause for one in found[1:]] == [beside] * (beside != "clean")


@pytest.mark.parametrize("side", ["rollout_logp", "old_logp"])
def test_log_probs_in_an_array_of_integers_are_named(side):
    def edit(columns, world):
        columns[side] = np.trunc(columns[side])

    made = world()
    made.edits = [edit]
    report = diagnose(made.records())
    assert report.verdict == "stored_rounded" and "are whole numbers" in report.causes[0].evidence


@pytest.mark.parametrize("side", ["rollout_logp", "old_logp"])
@pytest.mark.parametrize("constant", [-0.05, 0.2])
def test_a_constant_beside_the_log_probs_is_no_ban(side, constant):
    def edit(columns, world):
        columns[side] = columns[side] + constant

    made = world()
    made.edits = [edit]
    (found,) = diagnose(made.records()).causes
    said = f"{abs(constant):.3g} nats, one number at every token, or the other side's are"
    assert found.cause == "other_quantity" and said in found.evidence


@pytest.mark.parametrize(("quantity", "said"), [(np.exp, "probabilities, not"), (np.negative, "the negatives of")])
@pytest.mark.parametrize("beside", ["clean", "precision", "stale_weights"])
def test_both_sides_of_another_quantity_are_no_placeholders(quantity, said, beside):
    def edit(columns, world):
        for side in ("rollout_logp", "old_logp"):
            columns[side] = quantity(columns[side])

    made = world(beside)
    made.edits = [*made.edits, edit]
    report = diagnose(made.records())
    assert {one.cause for one in report.causes} == {"other_quantity", beside} - {"clean"}
    assert f"both sides are above 0, as no log-prob is: {said}" in report.causes[0].evidence


@pytest.mark.parametrize("side", ["rollout_logp", "old_logp"])
def test_a_shift_is_of_one_side_or_the_other(side):
    def edit(columns, world):
        columns[side] = np.roll(columns[side], 1, 1)

    made = world()
    made.edits = [edit]
    (found,) = diagnose(made.records()).causes
    assert found.cause == "shift" and "of one side" in found.title and "check one known sequence" in found.advice


@pytest.mark.parametrize("side", ["rollout_logp", "old_logp"])
@pytest.mark.parametrize("which", ["mean", "sum"])
@pytest.mark.parametrize("beside", ["clean", "precision"])
def test_a_mean_or_a_sum_at_every_token_of_a_sequence_is_named(side, which, beside):
    def edit(columns, world):
        columns[side] = np.repeat(getattr(columns[side], which)(1, keepdims=True), columns[side].shape[1], 1)

    made = world(beside)
    made.edits = [*made.edits, edit]
    found = diagnose(made.records()).causes[0]
    assert found.cause == "other_quantity"
    assert f"'s values are the {which} over the sequence, at each of its tokens" in found.evidence


@pytest.mark.parametrize("by", [1, 5])
def test_rows_in_another_order_are_named(by):
    def edit(columns, world):
        columns["rollout_logp"] = np.roll(columns["rollout_logp"], by, 0)

    (found,) = diagnose(World(edits=[edit]).records()).causes
    assert found.cause == "other_quantity" and "those of other sequences, as of rows in another order" in found.evidence


@pytest.mark.parametrize("temperature", [1 / np.log(2) / 1.01, np.log(2) * 1.02])
def test_log_probs_divided_by_a_temperature_are_no_other_base(temperature):
    def edit(columns, world):
        columns["rollout_logp"] /= temperature

    made = World(edits=[edit])
    assert "other_quantity" not in {one.cause for one in diagnose(made.records()).causes}


@pytest.mark.parametrize("cause", ["sentinel", "mask", "shift", "temperature", "top_p", "stale_weights", "clean"])
def test_eight_sequences_are_enough_for_what_is_plain(cause):
    assert diagnose(world(cause, sequences=8).records()).verdict == cause


@pytest.mark.parametrize(
    "pair",
    [
        ("temperature", "stale_weights"),
        ("sentinel", "temperature"),
        ("mask", "precision"),
        ("shift", "precision"),
        ("stored_bf16", "stale_weights"),
        ("appended_eos", "stale_weights"),
        ("policy_updates", "precision"),
        ("dropout", "temperature"),
        ("temperature_silent", "stored_bf16"),
        ("top_p", "stale_weights"),
    ],
    ids="+".join,
)
def test_two_causes_at_once_are_both_named(pair):
    found = {finding.cause for finding in diagnose(world(*pair).records()).causes}
    assert set(pair) <= found


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("cause", simulated.CAUSES)
def test_with_fewer_fields_and_sequences_no_other_cause_is_sure(cause, seed):
    records = world(cause, seed=seed).records()
    bare = [dataclasses.replace(one, entropy=None) for one in records]
    same = [dataclasses.replace(one, rollout_version=5, trainer_version=5) for one in bare]
    for lacking in (bare, records[:12], bare[:12], same if cause != "stale_weights" else bare):
        assert {one.cause for one in diagnose(lacking).causes if one.confidence > 0.65} <= {cause}


@pytest.mark.parametrize("cause, seed", [("truncated_prompt", 2), ("truncated_prompt", 4), ("stale_prefix_cache", 4)])
def test_of_few_sequences_another_prompt_and_other_weights_look_alike(cause, seed):
    few = world(cause, seed=seed).records()[:12]
    report = diagnose([dataclasses.replace(one, rollout_version=5, trainer_version=5) for one in few])
    assert report.verdict != cause and report.confidence <= 0.65


@pytest.mark.parametrize("versions", [(None, None), (0, 2)])
def test_a_temperature_is_read_of_the_sequences_with_entropy(versions):
    """Of each generation the trainers have the entropy of the first optimizer step alone."""
    records = [
        dataclasses.replace(one, rollout_version=versions[0], trainer_version=versions[1])
        for one in world("temperature").records()
    ]
    some = [one if at < 8 else dataclasses.replace(one, entropy=None) for at, one in enumerate(records)]
    report = diagnose(some)
    assert [one.cause for one in report.causes] == ["temperature"] and report.confidence == 0.5
    alone = [
        dataclasses.replace(one, entropy=None, logp=one.old_logp - 0.01, prompt_ids=np.r_[one.prompt_ids, at])
        for at, one in enumerate(records)
    ]
    none = diagnose(alone)
    assert all(one.confidence <= 0.65 for one in none.causes if one.cause != "policy_updates")
    assert any("temperature" in one and "entropy" in one for one in none.cannot_tell)


def versioned_dropout(age, size=0.2):
    """old_logp of a sampler that scores without dropout, and logp of the trainer, with dropout on."""
    rng = np.random.default_rng(0)
    return [
        dataclasses.replace(
            one,
            logp=one.old_logp + size * rng.standard_normal(len(one.old_logp)),
            rollout_version=5 - age,
            trainer_version=5,
        )
        for one in world("clean").records()
    ]


def test_a_logp_that_differs_where_no_update_was_made_is_dropout():
    report = diagnose(versioned_dropout(0))
    assert (report.verdict, report.confidence, len(report.causes)) == ("dropout", 0.65, 1)
    assert "where, by the logged versions, no update was made" in report.causes[0].evidence
    assert any("computed in another way than logp" in one for one in report.cannot_tell)
    own_updates = "own updates on the batch, where trainer_version is that of the weights of old_logp"
    assert any(own_updates in one for one in report.cannot_tell)
    alone = diagnose(versioned_dropout(0)[::4])  # no context twice
    assert (alone.verdict, alone.confidence) == ("dropout", 0.5)
    some = diagnose([*versioned_dropout(0)[:8], *versioned_dropout(3)[8:]])
    assert [one.cause for one in some.causes] == ["dropout"]
    for others in (versioned_dropout(3), versioned_dropout(0, size=0.01)):
        assert diagnose(others).verdict == "policy_updates"


def unversioned(records):
    return [dataclasses.replace(one, rollout_version=None, trainer_version=None) for one in records]


def test_without_versions_a_logp_that_does_not_repeat_itself_may_be_dropout():
    """Samples of one prompt begin alike: after updates alone their log-probs there are the same."""
    noisy = diagnose(unversioned(versioned_dropout(0)))
    assert (noisy.verdict, noisy.confidence) == ("policy_updates", 0.5)
    assert any("the trainer's dropout, which makes logp another" in one for one in noisy.cannot_tell)
    shift = np.random.default_rng(0).normal(0, 0.3, 1000)
    moved = [
        dataclasses.replace(one, logp=one.old_logp + shift[one.completion_ids]) for one in world("precision").records()
    ]
    repeated = diagnose(unversioned(moved))  # which another prompt of that pass does, too
    assert (repeated.verdict, repeated.confidence) == ("policy_updates", 0.5)
    assert not any("dropout" in one for one in repeated.cannot_tell)
    assert any("a fault of logp itself, alone or beside updates" in one for one in repeated.cannot_tell)


def test_beside_updates_a_logp_that_does_not_repeat_itself_is_asked_about():
    report = diagnose(versioned_dropout(3))
    assert report.verdict == "policy_updates" and report.confidence == 0.5
    assert any("is the trainer's dropout" in one for one in report.cannot_tell)


def test_a_few_of_the_updates_make_no_dropout():
    """Of all sequences the updates have moved logp far more than of those without an update."""
    few = [*versioned_dropout(0, size=0.03)[:8], *versioned_dropout(3, size=0.3)[8:]]
    assert diagnose(few).verdict == "policy_updates"


def test_without_entropy_a_ban_is_no_sure_top_k():
    """One of the two names in a third of the dumps, since a few largest d alone tell them apart."""
    banned = [dataclasses.replace(one, entropy=None) for one in world("logit_mask", seed=4).records()]
    report = diagnose(banned)
    assert report.verdict == "top_k" and report.confidence == 0.5
    assert any("top_k or a ban of some tokens" in one and "log entropy" in one for one in report.cannot_tell)
    assert diagnose(world("logit_mask", seed=4).records()).verdict == "logit_mask"
    kept = diagnose([dataclasses.replace(one, entropy=None) for one in world("top_k").records()])
    assert kept.confidence == 0.5 and any("top_k or a ban of some tokens" in one for one in kept.cannot_tell)
    known = diagnose(world("top_k").records())
    assert known.confidence == 0.5 and any("a low min_p, which leaves" in one for one in known.cannot_tell)
    assert not any("a ban of some tokens" in one for one in known.cannot_tell)


def test_log_probs_that_the_tokens_were_not_drawn_with_are_of_no_other_weights():
    """Scored after another prompt: the mean ratio is above 1, as for no two policies."""
    made = world(sequences=96)
    made.logged = lambda drawn, plain: simulated.log_softmax(noise(1.5, shared=True)(plain, made))
    report = diagnose(made.records())
    assert report.verdict == "chat_template" and report.confidence == 0.5
    assert "the sampler's log-probs are not those that the tokens were drawn with" in report.causes[0].evidence
    assert any("rows in another order" in one for one in report.cannot_tell)
    assert not any("int4" in one or "weights that are older" in one for one in report.cannot_tell)


def test_the_share_that_is_explained_decides_between_all_sequences_and_a_part():
    """Half of the sequences at another temperature, in which the fit on all of them finds a little of it."""
    cold, right = world("temperature").records(), world("clean").records()
    for seed in range(3):
        mixed = [cold[row] if row % 2 else right[row] for row in range(len(right))]
        np.random.default_rng(seed).shuffle(mixed)
        (found,) = diagnose(mixed).causes
        assert found.cause == "temperature" and found.share > 0.8 and "16 of the 32 sequences" in found.evidence


def test_a_placeholder_of_zero_is_taken_away_where_the_token_is_likely_too():
    def zeros(columns, world):
        columns["rollout_logp"][world.rng.random(columns["rollout_logp"].shape) < 0.05] = 0.0

    found = diagnose(simulated.World(edits=[zeros]).records()).causes
    assert [finding.cause for finding in found] == ["sentinel"]


def test_zeros_of_a_truncation_by_other_weights_are_no_placeholders():
    """A token that is alone has a log-prob of 0, whatever the newer weights find; placeholders choose no tokens."""
    made = world("top_p")
    made.trainer, made.sampler = noise(2.0, shared=True), nucleus(0.6)
    report = diagnose(made.records())
    zero = report.evidence.sampler[report.evidence.trainer < -1.5] == 0
    assert zero.sum() >= 3 and "sentinel" not in {one.cause for one in report.causes}


def test_zeros_of_a_truncation_that_is_not_named_are_asked_about():
    report = diagnose(world("stale_weights", "top_p").records())
    assert values.zeros_of_truncation(report.evidence)
    assert not any("exactly 0 from the sampler" in one for one in questions.open_questions(report.evidence, ["top_p"]))
    asked = questions.open_questions(report.evidence, ["stale_weights"])
    assert any("exactly 0 from the sampler" in one for one in asked)


def test_clean_is_not_certain_without_a_model():
    """A penalty that neither side logs is in no log-prob, and of two columns that are equal one may be a copy."""
    report = diagnose(world().records())
    assert (report.verdict, report.confidence) == ("clean", 0.5) and "number for number" in report.cannot_tell[0]
    computed = [dataclasses.replace(one, old_logp=one.old_logp - 1e-7) for one in world().records()]
    report = diagnose(computed)
    assert (report.verdict, report.confidence) == ("clean", 0.9) and "number for number" not in report.cannot_tell[0]
    assert any("drawn under a penalty" in one and "--model" in one for one in report.cannot_tell)
    assert not any("penalty" in one for one in questions.open_questions(report.evidence, [], draws_known=True))


def test_older_weights_by_their_size_alone_are_no_surer_than_another_prompt():
    """A large d, as of another header of the prompt, without versions or growth that speak for weights."""
    far = world()
    far.trainer = simulated.noise(3.0, shared=True)
    report = diagnose(far.records())
    assert report.verdict == "stale_weights" and report.confidence <= 0.8
    assert any("another prompt, template or position" in one for one in report.cannot_tell)
    for old in (3, 18):
        older = [dataclasses.replace(one, rollout_version=old, trainer_version=19) for one in far.records()]
        report = diagnose(older)
        assert report.verdict == "stale_weights" and report.confidence == 0.5
        assert any("another prompt" in one for one in report.cannot_tell)


def test_a_difference_that_is_larger_in_older_samples_is_of_their_age():
    """No other prompt and no precision does that."""

    def aged(sampler):
        records = []
        for age, size in ((1, 0.3), (8, 2.0), (16, 3.0)):
            made = world(seed=age)
            made.trainer, made.sampler = simulated.noise(size, shared=True), sampler or made.sampler
            of_age = {"rollout_version": 19 - age, "trainer_version": 19}
            records += [dataclasses.replace(one, **of_age) for one in made.records()]
        return diagnose(records)

    report = aged(None)
    assert report.verdict == "stale_weights" and report.confidence > 0.7
    assert not any("another prompt" in one or "int4" in one for one in report.cannot_tell)
    truncated = {one.cause: one.confidence for one in aged(nucleus(0.8)).causes}
    assert truncated["stale_weights"] == 0.5  # the mean ratio is below 1


def over_updates(records, first=0):
    """Of up to three updates after the first age, the same for the four samples of a prompt."""
    by_updates = []
    for at, one in enumerate(records):
        age = first + at // 4 % 4
        logp = one.old_logp + np.sqrt(age) * (one.logp - one.old_logp)
        by_updates.append(dataclasses.replace(one, logp=logp, rollout_version=7 - age, trainer_version=7))
    return by_updates


def test_an_old_logp_that_is_a_copy_may_hide_any_difference():
    """logp then differs from it by all that trainer and sampler differ by, with no update."""
    asked = "old_logp is rollout_logp, number for number"
    for cause in ("chat_template", "stale_weights", "precision"):
        copied = [
            dataclasses.replace(one, logp=one.old_logp, old_logp=one.rollout_logp) for one in world(cause).records()
        ]
        report = diagnose(copied)
        assert report.verdict == "policy_updates" and report.confidence == 0.5
        assert any(asked in one for one in report.cannot_tell)
        older = diagnose(over_updates(copied))
        assert older.confidence > 0.9 if cause == "stale_weights" else older.confidence == 0.5
        assert not any(asked in one for one in older.cannot_tell)


@pytest.mark.parametrize("cause", ["chat_template", "truncated_prompt", "stale_prefix_cache"])
def test_a_prompt_is_no_surer_the_cause_than_the_age_of_the_weights(cause):
    """A small policy some updates later differs most at the first tokens, as after another prompt."""
    records = world(cause).records()
    alternative = "weights that are older, as where an adapter"
    for versions, said in (((None, None), True), ((5, 5), False), ((3, 19), True)):
        given = [dataclasses.replace(one, rollout_version=versions[0], trainer_version=versions[1]) for one in records]
        report = diagnose(given)
        assert (report.verdict, report.confidence) == (cause, 0.5)
        older = "which may leave the same" in report.causes[0].evidence
        assert older == (versions == (3, 19))
        if cause != "stale_prefix_cache":
            assert any(alternative in one for one in report.cannot_tell) == said
    # Under a snapshot logp is of later weights, and d is not.
    shift = [dataclasses.replace(one, logp=one.old_logp - 3.0) for one in given]
    found = {one.cause: one for one in diagnose(shift).causes}
    assert found[cause].confidence == 0.5


def test_two_sequences_that_differ_from_some_token_on_are_no_sure_other_text():
    records = world("retokenised", sequences=32).records()
    own = world(sequences=32).records()
    few = diagnose(records[:4] + own[4:])
    assert [one.cause for one in few.causes] == ["retokenised"] and few.confidence <= 0.65
    assert any("another model, or weights far from those" in one for one in few.cannot_tell)
    assert diagnose(records).confidence > 0.9


@pytest.mark.parametrize("apart", [0, 3])
def test_sequences_that_differ_from_one_token_on_are_no_sure_other_text(apart):
    """Weights that were loaded while sampling begin at one token in all of them."""
    made = world(sequences=32)

    def from_one_token_on(columns, world):
        for row, at in ((0, 6), (5, 6 + apart), (9, 6)):
            columns["old_logp"][row, at] -= 12.0
            columns["old_logp"][row, at + 1 :] -= world.rng.exponential(1.5, world.tokens - at - 1)

    made.edits += [from_one_token_on]
    (found,) = (one for one in diagnose(made.records()).causes if one.cause == "retokenised")
    assert "at index 6 to" in found.evidence and (found.confidence > 0.5) == (apart > 0)


def test_tokens_that_a_policy_gave_up_are_no_sure_other_text():
    """A policy that has moved far since it sampled finds some tokens next to impossible, and differs before them."""
    moved = world("retokenised", sequences=32)
    moved.trainer = simulated.noise(0.05, shared=True)
    report = diagnose(moved.records())
    (found,) = (one for one in report.causes if one.cause == "retokenised")
    assert found.confidence == 0.5 and "may have given up such tokens" in found.evidence
    assert any("tokens that one side forbids (min_tokens, ignore_eos" in one for one in report.cannot_tell)
    (found,) = diagnose(world("retokenised", sequences=32).records()).causes
    assert found.confidence > 0.9 and "given up" not in found.evidence


def test_one_sequence_that_fits_again_by_chance_shows_no_other_text():
    moved = world("retokenised", sequences=32)
    moved.trainer = simulated.noise(0.05, shared=True)
    records = moved.records()
    old = records[1].rollout_logp.copy()
    old[20:-1] = old[21:]  # the only one whose log-probs fit when they are moved
    (found,) = (
        one
        for one in diagnose([records[0], dataclasses.replace(records[1], old_logp=old), *records[2:]]).causes
        if one.cause == "retokenised"
    )
    assert "in 1 of them the sampler's log-probs fit again" in found.evidence
    assert found.confidence == 0.5 and "may have given up such tokens" in found.evidence


def test_a_temperature_that_leaves_a_fiftieth_is_unsure():
    """Updates that sharpened a small policy have left .98 of the spread of d to a temperature."""
    report = diagnose(list(sharper(0.08)))
    assert report.verdict == "temperature" and report.confidence <= 0.65
    assert any("sharper, or flatter" in one for one in report.cannot_tell)
    assert diagnose(list(sharper(0.0))).confidence == 0.95


def test_a_softcap_of_the_logits_is_no_certain_temperature():
    """It leaves a temperature nearly all of the spread of d, and the temperature removes less of d than fits it."""
    made = world(sequences=32)
    made.sampler = lambda logits, world: 5 * np.tanh(logits / 5)
    report = diagnose(made.records())
    assert report.verdict == "temperature" and report.confidence <= 0.8 and report.causes[0].rough
    assert any("softcap" in one and "--model" in one for one in report.cannot_tell)


def flattened(rule, scale, **options):
    """Records of a policy whose distributions have logits of one standard deviation, which is small."""

    def scaled(logits):
        return scale * logits / logits.std(-1, keepdims=True)

    made = world(**options)
    made.trainer, made.sampler = lambda logits, _: scaled(logits), lambda logits, world: rule(scaled(logits), world)
    return made.records()


@pytest.mark.parametrize("scale", [0.15, 0.4, 1.0])
@pytest.mark.parametrize(
    "rule",
    [
        nucleus(0.8),
        nucleus(0.5),
        simulated.kept(lambda p: p >= np.sort(p, -1)[..., -30, None]),
        simulated.kept(lambda p: p >= 0.5 * p.max(-1, keepdims=True)),
        simulated.banned,
    ],
    ids=["top_p .8", "top_p .5", "top_k", "min_p", "ban"],
)
def test_no_truncation_of_a_flat_policy_is_named_for_sure(rule, scale):
    """Where about as many tokens are kept in every context, d is nearly one number, whatever keeps them."""
    report = diagnose(flattened(rule, scale))
    assert report.verdict in ("top_p", "top_k", "min_p", "logit_mask") and report.confidence <= 0.5
    assert any("the policy is so flat, or" in one for one in report.cannot_tell)


def test_unlikely_tokens_that_are_missing_are_no_mask():
    """Of a policy as flat as a top-p of .8 leaves the balance little to see, and yet too much for a mask."""
    report = diagnose(flattened(nucleus(0.8), 0.6, sequences=96))
    assert report.verdict == "top_p" and "unlikely tokens alone" not in report.causes[0].evidence


@pytest.mark.parametrize("scale", [0.4, 1.0])
def test_log_probs_divided_after_the_softmax_are_no_temperature(scale):
    made = world()
    made.trainer = made.sampler = lambda logits, world: scale * logits / logits.std(-1, keepdims=True)
    made.logged = lambda drawn, plain: drawn / 0.7
    assert diagnose(made.records()).verdict == "unnormalised"


def test_a_temperature_of_a_policy_that_sharpens_is_no_update_that_does_not_arrive():
    """d grows over the steps as the policy does, and in each a temperature explains all of it."""
    steps = []
    for step in range(12):
        made = world(sequences=8, seed=step)
        made.trainer = lambda logits, _, at=step: (0.4 + 0.1 * at) * logits
        made.sampler = lambda logits, _, at=step: (0.4 + 0.1 * at) * logits / 1.5
        steps += [dataclasses.replace(one, step=step) for one in made.records()]
    assert growth(Evidence.of(steps)) is not None
    assert diagnose(steps).verdict == "temperature"


def test_sampled_ends_that_are_far_off_are_not_appended():
    """A temperature moves an unlikely end token by more than it moves others."""

    def ends(columns, world):
        rng = np.random.default_rng(1)
        columns["completion_ids"][::3, -1] = 1
        columns["old_logp"][::3, -1] = -4 - rng.random(len(columns["old_logp"][::3]))
        columns["rollout_logp"][::3, -1] = columns["old_logp"][::3, -1] - 2.5

    records = simulated.World(edits=[ends]).records()
    shorter = [one if row % 3 else cut(one, 20 + row % 24) for row, one in enumerate(records)]
    assert "appended_eos" in {one.cause for one in diagnose(records).causes}, "all of the greatest length"
    assert "appended_eos" not in {one.cause for one in diagnose(shorter).causes}


def test_a_made_up_log_prob_is_not_always_of_a_made_up_end():
    """Ends that were sampled, early, and whose log-prob somebody filled in, look as appended ones do."""

    def ends(columns, world):
        columns["completion_ids"][::3, -1] = 1
        columns["old_logp"][::3, -1] = -4.0
        columns["rollout_logp"][::3, -1] = 0.0

    records = simulated.World(edits=[ends]).records()
    limit = diagnose([cut(one, 20 + row % 24) if row % 3 else one for row, one in enumerate(records)])
    assert limit.verdict == "appended_eos" and limit.confidence > 0.9
    assert not any("filled in" in one for one in limit.cannot_tell)
    early = [one if row % 3 else cut(one, 20 + row % 24) for row, one in enumerate(records)]
    for report in (diagnose(early), diagnose(records)):  # the latter: outputs of one length need no limit
        assert report.verdict == "appended_eos" and report.confidence == 0.5
        assert any("that the model sampled, and whose log-prob somebody filled in" in one for one in report.cannot_tell)


def cut(record, length):
    """The record with the last token after ``length - 1`` others."""
    chosen = [*range(length - 1), len(record) - 1]
    names = ("completion_ids", "rollout_logp", "old_logp", "entropy", "mask")
    return dataclasses.replace(record, **{name: getattr(record, name)[chosen] for name in names})


def test_a_second_cause_beside_a_penalty_is_asked_about():
    report = diagnose(world("repetition_penalty").records())
    assert any("a penalty moves each context by another amount" in one for one in report.cannot_tell)


@pytest.mark.parametrize(("rewarded", "symbols"), [(1, 60), (10, 300)])
def test_updates_that_rewarded_a_token_of_the_prompt_are_no_sure_penalty(rewarded, symbols):
    """The sampler's older weights have less of it, and more of all others, as under a penalty on this token."""
    draw = np.random.default_rng(0)
    usual = np.r_[np.full(rewarded, 0.7 / rewarded), np.full(symbols - rewarded, 0.3 / (symbols - rewarded))]
    logits = np.log(usual) + draw.standard_normal((symbols, symbols))
    better = logits.copy()
    better[:, :rewarded] += 0.15
    sampler, trainer = (one - np.log(np.exp(one).sum(-1, keepdims=True)) for one in (logits, better))
    entropy = -(np.exp(trainer) * trainer).sum(-1)
    records = []
    for at in range(120):
        ids = [rewarded + at % 10]
        for _ in range(15):
            ids.append(int(draw.choice(symbols, p=np.exp(sampler[ids[-1]]))))
        before, after = ids[:-1], ids[1:]
        row = {"rollout_logp": sampler[before, after], "old_logp": trainer[before, after], "entropy": entropy[before]}
        records.append(Record.of({"prompt_ids": [*range(rewarded), ids[0]], "completion_ids": after} | row))
    report = diagnose(records)
    found = [one for one in report.causes if one.cause == "repetition_penalty"]
    assert len(found) == (rewarded > 1)
    if found:
        assert found[0].confidence <= 0.65
        assert any("rewarded tokens of the prompt" in one for one in report.cannot_tell)


def in_all_contexts(logits, world):
    """An id has one probability, whatever stood before it."""
    return np.broadcast_to(3 * np.sin(np.arange(simulated.VOCABULARY)), logits.shape)


def test_a_ban_of_a_nearly_uniform_policy_is_no_sure_other_quantity():
    """It moves all log-probs by about one number."""
    made = World(trainer=lambda logits, world: 0.0 * logits)
    made.sampler = lambda logits, world: simulated.banned(0.0 * logits, world)
    report = diagnose(made.records())
    assert report.confidence <= 0.5
    assert any("ban" in one for one in report.cannot_tell)


def test_a_truncation_where_contexts_are_alike_is_no_sure_bias():
    made = World(trainer=in_all_contexts)
    made.sampler = lambda logits, world: nucleus(0.6)(in_all_contexts(logits, world), world)
    report = diagnose(made.records())
    assert report.confidence <= 0.5


@pytest.mark.parametrize("seed", range(3))
def test_what_leaves_different_tokens_after_one_prefix_alike_is_no_temperature(seed):
    """As a penalty on tokens that stood in the completion, which looks like a temperature from the second token on."""
    made = World(seed=seed, sequences=128, entropy=False)
    made.sampler = lambda logits, world: np.where(np.arange(world.tokens)[:, None] > 0, logits / 0.7, logits)
    assert not {one.cause for one in diagnose(made.records()).causes} & {"temperature", "raw_logprobs"}


def test_values_that_nobody_writes_are_no_sure_placeholders():
    """A clamp of the logits leaves some that are like none, and a placeholder is a round number."""

    def filled(value):
        records = world(sequences=64).records()
        return [
            dataclasses.replace(
                one, rollout_logp=np.where(np.arange(len(one)) % 24 == at % 24, value, one.rollout_logp)
            )
            for at, one in enumerate(records)
        ]

    found = {value: diagnose(filled(value)).causes[0] for value in (-0.0007, -7.0)}
    assert {one.cause for one in found.values()} == {"sentinel"}
    assert found[-0.0007].confidence == 0.5 < found[-7.0].confidence


@pytest.mark.parametrize("filled", [0.0, -0.1])
def test_end_tokens_whose_log_probs_are_filled_in_are_no_truncation_and_no_routing(filled):
    """The model is nearly certain of them, so that |d| is small; all other tokens agree."""
    records = []
    for at, one in enumerate(world(sequences=64).records()):
        one = cut(one, 12 + at % 30)
        ids, rollout, old = one.completion_ids.copy(), one.rollout_logp.copy(), one.old_logp.copy()
        ids[-1], rollout[-1], old[-1] = 1, filled, -0.15 - 0.08 * (at % 4)
        records.append(dataclasses.replace(one, completion_ids=ids, rollout_logp=rollout, old_logp=old))
    report = diagnose(records)
    assert [one.cause for one in report.causes] == ["appended_eos"] and report.confidence == 0.5
    assert any("whose log-prob somebody filled in" in one for one in report.cannot_tell)


def test_a_certain_token_that_rounding_raised_is_no_placeholder():
    records = [
        dataclasses.replace(one, rollout_logp=np.where(np.arange(len(one)) % 20 == 7, 2e-6, one.rollout_logp))
        for one in world("top_p").records()
    ]
    assert "sentinel" not in {one.cause for one in diagnose(records).causes}


def test_a_ban_that_neither_side_logged_is_asked_about():
    made = World(sequences=64, sampler=simulated.banned, logged=simulated.raw)
    report = diagnose(made.records())
    assert report.causes[0].confidence == 0.5
    assert any("a ban or a bias of some tokens" in one for one in report.cannot_tell)


@pytest.mark.parametrize("side", ["old_logp", "rollout_logp"])
def test_a_number_that_one_side_added_is_of_the_side_that_is_out_of_balance(side):
    """The entropy tells the trainer's, so that none is taken for a temperature that neither side logged."""
    records = [dataclasses.replace(one, **{side: getattr(one, side) - 0.5}) for one in world().records()]
    report = diagnose(records)
    assert [one.cause for one in report.causes] == ["other_quantity"]
    assert f"the {'trainer' if side == 'old_logp' else 'sampler'}'s values are off by" in report.causes[0].evidence


@pytest.mark.parametrize(
    ("entropy", "said"),
    [
        (lambda one: -one.entropy, "is below 0"),
        (lambda one: -one.old_logp, "is -old_logp"),
        (lambda one: 0 * one.entropy, "is 0"),
    ],
)
def test_an_entropy_that_is_none_is_left_out_and_asked_about(entropy, said):
    records = world("temperature_silent").records()
    report = diagnose([dataclasses.replace(one, entropy=entropy(one)) for one in records])
    assert report.verdict == "clean" and report.evidence.entropy is None
    assert any(f"the logged one was left out, as it {said}" in one for one in report.cannot_tell)
    assert diagnose(records).verdict == "temperature_silent"


def test_versions_that_make_the_sampler_the_newer_side_are_asked_about():
    records = [
        dataclasses.replace(one, rollout_version=5, trainer_version=3) for one in world("stale_weights").records()
    ]
    report = diagnose(records)
    assert any("rollout_version is above trainer_version in 32 of 32 sequences" in one for one in report.cannot_tell)
    assert any("newer weights of the sampler" in one for one in report.cannot_tell)


def test_a_difference_of_one_direction_is_unsure(cause="precision"):
    """A bias raises all other tokens."""
    found = {}
    for more in (1.0, 0.0):  # beside noise, and without any direction
        made = world(cause)
        columns = []
        for one in made.records():
            raised = more * np.abs(one.old_logp - one.rollout_logp) + (1 - more) * (one.rollout_logp - one.old_logp)
            keep = np.arange(len(one)) % 5 > 0
            columns.append(dataclasses.replace(one, rollout_logp=one.old_logp + np.where(keep, raised, -raised)))
        found[more] = diagnose(columns)
    assert found[1.0].verdict == found[0.0].verdict == cause
    asked = [
        any("penalty" in said and f"cause is {cause}" in said for said in one.cannot_tell) for one in found.values()
    ]
    assert asked == [True, False]


@pytest.mark.parametrize("cause", ["precision", "kv_cache"])
@pytest.mark.parametrize("edits", [[], [simulated.versions(0)], [simulated.versions(0, now=0)]])
def test_a_small_difference_is_no_sure_rounding(cause, edits):
    """A little staleness leaves the same, and another prompt may, also where the versions are equal."""
    made = world(cause)
    made.edits = edits
    assert [one.confidence for one in diagnose(made.records()).causes if one.cause == cause] == [0.5]


@pytest.mark.parametrize("side", ["rollout_logp", "old_logp"])
def test_clean_is_said_of_the_tokens_that_both_sides_scored(side):
    """Of an engine that does not report the unlikely tokens, the others say little."""
    records = world("clean").records()
    assert diagnose(records).confidence == 0.9 and of_one_side(records) == (0.0, "")
    third = np.arange(48) % 3 == 1
    few = [dataclasses.replace(one, **{side: np.where(third, np.nan, getattr(one, side))}) for one in records]
    report = diagnose(few)
    assert (report.verdict, report.confidence) == ("clean", 0.5) and "where both are known" in headline(report)
    assert "at the other 512 of 1,536 tokens, too" in report.cannot_tell[0]
    assert to_do(report)[1].startswith("To do: log the log-probs of both sides for every token")
    masked = diagnose([dataclasses.replace(one, mask=~third) for one in few])
    assert masked.confidence == 0.9 and "agree (" in headline(masked)


def test_clean_is_less_sure_without_entropy():
    """Nothing else shows a temperature that neither side's log-probs carry."""
    records = [dataclasses.replace(one, entropy=None) for one in world("clean").records()]
    assert (diagnose(records).verdict, diagnose(records).confidence) == ("clean", 0.7)


def test_updates_are_told_from_dropout_by_contexts_that_were_scored_more_than_once():
    records = over_updates(world("policy_updates").records())
    report = diagnose(records)
    assert report.verdict == "policy_updates" and 0.5 < report.confidence <= 0.95
    assert not any("dropout" in one for one in report.cannot_tell)
    alone = [dataclasses.replace(one, prompt_ids=np.r_[at, one.prompt_ids]) for at, one in enumerate(records)]
    report = diagnose(alone)
    assert (report.verdict, report.confidence) == ("policy_updates", 0.5)
    assert any("cause is policy_updates or the trainer's dropout" in one for one in report.cannot_tell)


@pytest.mark.parametrize("shared", [True, False])
def test_updates_are_told_from_noise_of_logp_by_what_contexts_share(shared):
    """Such as of a forward pass in bfloat16, or after another prompt."""
    made = world("clean")
    made.edits = [simulated.moved]
    records = made.records()
    if not shared:
        rng = np.random.default_rng(0)
        size = {one.completion_ids[0]: rng.normal(0, 0.01) for one in records}
        for at, one in enumerate(records):
            noise = np.r_[size[one.completion_ids[0]], rng.normal(0, 0.01, len(one) - 1)]
            records[at] = dataclasses.replace(one, logp=one.old_logp + noise)
    report = diagnose(over_updates(records))
    assert report.verdict == "policy_updates" and (report.confidence > 0.5) == shared


def test_a_small_difference_of_few_tokens_is_unsure():
    """A small penalty or bias leaves it in a few tokens of the vocabulary, and rounding in all."""
    found = {}
    for times in (1.0, 8.0):
        columns = []
        for one in world("precision").records():
            d = one.old_logp - one.rollout_logp
            columns.append(
                dataclasses.replace(
                    one, rollout_logp=one.old_logp - d / 2 * np.where(np.arange(len(d)) % 16 == 7, times, 1.0)
                )
            )
        found[times] = diagnose(columns)
    assert found[1.0].verdict == found[8.0].verdict == "precision"
    asked = [
        any("penalty" in said and "cause is precision" in said for said in one.cannot_tell) for one in found.values()
    ]
    assert asked == [False, True]


def test_a_policy_that_is_certain_of_its_tokens_was_not_stored_in_bf16():
    """In float32 log-probs near 0 are few multiples of the logits' last digit."""
    random = np.random.default_rng(0)
    records = []
    for one in world("precision").records():
        logp = -(2.0**-20) * random.integers(1, 200, len(one))
        records.append(dataclasses.replace(one, rollout_logp=logp, old_logp=logp - 1e-5 * random.random(len(one))))
    assert not {"stored_bf16", "stored_rounded"} & {one.cause for one in diagnose(records).causes}


def test_a_penalty_that_is_hardly_there_for_the_typical_id_is_unsure():
    """Where tokens that were seen compete with each other, as in a small model, a penalty moves some of them little."""
    little = []
    for one in world("repetition_penalty", sequences=64).records():
        some = one.completion_ids % 5 < 3
        fewer = np.where(some & (one.old_logp > one.rollout_logp), one.old_logp + 0.12, one.rollout_logp)
        little.append(dataclasses.replace(one, rollout_logp=fewer))
    report = diagnose(little)
    assert (report.verdict, report.confidence) == ("repetition_penalty", 0.5)
    whole = diagnose(world("repetition_penalty", sequences=64).records())
    assert whole.confidence == 0.65 and "accounted" not in headline(whole)  # its share is a lower bound


def test_a_penalty_is_asked_about_beside_weights_that_changed():
    (asked,) = (one for one in CAUSES["weights_swapped"].not_told_from if "repetition_penalty" in one.words)
    assert not asked.settled(Evidence.of(world("repetition_penalty").records()))
    assert asked.settled(Evidence.of(world("weights_swapped").records()))


@pytest.mark.parametrize("entropy", [True, False])
def test_a_temperature_leaves_room_for_a_truncation_besides(entropy):
    """The fit of the temperature takes the truncation, of which the mean ratio tells."""
    made = World(sequences=128, entropy=entropy)
    made.sampler = lambda logits, world: simulated.nucleus(0.8)(logits / 1.4, world)
    report = diagnose(made.records())
    found = {one.cause: one for one in report.causes}["temperature"]
    kept = report.numbers["ratio_mean"] + 2 * report.numbers["ratio_mean_se"]
    truncated = -np.log(kept) / report.numbers["abs_mean"]
    assert found.confidence > 0.7 and found.share <= 1 - truncated < 0.9
    assert any("(top_p, top_k, min_p)" in one for one in report.cannot_tell)
    alone = World(sequences=128, entropy=entropy, seed=1)
    alone.sampler = lambda logits, world: logits / 1.4
    assert not any("(top_p, top_k, min_p)" in one for one in diagnose(alone.records()).cannot_tell)


def test_differences_of_one_sign_are_no_rounding():
    """A sampler that forbids an unlikely token makes all others likelier, by as little as rounding would."""
    made = world()
    made.sampler = lambda logits, world: np.where(logits < logits.min(-1, keepdims=True) + 1e-9, -np.inf, logits)
    report = diagnose(made.records())
    assert 0 < report.numbers["abs_mean"] < 0.01 and "precision" not in {one.cause for one in report.causes}


def test_zeros_among_differences_of_one_sign_may_be_of_a_truncation():
    """A token that is alone has a log-prob of 0, and other kept tokens are likelier to the sampler."""

    def zeros(columns, world):
        columns["rollout_logp"] = columns["old_logp"] * (0.8 + 0.2 * world.rng.random(columns["old_logp"].shape))
        for row in range(1, 20):
            columns["rollout_logp"][row, 20], columns["old_logp"][row, 20] = 0.0, -1.5 - 0.1 * row

    records = simulated.World(edits=[zeros]).records()
    report = diagnose(records)
    (one,) = [one for one in report.causes if one.cause == "sentinel"]
    assert one.confidence == 0.5
    assert any("a truncation (top_p, top_k, min_p) or structured decoding left" in said for said in report.cannot_tell)
    alone = CAUSES["sentinel"].found(Evidence.of(records))
    assert alone is not None and alone.surest == 0.5


def test_few_tokens_do_not_say_whose_temperature_it_is():
    """Of a flat policy both temperatures draw nearly alike."""
    for seed in range(3):
        report = diagnose(flattened(lambda logits, world: logits / 1.1, 0.3, seed=seed, sequences=16))
        assert report.verdict in ("temperature", "raw_logprobs") and report.confidence <= 0.5
        assert any("compare the temperatures of both sides" in one for one in report.cannot_tell)
    report = diagnose(world("temperature").records())
    assert report.confidence == 0.95 and not any("temperatures of both" in one for one in report.cannot_tell)


def of_one_step(records):
    """The records, which say that they are of one optimizer step, and that logp is of the weights of old_logp."""
    random = np.random.default_rng(7)
    noise = [0.2 * (1.01 - np.exp(one.old_logp)) * random.standard_normal(len(one)) for one in records]
    return [
        dataclasses.replace(
            one, step=1, rollout_version=3, trainer_version=3, logp=np.minimum(one.rollout_logp + by, -1e-6)
        )
        for one, by in zip(records, noise, strict=True)
    ]


def test_log_probs_that_depend_on_the_batch_are_no_sure_dropout():
    """Two samples in one batch get exactly the same where they begin alike, which under dropout no two do."""
    records, pairs = world("dropout", seed=1).records(), []
    for row, one in enumerate(records):
        first = records[row - row % 2]
        alike = np.cumprod(one.completion_ids == first.completion_ids).astype(bool)
        pairs.append(dataclasses.replace(one, old_logp=np.where(alike, first.old_logp, one.old_logp)))
    report = diagnose(pairs)
    assert (report.verdict, report.confidence) == ("dropout", 0.5)
    assert any("depends on the batch" in one for one in report.cannot_tell)
    report = diagnose(of_one_step(records))
    assert report.confidence > 0.8 and not any("depends on the batch" in one for one in report.cannot_tell)


@pytest.mark.parametrize("at", ["the end", "anywhere"])
def test_zeros_in_place_of_the_trainers_log_probs_are_placeholders(at):
    """As where it scored a shorter longest completion, or multiplied by a mask that the dump has not."""

    def edit(columns, world):
        old = columns["old_logp"]
        here = np.random.default_rng(3).random(old.shape) < 0.05
        if at == "the end":
            here = np.arange(old.shape[1]) >= 3 * old.shape[1] // 4 + np.zeros((len(old), 1), int)
        columns["old_logp"] = np.where(here, 0.0, old)

    made = world()
    made.edits = [edit]
    found = diagnose(made.records()).causes
    assert [one.cause for one in found] == ["sentinel"] and found[0].confidence > 0.9
    assert "have exactly 0 from the trainer" in found[0].evidence


@pytest.mark.parametrize("fault", [lambda x: x / 2, lambda x: x - 0.3 * np.sin(7 * x)])
def test_an_old_logp_that_is_wrong_alone_is_named(fault):
    """Neither the sampler nor the trainer's logp is blamed, and no update, of which there was none."""
    same = {"rollout_version": 0, "trainer_version": 0}
    records = [
        dataclasses.replace(one, logp=one.old_logp, old_logp=fault(one.old_logp), **same) for one in world().records()
    ]
    report = diagnose(records)
    assert [one.cause for one in report.causes] == ["other_quantity"] and report.confidence == 0.8
    assert "old_logp alone is at fault" in report.causes[0].evidence
    updated = [dataclasses.replace(one, trainer_version=2) for one in records]
    assert not any("alone is at fault" in one.evidence for one in diagnose(updated).causes)


def test_a_trainer_that_differs_from_itself_at_first_may_have_read_other_prompts():
    """Dropout makes as much at every token; what another prompt makes fades."""

    def fading(one, by):
        times = np.where(np.arange(len(one.old_logp)) < 6, by, 1.0)
        return np.minimum(one.rollout_logp + times * (one.old_logp - one.rollout_logp), -1e-6)

    for by in (5.0, 1.0):
        records = [dataclasses.replace(one, old_logp=fading(one, by)) for one in world("dropout").records()]
        report = diagnose(records)
        assert report.verdict == "dropout" and report.confidence == 0.5
        assert any("another prompt that the trainer read with each sample" in one for one in report.cannot_tell)


def test_a_second_cause_beside_dropout_is_asked_about():
    report = diagnose(of_one_step(world("dropout").records()))
    assert report.causes[0].rough and report.causes[0].confidence > 0.8
    assert any("the noise of dropout hides a second cause" in one for one in report.cannot_tell)
    assert not any("hides" in one for one in questions.open_questions(report.evidence, ["dropout"], draws_known=True))


def test_what_noise_may_leave_is_no_sure_second_cause_beside_dropout():
    """A sequence that is far off from some token on may be other text, or the noise; a placeholder is neither."""
    found = {one.cause: one for one in diagnose(world("dropout", "retokenised", sequences=64).records()).causes}
    assert "dropout" in found and found["retokenised"].confidence == 0.5
    assert found["retokenised"].evidence.endswith("dropout may leave the same")
    both = {one.cause: one.confidence for one in diagnose(world("dropout", "sentinel").records()).causes}
    assert both["sentinel"] > 0.8 and "dropout" in both


def test_a_trainer_that_differs_by_itself_has_no_cause_in_the_sampler(monkeypatch):
    """A little dropout, whose noise fades along the completion as of an old prefix cache."""
    draw = np.random.default_rng(0)
    noise, records = 0.003 + 0.012 * np.exp(-np.arange(48) / 8), []
    for prompt in range(16):
        ids, logp = draw.integers(2, 30, 48), -draw.exponential(size=48)
        for sample in range(4):  # which begin with the same three tokens, and go on with another one each
            ids[3:], logp[3:] = draw.integers(2, 30, 45), -draw.exponential(size=45)
            ids[3] = 30 + sample
            old = logp + noise * (1 - np.exp(logp)) * draw.standard_normal(48)
            records.append(Record(np.array([prompt]), ids.copy(), logp.copy(), np.minimum(old, 0.0)))
    report = diagnose(records)
    assert [(one.cause, one.confidence) for one in report.causes] == [("precision", 0.5)]
    assert any("a little dropout" in one for one in report.cannot_tell)
    assert not any("a little dropout" in one for one in diagnose(world("precision").records()).cannot_tell)
    monkeypatch.setattr(policies, "BY_ITSELF", np.inf)
    assert diagnose(records).verdict == "stale_prefix_cache"


@pytest.mark.parametrize(("entropy", "size"), [(True, 2.0), (False, 2.0), (True, 0.3)])
def test_other_weights_are_no_surer_than_a_temperature_or_a_coarse_precision(entropy, size):
    """Without entropy a temperature leaves the same as older weights; of whatever size, so may coarse rounding."""
    made = world(entropy=entropy)
    made.trainer = noise(size, shared=True)
    report = diagnose(made.records())
    asked = {name: any(name in one for one in report.cannot_tell) for name in ("a temperature that one", "int4")}
    assert report.verdict == "stale_weights" and report.confidence <= 0.65
    assert asked["int4"] and not (entropy and asked["a temperature that one"])
    beside = "temperature" in {one.cause for one in report.causes}
    assert entropy or asked["a temperature that one"] or beside
    hidden = any("alone or beside other weights" in one for one in report.cannot_tell)
    assert hidden == (entropy and not beside)
    older = [dataclasses.replace(one, rollout_version=3, trainer_version=19) for one in made.records()]
    report = diagnose(older)
    assert any("int4" in one for one in report.cannot_tell)  # versions of one age say nothing of d
    assert entropy or any("a temperature that one" in one for one in report.cannot_tell)
    # Where old_logp is of the weights that sampled, the lag is in another difference, and says nothing of d.
    moved = [dataclasses.replace(one, logp=one.old_logp - 3.0) for one in older]
    assert any("int4" in one for one in diagnose(moved).cannot_tell)


def test_another_prompt_is_no_surer_than_a_temperature_near_0():
    made = world(seed=2)
    made.sampler = lambda logits, world: logits / 0.1
    report = diagnose(made.records())
    assert (report.verdict, report.confidence) == ("chat_template", 0.5)
    assert any("a temperature near 0" in one for one in report.cannot_tell)
    assert not any("near 0" in one for one in diagnose(world("chat_template").records()).cannot_tell)


def test_another_prompt_is_no_surer_than_a_coarse_precision():
    """Unless the first token is far off, as where the text just before it differs."""
    made = world(sequences=128)
    made.trainer = noise(0.3)
    report = diagnose(made.records())
    assert report.verdict == "chat_template" and report.confidence == 0.5
    assert any("int4" in one for one in report.cannot_tell)
    report = diagnose(world("chat_template").records())
    assert report.verdict == "chat_template" and not any("int4" in one for one in report.cannot_tell)


def test_before_any_update_none_is_missing():
    """Versions that are all 0: the sampler cannot have older weights, but may round as coarsely."""
    made = world()
    made.trainer = noise(0.3, shared=True)
    made.edits = [simulated.versions(0)]
    assert diagnose(made.records()).verdict == "adapter_not_synced"
    first = [dataclasses.replace(one, rollout_version=0, trainer_version=0) for one in made.records()]
    report = diagnose(first)
    assert (report.verdict, report.confidence) == ("precision", 0.5)
    assert any("weights that the engine was not given" in one for one in report.cannot_tell)
    assert "none is missing (int4 has left 0.16 in a toy model)" in report.causes[0].evidence


def test_no_rounding_is_as_coarse_as_another_checkpoint():
    """Before any update no version explains it either: it has no name."""
    made = world()
    made.trainer = noise(1.0, shared=True)
    report = diagnose([dataclasses.replace(one, rollout_version=0, trainer_version=0) for one in made.records()])
    assert report.verdict == "unknown" and not report.causes
    assert any("It may be another checkpoint, prompt, template" in one for one in to_do(report))


def test_a_gap_that_is_there_before_any_update_is_of_none():
    """And does not grow, so that an update which is missing later explains none of it."""
    made = world()
    made.trainer = noise(0.3, shared=True)
    versions = [at * 6 // len(made.records()) for at in range(len(made.records()))]
    dated = [
        dataclasses.replace(one, rollout_version=at, trainer_version=at)
        for one, at in zip(made.records(), versions, strict=True)
    ]
    report = diagnose(dated)
    assert (report.verdict, report.confidence) == ("precision", 0.5)
    assert any("another prompt, template or position" in one for one in report.cannot_tell)
    later = [one for one in dated if one.rollout_version]
    report = diagnose(later)
    assert report.verdict == "adapter_not_synced" and report.confidence <= 0.65
    assert any("int4" in one for one in report.cannot_tell)


@pytest.mark.parametrize(("size", "verdict"), [(0.0, "temperature"), (0.01, "temperature"), (0.05, "stale_weights")])
def test_other_weights_that_are_a_little_flatter_leave_no_temperature(size, verdict):
    """As int4 rounds them: near 1 a temperature explains nearly all of d, or is none."""
    other = noise(size, shared=True)
    report = diagnose(World(sampler=lambda logits, world: other(logits, world) / 1.03).records())
    assert (report.verdict, report.confidence) == (verdict, 0.5)
    assert ("temperature" in {one.cause for one in report.causes}) == (verdict == "temperature")
    if verdict == "stale_weights":
        assert any("int4" in one for one in report.cannot_tell)


def test_more_steps_do_not_take_away_what_the_first_says():
    """A coarse sampler that is two updates behind, too, which adds little to the gap."""
    made = world()
    made.trainer = noise(0.3, shared=True)
    steps = [at * 6 // len(made.records()) for at in range(len(made.records()))]
    dated = [
        dataclasses.replace(one, step=at + 1, rollout_version=max(at - 2, 0), trainer_version=at)
        for one, at in zip(made.records(), steps, strict=True)
    ]
    report = diagnose(dated)
    assert (report.verdict, report.confidence) == ("precision", 0.5)
    assert any("weights that are a little older" in one for one in report.cannot_tell)
    later = diagnose([one for one in dated if one.trainer_version])
    assert later.verdict == "stale_weights"


def test_a_temperature_of_few_tokens_stands_beside_other_weights():
    """A fit needs 64 tokens; with fewer nothing speaks against a temperature, whatever the versions say."""
    made = world("stale_weights", sequences=8)
    made.edits = [simulated.versions(3)]
    few = [dataclasses.replace(one, mask=np.arange(len(one)) < 7) for one in made.records()]
    report = diagnose(few)
    assert (report.verdict, report.confidence) == ("stale_weights", 0.5)
    assert any("a temperature that one side" in one for one in report.cannot_tell)
    report = diagnose(made.records())
    assert report.verdict == "stale_weights"
    assert not any("a temperature that one side" in one for one in report.cannot_tell)


@pytest.mark.parametrize("share", [0.25, 0.5, 0.8])
@pytest.mark.parametrize("cause", ["shift", "temperature"])
def test_a_fault_of_some_sequences_is_named(cause, share):
    """As of one engine of several."""
    faulty, right = world(cause).records(), world("clean").records()
    part = round(share * len(right))
    (found,) = diagnose(faulty[:part] + right[part:]).causes
    assert found.cause == cause
    assert f"this is of {part} of the {len(right)} sequences: in the others the log-probs agree" in found.evidence


def test_sequences_that_have_an_age_are_no_engine_of_another_temperature():
    """The others are of the current weights, and agree; the updates sharpened the policy."""
    old = [dataclasses.replace(one, rollout_version=3, trainer_version=19) for one in sharper(0.05)]
    new = [dataclasses.replace(one, rollout_version=19, trainer_version=19) for one in world("clean").records()]
    causes = diagnose(old[:16] + new[16:]).causes
    assert not any("this is of 16 of" in one.evidence for one in causes if one.cause in ("temperature", "raw_logprobs"))
    dateless = [dataclasses.replace(one, rollout_version=None) for one in old[:16] + new[16:]]
    assert "temperature" in {one.cause for one in diagnose(dateless).causes}


def test_where_some_sequences_have_other_weights_the_report_says_how_many():
    other, right = world("stale_weights").records(), world("clean").records()
    report = diagnose(other[:10] + right[10:])
    assert report.verdict not in ("clean", "unknown")
    assert f"of 10 of the {len(right)} sequences: in the others the log-probs agree" in report.causes[0].evidence


def test_where_no_cause_of_some_sequences_fits_the_report_says_that_they_alone_differ():
    made = world()
    made.trainer = noise(0.1)
    right = world("clean").records()
    report = diagnose([one if row % 2 else right[row] for row, one in enumerate(made.records())])
    assert report.verdict == "unknown"
    said = "why some sequences differ and others do not; this is of 16 of the 32 sequences"
    assert any(said in one for one in report.cannot_tell)


@pytest.mark.parametrize("side", ["rollout_logp", "old_logp"])
@pytest.mark.parametrize(
    ("rounded", "said"),
    [
        (lambda values: values.astype(np.float16).astype(np.float64), "numbers that float16 can hold"),
        (lambda values: values.round(3), "have 3 decimals at most"),
        (lambda values: values.round(2).astype(np.float32).astype(np.float64), "have 2 decimals at most"),
        (lambda values: values.round(1), "have 1 decimal at most"),
    ],
)
@pytest.mark.parametrize("beside", ["clean", "temperature"])
def test_values_that_were_rounded_as_they_were_stored(side, rounded, said, beside):
    def edit(columns, world):
        columns[side] = rounded(columns[side])

    made = world(beside)
    made.edits = [*made.edits, edit]
    found = {one.cause: one for one in diagnose(made.records()).causes}
    assert set(found) == {"stored_rounded", beside} - {"clean"}
    assert said in found["stored_rounded"].evidence and found["stored_rounded"].confidence > 0.99


def sharper(others):
    """Records whose trainer's policy is a power of the sampler's, and differs by noise besides."""
    made = world()
    by_id = simulated.noise(others, shared=True)
    made.trainer = lambda logits, world: by_id(1.4 * logits, world) if others else 1.4 * logits
    return made.records()


@pytest.mark.parametrize(("pair", "of_zeros"), [(("top_p", "shift"), "sentinel"), (("mask", "top_p"), "mask")])
def test_zeros_beside_a_truncation_are_no_sure_placeholders(pair, of_zeros):
    """A token that it left alone has 0, too, which a shift moves to another token."""
    found = {one.cause: one for one in diagnose(world(*pair).records()).causes}
    assert found[of_zeros].confidence <= 0.65 and found[of_zeros].evidence.endswith("left alone has 0, too")
    assert found["top_p"].confidence <= 0.65
    assert found["top_p"].evidence.endswith(
        f"; more of the zeros of {of_zeros}, at tokens that are likely, leave the same"
    )
    assert diagnose(world("mask").records()).confidence > 0.9


@pytest.mark.parametrize(("temperature", "beside"), [(0.9, True), (1.0, False)])
def test_what_a_temperature_leaves_is_no_sure_second_cause(temperature, beside):
    """A penalty on repeated tokens beside it looks like weights that were swapped, as more tokens repeat later on."""
    made = world()
    made.trainer = noise(0.3, shared=True, where=simulated.positions(lambda t: t >= 22))
    made.sampler = lambda logits, world: logits / temperature
    made.edits = [simulated.versions(0)]
    (found,) = (one for one in diagnose(made.records()).causes if one.cause == "weights_swapped")
    assert found.confidence == 0.5 and ("it is what the temperature leaves" in found.evidence) == beside


@pytest.mark.parametrize("share", [1.0, 0.9, 0.8])
def test_a_truncation_that_older_weights_hide_is_asked_about(share):
    """By the mean ratio, which weights alone leave at 1."""
    made = world()
    made.trainer, made.sampler = noise(0.8, shared=True), simulated.nucleus(share) if share < 1 else made.sampler
    made.edits = [simulated.versions(3)]
    report = diagnose(made.records())
    assert [one.cause for one in report.causes] == ["stale_weights"] and report.confidence == 0.5
    assert any("and would be 1 for two policies" in one for one in report.cannot_tell) == (share < 1)


@pytest.mark.parametrize("age", [1, 12])
@pytest.mark.parametrize("entropy", [True, False])
def test_a_fault_of_some_sequences_is_not_of_an_age_that_all_have(entropy, age):
    """The others agree, and have the same versions: d is not of older weights."""
    faulty, right = (world(cause, entropy=entropy).records() for cause in ("temperature", "clean"))
    records = faulty[: len(faulty) // 4] + right
    report = diagnose([dataclasses.replace(one, rollout_version=3, trainer_version=3 + age) for one in records])
    assert "stale_weights" not in {one.cause for one in report.causes}
    assert (report.verdict, report.confidence) == ("temperature", 0.5) or not entropy
    # Where the sequences that differ are the older ones, it may be.
    versions = [3 + age * (at < len(faulty) // 4) for at in range(len(records))]
    older = [
        dataclasses.replace(one, rollout_version=3, trainer_version=version)
        for one, version in zip(records, versions, strict=True)
    ]
    assert not differing_sequences(Evidence.of(older))[0].ageless


@pytest.mark.parametrize("part", [1.0, 0.25])
def test_updates_beside_a_shift_are_no_dropout_where_one_context_has_one_logp(part):
    """Of the tokens that a shift leaves to compare, or of the sequences that have it, too few share a context."""
    shifted, right = world("shift").records(), world("clean").records()
    rows = shifted[: round(part * len(right))] + right[round(part * len(right)) :]
    moved = [
        dataclasses.replace(
            one, logp=one.old_logp - 0.2 * np.sin(one.completion_ids), rollout_version=4, trainer_version=4
        )
        for one in rows
    ]
    report = diagnose(moved)
    assert report.verdict == "shift" and report.confidence > 0.9
    assert {one.cause for one in report.causes} == {"shift", "policy_updates"}


def test_a_bias_of_one_token_among_rounding_is_no_sure_precision():
    """Few tokens, all of one id, have much of d."""

    def end(columns, world):
        columns["rollout_logp"][columns["completion_ids"] == 3] += 0.3

    made = world("precision")
    made.edits = [end]
    evidence = Evidence.of(made.records())
    assert policies.of_one_id(evidence) and not policies.of_one_id(Evidence.of(world("precision").records()))
    assert any("a bias or a ban of the token id" in one for one in open_questions(evidence, ["precision"]))


@pytest.mark.parametrize(("kept", "asked"), [(0.98, True), (1.0, False)])
def test_a_mean_ratio_a_little_below_1_is_asked_about_beside_other_weights(kept, asked):
    made = world()
    made.trainer = noise(0.1, shared=True)

    def raised(columns, world):
        columns["rollout_logp"] -= np.log(kept)

    made.edits = [raised]
    report = diagnose(made.records())
    assert report.numbers["ratio_mean"] > 0.96
    assert any("and would be 1 for two policies" in one for one in report.cannot_tell) == asked


def test_the_first_tokens_alone_are_no_sure_expert_routing():
    """As where one engine of several reads another prompt, which a small model soon forgets."""
    made = world()
    made.sampler = noise(2.0, where=simulated.positions(lambda t: np.exp(-1.0 * t)))
    records = made.records()[:8] + world("clean").records()
    report = diagnose(records)
    assert report.confidence <= 0.5
    assert "moe_routing" not in report.verdict or any("another prompt" in one for one in report.cannot_tell)


@pytest.mark.parametrize("size", [0.02, 3.0])
@pytest.mark.parametrize("cause", ["temperature", "shift", "stored_bf16"])
def test_what_is_logged_or_drawn_wrongly_precedes_the_trainers_updates(cause, size):
    """However far these moved the policy: they are no fault."""
    moved = [
        dataclasses.replace(one, logp=one.old_logp - size * (1 + np.sin(one.completion_ids)), rollout_version=3)
        for one in world(cause).records()
    ]
    report = diagnose([dataclasses.replace(one, trainer_version=4) for one in moved])
    assert report.verdict == cause and [one.cause for one in report.causes][-1] in (cause, "policy_updates")


def test_weights_that_are_loaded_from_some_token_on_are_no_sure_other_text():
    """They find some tokens next to impossible, too, and the others likely or unlikely as before."""
    made = world("retokenised")
    made.edits = []
    assert made.records()

    def loaded(columns, world):
        moved = columns["old_logp"] + 3.0 * np.sin(5.0 * columns["completion_ids"]) - 2.0
        columns["old_logp"][:, 12:] = np.minimum(moved, 0)[:, 12:]

    made = world()
    made.edits = [loaded]
    named = [one for one in diagnose(made.records()).causes if one.cause == "retokenised"]
    assert all(one.confidence == 0.5 for one in named)


def _reordered(records, padding):
    """The sampler's log-probs in another order of the rows, of which the shorter ones are filled up."""
    rng = np.random.default_rng(0)
    order, longest = rng.permutation(len(records)), max(map(len, records))
    padded = [np.r_[one.rollout_logp, np.full(longest - len(one), padding)] for one in records]
    return [
        dataclasses.replace(one, rollout_logp=padded[at][: len(one)]) for one, at in zip(records, order, strict=True)
    ]


def _of_various_lengths(cause, **options):
    rng = np.random.default_rng(1)
    cut = ("completion_ids", "rollout_logp", "old_logp", "entropy")
    records = []
    for one in world(cause, **options).records():
        length = int(rng.integers(8, len(one) + 1))
        records.append(dataclasses.replace(one, **{name: getattr(one, name)[:length] for name in cut}, mask=None))
    return records


def test_rows_in_another_order_that_were_padded_with_0_are_no_sure_mask():
    report = diagnose(_reordered(_of_various_lengths("clean", sequences=64), 0.0))
    assert all(one.confidence == 0.5 for one in report.causes if one.cause == "mask")
    assert any("rows in another order" in one for one in report.cannot_tell)


def test_rows_of_which_half_stand_in_another_order_are_asked_about():
    """The mean ratio of two policies is 1."""
    records = _of_various_lengths("clean", sequences=64)
    report = diagnose(_reordered(records[:32], np.nan) + records[32:])
    named = {one.cause for one in report.causes}
    assert not named or any("rows in another order" in one for one in report.cannot_tell), (named, report.cannot_tell)


@pytest.mark.parametrize("bound", [None, 6.0])
def test_a_temperature_is_unsure_where_no_samples_share_a_prompt(bound):
    """A softcap leaves nearly all of the spread of d to one, and so do updates of a policy that hardly chooses."""
    made = world()
    made.sampler = lambda logits, world: logits / 1.3 if bound is None else bound * np.tanh(logits / bound)
    records = [dataclasses.replace(one, prompt_ids=np.r_[one.prompt_ids, at]) for at, one in enumerate(made.records())]
    (named,) = (one for one in diagnose(records).causes if one.cause == "temperature")
    assert named.confidence == 0.5


LOGGED_WRONGLY = {
    "probabilities": np.exp,
    "negatives": np.negative,
    "another base": lambda logp: logp / np.log(2),
    "zeros": np.zeros_like,
    "the next token": lambda logp: np.r_[logp[1:], logp[-1:]],
    "divided": lambda logp: logp / 0.7,
    "bfloat16": lambda logp: torch.as_tensor(logp).bfloat16().double().numpy(),
}


@pytest.mark.parametrize("quantity", LOGGED_WRONGLY)
def test_a_fault_of_logp_is_no_sure_update(quantity):
    """It, too, may move a token in the same way everywhere, here of a policy that mostly looks at the token id."""
    updated = {"rollout_version": 3, "trainer_version": 4}
    alike = simulated.noise(3.0, shared=True)
    rounding = simulated.noise(0.003)
    made = simulated.World(trainer=lambda logits, world: alike(0.3 * logits, world))
    made.sampler = lambda logits, world: rounding(made.trainer(logits, world), world)
    records = [
        dataclasses.replace(one, logp=LOGGED_WRONGLY[quantity](one.old_logp), **updated) for one in made.records()
    ]
    report = diagnose(records)
    assert [one.confidence for one in report.causes if one.cause == "policy_updates"] == [0.5]
    assert any("a fault of logp itself" in one for one in report.cannot_tell)


def test_updates_are_no_fault_of_logp():
    for seed in range(3):
        records = world("policy_updates", seed=seed).records()
        report = diagnose(over_updates(records))
        assert report.verdict == "policy_updates" and report.confidence > 0.9
        assert any("a fault of logp itself, alone or beside updates" in one for one in report.cannot_tell)


def test_updates_are_sure_where_logp_moves_by_their_number():
    """A fault of the forward pass that computes logp is in every sample, whatever their versions."""
    made = world("policy_updates")
    made.sequences = 64
    records = made.records()
    some, first = over_updates(records), over_updates(records, first=1)
    alike = [dataclasses.replace(one, rollout_version=3, trainer_version=4) for one in records]
    fault = [dataclasses.replace(one, logp=of.logp) for one, of in zip(some, records, strict=True)]
    two_ages = [one for one in some if one.rollout_version in (7, 5)]
    unknown = "no version says how many updates|as many updates lie between for every sample"
    both = "nats in the newest samples, of [0-9] updates?, and [0-9.]+ in the oldest, of [0-9] updates: what the newest"
    for given, said in ((some, ""), (two_ages, ""), (first, both), (alike, unknown), (fault, both)):
        report = diagnose(given)
        assert report.verdict == "policy_updates" and (report.confidence > 0.5) == (said == "")
        assert said or "on average" in report.causes[0].evidence[-12:]
        assert re.search(said, report.causes[0].evidence)


def test_what_updates_leave_in_the_newest_and_the_oldest_samples_is_said():
    made = world("policy_updates")
    made.sequences = 64
    records = over_updates(made.records(), first=1)
    sizes = {
        one: np.mean(np.concatenate([np.abs(r.logp - r.old_logp) for r in records if r.rollout_version == one]))
        for one in {record.rollout_version for record in records}
    }
    newest, oldest = sizes[max(sizes)], sizes[min(sizes)]
    assert f"it is {newest:.2g} nats in the newest" in diagnose(records).causes[0].evidence
    assert f"and {oldest:.2g} in the oldest" in diagnose(records).causes[0].evidence


@pytest.mark.parametrize("cause", ["chat_template", "truncated_prompt"])
def test_another_prompt_of_logp_is_no_sure_update(cause):
    """Versions that tell of an update do not exclude it."""
    records = [
        dataclasses.replace(one, logp=one.old_logp, old_logp=one.rollout_logp, rollout_version=3, trainer_version=4)
        for one in world(cause).records()
    ]
    report = diagnose(records)
    assert (report.verdict, report.confidence) == ("policy_updates", 0.5)
    said = "; (chat_template|truncated_prompt|position) fits it, too, with old_logp in the place of the sampler's"
    assert re.search(said, report.causes[0].evidence)


@pytest.mark.parametrize(("fades", "looks"), [(True, "is of another prompt"), (False, "has a penalty")])
def test_updates_that_are_of_the_first_tokens_or_of_the_others_are_no_sure_ones(fades, looks):
    """As of a logp whose pass left a token of the prompt out, too little to look like it, or has a penalty."""
    rng = np.random.default_rng(0)
    records = []
    for one in world(entropy=False).records():
        at = np.arange(len(one))
        size = 0.1 * np.exp(-at / 4 if fades else (at - len(one)) / 8) + 0.001
        logp = np.minimum(one.old_logp + size * (1 - np.exp(one.old_logp)) * rng.normal(size=len(one)), 0)
        records.append(dataclasses.replace(one, logp=logp, rollout_version=3, trainer_version=4))
    report = diagnose(records)
    assert (report.verdict, report.confidence) == ("policy_updates", 0.5)
    now = np.concatenate([np.abs(one.logp - one.old_logp) for one in records])
    first = np.concatenate([np.arange(len(one)) for one in records]) < 8
    said = f"(geometric means; in nats, {now[first].mean():.2g} and {now[~first].mean():.2g}), as where logp {looks}"
    assert "; relative to 1 - p, where" in report.causes[0].evidence and said in report.causes[0].evidence


def certain_at_first(seed, edit, certain=0.5, scale=2.0, early=0.02, tokens=20):
    """Sequences of which the first tokens are nearly certain; ``edit`` makes the sampler's log-probs of them."""
    rng = np.random.default_rng(seed)
    records = []
    for _ in range(64):
        own = -np.where(rng.random(tokens) < certain, 2e-3, 1) * rng.exponential(scale, tokens)
        own[: rng.integers(1, 13)] *= early
        rows = {"completion_ids": rng.integers(3, 60, tokens), "rollout_logp": edit(own, rng), "old_logp": own}
        records.append(Record.of({"prompt_ids": [1, 2]} | rows))
    return records


@pytest.mark.parametrize(("seed", "certain"), [(0, 0.5), (1, 0.5), (1, 0.7)])
def test_a_shift_leaves_nothing_to_a_cause_of_other_tokens(seed, certain):
    """Where the first tokens are nearly certain, both sides agree there whatever is moved."""
    report = diagnose(certain_at_first(seed, lambda own, rng: np.append(own[1:], own[-1]), certain))
    assert report.confidence > 0.95 and [one.cause for one in report.causes] == ["shift"]


@pytest.mark.parametrize("seed", [0, 1])
def test_a_shift_from_some_token_on_is_no_sure_one(seed):
    def later(own, rng):
        if rng.random() < 0.5:
            return own
        first = rng.integers(8, 16)
        return np.concatenate([own[:first], own[first + 1 :], own[-1:]])

    report = diagnose(certain_at_first(seed, later, scale=1.0, early=0.05, tokens=30))
    assert (report.verdict, report.confidence) == ("shift", 0.5)
    assert any("shift from some token on" in one for one in report.cannot_tell)


def test_a_shift_of_some_sequences_alone_is_a_sure_one():
    def some(own, rng):
        return own if rng.random() < 0.5 else np.append(own[1:], own[-1])

    report = diagnose(certain_at_first(0, some, scale=1.0, early=1.0, tokens=30))
    assert report.verdict == "shift" and report.confidence > 0.95
    assert not any("shift from some token on" in one for one in report.cannot_tell)


def test_few_sequences_that_differ_are_asked_about():
    """As where rows changed places."""
    few, right = world("stale_weights", sequences=4).records(), world(seed=3, sequences=48).records()
    asked = "4 of 52 sequences differ, while the others agree"
    assert any(asked in one for one in diagnose(few + right).cannot_tell)
    assert not any("sequences differ, while" in one for one in diagnose(world("stale_weights").records()).cannot_tell)
    rounded = world("precision", sequences=64).records()
    for at in (0, 1, 2):  # further off than the others, of which none agrees
        off = rounded[at].rollout_logp - rounded[at].old_logp
        rounded[at] = dataclasses.replace(rounded[at], old_logp=np.minimum(rounded[at].rollout_logp - 4 * off, 0))
    assert not any("sequences differ, while" in one for one in diagnose(rounded).cannot_tell)
    rng = np.random.default_rng(0)
    bound = [
        dataclasses.replace(one, rollout_logp=np.minimum(one.old_logp + 1.1e-4 * rng.normal(size=len(one)), 0))
        for one in world(sequences=64).records()
    ]
    assert not any("sequences differ, while" in one for one in diagnose(bound).cannot_tell)


@pytest.mark.parametrize(("factor", "entropy", "sure"), [(0.8, True, 1.0), (0.8, False, 0.5), (1.25, False, 1.0)])
def test_a_division_that_makes_the_tokens_likelier_is_sure_by_the_entropy_alone(factor, entropy, sure):
    """A truncation of a policy that is flat makes them likelier by about a multiple of their log-prob, too."""

    def divided(columns, world):
        columns["rollout_logp"] = factor * columns["old_logp"]

    report = diagnose(world(edits=[divided], entropy=entropy).records())
    assert report.verdict == "unnormalised" and report.confidence == pytest.approx(sure, abs=0.01)
    assert any("a truncation (top_k, top_p, min_p) where" in one for one in report.cannot_tell) == (sure == 0.5)


@pytest.mark.parametrize("old", [4, 8])
def test_older_weights_of_a_few_sequences_are_named(old):
    """The others agree, and the versions say which ones are older."""
    older, right = world("stale_weights").records(), world("clean").records()
    records = [dataclasses.replace(one, rollout_version=1, trainer_version=5) for one in older[:old]]
    records += [dataclasses.replace(one, rollout_version=5, trainer_version=5) for one in right[old:]]
    report = diagnose(records)
    assert report.verdict == "stale_weights" and f"this is of {old} of the 32 sequences" in report.causes[0].evidence


@pytest.mark.parametrize("cause", ["clean", "precision", "stale_weights"])
@pytest.mark.parametrize("undone", [np.negative, np.exp])
def test_another_quantity_on_both_sides_explains_nothing_of_their_difference(cause, undone):
    """It precedes the causes of what is left of d, and is no dropout."""
    records = [
        dataclasses.replace(one, rollout_logp=undone(one.rollout_logp), old_logp=undone(one.old_logp))
        for one in world(cause).records()
    ]
    report = diagnose(records)
    assert report.verdict == "other_quantity" and report.causes[0].share == 0
    assert "the values of both sides are above 0" in report.causes[0].evidence
    assert {one.cause for one in report.causes[1:]} == ({cause} - {"clean"})
    assert not any("a little dropout" in one for one in report.cannot_tell)


def test_the_method_for_older_weights_depends_on_the_length():
    """As docs/which.md has it."""
    assert "of up to 96 tokens minpro" in CAUSES["stale_weights"].advice
    assert "for longer ones a token form such as offcorr:cispo" in CAUSES["stale_weights"].advice


@pytest.mark.parametrize("versions", [None, 3])
def test_a_temperature_of_older_weights_may_be_of_the_updates(versions):
    records = [dataclasses.replace(one, rollout_version=versions, trainer_version=7) for one in sharper(0.12)]
    report = diagnose(records)
    (found,) = (one for one in report.causes if one.cause == "temperature")
    assert found.confidence == 0.5


@pytest.mark.parametrize("cause", ["top_p", "min_p", "top_k", "logit_mask"])
def test_a_vocabulary_that_is_padded_stands_beside_every_truncation(cause):
    """With the rows of ids that no tokenizer has, the trainer's probabilities of the others sum to less than 1."""
    report = diagnose(world(cause).records())
    assert report.verdict == cause and any("pad the vocabulary" in one for one in report.cannot_tell)


def test_without_entropy_a_temperature_is_not_taken_for_something_else():
    assert diagnose(world("temperature", entropy=False).records()).verdict in ("temperature", "unknown")


@pytest.mark.parametrize("versions", [False, True])
@pytest.mark.parametrize("temperature", [0.6, 0.7, 0.8, 1.4])
@pytest.mark.parametrize("seed", [0, 1])
def test_what_the_fit_of_a_temperature_leaves_is_no_sure_second_cause(seed, temperature, versions):
    """Softmax policies with one row of logits for each previous symbol, no entropy, and a prompt for each sequence."""
    report = diagnose(tempered(seed, temperature, versions, own_prompts=True))
    named = {one.cause: one.confidence for one in report.causes}
    assert "temperature" in named and all(sure <= 0.5 for cause, sure in named.items() if cause != "temperature")
    (fitted,) = [one.share for one in report.causes if one.cause == "temperature"]
    assert (len(named) == 1) == (fitted > 0.5)
    assert any("older weights, a lower precision or another prompt besides" in one for one in report.cannot_tell)
    alone = any(
        "a temperature that one side applies and the other does not, alone" in one for one in report.cannot_tell
    )
    assert alone == (len(named) > 1)


@pytest.mark.parametrize("versions", [False, True])
@pytest.mark.parametrize("temperature", [0.6, 0.7, 0.8, 1.4])
@pytest.mark.parametrize("seed", [0, 1])
def test_different_tokens_after_one_prompt_show_a_temperature_without_entropy(seed, temperature, versions):
    report = diagnose(tempered(seed, temperature, versions))
    (found,) = report.causes
    sure = (
        0.5 if temperature == 0.8 or (temperature, seed) == (1.4, 0) else 0.95
    )  # which the tokens say of 1.4 with luck
    assert (found.cause, found.confidence) == ("temperature", sure) and found.share > 0.99
    assert f"as at {temperature:.2f} times its temperature" in found.evidence
    asked = " ".join(report.cannot_tell)
    assert "which is the same as a temperature" in asked and "softcap" not in asked and "besides" not in asked


@pytest.mark.parametrize("also", [{}, {"top_k": 5}])
def test_beside_a_temperature_that_is_shown_the_rest_is_asked_about_or_named(also):
    """Rounded weights move tokens after one prompt apart, and a truncation moves all of them alike."""
    report = diagnose(tempered(0, 0.9 if also else 0.7, False, noise=0.0 if also else 0.03, **also))
    by_id = {one.cause: one for one in report.causes}
    found = by_id["temperature"]
    assert found.confidence > 0.9
    if also:
        (cut,) = set(by_id) & {"top_p", "top_k", "min_p"}
        assert by_id[cut].confidence == 0.5 and "beside it" in by_id[cut].evidence
        assert any("another of top_p, top_k and min_p, beside a temperature" in one for one in report.cannot_tell)
        assert found.rough
        assert "hides how much of d the temperature makes" in found.evidence
    else:
        assert len(by_id) == 1 and 0.9 < found.share < 0.99
        assert any("a lower precision or another prompt besides" in one for one in report.cannot_tell)


def test_other_weights_are_no_temperature_of_tokens_after_one_prompt():
    """They multiply nothing; beside a temperature they leave most of the difference, and the fit of one is unsure."""
    report = diagnose(tempered(0, 0.5, False, noise=0.2))
    (found,) = (one for one in report.causes if one.cause == "temperature")
    assert found.confidence == 0.5 and "are left by any temperature" in found.evidence


def test_a_gap_that_begins_with_the_second_token_is_no_sure_position():
    """A penalty on tokens that stood before, and a coarse cache, leave the first token as it is, too."""
    made = world()
    made.sampler = noise(0.5, where=simulated.positions(lambda t: t >= 1))
    report = diagnose(made.records())
    assert (report.verdict, report.confidence) == ("position", 0.5)
    assert all(any(words in one for one in report.cannot_tell) for words in ("presence_penalty", "kv_cache_dtype"))


def test_clamped_logits_are_no_sure_placeholders():
    """Tokens with a clamped logit have one log-prob in each context."""
    report = diagnose(tempered(0, 1.0, False, clamp=2.0, width=4.0))
    (found,) = (one for one in report.causes if one.cause == "sentinel")
    assert found.confidence == 0.5 and any("clamps" in one for one in report.cannot_tell)


def test_a_truncation_is_less_sure_where_a_temperature_may_stand_beside_it():
    """Where no prompt has several samples, none of them shows that the share that is kept is the trainer's."""
    records = world("top_p").records()
    alone = [dataclasses.replace(one, prompt_ids=np.r_[one.prompt_ids, at]) for at, one in enumerate(records)]
    shown, unknown = diagnose(records), diagnose(alone)
    assert shown.verdict == unknown.verdict == "top_p" and shown.confidence > unknown.confidence == 0.5
    asked = [any("beside a temperature of the sampler" in one for one in of.cannot_tell) for of in (shown, unknown)]
    assert asked == [False, True]


def tempered(seed, temperature, versions, own_prompts=False, noise=0.0, top_k=50, clamp=np.inf, width=2.5):
    """Records of a Markov policy over 50 symbols, whose sampler has the temperature, other logits, and top-k."""
    draw = np.random.default_rng(seed)
    logits = width * draw.standard_normal((50, 50))
    trainer = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    cooled = np.clip(logits + noise * draw.standard_normal(logits.shape), -clamp, clamp) / temperature
    cooled[cooled < np.sort(cooled)[:, -top_k, None]] = -np.inf
    sampler = cooled - np.log(np.exp(cooled).sum(-1, keepdims=True))
    records = []
    for at in range(60):
        ids = [int(draw.integers(50)) if own_prompts else at // 6]
        for _ in range(50):
            ids.append(int(draw.choice(50, p=np.exp(sampler[ids[-1]]))))
        before, after = ids[:-1], ids[1:]
        row = {"rollout_logp": sampler[before, after], "old_logp": trainer[before, after]}
        row |= {"rollout_version": 3, "trainer_version": 3} if versions else {}
        prompt = [100 + at, ids[0]] if own_prompts else ids[:1]
        records.append(Record.of({"prompt_ids": prompt, "completion_ids": after} | row))
    return records


@pytest.mark.parametrize(("size", "sure"), [(0.05, 0.95), (0.08, 0.5)])
def test_a_factor_that_leaves_much_may_be_another_change_of_the_logits(size, sure):
    """A softcap that squeezes the logits to a quarter has left .07 to .1 of their differences."""
    records = []
    for one in tempered(0, 0.6, False):
        off = size * np.sin(37.0 * one.completion_ids + 11 * one.prompt_ids.sum()) * (one.rollout_logp < -0.3)
        records.append(dataclasses.replace(one, rollout_logp=np.minimum(one.rollout_logp + off, 0)))
    report = diagnose(records)
    assert (report.verdict, report.confidence) == ("temperature", sure)
    assert any("a softcap, a clamp" in said for said in report.cannot_tell) == (sure == 0.5)


def test_beside_other_weights_a_top_p_may_leave_what_a_top_k_leaves():
    made = world("top_k")
    made.trainer = noise(0.2, shared=True)
    report = diagnose(made.records())
    found = {one.cause: one for one in report.causes}
    assert "top_k" in found and "single top_p" not in found["top_k"].evidence
    assert any("top_k or a top_p whose border is blurred by rounding, or by other" in one for one in report.cannot_tell)


@pytest.mark.parametrize("cause", ["top_k", "unnormalised", "shift", "clean"])
def test_without_entropy_the_report_says_what_it_cannot_tell(cause):
    report = diagnose(world(cause, entropy=False).records())
    assert report.verdict == cause
    assert any("entropy" in said for said in report.cannot_tell)
    assert "surprisal_balance" not in report.numbers


def test_silent_causes_need_the_entropy():
    assert diagnose(world("temperature_silent", entropy=False).records()).verdict == "clean"


def test_entropy_of_some_sequences_is_used():
    records = world("temperature_silent", seed=1).records()
    some = [one if at % 2 else _without_entropy(one) for at, one in enumerate(records)]
    assert diagnose(some).verdict == "temperature_silent"


def _without_entropy(record):
    return Record(record.prompt_ids, record.completion_ids, record.rollout_logp, record.old_logp)


def test_versions_decide_between_an_age_and_a_sync_that_failed():
    old, failed = world("stale_weights"), world("stale_weights")
    old.edits, failed.edits = [simulated.versions(5)], [simulated.versions(0)]
    assert diagnose(old.records()).verdict == "stale_weights"
    assert diagnose(failed.records()).verdict == "adapter_not_synced"


@pytest.mark.parametrize(
    ("sizes", "age", "verdict"),
    [
        (np.linspace(0.02, 0.6, 8), None, "adapter_not_synced"),  # nothing ever reaches the sampler
        (np.minimum(np.linspace(0.2, 1.6, 8), 0.6), None, "stale_weights"),  # a lag that is reached, and kept
        (np.full(8, 0.3), None, "stale_weights"),
        (np.linspace(0.02, 0.6, 8), 5, "stale_weights"),  # the logs say how old the sampler's weights are
    ],
)
def test_a_difference_that_grows_with_every_step_is_an_update_that_never_arrives(sizes, age, verdict):
    made = world("stale_weights")
    made.trainer = simulated.noise(1.0, shared=True, where=lambda world: np.repeat(sizes, 4)[:, None])
    made.edits = [lambda columns, world: columns.update(step=np.repeat(np.arange(8), 4))]
    made.edits += [] if age is None else [simulated.versions(age)]
    found = diagnose(made.records()).causes[0]
    assert found.cause == verdict
    assert ("does not level off" in found.evidence) == (verdict == "adapter_not_synced")
    assert found.confidence == 0.5 or age  # without versions it may be a lag, over a warm-up of the learning rate


def test_a_dump_is_sampled_in_whole_groups(monkeypatch):
    from offcorr.diagnose import diagnosis

    monkeypatch.setattr(diagnosis, "SAMPLED_TOKENS", 400)
    report = diagnose(world("precision").records())
    kept = [record.group_id for record in report.evidence.records]
    assert 0 < len(kept) < 32
    assert all(kept.count(group) == 4 for group in kept)
    assert diagnose(world("precision").records()).numbers == report.numbers  # the same sample


@pytest.mark.parametrize("beside", [False, True])
def test_what_placeholders_leave_is_asked_about_however_small_a_part_it_is(beside):
    """A few tokens with -9999 make nearly all of mean |d|."""

    def edit(columns, world):
        if beside:  # a fault without a name
            columns["rollout_logp"] = columns["rollout_logp"][:, ::-1].copy()
        columns["rollout_logp"][:, 7::25] = -9999.0

    made = world("clean", sequences=64)
    made.edits = [*made.edits, edit]
    report = diagnose(made.records())
    assert [one.cause for one in report.causes] == ["sentinel"]
    assert any(one.startswith("what makes the difference that the named") for one in report.cannot_tell) == beside


@pytest.mark.parametrize("noise", [0.0, 2e-7])
def test_a_sure_cause_of_d_precedes_a_silent_one_whatever_rounding_leaves(noise):
    def edit(columns, world):
        logp = columns["rollout_logp"] - noise * world.rng.exponential(1.0, columns["rollout_logp"].shape)
        columns["rollout_logp"] = np.roll(logp, 1, 1)

    made = world("temperature_silent", sequences=64)
    made.edits = [*made.edits, edit]
    report = diagnose(made.records())
    assert [one.cause for one in report.causes] == ["shift", "temperature_silent"]


def test_plain_rows_are_refused_with_what_makes_records_of_them():
    row = {"prompt_ids": [1], "completion_ids": [2], "rollout_logp": [-1.0], "logp": [-1.0]}
    with pytest.raises(TypeError, match=r"records\[0\] is a dict, expected a Record: Record.of makes one of a row"):
        diagnose([row])


def test_nothing_scored_is_refused():
    row = {"prompt_ids": [1], "completion_ids": [2], "rollout_logp": [None], "logp": [-1.0]}
    with pytest.raises(ValueError, match="no token has a log-prob of both sides: rollout_logp is NaN"):
        diagnose([Record.of(row)])


def test_a_user_s_cause_is_looked_for_too(monkeypatch):
    known = dict(CAUSES)

    class Doubled(Cause):
        id = "doubled"
        stage = "sampling"
        title = "log-probs counted twice"
        advice = "count them once"

        def found(self, evidence):
            twice = np.abs(evidence.sampler - 2 * evidence.trainer).mean()
            return Found(twice, 0.0, 1e-6, 9.0, "each is twice the other") if twice < 1e-6 else None

    try:
        made = world()
        made.edits = [lambda columns, world: columns.update(rollout_logp=2 * columns["old_logp"])]
        assert diagnose(made.records()).verdict == "doubled"
    finally:
        del CAUSES["doubled"]
    assert known == CAUSES


@pytest.mark.parametrize(
    ("attributes", "said"),
    [
        ({"title": None}, "Made.title is missing"),
        ({"stage": "never"}, "Made.stage is 'never', expected one of values, sampling, unlogged, policies, updates"),
        ({"id": "shift"}, "Made.id is 'shift', which Shift has already"),
    ],
)
def test_a_mistaken_cause_is_refused_when_its_class_is_defined(attributes, said):
    body = {"id": "made", "stage": "values", "title": "t", "advice": "a", "found": lambda self, evidence: None}
    with pytest.raises((TypeError, ValueError), match=said):
        type("Made", (Cause,), body | attributes)


def test_one_token_that_is_far_off_is_no_sure_cause():
    """Other experts move many tokens; a single one may be a value that is no log-prob."""
    records = world("clean", sequences=8).records()
    at = int(np.argmin(records[0].old_logp))
    changed = np.where(np.arange(len(records[0])) == at, 1.0, records[0].rollout_logp)
    report = diagnose([dataclasses.replace(records[0], rollout_logp=changed), *records[1:]])
    assert (report.verdict, report.confidence) == ("moe_routing", 0.5)
    assert any("ids that the sampler did not draw" in said for said in report.cannot_tell)
    assert any("a few tokens that somebody filled in" in said for said in report.cannot_tell)
    many = diagnose(world("moe_routing").records())
    assert any("a logit_bias" in said for said in many.cannot_tell)
    assert any("older weights, or an update, such as a LoRA adapter" in said for said in many.cannot_tell)
    assert many.confidence == 0.5 and not any("filled in" in said for said in many.cannot_tell)


def test_a_truncation_is_not_told_by_a_handful_of_uncertain_tokens():
    """Of a nearly certain token any sharpening leaves what a truncation leaves."""
    records = world("top_p", sequences=8).records()
    few = [
        dataclasses.replace(
            one,
            old_logp=np.where(np.arange(len(one)) < 3, one.old_logp, -1e-4),
            rollout_logp=np.where(np.arange(len(one)) < 3, one.rollout_logp, 0.0),
        )
        for one in records
    ]
    report = diagnose(few)
    assert (report.verdict, report.confidence) == ("top_p", 0.5)


@pytest.mark.parametrize("certain", [8.0, 9.0])
def test_where_nearly_every_token_is_the_likeliest_a_truncation_may_be_a_temperature(certain):
    """Both raise the probability of that token, and what they do to others is hardly drawn."""
    rng, records = np.random.default_rng(0), []
    for row in range(32):
        logits = rng.normal(size=(48, 20))
        logits[:, 0] += certain + rng.normal(size=48)
        old, new = simulated.log_softmax(logits), simulated.log_softmax(logits / 0.5)
        at = np.arange(48), simulated.draw(new, rng)
        columns = {"rollout_logp": new[at], "old_logp": old[at], "entropy": -(np.exp(old) * old).sum(1)}
        records.append(Record.of({"prompt_ids": [1, row // 4], "completion_ids": at[1], **columns}))
    report = diagnose(records)
    assert report.verdict in TRUNCATIONS and report.confidence <= 0.5
    assert any(COLDER.words in said for said in report.cannot_tell)


@pytest.mark.parametrize("cause", ["top_p", "top_k", "min_p", "logit_mask"])
def test_a_truncation_of_which_unlikely_tokens_are_drawn_is_no_temperature_alone(cause):
    report = diagnose(world(cause).records())
    assert report.verdict == cause and not any(COLDER.words in said for said in report.cannot_tell)


def test_what_is_left_of_text_that_was_encoded_again_is_no_sure_cause_of_its_own():
    """Some of the sequences may not have been found."""
    report = diagnose(world("retokenised", "moe_routing").records())
    assert report.verdict == "retokenised" and report.confidence == 0.5
    assert all(one.confidence <= 0.65 for one in report.causes[1:])


def test_the_statistic_of_precision_is_in_the_unit_of_its_threshold():
    """Both are mean |d| (nats)."""
    evidence = Evidence.of(world("precision").records())
    (found,) = diagnose(world("precision").records()).causes
    assert found.statistic == evidence.gap and found.threshold == evidence.floor


# -- the statistics ------------------------------------------------------------------------------------------


def evidence(**columns):
    count = len(columns["rollout_logp"])
    row = {"prompt_ids": [9], "completion_ids": range(count)} | columns
    return Evidence.of([Record.of({name: list(value) for name, value in row.items()})])


def test_ratio_identity_and_balance_by_hand():
    made = evidence(rollout_logp=[-1.0, -2.0], old_logp=[-1.0 + np.log(2), -2.0], entropy=[0.25, 2.5])
    assert made.ratio_identity.value == pytest.approx(1.5)
    assert made.ratio_identity.error == pytest.approx(0.5 / np.sqrt(2))
    assert made.balance.value == pytest.approx(((1 - np.log(2) - 0.25) + (2.0 - 2.5)) / 2)


def test_the_error_of_a_mean_over_tokens_is_over_sequences():
    """Of sequences that differ as wholes, as under older weights: the mean of each is one draw, whatever its length."""
    levels = np.random.default_rng(0).exponential(size=400)
    values, sequence = np.repeat(levels, 25), np.repeat(np.arange(400), 25)
    made = mean_by_sequence(values, sequence)
    assert made.value == pytest.approx(levels.mean())
    assert made.error == pytest.approx(levels.std(ddof=1) / np.sqrt(400))
    assert mean_by_sequence(np.append(values, np.nan), np.append(sequence, 7)) == made
    alone = mean_by_sequence(levels, np.zeros(400, int))
    assert alone.error == pytest.approx(levels.std() / 20)


@pytest.mark.parametrize("cause", ["policy_updates", "precision"])
def test_the_error_beside_a_statistic_is_of_sequences(cause):
    """Dumps of other sequences differ by about as much as the report says."""
    runs = [diagnose(world(cause, seed=seed).records()) for seed in range(12)]
    found = [finding for run in runs for finding in run.causes if finding.cause == cause]
    assert len(found) >= 8
    spread = np.std([finding.statistic for finding in found], ddof=1)
    assert 0.4 < np.mean([finding.se for finding in found]) / spread < 2.5


def test_only_what_the_mask_covers_and_both_scored_counts():
    made = evidence(rollout_logp=[-1.0, np.nan, -3.0], old_logp=[-1.0, -2.0, -5.0], mask=[1, 1, 0])
    assert made.d.tolist() == [0.0]
    assert made.position.tolist() == [0]


def test_seen_counts_the_prompt_and_what_came_before():
    row = {"prompt_ids": [5, 6], "completion_ids": [7, 5, 7], "rollout_logp": [-1] * 3, "old_logp": [-1] * 3}
    assert Evidence.of([Record.of(row)]).seen.tolist() == [False, True, True]


def test_spread_of_one_context_needs_the_same_prompt_and_prefix():
    def record(prompt, ids, logp):
        row = {"prompt_ids": prompt, "completion_ids": ids, "rollout_logp": [-1.0, -1.0], "old_logp": logp}
        return Record.of(row)

    shared = Evidence.of([record([1], [2, 3], [-1.0, -1.0]), record([1], [2, 4], [-1.5, -1.0])])
    doubt = 1.01 - np.exp([-1.0, -1.5])
    assert shared.same_context[0] == pytest.approx(0.25 / doubt)  # of token 2 alone: 3 and 4 are other tokens
    other = Evidence.of([record([1], [2, 3], [-1.0, -1.0]), record([5], [2, 3], [-1.5, -1.0])])
    assert len(other.same_context[0]) == 0


def test_confidence_grows_from_a_half_to_one():
    margins = [confidence(margin) for margin in (0.0, 0.5, 1.0, 5.0)]
    assert margins[0] == 0.5
    assert margins == sorted(margins)
    assert margins[-1] > 0.99


def test_a_trainer_that_has_learnt_between_two_steps_has_no_dropout():
    """The same samples of a stale sampler at two steps: the trainer's log-probs are of other weights at the second."""
    first, second = world(seed=1).records(), world("stale_weights", seed=1).records()
    apart = [dataclasses.replace(record, step=1 + i) for i, part in enumerate((first, second)) for record in part]
    together = [dataclasses.replace(record, step=1) for record in apart]
    for row, record in enumerate(second):
        for records in (apart, together):
            kept = dataclasses.replace(first[row], old_logp=record.old_logp, step=records[len(first) + row].step)
            records[len(first) + row] = kept
    assert diagnose(together).verdict == "dropout"
    assert diagnose(apart).verdict != "dropout"


@pytest.mark.parametrize("version", [None, 0])
def test_repeated_contexts_are_of_one_step_of_the_trainer(version):
    """A sampler that lags keeps its version while the trainer's weights move."""

    def record(step, logp):
        row = {"prompt_ids": [1], "completion_ids": [2, 3], "rollout_logp": [-1.0, -1.0], "old_logp": logp}
        return dataclasses.replace(Record.of(row), step=step, rollout_version=version)

    assert len(Evidence.of([record(1, [-1.0, -1.0]), record(1, [-1.5, -1.0])]).same_context[0]) == 4
    assert len(Evidence.of([record(1, [-1.0, -1.0]), record(2, [-1.5, -1.0])]).same_context[0]) == 0


# -- what looks like a cause and is another ------------------------------------------------------------------


def with_values(records, change):
    """The records with other values of the sampler; ``change`` takes and returns [T] log-probs."""
    return [dataclasses.replace(one, rollout_logp=change(one.rollout_logp.copy())) for one in records]


@pytest.mark.parametrize(
    "change",
    [lambda logp: np.zeros_like(logp), lambda logp: np.full_like(logp, logp[3]), lambda logp: logp * 0 - 1.5],
    ids=["zero", "one of the sequence", "one constant"],
)
def test_values_that_are_the_same_at_every_token_are_no_log_probs(change):
    report = diagnose(with_values(world().records(), change))
    assert [one.cause for one in report.causes] == ["sentinel"]
    assert "the same at every token" in report.causes[0].evidence


def ending_in_zero(records, every=1):
    """The records with 0 as the sampler's log-prob of the last token of some, which the trainer finds unlikely."""
    changed = []
    for row, one in enumerate(records):
        last = np.arange(len(one)) == len(one) - 1
        if row % every == 0:
            old_logp = np.where(last & (one.old_logp > -1.6), -1.6 - 0.1 * (row % 7), one.old_logp)
            one = dataclasses.replace(one, rollout_logp=np.where(last, 0.0, one.rollout_logp), old_logp=old_logp)
        changed.append(one)
    return changed


def test_zeros_at_the_last_tokens_are_placeholders():
    """As of an engine that reports one log-prob fewer; no token was left out of any distribution."""
    report = diagnose(ending_in_zero(world("clean").records()))
    assert [one.cause for one in report.causes] == ["sentinel"]
    assert not any("appended" in said for said in report.cannot_tell)


def test_zeros_at_few_end_tokens_are_placeholders():
    """Too few for end tokens that were appended, which are asked about; and of no router."""
    records = world("clean", sequences=96).records()
    end = [dataclasses.replace(one, completion_ids=np.append(one.completion_ids[:-1], 0)) for one in records]
    report = diagnose(ending_in_zero(end, every=24))
    assert [one.cause for one in report.causes] == ["sentinel"]
    assert any("end tokens that were appended" in said for said in report.cannot_tell)


@pytest.mark.parametrize("apart", [0.5, 2.0, 4.0])
def test_probabilities_are_no_log_probs_whatever_the_weights(apart):
    made = world()
    made.trainer = noise(apart)
    records = made.records()
    for side in ("rollout_logp", "old_logp"):
        swapped = [dataclasses.replace(one, **{side: np.exp(getattr(one, side))}) for one in records]
        found = {one.cause: one for one in diagnose(swapped).causes}
        assert "probabilities, not their logarithms" in found["other_quantity"].evidence and "sentinel" not in found


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_log_probs_of_the_likeliest_token_are_another_quantity(scale):
    """As of the first entry of a list of candidates; a truncation leaves a part of this at likely tokens, too."""
    made = world(sequences=64)
    made.sampler = made.trainer = lambda logits, world: scale * logits
    made.logged = lambda drawn, plain: np.broadcast_to(
        simulated.log_softmax(scale * plain).max(-1, keepdims=True), plain.shape
    )
    (found,) = diagnose(made.records()).causes
    assert found.cause == "other_quantity" and "those of the likeliest token" in found.evidence
    assert found.confidence > 0.9
    without = diagnose([dataclasses.replace(one, entropy=None) for one in made.records()])
    assert without.verdict == "other_quantity" and without.confidence == 0.5
    assert any("a truncation to few tokens (top_k" in one for one in without.cannot_tell)


def test_a_truncation_to_few_tokens_is_no_log_prob_of_the_likeliest():
    """Of a policy that is certain at most places, and open at some, the likely tokens keep all of their probability."""
    draw = np.random.default_rng(0)
    logits = 0.5 * draw.standard_normal((64, 40, 20))
    within = draw.random((64, 40)) < 0.7
    logits[within] = np.r_[3.0, 1.0, 0.0, np.full(17, -12.0)] + 0.3 * draw.standard_normal((int(within.sum()), 20))
    trainer = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    cut = np.where(trainer < np.sort(trainer, -1)[..., -3, None], -np.inf, trainer)
    sampler = cut - np.log(np.exp(cut).sum(-1, keepdims=True))
    ids = (np.exp(sampler).cumsum(-1) > draw.random((64, 40, 1))).argmax(-1)
    at = np.ix_(*map(np.arange, ids.shape)) + (ids,)
    rows = [
        {
            "prompt_ids": [row],
            "completion_ids": ids[row],
            "rollout_logp": sampler[at][row],
            "old_logp": trainer[at][row],
        }
        | {"entropy": -(np.exp(trainer) * trainer).sum(-1)[row]}
        for row in range(64)
    ]
    report = diagnose(map(Record.of, rows))
    assert "other_quantity" not in {one.cause for one in report.causes}
    assert report.causes and all(one.confidence == 0.5 for one in report.causes)


def test_another_text_from_some_token_on_is_no_log_prob_of_the_likeliest_token():
    """The trainer finds those tokens next to impossible, and before them the two sides agree."""

    def other(columns, world):
        columns["old_logp"][:, 20:] -= 6.0

    made = world(sequences=64)
    made.sampler = made.trainer = lambda logits, world: 3 * logits
    made.edits = [other]
    assert "other_quantity" not in {one.cause for one in diagnose(made.records()).causes}


def test_impossible_log_probs_of_other_tokens_are_no_placeholders():
    """Of another text they are all different."""
    records = with_values(world(sequences=64).records(), lambda logp: np.roll(20 * logp, 7))
    others = records[7:]
    records = [
        dataclasses.replace(one, rollout_logp=other.rollout_logp)
        for one, other in zip(records[: len(others)], others, strict=True)
    ]
    assert "sentinel" not in {one.cause for one in diagnose(records).causes}


@pytest.mark.parametrize("cause", ["top_p", "top_k", "min_p", "logit_mask"])
def test_without_entropy_divided_log_probs_stand_beside_a_truncation(cause):
    asked = "divided by the temperature after the softmax"
    records = world(cause).records()
    without = diagnose([dataclasses.replace(one, entropy=None) for one in records])
    assert any(asked in said for said in without.cannot_tell)
    if cause in ("top_p", "min_p"):
        assert not any(asked in said for said in diagnose(records).cannot_tell)


@pytest.mark.parametrize("divisor", [0.6, 0.8])
def test_without_entropy_divided_log_probs_are_no_temperature(divisor):
    records = [dataclasses.replace(one, entropy=None) for one in with_values(world().records(), lambda x: x / divisor)]
    report = diagnose(records)
    assert report.verdict == "unnormalised" and report.confidence > 0.9
    assert "the probabilities of one side" in report.causes[0].evidence  # of which, d does not say


def test_a_division_is_unsure_where_the_difference_is_not_proportional():
    """A softmax over more ids leaves a d that depends on the context alone, as a division at T on both sides does."""
    asked = "ids that one side's softmax has and the other's has not"
    made = world(sequences=64)
    made.logged = lambda drawn, plain: simulated.log_softmax(np.concatenate([plain, plain[..., :6]], -1))[..., :-6]
    padded, divided = diagnose(made.records()), diagnose(with_values(world().records(), lambda logp: logp / 0.7))
    assert padded.verdict == "unnormalised" and padded.confidence <= 0.8
    assert any(asked in said for said in padded.cannot_tell)
    assert divided.confidence > 0.9 and not any(asked in said for said in divided.cannot_tell)


def test_another_prompt_is_asked_about_where_an_update_may_be_missing_whatever_the_versions():
    """Equal versions say that none is; an adapter that never reaches the sampler leaves them equal."""
    asked = "an update, such as a LoRA adapter, that did not reach the sampler"
    made = world(sequences=128)
    made.trainer = noise(0.3)
    for version, open_to_it in ((None, False), (0, False), (5, True)):
        records = [dataclasses.replace(one, rollout_version=version, trainer_version=version) for one in made.records()]
        report = diagnose(records)
        assert report.verdict == "chat_template"
        assert any(asked in said for said in report.cannot_tell) == open_to_it


@pytest.mark.parametrize(("value", "named"), [(-9999.0, ["sentinel"]), (np.nan, [])])
def test_unlikely_tokens_without_a_log_prob_of_the_sampler_are_no_low_temperature(value, named):
    """As after a look-up among the likeliest tokens; how these were drawn counts."""
    looked_up = [
        dataclasses.replace(one, rollout_logp=np.where(one.old_logp < -4, value, one.rollout_logp))
        for one in world(sequences=64).records()
    ]
    report = diagnose(looked_up)
    assert [one.cause for one in report.causes] == named
    assert abs(report.numbers["surprisal_balance"]) < 3 * report.numbers["surprisal_balance_se"]


def test_tokens_that_were_masked_by_their_log_probs_are_asked_about_beside_a_low_temperature():
    asked = "tokens that were masked by their log-probs"
    records = world(sequences=64).records()
    report = diagnose([dataclasses.replace(one, mask=one.old_logp > -4) for one in records])
    assert report.verdict in ("temperature_silent", "top_p_silent") and any(asked in one for one in report.cannot_tell)
    report = diagnose(world("temperature_silent").records())
    assert not any(asked in one for one in report.cannot_tell)


@pytest.mark.parametrize("side", ["rollout_logp", "old_logp"])
@pytest.mark.parametrize(
    ("change", "said"), [(np.exp, "probabilities, not their"), (np.negative, "the negatives of log-probs")]
)
def test_values_above_0_in_a_part_of_the_sequences_are_another_quantity(side, change, said):
    records = world().records()
    some = [
        dataclasses.replace(one, **{side: change(getattr(one, side))}) if row % 4 == 0 else one
        for row, one in enumerate(records)
    ]
    (found,) = diagnose(some).causes
    assert found.cause == "other_quantity" and said in found.evidence
    assert f"in 8 of {len(records)} sequences" in found.evidence


@pytest.mark.parametrize("added", [1e-5, 1e-4])
def test_values_slightly_above_0_are_asked_about_and_no_placeholders(added):
    """As of log(p + epsilon) of a peaked policy, or of a logit and a normaliser of different precision."""
    asked = "of the sampler's log-probs are above 0, by up to"
    made = world(sequences=64)
    made.sampler = made.trainer = lambda logits, world: 6 * logits
    records = with_values(made.records(), lambda logp: np.log(np.exp(logp) + added))
    assert sum((one.rollout_logp > 1e-6).sum() for one in records) > 16
    report = diagnose(records)
    named = {one.cause for one in report.causes}
    assert not named & {"sentinel", "min_p", "top_k", "logit_mask", "top_p"}
    assert "other_quantity" in named or any(asked in one for one in report.cannot_tell)
    assert not any(asked in one for one in diagnose(made.records()).cannot_tell)


def test_a_number_added_to_nearly_certain_probabilities_is_found():
    made = world(sequences=64)
    made.sampler = made.trainer = lambda logits, world: 6 * logits
    (found,) = diagnose(with_values(made.records(), lambda logp: np.log(np.exp(logp) + 0.01))).causes
    assert found.cause == "other_quantity" and "log(p + 0.01)" in found.evidence


def test_another_prompt_stands_beside_a_temperature_that_explains_a_part():
    """A large d of any other policy looks in part like a temperature."""
    asked = "a part of which the fit of a temperature takes"
    made = world(sequences=64)
    made.trainer = lambda logits, world: noise(1.0, shared=True)(1.4 * logits, world)
    report = diagnose(made.records())
    named = {one.cause for one in report.causes}
    assert "temperature" not in named or any(asked in one for one in report.cannot_tell)
    assert not any(asked in one for one in diagnose(world("temperature").records()).cannot_tell)


def test_sequences_of_zeros_are_placeholders():
    """As of one engine of two that reports no log-probs; the model sampled these tokens, so no mask is wrong."""
    records = world().records()
    some = [
        dataclasses.replace(one, rollout_logp=0 * one.rollout_logp) if row % 2 else one
        for row, one in enumerate(records)
    ]
    (found,) = diagnose(some).causes
    assert found.cause == "sentinel" and found.confidence > 0.9


def test_short_sequences_that_a_truncation_leaves_alone_are_no_placeholders():
    """Each of their few tokens is likely, and alone under it."""
    made = world("top_p", sequences=128, tokens=2)
    made.sampler, made.trainer = (
        (lambda logits, world: nucleus(0.9)(4 * logits, world)),
        lambda logits, world: 4 * logits,
    )
    records = made.records()
    assert sum(not one.rollout_logp.any() for one in records) > 8
    assert "sentinel" not in {one.cause for one in diagnose(records).causes}


def test_zeros_in_place_of_log_probs_of_sampled_tokens_are_no_sure_mask():
    """How surprising they are tells text that the model did not write from its own; without entropy nothing does."""

    def zeros(columns, world):
        columns["rollout_logp"][:, 20:26] = 0.0

    asked = "in whose place somebody filled in 0"
    own = diagnose(simulated.World(edits=[zeros]).records())
    assert own.verdict == "mask" and own.confidence == 0.5 and any(asked in one for one in own.cannot_tell)
    tools = diagnose(world("mask").records())
    assert tools.confidence > 0.9 and not any(asked in one for one in tools.cannot_tell)
    without = diagnose([dataclasses.replace(one, entropy=None) for one in world("mask").records()])
    assert without.confidence == 0.5 and any(asked in one and "log entropy" in one for one in without.cannot_tell)


def test_means_of_some_sequences_are_another_quantity_rather_than_placeholders():
    some = [
        dataclasses.replace(one, rollout_logp=np.full(len(one), one.rollout_logp.mean())) if row % 2 else one
        for row, one in enumerate(world().records())
    ]
    (found,) = diagnose(some).causes
    assert found.cause == "other_quantity" and "the mean over the sequence" in found.evidence


def test_one_impossible_value_is_a_placeholder():
    records = world().records()
    records[3].rollout_logp[7] = -9999.0
    assert [one.cause for one in diagnose(records).causes] == ["sentinel"]
    records[3].rollout_logp[7] = records[3].old_logp[7] - 0.5  # one token that is off says nothing
    assert "sentinel" not in {one.cause for one in diagnose(records).causes}


def test_what_is_drawn_wrongly_precedes_updates_that_are_surer():
    """What a truncation leaves of d is nothing, so that the updates have all of the rest."""
    of_ids = np.random.default_rng(0).normal(0, 0.1, simulated.VOCABULARY)

    def moved(columns, world):
        columns["logp"] = columns["old_logp"] + of_ids[columns["completion_ids"]]

    made = world("top_k")
    made.edits, made.entropy = [moved], False
    report = diagnose(over_updates(made.records()))
    assert (report.verdict, report.confidence) == ("top_k", 0.5)
    updates = report.causes[-1]
    assert updates.cause == "policy_updates" and updates.confidence > 0.5


@pytest.mark.parametrize("divisor", [1.03, 1.04, 1.05, 1.06, 1.07])
def test_a_division_of_either_side_is_no_other_temperature_besides(divisor):
    """The trainer's, where d does not say whose it is, makes the tokens less surprising to it."""
    records = [dataclasses.replace(one, old_logp=one.old_logp / divisor) for one in world("clean").records()]
    assert [one.cause for one in diagnose(records).causes] == ["unnormalised"]


@pytest.mark.parametrize("number", [-100.0, -9999.0])
@pytest.mark.parametrize("where", ["anywhere", "last"])
def test_placeholders_of_the_trainer_are_named(number, where):
    rng, records = np.random.default_rng(0), []
    for one in world("clean").records():
        filled = rng.random(len(one)) < 0.01 if where == "anywhere" else np.arange(len(one)) == len(one) - 1
        records.append(dataclasses.replace(one, old_logp=np.where(filled, number, one.old_logp)))
    (found,) = diagnose(records).causes
    assert found.cause == "sentinel" and found.confidence > 0.9
    assert f"have exactly {number:g} from the trainer" in found.evidence


def test_clean_asks_about_a_bias_of_any_size():
    """One that neither side's log-probs carry leaves no trace in them."""
    (asked,) = (one for one in diagnose(world("clean").records()).cannot_tell if "under a penalty" in one)
    assert "a bias or ban of some tokens, however large (logit_bias, bad_words, min_tokens)" in asked


def test_tokens_that_were_forced_are_no_temperature():
    """The only token that a grammar allows has a log-prob of 0, and surprises the trainer."""
    rng, records = np.random.default_rng(0), []
    for one in world("clean", sequences=64).records():
        forced = (rng.random(len(one)) < 0.1) & (np.arange(len(one)) > 0)
        values = np.where(forced, 0.0, one.rollout_logp), np.where(forced, -6.0, one.old_logp)
        records.append(dataclasses.replace(one, rollout_logp=values[0], old_logp=values[1]))
    report = diagnose(records)
    (found,) = report.causes
    assert (found.cause, found.confidence) == ("sentinel", 0.5)
    assert "exactly 0 from the sampler, and -6 on average from the trainer" in found.evidence
    assert any("structured decoding left alone" in one for one in report.cannot_tell)


@pytest.mark.parametrize("elsewhere", [0, 40])
def test_whole_sequences_of_zeros_are_placeholders_where_zeros_stand_in_no_other(elsewhere):
    """A truncation of older weights leaves tokens alone, and short sequences, that the trainer finds unlikely."""
    records = world("stale_weights").records()
    changed, left = [], elsewhere
    for at, one in enumerate(records):
        zero = np.full(len(one), at % 8 == 0)
        if at % 8 and left:
            zero[np.argsort(one.old_logp)[: min(left, 2)]] = True
            left -= min(left, 2)
        changed.append(dataclasses.replace(one, rollout_logp=np.where(zero, 0.0, one.rollout_logp)))
    found = {one.cause: one.confidence for one in diagnose(changed).causes}
    assert (found["sentinel"] > 0.5) == (elsewhere == 0)


def test_zeros_of_sequences_of_one_token_are_no_sure_placeholders():
    records = []
    for at, one in enumerate(world("stale_weights").records()):
        first = {name: getattr(one, name)[:1] for name in ("completion_ids", "old_logp", "entropy", "mask")}
        sampler = np.where(at % 4 == 0, 0.0, one.rollout_logp[:1])
        records.append(dataclasses.replace(one, rollout_logp=sampler, **first))
    assert all(one.confidence <= 0.5 for one in diagnose(records).causes if one.cause == "sentinel")


def test_a_ban_of_a_flat_policy_is_no_other_base():
    """It leaves the difference of two tokens after one prefix as it is, and another base does not."""
    rng, records = np.random.default_rng(0), []
    for row in range(64):
        first = np.random.default_rng(row // 8).normal(1.18, 0.15)  # of one prompt
        trainer = rng.normal(-3.85, 0.3, 12)
        sampler = trainer + np.r_[first, rng.normal(1.18, 0.15, 11)]
        columns = {"completion_ids": rng.integers(0, 99, 12), "rollout_logp": sampler, "old_logp": trainer}
        records.append(Record.of({"prompt_ids": [row // 8], **columns}))
    assert not any("to base 2" in one.evidence for one in diagnose(records).causes)
    in_base = [dataclasses.replace(one, old_logp=one.rollout_logp / np.log(2)) for one in records]
    assert any("to base 2" in one.evidence for one in diagnose(in_base).causes)


def test_one_context_that_all_samples_have_is_no_bound():
    """The least log-prob stands at the first token of each sample of one prompt."""
    rng, records = np.random.default_rng(0), []
    for _ in range(16):
        sampler = np.r_[-3.0, -rng.uniform(0.1, 0.9, 9)]
        trainer = np.r_[-1.2, sampler[1:] + rng.normal(0, 0.02, 9)]
        ids = np.r_[3, rng.integers(4, 99, 9)]
        records.append(
            Record.of({"prompt_ids": [1], "completion_ids": ids, "rollout_logp": sampler, "old_logp": trainer})
        )
    assert not any("cut off at" in one.evidence for one in diagnose(records).causes)


@pytest.mark.parametrize("seed", range(4))
def test_numbers_of_bfloat16_return_by_chance(seed):
    made = world("stored_bf16", seed=seed, sequences=64, tokens=96)
    made.sampler = simulated.noise(1.0, shared=True)
    report = diagnose(made.records())
    assert {one.cause for one in report.causes} == {"stored_bf16", "stale_weights"}


@pytest.mark.parametrize("name", ["old_logp", "rollout_logp"])
def test_few_numbers_of_bfloat16_are_not_rounded_once_more(name):
    """What bfloat16 leaves takes few values, too, and so it does where half a step was taken off each difference."""
    made = simulated.World(sequences=256, sampler=simulated.noise(0.3, shared=True), entropy=False)
    if name == "rollout_logp":
        made.sampler = lambda logits, world: logits / 1.2

    def stored(columns, world):
        columns[name] = torch.as_tensor(columns[name]).bfloat16().double().numpy()

    made.edits = [stored]
    named = {one.cause for one in diagnose(made.records()).causes}
    assert "stored_bf16" in named and "stored_rounded" not in named


@pytest.mark.parametrize("cause", ["precision", "kv_cache", "moe_routing"])
def test_what_rounding_leaves_is_of_other_experts_only_where_the_values_show_them(cause):
    """Once half a step is taken off each token, most agree, whatever the rest comes from."""
    records = []
    for one in world(cause).records():
        rounded = torch.as_tensor(one.old_logp).bfloat16().double().numpy()
        records.append(dataclasses.replace(one, old_logp=rounded))
    found = {one.cause: one.evidence for one in diagnose(records).causes}
    assert "stored_bf16" in found and ("moe_routing" in found) == (cause == "moe_routing")
    assert all("of the part of d that the other causes" in found[name] for name in found if name in BY_SIZE)


@pytest.mark.parametrize("by", [-1, 1])
@pytest.mark.parametrize("other", [None, "stale_weights"])
def test_a_mask_that_is_shifted_by_one(by, other):
    """One token of each tool answer is inside the mask, and one sampled token outside."""

    def answers(columns, world):
        for start in (8, 22, 37):
            columns["rollout_logp"][:, start : start + 4] = 0.0
            columns["old_logp"][:, start : start + 4] -= 6.0
            columns["mask"][:, start : start + 4] = False
        columns["mask"] = np.roll(columns["mask"], by, axis=1)

    made = world(*filter(None, [other]))
    made.edits.append(answers)
    report = diagnose(made.records())
    assert {one.cause for one in report.causes} == {"mask", *filter(None, [other])}
    assert "beside masked ones" in next(one.evidence for one in report.causes if one.cause == "mask")


def test_text_that_is_encoded_again_fits_when_it_is_moved():
    """A token that the second encoding has more moves the log-probs behind it, as far as the next such place."""
    records = []
    for row, one in enumerate(world().records()):
        at = 5 + row % 20
        old = np.r_[one.old_logp[:at], -3.0, one.old_logp[at:-1]] if row % 2 else one.old_logp
        records.append(dataclasses.replace(one, old_logp=old, entropy=None))
    report = diagnose(records)
    assert [one.cause for one in report.causes] == ["retokenised"]
    assert "fit again when they are moved by 1 token" in report.causes[0].evidence


def test_certain_tokens_do_not_show_that_text_was_encoded_again():
    """Any two sides agree on them, and they fit whatever they are moved by."""
    records = []
    for one in world("retokenised", entropy=True).records():
        before = np.arange(len(one)) < np.argmax(np.abs(one.old_logp - one.rollout_logp) > 1)
        certain = {name: np.where(before, -1e-4, getattr(one, name)) for name in ("old_logp", "rollout_logp")}
        records.append(dataclasses.replace(one, **certain))
    assert diagnose(world("retokenised").records()).confidence > 0.5
    (found,) = (one for one in diagnose(records).causes if one.cause == "retokenised")
    assert found.confidence == 0.5 and found.rough  # other sequences may differ for another reason
    trainer, sampler = np.full(21, -1e-4), np.full(21, -1e-4)
    sampler[1:13] = -3.0
    assert _slip(trainer, sampler) is None


@pytest.mark.parametrize(("format", "digits"), [(torch.float8_e4m3fn, 4), (torch.float8_e5m2, 3)])
def test_log_probs_in_8_bits_are_not_called_bfloat16(format, digits):
    """Each of them is a bfloat16 number, too, and explains all of the difference."""

    def stored(columns, world):
        columns["rollout_logp"] = torch.as_tensor(columns["old_logp"]).to(format).double().numpy()

    (one,) = diagnose(simulated.World(edits=[stored]).records()).causes
    assert one.cause == "stored_rounded" and one.confidence > 0.9 and one.share > 0.95
    assert f"have {digits} binary digits at most" in one.evidence


def test_a_difference_at_the_first_tokens_alone_is_no_shift():
    """Where the others are certain, each beside its neighbour is as near as beside itself."""

    def first(columns, world):
        for name in ("rollout_logp", "old_logp"):
            columns[name] = -0.05 * world.rng.random(columns[name].shape)
        columns["old_logp"][:, 0] = -20.0

    evidence = Evidence.of(simulated.World(edits=[first]).records())
    assert evidence.gap > 0.1 and CAUSES["shift"].found(evidence) is None


@pytest.mark.parametrize(("noise", "surest"), [(0.3, 1.0), (0.6, 0.5)])
def test_a_neighbour_that_is_not_much_nearer_is_no_sure_shift(noise, surest):
    """A truncation to few tokens, whose log-probs are nearly alike, leaves half of the difference, too."""

    def near(columns, world):
        after = np.roll(columns["old_logp"], -1, 1)
        columns["rollout_logp"] = after * (1 + noise * world.rng.uniform(-1, 1, after.shape))

    found = CAUSES["shift"].found(Evidence.of(simulated.World(edits=[near]).records()))
    assert found is not None and found.surest == surest


def test_a_shift_behind_tokens_that_are_certain_is_no_other_text():
    """Where the completions begin with tokens that are certain, of various numbers, a shift shows only behind them."""

    def certain(columns, world):
        for row in range(world.sequences):
            first = slice(0, 2 + row % 12)
            columns["rollout_logp"][row, first] = columns["old_logp"][row, first] = -1e-4
            columns["entropy"][row, first] = 1e-3

    made = world("shift")
    made.edits.insert(0, certain)
    assert [one.cause for one in diagnose(made.records()).causes] == ["shift"]


def zero_at_one_place(least, place=0, also=0.0):
    """The sampler's 0 at one index of each completion, where the trainer finds most tokens likely."""

    def edit(columns, world):
        columns["rollout_logp"] = columns["old_logp"].copy()
        columns["old_logp"][:, place] = np.where(np.arange(world.sequences) % 8 == 0, least, -0.1)
        columns["rollout_logp"][:, place] = 0.0
        columns["rollout_logp"][world.rng.random(columns["rollout_logp"].shape) < also] = 0.0

    return edit


@pytest.mark.parametrize("place", [0, 3])
def test_zeros_at_one_index_of_all_completions_are_no_truncation(place):
    """As of a first token that the engine gave no log-prob of; a likely one looks as if it was left alone."""
    made = world("clean", sequences=64)
    made.edits = [zero_at_one_place(-3.0, place)]
    report = diagnose(made.records())
    assert report.verdict == "sentinel" and report.causes[0].share == pytest.approx(1.0, abs=1e-3)
    assert "64 of" in report.causes[0].evidence


@pytest.mark.parametrize(("least", "also"), [(-0.3, 0.0), (-3.0, 0.1)])
def test_zeros_of_likely_tokens_or_at_other_indices_too_are_not_placed(least, also):
    """A truncation leaves a likely token alone, such as one that begins every completion."""
    made = world("clean", sequences=64)
    made.edits = [zero_at_one_place(least, also=also)]
    assert not values._zeros_of_one_place(Evidence.of(made.records())).any()


@pytest.mark.parametrize("seed", range(3))
def test_the_mean_ratio_of_tokens_that_were_chosen_for_d_above_0_says_nothing(seed):
    evidence = Evidence.of(world("stale_weights", sequences=64, seed=seed).records())
    chosen = evidence.selection(evidence.d > 0)
    assert chosen.ratio_identity.value > 1.1 + 6 * chosen.ratio_identity.error
    assert not policies.not_drawn_so(chosen) and policies.not_drawn_so(dataclasses.replace(chosen, whole=None))


def early(*names):
    """The trainer's numbers of the next token in each token's place; the last stays."""

    def edit(columns, world):
        for name in names:
            columns[name] = np.concatenate([columns[name][:, 1:], columns[name][:, -1:]], 1)

    return edit


@pytest.mark.parametrize("names", [("old_logp",), ("old_logp", "entropy")])
@pytest.mark.parametrize("cause", ["precision", "stale_weights", "temperature"])
@pytest.mark.parametrize("seed", range(3))
def test_a_trainer_that_is_a_token_early_is_no_dropout(cause, names, seed):
    """What stands beside a token belongs to the next one, which differs from sample to sample of a prompt."""
    made = world(cause, sequences=64, seed=seed)
    right = Evidence.of(made.records())
    made = world(cause, sequences=64, seed=seed)
    made.edits = [*made.edits, early(*names)]
    report = diagnose(made.records())
    named = [one.cause for one in report.causes]
    assert named[0] == "shift" and cause in named and "dropout" not in named
    assert "the trainer's are those of the next token" in report.causes[0].evidence
    left = CAUSES["shift"].found(Evidence.of(made.records())).left
    for name in ("trainer", "sampler", "entropy", "ids"):
        assert np.array_equal(getattr(left, name), getattr(right, name)[right.position > 0]), name
    assert any("whether the trainer's dropout is on" in question for question in report.cannot_tell)


@pytest.mark.parametrize(
    ("name", "by", "said"),
    [
        ("rollout_logp", 1, "t + 1: the sampler's are those of the previous token, or the trainer's those of the next"),
        ("old_logp", -1, "t + 1: the sampler's are those of the previous token, or the trainer's those of the next"),
        (
            "rollout_logp",
            -1,
            "t - 1: the sampler's are those of the next token, or the trainer's those of the previous",
        ),
        ("old_logp", 1, "t - 1: the sampler's are those of the next token, or the trainer's those of the previous"),
    ],
)
def test_the_evidence_of_a_shift_says_at_which_index_the_sides_agree(name, by, said):
    made = world("precision", sequences=64)
    made.edits = [*made.edits, lambda columns, world: columns.update({name: np.roll(columns[name], by, 1)})]
    (found,) = (one for one in diagnose(made.records()).causes if one.cause == "shift")
    assert said in found.evidence


@pytest.mark.parametrize(("seed", "shared"), [(0, True), (1, False)])
def test_dropout_beside_a_sampler_that_is_a_token_late_is_found_or_asked_about(seed, shared):
    """Where samples share more than one token, the trainer's log-probs differ wherever they stand."""

    def late(columns, world):
        columns["rollout_logp"] = np.concatenate([columns["rollout_logp"][:, :1], columns["rollout_logp"][:, :-1]], 1)

    made = world("dropout", sequences=64, seed=seed)
    made.edits = [*made.edits, late]
    report = diagnose(made.records())
    assert report.verdict == "shift"
    assert ("dropout" in [one.cause for one in report.causes]) == shared
    assert ("those of the next token" in report.causes[0].evidence) == (not shared)
    assert any("whether the trainer's dropout is on" in question for question in report.cannot_tell) == (not shared)


def test_several_runs_are_not_forward_passes_that_differ():
    """One prompt and prefix at one step of two runs has other weights in each."""
    records = []
    for run in ("a", "b"):
        for one in world("policy_updates", seed=3).records():
            off = 0.0 if run == "a" else 0.2
            records.append(
                dataclasses.replace(
                    one,
                    step=1,
                    where=f"runs/{run}/step_1.parquet, {one.where}",
                    **{name: getattr(one, name) - off for name in ("rollout_logp", "old_logp", "logp")},
                )
            )
    assert [one.cause for one in diagnose(records).causes] == ["policy_updates"]


def test_a_truncation_below_a_temperature_is_asked_about():
    made = world("temperature")
    made.sampler = lambda logits, world: simulated.nucleus(0.9)(logits / 0.7, world)
    report = diagnose(made.records())
    assert report.verdict == "temperature"
    assert any("further below 1 than a temperature makes it" in one for one in report.cannot_tell)
    alone = diagnose(world("temperature").records())
    assert not any("further below 1" in one for one in alone.cannot_tell)


@pytest.mark.parametrize("hotter", [False, True])
def test_a_silent_temperature_is_no_surer_than_its_alternatives(hotter):
    made = world("temperature_silent", tokens=96)
    if hotter:
        made.sampler = lambda logits, world: logits / 1.4
    report = diagnose(made.records())
    assert report.verdict == "temperature_silent" and report.confidence < 0.66
    said = " ".join(report.cannot_tell)
    assert ("a penalty on repeated tokens" in said) == hotter and "other weights that sampled than scored" in said
    assert ("a truncation (top_p, top_k, min_p)" in said) != hotter


def test_a_truncation_among_other_differences_is_unsure_without_a_token_that_is_alone(monkeypatch):
    from offcorr.diagnose.causes import truncation

    evidence = Evidence.of(world("top_k").records())
    clear = CAUSES["top_k"].found(evidence)
    monkeypatch.setattr(truncation, "kept", lambda _: dataclasses.replace(found, among_others=True))
    found = dataclasses.replace(_kept_of(evidence))
    assert CAUSES["top_k"].found(evidence).margin < 0.2 < clear.margin


def _kept_of(evidence):
    from offcorr.diagnose.causes.truncation import Kept

    return Kept(evidence.ratio_identity, 0, 0.0, 0.5, evidence.balance, evidence, 0.7, 2.0)


def test_rows_in_another_order_are_no_older_weights():
    records = world("stale_weights").records()

    def with_logp_of(others):
        return [dataclasses.replace(one, rollout_logp=of.rollout_logp) for one, of in zip(records, others, strict=True)]

    assert diagnose(with_logp_of(records[4:] + records[:4])).verdict == "other_quantity"
    report = diagnose(with_logp_of(world("stale_weights", seed=9).records()))
    assert report.verdict == "unknown"
    assert any("are of the same tokens: they hardly correlate" in one for one in report.cannot_tell)
    assert not any("hardly correlate" in one for one in diagnose(records).cannot_tell)


def sharpened(steps, power=lambda step: 1.0):
    """Dumps of steps whose trainer's policy is a power of the sampler's, a step at a time."""
    for step in range(steps):
        made = world(seed=step, sequences=8)
        made.trainer = lambda logits, _, step=step: logits * power(step)
        for one in made.records():
            yield dataclasses.replace(one, step=step)


def test_a_policy_that_becomes_sharper_from_step_to_step_is_no_temperature():
    found = {one.cause for one in diagnose(list(sharpened(12, lambda step: 1 + 0.05 * step))).causes}
    assert "temperature" not in found and found
    assert diagnose(list(sharpened(12, lambda step: 0.7))).verdict == "temperature"


def test_a_temperature_that_explains_part_of_d_is_unsure():
    report = diagnose(world("temperature", "stale_weights").records())
    sure = {one.cause: one.confidence for one in report.causes}
    assert sure["temperature"] == 0.5 < diagnose(world("temperature").records()).confidence
    assert any("sharper, or flatter" in one for one in report.cannot_tell)


@pytest.mark.parametrize("cause", ["truncated_prompt", "stale_prefix_cache"])
def test_causes_that_leave_alike_traces_are_no_surer_than_that(cause):
    report = diagnose(world(cause).records())
    assert report.verdict == cause and report.confidence <= 0.8
    assert any(f"whether the cause is {cause} or" in one and "--checkpoint" in one for one in report.cannot_tell)


@pytest.mark.parametrize("share", [0.8, 0.9, 0.95])
@pytest.mark.parametrize("sharp", [1.0, 2.0])
def test_a_top_p_beside_int8_weights_is_named_with_its_alternatives(share, sharp):
    """Differences of about .01 in the logits move the border, and the mass that is kept stays much the same."""
    for seed in range(3):
        report = diagnose(peaked(sharp, seed, noise=0.01, share=share))
        blurred = "which these numbers then hold as well" in report.causes[0].evidence
        assert report.verdict == "top_p" and (blurred or sharp == 2.0) and (report.confidence <= 0.75 or not blurred)
        assert any("a top_k or min_p that keeps about as much" in one for one in report.cannot_tell)
    report = diagnose(peaked(sharp, 0, noise=0.01, kept=20))
    assert report.verdict == "top_k"
    exact = diagnose(peaked(sharp, 0, noise=0.0, share=share))
    assert exact.verdict == "top_p" and "hardly ever more tokens than this share needs" in exact.causes[0].evidence
    assert exact.confidence == 0.8 or sharp == 1.0 or share > 0.8  # of which hardly a token is alone
    assert any("as a low min_p does" in one for one in exact.cannot_tell)


def peaked(sharp, seed, *, noise, share=1.0, kept=64):
    """Records of draws from 64 normal logits of this deviation, each context with its own, truncated."""
    rng = np.random.default_rng(seed)
    records = []
    for row in range(32):
        logits = sharp * rng.normal(size=(72, 64))
        old = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        p = np.exp(logits + noise * rng.normal(size=logits.shape))
        p /= p.sum(1, keepdims=True)
        order = np.argsort(-p, axis=1)
        before = np.cumsum(np.take_along_axis(p, order, 1), 1) - np.take_along_axis(p, order, 1)
        inside = np.zeros(p.shape, bool)
        np.put_along_axis(inside, order, (before < share) & (np.arange(64) < kept), 1)
        p = np.where(inside, p, 0)
        p /= p.sum(1, keepdims=True)
        ids = np.array([rng.choice(64, p=one) for one in p])
        at = np.arange(72), ids
        columns = {"rollout_logp": np.log(p[at]), "old_logp": old[at], "entropy": -(np.exp(old) * old).sum(1)}
        records.append(Record.of({"prompt_ids": [1, row // 4], "completion_ids": ids, **columns}))
    return records


@pytest.mark.parametrize("kept", [20, 30])
def test_a_kept_share_that_leaves_no_token_alone_is_not_surely_of_top_p(kept):
    """A top_k among tokens that are as likely in every context keeps one share, too."""
    rng, records = np.random.default_rng(0), []
    for row in range(32):
        logits = rng.permuted(np.tile(np.r_[3.5, np.linspace(1.5, -3, 39)], (48, 1)), axis=1)
        logits += 0.1 * rng.normal(size=logits.shape)
        old = simulated.log_softmax(logits)
        new = simulated.log_softmax(np.where(logits >= np.sort(logits, 1)[:, -kept, None], logits, -np.inf))
        ids = simulated.draw(new, rng)
        at = np.arange(48), ids
        columns = {"prompt_ids": [1, row // 4], "completion_ids": ids, "rollout_logp": new[at], "old_logp": old[at]}
        records.append(Record.of(columns))
    report = diagnose(records)
    assert report.verdict == "top_p" and report.confidence == 0.5


ROUNDED = {"top_p 0.8": nucleus(0.8), "top_p 0.95": nucleus(0.95), "min_p": min_p, "top_k": top_k}


@pytest.mark.parametrize("name", ROUNDED)
@pytest.mark.parametrize("size, surest", [(0.01, 1.0), (0.03, 0.75), (0.1, 0.75)])
def test_a_truncation_beside_rounding(name, size, surest):
    """Rounding blurs the kept mass: what it can make of a top-p is named, if at all, with less confidence."""
    blur = noise(size)
    for seed in range(2):
        made = World(seed=seed)
        made.sampler = lambda logits, world: ROUNDED[name](blur(logits, world), world)
        report = diagnose(made.records())
        right = report.verdict == name.split()[0]
        assert right or report.confidence <= 0.75, (name, size, report.verdict, report.confidence)
        assert right or size == 0.1, (name, size, report.verdict)
        assert report.confidence <= surest or (name == "min_p" and size < 0.1)
        if report.verdict in ("min_p", "top_k") and report.confidence == 0.75:
            assert any("blurred by rounding" in one for one in report.cannot_tell)


@pytest.mark.parametrize("size", [0.05, 0.3])
def test_weights_that_are_the_trainers_from_one_token_on_were_swapped(size):
    """A fade leaves no part in which both sides agree exactly, from one token to the next."""
    made = world()
    made.sampler = noise(size, shared=True, where=simulated.positions(lambda t: t < 22))
    report = diagnose(made.records())
    assert [one.cause for one in report.causes] == ["weights_swapped"] and report.confidence == 0.5
    assert "agree in the last part of the completion" in report.causes[0].evidence


def test_a_prompt_that_a_recurrent_model_forgets_looks_like_weights_that_were_swapped():
    """Its state is soon the same to the last digit."""
    made = world()
    made.sampler = noise(2.0, where=simulated.positions(lambda t: np.exp(-0.7 * t)))
    report = diagnose(made.records())
    assert (report.verdict, report.confidence) == ("weights_swapped", 0.5)
    assert any("another prompt, template or position" in one for one in report.cannot_tell)


@pytest.mark.parametrize(("name", "named"), [("shift", "shift"), ("temperature", "temperature")])
def test_an_old_logp_that_is_a_copy_of_the_samplers_does_not_hide_what_is_wrong(name, named):
    """The trainer's log-probs of now tell a shift or a temperature, which no update of the weights leaves."""
    records = [
        dataclasses.replace(one, logp=one.old_logp, old_logp=one.rollout_logp.copy()) for one in world(name).records()
    ]
    report = diagnose(records)
    assert report.verdict == named and any("number for number" in question for question in report.cannot_tell)
    updated = [dataclasses.replace(one, logp=one.old_logp) for one in world("policy_updates").records()]
    assert not any("compared in its place" in question for question in diagnose(updated).cannot_tell)


@pytest.mark.parametrize("name", ["shift", "temperature"])
def test_an_old_logp_with_the_fault_of_the_samplers_hides_it_as_little(name):
    """Scored again with the same mistake; by the versions logp is of the same weights, and far off."""
    rng = np.random.default_rng(0)
    records = [
        dataclasses.replace(
            one,
            logp=one.old_logp,
            old_logp=one.rollout_logp + 1e-6 * rng.standard_normal(len(one.old_logp)),
            rollout_version=3,
            trainer_version=3,
        )
        for one in world(name).records()
    ]
    report = diagnose(records)
    assert report.verdict == name and any("by the versions no update lies" in one for one in report.cannot_tell)
    assert diagnose([dataclasses.replace(one, trainer_version=4) for one in records]).verdict != name
    unversioned = [dataclasses.replace(one, rollout_version=None, trainer_version=None) for one in records]
    assert diagnose(unversioned).verdict != name


def test_updates_that_the_versions_deny_are_half_sure():
    by_token = 0.3 * np.random.default_rng(0).standard_normal(simulated.VOCABULARY)
    records = [
        dataclasses.replace(one, logp=one.old_logp + by_token[one.completion_ids], rollout_version=3, trainer_version=3)
        for one in world("clean").records()
    ]
    report = diagnose(records)
    assert (report.verdict, report.confidence) == ("policy_updates", 0.5)
    assert any("with a fault that rollout_logp has, too" in one for one in report.cannot_tell)
    assert diagnose(over_updates(records)).confidence > 0.9


@pytest.mark.parametrize("temperature", [0.9, 0.8])
def test_a_truncation_beside_a_temperature_is_asked_about(temperature):
    made = world()
    made.sampler = lambda logits, world: simulated.nucleus(0.9)(logits / temperature, world)
    report = diagnose(made.records())
    assert report.verdict == "temperature"
    asked = any("the sampler may also leave tokens out" in one for one in report.cannot_tell)
    assert asked or [one.cause for one in report.causes] == ["temperature", "top_p"]
    assert not any("leave tokens out" in one for one in diagnose(world("temperature").records()).cannot_tell)


@pytest.mark.parametrize("cap", [8, 12])
def test_what_another_change_of_the_logits_leaves_beside_its_temperature_is_half_sure(cap):
    """A softcap: the temperature that fits it leaves some, which is of the same cause."""
    made = world()
    made.sampler = lambda logits, world: cap * np.tanh(logits / cap)
    report = diagnose(made.records())
    assert report.verdict == "temperature" and any("softcap" in one for one in report.cannot_tell)
    assert all(one.confidence <= 0.5 and "softcap" in one.evidence for one in report.causes[1:])
    assert len(report.causes) > 1


def test_surprising_tokens_may_be_none_that_the_model_sampled():
    asked = "tokens that the model did not sample, such as a tool's text"
    made = world()
    made.sampler, made.logged = (lambda logits, world: logits / 1.5), (lambda drawn, plain: plain)
    assert any(asked in one for one in diagnose(made.records()).cannot_tell)
    assert not any(asked in one for one in diagnose(world("temperature_silent").records()).cannot_tell)


@pytest.mark.parametrize(("sharp", "seed"), [(1.5, 0), (2.5, 0), (2.5, 1), (4.0, 3)])
def test_log_probs_that_hardly_correlate_are_of_no_truncation(sharp, seed):
    """Of a sampler with another model; these look like a ban, or like log-probs that were divided."""
    rng = np.random.default_rng(seed + 100)
    made = world(seed=seed)
    made.sampler = lambda logits, world: sharp * logits
    made.trainer = lambda logits, world: 3 * sharp * rng.standard_normal(logits.shape)
    report = diagnose(made.records())
    assert report.verdict == "unknown"
    assert any("they hardly correlate" in one for one in report.cannot_tell)


def test_top_p_and_top_k_together_are_asked_about_beside_min_p():
    made = world()
    made.sampler = lambda logits, world: simulated.nucleus(0.9)(simulated.top_k(logits, world), world)
    for report in (diagnose(made.records()), diagnose(world("min_p").records())):
        assert report.verdict == "min_p" and report.confidence <= 0.65
        assert any("top_p and top_k together" in one for one in report.cannot_tell)


@pytest.mark.parametrize("side", ["trainer", "sampler"])
def test_a_division_is_of_the_side_whose_log_probs_it_takes_out_of_balance(side):
    """Of the trainer's, it takes the surprisal balance out of its range, as a temperature of the sampler does."""
    name = "old_logp" if side == "trainer" else "rollout_logp"
    made = world("clean", sequences=64)
    made.edits = [*made.edits, lambda columns, world: columns.update({name: columns[name] / 0.8})]
    report = diagnose(made.records())
    assert [one.cause for one in report.causes] == ["unnormalised"]
    assert report.causes[0].evidence.endswith(f"the surprisal balance is 0 if that side is the {side}'s")


def test_what_a_silent_temperature_says_of_d_is_without_the_other_causes():
    made = world("temperature_silent", sequences=64)
    made.edits = [*made.edits, lambda columns, world: columns.update(rollout_logp=columns["rollout_logp"] / 0.8)]
    found = {one.cause: one for one in diagnose(made.records()).causes}
    assert ", but for the other causes" in found["temperature_silent"].evidence
    assert "of which side, d alone does not say" in found["unnormalised"].evidence
    alone = diagnose(world("temperature_silent", sequences=64).records()).causes[0].evidence
    assert "while the two log-probs differ by" in alone and "but for the other causes" not in alone


@pytest.mark.parametrize(("by", "cause"), [(0.69, "unnormalised"), (np.log(2), "other_quantity")])
@pytest.mark.parametrize("name", ["old_logp", "rollout_logp"])
def test_a_division_by_nearly_ln_2_is_no_base(name, by, cause):
    made = world("clean", sequences=64)
    made.edits = [*made.edits, lambda columns, world: columns.update({name: columns[name] / by})]
    assert diagnose(made.records()).verdict == cause


def test_completions_of_one_token_have_no_appended_end():
    records = [
        Record.of(
            {"prompt_ids": [1, at // 4], "completion_ids": [7], "rollout_logp": [0.0], "old_logp": [-0.6 - 0.01 * at]}
        )
        for at in range(64)
    ]
    assert not any(one.cause == "appended_eos" for one in diagnose(records).causes)


@pytest.mark.parametrize("share", [1, 4])
def test_sequences_of_zeros_may_be_a_greedy_samplers(share):
    """Of all requests or of some; the entropy tells its tokens, the likeliest, from those that were drawn."""

    def greedy(logits, world):
        return np.where(logits == logits.max(-1, keepdims=True), logits, -np.inf)

    def zeros(records):
        each = enumerate(records)
        return [one if at % share else dataclasses.replace(one, rollout_logp=0 * one.rollout_logp) for at, one in each]

    def likeliest(records):
        likely = world("clean")
        likely.sampler = greedy
        return [
            one if at % share else other for at, (one, other) in enumerate(zip(records, likely.records(), strict=True))
        ]

    drawn = world("clean").records()
    without = [dataclasses.replace(one, entropy=None) for one in zeros(drawn)]
    for given, sure in ((zeros(drawn), True), (without, False), (likeliest(drawn), False)):
        report = diagnose(given)
        assert report.verdict == "sentinel" and (report.confidence > 0.5) == sure
        assert any("greedy sampling" in one for one in report.cannot_tell) != sure
    ones = diagnose([dataclasses.replace(one, rollout_logp=0 * one.rollout_logp - 1) for one in drawn])
    assert ones.verdict == "sentinel" and ones.confidence > 0.9 and not any("greedy" in one for one in ones.cannot_tell)


def test_zeros_beside_policies_that_are_far_apart_may_be_a_truncations():
    far, near = world("mask"), world("mask")
    far.trainer, near.trainer = noise(3.0, shared=True), noise(0.1, shared=True)
    asked = "tokens that a truncation (top_p) left alone"
    found = {one.cause: one for one in diagnose(far.records()).causes}
    assert found["mask"].confidence == 0.5 and any(asked in one for one in diagnose(far.records()).cannot_tell)
    found = {one.cause: one for one in diagnose(near.records()).causes}
    assert found["mask"].confidence > 0.9 and not any(asked in one for one in diagnose(near.records()).cannot_tell)


@pytest.mark.parametrize("rewards", [(1.0, 1.0), (0.0, 1.0)])
def test_sequences_that_were_chosen_by_their_reward_may_look_like_a_temperature(rewards):
    records = [
        dataclasses.replace(one, reward=rewards[row % 2])
        for row, one in enumerate(world("temperature_silent").records())
    ]
    report = diagnose(records)
    asked = any("chosen by their rewards" in question for question in report.cannot_tell)
    assert report.verdict == "temperature_silent" and asked == (rewards == (1.0, 1.0))


@pytest.mark.parametrize("entropy", [True, False])
def test_a_ban_is_hardly_surer_than_a_truncation(entropy):
    """Of many tokens alike a truncation cuts likely ones, too, and in a peaked policy few tokens."""
    report = diagnose(world("logit_mask", seed=4, entropy=entropy).records())
    bans = [one for one in report.causes if one.cause == "logit_mask"]
    assert all(one.confidence == 0.5 for one in bans) and len(bans) >= entropy
    assert not bans or any("or a truncation to the likeliest tokens" in one for one in report.cannot_tell)
    assert "top_p=1.0" in CAUSES["logit_mask"].advice


@pytest.mark.parametrize("kept", [7, 8])
def test_a_top_k_of_digits_alike_is_no_sure_division_after_the_softmax(kept):
    """Every context has ten tokens about as likely, of which the truncation leaves some out everywhere."""

    def digits(logits, world):
        return np.where(np.arange(simulated.VOCABULARY) < 10, 0.3 * logits, -30.0)

    def truncated(logits, world):
        drawn = digits(logits, world)
        return np.where(drawn >= np.sort(drawn, -1)[..., -kept, None], drawn, -np.inf)

    report = diagnose(World(sequences=48, trainer=digits, sampler=truncated).records())
    assert report.verdict in ("top_k", "top_p", "min_p", "logit_mask", "unnormalised") and report.confidence <= 0.65
    said = [report.verdict, *report.cannot_tell]
    assert any("top_k" in one for one in said)


@pytest.mark.parametrize(("temperature", "drift"), [(0.7, 0.0), (1.4, 0.0), (1.4, 0.1)])
def test_a_silent_cause_is_unsure(temperature, drift):
    """A truncation makes draws likely, too, a penalty surprising, and other weights either, by themselves."""
    made = World(seed=1, sequences=64, sampler=lambda logits, world: logits / temperature, logged=simulated.raw)
    made.trainer = noise(drift)
    said = {one.cause: one for one in diagnose(made.records()).causes}["temperature_silent"]
    assert said.confidence == 0.5 and "while the two log-probs differ by" in said.evidence


def test_a_prompt_beside_a_temperature_may_be_what_its_fit_leaves():
    report = diagnose(world("temperature", "truncated_prompt").records())
    (found,) = [one for one in report.causes if one.cause == "truncated_prompt"]
    assert found.confidence <= 0.65 and "it is what the temperature leaves" in found.evidence


@pytest.mark.parametrize("temperature", [0.001, 0.01])
@pytest.mark.parametrize("seed", [0, 1])
def test_what_a_temperature_near_0_leaves_is_no_sure_placeholder_or_truncation(temperature, seed):
    """The sampler is nearly certain of every token, and the log-probs are 0 or nearly so."""
    report = diagnose(World(seed=seed, sampler=lambda logits, world: logits / temperature).records())
    assert report.causes and all(one.confidence == 0.5 for one in report.causes)
    assert "a temperature near 0 leaves the same" in report.causes[0].evidence
    assert any("or a temperature near 0" in one for one in report.cannot_tell)


@pytest.mark.parametrize("cause", ["sentinel", "mask", "top_p", "min_p"])
def test_a_sampler_that_is_as_uncertain_as_the_trainer_is_at_no_temperature_near_0(cause):
    report = diagnose(world(cause).records())
    assert report.verdict == cause and not any("near 0" in one for one in report.cannot_tell)


def test_a_sampler_that_is_certain_everywhere_added_nothing_to_its_probabilities():
    """Where the trainer bounds its logits, its probabilities are below the sampler's by much the same number."""
    rng = np.random.default_rng(0)
    rows = [
        {
            "prompt_ids": [row],
            "completion_ids": rng.integers(0, 50, 40),
            "rollout_logp": -rng.exponential(1e-3, 40),
            "old_logp": np.log(rng.normal(0.1, 0.002, 40)),
        }
        for row in range(32)
    ]
    report = diagnose([Record.of(row) for row in rows])
    assert "other_quantity" not in [one.cause for one in report.causes]
    rows = [row | {"rollout_logp": np.log(np.exp(row["old_logp"]) + 0.05)} for row in rows]
    assert "log(p + 0.05)" in diagnose([Record.of(row) for row in rows]).causes[0].evidence


def test_zeros_among_values_of_nearly_0_may_be_of_a_sampler_that_is_certain():
    made = world("sentinel")
    records = made.records()
    asked = "log-probs of which the sampler is certain to float32's precision"
    assert not any(asked in one for one in diagnose(records).cannot_tell)
    placed = []
    for one in records:
        sampler, trainer = one.rollout_logp.copy(), one.old_logp.copy()
        sampler[:6], trainer[:6] = [0.0, -1e-7, 0.0, -3e-7, 0.0, -1e-7], -2.0
        placed.append(dataclasses.replace(one, rollout_logp=sampler, old_logp=trainer))
    assert any(asked in one for one in diagnose(placed).cannot_tell)


@pytest.mark.parametrize("temperature", [1.0, 0.85])
def test_beside_a_d_that_grows_what_was_there_from_the_start_is_asked_about(temperature):
    records = []
    for step in range(12):
        made = World(seed=step, sequences=16, sampler=lambda logits, world: logits / temperature)
        made.trainer = lambda logits, world, step=step: logits + 0.15 * step * np.sin(np.arange(simulated.VOCABULARY))
        records += [dataclasses.replace(one, step=step, entropy=None) for one in made.records()]
    report = diagnose(records)
    assert "adapter_not_synced" in [one.cause for one in report.causes]
    asked = "that was there from the dump's first steps on"
    assert any(asked in one for one in report.cannot_tell) == (temperature != 1)


def test_a_temperature_that_changes_from_step_to_step_is_no_sure_update():
    """d grows, as under updates that do not arrive, and at the last steps a temperature explains it."""
    rising = np.repeat(np.linspace(1.0, 1.2, 8), 16)[:, None, None]
    made = World(sequences=128)
    made.trainer = lambda logits, world: logits / rising
    made.edits = [lambda columns, world: columns.update(step=np.repeat(np.arange(8), 16)), simulated.versions(0)]
    report = diagnose(made.records())
    assert (report.verdict, report.confidence) == ("adapter_not_synced", 0.5)
    assert any("a temperature, or another option" in one and "step to step" in one for one in report.cannot_tell)
    missing = world("stale_weights", sequences=128)
    sizes = np.repeat(np.linspace(0.02, 0.6, 8), 16)[:, None]
    missing.trainer = simulated.noise(1.0, shared=True, where=lambda world: sizes)
    missing.edits = made.edits
    report = diagnose(missing.records())
    assert (report.verdict, report.confidence) == ("adapter_not_synced", 0.5)
    assert not any("step to step" in one for one in report.cannot_tell)


def test_whole_sequences_that_agree_are_no_dropout():
    """Of sequences that are packed in one row the first sees no other."""
    made = world("dropout", sequences=64)
    made.edits = [lambda columns, world: columns["old_logp"].__setitem__(slice(0, 64, 8), columns["rollout_logp"][::8])]
    report = diagnose(made.records())
    assert (report.verdict, report.confidence) == ("dropout", 0.5)
    assert any("packed in one row" in one for one in report.cannot_tell)
    assert diagnose(of_one_step(world("dropout", sequences=64).records())).confidence > 0.8


@pytest.mark.parametrize("entropy", [False, True])
def test_other_tokens_that_may_be_other_rows_are_unsure(entropy):
    """The trainer's own draws do not surprise it; without entropy nobody knows."""
    made = world("retokenised")
    made.entropy = entropy
    made.edits += [lambda columns, world: columns.update(entropy=-columns["old_logp"])]
    report = diagnose(made.records())
    found = {one.cause: one.confidence for one in report.causes}
    assert found["retokenised"] == 0.5
    assert any("rows were put in another order" in one for one in report.cannot_tell)
    known = diagnose(world("retokenised").records())
    assert known.confidence > 0.8 and not any("another order" in one for one in known.cannot_tell)


def test_zeros_beside_a_ban_may_be_of_structured_decoding():
    report = diagnose(world("mask", "logit_mask").records())
    assert {one.cause: one.confidence for one in report.causes}["mask"] == 0.5
    assert any("mask or tokens that structured decoding" in one for one in report.cannot_tell)
    assert not any("structured decoding" in one for one in diagnose(world("mask").records()).cannot_tell)


def test_a_penalty_moves_all_new_tokens_after_one_prefix_alike():
    """And updates that rewarded repetitions do not, whatever the versions say."""
    found = []
    for size in (0.0, 0.05):
        made = world("repetition_penalty", sequences=64)
        made.edits += [simulated.versions(0, now=0)]
        uneven = size * np.random.default_rng(0).uniform(-1, 0, 3 * simulated.VOCABULARY)
        records = [
            dataclasses.replace(
                one, rollout_logp=one.rollout_logp - uneven[one.completion_ids] * (one.old_logp < one.rollout_logp)
            )
            for one in made.records()
        ]
        found.append(diagnose(records))
    assert [one.verdict for one in found] == ["repetition_penalty", "repetition_penalty"]
    assert found[0].confidence > 0.9 and found[1].confidence == 0.5
    asked = [any("rewarded tokens of the prompt, or repetitions" in said for said in one.cannot_tell) for one in found]
    assert asked == [False, True]


def test_an_end_token_that_a_truncation_left_alone_is_asked_about():
    (asked,) = (one for one in CAUSES["appended_eos"].not_told_from if "left the end token alone" in one.words)
    records = world("appended_eos").records()
    assert asked.settled(Evidence.of([cut(one, 20) if row % 2 else one for row, one in enumerate(records)]))
    assert not asked.settled(Evidence.of(records))


def test_chosen_completions_may_be_of_the_other_temperature():
    """A temperature near the trainer's moves their likelihood by less than choosing half of them does."""
    near, far = (diagnose(tempered(0, temperature, False)) for temperature in (0.9, 0.6))
    assert near.verdict == far.verdict == "temperature"
    assert near.confidence == 0.5 < far.confidence
    asked = [
        any("chosen by their rewards or their likelihood" in said for said in one.cannot_tell) for one in (near, far)
    ]
    assert asked == [True, False]


def test_a_factor_on_tokens_that_were_all_seen_may_be_a_penalty():
    """``repetition_penalty`` divides the positive logits of tokens that stood in the context before."""
    seen = [
        dataclasses.replace(one, prompt_ids=np.r_[np.arange(50), one.prompt_ids]) for one in tempered(0, 0.6, False)
    ]
    report = diagnose(seen)
    assert (report.verdict, report.confidence) == ("temperature", 0.5)
    assert any("a penalty on repeated tokens" in one for one in report.cannot_tell)
    assert not any("a penalty on repeated" in one for one in diagnose(tempered(0, 0.6, False)).cannot_tell)


@pytest.mark.parametrize("column", ["rollout_logp", "old_logp"])
def test_an_infinite_log_prob_beside_a_temperature_ends_no_diagnosis(column):
    records = world("temperature").records()
    values = getattr(records[3], column).copy()
    values[5] = -np.inf
    records[3] = dataclasses.replace(records[3], **{column: values})
    assert "temperature" in {one.cause for one in diagnose(records).causes}


def test_clean_is_unsure_where_the_tokens_surprise_less_than_draws():
    made = world("clean", sequences=64)
    made.edits = [lambda columns, world: columns.__setitem__("entropy", columns["entropy"] + 0.1)]
    report = diagnose(made.records())
    assert 3 < abs(report.numbers["surprisal_balance"] / report.numbers["surprisal_balance_se"]) < 5
    assert (report.verdict, report.confidence) == ("clean", 0.5)
    assert any("less surprising than draws" in one for one in report.cannot_tell)


def test_an_empty_completion_ends_no_diagnosis():
    """Its versions by the token are none."""
    records = world("precision").records()
    empty = {"prompt_ids": [1, 2], "completion_ids": [], "rollout_logp": [], "old_logp": [], "rollout_version": []}
    assert diagnose([Record.of(empty), *records]).verdict == "precision"


def test_single_zeros_may_be_of_tokens_that_were_forced():
    """Structured decoding leaves one token in some places, and changes nothing elsewhere."""

    def forced(columns, world):
        columns["rollout_logp"][:, [5, 17]] = 0.0
        columns["old_logp"][:, [5, 17]] -= 3.0

    report = diagnose(World(edits=[forced]).records())
    assert (report.verdict, report.confidence) == ("sentinel", 0.5)
    assert any("structured decoding left alone" in one for one in report.cannot_tell)


def test_rows_of_several_steps_that_do_not_say_so_are_no_sure_dropout():
    """The trainer's weights move between them, as its log-probs do under dropout."""
    records = world("dropout").records()
    asked = "rows of several optimizer steps"
    report = diagnose(records)
    assert (report.verdict, report.confidence) == ("dropout", 0.5)
    assert any(asked in one for one in report.cannot_tell)
    report = diagnose(of_one_step(records))
    assert report.confidence > 0.8 and not any(asked in one for one in report.cannot_tell)


def test_what_leaves_the_traces_of_another_prompt_is_asked_about():
    """A temperature of each request, or another base of the rotary positions."""
    report = diagnose(world("chat_template").records())
    assert report.verdict == "chat_template"
    for cause in ("chat_template", "truncated_prompt", "stale_prefix_cache"):
        asked = " ".join(questions.open_questions(report.evidence, [cause]))
        assert "rope_theta" in asked and "a softcap, a clamp" in asked
    unsure = Evidence.of(world("temperature").records())
    assert any("differs between requests" in one for one in questions.open_questions(unsure, ["chat_template"]))


def test_log_probs_divided_by_the_length_are_no_sure_temperature():
    """One factor of a sequence, and another of each length."""
    random = np.random.default_rng(0)
    records = []
    for one in world("clean", sequences=64).records():
        length = int(random.integers(len(one) // 2, len(one)))
        cut = {name: getattr(one, name)[:length] for name in ("completion_ids", "old_logp", "entropy", "mask")}
        records.append(dataclasses.replace(one, **cut, rollout_logp=cut["old_logp"] / length))
    by_id = {one.cause: one.confidence for one in diagnose(records).causes}
    assert by_id.get("unnormalised", 0.5) == 0.5
    evidence = Evidence.of(records)
    assert not sampling._surely_divided(evidence)
    divided = [dataclasses.replace(one, rollout_logp=0.8 * one.old_logp) for one in records]
    assert sampling._surely_divided(Evidence.of(divided))


@pytest.mark.parametrize("longer", [False, True])
def test_prompts_that_tell_which_sequences_agree_are_no_sure_cause(longer):
    """A prompt that one side cut, old blocks of a cache, a system prompt that some bring, and padding all do that."""
    records = []
    for at, one in enumerate(world("stale_weights", sequences=64).records()):
        long = at // 4 % 2 == 1
        prompt = np.random.default_rng(at // 4).integers(0, 50, 40 if long else 12)
        agree = long == longer
        records.append(
            dataclasses.replace(one, prompt_ids=prompt, rollout_logp=one.old_logp if agree else one.rollout_logp)
        )
    report = diagnose(records)
    assert report.confidence == 0.5, (report.verdict, report.confidence)


@pytest.mark.parametrize("side", ["rollout_logp", "old_logp"])
@pytest.mark.parametrize("step", [0.05, 0.07, 1 / 64, 1 / 1024])
def test_log_probs_in_fixed_steps_were_rounded_when_they_were_stored(side, step):
    """As 8 bits on a linear scale are."""
    made = world("clean", sequences=64)
    made.edits = [lambda columns, world: columns.update({side: step * np.round(columns[side] / step)})]
    report = diagnose(made.records())
    assert [one.cause for one in report.causes] == ["stored_rounded"] and report.confidence > 0.9
    assert not any(
        "stored_rounded" in {one.cause for one in diagnose(world(cause).records()).causes} for cause in IDS[:4]
    )


@pytest.mark.parametrize("step", [0.01, 0.02, 0.05])
@pytest.mark.parametrize("spread", [0.01, 0.05])
def test_rounding_beside_another_cause_has_no_share_of_what_that_one_makes(step, spread):
    """Mean |d| falls by little once the storage is mended, as what was rounded differed, too."""
    exact = world(sequences=64, trainer=noise(spread, shared=True)).records()
    rounded = [dataclasses.replace(one, rollout_logp=step * np.round(one.rollout_logp / step)) for one in exact]
    before, after = (
        np.mean(np.abs(np.concatenate([one.rollout_logp - one.old_logp for one in records])))
        for records in (rounded, exact)
    )
    found = next(one for one in diagnose(rounded).causes if one.cause == "stored_rounded")
    assert found.rough and -0.02 < found.share - (1 - after / before) < 0.1


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_probabilities_in_16_bits_were_rounded_when_they_were_stored(kind):
    """Their logarithms are numbers of any kind."""

    def rounded(columns, world):
        p = torch.tensor(np.exp(columns["rollout_logp"])).to(getattr(torch, kind)).double().clamp(min=1e-7)
        columns["rollout_logp"] = p.log().numpy()

    made = world("clean", sequences=64)
    made.edits = [rounded]
    report = diagnose(made.records())
    assert [one.cause for one in report.causes] == ["stored_rounded"] and report.confidence > 0.9
    assert f"the logarithms of probabilities in {kind}" in report.causes[0].evidence


def test_few_values_of_repeated_contexts_are_no_steps():
    """A truncation leaves zeros, at tokens that differ to the trainer, and samples of one prompt share the others."""
    rng = np.random.default_rng(0)
    alone, shared = -rng.exponential(0.1, 1500), np.tile(-rng.exponential(1.0, 60), 10)
    sampler, trainer = np.append(np.zeros(1500), shared), np.append(alone, shared - 0.05)
    once = np.ones(2100, bool)
    assert few_values(sampler, trainer, once) is None
    assert few_values(sampler, np.append(alone, shared - rng.exponential(0.05, 600)), once) is not None


@pytest.mark.parametrize("tokens", [1, 40])
def test_values_that_return_with_their_contexts_are_no_steps(tokens):
    """One-token answers, and the samples of a greedy sampler, of which the trainer's float32 noise differs."""
    rng, records = np.random.default_rng(0), []
    for prompt in range(32 if tokens == 1 else 8):
        ids = rng.integers(0, 6, (64, 1)) if tokens == 1 else np.tile(rng.integers(0, 60, tokens), (32, 1))
        logp = -rng.exponential(1.0, (6, 1)) if tokens == 1 else -rng.exponential(0.3, tokens)
        for row in ids:
            sampler = (logp[row[0]] if tokens == 1 else logp).astype(np.float32).astype(float)
            trainer = np.minimum(sampler + 3e-7 * rng.standard_normal(len(row)), 0)
            record = {"prompt_ids": [prompt], "completion_ids": row, "rollout_logp": sampler, "old_logp": trainer}
            records.append(Record.of(record))
    assert not any(one.cause == "stored_rounded" for one in diagnose(records).causes)


@pytest.mark.parametrize("few", [0, 12])
def test_noise_of_one_size_is_no_routing(few):
    """About tokens that are nearly certain it is large against 1 - p, and no token is far off."""
    rng, records = np.random.default_rng(0), []
    for row in range(64):
        logp = np.where(rng.random(40) < 0.4, np.log(0.985), -1.5)
        noise = 0.009 * rng.uniform(-1, 1, 40)
        if row < few:
            noise[row] = (-1) ** row
        columns = {"rollout_logp": np.minimum(logp + noise, 0), "old_logp": logp, "completion_ids": np.arange(40)}
        records.append(Record.of({"prompt_ids": [row], **columns}))
    assert (CAUSES["moe_routing"].found(Evidence.of(records)) is not None) == (few > 0)


def test_one_value_for_each_sequence_is_no_step():
    """As of the first token's log-prob at every token."""

    def first(columns, world):
        columns["old_logp"][:] = columns["old_logp"][:, :1]

    made = world("clean", sequences=64)
    made.edits = [first]
    assert "stored_rounded" not in {one.cause for one in diagnose(made.records()).causes}


def last_is(value, rounding=0.0):
    """The made-up value at the last token of each completion, with lower precision besides."""
    made = World(sequences=48, sampler=noise(rounding))
    return [dataclasses.replace(one, rollout_logp=np.append(one.rollout_logp[:-1], value)) for one in made.records()]


@pytest.mark.parametrize("rounding", [0.0, 0.003])
@pytest.mark.parametrize("value", [-10.0, -5.0, -1.0, -0.5])
def test_one_value_at_every_last_token_is_a_placeholder(value, rounding):
    report = diagnose(last_is(value, rounding))
    assert report.verdict == "sentinel" and report.confidence > 0.9
    assert f"most often {value:g}" in report.causes[0].evidence


def test_last_tokens_of_one_value_each_are_no_placeholders():
    made = World(sequences=48, sampler=noise(0.003)).records()
    rng = np.random.default_rng(0)
    moved = [
        dataclasses.replace(one, rollout_logp=np.append(one.rollout_logp[:-1], -rng.exponential(2.0))) for one in made
    ]
    assert "sentinel" not in {one.cause for one in diagnose(moved).causes}


def test_a_round_number_that_is_often_near_is_a_placeholder():
    """An ordinary log-prob, of which the trainer's are mostly no more than half a nat away."""

    def filled(columns, world):
        some = np.random.default_rng(1).random(columns["rollout_logp"].shape) < 0.3
        columns["rollout_logp"][some & (np.abs(columns["old_logp"] + 2) < 0.8)] = -2.0

    made = world("clean", sequences=64)
    made.edits = [filled]
    report = diagnose(made.records())
    assert report.verdict == "sentinel" and report.confidence > 0.9


def test_values_above_0_that_differ_are_no_sure_placeholders():
    def noisy(columns, world):
        columns["rollout_logp"] += 0.5 * np.random.default_rng(0).standard_normal(columns["rollout_logp"].shape)

    made = world("clean", sequences=64)
    made.edits = [noisy]
    report = diagnose(made.records())
    (found,) = (one for one in report.causes if one.cause == "sentinel")
    assert found.confidence == 0.5
    assert any("values above 0 are no log-probs" in one for one in report.cannot_tell)


@pytest.mark.parametrize("added", [0.0, 0.1])
def test_probabilities_that_do_not_sum_to_1_say_not_whose_temperature_it_is(added):
    """What is added to the trainer's log-probs makes the tokens likelier to it."""
    made = World(sequences=128, sampler=lambda logits, world: logits / (0.8 if added else 0.6))
    made.edits = [lambda columns, world: columns.update(old_logp=columns["old_logp"] + added)]
    sure = [one.confidence for one in diagnose(made.records()).causes if one.cause in ("temperature", "raw_logprobs")]
    assert sure == [0.95] if not added else max(sure) <= 0.5


@pytest.mark.parametrize("share", [0.125, 0.25])
def test_older_weights_of_some_sequences_are_no_expert_routing(share):
    """As of one engine of several, while the others round: the numbers are those of its sequences."""
    old = World(sequences=64, sampler=noise(0.5, shared=True)).records()
    new = World(sequences=64, sampler=noise(0.003)).records()
    part = round(64 * share)
    report = diagnose(old[:part] + new[part:])
    (found,) = report.causes
    alone = diagnose(old[:part]).causes[0]
    assert found.cause == "stale_weights" and f"this is of {part} of the 64 sequences" in found.evidence
    assert found.statistic == alone.statistic and found.share < 1


def test_a_cause_that_is_hardly_told_from_others_may_have_no_name():
    """The question is asked of what is .8 sure at most."""
    asked = "or a fault without a name here"
    for cause in ("chat_template", "precision"):
        unsure = diagnose(world(cause).records())
        assert unsure.confidence <= 0.8 and asked in unsure.cannot_tell[-1]
    sure = diagnose(world("shift").records())
    assert sure.confidence > 0.9 and not any(asked in one for one in sure.cannot_tell)


@pytest.mark.parametrize("side", [1, -1])
def test_a_few_tokens_of_one_sign_are_no_division(side):
    """The others differ, too, by rounding in both directions."""
    made = World(sequences=64, sampler=noise(0.003))

    def moved(columns, world):
        far = np.random.default_rng(0).random(columns["rollout_logp"].shape) < 0.05
        columns["rollout_logp"] -= side * np.where(far, 3.0 + np.random.default_rng(1).random(far.shape), 0.0)

    made.edits = [moved]
    assert "unnormalised" not in {one.cause for one in diagnose(made.records()).causes}


def test_a_number_at_a_few_tokens_is_no_sure_top_p():
    """A top_p that keeps as little there leaves no unlikely token alone elsewhere."""

    def raised(columns, world):
        columns["rollout_logp"][:, :5] += 0.3

    made = World(sequences=64, entropy=False)
    made.edits = [raised]
    assert all(one.confidence <= 0.5 for one in diagnose(made.records()).causes if one.cause == "top_p")


def test_rows_that_are_alike_but_for_some_tokens_are_in_no_other_order():
    """Where those tokens have made-up values, the row whose values are the nearest is no row of its own."""
    rng = np.random.default_rng(0)
    rows = []
    for at in range(64):
        own = np.append(-rng.exponential(1.0, 2), np.full(10, -0.01))
        row = {"prompt_ids": [at], "completion_ids": [*range(12)], "old_logp": own}
        rows.append(Record.of(row | {"rollout_logp": np.append(-1 - rng.exponential(4.0, 2), own[2:])}))
    assert "other_quantity" not in {one.cause for one in diagnose(rows).causes}


@pytest.mark.parametrize("digits", [2, 3, 4])
@pytest.mark.parametrize("side", ["rollout_logp", "old_logp"])
def test_significant_digits_were_rounded_when_they_were_stored(side, digits):
    """As by a format string such as .3g: small values keep more decimals."""

    def written(columns, world):
        columns[side] = np.vectorize(lambda one: float(f"{one:.{digits}g}"))(columns[side])

    made = world("clean", sequences=64)
    made.edits = [written]
    report = diagnose(made.records())
    assert [one.cause for one in report.causes] == ["stored_rounded"] and report.confidence > 0.9
    assert report.causes[0].share > 0.99


def test_decimals_are_no_significant_digits():
    """Of log-probs with three decimals a few have as many digits as a number that has five at most."""
    made = world("clean", sequences=64)
    made.edits = [lambda columns, world: columns.update(rollout_logp=columns["rollout_logp"].round(3))]
    (found,) = diagnose(made.records()).causes
    assert "have 3 decimals at most" in found.evidence and found.share > 0.99


@pytest.mark.parametrize("length", [8, 16])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_shifted_log_probs_of_rows_that_are_alike_are_in_no_other_order(length, seed):
    """A row that was sampled from the same prompt may fit what is shifted."""
    rng = np.random.default_rng(seed)
    rows = []
    for prompt in range(8):
        choices = -rng.exponential(1.0, (3, length))
        for _ in range(8):
            own = choices[
                rng.integers(0, 3, length) if rng.random() < 0.5 else np.zeros(length, int), np.arange(length)
            ]
            row = {"prompt_ids": [prompt], "completion_ids": [*range(length)], "old_logp": own}
            rows.append(Record.of(row | {"rollout_logp": np.append(own[1:], -1.5)}))
    assert diagnose(rows).verdict == "shift"


def test_end_tokens_that_were_sampled_have_no_made_up_value():
    """Nearly certain to the sampler, which read another prompt, and unlikely to the trainer."""
    rng = np.random.default_rng(0)
    rows = []
    for at in range(64):
        own = -rng.exponential(0.5, 10 + at % 5)
        row = {
            "prompt_ids": [at],
            "completion_ids": [*range(2, len(own) + 1), 1],
            "old_logp": np.append(own[:-1], -7.0),
        }
        rows.append(Record.of(row | {"rollout_logp": np.append(own[:-1], -0.001 * rng.random())}))
    assert "appended_eos" not in {one.cause for one in diagnose(rows).causes}
    filled = [dataclasses.replace(one, rollout_logp=np.append(one.rollout_logp[:-1], -0.0005)) for one in rows]
    assert "appended_eos" in {one.cause for one in diagnose(filled).causes}


def test_sequences_of_the_first_step_that_agree_are_of_no_padding():
    """They have the weights that sampled the second step, too, but were scored by others; whose prompts are longer is
    chance.
    """
    new = World(seed=0, sequences=16).records()
    old = World(seed=1, sequences=16, sampler=noise(0.3, shared=True)).records()
    new = [dataclasses.replace(one, prompt_ids=np.arange(40), trainer_version=0) for one in new]
    old = [dataclasses.replace(one, trainer_version=1) for one in old]
    mixed = [one for pair in zip(new, old, strict=True) for one in pair]
    named = [
        {one.cause for one in diagnose(mixed).causes}
        for mixed in (
            [dataclasses.replace(one, rollout_version=0, group_id=str(at)) for at, one in enumerate(mixed)],
            [dataclasses.replace(one, trainer_version=None) for one in mixed],
        )
    ]
    assert "position" not in named[0] and "position" in named[1]


def test_noise_that_grows_beside_a_constant_age_is_no_sure_age():
    rows = []
    for step in range(8):
        size = 0.012 * (1 + step / 2)
        for one in World(seed=step, sequences=8, sampler=noise(size)).records():
            rows.append(dataclasses.replace(one, step=step, rollout_version=step, trainer_version=step + 4))
    report = diagnose(rows)
    assert report.confidence == 0.5
    assert any("a lower precision whose effect grows" in one or "precision" in one for one in report.cannot_tell)


def test_tokens_that_were_not_sampled_are_asked_about_beside_a_silent_penalty():
    assert any("tokens that the model did not sample" in one.words for one in CAUSES["penalty_silent"].not_told_from)


def test_made_up_zeros_that_are_nearly_right_are_of_no_prompt_and_no_change():
    """The rest is float32's rounding, whose course over the positions says nothing."""
    rng = np.random.default_rng(0)
    rows = []
    for at in range(64):
        own = -rng.exponential(0.5, 20)
        own[-1] = -0.009 if at % 4 == 0 else -1e-5
        logged = own + 1e-6 * np.where(np.arange(20) < 8, 1.0, 1e-3) * rng.choice([-1, 1], 20)
        logged[-1] = 0.0
        row = {"prompt_ids": [at // 8], "completion_ids": rng.integers(0, 50, 20), "old_logp": own}
        rows.append(Record.of(row | {"rollout_logp": np.minimum(logged, 0)}))
    named = {one.cause for one in diagnose(rows).causes}
    assert not named & {"stale_prefix_cache", "weights_swapped", "chat_template", "truncated_prompt"}


def test_a_gap_of_weights_of_a_constant_age_that_grows_is_no_sure_age():
    """A setting, or a precision, whose effect grows leaves the same."""
    rows = []
    for step in range(9):
        for one in World(seed=step, sequences=8, sampler=noise(0.05 * (step + 1), shared=True)).records():
            rows.append(dataclasses.replace(one, step=step, rollout_version=step, trainer_version=step + 4))
    report = diagnose(rows)
    assert (report.verdict, report.confidence) == ("stale_weights", 0.5)
    lagging = [dataclasses.replace(one, rollout_version=0, trainer_version=one.step) for one in rows]
    assert diagnose(lagging).confidence > 0.5


@pytest.mark.parametrize("rounding", [0.0, 0.003])
def test_a_factor_of_the_first_tokens_is_no_sure_temperature(rounding):
    """Different tokens after one prompt show it, and the others agree, but for rounding."""

    def doubled(columns, world):
        columns["old_logp"][:, :3] *= 2

    made = World(sequences=128, sampler=noise(rounding))
    made.edits = [doubled]
    named = {one.cause: one.confidence for one in diagnose(made.records()).causes}
    assert all(named.get(cause, 0.0) <= 0.5 for cause in ("temperature", "raw_logprobs")), named


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("rescaled", [True, False])
def test_log_probs_that_are_of_one_curve_are_no_sure_temperature(rescaled, ends):
    """As those that were multiplied by a factor, and a number added: a temperature's normaliser is of the context."""
    made = World(sequences=64)
    if rescaled:
        made.edits = [lambda columns, world: columns.update(rollout_logp=0.7 * columns["old_logp"] - 0.3)]
    else:
        made.sampler = lambda logits, world: logits / 0.7
    if ends:  # which no log-prob has
        made.edits.append(lambda columns, world: columns["rollout_logp"].__setitem__((slice(None), -1), 0.0))
    report = diagnose(made.records())
    named = {one.cause: one.confidence for one in report.causes}
    assert (named.get("temperature", 0.0) > 0.5) != rescaled, named
    assert any("rescaled after the softmax" in one for one in report.cannot_tell) == rescaled


def test_greedy_sequences_of_tokens_that_the_trainer_finds_likely_are_no_sure_placeholders():
    """Where no token is unlikely to the trainer, either, a 0 everywhere may be of a sampler that is as good as
    greedy."""
    likely = world("clean", sequences=64)
    likely.trainer = lambda logits, world: np.where(logits == logits.max(-1, keepdims=True), logits + 3, logits)
    likely.sampler = lambda logits, world: np.where(logits == logits.max(-1, keepdims=True), logits, -np.inf)
    report = diagnose(likely.records())
    assert report.confidence == 0.5 and any("greedy sampling" in one for one in report.cannot_tell)


@pytest.mark.parametrize("base", [2, 10])
@pytest.mark.parametrize("side", ["rollout_logp", "old_logp"])
def test_the_negative_of_a_logarithm_to_another_base_is_one_cause(side, base):
    made = World(sequences=64)
    made.edits = [lambda columns, world: columns.update({side: -columns[side] / np.log(base)})]
    report = diagnose(made.records())
    assert [one.cause for one in report.causes] == ["other_quantity"]
    assert f"are the negatives of logarithms to base {base}" in report.causes[0].evidence


@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize("logged", [True, False])
def test_zeros_of_the_trainer_everywhere_are_placeholders(entropy, logged):
    """As of a buffer that nobody filled; a right logp beside them makes no update."""
    records = [
        dataclasses.replace(one, old_logp=0 * one.old_logp, logp=one.old_logp if logged else None)
        for one in world("clean", entropy=entropy).records()
    ]
    report = diagnose(records)
    assert report.verdict == "sentinel" and report.confidence > 0.9
    assert "the trainer's value is the same at every token (it is 0 everywhere)" in report.causes[0].evidence


@pytest.mark.parametrize(("factor", "value"), [(1.0, -9.0), (1 / 0.7, -4.0)])
def test_values_that_were_cut_off_beside_another_fault_are_no_sure_placeholders(factor, value):
    """No value is below them, and they stand at unlikely tokens, as placeholders of an engine's top tokens may."""

    def edit(columns, world):
        divided = factor * columns["rollout_logp"]
        unlikely = divided < (value if factor > 1 else -3.0)
        columns["rollout_logp"] = np.where(unlikely, value, divided)

    made = World(sequences=64)
    made.edits = [edit]
    found = {one.cause: one.confidence for one in diagnose(made.records()).causes}
    assert found["sentinel"] == 0.5
    assert any("that were cut off (clamped)" in one for one in diagnose(made.records()).cannot_tell)


@pytest.mark.parametrize("top_p", [0.98, None])
def test_a_mean_ratio_below_1_asks_about_a_truncation_beside_a_sharper_temperature(top_p):
    made = World(sequences=128)
    nucleus = simulated.nucleus(top_p) if top_p else lambda logits, world: logits
    made.sampler = lambda logits, world: nucleus(logits / 0.9, world)
    report = diagnose(made.records())
    assert [one.cause for one in report.causes] == ["temperature"]
    asked = any("the same beside a truncation (top_p, top_k, min_p)" in one for one in report.cannot_tell)
    assert asked == bool(top_p)


@pytest.mark.parametrize("side", ["rollout_logp", "old_logp"])
def test_values_that_were_cut_off_are_not_few_by_that(side):
    """Nearly all of a flat policy stand at the bound, beside whatever else differs."""
    made = World(sequences=64, sampler=noise(0.3))
    made.edits = [lambda columns, world: columns.update({side: np.maximum(columns[side], -1.5)})]
    found = {one.cause for one in diagnose(made.records()).causes}
    assert not found & {"stored_rounded", "stored_bf16"}, found


@pytest.mark.parametrize("bases", [(2, 10), (2, None), (10, 2)])
def test_two_other_bases_are_no_sure_division(bases):
    """Nor is a base beside another quantity of the other side."""
    sampler, trainer = bases

    def edit(columns, world):
        columns["rollout_logp"] /= np.log(sampler)
        columns["old_logp"] = columns["old_logp"] / np.log(trainer) if trainer else -columns["old_logp"]

    made = World(sequences=64)
    made.edits = [edit]
    report = diagnose(made.records())
    assert all(one.confidence <= 0.5 for one in report.causes if one.cause == "unnormalised"), report.causes
    assert any("another base than e" in one for one in report.cannot_tell)


@pytest.mark.parametrize("entropy", [True, False])
def test_a_temperature_that_goes_with_the_version_is_no_sure_age(entropy):
    """As under a schedule of it that the trainer does not follow."""
    records = []
    for age in range(6):
        made = World(seed=age, sampler=lambda logits, world, age=age: logits / (1 - 0.03 * age))
        made.entropy = entropy
        of_age = {"rollout_version": 19 - age, "trainer_version": 19}
        records += [dataclasses.replace(one, **of_age) for one in made.records()]
    report = diagnose(records)
    named = {one.cause: one.confidence for one in report.causes}
    assert named.get("stale_weights", 0.0) <= 0.5, named
    assert "temperature" in named or any("a temperature that one side applies" in one for one in report.cannot_tell)


def test_beside_other_weights_the_value_of_a_top_p_is_not_read():
    made = World(sequences=128, trainer=noise(0.2, shared=True), sampler=simulated.nucleus(0.9))
    report = diagnose(made.records())
    (found,) = (one for one in report.causes if one.cause == "top_p")
    assert "whose value these numbers do not tell" in found.evidence and "it has at least" not in found.evidence
    assert found.rough


def test_a_temperature_beside_a_truncation_without_entropy_claims_no_bound():
    """Mended alone, it takes most of the difference."""
    made = World(sequences=64)
    made.sampler, made.entropy = lambda logits, world: simulated.nucleus(0.95)(logits / 0.6, world), False
    report = diagnose(made.records())
    (found,) = (one for one in report.causes if one.cause == "temperature")
    assert found.rough and found.share > 0.8
    assert "is not accounted for" not in headline(report)


GAPS_BY_AGE = {
    "grows": lambda age: 0.06 * age + 0.01,
    "mended": lambda age: 0.3 if age > 2 else 0.002,
    "beside another": lambda age: 0.06 * age + 0.04,
}


@pytest.mark.parametrize("how", GAPS_BY_AGE)
def test_a_gap_that_jumps_with_the_age_or_is_there_without_it_is_no_sure_age(how):
    """As where samples from before some version have a fault that was mended then, or all samples have another."""
    records = []
    for age in range(6):
        size = GAPS_BY_AGE[how](age)
        made = World(seed=age, sampler=noise(size, shared=True))
        of_age = {"rollout_version": 19 - age, "trainer_version": 19}
        records += [dataclasses.replace(one, **of_age) for one in made.records()]
    report = diagnose(records)
    assert report.verdict == "stale_weights" and (report.confidence > 0.5) == (how == "grows")
    assert any("another prompt, template" in one for one in report.cannot_tell) == (how != "grows")


def test_zeros_in_place_of_unlikely_tokens_are_no_sure_mask_and_leave_no_silent_temperature():
    """They are surprising by their choice, and what is left is not, while all tokens together follow the trainer."""

    def filled(columns, world):
        drawn = np.take_along_axis(world.plain, columns["completion_ids"][..., None], -1)
        columns["rollout_logp"][(world.plain > drawn).sum(-1) > 1] = 0.0  # the engine reports its two likeliest

    def sharper(logits, world):
        return 1.5 * logits

    made = World(sequences=96, sampler=sharper, trainer=sharper)
    made.edits = [filled]
    report = diagnose(made.records())
    assert {one.cause for one in report.causes} == {"mask", "sentinel"} and report.confidence == 0.5


def test_one_number_from_some_token_on_is_no_running_sum():
    """It does not rise, either, where the policy is nearly certain of every token before."""
    rng = np.random.default_rng(0)
    rows = []
    for at in range(32):
        own = np.where(rng.random(20) < 0.1, -rng.exponential(1.0, 20), -1e-9)
        logged = np.append(np.full(10, -1e-9), np.full(10, -1.0))
        row = {"prompt_ids": [at], "completion_ids": [*range(20)], "old_logp": own}
        rows.append(Record.of(row | {"rollout_logp": logged}))
    assert not any("sums over the tokens" in one.evidence for one in diagnose(rows).causes)


@pytest.mark.parametrize("where", ["ends", "tail"])
def test_zeros_of_a_certain_trainer_are_placeholders_and_no_precision(where):
    """As a cross entropy leaves them at ids that it ignores; many of its other log-probs are nearly 0, too."""
    rng = np.random.default_rng(0)
    rows = []
    for at in range(64):
        own = np.where(rng.random(30) < 0.6, -1e-4 * rng.random(30), -rng.exponential(1.0, 30))
        own[-1] = -1.0 - rng.random()
        row = {"prompt_ids": [at], "completion_ids": rng.integers(0, 50, 30), "rollout_logp": own + 1e-7}
        zero = np.arange(30) >= (29 if where == "ends" else 22)
        rows.append(Record.of(row | {"old_logp": np.where(zero, 0.0, own), "rollout_logp": np.minimum(own + 1e-7, 0)}))
    report = diagnose(rows)
    assert [one.cause for one in report.causes] == ["sentinel"] and report.confidence > 0.9
    assert "exactly 0 from the trainer" in report.causes[0].evidence


def test_a_gap_of_tokens_that_are_certain_to_the_trainer_is_no_precision():
    rng = np.random.default_rng(0)
    rows = []
    for at in range(64):
        own = np.where(np.arange(30) % 5 == 0, -1e-3, -rng.exponential(1.0, 30))
        logged = own + np.where(np.arange(30) % 5 == 0, -0.02 * rng.random(30), 1e-5 * rng.standard_normal(30))
        row = {"prompt_ids": [at], "completion_ids": rng.integers(0, 50, 30), "old_logp": own}
        rows.append(Record.of(row | {"rollout_logp": np.minimum(logged, 0)}))
    assert "precision" not in {one.cause for one in diagnose(rows).causes}


@pytest.mark.parametrize("masked", [True, False])
def test_a_context_that_one_side_did_not_read_is_asked_about_behind_masked_tokens(masked):
    """As where the loss's mask stands in the place of the attention's, so that a tool's answer is not read."""
    made = world("retokenised", sequences=64)
    made.edits = []
    rng, rows = np.random.default_rng(0), []
    for one in made.records():
        cut = int(rng.integers(10, 30))
        mask = np.ones(len(one), bool)
        mask[cut - 4 : cut] = not masked
        other = np.append(one.old_logp[:cut], -1 - rng.exponential(2.0, len(one) - cut))
        other[cut] = -12.0
        rows.append(dataclasses.replace(one, old_logp=other, mask=mask))
    (found,) = (one for one in diagnose(rows).causes if one.cause == "retokenised")
    asked = any("a context that one side did not read" in one for one in diagnose(rows).cannot_tell)
    assert asked == masked and (found.confidence == 0.5) == masked


def test_a_truncation_of_the_trainers_is_asked_about_where_it_forbids_tokens():
    (asked,) = (one for one in CAUSES["unnormalised"].not_told_from if "that the trainer applies" in one.words)
    records = world("clean").records()
    assert asked.settled(Evidence.of(records))
    cut = [dataclasses.replace(one, old_logp=np.append(one.old_logp[:-1], -np.inf)) for one in records]
    assert not asked.settled(Evidence.of(cut))


@pytest.mark.parametrize("factor", [0.7, 0.8])
def test_a_temperature_of_logp_is_no_sure_update(factor):
    made = world("clean", sequences=64).records()
    moved = [
        dataclasses.replace(one, logp=other.old_logp, rollout_version=4, trainer_version=5)
        for one, other in zip(
            made,
            World(sequences=64, trainer=lambda logits, world: logits / factor).records(),
            strict=True,
        )
    ]
    report = diagnose(moved)
    assert (report.verdict, report.confidence) == ("policy_updates", 0.5)
    assert "temperature explains nearly all of it" in report.causes[0].evidence


@pytest.mark.parametrize("base", [2, 10])
@pytest.mark.parametrize("side", ["rollout_logp", "old_logp"])
def test_another_base_beside_another_gap_is_no_division(side, base):
    """The median quotient is that of the base, which no difference of the weights moves."""
    made = World(sequences=64, sampler=noise(0.05))
    made.edits = [lambda columns, world: columns.update({side: columns[side] / np.log(base)})]
    report = diagnose(made.records())
    assert report.verdict == "other_quantity" and f"logarithms to base {base}" in report.causes[0].evidence
    assert "unnormalised" not in {one.cause for one in report.causes}


def test_what_a_division_leaves_is_looked_at():
    """As of older weights besides: the share is that of the division alone."""
    made = World(sequences=96, sampler=noise(0.1, shared=True))
    made.edits = [lambda columns, world: columns.update(rollout_logp=columns["rollout_logp"] / 0.7)]
    report = diagnose(made.records())
    division, *others = report.causes
    assert division.cause == "unnormalised" and 0.9 < division.share < 0.97 and others
    alone = World(sequences=96)
    alone.edits = made.edits
    assert [(one.cause, round(one.share)) for one in diagnose(alone.records()).causes] == [("unnormalised", 1)]
