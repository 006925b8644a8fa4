"""Work of the lab in several processes, on one thread of torch each."""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

import torch

from offcorr.lab.text import duration

__all__ = ["Clock", "add_processes", "cores", "one_thread", "shared_out"]

STARTING = 2.5
"""Seconds on an idle core until a process has imported the library and can work."""

Item = TypeVar("Item")
Result = TypeVar("Result")


def add_processes(parser: argparse.ArgumentParser) -> None:
    """Adds the option --processes, by default one process per core."""
    parser.add_argument(
        "--processes",
        type=int,
        default=cores(),
        metavar="N",
        help="processes at a time, of one thread each (default: one per core, here %(default)s)",
    )


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


class Clock:
    """The time that work shared out to processes takes, and what is left of it.

    Args:
        total: an estimate of the work, in seconds of one idle core.
        items, processes: as in ``shared_out``.

    >>> Clock(total=10.0, items=5, processes=2).seconds
    7.5
    """

    def __init__(self, total: float, items: int, processes: int) -> None:
        self.total, self.processes = total, max(1, min(processes, items))
        self.starting = 0.0 if _stays_here(items, processes) else STARTING
        self.began = time.monotonic()

    @property
    def seconds(self) -> float:
        """An estimate of the whole time: the processes' start and the work."""
        return self.starting + self.total / self.processes

    def left(self, done: float) -> str:
        """The time that is left, in words, after ``done`` seconds of the work; "" before a tenth of it is done."""
        if done < 0.1 * self.total:
            return ""
        passed = self.starting + done / self.processes
        return f"; about {duration((time.monotonic() - self.began) * (self.seconds / passed - 1))} left"


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Context with torch on one thread: the tensors are small, and threads cost more than they save."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def shared_out(
    work: Callable[[Item], Result],
    items: Sequence[Item],
    processes: int,
    prepare: Callable[..., None],
    arguments: tuple[Any, ...],
) -> Iterator[tuple[Item, Result]]:
    """Yields every item with ``work(item)`` as it is finished; with one process or item in this process, in order.

    Any exception, Ctrl-C included, ends the processes without waiting for what they are at.

    Args:
        prepare: called with ``arguments`` once in every process, before its first item.

    Raises:
        ValueError: a process ended early.
    """
    if _stays_here(len(items), processes):
        with one_thread():
            prepare(*arguments)
            for item in items:
                yield item, work(item)
        return
    others = multiprocessing.active_children()
    pool = ProcessPoolExecutor(
        min(processes, len(items)), multiprocessing.get_context("spawn"), _prepare, (prepare, arguments)
    )
    try:
        with _without_ctrl_c():  # which then reaches this process alone, and not in the middle of an import
            futures = {pool.submit(work, item): item for item in items}
        for future in as_completed(futures):
            yield futures[future], future.result()
    except BaseException as error:
        for process in multiprocessing.active_children():
            if process not in others:
                process.kill()
        if isinstance(error, BrokenProcessPool):
            raise ValueError("a process ended early, perhaps for want of memory; give fewer --processes") from error
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _stays_here(items: int, processes: int) -> bool:
    """Whether the work is done in this process, since others would only take time to start."""
    return processes == 1 or items < 2


def _prepare(prepare: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    prepare(*arguments)


@contextlib.contextmanager
def _without_ctrl_c() -> Iterator[None]:
    """Context in which Ctrl-C has to wait; processes that begin in it never see one."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
