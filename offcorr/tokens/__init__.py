"""Token identity over the turns of a conversation: the trainer scores what the engine saw and sampled."""

from offcorr.tokens.compare import REASONS, REPAIRABLE, Difference, turn_ends
from offcorr.tokens.rows import collate, metrics, rollout_output
from offcorr.tokens.trajectory import Check, Row, Trajectory

__all__ = [
    "REASONS",
    "REPAIRABLE",
    "Check",
    "Difference",
    "Row",
    "Trajectory",
    "collate",
    "metrics",
    "rollout_output",
    "turn_ends",
]
