"""Causes in whose weights sampled and whose weights scored."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from offcorr.lab.mismatch.models import KEPT
from offcorr.lab.mismatch.setup import Setup, cause


def _lag(setup: Setup, chain: str) -> int:
    """A number of updates; one supervised update moves the policy less than one policy-gradient update."""
    if chain == "rl":
        return setup.pick("lag", weak=[1, 2], usual=[2, 4, 8], strong=[8, 16])
    return setup.pick("lag", weak=[2, 4], usual=[4, 8, 16], strong=[16])


def _versions(setup: Setup, lag: int) -> None:
    """The logs say the lag, say nothing, or claim that there is none: an update that failed without a word."""
    said = setup.one_of("versions", ["true", "true", "absent", "wrong"])
    setup.version_lag = {"true": lag, "absent": None, "wrong": 0}[said]


@cause(changes=["weights"])
def stale_weights(setup: Setup) -> None:
    """The sampler has the weights from some updates (policy-gradient, supervised, or of a LoRA) before old_logp's."""
    chain = setup.one_of("chain", ["rl", "rl", "sft", "lora"])
    if chain == "lora":
        updates = setup.pick("updates", weak=[2], usual=[4, 8], strong=[16])
        lag = updates // 2
        setup.settings["lag"] = lag
        setup.sampler = [setup.subject.merged(updates - lag)]
        setup.trainer, setup.saved = setup.subject.merged(updates), setup.subject.adapted(updates)
    else:
        lag = _lag(setup, chain)
        setup.trainer = setup.subject.at(chain, lag)
    _versions(setup, lag)


@cause(changes=["weights"], but=["random"])
def adapter_not_synced(setup: Setup) -> None:
    """The sampler has the base weights, the trainer a LoRA on them that was trained for some updates."""
    updates = setup.pick("updates", weak=[2, 4], usual=[4, 8, 16], strong=[16])
    setup.trainer, setup.saved = setup.subject.merged(updates), setup.subject.adapted(updates)
    setup.version_lag = setup.one_of("version_lag", [0, 0, None])


@cause(changes=["updates"])
def policy_updates(setup: Setup) -> None:
    """The trainer makes several policy-gradient updates on the batch; old_logp is from before them, logp from after."""
    setup.updates = setup.pick("updates", weak=[1], usual=[2, 3, 4], strong=[6, 8])
    # Some trainers log the version of the weights of logp, others that of the weights of old_logp.
    if setup.one_of("trainer_version_of", ["logp", "old_logp"]) == "logp":
        setup.version_ahead = setup.updates


@cause(changes=["weights"])
def weights_swapped(setup: Setup) -> None:
    """The sampler's weights change once while it samples: at one moment, which sequences that started at different
    times meet at different tokens, or at the same token of all.

    The tokens before were read by the old weights, whose keys and values stay.  The trainer has the new weights, or (as
    often) the old ones.
    """
    chain = setup.one_of("chain", ["rl", "rl", "sft"])
    lag = setup.pick("lag", weak=[4], usual=[8, 16], strong=[16])
    old, new = setup.subject.module, setup.subject.at(chain, lag)
    setup.sampler = [old, new]
    trainer_is_new = setup.one_of("trainer_has", ["new", "old"]) == "new"
    setup.trainer = new if trainer_is_new else old
    at = int(setup.subject.task.longest * setup.rng.uniform(0.15, 0.45))
    spread = setup.one_of("spread", [0, 8, 24])
    setup.settings["swapped_at"] = at
    seed = int(setup.rng.integers(2**31))

    def place(row: int) -> int:
        # The samples of one prompt start together.
        return max(1, at + int(np.random.default_rng([seed, row // 4]).integers(-spread, spread + 1)))

    setup.boundaries = lambda lengths: [[place(row) for row in range(len(lengths))]]
    setup.version_lag = None
    if trainer_is_new and setup.one_of("versions", ["absent", "absent", "per token"]) == "per token":
        # The token at a place is drawn by the weights that read the one before it.
        setup.token_lags = lambda row, places: np.where(places <= place(row), lag, 0)


@cause(changes=["weights"])
def stale_prefix_cache(setup: Setup) -> None:
    """The prompt's keys and values are from older weights, except for its last, incomplete block."""
    chain = setup.one_of("chain", ["rl", "rl", "sft"])
    lag = setup.pick("lag", weak=[4], usual=[8, 16], strong=[max(KEPT)])
    block = setup.one_of("block", [1, 4, 8, 16])
    new = setup.subject.at(chain, lag)
    setup.sampler, setup.trainer = [setup.subject.module, new], new

    def boundaries(lengths: Sequence[int]) -> list[list[int]]:
        # At least the last token is computed anew.
        return [[(length - 1) // block * block - length for length in lengths]]

    setup.boundaries = boundaries
