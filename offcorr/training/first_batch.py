"""The log-probs of a run's first batch: the engine's, and the ``old_logp`` that the sampler supplied."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from offcorr.batch import Batch, above_zero
from offcorr.training.origins import watched_rows
from offcorr.training.semantics import (
    FATAL_SURPRISE,
    HEALTHY,
    NOTABLE,
    SIGNIFICANT,
    UNCERTAIN,
    Estimate,
    Semantics,
    logprob_semantics,
    mean_of,
    not_per_token,
    surprise_of,
)

BORNE_OUT = 0.1
"""Mean |old_logp - rollout_logp|, as a share of their distance from logp, up to which the two are one number."""


def batch_semantics(
    batch: Batch, *, temperature: float = 1.0, sampled: bool = True, current: bool | None = None
) -> Semantics | None:
    """``logprob_semantics`` of a batch, padded or packed; None where the engine reported nothing.

    Of a batch with ``origin`` it looks at the sequences that were sampled for this generation; None where there are
    none.

    Args:
        temperature: the trainer's.
        sampled: ``old_logp``, if any, is of the weights that sampled; False: ``logp`` is compared.
        current: ``logp`` is of the weights that sampled, too; None: where the versions say so.
    """
    padded = batch.tokens.batch
    rows = watched_rows(padded)
    if rows is not None:
        padded = padded.rows(rows)
    if rows is not None and not rows.any():
        return None
    if sampled and (whole := _old_logp_of_sequences(padded)):
        return whole
    current = _same_version(padded) if current is None else current
    if sampled and current and (wrong := _wrong_old_logp(padded)):
        return wrong
    if padded.rollout_logp is None:
        return None
    mask, logp, entropy, same_weights = padded.mask.bool(), padded.logp.detach(), padded.entropy, True
    if not mask.any(1).all():
        # Sequences were left out, say those without an end: the mean of -logp - entropy of the others need not be 0.
        entropy = None
    of_both = sampled and current and _bears_the_engine_out(padded)
    if sampled and padded.old_logp is not None and not (current and (of_both or _is_the_engines(padded))):
        moved = (logp - padded.old_logp)[mask].nan_to_num().abs().mean()
        logp, entropy = padded.old_logp, entropy if moved < 0.01 else None
    elif padded.rollout_version is not None and padded.trainer_version is not None:
        same_weights = bool((padded.rollout_version == padded.trainer_version)[mask].all())
    found = logprob_semantics(
        logp,
        padded.rollout_logp,
        mask,
        entropy=entropy,
        temperature=temperature,
        same_weights=same_weights,
    )
    if of_both:
        return replace(found, sentence=f"{found.sentence}; the sampler's old_logp is as far from the trainer's")
    if same_weights or found.kind != "agrees" or found.gap <= NOTABLE:
        return found
    return replace(found, sentence=f"{found.sentence}, {_expected(padded)}")


class Unscored(NamedTuple):
    """The valid tokens of a batch without a log-prob of the sampler, which no comparison looks at.

    Args:
        number: of them.
        share: of all valid tokens.
        surprise: mean of -logp - entropy (nats), which is 0 where the tokens were drawn from the trainer's
            distributions; None: not known.
        of_all: the same of all valid tokens, among which these may be the unlikely ones.
    """

    number: int
    share: float
    surprise: Estimate | None
    of_all: Estimate | None

    @property
    def drawn_otherwise(self) -> bool:
        """Whether they were not drawn from the trainer's distributions, by enough to matter."""
        if self.surprise is None or self.of_all is None or self.number < UNCERTAIN:
            return False
        own = abs(self.surprise.value) > max(FATAL_SURPRISE, SIGNIFICANT * self.surprise.error)
        return own and abs(self.of_all.value) > 3 * self.of_all.error


def unscored(batch: Batch) -> Unscored:
    """The tokens that the sampler reported no log-prob of, in a batch whose ``logp`` is of the weights that sampled.

    Of a batch with ``origin`` it looks at the sequences that were sampled for this generation.
    """
    padded = batch.tokens.batch
    if (rows := watched_rows(padded)) is not None:
        padded = padded.rows(rows)
    valid = padded.mask.bool()
    without = valid if padded.rollout_logp is None else valid & ~padded.rollout_logp.isfinite()
    number, surprise, of_all = int(without.sum()), None, None
    logp = padded.logp.detach()
    # Where sequences were left out, say those without an end, the mean of the others need not be 0.
    if padded.entropy is not None and valid.any(1).all():
        drawn = valid & logp.isfinite() & padded.entropy.isfinite()
        if (known := without & drawn).any():
            surprise, of_all = (
                surprise_of(logp[which].double().cpu(), padded.entropy[which].double().cpu())
                for which in (known, drawn)
            )
    return Unscored(number, number / max(int(valid.sum()), 1), surprise, of_all)


def _expected(batch: Batch) -> str:
    """That a gap is expected of the lag of a batch with versions, whose trainer's log-probs are of other weights."""
    assert batch.rollout_version is not None and batch.trainer_version is not None
    lag = (batch.trainer_version - batch.rollout_version)[batch.mask.bool()].double().mean().item()
    return (
        f"as lag {lag:.3g} and this anchor make it: the sampler's weights are {lag:.3g} updates older than those that "
        "are compared (anchor='snapshot' compares the same weights, where the sampler supplies old_logp)"
    )


def _same_version(batch: Batch) -> bool:
    """Whether versions are known, and all say that the weights being trained sampled."""
    if batch.rollout_version is None or batch.trainer_version is None:
        return False
    return bool((batch.rollout_version == batch.trainer_version)[batch.mask.bool()].all())


def _old_logp_of_sequences(batch: Batch) -> Semantics | None:
    """The finding that ``old_logp`` is no log-prob of single tokens, while ``logp`` is; None where it is one."""
    if batch.old_logp is None:
        return None
    logp, old_logp = batch.logp.detach().cpu().double(), batch.old_logp.cpu().double()
    seen = batch.mask.bool().cpu() & logp.isfinite() & old_logp.isfinite()
    if not (finding := not_per_token(old_logp, logp, seen)):
        return None
    d = (logp - old_logp)[seen]
    gap, ratio = d.abs().mean().item(), mean_of(d.clamp(-50, 50).exp())
    sentence = f"the log-probs in old_logp {finding} (mean |d| {gap:.2g} over {len(d)} tokens)"
    return Semantics("per_sequence", len(d), gap, ratio, None, None, sentence)


def _is_the_engines(batch: Batch) -> bool:
    """Whether ``old_logp`` is ``rollout_logp`` under another name, so that it says nothing about it."""
    assert batch.old_logp is not None and batch.rollout_logp is not None
    same = batch.old_logp == batch.rollout_logp
    return bool(same[batch.mask.bool() & batch.rollout_logp.isfinite()].all())


def _bears_the_engine_out(batch: Batch) -> bool:
    """Whether ``old_logp`` agrees with ``rollout_logp``, and both are far from ``logp``, which has the same weights:
    both may have the same mistake."""
    if batch.old_logp is None or batch.rollout_logp is None:
        return False
    logp, old_logp, rollout_logp = batch.logp.detach(), batch.old_logp, batch.rollout_logp
    seen = batch.mask.bool() & logp.isfinite() & old_logp.isfinite() & rollout_logp.isfinite()
    if seen.sum() < UNCERTAIN:
        return False
    far = min((logp - other)[seen].abs().mean().item() for other in (old_logp, rollout_logp))
    return far > HEALTHY and (old_logp - rollout_logp)[seen].abs().mean().item() < BORNE_OUT * far


def _wrong_old_logp(batch: Batch) -> Semantics | None:
    """The finding that ``old_logp`` is not of the weights of ``logp``, though it should be; None where it is.

    Where the engine reported log-probs, they decide which of the two is wrong.
    """
    if batch.old_logp is None:
        return None
    logp, old_logp, mask = batch.logp.detach(), batch.old_logp, batch.mask.bool()

    def between(one: Tensor, other: Tensor) -> Tensor:
        seen = mask & one.isfinite() & other.isfinite()
        return (one - other)[seen].double().cpu()

    d = between(logp, old_logp)
    if len(d) < UNCERTAIN or (gap := d.abs().mean().item()) <= HEALTHY or above_zero(old_logp[mask]):
        return None
    ratio, borne_out = Estimate(torch.nan, torch.nan), ""
    engine = None if batch.rollout_logp is None else between(logp, batch.rollout_logp)
    if engine is not None and len(engine):
        if (other := engine.abs().mean().item()) > gap / 2:
            return None
        near = "agree with" if other <= NOTABLE else "are nearer to"
        ratio, borne_out = mean_of(engine.exp()), f", and the engine's {near} the trainer's (mean |d| {other:.2g})"
    sentence = (
        f"old_logp is not the trainer's log-prob of the same weights (lag 0): mean |d| {gap:.2g} over {len(d)} tokens"
    )
    return Semantics("old_logp", len(d), gap, ratio, None, None, sentence + borne_out)
