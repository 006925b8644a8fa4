"""A toy model and a toy task: off-policy training on a CPU in minutes, without downloads.

The task is reasoning-gym's `chain_sum` in a compact notation, solved step by step:

    prompt      a+3b+9c-4=
    completion  a+330b+921.c-480          after a+3: 03, after b+9: 12, after c-4: 08

A step repeats the term and gives the running sum with its *low* digit first, so that the carry is
known before the high digit is written. A `.` may follow a step. It has no meaning; it varies length
and entropy in a way that the reward ignores. The answer is the last two digits, low digit first.

The model is a Qwen3 of 0.1M parameters, warm-started by supervised learning on demonstrations with
mistakes. Greedy decoding is right nearly always, but some three fifths of the sampled answers are wrong,
which leaves room for reinforcement learning.
"""

from offcorr.optional import require

require("offcorr.toy", ["transformers", "tokenizers", "datasets", "filelock", "reasoning-gym"], extra="recipes")

from .task import MAX_COMPLETION, MAX_PROMPT, accuracy, dataset, demonstration, reward  # noqa: E402
from .warm_start import Recipe, model_path  # noqa: E402

__all__ = [
    "MAX_COMPLETION",
    "MAX_PROMPT",
    "Recipe",
    "accuracy",
    "dataset",
    "demonstration",
    "model_path",
    "reward",
]
