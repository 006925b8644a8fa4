"""``in_short``: a correction in a message, without the fields that are as they are by default."""

from __future__ import annotations

import dataclasses

import offcorr
from offcorr.methods.registry import Method, find


def in_short(correction: offcorr.Correction) -> str:
    """The name of a correction and the options that differ from its defaults; of one without a name, its stages.

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
    options, found = correction.to_config(), find(correction.method)
    name = options.pop("method")
    defaults = {option: p.default for option, p in found.options.items()} if isinstance(found, Method) else {}
    given = {option: value for option, value in options.items() if option not in defaults or value != defaults[option]}
    return f"{name!r} {given}" if given else repr(name)
