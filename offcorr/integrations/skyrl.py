"""SkyRL: ``register("minpro?eps_high=0.28")`` before the training starts, and its name as ``policy_loss_type``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from offcorr.batch import Batch
from offcorr.correction import Correction
from offcorr.integrations.hook import PREFIX, Hook
from offcorr.optional import require

__all__ = ["HOOK", "policy_loss", "register"]

HOOK = Hook(
    "SkyRL",
    sees="micro-batch",
    carries=frozenset({"old_logp", "rollout_logp"}),
    aggregates=False,
    scales=True,
)
"""SkyRL's hook sees all three policies; its ``loss_reduction`` is in the advantages already, so losses are sums."""

OFF = (
    "tis_ratio_type",
    "sequence_mask_metric",
    "outlier_token_is_threshold_low",
    "outlier_token_is_threshold_high",
    "token_mask_is_threshold_low",
    "token_mask_is_threshold_high",
)
"""SkyRL's own weights and rejections, under ``off_policy_correction``; None: off."""


def policy_loss(spec: str) -> Callable[..., tuple[Tensor, dict[str, float]]]:
    """Returns a policy loss with SkyRL's signature, which travels to Ray's workers as the name of the method.

    Args:
        spec: a method with its options, as for ``offcorr.get``; "offcorr:" may stand before it.

    Raises:
        ValueError: SkyRL's hook cannot carry the method.

    >>> import torch
    >>> old, mask = torch.full((2, 3), -2.0), torch.ones(2, 3)
    >>> advantages = torch.ones(2, 3) / 6  # SkyRL's token_mean of six tokens
    >>> loss, metrics = policy_loss("cispo?cap=1.0")(old + 0.1, old, advantages, config=None, loss_mask=mask)
    >>> round(loss.item(), 4)
    1.9
    """
    _resolved(spec)
    return functools.partial(_loss, spec)


def register(spec: str) -> str:
    """Make a method known to SkyRL; returns its name there, for ``trainer.algorithm.policy_loss_type``.

    Called in the process that starts the training, before it starts.

    Raises:
        ModuleNotFoundError: SkyRL is not installed.
        ValueError: SkyRL's hook cannot carry the method.
    """
    loss = policy_loss(spec)
    require("offcorr.integrations.skyrl.register()", ["skyrl"], install='pip install "skyrl[skyrl-train]"')
    from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry

    name = PREFIX + spec.removeprefix(PREFIX)
    if name not in PolicyLossRegistry.list_available():
        PolicyLossRegistry.register(name, loss)
    return name


@functools.cache
def _resolved(spec: str) -> Correction:
    return HOOK.resolve(spec)


def _loss(
    spec: str,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    config: Any = None,
    loss_mask: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    correction = _resolved(spec)
    theirs = getattr(config, "off_policy_correction", None)
    for name in OFF:
        if getattr(theirs, name, None) is not None:
            raise ValueError(
                f"off_policy_correction.{name} is {getattr(theirs, name)!r}, expected None: {correction.method!r} "
                "applies its own weights and rejections (&weight=..., or another method), and SkyRL's not at all"
            )
    batch = Batch(
        logp=log_probs,
        old_logp=old_log_probs,
        rollout_logp=rollout_logprobs,
        advantages=advantages,
        mask=(log_probs < float("inf")) if loss_mask is None else loss_mask.bool(),
    )
    out = correction(batch)
    return out.loss, {name: mean for name, (mean, _) in out.metrics.means().items()}
