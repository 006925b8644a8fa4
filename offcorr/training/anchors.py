"""Anchors: who plays ``old_logp``, the policy that a staleness ratio is held against.

Any loss takes any anchor.  A loop that does not care which:

    anchor.check(loss_fn)
    for batch in batches:
        batch = anchor.place(batch, score=lambda module: log_probs(module, batch))
        loss_fn(batch).loss.backward()
        optimizer.step()
        version += 1
        anchor.step(version, active=share_of_tokens_that_learn)

``score`` runs the batch through the module it is given and returns [B, T] log-probs (nats), the layout of
``batch.logp``; anchors that hold no weights never call it.  The simplest anchor is no object at all: with
``old_logp=None`` every staleness ratio is 1, and a gate that clips it does nothing.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from offcorr.batch import Batch
from offcorr.correction import Correction

Score = Callable[[nn.Module], Tensor]
"""Runs the batch at hand through a module: [B, T] log-probs (nats), the layout of ``batch.logp``."""


class Anchor(ABC):
    """Gives ``old_logp``."""

    resets: int = 0
    """How often it has begun anew by itself."""

    @property
    def wants_active(self) -> bool:
        """Whether ``step`` looks at ``active``."""
        return False

    @abstractmethod
    def old_logp(self, batch: Batch, score: Score | None = None) -> Tensor:
        """The anchor's log-probs of the batch's tokens, in the layout of ``batch.logp``, detached."""

    def place(self, batch: Batch, score: Score | None = None) -> Batch:
        """The batch with this anchor's ``old_logp``."""
        return dataclasses.replace(batch, old_logp=self.old_logp(batch, score))

    def step(self, version: int, active: float | None = None) -> None:  # noqa: B027  (most have nothing to do)
        """After every optimizer step.

        Args:
            version: of the weights now, one higher each time.
            active: share of the global batch's tokens that the last step learned from, for an anchor that
                ``wants_active``: 1 - ``offcorr/loss/coefficient_zero`` of the merged metrics.  Tokens that had
                nothing to teach, for want of an advantage, are best left out of it.
        """

    def check(self, correction: Correction) -> None:  # noqa: B027  (most have nothing to do)
        """Raise ``ValueError`` where the correction would count a ratio twice with this anchor."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs of this anchor; the same on every rank."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027  (most have nothing to do)
        """Continue from ``state_dict``'s answer."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class Recomputed(Anchor):
    """The model's own weights, when asked: exact, and one more forward pass.

    Ask before the first update on a batch and keep the answer for all of them; asked in between, ratios are 1.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def old_logp(self, batch: Batch, score: Score | None = None) -> Tensor:
        return _scored(self, batch, score, self.model)


class Rollout(Anchor):
    """What the engine reported, at no cost; a token it could not score keeps ratio 1.

    Staleness and engine mismatch then lie in one ratio, so there is no engine ratio left to weigh.
    """

    def old_logp(self, batch: Batch, score: Score | None = None) -> Tensor:
        return _reported(self, batch)

    def check(self, correction: Correction) -> None:
        for stage in correction.stages.values():
            if getattr(stage, "mismatch", None) == "engine":
                raise ValueError(
                    f"{self!r} puts rollout_logp in the place of old_logp, so the mismatch that {stage!r} looks at "
                    "is in the staleness ratio already, and would count twice or not at all: take another anchor, or "
                    "drop that stage"
                )


class LogLinear(Anchor):
    """A-3PO (2512.06547): between the engine's log-probs and the trainer's, by version, without a forward pass.

    old = rollout + alpha (sg logp - rollout),  alpha = clip((v_prox - v_b) / (v_theta - v_b), 0, 1);  v_b is the
    token's ``rollout_version``, v_theta ``trainer_version``, v_prox the version that lies ``proximal_lag`` before it.
    Where v_b >= v_theta the limit is taken: 0, and 1 for ``proximal_lag=0``.  alpha = 0 is ``Rollout``, alpha = 1
    ``logp`` detached.  A token that the engine could not score keeps ratio 1.

    Args:
        proximal_lag: optimizer steps; 1 is AReaL's.

    >>> rollout = torch.full((1, 3), -2.0)
    >>> batch = Batch(logp=rollout + 1, rollout_logp=rollout, advantages=torch.ones(1), mask=rollout < 0,
    ...               rollout_version=torch.tensor([[0, 3, 4]]), trainer_version=4)
    >>> LogLinear().old_logp(batch)
    tensor([[-1.2500, -2.0000, -2.0000]])
    """

    def __init__(self, proximal_lag: int = 1) -> None:
        if not _is_number(proximal_lag) or proximal_lag < 0:
            raise ValueError(f"proximal_lag is {proximal_lag!r}, expected 0 or more optimizer steps")
        self.proximal_lag = proximal_lag

    def old_logp(self, batch: Batch, score: Score | None = None) -> Tensor:
        logp, rollout_logp = batch.logp.detach(), _reported(self, batch)
        return rollout_logp + self.alpha(batch).to(logp) * (logp - rollout_logp)

    def alpha(self, batch: Batch) -> Tensor:
        """How far each token's anchor lies from the engine (0) towards the trainer (1)."""
        versions = _versions(self, batch)
        if batch.trainer_version is None:
            raise ValueError(f"trainer_version is None, but {self!r} needs it: pass the version of the weights trained")
        behind = batch.trainer_version - versions
        share = (behind - self.proximal_lag) / behind.clamp(min=1)
        return torch.where(behind > 0, share.clamp(0, 1), float(self.proximal_lag == 0))

    def __repr__(self) -> str:
        return f"LogLinear(proximal_lag={self.proximal_lag})"


class EWMA(Anchor):
    """An exponentially weighted mean of the weights so far (PPO-EWMA, 2110.00641).

    After k steps  theta = sum_j beta^(k-j) theta_j / sum_j beta^(k-j),  beta = W / (W + 2): its mean age is W / 2
    steps.  Where fewer than ``reset_below`` of the tokens stay active, it has been left too far behind and starts anew
    from the current weights (2605.12070).  Held in float32 (float64 for float64 weights).  Under ZeRO-3 and FSDP2
    every rank holds all of it, and all ranks must call every method with the same numbers.

    Args:
        model: the one that is trained.
        window: W, optimizer steps; in a stale pipeline its lag.
        reset_below: share of active tokens; None: never reset.
        device: where the mean is held; None: where the weights are.
    """

    def __init__(
        self,
        model: nn.Module,
        window: float,
        reset_below: float | None = 0.9,
        device: torch.device | str | None = None,
    ) -> None:
        if not _is_number(window) or window < 0:
            raise ValueError(f"window is {window!r}, expected 0 or more optimizer steps")
        if reset_below is not None and not (_is_number(reset_below) and 0 <= reset_below <= 1):
            raise ValueError(f"reset_below is {reset_below!r}, expected a share of tokens, or None")
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
                    f"active is None, but {self!r} resets by it: pass 1 - offcorr/loss/coefficient_zero of the merged "
                    "metrics, or reset_below=None"
                )
            if active < self.reset_below:
                self.resets += 1
                self.reset()
                return
        self._mass = self.beta * self._mass + 1
        for name, weight in _changing(self._model):
            mean = self._mean[name]
            mean.lerp_(weight.to(mean), 1 / self._mass)

    @torch.no_grad()
    def reset(self) -> None:
        """Forget the past: the mean is the current weights."""
        self._mass = 1.0
        self._mean = {
            name: weight.to(self.device, torch.promote_types(weight.dtype, torch.float32), copy=True)
            for name, weight in _changing(self._model)
        }

    def weights(self) -> dict[str, Tensor]:
        """The mean, by name."""
        return dict(self._mean)

    def old_logp(self, batch: Batch, score: Score | None = None) -> Tensor:
        if self._replica is None:
            self._replica = _replica(self._model, batch.logp.device)
        dtypes = {name: p.dtype for name, p in [*self._model.named_parameters(), *self._model.named_buffers()]}
        module = self._replica.load({name: mean.to(dtypes[name]) for name, mean in self._mean.items()})
        return _scored(self, batch, score, module)

    def state_dict(self) -> dict[str, Any]:
        return {"mass": self._mass, "mean": dict(self._mean), "resets": self.resets}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._mass, self.resets = state["mass"], state["resets"]
        for name, mean in state["mean"].items():
            self._mean[name] = mean.to(self._mean[name], copy=True)

    def __repr__(self) -> str:
        return f"EWMA(window={self.window:g}, reset_below={self.reset_below})"


class Snapshots(Anchor):
    """The very weights that sampled each token, by its ``rollout_version``: exact, one forward pass a version.

    Copies lie on the CPU, ``limit + 1`` of them at most; one is on the model's device while it is asked.

    Args:
        model: the one that is trained; its weights now are ``version``.
        limit: how many optimizer steps back a token's version may lie.
        version: the first.
    """

    def __init__(self, model: nn.Module, limit: int, version: int = 0) -> None:
        from offcorr.training.snapshots import SnapshotRing

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
        self._ring.push(version, _changing(self._model))

    def keep(self, versions: Iterable[int]) -> None:
        """Drop every version but the newest that is not among ``versions``, those of samples still in flight."""
        wanted = {*versions, *self.versions[-1:]}
        self._ring.load_state_dict({v: weights for v, weights in self._ring.state_dict().items() if v in wanted})

    def old_logp(self, batch: Batch, score: Score | None = None) -> Tensor:
        versions, mask = _versions(self, batch), batch.mask.bool()
        asked = torch.unique(versions[mask]).tolist()
        for version in asked:  # all of them before the first forward pass
            self._require(version)
        if self._replica is None:
            self._replica = _replica(self._model, batch.logp.device)
        answer = torch.zeros_like(batch.logp.detach())
        for version in asked:
            scored = _scored(self, batch, score, self._replica.load(self._ring[version]))
            answer = torch.where(versions == version, scored.to(answer), answer)
        return answer

    def state_dict(self) -> dict[str, Any]:
        return {"held": self._ring.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._ring.load_state_dict(state["held"])

    def _require(self, version: int) -> None:
        from offcorr.training.snapshots import MissingVersion

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


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


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


def _reported(anchor: Anchor, batch: Batch) -> Tensor:
    """``rollout_logp``, and ``logp`` where the engine could not score."""
    if batch.rollout_logp is None:
        raise ValueError(f"rollout_logp is None, but {anchor!r} needs it: pass what the engine reported")
    reported = batch.rollout_logp.detach()
    return torch.where(reported.isfinite(), reported, batch.logp.detach().to(reported))


def _versions(anchor: Anchor, batch: Batch) -> Tensor:
    if batch.rollout_version is None:
        raise ValueError(
            f"rollout_version is None, but {anchor!r} needs it: pass the version of the weights that sampled each "
            f"token, {tuple(batch.logp.shape)} integers"
        )
    return batch.rollout_version


# offcorr.rollout imports transformers, which the core does without until weights are asked for.


def _changing(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    from offcorr.training.snapshots import changing_weights

    return changing_weights(model)


def _replica(model: nn.Module, device: torch.device) -> Any:
    from offcorr.training.replica import Replica

    return Replica(model, device)
