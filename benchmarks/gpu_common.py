"""What the GPU benchmarks share: one device, a clock, a budget of time, and a report that a time-out does not lose.

Imported before triton: ``--smoke`` runs tiny shapes on a CPU under Triton's interpreter, to try the whole script
where there is no GPU; its times mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
if "--smoke" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # triton reads it once, when it is imported

import flags
import torch

Row = dict[str, Any]


def arguments(description: str, name: str, sections: list[str]) -> argparse.ArgumentParser:
    """The flags of every such script; ``name`` is the report's."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=description.split("\n")[0])
    parser.add_argument("--output", type=flags.output, default=Path(os.environ.get("OUT", ".")) / f"{name}.json")
    parser.add_argument("--budget", type=float, default=270, help="seconds after which nothing further is begun")
    parser.add_argument("--sections", nargs="+", default=sections, choices=sections)
    parser.add_argument("--smoke", action="store_true", help="tiny shapes under the interpreter, on a CPU")
    return parser


class Run:
    """The device, what is left of the time, and what has been found so far, on disk at any moment."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.smoke, self.gpu = options, options.smoke, not options.smoke
        if self.gpu and not torch.cuda.is_available():
            raise SystemExit("no GPU: --smoke tries the script on tiny shapes under Triton's interpreter")
        self.device = torch.device("cuda" if self.gpu else "cpu")
        self.began = time.perf_counter()
        self.found: dict[str, Any] = {"smoke": self.smoke, "machine": machine(self.gpu), "sections": {}, "wrong": []}
        self.flush()

    def left(self) -> float:
        """Seconds; below 0 nothing further is begun."""
        return self.options.budget - (time.perf_counter() - self.began)

    def flush(self) -> None:
        half_written = self.options.output.with_suffix(".tmp")
        half_written.write_text(json.dumps(self.found, indent=1) + "\n")
        half_written.replace(self.options.output)

    def add(self, series: str, row: Row) -> None:
        """One more row of a series, printed and written."""
        self.found.setdefault(series, []).append(row)
        self.flush()
        print(json.dumps({series: row}), flush=True)

    def wrong(self, what: str) -> None:
        """A result that is not what it should be: the script ends with 1, after everything else."""
        self.found["wrong"].append(what)
        self.flush()
        print(f"WRONG: {what}", flush=True)

    def sections(self, bodies: dict[str, Callable[[Run], None]]) -> None:
        """One after the other while there is time; what fails in one is recorded, and the next one runs."""
        for name in self.options.sections:
            began, status = time.perf_counter(), "done"
            if self.left() < 0:
                status = "left out: no time"
            else:
                try:
                    bodies[name](self)
                    status = "done" if self.left() > 0 else "cut short: no time"
                except Exception as error:
                    status = f"failed: {said(error)}"
                    self.wrong(f"{name}: {said(error)}")
            self.found["sections"][name] = {"status": status, "seconds": round(time.perf_counter() - began, 1)}
            self.flush()
            print(f"-- {name}: {status}, {self.options.budget - self.left():.0f} s of {self.options.budget:.0f}")

    def finish(self, table: str) -> None:
        """The table, the plots where matplotlib is, and 1 as the exit code where something was wrong."""
        print(table)
        try:
            import plots

            print("pictures:", *plots.draw(self.options.output))
        except Exception as error:  # they can be drawn later, elsewhere
            print(f"no pictures: {said(error)}")
        if self.found["wrong"]:
            raise SystemExit("\n".join(["wrong:", *self.found["wrong"]]))

    # -- measuring

    def synchronise(self) -> None:
        if self.gpu:
            torch.cuda.synchronize()

    def seconds(self, work: Callable[[], Any], rounds: int = 20) -> float:
        """Median wall-clock seconds of a call, the device waited for; three calls, or one, warm up."""
        taken = []
        warm_up, rounds = (3, rounds) if self.gpu else (1, 1)
        for number in range(warm_up + rounds):
            self.synchronise()
            began = time.perf_counter()
            work()
            self.synchronise()
            if number >= warm_up:
                taken.append(time.perf_counter() - began)
        return statistics.median(taken)

    def replay_seconds(self, work: Callable[[], Any], rounds: int = 100) -> float:
        """Seconds of device time of a call, captured as a CUDA graph and replayed; caches stay as it left them."""
        if not self.gpu:
            raise RuntimeError("a CPU has no graphs")
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")  # what waits for the device ends here, not in a broken capture
            try:
                work()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        graph.replay()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(rounds):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3 / rounds

    def attempt(self, measure: Callable[[], float]) -> tuple[float | None, str]:
        """(seconds, "") or (None, why not): what does not run, or not in this memory, is reported, not hidden."""
        try:
            return measure(), ""
        except Exception as error:
            why = said(error)
        self.recover()
        return None, why

    def recover(self) -> None:
        """After a failure: nothing pending, no memory held."""
        gc.collect()
        with contextlib.suppress(RuntimeError):
            self.synchronise()
            torch.cuda.empty_cache()

    def peak_gib(self, work: Callable[[], Any]) -> float | None:
        """GiB that a call holds at most, beyond what was there; None on a CPU."""
        if not self.gpu:
            work()
            return None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        return (torch.cuda.max_memory_allocated() - before) / 2**30


def said(error: BaseException) -> str:
    """Kind and first line."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


def machine(gpu: bool) -> Row:
    import triton

    import offcorr

    others = {}
    for name in ("trl", "liger-kernel", "cut-cross-entropy"):
        try:
            others[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            others[name] = "not installed"
    return {
        "device": torch.cuda.get_device_name() if gpu else f"{platform.machine()}, Triton's interpreter",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "offcorr": offcorr.__version__,
        **others,
    }


def target(found: dict[str, Any], what: str, measured: float | None, wanted: str, met: bool) -> None:
    """One line of ``found["targets"]``: a figure, and the one it was to be held against."""
    row = {"what": what, "measured": measured, "wanted": wanted, "met": met}
    found.setdefault("targets", []).append(row)


def targets_table(found: dict[str, Any]) -> str:
    lines = [
        f"{'met' if row['met'] else 'NOT met':<8}{row['what']}: {row['measured']:.3g}, wanted {row['wanted']}"
        for row in found.get("targets", [])
    ]
    return "\n".join(lines)
