"""Corrections in the loss hooks of other trainers, one small module for each; none imports its trainer before its use.

``offcorr.integrations.verl``: ``loss_mode="offcorr:minpro?eps_high=0.28"``.

Docs: the page "Other trainers" shows the line to write for each trainer, and which methods its hook carries.
"""

from offcorr.integrations import prime_rl, skyrl, slime, tinker, verl

__all__ = ["HOOKS"]

HOOKS = (verl.HOOK, skyrl.HOOK, prime_rl.HOOK, slime.HOOK, tinker.HOOK)
"""The loss hook of each trainer, which says what it can carry."""
