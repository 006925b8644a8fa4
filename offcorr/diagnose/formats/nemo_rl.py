"""NeMo-RL's training data: ``train_data_stepN.jsonl`` in its log folder."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from offcorr.diagnose.formats.base import Layout, needed
from offcorr.diagnose.record import RecordError

NAMES = frozenset({"token_ids", "token_loss_mask", "generation_logprobs", "prev_logprobs"})


def fields(row: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """The record of a row, whose lists have one entry per token of prompt and completion, padded on the right to the
    batch's longest; that of token t is about token t, given those before it.  Every value is in a list of its own
    (``"rewards": [1.0]``), as a row is a batch of one.

    =================== =========================================================================================
    ``prompt_ids``      ``token_ids`` before the first token with ``token_loss_mask``
    ``completion_ids``  the others, up to ``input_lengths``
    ``rollout_logp``    ``generation_logprobs``
    ``old_logp``        ``prev_logprobs``: before the first update on these samples
    ``mask``            ``token_loss_mask``; ``sample_loss_mask`` is not looked at, since a sequence whose loss is
                        masked was sampled all the same
    ``reward``          ``filtered_rewards`` where it is there (dynamic sampling), else ``rewards``
    ``advantage``       ``advantages``
    ``step``            N of the file's name
    =================== =========================================================================================

    Neither entropy nor groups nor versions are logged.  With ``force_on_policy_ratio`` NeMo-RL skips the pass of
    ``prev_logprobs`` and logs zeros: such a row has no log-prob of the trainer, and is left out.
    """
    values = {name: _unwrapped(value) for name, value in row.items()}
    ids, mask, rollout, old = needed(values, "token_ids", "token_loss_mask", "generation_logprobs", "prev_logprobs")
    end = int(values.get("input_lengths") or len(ids))
    trained = np.array(mask[:end], dtype=np.float64) != 0
    start = int(trained.argmax()) if trained.any() else end
    if not any(old) and any(rollout):
        raise RecordError(
            "value",
            "prev_logprobs",
            "prev_logprobs is 0 throughout, NeMo-RL's placeholder under force_on_policy_ratio=True, expected the "
            "trainer's log-probs: log them with force_on_policy_ratio=False",
        )
    advantages = _unwrapped(values.get("advantages"))  # one per token, or one
    reward = values.get("filtered_rewards", values.get("rewards"))
    step = re.search(r"step_?(\d+)", path.name)
    return {
        "prompt_ids": ids[:start],
        "completion_ids": ids[start:end],
        "rollout_logp": rollout[start:end],
        "old_logp": old[start:end],
        "mask": trained[start:],
        "advantage": advantages[start:end] if hasattr(advantages, "__len__") else advantages,
        "reward": reward,
        "step": int(step[1]) if step else None,
    }


def _unwrapped(value: Any) -> Any:
    """The only entry of a list of one; of a list of one number, that number."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


NEMO_RL = Layout(
    name="NeMo-RL's train_data",
    recognises=lambda names: NAMES <= names,
    columns=NAMES | {"input_lengths", "advantages", "rewards", "filtered_rewards"},
    fields=fields,
)
"""``token_ids token_loss_mask generation_logprobs prev_logprobs input_lengths advantages rewards``."""
