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
    current: str = "",
    sample_with: str = "a rollout_func that returns them as old_logp, as offcorr.rollout.OffPolicy and VLLMServer do",
    more: str = "",
) -> str:
    """The sentence where ``old_logp`` is recomputed by the weights being trained, so that it is ``logp``.

    Args:
        sampler: its name.
        supplied, reported: the batch has ``old_logp`` of the weights that sampled, or the engine's log-probs.
        used: what is used for one optimizer step.
        current: half a sentence that names a sampler which has the current weights.
        sample_with: supplies ``old_logp``.
        more: a sentence on what is no way out.
    """
    alone = "engine" not in correction.compares  # else anchor='rollout' would count the mismatch twice
    lacking, other = "anchor='recomputed' takes no log-probs of the weights that sampled", ""
    if supplied:
        cure = f"take anchor='snapshot', which uses those that {sampler} supplies"
    elif reported and alone:
        cure = f"take anchor='rollout', which uses those that {sampler} reports"
    else:
        lacking = "there are no log-probs of the weights that sampled"
        cure = f"sample with {sample_with}"
        other = ", or with an engine that reports log-probs (use_vllm=True)" if alone else ""
    return (
        f"every staleness ratio of {correction.method!r} will be 1, whatever the lag: {lacking}, and each {used} is "
        f"used for one optimizer step, so old_logp is logp. Where the sampler has the current weights{current}, this "
        f"is as it should be: there is no staleness to correct. For a sampler that lags, {cure}{other}"
        f"{more and f'. {more}'}"
    )
