"""Small models of several families, trained on a synthetic language, and real updates of their weights; cached."""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from offcorr.lab.mismatch.decode import decode, score
from offcorr.lab.mismatch.language import EOS, PAD, Example, Language, Task, ToyTask
from offcorr.optional import require
from offcorr.quiet import no_progress_bar

Weights = dict[str, Tensor]

VARIANTS = 3
"""Models per architecture, of different sizes, vocabularies and languages; the seed chooses one."""

KEPT = (1, 2, 4, 8, 16)
"""Numbers of updates after which the weights are kept."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Settings of the training that, with architecture and variant, determine the weights."""

    steps: int = 400
    batch_size: int = 8
    learning_rate: float = 4e-3
    rl_rate: float = 2.5e-4
    sft_rate: float = 2e-4
    lora_rate: float = 2e-3
    version: int = 3
    """To be raised when a change of the code changes the weights."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model that can be trained and sampled, its task, and weights from real updates.

    Args:
        architecture: its name.
        variant: the number of the model.
        recipe: of its training.
        module: the model, with its first weights, in evaluation mode.
        task: prompts, demonstrations and reward.
        chains: weights by kind of update ("rl", "sft") and number of updates; 0 is the module's own.
        folder: the checkpoint on disk, with its tokenizer.
    """

    architecture: str
    variant: int
    recipe: Recipe
    module: nn.Module
    task: Task
    chains: dict[str, dict[int, Weights]]
    folder: Path

    def at(self, chain: str, updates: int) -> nn.Module:
        """A copy of the model with the weights after that many updates."""
        module = copy.deepcopy(self.module)
        module.load_state_dict(self.chains[chain][updates])
        return module.eval()

    def adapted(self, updates: int) -> nn.Module:
        """A copy of the model with a LoRA beside its first weights, after that many supervised updates."""
        module = _with_lora(copy.deepcopy(self.module))
        module.load_state_dict(_adapters(self.architecture, self.variant, self.recipe)[updates], strict=False)
        return module.eval()

    def merged(self, updates: int) -> nn.Module:
        """The model of ``adapted``, with the LoRA added to the weights."""
        adapted: Any = self.adapted(updates)
        return adapted.merge_and_unload().eval()


Config = Callable[[Any, dict[str, Any], np.random.Generator], Any]


def _llama(transformers: Any, common: dict[str, Any], rng: np.random.Generator) -> Any:
    return transformers.LlamaConfig(**common, head_dim=32)


def _qwen2(transformers: Any, common: dict[str, Any], rng: np.random.Generator) -> Any:
    return transformers.Qwen2Config(**common, use_sliding_window=False)


def _qwen3(transformers: Any, common: dict[str, Any], rng: np.random.Generator) -> Any:
    return transformers.Qwen3Config(**common, head_dim=32, use_sliding_window=False)


def _gpt_neox(transformers: Any, common: dict[str, Any], rng: np.random.Generator) -> Any:
    common = {name: value for name, value in common.items() if name != "num_key_value_heads"}
    common["intermediate_size"] = 4 * common["hidden_size"]
    return transformers.GPTNeoXConfig(**common, rotary_pct=float(rng.choice([0.25, 1.0])))


def _gpt2(transformers: Any, common: dict[str, Any], rng: np.random.Generator) -> Any:
    return transformers.GPT2Config(
        vocab_size=common["vocab_size"],
        n_positions=common["max_position_embeddings"],
        n_embd=common["hidden_size"],
        n_layer=common["num_hidden_layers"],
        n_head=common["num_attention_heads"],
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=None,
        dtype="float32",
    )


def _mixtral(transformers: Any, common: dict[str, Any], rng: np.random.Generator) -> Any:
    common["intermediate_size"] //= 2
    experts = int(rng.choice([4, 8]))
    return transformers.MixtralConfig(**common, head_dim=32, num_local_experts=experts, num_experts_per_tok=2)


def _qwen3_moe(transformers: Any, common: dict[str, Any], rng: np.random.Generator) -> Any:
    experts, used = [(8, 2), (16, 4)][rng.integers(2)]
    return transformers.Qwen3MoeConfig(
        **common,
        head_dim=32,
        moe_intermediate_size=common["intermediate_size"] // 4,
        num_experts=experts,
        num_experts_per_tok=used,
        norm_topk_prob=True,
        use_sliding_window=False,
    )


FAMILIES: dict[str, Config] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gpt_neox": _gpt_neox,
    "gpt2": _gpt2,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
}

MOE = frozenset({"mixtral", "qwen3_moe"})
"""Architectures with a router."""

LEARNED_POSITIONS = frozenset({"gpt2"})

ARCHITECTURES = (*FAMILIES, "toy", "random")
"""The families, the toy task's model, and a llama of random weights, scaled until its output is as peaked."""


@functools.lru_cache(maxsize=4)
def subject(architecture: str, variant: int = 0, recipe: Recipe | None = None) -> Subject:
    """The model of an architecture, number ``variant``, and the weights of its updates.

    The first call trains it (about a minute on one core) and saves it in the user's cache, whose place
    `OFFCORR_CACHE` changes.  The last few are kept in memory: nobody may change their modules.

    Raises:
        ValueError: an unknown architecture.
    """
    if architecture not in ARCHITECTURES:
        raise ValueError(f"architecture is {architecture!r}, expected one of {', '.join(ARCHITECTURES)}")
    require("offcorr.lab.mismatch", ["transformers", "tokenizers", "peft"], install="pip install transformers peft")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from offcorr.toy.cache import cached_folder

    recipe = recipe or Recipe()
    settings = json.dumps([architecture, variant, dataclasses.asdict(recipe)])
    digest = hashlib.sha256(settings.encode()).hexdigest()[:12]

    def build(folder: Path) -> None:
        with _alone(variant):
            module, task = _first(architecture, variant, recipe)
            torch.save(_chains(module, task, variant, recipe), folder / "updates.pt")
            module.save_pretrained(folder)
            _saved_tokenizer(task).save_pretrained(folder)

    with no_progress_bar():
        folder = cached_folder(f"mismatch-{architecture}-{variant}-{digest}", build)
        module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if architecture == "toy":
        task: Task = ToyTask(AutoTokenizer.from_pretrained(folder))
    else:
        task = _language(architecture, variant)
    chains = torch.load(folder / "updates.pt", weights_only=True)
    first = {name: value.clone() for name, value in module.state_dict().items()}
    return Subject(
        architecture,
        variant,
        recipe,
        module,
        task,
        {kind: {0: first, **chain} for kind, chain in chains.items()},
        folder,
    )


def _rng(architecture: str, variant: int) -> np.random.Generator:
    return np.random.default_rng([ARCHITECTURES.index(architecture), variant])


def _language(architecture: str, variant: int) -> Language:
    """Vocabularies between 100 and 2000, one in each third of the (logarithmic) range; one variant's is peaked."""
    rng = _rng(architecture, variant)
    share = (variant % VARIANTS + rng.random()) / VARIANTS
    return Language(int(rng.integers(2**31)), vocabulary=round(100 * 20**share), peaked=variant == 2)


def _first(architecture: str, variant: int, recipe: Recipe) -> tuple[Any, Task]:
    import transformers

    if architecture == "toy":
        from offcorr.toy import model_path

        path = model_path(variant, progress=False)
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        module = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        return module.eval(), ToyTask(tokenizer)
    task = _language(architecture, variant)
    rng = np.random.default_rng([ARCHITECTURES.index(architecture), variant, 1])
    heads = int(rng.integers(2, 4))
    common = {
        "vocab_size": task.vocabulary,
        "hidden_size": 32 * heads,
        "intermediate_size": 64 * heads,
        "num_hidden_layers": int(rng.integers(2, 4)),
        "num_attention_heads": heads,
        "num_key_value_heads": int(rng.choice([1, heads])),
        "max_position_embeddings": 256,
        "tie_word_embeddings": bool(rng.integers(2)),
        "pad_token_id": PAD,
        "eos_token_id": EOS,
        "bos_token_id": None,
        "dtype": "float32",
    }
    config = FAMILIES["llama" if architecture == "random" else architecture](transformers, common, rng)
    if architecture == "random":
        config.initializer_range, config.tie_word_embeddings = 0.2, False
    module = transformers.AutoModelForCausalLM.from_config(config)
    if architecture == "random":
        _peaked(module, task, rng)
    else:
        _train(module, task, recipe, rng)
    return module.eval(), task


def _train(module: nn.Module, task: Task, recipe: Recipe, rng: np.random.Generator) -> None:
    """Supervised learning on whole sequences of the language."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.learning_rate, recipe.steps, pct_start=0.1)
    module.train()
    for _ in range(recipe.steps):
        pairs = task.examples(rng, recipe.batch_size)
        examples: list[Example] = [([], [*prompt, *completion]) for prompt, completion in pairs]
        _supervised(module, examples).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def _supervised(module: nn.Module, examples: list[Example]) -> Tensor:
    """Mean negative log-prob of the completions (nats)."""
    width = max(len(prompt) + len(completion) for prompt, completion in examples)
    ids = torch.full((len(examples), width), PAD)
    labels = torch.full((len(examples), width), -100)
    for row, (prompt, completion) in enumerate(examples):
        end = len(prompt) + len(completion)
        ids[row, :end] = torch.tensor([*prompt, *completion])
        labels[row, len(prompt) : end] = torch.tensor(completion)
    logits = module(input_ids=ids[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


def _peaked(module: Any, task: Task, rng: np.random.Generator) -> None:
    """Scales the output head of random weights until the mean entropy is between .5 and 2 nats, by bisection."""
    wanted = rng.uniform(0.5, 2.0)
    ids = torch.tensor([prompt[:4] for prompt in task.prompts(rng, 64)])
    with torch.no_grad():
        logits = module.eval()(input_ids=ids).logits[:, -1].double()
        low, high = 1e-3, 1e3
        for _ in range(40):
            middle = (low * high) ** 0.5
            logp = (middle * logits).log_softmax(-1)
            low, high = (low, middle) if -(logp.exp() * logp).sum(-1).mean() < wanted else (middle, high)
        module.lm_head.weight.mul_(middle)


def _chains(module: nn.Module, task: Task, variant: int, recipe: Recipe) -> dict[str, dict[int, Weights]]:
    """Weights after KEPT updates of each kind: policy gradients, supervised updates."""
    return {
        "rl": dict(_updates(copy.deepcopy(module), recipe.rl_rate, _policy_gradient, task, variant)),
        "sft": dict(_updates(copy.deepcopy(module), recipe.sft_rate, _on_changed, task, variant)),
    }


def _updates(
    module: Any,
    rate: float,
    loss: Callable[[nn.Module, Task, np.random.Generator], Tensor],
    task: Task,
    variant: int,
) -> Iterator[tuple[int, Weights]]:
    rng = np.random.default_rng([variant, 7])
    changing = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(changing, lr=rate)
    for update in range(1, max(KEPT) + 1):
        loss(module, task, rng).backward()
        torch.nn.utils.clip_grad_norm_(changing, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if update in KEPT:
            yield update, {name: value.detach().clone() for name, value in module.state_dict().items()}


@functools.lru_cache(maxsize=4)
def _adapters(architecture: str, variant: int, recipe: Recipe) -> dict[int, Weights]:
    """Weights of a LoRA after KEPT updates; some seconds."""
    first = subject(architecture, variant, recipe)
    with _alone(variant), torch.enable_grad():
        chain = _updates(_with_lora(copy.deepcopy(first.module)), recipe.lora_rate, _on_changed, first.task, variant)
        return {
            updates: {name: value for name, value in weights.items() if "lora_" in name} for updates, weights in chain
        }


def policy_gradient(
    module: nn.Module, prompts: list[list[int]], completions: list[list[int]], advantages: Tensor
) -> Tensor:
    """REINFORCE's loss on a batch: minus the mean over tokens of advantage times log-prob."""
    logp, _ = score(module, prompts, completions, grad=True)
    return -torch.cat([a * row for a, row in zip(advantages, logp, strict=True)]).mean()


def _policy_gradient(module: nn.Module, task: Task, rng: np.random.Generator) -> Tensor:
    prompts = [prompt for prompt in task.prompts(rng, 6) for _ in range(4)]
    generator = torch.Generator().manual_seed(int(rng.integers(2**62)))
    completions = decode([module], prompts, max_new_tokens=40, generator=generator).completion_ids
    rewards = [task.reward(completion) for completion in completions]
    return policy_gradient(module, prompts, completions, torch.tensor(advantages(rewards), dtype=torch.float32))


def _on_changed(module: nn.Module, task: Task, rng: np.random.Generator) -> Tensor:
    return _supervised(module, task.examples(rng, 8, changed=True))


def advantages(rewards: list[float], group: int = 4) -> list[float]:
    """Rewards minus their group's mean, over its standard deviation (GRPO).

    >>> advantages([1.0, 0.0, 1.0, 0.0])
    [1.0, -1.0, 1.0, -1.0]
    """
    table = np.array(rewards, dtype=np.float64).reshape(-1, group)
    spread = table.std(axis=1, keepdims=True)
    return ((table - table.mean(axis=1, keepdims=True)) / np.where(spread > 0, spread, 1.0)).ravel().tolist()


def _with_lora(module: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    turned = any(type(part).__name__ == "Conv1D" for part in module.modules())
    config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", fan_in_fan_out=turned)
    return get_peft_model(module, config)


def _saved_tokenizer(task: Task) -> Any:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    if not isinstance(task.tokenizer, Tokenizer):
        return task.tokenizer
    return PreTrainedTokenizerFast(tokenizer_object=task.tokenizer, pad_token="<pad>", eos_token="<eos>")


@contextmanager
def _alone(seed: int) -> Iterator[None]:
    """One thread and a random state of its own, so that the weights are the same bits on every call."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)
