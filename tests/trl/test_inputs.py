"""Reward functions and data with which no training can begin: named before a model is loaded."""

from __future__ import annotations

import functools
import inspect

import numpy as np
import pytest
import torch
import trl.trainer.utils
from datasets import Dataset, IterableDataset
from transformers import Qwen3ForCausalLM

from offcorr.trl import GRPOConfig, GRPOTrainer
from offcorr.trl.inputs import check_data, check_reward_funcs
from offcorr.trl.rewards import checked
from tests.trl.conftest import digits_reward

ROWS = Dataset.from_dict({"prompt": ["1+1="] * 8})


class Length:
    def __call__(self, completions, **kwargs):
        return [len(text) for text in completions]


async def late(completions, **kwargs):
    return 0.5


class Columns:
    __name__ = "columns"

    async def __call__(self, completions, **kwargs):
        return {"score": [1.0] * len(completions)}


def named(result):
    def scores(completions, **kwargs):
        return result

    return scores


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (named(0.5), r"scores returned 0\.5, "),
        (named("12345678"), "scores returned '12345678', "),
        (named(None), "scores returned None, "),
        (named([1.0, 2.0]), "scores returned 2 rewards, "),
        (named(["1"] * 8), "scores returned '1' for completion 0, "),
        (named([1.0, [2.0, 3.0]] * 4), r"scores returned \[2\.0, 3\.0\] for completion 1, "),
        (late, r"late returned 0\.5, "),
        (Columns(), r"columns returned (\{'score': |<coroutine ).*, "),  # an older TRL does not await an object
    ],
)
def test_what_a_reward_function_returns_is_checked_by_name(make_trainer, function, said):
    trainer = make_trainer(reward_funcs=[digits_reward, function], loss_type="minpro", max_steps=1)
    with pytest.raises(ValueError, match=rf"^reward function {said}expected a list of \d+ numbers, one per completion"):
        trainer.train()


@pytest.mark.parametrize("function", [late, Columns(), functools.partial(Columns()), Length(), named([1.0])])
def test_what_trl_awaits_is_awaited(function):
    """TRL makes an event loop only where one of the functions that it was given is to be awaited."""
    theirs = getattr(trl.trainer.utils, "is_async_callable", inspect.iscoroutinefunction)
    assert inspect.iscoroutinefunction(checked(function)) == theirs(function)


@pytest.mark.parametrize("make", [torch.tensor, np.array, tuple, iter, lambda rewards: [None, *rewards[1:]]])
def test_rewards_that_are_numbers_are_taken(make):
    rewards = checked(lambda prompts, completions: make([0.5, 1.0]))(prompts=["1"] * 2, completions=["2"] * 2)
    assert rewards[1] == 1.0


def test_a_reference_model_is_loaded_by_name(make_trainer, model_folder):
    model = Qwen3ForCausalLM.from_pretrained(model_folder)
    assert make_trainer(model=model, beta=0.1).beta == 0.1
    nameless = Qwen3ForCausalLM(model.config)
    model.config._name_or_path = ""
    with pytest.raises(
        ValueError, match=r"^beta is 0\.1, .* has no name: .* model\.save_pretrained\(\"FOLDER\"\), and pass"
    ):
        make_trainer(model=nameless, beta=0.1)
    assert make_trainer(model=nameless).beta == 0


@pytest.fixture
def refused(tmp_path):
    """``refused(error, message, ...)``: a trainer with these arguments is refused; there is no model."""

    def make(error, message, data=ROWS, reward_funcs=digits_reward, **kwargs):
        args = GRPOConfig(str(tmp_path), bf16=False, use_cpu=True, num_generations=2, generation_batch_size=8)
        with pytest.raises(error, match=message):
            GRPOTrainer("no model here", reward_funcs, args, train_dataset=data, **kwargs)

    return make


@pytest.mark.parametrize(
    ("loss_type", "metric", "why"),
    [
        ("minpro", "offcorr/loss/dropped", "an evaluation makes no update"),
        ("dapo", "eval_offcorr/loss/dropped", "an evaluation makes no update"),
        ("minpro", "clip_ratio/region_mean", "TRL's own loss logs"),
    ],
)
def test_a_best_metric_that_no_evaluation_logs(make_trainer, loss_type, metric, why):
    with pytest.raises(ValueError, match=f"metric_for_best_model is {metric!r}, .*{why}.* such as 'eval_reward'"):
        make_trainer(loss_type=loss_type, metric_for_best_model=metric)


@pytest.mark.parametrize("metric", ["eval_reward", "eval_offcorr/engine/abs_mean"])
def test_a_best_metric_that_evaluations_may_log(make_trainer, metric):
    assert make_trainer(loss_type="minpro", metric_for_best_model=metric).args.metric_for_best_model == metric


def test_data_without_prompts(refused):
    asked = Dataset.from_dict({"question": ["1+1="], "answer": ["2"]})
    columns = r"train_dataset has the columns \['question', 'answer'\], expected one of the name 'prompt'$"
    refused(ValueError, columns, asked)
    one = r"\['question'\], .* for instance train_dataset.rename_column\('question', 'prompt'\)"
    refused(ValueError, one, asked.select_columns(["question"]))
    refused(ValueError, r"eval_dataset\['hard'\] has the columns", eval_dataset={"easy": ROWS, "hard": asked})
    refused(ValueError, r"train_dataset\[0\]\['prompt'\] is 1, expected text", Dataset.from_dict({"prompt": [1] * 8}))


def test_data_for_not_one_step(refused):
    refused(ValueError, "train_dataset has no rows, expected at least 4", Dataset.from_dict({"prompt": []}))
    refused(ValueError, "train_dataset has 3 rows, expected at least 4, the different prompts", ROWS.select(range(3)))


def test_data_of_any_other_kind_is_left_to_trl():
    def rows():
        yield {"prompt": "1+1="}

    for data in (None, [1], ROWS, IterableDataset.from_generator(rows), Dataset.from_dict({"prompt": [[]]})):
        check_data("train_dataset", data)


def test_reward_functions_that_cannot_be_called(refused):
    refused(TypeError, r"reward_funcs\[1\] is 3, expected a function def reward", reward_funcs=[digits_reward, 3])
    refused(TypeError, "reward_funcs is the class Length, expected an instance", reward_funcs=Length)
    taken = r"reward_funcs is <lambda>\(text\), and TRL calls it by keyword, with prompts, completions"
    refused(TypeError, taken, reward_funcs=lambda text: 1.0)


@pytest.mark.parametrize(
    "function",
    [
        None,
        "a/model",
        torch.nn.Linear(2, 1),
        Length(),
        functools.partial(digits_reward),
        lambda prompts, completions, completion_ids, trainer_state, log_extra, log_metric: [],
        max,
    ],
)
def test_reward_functions_that_can_be_called(function):
    check_reward_funcs(function)
    check_reward_funcs([function, digits_reward])


@pytest.mark.parametrize(
    ("option", "value", "least"),
    [
        ("num_generations", 0, 2),
        ("num_generations", 1, 2),
        ("max_completion_length", 0, 1),
        ("steps_per_generation", 2.5, 1),
    ],
)
def test_counts_that_are_too_small_or_not_whole(tmp_path, option, value, least):
    with pytest.raises(ValueError, match=f"{option} is {value}, expected a whole number, {least} or more"):
        GRPOConfig(str(tmp_path), bf16=False, use_cpu=True, **{option: value})
