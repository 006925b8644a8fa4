"""``heard``: a process that tests start hears Ctrl-C."""

from __future__ import annotations

import signal


def heard() -> None:
    """For ``preexec_fn``: a shell that started the tests in the background made them deaf to it, and their children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
