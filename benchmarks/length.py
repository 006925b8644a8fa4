"""How much of the gradient a correction leaves as outputs grow: the mean multiplier of a token, by length.

    python benchmarks/length.py [METHOD ...] [--output benchmarks/results/lab_length.json]

Log-ratios are drawn, independent and normal, with standard deviation sigma and mean -sigma^2 / 2, since the mean of a
ratio is 1 under the policy that sampled.  No model is trained: this is what the definitions alone decide.  A multiplier
is what a method multiplies the gradient of an uncorrected loss (REINFORCE) by, here for an advantage and reward of +1
and of -1, with the same draws for every method.
"""

from __future__ import annotations

import argparse
import json

import flags
import torch

import offcorr
from offcorr.lab import results

METHODS = ("cispo", "sapo", "token_is", "aipo", "mu_grpo", "near_overlap", "minpro", "topr", "ppo", "ctpo", "gspo")
SIGMAS = (0.03, 0.1)
LENGTHS = (64, 1024, 16384)
TOKENS, DRAWS = 2**20, 16
"""Tokens of one draw, and draws of every cell, which differ from length to length."""


def multiplier(method: str, log_ratio: torch.Tensor, advantage: float) -> float:
    """The mean over tokens; all sequences are equally long, so no aggregation matters."""
    rows, length = log_ratio.shape
    old = torch.full((rows, length), -1.0, dtype=torch.float64)
    signs = torch.full((rows,), advantage, dtype=torch.float64)
    batch = offcorr.Batch(
        logp=old + log_ratio,
        old_logp=old,
        rollout_logp=old,
        advantages=signs,
        rewards=signs,
        mask=torch.ones_like(old, dtype=torch.bool),
    )
    coefficient = offcorr.get(method, aggregate="sum").coefficient(batch)
    return (-coefficient / advantage).mean().item()


def _multipliers(method: str, sigma: float, length: int, generator: torch.Generator) -> list[float]:
    """For an advantage of +1 and of -1, over one draw."""
    draws = torch.randn(TOKENS // length, length, generator=generator, dtype=torch.float64)
    log_ratio = sigma * draws - sigma**2 / 2
    return [multiplier(method, log_ratio, advantage) for advantage in (1.0, -1.0)]


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("methods", nargs="*", type=flags.method, default=list(METHODS))
    parser.add_argument("--output", type=flags.output, help="write the result as JSON")
    options = parser.parse_args()
    rows = []
    for sigma in SIGMAS:
        for length in LENGTHS:
            for method in options.methods:
                generator = torch.Generator().manual_seed(length)
                drawn = torch.tensor([_multipliers(method, sigma, length, generator) for _ in range(DRAWS)])
                (up, down), (up_error, down_error) = drawn.mean(0).tolist(), (drawn.std(0) / DRAWS**0.5).tolist()
                row = {"method": method, "sigma": sigma, "length": length, "up": up, "down": down}
                rows.append(row | {"up_error": up_error, "down_error": down_error})
                print(
                    f"sigma {sigma:<5} {length:>6} tokens  {method:14} A > 0 {up:6.3f} +- {up_error:.3f}   "
                    f"A < 0 {down:6.3f} +- {down_error:.3f}",
                    flush=True,
                )
    if options.output:
        setting = {"methods": options.methods, "sigmas": SIGMAS, "lengths": LENGTHS, "tokens": TOKENS * DRAWS}
        head = results.about("python benchmarks/length.py", setting)
        options.output.write_text(json.dumps(head | {"rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
