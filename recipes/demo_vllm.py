"""The effect of a correction with a real engine: a vLLM server on this machine samples, and lags behind.

    make demo-vllm       # or: python recipes/demo_vllm.py --python .venv-vllm/bin/python [--short]

The demo's three losses one after the other, each on samples of one vLLM server in bf16 whose weights are replaced every
32 optimizer updates.  Staleness and the engine's own gap are measured side by side.  The server is started and stopped
here; vLLM lives in an environment of its own, whose Python is passed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from offcorr import toy
from offcorr.flags import Parser
from offcorr.folders import check_writable
from offcorr.rollout import Engine, EngineError, save_for_engine

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from demo import RUNS, SHORT, alarms, comparison, next_commands, plot, record, train_all, verdict  # noqa: E402

SYNC_EVERY = 32
STARTING = 300  # seconds within which a server must be up
SETTING = """\
A model of 0.1 million parameters learns arithmetic with GRPO, three times, from one start.
A vLLM server samples, in {dtype}; it gets the trainer's weights every {sync_every} updates, so that
its samples are up to {oldest} updates old.
  TRL's default  the loss of a plain GRPOConfig, one update per generation: its anchor is
                 recomputed with the current weights, so every ratio is 1 at any lag
                 (TRL's use_vllm=True adds an engine weight to it, which this run has not)
  MinPRO, CTPO   --loss_type minpro, ctpo: their anchor is a snapshot, the log-probs of
                 the weights that sampled, in the trainer's precision"""
COST = {
    "full": "This takes 10 to 20 minutes on two cores, and 6 GB of memory; no GPU, no download.",
    "short": "This takes three to six minutes on two cores, and 6 GB of memory; no GPU, no download.",
}


def main() -> int:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", type=Path, required=True, help="of the environment that vLLM is installed in")
    parser.add_argument("--dtype", default="bfloat16", help="of the server's weights")
    parser.add_argument("--sync_every", type=int, default=SYNC_EVERY, help="updates between two weights of the server")
    parser.add_argument("--short", action="store_true", help="a few updates: too few to compare the methods")
    parser.add_argument("--output", type=Path, help="where the runs go (default: runs/demo-vllm)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if not args.python.exists():
        parser.error(f"--python {args.python} is not there: `make .venv-vllm` makes an environment with vLLM")
    steps = SHORT if args.short else 160
    output = args.output or Path("runs/demo-vllm-short" if args.short else "runs/demo-vllm")
    try:
        check_writable("--output", output)
    except ValueError as error:
        parser.error(str(error))
    oldest = min(args.sync_every, steps) - 1

    print(SETTING.format(dtype=args.dtype, sync_every=args.sync_every, oldest=oldest))
    print(f"{COST['short' if args.short else 'full']}\n", flush=True)
    model = engine_model(args.seed, output / "model")
    with server(args.python, model, output / "server.txt", "--dtype", args.dtype, "--max-model-len", "256") as url:
        print(f"Three runs of recipes/grpo.py --sampler {url}, {steps} updates each:", flush=True)
        sampler = {"sampler": url, "sync_every": args.sync_every}
        # One after the other: a server has one run's weights.
        logs = train_all(RUNS, output, steps, args.seed, sampler, at_once=1)
        vllm = Engine(url).version()
    title = f"vLLM server in {args.dtype}, new weights every {args.sync_every} updates"
    Console().print(comparison(logs, title))
    print(f"\n{verdict(logs, full=not args.short, age=f'up to {oldest} updates')}\n")
    print(f"picture: {plot(logs, output / 'demo_vllm.png', title)}")
    settings = {name: value for name, value in vars(args).items() if name != "python"} | {"updates": steps}
    numbers = record(logs, output / "demo_vllm.json", settings, {"sync_every": args.sync_every, "vllm": vllm})
    for line in alarms(logs, output):
        print(line)
    print(f"numbers: {numbers}\n\n{next_commands(output / 'trl' / 'rollouts', str(model), args.seed)}")
    return 0


def engine_model(seed: int, folder: Path) -> Path:
    """The toy model as a folder that vLLM can serve and reload."""
    path = toy.model_path(seed=seed)
    save_for_engine(AutoModelForCausalLM.from_pretrained(path), folder)
    AutoTokenizer.from_pretrained(path).save_pretrained(folder)
    return folder


@contextlib.contextmanager
def server(python: Path, model: Path, log: Path, *arguments: str, port: int | None = None) -> Iterator[str]:
    """A running vLLM server's vllm://host:port; it is stopped at the end, however that comes.

    Args:
        log: the file that its output goes to.
        arguments: further ones of vLLM's server.
        port: None: one that is free.
    """
    if port is None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
    command = [str(python.absolute()), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model.resolve())]
    command += ["--host", "127.0.0.1", "--port", str(port), "--logprobs-mode", "processed_logprobs"]
    command += ["--enforce-eager", "--max-num-seqs", "64", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
        "VLLM_SERVER_DEV_MODE": "1",  # for the replacement of weights
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
    }
    environment.pop("OMP_NUM_THREADS", None)
    log.parent.mkdir(parents=True, exist_ok=True)
    # A termination runs the `finally` below, as Ctrl-C does.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    with open(log, "wb") as output:
        # A session of its own, so that the engine's own processes can be stopped with it.
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
            preexec_fn=_end_with_parent if sys.platform == "linux" else None,
        )
    try:
        _wait(process, f"http://127.0.0.1:{port}", log)
        yield f"vllm://127.0.0.1:{port}"
    finally:
        _stop(process)
        signal.signal(signal.SIGTERM, before)


def _end_with_parent() -> None:
    """Ask Linux to end this process when the one that started it is killed, which runs no `finally`."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # 1: PR_SET_PDEATHSIG


def _wait(process: subprocess.Popen[Any], url: str, log: Path) -> None:
    began = said = time.monotonic()
    print("Starting a vLLM server (about a minute) ...", flush=True)
    while True:
        with contextlib.suppress(EngineError):
            Engine(url, patience=0.1, timeout=5).model(url)
            print(f"It is up after {time.monotonic() - began:.0f} s.", flush=True)
            return
        if process.poll() is not None or time.monotonic() - began > STARTING:
            last = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            ended = f"ended with status {process.poll()}" if process.poll() is not None else "is not up in time"
            raise SystemExit(f"the vLLM server {ended}; the end of its output, {log}:\n{last}")
        if time.monotonic() - said > 30:
            said = time.monotonic()
            print(f"  {said - began:4.0f} s", flush=True)
        time.sleep(1)


def _stop(process: subprocess.Popen[Any]) -> None:
    for how in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as at Ctrl-C: servers and runs end with it
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("stopped; nothing was compared", file=sys.stderr)
        sys.exit(130)
