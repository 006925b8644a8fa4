"""Who plays ``old_logp`` in a TRL run."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from accelerate.utils import convert_to_fp32
from torch import Tensor, nn

import offcorr
from offcorr.batch import Tokens
from offcorr.metrics import Mean, measure
from offcorr.rollout.off_policy import give_fused_head
from offcorr.stages.base import nearest
from offcorr.training.anchors import EWMA, Anchor, LogLinear, Rollout, Score
from offcorr.training.ess_lr import Gather
from offcorr.training.replica import base_of
from offcorr.trl.names import with_field_metrics


class Supplied(Anchor):
    """Log-probs that came with the batch; where none came, every staleness ratio is 1."""

    def old_logp(self, batch: offcorr.Batch, score: Score | None = None) -> Tensor:
        return batch.logp.detach() if batch.old_logp is None else batch.old_logp

    def place(self, batch: offcorr.Batch, score: Score | None = None) -> offcorr.Batch:
        return batch


class Kind(NamedTuple):
    """What a run has to know of an anchor before it has one.

    build: (model, where it names one, and the options of ``anchor_kwargs``) -> Anchor.
    needs: the keys of TRL's batch it cannot do without.  column: the one that holds its log-probs.
    computed: they are made of the forward pass, or by another, so nothing is known before.
    bypass: the engine's log-probs are (part of) it, so the engine's mismatch lies in the staleness ratio.
    """

    build: Callable[..., Anchor]
    needs: tuple[str, ...] = ()
    column: str | None = None
    computed: bool = False
    bypass: bool = False

    @property
    def options(self) -> dict[str, inspect.Parameter]:
        parameters = inspect.signature(self.build).parameters
        return {name: parameter for name, parameter in parameters.items() if name != "model"}

    def make(self, model: nn.Module, options: Mapping[str, Any]) -> Anchor:
        holds_weights = "model" in inspect.signature(self.build).parameters
        return self.build(model, **options) if holds_weights else self.build(**options)


KINDS = {
    "snapshot": Kind(Supplied, needs=("old_logp",), column="old_logp"),
    "rollout": Kind(Rollout, needs=("sampling_per_token_logps",), bypass=True),
    "recomputed": Kind(Supplied, column="old_per_token_logps"),
    "ewma": Kind(EWMA, computed=True),
    "log_linear": Kind(LogLinear, needs=("sampling_per_token_logps", "rollout_version"), computed=True, bypass=True),
}

_MISSING = {
    "old_logp": "wants old_logp, and the sampler gave none: let the rollout_func return 'old_logp', a list of "
    "log-probs for each completion (offcorr.rollout.OffPolicy does), or the rollout worker put it into a "
    "CorrectedSample (LocalWorker does), or take another anchor",
    "sampling_per_token_logps": "wants the engine's log-probs, and this run has none (TRL's own generation reports "
    "none): use a rollout_func or vLLM, or take another anchor",
    "rollout_version": "wants rollout_version, and the sampler gave none: let the rollout_func return "
    "'rollout_version', for each completion the version (optimizer step) of the weights that sampled it, or a list "
    "with one for each token (offcorr.rollout.OffPolicy does; of a rollout worker's sample it is the model_version), "
    "or take another anchor",
}


def check_anchor(
    anchor: str | None, correction: offcorr.Correction | None, options: Mapping[str, Any] | None = None
) -> None:
    """Raise ``ValueError`` for an anchor with wrong options, or one with which the correction makes no sense.

    Args:
        correction: None: TRL's own loss.
        options: ``anchor_kwargs``.
    """
    options = options or {}
    if anchor is None:
        if options:
            raise ValueError(
                f"anchor_kwargs={dict(options)!r} goes with an anchor: name one of {list(KINDS)} in anchor"
            )
        return
    kind = KINDS[anchor]
    for name in options:
        if name not in kind.options:
            raise ValueError(
                f"anchor={anchor!r} has no option {name!r}{nearest(name, kind.options)}; it has {list(kind.options)}"
            )
    for name, option in kind.options.items():
        if option.default is option.empty and name not in options:
            raise ValueError(f"anchor={anchor!r} needs {name}: say it in anchor_kwargs, it has {list(kind.options)}")
    made = kind.make(nn.Module(), options)  # no weights, but the bounds of the options
    if correction is None:
        if kind.computed:
            raise ValueError(
                f"anchor={anchor!r} goes with a correction, and TRL's own loss makes its old log-probs itself: write "
                "loss_type='offcorr:...' or drop the anchor"
            )
        return
    try:
        made.check(correction)
    except ValueError as reason:
        # In the words of the configuration.
        said = str(reason).replace(repr(made), f"anchor={anchor!r}")
        raise ValueError(f"loss {correction.method!r}: {said}") from None


def choose_anchor(anchor: str | None, correction: offcorr.Correction | None, supplied: Collection[str]) -> str:
    """The anchor in force, for a batch that holds the keys ``supplied``.

    Asked for: that one.  Else snapshot where the sampler supplies ``old_logp``; else rollout if the engine reported
    log-probs and the correction has no engine stage to look at them; else recomputed.

    Raises:
        ValueError: the anchor asked for needs what did not come.
    """
    if anchor is not None:
        for key in KINDS[anchor].needs:
            if key not in supplied:
                raise ValueError(f"anchor={anchor!r} {_MISSING[key]}")
        return anchor
    if "old_logp" in supplied:
        return "snapshot"
    if correction is not None and "sampling_per_token_logps" in supplied and "engine" not in correction.compares:
        return "rollout"
    return "recomputed"


class TrainingAnchor:
    """The anchor of a trainer: begun with a run, stepped after every optimizer step, and kept in checkpoints.

    Args:
        asked, options: ``anchor`` and ``anchor_kwargs`` of the configuration.
        model: gives the model that is trained, unwrapped.

    Raises:
        ValueError: as ``check_anchor``.
    """

    def __init__(
        self,
        asked: str | None,
        options: Mapping[str, Any] | None,
        correction: offcorr.Correction | None,
        model: Callable[[], nn.Module],
    ) -> None:
        check_anchor(asked, correction, options)
        self._asked, self._options, self._model = asked, dict(options or {}), model
        self._made: dict[str, Anchor] = {}
        self._in_force = KINDS["recomputed"]
        self._learned: Tensor | None = None

    def begin(self) -> None:
        """A run begins with the model's weights now."""
        self._made, self._learned = {}, None
        if self._asked is not None:
            self._anchor(self._asked)

    def place(
        self, batch: offcorr.Batch, correction: offcorr.Correction | None, inputs: Mapping[str, Any], score: Score
    ) -> offcorr.Batch:
        """The batch with ``old_logp``; ``inputs`` is TRL's batch, its columns in the layout of ``batch.logp``."""
        name = choose_anchor(self._asked, correction, inputs)
        self._in_force = KINDS[name]
        if self._in_force.column is not None:
            batch = dataclasses.replace(batch, old_logp=inputs.get(self._in_force.column))
        return self._anchor(name).place(batch, score)

    def metrics(self, measured: offcorr.Metrics, batch: offcorr.Batch) -> offcorr.Metrics:
        """The metrics of a batch, and what the field's names need beside them."""
        if self._in_force.bypass and self._in_force.computed:
            # A mixture of trainer and engine tells nothing of the gap between them: as for "rollout".
            raw = dataclasses.replace(batch, old_logp=Rollout().old_logp(batch))
            measured = offcorr.Metrics({**measured.data, **measure(raw).data})
        return with_field_metrics(measured, batch, bypass=self._in_force.bypass)

    def watch(self, correction: offcorr.Correction, batch: offcorr.Batch, coefficient: Tensor) -> None:
        """One micro-batch of the coming step, with its dL/dlogp."""
        if self._asked is None or not self._anchor(self._asked).wants_active:
            return
        could = batch.mask.bool()
        if correction.gate.scales_with_advantage:
            # A prompt that is solved always teaches nothing, wherever the anchor is.
            could = could & (batch.repack(Tokens(batch).advantages) != 0)
        learned = Mean.of(coefficient != 0, could)
        self._learned = learned if self._learned is None else self._learned + learned

    def step(self, version: int, gather: Gather) -> dict[str, float]:
        """After an optimizer step; what there is to log of it.

        Args:
            version: of the weights now.
            gather: [K] to [ranks, K]; called once, and only for an anchor that resets itself.
        """
        if self._asked is None:
            return {}
        anchor, active = self._anchor(self._asked), None
        if anchor.wants_active and self._learned is not None:
            share = Mean().read(gather(self._learned).sum(0).tolist())
            active, self._learned = (share or {"": 1.0})[""], None
        anchor.step(version, active)
        return {} if active is None else {"offcorr/anchor/active": active, "offcorr/anchor/resets": anchor.resets}

    def state_dict(self) -> dict[str, Any]:
        """Empty for an anchor without state."""
        if self._asked is None:
            return {}
        state = self._anchor(self._asked).state_dict()
        return {self._asked: state} if state else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``'s answer.  KeyError: it is another anchor's."""
        if self._asked is not None:
            self._anchor(self._asked).load_state_dict(state[self._asked])

    def _anchor(self, name: str) -> Anchor:
        if name not in self._made:
            self._made[name] = KINDS[name].make(self._model(), self._options)
        return self._made[name]

    def __repr__(self) -> str:
        return f"anchor={self._asked!r}"


def as_trained(
    trainer: Any, module: nn.Module, give_head: Callable[[nn.Module, Any], None] = give_fused_head
) -> Callable[..., Any]:
    """What TRL and accelerate would make of a module that they train: its forward, in the same precision."""
    if "forward" not in vars(base_of(module)):  # not yet TRL's
        give_head(module, trainer)

    def forward(**inputs: Any) -> Any:
        with trainer.accelerator.autocast():
            outputs = module(**inputs)
        return convert_to_fp32(outputs) if trainer.accelerator.native_amp else outputs

    return forward
