"""Checks of how long a training is, and that the samples of a generation are whole groups of one prompt."""

from __future__ import annotations

__all__ = ["check_generation", "check_max_steps"]


def check_generation(per_device: int, processes: int, steps: int, generations: int) -> None:
    """Raises ``ValueError`` where the samples of one generation cannot be split into groups of one prompt each.

    Args:
        per_device: samples in a micro-batch of a process, TRL's ``per_device_train_batch_size``.
        processes: those that train.
        steps: micro-batches of a generation, TRL's ``steps_per_generation``.
        generations: samples of a prompt, TRL's ``num_generations``.

    >>> check_generation(3, 2, 1, 8)
    Traceback (most recent call last):
    ValueError: generation_batch_size (6) must be divisible by num_generations (8); the 6 are 3 x 2 x 1: ...
    """
    samples = per_device * processes * steps
    if generations > 0 and samples % generations:
        raise ValueError(
            f"generation_batch_size ({samples}) must be divisible by num_generations ({generations}); the {samples} "
            f"are {per_device} x {processes} x {steps}: --per_device_train_batch_size x --num_processes x "
            "--steps_per_generation"
        )


def check_max_steps(max_steps: int) -> None:
    """Raises ``ValueError`` for a number of optimizer updates that trains nothing."""
    if max_steps < 1 and max_steps != -1:
        raise ValueError(f"max_steps is {max_steps}, expected 1 or more updates, or -1 for num_train_epochs")
