"""Anchors: the policy that supplies ``old_logp``, against which staleness ratios are taken.

In decoupled PPO this policy is called proximal.  Any loss works with any anchor:

    anchor.check(loss_fn)
    for batch in batches:
        batch = anchor.place(batch, score=lambda module: log_probs(module, batch))
        loss_fn(batch).loss.backward()
        optimizer.step()
        version += 1
        anchor.step(version, active=share_of_tokens_with_a_gradient)

``score`` runs the batch through the module it is given and returns [B, T] log-probs (nats) in the layout of
``batch.logp``; anchors that hold no weights never call it.  With ``old_logp=None`` and no anchor, every staleness ratio
is 1, and a gate that clips it does nothing.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from offcorr.batch import Batch
from offcorr.correction import Correction
from offcorr.stages.checks import nearest, one_of, warn_once
from offcorr.training.replica import Replica
from offcorr.training.snapshots import MissingVersion, SnapshotRing, changing_weights, check_steps

Score = Callable[[nn.Module], Tensor]
"""Runs the batch at hand through a module: [B, T] log-probs (nats), in the layout of ``batch.logp``."""


class Anchor(ABC):
    """Base class: supplies ``old_logp``.

    Class attributes:
        contains_rollout: ``rollout_logp`` is (part of) its log-probs, so that the staleness ratio contains the mismatch
            between trainer and engine.
        needs_forward: its log-probs are known only with or after the forward pass of the batch.
        reads_recomputed: ``place`` reads ``recomputed``; where no anchor does, a loop need not compute it.
        policy: in words, the policy that supplies ``old_logp``, and by what means.
        supplies: "sampled" where ``old_logp`` is of the weights that sampled, "before" where it is of those before the
            first update on the samples, "" where it is of neither: then the gap between ``old_logp`` and the engine
            is not the engine's.
    """

    policy: ClassVar[str] = "a policy of one's own"
    supplies: ClassVar[str] = ""
    contains_rollout: ClassVar[bool] = False
    needs_forward: ClassVar[bool] = False
    reads_recomputed: ClassVar[bool] = False

    resets: int = 0
    """Number of times it has reset itself."""

    of_metrics: bool = False
    """Whether metrics alone compare with its log-probs, because the loss is not this library's."""

    @property
    def wants_active(self) -> bool:
        """Whether ``step`` reads ``active``."""
        return False

    @abstractmethod
    def old_logp(self, batch: Batch, score: Score | None = None) -> Tensor:
        """The anchor's log-probs of the batch's tokens, in the layout of ``batch.logp``, detached."""

    def place(self, batch: Batch, score: Score | None = None, recomputed: Tensor | None = None) -> Batch:
        """The batch with this anchor's ``old_logp``.

        Args:
            recomputed: log-probs that the loop computed before its first update on these samples; None where the
                anchor does not say that it ``reads_recomputed``.
        """
        return dataclasses.replace(batch, old_logp=self.old_logp(batch, score))

    def step(self, version: int, active: float | None = None) -> None:  # noqa: B027  (most have nothing to do)
        """Follow an optimizer step; to be called after each.

        Args:
            version: of the weights after the step, one higher each time.
            active: share of the global batch's tokens with an advantage whose gradient was not 0 in the step, for an
                anchor that ``wants_active``: 1 - ``offcorr/loss/dropped`` of the merged metrics.
        """

    def check(self, correction: Correction) -> None:  # noqa: B027  (most have nothing to do)
        """Raise ``ValueError`` where the correction would count a ratio twice with this anchor."""

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint, the same on every rank; empty for an anchor without state."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027  (most have nothing to do)
        """Continue from a result of ``state_dict``."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def __str__(self) -> str:
        """The name that configurations use, with its options; the repr, if it has no name; and who compares with it."""
        name = next((name for name, kind in ANCHORS.items() if kind is type(self)), None)
        options = repr(self).removeprefix(type(self).__name__)
        named = repr(self) if name is None else f"anchor {name!r}{'' if options == '()' else f' {options}'}"
        return f"{named}, of the metrics alone: the loss does not read it" if self.of_metrics else named


class Supplied(Anchor):
    """The weights that sampled, in the trainer's precision: ``old_logp`` as the sampler supplied it with the batch."""

    policy = "the weights that sampled, as the sampler supplied it"
    supplies = "sampled"

    def old_logp(self, batch: Batch, score: Score | None = None) -> Tensor:
        return _required(self, batch, "old_logp").detach()

    def place(self, batch: Batch, score: Score | None = None, recomputed: Tensor | None = None) -> Batch:
        _required(self, batch, "old_logp")
        return batch


class Recomputed(Anchor):
    """The weights as they were before the first update on the samples, by one more forward pass.

    Args:
        model: scores the batch when asked: ask before the first update and keep the log-probs, since between updates
            every ratio would be 1.  None: the loop passes the log-probs to ``place``; if it has none, ``old_logp`` is
            None and every staleness ratio is 1.
    """

    policy = "the weights before the first update on the samples"
    supplies = "before"
    reads_recomputed = True

    def __init__(self, model: nn.Module | None = None) -> None:
        self.model = model

    def old_logp(self, batch: Batch, score: Score | None = None) -> Tensor:
        return batch.logp.detach() if self.model is None else _scored(self, batch, score, self.model)

    def place(self, batch: Batch, score: Score | None = None, recomputed: Tensor | None = None) -> Batch:
        if self.model is None:
            return dataclasses.replace(batch, old_logp=recomputed)
        return super().place(batch, score)


class Rollout(Anchor):
    """The engine: ``rollout_logp``, at no cost; a token that it could not score has ratio 1.

    Staleness and the mismatch between trainer and engine are then one ratio, so no engine ratio is left to weigh.
    """

    policy = "the engine, as it reported"
    contains_rollout = True

    def old_logp(self, batch: Batch, score: Score | None = None) -> Tensor:
        return _reported(self, batch)

    def check(self, correction: Correction) -> None:
        for stage in correction.stages.values():
            if stage.mismatch == "engine":
                raise ValueError(
                    f"loss {correction.method!r}: the anchor {self!r} puts rollout_logp in the place of old_logp, so "
                    f"the mismatch that {stage!r} looks at is in the staleness ratio already, and would count twice or "
                    "not at all: take another anchor, or drop that stage"
                )


class LogLinear(Anchor):
    """A log-linear mixture of engine and trainer by version, without a forward pass (A-3PO, 2512.06547).

    old = rollout + alpha (sg logp - rollout),  alpha = clip((v_prox - v_b) / (v_theta - v_b), 0, 1);  v_b is the
    token's ``rollout_version``, v_theta ``trainer_version``, v_prox the version that lies ``proximal_lag`` before it.
    Where v_b >= v_theta the limit is taken: 0, and 1 for ``proximal_lag=0``.  alpha = 0 is ``Rollout``, alpha = 1
    ``logp`` detached.  A token that the engine could not score keeps ratio 1.

    Args:
        proximal_lag: optimizer steps; 1 is AReaL's.  With 0 every ratio is 1, which it warns of.

    >>> rollout = torch.full((1, 3), -2.0)
    >>> batch = Batch(logp=rollout + 1, rollout_logp=rollout, advantages=torch.ones(1), mask=rollout < 0,
    ...               rollout_version=torch.tensor([[0, 3, 4]]), trainer_version=4)
    >>> LogLinear().old_logp(batch)
    tensor([[-1.2500, -2.0000, -2.0000]])
    """

    policy = "a mixture of the engine's and the current log-probs"
    contains_rollout = True
    needs_forward = True

    def __init__(self, proximal_lag: int = 1) -> None:
        if not _is_number(proximal_lag) or proximal_lag < 0:
            raise ValueError(f"proximal_lag is {proximal_lag!r}, expected 0 or more optimizer steps")
        if proximal_lag == 0:
            warn_once(
                "proximal_lag is 0: old_logp of anchor 'log_linear' is then logp itself, so that every ratio is 1 and "
                "the loss corrects nothing, whatever the lag; 1 is AReaL's"
            )
        self.proximal_lag = proximal_lag

    def old_logp(self, batch: Batch, score: Score | None = None) -> Tensor:
        logp, rollout_logp = batch.logp.detach(), _reported(self, batch)
        return rollout_logp + self.alpha(batch).to(logp) * (logp - rollout_logp)

    def alpha(self, batch: Batch) -> Tensor:
        """Position of each token's anchor between the engine (0) and the trainer (1)."""
        versions = _required(self, batch, "rollout_version")
        behind = _required(self, batch, "trainer_version") - versions
        share = (behind - self.proximal_lag) / behind.clamp(min=1)
        return torch.where(behind > 0, share.clamp(0, 1), float(self.proximal_lag == 0))

    def __repr__(self) -> str:
        return f"LogLinear(proximal_lag={self.proximal_lag})"


class EWMA(Anchor):
    """An exponentially weighted mean of the weights so far (PPO-EWMA, 2110.00641).

    After k steps  theta = sum_j beta^(k-j) theta_j / sum_j beta^(k-j),  beta = W / (W + 2): the mean age is W / 2
    steps.  When the share of tokens with a gradient falls below ``reset_below``, the mean lies too far behind and is
    reset to the current weights (2605.12070).  It is held in float32 (float64 for float64 weights).  Under ZeRO-3 and
    FSDP2 every rank holds all of it, and all ranks must call every method with the same numbers.

    Args:
        model: the model being trained.
        window: W, optimizer steps, above 0 and not necessarily whole; in a stale pipeline its lag.
        reset_below: share of active tokens; None: never reset.
        device: where the mean is held; None: where the weights are.

    Raises:
        ValueError: a number out of range, or a device that torch does not have here.
    """

    policy = "a mean of the weights so far, by one more forward pass"
    needs_forward = True

    def __init__(
        self,
        model: nn.Module,
        window: float,
        reset_below: float | None = 0.9,
        device: torch.device | str | None = None,
    ) -> None:
        if not _is_number(window) or window <= 0:
            alone = ": the mean over 0 steps is the current weights, so every ratio would be 1" if window == 0 else ""
            raise ValueError(f"window is {window!r}, expected a number of optimizer steps above 0{alone}")
        if reset_below is not None and not (_is_number(reset_below) and 0 <= reset_below <= 1):
            raise ValueError(f"reset_below is {reset_below!r}, expected a share of tokens, or None")
        _check_device(device)
        self.window, self.reset_below, self.device = window, reset_below, device
        self.beta = window / (window + 2)
        self.resets = 0
        self._model = model
        self._replica: Any = None
        self._mass = 0.0
        self._mean: dict[str, Tensor] = {}
        self.reset()

    @property
    def wants_active(self) -> bool:
        return self.reset_below is not None

    @torch.no_grad()
    def step(self, version: int, active: float | None = None) -> None:
        if self.reset_below is not None:
            if active is None:
                raise ValueError(
                    f"active is None, but {self!r} resets by it: pass 1 - offcorr/loss/dropped of the merged metrics, "
                    "or reset_below=None"
                )
            if active < self.reset_below:
                self.resets += 1
                self.reset()
                return
        self._mass = self.beta * self._mass + 1
        for name, weight in changing_weights(self._model):
            mean = self._mean[name]
            mean.lerp_(weight.to(mean), 1 / self._mass)

    @torch.no_grad()
    def reset(self) -> None:
        """Set the mean to the current weights."""
        self._mass = 1.0
        self._mean = {
            name: weight.to(self.device, torch.promote_types(weight.dtype, torch.float32), copy=True)
            for name, weight in changing_weights(self._model)
        }

    def weights(self) -> dict[str, Tensor]:
        """The mean, by name."""
        return dict(self._mean)

    def module(self, device: torch.device) -> nn.Module:
        """A model with the mean as its weights, on a device; the next call changes them."""
        if self._replica is None:
            self._replica = Replica(self._model, device)
        dtypes = {name: p.dtype for name, p in [*self._model.named_parameters(), *self._model.named_buffers()]}
        return self._replica.load({name: mean.to(dtypes[name]) for name, mean in self._mean.items()})

    def old_logp(self, batch: Batch, score: Score | None = None) -> Tensor:
        return _scored(self, batch, score, self.module(batch.logp.device))

    def state_dict(self) -> dict[str, Any]:
        return {"mass": self._mass, "mean": dict(self._mean), "resets": self.resets}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._mass, self.resets = state["mass"], state["resets"]
        for name, mean in state["mean"].items():
            self._mean[name] = mean.to(self._mean[name], copy=True)

    def __repr__(self) -> str:
        return f"EWMA(window={self.window:g}, reset_below={self.reset_below})"


class Snapshots(Anchor):
    """The weights that sampled each token, by its ``rollout_version``: exact, one forward pass per version.

    At most ``limit + 1`` copies are held, on the CPU; one at a time is loaded to the model's device.

    Args:
        model: the model being trained; its weights now are ``version``.
        limit: the number of optimizer steps that a token's version may lie back.
        version: the first version.
    """

    policy = "the weights that sampled, by one more forward pass per version"
    supplies = "sampled"
    needs_forward = True

    def __init__(self, model: nn.Module, limit: int, version: int = 0) -> None:
        check_steps("limit", limit)
        self._model = model
        self._ring = SnapshotRing(limit)
        self._replica: Any = None
        self.step(version)

    @property
    def limit(self) -> int:
        return self._ring.lag

    @property
    def versions(self) -> list[int]:
        """The versions held, oldest first."""
        return self._ring.versions

    def step(self, version: int, active: float | None = None) -> None:
        self._ring.push(version, changing_weights(self._model))

    def keep(self, versions: Iterable[int]) -> None:
        """Keep only the newest version and ``versions``, those of samples still in flight."""
        wanted = {*versions, *self.versions[-1:]}
        self._ring.load_state_dict({v: weights for v, weights in self._ring.state_dict().items() if v in wanted})

    def old_logp(self, batch: Batch, score: Score | None = None) -> Tensor:
        versions, mask = _required(self, batch, "rollout_version"), batch.mask.bool()
        asked = torch.unique(versions[mask]).tolist()
        for version in asked:  # checked before the first forward pass
            self._require(version)
        if self._replica is None:
            self._replica = Replica(self._model, batch.logp.device)
        logp = torch.zeros_like(batch.logp.detach())
        for version in asked:
            scored = _scored(self, batch, score, self._replica.load(self._ring[version]))
            logp = torch.where(versions == version, scored.to(logp), logp)
        return logp

    def state_dict(self) -> dict[str, Any]:
        return {"held": self._ring.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._ring.load_state_dict(state["held"])

    def _require(self, version: int) -> None:
        if version in self._ring:
            return
        if version > self.versions[-1]:
            raise MissingVersion(
                f"a token's rollout_version is {version}, which was never recorded; the newest is "
                f"{self.versions[-1]}: call step(version) after every optimizer step, and count as the sampler does"
            )
        raise MissingVersion(
            f"a token's rollout_version is {version}, whose weights were dropped or never recorded; held: "
            f"{self.versions}. limit={self.limit} keeps the newest and the {self.limit} before it: raise it, or pass "
            "to keep() every version that samples in flight still have"
        )

    def __repr__(self) -> str:
        return f"Snapshots(limit={self.limit})"


ANCHORS: dict[str, type[Anchor]] = {
    "snapshot": Supplied,
    "rollout": Rollout,
    "recomputed": Recomputed,
    "ewma": EWMA,
    "log_linear": LogLinear,
}
"""Anchors by the names that configurations use."""


def check_anchor(name: Any) -> None:
    """Raise ``ValueError`` for a name that no anchor has."""
    if not isinstance(name, str) or name not in ANCHORS:
        raise ValueError(f"anchor is {name!r}{one_of(name, ANCHORS)}")


def make_anchor(name: str, model: nn.Module | None = None, **options: Any) -> Anchor:
    """The anchor of this name; ``model`` goes to one that holds weights.

    Raises:
        ValueError: an unknown name or option, one that is missing, or a value out of range.

    >>> make_anchor("log_linear", proximal_lag=2)
    LogLinear(proximal_lag=2)
    >>> make_anchor("log_linear", lag=2)
    Traceback (most recent call last):
    ValueError: anchor 'log_linear' has no option 'lag'. It has ['proximal_lag']
    >>> make_anchor("snapshot", window=16)
    Traceback (most recent call last):
    ValueError: anchor 'snapshot' has no option 'window'. It has none
    """
    check_anchor(name)
    build: Any = ANCHORS[name]
    parameters = inspect.signature(build).parameters
    known = {option: p for option, p in parameters.items() if option != "model"}
    for option in options:
        if option not in known:
            near = nearest(option, known, ".")
            raise ValueError(f"anchor {name!r} has no option {option!r}{near} It has {[*known] or 'none'}")
    for option, parameter in known.items():
        if parameter.default is parameter.empty and option not in options:
            raise ValueError(f"anchor {name!r} needs {option}; its options are {[*known]}")
    holds_weights = "model" in parameters and parameters["model"].default is inspect.Parameter.empty
    return build(model, **options) if holds_weights else build(**options)


def default_anchor(correction: Correction | None, *, old_logp: bool, rollout_logp: bool) -> Anchor:
    """The anchor of a batch that comes with, or without, ``old_logp`` and ``rollout_logp``.

    ``Supplied`` with ``old_logp``; else ``Rollout`` with ``rollout_logp``, if the correction has no stage that compares
    with the engine; else ``Recomputed``.
    """
    if old_logp:
        return Supplied()
    if correction is not None and rollout_logp and "engine" not in correction.compares:
        return Rollout()
    return Recomputed()


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check_device(device: Any) -> None:
    """Raise ``ValueError`` for a device on which torch cannot hold a tensor; None is the model's."""
    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError, TypeError) as error:  # by a torch without CUDA an AssertionError
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"device is {device!r}, expected one that torch has here, such as 'cpu', or None for that of the weights "
            f"({reason})"
        ) from error


@torch.no_grad()
def _scored(anchor: Anchor, batch: Batch, score: Score | None, module: nn.Module) -> Tensor:
    if score is None:
        raise ValueError(
            f"score is None, but {anchor!r} needs it: pass a function that runs the batch through the module it is "
            "given and returns its log-probs"
        )
    logp = score(module).detach()
    if logp.shape != batch.logp.shape:
        raise ValueError(f"score returned shape {tuple(logp.shape)}, expected {tuple(batch.logp.shape)}, that of logp")
    return logp


_REMEDIES = {
    "old_logp": "pass the sampled tokens' log-probs under the weights that sampled them, in the trainer's precision "
    "(in TRL a rollout_func returns them as 'old_logp', as offcorr.rollout.OffPolicy does, and a rollout worker in a "
    "CorrectedSample)",
    "rollout_logp": "pass what the engine reported (TRL's own generation reports nothing: use a rollout_func or vLLM)",
    "rollout_version": "pass the version (optimizer step) of the weights that sampled each token (in TRL a "
    "rollout_func returns 'rollout_version', one number per completion or a list with one per token, and a rollout "
    "worker's sample has its model_version)",
    "trainer_version": "pass the version of the weights being trained",
}


def _required(anchor: Anchor, batch: Batch, name: str) -> Any:
    value = getattr(batch, name)
    if value is None:
        remedy = f"{_REMEDIES[name]}, or take another anchor"
        raise ValueError(f"{name} is None, but {anchor} needs it: {remedy}")
    return value


def _reported(anchor: Anchor, batch: Batch) -> Tensor:
    """``rollout_logp``, and ``logp`` where the engine could not score."""
    reported = _required(anchor, batch, "rollout_logp").detach()
    return torch.where(reported.isfinite(), reported, batch.logp.detach().to(reported))
