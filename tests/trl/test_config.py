"""``loss_type``, ``loss_kwargs`` and ``anchor`` from Python, the command line and YAML."""

from __future__ import annotations

import pytest
from transformers import HfArgumentParser
from trl import TrlParser

from offcorr.trl import GRPOConfig

KWARGS = {"eps_high": 0.28, "weight": {"name": "truncate", "cap": 2.0}}
BASE = ["--bf16", "false", "--use_cpu", "true", "--report_to", "none"]


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


def test_defaults_are_trls(tmp_path):
    args = GRPOConfig(str(tmp_path), bf16=False, use_cpu=True, report_to=[])
    assert (args.loss_type, args.loss_kwargs, args.anchor) == ("dapo", None, None)
    assert args.to_dict()["loss_kwargs"] is None
