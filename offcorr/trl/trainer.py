"""``GRPOTrainer``: TRL's, with the policy loss and the mismatch metrics of this library.

TRL's methods change with every release, so little is overridden: ``_compute_loss``, where the loss is made;
``_generate_and_score_completions``, where what the sampler knows is attached to the batch; and what those two need.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial, reduce
from typing import Any, NamedTuple

import torch
import trl
from accelerate.utils import gather_object
from torch import Tensor

import offcorr
from offcorr.trl.anchor import as_trained
from offcorr.trl.config import choose_correction
from offcorr.trl.corrected import Corrected
from offcorr.trl.head import head
from offcorr.trl.replaced import replaced
from offcorr.trl.skip import dead_sequences, only, rows_kept
from offcorr.trl.state import Keeper

SAMPLED = {"old_logp": torch.float32, "rollout_version": torch.long}
"""What a ``rollout_func`` may return beside TRL's keys; it travels with the batch to the loss."""


class Forward(NamedTuple):
    """What TRL's forward returns, whichever its version."""

    logp: Tensor  # [B, T], with a graph
    entropy: Tensor  # [B, T]; None where it was not asked for
    aux_loss: Tensor | None = None


@cache
def forward_arguments() -> frozenset[str]:
    """What the installed TRL's forward takes; images and their like are passed through by name."""
    return frozenset(inspect.signature(trl.GRPOTrainer._get_per_token_logps_and_entropies).parameters)


class GRPOTrainer(Corrected, trl.GRPOTrainer):
    """TRL's ``GRPOTrainer``, with a correction for off-policy data.

    Args:
        loss: an ``offcorr.Correction``; None: the one that ``args.loss_type`` names, or TRL's own loss.
        Everything else as TRL's.

    A ``rollout_func`` with an ``attach`` method is attached to the trainer, and may return, beside TRL's keys,
    ``old_logp`` (one list of log-probs a completion) and ``rollout_version`` (one int a completion, or a list).

    Raises:
        ValueError: an unknown loss or option, or settings that contradict each other; before the model is loaded.
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        *rest: Any,
        loss: offcorr.Correction | None = None,
        **kwargs: Any,
    ) -> None:
        self._follow(args, choose_correction(args, loss))
        self._kept_forwards: list[tuple] | None = None
        self._sampled: dict[str, list] = {}
        self._groups_made = 0
        self._statistics: Any = None
        self._sampler: Any = None
        super().__init__(model, reward_funcs, args, *rest, **kwargs)
        if self.correction is not None:
            self._check_settings()
            self._take_over_vllm_correction()
        if self.rollout_func is not None:
            if hasattr(self.rollout_func, "attach"):
                self.rollout_func.attach(self)
            self._sampler = self.rollout_func
            self.rollout_func = self._remember_sampled(self.rollout_func)
        self.add_callback(Keeper(self))

    # The loss

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """The loss of one micro-batch, divided for gradient accumulation as TRL divides it."""
        if self.correction is None:
            with self._one_forward() as kept:
                loss = super()._compute_loss(model, inputs)
            batch = self._batch(inputs, Forward(*kept[0]))
            self._add_metrics(offcorr.metrics.measure(batch), batch)
            self._scale_learning_rate(batch, inputs)
            return loss

        self._anneal()
        statistics = self._window_statistics(model, inputs)
        denominator = self._denominator(inputs)
        if self._skips_dead:
            inputs, skipped = self._without_dead(inputs)
        with self._one_forward():
            batch = self._batch(inputs, self._forward(model, inputs))
            out = self.correction(batch, denominator=denominator, statistics=statistics)
            if self._skips_dead:
                out = out._replace(metrics=offcorr.Metrics({**out.metrics.data, "offcorr/loss/skipped": skipped}))
            loss = out.loss
            if self._has_other_terms:
                loss = loss + self._other_terms(model, inputs, batch)
        self._add_metrics(out.metrics, batch)
        if self._mode == "train":
            self.anchor.watch(self.correction, batch, out.coefficient)
        self._scale_learning_rate(batch, inputs)
        return loss

    def _versions(self, batch: offcorr.Batch, inputs: dict[str, Any]) -> tuple[Tensor, int]:
        sampled = inputs["generated_at"] if batch.rollout_version is None else batch.rollout_version
        return sampled, self.state.global_step

    def _window_statistics(self, model: Any, inputs: dict[str, Any]) -> offcorr.Statistics | None:
        """Statistics of the optimizer step's whole batch, all ranks; None for a correction that needs none.

        Read ahead: at a window's first micro-batch all of its micro-batches run forward once without gradient,
        whose weights are the ones the window trains, so the numbers are exact and do not depend on the split.
        """
        if not self._coupled:
            return None
        window = [inputs]
        if self._mode == "train":
            if self._step % self.args.gradient_accumulation_steps:
                return self._statistics
            start = self._step % self.args.steps_per_generation
            window = self._buffered_inputs[start : start + self.args.gradient_accumulation_steps]
        parts: list[Any] = []
        with torch.no_grad():
            for part in window:
                parts.append(self.correction.statistics(self._batch(part, self._forward(model, part))))
        self._statistics = reduce(offcorr.Statistics.merge, parts).all_reduce(gather_object, self.accelerator.device)
        return self._statistics

    @property
    def _coupled(self) -> bool:
        stages = self.correction.stages.values()
        return any(stage.statistics is not None for stage in stages)

    @property
    def _skips_dead(self) -> bool:
        # KL, entropy bonus and auxiliary loss want every sequence.
        return getattr(self.args, "skip_dead_sequences", False) and self._mode == "train" and not self._has_other_terms

    def _without_dead(self, inputs: dict[str, Any]) -> tuple[dict[str, Any], Tensor]:
        """The micro-batch without the sequences that cannot matter; (number left out, number there was)."""
        assert self.correction is not None  # TRL's own losses compute every sequence
        known = inputs.get("old_logp", inputs.get("sampling_per_token_logps"))
        placeholder = torch.zeros_like(inputs["completion_ids"], dtype=torch.float32) if known is None else known
        batch = self._batch(inputs, Forward(placeholder.nan_to_num(), torch.zeros_like(placeholder)))
        rows = rows_kept(dead_sequences(self.correction, batch))
        size = len(inputs["advantages"])
        return only(inputs, rows), rows.new_tensor([size - len(rows), size], dtype=torch.float64)

    def _forward(self, model: Any, inputs: dict[str, Any], compute_entropy: bool = True) -> Forward:
        """TRL's forward over the completion tokens, with whatever this version of it takes."""
        accepted = forward_arguments()
        options = {name: inputs[name] for name in accepted if name in inputs}
        if "compute_aux_loss" in accepted:
            options["compute_aux_loss"] = self.aux_loss_enabled
        options |= {
            "input_ids": torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
            "attention_mask": torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
            "logits_to_keep": inputs["completion_ids"].size(1),
            "compute_entropy": compute_entropy,
        }
        return Forward(*self._get_per_token_logps_and_entropies(model, **options))

    def _batch(self, inputs: dict[str, Any], forward: Forward) -> offcorr.Batch:
        logp = forward.logp
        mask = inputs["completion_mask"].bool()
        if "tool_mask" in inputs:
            mask = mask & inputs["tool_mask"].bool()
        advantages = inputs["advantages"]
        if self.correction is not None and self.top_entropy_quantile < 1.0:
            # TRL's option: only the uncertain tokens learn.
            uncertain = self.get_high_entropy_mask(forward.entropy, mask, 1 - self.top_entropy_quantile)
            advantages = advantages.view(len(advantages), -1) * uncertain

        version = inputs.get("rollout_version")
        if version is not None and version.ndim == 1:
            version = version[:, None].expand_as(mask)
        batch = offcorr.Batch(
            logp=logp,
            advantages=advantages,
            mask=mask,
            rollout_logp=inputs.get("sampling_per_token_logps"),
            rewards=inputs.get("rewards"),
            group_ids=inputs.get("group_ids"),
            entropy=forward.entropy.detach(),
            rollout_version=version,
            trainer_version=None if version is None else self.state.global_step,
        )
        batch = self.anchor.place(batch, self.correction, inputs, partial(self._score, inputs))
        if batch.old_logp is None:
            self._warn_if_idle()
        return batch

    def _score(self, inputs: dict[str, Any], module: Any) -> Tensor:
        """[B, T]: the batch's log-probs under another module, which is not the forward that is kept."""
        with replaced(self, _kept_forwards=None):
            return self._forward(as_trained(self, module), inputs, compute_entropy=False).logp

    def _denominator(self, inputs: dict[str, Any]) -> Any:
        """What a micro-batch's sum is divided by, so that a window's gradients add up to TRL's mean.

        Token-mean: the generation batch's tokens over all ranks, scaled to one window and this rank (the gradients
        of ranks are averaged).  Means over sequences: this micro-batch's sequences, times the accumulation.
        """
        train = self._mode == "train"
        accumulation = self.current_gradient_accumulation_steps if train else 1
        if self.correction.aggregate != "token-mean":
            return len(inputs["advantages"]) * accumulation
        tokens = inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes
        return tokens * accumulation / self.args.steps_per_generation if train else tokens

    # What TRL adds to the policy loss: KL to a reference, entropy bonus, MoE auxiliary loss

    @property
    def _has_other_terms(self) -> bool:
        return self.beta != 0.0 or self._entropy_bonus_enabled or self.aux_loss_enabled

    def _other_terms(self, model: Any, inputs: dict[str, Any], batch: offcorr.Batch) -> Tensor:
        """TRL's own loss with advantage 0, over the forward at hand: everything in it but the policy's term."""
        logp = batch.logp.detach()
        old_logp = logp
        if getattr(self.args, "use_bias_correction_kl", False) and batch.old_logp is not None:
            # The KL is weighted by this ratio; clamped, since an overflow times the advantage 0 is NaN, as is what
            # lies under the mask times 0.
            old_logp = logp - (logp - batch.old_logp).nan_to_num(nan=0.0).clamp(-20.0, 20.0)
        inputs = {
            **inputs,
            "advantages": torch.zeros_like(inputs["advantages"]),
            "old_per_token_logps": old_logp,
        }
        # TRL's loss of the same aggregation; dr_grpo is sums over a constant length, which may be 1.
        loss_type, length = {
            "token-mean": ("dapo", None),
            "seq-mean-token-mean": ("grpo", None),
            "seq-mean-token-sum": ("dr_grpo", 1),
            "seq-mean-token-sum-norm": ("dr_grpo", self.correction.max_length),
        }[self.correction.aggregate]
        with replaced(self, loss_type=loss_type, max_completion_length=length or self.max_completion_length):
            loss = super()._compute_loss(model, inputs)
        for name in [*self._metrics[self._mode]]:
            if name.startswith("clip_ratio/") or name == "policy_loss":
                del self._metrics[self._mode][name]  # of advantage 0, so they say nothing
        return loss

    @contextmanager
    def _one_forward(self) -> Iterator[list[tuple]]:
        """Inside, the model runs once: the first result of TRL's forward is kept and given again."""
        self._kept_forwards = []
        try:
            yield self._kept_forwards
        finally:
            self._kept_forwards = None

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> tuple:
        if self._kept_forwards:
            return self._kept_forwards[0]
        choice = getattr(self.args, "logprob_head", "auto")
        if choice == "auto" and self.correction is None:
            choice = "trl"  # TRL's own loss to the last bit
        with head(choice, self.accelerator.device):
            result = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if self._kept_forwards is not None:
            self._kept_forwards.append(result)
        return result

    # What travels with the batch

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """TRL's, and [B] ``rewards``, ``group_ids`` and ``generated_at``, and what the sampler gave, beside it."""
        self._sampled = {}
        output = super()._generate_and_score_completions(inputs)
        ours = len(output["advantages"])
        first = self.accelerator.process_index * ours
        width = output["completion_ids"].size(1)
        device = output["completion_ids"].device
        size = self.num_generations if self._mode == "train" else self.num_generations_eval

        # Rows of a group are neighbours in the global batch; the numbers never repeat, so windows may span batches.
        place = torch.arange(first, first + ours, device=device)
        output["group_ids"] = self._groups_made + place // size
        self._groups_made += -(-ours * self.accelerator.num_processes // size)
        output["rewards"] = self._weighted_rewards(size)[first : first + ours]
        output["generated_at"] = torch.full_like(place, self.state.global_step)

        for name, rows in self._sampled.items():
            if isinstance(rows[0], list | tuple):
                output[name] = _padded(rows, width, SAMPLED[name], device)
            else:
                output[name] = torch.as_tensor(rows, dtype=SAMPLED[name], device=device)
        return output

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        self._rewards_per_function = super()._calculate_rewards(*args, **kwargs)  # [global B, functions]
        return self._rewards_per_function

    def _weighted_rewards(self, size: int) -> Tensor:
        """[global B]: the weighted sum that TRL makes advantages of; its group's mean where nothing was scored."""
        per_function = self._rewards_per_function
        rewards = (per_function * self.reward_weights.to(per_function.device)).nansum(dim=1)
        groups = rewards.masked_fill(per_function.isnan().all(dim=1), torch.nan).view(-1, size)
        means = groups.nanmean(dim=1, keepdim=True).nan_to_num(0.0)
        return torch.where(groups.isnan(), means, groups).flatten()

    def _remember_sampled(self, rollout_func: Callable) -> Callable:
        def remembering(prompts: list, trainer: Any) -> dict[str, Any]:
            output = rollout_func(prompts, trainer)
            self._sampled = {name: output[name] for name in SAMPLED if output.get(name) is not None}
            self._check_sampled(output["completion_ids"])
            return output

        return remembering

    def _check_sampled(self, completion_ids: list) -> None:
        """A list a completion, a number a token: one token off and every ratio is another token's."""
        for name, rows in self._sampled.items():
            got = [len(row) if isinstance(row, list | tuple) else 1 for row in rows]
            wanted = [len(ids) for ids in completion_ids]
            if got != wanted and (name == "old_logp" or got != [1] * len(wanted)):
                raise ValueError(
                    f"rollout_func returned {name} for completions of {got} tokens, expected {wanted}: one number for "
                    "each token of completion_ids"
                )
        if "old_logp" in self._sampled and self.tools:
            raise ValueError(
                "rollout_func returned old_logp and the trainer has tools: TRL then continues the completions by "
                "itself, without old_logp. Call the tools inside rollout_func and return env_mask"
            )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Called on every start with the checkpoint to resume from; the sampler has its own part in it."""
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and hasattr(self._sampler, "restore"):
            with suppress(FileNotFoundError):  # a checkpoint from before this sampler was used
                self._sampler.restore(checkpoint)

    # Checks, said once

    def _check_settings(self) -> None:
        if getattr(self, "use_liger_kernel", False):
            raise ValueError(
                "use_liger_kernel=True computes TRL's own loss inside the kernel, so "
                f"{self.correction.method!r} would never run: set use_liger_kernel=False"
            )
        args = self.args
        if getattr(args, "skip_dead_sequences", False) and (self._coupled or self.top_entropy_quantile < 1.0):
            why = (
                f"{self.correction.method!r}" if self._coupled else f"top_entropy_quantile={self.top_entropy_quantile}"
            )
            raise ValueError(
                f"skip_dead_sequences=True leaves sequences out of the forward pass, and {why} looks at all of them: "
                "leave one of the two out"
            )
        if self._coupled and args.steps_per_generation % args.gradient_accumulation_steps:
            raise ValueError(
                f"{self.correction.method!r} looks at an optimizer step's whole batch before its first gradient, so a "
                f"step must lie in one generation: steps_per_generation is {args.steps_per_generation}, expected a "
                f"multiple of gradient_accumulation_steps, {args.gradient_accumulation_steps}"
            )
        if "group_ids" in self.correction.needs and args.steps_per_generation != args.gradient_accumulation_steps:
            raise ValueError(
                f"{self.correction.method!r} compares the completions of a prompt, which TRL shuffles over the steps "
                f"of a generation: steps_per_generation is {args.steps_per_generation}, expected "
                f"gradient_accumulation_steps, {args.gradient_accumulation_steps}"
            )
        if not self.correction.count_rejected:
            raise ValueError(
                "count_rejected=False divides by what was kept, which no micro-batch and no rank knows of the others: "
                "leave it out in training with TRL"
            )

    def _take_over_vllm_correction(self) -> None:
        if self.use_vllm and self.vllm_importance_sampling_correction:
            self.vllm_importance_sampling_correction = False
            self._say(
                f"{self.correction.method!r} takes the place of TRL's vLLM importance sampling correction, which is "
                "switched off: no mismatch is corrected twice. To weigh the engine's mismatch, give it an engine "
                'weight, for instance loss_kwargs={"weight": {"name": "truncate", "cap": 2.0}}'
            )

    def _warn_if_idle(self) -> None:
        """Recomputed log-probs are the current weights': with one optimizer step a generation, the ratio is 1."""
        if self.correction is None or "staleness" not in self.correction.compares:
            return
        window = self.args.steps_per_generation * self.num_iterations
        if self.args.gradient_accumulation_steps % window == 0:
            self._say(
                f"every staleness ratio of {self.correction.method!r} will be 1, whatever the lag: there are no "
                "log-probs of the weights that sampled, and each generation is used for one optimizer step, so "
                "old_logp is logp. Sample with offcorr.rollout.OffPolicy (anchor='snapshot'), take anchor='rollout' "
                "where the engine reports log-probs, or make more steps a generation (num_iterations, "
                "steps_per_generation)"
            )


def _padded(rows: list, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Ragged lists, one a completion, as [B, width], right-padded with 0; None (not known) is NaN."""
    filled = [[*(torch.nan if x is None else x for x in row), *[0] * (width - len(row))] for row in rows]
    return torch.tensor(filled, dtype=dtype, device=device)
