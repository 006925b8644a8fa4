"""``convex_kl``: TRL's KL penalty to its reference model, shared with one to recent weights (ReMix, 2507.06892)."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from offcorr.extras.convex_kl import convex_reference
from offcorr.training.anchors import EWMA
from offcorr.training.schedules import Linear, share_done

STATE_FILE = "offcorr_convex_kl.pt"

EXAMPLE = '{"base_share": 0.5, "window": 16}'


class ConvexKL(TrainerCallback):
    """Replaces the reference of the KL penalty by a mixture of the reference model and a mean of recent weights.

    ``offcorr.extras.convex_reference`` says what is penalised then.  The recent weights are those of ``EWMA``: held
    beside the model, and scored by one more forward pass per micro-batch of training.  An evaluation keeps TRL's own
    reference.

    Args:
        base_share: the reference model's share, a number in [0, 1] or a ``Linear`` over the training.
        window: of the mean of recent weights, in optimizer steps, above 0.

    Raises:
        ValueError: an unknown option, or a number out of range.
    """

    def __init__(self, *, base_share: float | Linear = 0.5, window: float = 1) -> None:
        for end in (base_share.start, base_share.end) if isinstance(base_share, Linear) else (base_share,):
            if isinstance(end, bool) or not isinstance(end, int | float) or not 0 <= end <= 1:
                raise ValueError(f"convex_kl: base_share is {base_share!r}, expected 0 <= base_share <= 1")
        if isinstance(window, bool) or not isinstance(window, int | float) or not window > 0:
            raise ValueError(f"convex_kl: window is {window!r}, expected a number of optimizer steps above 0")
        self.base_share, self.window = base_share, window
        self.precedent: EWMA | None = None
        self._trainer: Any = None

    @classmethod
    def of(cls, options: Any, beta: float) -> ConvexKL | None:
        """The mapping ``convex_kl`` of a configuration as an object; None: TRL's penalty as it is."""
        if options is None:
            return None
        if unknown := options.keys() - {"base_share", "window"}:
            raise ValueError(f"convex_kl has the key {min(unknown)!r}, expected base_share and window, as in {EXAMPLE}")
        if beta == 0:
            raise ValueError("convex_kl shares the KL penalty between two policies, and beta is 0: set beta above 0")
        share = options.get("base_share", 0.5)
        if isinstance(share, Mapping):
            if share.keys() != {"start", "end"}:
                raise ValueError(f"convex_kl: base_share is {dict(share)!r}, expected a number, or 'start' and 'end'")
            share = Linear(**share)
        return cls(base_share=share, window=options.get("window", 1))

    def attach(self, trainer: Any) -> None:
        """Follow a trainer's steps and checkpoints."""
        self._trainer = weakref.proxy(trainer)
        trainer.add_callback(self)

    def shared(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The inputs of a micro-batch of training with the log-probs of the mixture as those of the reference."""
        trainer = self._trainer
        assert self.precedent is not None
        module: nn.Module = self.precedent.module(trainer.accelerator.device)
        with torch.no_grad():
            recent = trainer._score(inputs, module)
        done = share_done(trainer.state.global_step, trainer.state.max_steps)
        share = self.base_share.at(done) if isinstance(self.base_share, Linear) else self.base_share
        return inputs | {"ref_per_token_logps": convex_reference(inputs["ref_per_token_logps"], recent, share)}

    # The trainer's callbacks

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        trainer = self._trainer
        self.precedent = EWMA(trainer.accelerator.unwrap_model(trainer.model), self.window, reset_below=None)
        checkpoint = trainer._callback.checkpoint
        if checkpoint is not None and (saved := Path(checkpoint, STATE_FILE)).exists():
            self.precedent.load_state_dict(torch.load(saved, "cpu", weights_only=True))

    def on_step_end(self, args, state, control, **kwargs) -> None:
        assert self.precedent is not None
        self.precedent.step(state.global_step)

    def on_save(self, args, state, control, **kwargs) -> None:
        if args.should_save and self.precedent is not None:
            folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(self.precedent.state_dict(), folder / STATE_FILE)
