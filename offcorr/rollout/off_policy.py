"""``OffPolicy``: a sampler for TRL with weights of k updates ago, in a chosen precision."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import convert_to_fp32
from torch import Tensor, nn
from transformers import TrainerCallback

from offcorr.rollout.decode import Sampling, decode
from offcorr.training.precision import Precision
from offcorr.training.replica import Replica, base_of
from offcorr.training.snapshots import SnapshotRing, changing_weights

STATE_FILE = "offcorr_rollout.pt"
"""The file of a checkpoint folder with the sampler's state."""


@dataclass(kw_only=True, eq=False)
class OffPolicy:
    """A ``rollout_func`` for TRL's GRPOTrainer that samples off-policy by a known amount.

    ``GRPOTrainer(..., rollout_func=OffPolicy(lag=16, precision="int8"))`` simulates a sampler that is 16 optimizer
    updates behind and has int8 weights.

    Args:
        lag: optimizer updates; samples with the weights of version max(0, current - lag), where the version is
            ``trainer.state.global_step``.
        precision: of the sampler's weights: fp32, bf16, fp16, int8, fp8_e4m3 or fp8_e5m2; the last three are
            weight-only, one scale per output channel (see ``Precision``, ``Replica``).
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
        self.ring = SnapshotRing(self.lag)
        self._precision = Precision.named(self.precision)
        self._sampling(Sampling())  # checks the bounds
        if self.seed is not None:
            check_seed(self.seed)
        self._replica: Replica | None = None
        self._trainer: weakref.ref[Any] | None = None
        # by training or not: (version, calls so far at that version), for the next call's draws
        self._calls: dict[bool, tuple[int, int]] = {}

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """Sample one completion for each prompt (text, or messages); see the class."""
        self.attach(trainer)
        training = trainer.model.training
        now = trainer.state.global_step
        version = max(0, now - self.lag) if training else now
        weights = self._weights(trainer, version)
        sampler = self._replica_of(trainer).load(weights, self._precision if training else Precision.named("fp32"))
        prompt_ids = tokenize(prompts, trainer)
        generator = torch.Generator(trainer.accelerator.device)
        generator.manual_seed(self._draw_seed(trainer, training, now))
        tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
        decoded = decode(
            sampler,
            prompt_ids,
            max_new_tokens=trainer.args.max_completion_length,
            eos_token_ids=getattr(trainer, "eos_token_ids", None) or [tokenizer.eos_token_id],
            sampling=self._sampling(trainer.args),
            generator=generator,
        )
        scorer = self._replica_of(trainer).load(weights)
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": decoded.completion_ids,
            "logprobs": decoded.logp,
            "old_logp": trainer_logp(trainer, scorer, prompt_ids, decoded.completion_ids),
            "rollout_version": [version] * len(prompts),
        }

    # ---- the trainer it samples for

    def attach(self, trainer: Any) -> None:
        """Follow every optimizer step of ``trainer`` from now on; a second call does nothing.

        A trainer that attaches in its ``__init__`` is followed from its first step; otherwise the first call attaches,
        which is before the first step of a fresh run.

        Raises:
            ValueError: a setting of the trainer that this sampler would have to ignore.
        """
        if self._trainer is not None and self._trainer() is trainer:
            return
        _refuse_ignored(trainer)
        self.ring.clear()
        self._calls.clear()
        self._replica = None
        self._trainer = weakref.ref(trainer)
        trainer.add_callback(_Recorder(self, trainer))

    def begin(self, trainer: Any) -> None:
        """Start, or resume, at the trainer's current version; called by ``on_train_begin``."""
        now = trainer.state.global_step
        self._replica = None  # training may have moved, wrapped or sharded the model since
        if now == 0:
            self.ring.clear()
            self._calls.clear()
        elif self.ring.versions[-1:] != [now]:
            saved = Path(trainer.args.output_dir, f"checkpoint-{now}")
            if (saved / STATE_FILE).exists():
                self.restore(saved)
            else:
                self.ring.clear()
        self.record(trainer)

    def record(self, trainer: Any) -> None:
        """Take a snapshot of the trainer's weights; every rank must call it, since sharded ones are gathered."""
        if self.lag:
            self.ring.push(trainer.state.global_step, changing_weights(_unwrapped(trainer)))

    def _weights(self, trainer: Any, version: int) -> dict[str, Tensor]:
        now = trainer.state.global_step
        if self.lag and not self.ring.versions and trainer.model.training:
            self.begin(trainer)  # the first call attached, after on_train_begin
        if version == now:
            return dict(changing_weights(_unwrapped(trainer)))
        return self.ring[version]

    def _replica_of(self, trainer: Any) -> Replica:
        if self._replica is None:
            self._replica = Replica(_unwrapped(trainer), trainer.accelerator.device)
            give_fused_head(self._replica.module, trainer)
        return self._replica

    def _sampling(self, default: Any) -> Sampling:
        """This sampler's own settings, or those of ``default``."""

        def chosen(name: str) -> Any:
            own = getattr(self, name)
            return getattr(default, name) if own is None else own

        top_k = chosen("top_k")
        # Engines write -1, older TRL None, for a top-k that is off.
        return Sampling(chosen("temperature"), chosen("top_p"), 0 if top_k in (None, -1) else top_k)

    def _draw_seed(self, trainer: Any, training: bool, now: int) -> int:
        version, calls = self._calls.get(training, (now, 0))
        calls = calls if version == now else 0
        self._calls[training] = (now, calls + 1)
        seed = trainer.args.seed if self.seed is None else self.seed
        key = [seed, trainer.accelerator.process_index, int(training), now, calls]
        return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> 1)

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The snapshots and the position in the stream of draws; the same on every rank."""
        return {"ring": self.ring.state_dict(), "calls": dict(self._calls)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a result of ``state_dict``."""
        self.ring.load_state_dict(state["ring"])
        self._calls = {key: tuple(value) for key, value in state["calls"].items()}

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the state into a checkpoint folder."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        torch.save(self.state_dict(), Path(folder, STATE_FILE))

    def restore(self, folder: str | os.PathLike[str]) -> None:
        """Read the state from a checkpoint folder.

        Raises:
            FileNotFoundError: the folder has none.
        """
        self.load_state_dict(torch.load(Path(folder, STATE_FILE), weights_only=True))


def check_seed(seed: Any) -> None:
    """Raise ``ValueError`` unless ``seed`` is a whole number, 0 or more."""
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise ValueError(f"seed is {seed!r}, expected a whole number, 0 or more, or None for the trainer's")


class _Recorder(TrainerCallback):
    """Tells the sampler of every optimizer step, and saves it with the checkpoints."""

    def __init__(self, sampler: OffPolicy, trainer: Any) -> None:
        self.sampler = sampler
        self._trainer = weakref.ref(trainer)

    @property
    def _seen(self) -> Any:
        """The trainer, while the sampler still samples for it."""
        trainer = self._trainer()
        attached = self.sampler._trainer is not None and self.sampler._trainer() is trainer
        return trainer if attached else None

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        if self._seen is not None:
            self.sampler.begin(self._seen)

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if self._seen is not None:
            self.sampler.record(self._seen)

    def on_save(self, args, state, control, **kwargs) -> None:
        if self._seen is not None and args.should_save:
            self.sampler.save(Path(args.output_dir, f"checkpoint-{state.global_step}"))


def tokenize(prompts: list[Any], trainer: Any) -> list[list[int]]:
    """Token ids of the prompts, as the trainer makes them: text as it is, messages through the chat template."""
    processor = trainer.processing_class
    if isinstance(prompts[0], str):
        return processor(text=prompts)["input_ids"]
    parts = (part for messages in prompts for m in messages for part in _parts(m["content"]))
    if any(part.get("type") == "image" for part in parts):
        raise ValueError("OffPolicy samples from text; a prompt holds an image")
    return processor.apply_chat_template(
        conversation=prompts,
        chat_template=getattr(trainer, "chat_template", None),
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        **(getattr(trainer, "chat_template_kwargs", None) or {}),
    )["input_ids"]


def _parts(content: Any) -> list[dict[str, Any]]:
    return content if isinstance(content, list) else []


@torch.no_grad()
def trainer_logp(
    trainer: Any,
    scorer: nn.Module,
    prompt_ids: list[list[int]],
    completion_ids: list[list[int]],
) -> list[list[float]]:
    """Log-probs (nats) of the completions under ``scorer``, by the trainer's own function, with its mixed precision,
    temperature and micro-batch size.
    """
    accelerator = trainer.accelerator
    prompt_width, width = max(map(len, prompt_ids)), max(map(len, completion_ids))
    multiple = getattr(trainer, "pad_to_multiple_of", None) or 1
    prompt_width, width = (-(-w // multiple) * multiple for w in (prompt_width, width))
    ids = torch.full((len(prompt_ids), prompt_width + width), _pad_id(trainer))
    mask = torch.zeros_like(ids)
    for row, (prompt, completion) in enumerate(zip(prompt_ids, completion_ids, strict=True)):
        start = prompt_width - len(prompt)
        ids[row, start : prompt_width + len(completion)] = torch.tensor([*prompt, *completion])
        mask[row, start : prompt_width + len(completion)] = 1

    mode = "train" if trainer.model.training else "eval"
    logp = trainer._get_per_token_logps_and_entropies(
        in_mixed_precision(accelerator, scorer),
        ids.to(accelerator.device),
        mask.to(accelerator.device),
        width,
        batch_size=getattr(trainer.args, f"per_device_{mode}_batch_size"),
    )[0]
    return [row[: len(c)] for row, c in zip(logp.tolist(), completion_ids, strict=True)]


def in_mixed_precision(accelerator: Any, module: nn.Module) -> Callable[..., Any]:
    """The module's forward in the trainer's mixed precision, as Accelerate runs a model that it prepared."""

    def forward(**inputs: Any) -> Any:
        with accelerator.autocast():
            outputs = module(**inputs)
        return convert_to_fp32(outputs) if accelerator.native_amp else outputs

    return forward


def _pad_id(trainer: Any) -> int:
    return getattr(trainer.processing_class, "tokenizer", trainer.processing_class).pad_token_id


def _unwrapped(trainer: Any) -> nn.Module:
    return trainer.accelerator.unwrap_model(trainer.model)


def give_fused_head(module: nn.Module, trainer: Any) -> None:
    """Patch ``module`` for the trainer's log-prob function, which in newer TRL takes log-probs from the model where
    older ones take logits.
    """
    import trl.trainer.grpo_trainer as grpo

    if hasattr(grpo, "add_fused_lm_head"):
        grpo.add_fused_lm_head(
            base_of(module),
            temperature=trainer.temperature,
            cast_lm_head_to_fp32=trainer.args.cast_lm_head_to_fp32,
        )
    elif trainer.args.cast_lm_head_to_fp32:
        raise ValueError("cast_lm_head_to_fp32=True with OffPolicy needs a newer TRL (1.16)")


def _refuse_ignored(trainer: Any) -> None:
    """Raise ``ValueError`` for settings that OffPolicy would otherwise silently ignore."""
    args = trainer.args
    for name, value, remedy in (
        ("use_vllm", args.use_vllm, "vLLM samples by itself: drop rollout_func or use_vllm"),
        ("min_p", args.min_p, "leave it unset"),
        ("repetition_penalty", args.repetition_penalty != 1.0, "leave it at 1.0"),
        ("generation_kwargs", args.generation_kwargs, "leave it unset"),
        ("tools", getattr(trainer, "tools", None), "TRL runs tools with its own generation only"),
    ):
        if value:
            raise ValueError(f"OffPolicy does not apply {name} ({value!r}): {remedy}")
