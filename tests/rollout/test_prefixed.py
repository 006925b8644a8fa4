"""Tests of samplers that continue prefixes: tokens, limits, log-probs, and the engine's requests."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from offcorr.rollout import Engine, OffPolicy, Sampling, VLLMServer, decode
from offcorr.rollout.sampler import tokenize
from tests.rollout.rollout_models import EOS, fresh_model
from tests.rollout.test_engine import serve  # noqa: F401  (a fixture)
from tests.rollout.test_rollout_trl import PROMPTS, gap, scored, trainer_of

pytestmark = pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")

PREFIXES = [[3, 4, 5], [], [6], [7] * 11]


@pytest.fixture
def trainer(tmp_path):
    made = trainer_of(None, tmp_path)
    made.model.train()
    return made


class Served:
    """What ``VLLMServer`` asks of ``ServedWeights``, by a model that is here."""

    def __init__(self, sampler, trainer):
        self.replica, self.asked = sampler._replica_of(trainer), []

    def ensure(self, version, weights, prompt_ids):
        self.weights = weights

    def sample(self, version, prompt_ids, *, max_new_tokens, eos_token_ids, seeds):
        self.asked.append((prompt_ids, max_new_tokens))
        draw = torch.Generator().manual_seed(seeds[0])
        options = {"max_new_tokens": max_new_tokens, "eos_token_ids": eos_token_ids, "generator": draw}
        return decode(self.replica.load(self.weights), prompt_ids, **options)

    def remember(self, prompt_ids, completion_ids):
        self.known = (prompt_ids, completion_ids)


def server(trainer):
    sampler = VLLMServer(url="127.0.0.1:9")
    served = Served(sampler, trainer)
    sampler._served_to = lambda of: served
    return sampler


@pytest.mark.parametrize("make", [lambda trainer: OffPolicy(), server], ids=["OffPolicy", "VLLMServer"])
def test_a_prefix_begins_the_completion_and_what_follows_is_scored_after_it(trainer, make):
    sampler = make(trainer)
    prompt_ids = tokenize(PROMPTS, trainer)
    output = sampler.sample(prompt_ids, trainer, PREFIXES)
    assert output["prompt_ids"] == prompt_ids
    weights = dict(trainer.model.named_parameters())
    for row, prefix in enumerate(PREFIXES):
        ids, k = output["completion_ids"][row], len(prefix)
        assert ids[:k] == prefix and k < len(ids) <= 12
        assert len(ids) == 12 or ids[-1] == EOS
        assert output["env_mask"][row] == [0] * k + [1] * (len(ids) - k)
        for name in ("logprobs", "old_logp"):
            assert len(output[name][row]) == len(ids)
            assert all(map(math.isnan, output[name][row][:k]))
        call = {"prompt_ids": [prompt_ids[row] + prefix], "completion_ids": [ids[k:]]}
        alone = scored(weights, call)
        assert gap([output["logprobs"][row][k:]], alone) < 1e-5
        assert gap([output["old_logp"][row][k:]], alone) < 1e-5
    assert len(output["completion_ids"][3]) == 12  # one token was left to sample


@pytest.mark.parametrize("make", [lambda trainer: OffPolicy(), server], ids=["OffPolicy", "VLLMServer"])
def test_without_prefixes_nothing_is_added_and_empty_ones_draw_the_same(trainer, make):
    plain = make(trainer)(PROMPTS, trainer)
    assert set(plain) == {"prompt_ids", "completion_ids", "logprobs", "old_logp", "rollout_version"}
    prompt_ids = tokenize(PROMPTS, trainer)
    assert make(trainer).sample(prompt_ids, trainer) == plain
    empty = make(trainer).sample(prompt_ids, trainer, [[]] * 4)
    assert empty.pop("env_mask") == [[1] * len(ids) for ids in plain["completion_ids"]]
    assert empty == plain


def test_a_prefix_acts_as_the_end_of_its_prompt(trainer):
    prompt_ids = tokenize(PROMPTS[:1], trainer)
    whole = OffPolicy(seed=5).sample([prompt_ids[0] + [3, 4]], trainer)
    given = OffPolicy(seed=5).sample(prompt_ids, trainer, [[3, 4]])
    assert given["completion_ids"][0] == [3, 4] + whole["completion_ids"][0][:10]


def test_prefixes_that_leave_nothing_to_sample_are_refused(trainer):
    prompt_ids = tokenize(PROMPTS[:2], trainer)
    with pytest.raises(ValueError, match=r"prefixes\[1\] has 12 tokens, expected fewer than max_completion_length=12"):
        OffPolicy().sample(prompt_ids, trainer, [[], [3] * 12])
    with pytest.raises(ValueError, match="prefixes has 1 entries, expected 2"):
        OffPolicy().sample(prompt_ids, trainer, [[]])


def test_each_prompt_of_a_decode_has_its_own_limit():
    prompts, limits = [[3, 4], [5], [3, 4], [6, 7, 8]] * 2, [1, 7, 3, 12] * 2

    def draw(limit, eos):
        options = {"eos_token_ids": eos, "generator": torch.Generator().manual_seed(1)}
        return decode(fresh_model(), prompts, max_new_tokens=limit, **options)

    without_end = draw(limits, [-1])
    assert [len(ids) for ids in without_end.completion_ids] == limits
    assert [len(logp) for logp in without_end.logp] == limits
    assert draw([9] * 8, [EOS]) == draw(9, [EOS])
    ended = draw([6] * 8, [2, 3, 4, 5, 6])
    assert all(len(ids) == 6 or ids[-1] in (2, 3, 4, 5, 6) for ids in ended.completion_ids)
    with pytest.raises(ValueError, match="max_new_tokens is 0, expected at least 1"):
        draw([3] * 7 + [0], [EOS])


def test_a_request_to_the_engine_has_its_own_limit(serve):  # noqa: F811
    def answer(body):
        choice = {"token_ids": [5] * body["max_tokens"], "logprobs": {"token_logprobs": [-1.0] * body["max_tokens"]}}
        return {"choices": [{"index": i, **choice} for i in range(body["n"])]}

    engine = Engine(serve(**{"v1/completions": answer}).url)
    decoded = engine.sample(
        [[5], [5], [5], [6]], max_new_tokens=[3, 3, 2, 4], eos_token_ids=[1], sampling=Sampling(), seeds=range(4)
    )
    assert [len(ids) for ids in decoded.completion_ids] == [3, 3, 2, 4]


def test_a_prompt_with_its_prefix_must_fit_the_engine():
    from offcorr.rollout.engine import EngineError
    from offcorr.rollout.served import ServedWeights

    engine = SimpleNamespace(longest=lambda: 10)
    served = ServedWeights(engine, None, None, 0.1, Sampling())
    with pytest.raises(
        EngineError, match="a prompt and max_completion_length=7 are 11 tokens, and the server takes 10"
    ):
        served.sample(0, [[3] * 4, [3] * 6], max_new_tokens=[7, 4], eos_token_ids=[1], seeds=[0, 0])
