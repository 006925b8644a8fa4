"""verl: ``actor_rollout_ref.actor.policy_loss.loss_mode="offcorr:minpro?eps_high=0.28"`` and nothing else.

verl loads ``offcorr.integrations.verl_plugin`` by its entry point in every process that imports verl.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from offcorr.batch import Batch
from offcorr.correction import Correction
from offcorr.integrations.hook import PREFIX, Hook
from offcorr.methods.registry import split_spec
from offcorr.optional import require
from offcorr.stages.aggregate import AGGREGATIONS
from offcorr.stages.checks import warn_once

__all__ = ["HOOK", "Registry", "policy_loss", "register"]

HOOK = Hook("verl", sees="micro-batch", carries=frozenset({"old_logp", "rollout_logp"}))
"""verl's hook is called once per micro-batch; its weights ``rollout_is_weights`` give the engine's log-probs."""

THEIRS = {"token-sum": "sum"}
"""verl's names of the aggregations, where they differ from those here."""

ENGINE = (
    "algorithm.rollout_correction.rollout_is=token, algorithm.rollout_correction.rollout_is_threshold=1e9 and "
    "actor_rollout_ref.rollout.calculate_log_probs=true"
)


@functools.cache
def policy_loss(spec: str) -> Callable[..., tuple[Tensor, dict[str, float]]]:
    """Returns a policy loss with verl's signature, for ``loss_mode`` or for ``register_policy_loss``.

    Args:
        spec: a method with its options, as for ``offcorr.get``; "offcorr:" may stand before it.

    Raises:
        ValueError: verl's hook cannot carry the method.

    >>> import torch
    >>> old, mask = torch.full((2, 3), -2.0), torch.ones(2, 3)
    >>> logp = (old + 0.1).requires_grad_()
    >>> loss, metrics = policy_loss("offcorr:cispo?cap=1.0")(old, logp, torch.ones(2, 3), mask)
    >>> loss.backward(); logp.grad
    tensor([[-0.1667, -0.1667, -0.1667],
            [-0.1667, -0.1667, -0.1667]])
    >>> round(metrics["offcorr/staleness/k1"], 3)
    -0.1
    """
    correction = HOOK.resolve(spec)
    chosen = "aggregate" in split_spec(spec)[1]

    def loss(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        if not chosen and THEIRS.get(loss_agg_mode, loss_agg_mode) != correction.aggregate:
            warn_once(
                f"loss {correction.method!r} aggregates by {correction.aggregate!r}, its own default; verl's "
                f"loss_agg_mode={loss_agg_mode!r} applies to the KL and entropy terms only. Say which one is meant: "
                f"'{PREFIX}{correction.method}?aggregate={THEIRS.get(loss_agg_mode, loss_agg_mode)}'"
            )
        mask = response_mask.bool()
        engine: dict[str, Any] = {}
        if "rollout_logp" in correction.needs:
            engine["rollout_logp"] = _rollout_logp(correction, old_log_prob, rollout_is_weights, mask)
        elif rollout_is_weights is not None:
            engine["weight"] = rollout_is_weights.to(log_prob.dtype)
        batch = Batch(logp=log_prob, old_logp=old_log_prob, advantages=advantages, mask=mask, **engine)
        total, ranks, fitted = _normalisation(correction, mask, getattr(config, "global_batch_info", None) or {})
        out = fitted(batch, denominator=total)
        return out.loss * ranks, {name: mean for name, (mean, _) in out.metrics.means().items()}

    return loss


def _normalisation(
    correction: Correction, mask: Tensor, of_batch: Mapping[str, Any]
) -> tuple[Tensor | float | None, int, Correction]:
    """The denominator of the global batch, the number of ranks over which verl averages, and the fitted correction."""
    ranks = of_batch.get("dp_size") or 1
    kind = AGGREGATIONS[correction.aggregate]
    if kind.constant_length:
        correction = correction.with_max_length(of_batch.get("loss_scale_factor") or mask.shape[1])
    if kind.unit == "none":
        return None, ranks, correction
    name, own = {
        "tokens": ("batch_num_tokens", mask.sum()),
        "sequences": ("global_batch_size", mask.any(1).sum()),
    }[kind.unit]
    number = of_batch.get(name)
    if number is None and ranks > 1:
        raise ValueError(f"{name} of verl's global_batch_info is None with dp_size={ranks}, expected a number")
    return (own.clamp(min=1) if number is None else number), ranks, correction


def _rollout_logp(correction: Correction, old_logp: Tensor, weights: Tensor | None, mask: Tensor) -> Tensor:
    """The engine's log-probs, from verl's token weights, which are the unbounded engine ratios."""
    problem = ""
    if weights is None:
        problem = "verl hands over no rollout_is_weights"
    elif bool((weights[mask] <= 0).any()):
        problem = "rollout_is_weights are 0 on some valid tokens, as a threshold with a lower bound makes them"
    elif _one_per_sequence(weights, mask):
        problem = "rollout_is_weights are constant within every sequence, as rollout_is=sequence makes them"
    if problem or weights is None:
        raise ValueError(
            f"loss {correction.method!r} compares the engine's log-probs, which verl shows to its loss only as "
            f"unbounded token weights, and {problem}: set {ENGINE}"
        )
    largest = weights[mask].max() if mask.any() else weights.new_ones(())
    if largest > 1 and int((weights[mask] == largest).sum()) > 1:
        warn_once(
            f"several of verl's rollout_is_weights equal their maximum, {float(largest):g}, as if they were truncated "
            f"there; loss {correction.method!r} bounds them itself and needs them unbounded: set {ENGINE}"
        )
    ratio = torch.where(mask, weights, 1).to(torch.promote_types(old_logp.dtype, torch.float32))
    return old_logp - ratio.log()


def _one_per_sequence(weights: Tensor, mask: Tensor) -> bool:
    largest = torch.where(mask, weights, -math.inf).amax(1)
    smallest = torch.where(mask, weights, math.inf).amin(1)
    long = mask.sum(1) > 1
    return bool(long.any() and (largest == smallest)[long].all() and (largest != 1)[long].any())


class Registry(dict[str, Any]):
    """verl's table of policy losses, in which every name that begins with "offcorr:" is found, too.

    >>> sorted(Registry(vanilla=print)), "offcorr:minpro" in Registry(), "minpro" in Registry()
    (['vanilla'], True, False)
    """

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (isinstance(name, str) and name.startswith(PREFIX))

    def __missing__(self, name: str) -> Any:
        if not name.startswith(PREFIX):
            raise KeyError(name)
        return policy_loss(name)


def register() -> None:
    """Make ``loss_mode="offcorr:..."`` known to verl in this process; the plugin does so in each of them.

    Raises:
        ModuleNotFoundError: verl is not installed.
    """
    require("offcorr.integrations.verl.register()", ["verl"], install="pip install verl")
    from verl.trainer.ppo import core_algos

    known: MutableMapping[str, Any] = core_algos.POLICY_LOSS_REGISTRY
    if not isinstance(known, Registry):
        core_algos.POLICY_LOSS_REGISTRY = Registry(known)
