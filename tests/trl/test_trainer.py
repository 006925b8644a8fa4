"""TRL's own losses beside ours, anchors, metrics, batch-coupled corrections, and what is refused."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import math
import re
import textwrap
import warnings

import pytest
import torch
import trl
from peft import LoraConfig
from transformers import Qwen3ForCausalLM

import offcorr
from offcorr.cli.metrics import about, find
from offcorr.rollout import OffPolicy
from offcorr.stages import weights
from offcorr.stages.checks import warn_again
from offcorr.training import Step
from offcorr.training.field_metrics import ALIASES
from offcorr.training.logged import CHOICES
from offcorr.trl import GRPOConfig, GRPOTrainer
from offcorr.trl.config import TRL_LOSSES, choose_correction
from offcorr.trl.step import _why_all_dropped
from offcorr.trl.trainer import forward_arguments
from tests.trl.recording import Recording


def parameters(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


# TRL's own losses


@pytest.mark.parametrize("loss_type", ["dapo", "bnpo"])
def test_bare_trl_name_runs_trls_own_loss(make_trainer, series, loss_type):
    ours = make_trainer(loss_type=loss_type, num_iterations=2)
    ours.train()
    theirs = make_trainer(trl.GRPOTrainer, config=trl.GRPOConfig, loss_type=loss_type, num_iterations=2)
    theirs.train()
    assert torch.equal(parameters(ours), parameters(theirs))
    for name in "reward", "loss", "entropy", "clip_ratio/region_mean":
        assert series(ours, name) == series(theirs, name)
    staleness = series(ours, "offcorr/staleness/abs_mean")
    assert staleness[0] == 0 and staleness[1] > 0.01
    assert not series(theirs, "offcorr/staleness/abs_mean")


def test_every_loss_of_the_installed_trl_is_listed():
    """Those that its own ``_compute_loss`` compares ``loss_type`` with."""
    source = textwrap.dedent(inspect.getsource(trl.GRPOTrainer._compute_loss))
    known = {
        constant.value
        for compare in ast.walk(ast.parse(source))
        if isinstance(compare, ast.Compare) and getattr(compare.left, "attr", "") == "loss_type"
        for constant in ast.walk(compare)
        if isinstance(constant, ast.Constant) and isinstance(constant.value, str)
    }
    assert len(known) >= 8 and known == set(TRL_LOSSES)


@pytest.fixture
def replaced(monkeypatch):
    """TRL's own names stand for other classes, as after a plugin's or a user's assignment."""

    class Theirs(trl.GRPOTrainer):
        def _get_per_token_logps_and_entropies(self, *args, **kwargs):
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)

        def _compute_loss(self, model, inputs):
            return super()._compute_loss(model, inputs)

    @dataclasses.dataclass
    class TheirConfig(GRPOConfig):
        epsilon: float = 0.3

    wanted = forward_arguments()
    monkeypatch.setattr(trl, "GRPOTrainer", Theirs)
    monkeypatch.setattr(trl, "GRPOConfig", TheirConfig)
    forward_arguments.cache_clear()
    yield wanted
    forward_arguments.cache_clear()


def test_names_of_trl_may_be_replaced(replaced, make_trainer, series):
    """This library looks at the classes that it subclassed when it was imported."""
    assert forward_arguments() == replaced and "compute_entropy" in replaced
    for loss_type, corrects in (("dapo", False), ("grpo", False), ("minpro", True)):
        assert (make_trainer(loss_type=loss_type).correction is not None) == corrects
    args = GRPOConfig("out", loss_type="minpro", epsilon=0.3, bf16=False, use_cpu=True, report_to=[])
    with pytest.warns(UserWarning, match=r"TRL's own losses read epsilon=0.3"):
        choose_correction(args)


# Anchors


def test_snapshot_anchor_makes_the_correction_act(make_trainer, series):
    """Lag 16, fp32 sampler: the ratios are the lag's, and the engine agrees with the trainer."""
    sampler = OffPolicy(lag=16)
    trainer = make_trainer(
        Recording,
        loss_type="minpro",
        rollout_func=sampler,
        max_steps=18,
        learning_rate=1e-3,
        steps_per_generation=2,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="every staleness ratio")
        trainer.train()
    staleness = series(trainer, "offcorr/staleness/abs_mean")
    assert staleness[0] < 1e-5 and staleness[-1] > 0.02
    assert series(trainer, "offcorr/staleness/lag") == [*range(17), 16]
    assert max(series(trainer, "offcorr/engine/abs_max")) < 1e-4
    inputs, batch = trainer.batches[-1]
    assert torch.equal(batch.old_logp, inputs["old_logp"])
    assert (batch.logp.exp() - batch.old_logp.exp())[batch.mask].abs().max() > 0.01


def test_precision_gap_is_the_engine_series(make_trainer, series):
    trainer = make_trainer(
        loss_type="minpro", rollout_func=OffPolicy(precision="int8"), max_steps=2, log_metrics="aliases"
    )
    trainer.train()
    assert min(series(trainer, "offcorr/engine/abs_mean")) > 1e-4
    assert series(trainer, "offcorr/staleness/abs_mean")[0] < 1e-5
    logged = trainer.state.log_history[0]
    assert ALIASES.keys() <= logged.keys()
    assert logged["mismatch_kl"] == logged["offcorr/engine/k3"]


def test_old_logp_stays_with_its_tokens(make_trainer, replay, recorded):
    """Through padding, shuffling and splitting, each row keeps the numbers the sampler gave with its tokens."""
    trainer = make_trainer(Recording, loss_type="tis", rollout_func=replay("old_logp", "rollout_version"), max_steps=2)
    trainer.train()
    given = {
        (*row["prompt_ids"], *row["completion_ids"]): row for completions in recorded.values() for row in completions
    }
    seen = 0
    for inputs, batch in trainer.batches:
        for i in range(len(batch.mask)):
            length = int(inputs["completion_mask"][i].sum())
            prompt = inputs["prompt_ids"][i].tolist()  # all prompts have one length: no padding
            row = given[(*prompt, *inputs["completion_ids"][i, :length].tolist())]
            torch.testing.assert_close(batch.old_logp[i, :length], torch.tensor(row["old_logp"]))
            torch.testing.assert_close(batch.rollout_logp[i, :length], torch.tensor(row["logprobs"]))
            assert set(batch.rollout_version[i].tolist()) == {0}
            seen += 1
    assert seen == 16


def test_default_anchor(make_trainer, replay):
    def anchor(keys=(), **settings):
        settings.setdefault("rollout_func", replay(*keys))
        trainer = make_trainer(Recording, max_steps=1, **settings)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.train()
        inputs, batch = trainer.batches[-1]
        if batch.old_logp is None:
            return "recomputed"
        source = "old_logp" if "old_logp" in inputs else "sampling_per_token_logps"
        assert torch.equal(batch.old_logp[batch.mask], inputs[source][batch.mask])
        return {"old_logp": "snapshot"}.get(source, "rollout")

    assert anchor(["old_logp"], loss_type="minpro") == "snapshot"
    assert anchor(["old_logp"], loss_type="tis") == "snapshot"
    assert anchor(loss_type="minpro") == "rollout"
    assert anchor(loss_type="tis") == "recomputed"
    assert anchor(loss_type="minpro", rollout_func=None) == "recomputed"


ADAPTER = dict(peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


@pytest.mark.parametrize("more", [{}, {"beta": 0.1}, ADAPTER | {"beta": 0.1}], ids=["plain", "kl", "adapter"])
@pytest.mark.parametrize(
    ("loss_type", "keys", "scored"),
    [("tis", ["old_logp"], False), ("minpro", [], False), ("tis", [], True)],
    ids=["snapshot", "rollout", "recomputed"],
)
def test_samples_are_scored_again_only_for_an_anchor_that_looks(make_trainer, replay, loss_type, keys, scored, more):
    """What is left out changes nothing: the weights after training are the same to the last bit."""

    class Scoring(Recording):
        def _scores_in_vain(self):
            return False

    after = []
    for cls in (Recording, Scoring):
        settings = dict(loss_type=loss_type, num_iterations=2, max_steps=3) | more
        trainer = make_trainer(cls, rollout_func=replay(*keys), **settings)
        trainer.train()
        assert all(("old_per_token_logps" in inputs) == (scored or cls is Scoring) for inputs, _ in trainer.batches)
        after.append([weight.detach() for weight in trainer.model.parameters()])
    assert all(map(torch.equal, *after))


def test_rollout_anchor_logs_the_gap_as_staleness(make_trainer, replay, series):
    trainer = make_trainer(loss_type="minpro", rollout_func=replay(), max_steps=1, log_metrics="aliases")
    trainer.train()
    assert not series(trainer, "offcorr/engine/abs_mean")
    assert series(trainer, "offcorr/staleness/abs_mean")[0] > 0.01
    assert series(trainer, "mismatch_kl") == series(trainer, "offcorr/staleness/k3")


def test_idle_ratio_is_said_once(make_trainer):
    trainer = make_trainer(loss_type="minpro", max_steps=2)
    with pytest.warns(UserWarning, match="every staleness ratio of 'minpro' will be 1") as caught:
        trainer.train()
    assert sum("every staleness ratio" in str(w.message) for w in caught) == 1


@pytest.mark.parametrize(
    ("keys", "loss_type", "said", "unsaid"),
    [
        (["old_logp"], "minpro", "take anchor='snapshot', which uses those that rollout_func supplies", "OffPolicy"),
        ([], "minpro", "take anchor='rollout', which uses those that rollout_func reports", "OffPolicy"),
        ([], "tis", "sample with a rollout_func that returns them as old_logp", "anchor='rollout'"),
        (None, "minpro", r"sample with a rollout_func that .*, or with an engine .*\(use_vllm=True\)", "anchor="),
    ],
)
def test_advice_against_an_idle_ratio_fits_the_sampler(make_trainer, replay, keys, loss_type, said, unsaid):
    """One that is in use already is not advised, nor an anchor that the correction refuses."""
    trainer = make_trainer(
        rollout_func=None if keys is None else replay(*keys), loss_type=loss_type, anchor="recomputed", max_steps=1
    )
    with pytest.warns(UserWarning, match=f"every staleness ratio .*{said}.* leave a lag of the sampler out$") as caught:
        trainer.train()
    (warning,) = [str(w.message) for w in caught if "every staleness ratio" in str(w.message)]
    assert unsaid not in warning
    as_it_should_be = (
        "Where the sampler has the current weights, as TRL's own has, this is as it should be: there is no"
    )
    assert f"{as_it_should_be} staleness to correct. For a sampler that lags, " in warning


def test_ratio_that_moves_is_not_called_idle(make_trainer):
    trainer = make_trainer(loss_type="minpro", max_steps=2, num_iterations=2)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="every staleness ratio")
        trainer.train()


@pytest.mark.parametrize(
    ("keys", "settings", "line", "anchor"),
    [
        (
            ["old_logp"],
            dict(loss_type="tis"),
            "loss 'tis'; old_logp: the weights that sampled, as the sampler supplied it (anchor "
            "'snapshot', by default); engine log-probs: yes; sampled by rollout_func",
            "Supplied()",
        ),
        (
            [],
            dict(loss_type="minpro", anchor="rollout"),
            "loss 'minpro'; old_logp: the engine, as it reported (anchor 'rollout'); engine log-probs: yes; the "
            "engine's gap is part of staleness: no offcorr/engine series (anchor='recomputed' has them); sampled by "
            "rollout_func",
            "Rollout()",
        ),
        (
            None,
            dict(loss_type="minpro"),
            "loss 'minpro'; old_logp: none, so that every staleness ratio is 1 (anchor 'recomputed', by "
            "default); engine log-probs: no; sampled by TRL's own generation",
            "Recomputed()",
        ),
        (
            None,
            dict(loss_type="minpro", num_iterations=2),
            "loss 'minpro'; old_logp: the weights before the first update on the samples "
            "(anchor 'recomputed', by default); engine log-probs: no; sampled by TRL's own generation",
            "Recomputed()",
        ),
        (
            ["old_logp"],
            dict(loss_type="tis", ess_lr="linear"),
            "loss 'tis'; old_logp: the weights that sampled, as the sampler supplied it (anchor 'snapshot', by "
            "default); engine log-probs: yes; learning rate scaled by the effective sample size ('linear'); sampled by "
            "rollout_func",
            "Supplied()",
        ),
        (
            ["old_logp"],
            dict(loss_type="dapo"),
            "TRL's own loss 'dapo': this library adds metrics and corrects nothing; "
            "staleness is measured against the weights that sampled, as "
            "the sampler supplied it; engine log-probs: yes; sampled by rollout_func",
            "Supplied()",
        ),
        (
            None,
            dict(loss_type="dapo"),
            "TRL's own loss 'dapo': this library adds metrics and corrects nothing; "
            "staleness is not measured, as there are no log-probs of "
            "older weights; engine log-probs: no; sampled by TRL's own generation",
            "Recomputed()",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:every staleness ratio")
def test_the_anchor_in_force_is_said_once(make_trainer, replay, caplog, keys, settings, line, anchor):
    trainer = make_trainer(rollout_func=None if keys is None else replay(*keys), max_steps=2, **settings)
    trainer.train()
    said = [record.getMessage() for record in caplog.records if record.name == "offcorr"]
    if keys is not None:
        few = "; too few uncertain tokens to compare the engine's log-probs with the trainer's (mean |d| 0.044 over 27"
        line += ", rollout_version is not returned: lag is a lower bound"
        line = f"{line}{few} tokens): this test is skipped, as it is made of a run's first batch alone"
    assert said == [f"offcorr: {line}"]
    assert repr(trainer.anchor) == anchor and f"anchor={anchor}" in repr(trainer.correction_step)


@pytest.mark.parametrize(("keys", "said"), [((), False), (("old_logp",), False), (None, True)])
@pytest.mark.filterwarnings("ignore:every staleness ratio")
def test_the_first_line_says_that_the_ratios_leave_a_lag_out(make_trainer, replay, caplog, keys, said):
    """Where a rollout_func returns no log-probs, the ratios of several updates compare these updates alone."""

    def without_logp(prompts, trainer):
        return {**replay()(prompts, trainer), "logprobs": None}

    sampler = without_logp if keys is None else replay(*keys)
    make_trainer(rollout_func=sampler, max_steps=2, loss_type="minpro", num_iterations=2).train()
    (line,) = [record.getMessage() for record in caplog.records if record.name == "offcorr"]
    assert ("the ratios leave a lag of the sampler out, as it returns no log-probs" in line) == said


@pytest.mark.parametrize(
    ("sampler", "settings", "anchor"),
    [
        (OffPolicy, {"loss_type": "tis"}, "Supplied()"),
        (None, {"loss_type": "ppo"}, "Recomputed()"),
        (None, {"loss_type": "dapo"}, "Recomputed()"),
        (None, {"loss_type": "ppo", "anchor": "ewma", "anchor_kwargs": {"window": 4}}, "EWMA(window=4, "),
        (OffPolicy, {"loss_type": "ppo", "anchor": "rollout"}, "Rollout()"),
    ],
)
@pytest.mark.filterwarnings("ignore:every staleness ratio")
def test_the_anchor_is_known_before_the_first_batch(make_trainer, sampler, settings, anchor):
    """It is then the one that the first batch gets."""
    trainer = make_trainer(rollout_func=sampler and sampler(), max_steps=1, **settings)
    before = repr(trainer.anchor)
    assert before.startswith(anchor)
    assert str(trainer.anchor).endswith(", of the metrics alone: the loss does not read it") == (
        settings["loss_type"] == "dapo"
    )
    trainer.train()
    assert repr(trainer.anchor) == before


def test_the_anchor_of_an_unknown_sampler_is_known_with_the_first_batch(make_trainer, replay):
    trainer = make_trainer(loss_type="ppo", rollout_func=replay("old_logp"), max_steps=1)
    assert trainer.anchor is None
    trainer.train()
    assert repr(trainer.anchor) == "Supplied()"


def at_temperature(sampler, temperature):
    """``sampler``, which reports its log-probs at this temperature, whatever it samples at."""

    def rollout_func(prompts, trainer):
        output = sampler(prompts, trainer)
        model = trainer.accelerator.unwrap_model(trainer.model)
        output["logprobs"] = []
        for prompt, ids in zip(output["prompt_ids"], output["completion_ids"], strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
            scores = (logits / temperature).log_softmax(-1).gather(1, torch.tensor(ids)[:, None])
            output["logprobs"].append(scores[:, 0].tolist())
        return output

    return rollout_func


@pytest.mark.parametrize("loss_type", ["tis", "dapo"])
@pytest.mark.parametrize(
    ("sampler", "settings", "sentence"),
    [
        (OffPolicy(temperature=0.5), {}, r"carry a temperature of about 0\.5\d, the trainer's 1.00.*set the same temp"),
        (OffPolicy(top_p=0.9), {}, r"the tokens that top-p.*, 0\.9\d+ \+- .*sample without truncation \(top_p=1.0"),
        (
            at_temperature(OffPolicy(), 1.0),
            {"temperature": 0.5},
            r"temperature of about 1\.0\d, the trainer's 0.50: it sampled at the trainer's.*"
            r"logprobs_mode='processed_logprobs'",
        ),
    ],
    ids=["temperature", "top_p", "raw"],
)
def test_log_probs_that_are_not_the_samplers_are_a_warning(
    make_trainer, caplog, sampler, settings, sentence, loss_type
):
    """Under a correction and under TRL's own loss, once in a run."""
    settings = {"per_device_train_batch_size": 32, "max_completion_length": 16, "learning_rate": 0.0} | settings
    trainer = make_trainer(rollout_func=sampler, loss_type=loss_type, max_steps=2, **settings)
    with pytest.warns(UserWarning, match=f"in the first batch the engine's log-probs.*{sentence}") as caught:
        trainer.train()
    assert sum("in the first batch" in str(one.message) for one in caught) == 1
    said = [record.getMessage() for record in caplog.records if record.name == "offcorr"]
    assert len(said) == 1 and "mean |d|" not in said[0]


@pytest.mark.parametrize("loss_type", ["tis", "dapo"])
def test_probabilities_as_log_probs_are_one_warning(make_trainer, loss_type):
    """Where the trainer generates by itself, as with vLLM; those of a ``rollout_func`` are refused."""

    class Reporting(GRPOTrainer):
        def _generate_single_turn(self, *args):
            ids, _ = super()._generate_single_turn(*args)
            return ids, [[0.25 + 0.01 * place for place in range(len(row))] for row in ids]

    trainer = make_trainer(Reporting, loss_type=loss_type, max_steps=2)
    warn_again()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    said = [str(w.message) for w in caught if "log-prob is" in str(w.message)]
    assert said == ["rollout_logp is above 0 on valid tokens, as no log-prob is: were probabilities passed, or -log p?"]
    warn_again()


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.5}, {"anchor": "rollout"}, {"anchor": "recomputed"}])
def test_log_probs_that_agree_are_half_a_sentence(make_trainer, caplog, settings):
    settings = {"loss_type": "minpro", "per_device_train_batch_size": 32, "max_completion_length": 16} | settings
    trainer = make_trainer(rollout_func=OffPolicy(precision="bf16"), max_steps=2, **settings)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="in the first batch")
        trainer.train()
    (said,) = [record.getMessage() for record in caplog.records if record.name == "offcorr"]
    assert re.search(
        r"OffPolicy; the engine's log-probs agree with the trainer's \(mean \|d\| 0\.\d+ over \d{3} tokens", said
    )
    inside = "the engine's gap is part of staleness: no offcorr/engine series (anchor='recomputed' has them)"
    assert (inside in said) == (settings.get("anchor") == "rollout")


def test_log_probs_are_compared_in_the_first_batch_alone(make_trainer, monkeypatch):
    """Later steps have no copy to the host for it."""
    seen = []
    monkeypatch.setattr(Step, "semantics", lambda step, *args: seen.append(args))
    trainer = make_trainer(rollout_func=OffPolicy(), loss_type="tis", max_steps=3)
    trainer.train()
    assert len(seen) == 1


@pytest.mark.parametrize("settings", [dict(loss_type="minpro", anchor="rollout"), dict(loss_type="minpro"), dict()])
@pytest.mark.parametrize("engine", ["nothing", "some"])
@pytest.mark.filterwarnings("ignore:every staleness ratio")
def test_an_engine_that_scored_nothing_is_said_once(make_trainer, replay, series, settings, engine):
    inner = replay("old_logp")

    def rollout_func(prompts, trainer):
        output = inner(prompts, trainer)
        scored = 1 if engine == "some" else 0
        logprobs = [[*row[:scored], *[math.nan] * (len(row) - scored)] for row in output["logprobs"]]
        return output | {"logprobs": logprobs}

    trainer = make_trainer(rollout_func=rollout_func, max_steps=2, log_metrics="short", **settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    said = [w for w in caught if "not one since the last log is a finite number" in str(w.message)]
    assert len(said) == (engine == "nothing") and all("rollout_func" in str(w.message) for w in said)
    assert len(series(trainer, "offcorr/loss/unscored")) == 2


def test_tokens_that_the_engine_could_not_score_are_in_no_series(make_trainer, replay, series):
    """Under the anchor "rollout" they have the ratio 1, which is no measurement of staleness."""
    inner, logged = replay(), {}
    for scored in (8, 1, 0):  # of the tokens of each completion

        def rollout_func(prompts, trainer, scored=scored):
            output = inner(prompts, trainer)
            rows = [[*row[:scored], *[math.nan] * (len(row) - scored)] for row in output["logprobs"]]
            return output | {"logprobs": rows}

        settings = dict(loss_type="minpro", anchor="rollout", learning_rate=0.0, max_steps=1)
        trainer = make_trainer(Recording, rollout_func=rollout_func, **settings)
        if not scored:
            with pytest.raises(ValueError, match="and the ratios of loss 'minpro' are taken from them"):
                trainer.train()
            continue
        trainer.train()
        logged[scored] = {name for entry in trainer.state.log_history for name in entry if "/staleness/" in name}
        batches = [batch for _, batch in trainer.batches]
        seen = [(batch.logp - batch.old_logp)[:, :scored][batch.mask[:, :scored]] for batch in batches]
        wanted = torch.cat(seen).abs().mean().item()
        assert wanted > 0.01
        assert series(trainer, "offcorr/staleness/abs_mean") == [pytest.approx(wanted, rel=1e-4)]
    assert "offcorr/staleness/ess_seq" in logged[1]


@pytest.mark.parametrize(("eps", "said"), [(1e-9, 1), (0.2, 0)])
def test_a_correction_that_drops_everything_is_said_once(make_trainer, eps, said):
    trainer = make_trainer(
        loss_type="icepop",
        loss_kwargs={"weight": {"name": "mask", "low": 1 - eps, "high": 1 + eps}},
        rollout_func=OffPolicy(lag=1, precision="int4"),
        max_steps=3,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    assert len([w for w in caught if "dropped every token that has an advantage" in str(w.message)]) == said


def test_a_rejection_that_drops_everything_is_named(make_trainer):
    """Not the bounds of the loss, which drop nothing."""
    narrow = {"name": "geometric", "low": 1 - 1e-9, "high": 1 + 1e-9}
    trainer = make_trainer(
        loss_type="minpro",
        loss_kwargs={"reject": narrow},
        rollout_func=OffPolicy(lag=1, precision="int4"),
        max_steps=2,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    (said,) = {str(w.message) for w in caught if "dropped every token that has an advantage" in str(w.message)}
    assert "Of all tokens 100% are left out by reject=Geometric(" in said and said.endswith("gap that they look at")
    assert _why_all_dropped(offcorr.get("ppo"), 0.0).startswith("Widen its bounds")


@pytest.mark.parametrize(("loss_type", "asked"), [("minpro", "loss 'minpro'"), ("dapo", "the metrics, the monitor")])
def test_a_subclass_that_computes_the_loss_without_this_class_is_refused(make_trainer, loss_type, asked):
    class Own(GRPOTrainer):
        def _compute_loss(self, model, inputs):
            return self._get_per_token_logps_and_entropies(
                model,
                *(torch.cat([inputs[f"prompt_{name}"], inputs[f"completion_{name}"]], 1) for name in ("ids", "mask")),
                inputs["completion_ids"].shape[1],
            )[0].mean()

    class Added(GRPOTrainer):
        def _compute_loss(self, model, inputs):
            return super()._compute_loss(model, inputs) * 2

    with pytest.raises(
        RuntimeError, match=f"Own computes the loss without .*: {asked}.* would never run. Call it there"
    ):
        trainer = make_trainer(Own, loss_type=loss_type)
        trainer.train()
    assert trainer.state.global_step == 0
    make_trainer(Added, loss_type=loss_type, max_steps=1).train()


@pytest.mark.parametrize(("loss_type", "said"), [("gspo", True), ("ctpo", False), ("dapo", False), ("minpro", False)])
def test_high_entropy_tokens_of_a_ratio_of_the_sequence_are_said(make_trainer, loss_type, said):
    """Their gradient is another than TRL's, where every token has that of the terms that are left."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(loss_type=loss_type, top_entropy_quantile=0.2)
    assert any("this is another update than TRL's" in str(one.message) for one in caught) == said


@pytest.mark.parametrize("value", [1.0, math.nan])
def test_rewards_that_teach_nothing_are_said_once(make_trainer, series, value):
    def constant(completion_ids, **_):
        return [value] * len(completion_ids)

    trainer = make_trainer(loss_type="minpro", reward_funcs=constant, rollout_func=OffPolicy(), max_steps=3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    assert len([w for w in caught if "no sequence since the last log has an advantage" in str(w.message)]) == 1
    assert not series(trainer, "offcorr/loss/dropped")


@pytest.mark.parametrize("anchor", ["snapshot", "rollout", "recomputed"])
def test_an_anchor_that_trls_loss_does_not_read_is_said(make_trainer, anchor):
    with pytest.warns(
        UserWarning, match=f"anchor='{anchor}' .* changes no update.* loss_type='offcorr:dapo'"
    ) as caught:
        make_trainer(loss_type="dapo", anchor=anchor, rollout_func=OffPolicy())
    assert any(w.filename.endswith("conftest.py") for w in caught)  # the caller, not a line of this library
    with pytest.warns(UserWarning, match=r"loss_type='offcorr:\.\.\.' or drop"):  # there is no bnpo here
        make_trainer(loss_type="bnpo", anchor=anchor, rollout_func=OffPolicy())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="anchor=")
        make_trainer(loss_type="offcorr:dapo", anchor="recomputed")


# Batch-coupled corrections


@pytest.mark.parametrize(
    ("loss_type", "options"),
    [
        ("offcorr:dapo", {"weight": {"name": "self_normalise", "inner": {"name": "truncate", "cap": 1.5}}}),
        ("bapo", {"low_start": 0.9, "low_max": 1.0, "high_start": 1.01, "high_max": 1.05}),
        ("m2po", {"tau": 0.001}),
        ("asymre", {}),
        ("icepop", {"low": 0.97, "high": 1.03, "count_rejected": False}),
        ("geo_rs", {"low": 0.99, "high": 1.01, "count_rejected": False, "aggregate": "seq-mean-token-mean"}),
    ],
)
def test_statistics_are_the_windows(make_trainer, replay, loss_type, options):
    """The update does not depend on how an optimizer step is split into micro-batches."""
    ends = []
    for per_device, accumulation in ((8, 1), (4, 2), (2, 4)):
        trainer = make_trainer(
            loss_type=loss_type,
            loss_kwargs=options,
            rollout_func=replay("old_logp"),
            per_device_train_batch_size=per_device,
            gradient_accumulation_steps=accumulation,
            max_steps=4,
            num_iterations=2,
            optim="sgd",
            learning_rate=0.05,
        )
        trainer.train()
        ends.append(parameters(trainer))
    start = parameters(make_trainer())
    assert (ends[0] - start).abs().max() > 1e-3
    torch.testing.assert_close(ends[1], ends[0], rtol=0, atol=2e-6)
    torch.testing.assert_close(ends[2], ends[0], rtol=0, atol=2e-6)


# What travels, and what is logged


def test_a_short_log(make_trainer, series):
    """A dozen of this library's keys at most, where a full log with aliases has more than sixty; TRL's own stay."""
    logged = {}
    for choice in CHOICES:
        trainer = make_trainer(
            log_metrics=choice,
            loss_type="tis",
            rollout_func=OffPolicy(lag=1, precision="int8"),
            max_steps=2,
            eval_strategy="steps",
            eval_steps=2,
            eval_dataset=make_trainer().train_dataset.select(range(4)),
        )
        trainer.train()
        entries = trainer.state.log_history
        trained, evaluated = ([e for e in entries if key in e][-1].keys() for key in ("loss", "eval_loss"))
        logged[choice] = {"train": set(trained), "eval": set(evaluated)}
    short, full, aliases = (logged[choice]["train"] for choice in CHOICES)
    ours = {name for name in short if name.startswith("offcorr/")}
    assert {"offcorr/staleness/lag", "offcorr/staleness/ess_seq", "offcorr/engine/abs_mean"} <= ours
    assert len(ours) <= 12 and ours < {name for name in full if name.startswith("offcorr/")}
    assert full < aliases and aliases - full == set(ALIASES) and len(aliases - short) >= 40
    assert {"entropy", "reward", "grad_norm"} <= short
    # The samples of an evaluation are of the current weights in fp32: every series of the mismatch would be 0.
    for choice in logged:
        assert "eval_reward" in logged[choice]["eval"]
        assert not {
            name for name in logged[choice]["eval"] if "offcorr" in name or name.removeprefix("eval_") in ALIASES
        }


def test_an_evaluation_with_a_gap_logs_it(make_trainer, replay):
    """The recorded log-probs are an engine's with noise, in training and evaluation alike; no update is corrected."""
    settings = dict(loss_type="tis", rollout_func=replay("old_logp"), log_metrics="full", max_steps=1)
    trainer = make_trainer(eval_dataset=make_trainer().train_dataset.select(range(8)), **settings)
    logged = trainer.evaluate()
    ours = {name for name in logged if "offcorr" in name}
    assert logged["eval_offcorr/engine/abs_mean"] > 0.01 and len(ours) > 5
    assert all(name.startswith("eval_offcorr/engine/") for name in ours)


def test_rewards_and_groups(make_trainer, tokenizer):
    def reward(completion_ids, prompts, **_):
        return [None if p.startswith("1") else float(len(i)) for i, p in zip(completion_ids, prompts, strict=True)]

    trainer = make_trainer(Recording, loss_type="offcorr:dapo", max_steps=4, reward_funcs=reward, num_iterations=2)
    trainer.train()
    groups = {}
    for inputs, batch in trainer.batches:
        for i, group in enumerate(batch.group_ids.tolist()):
            groups.setdefault(group, set()).add(tuple(inputs["prompt_ids"][i].tolist()))
            length = int(inputs["completion_mask"][i].sum())
            unscored = tokenizer.decode(inputs["prompt_ids"][i]).strip().startswith("1")
            assert batch.rewards[i] == (0 if unscored else length)
    assert len(groups) == 4 and all(len(prompts) == 1 for prompts in groups.values())


def test_one_transfer_a_logging_step(make_trainer, series):
    """Three steps in one entry: the shares are over all their tokens, not means of means."""
    settings = dict(loss_type="offcorr:dapo", max_steps=3, num_iterations=3)
    every = make_trainer(**settings)
    every.train()
    once = make_trainer(logging_steps=3, **settings)
    once.train()
    assert series(once, "offcorr/staleness/abs_max") == [max(series(every, "offcorr/staleness/abs_max"))]
    # The three steps train on the same tokens, so here the mean over all of them is the mean of the three.
    for name in ("offcorr/staleness/abs_mean", "offcorr/loss/clipped", "entropy"):
        apart = series(every, name)
        assert len(apart) == 3 and len(set(apart)) > 1
        assert series(once, name) == [pytest.approx(sum(apart) / 3, rel=1e-6)]


def test_tis_weights_against_the_engine(make_trainer, replay, series):
    trainer = make_trainer(loss_type="tis", loss_kwargs={"cap": 1.02}, rollout_func=replay("old_logp"), max_steps=1)
    trainer.train()
    assert 0.1 < series(trainer, "offcorr/loss/truncated")[0] < 0.9


def test_vllm_correction_is_taken_over_once(make_trainer):
    trainer = make_trainer(loss_type="offcorr:dapo")
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
    with pytest.warns(UserWarning, match="takes the place of TRL's vLLM importance sampling correction"):
        trainer._take_over_vllm_correction()
    assert not trainer.vllm_importance_sampling_correction
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer._take_over_vllm_correction()


def test_loss_object(make_trainer):
    loss = offcorr.Correction(gate=offcorr.gates.Clip(0.2, 0.28), aggregate="seq-mean-token-sum-norm")
    trainer = make_trainer(loss=loss, num_iterations=2)
    trainer.train()
    assert trainer.correction.max_length == trainer.max_completion_length
    named = make_trainer(
        loss_type="offcorr:dapo",
        loss_kwargs={"aggregate": "seq-mean-token-sum-norm"},
        num_iterations=2,
    )
    named.train()
    assert torch.equal(parameters(trainer), parameters(named))


def test_a_users_file(make_trainer, tmp_path, series):
    file = tmp_path / "my_loss.py"
    file.write_text(
        "import offcorr\n"
        "def half_clip(eps: float = 0.1) -> offcorr.Correction:\n"
        "    return offcorr.Correction(gate=offcorr.gates.Clip(eps, eps))\n"
    )
    trainer = make_trainer(loss_type=f"{file}:half_clip", loss_kwargs={"eps": 0.05}, num_iterations=2, max_steps=2)
    trainer.train()
    assert trainer.correction.gate == offcorr.gates.Clip(0.05, 0.05)
    assert series(trainer, "offcorr/loss/clipped")[-1] > 0


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_unknown_numbers_under_the_mask(make_trainer, replay, beta, series):
    """A sampler has no log-prob for a tool's token: None or NaN there, and nothing of it reaches the loss."""
    inner = replay("old_logp", "env_mask")
    ends = []
    for unknown in ({"old_logp": 0.0, "logprobs": 0.0}, {"old_logp": None, "logprobs": float("nan")}):

        def rollout_func(prompts, trainer, unknown=unknown):
            output = inner(prompts, trainer)
            for name in ("old_logp", "logprobs"):
                output[name] = [
                    [value if kept else unknown[name] for value, kept in zip(values, mask, strict=True)]
                    for values, mask in zip(output[name], output["env_mask"], strict=True)
                ]
            return output

        trainer = make_trainer(loss_type="tis", rollout_func=rollout_func, beta=beta, max_steps=2)
        trainer.train()
        assert series(trainer, "offcorr/loss/nonfinite") == [0, 0]
        ends.append(parameters(trainer))
    assert ends[0].isfinite().all()
    assert torch.equal(*ends)


# Refusals


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(loss_type="minpor"), "did you mean 'minpro'"),
        (dict(loss_type="MinPRO"), "did you mean 'minpro'"),
        (dict(loss_type="dapo", loss_kwargs={"eps_high": 0.3}), "offcorr:dapo"),
        (dict(loss_type="minpro", loss_kwargs={"eps_hihg": 0.3}), "eps_high"),
        (dict(loss_type="offcorr:bnpo"), "'bnpo' is no method of this library: write loss_type='offcorr:grpo'"),
        (
            dict(loss_type="tis", anchor="rollout"),
            r"'tis': the anchor Rollout\(\) puts .* that \w+\(.*2.0.* count twice",
        ),
        (dict(loss=offcorr.Correction(), loss_type="minpro"), "one of the two ways"),
        (dict(loss=offcorr.Correction(), loss_kwargs={"eps_high": 0.3}), "one of the two ways"),
        (
            dict(
                loss_type="opsm",
                loss_kwargs={"count_rejected": False},
                gradient_accumulation_steps=4,
                steps_per_generation=2,
            ),
            "count_rejected=False of 'opsm' looks at .* steps_per_generation is 2",
        ),
        (
            dict(
                loss_type="bapo",
                gradient_accumulation_steps=4,
                steps_per_generation=2,
            ),
            "steps_per_generation is 2",
        ),
        (
            dict(loss_type="asymre", gradient_accumulation_steps=2, steps_per_generation=4),
            "shuffles over the steps",
        ),
    ],
)
def test_refused_at_construction(make_trainer, settings, message):
    with pytest.raises(ValueError, match=message):
        make_trainer(**settings)


def test_loss_must_be_a_correction(make_trainer):
    with pytest.raises(TypeError, match="expected an offcorr.Correction"):
        make_trainer(loss=lambda batch: 0.0)


def test_snapshot_without_old_logp(make_trainer, replay):
    trainer = make_trainer(loss_type="minpro", anchor="snapshot", rollout_func=replay())
    with pytest.raises(ValueError, match="old_logp is None, but anchor 'snapshot' needs it"):
        trainer.train()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        *[
            (dict(loss_type=name), f"loss '{name}' compares with the engine's log-probs, .*use_vllm=True.*rollout_func")
            for name in ("tis", "vcpo", "veto", "icepop")
        ],
        (dict(loss_type="offcorr:dapo", loss_kwargs={"weight": "truncate"}), "loss 'dapo' compares with the engine's"),
        (dict(loss_type="minpro", anchor="rollout"), "anchor='rollout' takes the engine's log-probs, .*use_vllm=True"),
        (dict(loss_type="minpro", anchor="snapshot"), "anchor='snapshot' needs old_logp of .*no rollout_func"),
        (dict(loss_type="dapo", anchor="snapshot"), "anchor='snapshot' needs .*no rollout_func .*or drop the anchor"),
        (dict(loss_type="dapo", anchor="rollout"), "anchor='rollout' takes .*or drop the anchor, which TRL's own"),
        (dict(loss_type="minpro", anchor="log_linear"), "anchor='log_linear' needs rollout_version of .*no rollout_f"),
    ],
)
def test_log_probs_that_nobody_reports_are_missed_before_the_model_is_loaded(make_trainer, tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        make_trainer(model=str(tmp_path / "no model here"), **settings)


def test_log_probs_of_a_trainer_with_its_own_generation(make_trainer):
    class Reporting(Recording):
        def _generate_single_turn(self, *args):
            ids, _ = super()._generate_single_turn(*args)
            return ids, [[-1.0] * len(row) for row in ids]

    trainer = make_trainer(Reporting, loss_type="tis", max_steps=1)
    trainer.train()
    assert all((batch.rollout_logp[batch.mask] == -1).all() for _, batch in trainer.batches)


@pytest.mark.parametrize("settings", [dict(ess_base=0.55), dict(ess_base="auto")])
def test_ess_base_without_ess_lr_is_said(settings):
    with pytest.warns(UserWarning, match="ess_base=.* does nothing without ess_lr"):
        GRPOConfig("out", bf16=False, use_cpu=True, **settings)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="ess_base")
        GRPOConfig("out", bf16=False, use_cpu=True)
        GRPOConfig("out", bf16=False, use_cpu=True, ess_lr="sqrt", **settings)


def test_an_option_of_the_anchor_is_refused_by_the_name_of_its_mapping(make_trainer):
    with pytest.raises(ValueError, match="anchor_kwargs: .*window is '4', expected"):
        make_trainer(loss_type="minpro", anchor="ewma", anchor_kwargs={"window": "4"})


@pytest.mark.parametrize("name", ["eps_low", "eps_high"])
def test_a_bound_of_minpro_is_refused_by_its_name(make_trainer, name):
    with pytest.raises(ValueError, match=f"minpro: {name} is -1, expected a finite number >= 0"):
        make_trainer(loss_type="minpro", loss_kwargs={name: -1})


def test_options_only_trl_reads_are_named(model_folder, dataset, tokenizer, tmp_path):
    from offcorr.trl import GRPOConfig

    args = GRPOConfig(str(tmp_path), loss_type="minpro", epsilon_high=0.3, bf16=False, use_cpu=True, report_to=[])
    with pytest.warns(UserWarning, match=r"epsilon_high=0.3 \(here: eps_high"):
        GRPOTrainer(
            model_folder,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=args,
            train_dataset=dataset,
            processing_class=tokenizer,
        )


def warnings_of_ignored(loss_type, loss=None, **options):
    args = GRPOConfig("out", loss_type=loss_type, bf16=False, use_cpu=True, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        choose_correction(args, loss)
    return [str(one.message) for one in caught if "TRL's own losses read" in str(one.message)]


def test_every_metric_that_is_logged_is_explained(make_trainer):
    """By its name, at the command line."""
    settings = {"loss_type": "tis", "log_metrics": "full", "max_steps": 3, "ess_lr": "sqrt"}
    trainer = make_trainer(rollout_func=OffPolicy(lag=1, precision="int8"), **settings)
    trainer.train()
    logged = {name for entry in trainer.state.log_history for name in entry if name.startswith("offcorr/")}
    assert "offcorr/staleness/lag_max" in logged and len(logged) > 40
    assert all(len(find(name)) == 1 for name in logged)
    assert 'log_metrics="full"' in about("offcorr/staleness/lag_max", 100)


def test_an_option_that_trls_kl_still_reads_is_not_called_ignored_alone():
    """TRL weights the KL by the ratio, of the level that importance_sampling_level says."""
    level = {"importance_sampling_level": "sequence"}
    (plain,) = warnings_of_ignored("minpro", **level)
    assert "(here: loss_type='gspo' or 'luspo', " in plain and plain.endswith("'minpro' ignores this")
    (weighted,) = warnings_of_ignored("minpro", beta=0.1, use_bias_correction_kl=True, **level)
    assert "ignores this, but TRL's KL term does not" in weighted
    (unweighted,) = warnings_of_ignored("minpro", beta=0.1, use_bias_correction_kl=False, **level)
    assert "KL" not in unweighted
    assert not warnings_of_ignored("gspo", **level)  # whose ratio is that of the sequence


@pytest.mark.parametrize(
    ("loss_type", "option", "said"),
    [
        (
            "minpro",
            {"epsilon": 0.1},
            "epsilon=0.1 (here: eps_low and eps_high); the correction 'minpro' ignores this: ",
        ),
        (
            "offcorr:cispo",
            {"epsilon_high": 3.0},
            "epsilon_high=3.0 (here: cap, a bound of the ratio itself, as in TRL's CISPO)",
        ),
        ("minpro", {"delta": 3.0}, "delta=3.0 ('minpro' has nothing like it); the correction 'minpro' ignores this"),
        (
            "gmpo",
            {"epsilon_high": 0.4},
            "epsilon_high=0.4 (here: eps_high, where eps_low and eps_high are in log space)",
        ),
    ],
)
def test_an_ignored_option_is_named_with_the_one_that_this_method_has(loss_type, option, said):
    (warning,) = warnings_of_ignored(loss_type, **option)
    assert said in warning
    assert warning.endswith("set the one named here in loss_kwargs instead") == ("(here:" in warning)


@pytest.mark.parametrize("loss_type", ["tis", "seq_tis", "seq_mis", "decoupled_ppo"])
def test_the_cap_of_the_engines_ratio_is_not_named_for_the_bounds_of_the_other(loss_type):
    (said,) = warnings_of_ignored(loss_type, epsilon_high=0.28)
    assert "epsilon_high=0.28 (here: eps_high)" in said
    (said,) = warnings_of_ignored(loss_type, epsilon=0.1)
    assert "epsilon=0.1 (here: eps_low and eps_high)" in said


def test_of_a_loss_that_was_passed_the_option_is_set_in_it():
    """``loss_kwargs`` beside ``loss=`` is refused."""
    (said,) = warnings_of_ignored("dapo", offcorr.get("ppo"), epsilon=0.3)
    assert said.endswith("ignores this: set the one named here in the correction passed as loss= instead")


@pytest.mark.parametrize("weighted", [True, False])
def test_the_first_line_says_that_the_kl_is_weighted(make_trainer, replay, caplog, weighted):
    """Then the logged kl depends on the anchor."""
    make_trainer(
        rollout_func=replay("old_logp"),
        loss_type="minpro",
        beta=0.1,
        use_bias_correction_kl=weighted,
        max_steps=1,
    ).train()
    assert ("the logged kl are weighted by the ratio to old_logp" in caplog.text) == weighted


def test_each_switch_of_trls_engine_correction_is_named_where_it_was_set():
    """Nothing is said of a correction that is off under a loss that compares with no engine."""
    (off,) = warnings_of_ignored("tis", use_vllm=True, vllm_importance_sampling_correction=False)
    assert "vllm_importance_sampling_correction=False (here: weight=None" in off and "'tis' ignores this" in off
    assert warnings_of_ignored("minpro", use_vllm=True, vllm_importance_sampling_correction=False) == []
    assert warnings_of_ignored("tis") == []
    (cap,) = warnings_of_ignored("tis", use_vllm=True, vllm_importance_sampling_cap=7.0)
    assert "read vllm_importance_sampling_cap=7.0 (" in cap and "clip_max" not in cap
    for name, value in {"mode": "token_mask", "clip_max": 7.0, "clip_min": 0.5}.items():
        (said,) = warnings_of_ignored("tis", use_vllm=True, **{f"vllm_importance_sampling_{name}": value})
        assert f"read vllm_importance_sampling_{name}={value!r} (" in said


def test_an_option_of_trls_vllm_is_not_replaced_where_vllm_is_off():
    """Nor does TRL read it then; a weight of the engine in its place would have nothing to compare with."""
    args = GRPOConfig("out", vllm_importance_sampling_mode="token_mask", bf16=False, use_cpu=True, loss_type="ppo")
    with pytest.warns(UserWarning, match="without use_vllm nothing reads vllm_importance_sampling_mode='token_mask'"):
        choose_correction(args)
    assert warnings_of_ignored("ppo", vllm_importance_sampling_mode="token_mask") == []
    (said,) = warnings_of_ignored("ppo", vllm_importance_sampling_mode="token_mask", epsilon=0.1)
    assert "epsilon=0.1" in said and "vllm" not in said


def test_epsilon_is_the_cap_of_a_method_that_has_one_and_a_low_delta_is_nothing_here():
    """TRL's CISPO reads epsilon as its cap where epsilon_high is unset; its delta bounds both signs where it is low."""
    (said,) = warnings_of_ignored("offcorr:cispo", epsilon=0.1)
    assert "epsilon=0.1 (here: cap, a bound" in said
    (said,) = warnings_of_ignored("ppo", epsilon=0.1)
    assert "epsilon=0.1 (here: eps_low" in said
    (low,), (high,) = warnings_of_ignored("ppo", delta=1.1), warnings_of_ignored("ppo", delta=1.5)
    assert "bounds positive advantages, too" in low and low.endswith("'ppo' ignores this")
    assert "here: dual_clip" in high


@pytest.mark.parametrize("method", ["tis", "seq_mis", "minpro"])
def test_the_weight_that_is_named_is_that_of_trls_mode(method):
    def said(**options):
        given = {f"vllm_importance_sampling_{one}": options[one] for one in options}
        (words,) = warnings_of_ignored(method, use_vllm=True, **given)
        return offcorr.get("ppo", weight=ast.literal_eval(re.search(r"weight=({.*?})", words)[1])).weight

    assert said(clip_max=5.0) == weights.Mask(None, 5.0, level="sequence")
    assert said(clip_min=0.5) == weights.Mask(0.5, 3.0, level="sequence")
    assert said(mode="token_truncate") == weights.Bound(high=3.0)
    assert said(mode="sequence_truncate", clip_max=2.0) == weights.Bound(high=2.0, level="sequence")
    assert said(mode="token_mask", clip_min=0.5) == weights.Mask(0.5, 3.0)


@pytest.mark.parametrize("options", [{"eps_high": 0.28}, None])
@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("dr_grpo", {"loss_type": "offcorr:grpo", "loss_kwargs": {"aggregate": "seq-mean-token-sum-norm"}}),
        ("bnpo", {"loss_type": "offcorr:grpo", "loss_kwargs": {"aggregate": "token-mean"}}),
    ],
)
def test_a_loss_of_trl_that_is_no_method_here_leads_to_one_that_is(make_trainer, name, options, written):
    given = {"loss_type": name if options else f"offcorr:{name}", "loss_kwargs": options}
    with pytest.raises(ValueError, match="write loss_type=") as refused:
        make_trainer(**given)
    said = str(refused.value)
    assert f"loss_type={written['loss_type']!r} with loss_kwargs={written['loss_kwargs']!r}" in said
    make_trainer(**written)


@pytest.mark.parametrize("sampler", [None, OffPolicy(lag=0)])
@pytest.mark.parametrize("dropout", [0.3, 0.0])
@pytest.mark.parametrize("lora", [True, False])
def test_dropout_is_warned_of_at_the_first_batch(make_trainer, model_folder, lora, dropout, sampler):
    """Of the model or of a new adapter, whose noise is 0 until its first update."""
    model = Qwen3ForCausalLM.from_pretrained(model_folder, attention_dropout=0.0 if lora else dropout)
    adapter = {"peft_config": LoraConfig(r=2, lora_dropout=dropout, target_modules="all-linear")} if lora else {}
    settings = {"loss_type": "ppo", "num_iterations": 2, "max_steps": 1, **adapter}
    trainer = make_trainer(model=model, rollout_func=sampler, **settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    assert sum("dropout is on (up to 0.3)" in str(one.message) for one in caught) == (dropout > 0)
    assert trainer.correction_step.monitor.dropout == dropout
