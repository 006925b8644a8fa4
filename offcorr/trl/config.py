"""``GRPOConfig``: TRL's and seven fields more, most of them the asynchronous trainer's too; and how a name of a loss
becomes a correction.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import math
import textwrap
import warnings
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import trl

import offcorr
from offcorr.methods.registry import Method, find
from offcorr.stages.aggregate import AGGREGATIONS
from offcorr.training.ess_lr import RULES
from offcorr.training.schedules import Annealed
from offcorr.trl.anchor import KINDS
from offcorr.trl.head import HEADS, SUPPORTED
from offcorr.trl.state import AUTO

PREFIX = "offcorr:"
"""``"offcorr:dapo"`` is this library's dapo; a bare ``"dapo"`` is TRL's."""

# What TRL's losses read and a correction does not, and the option that does the same here.
TRL_LOSS_OPTIONS = {
    "epsilon": "eps_low",
    "epsilon_high": "eps_high, or cap for cispo",
    "delta": "dual_clip",
    "importance_sampling_level": "the method itself (gspo, luspo) or its ratio",
    "sapo_temperature_pos": "tau_pos",
    "sapo_temperature_neg": "tau_neg",
    "vespo_k_pos": "k_pos",
    "vespo_lambda_pos": "lam_pos",
    "vespo_k_neg": "k_neg",
    "vespo_lambda_neg": "lam_neg",
    "off_policy_mask_threshold": 'reject={"name": "opsm", "delta": ...}',
}


@dataclass
class CorrectionOptions:
    """What both of this library's configurations add to TRL's.

    In ``loss_kwargs`` ``{"start": 2.0, "end": -1.0}`` may stand for a number: it runs linearly over the training, and
    is logged as ``offcorr/schedule/...``.
    """

    loss_kwargs: dict | str | None = field(
        default=None,
        metadata={
            "help": "Options of the correction that `loss_type` names; on the command line as JSON, for instance "
            '\'{"eps_high": 0.28, "weight": {"name": "truncate", "cap": 2.0}}\'.'
        },
    )
    anchor: str | None = field(
        default=None,
        metadata={
            "help": "Who plays old_logp. 'snapshot': the log-probs that the sampler supplies (weights that sampled, "
            "trainer's precision). 'rollout': what the engine reported. 'recomputed': the current weights at "
            "generation; in the asynchronous trainer those being trained, so every staleness ratio is 1. 'ewma': a "
            "mean of the weights so far, by one more forward pass (PPO-EWMA). 'log_linear': between rollout and "
            "current log-probs, by version (A-3PO). Default: snapshot where the sampler supplies it, else rollout if "
            "the correction has no engine stage, else recomputed.",
            "choices": list(KINDS),
        },
    )
    anchor_kwargs: dict | str | None = field(
        default=None,
        metadata={
            "help": "Options of the anchor; on the command line as JSON. ewma: window (optimizer steps; needed), "
            "reset_below (share of the tokens, 0.9), device. log_linear: proximal_lag (versions, 1): optimizer steps; "
            "in the asynchronous trainer weight syncs."
        },
    )

    ess_lr: str | None = field(
        default=None,
        metadata={
            "help": "Scale each step's learning rate by min(1, ess / ess_base), to the power 1/2 ('sqrt') or 1 "
            "('linear'); ess is the effective sample size of the step's trajectories, all ranks. Logged as lr_scale.",
            "choices": list(RULES),
        },
    )
    ess_base: float | str | None = field(  # with None, or the command line would take numbers only
        default=1.0,
        metadata={
            "help": "The effective sample size that counts as healthy, in (0, 1]: 1 (one turn), .55 (several); or "
            "'auto': its mean over the optimizer steps whose whole batch is on-policy, which are not scaled."
        },
    )

    def _check_options(self) -> None:
        """Raise ``ValueError`` for what none of the options can be; ``ess_base`` as a number where it is one."""
        for name, example in (("loss_kwargs", '{"eps_high": 0.28}'), ("anchor_kwargs", '{"window": 16}')):
            if isinstance(getattr(self, name), str):
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}, expected a mapping or a JSON object, for instance '{example}'"
                )
        if self.anchor is not None and self.anchor not in KINDS:
            raise ValueError(f"anchor is {self.anchor!r}, expected one of {list(KINDS)} or None")
        if self.ess_lr is not None and self.ess_lr not in RULES:
            raise ValueError(f"ess_lr is {self.ess_lr!r}, expected one of {list(RULES)} or None")
        self.ess_base = _ess_base(self.ess_base)


@dataclass
class GRPOConfig(CorrectionOptions, trl.GRPOConfig):
    """TRL's ``GRPOConfig`` and seven fields more; ``loss_type`` also takes this library's names.

    ``loss_type``: a name that TRL knows runs TRL's own loss; ``"offcorr:dapo"``, ``"minpro"`` or
    ``"my_file.py:MyLoss"`` a correction.  In ``loss_kwargs`` ``{"start": 2.0, "end": -1.0}`` may stand for a number: it
    runs linearly over the training, and is logged as ``offcorr/schedule/...``.

    >>> GRPOConfig("out", loss_type="minpro", loss_kwargs={"eps_high": 0.28}, bf16=False).loss_kwargs
    {'eps_high': 0.28}
    """

    _VALID_DICT_FIELDS = [*trl.GRPOConfig._VALID_DICT_FIELDS, "loss_kwargs", "anchor_kwargs"]

    logprob_head: str = field(
        default="auto",
        metadata={
            "help": "What makes log-probs of hidden states: 'trl', 'offcorr' (offcorr.linear_logprob, TRL 1.16 and "
            "later), or 'auto', ours for a correction where it was measured to be faster, on a CPU.",
            "choices": list(HEADS),
        },
    )

    skip_dead_sequences: bool = field(
        default=False,
        metadata={
            "help": "Leave sequences out of the forward and backward passes whose gradient is known to be 0 before: no "
            "advantage, or rejected by stages that compare old with rollout log-probs. The update is the same; "
            "metrics cover the computed sequences, and offcorr/loss/skipped is the share left out."
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_options()
        if self.logprob_head not in HEADS:
            raise ValueError(f"logprob_head is {self.logprob_head!r}, expected one of {list(HEADS)}")
        if self.logprob_head == "offcorr" and not SUPPORTED:
            raise ValueError(
                "logprob_head='offcorr' takes the place of a function that this TRL does not have: update it (1.16 "
                "does), or take 'auto'"
            )
        if self.ess_lr is not None and self.skip_dead_sequences:
            raise ValueError(
                f"skip_dead_sequences=True leaves sequences out of the forward pass, and ess_lr={self.ess_lr!r} "
                "looks at all of them: leave one of the two out"
            )
        if self.skip_dead_sequences and self.anchor is not None and KINDS[self.anchor].computed:
            raise ValueError(
                f"skip_dead_sequences=True leaves sequences out before the forward pass, and anchor={self.anchor!r} "
                "has no log-probs before it: leave one of the two out"
            )


def _ess_base(base: Any) -> float | str:
    """A number in (0, 1], also as text, or "auto"."""
    if base == AUTO:
        return base
    try:
        number = float(base)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number <= 1:
        raise ValueError(f"ess_base is {base!r}, expected an effective sample size in (0, 1], or {AUTO!r}")
    return number


@cache
def trl_losses() -> frozenset[str]:
    """The loss names that the installed TRL knows: what its own ``_compute_loss`` compares ``loss_type`` with."""
    source = textwrap.dedent(inspect.getsource(trl.GRPOTrainer._compute_loss))
    return frozenset(
        constant.value
        for compare in ast.walk(ast.parse(source))
        if isinstance(compare, ast.Compare) and getattr(compare.left, "attr", "") == "loss_type"
        for constant in ast.walk(compare)
        if isinstance(constant, ast.Constant) and isinstance(constant.value, str)
    )


def choose_correction(args: Any, loss: offcorr.Correction | None = None) -> Annealed | None:
    """The correction, over training, that ``loss=`` or the config asks for; None: TRL's own loss.

    Raises:
        TypeError: ``loss`` is no Correction.
        ValueError: both ways are used at once, the name or an option is unknown (at the start of its schedule or at
            its end), or options go with a TRL name.
    """
    loss_type = getattr(args, "loss_type", "dapo")
    options = dict(getattr(args, "loss_kwargs", None) or {})
    known_to_trl = loss_type in trl_losses()
    if loss is not None:
        annealed = given(loss, args)
        if options or not known_to_trl:
            raise ValueError(
                f"loss={loss!r} was passed beside loss_type={loss_type!r}, loss_kwargs={options or None!r}: "
                "give the correction in one of the two ways"
            )
    elif known_to_trl:
        if options:
            raise ValueError(
                f"loss_kwargs={options!r} goes with a correction, and loss_type={loss_type!r} is TRL's own loss: "
                f"write loss_type={PREFIX + loss_type!r} for this library's, or drop loss_kwargs"
            )
        return None
    else:
        annealed = named(loss_type, args)
    _say_what_is_ignored(args, annealed.at(0.0))
    return annealed


def given(loss: Any, args: Any) -> Annealed:
    """The correction that was passed as ``loss=``.  TypeError: it is none."""
    if not isinstance(loss, offcorr.Correction):
        raise TypeError(f"loss is a {type(loss).__name__}, expected an offcorr.Correction")
    return Annealed(lambda: _with_length(loss, args))


def named(name: str, args: Any) -> Annealed:
    """The correction of this name with the ``loss_kwargs`` of ``args``, over training.

    ValueError: the name or an option is unknown (at the start of its schedule or at its end).
    """
    found = find(name)
    own = found.schedules if isinstance(found, Method) else {}
    options = getattr(args, "loss_kwargs", None) or {}
    return Annealed(lambda **in_force: _with_length(offcorr.resolve(name, **in_force), args), {**own, **options})


def _with_length(correction: offcorr.Correction, args: Any) -> offcorr.Correction:
    """With the longest completion as the constant length, where one is wanted and none is given: as TRL's dr_grpo."""
    if not AGGREGATIONS[correction.aggregate].constant_length or correction.max_length is not None:
        return correction
    length = getattr(args, "max_completion_length", None)
    return dataclasses.replace(correction, max_length=length, options={**correction.options, "max_length": length})


def _say_what_is_ignored(args: Any, correction: offcorr.Correction) -> None:
    defaults = {name: f.default for name, f in trl.GRPOConfig.__dataclass_fields__.items()}
    ignored = {
        name: mend
        for name, mend in TRL_LOSS_OPTIONS.items()
        if name in defaults and getattr(args, name, defaults[name]) != defaults[name]
    }
    if ignored:
        listed = ", ".join(f"{name}={getattr(args, name)!r} (here: {mend})" for name, mend in ignored.items())
        warnings.warn(
            f"TRL's own losses read {listed}; the correction {correction.method!r} does not: say it in loss_kwargs",
            stacklevel=3,
        )
