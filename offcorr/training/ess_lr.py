"""``ESSLearningRate``: a learning rate that follows the effective sample size of the off-policy batch.

lr = scheduled rate * min(1, ess / base) ** (1/2), for one optimizer step  (VCPO, 2602.17616).  It is a part of VCPO
that works with any loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from offcorr.batch import Batch, check_batch
from offcorr.metrics import Gather, LogSumExp, Metrics
from offcorr.stages.checks import warn_once

RULES = {"sqrt": 0.5, "linear": 1.0}
"""The exponent of ess / base."""

AUTO = "auto"

NO_ENGINE = (
    "the ESS learning rate counts the staleness alone: the sampler reports no log-probs (rollout_logp of a batch, "
    "logprobs of a rollout_func in TRL), so a mismatch between it and the trainer does not lower the learning rate"
)


class ESSLearningRate:
    """Scales an optimizer's learning rate by the effective sample size of each step's batch.

    w_i = exp(sum over the trajectory of (logp - rollout_logp)), computed by logsumexp and never clamped: a clamp would
    put a floor under the ESS and hide a collapse.  ess = (sum w)^2 / (B sum w^2) over the whole optimizer batch, all
    micro-batches and ranks; B counts the trajectories that have a valid token.  For a token without a ``rollout_logp``
    (not scored by the engine, or none given at all) ``old_logp`` takes its place.  Where none is given this is the ESS
    of the staleness alone, and it warns once, unless there is no engine (``own_samples``).

    The rate is scaled inside the optimizer's own ``step``, by its hooks, and restored before ``step`` returns.  No
    scheduler, warm-up, log or checkpoint ever sees a scaled rate, wherever the step happens: in ``optimizer.step()``,
    in a GradScaler, or within DeepSpeed's backward.

    Args:
        optimizer: of torch, or as ``accelerator.prepare`` returns it, under DeepSpeed and FSDP2 too.
        base: the ESS that counts as healthy, in (0, 1]: 1 (single turn) or .55 (several turns).  "auto": its mean over
            the steps whose global batch is on-policy, which are not scaled (1 until there was one).
        rule: "sqrt" or "linear".
        own_samples: the model being trained draws the samples by itself, so that no engine's log-probs are missing.

    Raises:
        TypeError: the optimizer has no hooks, so it is not torch's.
        ValueError: ``base`` or ``rule`` is out of range.

    ``offcorr.training.Step`` drives it.  By hand, where only the last micro-batch of a step takes the second branch:

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

    def __init__(
        self, optimizer: Any, base: float | str = 1.0, rule: str = "sqrt", *, own_samples: bool = False
    ) -> None:
        if rule not in RULES:
            raise ValueError(f"rule is {rule!r}, expected one of {list(RULES)}")
        self.auto = isinstance(base, str) and base == AUTO
        number = isinstance(base, int | float) and not isinstance(base, bool) and 0 < base <= 1
        if not (self.auto or number):
            raise ValueError(f"base is {base!r}, expected an effective sample size in (0, 1], or {AUTO!r}")
        self.base = 1.0 if self.auto else float(base)
        self.rule, self.own_samples = rule, own_samples
        self.lr_scale = 1.0
        """The factor of the current or else of the last step, to be logged."""
        self._calibrations = 0
        self._seen: LogSumExp | None = None
        self._on_policy: Tensor | None = None
        self._in_force = False
        self._own_rates: list[tuple[dict[str, Any], Any]] = []
        inner = _innermost(optimizer)
        self._hooks = (
            inner.register_step_pre_hook(self._scale_rates),
            inner.register_step_post_hook(self._restore_rates),
        )

    @torch.no_grad()
    def add(self, batch: Batch, on_policy: Tensor | None = None) -> None:
        """Add one micro-batch of the coming step, with the log-probs it is trained on.

        Args:
            on_policy: [] bool, for ``base="auto"``: all of the batch was sampled by the weights being trained.  None:
                where the batch's ``rollout_version`` says so.

        Raises:
            ValueError: the batch has neither ``rollout_logp`` nor ``old_logp``.
        """
        check_batch(batch)
        if batch.rollout_logp is None and batch.old_logp is None:
            raise ValueError(
                "the ESS learning rate has no policy to compare logp with, since rollout_logp and old_logp are None: "
                "pass rollout_logp, what the engine reported, or leave ess_lr out"
            )
        if batch.rollout_logp is None and not self.own_samples:
            warn_once(NO_ENGINE)
        tokens = batch.tokens
        log_weight = tokens.log_ratio("staleness" if batch.rollout_logp is None else "total").raw.double().sum(1)
        seen = LogSumExp(LogSumExp.of(log_weight, tokens.rows.count > 0))
        self._seen = seen if self._seen is None else self._seen.merge(seen)
        if self.auto:
            fresh = is_on_policy(batch) if on_policy is None else on_policy
            self._on_policy = fresh if self._on_policy is None else self._on_policy & fresh

    def ess(self, gather: Gather | None = None) -> float:
        """Effective share of the trajectories added since the last step, in (0, 1]; 1 if none or one had a valid token.

        Args:
            gather: [K] to [ranks, K]; None: one rank.  One transfer to the host.
        """
        if self._seen is None:
            raise ValueError("no batch was added since the last step: call add(batch) on every micro-batch")
        seen = Metrics({"ess": self._seen})
        moments = (seen.all_reduce(gather) if gather else seen).data["ess"].read()
        ess = moments[2] if moments else None
        return 1.0 if ess is None else ess

    def scale(self, gather: Gather | None = None) -> float:
        """min(1, ess / base), to the power of the rule."""
        return min(1.0, self.ess(gather) / self.base) ** RULES[self.rule]

    def calibrate(self, gather: Gather | None = None) -> float:
        """Take the ESS of the added batches, which are on-policy, as healthy; to be called in place of ``applied``.

        ``base`` becomes the mean over the calls: on-policy, only the engine's mismatch is left.  The step that follows
        is not scaled.
        """
        ess = self.ess(gather)
        self.end()
        self._seen, self.lr_scale = None, 1.0
        self._calibrations += 1
        self.base += (ess - self.base) / self._calibrations  # the first call replaces it
        return ess

    @contextmanager
    def applied(self, gather: Gather | None = None) -> Iterator[float]:
        """Context in which the optimizer steps at the scaled rate; uses up the added batches and gives the scale."""
        try:
            yield self.begin(gather)
        finally:
            self.end()

    def begin(self, gather: Gather | None = None) -> float:
        """Scale every step from now on, up to ``end`` or the next ``begin``, for trainers that step by themselves.

        With ``base="auto"`` and a global batch that is on-policy, calibrates instead.
        """
        on_policy, self._on_policy = self._on_policy, None
        if on_policy is not None and bool((gather(on_policy[None].float()) if gather else on_policy).all()):
            self.calibrate(gather)
        else:
            self.lr_scale = self.scale(gather)
            self._seen, self._in_force = None, True
        return self.lr_scale

    def end(self) -> None:
        """Stop scaling."""
        self._in_force = False
        self._restore_rates()

    def detach(self) -> None:
        """Remove the hooks from the optimizer."""
        self.end()
        for hook in self._hooks:
            hook.remove()

    def state_dict(self) -> dict[str, Any]:
        """The base and the number of calibrations; batches added for a step that was not taken are not kept."""
        return {"base": self.base, "calibrations": self._calibrations}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a result of ``state_dict``, at the beginning of a step."""
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


def is_on_policy(batch: Batch) -> Tensor:
    """[] bool: every valid token was sampled by the version being trained; False where the versions are not known."""
    if batch.rollout_version is None or batch.trainer_version is None:
        return torch.zeros((), dtype=torch.bool, device=batch.logp.device)
    return ((batch.rollout_version == batch.trainer_version) | ~batch.mask.bool()).all()


def _innermost(optimizer: Any) -> Any:
    """The optimizer that reads the rates, inside the wrappers of Accelerate and DeepSpeed."""
    while (inner := getattr(optimizer, "optimizer", None)) is not None:
        optimizer = inner
    if not hasattr(optimizer, "register_step_pre_hook"):
        raise TypeError(
            f"optimizer is a {type(optimizer).__name__}, expected a torch.optim.Optimizer, or one that "
            "accelerator.prepare returned"
        )
    return optimizer
