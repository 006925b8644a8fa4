"""prime-rl: ``import_path = "offcorr.integrations.prime_rl.loss"`` and the method in ``kwargs``, in ``[trainer.loss]``.

``kwargs = { spec = "minpro?eps_high=0.28" }``.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from torch import Tensor

from offcorr.batch import Batch
from offcorr.correction import Correction
from offcorr.integrations.hook import Hook

__all__ = ["HOOK", "Outputs", "loss"]

HOOK = Hook(
    "prime-rl",
    sees="sequence",
    carries=frozenset({"old_logp", "rollout_logp"}),
    engine_alone=False,
    aggregates=False,
)
"""prime-rl calls its loss once per sequence and divides by the global number of tokens outside."""


class Outputs(NamedTuple):
    """Loss and metrics of a sequence, under the names of prime-rl's ``LossOutputs``."""

    loss: Tensor
    metrics: dict[str, Tensor]


def loss(inputs: Any, spec: str, **options: Any) -> Outputs:
    """The loss of one sequence, for prime-rl's custom loss.

    The ratio is the total one, of the current log-probs to the engine's; its metrics are ``offcorr/staleness/*``.

    Args:
        inputs: prime-rl's ``LossInputs``.
        spec: a method, as for ``offcorr.get``.
        options: its options, where they do not stand in ``spec``.

    Raises:
        ValueError: prime-rl's hook cannot carry the method.

    >>> import torch
    >>> from types import SimpleNamespace
    >>> engine = torch.full((3,), -2.0)
    >>> inputs = SimpleNamespace(trainer_logprobs=engine + 0.1, inference_logprobs=engine, advantages=torch.ones(3),
    ...                          loss_mask=torch.ones(3).bool(), loss_weights=None)
    >>> round(loss(inputs, "cispo", cap=1.0).loss.item(), 4)
    5.7
    """
    correction = _resolved(spec, tuple(sorted(options.items())))
    engine = inputs.inference_logprobs[None]
    weights = inputs.loss_weights
    batch = Batch(
        logp=inputs.trainer_logprobs[None],
        old_logp=engine,
        rollout_logp=engine,
        advantages=inputs.advantages[None],
        mask=inputs.loss_mask[None],
        weight=None if weights is None else weights[None],
    )
    out = correction(batch)
    means = out.metrics.means().items()
    return Outputs(
        out.loss,
        {
            name: out.loss.new_tensor(mean)
            for name, (mean, _) in means
            if not name.startswith("offcorr/engine/")  # the engine is its own anchor here
        },
    )


@functools.cache
def _resolved(spec: str, options: tuple[tuple[str, Any], ...]) -> Correction:
    return HOOK.resolve(spec, **dict(options))
