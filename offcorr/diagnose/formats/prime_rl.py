"""prime-rl's token export: ``token_exports/step_N/rank_R.jsonl``, which ``enable_token_export`` writes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from offcorr.diagnose.formats.base import Layout, needed

NAMES = frozenset({"token_ids", "loss_mask", "inference_logprobs", "trainer_logprobs"})


def fields(row: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """The record of a row, whose lists have one entry per token of prompt and completion; that of token t is about
    token t, given those before it.

    =================== =========================================================================================
    ``prompt_ids``      ``token_ids`` before the first token with ``loss_mask``
    ``completion_ids``  the others
    ``rollout_logp``    ``inference_logprobs``
    ``logp``            ``trainer_logprobs``: of the pass that is trained on
    ``entropy``         ``entropy``
    ``mask``            ``loss_mask``, where ``rl_weights`` or ``ref_kl_weights`` is not 0 too: other tokens were not
                        sampled by the policy (``rl_weights`` null: 1 everywhere)
    ``advantage``       ``advantages``
    ``step``            ``step``
    =================== =========================================================================================

    Neither rewards nor groups nor versions are exported.  Where prime-rl has no finite number it writes null, which is
    NaN here.
    """
    ids, mask, rollout, trainer = needed(row, "token_ids", "loss_mask", "inference_logprobs", "trainer_logprobs")
    trained = np.array(mask, dtype=bool)
    start = int(trained.argmax()) if trained.any() else len(trained)
    sampled = trained.copy()
    if any(value is not None for value in row.get("rl_weights") or []):
        weights = [row["rl_weights"], row.get("ref_kl_weights") or []]
        sampled &= np.any([_nonzero(values, len(ids)) for values in weights], axis=0)
    per_token = {"rollout_logp": rollout, "logp": trainer, "mask": sampled}
    per_token |= {"entropy": row.get("entropy"), "advantage": row.get("advantages")}
    return {
        "prompt_ids": ids[:start],
        "completion_ids": ids[start:],
        "step": row.get("step"),
        **{name: None if values is None else values[start:] for name, values in per_token.items()},
    }


def _nonzero(values: Any, length: int) -> Any:
    return np.array([bool(value) for value in values] if len(values) == length else [False] * length)


PRIME_RL = Layout(
    name="prime-rl's token export",
    recognises=lambda names: NAMES <= names,
    columns=NAMES | {"entropy", "rl_weights", "ref_kl_weights", "advantages", "step"},
    fields=fields,
)
"""``token_ids loss_mask inference_logprobs trainer_logprobs entropy advantages step``."""
