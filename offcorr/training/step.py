"""``Step``: what is known only for a whole optimizer step, and not for one of its micro-batches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import reduce
from typing import Any, NoReturn

import torch
from torch import Tensor

from offcorr.batch import Batch, check_batch
from offcorr.correction import Correction, Output
from offcorr.metrics import NONFINITE, Count, Gather, Mean, Metrics, measure
from offcorr.stages.aggregate import AGGREGATIONS, tokens_on_host
from offcorr.stages.checks import warn_first
from offcorr.statistics import Statistics
from offcorr.training.anchors import Anchor, Score, default_anchor
from offcorr.training.counted import Counted, warn_of_wrong_number
from offcorr.training.described import on_one_line
from offcorr.training.ess_lr import ESSLearningRate
from offcorr.training.field_metrics import FIELD, field_metrics
from offcorr.training.first_batch import batch_semantics
from offcorr.training.last_batches import Ids
from offcorr.training.logged import logged
from offcorr.training.monitor import Monitor
from offcorr.training.origins import origin_metrics, watched_metrics, watched_numbers
from offcorr.training.parts import given_or_made
from offcorr.training.schedules import Annealed
from offcorr.training.semantics import WORTH_IT, Semantics

ENGINE = "offcorr/engine/"
UNSCORED = "offcorr/loss/unscored"
NO_ADVANTAGE = "offcorr/loss/no_advantage"
DROPPED, REJECTED = "offcorr/loss/dropped", "offcorr/loss/rejected"
MASKED = "offcorr/monitor/masked"
MONITORED = "the monitor's baselines"


class Step:
    """Everything that depends on the whole optimizer step, rather than on one micro-batch; a training loop has one.

    It holds the correction in force, the statistics and the denominator of the whole optimizer step (all micro-batches
    and ranks), the anchor, the ESS learning rate, and the metrics since they were last read.

    Args:
        loss: the correction, or an ``Annealed`` one whose options follow schedules; None: the loss is computed
            elsewhere, and ``observe`` measures its batches.
        anchor: supplies ``old_logp``; None: ``default_anchor`` of each batch.  A function that makes an anchor is
            called when it is first needed, and again by ``restart``; what it makes is checked then.
        ess_lr: scales the learning rate; a function, as for ``anchor``, where the optimizer is made later.
        gather: [K] of this rank to [ranks, K], for instance ``lambda vector: accelerator.gather(vector[None])``;
            None: one rank.
        monitor: watches the mismatch: it sees the batches of training and, whenever ``metrics`` is called, the
            metrics, and acts then.  ``end`` is to be called with the number of steps.

    Raises:
        TypeError: an argument is of another type.
        ValueError: the correction and the anchor would count a ratio twice.

    A whole training loop, on a bandit whose third action pays:

    >>> import torch, offcorr
    >>> from offcorr.training import ESSLearningRate, EWMA, Step, share_done
    >>> policy = torch.nn.Embedding.from_pretrained(torch.zeros(4, 3), freeze=False)  # prompts to logits of 3 actions
    >>> optimizer = torch.optim.SGD(policy.parameters(), lr=3.0)
    >>> step = Step(offcorr.get("ppo"), anchor=EWMA(policy, window=4), ess_lr=ESSLearningRate(optimizer))
    >>> prompts, generator = torch.arange(4).repeat(8), torch.Generator().manual_seed(0)
    >>> for version in range(20):
    ...     rollout = policy(prompts).detach().log_softmax(-1)
    ...     actions = torch.multinomial(rollout.exp(), 1, generator=generator)  # [B, 1]: completions of one token
    ...     rewards = (actions[:, 0] == 2).float()
    ...     score = lambda module: module(prompts).log_softmax(-1).gather(1, actions)
    ...     batch = offcorr.Batch(logp=score(policy), rollout_logp=rollout.gather(1, actions),
    ...                           advantages=rewards - rewards.mean(), mask=actions >= 0)
    ...     step.begin(sequences=len(actions), done=share_done(version, steps=20))
    ...     step.loss(step.place(batch, score)).loss.backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    ...     step.end(version + 1)
    >>> bool(policy.weight.softmax(-1)[:, 2].min() > 0.9), step.metrics()["lr_scale"]
    (True, 1.0)

    With several micro-batches per optimizer step, ``begin`` is called once, with the number of tokens or sequences of
    all of them, and ``loss`` for each, with ``last=False`` for all but the last.  A correction that couples the batch
    (``correction.couples``), or that divides by what it keeps (``count_rejected=False``), needs ``begin(window=...)``:
    the placed batches of all micro-batches, read only then.
    """

    def __init__(
        self,
        loss: Correction | Annealed | None = None,
        *,
        anchor: Anchor | Callable[[], Anchor] | None = None,
        ess_lr: ESSLearningRate | Callable[[], ESSLearningRate] | None = None,
        gather: Gather | None = None,
        monitor: Monitor | None = None,
    ) -> None:
        if loss is not None and not isinstance(loss, Correction | Annealed):
            raise TypeError(f"loss is {loss!r}, expected an offcorr.Correction, for instance offcorr.get('dapo')")
        self._annealed = loss if isinstance(loss, Annealed) else None
        self._correction = loss.at(0.0) if isinstance(loss, Annealed) else loss
        self._anchor, self._make_anchor = given_or_made(
            "anchor",
            anchor,
            Anchor,  # type: ignore[type-abstract]
            "make_anchor('rollout')",
        )
        self._ess_lr, self._make_ess_lr = given_or_made("ess_lr", ess_lr, ESSLearningRate, "ESSLearningRate(optimizer)")
        if self._anchor is not None:
            self._checked(self._anchor)
        self._gather: Gather = gather or (lambda vector: vector[None])
        self.monitor = monitor
        if monitor is not None:
            monitor.measures = False
            if gather is not None:
                monitor.gather = gather
        self._kept: dict[str, Tensor] = {}
        self._tokens: float | Tensor | None = None
        self._ahead: int | None = None
        """The micro-batches that the window had; None: it was not read."""
        self._counted: Counted | None = None
        self._compares_first = gather is None  # a loop may never read the metrics, which compare every step
        self.statistics: Statistics | None = None
        self.denominator: float | Tensor | None = None
        self.in_progress = False
        """A step of training has begun, and its last micro-batch is still to come."""
        self.none_scored = False
        """The engine reported log-probs of the tokens whose metrics were read last, and none of them was finite."""
        self.none_advantaged = False
        """None of the tokens whose metrics were read last had an advantage."""
        self.all_dropped = False
        """The correction dropped every token with an advantage, of those whose metrics were read last, and not the
        monitor."""
        self.rejected = 0.0
        """Share of those tokens, with an advantage or not, that its weight and its rejection dropped."""
        self.none_trained = False
        """The batches whose metrics were read last, with ``entropy``, had no valid token."""
        self._begun = False
        self._train = True
        self._version = 0
        self._placed: Anchor | None = None
        self._active: Mean | None = None
        self._measured: dict[bool, Metrics] = {True: Metrics(), False: Metrics()}
        self._values: dict[bool, dict[str, list[float]]] = {True: defaultdict(list), False: defaultdict(list)}

    @property
    def correction(self) -> Correction:
        """The correction in force.

        Raises:
            ValueError: the loss is computed elsewhere.
        """
        if self._correction is None:
            raise ValueError("loss is None: this Step measures batches whose loss is computed elsewhere")
        return self._correction

    @correction.setter
    def correction(self, value: Any) -> NoReturn:
        """Refuses any value; the error says what to do instead."""
        raise AttributeError(
            "Step.correction cannot be set: it is that of a whole optimizer step, with its statistics. For an option "
            "that varies over training give Step an offcorr.training.Annealed; for any other course call a correction "
            "of your own for each step, without Step (docs/extending.md: A bound that follows the last step)"
        )

    @property
    def anchor(self) -> Anchor | None:
        """The anchor; None: ``default_anchor`` of each batch."""
        if self._anchor is None and self._make_anchor is not None:
            self._anchor = self._checked(self._make_anchor())
        return self._anchor

    def _checked(self, anchor: Anchor) -> Anchor:
        """The anchor; raises ``ValueError`` where the correction would count a ratio twice with it."""
        if self._correction is not None:
            anchor.check(self._correction)
        return anchor

    @property
    def anchor_in_force(self) -> Anchor | None:
        """The anchor that supplied the last batch's ``old_logp``; before the first, the one that was passed, None where
        that is a function which has not been called or the default, which depends on the batch.
        """
        return self._placed or self._anchor

    def describe(self, batch: Batch, lags: bool | None = None) -> str:
        """One line on a placed batch: the loss, the policy that supplies ``old_logp``, the engine's log-probs.

        The loss is named with the options that differ from its defaults.  Of a loss that is computed elsewhere the line
        says what is measured.

        Args:
            lags: the sampler's weights are older than the trainer's at some generation; None: not known.

        Raises:
            ValueError: the batch has not been placed.

        >>> import offcorr
        >>> step = Step(offcorr.get("tis"))
        >>> print(step.describe(step.place(offcorr.testing.example())))
        loss 'tis'; old_logp: the weights that sampled, as the sampler supplied it (anchor 'snapshot', by
        default); engine log-probs: yes
        """
        engine = f"engine log-probs: {'no' if batch.rollout_logp is None else 'yes'}"
        rate = ""
        if self.ess_lr is not None:
            rate = f"; learning rate scaled by the effective sample size ({self.ess_lr.rule!r})"
        policy = None if batch.old_logp is None or self._placed is None else self._placed.policy
        if self._placed is None or (batch.old_logp is None and self._placed.supplies == "sampled"):
            raise ValueError("describe(batch) takes what place() returned: step.describe(step.place(batch))")
        if self._correction is None:
            measured = "not measured, as there are no log-probs of older weights"
            if policy is not None:
                measured = f"measured against {policy}"
            return f"this library adds metrics and corrects nothing; staleness is {measured}; {engine}{rate}"
        old_logp = f"{policy or 'none, so that every staleness ratio is 1'} ({self._named_anchor(str)})"
        if self._placed is not None and self._placed.contains_rollout:
            engine += "; the engine's gap is part of staleness: no offcorr/engine series (anchor='recomputed' has them)"
            if self._placed.needs_forward:  # old_logp holds current weights, too
                engine += ", and offcorr/loss compares with the ratio to old_logp, which is not that of staleness"
        elif lags is not False and self._holds_lag(batch):
            said = "offcorr/engine holds the lag as well" if lags else "if the sampler lags, offcorr/engine holds that"
            engine += f"; {said} (anchor='snapshot' keeps the two apart)"
        scheduled = "" if self._annealed is None else ", ".join(self._annealed.schedules)
        loss = on_one_line(self._correction) + (f" ({scheduled} by a schedule)" if scheduled else "")
        if not {"old_logp", "rollout_logp"} & self._correction.needs:
            loss += ", which takes no ratio, so that neither the age of the samples nor the anchor enters it"
        return f"loss {loss}; old_logp: {old_logp}; {engine}{rate}"

    def _holds_lag(self, batch: Batch) -> bool:
        """Whether the engine series of a sampler that may lag compare it with later weights than it has."""
        return not self.compares_with_sampler and batch.rollout_logp is not None and batch.rollout_version is not None

    @property
    def compares_with_sampler(self) -> bool:
        """Whether ``old_logp`` of the batch that was placed last is of the weights that sampled."""
        return self._placed is None or self._placed.supplies == "sampled"

    def semantics(self, batch: Batch, temperature: float = 1.0, current: bool | None = None) -> Semantics | None:
        """Whether the engine's log-probs of a placed batch are the sampler's probabilities; None without them.

        Where the lag is 0, ``old_logp`` is compared with ``logp`` before.

        It copies the batch to the host, so it is for a run's first batch.

        Args:
            temperature: the trainer's.
            current: the weights being trained sampled the batch; None: where its versions say so.

        >>> import offcorr
        >>> step = Step(offcorr.get("tis"))
        >>> step.semantics(step.place(offcorr.testing.example(spread=0.0))).sentence
        "the engine's log-probs agree with the trainer's (mean |d| 0 over 48 tokens)"
        """
        sampled = self._placed is not None and self._placed.supplies == "sampled"
        found = batch_semantics(batch, temperature=temperature, sampled=sampled, current=current)
        if found is not None and self._counts_the_engine():
            found = replace(found, sentence=found.sentence.removesuffix(WORTH_IT))
        return found

    def _counts_the_engine(self) -> bool:
        """Whether the loss has the engine's ratio already, in a stage or by its anchor."""
        if self.anchor_in_force is not None and self.anchor_in_force.contains_rollout:
            return True
        loss = self._correction
        if loss is None:
            return False
        open_ratio = loss.ratio is not None and loss.ratio.mismatch is None  # it counts what the batch has
        return open_ratio or "rollout_logp" in loss.needs

    def _named_anchor(self, text: Callable[[object], str] = repr) -> str:
        chosen = self._make_anchor is not None or self._anchor is not None
        if chosen and self.anchor_in_force is None:
            return "made when first needed"
        return f"{text(self.anchor_in_force)}{'' if chosen else ', by default'}"

    def __repr__(self) -> str:
        loss = None if self._correction is None else self._correction.method
        return f"Step(loss={loss!r}, anchor={self._named_anchor()})"

    @property
    def ess_lr(self) -> ESSLearningRate | None:
        """The ESS learning rate; None: the optimizer's own rate."""
        if self._ess_lr is None and self._make_ess_lr is not None:
            self._ess_lr = self._make_ess_lr()
        return self._ess_lr

    def restart(self, version: int = 0) -> None:
        """Begin a run: an anchor or learning rate that was passed as a function is made anew, now.

        Args:
            version: of the weights that the run begins with.
        """
        anchor = self._anchor if self._make_anchor is None else self._checked(self._make_anchor())
        ess_lr = self._ess_lr if self._make_ess_lr is None else self._make_ess_lr()
        if self._ess_lr is not None and self._ess_lr is not ess_lr:
            self._ess_lr.detach()
        self._version, self._anchor, self._ess_lr = version, anchor, ess_lr
        if self.monitor is not None:
            self.monitor.restart()
        self._active, self._placed, self.in_progress, self._begun = None, None, False, False
        self._counted = None

    # -- one optimizer step --------------------------------------------------------------------------------------

    def begin(
        self,
        window: Iterable[Batch] = (),
        *,
        tokens: float | Tensor | None = None,
        sequences: float | Tensor | None = None,
        averaged_over: int = 1,
        done: float = 0.0,
        train: bool = True,
    ) -> None:
        """Begin an optimizer step, or one of evaluation.

        Args:
            window: every micro-batch of this rank, placed, under the weights the step begins with (a generator, say,
                which runs each forward pass): read, without gradient, only where ``needs_window``.
            tokens, sequences, averaged_over: as in ``count``, which may be called later instead.
            done: share of the training that is done, for options that follow a schedule (``share_done``).
            train: False: an evaluation, whose metrics are kept apart, and which no anchor and no learning rate sees.
        """
        self._train = self.in_progress = train
        self._begun = True
        if self._annealed is not None and self._annealed.schedules:
            self._correction = self._annealed.at(done)
            for name, value in self._annealed.values(done).items():
                self._values[train][f"offcorr/schedule/{name}"] = [value]
        self.statistics = self.denominator = self._tokens = self._ahead = None
        self._counted = Counted() if train else None
        if self.needs_window:
            self._look_ahead(window)
        if tokens is not None or sequences is not None or self._kept:
            self.count(tokens=tokens, sequences=sequences, averaged_over=averaged_over)

    @property
    def needs_window(self) -> bool:
        """Whether ``begin`` reads ``window``: the correction couples the batch, or divides by what it keeps."""
        return self._correction is not None and (bool(self._correction.couples) or self._correction.divides_by_kept)

    @torch.no_grad()
    def _look_ahead(self, window: Iterable[Batch]) -> None:
        """The statistics and the kept units of the whole step, over all micro-batches and ranks."""
        correction = self.correction
        batches = list(window) if correction.divides_by_kept else window
        self._kept = {}
        if correction.couples:
            parts: list[Any] = [correction.statistics(batch) for batch in batches]
            self._ahead = len(parts)
            if parts:
                self.statistics = reduce(Statistics.merge, parts).all_reduce(self._gather)
        if correction.divides_by_kept and batches:
            units = [correction.kept_units(batch, self.statistics) for batch in batches]
            self._ahead, kept = len(units), self.total(torch.stack(units).sum(0))
            self._kept = {"tokens": kept[0], "sequences": kept[1]}
        if self.statistics is None and not self._kept:
            reason = repr(correction.method) if correction.couples else f"count_rejected=False of {correction.method!r}"
            raise ValueError(f"window is empty, but {reason} needs the batches of the whole optimizer step")

    def count(
        self,
        *,
        tokens: float | Tensor | None = None,
        sequences: float | Tensor | None = None,
        averaged_over: int = 1,
        estimated: bool = False,
    ) -> None:
        """Set the denominator of the losses that follow.

        Args:
            tokens, sequences: of the whole optimizer step, over all micro-batches and ranks (``total`` sums over
                ranks); which of the two is needed depends on the correction's aggregation.  With
                ``count_rejected=False`` the kept ones are known from the window, and take their place.  ``metrics``
                warns once where the micro-batches had another number, over all ranks by ``gather``.
            averaged_over: number of losses that the framework averages: the ranks where it averages gradients over
                them, times the micro-batches where it divides the loss by their number.
            estimated: the number is not that of the micro-batches, such as a mean over several steps, as TRL's is:
                ``loss`` does not refuse a micro-batch with more tokens, and ``metrics`` does not compare it.
        """
        unit = AGGREGATIONS[self.correction.aggregate].unit
        number = ({"tokens": tokens, "sequences": sequences} | self._kept).get(unit)
        self._tokens = tokens if unit == "tokens" and not self._kept and not estimated else None
        if self._counted is not None:
            self._counted.told = None if self._kept or estimated or unit == "none" else number
            self._counted.unit = unit
        if number is None:
            if unit != "none":
                raise ValueError(f"{unit} is None, but aggregate={self.correction.aggregate!r} divides by its number")
            self.denominator = None
        elif isinstance(number, Tensor):
            self.denominator = torch.where(number > 0, number, 1) / averaged_over
        else:
            self.denominator = (number or 1) / averaged_over

    def total(self, counts: Tensor) -> Tensor:
        """[K] counts of this rank, summed over all ranks."""
        return self._gather(counts).sum(0)

    says_idle = True
    """Whether ``place`` warns, once, where no anchor gives a batch ``old_logp``; the trainers do so themselves."""

    def place(self, batch: Batch, score: Score | None = None, recomputed: Tensor | None = None) -> Batch:
        """The batch with the anchor's ``old_logp``.

        Args:
            batch: ``old_logp`` as the sampler supplied it, or None.
            score: runs the batch through a module, for anchors that hold weights.
            recomputed: log-probs that the loop computed before its first update on these samples, if it did
                (``reads_recomputed`` says whether it has to).
        """
        check_batch(batch)
        self._placed = self._anchor_of(batch.old_logp is not None, batch.rollout_logp is not None)
        placed = self._placed.place(batch, score, recomputed)
        if placed.old_logp is None and self.anchor is None and self.says_idle and self._idle:
            warn_first(
                "Step: no old_logp",
                f"old_logp is None, and {self.correction.method!r} compares with it; no anchor was chosen and place() "
                "was given no recomputed=, so every staleness ratio is 1. Pass the log-probs from before the first "
                "update on these samples as place(batch, recomputed=...), or batches with old_logp; "
                "Step(..., anchor=offcorr.training.Recomputed()) says that each sample has one update",
            )
        return placed

    @property
    def _idle(self) -> bool:
        """Whether a part of the correction looks at staleness, and does nothing while each ratio of it is 1."""
        return self._correction is not None and "staleness" in self._correction.compares

    def reads_recomputed(self, *, old_logp: bool, rollout_logp: bool) -> bool:
        """Whether ``place`` reads ``recomputed`` of batches that come with, or without, these log-probs.

        Where it does not, a loop saves a forward pass over the samples.

        >>> import offcorr
        >>> Step(offcorr.get("ppo")).reads_recomputed(old_logp=True, rollout_logp=True)
        False
        """
        return self._anchor_of(old_logp, rollout_logp).reads_recomputed

    def _anchor_of(self, old_logp: bool, rollout_logp: bool) -> Anchor:
        return self.anchor or default_anchor(self._correction, old_logp=old_logp, rollout_logp=rollout_logp)

    def loss(
        self,
        batch: Batch,
        *,
        last: bool = True,
        on_policy: Tensor | None = None,
        ids: Ids | None = None,
    ) -> Output:
        """Loss, coefficient and metrics of a micro-batch; its share of the loss of the whole optimizer step.

        Args:
            last: True for the last micro-batch before ``optimizer.step()``: no other follows until ``begin``.  An
                evaluation may have any number of micro-batches.
            on_policy: as in ``ESSLearningRate.add``.
            ids: the batch's token ids, called where a monitor needs its records; as in ``Monitor.keep``.

        Raises:
            MismatchError: the batch is the first, and fails the monitor's self-test.
            RuntimeError: no step has begun since the last micro-batch of the one before, or an evaluation has, and
                the batch is trained on: it has a graph.
            ValueError: the number that the aggregation divides by was not given; or it is of tokens, and the batch
                alone has more.  This is read where both the mask and the number are on the host: a mask on a CPU, and
                a number or a CPU tensor.  On a device it would synchronise.
        """
        unit = AGGREGATIONS[self.correction.aggregate].unit
        self._check_begun(batch)
        if self.denominator is None and unit != "none":
            raise ValueError(
                f"{unit} is None, but aggregate={self.correction.aggregate!r} divides by the {unit} of the whole "
                "optimizer step: pass their number to begin() or count()"
            )
        self._check_tokens(batch)
        kept = not self.correction.count_rejected
        weighted = batch
        if self.monitor is not None and self._train:
            weighted = self.monitor.masked(batch)
            self.add(self.monitor.masking(batch))
        out = self.correction(
            weighted,
            denominator=self.denominator,
            statistics=self.statistics,
            kept=kept,
            anchored=self._placed is not None,  # else the correction warns of a batch without old_logp
        )
        self.observe(batch, out.metrics, last=last, on_policy=on_policy, ids=ids, coefficient=out.coefficient)
        return out

    def _check_begun(self, batch: Batch) -> None:
        """Raise ``RuntimeError`` for a micro-batch that would be divided by the denominator of another step."""
        wanted = "call begin() before the first micro-batch of every step"
        if not self._begun:
            raise RuntimeError(
                f"no optimizer step has begun since the last micro-batch of the one before: {wanted}, and pass "
                "last=False with all of its micro-batches but the last"
            )
        if not self._train and batch.logp.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                "no optimizer step has begun: begin(train=False) began an evaluation, and logp of this batch has a "
                f"graph: {wanted}, and evaluate under torch.no_grad()"
            )

    def _check_tokens(self, batch: Batch) -> None:
        """Raise ``ValueError`` for a micro-batch with more tokens than the whole step, where nothing synchronises."""
        check_batch(batch)
        tokens = self._tokens
        if tokens is None or (isinstance(tokens, Tensor) and tokens.device.type != "cpu"):
            return
        own = tokens_on_host(batch.mask)
        if own is not None and own > float(tokens):
            raise ValueError(
                f"tokens is {float(tokens):g}, but this micro-batch alone has {own}: pass begin() or count() the "
                "tokens of the whole optimizer step, over all micro-batches and ranks (tokens are not sequences)"
            )

    def observe(
        self,
        batch: Batch,
        metrics: Metrics | None = None,
        *,
        last: bool = True,
        on_policy: Tensor | None = None,
        ids: Ids | None = None,
        coefficient: Tensor | None = None,
    ) -> None:
        """Measure a micro-batch whose loss is computed elsewhere; arguments as in ``loss``.

        Args:
            coefficient: dL/dlogp of that loss, in the layout of ``batch.logp``: for the share of each origin's tokens
                that it keeps, and for an anchor that resets itself by the share of tokens with a gradient.

        Raises:
            ValueError: ``coefficient`` has another shape, or the anchor needs it and it is None.
        """
        check_batch(batch)
        if coefficient is not None and coefficient.shape != batch.logp.shape:
            raise ValueError(
                f"coefficient has shape {tuple(coefficient.shape)}, expected {tuple(batch.logp.shape)}, that of logp"
            )
        if self._train and self.anchor is not None and self.anchor.wants_active:
            self._count_active(batch, coefficient)
        if self.monitor is not None and self._train:
            if not self.monitor.tested and self.monitor.self_test != "off":
                self.monitor.test(self.semantics(batch, self.monitor.temperature))
            self.monitor.same_weights = self._placed is not None and self._placed.supplies == "sampled"
            self.monitor.holds_lag = not self.monitor.same_weights and batch.rollout_version is not None
            kept = (
                batch if self._of_weights else batch.replaced(old_logp=None)
            )  # no log-probs of the weights that sampled
            self.monitor.keep(kept, ids, self._version + 1)
        if metrics is None:
            unscored = batch.tokens.unscored.sum(dtype=torch.float64).reshape(1)
            metrics = Metrics({**measure(batch).data, UNSCORED: Count(unscored)})
        self.add(self._complete(metrics, batch, coefficient))
        self.in_progress = self._train and not last
        if self._counted is not None:
            self._counted.add(batch)
            self._check_window(last)
        if self._train and last:
            self._begun = False
            self._add_counted()
        if not self._train or self.ess_lr is None:
            return
        self.ess_lr.add(batch, on_policy)
        if last:
            self._values[True]["lr_scale"].append(self.ess_lr.begin(self._gather))
            if self.ess_lr.auto:
                self._values[True]["ess_base"].append(self.ess_lr.base)

    def _check_window(self, last: bool) -> None:
        """Warn of a step whose micro-batches are more or fewer than those of the window that ``begin`` read."""
        count = 0 if self._counted is None else self._counted.micro_batches
        if self._ahead is not None and (count > self._ahead or (last and count < self._ahead)):
            warn_first(
                "Step: another window",
                f"the window of begin() had {self._ahead} micro-batches, and the optimizer step has "
                f"{'at least ' * (not last)}{count}: the statistics of {self.correction.method!r} are not those of "
                "the step; pass every micro-batch of the step in window, and no other",
            )

    def add(self, metrics: Metrics) -> None:
        """Add to the metrics of the current step."""
        self._measured[self._train] = self._measured[self._train].merge(metrics)

    def _add_counted(self) -> None:
        """Adds the number that the step was told and what its micro-batches had, for ``metrics`` to compare.

        The first step's of a lone rank are compared at once.
        """
        if self._counted is not None:
            counted = self._counted.metrics()
            self._measured[True] = self._measured[True].merge(counted)
            if self._compares_first:
                warn_of_wrong_number(counted.compute())
                self._compares_first = False
        self._counted = None

    def end(self, version: int) -> None:
        """End an optimizer step: the anchor follows it.  Warns once where it had micro-batches, none of them the last.

        Args:
            version: of the weights now, one higher after every step.
        """
        if self.in_progress and self._counted is not None and self._counted.micro_batches:
            warn_first(
                "Step: no last micro-batch",
                f"end({version}) ends an optimizer step of {self._counted.micro_batches} micro-batches, all with "
                "last=False: pass last=True with the last one, before optimizer.step(); the ESS learning rate and the "
                "refusal of micro-batches that follow depend on it",
            )
            self._add_counted()
        self._counted = None
        self.in_progress = self._begun = False
        self._version = version
        if self._ess_lr is not None:
            self._ess_lr.end()
        if self.anchor is None:
            return
        share = None
        if self.anchor.wants_active and self._active is not None:
            (share,) = Mean(self._gather(self._active.vector).sum(0)).read() or (1.0,)
            self._active = None
        self.anchor.step(version, share)
        if share is not None:
            self._values[True] |= {"offcorr/anchor/active": [share], "offcorr/anchor/resets": [self.anchor.resets]}

    # -- metrics -------------------------------------------------------------------------------------------------

    def metrics(self, train: bool = True, choice: str | None = None) -> dict[str, float]:
        """The metrics since the last call, over all micro-batches and ranks.

        One packed vector per rank and one transfer to the host; every rank must call it.  A monitor sees them, too.
        Warns once where the micro-batches had another number of tokens (or sequences) than ``begin`` or ``count`` was
        told; it is read here, and not by ``end``, because reading it needs the other ranks and the host.

        Args:
            train: False: those of evaluations.
            choice: None: all that was measured; "short", "full", "aliases": those that the trainers log under this
                ``log_metrics``, which in an evaluation are without the constant ones (``offcorr.training.logged``).

        Raises:
            MismatchError: the monitor raises an alarm whose action is "stop".
        """
        measured, self._measured[train] = self._measured[train], Metrics()
        values, self._values[train] = self._values[train], defaultdict(list)
        ranks = 1

        def gather(vector: Tensor) -> Tensor:
            nonlocal ranks
            gathered = self._gather(vector)
            ranks = len(gathered)
            return gathered

        computed = measured.all_reduce(gather).compute(none_scored="pass")
        warn_of_wrong_number(computed, ranks)
        computed |= {name: sum(value) / len(value) for name, value in values.items()}
        self.none_scored = computed.get(UNSCORED, 0.0) > 0 and FIELD + "k2" not in computed
        self.none_trained = "entropy" in measured.data and "entropy" not in computed
        self.none_advantaged = computed.get(NO_ADVANTAGE) == 1.0 and not computed.get(NONFINITE)
        self.all_dropped = computed.get(DROPPED) == 1.0 and not computed.get(MASKED)
        self.rejected = computed.get(REJECTED, 0.0)
        if self.monitor is not None and train:
            self.monitor.say_masked(computed)
            self.monitor.end(self._version, self._judged(computed))
            computed |= self.monitor.numbers() if computed else {}
        if choice is None:
            return {name: value for name, value in computed.items() if not name.startswith(FIELD)}
        return logged(computed, choice, train)

    @property
    def _of_weights(self) -> bool:
        """Whether ``old_logp`` is of weights that the samples' age explains, rather than of a mixture of policies."""
        return self._placed is None or bool(self._placed.supplies)

    def _judged(self, computed: Mapping[str, float]) -> dict[str, float]:
        """The numbers for the monitor: without the engine series where it is not the engine that they measure."""
        numbers = watched_numbers(computed)
        if self._of_weights:
            return numbers
        return {name: value for name, value in numbers.items() if not name.startswith(ENGINE)}

    def _complete(self, metrics: Metrics, batch: Batch, coefficient: Tensor | None = None) -> Metrics:
        """Adds the metrics that other frameworks log, those by origin and those for the monitor.  Where the anchor
        contains the engine's log-probs, the engine series is dropped: it would be 0 by construction, and the staleness
        series, measured against the engine itself, holds the mismatch of both.
        """
        padded = measured = batch.tokens.batch
        contains_rollout = self._placed is not None and self._placed.contains_rollout
        data = dict(metrics.data)
        if contains_rollout:
            # The anchor gives an unscored token the ratio 1, which is no measurement; a mixture hides part of the gap.
            measured = padded.replaced(old_logp=padded.rollout_logp, rollout_logp=None)
            data |= measure(measured).data
            data = {name: value for name, value in data.items() if not name.startswith(ENGINE)}
        data |= field_metrics(padded, contains_rollout=contains_rollout).data
        if batch.origin is not None:
            coefficient = None if coefficient is None else batch.replaced(logp=coefficient).padded().logp
            data |= origin_metrics(measured, coefficient, engine=not contains_rollout).data
            if self.monitor is not None and self._train:
                data |= watched_metrics(padded, measured, contains_rollout=contains_rollout).data
        return Metrics(data)

    @torch.no_grad()
    def _count_active(self, batch: Batch, coefficient: Tensor | None) -> None:
        if coefficient is None:
            raise ValueError(
                f"coefficient is None, but {self.anchor!r} resets itself by the share of tokens with a gradient: pass "
                "dL/dlogp to observe(coefficient=...), or take an anchor without it (EWMA: reset_below=None)"
            )
        could = batch.mask.bool()
        if self._correction is None or self._correction.scales_with_advantage:
            # A prompt whose samples all have the same reward has no gradient, wherever the anchor is.
            could = could & (batch.repack(batch.tokens.advantages) != 0)
        active = Mean(Mean.of(coefficient != 0, could))
        self._active = active if self._active is None else self._active.merge(active)

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint between two optimizer steps, the same on every rank: anchor, calibration, baselines.

        Empty where none of them has any.
        """
        state: dict[str, Any] = {}
        if self.anchor is not None and (weights := self.anchor.state_dict()):
            state["anchor"] = {type(self.anchor).__name__: weights}
        if self.ess_lr is not None and self.ess_lr.auto:
            state["ess_lr"] = self.ess_lr.state_dict()
        if self.monitor is not None:
            state["monitor"] = self.monitor.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Continue from a result of ``state_dict``.

        Returns:
            Names of the parts that ``state`` lacks; they keep their current values.
        """
        missing = []
        for name, own in self.state_dict().items():
            found = state.get(name, {})
            if not own.keys() <= found.keys():
                missing.append({"anchor": repr(self.anchor), "ess_lr": "the calibrated ess_base"}.get(name, MONITORED))
            elif name == "anchor":
                self.anchor.load_state_dict(found[type(self.anchor).__name__])  # type: ignore[union-attr]
            elif name == "monitor":
                self.monitor.load_state_dict(found)  # type: ignore[union-attr]
            else:
                self.ess_lr.load_state_dict(found)  # type: ignore[union-attr]
        return missing
