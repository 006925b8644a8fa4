"""Minimum-variance baselines for importance-weighted policy gradients: OPOB, exact, and OTB, its cheap proxy.

The gradient estimate is  mean of w (R - b) g,  g = grad log pi(tau), w the behaviour weight.  Its variance over
sampled trajectories is least at  b* = E[w^2 |g|^2 R] / E[w^2 |g|^2]  (VCPO, 2602.17616), since E[w g] = 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch
from einops import repeat
from torch import Tensor

from offcorr.batch import Batch
from offcorr.correction import Correction
from offcorr.stages import gates
from offcorr.stages.checks import check_value
from offcorr.stages.reference import weight_of
from offcorr.stages.weights import Truncate, Weight


class OPOB:
    """The off-policy optimal baseline, exact: b* = sum w^2 |g|^2 R / sum w^2 |g|^2 over a prompt group.

    The norm is over all parameters and of one trajectory, so trajectories are added one by one (micro-batches of one);
    besides ``p.grad`` it needs one more buffer of that size, for sum w g.  Afterwards ``p.grad`` has grown by the
    gradient of the loss, - sum w (R - b*) g / denominator.  Parameters must not be sharded (with ZeRO-2, ZeRO-3 or FSDP
    a rank's own gradient never exists), and a group's trajectories lie on one rank.

        opob = OPOB(model.parameters(), denominator=trajectories_of_all_ranks)
        for group in groups:
            for trajectory in group:
                with accelerator.no_sync(model):
                    opob.add(log_prob(model, trajectory), trajectory.reward, trajectory.weight)
            opob.end_group()
        for p in model.parameters():
            p.grad = accelerator.reduce(p.grad, "sum")
        optimizer.step()

    Args:
        parameters: the trained ones.
        denominator: Z, the number of trajectories of the optimizer batch.

    >>> theta = torch.nn.Parameter(torch.zeros(2))
    >>> opob = OPOB([theta], denominator=2)
    >>> for action, reward in ((0, 1.0), (1, 0.0)):
    ...     opob.add(theta.log_softmax(0)[action], reward)
    >>> opob.end_group(), theta.grad
    (0.5, tensor([-0.2500,  0.2500]))
    """

    def __init__(self, parameters: Iterable[Tensor], denominator: float) -> None:
        check_value("OPOB", "denominator", denominator, low=0.0, above=True)
        self.parameters = [p for p in parameters if p.requires_grad]
        if not self.parameters:
            raise ValueError("parameters holds none that requires grad")
        self.denominator = denominator
        self._scores = [torch.zeros_like(p) for p in self.parameters]  # sum w g of the group at hand
        self._squared_norm = self._rewarded_norm = torch.zeros((), dtype=torch.float64)  # sum w^2 |g|^2 (R)

    def add(self, log_prob: Tensor, reward: float | Tensor, weight: float | Tensor = 1.0) -> None:
        """Add one trajectory: its log pi(tau), a scalar with a graph; its reward; its weight, which is detached.

        ``log_prob`` may be any scalar whose gradient the estimate multiplies by R - b, for instance minus the loss of a
        correction at advantage 1 (which contains the weight), if ``check_proportional`` accepts it.  A score divided by
        the trajectory's length gives the best baseline of that estimator, which any baseline biases slightly.
        """
        if log_prob.numel() != 1:
            raise ValueError(
                f"log_prob has shape {tuple(log_prob.shape)}, expected a scalar: the sum over one trajectory's tokens"
            )
        reward, weight = (torch.as_tensor(x, dtype=torch.float64).detach() for x in (reward, weight))
        scores = torch.autograd.grad(log_prob.reshape(()), self.parameters, allow_unused=True)
        norm = torch.zeros((), dtype=torch.float64, device=log_prob.device)
        with torch.no_grad():
            for p, total, score in zip(self.parameters, self._scores, scores, strict=True):
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
                if score is None:
                    continue
                norm = norm + score.square().sum(dtype=torch.float64)
                weighted = score * weight.to(score)
                total += weighted
                p.grad -= weighted * (reward / self.denominator).to(score)
            squared = weight.to(norm).square() * norm
            self._squared_norm = self._squared_norm.to(norm) + squared
            self._rewarded_norm = self._rewarded_norm.to(norm) + squared * reward.to(norm)

    @torch.no_grad()
    def end_group(self) -> float:
        """Subtract the baseline of the prompt whose trajectories were added, and return it (0 if every score is 0)."""
        baseline = torch.where(self._squared_norm > 0, self._rewarded_norm / self._squared_norm, 0)
        for p, total in zip(self.parameters, self._scores, strict=True):
            if p.grad is not None:
                p.grad += total * (baseline / self.denominator).to(total)
            total.zero_()
        self._squared_norm, self._rewarded_norm = (
            torch.zeros_like(x) for x in (self._squared_norm, self._rewarded_norm)
        )
        return float(baseline)


def check_proportional(loss_fn: Correction) -> None:
    """Raise ``ValueError`` if the gradient is not proportional to the advantage: no baseline of least variance exists.

    The effect of a clip or a soft gate on a token depends on the sign of its advantage, and that on the baseline.

    >>> import offcorr
    >>> check_proportional(offcorr.get("vcpo"))
    """
    sensitive = [s for place, s in loss_fn.stages.items() if place != "gate" and "advantage" in s.inputs]
    sensitive += [] if type(loss_fn.gate) in PROPORTIONAL_GATES else [loss_fn.gate]
    if sensitive:
        raise ValueError(
            f"an optimal baseline needs a gradient proportional to the advantage, but {sensitive[0]!r} of "
            f"{loss_fn.method!r} may treat advantages of one sign otherwise: take a loss such as vcpo or reinforce"
        )


PROPORTIONAL_GATES = (gates.ScoreFunction, gates.DetachedRatio, gates.Unclipped, gates.DetachedClip)
"""Gates whose surrogate's derivative is the advantage times a factor that does not depend on it."""


@torch.no_grad()
def token_baseline(
    batch: Batch,
    returns: Tensor | None = None,
    weight: Weight | None = Truncate(8.0, level="sequence", mismatch="total"),  # noqa: B008  (frozen)
) -> Tensor:
    """OTB (2602.07078), the proxy of OPOB that needs no gradients: b_t = sum G_t W_t / sum W_t over the prompt group.

    W_t = sum over s <= t of w^2 |s|^2, where |s|^2 = 1 - 2 p + sum over the vocabulary of p^2 is the squared gradient
    of log p with respect to the logits.  t counts valid tokens, without those of tools.  A token at a position that
    only one trajectory of its group reaches gets baseline 0, since its own return would be no baseline.

    Args:
        batch: whole groups, with ``sum_sq_probs``, ``group_ids``, ``rewards`` and the log-probs that ``weight``
            compares.  ``advantages`` are ignored.
        returns: [B], or G_t as [B, T]; None: ``batch.rewards``, at every token.
        weight: w; None: 1.

    Returns:
        b_t in the layout of ``batch.logp``, 0 on masked tokens. The advantage is returns - b_t.

    >>> logp = torch.tensor([[-0.5], [-1.0]])
    >>> batch = Batch(logp=logp, advantages=torch.zeros(2), mask=logp < 0, rewards=torch.tensor([1.0, 0.0]),
    ...               group_ids=torch.tensor([3, 3]), sum_sq_probs=torch.full((2, 1), 0.5))
    >>> token_baseline(batch, weight=None)
    tensor([[0.2730],
            [0.2730]])
    """
    returns = batch.rewards if returns is None else returns
    for name, value, remedy in (
        ("sum_sq_probs", batch.sum_sq_probs, "the sum over the vocabulary of the trainer's squared probabilities"),
        ("group_ids", batch.group_ids, "the prompt that each sequence belongs to"),
        ("rewards", returns, "one number per sequence, or returns="),
    ):
        if value is None:
            raise ValueError(f"{name} is None, but token_baseline needs it: pass {remedy}")
    if weight is not None and weight.mismatch in ("engine", "total") and batch.rollout_logp is None:
        raise ValueError(
            f"rollout_logp is None, but weight {weight!r} needs it; pass rollout_logp=old_logp to say that engine and "
            "trainer agree, or weight=None"
        )
    assert returns is not None
    tokens = dataclasses.replace(batch, advantages=returns).tokens
    padded, mask, returns = tokens.batch, tokens.trainable, tokens.advantages
    assert padded.sum_sq_probs is not None and padded.group_ids is not None

    score = 1 - 2 * tokens.logp.exp() + padded.sum_sq_probs.to(tokens.dtype)
    if weight is not None:
        score = score * weight_of(weight, tokens).weight.square()
    squared = torch.where(mask, score.clamp(min=0), 0).cumsum(1)

    # One slot for each prompt and position, which holds at most one token of each trajectory.
    group = repeat(torch.unique(padded.group_ids, return_inverse=True)[1], "b -> b t", t=mask.shape[1])
    slot = (group * (mask.shape[1] + 1) + tokens.rows.position.long())[mask]
    slots, slot = torch.unique(slot, return_inverse=True)

    def over_slot(values: Tensor) -> Tensor:
        return values.new_zeros(len(slots)).index_add(0, slot, values)[slot]

    total, weighted = over_slot(squared[mask]), over_slot((squared * returns)[mask])
    alone = over_slot(torch.ones_like(total)) == 1
    baseline = torch.zeros_like(squared)
    baseline[mask] = torch.where((total > 0) & ~alone, weighted / total, 0)
    return batch.repack(baseline)
