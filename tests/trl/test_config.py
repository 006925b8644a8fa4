"""``loss_type``, ``loss_kwargs`` and ``anchor`` from Python, the command line and YAML."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path

import pytest
import trl
from packaging.version import Version
from transformers import HfArgumentParser
from trl import TrlParser

import offcorr
from offcorr.methods.registry import find
from offcorr.training.described import in_short
from offcorr.training.named_loss import TRL_LOSSES
from offcorr.trl import GRPOConfig, GRPOTrainer
from offcorr.trl.config import CorrectionOptions, choose_correction
from offcorr.trl.numeric import NOT_NEGATIVE

CONFIGS = [GRPOConfig]
PACKED_ROWS = Version(trl.__version__) >= Version("1.16")
"""Whether the installed TRL has the asynchronous trainer that ours stands on."""
if PACKED_ROWS:
    from offcorr.trl.async_grpo import AsyncGRPOConfig, choose_async_correction

    CONFIGS.append(AsyncGRPOConfig)

KWARGS = {"eps_high": 0.28, "weight": {"name": "truncate", "cap": 2.0}}
BASE = ["--bf16", "false", "--use_cpu", "true", "--report_to", "none"]


def test_the_page_has_every_option():
    page = (Path(__file__).resolve().parents[2] / "docs" / "using_trl.md").read_text()
    table = page.partition("## The options")[2].partition("## PEFT")[0]
    added = {field.name for field in dataclasses.fields(GRPOConfig)} - {
        f.name for f in dataclasses.fields(trl.GRPOConfig)
    }
    rows = re.findall(r"^\| (`.*?) \|", table, flags=re.M)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == added | {"loss_type"}
    starred = {name for row in rows if row.endswith("*") for name in re.findall(r"`(\w+)`", row)}
    assert starred == added - {field.name for field in dataclasses.fields(CorrectionOptions)}


def test_command_line(tmp_path):
    (args,) = HfArgumentParser(GRPOConfig).parse_args_into_dataclasses(
        [
            "--output_dir",
            str(tmp_path),
            "--loss_type",
            "minpro",
            "--anchor",
            "rollout",
            "--loss_kwargs",
            '{"eps_high": 0.28, "weight": {"name": "truncate", "cap": 2.0}}',
            *BASE,
        ]
    )
    assert (args.loss_type, args.anchor, args.loss_kwargs) == ("minpro", "rollout", KWARGS)


def test_yaml(tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(
        f"""
output_dir: {tmp_path}
loss_type: minpro
anchor: snapshot
loss_kwargs:
  eps_high: 0.28
  weight:
    name: truncate
    cap: 2.0
bf16: false
use_cpu: true
report_to: none
"""
    )
    (args,) = TrlParser((GRPOConfig,)).parse_args_and_config(["--config", str(config)])
    assert (args.loss_type, args.anchor, args.loss_kwargs) == ("minpro", "snapshot", KWARGS)
    (args,) = TrlParser((GRPOConfig,)).parse_args_and_config(
        ["--config", str(config), "--loss_kwargs", '{"eps_high": 0.3}']
    )
    assert args.loss_kwargs == {"eps_high": 0.3}


def test_refusals(tmp_path):
    common = dict(output_dir=str(tmp_path), bf16=False, use_cpu=True, report_to=[])
    with pytest.raises(ValueError, match="anchor is 'old', expected one of"):
        GRPOConfig(anchor="old", **common)
    with pytest.raises(ValueError, match="loss_kwargs is 'eps_high=0.3', expected a mapping or a JSON"):
        GRPOConfig(loss_kwargs="eps_high=0.3", **common)


@pytest.mark.parametrize("config", CONFIGS)
def test_log_metrics_from_every_source(tmp_path, config):
    common = dict(output_dir=str(tmp_path), bf16=False, use_cpu=True, report_to=[])
    assert config(**common).log_metrics == "short"
    given = ["--output_dir", str(tmp_path), *BASE]
    (args,) = HfArgumentParser(config).parse_args_into_dataclasses([*given, "--log_metrics", "aliases"])
    assert args.log_metrics == "aliases"
    file = tmp_path / "config.yaml"
    file.write_text("log_metrics: full\n")
    (args,) = TrlParser((config,)).parse_args_and_config(["--config", str(file), *given])
    assert args.log_metrics == "full"
    for wrong in ("ful", True, None, ["full"]):
        with pytest.raises(ValueError, match=r"log_metrics is .* ?[eE]xpected one of \['short', 'full', 'aliases'\]"):
            config(**common, log_metrics=wrong)
    file.write_text("log_metrics: everything\n")
    with pytest.raises(ValueError, match="log_metrics is 'everything'"):
        TrlParser((config,)).parse_args_and_config(["--config", str(file), *given])
    # An option of TRL's or of transformers' under this name would be replaced by this one in silence.
    assert not any(hasattr(base, "log_metrics") for base in config.__mro__ if not base.__module__.startswith("offcorr"))


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("option", ["loss_kwargs", "anchor_kwargs"])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ('{"window": 0.28', r"is '{\"window\": 0.28', expected a mapping or a JSON object.* \(Expecting ','"),
        ("[1]", r"is '\[1\]', expected a mapping or a JSON object"),
        ("null", "is 'null', expected a mapping or a JSON object"),
        ([1], r"is \[1\], expected a mapping or a JSON object"),
        ({1: 2}, "has the key 1, expected the name of an option"),
    ],
)
def test_a_mapping_that_is_none_is_refused_by_name(tmp_path, config, option, value, message):
    with pytest.raises(ValueError, match=f"{option} {message}"):
        config(str(tmp_path), loss_type="minpro", bf16=False, use_cpu=True, report_to=[], **{option: value})


@pytest.mark.parametrize(
    ("loss_type", "options", "message"),
    [
        (
            None,
            None,
            "loss_type is None, expected the name of a loss: one of TRL's, .*'dapo'.* or of offcorr.available",
        ),
        (3, None, "loss_type is 3, expected the name"),
        ("minpro", {"eps_high": "high"}, "minpro: eps_high is 'high', expected a finite number"),
        ("minpro?eps_high=high", None, "minpro: eps_high is 'high', expected a finite number"),
        ("offcorr:dapo", {"eps_high": "high"}, "dapo: eps_high is 'high', expected a finite number"),
        ("seq_mis", {"cap": None}, "seq_mis: cap is None, expected a finite number"),
        ("minpro", {"bounded": "no"}, "minpro: bounded is 'no', expected True or False"),
        ("minpro", {"strict": "no"}, "strict is 'no', expected True or False"),
        (
            "minpro",
            {"eps_high": {"start": 1, "stop": 2}},
            r"eps_high is {.*'stop': 2}, expected a number, or a schedule {'s",
        ),
        (
            "minpro",
            {"eps_high": {"from": 1, "to": 2}},
            r"minpro: eps_high is {'from'.*, expected a finite number; in a trainer",
        ),
        (
            "minpro",
            {"weight": [{"name": "truncate", "cap": {"begin": 1, "end": 2}}]},
            r"weight.0.cap is {'begin': 1, 'end': 2}, expected a number, or a schedule",
        ),
        ("minpro", {"eps_high": {"start": "1", "end": 2}}, "eps_high: Linear: start is '1', expected a finite number"),
    ],
)
def test_a_wrong_value_is_refused_by_name(tmp_path, loss_type, options, message):
    common = dict(bf16=False, use_cpu=True, report_to=[])
    args = GRPOConfig(str(tmp_path), loss_type=loss_type, loss_kwargs=options, **common)
    with pytest.raises(ValueError, match=message):
        choose_correction(args)
    if loss_type is not None and PACKED_ROWS:
        args = AsyncGRPOConfig(str(tmp_path), loss_type=loss_type, loss_kwargs=options, **common)
        with pytest.raises(ValueError, match=message):
            choose_async_correction(args)


@pytest.mark.parametrize("config", CONFIGS)
def test_help_lists_every_name_that_loss_type_takes(config):
    parser = HfArgumentParser(config)
    said = " ".join(parser.format_help().split())
    (action,) = (action for action in parser._actions if action.dest == "loss_type")
    for name in offcorr.available():
        own = f"offcorr:{name}" if config is GRPOConfig and name in TRL_LOSSES else name
        assert re.search(rf"[ :]{own}[,;]", action.help), name
    assert "--loss_type" in said
    if config is GRPOConfig:
        assert all(f"'{name}'" in action.help for name in TRL_LOSSES) and action.default == "dapo"


def test_defaults_are_trls(tmp_path):
    args = GRPOConfig(str(tmp_path), bf16=False, use_cpu=True, report_to=[])
    assert (args.loss_type, args.loss_kwargs, args.anchor) == ("dapo", None, None)
    assert args.to_dict()["loss_kwargs"] is None


@pytest.mark.parametrize("config", CONFIGS)
def test_an_option_in_the_name_takes_the_place_of_the_methods_schedule(tmp_path, config):
    choose = choose_correction if config is GRPOConfig else choose_async_correction
    common = dict(bf16=False, use_cpu=True, report_to=[])
    annealed = choose(config(str(tmp_path), loss_type="holderpo?power=1.0", **common))
    assert not annealed.schedules and annealed.at(0.0).ratio.power == annealed.at(1.0).ratio.power == 1.0
    other = choose(config(str(tmp_path), loss_type="holderpo?aggregate=sum", max_steps=4, **common))
    assert list(other.schedules) == ["power"] and other.at(1.0).ratio.power == -1.0
    twice = config(str(tmp_path), loss_type="holderpo?power=1.0", loss_kwargs={"power": 2.0}, **common)
    with pytest.raises(ValueError, match=r"loss_kwargs: power is 2.0, but 'holderpo\?power=1.0' holds it too: give it"):
        choose(twice)


@pytest.mark.parametrize("loss_type", ["grpo", "offcorr:dapo", "minpro"])
def test_a_loss_beside_an_explicit_loss_type_is_refused(tmp_path, loss_type):
    common = dict(bf16=False, use_cpu=True, report_to=[])
    with pytest.raises(ValueError, match=f"was passed beside loss_type='{loss_type}', .* in one of the two ways"):
        choose_correction(GRPOConfig(str(tmp_path), loss_type=loss_type, **common), offcorr.get("minpro"))


@pytest.mark.parametrize(("high", "here"), [(None, "eps_low and eps_high"), (0.3, "eps_low")])
def test_trls_epsilon_is_both_bounds_where_the_upper_one_is_not_set(tmp_path, high, here):
    common = dict(bf16=False, use_cpu=True, report_to=[])
    args = GRPOConfig(str(tmp_path), loss_type="minpro", epsilon=0.1, epsilon_high=high, **common)
    with pytest.warns(UserWarning, match=re.escape(f"TRL's own losses read epsilon=0.1 (here: {here})")):
        choose_correction(args)


def test_a_loss_in_a_message_is_its_name_and_what_differs(tmp_path):
    args = GRPOConfig(str(tmp_path), loss_type="minpro", bf16=False, use_cpu=True, report_to=[])
    with pytest.raises(ValueError, match=r"loss='minpro' {'eps_high': 0.3} was passed beside loss_type='minpro'"):
        choose_correction(args, offcorr.get("minpro", eps_high=0.3))
    weight = {"name": "truncate", "cap": 2.0}
    assert in_short(offcorr.get("ppo", weight=weight)).startswith("'ppo' {'weight': {'name': 'truncate', 'cap': 2.0")
    method = next(name for name in offcorr.available() if find(name).required)
    assert in_short(find(method)(**find(method).example)).startswith(f"{method!r} {{")


def test_a_correction_whose_name_was_taken_back_is_told_with_all_its_options():
    @offcorr.register("half_ppo")
    def half_ppo(eps: float = 0.1) -> offcorr.Correction:
        return offcorr.Correction(gate=offcorr.gates.Clip(eps, eps))

    correction = offcorr.get("half_ppo")
    offcorr.unregister("half_ppo")
    assert in_short(correction) == "'half_ppo' {'eps': 0.1}"


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(
    ("option", "value", "wanted"),
    [
        ("temperature", math.nan, "a finite number"),
        ("temperature", 0.0, "a number above 0: the trainer divides the model's logits by it"),
        ("learning_rate", math.inf, "a finite number"),
        ("learning_rate", "1e-4", "a finite number"),
        ("weight_decay", True, "a finite number"),
        ("epsilon", math.nan, "a finite number"),
        ("epsilon_high", math.nan, "a number"),
        ("max_grad_norm", -math.inf, "a number"),
        ("learning_rate", -1e-6, "0 or more: every update would go the wrong way"),
        ("epsilon", -0.2, "0 or more: it is a distance from a ratio of 1"),
    ],
)
def test_a_number_that_is_none_is_refused_by_name(tmp_path, config, option, value, wanted):
    """TRL takes it, and the weights are NaN after the first update."""
    common = dict(bf16=False, use_cpu=True, report_to=[])
    with pytest.raises(ValueError, match=f"^{option} is {value!r}, expected {wanted}$"):
        config(str(tmp_path), **common, **{option: value})
    config(str(tmp_path), **common, max_grad_norm=math.inf, epsilon_high=math.inf, weight_decay=0, learning_rate=None)


@pytest.mark.parametrize(("option", "value"), [("beta", -0.1), ("repetition_penalty", -1.0), ("epsilon_high", -0.1)])
def test_a_negative_number_of_trls_is_refused(tmp_path, option, value):
    with pytest.raises(ValueError, match=f"^{option} is {value}, expected 0 or more: "):
        GRPOConfig(str(tmp_path), bf16=False, use_cpu=True, report_to=[], **{option: value})


def test_options_that_must_not_be_negative_are_trls():
    assert {*NOT_NEGATIVE} <= {option.name for option in dataclasses.fields(GRPOConfig)}


@pytest.mark.parametrize("option", ["beta", "entropy_coef", "delta"])
def test_a_term_of_nan_is_refused(tmp_path, option):
    with pytest.raises(ValueError, match=f"{option} is nan, expected a"):
        GRPOConfig(str(tmp_path), bf16=False, use_cpu=True, report_to=[], **{option: math.nan})


def test_a_loss_beside_trls_default_loss_type_is_taken(tmp_path):
    minpro = offcorr.get("minpro")
    for args in (None, GRPOConfig(str(tmp_path), bf16=False, use_cpu=True, report_to=[])):
        assert choose_correction(args, minpro).at(0.0) == minpro


OF_A_USER = """
import torch, offcorr
from dataclasses import dataclass
from offcorr import gates, ops

def total(log_ratio, advantage):
    ratio = ops.exp(log_ratio)
    return (ratio * advantage).sum(1), ratio * advantage

class Total(gates.Gate):
    surrogate = staticmethod(total)

class Plain(gates.Gate):
    surrogate = staticmethod(lambda log_ratio, advantage: 2 * (ops.exp(log_ratio) * advantage,))

@dataclass(frozen=True)
class Aged(offcorr.rejections.Rejection):
    needs = frozenset({"rollout_version", "sum_sq_probs", "turn_ids"})
    mismatch = "staleness"
    measure = staticmethod(lambda log_ratio: log_ratio)
    rule = staticmethod(lambda value: (value * 0 + 1, value < 9))

@dataclass(frozen=True)
class Everything(offcorr.rejections.Rejection):
    needs = frozenset({"rollout_logp", "rewards", "group_ids", "entropy", "old_logp"})
    mismatch = "staleness"
    measure = staticmethod(lambda log_ratio: log_ratio)
    rule = staticmethod(lambda value: (value * 0 + 1, value < 9))

def wrong(): return offcorr.Correction(gate=Total())
def right(): return offcorr.Correction(gate=Plain(), reject=Everything())
def aged(): return offcorr.Correction(gate=Plain(), reject=Aged())
"""


@pytest.mark.parametrize("config", CONFIGS)
def test_a_stage_of_a_file_that_cannot_run_is_named_before_the_model_is_loaded(tmp_path, config, recwarn):
    choose = choose_correction if config is GRPOConfig else choose_async_correction
    (tmp_path / "mine.py").write_text(OF_A_USER)
    common = dict(bf16=False, use_cpu=True, report_to=[])
    for name in ("right", "aged"):
        choose(config(str(tmp_path), loss_type=f"{tmp_path}/mine.py:{name}", **common))
    assert not [str(warning.message) for warning in recwarn if warning.category is RuntimeWarning]
    wrong = config(str(tmp_path), loss_type=f"{tmp_path}/mine.py:wrong", **common)
    with pytest.raises(TypeError, match=r"loss_type='.*/mine.py:wrong' fails on an example batch: Total.surrogate"):
        choose(wrong)
    with pytest.raises(TypeError, match="^loss fails on an example batch: Total.surrogate"):
        choose(None, offcorr.resolve(f"{tmp_path}/mine.py:wrong"))


def test_the_trainer_names_it_before_it_looks_for_the_model(tmp_path):
    (tmp_path / "mine.py").write_text(OF_A_USER)
    args = GRPOConfig(str(tmp_path), loss_type=f"{tmp_path}/mine.py:wrong", bf16=False, use_cpu=True, report_to=[])
    with pytest.raises(TypeError, match="loss_type=.*mine.py:wrong' fails on an example batch"):
        GRPOTrainer("there/is-no-such-model", args=args, reward_funcs=len)
