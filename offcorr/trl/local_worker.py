"""``LocalWorker`` and ``VLLMWorker``: rollout workers for ``AsyncGRPOTrainer`` in a thread of its own process.

For machines without vLLM, small models and experiments with asynchrony: trainer and sampler run at the same time,
through the same two interfaces as TRL's own worker and weight transfer.
"""

from __future__ import annotations

import dataclasses
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from offcorr.data import WorkerReplay
from offcorr.rollout import Engine, Sampling, decode, score
from offcorr.rollout.decode import Decoded
from offcorr.rollout.sampler import eos_of, tokenize_with
from offcorr.rollout.served import ServedWeights
from offcorr.training import Precision, Replica
from offcorr.trl.async_grpo import CorrectedSample
from offcorr.trl.inputs import check_data, check_reward_funcs
from offcorr.trl.rewards import group_advantages, scored

__all__ = ["LocalWorker", "VLLMWorker"]


class LocalWorker:
    """Samples with the last weights it was sent: both ``rollout_worker=`` and ``weight_transfer=`` of the trainer.

    Args:
        model: of the trainer's kind, on the device to sample on; its weights are replaced.
        processing_class: the tokenizer.
        dataset: rows with ``prompt``; other columns reach the reward function.
        reward_func: TRL's: (completions=, prompts=, **columns) to a list of floats.
        args: the trainer's; it reads num_generations, max_completion_length, temperature, top_p, top_k, seed, and
            queue_maxsize and max_inflight_tasks (which TRL derives from max_staleness), which limit how far the worker
            runs ahead of the trainer.
        precision: of the sampler's weights, see ``offcorr.training.Precision``.
        prompts: number of prompts sampled at once.
        replay: replaces a share of the groups by earlier ones; None: none are.

    Each sample has the version of its weights, the log-probs of its decode, and ``old_logp``: the same tokens scored by
    the same weights in full precision.  A decode finishes with the weights it began with.
    """

    def __init__(
        self,
        model: nn.Module,
        processing_class: Any,
        dataset: Any,
        reward_func: Callable[..., list[float]],
        args: Any,
        *,
        precision: str = "fp32",
        prompts: int = 4,
        replay: WorkerReplay | None = None,
    ) -> None:
        check_reward_funcs(reward_func)
        check_data("dataset", dataset)
        self.rollout_buffer: queue.Queue = queue.Queue()
        self.metrics_queue: queue.Queue = queue.Queue()
        self.tokenizer, self.dataset, self.reward_func, self.args = processing_class, dataset, reward_func, args
        self.eos = eos_of(processing_class)
        self.device = next(model.parameters()).device
        self.precision, self.prompts = Precision.named(precision), prompts
        self.sampling = Sampling(args.temperature, args.top_p, max(args.top_k or 0, 0))
        self.replay = replay
        if replay is not None:
            replay.begin(args.max_staleness, args.seed)
        self._replica = Replica(model, self.device)
        self._lock = threading.Lock()
        self._incoming: dict[str, Tensor] = {}
        self._weights: tuple[int, dict[str, Tensor]] | None = None
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._last_put = time.time()

    # TRL's RolloutWorkerProtocol

    def start(self) -> None:
        """Begin sampling, with the weights that have been sent.

        Raises:
            ValueError: ``args`` is not the trainer's own, in which TRL sets how far the worker may run ahead.
        """
        for name in ("queue_maxsize", "max_inflight_tasks"):
            if not getattr(self.args, name) > 0:
                raise ValueError(
                    f"args.{name} is {getattr(self.args, name)}, so the worker would never sample: the trainer sets it "
                    "in its own configuration, so give the worker that same object"
                )
        self._stopped.clear()
        self._last_put = time.time()
        self._thread = threading.Thread(target=self._run, name="offcorr-local-worker", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Finish the decode at hand and end."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def update_model_version(self, model_version: int) -> None:
        """Name the version of the weights last sent, which the next decode uses."""
        with self._lock:
            self._weights = (model_version, self._incoming)

    def check_health(self, stale_after_s: float) -> None:
        """Raise ``RuntimeError`` if the thread has ended by an error, or has produced nothing for too long."""
        if self._error is not None:
            raise RuntimeError(f"the rollout worker's thread has ended: {self._error}") from self._error
        idle = time.time() - self._last_put
        if idle > stale_after_s:
            raise RuntimeError(f"the rollout worker has produced nothing for {idle:.0f} s")

    # TRL's WeightTransferProtocol

    def init_weight_transfer(self) -> None:
        """Nothing to set up: trainer and sampler share a process."""

    def pause(self) -> None:
        """Nothing to pause: a decode keeps the weights it began with."""

    def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None:
        """Copy the trainer's weights."""
        self._incoming = {name: weight.detach().to(self.device, copy=True) for name, weight in iterator}

    def resume(self) -> None:
        """See ``pause``."""

    def destroy(self) -> None:
        """Nothing to release."""

    # The thread

    def _run(self) -> None:
        try:
            order = np.random.default_rng(self.args.seed)
            rows = (int(i) for _ in itertools.count() for i in order.permutation(len(self.dataset)))
            generator = torch.Generator(self.device).manual_seed(self.args.seed)
            group = 0
            while not self._stopped.is_set():
                if self.rollout_buffer.qsize() >= min(self.args.queue_maxsize, self.args.max_inflight_tasks):
                    self._last_put = time.time()  # full, not stuck
                    self._stopped.wait(0.005)
                    continue
                for sample in self._groups(rows, group, generator):
                    self.rollout_buffer.put(sample)
                group += self.prompts
                self._last_put = time.time()
        except BaseException as error:  # noqa: BLE001 - the trainer raises it, in check_health
            self._error = error

    def _groups(self, rows: Iterator[int], first_group: int, generator: torch.Generator) -> list[CorrectedSample]:
        """The samples of as many groups as there are ``prompts``, some of them replayed."""
        replayed = []
        if self.replay is not None and self._weights is not None:
            replayed = self.replay.take(self.prompts, self._weights[0], first_group)
        first_group += (old := len({sample.group_id for sample in replayed}))
        picked = [self.dataset[i] for i in itertools.islice(rows, self.prompts - old)]
        new = self.sample(picked, first_group, generator) if picked else []
        if self.replay is not None:
            new = [dataclasses.replace(sample, origin="fresh") for sample in new]
            self.replay.keep(new)
        return [*replayed, *new]

    def sample(self, rows: list[dict[str, Any]], first_group: int, generator: torch.Generator) -> list[CorrectedSample]:
        """A group of completions for each row's prompt, scored, with group-relative advantages."""
        n = self.args.num_generations
        rows = [row for row in rows for _ in range(n)]
        with self._lock:
            if self._weights is None:
                raise RuntimeError("no weights were sent: pass the worker as weight_transfer= as well")
            version, weights = self._weights
        prompts = [self._encode(row["prompt"]) for row in rows]
        decoded = self._decode(version, weights, prompts, generator)
        scorer = self._replica.load(weights)
        old_logp = score(scorer, prompts, decoded.completion_ids, temperature=self.sampling.temperature)
        texts = self.tokenizer.batch_decode(decoded.completion_ids, skip_special_tokens=True)
        columns = {name: [row[name] for row in rows] for name in rows[0] if name != "prompt"}
        rewards = scored(self.reward_func, texts, prompts=[row["prompt"] for row in rows], **columns).reshape(-1, n)
        advantages = group_advantages(rewards)
        samples = []
        for i, (prompt, ids) in enumerate(zip(prompts, decoded.completion_ids, strict=True)):
            group, place = divmod(i, n)
            padding = [0.0] * len(prompt)
            samples.append(
                CorrectedSample(
                    prompt=_messages(rows[i]["prompt"], "user"),
                    completion=_messages(texts[i], "assistant"),
                    input_ids=np.array([*prompt, *ids], dtype=np.int64),
                    completion_mask=np.array([0] * len(prompt) + [1] * len(ids), dtype=np.int64),
                    old_log_probs=np.array([*padding, *decoded.logp[i]], dtype=np.float32),
                    advantage=float(advantages[group, place]),
                    model_version=version,
                    group_id=first_group + group,
                    metrics=_metrics(rewards[group], place),
                    enqueued_at=time.time(),
                    old_logp=np.array([*padding, *old_logp[i]], dtype=np.float32),
                )
            )
        return samples

    def _decode(
        self, version: int, weights: dict[str, Tensor], prompts: list[list[int]], generator: torch.Generator
    ) -> Decoded:
        return decode(
            self._replica.load(weights, self.precision),
            prompts,
            max_new_tokens=self.args.max_completion_length,
            eos_token_ids=[self.eos],
            sampling=self.sampling,
            generator=generator,
        )

    def _encode(self, prompt: Any) -> list[int]:
        return tokenize_with(self.tokenizer, [prompt])[0]


class VLLMWorker(LocalWorker):
    """A ``LocalWorker`` whose samples come from a running vLLM server, with weights sent through a folder.

    It needs no NCCL, and runs with servers on CPUs and GPUs.  The server's weights are replaced between two batches of
    samples, by the thread that samples, so that no sequence is of two versions; each replacement is checked, as
    ``offcorr.rollout.VLLMServer`` describes.

    Args:
        model: of the trainer's kind, for ``old_logp``; its weights are replaced.
        url, tolerance, timeout, patience: see ``offcorr.rollout.VLLMServer``.
        folder: for the weights on their way to the server, which must find it under the same name; None:
            ``engine_weights`` in ``args.output_dir``.
        All other arguments are those of ``LocalWorker``.
    """

    def __init__(
        self,
        model: nn.Module,
        processing_class: Any,
        dataset: Any,
        reward_func: Callable[..., list[float]],
        args: Any,
        *,
        url: str,
        prompts: int = 4,
        replay: WorkerReplay | None = None,
        tolerance: float = 0.1,
        folder: str | None = None,
        timeout: float = 600.0,
        patience: float = 10.0,
    ) -> None:
        super().__init__(model, processing_class, dataset, reward_func, args, prompts=prompts, replay=replay)
        self.engine = Engine(url, timeout=timeout, patience=patience)
        place = Path(folder or Path(args.output_dir, "engine_weights")).resolve()
        self._served = ServedWeights(self.engine, self._replica, place, tolerance, self.sampling)

    def _decode(
        self, version: int, weights: dict[str, Tensor], prompts: list[list[int]], generator: torch.Generator
    ) -> Decoded:
        self._served.ensure(version, weights, prompts)
        seeds = torch.randint(2**62, (len(prompts),), generator=generator, device=generator.device).tolist()
        decoded = self._served.sample(
            version,
            prompts,
            max_new_tokens=self.args.max_completion_length,
            eos_token_ids=[self.eos],
            seeds=seeds,
        )
        self._served.remember(prompts, decoded.completion_ids)
        return decoded


def _metrics(rewards: NDArray[np.float64], place: int) -> dict[str, float]:
    """Those of a sample, of the rewards of its group; NaN where there is no reward."""
    finite = rewards[np.isfinite(rewards)]
    return {"reward": float(rewards[place]), "reward_std": float(finite.std()) if len(finite) else np.nan}


def _messages(said: Any, role: str) -> list[dict[str, str]]:
    return [{"role": role, "content": said}] if isinstance(said, str) else said
