"""Cost of the monitor: the share of a training step that is spent in it.

    python benchmarks/monitor.py [--rounds 6] [--output result.json]

A run of ``trl_step.py``'s ``offcorr:dapo`` with the monitor on, whose methods are timed one by one, and the same run
with ``monitor="off"``, in turn.  The share is the time within the monitor, and that of the one metric that is measured
for it alone, over the time of the steps: a difference of two runs would be lost in the noise of the machine.  The
ratio of the two runs' steps is given as well.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from functools import wraps

import flags
import torch
import trl_step

from offcorr.metrics import Mean
from offcorr.training import Monitor
from offcorr.trl import GRPOConfig, GRPOTrainer

TIMED = ("keep", "masked", "masking", "end", "numbers")
"""The methods of the monitor that a step calls."""


def timed(seconds: dict[str, float], name: str, function):
    @wraps(function)
    def measured(*args, **kwargs):
        began = time.process_time()
        result = function(*args, **kwargs)
        seconds[name] += time.process_time() - began
        return result

    return measured


def surprise_seconds(rows: int, width: int, repeats: int = 200) -> float:
    """Seconds of the metric that is measured for the monitor alone, for one micro-batch."""
    logp, entropy, mask = torch.randn(rows, width), torch.rand(rows, width), torch.ones(rows, width).bool()
    began = time.process_time()
    for _ in range(repeats):
        surprise = -logp - entropy
        Mean(Mean.of(surprise, mask & surprise.isfinite()))
    return (time.process_time() - began) / repeats


def measure(options: argparse.Namespace) -> dict:
    seconds: dict[str, float] = defaultdict(float)
    for name in TIMED:
        setattr(Monitor, name, timed(seconds, name, getattr(Monitor, name)))
    steps: dict[str, list[float]] = {"on": [], "off": []}
    number = 0
    with tempfile.TemporaryDirectory() as folder:
        runs = {
            name: trl_step.make_trainer(GRPOTrainer, GRPOConfig, "offcorr:dapo", options, folder, monitor=monitor)
            for name, monitor in (("on", {"self_test": "off", "critical": "log", "warning": "log"}), ("off", "off"))
        }
        for index in range(options.rounds + 1):
            for name in list(runs)[:: 1 if index % 2 else -1]:
                trainer, clock = runs[name]
                if name == "on" and index == 1:
                    seconds.clear()  # the first round warms up
                trainer.train()
                taken = clock.steps(warm_up=0)
                if index:
                    steps[name] += taken
                    number += options.steps * (name == "on")
    own = {name: seconds[name] / number for name in TIMED}
    own["surprise"] = options.accumulation * surprise_seconds(options.batch, options.length)
    step = statistics.median(steps["on"])
    return {
        "share": sum(own.values()) / step,
        "seconds_per_step": {"step": step, **own},
        "ratio": step / statistics.median(steps["off"]),
        "steps": number,
    }


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps of a run")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=512)
    parser.add_argument("--batch", type=int, default=8, help="completions of a micro-batch")
    parser.add_argument("--length", type=int, default=128, help="longest completion")
    parser.add_argument("--accumulation", type=int, default=2)
    parser.add_argument("--logging-steps", type=int, default=1)
    parser.add_argument("--output", type=flags.output, help="write the result as JSON")
    options = parser.parse_args(namespace=argparse.Namespace(device="cpu"))
    torch.set_num_threads(1)
    result = measure(options)
    for name, seconds in result["seconds_per_step"].items():
        print(f"{name:10}{1000 * seconds:>10.3f} ms a step")
    print(f"{'share':10}{100 * result['share']:>10.2f} %")
    print(f"{'on / off':10}{result['ratio']:>10.3f}")
    if options.output:
        options.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
