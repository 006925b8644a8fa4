"""``VLLMServer``: a sampler for TRL that is a running vLLM server, with weights that are really some updates old."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from accelerate.utils import broadcast_object_list, gather_object

from offcorr.folders import check_writable
from offcorr.rollout.decode import Decoded
from offcorr.rollout.engine import Engine, EngineError
from offcorr.rollout.prefixed import Prefixed
from offcorr.rollout.sampler import Sampler, draw_seeds, eos_token_ids, trainer_logp, unwrapped
from offcorr.rollout.served import ServedWeights
from offcorr.training.snapshots import changing_weights

Result = TypeVar("Result")


@dataclass(kw_only=True, eq=False)
class VLLMServer(Sampler):
    """A ``rollout_func`` for TRL's GRPOTrainer that samples from a running vLLM server, by token ids over HTTP.

    ``GRPOTrainer(..., rollout_func=VLLMServer(url="http://127.0.0.1:8000", sync_every=16))`` gives the server new
    weights every 16 optimizer updates, so that its samples are up to 15 updates older than the weights being trained,
    and more where a generation is used for several updates.

    Args:
        url: of the server, or of several with the same model, comma-separated; see ``Engine`` for how to start one.
        sync_every: optimizer updates between two replacements of the server's weights.
        temperature, top_p, top_k: None: the trainer's own.
        seed: None: the trainer's own.  Each prompt's seed depends on (seed, process, version, call) alone.
        tolerance: the largest mean difference of a log-prob (nats) between the server and the trainer, under the same
            weights, with which a replacement of the weights counts as done.
        folder: for the weights on their way to the server, which must find it under the same name; None:
            ``engine_weights`` in the trainer's output_dir.  It is removed once the server has read it.
        timeout, patience: see ``Engine``.

    A call returns the keys of ``OffPolicy``: ``logprobs`` are the server's own, ``old_logp`` those of a snapshot of the
    same weights in the trainer's precision, and ``rollout_version`` is the version of these weights.

    Every replacement is checked: the server scores known sequences, and where its log-probs are at least twice as near
    to those of the weights before, in whole or in the output head, or differ by more than ``tolerance``, the run ends
    with an error that says so.  A change that is smaller than the engine's rounding is not seen.  Before and after each
    batch the server is asked for the version it was marked with (by ``/weight_info``, which older vLLM lacks), and
    other weights than it should have end the run.  A server that was restarted gets its weights again.

    Evaluation samples the current weights, which are loaded for it.  One server serves one run at a time.

    Raises:
        ValueError: a url or a number that cannot be, or a setting of the trainer that would have to be ignored.
        EngineError: the server does not answer, refuses, or has other weights than it should.  In training, after the
            first update, a checkpoint is saved before it is raised, from which the run can be resumed.
    """

    # A repr has what decides the samples: a run that goes on from a checkpoint may have another server and other waits.
    url: str = field(repr=False)
    sync_every: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    tolerance: float = field(default=0.1, repr=False)
    folder: str | None = field(default=None, repr=False)
    timeout: float = field(default=600.0, repr=False)
    patience: float = field(default=10.0, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.sync_every, int) or isinstance(self.sync_every, bool) or self.sync_every < 1:
            raise ValueError(f"sync_every is {self.sync_every!r}, expected a whole number of updates, 1 or more")
        if not self.tolerance > 0:
            raise ValueError(f"tolerance is {self.tolerance!r}, expected a number of nats above 0")
        if self.folder is not None:
            check_writable("folder of VLLMServer", self.folder)
        self.engine = Engine(self.url, timeout=self.timeout, patience=self.patience)
        self._served: ServedWeights | None = None
        self._prepare(0)

    def _sample(self, request: Prefixed, trainer: Any) -> dict[str, list[Any]]:
        now = trainer.state.global_step
        if not self.ring.versions:
            self.begin(trainer)  # the first call attached, after on_train_begin
        elif trainer.model.training and now - self.ring.versions[-1] >= self.sync_every:
            self._take_snapshot(trainer)
        calls = dict(self._calls)
        try:
            return self._by_version(request, trainer, self.ring.versions[-1] if trainer.model.training else now)
        except EngineError as error:
            self._calls = calls  # a resumed run repeats this call
            raise EngineError(f"{error}{self._save(trainer)}") from error

    def _by_version(self, request: Prefixed, trainer: Any, version: int) -> dict[str, list[Any]]:
        if version in self.ring:
            weights = self.ring[version]
        else:  # an evaluation of the current weights
            weights = {name: w.to("cpu", copy=True) for name, w in changing_weights(unwrapped(trainer))}
        served = self._served_to(trainer)
        accelerator = trainer.accelerator
        contexts = request.contexts
        # Every rank gets the main one's outcome, so that none waits for another that has failed.
        ensure = partial(served.ensure, version, weights, contexts)
        _raise_first(broadcast_object_list([_attempt(ensure) if accelerator.is_main_process else None]))

        sample = partial(
            served.sample,
            version,
            contexts,
            max_new_tokens=request.limits,
            eos_token_ids=eos_token_ids(trainer),
            seeds=draw_seeds(self._draw_key(trainer), len(contexts)),
        )
        decoded = _attempt(sample)
        failed = decoded if isinstance(decoded, EngineError) else None
        _raise_first(gather_object([failed]) if accelerator.num_processes > 1 else [failed])
        sampled = cast(Decoded, decoded)
        served.remember(contexts, sampled.completion_ids)
        scorer = served.replica.load(weights)
        return request.output(sampled, trainer_logp(trainer, scorer, contexts, sampled.completion_ids), version)

    # ---- the trainer it samples for

    def begin(self, trainer: Any) -> None:
        """Start, or resume, at the trainer's current version; called by ``on_train_begin``."""
        self._replica = self._served = None  # training may have moved, wrapped or sharded the model since
        now = trainer.state.global_step
        if now == 0 or not self.ring.versions or self.ring.versions[-1] > now:
            self._restore_or_forget(trainer)
        if not self.ring.versions:
            self._take_snapshot(trainer)

    def record(self, trainer: Any) -> None:
        """Nothing to note: weights are copied when the server gets them."""

    def _take_snapshot(self, trainer: Any) -> None:
        self.ring.push(trainer.state.global_step, changing_weights(unwrapped(trainer)))

    def _served_to(self, trainer: Any) -> ServedWeights:
        if self._served is None:
            (self.engine.run,) = broadcast_object_list([self.engine.run])
            folder = Path(self.folder or Path(trainer.args.output_dir, "engine_weights")).resolve()
            sampling = self._sampling(trainer.args)
            self._served = ServedWeights(self.engine, self._replica_of(trainer), folder, self.tolerance, sampling)
        return self._served

    def _save(self, trainer: Any) -> str:
        """Save a checkpoint of a run that cannot go on; where it is."""
        now = trainer.state.global_step
        if now == 0 or not trainer.is_in_train:
            return ""
        folder = Path(trainer.args.output_dir, f"checkpoint-{now}")
        if not folder.exists():
            trainer._save_checkpoint(trainer.model, trial=None)
            trainer.callback_handler.on_save(trainer.args, trainer.state, trainer.control)
        return f"\nThe run after {now} updates is saved in {folder}: resume_from_checkpoint continues it."


def _attempt(call: Callable[[], Result]) -> Result | EngineError:
    try:
        return call()
    except EngineError as error:
        return error


def _raise_first(outcomes: list[Any]) -> None:
    for outcome in outcomes:
        if isinstance(outcome, EngineError):
            raise outcome
