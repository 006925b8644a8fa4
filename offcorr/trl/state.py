"""What follows the optimizer's steps and lies in checkpoints: a calibrated learning rate, an anchor with weights."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from offcorr.batch import Batch
from offcorr.training.ess_lr import ESSLearningRate, Gather

STATE_FILE = "offcorr_trainer.pt"
"""What a checkpoint folder holds of the trainer."""

AUTO = "auto"


class StepRate:
    """``ess_lr`` of a trainer: each optimizer step is scaled, or, with base "auto", calibrated on.

    With "auto" a step whose whole global batch is on-policy is taken for healthy: its ESS enters the base, and it is
    not scaled.  Before there was one the base is 1.
    """

    def __init__(self, rule: str, base: float | str) -> None:
        self._rule, self._auto = rule, base == AUTO
        self._base = 1.0 if base == AUTO else float(base)
        self._ess_lr: ESSLearningRate
        self._on_policy: Tensor | None = None

    def begin(self, optimizer: Any) -> None:
        """A run begins, with this optimizer."""
        before: ESSLearningRate | None = getattr(self, "_ess_lr", None)
        if before is None or not before.drives(optimizer):
            self._ess_lr = ESSLearningRate(optimizer, self._base, self._rule)
        else:  # its hooks are there already
            before.end()
            before.load_state_dict({"base": self._base, "calibrations": 0})
        self._on_policy = None

    def add(self, batch: Batch, version: Tensor, now: int) -> None:
        """One micro-batch of the coming step.

        Args:
            version: [B, T] or [B]: of the weights that sampled, as far as is known.
            now: the version of the weights that are trained.
        """
        self._ess_lr.add(batch)
        if self._auto:
            fresh = (version.reshape(len(batch.mask), -1) == now) | ~batch.mask.bool()
            self._on_policy = fresh.all() if self._on_policy is None else self._on_policy & fresh.all()

    def step(self, gather: Gather) -> dict[str, float]:
        """At a step's last micro-batch, before its backward; what there is to log."""
        if not self._auto:
            return {"lr_scale": self._ess_lr.begin(gather)}
        assert self._on_policy is not None  # a micro-batch was added
        on_policy, self._on_policy = self._on_policy, None
        if gather(on_policy[None].float()).all():
            self._ess_lr.calibrate(gather)
        else:
            self._ess_lr.begin(gather)
        return {"lr_scale": self._ess_lr.lr_scale, "ess_base": self._ess_lr.base}

    def state_dict(self) -> dict[str, Any]:
        """Empty where nothing is calibrated."""
        return self._ess_lr.state_dict() if self._auto else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state_dict``'s answer."""
        if self._auto:
            self._ess_lr.load_state_dict(state)

    def __repr__(self) -> str:
        return f"ess_base={AUTO if self._auto else self._base!r}"


class Keeper(TrainerCallback):
    """Tells a trainer when a run begins, when the optimizer has stepped, and keeps its state in the checkpoints."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = weakref.proxy(trainer)

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self._trainer._begin_run()

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self._trainer._after_step()

    def on_save(self, args, state, control, **kwargs) -> None:
        found = {name: part for name, follower in self._trainer._followers.items() if (part := follower.state_dict())}
        if found and args.should_save:
            folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(found, folder / STATE_FILE)


def saved_state(checkpoint: str) -> dict[str, Any]:
    """What ``Keeper`` wrote into a checkpoint folder; empty for a checkpoint without it."""
    path = Path(checkpoint, STATE_FILE)
    return torch.load(path, "cpu", weights_only=True) if path.exists() else {}
