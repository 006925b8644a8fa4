"""Where a resumed run is not the one that it continues, said when it begins, since nothing else shows it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ASKED_FILE = "offcorr_run.json"
"""The file of a checkpoint folder with the loss, anchor, learning rate and sampler that the run was asked for."""


def asked_for(trainer: Any) -> dict[str, str]:
    """A trainer's loss, anchor, learning rate and sampler in words, by option; to be called before it trains.

    ``loss`` is the correction at the start of its schedules; a sampler that has no repr of its own is named by its
    class or function.
    """
    args, sampler = trainer.args, getattr(trainer, "_sampler", None)
    anchor, options = getattr(args, "anchor", None), getattr(args, "anchor_kwargs", None)
    loss = trainer.correction
    return {
        "loss": repr(getattr(args, "loss_type", None) if loss is None else loss),
        "anchor": repr(anchor) + (f" with {dict(options)}" if options else ""),
        "ess_lr": repr(getattr(args, "ess_lr", None)),
        "rollout_func": "None" if sampler is None else _named(sampler),
    }


def _named(sampler: Any) -> str:
    text = repr(sampler)
    return str(getattr(sampler, "__qualname__", type(sampler).__qualname__)) if text.startswith("<") else text


def save_asked(asked: dict[str, str], folder: Path) -> None:
    """Write it into a checkpoint folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ASKED_FILE).write_text(json.dumps(asked, indent=2) + "\n")


def differences(asked: dict[str, str], checkpoint: Path) -> str:
    """A sentence on what a run is asked for otherwise than the one that saved ``checkpoint``; "": nothing is known."""
    file = checkpoint / ASKED_FILE
    saved = json.loads(file.read_text()) if file.exists() else {}
    changed = [name for name, now in asked.items() if saved.get(name, now) != now]
    if not changed:
        return ""
    each = "; ".join(f"{name} was {saved[name]}, and is {asked[name]}" for name in changed)
    return f"the run that goes on from {checkpoint} is not the one that saved it: {each}"


def cut_generation(trainer: Any) -> str:
    """A sentence where a run resumes in the middle of a generation; "": it does not.

    TRL keeps no samples in a checkpoint: it samples anew, and the rest of the generation is never trained on.
    """
    used = getattr(trainer.args, "steps_per_generation", None)
    if used is None:  # the asynchronous trainer has no generations
        return ""
    uses, each = used * trainer.num_iterations, trainer.args.gradient_accumulation_steps
    left = -trainer.state.global_step * each % uses
    if not left:
        return ""
    whole = next(steps for steps in range(1, uses + 1) if steps * each % uses == 0)
    return (
        f"the checkpoint of step {trainer.state.global_step} lies in the middle of a generation, whose other samples "
        "it does not hold: new ones are sampled, so the run is not the one that would have gone on. Set save_steps to "
        f"a multiple of {whole} for checkpoints between two generations"
    )
