"""``OffPolicy``: a sampler for TRL with weights of k updates ago, in a chosen precision."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offcorr.rollout.decode import decode
from offcorr.rollout.prefixed import Prefixed
from offcorr.rollout.sampler import Sampler, draw_seeds, eos_token_ids, trainer_logp, unwrapped
from offcorr.stages.checks import outside
from offcorr.training.precision import Precision
from offcorr.training.snapshots import changing_weights


@dataclass(kw_only=True, eq=False)
class OffPolicy(Sampler):
    """A ``rollout_func`` for TRL's GRPOTrainer that samples off-policy by a known amount.

    ``GRPOTrainer(..., rollout_func=OffPolicy(lag=16, precision="int8"))`` simulates a sampler that is 16 optimizer
    updates behind and has int8 weights.

    Args:
        lag: optimizer updates; samples with the weights of version max(0, current - lag), where the version is
            ``trainer.state.global_step``.  A run that resumes without weights of that age takes the oldest that it
            holds, and says so.
        precision: of the sampler's weights: fp32, bf16, fp16, int8, int4, fp8_e4m3 or fp8_e5m2; the last four
            are weight-only, one scale per output channel (see ``Precision``, ``Replica``).
        temperature, top_p, top_k: None: the trainer's own.
        seed: None: the trainer's own.  Draws depend on (seed, process, version, call) alone, so evaluating in between
            changes nothing, and a resumed run needs no generator state.

    A call returns, beside TRL's keys, for every sequence:

        logprobs: of each sampled token, from the decode with its KV cache: after temperature, top-k and top-p,
            renormalised (vLLM's processed log-probs, as TRL's vLLM path reports them).
        old_logp: of the same tokens under the same snapshot, in the trainer's precision, by the trainer's own log-prob
            function and temperature, for ``anchor="snapshot"``.
        rollout_version: the version of the weights that sampled.

    Evaluation (the trainer's model in eval mode) concerns the policy being trained: it samples the current weights in
    fp32, whatever ``lag`` and ``precision`` are, at the same temperature.
    """

    lag: int = 0
    precision: str = "fp32"
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        self._prepare(self.lag)
        self._precision = Precision.named(self.precision)

    def _sample(self, request: Prefixed, trainer: Any) -> dict[str, list[Any]]:
        training = trainer.model.training
        now = trainer.state.global_step
        version = self._version(trainer) if training else now
        weights = self._weights(trainer, version)
        sampler = self._replica_of(trainer).load(weights, self._precision if training else Precision.named("fp32"))
        generator = torch.Generator(trainer.accelerator.device)
        generator.manual_seed(draw_seeds(self._draw_key(trainer), 1)[0])
        decoded = decode(
            sampler,
            request.contexts,
            max_new_tokens=request.limits,
            eos_token_ids=eos_token_ids(trainer),
            sampling=self._sampling(trainer.args),
            generator=generator,
        )
        scorer = self._replica_of(trainer).load(weights)
        old_logp = trainer_logp(trainer, scorer, request.contexts, decoded.completion_ids)
        return request.output(decoded, old_logp, version)

    def attach(self, trainer: Any) -> None:
        """As ``Sampler.attach``; warns where ``max_steps`` is too small for any sample to be ``lag`` updates old."""
        known = self._trainer is not None and self._trainer() is trainer
        super().attach(trainer)
        if not known and trainer.args.max_steps > 0:
            self._warn_of_unreached(trainer, trainer.args.max_steps)

    def begin(self, trainer: Any) -> None:
        """Start, or resume, at the trainer's current version; called by ``on_train_begin``."""
        self._replica = None  # training may have moved, wrapped or sharded the model since
        if trainer.state.global_step == 0 or self.ring.versions[-1:] != [trainer.state.global_step]:
            self._restore_or_forget(trainer)
        self.record(trainer)
        self._warn_of_missing(trainer)
        if trainer.args.max_steps <= 0:  # only now the epochs are counted
            self._warn_of_unreached(trainer, trainer.state.max_steps)

    def record(self, trainer: Any) -> None:
        """Take a snapshot of the trainer's weights; every rank must call it, since sharded ones are gathered."""
        if self.lag:
            self.ring.push(trainer.state.global_step, changing_weights(unwrapped(trainer)))

    def _version(self, trainer: Any) -> int:
        """Of the weights that sample: ``lag`` updates old, or the oldest that the run holds."""
        now = trainer.state.global_step
        if not self.lag:
            return now
        if not self.ring.versions:
            self.begin(trainer)  # the first call attached, after on_train_begin
        return max(now - self.lag, self.ring.versions[0])

    def _warn_of_unreached(self, trainer: Any, steps: int) -> None:
        """Say where the lag reaches back to the first weights at every generation of so many optimizer steps."""
        args = trainer.args
        generation = args.steps_per_generation * args.num_iterations
        last = (steps * args.gradient_accumulation_steps - 1) // generation * generation
        oldest = last // args.gradient_accumulation_steps
        if steps > 0 and self.lag > 0 and self.lag >= oldest and trainer.accelerator.is_main_process:
            smaller = f"a lag below {oldest}, or " if oldest > 1 else ""
            warnings.warn(
                f"lag={self.lag} keeps the sampler at the first weights, unless the run resumes from older ones: of "
                f"{steps} optimizer steps the last generation is sampled after {oldest}, so all come from the weights "
                "that the run begins with. "
                f"Take {smaller}more steps",
                stacklevel=outside(),
            )

    def _warn_of_missing(self, trainer: Any) -> None:
        """Say where a resumed run does not hold the weights that the lag asks for."""
        now = trainer.state.global_step
        if not self.lag or self.ring.versions[0] <= max(0, now - self.lag) or not trainer.accelerator.is_main_process:
            return
        oldest = self.ring.versions[0]
        warnings.warn(
            f"the run that resumes at step {now} samples with weights of {self.lag} updates ago (lag={self.lag}), and "
            f"its checkpoint holds none from before version {oldest}: up to step {oldest + self.lag} it samples with "
            "these, the oldest held, as a fresh run does with its first",
            stacklevel=outside(),
        )

    def _weights(self, trainer: Any, version: int) -> dict[str, Tensor]:
        now = trainer.state.global_step
        if version == now:
            return dict(changing_weights(unwrapped(trainer)))
        return self.ring[version]
