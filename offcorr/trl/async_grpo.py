"""``AsyncGRPOTrainer``: TRL's, whose packed rows meet a correction of this library.

TRL's asynchronous trainer has one loss, a clipped ratio against the engine's log-probs, and drops what is older than
``max_staleness``.  Here any correction takes its place: the loss terms of a packed row become a packed ``Batch``, and
what TRL leaves behind on the way from the queue to the loss (rewards, groups, versions, the sampler's ``old_logp``)
comes along.  Without a GPU, ``dense_tree_attention`` stands in for FlashAttention 3.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any

import torch
import torch.nn.functional as F
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor
from transformers import AttentionInterface
from trl.experimental import async_grpo as trl_async
from trl.experimental.async_grpo import async_grpo_trainer as trl_module
from trl.experimental.async_grpo.packing import TREE_ATTENTION

import offcorr
from offcorr.stages.aggregate import AGGREGATIONS
from offcorr.training.replica import base_of
from offcorr.training.schedules import Annealed
from offcorr.trl.anchor import as_trained
from offcorr.trl.config import PREFIX, CorrectionOptions, given, named, trl_losses
from offcorr.trl.corrected import Corrected
from offcorr.trl.replaced import replaced
from offcorr.trl.state import Keeper

__all__ = ["AsyncGRPOConfig", "AsyncGRPOTrainer"]

CARRIED = "offcorr"
"""The key of a sample's ``metrics`` under which its ``Carried`` travels from the queue to the collator."""

PER_TERM = {"rewards": torch.float32, "group_ids": torch.long, "rollout_version": torch.long, "old_logp": torch.float32}
"""What the collator adds to TRL's batch: one number for each loss term, [rows, terms]."""

NO_VERSION = -1
"""Of weights that no sampler has had."""


@dataclass
class AsyncGRPOConfig(CorrectionOptions, trl_async.AsyncGRPOConfig):
    """TRL's ``AsyncGRPOConfig`` and six fields more: ``loss_type``, and the ``CorrectionOptions``, as ``GRPOConfig``.

    >>> AsyncGRPOConfig("out", loss_type="minpro", loss_kwargs={"eps_high": 0.28}, bf16=False).loss_type
    'minpro'
    """

    _VALID_DICT_FIELDS = [*trl_async.AsyncGRPOConfig._VALID_DICT_FIELDS, "loss_kwargs", "anchor_kwargs"]

    loss_type: str | None = field(
        default=None, metadata={"help": "A correction: a name of offcorr.available(). None: TRL's own loss."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_options()
        if self.loss_kwargs and self.loss_type is None:
            raise ValueError(f"loss_kwargs={self.loss_kwargs!r} goes with a correction: name one in loss_type")


class AsyncGRPOTrainer(Corrected, trl_async.AsyncGRPOTrainer):
    """TRL's ``AsyncGRPOTrainer``, with a correction for off-policy data.

    Args:
        loss: an ``offcorr.Correction``; None: the one that ``args.loss_type`` names, or TRL's own loss.
        Everything else as TRL's.  A ``rollout_worker`` may put ``CorrectedSample`` on its buffer.

    The denominator is the whole optimizer step's: its tokens (or sequences) over all micro-batches and ranks, so the
    update does not depend on how the token budget happened to split them.  (TRL's own loss divides each micro-batch
    by its own tokens, and averages.)

    Raises:
        ValueError: an unknown loss or option, or settings that contradict each other; before the model is loaded.
    """

    def __init__(
        self, model: str, *rest: Any, args: Any = None, loss: offcorr.Correction | None = None, **kwargs: Any
    ) -> None:
        self._follow(args, choose_async_correction(args, loss))
        self.trainer_version = 0
        self._window: list[dict[str, Tensor]] = []
        self._statistics: Any = None
        self._outputs: Any = None
        # TRL asks CUDA for the device's peak speed, even where there is none.
        without_cuda = {} if torch.cuda.is_available() else {"get_peak_flops_per_device": lambda *_: None}
        with replaced(trl_module, **without_cuda):
            super().__init__(model, *rest, args=args, **kwargs)
        if self.accelerator.device.type == "cpu":
            AttentionInterface.register(TREE_ATTENTION, dense_tree_attention)
        if self.rollout_queue is not None:
            self.rollout_queue = Labelled(self.rollout_queue)
        self.add_callback(Keeper(self))

    # The loss

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """The loss of one micro-batch, its part of the whole step's mean."""
        if self.correction is None:
            loss = super().compute_loss(self._remembering(model), inputs)
            batch = self._batch(inputs)
            self._add_metrics(offcorr.metrics.measure(batch), batch)
            self._scale_learning_rate(batch, inputs)
            return loss

        self._anneal()
        statistics = self._window_statistics(model)
        # TRL's compute_loss for its metrics and accounts; the forward inside it is the one that is trained.
        with torch.no_grad():
            super().compute_loss(self._remembering(model), inputs)
        batch = self._batch(inputs)
        out = self.correction(batch, denominator=self._denominator(), statistics=statistics)
        self._add_metrics(out.metrics, batch)
        self.anchor.watch(self.correction, batch, out.coefficient)
        self._scale_learning_rate(batch, inputs)
        loss = out.loss
        if self.aux_loss_enabled:
            share = self.router_aux_loss_coef / self.current_gradient_accumulation_steps
            loss = loss + share * self._outputs.aux_loss
        return loss

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list, Any]:
        """TRL's micro-batches of one optimizer step, remembered."""
        self._window, items = super().get_batch_samples(*args, **kwargs)
        self._statistics = None
        return self._window, items

    def _denominator(self) -> Tensor:
        """Tokens or sequences of the whole step; gradients of ranks are averaged, so a rank's share of them."""
        counted = {"tokens": "global_n_tokens", "sequences": "global_n_sequences"}
        name = counted[AGGREGATIONS[self.correction.aggregate].unit]
        total = sum(part[name][0].to(self.accelerator.device) for part in self._window)
        return total.clamp(min=1) / self.accelerator.num_processes

    def _window_statistics(self, model: Any) -> offcorr.Statistics | None:
        """Statistics of the step's whole batch, all ranks, by one forward pass ahead; None where none are needed."""
        if all(stage.statistics is None for stage in self.correction.stages.values()):
            return None
        if self._statistics is None:
            parts: list[Any] = []
            for part in self._window:
                inputs = self._prepare_inputs(part)
                with torch.no_grad():
                    self._outputs = model(**self._model_inputs(inputs))
                    parts.append(self.correction.statistics(self._batch(inputs)))
            self._statistics = reduce(offcorr.Statistics.merge, parts).all_reduce(
                gather_object, self.accelerator.device
            )
        return self._statistics

    def _remembering(self, model: Any) -> Callable[..., Any]:
        """The model's forward, with gradients in any case; what comes out is kept."""

        def forward(**inputs: Any) -> Any:
            with torch.enable_grad():
                self._outputs = model(**inputs)
            return self._outputs

        return forward

    def _model_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """What TRL's compute_loss passes to the model, asked of it."""
        asked: dict[str, Any] = {}

        def ask(**kwargs: Any) -> Any:
            asked.update(kwargs)
            raise _Asked

        try:
            super().compute_loss(ask, inputs)
        except _Asked:
            return asked
        raise RuntimeError("TRL's compute_loss did not call the model")

    # The batch

    def _batch(self, inputs: dict[str, Any]) -> offcorr.Batch:
        """The loss terms of this rank's row, as a packed batch."""
        logp = self._outputs.log_probs.flatten()
        batch = packed_batch(inputs, logp, self._outputs.entropy.flatten().detach(), self.trainer_version)
        old_logp = batch.old_logp
        if old_logp is not None and not old_logp.isfinite().all():  # the worker supplied none
            old_logp = None
        columns = {
            "old_logp": old_logp,
            "sampling_per_token_logps": batch.rollout_logp,
            "rollout_version": batch.rollout_version,
        }
        supplied = {name: column for name, column in columns.items() if column is not None}
        return self.anchor.place(batch, self.correction, supplied, partial(self._score, inputs))

    def _score(self, inputs: dict[str, Any], module: Any) -> Tensor:
        """[M]: the loss terms' log-probs under another module."""
        terms = inputs["token_index"][inputs["token_index"] >= 0]
        return as_trained(self, module, _give_head)(**self._model_inputs(inputs)).log_probs.flatten()[terms]

    def _versions(self, batch: offcorr.Batch, inputs: dict[str, Any]) -> tuple[Tensor, int]:
        sampled: Any = batch.rollout_version
        # Versions count weight syncs; what is trained between two of them no sampler has had.
        synced = self.state.global_step % self.args.weight_sync_steps == 0
        return sampled, self.trainer_version if synced else NO_VERSION

    def get_train_dataloader(self) -> Any:
        """TRL's, whose collator also lays out what a correction needs.

        TRL looks at a sample's age when it reads it, and Accelerate reads a micro-batch ahead, over an optimizer step:
        the reader's limit is one less, so that ``max_staleness`` holds where the sample is trained on.
        """
        with replaced(trl_module, DataCollatorForRollout=CarryingCollator):
            loader = super().get_train_dataloader()
        if self._rollout_dataset is not None:
            if not self.args.max_staleness:
                warnings.warn(
                    "max_staleness=0 cannot hold: a micro-batch is read ahead of the weight update before it, so some "
                    "samples are trained on at a lag of 1 (offcorr/staleness/lag_max)",
                    stacklevel=2,
                )
            self._rollout_dataset.max_staleness = max(self.args.max_staleness - 1, 0)
        return loader

    def _sync_weight(self) -> None:
        """TRL's, after which every rank knows the version; TRL tells the first alone."""
        super()._sync_weight()
        self.trainer_version = broadcast_object_list([self.model_version])[0]


class _Asked(Exception):
    """Raised in place of a forward pass."""


def _give_head(module: Any, trainer: Any) -> None:
    """TRL's head of a trained model, for log-probs alone."""
    trl_module.add_fused_lm_head(base_of(module), temperature=trainer.temperature)


def choose_async_correction(args: Any, loss: offcorr.Correction | None = None) -> Annealed | None:
    """The correction, over training, that ``loss=`` or the config asks for; None: TRL's own loss.

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
        annealed = named(PREFIX + name if name in trl_losses() else name, args)
    if annealed.schedules and args.max_steps <= 0:
        raise ValueError(
            f"{list(annealed.schedules)} of {name!r} runs over the training, and where it ends by num_train_epochs its "
            "length in steps is not known before: say max_steps, or give a number in loss_kwargs"
        )
    correction = annealed.at(0.0)
    if not correction.count_rejected:
        raise ValueError(
            "count_rejected=False divides by what was kept, which no micro-batch and no rank knows of the others: "
            "leave it out in training with TRL"
        )
    if "group_ids" in correction.needs:
        warnings.warn(
            f"{correction.method!r} compares the completions of a prompt: it sees those that reached the same "
            "optimizer step, which need not be all",
            stacklevel=3,
        )
    return annealed


# -- from the queue to the loss --------------------------------------------------------------------------------


@dataclass(slots=True)
class CorrectedSample(trl_module.RolloutSample):
    """TRL's sample, and what a worker with the sampling weights at hand can add.

    old_logp: [L] log-probs (nats) under the weights that sampled, in the trainer's precision; 0 off the completion.
    """

    old_logp: Any = None


@dataclass
class Carried:
    """What TRL's queue reader would leave behind of a sample."""

    reward: float
    rollout_version: int
    old_logp: Any


class Labelled:
    """A rollout queue whose samples carry a ``Carried``.

    TRL's reader hands on five fields by name, and of those ``metrics`` is the one with room.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def get(self, *args: Any, **kwargs: Any) -> Any:
        sample = self.inner.get(*args, **kwargs)
        carried = Carried(
            sample.metrics.get("reward", torch.nan), sample.model_version, getattr(sample, "old_logp", None)
        )
        return dataclasses.replace(sample, metrics={**sample.metrics, CARRIED: carried})

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class CarryingCollator(trl_module.DataCollatorForRollout):
    """TRL's collator, and ``PER_TERM`` laid out as TRL lays out its advantages; ``global_n_sequences`` beside them."""

    def torch_call(self, examples: list[Any]) -> dict[str, Any]:
        (rows,) = examples
        carried = [[sample["metrics"].pop(CARRIED) for sample in row.samples] for row in rows]
        batch = super().torch_call(examples)
        for name, dtype in PER_TERM.items():
            laid_out = torch.zeros(batch["token_index"].shape, dtype=dtype)
            for place, row, extras in zip(laid_out, rows, carried, strict=True):
                terms = [term for pair in zip(row.samples, extras, strict=True) for term in _terms(name, *pair)]
                place[: len(terms)] = torch.tensor(terms, dtype=dtype)
            batch[name] = laid_out
        sequences = sum(len(row.samples) for row in rows)
        batch["global_n_sequences"] = torch.full((self.num_processes,), float(sequences))
        return batch


def _terms(name: str, sample: dict[str, Any], carried: Carried) -> list[float]:
    """One number for each of the sample's loss terms, in the order of ``TreeRow.pack``."""
    trained = sample["completion_mask"][1:].astype(bool)
    if name == "old_logp":
        return [torch.nan] * int(trained.sum()) if carried.old_logp is None else carried.old_logp[1:][trained].tolist()
    value = {
        "rewards": carried.reward,
        "rollout_version": carried.rollout_version,
        "group_ids": sample["group_id"],
    }[name]
    return [value] * int(trained.sum())


def packed_batch(
    inputs: dict[str, Any], logp: Tensor, entropy: Tensor | None = None, version: int | None = None
) -> offcorr.Batch:
    """A rank's packed row, as TRL's collator lays it out, as a packed ``Batch``.

    A row forwards what its samples share once, so its S samples have M loss terms over N forwarded tokens; a term
    points at the token that predicts it.  The terms of a sample are neighbours, and are its sequence here: all M are
    valid.  Where a sample's consecutive terms are not consecutive tokens, a tool has spoken: a new turn begins.

    Args:
        inputs: with a leading dimension of 1; of ``PER_TERM`` what there is.
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
    extra = {name: inputs[name][terms] for name in PER_TERM if name in inputs}
    # Of a sequence with no terms there is nothing to read; its reward and group multiply nothing.
    first = starts.clamp(max=max(len(index) - 1, 0))
    per_sequence = {name: extra.pop(name)[first] for name in ("rewards", "group_ids") if name in extra}
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
    """TRL's ``tree_attention`` by a dense [N, N] mask and torch's own attention: for CPUs, and to check the other.

    Every segment of the trie sees the tokens on its path from the root: [1, heads, N, width] to [1, N, heads, width].
    """
    if softcap:
        raise ValueError(f"softcap is {softcap}, which torch's attention does not apply; this model needs a GPU")
    n = query.shape[2]
    seen = torch.zeros(n, n, dtype=torch.bool, device=query.device)
    starts, paths = tree_cu_seqlens_q.tolist(), tree_cu_seqlens_k.tolist()
    for q0, q1, k0, k1 in zip(starts, starts[1:], paths, paths[1:], strict=False):
        # A segment's own tokens are the end of its path, so its first token's place on it is (path - segment).
        place = torch.arange(k1 - k0, device=query.device)
        ahead = place + (q1 - q0) - (k1 - k0) - torch.arange(q1 - q0, device=query.device)[:, None]
        visible = ahead <= 0
        if sliding_window:
            visible &= ahead > -sliding_window
        seen[q0:q1, tree_kv_index[k0:k1]] = visible
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=seen, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )
    return out.transpose(1, 2), None
