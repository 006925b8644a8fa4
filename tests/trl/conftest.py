"""A tiny Qwen3 model, its character tokenizer, a dataset and a trainer, all built here: no hub."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from tests.conftest import missing_at

if not missing_at(Path(__file__).parent):  # else the tests beside this file are skipped
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        PreTrainedTokenizerFast,
        PrinterCallback,
        Qwen3Config,
        Qwen3ForCausalLM,
        set_seed,
    )

    from offcorr.trl import GRPOConfig, GRPOTrainer
    from offcorr.trl.config import CorrectionOptions

CHARACTERS = ["<pad>", "<eos>", *"0123456789+-=abcdefgh"]


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tokenizer():
    vocabulary = {character: i for i, character in enumerate(CHARACTERS)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", padding_side="left")


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory, tokenizer):
    """A folder with the model and the tokenizer, as ``from_pretrained`` wants it."""
    set_seed(0)
    config = Qwen3Config(
        vocab_size=len(CHARACTERS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    folder = tmp_path_factory.mktemp("qwen3")
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(5)  # far from uniform: ratios move fast
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def dataset():
    return Dataset.from_dict({"prompt": [f"{i}+{j}=" for i in range(8) for j in range(4)]})


def digits_reward(completion_ids, **_):
    """Depends on every token, so that advantages of both signs come up in each group."""
    return [float(sum(i % 3 for i in ids)) / len(ids) for ids in completion_ids]


@pytest.fixture(scope="session")
def recorded(model_folder, tokenizer, dataset):
    """``{prompt: [completion, ...]}``: random completions, the initial model's log-probs of them (``old_logp``), and
    those with noise, as an engine of low precision might report them (``logprobs``).  Some tokens are a tool's.
    """
    model = Qwen3ForCausalLM.from_pretrained(model_folder)
    chance = torch.Generator().manual_seed(7)
    record = {}
    for prompt in dataset["prompt"]:
        prompt_ids = tokenizer(prompt)["input_ids"]
        record[prompt] = []
        for _ in range(4):
            length = int(torch.randint(2, 9, (), generator=chance))
            ids = torch.randint(2, len(CHARACTERS), (length,), generator=chance)
            ids[-1] = 1  # ends in <eos>
            with torch.no_grad():
                logits = model(torch.tensor([prompt_ids + ids.tolist()])).logits[0]
            logp = logits[len(prompt_ids) - 1 : -1].log_softmax(-1).gather(1, ids[:, None])[:, 0]
            noise = 0.05 * torch.randn(length, generator=chance)
            record[prompt].append(
                {
                    "prompt_ids": prompt_ids,
                    "completion_ids": ids.tolist(),
                    "old_logp": logp.tolist(),
                    "logprobs": (logp + noise).tolist(),
                    "env_mask": [int(i % 3 != 1) for i in range(length)],
                    "rollout_version": 0,
                }
            )
    return record


@pytest.fixture
def replay(recorded):
    """``replay(*keys)``: a ``rollout_func`` that gives the recorded completions, with these keys beside TRL's."""

    def make(*keys):
        def rollout_func(prompts, trainer):
            seen = {}
            chosen = []
            for prompt in prompts:
                seen[prompt] = seen.get(prompt, -1) + 1
                chosen.append(recorded[prompt][seen[prompt] % 4])
            names = ("prompt_ids", "completion_ids", "logprobs", *keys)
            return {name: [row[name] for row in chosen] for name in names}

        return rollout_func

    return make


@pytest.fixture
def make_trainer(model_folder, tokenizer, dataset, tmp_path):
    """``make_trainer(cls, reward_funcs=, model=, eval_dataset=, ..., **config)``: a trainer for a short CPU run."""
    passed_on = ("rollout_func", "loss", "eval_dataset", "callbacks", "peft_config", "tools")

    def make(cls=GRPOTrainer, config=GRPOConfig, model=None, reward_funcs=digits_reward, **settings):
        trainer_settings = {name: settings.pop(name) for name in passed_on if name in settings}
        defaults = dict(
            output_dir=str(tmp_path / "run"),
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            num_generations=4,
            max_completion_length=8,
            max_steps=4,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            disable_tqdm=True,
            seed=3,
        )
        if issubclass(config, CorrectionOptions):
            defaults["log_metrics"] = "full"
            # Recorded completions are drawn at random: as a sampler's they would be refused.
            defaults["monitor"] = {"self_test": "warn"}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="TRL's own losses read")
            trainer = cls(
                model=model or model_folder,
                reward_funcs=reward_funcs,
                args=config(**{**defaults, **settings}),
                train_dataset=dataset,
                processing_class=tokenizer,
                **trainer_settings,
            )
        trainer.remove_callback(PrinterCallback)
        return trainer

    return make


@pytest.fixture
def series():
    """``series(trainer, name)``: the values logged under a name, in order."""
    return lambda trainer, name: [entry[name] for entry in trainer.state.log_history if name in entry]
