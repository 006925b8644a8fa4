"""Tests of Demonstrations: traces in the groups of GRPOTrainer, their ratios, and what is refused."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from trl import GRPOTrainer as TRLTrainer

import offcorr
from offcorr import Batch
from offcorr.data import Demonstrations, Prefixes, Traces
from offcorr.data.demonstrations import comparing
from offcorr.data.matched import Matched
from offcorr.rollout import OffPolicy
from offcorr.training import origin_ids
from offcorr.training.unrecorded import filled
from tests.data.runs import ANSWERS, PROMPTS, Seen, traces_of, trainer_of, weights_of
from tests.rollout.rollout_models import EOS, fresh_model, tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")

FRESH, DEMONSTRATION = origin_ids(["fresh", "demonstration"])
OPTIONS = {  # without a default
    "estr": {"tau": 0.1},
    "geo_mis": {"low": 0.5, "high": 2.0},
    "pnpo": {"low": 0.5, "high": 2.0},
}


def taken(outputs):
    """The completions that are traces."""
    rows = [row for output in outputs for row in zip(output["completion_ids"], output["origin"], strict=True)]
    return [ids for ids, origin in rows if origin == DEMONSTRATION]


def methods():
    return {name: offcorr.get(name, **OPTIONS.get(name, {})) for name in offcorr.available()}


# ------------------------------------------------------------------------------------------------ what is trained on


def test_the_last_rows_of_a_group_are_traces_with_the_groups_advantage(tmp_path):
    traces = traces_of(logp=-0.5)
    trainer = trainer_of(Demonstrations(OffPolicy(), traces), tmp_path, per_device_train_batch_size=16)
    seen = Seen(trainer)
    trainer.train()
    for output in seen.training:
        for start in range(0, 16, 4):
            prompt = tuple(output["prompt_ids"][start])
            assert all(tuple(ids) == prompt for ids in output["prompt_ids"][start : start + 4])
            found = traces.of(prompt)
            assert output["origin"][start : start + 3] == [FRESH] * 3
            assert output["origin"][start + 3] == (DEMONSTRATION if found else FRESH)
            if found:
                assert output["completion_ids"][start + 3] == [*found[0].completion_ids]
                assert output["old_logp"][start + 3] == [-0.5] * len(found[0])
                assert all(map(math.isnan, output["logprobs"][start + 3]))
    assert {DEMONSTRATION} < {origin for output in seen.training for origin in output["origin"]}
    for batch in seen.batches:
        advantages = torch.zeros(int(batch.group_ids.max()) + 1).index_add(0, batch.group_ids, batch.advantages)
        assert advantages.abs().max() < 1e-4  # of the whole group, trace included
        given = batch.origin == DEMONSTRATION
        assert (batch.old_logp[given][batch.mask[given]] == -0.5).all()
        assert (batch.rollout_version[given] == batch.trainer_version).all()
    assert "offcorr/staleness/lag" in trainer.state.log_history[0]
    assert all(e["offcorr/staleness/lag"] == 0 for e in trainer.state.log_history if "offcorr/staleness/lag" in e)
    assert not any("offcorr/origin/demonstration/lag" in entry for entry in trainer.state.log_history)


def test_traces_of_a_prompt_take_turns_and_no_group_has_one_twice(tmp_path):
    rows = [{"prompt": "c2=", "completion": text, "logp": [-1.0] * 2} for text in "012"]
    traces = Traces(rows, tokenizer())
    trainer = trainer_of(Demonstrations(OffPolicy(), traces, per_group=2), tmp_path, prompts=["c2="], max_steps=2)
    seen = Seen(trainer)
    trainer.train()
    order = [[*trace.completion_ids] for trace in traces]
    assert taken(seen.training) == [order[i % 3] for i in range(8)]  # two groups of two in each of two steps
    one = Demonstrations(OffPolicy(), traces_of(["c2="], logp=-1.0), per_group=3)
    trainer = trainer_of(one, tmp_path, prompts=["c2="], max_steps=1)
    seen = Seen(trainer)
    trainer.train()
    assert seen.training[0]["origin"] == [FRESH] * 3 + [DEMONSTRATION] + [FRESH] * 3 + [DEMONSTRATION]


def test_prompts_without_traces_are_sampled_as_without_the_class(tmp_path):
    plain = trainer_of(OffPolicy(lag=1), tmp_path / "plain")
    plain.train()
    traces = traces_of(logp=-1.0)
    none = trainer_of(Demonstrations(OffPolicy(lag=1), traces), tmp_path / "none")
    traces._by_prompt.clear()
    none.train()
    assert torch.equal(weights_of(plain), weights_of(none))


def test_evaluation_samples_every_completion(tmp_path):
    trainer = trainer_of(Demonstrations(OffPolicy(), traces_of(logp=-0.5)), tmp_path)
    seen = Seen(trainer)
    trainer.evaluate()
    assert seen.rollouts and not seen.training
    assert not any("origin" in output for _, output in seen.rollouts)


def test_tokens_that_the_writer_did_not_choose_are_not_trained_on(tmp_path):
    traces = traces_of(["c2="], logp=-1.0, mask=[1, 0, 0, 1, 1])
    trainer = trainer_of(Demonstrations(OffPolicy(), traces), tmp_path, prompts=["c2="], max_steps=1)
    seen = Seen(trainer)
    trainer.train()
    batch = seen.batches[0]
    given = batch.origin == DEMONSTRATION
    assert batch.mask[given].sum(1).tolist() == [3, 3]
    assert batch.mask[~given].sum() == sum(len(ids) for ids in seen.training[0]["completion_ids"]) - 10


# ------------------------------------------------------------------------------------------------ without log-probs


@pytest.mark.parametrize("without, expected", [("ratio_one", None), ("deterministic", 0.0)])
def test_the_ratio_of_a_trace_without_log_probs(tmp_path, without, expected):
    trainer = trainer_of(Demonstrations(OffPolicy(lag=1), traces_of(), without_logp=without), tmp_path)
    seen = Seen(trainer)
    trainer.train()
    shares = []
    for batch in seen.batches:
        given = (batch.origin == DEMONSTRATION)[:, None] & batch.mask
        shares.append(bool(given.any()))
        wanted = batch.logp.detach() if expected is None else torch.full_like(batch.logp, expected)
        assert torch.equal(batch.old_logp[given], wanted[given])
        assert batch.old_logp[batch.mask].isfinite().all()
        assert not batch.old_logp.requires_grad
    assert any(shares)
    assert all(entry["offcorr/loss/nonfinite"] == 0 for entry in trainer.state.log_history if "loss" in entry)


def test_skipping_dead_sequences_changes_nothing(tmp_path):
    found = []
    for skip in (False, True):
        sampler = Demonstrations(OffPolicy(lag=1), traces_of(), without_logp="ratio_one")
        trainer = trainer_of(sampler, tmp_path, loss_type="tis", skip_dead_sequences=skip, reward=unequal)
        trainer.train()
        found.append((weights_of(trainer), sum(e.get("offcorr/loss/skipped", 0) for e in trainer.state.log_history)))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-4, atol=1e-6)
    assert found[1][1] > 0


def unequal(prompts, completion_ids, **_):
    """Equal for all completions of one of the prompts, whose advantages are 0 then."""
    rows = zip(prompts, completion_ids, strict=True)
    return [0.0 if prompt == PROMPTS[0] else float(sum(ids) % 5) for prompt, ids in rows]


def test_ratio_one_has_the_gradient_of_the_log_prob():
    """And the deterministic one that of pi, times the advantage."""
    logp = torch.tensor([[-1.0, -2.0], [-0.5, -3.0]], requires_grad=True)
    origin = torch.tensor([FRESH, DEMONSTRATION])
    unknown = torch.tensor([[-1.0, -2.0], [math.nan, math.nan]])
    fields = {"logp": logp, "advantages": torch.tensor([0.0, 1.0]), "mask": torch.ones(2, 2).bool(), "origin": origin}
    loss = offcorr.get("token_is", aggregate="sum")
    one = loss(Batch(**fields, old_logp=filled(unknown, logp, origin))).coefficient
    assert torch.equal(one[1], torch.tensor([-1.0, -1.0]))
    deterministic = loss(Batch(**fields, old_logp=torch.tensor([[-1.0, -2.0], [0.0, 0.0]]))).coefficient
    torch.testing.assert_close(deterministic[1], -logp.detach()[1].exp())


def test_nothing_but_a_demonstration_is_filled():
    logp, old = torch.zeros(2, 2), torch.tensor([[math.nan, -1.0], [math.nan, -1.0]])
    made = filled(old, logp, torch.tensor(origin_ids(["replay", "demonstration"])))
    assert made.isnan().tolist() == [[True, False], [False, False]] and made[1].tolist() == [0.0, -1.0]
    assert filled(None, logp, None) is None and filled(old, logp, None) is old


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return trainer_of(OffPolicy(), tmp_path_factory.mktemp("plain"))


TAKE_TRACES_WITHOUT_LOGP = {"asymre", "opmd", "reinforce"}


@pytest.mark.parametrize("name, correction", methods().items(), ids=methods())
def test_which_methods_refuse_traces_without_log_probs(plain, monkeypatch, name, correction):
    monkeypatch.setattr(type(plain), "correction", correction)
    refused = name not in TAKE_TRACES_WITHOUT_LOGP
    assert bool(comparing(correction)) is refused
    if refused:
        with pytest.raises(ValueError, match=r"2 of 2 traces have no logp \(the first: row 1\)") as error:
            Demonstrations(OffPolicy(), traces_of()).attach(plain)
        said = str(error.value)
        assert f"loss {correction.method!r}" in said and "without_logp='ratio_one'" in said and "'determ" in said
        assert all(repr(stage) in said for stage in comparing(correction).values())
    else:
        Demonstrations(OffPolicy(), traces_of()).attach(plain)
    for accepted in (
        Demonstrations(OffPolicy(), traces_of(), without_logp="ratio_one"),
        Demonstrations(OffPolicy(), traces_of(), without_logp="deterministic"),
        Demonstrations(OffPolicy(), traces_of(logp=-1.0)),
    ):
        accepted.attach(plain)


@pytest.mark.parametrize("name, correction", methods().items(), ids=methods())
def test_what_takes_a_trace_without_log_probs_does_not_read_them_and_no_engine_is_as_one_that_agrees(name, correction):
    """The rule that ``comparing`` states, against the numbers that each method computes."""
    chance = torch.Generator().manual_seed(1)
    size = (8, 6)

    def normal(*shape):
        return torch.randn(*shape, generator=chance)

    old, given = -normal(*size).abs() - 0.5, torch.arange(8)[:, None] % 4 == 3
    fields = {
        "logp": old + 0.4 * normal(*size).clamp(-1, 1),
        "advantages": normal(8),
        "mask": torch.ones(size).bool(),
        "rewards": normal(8).sign(),
        "group_ids": torch.arange(8) // 4,
        "entropy": normal(*size).abs(),
        "sum_sq_probs": torch.rand(size, generator=chance),
        "rollout_version": torch.zeros(size).long(),
        "trainer_version": 1,
    }
    engine = torch.where(given, math.nan, old + 0.1)
    found = correction(Batch(**fields, old_logp=old, rollout_logp=engine)).coefficient
    agreeing = torch.where(given, old, engine)
    same = correction(Batch(**fields, old_logp=old, rollout_logp=agreeing)).coefficient
    torch.testing.assert_close(found, same)
    other = torch.where(given, old - 1.5, old)
    changed = correction(Batch(**fields, old_logp=other, rollout_logp=engine)).coefficient
    if not comparing(correction):
        assert torch.equal(changed, found)


# ------------------------------------------------------------------------------------------------ what is refused


def refused(folder, match, sampler=None, traces=None, **options):
    own = {name: options.pop(name) for name in ("per_group", "without_logp") if name in options}
    with pytest.raises(ValueError, match=match):
        demonstrations = Demonstrations(sampler or OffPolicy(), traces or traces_of(logp=-1.0), **own)
        trainer_of(demonstrations, folder, **options).train()


def test_settings_that_do_not_go_together_are_refused(tmp_path):
    refused(tmp_path, "per_group is 0, expected a number of completions", per_group=0)
    refused(tmp_path, "per_group is 4 and num_generations 4: expected fewer", per_group=4)
    refused(tmp_path, "without_logp is 'one'.*Expected one of|without_logp is 'one', expected", without_logp="one")
    refused(tmp_path, "row 2: the trace has 5 tokens, and max_completion_length is 4", max_completion_length=4)
    refused(tmp_path, "anchor='recomputed' does not read the old_logp of a trace", anchor="recomputed")
    refused(tmp_path, "TRL's own loss takes the weights before the update.*'ratio_one'", loss_type="dapo")

    def bare(prompts, trainer):
        output = OffPolicy()(prompts, trainer)
        return {name: output[name] for name in ("prompt_ids", "completion_ids", "logprobs")}

    refused(tmp_path, "returned no old_logp, and loss 'ppo' reads it", sampler=bare)
    with pytest.raises(TypeError, match=r"traces is a list, expected Traces\(rows, tokenizer\)"):
        Demonstrations(OffPolicy(), [{}])
    with pytest.raises(ValueError, match=r"there are 6 prompts, expected a multiple of num_generations=4"):
        own = trainer_of(Demonstrations(OffPolicy(), traces_of(logp=-1.0)), tmp_path)
        own.model.train()
        own.rollout_func(PROMPTS[:1] * 6, own)
    with pytest.raises(ValueError, match=r"prompts\[3\] differs from prompts\[0\], expected 4 neighbours"):
        own.rollout_func(PROMPTS[:1] * 3 + PROMPTS[1:2], own)


def test_trls_own_loss_takes_traces_where_that_is_said(tmp_path):
    for cls in (TRLTrainer, None):
        demonstrations = Demonstrations(OffPolicy(), traces_of(), without_logp="ratio_one")
        options = {"loss_type": "dapo", "max_steps": 2} | ({} if cls is None else {"cls": cls})
        trainer_of(demonstrations, tmp_path, **options).train()


AROUND = {"Demonstrations": Demonstrations, "Prefixes": Prefixes}


@pytest.mark.parametrize("kind", AROUND)
def test_traces_that_match_no_prompt_are_refused(tmp_path, kind):
    sampler = AROUND[kind](OffPolicy(), traces_of(["c2="], logp=-1.0))
    with pytest.raises(ValueError, match=r"none of the 2 prompts of the training dataset has a trace; there are Tr"):
        trainer_of(sampler, tmp_path, prompts=PROMPTS[2:])


@pytest.mark.parametrize("kind", AROUND)
def test_the_first_line_counts_the_prompts_with_a_trace(tmp_path, kind, caplog):
    trainer_of(AROUND[kind](OffPolicy(), traces_of(logp=-1.0)), tmp_path, max_steps=1).train()
    (line,) = [record.getMessage() for record in caplog.records if "sampled by" in record.getMessage()]
    what = {"Demonstrations": "demonstration", "Prefixes": "trace to begin with"}[kind]
    assert f"sampled by {kind}(OffPolicy), 2 of 4 prompts have a {what}" in line


def test_demonstrations_around_prefixes_describe_both(tmp_path, caplog):
    inner = Prefixes(OffPolicy(), traces_of(PROMPTS[:1], logp=-1.0))
    both = Demonstrations(inner, traces_of(PROMPTS[:3], logp=-1.0), per_group=1)
    trainer_of(both, tmp_path, max_steps=1).train()
    (line,) = [record.getMessage() for record in caplog.records if "sampled by" in record.getMessage()]
    counts = "3 of 4 prompts have a demonstration, 1 of 4 prompts have a trace to begin with"
    assert f"sampled by Demonstrations(Prefixes(OffPolicy)), {counts}" in line
    assert repr(both).startswith("Demonstrations(Prefixes(OffPolicy(") and "per_group=1, without_log" in repr(both)


def test_prompts_of_an_iterable_dataset_that_never_match_are_noticed():
    matched = Matched(traces_of(["c2="], logp=-1.0))
    matched.count(SimpleNamespace(train_dataset=iter([])))
    with pytest.warns(RuntimeWarning, match=r"none of the first 64 prompts has a trace; there are Traces\(1 of 1"):
        for _ in range(32):
            matched.note(2, 0)
    assert matched.said("demonstration") == ""


# ------------------------------------------------------------------------------------------------ composed, resumed


SAVING = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}


@pytest.mark.parametrize("inside", ["plain", "prefixes"])
def test_resuming_reproduces_the_uninterrupted_run(tmp_path, inside):
    rows = [{"prompt": p, "completion": c, "logp": [-1.0] * 4} for p in PROMPTS[:2] for c in ("123", "456", "789")]
    traces = Traces(rows, tokenizer())

    def sampler():
        own = OffPolicy(lag=1)
        return Demonstrations(Prefixes(own, traces, share=0.5) if inside == "prefixes" else own, traces)

    whole = trainer_of(sampler(), tmp_path, **SAVING)
    seen = Seen(whole)
    whole.train()
    resumed = trainer_of(sampler(), tmp_path, fresh_model(seed=7), **{**SAVING, "save_strategy": "no"})
    again = Seen(resumed)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert [str(output) for output in again.training] == [str(output) for output in seen.training[2:]]
    assert torch.equal(weights_of(whole), weights_of(resumed))
    anew = Seen(whole)
    whole.train()  # a second run begins anew with the traces
    first, second = (taken(outputs) for outputs in (seen.training[:4], anew.training[-4:]))
    assert first and first == second


def test_prefixes_and_traces_share_a_group(tmp_path):
    traces = traces_of(logp=-1.0)
    sampler = Demonstrations(Prefixes(OffPolicy(), traces, length=0.4), traces)
    trainer = trainer_of(sampler, tmp_path, prompts=["c2="])
    seen = Seen(trainer)
    trainer.train()
    for output in seen.training:
        assert output["origin"] == origin_ids(["prefix"] * 3 + ["demonstration"]) * 2
        assert [sum(mask) - len(mask) for mask in output["env_mask"]] == [-2, -2, -2, 0] * 2
        assert [tokenizer().decode(ids[:2]) for ids in output["completion_ids"]] == [ANSWERS[1][:2]] * 8
        assert output["completion_ids"][3][-1] == EOS
