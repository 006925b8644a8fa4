"""VCPO (2602.17616) in TRL: a truncated sequence weight, an ESS learning rate, a minimum-variance baseline.

    accelerate launch recipes/vcpo.py --config recipes/configs/vcpo.yaml                    # sampler 16 updates behind
    accelerate launch recipes/vcpo.py --config recipes/configs/vcpo.yaml --baseline group   # TRL's own advantages

The weight is a loss (``loss_type: vcpo``) and the learning rate an option (``ess_lr: sqrt``): both are configuration.
The baseline belongs where advantages are computed, so it is left to a recipe.  The exact one needs a gradient per
trajectory (recipes/accelerate_loop.py, ``--baseline opob``); this is its proxy, from the probabilities alone.
Everything else is recipes/grpo.py.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
import grpo  # noqa: E402

import offcorr  # noqa: E402
from offcorr.training import token_baseline  # noqa: E402


@dataclass
class Arguments(grpo.Arguments):
    """grpo.py's arguments and the baseline."""

    baseline: str = field(
        default="token",
        metadata={"help": "token: OTB, the proxy of the optimal baseline; group: TRL's", "choices": ["token", "group"]},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.per_device_train_batch_size * self.steps_per_generation % self.num_generations:
            raise ValueError(
                f"a prompt's samples must lie on one rank: per_device_train_batch_size * steps_per_generation is "
                f"{self.per_device_train_batch_size * self.steps_per_generation}, expected a multiple of "
                f"num_generations, {self.num_generations}"
            )


class VCPOTrainer(grpo.GRPOTrainer):
    """The advantages are reward - b_t, one per token."""

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        if self.args.baseline == "token" and self.model.training:
            output["advantages"] = self.advantages(output)
        return output

    @torch.no_grad()
    def advantages(self, output: dict[str, Any]) -> Tensor:
        """[B, T], under the current weights, which are those of the first update on these samples."""
        size = self.args.per_device_train_batch_size
        names = ("prompt_ids", "completion_ids", "prompt_mask", "completion_mask")
        parts = [self.probabilities(*part) for part in zip(*(output[name].split(size) for name in names), strict=True)]
        logp, sum_sq_probs = (torch.cat(column) for column in zip(*parts, strict=True))
        batch = offcorr.Batch(
            logp=logp,
            sum_sq_probs=sum_sq_probs,
            rollout_logp=output["sampling_per_token_logps"],
            advantages=output["advantages"],
            mask=output["completion_mask"].bool(),
            rewards=output["rewards"],
            group_ids=output["group_ids"],
        )
        return batch.rewards[:, None] - token_baseline(batch)

    def probabilities(
        self, prompt_ids: Tensor, completion_ids: Tensor, prompt_mask: Tensor, completion_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Log-prob of each completion token, and the sum over the vocabulary of squared probabilities; 0 on padding."""
        length = completion_ids.shape[1]
        with self.accelerator.autocast():
            logits = self.model(
                input_ids=torch.cat([prompt_ids, completion_ids], 1),
                attention_mask=torch.cat([prompt_mask, completion_mask], 1),
                logits_to_keep=length + 1,
            ).logits
        result = offcorr.logits_logprob(
            logits[:, :-1], completion_ids, mask=completion_mask, temperature=self.temperature, sum_sq_probs=True
        )
        return result.logp, result.sum_sq_probs


if __name__ == "__main__":
    grpo.main(Arguments, VCPOTrainer)
