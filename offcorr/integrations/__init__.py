"""Corrections in the loss hooks of other trainers, one small module for each; none imports its trainer before its use.

``verl``, ``skyrl``, ``prime_rl``, ``slime`` and ``tinker``; docs/trainers.md shows the line to write for each, and
which methods its hook carries.

>>> import offcorr
>>> {hook.trainer for hook in HOOKS if hook.refusal(offcorr.get("minpro"))}
{'slime'}
"""

from offcorr.integrations import prime_rl, skyrl, slime, tinker, verl

__all__ = ["HOOKS"]

HOOKS = (verl.HOOK, skyrl.HOOK, prime_rl.HOOK, slime.HOOK, tinker.HOOK)
"""The loss hook of each trainer, which says what it can carry."""
