"""``GRPOTrainer``: TRL's, with the policy loss and the mismatch metrics of this library.

TRL's methods change with every release, so few are overridden: ``_compute_loss``, which makes the loss;
``_generate_and_score_completions``, which attaches the sampler's log-probs and versions to the batch; and those that
these two need.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
import trl
from torch import Tensor

import offcorr
from offcorr.metrics import Mean
from offcorr.rollout.off_policy import OffPolicy
from offcorr.rollout.sampler import give_fused_head, in_mixed_precision
from offcorr.rollout.vllm_server import VLLMServer
from offcorr.stages.aggregate import AGGREGATIONS
from offcorr.training.anchors import Anchor, default_anchor
from offcorr.training.ess_lr import AUTO
from offcorr.training.field_metrics import SKIPPED
from offcorr.training.replica import base_of
from offcorr.training.unrecorded import filled
from offcorr.trl.config import choose_correction
from offcorr.trl.convex_kl import ConvexKL
from offcorr.trl.dump import check_dump, dump_padded, make_dumps, padded_ids
from offcorr.trl.idle import compares_staleness, idle_warning
from offcorr.trl.inputs import check_best_metric, check_data, check_reference, check_reward_funcs
from offcorr.trl.lm_head import counting_real_tokens, lm_head
from offcorr.trl.patch import patched
from offcorr.trl.prompts import check_prompts
from offcorr.trl.recorded import score_unrecorded
from offcorr.trl.returned import SAMPLED, check_returned, check_rollout_func, column, none_as_nan
from offcorr.trl.rewards import checked, reward_faults, without_rounding
from offcorr.trl.sampling import distorting, distortion_warning, lag_of, of_model, precision_of, unknown_to_trainer
from offcorr.trl.skip import check_skipping, dead_sequences, only, rows_kept
from offcorr.trl.step import (
    StepCallback,
    check_steps,
    lag_metrics,
    log_metrics,
    make_step,
    of_metrics,
    refuse_nan_model,
    report_first_batch,
    share_done,
    warn_of_cut_off,
    warn_on_main,
    warn_once_in_run,
)

GENERATION = ("_generate", "_generate_single_turn", "_generate_and_score_completions")
"""TRL's methods of generation; a subclass with one of its own may report log-probs."""

ENGINE_MISSING = (
    "the engine's log-probs, which nothing reports here: sample by vLLM (use_vllm=True) or by a rollout_func that "
    "returns logprobs, for instance offcorr.rollout.OffPolicy(precision='int8')"
)


OF_SEQUENCE = ("sequence", "geometric")
"""The spans in which every token's ratio is that of the whole sequence."""

MODE_CHANGED = (
    "rollout_func left the model in another mode, by model.eval() or model.train(); it was set back, as an update in "
    "evaluation mode would count as an evaluation. Set it back where you change it"
)

SUMMED = "sum_then_normalize"
"""TRL's default way to make one reward of several, in which a reward at its group's mean has no advantage."""

FEWER_TOKENS = (
    "top_entropy_quantile={:g}: with {!r} the tokens of high entropy alone have a gradient. TRL's loss at the level of "
    "the sequence leaves out the terms of the others, but not their gradient, as every term holds the ratio of the "
    "whole sequence; so this is another update than TRL's"
)


class Forward(NamedTuple):
    """The result of TRL's forward, in any version."""

    logp: Tensor  # [B, T], with a graph
    entropy: Tensor  # [B, T]; None where it was not asked for
    aux_loss: Tensor | None = None


class GRPOTrainer(trl.GRPOTrainer):
    """TRL's ``GRPOTrainer``, with a correction for off-policy data.

    Args:
        loss: an ``offcorr.Correction``; None: the one that ``args.loss_type`` names, or TRL's own loss.
        All other arguments are TRL's.

    ``correction_step`` holds all state of the correction (``offcorr.training.Step``).  A ``rollout_func`` with an
    ``attach`` method is attached to the trainer, and may return, beside TRL's keys, ``old_logp`` (a list of log-probs
    per completion), ``rollout_version`` (an int per completion, or a list with one per token), ``origin`` (an index of
    ``offcorr.training.ORIGINS`` per completion) and ``recorded_rewards`` (per completion None, or one number for each
    reward function, which is then not called for it).  ``offcorr.data.Around`` describes further methods that it may
    have.

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
        check_rollout_func(kwargs.get("rollout_func"))
        annealed = choose_correction(args, loss)
        check_skipping(args, annealed)
        check_dump(args)
        check_best_metric(args, annealed is not None)
        check_reward_funcs(reward_funcs)
        check_reference(model, args, kwargs.get("peft_config", rest[5:] or None))
        if kwargs.get("environment_factory") is None:  # else the environment may own the prompts
            check_data("train_dataset", rest[0] if rest else kwargs.get("train_dataset"), _prompts(args), steps=True)
            check_data("eval_dataset", kwargs.get("eval_dataset"))
        self.correction_step = make_step(self, args, annealed)
        self._corrects = annealed is not None
        if not rest:  # else rollout_func may be among them
            self._check_sources(args, kwargs.get("rollout_func"))
        self._computed_loss = False
        """This class has computed a loss, which a subclass could do without."""
        self._kept_forwards: list[tuple] | None = None
        self._sampled: dict[str, list] = {}
        self._reports_logp = False
        """The last result of ``rollout_func`` had the sampler's log-probs."""
        self._leaves_unscored = False
        """TRL's next forward pass would compute ``old_per_token_logps``, which nothing reads."""
        self._recorded_rewards: list[Any] | None = None
        self._groups_made = 0
        self._sampler: Any = None
        self._warned_idle = self._reported = False
        self._warned: set[str] = set()
        """Warnings of the log that this run has given."""
        super().__init__(model, reward_funcs, args, *rest, **kwargs)
        self._check_sources(self.args, self.rollout_func)
        if self._corrects:
            self._check_settings()
            self._take_over_vllm_correction()
        self._check_ess_lr()
        if self.rollout_func is not None:
            check_rollout_func(self.rollout_func)
            if hasattr(self.rollout_func, "attach"):
                self.rollout_func.attach(self)
            self._sampler = self.rollout_func
            self.rollout_func = self._remember_sampled(self.rollout_func)
        self._check_sampling()
        self.dumps = make_dumps(self)
        self._callback = StepCallback(self)
        self.add_callback(self._callback)
        self.convex_kl = ConvexKL.of(getattr(self.args, "convex_kl", None), self.beta)
        if self.convex_kl is not None:
            self.convex_kl.attach(self)

    @property
    def correction(self) -> offcorr.Correction | None:
        """The correction in force; None: TRL's own loss."""
        return self.correction_step.correction if self._corrects else None

    @property
    def anchor(self) -> Anchor | None:
        """The anchor that supplied the last batch's ``old_logp``; under TRL's own loss that of the metrics alone.

        Before the first batch, the one that was asked for, else the default of this library's samplers, of vLLM or of
        TRL's own generation; None: the default of another ``rollout_func`` depends on what it will return.
        """
        found = self.correction_step.anchor_in_force or self.correction_step.anchor or self._expected_anchor()
        return of_metrics(found, not self._corrects)

    def _expected_anchor(self) -> Anchor | None:
        """The default anchor of the first batch, where the sampler is one whose log-probs are known."""
        known = type(self._sampler) in (OffPolicy, VLLMServer)
        if self._generates_elsewhere(self._sampler) and not known:
            return None
        return default_anchor(self.correction, old_logp=known, rollout_logp=known or self.use_vllm)

    def _generates_elsewhere(self, rollout_func: Any) -> bool:
        """Whether a ``rollout_func`` or a subclass samples, of whose log-probs nothing is known before they come."""
        own = type(self).__mro__[: type(self).__mro__.index(GRPOTrainer)]
        return rollout_func is not None or any(name in vars(cls) for cls in own for name in GENERATION)

    @property
    def _mode(self) -> str:
        return "train" if self.model.training else "eval"

    # The loss

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """TRL's, of one micro-batch.

        Raises:
            RuntimeError: a subclass computes the loss without this class's; raised before the first update, but under
                DeepSpeed, whose backward pass may make it.
        """
        loss = super().training_step(*args, **kwargs)
        if not self._computed_loss and not getattr(self, "use_liger_kernel", False):  # TRL's loss in liger's kernel
            asked = f"loss {self.correction.method!r}" if self._corrects else "the metrics, the monitor and the dump"
            raise RuntimeError(
                f"{type(self).__name__} computes the loss without calling super()._compute_loss(model, inputs): "
                f"{asked} would never run. Call it there, or derive the class from trl.GRPOTrainer"
            )
        return loss

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """The loss of one micro-batch, divided for gradient accumulation as TRL divides it."""
        self._computed_loss = True
        step, train = self.correction_step, self._mode == "train"
        if train and self.convex_kl is not None:
            inputs = self.convex_kl.shared(inputs)
        if not (train and step.in_progress):
            window = (self._batch(part, self._forward(model, part)) for part in self._window(inputs))
            step.begin(window, done=share_done(self), train=train)
        last = {"last": self.accelerator.sync_gradients, "on_policy": self._on_policy(inputs)}
        if not self._corrects:
            with self._one_forward() as kept:
                loss = super()._compute_loss(model, inputs)
            batch = self._batch(inputs, Forward(*kept[0]))
            step.observe(batch, ids=padded_ids(inputs), **last)
            step.add(lag_metrics(self, inputs, batch))
            dump_padded(self, inputs, batch)
            self._tell_trained(inputs, batch)
            return loss

        self._count(inputs)
        if self._skips_dead:
            inputs = self._without_dead(inputs)
        with self._one_forward():
            batch = self._batch(inputs, self._forward(model, inputs))
            loss = step.loss(batch, ids=padded_ids(inputs), **last).loss
            step.add(lag_metrics(self, inputs, batch))
            dump_padded(self, inputs, batch)
            self._tell_trained(inputs, batch)
            if self._has_other_terms:
                loss = loss + self._other_terms(model, inputs, batch, loss.detach())
        return loss

    def _tell_trained(self, inputs: dict[str, Any], batch: offcorr.Batch) -> None:
        """Tell a sampler that asks for it how far the micro-batch is from its recorded log-probs."""
        recorded = inputs.get("old_logp", inputs.get("sampling_per_token_logps"))
        if self._mode == "train" and recorded is not None and "place" in inputs:
            log_ratio = torch.where(batch.mask.bool(), batch.logp.detach() - recorded, 0).nan_to_num()
            self._sampler.trained(inputs["place"], log_ratio.sum(1))

    def _window(self, inputs: dict[str, Any]) -> list[dict[str, Any]]:
        """The micro-batches of the optimizer step that begins, or the one of an evaluation."""
        if self._mode == "eval":
            return [inputs]
        start = self._step % self.args.steps_per_generation
        return self._buffered_inputs[start : start + self.args.gradient_accumulation_steps]

    def _count(self, inputs: dict[str, Any]) -> None:
        """Tokens and sequences of the optimizer step, as TRL takes them: the generation batch's tokens, scaled to one
        step, and this micro-batch's sequences times the micro-batches and ranks.
        """
        processes, tokens = self.accelerator.num_processes, inputs["num_items_in_batch"]
        sequences = len(inputs["advantages"]) * processes
        if self._mode == "train":
            accumulation = self.current_gradient_accumulation_steps
            tokens, sequences = tokens * accumulation / self.args.steps_per_generation, sequences * accumulation
        self.correction_step.count(tokens=tokens, sequences=sequences, averaged_over=processes, estimated=True)

    def _on_policy(self, inputs: dict[str, Any]) -> Tensor | None:
        """[] bool, where the sampler gave no versions: the samples were generated at the current step."""
        if "rollout_version" in inputs or getattr(self.args, "ess_base", None) != AUTO:
            return None
        return (inputs["generated_at"] == self.state.global_step).all()

    def _warn_if_all_cut_off(self, completion_mask: Tensor) -> None:
        trained = self.accelerator.gather(completion_mask.any(1))
        if not trained.any():
            warn_of_cut_off(self, self.state.global_step + 1, f"{len(trained)} completions of a generation")

    @property
    def _skips_dead(self) -> bool:
        return getattr(self.args, "skip_dead_sequences", False) and self._mode == "train"

    def _without_dead(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The micro-batch without the sequences whose gradient is known to be 0."""
        known = inputs.get("old_logp", inputs.get("sampling_per_token_logps"))
        placeholder = torch.zeros_like(inputs["completion_ids"], dtype=torch.float32) if known is None else known
        with patched(self, _reported=True):  # placeholders have nothing to report
            batch = self._batch(inputs, Forward(placeholder.nan_to_num(), torch.zeros_like(placeholder)))
        rows = rows_kept(dead_sequences(self.correction_step.correction, batch))
        skipped = rows.new_tensor([len(inputs["advantages"]) - len(rows)] * 2, dtype=torch.float64)
        self.correction_step.add(offcorr.Metrics({SKIPPED: Mean(skipped)}))
        return only(inputs, rows)

    def _forward(self, model: Any, inputs: dict[str, Any], compute_entropy: bool = True) -> Forward:
        """TRL's forward over the completion tokens, with the arguments that this version of it takes."""
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
        if self._corrects and self.top_entropy_quantile < 1.0:
            # TRL's option: only the tokens of highest entropy are trained on.
            uncertain = self.get_high_entropy_mask(forward.entropy, mask, 1 - self.top_entropy_quantile)
            advantages = advantages.view(len(advantages), -1) * uncertain

        refuse_nan_model(self, logp, mask)
        supplied = inputs.get("old_logp") if getattr(self.args, "anchor", None) in (None, "snapshot") else None
        version = inputs.get("rollout_version")
        if version is not None and version.ndim == 1:
            version = version[:, None].expand_as(mask)
        batch = offcorr.Batch(
            logp=logp,
            advantages=advantages,
            mask=mask,
            old_logp=filled(supplied, logp, inputs.get("origin")),
            rollout_logp=inputs.get("sampling_per_token_logps"),
            rewards=inputs.get("rewards"),
            group_ids=inputs.get("group_ids"),
            entropy=forward.entropy.detach(),
            rollout_version=version,
            trainer_version=None if version is None else self.state.global_step,
            origin=inputs.get("origin"),
        )
        recomputed = inputs.get("old_per_token_logps")
        batch = self.correction_step.place(batch, partial(self._score, inputs), recomputed)
        if self._mode == "train" and not self._reported:
            self._reported = True
            # Among sequences that were picked by their reward -logp - entropy need not have the mean 0.
            tested = batch.replaced(entropy=None) if self._skips_dead else batch
            report_first_batch(self, tested, self._sampler_name, padded_ids(inputs))
        if batch.old_logp is None:
            self._warn_if_idle(inputs)
        return batch

    @property
    def _sampler_name(self) -> str:
        if self._sampler is None:
            return "vLLM" if self.use_vllm else "TRL's own generation"
        return getattr(self._sampler, "__name__", type(self._sampler).__name__)

    def _score(self, inputs: dict[str, Any], module: Any) -> Tensor:
        """[B, T]: the batch's log-probs under another module, by a forward pass that is not kept."""
        if "forward" not in vars(base_of(module)):  # not patched by TRL yet
            give_fused_head(module, self)
        with patched(self, _kept_forwards=None):
            return self._forward(in_mixed_precision(self.accelerator, module), inputs, compute_entropy=False).logp

    # What TRL adds to the policy loss: KL to a reference, entropy bonus, MoE auxiliary loss

    @property
    def _has_other_terms(self) -> bool:
        return self.beta != 0.0 or self._entropy_bonus_enabled or self.aux_loss_enabled

    def _other_terms(self, model: Any, inputs: dict[str, Any], batch: offcorr.Batch, policy_loss: Tensor) -> Tensor:
        """TRL's own loss with advantage 0, on the same forward pass: all of its terms but the policy's.

        TRL logs ``policy_loss``, policy term and KL, beside an entropy bonus: its KL is here, the other is added.
        """
        logp = batch.logp.detach()
        old_logp = logp
        if getattr(self.args, "use_bias_correction_kl", False) and batch.old_logp is not None:
            # The KL is weighted by this ratio; clamped, since an overflow times the advantage 0 would be NaN, as would
            # a NaN under the mask.
            old_logp = logp - (logp - batch.old_logp).nan_to_num(nan=0.0).clamp(-20.0, 20.0)
        inputs = {
            **inputs,
            "advantages": torch.zeros_like(inputs["advantages"]),
            "old_per_token_logps": old_logp,
        }
        # TRL's loss of the same aggregation; dr_grpo is sums over a constant length, which may be 1.
        correction = self.correction_step.correction
        loss_type, length = {
            "token-mean": ("dapo", None),
            "seq-mean-token-mean": ("grpo", None),
            "seq-mean-token-sum": ("dr_grpo", 1),
            "seq-mean-token-sum-norm": ("dr_grpo", correction.max_length),
        }[correction.aggregate]
        with patched(self, loss_type=loss_type, max_completion_length=length or self.max_completion_length):
            loss = super()._compute_loss(model, inputs)
        logged = self._metrics[self._mode]
        for name in [*logged]:
            if name.startswith("clip_ratio/"):
                del logged[name]  # meaningless at advantage 0
        if self._entropy_bonus_enabled:
            # As TRL logs it: a sequence mean before it is divided for gradient accumulation, a token mean after.
            if AGGREGATIONS[correction.aggregate].unit == "sequences" and self._mode == "train":
                policy_loss = policy_loss * self.current_gradient_accumulation_steps
            logged["policy_loss"][-1] += self.accelerator.gather(policy_loss).nanmean().item()
        return loss

    @contextmanager
    def _one_forward(self) -> Iterator[list[tuple]]:
        """Context in which the model runs once: the first result of TRL's forward is returned again."""
        self._kept_forwards = []
        try:
            yield self._kept_forwards
        finally:
            self._kept_forwards = None

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> tuple:
        if self._kept_forwards:
            return self._kept_forwards[0]
        if self._leaves_unscored:
            self._leaves_unscored = False
            return None, None, None
        choice = getattr(self.args, "logprob_head", "auto")
        if choice == "auto" and not self._corrects:
            choice = "trl"  # TRL's own loss to the last bit
        if choice == "exact":
            model = counting_real_tokens(model)
        with lm_head(choice, self.accelerator.device):
            result = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        if self._kept_forwards is not None:
            self._kept_forwards.append(result)
        return result

    # The columns that travel with the batch

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """TRL's output, with [B] ``rewards``, ``group_ids`` and ``generated_at``, and the sampler's own columns."""
        self._sampled, self._recorded_rewards = {}, None
        exchanges = self._mode == "train" and hasattr(self._sampler, "exchange")
        if exchanges:
            inputs = self._sampler.exchange(inputs, self)
        output = super()._generate_and_score_completions(inputs)
        self._leaves_unscored = False
        ours = len(output["advantages"])
        first = self.accelerator.process_index * ours
        width = output["completion_ids"].size(1)
        device = output["completion_ids"].device
        size = self.num_generations if self._mode == "train" else self.num_generations_eval

        # Rows of a group are neighbours in the global batch; ids never repeat, so an optimizer step may span batches.
        row = torch.arange(first, first + ours, device=device)
        output["group_ids"] = self._groups_made + row // size
        self._groups_made += -(-ours * self.accelerator.num_processes // size)
        rewards = self._weighted_rewards(size)
        output["rewards"] = rewards[first : first + ours]
        if self._corrects and getattr(self, "multi_objective_aggregation", SUMMED) == SUMMED:
            output["advantages"] = without_rounding(output["advantages"], rewards, size, first)
        output["generated_at"] = torch.full_like(row, self.state.global_step)

        for name, rows in self._sampled.items():
            output[name] = column(name, rows, width, device)
        if self._mode == "train" and self.args.mask_truncated_completions:
            self._warn_if_all_cut_off(output["completion_mask"])
        if exchanges:
            output["place"] = row - first
            self._sampler.finished(inputs, output, self._rewards_per_function[first : first + ours], self)
        return output

    def _generate(self, *args: Any, **kwargs: Any) -> tuple:
        result = super()._generate(*args, **kwargs)
        self._leaves_unscored = self._scores_in_vain()
        return result

    def _scores_in_vain(self) -> bool:
        """Whether TRL is about to score the samples with the weights as they are, and nothing looks at the result.

        TRL does so where samples are used for more than one optimizer step.  Dumped rollouts have these log-probs.
        """
        generation = self.args.steps_per_generation * self.num_iterations
        aligned = self.args.gradient_accumulation_steps % generation == 0
        if aligned or not self._corrects or self.dumps is not None:
            return False
        reported = self._reports_logp if self.rollout_func is not None else self.use_vllm
        return not self.correction_step.reads_recomputed(old_logp="old_logp" in self._sampled, rollout_logp=reported)

    def _calculate_rewards(self, *columns: Any) -> Tensor:
        """[global B, functions]: TRL's, but for the completions whose rewards were recorded."""
        score = super()._calculate_rewards
        with patched(self, reward_funcs=[checked(function) for function in self.reward_funcs]):
            self._rewards_per_function = score_unrecorded(
                score, columns, self._recorded_rewards, len(self.reward_funcs), self.accelerator
            )
        known = self._rewards_per_function.cpu().numpy()
        if self._mode != "train":
            known = known[~np.isnan(known).all(axis=1)]
        for sentence in reward_faults(self.reward_func_names, known):
            warn_once_in_run(self, sentence)
        return self._rewards_per_function

    def _weighted_rewards(self, size: int) -> Tensor:
        """[global B]: the weighted sum that TRL computes advantages from; the group's mean where nothing was scored."""
        per_function = self._rewards_per_function
        rewards = (per_function * self.reward_weights.to(per_function.device)).nansum(dim=1)
        groups = rewards.masked_fill(per_function.isnan().all(dim=1), torch.nan).view(-1, size)
        means = groups.nanmean(dim=1, keepdim=True).nan_to_num(0.0)
        return torch.where(groups.isnan(), means, groups).flatten()

    def _remember_sampled(self, rollout_func: Callable) -> Callable:
        def remembering(prompts: list, trainer: Any) -> Mapping[str, Any]:
            training = trainer.model.training
            output = rollout_func(prompts, trainer)
            if trainer.model.training != training:  # as TRL's own generation leaves it
                trainer.model.train(training)
                warn_once_in_run(self, MODE_CHANGED)
            check_returned(output, prompts, trainer)
            if not self._reported and self._mode == "train":
                check_prompts(output, prompts, trainer)
            self._sampled = {name: output[name] for name in SAMPLED if output.get(name) is not None}
            self._recorded_rewards = output.get("recorded_rewards")
            self._reports_logp = output.get("logprobs") is not None
            if self._reports_logp:
                output = {**output, "logprobs": none_as_nan(output["logprobs"])}
            return {name: values for name, values in output.items() if name != "recorded_rewards"}

        return remembering

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Called on every start with the checkpoint to resume from; step and sampler keep their state there."""
        super()._load_optimizer_and_scheduler(checkpoint)
        self._callback.checkpoint = checkpoint
        if checkpoint is not None and hasattr(self._sampler, "restore"):
            with suppress(FileNotFoundError):  # a checkpoint from before this sampler was used
                self._sampler.restore(checkpoint)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        log_metrics(self, logs)
        super().log(logs, start_time)

    # Checks

    def _check_settings(self) -> None:
        args, correction = self.args, self.correction_step.correction
        if getattr(self, "use_liger_kernel", False):
            raise ValueError(
                "use_liger_kernel=True computes TRL's own loss inside the kernel, so "
                f"{correction.method!r} would never run: set use_liger_kernel=False"
            )
        if self.aux_loss_enabled and getattr(args, "skip_dead_sequences", False):
            raise ValueError(
                "skip_dead_sequences=True leaves sequences out of the forward pass, and the auxiliary loss of this "
                "MoE model looks at all of them: set router_aux_loss_coef=0 or leave it out"
            )
        check_steps(args, correction, self.correction_step.needs_window)
        if correction.aggregate == "sum" and self._has_other_terms:
            raise ValueError(
                "aggregate='sum' divides by nothing, and TRL's other terms (beta, the entropy bonus, the auxiliary "
                "loss) are means: take another aggregation, or set them to 0"
            )

        quantile, ratio = self.top_entropy_quantile, correction.ratio
        if (
            quantile < 1.0
            and ratio is not None
            and ratio.span in OF_SEQUENCE
            and not getattr(correction.gate, "detached", False)
        ):
            warn_on_main(self, FEWER_TOKENS.format(quantile, correction.method))

    def _check_ess_lr(self) -> None:
        """The effective sample size compares with the sampler's log-probs, or those that TRL takes before an update."""
        generates = not self._generates_elsewhere(self.rollout_func)
        generation = self.args.steps_per_generation * self.num_iterations
        if getattr(self.args, "ess_lr", None) is None or self.use_vllm or not generates:
            return
        if self.args.gradient_accumulation_steps % generation == 0:
            raise ValueError(
                f"ess_lr={self.args.ess_lr!r} compares with the sampler's log-probs, which nothing reports here, and "
                "with one optimizer step per generation every ratio is 1: sample by vLLM or a rollout_func that "
                "returns logprobs or old_logp, for instance offcorr.rollout.OffPolicy, or leave ess_lr out"
            )

    def _check_sources(self, args: Any, rollout_func: Any) -> None:
        """Log-probs that correction and anchor need must come from somewhere: TRL's own generation has none."""
        if self._generates_elsewhere(rollout_func):
            return  # seen when it returns
        anchor, vllm = getattr(args, "anchor", None), getattr(args, "use_vllm", False)
        correction = self.correction_step.correction if self._corrects else None
        if not vllm and correction is not None and "rollout_logp" in correction.needs:
            raise ValueError(
                f"loss {correction.method!r} compares with {ENGINE_MISSING}, or take a loss that needs no engine"
            )
        otherwise = "take another anchor" if self._corrects else "drop the anchor, which TRL's own loss does not read"
        if not vllm and anchor == "rollout":
            raise ValueError(f"anchor='rollout' takes {ENGINE_MISSING}, or {otherwise}")
        if anchor in ("snapshot", "log_linear"):
            key = {"snapshot": "old_logp", "log_linear": "rollout_version"}[anchor]
            raise ValueError(
                f"anchor={anchor!r} needs {key} of every completion, and there is no rollout_func to return it: pass "
                f"one, for instance offcorr.rollout.OffPolicy(), or {otherwise}"
            )

    def _check_sampling(self) -> None:
        """Warn of settings with which the sampler draws from another distribution than the trainer scores."""
        settings, own = distorting(self.args, self._sampler), self._of_model() if self._sampler is None else {}
        if self.correction_step.monitor is not None:
            self.correction_step.monitor.sampling = settings
            self.correction_step.monitor.precision = precision_of(self._sampler)
            self.correction_step.monitor.lag = lag_of(self._sampler)
        said = settings | unknown_to_trainer(self.args, self._sampler)
        if said or own:
            warn_on_main(self, distortion_warning(said, self._sampler is not None or self.use_vllm, own))

    def _of_model(self) -> dict[str, Any]:
        """The settings of the model's own generation_config that TRL's generation applies."""
        model = self.accelerator.unwrap_model(self.model)
        return of_model(getattr(self, "generation_config", None), getattr(model, "generation_config", None))

    def _take_over_vllm_correction(self) -> None:
        if self.use_vllm and self.vllm_importance_sampling_correction:
            self.vllm_importance_sampling_correction = False
            warn_on_main(
                self,
                f"{self.correction_step.correction.method!r} takes the place of TRL's vLLM importance sampling "
                "correction, which is switched off: no mismatch is corrected twice. To weight the engine's mismatch, "
                'give it an engine weight, for instance loss_kwargs={"weight": {"name": "truncate", "cap": 2.0}}',
            )

    def _warn_if_idle(self, inputs: dict[str, Any]) -> None:
        """Recomputed log-probs are those of the current weights: with one optimizer step per generation every ratio
        is 1.
        """
        window = self.args.steps_per_generation * self.num_iterations
        if self._warned_idle or not compares_staleness(self.correction):
            return
        if self.args.gradient_accumulation_steps % window:
            return
        self._warned_idle = True
        warn_on_main(
            self,
            idle_warning(
                self.correction_step.correction,
                self._sampler_name,
                supplied="old_logp" in inputs,
                reported="sampling_per_token_logps" in inputs,
                current=", as TRL's own has",
                more="More optimizer steps per generation (num_iterations, steps_per_generation) would give ratios of "
                "those steps alone, and leave a lag of the sampler out",
            ),
        )


def _prompts(args: Any) -> int:
    """The number of different prompts of a generation, on all ranks."""
    return args.generation_batch_size // args.num_generations if args is not None else 1


@cache
def forward_arguments() -> frozenset[str]:
    """Arguments of the installed TRL's forward; those for images and the like are passed through by name.

    They are read from the classes that were subclassed here, whatever ``trl.GRPOTrainer`` is by now; a method that
    passes ``**kwargs`` on leaves the names to the next class, or to the method that it calls (TRL 1.14).
    """
    for method in ("_get_per_token_logps_and_entropies", "_full_logits_logps"):
        for owner in GRPOTrainer.__mro__[1:]:
            forward = vars(owner).get(method)
            names = inspect.signature(forward).parameters if forward else {}
            if names and not any(name.kind is name.VAR_KEYWORD for name in names.values()):
                return frozenset(names)
    raise RuntimeError("this TRL has no _get_per_token_logps_and_entropies")
