"""A model and a task that need no model hub: train off-policy on any machine, in about a minute.

The task is reasoning-gym's `chain_sum`, written compactly and worked out step by step:

    prompt      a+3b+9c-4=
    completion  a+330b+921.c-480          after a+3: 03, after b+9: 12, after c-4: 08

A step is the term again, then the running sum with its *low* digit first, so that the carry is
known before it is written. A `.` may follow a step: it means nothing, and makes length and entropy
vary in a way that the reward ignores. The answer is the last two digits, low digit first.

The model is a Qwen3 of 0.1M parameters, warm-started on demonstrations with mistakes in them: it
knows the task (greedy decoding is right nearly always) but samples wrong answers half of the time,
which is what reinforcement learning then mends.
"""

from .task import MAX_COMPLETION, MAX_PROMPT, accuracy, dataset, reward
from .warm_start import Recipe, model_path

__all__ = [
    "MAX_COMPLETION",
    "MAX_PROMPT",
    "Recipe",
    "accuracy",
    "dataset",
    "model_path",
    "reward",
]
