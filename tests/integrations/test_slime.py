"""The adapter for slime against offcorr's own loss and, where its source is there, against slime's functions.

The second part runs where OFFCORR_SLIME names a checkout of slime.  Its module of losses imports Megatron, so the two
functions are taken out of the file by name; ``mis.py`` of its mismatch example is loaded whole.
"""

import ast
import importlib.util
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import offcorr
from offcorr.integrations import slime
from tests.integrations.cases import assert_same, carried, case, refused


def lists(batch):
    """The sequences without their padding, as slime keeps them: each ends with its last valid token."""
    lengths = [int(row.nonzero().max()) + 1 if row.any() else 1 for row in batch.mask]
    cut = {
        name: [row[:length] for row, length in zip(getattr(batch, field), lengths, strict=True)]
        for name, field in (("train_log_probs", "old_logp"), ("rollout_log_probs", "rollout_logp"))
    }
    return cut | {"loss_masks": [row[:length].long() for row, length in zip(batch.mask, lengths, strict=True)]}


def surrogates(batch, loss_masks):
    """PPO's loss of each token, end to end, as slime hands it over; with a graph."""
    ratio = (batch.logp - batch.old_logp).exp()
    losses = torch.maximum(-batch.advantages * ratio, -batch.advantages * ratio.clamp(0.8, 1.2))
    return torch.cat([row[: len(mask)] for row, mask in zip(losses, loss_masks, strict=True)])


def total(pg_loss, masks):
    return (pg_loss * torch.cat(masks)).sum()


def called(spec, batch):
    fields = lists(batch)
    pg_loss, masks, metrics = slime.tis(
        SimpleNamespace(offcorr=spec), pg_loss=surrogates(batch, fields["loss_masks"]), **fields, total_lengths=[]
    )
    return total(pg_loss, masks), masks, metrics


@pytest.mark.parametrize("name", carried(slime.HOOK))
def test_weights_and_rejections_are_offcorrs_own(name):
    for seed in range(3):
        batch = case(seed)
        loss, masks, metrics = called(f"offcorr:{name}", batch)
        out = offcorr.get(name, eps_low=0.2, eps_high=0.2, aggregate="sum")(batch)
        assert_same(loss, out.loss, batch)
        assert all(mask.dtype == torch.long for mask in masks)
        valid = torch.cat(lists(batch)["loss_masks"]).bool()
        rejected = metrics["offcorr/rejected"][valid].mean()
        assert float(rejected) == pytest.approx(out.metrics.compute()["offcorr/loss/rejected"])
        assert int(torch.cat(masks).sum()) == int(valid.sum() - metrics["offcorr/rejected"].sum())


def test_refused_methods():
    assert carried(slime.HOOK) == [
        *("binary_kl", "decoupled_ppo", "geo_rs", "icepop", "seq_mis", "seq_tis", "tis", "veto")
    ]
    assert "minpro" in refused(slime.HOOK)
    with pytest.raises(ValueError, match="loss 'minpro' cannot run in slime: slime computes the surrogate itself"):
        called("minpro", case(0))
    with pytest.raises(ValueError, match="args.offcorr is None, expected a method: write 'offcorr: tis.cap=2'"):
        called(None, case(0))


def test_sequences_that_are_split_over_ranks_are_noticed():
    fields = lists(case(0))
    fields["train_log_probs"] = [part[:1] for part in fields["train_log_probs"]]
    with pytest.raises(ValueError, match="rollout_log_probs has sequences of .* expected .1, 1, .*context parallel"):
        slime.tis(SimpleNamespace(offcorr="tis"), pg_loss=torch.ones(6), **fields)


# -- slime's own code ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder():
    if not (named := os.environ.get("OFFCORR_SLIME")):
        pytest.skip("OFFCORR_SLIME names no checkout of slime: `make test-integrations` gets one")
    return Path(named)


@pytest.fixture(scope="module")
def functions(folder):
    """vanilla_tis_function and icepop_function."""
    file = folder / "slime" / "backends" / "megatron_utils" / "loss.py"
    wanted = {"vanilla_tis_function", "icepop_function"}
    parts = [node for node in ast.parse(file.read_text()).body if getattr(node, "name", None) in wanted]
    assert {node.name for node in parts} == wanted
    names = {"torch": torch, "Any": Any}
    exec(compile(ast.Module(parts, []), str(file), "exec"), names)
    return SimpleNamespace(**{name: names[name] for name in wanted})


@pytest.fixture(scope="module")
def mis(folder):
    spec = importlib.util.spec_from_file_location(
        "slime_mis", folder / "examples" / "train_infer_mismatch_helper" / "mis.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "name, spec, args",
    [
        ("vanilla_tis_function", "tis?cap=1.3", {"tis_clip_low": 0.0, "tis_clip": 1.3}),
        ("icepop_function", "icepop?low=0.7&high=1.3", {"tis_clip_low": 0.7, "tis_clip": 1.3}),
    ],
)
def test_slimes_functions_agree(functions, name, spec, args):
    for seed in range(4):
        batch = case(seed)
        fields = lists(batch)
        pg_loss, masks, _ = getattr(functions, name)(
            SimpleNamespace(**args), pg_loss=surrogates(batch, fields["loss_masks"]), **fields
        )
        assert_same(called(spec, batch)[0], total(pg_loss, masks), batch)


@pytest.mark.parametrize(
    "spec, args",
    [
        ("tis?cap=1.3", {"tis_level": "token", "tis_mode": "truncate"}),
        ("seq_tis?cap=1.3", {"tis_level": "sequence", "tis_mode": "truncate"}),
        ("seq_mis?cap=1.3", {"tis_level": "sequence", "tis_mode": "mask", "tis_lower_bound": 1e-9}),
        ("icepop?low=0.7&high=1.3", {"tis_level": "token", "tis_mode": "mask", "tis_lower_bound": 0.7}),
    ],
)
def test_slimes_mismatch_example_agrees(mis, spec, args):
    args = SimpleNamespace(
        **{"tis_lower_bound": None} | args,
        use_tis=True,
        use_rs=False,
        tis_upper_bound=1.3,
        rs_lower_bound=None,
        rs_upper_bound=None,
        rs_veto_threshold=None,
        tis_batch_normalize=False,
    )
    for seed in range(4):
        batch = case(seed)
        fields = lists(batch)
        weights, masks, _ = mis.compute_mis_weights(args, **fields)
        theirs = total(surrogates(batch, fields["loss_masks"]) * torch.cat(weights), masks)
        assert_same(called(spec, batch)[0], theirs, batch)
