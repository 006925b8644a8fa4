"""The formula of each metric, its healthy range with the source, and what to do outside it.

docs/metrics.md is generated from ``GUIDE``, and `offcorr metrics NAME` prints it.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["GUIDE", "HINTS", "Advice", "guide"]


class Advice(NamedTuple):
    """Texts about a metric, in Markdown."""

    formula: str
    healthy: str
    outside: str


GUIDE: dict[str, Advice] = {
    "offcorr/staleness/lag": Advice(
        "Mean over tokens of the trainer's version minus the version that sampled, in optimizer updates (weight "
        "syncs in the asynchronous trainer). Without versions (TRL's own generation, a `rollout_func` that "
        "returns none) it is counted from the weights at the time of the generation: with "
        "`steps_per_generation=4` it is 0, 1, 2 and 3. TRL's own generation samples with those weights; a "
        "`rollout_func` may have older ones, so the logged lag is then a lower bound, with one update per generation "
        "0 throughout: return `rollout_version`. "
        "The `lag` of `OffPolicy` is the age when the samples are drawn, and each further update on the same "
        "samples adds 1: with four updates per generation `lag=4` is logged as 4 to 7, 5.5 on average. A run's "
        "first samples are younger, as no weights are older than the run. Demonstrations have no age, and are left "
        "out: no weights of this run wrote them. TRL's `sample/staleness_mean` of the asynchronous trainer is "
        "[another number](#trls-staleness-and-this-librarys-lag).",
        "0 is on-policy. Frameworks drop older samples than this by default: 4 weight syncs in TRL "
        "(`max_staleness` of its asynchronous trainer), 8 in prime-rl (`max_off_policy_steps`). How much lag a "
        "run bears depends on the learning rate; `abs_mean` tells.",
        "Fewer updates per generation, more sampling capacity, a lower `max_staleness`; or a method that bears it "
        "([which one](which.md)).",
    ),
    "offcorr/staleness/abs_mean": Advice(
        "Mean |d| over tokens.",
        "No source names a range. Of our runs of the demo the one that collapsed has almost five times as much as "
        "MinPRO's. For scale: a clip range of .2 begins to act at |d| = .18.",
        "Where the sampler's log-probs are the anchor (`anchor='rollout'`, as with vLLM), the engine's gap is in it, "
        "at lag 0, too, and a rise at a constant lag may be the engine's, as of its precision or its sampling options: "
        "dump a batch and ask `offcorr diagnose`. Under other anchors a value at lag 0, where nothing has moved, is "
        "noise of the trainer's own, as [dropout](mismatch.md#dropout) makes it, and a rise at a constant lag means "
        "that each update moves the policy further: lower the learning rate, or scale it by `ess_lr`. A rise with the "
        "lag: see `lag`.",
    ),
    "offcorr/staleness/ess_seq": Advice(
        "(sum w)^2 / (n sum w^2) over sequences, w = e^(sum of d), unclamped: the share of the sequences that is "
        "left when they are weighted by their ratios. The n are all since the last log: with `logging_steps` above 1 "
        "several updates are pooled, and the number is mostly lower than the mean of theirs.",
        "verl's guide calls .5 good and warns below .3 "
        "([rollout_corr.md](https://github.com/volcengine/verl/blob/main/docs/algo/rollout_corr.md), of its own "
        "weights). Ours: MinPRO's run is below .3 in 3 of its 40 entries, the one that collapsed in 28, among them "
        "nearly all from update 60 on. It falls with length, since log-ratios add up.",
        "A fall at a constant lag has two causes, and a third where the sampler's log-probs are the anchor "
        "(`anchor='rollout'`, as with vLLM): a larger gap of the engine (see `abs_mean`). Otherwise either each update "
        "moves the policy further, and `abs_mean` rises as well: lower the learning rate, or scale it by `ess_lr`. Or "
        "the outputs grow longer (TRL's "
        "`completions/mean_length`) while `abs_mean` stays: methods with token ratios do not feel that. A fall with "
        "the lag: fewer updates per generation, or a method that bears it ([which one](which.md)). Near 1/n (n "
        "sequences) a sequence-level weight trains on one sequence: take token or prefix ratios, or `ess_lr`.",
    ),
    "offcorr/engine/abs_mean": Advice(
        "Mean |d| over the tokens that the engine scored.",
        "Below .05: NeMo-RL investigates where its `token_mult_prob_error`, mean e^|d|, exceeds 1.05 "
        "([adding-new-models.md](https://github.com/NVIDIA-NeMo/RL/blob/main/docs/adding-new-models.md), for "
        "equal precision), and e^|d| is at least 1 + |d|. An engine weight has something to do from .01 or so on "
        "([which one](which.md)).",
        "First look for an error rather than a correction: the sampling temperature, top-p and top-k on both "
        "sides, processed against raw log-probs (the first batch's [check](#are-these-the-samplers-probabilities) "
        "names these), a weight sync that missed parameters, the chat template. Then precision: the LM head in "
        "float32, bfloat16 in place of fp8. What remains is what `tis`, `icepop` and the other engine weights are "
        "for.",
    ),
    "offcorr/engine/ess_seq": Advice(
        "As for staleness, of the engine's d: (sum w)^2 / (n sum w^2) over sequences, w = e^(sum of d), unclamped.",
        "As for staleness: verl's guide calls .5 good and warns below .3.",
        "As for `engine/abs_mean`: first look for an error. If `abs_mean` is small and this is low, either the "
        "outputs are long or a few tokens are far off; "
        '[`ratio_min` and `ratio_max`](#how-to-read-them) (`log_metrics="full"`) tell which. Both near 1 (.9 and 1.1, '
        "say): it is the length. Over T tokens independent errors of standard deviation s give about e^(-T s^2): 2,000 "
        "tokens with s = .02 (`abs_mean` .016) give .45, although no token is far off. A weight per token (`tis`) "
        "hardly changes these; one per sequence keeps all of that noise. One of the two far from 1: a few tokens are "
        "far off, and `icepop` leaves them out (a veto drops their whole sequences, and by default only where a ratio "
        "is below 1e-4).",
    ),
    "offcorr/loss/multiplier_vs_ratio": Advice(
        "sum |c| / sum r over the tokens that have an advantage.",
        "1: as much as the plain ratio. No source names a range; in our runs of the demo MinPRO has about .85 and CTPO "
        ".77, and both learn.",
        "It is a mean over tokens, and no length of the gradient. Where all tokens are scaled alike, it is a factor on "
        "the learning rate under SGD; Adam divides a constant factor out, and sees its changes. Where tokens are "
        "dropped, the gradient turns, and its length (`grad_norm`) falls by another factor. So tune "
        "the learning rate for each method before comparing them. Far below 1, the correction drops tokens or damps "
        "them: `dropped` and `damped` tell which (MinPRO drops nothing). Above 1, it makes them count for more: a "
        "weight without a cap, or a power of the ratio.",
    ),
    "offcorr/loss/dropped": Advice(
        "Share of the tokens with an advantage whose c is 0: clipped, masked or rejected.",
        "verl's guide calls a share above .1 of vetoed sequences too high (rollout_corr.md). TRL's documentation "
        "says of its clip ratio only that a higher value constrains the policy more. In our runs of "
        "the demo MinPRO drops nothing and CTPO about a quarter, and both learn.",
        "Widen the bounds, or take a method that damps (`sapo`, `cispo`, `minpro`). If it rises over a run, the "
        "data has become too stale: see `staleness/abs_mean`. Tokens without an advantage are not among these; "
        "TRL's `frac_reward_zero_std` counts their prompts.",
    ),
    "offcorr/loss/damped": Advice(
        "Share of the tokens with an advantage that have 0 < |c| < .99 r.",
        "No source names a range; it says which way a method works. MinPRO, which multiplies a token's ratio by "
        "the smallest one before it, works by it: in our run of the demo on almost half of the tokens.",
        "Harmless by itself; read it beside `multiplier_vs_ratio`, which says by how much.",
    ),
    "offcorr/loss/amplified": Advice(
        "Share of the tokens with an advantage that have |c| > 1.01 r.",
        "0 for a method that only clips or caps the token's own ratio (`ppo`, `cispo`). An engine weight (`tis`, "
        "`icepop`) amplifies every token whose engine ratio is above 1.01, a ratio of the whole sequence (`gspo`) "
        "every token that is below it: about half of the tokens, or more where a few tokens raise the ratio, and no "
        "fault. CTPO, which takes the product of the ratios along the prefix, both amplifies and damps, in shares that "
        "change from log to log.",
        "Harmless by itself. Where `ess_after` is low as well, some of these tokens may carry the update: an engine "
        "weight without a cap gets one (`weights.Truncate`, which bounds the engine's ratio and not that of "
        "staleness); for the ratio of staleness take a method that bounds it (`cispo`, `minpro`).",
    ),
    "offcorr/loss/ess_after": Advice(
        "(sum |c|)^2 / (n sum c^2) over the n tokens with an advantage; `ess_before` (in the full log) is the "
        "same of r.",
        "Near `ess_before`, less what is dropped: .5 is good and below .3 is low (verl, of its weights). In our "
        "runs of the demo MinPRO has .90 and CTPO .75.",
        "As low as `ess_before`: the ratios themselves are uneven, and a few tokens with a large one carry the update, "
        "also where `amplified` is 0, as it compares with the plain ratio. Take a method that bounds the token's ratio "
        "(`cispo`, `minpro`, `ppo` with `dual_clip`), or lower the lag. Below `ess_before` although little is dropped: "
        "normal for a method that damps, such as MinPRO; if many tokens are amplified, as there. Low because much is "
        "dropped: as for `dropped`.",
    ),
    "entropy": Advice(
        "Mean entropy of the next token's distribution over the sampled tokens, in nats. Where TRL logs one itself "
        "(its own loss, a KL term, an entropy bonus), it is the mean over the micro-batches of their means, another "
        "number where they hold unequal numbers of tokens.",
        "A slow fall. TRL's documentation offers an entropy bonus against a policy that becomes "
        "near-deterministic, and no number. Ours: from .23 to .02 in MinPRO's run, and to .06, not steadily, in the "
        "one that collapsed, whose mean of .12 lies between those of the two that learned: the level tells nothing.",
        "A fall to 0 beside a flat reward: a larger `eps_high`, an entropy bonus, more varied prompts. A rise "
        "beside a falling reward is a collapse: stop, and go back to a checkpoint.",
    ),
}
"""The metrics of the short log that are always logged."""

CHI2 = (
    "No source names a range. ESS divides the ratios by their mean and chi2 does not: 1 + chi2 = (mean ratio)^2 / ESS, "
    "where that is above 1, so a mean ratio of 1.14 alone makes chi2 .3 beside an ESS of 1."
)
HINTS: dict[str, str] = {
    "abs_p99": "No source names a range. It is interpolated inside a bin of a histogram that ends 40 % above where it "
    "begins: over thousands of tokens usually less than 10 % off, and never above `abs_max`.",
    "ratio_min": "No source names a range; it moves away from 1 with the number of tokens. Bounds that methods set: "
    "the veto drops a sequence with a token below 1e-4, IcePop keeps the engine's ratios above .5, PPO's clip acts "
    "below .8. Near 0 for the engine, it drew a token that the trainer's policy would hardly have drawn: reject it "
    "(a veto), and look for another temperature or a stale weight.",
    "ratio_max": "No source names a range; it moves away from 1 with the number of tokens. Bounds that methods set: "
    "IcePop keeps the engine's ratios below 5, PPO's clip acts above 1.2. A truncated weight (`tis`) bounds what the "
    "engine's does in the loss; this number is from before it.",
    "ratio_mean": "1 in expectation for any two policies, on tokens that the sampler drew. Far from 1, either the "
    "logged numbers are not the sampler's probabilities, or the two sample from other supports (top-p, top-k, "
    "temperature).",
    "chi2_token": CHI2,
    "chi2_seq": CHI2,
    "first_token": "Exactly 0 beside a gap elsewhere points at a difference between decode and prefill, not at the "
    "weights.",
    "clipped": "The clip fraction of a hard clip, the mean damping of a soft gate; always 0 for `gmpo`, which clips in "
    "its ratio: `dropped` has it. No source names a range.",
    "unscored": "0. The engine returned no log-prob for these tokens.",
    "nonfinite": "0. `strict=True` makes an error of it, which names the stage.",
    "skipped": "Any value: the sequences that `skip_dead_sequences` left out have no gradient.",
}
"""Further notes on metrics of the full log, by the last part of their names."""


def guide() -> str:
    """The sections of docs/metrics.md about the metrics of ``GUIDE``, in Markdown."""
    sections = []
    for name, (formula, healthy, outside) in GUIDE.items():
        sections.append(
            f"\n### `{name}`\n\n- **Formula.** {formula}\n- **Healthy.** {healthy}\n- **Outside.** {outside}\n"
        )
    return "".join(sections)
