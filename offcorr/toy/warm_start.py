"""The toy model: a small Qwen3 with a character tokenizer, warm-started by SFT and cached."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import torch

from offcorr.lab.text import Progress
from offcorr.quiet import no_progress_bar

from . import task
from .cache import cached_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Settings that, together with the seed, determine the warm-started weights."""

    hidden_size: int = 64
    intermediate_size: int = 192
    layers: int = 2
    heads: int = 4
    head_dim: int = 32  # the smallest that vLLM's attention takes on a CPU
    steps: int = 900
    batch_size: int = 32
    learning_rate: float = 6e-3
    warmup_steps: int = 40
    weight_decay: float = 0.01
    pool_size: int = 8192
    error_rate: float = 0.12
    filler_rate: float = 0.25
    version: int = 1
    """To be raised when a change of the code changes the weights."""

    def fingerprint(self) -> str:
        """Returns twelve hexadecimal digits that change with every setting."""
        settings = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(settings.encode()).hexdigest()[:12]


def model_path(seed: int = 0, progress: bool = True, recipe: Recipe | None = None) -> str:
    """Returns the folder of the warm-started model and its tokenizer, for `from_pretrained`.

    The first call for a seed trains the model (about half a minute on two free cores) and saves it in the
    user's cache, whose place `OFFCORR_CACHE` changes; `progress` shows on stderr how far it is. A second
    process waits for the first one's model. A damaged folder is built again.
    """
    recipe = recipe or Recipe()

    def build(folder: Path) -> None:
        model = train(recipe, seed, progress)
        with no_progress_bar():
            model.save_pretrained(folder)
        save_tokenizer(folder)

    return str(cached_folder(f"toy-{recipe.fingerprint()}-seed{seed}", build))


def train(recipe: Recipe, seed: int, progress: bool = False) -> Qwen3ForCausalLM:
    """Trains on demonstrations with mistakes; the same seed gives the same bits on the same machine."""
    rng = Random(f"warm start {seed}")
    tokenizer = build_tokenizer()
    ids = tokenizer.get_vocab()
    prompts = list(task.items(recipe.pool_size, seed, "train"))
    with _one_thread():
        model = build_model(recipe, tokenizer, seed)
        optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=recipe.learning_rate,
            betas=(0.9, 0.98),
            weight_decay=recipe.weight_decay,
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: _schedule(recipe, n))
        model.train()
        for _ in _shown(recipe.steps, seed) if progress else range(recipe.steps):
            rows = []
            for terms in rng.choices(prompts, k=recipe.batch_size):
                working = task.render_working(terms, rng, recipe.error_rate, recipe.filler_rate)
                rows.append((task.render_prompt(terms), working))
            input_ids, labels = collate(rows, ids)
            logits = model(input_ids=input_ids[:, :-1]).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    return model.eval()


def build_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """Returns an untrained Qwen3 of the recipe's size; the global random state is not changed."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.heads,
        head_dim=recipe.head_dim,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.05,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer with one token per character of the task and three special tokens."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {text: i for i, text in enumerate([PAD, EOS, UNKNOWN, *task.ALPHABET])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=task.MAX_PROMPT + task.MAX_COMPLETION,
    )


def save_tokenizer(folder: Path) -> None:
    """Saves the tokenizer for transformers 4 and 5; version 5 writes a class name that version 4 cannot load."""
    build_tokenizer().save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(settings, indent=2))


def collate(rows: list[tuple[str, str]], ids: dict[str, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns right-padded token ids [B, T] and labels with -100 on prompts and padding."""
    width = max(len(prompt) + len(working) for prompt, working in rows) + 1
    input_ids = torch.full((len(rows), width), ids[PAD])
    labels = torch.full((len(rows), width), -100)
    for i, (prompt, working) in enumerate(rows):
        tokens = torch.tensor([ids[c] for c in prompt + working] + [ids[EOS]])
        input_ids[i, : len(tokens)] = tokens
        labels[i, len(prompt) : len(tokens)] = tokens[len(prompt) :]
    return input_ids, labels


def _schedule(recipe: Recipe, step: int) -> float:
    """Factor on the learning rate: a linear warm-up, then a cosine down to a tenth."""
    if step < recipe.warmup_steps:
        return (step + 1) / recipe.warmup_steps
    done = (step - recipe.warmup_steps) / max(1, recipe.steps - recipe.warmup_steps)
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done))


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Runs torch on one thread, because sums split over threads are rounded differently from run to run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _shown(steps: int, seed: int) -> Iterator[int]:
    """The updates, whose number is shown on stderr with or without a terminal."""
    with Progress(
        steps, f"training the toy model of seed {seed} once, about half a minute on two free cores"
    ) as progress:
        for step in range(steps):
            yield step
            progress(step + 1, "updates of the toy model")
