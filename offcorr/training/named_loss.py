"""``named_loss``: the correction that a trainer's ``loss_type`` and ``loss_kwargs`` name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from offcorr.correction import Correction
from offcorr.methods.registry import Method, available, find, resolve, split_spec
from offcorr.stages.checks import nearest
from offcorr.training.schedules import Annealed

__all__ = ["PREFIX", "TRL_LOSSES", "named_loss"]

TRL_LOSSES = ("bnpo", "cispo", "dapo", "dr_grpo", "grpo", "luspo", "sapo", "vespo")
"""The loss types of TRL, in every supported version (1.9.2 to 1.16.0): as bare names these run TRL's own loss.

Any other bare name is this library's; a loss that a later TRL adds is then an unknown method until it is listed here.
"""

PREFIX = "offcorr:"
"""``"offcorr:dapo"`` is this library's dapo; a bare ``"dapo"`` is TRL's."""


OF_ANOTHER_NAME = {
    "dr_grpo": "loss_type='offcorr:grpo' with loss_kwargs={'aggregate': 'seq-mean-token-sum-norm'}, which is dr_grpo",
    "bnpo": "loss_type='offcorr:grpo' with loss_kwargs={'aggregate': 'token-mean'}, the nearest to bnpo, which divides "
    "by the tokens of a micro-batch",
}
"""The losses of TRL that are no methods of this library, and what to write in their place."""


def ours(loss_type: str) -> str:
    """The words for this library's loss, where ``loss_type`` is one of TRL's names."""
    return OF_ANOTHER_NAME.get(loss_type, f"loss_type={PREFIX + loss_type!r} for this library's")


def named_loss(
    name: str,
    options: Mapping[str, Any],
    finish: Callable[[Correction], Correction] = lambda correction: correction,
) -> Annealed:
    """The correction of this name with these options, and its schedules.

    An option that ``options`` or the name itself gives, as in "holderpo?power=1.0", takes the place of the method's
    own schedule.

    Args:
        finish: makes the last change to the correction, whatever the numbers in force.

    Raises:
        TypeError, ValueError: the name is unknown, or an option is unknown or out of range; the message begins with
            ``loss_type`` or ``loss_kwargs``.

    >>> named_loss("minpro", {"eps_high": 0.3}).at(0.0).method
    'minpro'
    >>> named_loss("minprop", {})
    Traceback (most recent call last):
    ValueError: loss_type: unknown method 'minprop', did you mean 'minpro'? offcorr.available() lists them; your own ...
    >>> named_loss("DAPO", {})
    Traceback (most recent call last):
    ValueError: ... did you mean 'dapo'? 'dapo' is TRL's own loss; write loss_type='offcorr:dapo' for this library's
    """
    try:
        found, (_, in_name) = find(name), split_spec(name)
    except (TypeError, ValueError) as error:
        bare = name.partition("?")[0]
        if (of_trl := bare.removeprefix(PREFIX)) in OF_ANOTHER_NAME:
            raise ValueError(f"loss_type: {of_trl!r} is no method of this library: write {ours(of_trl)}") from error
        meant = nearest(bare, {*TRL_LOSSES, *available()}) if str(error).startswith(f"unknown method {bare!r}") else ""
        if of_trl := next((loss for loss in TRL_LOSSES if repr(loss) in meant), ""):
            said = "" if of_trl in OF_ANOTHER_NAME else f"; write {ours(of_trl)}"
            raise ValueError(f"loss_type: unknown method {bare!r}{meant} {of_trl!r} is TRL's own loss{said}") from error
        raise _of_option("loss_type", error) from error
    schedules = found.schedules if isinstance(found, Method) else {}
    own = {option: schedule for option, schedule in schedules.items() if option not in in_name}
    try:
        return Annealed(lambda **in_force: finish(resolve(name, **in_force)), {**own, **options})
    except (TypeError, ValueError) as error:
        raise _of_option("loss_kwargs" if options else "loss_type", error) from error


def _of_option(name: str, error: Exception) -> Exception:
    """The error of a correction, with the option that asked for it."""
    return (TypeError if isinstance(error, TypeError) else ValueError)(f"{name}: {error}")
