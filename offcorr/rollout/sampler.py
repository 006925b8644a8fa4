"""``Sampler``: the part that ``OffPolicy`` and ``VLLMServer`` share: following a trainer, seeds and checkpoints."""

from __future__ import annotations

import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import convert_to_fp32
from torch import nn
from transformers import TrainerCallback

from offcorr.rollout.decode import Sampling
from offcorr.rollout.prefixed import Prefixed
from offcorr.training.replica import Replica, base_of
from offcorr.training.snapshots import SnapshotRing

STATE_FILE = "offcorr_rollout.pt"
"""The file of a checkpoint folder with the sampler's state."""


class Sampler(ABC):
    """A ``rollout_func`` that follows the trainer it samples for, and keeps snapshots of its weights.

    A subclass has the fields ``temperature``, ``top_p``, ``top_k`` and ``seed`` (None: the trainer's own), calls
    ``_prepare``, and defines the abstract methods.
    """

    ring: SnapshotRing
    seed: int | None

    def _prepare(self, lag: int) -> None:
        """Check the fields and start without snapshots."""
        self.ring = SnapshotRing(lag)
        self._sampling(Sampling())  # checks the bounds
        if self.seed is not None:
            check_seed(self.seed)
        self._replica: Replica | None = None
        self._trainer: weakref.ref[Any] | None = None
        # by training or not: (version, calls so far at that version), for the next call's draws
        self._calls: dict[bool, tuple[int, int]] = {}

    # ---- sampling

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """Sample one completion for each prompt (text, or messages); see the class."""
        self.attach(trainer)
        return self.sample(tokenize(prompts, trainer), trainer)

    def sample(
        self, prompt_ids: list[list[int]], trainer: Any, prefixes: Sequence[Sequence[int]] | None = None
    ) -> dict[str, list[Any]]:
        """Sample one completion for each prompt, given as token ids; see the class.

        Args:
            prefixes: for each prompt the first tokens of its completion, which are given rather than sampled.  The
                completion returned has them at its beginning, with ``env_mask`` 0 and log-probs NaN, and is not
                longer than ``max_completion_length`` with them.

        Raises:
            ValueError: a prefix leaves no token to sample.
        """
        self.attach(trainer)
        return self._sample(Prefixed(prompt_ids, prefixes, trainer.args.max_completion_length), trainer)

    @abstractmethod
    def _sample(self, request: Prefixed, trainer: Any) -> dict[str, list[Any]]:
        """Sample one completion for each prompt of ``request``."""

    # ---- the trainer it samples for

    def attach(self, trainer: Any) -> None:
        """Follow every optimizer step of ``trainer`` from now on; a second call does nothing.

        A trainer that attaches in its ``__init__`` is followed from its first step; otherwise the first call attaches,
        which is before the first step of a fresh run.

        Raises:
            ValueError: a setting of the trainer that this sampler would have to ignore, or a tokenizer without an EOS
            token.
        """
        if self._trainer is not None and self._trainer() is trainer:
            return
        _refuse_ignored(type(self).__name__, trainer)
        eos_token_ids(trainer)
        self._forget()
        self._trainer = weakref.ref(trainer)
        trainer.add_callback(recorder(self, trainer))

    @abstractmethod
    def begin(self, trainer: Any) -> None:
        """Start, or resume, at the trainer's current version; called by ``on_train_begin``."""

    @abstractmethod
    def record(self, trainer: Any) -> None:
        """Note an optimizer step; every rank must call it, since sharded weights are gathered."""

    def _forget(self) -> None:
        self.ring.clear()
        self._calls.clear()
        self._replica = None

    def _restore_or_forget(self, trainer: Any) -> None:
        saved = Path(trainer.args.output_dir, f"checkpoint-{trainer.state.global_step}")
        if trainer.state.global_step and (saved / STATE_FILE).exists():
            self.restore(saved)
        else:
            self._forget()

    def _replica_of(self, trainer: Any) -> Replica:
        if self._replica is None:
            self._replica = Replica(unwrapped(trainer), trainer.accelerator.device)
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

    def _draw_key(self, trainer: Any) -> list[int]:
        """A key that no other call has: (seed, process, training, version, call)."""
        training, now = trainer.model.training, trainer.state.global_step
        version, calls = self._calls.get(training, (now, 0))
        calls = calls if version == now else 0
        self._calls[training] = (now, calls + 1)
        seed = trainer.args.seed if self.seed is None else self.seed
        return [seed, trainer.accelerator.process_index, int(training), now, calls]

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


def draw_seeds(key: list[int], n: int) -> list[int]:
    """Seeds that depend on ``key`` alone, each below 2**63."""
    return [int(s >> 1) for s in np.random.SeedSequence(key).generate_state(n, np.uint64)]


def check_seed(seed: Any) -> None:
    """Raise ``ValueError`` unless ``seed`` is a whole number, 0 or more."""
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise ValueError(f"seed is {seed!r}, expected a whole number, 0 or more, or None for the trainer's")


def recorder(sampler: Any, trainer: Any) -> TrainerCallback:
    """A callback that tells the sampler of every optimizer step, and saves it with the checkpoints.

    Args:
        sampler: a ``Sampler``, or anything else with ``begin``, ``record``, ``save`` and the trainer that it follows.
    """
    # A class for each kind of sampler, since a trainer warns of a second callback of one class.
    return type(f"{type(sampler).__name__}Recorder", (_Recorder,), {})(sampler, trainer)


class _Recorder(TrainerCallback):
    """See ``recorder``."""

    def __init__(self, sampler: Any, trainer: Any) -> None:
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
    template = getattr(trainer, "chat_template", None)
    return tokenize_with(trainer.processing_class, prompts, template, getattr(trainer, "chat_template_kwargs", None))


def tokenize_with(
    processor: Any, prompts: list[Any], chat_template: str | None = None, options: Mapping[str, Any] | None = None
) -> list[list[int]]:
    """Token ids of the prompts: text as it is, messages through the chat template with its ``options``.

    Raises:
        ValueError: a prompt is neither, holds an image, or has no token.
    """
    for row, prompt in enumerate(prompts):
        if not isinstance(prompt, type(prompts[0]) if isinstance(prompts[0], str | list) else str | list):
            raise ValueError(
                f"prompt {row} of {len(prompts)} is {prompt!r}, expected text or a list of messages, the same for all "
                "rows of the training set's column 'prompt'"
            )
    ids = _token_ids(processor, prompts, chat_template, options)
    for row, tokens in enumerate(ids):
        if not len(tokens):
            raise ValueError(
                f"prompt {row} of {len(prompts)} is {prompts[row]!r}, of which the tokenizer makes no token, expected "
                "at least one: drop such rows from the training set, or begin prompts with a BOS token"
            )
    return ids


def _token_ids(
    processor: Any, prompts: list[Any], chat_template: str | None, options: Mapping[str, Any] | None
) -> list[list[int]]:
    if isinstance(prompts[0], str):
        return processor(text=prompts)["input_ids"]
    parts = (part for messages in prompts for m in messages for part in _parts(m["content"]))
    if any(part.get("type") == "image" for part in parts):
        raise ValueError("this sampler takes text, and a prompt holds an image")
    return processor.apply_chat_template(
        conversation=prompts,
        chat_template=chat_template,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        **(options or {}),
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


def _tokenizer(trainer: Any) -> Any:
    return getattr(trainer.processing_class, "tokenizer", trainer.processing_class)


def _pad_id(trainer: Any) -> int:
    return _tokenizer(trainer).pad_token_id


def eos_token_ids(trainer: Any) -> list[int]:
    """The tokens that end a completion for the trainer.

    Raises:
        ValueError: there is none.
    """
    # TRL's list has None where the tokenizer has no such token, and those of the model's generation_config.
    known = [token for token in getattr(trainer, "eos_token_ids", ()) if token is not None]
    return known or [eos_of(_tokenizer(trainer))]


def eos_of(tokenizer: Any) -> int:
    """The token that ends a completion.

    Raises:
        ValueError: the tokenizer has none.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError(
            "the tokenizer's eos_token is None, expected the token that ends a completion: set "
            "tokenizer.eos_token = '...', and pass the tokenizer as processing_class"
        )
    return tokenizer.eos_token_id


def unwrapped(trainer: Any) -> nn.Module:
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
        raise ValueError("cast_lm_head_to_fp32=True with a sampler that scores needs a newer TRL (1.16)")


def _refuse_ignored(sampler: str, trainer: Any) -> None:
    """Raise ``ValueError`` for settings that the sampler would otherwise silently ignore."""
    args = trainer.args
    for name, value, remedy in (
        ("use_vllm", args.use_vllm, "TRL's own vLLM path samples by itself: drop rollout_func or use_vllm"),
        ("min_p", args.min_p, "leave it unset"),
        ("repetition_penalty", args.repetition_penalty if args.repetition_penalty != 1.0 else None, "leave it at 1.0"),
        ("generation_kwargs", args.generation_kwargs, "leave it unset"),
        ("tools", getattr(trainer, "tools", None), "TRL runs tools with its own generation only"),
    ):
        if value:
            raise ValueError(f"{sampler} does not apply {name} ({value!r}): {remedy}")
