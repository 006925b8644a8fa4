"""``Corrected``: what this library's two trainers share beside the loss itself."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from typing import Any

import transformers
from torch import Tensor

import offcorr
from offcorr.training.schedules import Annealed
from offcorr.trl.anchor import TrainingAnchor
from offcorr.trl.names import readable
from offcorr.trl.state import StepRate, saved_state


class Corrected(transformers.Trainer, ABC):
    """Its correction is annealed, anchor and learning rate follow the optimizer's steps, and all of it is logged.

    To stand before one of TRL's trainers; ``_follow`` comes before its ``__init__`` and a ``Keeper`` after it.
    """

    def _follow(self, args: Any, annealed: Annealed | None) -> None:
        """Take the correction over training, and what ``args`` says of ``CorrectionOptions``.

        ValueError: settings that contradict each other.
        """
        self._annealed = annealed
        self.correction = None if annealed is None else annealed.at(0.0)
        self.anchor = TrainingAnchor(
            getattr(args, "anchor", None),
            getattr(args, "anchor_kwargs", None),
            self.correction,
            lambda: self.accelerator.unwrap_model(self.model),
        )
        rule = getattr(args, "ess_lr", None)
        self._step_rate = None if rule is None else StepRate(rule, args.ess_base)
        self._restored: dict[str, Any] | None = None
        self._said: set[str] = set()
        self._mismatch: dict[str, offcorr.Metrics | None] = {"train": None, "eval": None}

    @property
    def _mode(self) -> str:
        return "train" if self.model.training else "eval"

    def _gather(self, vector: Tensor) -> Tensor:
        """[K] of this rank to [ranks, K]."""
        return self.accelerator.gather(vector[None])

    # What depends on the optimizer's steps

    def _anneal(self) -> None:
        """The correction in force at this optimizer step, which depends on how much of the training is done alone."""
        if self._annealed.schedules:
            done = self.state.global_step / self.state.max_steps if self.state.max_steps else 0.0
            self.correction = self._annealed.at(done)
            for name, value in self._annealed.values(done).items():
                self._metrics[self._mode][f"offcorr/schedule/{name}"] = [value]

    def _scale_learning_rate(self, batch: offcorr.Batch, inputs: dict[str, Any]) -> None:
        """ess_lr: collect the window; at its last micro-batch, whose backward may step, scale the step that follows."""
        if self._step_rate is None or self._mode != "train":
            return
        padded = batch.padded()
        self._step_rate.add(padded, *self._versions(padded, inputs))
        if self.accelerator.sync_gradients:
            for name, value in self._step_rate.step(self._gather).items():
                self._metrics["train"][name].append(value)

    @abstractmethod
    def _versions(self, batch: offcorr.Batch, inputs: dict[str, Any]) -> tuple[Tensor, int]:
        """Of the weights that sampled, as far as is known, and of those that are trained."""

    # What lies in checkpoints

    @property
    def _followers(self) -> dict[str, Any]:
        return {"anchor": self.anchor} | ({} if self._step_rate is None else {"ess_lr": self._step_rate})

    def _begin_run(self) -> None:
        """Model and optimizer are ready, and loaded where a run resumes."""
        self.anchor.begin()
        if self._step_rate is not None:
            self._step_rate.begin(self.optimizer)
        restored, self._restored = self._restored, None
        for name, follower in self._followers.items():
            if restored is None or not follower.state_dict():
                continue
            if follower.state_dict().keys() <= restored.get(name, {}).keys():
                follower.load_state_dict(restored[name])
            else:
                self._say(f"the checkpoint holds nothing of {follower!r}: it begins anew with the weights loaded")

    def _after_step(self) -> None:
        for name, value in self.anchor.step(self.state.global_step, self._gather).items():
            self._metrics["train"][name] = [value]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Called on every start with the checkpoint to resume from; what follows the steps has its own part in it."""
        super()._load_optimizer_and_scheduler(checkpoint)
        self._restored = None if checkpoint is None else saved_state(checkpoint)

    # Metrics: accumulated on the device, one packed vector a rank when they are logged

    def _add_metrics(self, metrics: offcorr.Metrics, batch: offcorr.Batch) -> None:
        metrics = self.anchor.metrics(metrics, batch.padded())
        so_far = self._mismatch[self._mode]
        self._mismatch[self._mode] = metrics if so_far is None else so_far.merge(metrics)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        metrics, self._mismatch[self._mode] = self._mismatch[self._mode], None
        if metrics is not None:
            everywhere = metrics.all_reduce(self._gather)
            for name, value in readable(everywhere.compute()).items():
                if name not in self._metrics[self._mode]:  # what TRL measured itself stands
                    self._metrics[self._mode][name] = [value]
        super().log(logs, start_time)

    def _say(self, message: str) -> None:
        """Warn, once."""
        if message not in self._said and self.accelerator.is_main_process:
            warnings.warn(message, stacklevel=2)
        self._said.add(message)
