"""Semantics of log-probs, on tokens drawn exactly from a sampler over 200 symbols that does what it is told."""

from __future__ import annotations

import re
from collections import Counter
from typing import get_args

import pytest
import torch

import offcorr
from offcorr.training import Rollout, Step, Supplied, logprob_semantics
from offcorr.training.first_batch import unscored
from offcorr.training.semantics import MENDS, Kind

SYMBOLS = 200
SIZES = (16, 32)  # 512 tokens


def sampled(
    seed=0,
    *,
    sizes=SIZES,
    trainer_temperature=1.0,
    temperature=1.0,
    top_p=1.0,
    top_k=SYMBOLS,
    reported="processed",
    noise=0.0,
    far=0.0,
    logits_dtype=torch.float64,
    stored=torch.float64,
    peaked=False,
):
    """[B, T] logp, rollout_logp, mask and entropy of tokens from distributions between flat and ``peaked``.

    reported: "processed", of the distribution that was sampled; "raw", at temperature 1 over all symbols; "divided",
        the raw log-prob divided by the temperature.
    noise: standard deviation of what the engine's logits have beside the trainer's, as from quantised weights.
    far: share of the places where that noise is 13 times as large, as where a mixture of experts takes another route.
    """
    draw = torch.Generator().manual_seed(seed)
    low, high = (3.0, 9.0) if peaked else (0.5, 4.0)
    scale = low + (high - low) * torch.rand(*sizes, 1, generator=draw, dtype=torch.float64)
    logits = scale * torch.randn(*sizes, SYMBOLS, generator=draw, dtype=torch.float64)
    trainer = (logits / trainer_temperature).log_softmax(-1)
    engine = logits
    if noise:
        noises = noise * torch.where(torch.rand(*sizes, 1, generator=draw) < far, 13, 1)
        engine = logits + noises * torch.randn(logits.shape, generator=draw)
    engine = engine.to(logits_dtype).double()

    probs = (engine / temperature).softmax(-1)
    if top_p < 1 or top_k < SYMBOLS:
        ordered, order = probs.sort(-1, descending=True)
        kept = (ordered.cumsum(-1) - ordered < top_p) & (torch.arange(SYMBOLS) < top_k)
        probs = torch.zeros_like(probs).scatter(-1, order, torch.where(kept, ordered, 0))
        probs = probs / probs.sum(-1, keepdim=True)
    reached = probs.cumsum(-1)
    below = torch.rand(*sizes, 1, generator=draw, dtype=torch.float64) * reached[..., -1:]
    tokens = torch.searchsorted(reached, below, right=True)  # of symbols that were cut, none

    raw = engine.log_softmax(-1)
    scores = {"processed": probs.log(), "raw": raw, "divided": raw / temperature}[reported]
    logp, rollout_logp = (table.gather(-1, tokens)[..., 0] for table in (trainer, scores))
    entropy = -(trainer.exp() * trainer).sum(-1)
    return logp.float(), rollout_logp.to(stored), torch.ones(sizes).bool(), entropy.float()


def found(seed=0, *, with_entropy=True, same_weights=True, **settings):
    logp, rollout_logp, mask, entropy = sampled(seed, **settings)
    return logprob_semantics(
        logp,
        rollout_logp,
        mask,
        entropy=entropy if with_entropy else None,
        temperature=settings.get("trainer_temperature", 1.0),
        same_weights=same_weights,
    )


NOISES = {
    "exact": {},
    "quantised": {"noise": 0.03},
    "some tokens far off": {"noise": 0.03, "far": 0.03},
    "bf16 logits": {"logits_dtype": torch.bfloat16},
    "bf16 log-probs": {"stored": torch.bfloat16},
    "temperature on both sides": {"temperature": 0.7, "trainer_temperature": 0.7},
}


def kinds_without_a_fault(noise, peaked, draws):
    """Of draws of 512 tokens, each seen with entropy and without."""
    kinds: Counter = Counter()
    for seed in range(draws):
        logp, rollout_logp, mask, entropy = sampled(seed, peaked=peaked, **NOISES[noise])
        kinds.update(logprob_semantics(logp, rollout_logp, mask, entropy=given).kind for given in (entropy, None))
    return kinds


@pytest.mark.parametrize("peaked", [False, True])
@pytest.mark.parametrize("noise", NOISES)
def test_no_false_alarm(noise, peaked, draws):
    assert kinds_without_a_fault(noise, peaked, draws) == {"agrees": 2 * draws}


@pytest.mark.slow
@pytest.mark.parametrize("peaked", [False, True])
@pytest.mark.parametrize("noise", NOISES)
def test_no_false_alarm_in_200_draws(noise, peaked):
    """2,400 draws in all."""
    assert kinds_without_a_fault(noise, peaked, 200) == {"agrees": 400}


FAULTS = {
    "processed, T = .7": ("temperature", {"temperature": 0.7}),
    "processed, T = 1.3": ("temperature", {"temperature": 1.3}),
    "processed, T = .7, bf16": (
        "temperature",
        {"temperature": 0.7, "logits_dtype": torch.bfloat16, "stored": torch.bfloat16},
    ),
    "processed, T = .7, quantised": ("temperature", {"temperature": 0.7, "noise": 0.05}),
    "raw, T = .7": ("raw", {"temperature": 0.7, "trainer_temperature": 0.7, "reported": "raw"}),
    "raw, T = 1.3": ("raw", {"temperature": 1.3, "trainer_temperature": 1.3, "reported": "raw"}),
    "raw on both sides, T = .7": ("unlogged", {"temperature": 0.7, "reported": "raw"}),
    "raw on both sides, T = 1.3": ("unlogged", {"temperature": 1.3, "reported": "raw"}),
    "top-p .9": ("kept_mass", {"top_p": 0.9}),
    "top-p .9, bf16": ("kept_mass", {"top_p": 0.9, "logits_dtype": torch.bfloat16, "stored": torch.bfloat16}),
    "top-p .9, quantised": ("kept_mass", {"top_p": 0.9, "noise": 0.05}),
    "top-p .9, some tokens far off": ("kept_mass", {"top_p": 0.9, "noise": 0.02, "far": 0.03}),
    "processed, T = .7, some tokens far off": ("temperature", {"temperature": 0.7, "noise": 0.02, "far": 0.03}),
    "top-k 5": ("kept_mass", {"top_k": 5}),
    "divided by .7": ("unnormalised", {"temperature": 0.7, "reported": "divided"}),
    "divided by 1.3": ("unnormalised", {"temperature": 1.3, "reported": "divided"}),
    "far away": ("differs", {"noise": 0.8}),
}


@pytest.mark.parametrize("peaked", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_named_in_512_tokens(fault, peaked, draws):
    """In 20 of 20 draws; at least in 14 where both log-probs are the same and only the surprisal tells."""
    (kind, settings), seeds = FAULTS[fault], draws // 3
    kinds = Counter(found(seed, peaked=peaked, **settings).kind for seed in range(seeds))
    assert kinds[kind] >= (0.7 if kind == "unlogged" else 1) * seeds, kinds


@pytest.mark.parametrize("peaked", [False, True])
@pytest.mark.parametrize("temperature", [0.7, 0.95, 1.3])
def test_the_temperature_is_estimated(temperature, peaked):
    for seed in range(10):
        one_sided = found(seed, temperature=temperature, peaked=peaked).temperature
        raw = found(seed, temperature=temperature, trainer_temperature=temperature, reported="raw", peaked=peaked)
        assert one_sided.value == pytest.approx(temperature, abs=0.02) and 0 < one_sided.error < 0.01
        assert raw.temperature.value == pytest.approx(1.0, abs=0.02)


def test_a_temperature_that_entropy_does_not_describe_is_named_all_the_same():
    """Contexts of one entropy and two shapes, a choice of two and a likely token before a flat tail."""
    for seed in range(8):
        draw = torch.Generator().manual_seed(seed)
        far, tail = torch.rand(2, 960, generator=draw, dtype=torch.float64)
        logits = 0.1 * torch.randn(960, 50, generator=draw, dtype=torch.float64)
        logits[:384, 0] += 5 + 2 * tail[:384]
        logits[384:] -= 12
        logits[384:, 0], logits[384:, 1] = 0, -0.5 - 3 * far[384:]
        trainer, engine = logits.log_softmax(-1), (logits / 0.7).log_softmax(-1)
        tokens = torch.multinomial(engine.exp(), 1, generator=draw)
        logp, rollout_logp = (table.gather(-1, tokens).view(8, 120) for table in (trainer, engine))
        entropy = -(trainer.exp() * trainer).sum(-1).view(8, 120)
        named = logprob_semantics(logp, rollout_logp, torch.ones(8, 120).bool(), entropy=entropy)
        assert named.kind == "temperature" and named.temperature.value == pytest.approx(0.7, abs=0.05)
        assert named.sentence.count("it sampled at its own") == 1


def test_the_kept_mass_is_estimated():
    """With many symbols the mass that top-p keeps is top_p and a little; of log-probs with noise, too."""
    for noise in (0.0, 0.05):
        mass = found(sizes=(16, 128), top_p=0.9, noise=noise).ratio
        assert 0.9 < mass.value < 0.91 and mass.error < 0.002


@pytest.mark.parametrize("fault", [name for name, (kind, _) in FAULTS.items() if kind in ("kept_mass", "unnormalised")])
def test_what_needs_no_entropy(fault, draws):
    kind, settings = FAULTS[fault]
    assert {found(seed, with_entropy=False, **settings).kind for seed in range(draws // 3)} == {kind}


def test_a_temperature_without_entropy_has_a_direction_only():
    results = [found(seed, with_entropy=False, temperature=1.3) for seed in range(20)]
    assert {result.kind for result in results} == {"temperature"}
    assert all(result.temperature is None and "a higher temperature" in result.sentence for result in results)


@pytest.mark.parametrize(("by", "neighbour"), [(1, "previous"), (-1, "next")])
def test_shifted_by_one(by, neighbour):
    logp, rollout_logp, mask, entropy = sampled()
    result = logprob_semantics(logp, rollout_logp.roll(by, 1), mask, entropy=entropy)
    assert result.kind == "shifted" and f"of the {neighbour} token" in result.sentence


def test_one_number_for_every_token():
    logp, rollout_logp, mask, _ = sampled()
    result = logprob_semantics(logp, torch.zeros_like(rollout_logp), mask)
    assert result.kind == "placeholders" and "the log-prob 0 for every token" in result.sentence


OF_A_SEQUENCE = {
    "mean": (lambda e: e.mean(1, keepdim=True).expand_as(e), "the same at every token of a sequence: they are no log"),
    "sum": (lambda e: e.sum(1, keepdim=True).expand_as(e), r"the same at .* \(an average or a sum\?\)"),
    "so far": (lambda e: e.cumsum(1), r"only fall from token to token of a sequence.*\(cumulative sums\?\)"),
    "to come": (lambda e: e.flip(1).cumsum(1).flip(1), "only rise from token to token"),
}


@pytest.mark.parametrize("reported", OF_A_SEQUENCE)
@pytest.mark.parametrize("with_entropy", [True, False])
def test_numbers_of_a_whole_sequence_are_no_log_probs_of_tokens(reported, with_entropy):
    """As from an API that gives only a cumulative log-prob; no temperature is named."""
    logp, rollout_logp, mask, entropy = sampled()
    make, said = OF_A_SEQUENCE[reported]
    result = logprob_semantics(logp, make(rollout_logp), mask, entropy=entropy if with_entropy else None)
    assert result.kind == "per_sequence" and result.fatal and "logprobs=None" in result.mend
    assert re.search(said, result.sentence) and "temperature" not in result.sentence


@pytest.mark.parametrize("engine", ["the same", "absent"])
def test_an_old_logp_of_whole_sequences_is_named(engine):
    """At any lag, and where the engine's log-probs have the same fault or there are none."""
    logp, rollout_logp, mask, entropy = sampled()
    mean = rollout_logp.mean(1, keepdim=True).expand_as(logp).float()
    batch = batch_of(logp, None if engine == "absent" else mean, mask, entropy, old_logp=mean)
    result = semantics_of(batch, Supplied())
    assert result.kind == "per_sequence" and result.sentence.startswith("the log-probs in old_logp are the same at ev")


def test_log_probs_that_fall_on_both_sides_or_in_few_tokens_are_log_probs():
    falling = torch.linspace(-0.1, -3.0, 32).repeat(4, 1)
    noisy = falling + 0.01 * torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    assert logprob_semantics(falling, falling - 0.001, torch.ones(4, 32).bool()).kind == "agrees"
    assert logprob_semantics(falling, noisy, torch.ones(4, 32).bool()).kind == "agrees"
    logp, rollout_logp, mask, entropy = sampled()
    rollout_logp[1:, 3:], mask[1:, 3:] = torch.nan, False
    rollout_logp[0] = rollout_logp[0].sort(descending=True)[0]
    mask[0, 8:] = False
    assert logprob_semantics(logp, rollout_logp, mask, entropy=entropy).kind != "per_sequence"


@pytest.mark.parametrize("with_entropy", [True, False])
def test_a_fit_that_no_temperature_gives_is_no_temperature(with_entropy):
    """Log-probs that hardly depend on the trainer's, and a temperature of 20: they differ, with the numbers."""
    logp, rollout_logp, mask, entropy = sampled()
    draw = torch.Generator().manual_seed(0)
    unrelated = -0.5 - 5 * torch.rand(SIZES, generator=draw)
    hot = 0.05 * rollout_logp - 3 + 0.001 * torch.randn(SIZES, generator=draw)
    of_means = rollout_logp.mean(1, keepdim=True) + 0.01 * torch.randn(SIZES, generator=draw)
    for engine in (unrelated, hot, of_means):
        result = logprob_semantics(logp, engine, mask, entropy=entropy if with_entropy else None)
        assert result.kind == "differs" and result.temperature is None, result.sentence
        assert re.search(r"\(mean \|d\| \d.* over 512 tokens\)", result.sentence)


@pytest.mark.parametrize("with_entropy", [True, False])
def test_probabilities_are_named_and_nothing_else(with_entropy):
    logp, rollout_logp, mask, entropy = sampled()
    result = logprob_semantics(logp, rollout_logp.exp(), mask, entropy=entropy if with_entropy else None)
    assert result.kind == "probabilities" and "probabilities, it seems" in result.sentence and "log" in result.mend


def test_probabilities_of_the_trainer_are_not_the_engines_fault():
    logp, rollout_logp, mask, entropy = sampled()
    result = logprob_semantics(logp.exp(), rollout_logp, mask, entropy=entropy)
    assert result.kind == "probabilities" and "the trainer's log-probs (old_logp, if" in result.sentence


def test_a_batch_without_valid_tokens_says_nothing_of_the_engine():
    logp, rollout_logp, mask, _ = sampled()
    sentence = logprob_semantics(logp, rollout_logp, torch.zeros_like(mask)).sentence
    assert sentence == "no token is trained on: the mask is 0 everywhere"


def test_what_differs_may_be_a_quantised_engine():
    assert "quantised" in found(noise=0.4).mend and found(noise=0.4).kind == "differs"


def test_log_probs_one_place_late_of_a_peaked_policy_are_no_division():
    """The engine's are never above the trainer's, but no function of them."""
    draw = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(16, 40, 50, generator=draw)
    tokens = torch.multinomial(logits.softmax(-1).view(-1, 50), 1, generator=draw).view(16, 40, 1)
    right, late = (one.log_softmax(-1).gather(-1, tokens)[..., 0] for one in (logits, logits.roll(1, 1)))
    found = logprob_semantics(right, late, torch.ones(16, 40).bool())
    assert found.kind == "differs" and found.fatal and "they hardly correlate" in found.sentence
    assert "not shifted by one" in found.mend and "quantised" not in found.mend
    divided = logprob_semantics(right, right / 0.7, torch.ones(16, 40).bool())
    assert divided.kind == "unnormalised"


def test_other_weights_are_no_truncation():
    """Of few tokens the mean ratio is below 1, and d is far above 0 at some, as under no kept mass."""
    logp, rollout_logp, mask, entropy = sampled(top_p=0.8)
    assert logprob_semantics(logp, rollout_logp, mask, entropy=entropy).kind == "kept_mass"
    some = torch.rand(SIZES, generator=torch.Generator().manual_seed(0)) < 0.04
    off = torch.where(some, logp - 0.5, rollout_logp)
    assert logprob_semantics(logp, off, mask, entropy=entropy).kind != "kept_mass"


def test_what_no_two_policies_leave_is_no_quantised_engine():
    """Rows in another order: the mean of e^d is far from 1, which is the reason to refuse, and is said."""
    logp, rollout_logp, mask, entropy = sampled(noise=0.1)
    right = logprob_semantics(logp, rollout_logp, mask, entropy=entropy)
    rolled = logprob_semantics(logp, rollout_logp.roll(1, 0), mask, entropy=entropy)
    assert rolled.kind == "differs" and rolled.fatal and not right.fatal
    assert "quantised" not in rolled.mend and "rows in another order" in rolled.mend
    assert f"the mean ratio e^d is {rolled.ratio.value:.3g} +- " in rolled.sentence


@pytest.mark.parametrize(("move", "neighbour"), [((1, 0), "next"), ((0, 1), "previous")])
def test_a_shift_with_a_filled_end_is_said_beside_the_placeholder(move, neighbour):
    logp = -4 * torch.rand(16, 12, generator=torch.Generator().manual_seed(0)) - 0.05
    filled = torch.nn.functional.pad(logp, (move[1], move[0]))[:, move[0] : move[0] + 12]
    found = logprob_semantics(logp, filled, torch.ones_like(logp).bool())
    assert found.kind == "placeholders" and f"its other log-probs are those of the {neighbour} token" in found.sentence
    assert "env_mask" in found.mend and "move one of the two by one token" in found.mend
    ended = torch.cat([logp[:, :-1], torch.zeros(16, 1)], 1)
    assert "its other" not in logprob_semantics(logp, ended, torch.ones_like(logp).bool()).sentence


@pytest.mark.parametrize("placeholder", [-20.0, -1.0])
def test_a_few_placeholders_hide_no_temperature(placeholder):
    for seed in range(10):
        logp, rollout_logp, mask, entropy = sampled(seed, temperature=0.7)
        rollout_logp[:, 5] = placeholder  # 16 of 512 tokens
        result = logprob_semantics(logp, rollout_logp, mask, entropy=entropy)
        assert result.kind in ("temperature", "raw") and result.temperature.value == pytest.approx(0.7, abs=0.05)


def test_too_little_to_tell():
    assert found(sizes=(2, 10), temperature=0.5).kind == "unknown"
    certain = torch.full((16, 32), -0.001)
    assert logprob_semantics(certain, certain * 3, torch.ones(16, 32).bool()).kind == "unknown"
    unscored = torch.full((16, 32), torch.nan)
    nothing = logprob_semantics(certain, unscored, torch.ones(16, 32).bool())
    assert (nothing.kind, nothing.tokens) == ("unknown", 0) and not nothing.wrong


def test_a_rare_token_that_is_absent_is_no_surprise():
    """400 tokens of entropy .01, none of which happens to be the rare one: their variance is not that of the sample."""
    share = torch.tensor(0.0015)
    logp = torch.log1p(-share).expand(8, 50).clone()
    entropy = -(share * share.log() + (1 - share) * torch.log1p(-share)).expand(8, 50)
    uncertain, _, mask, its_entropy = sampled(sizes=(8, 10))
    logp, entropy = torch.cat([logp, uncertain], 1), torch.cat([entropy, its_entropy], 1)
    mask = torch.cat([mask, mask.new_ones(8, 50)], 1)
    assert logprob_semantics(logp, logp, mask, entropy=entropy).kind == "agrees"
    surprise = logprob_semantics(logp[:, :50], logp[:, :50], mask[:, :50], entropy=entropy[:, :50]).surprise
    assert abs(surprise.value) < surprise.error


@pytest.mark.parametrize("which", ["unlikely", "other"])
def test_tokens_that_the_engine_did_not_score_count_for_how_tokens_were_drawn(which):
    """They may be the unlikely ones, as after a look-up among the likeliest; or were drawn otherwise themselves."""
    logp, rollout_logp, mask, entropy = sampled(sizes=(32, 64))
    left_out = logp < logp.quantile(0.07)
    if which == "other":
        left_out = torch.rand(logp.shape, generator=torch.Generator().manual_seed(1)) < 0.07
        logp = torch.where(left_out, logp - 3, logp)
    rollout_logp = torch.where(left_out, torch.nan, rollout_logp)
    result = logprob_semantics(logp, rollout_logp, mask, entropy=entropy)
    assert result.kind == "agrees"
    advantages = torch.ones(len(logp))
    batch = offcorr.Batch(
        logp=logp, old_logp=logp, rollout_logp=rollout_logp, advantages=advantages, mask=mask, entropy=entropy
    )
    assert unscored(batch).drawn_otherwise == (which == "other")


def test_nothing_under_the_mask_and_nothing_unscored_counts():
    logp, rollout_logp, mask, entropy = sampled(top_p=0.9)
    wanted = logprob_semantics(logp[:, :24], rollout_logp[:, :24], mask[:, :24], entropy=entropy[:, :24])
    mask[:, 28:] = False
    logp[:, 28:30], entropy[:, 28:30], rollout_logp[:, 24:28], rollout_logp[:, 28:] = (
        torch.nan,
        torch.inf,
        torch.nan,
        -9.0,
    )
    assert logprob_semantics(logp, rollout_logp, mask, entropy=entropy) == wanted


def test_later_weights_are_no_fault():
    assert found(noise=0.4).kind == "differs"
    later = found(noise=0.4, same_weights=False)
    assert later.kind == "agrees" and "as those of other weights do" in later.sentence
    assert found(temperature=0.7, reported="raw", same_weights=False).kind == "agrees"
    assert "training since" in found(temperature=0.7, same_weights=False).sentence
    assert found(top_p=0.9, same_weights=False).kind == "kept_mass"


def test_every_kind_has_a_mend_unless_nothing_is_wrong():
    assert MENDS.keys() == set(get_args(Kind))
    assert {kind for kind, mend in MENDS.items() if not mend} == {"agrees", "unknown"}
    result = found(top_p=0.9)
    assert result.wrong and "top_p=1.0" in result.mend and "linear_logprob(..., support=)" in result.mend
    assert result.sentence.endswith("512 tokens)")
    assert not found().wrong


@pytest.mark.parametrize("name", ["logp", "rollout_logp", "mask", "entropy"])
def test_shapes(name):
    columns = dict(zip(("logp", "rollout_logp", "mask", "entropy"), sampled(), strict=True))
    columns[name] = columns[name][:, :1]
    with pytest.raises(ValueError, match=r"has shape \(16, (1|32)\), expected \[B, T\]"):
        logprob_semantics(**columns)


def test_the_temperature_is_above_0():
    with pytest.raises(ValueError, match=r"temperature is 0.0, expected a number > 0"):
        logprob_semantics(*sampled()[:3], temperature=0.0)


# -- Step.semantics ----------------------------------------------------------------------------------------------


def batch_of(logp, rollout_logp, mask, entropy, **columns):
    return offcorr.Batch(
        logp=logp, rollout_logp=rollout_logp, mask=mask, entropy=entropy, advantages=torch.ones(len(logp)), **columns
    )


def semantics_of(batch, anchor=None, temperature=1.0):
    step = Step(offcorr.get("ppo"), anchor=anchor)
    return step.semantics(step.place(batch), temperature)


def test_step_without_engine():
    logp, _, mask, entropy = sampled()
    assert semantics_of(batch_of(logp, None, mask, entropy)) is None


def test_step_compares_with_the_weights_that_sampled():
    """The trainer has moved on, so that ``logp`` is far away; its entropy is then not that of ``old_logp``."""
    logp, rollout_logp, mask, entropy = sampled()
    moved = logp - 0.5 * torch.rand(logp.shape, generator=torch.Generator().manual_seed(1))
    placed = semantics_of(batch_of(moved, rollout_logp, mask, entropy, old_logp=logp), Supplied())
    assert placed.kind == "agrees" and placed.gap < 1e-6 and placed.surprise is None
    unmoved = semantics_of(batch_of(logp, rollout_logp, mask, entropy, old_logp=logp), Supplied())
    assert unmoved.kind == "agrees" and unmoved.surprise is not None


def test_step_knows_the_lag_from_the_versions():
    columns = sampled(noise=0.4)
    version = torch.zeros(SIZES, dtype=torch.long)
    for anchor in (Rollout(), None):
        kinds = [
            semantics_of(batch_of(*columns, rollout_version=version, trainer_version=now), anchor).kind
            for now in (0, 3)
        ]
        assert kinds == ["differs", "agrees"]


def test_step_takes_packed_batches_and_the_temperature():
    logp, rollout_logp, _, entropy = sampled(temperature=0.7, trainer_temperature=0.7, reported="raw")
    batch = offcorr.Batch.packed(
        logp=logp.flatten(),
        rollout_logp=rollout_logp.flatten(),
        entropy=entropy.flatten(),
        advantages=torch.ones(16),
        mask=torch.ones(512).bool(),
        cu_seqlens=torch.arange(17) * 32,
    )
    result = semantics_of(batch, temperature=0.7)
    assert result.kind == "raw" and "about 1.00, the trainer's 0.70: it sampled at the trainer's" in result.sentence


def test_a_kept_mass_over_a_nearly_uniform_policy_is_not_a_missing_normalisation():
    draw = torch.Generator().manual_seed(0)
    logp = -7 + 0.2 * torch.randn(8, 64, generator=draw)
    kept = torch.full_like(logp, 0.9).log() + 0.002 * torch.randn(8, 64, generator=draw)
    assert logprob_semantics(logp, logp - kept, torch.ones_like(logp).bool()).kind == "kept_mass"
    halved = logprob_semantics(logp, logp / 1.1, torch.ones_like(logp).bool())
    assert halved.kind == "unnormalised"


def test_what_is_further_off_is_not_judged_more_mildly():
    """A truncation and a silent temperature stop the run; so does what no setting of a sampler explains."""
    generator = torch.Generator().manual_seed(0)
    logp = -torch.rand(16, 64, generator=generator) * 2 - 8.0
    made_up = -torch.rand(16, 64, generator=generator)
    scripted = logprob_semantics(logp, made_up, torch.ones_like(logp).bool())
    assert scripted.wrong and scripted.fatal
    unlikely = logprob_semantics(logp, logp, torch.ones_like(logp).bool(), entropy=torch.full_like(logp, 1.0))
    assert unlikely.kind == "unlogged" and unlikely.fatal
    assert found(top_p=0.9).fatal and found(top_k=2).fatal and 1 - found(top_k=2).ratio.value > 0.6
    assert found(temperature=2.0, reported="divided").fatal
    noisy = found(noise=0.8)
    assert noisy.wrong and not noisy.fatal  # an engine weight corrects it
    silent = logprob_semantics(logp, logp, torch.ones_like(logp).bool(), entropy=-logp - 0.2)
    assert silent.kind == "unlogged"
    assert silent.fatal


@pytest.mark.parametrize(
    ("placeholder", "number", "noise", "said"),
    [
        (0.0, 51, 0.0, "0, for 10% of the tokens"),
        (0.0, 10, 0.0, "0, for 2% of the tokens"),
        (0.0, 1, 0.0, "0, for 1 of the tokens"),
        (0.0, 3, 0.06, None),  # other weights, or a truncation, may leave three unlikely tokens alone
        (-9999.0, 51, 0.0, "-9999, for 10% of the tokens"),
        (-9999.0, 3, 0.06, "-9999, for 3 of the tokens"),
    ],
)
def test_placeholders_are_refused(placeholder, number, noise, said):
    """However few, where nothing else explains them; the mend names no correction."""
    logp, rollout_logp, mask, entropy = sampled(noise=noise)
    rare = (logp < -1.6).nonzero()[:number]
    rollout_logp[rare[:, 0], rare[:, 1]] = placeholder
    result = logprob_semantics(logp, rollout_logp, mask, entropy=entropy)
    assert (result.kind, result.fatal) == (("placeholders", True) if said else ("agrees", False))
    assert not said or (said in result.sentence and "tis" not in result.mend and "NaN" in result.mend)


@pytest.mark.parametrize("temperature", [1.2, 1.5, 2.0])
def test_log_probs_divided_beside_a_trainer_at_that_temperature_are_no_kept_mass(temperature):
    """d is then log Z, a function of the context, as under a truncation; but the tokens were drawn as from all."""
    divided = {"temperature": temperature, "trainer_temperature": temperature, "reported": "divided"}
    for seed in range(8):
        result = found(seed, **divided)
        assert result.kind == "unnormalised" and result.fatal
        assert "drawn as from all" in result.sentence and "top_p=1.0" not in result.mend and "likeliest" in result.mend
    without = found(**divided, with_entropy=False)
    assert without.kind == "kept_mass" and "divided by a temperature above 1 after the softmax" in without.sentence
    assert "which entropy would show" in without.sentence


def test_log_probs_of_the_likeliest_token_are_no_kept_mass():
    """In place of the sampled one's, as of the first entry of a list of candidates."""
    logp, _, mask, entropy = sampled()
    draw = torch.Generator().manual_seed(1)
    likeliest = torch.maximum(logp, -entropy * torch.rand(logp.shape, generator=draw))
    result = logprob_semantics(logp, likeliest, mask, entropy=entropy)
    assert result.kind == "unnormalised" and result.fatal and "such as the likeliest" in result.mend


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda e: -e, "negatives of log-probs, it seems"),
        (lambda e: e.exp(), "probabilities, it seems"),
        (lambda e: e.clamp(min=-2), "are cut off at -2, where 72% of the tokens"),
        (lambda e: e.trunc(), "are whole numbers: rounded, or cut off"),
    ],
)
def test_values_that_are_no_log_probs_of_single_tokens_are_said_to_be_what_they_are(change, said):
    logp, rollout_logp, mask, entropy = sampled()
    result = logprob_semantics(logp, change(rollout_logp), mask, entropy=entropy)
    assert result.fatal and said in result.sentence


def test_log_probs_after_another_text_are_no_kept_mass():
    """The sampler's tokens are nearly impossible to the trainer, so that d is below 0 at each of them."""
    logp, rollout_logp, mask, entropy = sampled(peaked=True)
    other = logp - 15 * torch.rand(logp.shape, generator=torch.Generator().manual_seed(2))
    for known in (entropy, None):
        result = logprob_semantics(other, rollout_logp.flip(0), mask, entropy=known)
        assert result.kind == "differs" and result.fatal and "hardly correlate" in result.sentence


def test_a_ban_is_told_from_a_truncation_or_asked_about():
    """Of a few tokens: asked about.  Of the likeliest one: its tokens are less likely than draws from all."""
    few = found(top_k=SYMBOLS - 20)
    assert few.kind == "kept_mass" and "some tokens are forbidden" in few.sentence
    logp, _, mask, entropy = sampled()
    rest = logprob_semantics(logp - 1, logp - 0.5, mask, entropy=entropy + 0.4)
    assert rest.kind == "unnormalised" and "rather the others" in rest.sentence and "forbids some" in rest.mend


@pytest.mark.parametrize("settings", [{"top_p": 0.9}, {"top_p": 0.8, "peaked": True}, {"top_k": 5}, {"top_k": 50}])
def test_a_truncation_is_one(settings):
    """Its tokens are likelier than the trainer's draws: not divided after the softmax, but maybe banned."""
    results = [found(seed, **settings) for seed in range(8)]
    assert {result.kind for result in results} == {"kept_mass"}
    assert not any("after the softmax" in result.sentence for result in results)
    assert all("or some tokens are forbidden (logit_bias, bad_words)" in result.sentence for result in results)


@pytest.mark.parametrize(
    ("noise", "said"),
    [
        (0.005, r"agree with the trainer's \(mean \|d\| 0\.00\d+ over 512 tokens\)$"),
        (0.06, r"are near the trainer's: mean \|d\| is 0\.0\d+ over 512 tokens \(above 0\.01 an engine w"),
        (0.12, r"differ .* by mean \|d\| 0\.0\d+ over"),
    ],
)
def test_engine_and_trainer_agree_below_the_healthy_limit_alone(noise, said):
    """The limit is the one of docs/metrics.md for offcorr/engine/abs_mean."""
    result = logprob_semantics(*sampled(noise=noise)[:3])
    assert result.kind == "agrees" and (result.gap > 0.05) == ("differ" in said)
    assert re.search(said, result.sentence) and ("(healthy: below 0.05)" in result.sentence) == ("differ" in said)
    assert ("an engine weight may be worth it: docs/which.md" in result.sentence) == (0.01 < result.gap < 0.05)
    later = logprob_semantics(*sampled(noise=noise)[:3], same_weights=False).sentence
    assert "engine weight" not in later and ("differ from the trainer's as those of other weights" in later) == (
        result.gap > 0.01
    )


@pytest.mark.parametrize(
    ("loss", "anchor", "hinted"),
    [
        ("minpro", None, True),
        ("minpro?weight=truncate", None, False),
        ("tis", None, False),
        ("aipo", None, False),
        ("near_overlap", None, False),
        ("cispo", "rollout", False),
    ],
)
def test_a_loss_that_takes_no_engine_weight_is_not_told_that_one_may_be_worth_it(loss, anchor, hinted):
    logp, rollout_logp, mask, _ = sampled(noise=0.06)
    step = Step(offcorr.get(loss), anchor=Rollout() if anchor else None)
    sentence = step.semantics(step.place(batch_of(logp, rollout_logp, mask, None, old_logp=logp))).sentence
    assert "are near the trainer's: mean |d| is" in sentence
    assert ("an engine weight may be worth it" in sentence) == hinted


@pytest.mark.parametrize("engine", ["right", "NaN", "absent"])
@pytest.mark.parametrize("factor", [0.9, 0.5])
def test_a_wrong_old_logp_is_named_where_the_lag_is_0(engine, factor):
    logp, rollout_logp, mask, _ = sampled()
    rollout = {"right": rollout_logp.float(), "NaN": torch.full_like(logp, torch.nan), "absent": None}[engine]
    given = {"logp": logp, "advantages": torch.ones(len(logp)), "mask": mask, "rollout_logp": rollout}
    versions = {"rollout_version": torch.full(logp.shape, 3), "trainer_version": 3}
    step = Step(offcorr.get("minpro"))
    wrong = step.place(offcorr.Batch(**given, **versions, old_logp=factor * logp))
    found = step.semantics(wrong)
    assert found.kind == "old_logp" and found.sentence.startswith("old_logp is not the trainer's log-prob")
    assert found.fatal == (engine == "right") and "old_logp" in found.mend
    assert ("the engine's agree with" in found.sentence) == (engine == "right")
    if engine == "right":
        noise = torch.randn(logp.shape, generator=torch.Generator().manual_seed(0))
        off = step.semantics(wrong.replaced(rollout_logp=rollout + 0.02 * noise))
        assert "the engine's are nearer to the trainer's (mean |d| 0.01" in off.sentence
    assert step.semantics(wrong.replaced(trainer_version=4)) is None or engine != "absent"
    right = step.semantics(wrong.replaced(old_logp=logp))
    assert right is None if engine == "absent" else not right.wrong


@pytest.mark.parametrize("value", [-1.0, -3.0, -0.01])
def test_a_value_that_was_filled_in_is_no_truncation(value):
    """As for a tool's tokens within the mask."""
    logp, rollout_logp, mask, entropy = sampled()
    rollout_logp[:, 2:5] = value
    found = logprob_semantics(logp, rollout_logp, mask, entropy=entropy)
    assert (
        found.kind == "placeholders" and f"a placeholder, {value:g}, for" in found.sentence and "env_mask" in found.mend
    )


def test_raw_logits_are_no_single_placeholder():
    """Scores that an offset keeps below 0: no value keeps returning."""
    logp, rollout_logp, mask, entropy = sampled()
    scores = rollout_logp + 2 * torch.randn(SIZES, generator=torch.Generator().manual_seed(0)) - 48
    found = logprob_semantics(logp, scores, mask, entropy=entropy)
    assert (
        found.fatal and "raw logits in place of log-probs" in found.sentence and "a placeholder" not in found.sentence
    )


def test_first_tokens_that_samples_share_are_no_placeholders():
    """Under another prompt their log-prob differs, and is the same for all samples on either side."""
    logp, rollout_logp, mask, entropy = sampled()
    logp[:, :2], rollout_logp[:, :2] = -0.7, -1.9
    assert logprob_semantics(logp, rollout_logp, mask, entropy=entropy).kind != "placeholders"


@pytest.mark.parametrize("value", [-9999.0, -100.0])
@pytest.mark.parametrize("place", [0, 5, -1])
def test_a_single_placeholder_is_no_shift_and_no_lost_mass(value, place):
    logp, rollout_logp, mask, entropy = sampled()
    rollout_logp[0, place] = value
    found = logprob_semantics(logp, rollout_logp, mask, entropy=entropy)
    assert found.kind == "placeholders" and f"a placeholder, {value:g}, for 1 of the tokens" in found.sentence


def test_zeros_at_a_few_unlikely_tokens_are_no_truncation():
    logp, rollout_logp, mask, entropy = sampled()
    rows, places = (mask & (logp < -1.6)).nonzero(as_tuple=True)
    rollout_logp[rows[:8], places[:8]] = 0.0
    found = logprob_semantics(logp, rollout_logp, mask, entropy=entropy)
    assert found.kind == "placeholders" and "a placeholder, 0, for" in found.sentence
    assert "a token that structured decoding, or a truncation, left alone has a true 0" in found.sentence


def test_an_old_logp_that_is_a_copy_of_the_engines_bears_nothing_out():
    """Both are of another temperature, and equal to each other; the trainer's log-probs of now tell."""
    logp, rollout_logp, mask, entropy = sampled(temperature=0.7)
    step = Step(offcorr.get("minpro"))
    batch = batch_of(logp, rollout_logp, mask, entropy, old_logp=rollout_logp)
    found = step.semantics(step.place(batch), 1.0, True)
    assert found.kind == "temperature" and "about 0.7" in found.sentence


@pytest.mark.parametrize("kind", ["temperature", "shifted"])
def test_an_old_logp_with_the_mistake_of_the_engines_bears_nothing_out(kind):
    """The sampler scored the tokens again, and made the same mistake; the trainer has the same weights."""
    logp, rollout_logp, mask, entropy = sampled(temperature=0.7) if kind == "temperature" else sampled()
    rollout_logp = rollout_logp if kind == "temperature" else rollout_logp.roll(-1, 1)
    again = rollout_logp + 1e-6 * torch.randn(logp.shape, generator=torch.Generator().manual_seed(0))
    step = Step(offcorr.get("minpro"))
    placed = step.place(batch_of(logp, rollout_logp, mask, entropy, old_logp=again))
    found = step.semantics(placed, 1.0, True)
    assert found.kind == kind and found.fatal
    assert found.sentence.endswith("; the sampler's old_logp is as far from the trainer's")
    later = step.semantics(placed, 1.0, False)  # the trainer has moved on: old_logp is what compares
    assert later.kind == "agrees"


def test_a_fault_that_either_side_may_have_is_not_put_down_to_the_engine():
    """A trainer that is late by one, an entropy of other distributions, and zeros among the trainer's log-probs."""
    logp, engine, mask, entropy = sampled()
    late = logprob_semantics(logp.roll(-1, 1), engine, mask, entropy=entropy)
    assert late.kind == "shifted" and "or the trainer's those of the next" in late.sentence
    raw = logprob_semantics(logp, engine, mask, entropy=2 * entropy)
    assert raw.kind == "unlogged" and "unless the entropy is of other distributions" in raw.sentence
    zeros = torch.arange(logp.numel()).reshape(logp.shape) % 20 == 0
    filled = logprob_semantics(torch.where(zeros, 0.0, logp), engine, mask, entropy=entropy)
    assert filled.kind == "unnormalised" and "of the trainer's log-probs are exactly 0" in filled.sentence
    assert "exactly 0" not in logprob_semantics(0.7 * logp, engine, mask, entropy=entropy).sentence
    cut_off = logprob_semantics(logp.clamp(min=-1), engine, mask, entropy=entropy)
    assert "of the trainer's log-probs are exactly -1 where the engine's are not" in cut_off.sentence


def test_surprising_tokens_may_be_none_of_the_models():
    """A tool's text that the model scored, within the mask: both log-probs agree, whatever the sampler is set to."""
    logp, _, mask, entropy = sampled()
    logp[:, 3:6] = -6.0
    found = logprob_semantics(logp, logp, mask, entropy=entropy)
    assert found.kind == "unlogged" and "not all sampled by this model" in found.sentence
    assert "env_mask" in found.mend and "origin" in found.mend
    sharper = logprob_semantics(0.5 * logp.clamp(min=-2), 0.5 * logp.clamp(min=-2), mask, entropy=entropy)
    assert sharper.kind == "unlogged" and "more certain" in sharper.sentence and "env_mask" not in sharper.mend


@pytest.mark.parametrize(("least", "kind"), [(-3.0, "placeholders"), (-0.3, "agrees")])
def test_zeros_at_one_index_of_all_completions(least, kind):
    """No truncation leaves every first token alone, and among them one that the trainer gives a twentieth."""
    draw = torch.Generator().manual_seed(0)
    logp = -0.1 - torch.rand(64, 12, generator=draw, dtype=torch.float64)
    logp[:, 0] = torch.where(torch.arange(64) % 16 == 0, least, -0.1)
    engine = logp - 1e-4
    engine[:, 0] = 0.0
    found = logprob_semantics(logp, engine, torch.ones(64, 12).bool())
    assert (found.kind == "placeholders") == (kind == "placeholders"), found.sentence
    if kind == "placeholders":
        assert "a placeholder, 0, for 8% of the tokens" in found.sentence


@pytest.mark.parametrize("peaked", [False, True])
@pytest.mark.parametrize("temperature", [0.05, 0.1, 0.2, 0.25, 0.3])
@pytest.mark.parametrize("rows", [16, 64])
def test_a_temperature_far_below_the_trainers_is_named_or_asked_about(temperature, peaked, rows):
    """It leaves few tokens that a fit can use; the training does not begin, and temperature= is in what to change."""
    logp, engine, mask, entropy = sampled(sizes=(rows, 12), temperature=temperature, peaked=peaked)
    found = logprob_semantics(logp, engine, mask, entropy=entropy)
    assert found.fatal and "temperature" in found.sentence, found.sentence
    assert "set the same temperature=" in found.mend
    if found.kind == "differs":
        assert "not by" not in found.sentence
        assert found.mend.index("temperature=") < found.mend.index("weight sync")


@pytest.mark.parametrize("temperature", [0.08, 0.15, 0.2])
@pytest.mark.parametrize("rows", [48, 64])
@pytest.mark.parametrize("seed", range(4))
def test_a_far_lower_temperature_is_said_to_be_possible_where_few_tokens_tell(temperature, rows, seed):
    """Of a policy that is certain of most tokens the surprise may be within its error, and the entropies far apart."""
    draw = torch.Generator().manual_seed(seed)
    below = torch.where(torch.rand(rows, 17, generator=draw) < 0.8, 20, 3 * torch.rand(rows, 17, generator=draw))
    logits = torch.stack([0 * below, -below, -below - 1], -1).double()
    trainer, engine = logits.log_softmax(-1), (logits / temperature).log_softmax(-1)
    tokens = torch.multinomial(engine.exp().view(-1, 3), 1, generator=draw).view(rows, 17, 1)
    logp, reported = trainer.gather(-1, tokens)[..., 0], engine.gather(-1, tokens)[..., 0]
    entropy = -(trainer.exp() * trainer).sum(-1)
    found = logprob_semantics(logp, reported, torch.ones(rows, 17).bool(), entropy=entropy)
    assert "temperature" in found.sentence and "nor by one" not in found.sentence, found.sentence
    assert found.kind not in ("unlogged", "temperature") and found.gap > 0.04


def test_weights_that_were_rounded_coarsely_are_no_far_lower_temperature():
    for peaked in (False, True):
        logp, engine, mask, entropy = sampled(sizes=(64, 32), noise=0.8, peaked=peaked)
        found = logprob_semantics(logp, engine, mask, entropy=entropy)
        assert not found.colder and not found.fatal
        assert "far lower temperature" not in found.sentence


@pytest.mark.parametrize(("noise", "said"), [(0.0, "carry a temperature of about 1.98"), (1.0, "differ about as at")])
def test_a_temperature_that_fits_badly_may_be_another_change(noise, said):
    """As of an engine with coarse weights, whose distributions are flatter."""
    logp, rollout_logp, mask, entropy = sampled(temperature=2.0, noise=noise)
    found = logprob_semantics(logp, rollout_logp, mask, entropy=entropy)
    assert found.kind == "temperature" and said in found.sentence
    assert ("another change of the logits may leave the same" in found.sentence) == bool(noise)
    assert "coarse weights (int4, fp8)" in MENDS["temperature"]
