"""Peak memory and speed of `offcorr diagnose` on large dumps.

    python benchmarks/diagnose_large.py --output benchmarks/results/diagnose_large.json

A file of a million tokens, written by ``DumpWriter`` (parquet), holds sequences of 1,000 tokens, eight per prompt, of a
sampler whose logits have noise.  A dump of N million tokens is a folder with N names of that file, as a run's steps lie
in a folder; every name is read as a file of its own.  Each dump is diagnosed by a process of its own, whose peak
memory (of the kernel's accounting) includes Python and the library.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import flags
import numpy as np

from offcorr.diagnose import DumpWriter, Record
from offcorr.lab import results

FILE = 1_000_000
"""Tokens of the file."""

LENGTH, PROMPT, GROUP, VOCABULARY = 1000, 200, 8, 50_000
"""Tokens of a completion, of a prompt, completions per prompt, token ids."""


def records(seed: int = 0):
    """Sequences of one file: noise of 0.01 on the logits of a trainer whose log-probs are those of sampled tokens."""
    rng = np.random.default_rng(seed)
    for row in range(FILE // LENGTH):
        if row % GROUP == 0:
            prompt = rng.integers(0, VOCABULARY, PROMPT)
        entropy = rng.gamma(0.5, 1.0, LENGTH)
        trainer = -entropy * rng.exponential(1.0, LENGTH)
        noise = 0.01 * rng.standard_normal(LENGTH) * (1 - np.exp(trainer))
        yield Record(
            prompt_ids=prompt,
            completion_ids=(VOCABULARY * rng.random(LENGTH) ** 4).astype(np.int64),
            rollout_logp=np.float32(np.minimum(trainer - noise, 0)).astype(float),
            old_logp=np.float32(trainer).astype(float),
            entropy=np.float32(entropy).astype(float),
            mask=np.ones(LENGTH, bool),
            group_id=row // GROUP,
            step=0,
        )


def measured(millions: int, file: Path, folder: Path) -> dict[str, Any]:
    """Diagnoses a dump of so many million tokens in a process of its own."""
    dump = folder / f"{millions}"
    dump.mkdir()
    for step in range(millions):
        os.link(file, dump / f"step_{step:06d}.parquet")
    command = [sys.executable, "-m", "offcorr", "diagnose", str(dump), "--json"]
    began = time.monotonic()
    with open(folder / "report.json", "wb") as report, open(os.devnull, "wb") as silent:
        process = subprocess.Popen(command, stdout=report, stderr=silent)
        _, status, usage = os.wait4(process.pid, 0)
    seconds = time.monotonic() - began
    if status:
        raise SystemExit(f"{' '.join(command)} exited with {os.waitstatus_to_exitcode(status)}")
    found = json.loads((folder / "report.json").read_text())
    cpu = usage.ru_utime + usage.ru_stime
    return {
        "tokens": int(found["numbers"]["dump_tokens"]),
        "tokens_tested": int(found["numbers"]["tokens"]),
        "verdict": found["verdict"],
        "peak_mb": round(usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e6),
        "seconds": round(seconds, 1),
        "cpu_seconds": round(cpu, 1),
        "tokens_per_cpu_second": round(found["numbers"]["dump_tokens"] / cpu),
    }


def main() -> None:
    """Measures dumps of growing size."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=flags.output, metavar="FILE.json")
    parser.add_argument("--millions", type=int, nargs="+", default=[1, 4, 10, 100], help="tokens of the dumps")
    parser.add_argument("--overwrite", action="store_true", help="replace the file of --output")
    options = parser.parse_args()
    if options.output is not None:
        results.free(options.output, options.overwrite)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "one.parquet")
        with DumpWriter(file) as writer:
            writer.write(records())
        size = file.stat().st_size
        rows = []
        for millions in options.millions:
            rows.append(measured(millions, file, Path(folder)))
            print(rows[-1], flush=True)
    setting = {"bytes per token": round(size / FILE, 1), "completion": LENGTH, "prompt": PROMPT, "samples": GROUP}
    command = " ".join(["python", "benchmarks/diagnose_large.py", *sys.argv[1:]])
    if options.output is not None:
        results.save({"about": results.about(command, setting), "dumps": rows}, options.output)


if __name__ == "__main__":
    main()
