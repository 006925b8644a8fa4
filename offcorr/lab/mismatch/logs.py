"""Causes in what is written down: log-probs at the wrong place, placeholders, masks, rounding."""

from __future__ import annotations

import torch

from offcorr.lab.mismatch.language import EOS, PAD
from offcorr.lab.mismatch.setup import Log, Setup, cause


@cause(changes=["shift"])
def shift(setup: Setup) -> None:
    """The sampler's log-probs are logged one token late or early; the place that is left over holds 0."""
    late = setup.one_of("shift", [1, -1]) == 1
    setup.placeholder = 0.0

    def edit(log: Log) -> None:
        logp = log.rollout_logp
        log.rollout_logp = [0.0, *logp[:-1]] if late else [*logp[1:], 0.0]

    setup.edits.append(edit)


@cause(changes=["mask"])
def mask(setup: Setup) -> None:
    """The mask covers tokens that the model did not sample, whose log-prob is a placeholder 0: tools' answers or
    padding; or it is shifted over them."""
    kind = setup.one_of("mask", ["tools covered", "tools shifted", "padding covered"])
    setup.tools, setup.placeholder = kind != "padding covered", 0.0
    by = setup.one_of("by", [-3, -2, 2, 3]) if kind == "tools shifted" else 0
    longest = setup.subject.task.longest

    def edit(log: Log) -> None:
        if kind == "padding covered":
            missing = longest - len(log.completion_ids)
            log.completion_ids += [PAD] * missing
            log.rollout_logp += [0.0] * missing
            log.sampled += [False] * missing
            log.mask += [True] * missing
        elif kind == "tools covered":
            log.mask = [True] * len(log.mask)
        else:
            log.mask = [log.mask[min(max(t - by, 0), len(log.mask) - 1)] for t in range(len(log.mask))]

    setup.edits.append(edit)


@cause(changes=["sentinel"])
def sentinel(setup: Setup) -> None:
    """Some of the sampler's log-probs are placeholders: -9999, -100, 0 or 1, at random tokens or at unlikely ones."""
    value = setup.one_of("sentinel", [-9999.0, -100.0, 0.0, 1.0])
    share = setup.pick("share", weak=[0.005, 0.01], usual=[0.02, 0.05], strong=[0.1, 0.2])
    unlikely = setup.one_of("where", ["random", "unlikely"]) == "unlikely"
    rng = setup.rng

    def edit(log: Log) -> None:
        for t, logp in enumerate(log.rollout_logp):
            # A sampler that returns only the likeliest tokens' log-probs lacks those of the others.
            chance = min(1.0, 4 * share) * (logp < -2) if unlikely else share
            if log.sampled[t] and rng.random() < chance:
                log.rollout_logp[t] = value

    setup.edits.append(edit)


@cause(changes=["eos"])
def appended_eos(setup: Setup) -> None:
    """An EOS that was not sampled is appended to the completions that were cut off, with a made-up log-prob."""
    value = setup.one_of("logp", [0.0, 0.0, -1e-3])
    longest = setup.subject.task.longest
    limit = setup.one_of("limit", [longest // 4, longest // 2, longest])

    def edit(log: Log) -> None:
        if len(log.completion_ids) > limit:
            for values in (log.completion_ids, log.rollout_logp, log.sampled, log.mask):
                del values[limit:]
            log.ended = False
        if not log.ended:
            log.completion_ids.append(EOS)
            log.rollout_logp.append(value)
            log.sampled.append(False)
            log.mask.append(True)

    setup.edits.append(edit)


@cause(changes=["stored"])
def stored_bf16(setup: Setup) -> None:
    """The sampler's log-probs are rounded to bf16 when they are stored."""

    def edit(log: Log) -> None:
        log.rollout_logp = torch.tensor(log.rollout_logp).bfloat16().tolist()

    setup.edits.append(edit)
