"""The losses of SkyRL and prime-rl, written again from their definitions, have the gradients of the corrections that
docs/migrating.md names for them, on random batches in float64.
"""

from __future__ import annotations

import doctest
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import offcorr
from offcorr import Batch, gates, ratios
from offcorr.stages.rejections import K1, Geometric, Veto
from offcorr.stages.weights import Truncate

PAGE = Path(__file__).resolve().parent.parent / "docs" / "migrating.md"
LENGTH = 12


class Logps(NamedTuple):
    """Log-probabilities [B, T] of the trainer, of the recomputed old policy and of the engine, with A and the mask."""

    now: Tensor
    old: Tensor
    engine: Tensor
    advantage: Tensor
    mask: Tensor


def logps(seed: int) -> Logps:
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    old = -normal(40, LENGTH).abs() - 0.05
    engine = (old + 0.05 * normal(40, 1) + 0.3 * normal(40, LENGTH)).clamp(max=-1e-3)
    now = (old + 0.4 * normal(40, LENGTH)).clamp(max=-1e-3)
    mask = torch.rand(40, LENGTH, generator=draw) < 0.8
    return Logps(now.requires_grad_(), old, engine, normal(40, 1).expand(40, LENGTH), mask)


def gradient(term: Tensor, d: Logps) -> Tensor:
    """dL/dlogp of the mean of -term over the valid tokens."""
    loss = -torch.where(d.mask, term, 0.0).sum() / d.mask.sum()
    return torch.autograd.grad(loss, d.now)[0]


def over_row(value: Tensor, d: Logps, mean: bool = False) -> Tensor:
    total = torch.where(d.mask, value, 0.0).sum(-1, keepdim=True)
    return total / d.mask.sum(-1, keepdim=True).clamp(min=1) if mean else total


# ------------------------------------------------------------------------------------------------------- SkyRL


def pessimistic(ratio: Tensor, d: Logps) -> Tensor:
    return torch.minimum(ratio * d.advantage, ratio.clamp(0.8, 1.2) * d.advantage)


def regular(d: Logps) -> Tensor:
    return pessimistic((d.now - d.old).exp(), d)


def dual_clip(d: Logps) -> Tensor:
    return torch.where(d.advantage < 0, torch.maximum(regular(d), 3.0 * d.advantage), regular(d))


def gspo(d: Logps) -> Tensor:
    own = d.now - d.now.detach()
    return pessimistic((own + over_row(d.now - d.old, d, mean=True).detach()).exp(), d)


def sapo(d: Logps) -> Tensor:
    tau = 1.05 - 0.05 * (d.advantage > 0).double()
    return 4 / tau * torch.sigmoid(tau * ((d.now - d.old).exp() - 1)) * d.advantage


def cispo(d: Logps) -> Tensor:
    return (d.now - d.old).exp().clamp(0.0, 5.0).detach() * d.advantage * d.now


def cispo_rollout(d: Logps) -> Tensor:
    return (d.now - d.engine).exp().clamp(0.0, 5.0).detach() * d.advantage * d.now


def rollout_is(d: Logps) -> Tensor:
    ratio = (d.now - d.engine).exp().detach()
    return ratio * ((ratio > 0.8) & (ratio < 1.2)) * d.advantage * d.now


def dppo(d: Logps) -> Tensor:
    moved = (d.now.exp() - d.engine.exp()).detach()
    keep = ~((d.advantage > 0) & (moved > 0.2)) & ~((d.advantage < 0) & (-moved > 0.2))
    return (d.now - d.engine).exp() * d.advantage * keep


def dppo_kl(d: Logps) -> Tensor:
    p, mu = d.now.detach().exp(), d.engine.exp()
    kl = mu * (mu / p).log() + (1 - mu) * ((1 - mu) / (1 - p)).log()
    keep = ~((kl > 0.05) & ((p - mu) * d.advantage > 0))
    return (d.now - d.engine).exp() * d.advantage * keep


def importance_sampling(d: Logps) -> Tensor:
    return (d.now - d.old).exp() * d.advantage * d.mask.sum()  # a plain sum over tokens


def corrected(factor: Callable[[Tensor, Logps], Tensor]) -> Callable[[Logps], Tensor]:
    """The default loss times a factor of the engine's log-ratio, which is detached."""
    return lambda d: regular(d) * factor(d.old - d.engine, d)


def inside(ratio: Tensor, low: float, high: float) -> Tensor:
    return (ratio >= low) & (ratio <= high)


def no_outlier(gap: Tensor, d: Logps, low: float, high: float) -> Tensor:
    return (inside(gap.exp(), low, high) | ~d.mask).all(-1, keepdim=True)


SKYRL: dict[str, tuple[Callable[[Logps], Tensor], Any]] = {
    "regular": (regular, offcorr.get("ppo", aggregate="token-mean")),
    "dual_clip": (dual_clip, offcorr.get("ppo", dual_clip=3.0, aggregate="token-mean")),
    "gspo": (gspo, offcorr.get("gspo", eps_low=0.2, eps_high=0.2, aggregate="token-mean")),
    "sapo": (sapo, offcorr.get("sapo", aggregate="token-mean")),
    "cispo": (cispo, offcorr.get("cispo")),
    "cispo, rollout": (cispo_rollout, offcorr.get("aipo", cap=5.0)),
    "rollout_is": (rollout_is, offcorr.get("glm5", eps_low=0.2, eps_high=0.2)),
    "dppo, binary_tv": (dppo, offcorr.get("dppo", cap=None, aggregate="token-mean")),
    "dppo, binary_kl": (dppo_kl, offcorr.get("dppo_kl", cap=None, aggregate="token-mean")),
    "importance_sampling": (importance_sampling, offcorr.get("token_is", aggregate="sum")),
    "tis_ratio_type=token": (
        corrected(lambda gap, d: gap.exp().clamp(max=2.0)),
        offcorr.get("ppo", weight=Truncate(2.0), aggregate="token-mean"),
    ),
    "tis_ratio_type=sequence": (
        corrected(lambda gap, d: over_row(gap, d).exp().clamp(max=5.0)),
        offcorr.get("ppo", weight=Truncate(5.0, level="sequence"), aggregate="token-mean"),
    ),
    "sequence_mask_metric=geometric": (
        corrected(lambda gap, d: inside(over_row(gap, d, mean=True).exp(), 0.99, 1.01)),
        offcorr.get("ppo", reject=Geometric(0.99, 1.01), aggregate="token-mean"),
    ),
    "sequence_mask_metric=product": (
        corrected(lambda gap, d: inside(over_row(gap, d).exp(), 0.5, 2.0)),
        offcorr.get("ppo", reject=K1(0.5, 2.0, level="seq-sum"), aggregate="token-mean"),
    ),
    "token_mask": (
        corrected(lambda gap, d: inside(gap.exp(), 0.5, 2.0)),
        offcorr.get("ppo", reject=K1(0.5, 2.0, level="token"), aggregate="token-mean"),
    ),
    "outlier_token": (
        corrected(lambda gap, d: no_outlier(gap, d, 0.6, 2.0)),
        offcorr.get("ppo", reject=K1(0.6, 2.0, level="seq-max"), aggregate="token-mean"),
    ),
    "outlier_token, low alone": (
        corrected(lambda gap, d: no_outlier(gap, d, 0.6, float("inf"))),
        offcorr.get("ppo", reject=Veto(0.6), aggregate="token-mean"),
    ),
}


# ---------------------------------------------------------------------------------------------------- prime-rl


def page_gate() -> type:
    """The gate that the page writes out."""
    examples = doctest.DocTestParser().get_examples(PAGE.read_text().partition("## prime-rl")[2].partition("\n## ")[0])
    names: dict[str, Any] = {"__name__": __name__}
    for example in examples:
        if "prime_rl(batch)" not in example.source:
            exec(example.source, names)
    return names["MaskAndPenalty"]


def prime_rl_default(d: Logps) -> Tensor:
    ratio, moved = (d.now - d.engine).exp(), (d.now.exp() - d.engine.exp()).detach()
    masked = torch.where(d.advantage > 0, moved > 0.2, moved < -0.2)
    return ~masked * d.advantage * ratio - 1e-3 * (d.now - d.engine) ** 2


def prime_rl_ipo(d: Logps) -> Tensor:
    ratio, moved = (d.now - d.engine).exp(), (d.now.exp() - d.engine.exp()).detach()
    return (moved.abs() <= 0.1) * d.advantage * ratio - 1e-3 * (d.now - d.engine) ** 2


def total(gate: gates.Gate) -> offcorr.Correction:
    return offcorr.Correction(ratio=ratios.Token(mismatch="total"), gate=gate, aggregate="token-mean")


def without_penalty(d: Logps) -> Tensor:
    return prime_rl_default(d) + 1e-3 * (d.now - d.engine) ** 2


Gate = page_gate()
CASES = {
    **SKYRL,
    "prime-rl, default": (prime_rl_default, total(Gate())),
    "prime-rl, kl_tau=0": (without_penalty, offcorr.get("dppo", cap=None, aggregate="token-mean")),
    "prime-rl, ipo": (prime_rl_ipo, offcorr.get("ipo", threshold=0.1, kl_tau=1e-3)),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CASES)
def test_their_loss_is_the_named_correction(name, seed):
    theirs, ours = CASES[name]
    d = logps(seed)
    batch = Batch(
        logp=d.now.detach(), old_logp=d.old, rollout_logp=d.engine, advantages=d.advantage.contiguous(), mask=d.mask
    )
    wanted = gradient(theirs(d), d)
    torch.testing.assert_close(ours(batch).coefficient, wanted, rtol=1e-9, atol=1e-12)
    plain = gradient(d.advantage * d.now, d)
    assert (wanted - plain).abs().max() > 1e-4, "the case does not exercise the correction"
