"""``in_short``, ``on_one_line``: a correction in a message, without the fields that are as they are by default."""

from __future__ import annotations

import dataclasses

from offcorr.correction import Correction
from offcorr.methods.registry import Method, find


def in_short(correction: Correction) -> str:
    """The name of a correction and the options that differ from its defaults; of one without a name, its stages.

    >>> import offcorr
    >>> print(in_short(offcorr.get("minpro", eps_high=0.3)))
    'minpro' {'eps_high': 0.3}
    >>> print(in_short(offcorr.get("gspo")))
    'gspo'
    >>> print(in_short(offcorr.Correction(ratio=offcorr.ratios.Turn(), gate=offcorr.gates.Clip(0.2, 0.28))))
    Correction(ratio=Turn(mismatch='staleness'), gate=Clip(eps_low=0.2, eps_high=0.28, dual_clip=None))
    """
    if correction.method == "custom":
        given = {
            field.name: getattr(correction, field.name)
            for field in dataclasses.fields(correction)
            if field.repr and getattr(correction, field.name) != field.default
        }
        return f"Correction({', '.join(f'{name}={value!r}' for name, value in given.items())})"
    options = correction.to_config()
    name = options.pop("method")
    try:
        found = find(name)
    except ValueError:  # its name was taken back since, or its file is elsewhere
        found = None
    defaults = {option: p.default for option, p in found.options.items()} if isinstance(found, Method) else {}
    given = {option: value for option, value in options.items() if option not in defaults or value != defaults[option]}
    return f"{name!r} {given}" if given else repr(name)


def on_one_line(correction: Correction) -> str:
    """As ``in_short``; of a correction without a name, the names of its stages.

    >>> import offcorr
    >>> print(on_one_line(offcorr.get("ppo")))
    'ppo'
    >>> print(on_one_line(offcorr.Correction(ratio=offcorr.ratios.Turn(), weight=offcorr.weights.Truncate(2.0))))
    'custom' (turn, clip, truncate)
    """
    if correction.method != "custom":
        return in_short(correction)
    return f"'custom' ({', '.join(stage.to_config()['name'] for stage in correction.stages.values())})"
