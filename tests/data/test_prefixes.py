"""Tests of Prefixes: what is given, what it leaves unchanged, the curriculum, evaluation and checkpoints."""

from __future__ import annotations

import math

import pytest
import torch
from trl import GRPOTrainer as TRLTrainer

import offcorr
from offcorr import Batch
from offcorr.data import Curriculum, Demonstrations, Prefixes, Traces
from offcorr.rollout import OffPolicy
from offcorr.training import Linear, origin_ids
from tests.data.runs import PROMPTS, Seen, traces_of, trainer_of, weights_of
from tests.data.test_demonstrations import methods
from tests.rollout.rollout_models import fresh_model, tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")

FRESH, PREFIX = origin_ids(["fresh", "prefix"])
TRACE = "0123456789"


def traces(text=TRACE, prompts=PROMPTS[:2]):
    return Traces([{"prompt": prompt, "completion": text, "ended": False} for prompt in prompts], tokenizer())


def run(folder, sampler, **options):
    """What a run of three steps on prompts that all have traces has seen."""
    trainer = trainer_of(sampler, folder, **{"prompts": PROMPTS[:2], **options})
    seen = Seen(trainer)
    trainer.train()
    return trainer, seen


def given(output):
    """The number of tokens given in each row."""
    return [len(mask) - sum(mask) for mask in output["env_mask"]]


# --------------------------------------------------------------------------------------------------- what is given


def test_all_rows_of_a_group_begin_with_the_same_part_of_a_trace(tmp_path):
    own = traces()
    _, seen = run(tmp_path, Prefixes(OffPolicy(), own, length=0.4))
    for output in seen.training:
        assert given(output) == [4] * 8 and output["origin"] == [PREFIX] * 8
        assert {tuple(ids[:4]) for ids in output["completion_ids"]} == {[*own][0].completion_ids[:4]}
        assert all(4 < len(ids) <= 10 for ids in output["completion_ids"])
    for batch in seen.batches:
        assert batch.mask.sum(1).min() >= 1 and not batch.mask[:, :4].any()


def test_a_whole_trace_leaves_its_last_token_to_be_sampled(tmp_path):
    _, seen = run(tmp_path, Prefixes(OffPolicy(), traces(), length=1.0), max_steps=1)
    assert given(seen.training[0]) == [9] * 8
    assert all(len(ids) == 10 for ids in seen.training[0]["completion_ids"])


def test_the_length_follows_a_schedule_and_the_rest_is_fresh(tmp_path):
    _, seen = run(tmp_path, Prefixes(OffPolicy(), traces(), length=Linear(0.8, 0.0)))
    assert [given(output) for output in seen.training] == [[8] * 8, [4] * 8, [0] * 8]
    assert [output["origin"][0] for output in seen.training] == [PREFIX, PREFIX, FRESH]


def test_the_share_is_one_of_groups(tmp_path):
    trainer = trainer_of(Prefixes(OffPolicy(), traces(), share=0.3), tmp_path)
    sampler = trainer._sampler
    prompt_ids = [[*prompt] for _ in range(200) for prompt in sampler.traces.prompts for _ in range(4)]
    prefixes = sampler._prefixes(prompt_ids, trainer)
    groups = [prefixes[start : start + 4] for start in range(0, len(prefixes), 4)]
    assert all(group == [group[0]] * 4 for group in groups)
    assert 0.24 < sum(bool(group[0]) for group in groups) / 400 < 0.36
    assert prefixes != sampler._prefixes(prompt_ids, trainer)  # another draw
    none, every = Prefixes(OffPolicy(), traces(), share=0), Prefixes(OffPolicy(), traces(), share=Linear(1, 0))
    assert not any(none._prefixes(prompt_ids, trainer)) and all(every._prefixes(prompt_ids, trainer))


def test_a_share_of_0_is_the_plain_run_to_the_last_bit(tmp_path):
    plain, _ = run(tmp_path / "plain", OffPolicy(lag=1))
    none, seen = run(tmp_path / "none", Prefixes(OffPolicy(lag=1), traces(), share=0.0))
    assert torch.equal(weights_of(plain), weights_of(none))
    assert {origin for output in seen.training for origin in output["origin"]} == {FRESH}


def test_evaluation_starts_from_scratch(tmp_path):
    _, seen = run(tmp_path, Prefixes(OffPolicy(), traces()), eval_strategy="steps", eval_steps=1)
    evaluations = [output for training, output in seen.rollouts if not training]
    assert evaluations and not any("env_mask" in output for output in evaluations)
    _, quiet = run(tmp_path, Prefixes(OffPolicy(), traces()))
    assert all(given(output) == [5] * 8 for output in seen.training)
    for name in ("prompt_ids", "completion_ids"):  # and disturbs nothing
        assert [output[name] for output in seen.training] == [output[name] for output in quiet.training]


# ------------------------------------------------------------------------------------- what it does not change


@pytest.mark.parametrize("correction", methods().values(), ids=methods())
def test_masked_tokens_before_a_continuation_change_no_coefficient_and_no_metric(correction):
    if correction.aggregate == "seq-mean-token-sum-norm":
        correction = offcorr.get(correction.method, max_length=8)
    chance = torch.Generator().manual_seed(2)

    def normal(*shape):
        return torch.randn(*shape, generator=chance)

    old = -normal(8, 5).abs() - 0.5
    fields = {
        "logp": old + 0.3 * normal(8, 5).clamp(-1, 1),
        "old_logp": old,
        "rollout_logp": old + 0.1 * normal(8, 5),
        "entropy": normal(8, 5).abs(),
        "sum_sq_probs": torch.rand(8, 5, generator=chance),
    }
    rows = {"advantages": normal(8), "rewards": normal(8).sign(), "group_ids": torch.arange(8) // 4}
    plain = Batch(**fields, **rows, mask=torch.ones(8, 5).bool())
    behind = {name: torch.cat([torch.full((8, 3), math.nan), value], 1) for name, value in fields.items()}
    prefixed = Batch(**behind, **rows, mask=(torch.arange(8) >= 3).expand(8, 8))
    found, wanted = correction(prefixed), correction(plain)
    assert not found.coefficient[:, :3].any()
    torch.testing.assert_close(found.coefficient[:, 3:], wanted.coefficient, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(found.loss, wanted.loss)
    assert found.metrics.compute() == pytest.approx(wanted.metrics.compute(), rel=1e-5, nan_ok=True)


@pytest.mark.parametrize("loss", ["ppo", "near_overlap", "turn_ppo", "ctpo", "minpro", "gspo", "m2po"])
def test_a_prefix_is_as_the_end_of_its_prompt_for_the_trainer(tmp_path, loss):
    """Once with the prefix in the completion, masked, once in the prompt: the same update and the same metrics."""
    chance = torch.Generator().manual_seed(0)
    rows = []
    for row in range(8):
        tokens = torch.randint(2, 17, (int(torch.randint(2, 6, (), generator=chance)),), generator=chance).tolist()
        logp = (-2 + 0.3 * torch.randn(len(tokens), generator=chance)).tolist()
        rows.append(
            {"prompt": [3 + row // 4, 4], "prefix": [5, 6, 7], "tokens": tokens, "logp": logp, "score": row % 3}
        )

    def rollout_func(inside):
        def generate(prompts, trainer):
            k = [len(row["prefix"]) if inside else 0 for row in rows]
            return {
                "prompt_ids": [row["prompt"] + ([] if inside else row["prefix"]) for row in rows],
                "completion_ids": [(row["prefix"] if inside else []) + row["tokens"] for row in rows],
                "env_mask": [[0] * n + [1] * len(row["tokens"]) for n, row in zip(k, rows, strict=True)],
                "logprobs": [[math.nan] * n + row["logp"] for n, row in zip(k, rows, strict=True)],
                "old_logp": [[math.nan] * n + row["logp"] for n, row in zip(k, rows, strict=True)],
                "rollout_version": [0] * 8,
                "origin": [PREFIX] * 8,
                "score": [row["score"] for row in rows],
            }

        return generate

    def reward(completions, score, **_):
        return [float(value) for value in score]

    options = {"reward": reward, "loss_type": f"offcorr:{loss}", "max_steps": 2, "monitor": "off"}
    options |= {"optim": "sgd", "learning_rate": 0.1, "gradient_accumulation_steps": 1}
    inside = trainer_of(rollout_func(True), tmp_path / "in", **options)
    outside = trainer_of(rollout_func(False), tmp_path / "out", **options)
    start = weights_of(inside)
    for trainer in (inside, outside):
        trainer.train()
    assert (weights_of(inside) - start).abs().max() > 1e-4
    torch.testing.assert_close(weights_of(inside), weights_of(outside), rtol=1e-4, atol=2e-6)
    for mine, other in zip(inside.state.log_history[:2], outside.state.log_history[:2], strict=True):
        assert mine.keys() == other.keys()
        for name, value in mine.items():
            if name not in ("num_tokens", "step_time"):  # TRL counts tokens of prompts, too
                assert value == pytest.approx(other[name], rel=1e-3, abs=1e-5), name


# --------------------------------------------------------------------------------------------------- the curriculum


def test_a_curriculum_shortens_what_succeeds_and_lengthens_what_fails(tmp_path):
    paid = tokenizer()(PROMPTS[0])["input_ids"]

    def reward(prompts, **_):
        return [float(prompt == PROMPTS[0]) for prompt in prompts]

    curriculum = Curriculum(start=0.5, step=0.2, bound=0.5, high=0.8)
    options = {"per_device_train_batch_size": 4, "reward": reward, "max_steps": 8, "gradient_accumulation_steps": 1}
    trainer, seen = run(tmp_path, Prefixes(OffPolicy(), traces(), length=curriculum), **options)
    lengths = {True: [], False: []}
    for output in seen.training:
        lengths[output["prompt_ids"][0] == paid].append(given(output)[0])
    assert lengths[True] == [5, 3, 1, 0, 0][: len(lengths[True])] and len(lengths[True]) > 2
    assert lengths[False] == [5, 7, 8, 8, 8][: len(lengths[False])] and len(lengths[False]) > 2
    assert sorted(trainer._sampler._lengths.values()) == pytest.approx([0.0, 0.8])


def test_a_curriculum_looks_at_sampled_completions_alone(tmp_path):
    """A demonstration in the group succeeds, whatever the prefix is."""
    own = traces_of(PROMPTS[:2], logp=-1.0)

    def reward(origin, **_):
        return [float(name == 2) for name in origin]

    prefixes = Prefixes(OffPolicy(), own, length=Curriculum(start=0.5, step=0.25, bound=0.1))
    run(tmp_path, Demonstrations(prefixes, own), reward=reward, max_steps=1)
    assert {*prefixes._lengths.values()} == {0.75}


def test_a_curriculum_follows_each_of_several_generations_of_an_optimizer_step(tmp_path):
    sampler = Prefixes(OffPolicy(), traces(prompts=PROMPTS[:1]), length=Curriculum(start=0.5, step=0.1, bound=-1.0))
    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 1}
    run(tmp_path, sampler, prompts=PROMPTS[:1], max_steps=1, **options)
    assert [*sampler._lengths.values()] == pytest.approx([0.3])


def test_numbers_of_a_curriculum_are_checked():
    for options in ({"start": 1.5}, {"low": -0.1}, {"high": 2}, {"step": 0}, {"bound": math.nan}, {"low": 0.9}):
        name = next(iter(options))
        with pytest.raises(ValueError, match=f"Curriculum.*{'start' if name == 'low' and options[name] > 0 else name}"):
            Curriculum(**options)
    assert Curriculum().after(0.5, reward=0.5) == 0.5


# --------------------------------------------------------------------------------------------- checkpoints, refusals


SAVING = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}


@pytest.mark.parametrize("cls", ["ours", "TRL"])
def test_resuming_reproduces_the_uninterrupted_run(tmp_path, cls):
    def sampler():
        rows = [{"prompt": p, "completion": c} for p in PROMPTS[:2] for c in ("12345", "456", "78987")]
        length = Curriculum(bound=0.4, start=0.5, step=0.2) if cls == "ours" else 0.6
        return Prefixes(OffPolicy(lag=1), Traces(rows, tokenizer()), share=0.7, length=length)

    options = {"prompts": PROMPTS[:2]} | ({} if cls == "ours" else {"cls": Recorded, "loss_type": "dapo"})
    whole, again = sampler(), sampler()
    trainer = trainer_of(whole, tmp_path, **SAVING, **options)
    calls = watched(trainer)
    trainer.train()
    resumed = trainer_of(again, tmp_path, fresh_model(seed=7), **SAVING | {"save_strategy": "no"}, **options)
    new = watched(resumed)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert [str(output) for output in new] == [str(output) for output in calls[2:]]
    assert torch.equal(weights_of(trainer), weights_of(resumed))
    assert whole.state_dict() == again.state_dict()


class Recorded(TRLTrainer):
    """TRL's own trainer."""


def watched(trainer):
    """The outputs of its rollout_func, as they come."""
    calls, inner = [], trainer.rollout_func

    def rollout_func(prompts, of):
        calls.append(inner(prompts, of))
        return calls[-1]

    trainer.rollout_func = rollout_func
    return calls


def test_what_cannot_be_is_refused(tmp_path):
    with pytest.raises(TypeError, match=r"sampler is .*Demonstrations\(Prefixes\(OffPolicy\(\), traces\), traces\)"):
        Prefixes(Demonstrations(OffPolicy(), traces_of()), traces())
    with pytest.raises(TypeError, match="expected an instance"):
        Prefixes(OffPolicy, traces())
    with pytest.raises(TypeError, match=r"traces is a list, expected Traces\(rows, tokenizer\)"):
        Prefixes(OffPolicy(), [])
    for options in ({"share": 1.5}, {"length": -0.1}, {"length": Linear(0.5, 2.0)}, {"share": True}):
        with pytest.raises(ValueError, match=f"{next(iter(options))} is .*, expected a number between 0 and 1"):
            Prefixes(OffPolicy(), traces(), **options)
    with pytest.raises(ValueError, match="row 1: the trace has 10 tokens, and max_completion_length is 8"):
        trainer_of(Prefixes(OffPolicy(), traces()), tmp_path, max_completion_length=8)
    with pytest.raises(ValueError, match=r"length=Curriculum\(.*follows the rewards, which Recorded does not keep"):
        sampler = Prefixes(OffPolicy(), traces(), length=Curriculum())
        trainer_of(sampler, tmp_path, cls=Recorded, loss_type="dapo").train()
