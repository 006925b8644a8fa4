"""The trainer of the tests of ``Replay``, which keeps what it generated and trained on."""

from __future__ import annotations

import torch

from offcorr.trl import GRPOTrainer

SETTINGS = dict(loss_type="minpro", learning_rate=5e-3, max_steps=6)
"""Two prompts of four completions per generation and optimizer step."""

SIZE = 4


def scored(completions, marks, calls=None, **columns):
    """A reward function that reads a column of the dataset, and notes the completions that it is called for."""
    if calls is not None:
        calls.append(list(zip(marks, completions, strict=True)))
    return [float(len(text) % 3) + mark / 100 for text, mark in zip(completions, marks, strict=True)]


class Seen(GRPOTrainer):
    """Keeps what every generation gave to the loss, and every batch that was trained on."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.generations, self.batches = [], []

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        if self.model.training:
            self.generations.append({name: value for name, value in output.items() if isinstance(value, torch.Tensor)})
        return output

    def _batch(self, inputs, forward):
        batch = super()._batch(inputs, forward)
        self.batches.append((inputs, batch))
        return batch


def parameters(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def groups_of(generation):
    """The groups of a generation: (origin, tokens, recorded log-probs and rewards)."""
    names = ("prompt_ids", "completion_ids", "old_logp", "sampling_per_token_logps")
    mask = {"prompt_ids": "prompt_mask"}
    found = []
    for start in range(0, len(generation["origin"]), SIZE):
        origins = generation["origin"][start : start + SIZE]
        assert len({*origins.tolist()}) == 1, "a torn group"
        content = tuple(
            tuple(generation[name][row][generation[mask.get(name, "completion_mask")][row].bool()].tolist())
            for row in range(start, start + SIZE)
            for name in names
        )
        rewards = tuple(generation["rewards"][start : start + SIZE].tolist())
        found.append((int(origins[0]), (*content, rewards)))
    return found
