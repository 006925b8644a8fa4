"""A user's file: two methods that fail the contract, and one that passes."""

import offcorr
from offcorr import gates, ops


def holes(log_ratio, advantage):
    surrogate = ops.exp(log_ratio) * ops.sqrt(0.2 - log_ratio) * advantage  # NaN beyond a log-ratio of .2
    return surrogate, surrogate


def triple(log_ratio, advantage):
    surrogate = ops.exp(log_ratio) * advantage
    return surrogate, 3 * surrogate


class Holes(gates.Gate):
    surrogate = staticmethod(holes)


class Triple(gates.Gate):
    surrogate = staticmethod(triple)


def with_holes():
    return offcorr.Correction(gate=Holes())


def tripled():
    return offcorr.Correction(gate=Triple())


finished = offcorr.Correction(gate=gates.DetachedClip(cap=2.0))
