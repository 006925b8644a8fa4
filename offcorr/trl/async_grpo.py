"""``AsyncGRPOTrainer``: TRL's, with corrections on its packed rows.

TRL's asynchronous trainer has one loss, a clipped ratio against the engine's log-probs, and drops samples older than
``max_staleness``.  Here any correction can take its place: the loss terms of a packed row become a packed ``Batch``,
and the columns that TRL drops between queue and loss (rewards, groups, versions, the sampler's ``old_logp``) are kept.
Without a GPU, ``dense_tree_attention`` replaces FlashAttention 3.  Packed rows came with TRL 1.16, which needs Python
3.11.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from accelerate.utils import broadcast_object_list
from torch import Tensor
from transformers import AttentionInterface

import offcorr
from offcorr.data.sources import warn_of_unseen_age
from offcorr.optional import require
from offcorr.rollout.sampler import in_mixed_precision
from offcorr.stages.aggregate import AGGREGATIONS
from offcorr.stages.checks import outside
from offcorr.training.anchors import Anchor
from offcorr.training.named_loss import PREFIX, TRL_LOSSES
from offcorr.training.origins import origin_ids
from offcorr.training.replica import base_of
from offcorr.training.schedules import Annealed
from offcorr.trl.config import CORRECTIONS_HELP, CorrectionOptions, given, named
from offcorr.trl.dump import check_dump, dump_row, make_dumps, row_ids
from offcorr.trl.idle import compares_staleness, idle_warning
from offcorr.trl.inputs import check_data, check_reward_funcs
from offcorr.trl.patch import patched
from offcorr.trl.rewards import function_name, reward_faults
from offcorr.trl.step import (
    StepCallback,
    log_metrics,
    make_step,
    of_metrics,
    refuse_nan_model,
    report_first_batch,
    share_done,
    warn_on_main,
    warn_once_in_run,
)

require("offcorr.trl.async_grpo", ["trl>=1.16"], extra="trl")

from trl.experimental import async_grpo as trl_async  # noqa: E402
from trl.experimental.async_grpo import async_grpo_trainer as trl_module  # noqa: E402
from trl.experimental.async_grpo.packing import TREE_ATTENTION  # noqa: E402

__all__ = ["AsyncGRPOConfig", "AsyncGRPOTrainer"]

COLUMNS = {
    "rewards": torch.float32,
    "group_ids": torch.long,
    "rollout_version": torch.long,
    "origin": torch.long,
    "old_logp": torch.float32,
}
"""The columns that the collator adds to TRL's batch: [rows, terms], one number for each loss term."""

UNKNOWN = -1
"""The origin of a sample whose worker names none."""

KEY = "offcorr"
"""The key of a sample's ``metrics`` under which its ``COLUMNS`` travel from the queue to the collator."""

UNSCORED_WORKERS = (trl_module.AsyncRolloutWorker, type(None))
"""The rollout workers that are known to supply no ``old_logp``: TRL's own, which None stands for."""


ASYNC_HELP = CORRECTIONS_HELP.replace(PREFIX, "")  # TRL's loss has no name here, so every name is this library's


@dataclass
class AsyncGRPOConfig(CorrectionOptions, trl_async.AsyncGRPOConfig):
    """TRL's ``AsyncGRPOConfig`` with ``loss_type`` and the ``CorrectionOptions``.

    >>> AsyncGRPOConfig("out", loss_type="minpro", loss_kwargs={"eps_high": 0.28}, bf16=False).loss_type
    'minpro'
    """

    _VALID_DICT_FIELDS = [*trl_async.AsyncGRPOConfig._VALID_DICT_FIELDS, "loss_kwargs", "anchor_kwargs"]

    loss_type: str | None = field(default=None, metadata={"help": f"A correction; None: TRL's own loss. {ASYNC_HELP}"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss_kwargs and self.loss_type is None:
            raise ValueError(f"loss_kwargs={self.loss_kwargs!r} goes with a correction: name one in loss_type")


class AsyncGRPOTrainer(trl_async.AsyncGRPOTrainer):
    """TRL's ``AsyncGRPOTrainer``, with a correction for off-policy data.

    Args:
        loss: an ``offcorr.Correction``; None: the one that ``args.loss_type`` names, or TRL's own loss.
        All other arguments are TRL's.  A ``rollout_worker`` may put ``CorrectedSample`` on its buffer.

    The denominator counts the whole optimizer step, its tokens (or sequences) over all micro-batches and ranks, so the
    update does not depend on how the token budget happened to split them.  (TRL's own loss divides each micro-batch
    by its own tokens, and averages.)

    Raises:
        ValueError: an unknown loss or option, or settings that contradict each other; before the model is loaded.
    """

    def __init__(
        self, model: str, *rest: Any, args: Any = None, loss: offcorr.Correction | None = None, **kwargs: Any
    ) -> None:
        annealed = choose_async_correction(args, loss)
        worker = kwargs.get("rollout_worker")
        if getattr(args, "anchor", None) == "snapshot" and isinstance(worker, UNSCORED_WORKERS):
            raise ValueError(
                f"anchor='snapshot' needs old_logp of every sample, and {UNSCORED_WORKERS[0].__name__}, TRL's own "
                "rollout_worker, has none: pass a worker that puts CorrectedSample with old_logp on its buffer, for "
                "instance offcorr.trl.local_worker.LocalWorker, or take another anchor"
            )
        check_dump(args)
        check_reward_funcs(rest[0] if rest else kwargs.get("reward_funcs"))
        if kwargs.get("environment_factory") is None:  # else the environment may own the prompts
            check_data("train_dataset", kwargs.get("train_dataset"))
        self.correction_step = make_step(self, args, annealed)
        self._corrects = annealed is not None
        self._reported = False
        self._warned: set[str] = set()
        """Warnings of the log that this run has given."""
        self.trainer_version = 0
        self._window: list[dict[str, Tensor]] = []
        self._outputs: Any = None
        # TRL asks CUDA for the device's peak speed, even where there is none.
        without_cuda = {} if torch.cuda.is_available() else {"get_peak_flops_per_device": lambda *_: None}
        with patched(trl_module, **without_cuda):
            super().__init__(model, *rest, args=args, **kwargs)
        if self.accelerator.device.type == "cpu":
            AttentionInterface.register(TREE_ATTENTION, dense_tree_attention)
        if self.rollout_queue is not None:
            own = getattr(self.rollout_worker, "reward_func", None)
            name = "of the rollout worker" if own is None else function_name(own)
            self.rollout_queue = ColumnQueue(self.rollout_queue, partial(warn_once_in_run, self), name)
        self.dumps = make_dumps(self)
        self._callback = StepCallback(self)
        self.add_callback(self._callback)

    @property
    def correction(self) -> offcorr.Correction | None:
        """The correction in force; None: TRL's own loss."""
        return self.correction_step.correction if self._corrects else None

    @property
    def anchor(self) -> Anchor | None:
        """The anchor that supplied the last batch's ``old_logp``; under TRL's own loss that of the metrics alone.

        Before the first batch, the one that was asked for; None: the default depends on what the worker will put on
        its buffer.
        """
        return of_metrics(self.correction_step.anchor_in_force or self.correction_step.anchor, not self._corrects)

    # The loss

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """The loss of one micro-batch, its share of the whole step's mean."""
        step = self.correction_step
        if not step.in_progress:
            self._begin_step(model)
        last = {"last": self.accelerator.sync_gradients, "on_policy": self._on_policy()}
        last["ids"] = partial(row_ids, inputs)
        if not self._corrects:
            loss = super().compute_loss(self._remembering(model), inputs)
            batch = self._batch(inputs)
            step.observe(batch, **last)
            dump_row(self, inputs, batch)
            return loss

        # TRL's compute_loss for its metrics; the forward pass inside it is the one that is trained.
        with torch.no_grad():
            super().compute_loss(self._remembering(model), inputs)
        batch = self._batch(inputs)
        loss = step.loss(batch, **last).loss
        dump_row(self, inputs, batch)
        if self.aux_loss_enabled:
            share = self.router_aux_loss_coef / self.current_gradient_accumulation_steps
            loss = loss + share * self._outputs.aux_loss
        return loss

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list, Any]:
        """TRL's micro-batches of one optimizer step, remembered."""
        self._window, items = super().get_batch_samples(*args, **kwargs)
        return self._window, items

    def _begin_step(self, model: Any) -> None:
        step = self.correction_step
        step.begin(map(partial(self._ahead, model), self._window), done=share_done(self))
        if self._corrects:
            names = {"tokens": "global_n_tokens", "sequences": "global_n_sequences"}
            totals: dict[str, Any] = {unit: sum(part[name][0] for part in self._window) for unit, name in names.items()}
            device = self.accelerator.device
            step.count(
                **{unit: total.to(device) for unit, total in totals.items()},
                averaged_over=self.accelerator.num_processes,
                estimated=AGGREGATIONS[step.correction.aggregate].unit == "sequences",  # see packed_batch
            )

    def _ahead(self, model: Any, part: dict[str, Any]) -> offcorr.Batch:
        """A micro-batch of the step, by a forward pass before its own."""
        inputs = self._prepare_inputs(part)
        self._outputs = model(**self._model_inputs(inputs))
        return self._batch(inputs)

    def _on_policy(self) -> Tensor | None:
        """Versions count weight syncs: between two of them, no sample is of the weights being trained."""
        synced = self.state.global_step % self.args.weight_sync_steps == 0
        return None if synced else torch.zeros((), dtype=torch.bool, device=self.accelerator.device)

    def _remembering(self, model: Any) -> Callable[..., Any]:
        """The model's forward, with gradients in any case; its outputs are kept."""

        def forward(**inputs: Any) -> Any:
            with torch.enable_grad():
                self._outputs = model(**inputs)
            return self._outputs

        return forward

    def _model_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The keywords that TRL's compute_loss passes to the model, recorded by calling it."""
        recorded: dict[str, Any] = {}

        def record(**kwargs: Any) -> Any:
            recorded.update(kwargs)
            raise _Recorded

        try:
            super().compute_loss(record, inputs)
        except _Recorded:
            return recorded
        raise RuntimeError("TRL's compute_loss did not call the model")

    # The batch

    def _batch(self, inputs: dict[str, Any]) -> offcorr.Batch:
        """The loss terms of this rank's row, as a packed batch."""
        logp = self._outputs.log_probs.flatten()
        predicts = inputs["token_index"][inputs["token_index"] >= 0]
        refuse_nan_model(self, logp[predicts], torch.ones_like(predicts, dtype=torch.bool))
        batch = packed_batch(inputs, logp, self._outputs.entropy.flatten().detach(), self.trainer_version)
        if batch.origin is not None and (batch.origin == UNKNOWN).any():
            batch = batch.replaced(origin=None)
        batch = self.correction_step.place(batch, partial(self._score, inputs))
        if not self._reported:
            self._reported = True
            report_first_batch(self, batch, type(self.rollout_worker).__name__, partial(row_ids, inputs))
            if self._corrects and getattr(self.rollout_worker, "replay", None) is not None:
                warn_of_unseen_age("WorkerReplay", self, ["old_logp", "logprobs"])
            if batch.old_logp is None and compares_staleness(self.correction):
                self._warn_idle(inputs)
        return batch

    def _warn_idle(self, inputs: dict[str, Any]) -> None:
        """Each sample is trained on once, so recomputed log-probs are those of the weights being trained."""
        warn_on_main(
            self,
            idle_warning(
                self.correction_step.correction,
                type(self.rollout_worker).__name__,
                supplied="old_logp" in inputs and bool(inputs["old_logp"].isfinite().all()),
                reported=True,
                used="sample",
                sample_with="a worker that puts CorrectedSample with old_logp on its buffer, for instance "
                "offcorr.trl.local_worker.LocalWorker",
            ),
        )

    def _score(self, inputs: dict[str, Any], module: Any) -> Tensor:
        """[M]: the loss terms' log-probs under another module."""
        if "forward" not in vars(base_of(module)):  # not patched by TRL yet
            trl_module.add_fused_lm_head(base_of(module), temperature=self.temperature)
        terms = inputs["token_index"][inputs["token_index"] >= 0]
        forward = in_mixed_precision(self.accelerator, module)
        return forward(**self._model_inputs(inputs)).log_probs.flatten()[terms]

    def get_train_dataloader(self) -> Any:
        """TRL's, whose collator also lays out ``COLUMNS``.

        TRL checks the age of a sample when it reads it, and Accelerate reads one micro-batch ahead, across an optimizer
        step: the reader's limit is one less, so that ``max_staleness`` holds where the sample is trained on.
        """
        with patched(trl_module, DataCollatorForRollout=ColumnCollator):
            loader = super().get_train_dataloader()
        if self._rollout_dataset is not None:
            if not self.args.max_staleness:
                warnings.warn(
                    "max_staleness=0 cannot hold: a micro-batch is read ahead of the weight update before it, so some "
                    "samples are trained on at a lag of 1 (offcorr/staleness/lag_max)",
                    stacklevel=outside(),
                )
            self._rollout_dataset.max_staleness = max(self.args.max_staleness - 1, 0)
        return loader

    def _sync_weight(self) -> None:
        """TRL's, after which every rank knows the version; in TRL only the first does."""
        super()._sync_weight()
        self.trainer_version = broadcast_object_list([self.model_version])[0]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Called on every start with the checkpoint to resume from; the step keeps its state there."""
        super()._load_optimizer_and_scheduler(checkpoint)
        self._callback.checkpoint = checkpoint

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        log_metrics(self, logs)
        super().log(logs, start_time)


class _Recorded(Exception):
    """Raised in place of a forward pass."""


def choose_async_correction(args: Any, loss: offcorr.Correction | None = None) -> Annealed | None:
    """The correction that ``loss=`` or the config asks for, with its schedules; None: TRL's own loss.

    TRL's asynchronous trainer has one loss without a name, so every name is this library's here.
    """
    name: Any = getattr(args, "loss_type", None)
    if loss is not None and name is not None:
        raise ValueError(f"loss={loss!r} was passed beside loss_type={name!r}: give the correction in one of two ways")
    if loss is None and name is None:
        return None
    if loss is not None:
        annealed = given(loss, args)
    else:
        annealed = named(PREFIX + name if name in TRL_LOSSES else name, args)
    if annealed.schedules and args.max_steps <= 0:
        raise ValueError(
            f"{list(annealed.schedules)} of {name!r} follows the training, whose length in steps is not known before "
            "where num_train_epochs ends it: set max_steps, or give a number in loss_kwargs"
        )
    correction = annealed.at(0.0)
    if "group_ids" in correction.needs:
        warnings.warn(
            f"{correction.method!r} compares the completions of a prompt: it sees those that reached the same "
            "optimizer step, which need not be all",
            stacklevel=outside(),
        )
    return annealed


# -- from the queue to the loss --------------------------------------------------------------------------------


@dataclass(slots=True)
class CorrectedSample(trl_module.RolloutSample):
    """TRL's sample, with what else a worker may know of it.

    old_logp: [L] log-probs (nats) under the weights that sampled, in the trainer's precision; 0 off the completion.
    origin: a name of ``offcorr.training.ORIGINS``; None: not known.  Of all samples of a worker, or of none.
    """

    old_logp: Any = None
    origin: str | None = None


class ColumnQueue:
    """A rollout queue whose samples keep the ``COLUMNS`` that TRL's reader would drop.

    The reader passes on five fields by name, and of those only ``metrics`` can hold more.

    Args:
        warn: receives a sentence on each sample whose reward is no number; None: nothing is said.
        reward_func: the name of the reward function, for workers that log one reward per sample.
    """

    def __init__(self, inner: Any, warn: Callable[[str], None] | None = None, reward_func: str = "") -> None:
        self.inner, self.warn, self.reward_func = inner, warn, reward_func

    def get(self, *args: Any, **kwargs: Any) -> Any:
        sample = self.inner.get(*args, **kwargs)
        _check_sample(sample)
        if self.warn is not None and "reward" in sample.metrics:
            for sentence in _reward_faults(sample.metrics, self.reward_func):
                self.warn(sentence)
        old_logp = getattr(sample, "old_logp", None)
        columns = {
            "rewards": sample.metrics.get("reward", torch.nan),
            "group_ids": sample.group_id,
            "rollout_version": sample.model_version,
            "origin": UNKNOWN if (origin := getattr(sample, "origin", None)) is None else origin_ids([origin])[0],
            "old_logp": None if old_logp is None else np.asarray(old_logp),
        }
        # Of an infinite reward TRL's worker makes a NaN, for which its other trainer puts 0.
        unlearnt = not np.isfinite(columns["rewards"]) and not np.isfinite(sample.advantage)
        advantage = 0.0 if unlearnt else sample.advantage
        return dataclasses.replace(sample, advantage=advantage, metrics={**sample.metrics, KEY: columns})

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def _reward_faults(metrics: dict[str, Any], reward_func: str) -> Iterator[str]:
    """Sentences on a sample's rewards; those of each function are there where the worker logs them."""
    prefix = "rewards/"
    each = {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}
    each = each or {reward_func: metrics["reward"]}
    return reward_faults([*each], np.array([[*each.values()]], dtype=float))


def _check_sample(sample: Any) -> None:
    """Raise ``ValueError`` where a worker's sample does not have one number for each token of ``input_ids``."""
    wanted = (len(sample.input_ids),)
    for name in ("completion_mask", "old_log_probs", "old_logp"):
        value: Any = getattr(sample, name, None)
        if (value is not None or name != "old_logp") and tuple(np.shape(value)) != wanted:
            raise ValueError(
                f"the rollout worker's {type(sample).__name__} has {name} of shape {tuple(np.shape(value))}, expected "
                f"{wanted}: one number for each token of input_ids"
            )


class ColumnCollator(trl_module.DataCollatorForRollout):
    """TRL's collator, which also lays out ``COLUMNS``, as TRL lays out advantages, and ``global_n_sequences``."""

    def torch_call(self, examples: list[Any]) -> dict[str, Any]:
        (rows,) = examples
        columns = [[sample["metrics"].pop(KEY) for sample in row.samples] for row in rows]
        batch = super().torch_call(examples)
        for name, dtype in COLUMNS.items():
            laid_out = torch.zeros(batch["token_index"].shape, dtype=dtype)
            for target, row, of_row in zip(laid_out, rows, columns, strict=True):
                terms = [t for sample, own in zip(row.samples, of_row, strict=True) for t in _terms(sample, own[name])]
                target[: len(terms)] = torch.tensor(terms, dtype=dtype)
            batch[name] = laid_out
        sequences = sum(len(row.samples) for row in rows)
        batch["global_n_sequences"] = torch.full((self.num_processes,), float(sequences))
        return batch


def _terms(sample: dict[str, Any], value: Any) -> list[float]:
    """One number for each of the sample's loss terms, in the order of ``TreeRow.pack``; NaN where there is none."""
    trained = sample["completion_mask"][1:].astype(bool)
    if hasattr(value, "shape"):
        return value[1:][trained].tolist()
    return [torch.nan if value is None else value] * int(trained.sum())


def packed_batch(
    inputs: dict[str, Any], logp: Tensor, entropy: Tensor | None = None, version: int | None = None
) -> offcorr.Batch:
    """A rank's packed row, as TRL's collator lays it out, as a packed ``Batch``.

    A row forwards tokens that its samples share only once, so its S samples have M loss terms over N forwarded tokens;
    a term points to the token that predicts it.  The terms of a sample are contiguous and form its sequence here, so
    all M are valid; trailing samples without terms are left out, though ``global_n_sequences`` counts them.  Where
    consecutive terms of a sample are not consecutive tokens, a tool's output lies between them and a new turn begins.

    Args:
        inputs: with a leading dimension of 1; any of ``COLUMNS``.
        logp, entropy: [N], each position's target's log-prob (nats) and its distribution's entropy.
        version: of the weights being trained.
    """
    terms = inputs["token_index"] >= 0
    index, segment = inputs["token_index"][terms], inputs["segment_id"][terms]
    logp = logp[index]
    lengths = torch.bincount(segment)
    starts = lengths.cumsum(0) - lengths
    depth = inputs["position_ids"][inputs["attention_mask"].bool()][index]
    breaks = F.pad((depth.diff() != 1) | (segment.diff() != 0), (1, 0)).long()
    extra = {name: inputs[name][terms] for name in COLUMNS if name in inputs}
    if "old_logp" in extra and not extra["old_logp"].isfinite().all():  # the worker supplied none
        del extra["old_logp"]
    # A sequence without terms has no entry to read; its reward and group multiply nothing.
    first = starts.clamp(max=max(len(index) - 1, 0))
    per_sequence = {name: extra.pop(name)[first] for name in ("rewards", "group_ids", "origin") if name in extra}
    return offcorr.Batch.packed(
        logp=logp,
        cu_seqlens=F.pad(lengths.cumsum(0), (1, 0)),
        advantages=inputs["advantages"][terms],
        mask=torch.ones_like(logp, dtype=torch.bool),
        rollout_logp=inputs["old_log_probs"][terms],
        entropy=None if entropy is None else entropy[index],
        trainer_version=version if "rollout_version" in extra else None,
        turn_ids=breaks.cumsum(0),
        **extra,
        **per_sequence,
    )


def dense_tree_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    tree_kv_index: Tensor,
    tree_cu_seqlens_q: Tensor,
    tree_cu_seqlens_k: Tensor,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """TRL's ``tree_attention`` by a dense [N, N] mask and torch's own attention, for CPUs and as a reference.

    Every segment of the trie sees the tokens on its path from the root: [1, heads, N, width] to [1, N, heads, width].
    """
    if softcap:
        raise ValueError(f"softcap is {softcap}, which torch's attention does not apply; this model needs a GPU")
    n = query.shape[2]
    seen = torch.zeros(n, n, dtype=torch.bool, device=query.device)
    starts, paths = tree_cu_seqlens_q.tolist(), tree_cu_seqlens_k.tolist()
    for q0, q1, k0, k1 in zip(starts, starts[1:], paths, paths[1:], strict=False):
        # A segment's own tokens are the end of its path, so its first token's position there is (path - segment).
        position = torch.arange(k1 - k0, device=query.device)
        ahead = position + (q1 - q0) - (k1 - k0) - torch.arange(q1 - q0, device=query.device)[:, None]
        visible = ahead <= 0
        if sliding_window:
            visible &= ahead > -sliding_window
        seen[q0:q1, tree_kv_index[k0:k1]] = visible
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=seen, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )
    return out.transpose(1, 2), None
