"""``ESSLearningRate``: a learning rate that follows the effective sample size of the off-policy batch.

lr = own rate * min(1, ess / base) ** (1/2), for one optimizer step  (VCPO, 2602.17616).  Part of VCPO, but no part of
a loss: it goes with any method.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from offcorr.batch import Batch, Tokens
from offcorr.metrics import LogSumExp

Gather = Callable[[Tensor], Tensor]
"""[K] of this rank to [ranks, K]: ``lambda vector: accelerator.gather(vector[None])``."""

RULES = {"sqrt": 0.5, "linear": 1.0}
"""The exponent of ess / base."""

_TRAJECTORIES = LogSumExp()


class ESSLearningRate:
    """Scales an optimizer's learning rate by the effective sample size of each step's batch.

    w_i = exp(sum over the trajectory of (logp - rollout_logp)), by logsumexp and never clamped: a clamp puts a floor
    under the ESS, and the alarm could not ring.  ess = (sum w)^2 / (B sum w^2) over the whole optimizer batch, all
    micro-batches and ranks; B counts the trajectories that have a valid token.  Where a token was not scored by the
    engine, and where there is no ``rollout_logp`` at all, ``old_logp`` stands in for it.

    The rate is scaled inside the optimizer's own ``step``, by its hooks, and put back before ``step`` returns.  So no
    scheduler, warm-up, log or checkpoint ever sees a scaled rate, wherever the step happens: in ``optimizer.step()``,
    in a GradScaler, or within DeepSpeed's backward.

    Args:
        optimizer: of torch, or as ``accelerator.prepare`` returns it, under DeepSpeed and FSDP2 too.
        base: the ESS that counts as healthy, in (0, 1]: 1 (single turn), .55 (several turns), or ``calibrate``.
        rule: "sqrt" or "linear".

    Raises:
        TypeError: the optimizer has no hooks, so is not torch's.
        ValueError: ``base`` or ``rule`` is out of range.

    A loop, where only the last micro-batch of a step takes the second branch:

        ess_lr.add(batch)
        if not accelerator.sync_gradients:
            accelerator.backward(loss)
        else:
            with ess_lr.applied(lambda vector: accelerator.gather(vector[None])) as lr_scale:
                accelerator.backward(loss)  # DeepSpeed steps in here
                optimizer.step()

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.zeros(1))
    >>> optimizer = torch.optim.SGD([weight], lr=1.0)
    >>> ess_lr = ESSLearningRate(optimizer)
    >>> rollout = torch.full((2, 1), -2.0)
    >>> moved = rollout + torch.tensor([[3.0], [1.0]]).log()  # w = 3, 1: ess = 16 / (2 * 10)
    >>> ess_lr.add(Batch(logp=moved, rollout_logp=rollout, advantages=torch.ones(2), mask=moved < 0))
    >>> weight.grad = torch.ones(1)
    >>> with ess_lr.applied() as lr_scale:
    ...     optimizer.step()
    >>> round(lr_scale, 4), round(-weight.item(), 4), optimizer.param_groups[0]["lr"]
    (0.8944, 0.8944, 1.0)
    """

    def __init__(self, optimizer: Any, base: float = 1.0, rule: str = "sqrt") -> None:
        if rule not in RULES:
            raise ValueError(f"rule is {rule!r}, expected one of {list(RULES)}")
        if not 0 < base <= 1:
            raise ValueError(f"base is {base!r}, expected an effective sample size in (0, 1]")
        self.base, self.rule = base, rule
        self.lr_scale = 1.0
        """The factor of the step in force, or else of the last one: what to log."""
        self._calibrations = 0
        self._seen: Tensor | None = None
        self._in_force = False
        self._own_rates: list[tuple[dict[str, Any], Any]] = []
        self._optimizer = _innermost(optimizer)
        self._optimizer.register_step_pre_hook(self._scale_rates)
        self._optimizer.register_step_post_hook(self._restore_rates)

    def drives(self, optimizer: Any) -> bool:
        """Whether this is the optimizer whose rate it scales, wrapped or not."""
        return _innermost(optimizer) is self._optimizer

    @torch.no_grad()
    def add(self, batch: Batch) -> None:
        """One micro-batch of the coming step, with the log-probs it is trained on.

        ValueError: the batch names no other policy, neither ``rollout_logp`` nor ``old_logp``.
        """
        if batch.rollout_logp is None and batch.old_logp is None:
            raise ValueError(
                "rollout_logp and old_logp are None, so there is no policy to compare logp with: pass rollout_logp, "
                "what the engine reported"
            )
        tokens = Tokens(batch)
        log_weight = tokens.log_ratio("total").raw.double().sum(1)
        seen = LogSumExp.of(log_weight, tokens.rows.count > 0)
        self._seen = seen if self._seen is None else _TRAJECTORIES.merge(self._seen, seen)

    def ess(self, gather: Gather | None = None) -> float:
        """Effective share of the trajectories added since the last step, in (0, 1]; 1 where there was none.

        Args:
            gather: [K] to [ranks, K], to see every rank's. One transfer to the host.
        """
        if self._seen is None:
            raise ValueError("no batch was added since the last step: call add(batch) on every micro-batch")
        merged, *others = gather(self._seen) if gather else [self._seen]
        for other in others:
            merged = _TRAJECTORIES.merge(merged, other)
        return (_TRAJECTORIES.read(merged.tolist()) or {"ess": 1.0})["ess"]

    def scale(self, gather: Gather | None = None) -> float:
        """min(1, ess / base), to the power of the rule."""
        return min(1.0, self.ess(gather) / self.base) ** RULES[self.rule]

    def calibrate(self, gather: Gather | None = None) -> float:
        """Take the ESS of what was added for healthy, and forget it: on on-policy batches, in place of ``applied``.

        ``base`` becomes the mean over the calls.  What is left on-policy is the mismatch of the engine.  The step that
        follows is not scaled.
        """
        ess = self.ess(gather)
        self.end()
        self._seen, self.lr_scale = None, 1.0
        self._calibrations += 1
        self.base += (ess - self.base) / self._calibrations  # the first call replaces it
        return ess

    @contextmanager
    def applied(self, gather: Gather | None = None) -> Iterator[float]:
        """Inside, the optimizer steps at the scaled rate; the added batches are used up.  Gives the scale."""
        try:
            yield self.begin(gather)
        finally:
            self.end()

    def begin(self, gather: Gather | None = None) -> float:
        """Scale every step from now on, up to ``end`` or the next ``begin``: for trainers that own the step."""
        self.lr_scale = self.scale(gather)
        self._seen, self._in_force = None, True
        return self.lr_scale

    def end(self) -> None:
        """Scale no more."""
        self._in_force = False
        self._restore_rates()

    def state_dict(self) -> dict[str, Any]:
        """The base and how it was calibrated; what was added for a step not taken goes with its gradients."""
        return {"base": self.base, "calibrations": self._calibrations}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state_dict``'s answer, at the beginning of a step."""
        self.base, self._calibrations, self._seen = state["base"], state["calibrations"], None

    # DeepSpeed calls the optimizer once for each part of the parameters, with param_groups narrowed to it.

    def _scale_rates(self, optimizer: torch.optim.Optimizer, *args: Any) -> None:
        if not self._in_force:
            return
        self._restore_rates()  # of a step that raised
        for group in optimizer.param_groups:
            self._own_rates.append((group, group["lr"]))
            group["lr"] = group["lr"] * self.lr_scale  # a new tensor where the rate is one

    def _restore_rates(self, *args: Any) -> None:
        for group, rate in self._own_rates:
            group["lr"] = rate
        self._own_rates.clear()


def _innermost(optimizer: Any) -> Any:
    """The optimizer that reads the rates: inside the wrappers of Accelerate and DeepSpeed."""
    while (inner := getattr(optimizer, "optimizer", None)) is not None:
        optimizer = inner
    if not hasattr(optimizer, "register_step_pre_hook"):
        raise TypeError(
            f"optimizer is a {type(optimizer).__name__}, expected a torch.optim.Optimizer, or one that "
            "accelerator.prepare returned"
        )
    return optimizer
