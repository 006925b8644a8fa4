"""``Batch``: the tokens of an update, with their shapes checked; ``Tokens``: the padded view that stages work on."""

from __future__ import annotations

import copy
import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, get_args

import torch
from einops import repeat
from torch import Tensor

from offcorr.shapes import BoolScalar, Mismatch, PerSequence, PerToken, TokenIndex, TokenMask
from offcorr.stages import pointwise
from offcorr.stages.checks import nearest, one_of, warn_once

__all__ = ["Batch", "LOG_LIMIT", "LogRatio", "Rows", "Tokens"]

LOG_LIMIT = 20.0
"""Log-ratios (nats) are clamped to +-LOG_LIMIT, token by token and again before ``exp``."""

ABOVE_ZERO = "{} is above 0 on valid tokens, as no log-prob is: were probabilities passed, or -log p?"
"""The warning where ``above_zero`` holds of a field."""

PLACEHOLDERS = {
    "rollout_logp": "rollout_logp is 0 on valid tokens that are unlikely by logp, or -100 or less where they are not, "
    "as no log-prob of a sampled token is: are these placeholders? Mask tokens that the model did not sample, such as "
    "a tool's, and pass NaN where the engine reported none of one that it did: it gets no engine weight, and "
    "offcorr/loss/unscored counts it",
    "old_logp": "old_logp is 0 on valid tokens that are unlikely by logp, or -100 or less where they are not, as no "
    "log-prob of a sampled token is: are these placeholders? Pass the log-probs under the weights that sampled",
}
"""The warnings where ``placeholders`` holds."""

NOT_PER_TOKEN = "{} {}, as no log-prob of single tokens does: were {} passed?"
"""The warning where ``not_of_tokens`` says so."""

BELOW_ZERO = {
    "entropy": "entropy is below 0 on valid tokens, as no entropy of a next-token distribution is: was sum p log p "
    "passed without its minus sign?",
    "sum_sq_probs": "sum_sq_probs is below 0 on valid tokens, as no sum of squares is",
    "weight": "weight is below 0 on valid tokens, where it turns the sign of the loss: was another field meant?",
}
"""The warnings where a field is below 0; an entropy and a sum of squares by more than rounding."""

ORIGINS = ("fresh", "replay", "demonstration", "prefix")
"""Names of where a sequence came from, at the index that stands for each in ``Batch.origin``:

- "fresh": sampled for this generation;
- "replay": sampled for an earlier one, by this run or another, with the log-probs that were recorded then;
- "demonstration": written by another model or by a person;
- "prefix": sampled for this generation after the first tokens of a stored trace, which are masked.
"""

_PER_TOKEN = (
    "mask",
    "old_logp",
    "rollout_logp",
    "entropy",
    "sum_sq_probs",
    "rollout_version",
    "turn_ids",
)
_PER_SEQUENCE = ("rewards", "group_ids", "origin")
_EITHER = ("advantages", "weight")
_REQUIRED = ("logp", "advantages", "mask")
_NUMBERS = ("trainer_version", "max_seqlen")
_INTEGER = ("group_ids", "rollout_version", "turn_ids", "origin", "cu_seqlens")


@dataclass(frozen=True, eq=False)
class Batch:
    """Log-probs of sampled tokens under up to three policies, with their advantages and their mask.

    Padded: B sequences, T positions.  ``Batch.packed`` takes N tokens of S sequences end to end instead.
    Everything but ``logp`` is treated as a constant.

    Args:
        logp: [B, T] log-probs (nats) under the weights being trained; carries the gradient.
        advantages: [B] or [B, T] (packed: [S] or [N]; where S = N, per sequence).
        mask: [B, T] bool or 0/1; the valid tokens. Values elsewhere, NaN included, are never used.
        old_logp: [B, T] log-probs under the policy that ratios are compared with (the proximal policy of decoupled
            PPO), usually the weights that sampled, in the trainer's precision. None: ``logp`` detached, so that every
            staleness ratio is 1.
        rollout_logp: [B, T] log-probs that the engine reported; NaN on a valid token: the engine could not score it.
        weight: [B] or [B, T] (packed: [S] or [N]), a detached weight from outside that multiplies each loss term.
        rewards: [B], for methods that look at the reward; the tokens of a sequence whose reward is NaN or infinite are
            then not trained on, and counted.
        group_ids: [B] int, the prompt each sequence belongs to; another number for each prompt of the optimizer step,
            on all ranks, as statistics of micro-batches are merged by it.
        entropy, sum_sq_probs: [B, T] of the trainer's next-token distribution (nats; sum of squared probabilities).
        rollout_version: [B, T] int, the weights' version each token was sampled with.
        trainer_version: the version being trained.
        turn_ids: [B, T] int; None: each contiguous run of the mask is a turn.
        origin: [B] int, where each sequence came from, an index of ``offcorr.training.ORIGINS``, or -1 where it is not
            known (such a sequence is in no series of an origin); None: all are fresh.

    Raises:
        TypeError: a field is not a tensor, or of the wrong kind of dtype, or ``trainer_version`` is no whole number.
        ValueError: a shape, device or mask value does not fit, ``origin`` holds a number that stands for none,
            ``cu_seqlens`` does not rise from 0 to N, or ``logp``, ``old_logp``, ``advantages`` or ``weight`` has no
            finite number on any valid token; the message says what came and what was wanted.  On a GPU values are not
            checked, as that costs a synchronisation: mask and origin are not looked at, tokens without a finite number
            are counted (``Metrics.compute`` raises if they are all of them), and a wrong ``cu_seqlens`` ends in a
            device-side assertion, as a wrong index does in torch.

    >>> import torch
    >>> batch = Batch(logp=torch.zeros(4, 128), advantages=torch.ones(4), mask=torch.ones(4, 128).bool())
    >>> Batch(logp=torch.zeros(4, 128), advantages=torch.ones(3), mask=torch.ones(4, 128).bool())
    Traceback (most recent call last):
    ValueError: advantages has shape (3,), expected (4,) or (4, 128) to go with logp (4, 128)
    """

    __slots__ = ("__dict__", "__weakref__", "_tokens")  # ``tokens`` is kept beside the fields, not among them

    logp: Tensor
    advantages: Tensor
    mask: Tensor
    old_logp: Tensor | None = None
    rollout_logp: Tensor | None = None
    weight: Tensor | None = None
    rewards: Tensor | None = None
    group_ids: Tensor | None = None
    entropy: Tensor | None = None
    sum_sq_probs: Tensor | None = None
    rollout_version: Tensor | None = None
    trainer_version: int | None = None
    turn_ids: Tensor | None = None
    origin: Tensor | None = None
    cu_seqlens: Tensor | None = None
    max_seqlen: int | None = None

    @classmethod
    def packed(cls, *, logp: Tensor, cu_seqlens: Tensor, **fields: Any) -> Batch:
        """N tokens of S sequences end to end: [N] for [B, T], [S] for [B], ``cu_seqlens`` [S + 1] from 0 to N.

        ``max_seqlen`` is the longest sequence's length, or more; where it is not given it is read from the device
        when the batch is padded, which the reference and statistics of controllers do.

        >>> import torch
        >>> batch = Batch.packed(logp=torch.zeros(5), advantages=torch.ones(2), mask=torch.ones(5).bool(),
        ...                      cu_seqlens=torch.tensor([0, 2, 5]))
        >>> batch.padded().logp.shape
        torch.Size([2, 3])
        """
        return cls(logp=logp, cu_seqlens=cu_seqlens, **fields)

    def __post_init__(self) -> None:
        self.check_kinds()
        if self.cu_seqlens is not None:
            self._check_cu_seqlens(self.cu_seqlens)
        elif self.max_seqlen is not None:
            raise ValueError(f"max_seqlen is {self.max_seqlen} without cu_seqlens, expected None: logp is padded")
        self.check_shapes()
        if not _unseen(self.mask):
            if self.mask.dtype != torch.bool:
                self.check_mask_values()
            self._check_numbers()
            self._check_origin()

    def check_kinds(self) -> None:
        """Raise for a field of another type, dtype, device or number of dimensions; no value is read."""
        for name in _REQUIRED:
            if getattr(self, name) is None:
                raise TypeError(f"{name} is None, expected a torch.Tensor")
        if self.trainer_version is not None and not _is_whole(self.trainer_version):
            raise TypeError(f"trainer_version is {self.trainer_version!r}, expected a whole number or None")
        for name, value in self._tensors().items():
            if not isinstance(value, Tensor):
                raise TypeError(f"{name} is a {type(value).__name__}, expected a torch.Tensor")
            if name != "mask" and value.is_floating_point() == (name in _INTEGER):
                wanted = "integers" if name in _INTEGER else "floating point"
                raise TypeError(f"{name} has dtype {value.dtype}, expected {wanted}")
            if value.device != self.logp.device:
                raise ValueError(f"{name} is on {value.device}, expected {self.logp.device}, where logp is")
        dims = 2 if self.cu_seqlens is None else 1
        if self.logp.ndim != dims:
            wanted = "(B, T)" if dims == 2 else "(N,), as cu_seqlens is given"
            raise ValueError(f"logp has shape {tuple(self.logp.shape)}, expected {wanted}")

    def check_shapes(self) -> None:
        """Raise for a field whose shape does not go with that of ``logp``; no value is read."""
        tokens, sequences = tuple(self.logp.shape), (self.sequences,)
        for name, value in self._tensors().items():
            allowed = (
                (tokens,)
                if name in _PER_TOKEN
                else (sequences,)
                if name in _PER_SEQUENCE
                else (sequences, tokens)
                if name in _EITHER
                else ()
            )
            if allowed and tuple(value.shape) not in allowed:
                wanted = " or ".join(map(str, allowed))
                raise ValueError(f"{name} has shape {tuple(value.shape)}, expected {wanted} to go with logp {tokens}")

    @property
    def sequences(self) -> int:
        """The number of sequences."""
        return self.logp.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    def check_mask_values(self) -> None:
        """Raise if a mask that is not bool holds anything but 0 and 1 (on a GPU this costs a synchronisation)."""
        odd = self.mask[(self.mask != 0) & (self.mask != 1)]
        if odd.numel():
            raise ValueError(f"mask holds {odd.flatten()[0].item()!r}, expected bool or only 0 and 1")

    def check_scored(self) -> None:
        """Raise where the engine's log-probs are not one a finite number (on a GPU this costs a synchronisation)."""
        if self.rollout_logp is not None:
            valid = self.rollout_logp.detach()[self.mask.bool()]
            if len(valid):
                _refuse_none_finite("rollout_logp", valid, len(valid))

    def _check_numbers(self) -> None:
        """Raise for a field without a finite number on any valid token, and warn of wrong signs and probabilities."""
        mask = self.mask.bool()
        for name in ("logp", "old_logp", "rollout_logp"):
            values = getattr(self, name)
            if values is None:
                continue
            valid = values.detach()[mask]
            if not len(valid) or -math.inf < valid.max() <= 0:  # NaN where one value is
                continue
            if name != "rollout_logp":  # NaN there: not scored
                _refuse_none_finite(name, valid, len(valid))
            if above_zero(valid):
                warn_once(ABOVE_ZERO.format(name))
        logp = self.logp.detach()[mask]
        for name, warning in PLACEHOLDERS.items():
            values = getattr(self, name)
            if values is not None and placeholders(values.detach()[mask], logp):
                warn_once(warning)
        sequence = self._sequence_of_tokens()[mask]
        for name in ("logp", "old_logp", "rollout_logp"):
            values = getattr(self, name)
            if values is not None and (found := not_of_tokens(values.detach()[mask], sequence)):
                warn_once(NOT_PER_TOKEN.format(name, *found))
        tokens = int(mask.sum())
        for name in _EITHER:
            values = getattr(self, name)
            if values is not None and tokens:
                _refuse_none_finite(name, self._of_valid(values.detach(), mask), tokens)
        for name in ("entropy", "sum_sq_probs"):
            values = getattr(self, name)
            if values is not None and tokens and above_zero(-values.detach()[mask]):
                warn_once(BELOW_ZERO[name])
        if self.weight is not None and (self._of_valid(self.weight.detach(), mask) < 0).any():
            warn_once(BELOW_ZERO["weight"])

    def _sequence_of_tokens(self) -> Tensor:
        """[B, T] (packed: [N]) the index of each token's sequence."""
        index = torch.arange(self.sequences, device=self.logp.device)
        if self.cu_seqlens is None:
            return index[:, None].expand_as(self.mask)
        return index.repeat_interleave(self.cu_seqlens.diff(), output_size=len(self.mask))

    def _check_origin(self) -> None:
        """Raise for a number that stands for no origin, whose tokens would be in no series."""
        if self.origin is not None and self.origin.numel():
            smallest, largest = int(self.origin.min()), int(self.origin.max())
            if smallest < -1 or largest >= len(ORIGINS):
                raise ValueError(
                    f"origin holds {smallest if smallest < -1 else largest}, expected indices from 0 to "
                    f"{len(ORIGINS) - 1}, of {ORIGINS}, or -1 where it is not known"
                )

    def _of_valid(self, values: Tensor, mask: Tensor) -> Tensor:
        """The values [B] or [B, T] (packed: [S] or [N]) that belong to a valid token; of a packed [S] one per token."""
        if values.shape == mask.shape and (self.cu_seqlens is None or self.sequences != len(mask)):
            return values[mask]
        if self.cu_seqlens is None:
            return values[mask.any(1)]
        return values.repeat_interleave(self.cu_seqlens.diff(), output_size=len(mask))[mask]

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))

    def replaced(self, **fields: Any) -> Batch:
        """The batch with fields computed from its own: unlike ``dataclasses.replace``, no value is read again.

        Raises:
            TypeError: a batch has no field of such a name (the message gives the nearest one), or a field is no tensor
                or has another dtype.
            ValueError: the shape of a field does not go with that of ``logp``.
        """
        for name in fields.keys() - _FIELDS:
            raise TypeError(
                f"Batch has no field {name!r}{nearest(name, sorted(_FIELDS), '.')} It has {sorted(_FIELDS)}"
            )
        batch = copy.copy(self)
        vars(batch).update(fields)
        batch.check_kinds()
        batch.check_shapes()
        return batch

    @property
    def tokens(self) -> Tokens:
        """The padded, detached view that the stages work on; built once."""
        tokens: Tokens | None = getattr(self, "_tokens", None)
        if tokens is None:
            with torch.no_grad():
                tokens = Tokens(self)
            object.__setattr__(self, "_tokens", tokens)
        return tokens

    def weighted(self, factor: PerSequence) -> Batch:
        """The batch with ``weight`` multiplied by a factor of each sequence, [B]."""
        weight = self.weight
        if weight is None or weight.shape == (self.sequences,):
            return self.replaced(weight=factor if weight is None else weight * factor)
        if self.cu_seqlens is None:
            factor = repeat(factor, "b -> b 1")
        else:
            factor = factor.repeat_interleave(self.cu_seqlens.diff(), output_size=self.logp.shape[0])
        return self.replaced(weight=weight * factor)

    def rows(self, index: Tensor | slice) -> Batch:
        """The sequences that ``index`` picks (padded batches)."""
        if self.cu_seqlens is not None:
            raise ValueError("rows() picks from a padded batch; this one is packed (cu_seqlens is given)")
        return self.replaced(**{name: value[index] for name, value in self._tensors().items()})

    def padded(self) -> Batch:
        """The same batch, padded; itself if it already is.  Differentiable in ``logp``.

        Without ``max_seqlen`` this reads the longest length from the device, which is a synchronisation.
        """
        if self.cu_seqlens is None:
            return self
        index, inside = self._token_index(self.cu_seqlens)

        def pad(name: str, value: Tensor) -> Tensor:
            if name in _PER_SEQUENCE or (name in _EITHER and value.shape[0] == self.sequences):
                return value
            spread = value[index] if value.numel() else value.new_zeros(index.shape)
            return spread.bool() & inside if name == "mask" else spread

        present = self._tensors()
        fields: dict[str, Any] = {name: pad(name, present[name]) for name in present if name != "cu_seqlens"}
        return self.replaced(cu_seqlens=None, max_seqlen=None, **fields)

    def repack(self, padded: Tensor) -> Tensor:
        """A [B, T] result in the layout of ``logp``; of a packed batch, with a synchronisation."""
        if self.cu_seqlens is None:
            return padded
        _, inside = self._token_index(self.cu_seqlens)
        return padded[inside]

    def _tensors(self) -> dict[str, Any]:
        fields = ((f.name, getattr(self, f.name)) for f in dataclasses.fields(self))
        return {name: value for name, value in fields if value is not None and name not in _NUMBERS}

    def _check_cu_seqlens(self, ends: Tensor) -> None:
        if ends.ndim != 1 or ends.shape[0] < 1:
            raise ValueError(f"cu_seqlens has shape {tuple(ends.shape)}, expected (S + 1,)")
        tokens, most = self.logp.shape[0], self.max_seqlen
        if most is not None and (not _is_whole(most) or most < 0):
            raise ValueError(f"max_seqlen is {most!r}, expected a number of tokens or None")
        rises = rises_to(tokens, ends)
        short = (ends.diff() > (tokens if most is None else most)).any()
        if _unseen(ends):
            torch._assert_async(rises, f"cu_seqlens does not rise from 0 to {tokens}, the number of tokens in logp")
            if most is not None:
                torch._assert_async(~short, f"max_seqlen is {most}, which a sequence of cu_seqlens is longer than")
        elif not rises:
            falls = (ends.diff() < 0).nonzero()
            where = f" and falls at {int(falls[0]) + 1}" if len(falls) else ""
            raise ValueError(
                f"cu_seqlens goes from {int(ends[0])} to {int(ends[-1])}{where}, expected to rise "
                f"from 0 to {tokens}, the number of tokens in logp"
            )
        elif short:
            raise ValueError(f"max_seqlen is {most}, expected at least {int(ends.diff().max())}, the longest sequence")

    def _token_index(self, ends: Tensor) -> tuple[Tensor, Tensor]:
        """Where each padded position lies in the packed row, and whether it lies inside its sequence."""
        lengths = ends.diff()
        width = self.max_seqlen
        if width is None:
            width = int(lengths.max()) if lengths.numel() else 0
        place = torch.arange(width, device=ends.device)
        inside = place < repeat(lengths, "s -> s 1")
        return torch.where(inside, repeat(ends[:-1], "s -> s 1") + place, 0), inside


_FIELDS = frozenset(f.name for f in dataclasses.fields(Batch))


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def check_batch(batch: object) -> None:
    """Raise ``TypeError`` for anything but a ``Batch``."""
    if not isinstance(batch, Batch):
        raise TypeError(f"batch is a {type(batch).__name__}, expected an offcorr.Batch")


def _refuse_none_finite(name: str, valid: Tensor, tokens: int) -> None:
    """Raise where none of a field's values that count is a finite number."""
    if not valid.isfinite().any():
        raise ValueError(
            f"{name} is {_word(valid)} on {'the only valid token' if tokens == 1 else f'all {tokens} valid tokens'}, "
            "expected finite numbers"
        )


def _word(values: Tensor) -> str:
    return "NaN" if values.isnan().all() else "NaN or infinite" if values.isnan().any() else "infinite"


def above_zero(logp: Tensor) -> bool:
    """Whether these [N], of log-probs or entropies, are above 0 by more than rounding."""
    # Rounding alone gives up to 1e-6 in float32, 5e-3 in bfloat16, and hardly on every token.
    return bool(((logp > 0.01) | ((logp > 1e-3) & (logp > 0).all())).any())


def not_of_tokens(logp: Tensor, sequence: Tensor) -> tuple[str, str] | None:
    """In words, that these [N] are sums or means over several sequences, and which; None where nothing shows it."""
    within = sequence.diff() == 0
    steps = logp.diff()
    inside, between = steps[within], steps[~within]
    if len(inside) < max(8, len(within) // 2) or not len(between):
        return None
    if not inside.any():
        differ = bool((between.abs() > 1e-3).any())  # one number everywhere was made up
        return ("is the same at every token of each sequence", "sums or means over the sequences") if differ else None
    if len(inside) >= 16 and inside.max() <= 0 and between.max() > 0:
        return "never rises from token to token of a sequence", "running sums"
    return None


def placeholders(rollout_logp: Tensor, logp: Tensor) -> bool:
    """Whether more than 1 % of these [N] are no log-probs of tokens that were sampled, whatever the trainer finds."""
    zero, few = rollout_logp == 0, max(2, 0.01 * len(logp))
    unlikely = int((zero & (logp < -1)).sum())  # a truncation leaves tokens alone, with a log-prob of 0: likely ones
    impossible = int(((rollout_logp <= -100) & (logp > -20)).sum())
    return impossible > few or unlikely > max(few, 0.2 * int(zero.sum()))


def rises_to(tokens: int, ends: Tensor) -> BoolScalar:
    """Whether ``ends`` [S + 1] goes from 0 to ``tokens`` and never falls: a bool on its device."""
    return (ends[0] == 0) & (ends[-1] == tokens) & (ends.diff() >= 0).all()


def _unseen(values: Tensor) -> bool:
    """Whether values are not checked: on a GPU reading them synchronises, on "meta" there are none."""
    return values.is_cuda or values.is_meta


@dataclass(frozen=True, eq=False)
class Rows:
    """The geometry of a padded batch: which tokens are valid, and the counts of them that spans need."""

    mask: TokenMask
    turn_ids: TokenIndex | None
    dtype: torch.dtype

    @cached_property
    def position(self) -> PerToken:
        """1-based count of valid tokens up to and including t."""
        return self.mask.cumsum(1).to(self.dtype)

    @cached_property
    def count(self) -> PerSequence:
        """Valid tokens of each sequence."""
        return self.mask.sum(1).to(self.dtype)

    @cached_property
    def turn(self) -> TokenIndex:
        """Turn numbers, dense over the batch, from 1; 0 under the mask."""
        if self.turn_ids is None:
            starts = self.mask & ~torch.nn.functional.pad(self.mask, (1, 0))[:, :-1]
            number = starts.flatten().cumsum(0)
        else:
            row = repeat(
                torch.arange(len(self.mask), device=self.mask.device),
                "b -> b t",
                t=self.mask.shape[1],
            )
            named = torch.stack([row.flatten(), self.turn_ids.flatten()], 1)
            number = torch.unique(named, dim=0, return_inverse=True)[1] + 1
        return torch.where(self.mask, number.view_as(self.mask), 0)


class LogRatio(NamedTuple):
    """Two policies compared, token by token (nats); 0 where there is nothing to compare."""

    clamped: PerToken
    raw: PerToken  # unclamped, for vetoes and effective sample sizes
    logp: PerToken  # of the first policy of the pair
    anchor_logp: PerToken  # of the second
    compared: TokenMask  # both log-probs are numbers


_OF_PAIR = {"log_ratio": "clamped", "raw_log_ratio": "raw", "logp": "logp", "anchor_logp": "anchor_logp"}


class Tokens:
    """The view of a batch that the stages work on: padded, float32 or float64, selected before any arithmetic.

    Where a token is masked, or has a log-prob or advantage that is not finite, every log-ratio is 0 and the
    advantage is 0, so garbage reaches neither a value nor a gradient.
    """

    def __init__(self, batch: Batch) -> None:
        batch = batch.padded()
        self.dtype = torch.promote_types(batch.logp.dtype, torch.float32)
        self.batch = batch
        mask = batch.mask.bool()

        advantages = batch.advantages.detach().to(self.dtype)
        if advantages.ndim == 1:
            advantages = repeat(advantages, "b -> b 1")
        old_logp = (batch.logp if batch.old_logp is None else batch.old_logp).detach()
        self.trainable: TokenMask = pointwise.trainable(mask, batch.logp.detach(), old_logp, advantages)

        self.logp = torch.where(self.trainable, batch.logp.to(self.dtype), 0)
        self.old_logp = torch.where(self.trainable, old_logp.to(self.dtype), 0)
        self.advantages = torch.where(self.trainable, advantages, 0)
        self.scored: TokenMask = torch.zeros_like(mask)
        self.unscored: TokenMask = self.scored  # none, where the engine reported nothing
        self.rollout_logp = self.old_logp
        if batch.rollout_logp is not None:
            reported = batch.rollout_logp.detach()
            self.scored = self.trainable & pointwise.finite(reported)
            self.unscored = self.trainable & ~self.scored
            self.rollout_logp = torch.where(self.scored, reported.to(self.dtype), self.old_logp)

        self.weight: PerToken | None = None
        if batch.weight is not None:
            weight = batch.weight.detach().to(self.dtype)
            self.weight = torch.where(mask, repeat(weight, "b -> b 1") if weight.ndim == 1 else weight, 0)

        self.mask: TokenMask = mask
        self.rows = Rows(mask, batch.turn_ids, self.dtype)
        self._log_ratios: dict[Mismatch, LogRatio] = {}

    @property
    def reward(self) -> PerToken | None:
        """The sequence's reward at each of its tokens."""
        if self.batch.rewards is None:
            return None
        return self._over_row(self.batch.rewards.detach().to(self.dtype))

    @property
    def entropy(self) -> PerToken | None:
        """The entropy of the distribution that each token was drawn from (nats)."""
        if self.batch.entropy is None:
            return None
        return torch.where(self.trainable, self.batch.entropy.detach().to(self.dtype), 0)

    def log_ratio(self, mismatch: Mismatch) -> LogRatio:
        """The two policies that ``mismatch`` names, compared; detached.

        Without ``rollout_logp`` the total ratio is the staleness ratio alone, with a warning; a stage that names
        ``rollout_logp`` in ``needs`` refuses such a batch instead.
        """
        if mismatch not in self._log_ratios:
            if mismatch not in get_args(Mismatch):
                raise ValueError(f"mismatch is {mismatch!r}{one_of(mismatch, get_args(Mismatch))}")
            if mismatch == "engine" and self.batch.rollout_logp is None:
                raise ValueError(
                    "rollout_logp is None, but log_ratio('engine') compares with it; a stage names it in needs"
                )
            if mismatch == "total" and self.batch.rollout_logp is None:
                warn_once(
                    "rollout_logp is None, so a total ratio (log_ratio('total')) is logp against old_logp, the "
                    "staleness alone. The engine's mismatch counts where its log-probs are given; "
                    "rollout_logp=old_logp says that there is none"
                )
            first = self.old_logp if mismatch == "engine" else self.logp.detach()
            second = self.old_logp if mismatch == "staleness" else self.rollout_logp
            compared = self.trainable if mismatch == "staleness" else self.scored
            raw = first - second
            self._log_ratios[mismatch] = LogRatio(raw.clamp(-LOG_LIMIT, LOG_LIMIT), raw, first, second, compared)
        return self._log_ratios[mismatch]

    def input(self, name: str, mismatch: Mismatch) -> PerToken | None:
        """An input of pointwise functions by name (``stages.definition.INPUTS``), but for ``value``; [B, T]."""
        if name in _OF_PAIR:
            return getattr(self.log_ratio(mismatch), _OF_PAIR[name])
        if name == "advantage":
            return self.advantages
        if name == "position":
            return self.rows.position
        others = {
            "reward": lambda: self.reward,
            "entropy": lambda: self.entropy,
            "length": lambda: self._over_row(self.rows.count),
            "mean_advantage": lambda: self._over_row(self.mean_advantage),
        }
        return others[name]()

    @property
    def mean_advantage(self) -> PerSequence:
        """Mean of the advantage over the sequence's valid tokens, added up in float64."""
        return self.advantages.sum(1, dtype=torch.float64).to(self.dtype) / self.rows.count.clamp(min=1)

    def _over_row(self, per_sequence: PerSequence) -> PerToken:
        return repeat(per_sequence, "b -> b t", t=self.mask.shape[1])
