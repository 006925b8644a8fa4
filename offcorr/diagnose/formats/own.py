"""Rows with the names of ``Record``'s fields: what ``DumpWriter`` writes, and what any other program may."""

from __future__ import annotations

from offcorr.diagnose.formats.base import Layout
from offcorr.diagnose.record import LOGPS, NAMES

OWN = Layout(
    name="rows with prompt_ids, completion_ids, rollout_logp and old_logp",
    recognises=lambda names: len(names & {"prompt_ids", "completion_ids", *LOGPS}) >= 2,
    columns=frozenset(NAMES),
    fields=lambda row, path: row,
)
"""``prompt_ids completion_ids rollout_logp old_logp logp entropy mask reward advantage group_id turn_ids
rollout_version trainer_version step origin``, one row per sequence; the first three are needed, and ``old_logp`` or
``logp``.
"""
