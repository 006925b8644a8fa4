"""``idle_warning``: the sentence on an anchor with which every staleness ratio is 1."""

from __future__ import annotations

import offcorr


def compares_staleness(correction: offcorr.Correction | None) -> bool:
    """Whether a correction has ratios of staleness; False of TRL's own loss."""
    return correction is not None and "staleness" in correction.compares


def idle_warning(
    correction: offcorr.Correction,
    sampler: str,
    *,
    supplied: bool,
    reported: bool,
    used: str = "generation",
    sample_with: str = "offcorr.rollout.OffPolicy",
    more: str = "",
) -> str:
    """The sentence where ``old_logp`` is recomputed by the weights being trained, so that it is ``logp``.

    Args:
        sampler: its name.
        supplied, reported: the batch has ``old_logp`` of the weights that sampled, or the engine's log-probs.
        used: what is used for one optimizer step.
        sample_with: supplies ``old_logp``.
        more: further ways out.
    """
    alone = "engine" not in correction.compares  # else anchor='rollout' would count the mismatch twice
    lacking, other = "anchor='recomputed' takes no log-probs of the weights that sampled", ""
    if supplied:
        cure = f"Take anchor='snapshot', which uses those that {sampler} supplies"
    elif reported and alone:
        cure = f"Take anchor='rollout', which uses those that {sampler} reports"
    else:
        lacking = "there are no log-probs of the weights that sampled"
        cure = f"Sample with {sample_with}, which supplies them"
        other = ", or with an engine that reports log-probs (use_vllm=True)" if alone else ""
    return (
        f"every staleness ratio of {correction.method!r} will be 1, whatever the lag: {lacking}, and each {used} is "
        f"used for one optimizer step, so old_logp is logp. {cure}{other}{more}"
    )
