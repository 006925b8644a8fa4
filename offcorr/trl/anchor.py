"""Who plays ``old_logp`` in a TRL run."""

from __future__ import annotations

from collections.abc import Collection

import offcorr

ANCHORS = ("snapshot", "rollout", "recomputed")


def check_anchor(anchor: str | None, correction: offcorr.Correction | None) -> None:
    """Raise ``ValueError`` where the engine's log-probs as anchor would turn an engine station into a no-op."""
    if anchor == "rollout" and correction is not None and "engine" in correction.compares:
        raise ValueError(
            f"anchor='rollout' puts rollout_logp in the place of old_logp, so the engine ratio of "
            f"{correction.method!r} would be 1 everywhere: the mismatch is in its staleness ratio already. Take "
            "anchor='recomputed' or 'snapshot', "
            "or drop the engine station (weight=None, reject=None)"
        )


def choose_anchor(anchor: str | None, correction: offcorr.Correction | None, supplied: Collection[str]) -> str:
    """The anchor in force, for a batch that holds the keys ``supplied``.

    Asked for: that one.  Else snapshot where the sampler supplies ``old_logp``; else rollout if the engine reported
    log-probs and the correction has no engine station to look at them; else recomputed.

    Raises:
        ValueError: the anchor asked for needs log-probs that did not come.
    """
    needs = {"snapshot": "old_logp", "rollout": "sampling_per_token_logps"}
    if anchor is not None:
        if anchor in needs and needs[anchor] not in supplied:
            raise ValueError(
                "anchor='snapshot' wants old_logp, and the rollout_func returned none: return 'old_logp', a list of "
                "log-probs for each completion (offcorr.rollout.OffPolicy does), or take another anchor"
                if anchor == "snapshot"
                else "anchor='rollout' wants the engine's log-probs, and this run has none (TRL's own generation "
                "reports none): use a rollout_func or vLLM, or take another anchor"
            )
        return anchor
    if needs["snapshot"] in supplied:
        return "snapshot"
    if correction is not None and needs["rollout"] in supplied and "engine" not in correction.compares:
        return "rollout"
    return "recomputed"
