"""A trainer's ``correction_step``: built from its configuration, tied to its run by one callback."""

from __future__ import annotations

import logging
import math
import warnings
import weakref
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn
from transformers import TrainerCallback

import offcorr
from offcorr.batch import ABOVE_ZERO, above_zero
from offcorr.diagnose import Record, records_of
from offcorr.folders import check_writable
from offcorr.metrics import Metrics
from offcorr.stages.checks import outside, warn_once
from offcorr.training import schedules
from offcorr.training.alarms import MismatchError, write_dump
from offcorr.training.anchors import Anchor, make_anchor
from offcorr.training.ess_lr import ESSLearningRate
from offcorr.training.field_metrics import lag_series
from offcorr.training.first_batch import unscored
from offcorr.training.last_batches import Ids
from offcorr.training.monitor import Monitor
from offcorr.training.monitor_option import monitor_options
from offcorr.training.named_loss import PREFIX
from offcorr.training.origins import origin_lag
from offcorr.training.schedules import Annealed
from offcorr.training.self_test import warning
from offcorr.training.step import MONITORED, Step
from offcorr.trl.config import weights_kl
from offcorr.trl.resume import asked_for, cut_generation, differences, kept, nothing_left, save_asked
from offcorr.trl.sampling import distorting, lags, unknown_to_trainer

logger = logging.getLogger("offcorr")

UNSCORED = (
    "the sampler reported log-probs, and not one since the last log is a finite number: tokens without one count as if "
    "engine and trainer agreed, so corrections of that mismatch do nothing, and its metrics are not logged. Check the "
    "logprobs that rollout_func returns or the engine reports"
)

UNANCHORED = (
    ". They are also the anchor of the staleness ratios, each of which is 1: without them the loss corrects nothing"
)

NOT_MEASURED = (
    "Metrics over tokens with an advantage (offcorr/loss/dropped, damped, amplified, multiplier_vs_ratio, ess_after) "
    "have nothing to measure and are not logged"
)

NO_ADVANTAGE = (
    "no sequence since the last log has an advantage: the rewards of each prompt's completions are all equal, or NaN. "
    f"{NOT_MEASURED}. Check the reward functions, or take prompts that are neither always nor never solved"
)

MASKED_ADVANTAGE = (
    "no token that is trained on has an advantage since the last log, although the rewards of some prompts' "
    f"completions differ: the sequences that have an advantage are left out{{}}. {NOT_MEASURED}"
)

ADVANTAGE_ELSEWHERE = (
    "no token that is trained on has an advantage since the last log: the sequences that have one are trained on in "
    "other optimizer steps of their generation, of which it has {}, or there is none, as where the rewards of each "
    f"prompt's completions are all equal{{}}. {NOT_MEASURED}. Where frac_reward_zero_std stays near 1, check the "
    "reward functions, or take prompts that are neither always nor never solved"
)

DROPOUT = (
    "dropout is on (up to {:g}) where logp is computed: the ratios to older log-probs carry its noise, so that "
    "staleness is above 0 at lag 0, and a correction drops and damps on-policy tokens. Set disable_dropout=True, or "
    "dropout to 0 in the configurations of model and adapter"
)

ALL_DROPPED = (
    "loss {!r} dropped every token that has an advantage since the last log (offcorr/loss/dropped is 1): the gradient "
    "of its {} is 0. {}"
)

BY_THE_GATE = (
    "Widen its bounds, take a method that damps in place of dropping (minpro, offcorr:cispo), or lower the age of the "
    "samples where they are old"
)

BY_A_BOUND = "Of all tokens {:.0%} are left out by {}: widen these bounds, or mend the gap that they look at"

ALL_CUT_OFF = (
    "step {}: all {} were cut off at max_completion_length={}, and mask_truncated_completions=True leaves such "
    "completions out of the loss: no token is trained on, loss and gradient are 0. Raise max_completion_length, or set "
    "mask_truncated_completions=False"
)

STATE_FILE = "offcorr_trainer.pt"
"""The file of a checkpoint folder with the state of the ``Step``."""


def check_anchor(args: Any, loss: Annealed | None) -> tuple[str | None, dict[str, Any]]:
    """Name and options of the anchor that the ``CorrectionOptions`` of ``args`` ask for, as ``make_step`` does.

    Raises:
        ValueError: see ``make_step``.
    """
    name, options = getattr(args, "anchor", None), dict(getattr(args, "anchor_kwargs", None) or {})
    if name is None and options:
        raise ValueError(f"anchor_kwargs={options!r} goes with an anchor: name one in anchor")
    if name is not None:
        try:
            anchor = make_anchor(name, nn.Module(), **options)  # has no weights, but checks the options
        except ValueError as error:
            raise ValueError(f"anchor_kwargs: {error}") from error
        if loss is not None:
            anchor.check(loss.at(0.0))
        else:
            _check_unread_anchor(name, anchor, getattr(args, "loss_type", None))
    return name, options


def check_steps(args: Any, correction: offcorr.Correction, needs_window: bool = False) -> None:
    """Refuses a loss that has to see what is not in one optimizer step.

    Args:
        needs_window: as ``Step.needs_window``; without it a loss is looked at that compares a prompt's completions.

    Raises:
        ValueError: the step's batch may lie in two generations, or a prompt's completions in several steps.
    """
    if needs_window and args.steps_per_generation % args.gradient_accumulation_steps:
        who = repr(correction.method) if correction.couples else f"count_rejected=False of {correction.method!r}"
        raise ValueError(
            f"{who} looks at an optimizer step's whole batch before its first gradient, so a step must lie in one "
            f"generation: steps_per_generation is {args.steps_per_generation}, expected a multiple of "
            f"gradient_accumulation_steps, {args.gradient_accumulation_steps}"
        )
    if "group_ids" in correction.needs and args.steps_per_generation != args.gradient_accumulation_steps:
        raise ValueError(
            f"{correction.method!r} compares the completions of a prompt, which TRL shuffles over the steps of a "
            f"generation: steps_per_generation is {args.steps_per_generation}, expected gradient_accumulation_steps, "
            f"{args.gradient_accumulation_steps}"
        )


def make_step(trainer: Any, args: Any, loss: Annealed | None) -> Step:
    """The ``Step`` that the ``CorrectionOptions`` of ``args`` ask for; anchor and learning rate are made when a run
    begins.

    Args:
        loss: None: TRL's own loss.

    Raises:
        ValueError: options of the anchor that are wrong, or an anchor with which the loss makes no sense.
    """
    name, options = check_anchor(args, loss)
    rule = getattr(args, "ess_lr", None)

    def make_ess_lr() -> ESSLearningRate:
        own = getattr(trainer, "rollout_func", None) is None and not getattr(trainer, "use_vllm", True)
        return ESSLearningRate(trainer.optimizer, args.ess_base, rule or "sqrt", own_samples=own)

    step = Step(
        loss,
        anchor=None
        if name is None
        else lambda: make_anchor(name, trainer.accelerator.unwrap_model(trainer.model), **options),
        ess_lr=None if rule is None else make_ess_lr,
        gather=lambda vector: trainer.accelerator.gather(vector[None]),
        monitor=make_monitor(args, corrects=loss is not None),
    )
    step.says_idle = False  # see offcorr.trl.idle
    return step


def make_monitor(args: Any, corrects: bool) -> Monitor | None:
    """The monitor that ``args.monitor`` asks for; None: "off".

    Args:
        corrects: False: the loss is TRL's own, which has no weights to mask sequences with.

    Raises:
        ValueError: an unknown option, one that the loss cannot follow, or a folder that cannot be made.
    """
    given = getattr(args, "monitor", "warn")
    options = monitor_options(given)
    if options is None:
        return None
    if "folder" in options:
        check_writable("folder of monitor", options["folder"])
    monitor = Monitor(**options, temperature=getattr(args, "temperature", 1.0))
    if "folder" not in options:
        monitor.folder = Path(getattr(args, "output_dir", None) or ".", "mismatch")
    monitor.raises = False  # a checkpoint comes first
    if not corrects and any("mask" in actions for actions in monitor.actions.values()):
        raise ValueError(
            f"monitor={given!r} masks sequences, and TRL's own loss has no weights for it: name a correction in "
            f"loss_type, for instance '{PREFIX}dapo', or take another action"
        )
    return monitor


def _check_unread_anchor(name: str, anchor: Anchor, loss_type: str | None) -> None:
    """Warn of an anchor beside TRL's own loss, which does not read it; refuse one that costs a forward pass.

    Args:
        loss_type: None in the asynchronous trainer, whose loss has no name.
    """
    reason = f"anchor={name!r} goes with a correction, and TRL's own loss computes its old log-probs itself"
    known = loss_type in offcorr.available()
    instead = f"write loss_type='{PREFIX}{loss_type if known else '...'}' or drop the anchor"
    if anchor.needs_forward:
        raise ValueError(f"{reason}: {instead}")
    warnings.warn(
        f"{reason}: the anchor changes no update, only the metrics of staleness; {instead}", stacklevel=outside()
    )


def share_done(trainer: Any) -> float:
    """Share of the training that is done: 0 at its first optimizer step, 1 at its last."""
    return schedules.share_done(trainer.state.global_step, trainer.state.max_steps)


def lag_metrics(trainer: Any, inputs: dict[str, Any], batch: offcorr.Batch) -> Metrics:
    """The lag of a micro-batch without versions, counted from the weights of its generation; empty with versions.

    That is the lag of TRL's own generation, and the least that a ``rollout_func`` without versions can have; of a
    replayed sequence it is counted from the generation that sampled it.
    """
    if batch.rollout_version is not None:
        return Metrics()
    lag = (trainer.state.global_step - inputs["generated_at"])[:, None].expand_as(batch.logp).double()
    return Metrics({**lag_series(batch, lag), **origin_lag(batch, lag).data})


def _why_all_dropped(correction: offcorr.Correction, rejected: float) -> str:
    """The advice where a correction dropped every token.

    Args:
        rejected: share of the tokens that its weight and its rejection dropped.
    """
    parts = {"weight": correction.weight, "reject": correction.reject}
    bounds = " and ".join(f"{name}={stage!r}" for name, stage in parts.items() if stage is not None)
    said = [BY_A_BOUND.format(rejected, bounds)] * (rejected > 0) + [BY_THE_GATE] * (rejected < 1)
    return ". ".join(said)


def log_metrics(trainer: Any, logs: dict[str, float]) -> None:
    """Hand the metrics of ``args.log_metrics`` to TRL, to be logged; what TRL measured itself stands.

    The monitor reads them; where it stops the training, a checkpoint is saved and the loop ends after this step.
    Warns once per run, on the main process, where the engine's log-probs since the last log are all NaN or infinite,
    once where no sequence had an advantage, once where the correction dropped every token that has one, and once where
    every completion was masked as cut off.
    """
    mode = "train" if trainer.model.training else "eval"
    choice = getattr(trainer.args, "log_metrics", "short")
    step = trainer.correction_step
    if step.monitor is not None:
        step.monitor.on_main = trainer.accelerator.is_main_process
        step.monitor.learning_rate = logs.get("learning_rate")
    for name, value in _measured(trainer, mode == "train", choice).items():
        if name not in trainer._metrics[mode]:
            trainer._metrics[mode][name] = [value]
    if step.monitor is not None and step.monitor.stopped and not trainer.control.should_training_stop:
        trainer.control.should_training_stop = trainer.control.should_save = True
    if step.none_scored:
        anchored = step.anchor_in_force is not None and step.anchor_in_force.contains_rollout
        ratios = trainer.correction is not None and "old_logp" in trainer.correction.needs
        warn_once_in_run(trainer, UNSCORED + UNANCHORED if anchored and ratios else UNSCORED)
    if step.none_advantaged and mode == "train":
        warn_once_in_run(trainer, _why_no_advantage(trainer))
    if step.all_dropped and mode == "train":
        updates = "update" if getattr(trainer.args, "logging_steps", 1) == 1 else "updates"
        why = _why_all_dropped(trainer.correction, step.rejected)
        warn_once_in_run(trainer, ALL_DROPPED.format(trainer.correction.method, updates, why), "all dropped")
    if step.none_trained and mode == "train" and getattr(trainer.args, "mask_truncated_completions", False):
        warn_of_cut_off(trainer, trainer.state.global_step, "completions trained on since the last log")


def _why_no_advantage(trainer: Any) -> str:
    """The warning where no token that is trained on has an advantage."""
    args = trainer.args
    options = {
        "mask_truncated_completions (raise max_completion_length)": getattr(args, "mask_truncated_completions", False),
        "env_mask": getattr(trainer, "_sampler", None) is not None or getattr(trainer, "tools", None),
        "top_entropy_quantile": getattr(args, "top_entropy_quantile", 1.0) < 1,
    }
    masks = " or ".join(name for name, on in options.items() if on)
    once = args.gradient_accumulation_steps
    steps = -(-getattr(args, "steps_per_generation", once) // once)  # the asynchronous trainer has none
    if steps > 1:
        return ADVANTAGE_ELSEWHERE.format(steps, f", or {masks} leaves them out" * bool(masks))
    equal, rewards = (trainer._metrics["train"].get(name, []) for name in ("frac_reward_zero_std", "reward"))
    masked = any(share < 1 for share in equal) and all(map(math.isfinite, rewards))
    return MASKED_ADVANTAGE.format(f", by {masks}" * bool(masks)) if masked else NO_ADVANTAGE


def _measured(trainer: Any, train: bool, choice: str) -> dict[str, float]:
    """The metrics; their error says so where it is the model that is not finite."""
    try:
        return trainer.correction_step.metrics(train, choice)
    except ValueError as error:
        if _has_finite_weights(trainer):
            raise
        raise ValueError(
            f"the model's weights are NaN or infinite, by step {trainer.state.global_step} at the latest: {error}"
        ) from error


def refuse_nan_model(trainer: Any, logp: Tensor, mask: Tensor) -> None:
    """Raise ``ValueError`` where the model gives no finite log-prob of a micro-batch, with the step that it comes from.

    Only on a CPU, where looking costs no synchronisation; on a GPU the metrics show it when they are logged.

    Args:
        logp, mask: of the micro-batch's tokens, in one shape; the tokens that are trained on.
    """
    if logp.device.type == "cpu" and mask.any() and not logp.detach()[mask].isfinite().any():
        raise ValueError(f"no token has a finite log-prob: {_nan_model(trainer)}")


def _has_finite_weights(trainer: Any) -> bool:
    return all(bool(weight.isfinite().all()) for weight in trainer.model.parameters())


def _nan_model(trainer: Any) -> str:
    """Half a sentence on weights or logits that are not finite, since which step, and what to look at."""
    done = trainer.state.global_step
    since = f"since the update of step {done}" if done else "as they were loaded"
    if _has_finite_weights(trainer):
        return (
            f"the model's logits are NaN or infinite {since}, and its weights are finite: they overflow its precision"
        )
    advice = "look at loss and grad_norm of that step, and lower the learning rate" if done else "load other weights"
    return f"the model's weights are NaN or infinite {since}: {advice}"


def warn_of_cut_off(trainer: Any, step: int, completions: str) -> None:
    """Warn, once in a run, that ``completions`` are all masked as cut off."""
    message = ALL_CUT_OFF.format(step, completions, trainer.args.max_completion_length)
    warn_once_in_run(trainer, message, "cut off")


def warn_once_in_run(trainer: Any, message: str, subject: str = "") -> None:
    """Warn, on the main process alone, the first time in a run that the message, or any on the subject, is given."""
    if (subject or message) not in trainer._warned:
        trainer._warned.add(subject or message)
        warn_on_main(trainer, message)


def report_first_batch(trainer: Any, batch: offcorr.Batch, sampler: str, ids: Ids) -> None:
    """Log one line at a run's first batch, on the main process: loss, anchor and the engine's log-probs.

    It goes to the logger "offcorr" at the level of warnings, the lowest that is shown where nothing is configured.
    Under TRL's own loss it says that nothing is corrected here, and what is measured.  Engine log-probs that are not
    the sampler's probabilities are a warning that names what to change, or end the run on every rank (``Monitor``),
    and the batch is then written to the monitor's folder.

    Args:
        ids: the batch's token ids, called with it.

    Raises:
        MismatchError: the first batch of the main process fails the monitor's self-test.
    """
    step = trainer.correction_step
    refusal = [_report(trainer, batch, sampler) if trainer.accelerator.is_main_process else ""]
    if step.monitor is not None:
        step.monitor.tested = True
        if refusal[0]:
            records = records_of(batch, **ids(batch), step=trainer.state.global_step + 1)
            refusal[0] += _written(records, step.monitor.folder / "first_batch.jsonl")
        if broadcast_object_list(refusal)[0]:
            raise MismatchError(refusal[0])


def _written(records: list[Record], path: Path) -> str:
    """The end of a refusal, with the file of its batch; "" where that cannot be written."""
    try:
        path = write_dump(records, path)
    except OSError:
        return ""
    return f". The batch was written to {path}: offcorr diagnose {path}"


def dropout_of(model: nn.Module) -> float:
    """The largest dropout that is on in a model: of its modules, or of an option of its configuration; 0: none.

    >>> dropout_of(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))), dropout_of(nn.Dropout(0.1).eval())
    (0.1, 0.0)
    """
    if not model.training:
        return 0.0
    found = [float(module.p) for module in model.modules() if isinstance(module, nn.Dropout)]
    options = model.config.to_dict() if hasattr(model, "config") and hasattr(model.config, "to_dict") else {}
    found += [value for name, value in options.items() if "drop" in name and isinstance(value, float)]
    return max(found, default=0.0)


def _dropout(trainer: Any, batch: offcorr.Batch) -> float:
    """The dropout that is on, with a warning where there are ratios.

    A new adapter is 0, so that a first batch may not show its noise yet.
    """
    dropout = dropout_of(trainer.accelerator.unwrap_model(trainer.model))
    if dropout > 0 and (batch.old_logp is not None or batch.rollout_logp is not None):
        warn_on_main(trainer, DROPOUT.format(dropout))
    return dropout


def _report(trainer: Any, batch: offcorr.Batch, sampler: str) -> str:
    """Log the line, warn, and return the reason not to begin the training, if there is one."""
    dropout, step = _dropout(trainer, batch), trainer.correction_step
    if step.monitor is not None:
        step.monitor.dropout = dropout
    tests = step.monitor is None or step.monitor.self_test != "off"
    # At the first step there are no older weights that a sampler without versions could have used.
    current = True if batch.rollout_version is None and trainer.state.global_step == 0 else None
    found = step.semantics(batch, trainer.temperature, current) if tests else None
    rest = _unscored(trainer, batch, dropout) if tests and trainer.state.global_step == 0 else ""
    whose = "" if trainer.correction is not None else f"{trls_loss(trainer.args)}: "
    agreement = "" if found is None or found.wrong else f"; {found.sentence}"
    if found is not None and found.kind == "unknown" and found.tokens:
        agreement += ": this test is skipped, as it is made of a run's first batch alone"
    remark = trainer._sampler.remark() if hasattr(getattr(trainer, "_sampler", None), "remark") else ""
    sampler += f", {remark}" if remark else ""
    unversioned = batch.rollout_version is None and getattr(trainer, "_sampler", None) is not None
    bound = ", rollout_version is not returned: lag is a lower bound" if unversioned else ""
    if unversioned and batch.rollout_logp is None and batch.old_logp is not None and not step.compares_with_sampler:
        bound += ", and the ratios leave a lag of the sampler out, as it returns no log-probs"
    described = step.describe(batch, lags(getattr(trainer, "_sampler", None)))
    if trainer.correction is not None and batch.old_logp is not None and weights_kl(trainer.args):
        described += "; the KL term and the logged kl are weighted by the ratio to old_logp (use_bias_correction_kl)"
    logger.warning("offcorr: %s%s; sampled by %s%s%s", whose, described, sampler, bound, agreement + rest)
    if found is None or not found.wrong:
        return ""
    refusal = "" if step.monitor is None else step.monitor.refusal(found)
    if not refusal and found.kind == "probabilities":
        for name in _above_zero(batch):
            warn_once(ABOVE_ZERO.format(name))  # on a CPU the batch has said so
    elif not refusal:
        said = warning(found, {}, dropout) if step.monitor is None else step.monitor.warning(found)
        warnings.warn(said, stacklevel=outside())
    return refusal


FEW_UNSCORED = 0.01
"""Share of the tokens without a log-prob of the sampler up to which nothing is said of them."""

DRAWN_OTHERWISE = (
    "{} of the first batch have no log-prob of the sampler, and were not drawn from the trainer's distributions: their "
    "mean of -logp - entropy is {:.2g} +- {:.1g} nats in place of 0. Set the sampler's temperature= for the trainer, "
    "too, sample with top_p=1.0, top_k=0, min_p=0.0, and, where the model did not sample these tokens, as a tool's, "
    "return env_mask with 0 for them"
)


def _unscored(trainer: Any, batch: offcorr.Batch, dropout: float) -> str:
    """Half a sentence on tokens that the test leaves out, with a warning where the model did not draw them as it is."""
    left = unscored(batch)
    if left.number == 0 or (batch.rollout_logp is not None and left.share <= FEW_UNSCORED):
        return ""
    sampler = getattr(trainer, "_sampler", None)
    explained = dropout or distorting(trainer.args, sampler) or unknown_to_trainer(trainer.args, sampler)
    who = "the tokens" if batch.rollout_logp is None else f"{left.share:.0%} of the tokens"
    if left.drawn_otherwise and left.surprise is not None and not explained:
        warnings.warn(DRAWN_OTHERWISE.format(who, *left.surprise), stacklevel=outside())
    return "" if batch.rollout_logp is None else f"; {who} have no log-prob of the sampler, and were not compared"


def _above_zero(batch: offcorr.Batch) -> list[str]:
    """The fields whose log-probs are none."""
    given = {name: getattr(batch, name) for name in ("logp", "old_logp", "rollout_logp")}
    mask = batch.mask.bool()
    return [name for name, values in given.items() if values is not None and above_zero(values.detach()[mask])]


def of_metrics(anchor: Anchor | None, alone: bool) -> Anchor | None:
    """The anchor, which then says of itself whether metrics alone compare with it."""
    if anchor is not None:
        anchor.of_metrics = alone
    return anchor


def trls_loss(args: Any) -> str:
    """TRL's own loss in words; the asynchronous trainer's has no name."""
    name = getattr(args, "loss_type", None)
    return "TRL's own loss" if name is None else f"TRL's own loss {name!r}"


def warn_on_main(trainer: Any, message: str) -> None:
    """Warn, on the main process alone."""
    if trainer.accelerator.is_main_process:
        warnings.warn(message, stacklevel=outside())


class StepCallback(TrainerCallback):
    """Starts, ends and saves a trainer's ``correction_step`` with its run, its steps and its checkpoints."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = weakref.proxy(trainer)
        self._asked = asked_for(trainer)
        self.checkpoint: str | None = None
        """The folder that the run resumes from; to be set before it begins."""

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        step = self._trainer.correction_step
        step.restart(state.global_step)
        if self._trainer.dumps is not None:
            self._trainer.dumps.begin(resumed=self.checkpoint is not None)
        if self.checkpoint is None:
            return
        folder = Path(self.checkpoint)
        said = (differences(self._asked, folder), cut_generation(self._trainer, folder))
        for sentence in (*said, nothing_left(self._trainer, folder)):
            if sentence:
                warn_on_main(self._trainer, sentence)
        self._asked |= kept(folder)  # what is in force, for the next checkpoint
        path = Path(self.checkpoint, STATE_FILE)
        saved = torch.load(path, "cpu", weights_only=True) if path.exists() else {}
        for missing in step.load_state_dict(saved):
            if missing == MONITORED:
                if self._trainer.accelerator.is_main_process:
                    logger.warning("offcorr: the checkpoint %s has no state of %s, made anew", self.checkpoint, missing)
                continue
            warn_on_main(
                self._trainer,
                f"the checkpoint {self.checkpoint} has no state of {missing}, which begins with the weights loaded",
            )

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self._trainer.correction_step.end(state.global_step)
        if self._trainer.dumps is not None:
            self._trainer.dumps.end()

    def on_save(self, args, state, control, **kwargs) -> None:
        saved = self._trainer.correction_step.state_dict()
        if not args.should_save:
            return
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        save_asked(self._asked, folder)
        if saved:
            torch.save(saved, folder / STATE_FILE)
