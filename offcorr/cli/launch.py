"""``launch``: several processes by `accelerate launch`, whose failure is told by the process that failed."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from collections.abc import Sequence

__all__ = ["launch"]

REPEATED = ("torch.distributed.elastic.multiprocessing.api", "torch.distributed.elastic.agent.server.api")
"""The loggers in which torch says, after a process has said why it fails, that it failed."""


def launch(command: str, arguments: Sequence[str]) -> int:
    """Runs `accelerate launch` with these arguments and returns the exit code of the process that failed first, else 0.

    What a failing process writes to stderr is the end of the output: torch's table of exit codes and the launcher's own
    traceback are left out. A process that a signal has ended wrote nothing, so a line says which.

    Args:
        command: the name under which that line is written: "offcorr train".

    Raises:
        KeyboardInterrupt: Ctrl-C, after every process has been ended.
    """
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    for name in REPEATED:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        launch_command(launch_command_parser().parse_args(list(arguments)))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        return _exit_code(command, f"process {rank}", failure.exitcode)
    except subprocess.CalledProcessError as error:  # accelerate starts a single process itself
        return _exit_code(command, "the process", error.returncode)
    except SignalException as error:
        raise KeyboardInterrupt from error
    return 0


def _exit_code(command: str, process: str, code: int) -> int:
    """The code as a shell has it, 128 + the signal's number for one that a signal has ended."""
    if code >= 0:
        return code
    hint = " (often: no memory left)" if -code == signal.SIGKILL else ""
    print(f"{command}: {process} was ended by {signal.Signals(-code).name}{hint}", file=sys.stderr)
    return 128 - code
