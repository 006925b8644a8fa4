"""Dumps with known causes whose tokens a real engine sampled: a vLLM server on this machine's CPU.

    python benchmarks/mismatch_served.py --python .venv-vllm/bin/python --output FOLDER
        [--architectures llama qwen3 gpt2] [--seeds 0] [--causes ...] [--sequences 32]

The trainer is that of ``offcorr.lab.mismatch``, and so are models, prompts and the choice of settings; vLLM is the
sampler.  What an engine can do wrong by itself, it does itself: precision, KV cache, sampling parameters, the kind of
log-probs, weights that are replaced while requests are in flight or without dropping cached prefixes.  Matrices are
quantised by rounding the checkpoint that is served.  Dumps that one server can make are made one after the other, one
server at a time.  Every replacement of weights is verified; vLLM 0.32 on a CPU does not get those of an MoE right, so
that its dumps with two weights fail with a message.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
import urllib.request
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "recipes"))
from demo_vllm import server  # noqa: E402

from offcorr.lab.mismatch import (  # noqa: E402
    ARCHITECTURES,
    CAUSES,
    STRENGTHS,
    VARIANTS,
    Dump,
    Setup,
    logged,
    prepare,
)
from offcorr.lab.mismatch.__main__ import write  # noqa: E402
from offcorr.lab.mismatch.decode import Decoded, score  # noqa: E402
from offcorr.lab.mismatch.generate import GROUP  # noqa: E402
from offcorr.lab.mismatch.language import EOS, FIRST  # noqa: E402
from offcorr.lab.mismatch.numerics import at_precision  # noqa: E402
from offcorr.rollout import Engine, save_for_engine  # noqa: E402
from offcorr.training import Precision  # noqa: E402

SERVED = [name for name in CAUSES if name not in ("mask", "unnormalised", "moe_routing")]
"""Causes without those that an engine cannot make: tools' answers, wrong arithmetic, routers alone."""

# One core is the fastest for models this small: several wait for each other at every step.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", str((os.cpu_count() or 1) - 1))

DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class Serving:
    """A way to start the server: the precision that the checkpoint is rounded to, and the server's arguments."""

    rounded: str
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class Job:
    """One dump to be made."""

    name: str
    architecture: str
    seed: int
    setup: Setup


def serving(setup: Setup) -> Serving:
    """The server that a setup needs."""
    precision = setup.settings.get("precision", "fp32")
    mode = "raw_logprobs" if setup.reported == "raw" else "processed_logprobs"
    arguments = ["--dtype", DTYPES.get(precision, "float32"), "--logprobs-mode", mode]
    # A short block, so that prompts fill some.
    arguments += ["--block-size", "32", "--max-model-len", "256"]
    if "stored" in setup.settings:
        setup.settings["stored"] = "fp8_e5m2" if setup.settings["stored"] == "fp8_e5m2" else "fp8_e4m3"
        arguments += ["--kv-cache-dtype", setup.settings["stored"]]
    return Serving("fp32" if precision in DTYPES else precision, tuple(arguments))


class Server:
    """The sampler of ``logged`` that is a running server.

    Args:
        url: of the server.
        folder: the checkpoint that it was started with.
    """

    def __init__(self, url: str, folder: Path) -> None:
        self.engine = Engine(url)
        self.url, self.folder = self.engine.urls[0], folder
        self.replaced = 0
        self.broken = False

    def __call__(self, setup: Setup, prompts: list[list[int]], longest: int) -> Decoded:
        """Completions with the log-probs that the server reports, of whichever kind."""
        bodies = [
            self.body(setup, prompt, longest) | {"seed": int(setup.rng.integers(2**31))} for prompt in prompts[::GROUP]
        ]
        if self.broken:
            raise RuntimeError("left out, because the server does not have the weights that it was given before")
        if len(setup.sampler) == 1:
            answers = self.complete(bodies)
        else:
            with tempfile.TemporaryDirectory() as new:
                save_for_engine(setup.sampler[1], new)
                answers = self.of_two_weights(setup, bodies, new)
        choices = [choice for answer in answers for choice in sorted(answer["choices"], key=lambda c: c["index"])]
        logp = [choice["logprobs"]["token_logprobs"] for choice in choices]
        return Decoded([choice["token_ids"] for choice in choices], logp, logp)

    def body(self, setup: Setup, prompt: list[int], longest: int) -> dict[str, Any]:
        """A request for the samples of one prompt with the setup's temperature and sampling parameters."""
        settings = setup.settings
        body: dict[str, Any] = {"prompt": prompt, "n": GROUP, "max_tokens": longest, "temperature": setup.temperature}
        body |= {"stop_token_ids": [EOS], "logprobs": 0, "return_token_ids": True}
        body |= {name: settings[name] for name in ("top_p", "top_k", "min_p") if name in settings}
        if "penalty" in settings:
            body[f"{settings['penalty_kind']}_penalty"] = settings["penalty"]
        if "forbidden_ids" in settings:
            forbidden = set(settings["forbidden_ids"])
            body["allowed_token_ids"] = [i for i in range(setup.subject.task.vocabulary) if i not in forbidden]
        return body

    def complete(self, bodies: list[dict[str, Any]]) -> list[Any]:
        """The answers to requests that run side by side."""
        name = self.engine.model(self.url)["id"]
        with ThreadPoolExecutor(len(bodies)) as pool:
            return list(pool.map(lambda body: self.post("/v1/completions", body | {"model": name}), bodies))

    def of_two_weights(self, setup: Setup, bodies: list[dict[str, Any]], new: str) -> list[Any]:
        """The answers of a sampler that gets new weights, and afterwards its first ones again."""
        try:
            if "swapped_at" in setup.settings:
                answers = self.swapped(setup, bodies, new)
            else:
                self.complete([body | {"n": 1, "max_tokens": 1} for body in bodies])
                self.reload(new)
                answers = self.complete(bodies)
            self.verify(setup, setup.sampler[1])
        finally:
            self.replaced += 1
            self.engine.replace_weights(str(self.folder), self.replaced)
        self.verify(setup, setup.sampler[0])
        return answers

    def swapped(self, setup: Setup, bodies: list[dict[str, Any]], folder: str) -> list[Any]:
        """The answers to requests during which the weights are replaced, once another request has some tokens."""
        # Early enough for the new weights to be there before the completions end.
        tokens = setup.settings["swapped_at"] = min(setup.settings["swapped_at"], bodies[0]["max_tokens"] // 4)
        setup.token_lags = None  # which token each sequence had reached is not known
        name = self.engine.model(self.url)["id"]
        counted = {name: value for name, value in bodies[0].items() if name not in ("n", "stop_token_ids")}
        counted |= {"model": name, "stream": True, "ignore_eos": True, "max_tokens": 128}

        replaced: list[float] = []

        def replace() -> None:
            with self.opened("/v1/completions", counted) as answer:
                for number, _ in enumerate(line for line in answer if line.startswith(b"data: {")):
                    if number == tokens:
                        self.reload(folder)
                        replaced.append(time.monotonic())

        thread = threading.Thread(target=replace)
        thread.start()
        try:
            answers = self.complete(bodies)
            ended = time.monotonic()
        finally:
            thread.join()
        if not replaced or replaced[0] > ended:
            raise RuntimeError("the weights were not replaced before the last completion ended")
        return answers

    def verify(self, setup: Setup, module: Any) -> None:
        """Raises where the server's weights are not the module's: a reload may say that it worked and have not."""
        generator = torch.Generator().manual_seed(0)
        known = torch.randint(FIRST, setup.subject.task.vocabulary, (4, 24), generator=generator).tolist()
        (by_server,) = self.engine.score(known)
        by_module, _ = score(module, [row[:1] for row in known], [row[1:] for row in known])
        gap = (torch.tensor(by_server) - torch.stack(by_module)).abs().mean().item()
        if gap > 1e-3:
            self.broken = True
            raise RuntimeError(f"after a reload the server's log-probs are {gap:.3f} nats from those of its weights")

    def reload(self, folder: str) -> None:
        """New weights, while cached prefixes and what is in flight keep their keys and values."""
        self.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}})

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The server's JSON answer."""
        with self.opened(path, body) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def opened(self, path: str, body: dict[str, Any]) -> Any:
        """The server's answer, to be read."""
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        return urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=600)


def main() -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", type=Path, required=True, help="of the environment that vLLM is installed in")
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--architectures", nargs="+", default=["llama", "qwen3", "gpt2"], choices=ARCHITECTURES)
    parser.add_argument("--causes", nargs="+", default=SERVED, choices=SERVED, metavar="CAUSE")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--strength", default="usual", choices=STRENGTHS)
    parser.add_argument("--sequences", type=int, default=32)
    args = parser.parse_args()

    failed = 0
    for architecture in args.architectures:
        # The dumps of one checkpoint that one server can make.
        jobs: dict[tuple[int, int, Serving], list[Job]] = defaultdict(list)
        for seed in args.seeds:
            for name in args.causes:
                if architecture in CAUSES[name].architectures:
                    setup = prepare([name], architecture=architecture, seed=seed, strength=args.strength)
                    setup.tools = setup.settings["tools"] = False
                    weights = id(setup.sampler[0])  # the model's own, or with an earlier adapter
                    jobs[seed % VARIANTS, weights, serving(setup)].append(Job(name, architecture, seed, setup))
        for number, ((variant, _, needed), group) in enumerate(jobs.items()):
            folder = args.output / f"served-{architecture}-{variant}-{number}"
            subject = group[0].setup.subject
            save_for_engine(at_precision(group[0].setup.sampler[0], Precision.named(needed.rounded)), folder)
            for part in ("tokenizer.json", "tokenizer_config.json"):
                (folder / part).write_bytes((subject.folder / part).read_bytes())
            print(f"{architecture} {variant}: {' '.join(needed.arguments)}, weights {needed.rounded}", flush=True)
            try:
                with server(args.python, folder, folder / "server.txt", *needed.arguments) as url:
                    sampler = Server(url, folder)
                    # Those that replace weights come last.
                    group.sort(key=lambda job: len(job.setup.sampler))
                    failed += sum(not made(args, sampler, job) for job in group)
            except SystemExit as error:
                print(f"  no server: {error}", flush=True)
                failed += len(group)
    print(f"{failed} failed" if failed else f"all in {args.output}")
    return 1 if failed else 0


def made(args: argparse.Namespace, sampler: Server, job: Job) -> bool:
    """Whether a dump could be made; it is then in the folder."""
    began = time.monotonic()
    try:
        records = logged(job.setup, args.sequences, sampler)
    except (OSError, RuntimeError) as error:
        print(f"  {job.name} {job.seed}: {error}", flush=True)
        return False
    settings = job.setup.settings
    dump = Dump(records, (job.name,), f"vllm-{job.architecture}", job.seed, args.strength, settings)
    print(f"  {write(dump, args.output).name} ({time.monotonic() - began:.1f} s)", flush=True)
    return True


if __name__ == "__main__":
    sys.exit(main())
