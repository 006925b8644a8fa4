"""Short runs of GRPOTrainer with samplers of ``offcorr.data``, on a tiny model, without downloads."""

from __future__ import annotations

import warnings

import torch
from datasets import Dataset
from transformers import TrainerCallback

from offcorr.data import Traces
from offcorr.trl import GRPOConfig, GRPOTrainer
from tests.rollout.rollout_models import fresh_model, tokenizer

PROMPTS = ["a3b1=", "c2=", "b7a3c9=", "a1b2c3a4="]
ANSWERS = ["4.", "22..", "0123", "abc."]

SETTINGS = {
    "per_device_train_batch_size": 8,
    "per_device_eval_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": 10,
    "max_steps": 3,
    "learning_rate": 2e-2,
    "lr_scheduler_type": "constant",
    "loss_type": "offcorr:ppo",
    "bf16": False,
    "use_cpu": True,
    "gradient_checkpointing": False,
    "save_strategy": "no",
    "logging_steps": 1,
    "log_metrics": "full",
    "report_to": "none",
    "disable_tqdm": True,
    "seed": 3,
}


def variety(completions, **_):
    """A reward that depends on the whole text."""
    return [len(set(text)) / (1 + len(text)) for text in completions]


def trainer_of(sampler, folder, model=None, cls=GRPOTrainer, reward=variety, prompts=PROMPTS, **options):
    """A trainer on the prompts, for a run of a few steps."""
    loss = {"loss": options.pop("loss")} if "loss" in options else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return cls(
            model=fresh_model() if model is None else model,
            reward_funcs=reward,
            args=GRPOConfig(output_dir=str(folder), **{**SETTINGS, **options}),
            train_dataset=Dataset.from_list([{"prompt": p} for p in prompts] * 16),
            eval_dataset=Dataset.from_list([{"prompt": p} for p in prompts]),
            processing_class=tokenizer(),
            rollout_func=sampler,
            **loss,
        )


class Seen(TrainerCallback):
    """The micro-batches and rollouts of a run, as the loss sees them."""

    def __init__(self, trainer):
        self.inputs, self.batches, self.rollouts = [], [], []
        inner, place = trainer.rollout_func, trainer.correction_step.place

        def rollout_func(prompts, of):
            output = inner(prompts, of)
            self.rollouts.append((of.model.training, output))
            return output

        def placed(batch, *rest):
            self.batches.append(place(batch, *rest))
            return self.batches[-1]

        trainer.rollout_func, trainer.correction_step.place = rollout_func, placed

    @property
    def training(self):
        """The rollouts of training."""
        return [output for training, output in self.rollouts if training]


def traces_of(prompts=PROMPTS[:2], *, logp=None, **fields):
    """Traces of the first prompts; with ``logp`` each token has this log-prob."""
    rows = []
    for prompt in prompts:
        text = ANSWERS[PROMPTS.index(prompt)]
        rows.append({"prompt": prompt, "completion": text, "reward": 1.0, **fields})
        if logp is not None:
            rows[-1]["logp"] = [logp] * (len(text) + 1)
    return Traces(rows, tokenizer())


def weights_of(trainer):
    """All parameters of the model, end to end."""
    return torch.cat([p.detach().flatten() for p in trainer.accelerator.unwrap_model(trainer.model).parameters()])
