"""Captions of the plots of a report: what is drawn, and where the causes that this report names are seen in it."""

from __future__ import annotations

from collections.abc import Mapping

from offcorr.diagnose.diagnosis import Report

DRAWN: Mapping[str, str] = {
    "histogram": "Histogram of d: how many tokens have which d, on a logarithmic scale.",
    "quantiles": "QQ plot: the sorted values of d (its quantiles) against those that as many draws from a normal "
    "distribution would have. The ends are the tokens that differ most.",
    "against_logp": "d against the trainer's log-prob, the logarithm of the probability that it gives a token: at the "
    "right, near 0, the tokens that it is nearly certain of.",
    "positions": "Mean |d|, the size of d without its sign, over the position in the completion. At the right fewer "
    "sequences are long enough, so the mean is of fewer tokens there and jumps more.",
    "lags": "Lag correlation: how closely the trainer's log-probs follow the sampler's of the token so many places "
    "before or after (1: exactly; 0: not at all). At a lag of 0 both are of the same token.",
    "updates": "Histogram of logp - old_logp, on a logarithmic scale: how far the trainer's own updates have moved "
    "its log-probs since the tokens were sampled. This gap is staleness, which comes in addition to d.",
    "token_ids": "Mean d of each token id, one dot per id, in two halves of the sequences. On the grey line both "
    "halves have the same mean.",
    "turns": "Mean |d| of each turn of the conversation.",
    "ages": "Mean |d| of each sequence against the age of the sampler's weights.",
}
"""By the name of a plot: how to read it, whatever the verdict."""


def _each(causes: str, sentence: str) -> dict[str, str]:
    return dict.fromkeys(causes.split(), sentence)


CERTAIN = "two models hardly differ about a token that is nearly certain, so |d| is smallest at the right"
SEEN: Mapping[str, Mapping[str, str]] = {
    "histogram": {
        **_each("precision kv_cache", "rounding raises some log-probs and lowers others, so d is on both sides of 0"),
        **_each(
            "top_p top_k min_p logit_mask",
            "the sampler leaves tokens out and scales the probabilities of the others up to sum to 1, which moves d "
            "below 0",
        ),
        **_each("unnormalised", "the sampler's probabilities do not sum to 1, which moves d to one side of 0"),
        **_each(
            "repetition_penalty",
            "the sampler finds penalised tokens less likely than the trainer does, which moves d above 0, and all "
            "others a little more likely",
        ),
        **_each("mask appended_eos", "the tokens that the model did not sample are among those farthest from 0"),
    },
    "quantiles": {
        **_each(
            "precision kv_cache",
            "rounding changes the log-prob of an uncertain token more than that of a nearly certain one, so the ends "
            "bend away from the line of the middle",
        ),
        **_each("moe_routing", "most tokens agree, in the middle, and a few are far off, at the ends"),
    },
    "against_logp": {
        **_each("precision kv_cache stale_weights adapter_not_synced dropout", CERTAIN),
        **_each(
            "temperature raw_logprobs unnormalised",
            "a temperature changes the log-prob of an unlikely token, at the left, more than that of a likely one",
        ),
        **_each(
            "stored_bf16",
            "the steps between the numbers of bfloat16 are wider, the farther a number is from 0, so d spreads to "
            "the left",
        ),
    },
    "positions": {
        **_each(
            "precision stale_weights adapter_not_synced",
            "the curve rises and falls with how uncertain the tokens of a position are",
        ),
        **_each("kv_cache", "the first token, which is not read from the cache, differs less for how certain it is"),
        **_each("chat_template", "another prompt may change the first tokens, at the left, more than later ones"),
        **_each(
            "truncated_prompt stale_prefix_cache",
            "a difference in the prompt matters less, the longer the completion is, so the curve may fall to the right",
        ),
        **_each(
            "weights_swapped",
            "|d| of a sequence changes where the new weights arrived; at how many positions that was, is how gradual "
            "the change of the curve is",
        ),
        **_each("retokenised", "a sequence agrees up to the token that was replaced, and differs from there on"),
    },
    "lags": _each("shift", "each log-prob is that of a neighbouring token, so the highest bar is not at 0"),
    "token_ids": {
        **_each(
            "stale_weights adapter_not_synced",
            "two sets of weights differ about a token id in much the same way everywhere, which brings ids that are "
            "frequent enough near the grey line",
        ),
        **_each(
            "precision",
            "rounded weights, too, may differ about a token id in the same way everywhere, so dots near the grey line "
            "are no sign of another cause",
        ),
        **_each(
            "temperature raw_logprobs unnormalised repetition_penalty logit_bias",
            "it changes a token id in much the same way everywhere, which brings the dots near the grey line",
        ),
    },
    "turns": _each("truncated_prompt", "a history that one side lacks may grow from turn to turn, and |d| with it"),
    "ages": _each("stale_weights", "older weights may differ more"),
}
"""By the name of a plot and the id of a cause: where the cause is seen in it, true of every dump with that cause."""


def caption(plot: str, report: Report, here: str = "") -> str:
    """Caption of a plot: what is drawn, its numbers, and what the causes that this report names do to it.

    A cause that the report does not name is not mentioned, since no shape of a plot is a proof of one.

    Args:
        plot: a name of ``DRAWN``.
        here: a sentence with the numbers of these data.

    >>> from offcorr.diagnose import Record, diagnose
    >>> rows = [{"prompt_ids": [1], "completion_ids": [2, 3], "rollout_logp": [-1.0, -2.0], "logp": [-1.0, -2.0]}] * 40
    >>> caption("turns", diagnose(map(Record.of, rows)), "Here it is 0.")
    'Mean |d| of each turn of the conversation. Here it is 0.'
    """
    seen = SEEN.get(plot, {})
    named = [finding.cause for finding in report.causes if finding.cause in seen]
    said = [f"{'The verdict' if id == report.verdict else 'A further cause'}, {id}: {seen[id]}." for id in named]
    return " ".join(filter(None, [DRAWN[plot], here, *said]))


def how_to_read(report: Report) -> str:
    """The sentence above the plots, on what they have to do with the verdict.

    >>> from offcorr.diagnose import Record, diagnose
    >>> rows = [{"prompt_ids": [1], "completion_ids": [2, 3], "rollout_logp": [-1.0, -2.0], "logp": [-1.0, -2.0]}] * 40
    >>> how_to_read(diagnose(map(Record.of, rows)))
    'The verdict is clean: what is drawn of d is rounding, 0 nats per token on average, and no shape of it means more.'
    """
    if report.verdict == "clean":
        gap = report.numbers["abs_mean"]
        return (
            f"The verdict is clean: what is drawn of d is rounding, {gap:.2g} nats per token on average, and no shape "
            "of it means more."
        )
    if not report.causes:
        return "No known cause fits these data, so the captions say what is drawn and name no cause."
    return (
        "The verdict comes from the tests above and not from the look of a plot. A caption says what is drawn and, "
        "where a cause that this report names is seen in it, what it does there."
    )
