"""``GRPOConfig``: TRL's with the options of a correction; and the correction that a ``loss_type`` names."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trl

import offcorr
from offcorr.methods.registry import catalogue
from offcorr.stages.checks import one_of, outside
from offcorr.stages.ratios import Geometric
from offcorr.training.anchors import ANCHORS
from offcorr.training.described import in_short
from offcorr.training.ess_lr import AUTO, RULES
from offcorr.training.logged import CHOICES
from offcorr.training.monitor_option import monitor_options
from offcorr.training.named_loss import PREFIX, TRL_LOSSES, named_loss, ours
from offcorr.training.schedules import Annealed
from offcorr.trl.convex_kl import EXAMPLE, ConvexKL
from offcorr.trl.lm_head import HEADS, SUPPORTED
from offcorr.trl.numeric import check_counts, check_numbers
from offcorr.trl.trial import try_out

MAPPINGS = {"loss_kwargs": '{"eps_high": 0.28}', "anchor_kwargs": '{"window": 16}', "convex_kl": EXAMPLE}
"""The options that are mappings, each with an example."""

TRL_LOSS_OPTIONS = {
    "epsilon": ("eps_low",),
    "epsilon_high": ("eps_high", "cap"),
    "delta": ("dual_clip",),
    "importance_sampling_level": "loss_type='gspo' or 'luspo', with narrower bounds of their own, or loss= of another "
    "ratio",
    "sapo_temperature_pos": ("tau_pos",),
    "sapo_temperature_neg": ("tau_neg",),
    "vespo_k_pos": ("k_pos",),
    "vespo_lambda_pos": ("lam_pos",),
    "vespo_k_neg": ("k_neg",),
    "vespo_lambda_neg": ("lam_neg",),
    "off_policy_mask_threshold": 'reject={"name": "opsm", "delta": ...}',
    "vllm_importance_sampling_correction": "weight=None and reject=None, or a loss that compares with no engine",
    "vllm_importance_sampling_mode": "",
    "vllm_importance_sampling_clip_max": "",
    "vllm_importance_sampling_clip_min": "",
    "vllm_importance_sampling_cap": "",
}
"""The options of TRL's own losses, which a correction ignores, and what has the same effect here: a method's options of
these names, where it has one, or what is said; "": what ``_engine_weight`` says."""

TRL_DEFAULTS = {name: f.default for name, f in trl.GRPOConfig.__dataclass_fields__.items()}
"""The defaults of TRL's options, as TRL has them: its class may be replaced after this library was imported."""


CORRECTIONS = ", ".join(PREFIX + name if name in TRL_LOSSES else name for name in offcorr.available())
"""The names of this library's losses as ``loss_type`` takes them."""

CORRECTIONS_HELP = (
    f"A correction is one of: {CORRECTIONS}; or FILE.py:SYMBOL. Options stand in `loss_kwargs`, or behind the name as "
    "in 'minpro?eps_high=0.28'; `offcorr methods` lists them."
)
"""The help of an option that takes such a name."""


@dataclass
class CorrectionOptions:
    """The options that both of this library's configurations add to TRL's.

    In ``loss_kwargs`` a number may be given as ``{"start": 2.0, "end": -1.0}``: it changes linearly from the first
    optimizer step to the last, and is logged as ``offcorr/schedule/...``.
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
            "help": "The policy that supplies old_logp (the proximal policy of decoupled PPO). 'snapshot': the weights "
            "that sampled, in the trainer's precision, as the sampler supplies them. 'rollout': the engine, as "
            "reported. 'recomputed': the weights at generation; in the asynchronous trainer those being trained, so "
            "that every staleness ratio is 1. 'ewma': a mean of the weights so far, by one more forward pass "
            "(PPO-EWMA). 'log_linear': a mixture of the engine's and the current log-probs, by version (A-3PO). "
            "Default: snapshot where the sampler supplies it, else rollout if no stage of the correction compares "
            "with the engine, else recomputed.",
            "choices": list(ANCHORS),
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
            "'auto': its mean over the optimizer steps whose global batch is on-policy, which are not scaled."
        },
    )
    log_metrics: str = field(
        default="short",
        metadata={
            "help": "This library's metrics in the log. 'short': about ten, which say how stale the data is, how far "
            "off the engine, and what the correction did to how many tokens; 'full': all of them; 'aliases': all, and "
            "also under the names of verl, slime, prime-rl, NeMo-RL, Tinker and TRL. docs/metrics.md explains each.",
            "choices": list(CHOICES),
        },
    )
    monitor: dict | str | None = field(
        default="warn",
        metadata={
            "help": "Watches the mismatch between trainer and sampler (offcorr.Monitor). 'warn', 'log', 'dump', 'mask' "
            "or 'stop': the action of every alarm; 'off' or None: nothing is watched, and a first batch that would "
            "end the run is a warning. Or a mapping of the options, on the command line as JSON, for instance "
            '\'{"critical": ["dump", "stop"], "self_test": "warn"}\': warning, '
            "critical, self_test, warmup, drift, threshold, persistence, folder. docs/metrics.md, 'The monitor'."
        },
    )
    dump_rollouts: str | None = field(
        default=None,
        metadata={
            "help": "A folder, new or empty, for the sequences that are trained on, with the log-probs of sampler and "
            "trainer: one parquet file per optimizer step and rank, which `offcorr diagnose` reads. Needs pyarrow."
        },
    )
    dump_every: int = field(
        default=1, metadata={"help": "Optimizer steps from one that dump_rollouts writes to the next; the first is 1."}
    )

    def __post_init__(self) -> None:
        for name, example in MAPPINGS.items():
            value = getattr(self, name, None)
            wanted = f"expected a mapping or a JSON object, for instance '{example}'"
            reason = ""
            if isinstance(value, str):  # TRL would parse it, and not name the option
                try:
                    setattr(self, name, json.loads(value))
                except json.JSONDecodeError as error:
                    reason = f" ({error})"
            parsed = getattr(self, name, None)
            if parsed is None and value is None:
                continue
            if not isinstance(parsed, Mapping):
                raise ValueError(f"{name} is {value!r}, {wanted}{reason}")
            for key in parsed:
                if not isinstance(key, str):
                    raise ValueError(f"{name} has the key {key!r}, expected the name of an option")
        check_counts(self)
        super().__post_init__()  # type: ignore[misc]  # TRL's
        check_numbers(self)
        self._check_options()

    def _check_options(self) -> None:
        """Raise ``ValueError`` for values that an option cannot have; make ``ess_base`` a number if it is text."""
        if self.anchor is not None and self.anchor not in list(ANCHORS):  # a list has no hash
            raise ValueError(f"anchor is {self.anchor!r}{one_of(self.anchor, ANCHORS)}, or None")
        if self.ess_lr is not None and self.ess_lr not in RULES:
            raise ValueError(f"ess_lr is {self.ess_lr!r}{one_of(self.ess_lr, RULES)}, or None")
        if self.log_metrics not in CHOICES:
            raise ValueError(f"log_metrics is {self.log_metrics!r}{one_of(self.log_metrics, CHOICES)}")
        monitor_options(self.monitor)
        self.ess_base = _ess_base(self.ess_base)
        self._check_dump()
        if self.ess_lr is None and self.ess_base != 1.0:
            warnings.warn(
                f"ess_base={self.ess_base!r} does nothing without ess_lr: set ess_lr to one of {list(RULES)}",
                stacklevel=outside(),
            )

    def _check_dump(self) -> None:
        folder, every = self.dump_rollouts, self.dump_every
        if folder is not None and not (isinstance(folder, str | Path) and str(folder)):
            raise ValueError(f"dump_rollouts is {folder!r}, expected the path of a folder or None")
        if folder is not None and Path(folder).exists() and not Path(folder).is_dir():
            raise ValueError(f"dump_rollouts is {folder!r}, which is a file, expected a folder")
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise ValueError(f"dump_every is {every!r}, expected a number of optimizer steps, 1 or more")
        if folder is None and every != 1:
            warnings.warn(
                f"dump_every={every} does nothing without dump_rollouts: name a folder there", stacklevel=outside()
            )


@dataclass
class GRPOConfig(CorrectionOptions, trl.GRPOConfig):
    """TRL's ``GRPOConfig`` with the ``CorrectionOptions``, ``convex_kl``, ``logprob_head`` and ``skip_dead_sequences``.

    ``loss_type`` also takes this library's names: one of ``TRL_LOSSES`` runs TRL's own loss; ``"offcorr:dapo"``,
    ``"minpro"`` or ``"my_file.py:MyLoss"`` a correction.

    >>> GRPOConfig("out", loss_type="minpro", loss_kwargs={"eps_high": 0.28}, bf16=False).loss_kwargs
    {'eps_high': 0.28}
    """

    _VALID_DICT_FIELDS = [*trl.GRPOConfig._VALID_DICT_FIELDS, *MAPPINGS]

    loss_type: str = field(
        default=TRL_DEFAULTS["loss_type"],
        metadata={
            "help": f"A correction of offcorr or a loss of TRL's own. {CORRECTIONS_HELP} TRL's own: "
            + trl.GRPOConfig.__dataclass_fields__["loss_type"].metadata["help"]
        },
    )

    convex_kl: dict | str | None = field(
        default=None,
        metadata={
            "help": "Share the KL penalty (beta) between the reference model and a mean of recent weights (ReMix); on "
            f"the command line as JSON, for instance '{EXAMPLE}': the reference model's share, which may be "
            '{"start": 1.0, "end": 0.0}, and the window of the mean in optimizer steps. One more forward pass.'
        },
    )

    logprob_head: str = field(
        default="auto",
        metadata={
            "help": "Computes log-probs from hidden states: 'trl', 'offcorr' (offcorr.linear_logprob, TRL 1.16 and "
            "later), 'exact' (offcorr.exact: with OffPolicy and inside batch_invariant the sampler's to the last bit), "
            "or 'auto': for a correction, offcorr where it was measured to be faster (on a CPU), else trl.",
            "choices": list(HEADS),
        },
    )

    skip_dead_sequences: bool = field(
        default=False,
        metadata={
            "help": "Skip sequences whose gradient is known to be zero before the forward pass: their advantage is "
            "zero, or they are rejected by stages that compare old with rollout log-probs. The update is the same; "
            "metrics cover the computed sequences, and offcorr/loss/skipped is the share that was skipped. Goes with a "
            "correction, without KL (beta), entropy bonus or auxiliary loss, which need every sequence."
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.skip_dead_sequences, bool):
            raise ValueError(f"skip_dead_sequences is {self.skip_dead_sequences!r}, expected True or False")
        ConvexKL.of(self.convex_kl, self.beta)
        if self.logprob_head not in HEADS:
            raise ValueError(f"logprob_head is {self.logprob_head!r}{one_of(self.logprob_head, HEADS)}")
        if self.logprob_head in ("offcorr", "exact") and not SUPPORTED:
            raise ValueError(
                f"logprob_head={self.logprob_head!r} replaces a function that this TRL does not have: update TRL (1.16 "
                "has it), or take 'auto'"
            )
        if self.ess_lr is not None and self.skip_dead_sequences:
            raise ValueError(
                f"skip_dead_sequences=True leaves sequences out of the forward pass, and ess_lr={self.ess_lr!r} "
                "looks at all of them: leave one of the two out"
            )
        if self.skip_dead_sequences and self.anchor is not None and ANCHORS[self.anchor].needs_forward:
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


def choose_correction(args: Any, loss: offcorr.Correction | None = None) -> Annealed | None:
    """The correction that ``loss=`` or the config asks for, with its schedules; None: TRL's own loss.

    A ``loss_type`` equal to TRL's default cannot be told from none, so it may stand beside ``loss=``.

    Raises:
        TypeError: ``loss`` is no Correction, or a stage of the user's own cannot run (``try_out``).
        ValueError: the correction is given twice, its name is unknown, an option is unknown or out of range (at the
            start of its schedule or at its end), or options are given for a loss of TRL.
    """
    loss_type = getattr(args, "loss_type", TRL_DEFAULTS["loss_type"])
    options = dict(getattr(args, "loss_kwargs", None) or {})
    known_to_trl = loss_type in TRL_LOSSES
    if loss is not None:
        annealed = given(loss, args)
        if options or loss_type != TRL_DEFAULTS["loss_type"]:
            raise ValueError(
                f"loss={in_short(loss)} was passed beside loss_type={loss_type!r}, loss_kwargs={options or None!r}: "
                "give the correction in one of the two ways"
            )
    elif known_to_trl:
        if options:
            raise ValueError(
                f"loss_kwargs={options!r} goes with a correction, and loss_type={loss_type!r} is TRL's own loss: "
                f"write {ours(loss_type)}, or drop loss_kwargs"
            )
        return None
    else:
        annealed = named(loss_type, args)
    _warn_about_ignored(args, annealed.at(0.0), "loss_kwargs" if loss is None else "the correction passed as loss=")
    return annealed


def given(loss: Any, args: Any) -> Annealed:
    """The correction that was passed as ``loss=``.

    Raises:
        TypeError: it is no Correction, or a stage of the user's own cannot run on an example batch.
    """
    if not isinstance(loss, offcorr.Correction):
        raise TypeError(f"loss is a {type(loss).__name__}, expected an offcorr.Correction")
    try_out(loss, "loss")
    return Annealed(lambda: _with_length(loss, args))


def named(name: str, args: Any) -> Annealed:
    """The correction of this name with the ``loss_kwargs`` of ``args``, and its schedules.

    Raises:
        TypeError: a stage of the user's own cannot run on an example batch.
        ValueError: the name is unknown, or an option is unknown or out of range.
    """
    if not isinstance(name, str):
        raise ValueError(
            f"loss_type is {name!r}, expected the name of a loss: one of TRL's, {list(TRL_LOSSES)}, or of "
            "offcorr.available(), such as 'minpro' or 'offcorr:dapo'"
        )
    options = getattr(args, "loss_kwargs", None) or {}
    annealed = named_loss(name, options, lambda correction: _with_length(correction, args))
    try_out(annealed.at(0.0), f"loss_type={name!r}")
    return annealed


def _with_length(correction: offcorr.Correction, args: Any) -> offcorr.Correction:
    """With the longest completion as the constant length where it needs one and has none, as TRL's dr_grpo."""
    length = getattr(args, "max_completion_length", None)
    return correction if length is None else correction.with_max_length(length)


def _warn_about_ignored(args: Any, correction: offcorr.Correction, where: str) -> None:
    """Warn of options of TRL's own losses that were set and do nothing here.

    Args:
        where: the options of the correction are given.
    """
    ignored = {
        name: instead
        for name, instead in TRL_LOSS_OPTIONS.items()
        if name in TRL_DEFAULTS and getattr(args, name, TRL_DEFAULTS[name]) != TRL_DEFAULTS[name]
    }
    if "engine" not in correction.compares:  # then nothing is left on
        ignored.pop("vllm_importance_sampling_correction", None)
    if "vllm_importance_sampling_cap" in ignored:  # which TRL copies
        ignored.pop("vllm_importance_sampling_clip_max", None)
    if "epsilon" in ignored and getattr(args, "epsilon_high", None) is None:  # which TRL then takes for both
        ignored["epsilon"] = ("eps_low", "eps_high", "cap")
    if "delta" in ignored and args.delta <= 1 + (getattr(args, "epsilon_high", None) or args.epsilon):
        ignored["delta"] = "nothing: at 1 + epsilon_high or below it bounds positive advantages, too"
    if getattr(args, "importance_sampling_level", None) == "sequence" and isinstance(correction.ratio, Geometric):
        ignored.pop("importance_sampling_level", None)  # which the correction has
    unread = [name for name in ignored if name.startswith("vllm_") and not getattr(args, "use_vllm", True)]
    if unread:
        listed = ", ".join(f"{name}={getattr(args, name)!r}" for name in unread)
        warnings.warn(
            f"without use_vllm nothing reads {listed}: neither TRL's own losses nor {correction.method!r}",
            stacklevel=outside(),
        )
    ignored = {name: instead for name, instead in ignored.items() if name not in unread}
    if ignored:
        listed = ", ".join(
            f"{name}={getattr(args, name)!r} ({_has_instead(correction.method, instead or _engine_weight(args))})"
            for name, instead in ignored.items()
        )
        but = (
            KL_READS_IT
            if "importance_sampling_level" in ignored and weights_kl(args)
            else f": set the one named here in {where} instead" * _can_be_set(listed, ignored)
        )
        warnings.warn(
            f"TRL's own losses read {listed}; the correction {correction.method!r} ignores this{but}",
            stacklevel=outside(),
        )


def _can_be_set(listed: str, ignored: Mapping[str, Any]) -> bool:
    """Whether an option of the correction is named in place of one that is ignored."""
    named = listed.count("(here:") - listed.count("(here: nothing")
    return named > 0 and [*ignored] != ["importance_sampling_level"]


def _engine_weight(args: Any) -> str:
    """The weight that TRL's options of its engine correction describe together, in this library's terms."""
    level, _, outside = getattr(args, "vllm_importance_sampling_mode", "sequence_mask").partition("_")
    low, high = (getattr(args, f"vllm_importance_sampling_clip_{end}", None) for end in ("min", "max"))
    name = "mask" if outside == "mask" else "bound"  # which truncates
    return "weight=" + repr({"name": name, "low": low, "high": high, "level": level})


def _has_instead(method: str, instead: str | Sequence[str]) -> str:
    """A few words on the options that a method has in place of one of TRL's."""
    if isinstance(instead, str):
        return f"here: {instead}"
    known = {one.name: one for one in catalogue()}.get(method)
    if known is None:  # a correction of the user's own
        return f"here: {' or '.join(instead)}, where a method has it"
    own = [name for name in instead if name in known.options and name != "cap"]
    if not own and "cap" in instead and "cap" in known.options:  # beside bounds of the ratio it bounds the engine's
        return "here: cap, a bound of the ratio itself, as in TRL's CISPO"
    if not own:
        return f"{method!r} has nothing like it"
    note = known.notes.partition(";")[0]
    unit = f", where {note}" * any(name in note for name in own)  # gmpo's bounds are in log space
    return f"here: {' and '.join(own)}{unit}"


KL_READS_IT = (
    ", but TRL's KL term does not: use_bias_correction_kl weights it by the ratio at importance_sampling_level, token "
    "or sequence (TRL's own GSPO has the sequence there, too: keep it for the same KL)"
)


def weights_kl(args: Any) -> bool:
    """Whether there is a KL term that TRL weights by the ratio of the policy to ``old_logp``."""
    return bool(getattr(args, "beta", 0.0) and getattr(args, "use_bias_correction_kl", False))
