"""Metrics by origin, and what the monitor sees of a mixture."""

from __future__ import annotations

import pytest
import torch

import offcorr
from offcorr.diagnose import DumpWriter, Record, read, records_of
from offcorr.training import MismatchError, Monitor, Step, origin_ids, origin_metrics

NAMES = ["fresh", "replay", "fresh", "prefix"]


def a_batch(origin=NAMES, moved=(0.0, 0.5, 0.0, 0.1), packed=False):
    """Four sequences of three tokens, the first of two: each of them has moved by as much as ``moved`` says."""
    generator = torch.Generator().manual_seed(0)
    logp = -1 - torch.rand(4, 3, generator=generator)
    mask = torch.ones(4, 3, dtype=torch.bool)
    mask[0, 2] = False
    versions = torch.tensor([5, 1, 5, 5])[:, None].expand(4, 3)
    columns = {"logp": logp, "old_logp": logp - torch.tensor(moved)[:, None], "rollout_logp": logp - 0.7}
    columns |= {"mask": mask, "rollout_version": versions, "entropy": -logp}
    fields = {"advantages": torch.tensor([1.0, -1.0, 1.0, 0.0]), "rewards": torch.arange(4.0), "trainer_version": 5}
    if origin is not None:
        fields["origin"] = torch.tensor(origin_ids(origin))
    if packed:
        ends = torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0))
        return offcorr.Batch.packed(cu_seqlens=ends, **{n: c[mask] for n, c in columns.items()}, **fields)
    return offcorr.Batch(**columns, **fields)


def measured(batch, **options):
    step = Step(offcorr.get("ppo"), **options)
    step.begin(sequences=4, tokens=11)
    step.loss(step.place(batch))
    return step.metrics()


@pytest.mark.parametrize("packed", [False, True])
def test_each_origin_has_its_own_numbers(packed):
    found = measured(a_batch(packed=packed))
    of = {name.removeprefix("offcorr/origin/"): value for name, value in found.items() if "/origin/" in name}
    assert of["fresh/share"] == 0.5 and of["replay/share"] == of["prefix/share"] == 0.25
    assert not any(name.startswith("demonstration") for name in of)
    assert (of["fresh/reward"], of["replay/reward"], of["replay/lag"], of["fresh/lag"]) == (1, 1, 4, 0)
    assert of["fresh/abs_mean"] == 0 and of["replay/abs_mean"] == pytest.approx(0.5)
    assert of["replay/engine_abs_mean"] == pytest.approx(0.2)
    assert of["fresh/ess_seq"] == of["replay/ess_token"] == pytest.approx(1)
    assert "replay/ess_seq" not in of and of["replay/ratio_mean_seq"] == pytest.approx(4.48, abs=0.01)  # of e^1.5
    # The ratio e^.5 is outside the clip range: where A < 0 the gradient stays.
    assert of["fresh/kept"] == of["replay/kept"] == 1 and "prefix/kept" not in of


@pytest.mark.parametrize("packed", [False, True])
def test_demonstrations_have_no_age(packed):
    origin = ["fresh", "demonstration", "fresh", "fresh"]  # of the versions 5, 1, 5 and 5
    found = measured(a_batch(origin=origin, packed=packed))
    assert found["offcorr/staleness/lag"] == found["offcorr/staleness/lag_max"] == 0
    assert found["offcorr/origin/fresh/lag"] == 0 and "offcorr/origin/demonstration/lag" not in found
    assert found["offcorr/origin/demonstration/abs_mean"] == pytest.approx(0.5)


def test_kept_counts_what_the_loss_clips():
    found = measured(a_batch(origin=["replay"] * 4, moved=(0.5, 0.5, 0.0, 0.0)))
    assert found["offcorr/origin/replay/kept"] == pytest.approx(6 / 8)  # the first sequence, of two tokens, is clipped


def test_without_origin_nothing_changes():
    plain, mixed = measured(a_batch(origin=None)), measured(a_batch())
    assert plain == {name: value for name, value in mixed.items() if "/origin/" not in name}
    assert not origin_metrics(a_batch(origin=None)).data


def test_every_rank_has_the_same_metrics():
    one, other = (origin_metrics(a_batch(origin=[name] * 4)) for name in ("fresh", "demonstration"))
    assert one.data.keys() == other.data.keys()
    assert one.merge(other).compute()["offcorr/origin/demonstration/share"] == 0.5


def test_the_short_log_has_four_for_each_origin():
    step = Step(offcorr.get("ppo"))
    step.begin(sequences=4, tokens=11)
    step.loss(step.place(a_batch(origin=["fresh", "replay", "replay", "prefix"])))
    short = [name for name in step.metrics(choice="short") if "origin/replay" in name]
    assert [name.rpartition("/")[2] for name in short] == ["share", "lag", "ess_seq", "kept"]


# -- the monitor -------------------------------------------------------------------------------------------------


def far_off(seed, origin):
    generator = torch.Generator().manual_seed(seed)
    logp = -20 - torch.rand(4, 32, generator=generator)
    gap = torch.tensor([0.001 if name == "fresh" else 3.0 for name in origin])[:, None]
    old_logp = logp + gap * torch.randn(4, 32, generator=generator)
    return offcorr.Batch(
        logp=logp,
        old_logp=old_logp,
        rollout_logp=old_logp + gap,
        advantages=torch.ones(4),
        mask=torch.ones(4, 32, dtype=torch.bool),
        origin=torch.tensor(origin_ids(origin)),
    )


@pytest.mark.parametrize("inside", ["step", "loop"])
@pytest.mark.parametrize("foreign", ["replay", "demonstration", "fresh"])
def test_old_and_foreign_data_raises_no_alarm(inside, foreign):
    """From step 8 on half of the batch is far off; of fresh sequences that would be an alarm."""
    monitor = Monitor(self_test="off", warmup=6, warning="log", critical="log")
    step = Step(offcorr.get("ppo"), monitor=monitor) if inside == "step" else None
    alarms = []
    for number in range(1, 16):
        batch = far_off(number, ["fresh", "fresh", "replay", "replay"])
        if number < 8:
            batch = far_off(number, ["fresh"] * 4)
        elif foreign == "fresh":
            batch = batch.replaced(origin=torch.zeros(4, dtype=torch.long))
        else:
            batch = batch.replaced(origin=torch.tensor(origin_ids(["fresh", "fresh", foreign, foreign])))
        if step is None:
            monitor.observe(batch)
            alarms += monitor.end(number)
        else:
            step.begin(tokens=128, sequences=4)
            step.loss(step.place(batch))
            step.end(number)
            step.metrics()
            alarms = monitor.alarms
    assert bool(alarms) == (foreign == "fresh")


def test_the_self_test_looks_at_what_was_sampled_now():
    """Log-probs that are probabilities, of the replayed sequences alone."""
    batch = far_off(0, ["fresh", "fresh", "replay", "replay"])
    wrong = batch.replaced(rollout_logp=torch.where(batch.origin[:, None] == 1, 0.9, batch.rollout_logp))
    Monitor().observe(wrong)
    with pytest.raises(MismatchError):
        Monitor().observe(wrong.replaced(origin=torch.zeros(4, dtype=torch.long)))
    Monitor().observe(wrong.replaced(origin=torch.ones(4, dtype=torch.long)))  # nothing to test


def test_the_mask_of_an_alarm_leaves_replayed_sequences_alone():
    monitor = Monitor(self_test="off")
    monitor._series["staleness"].mask_above = 0.01
    weights = monitor.masked(far_off(0, ["fresh", "fresh", "replay", "replay"])).weight
    assert weights.tolist() == [1, 1, 1, 1]
    odd = far_off(0, ["fresh", "fresh", "replay", "replay"]).replaced(origin=torch.zeros(4, dtype=torch.long))
    assert monitor.masked(odd).weight.tolist() == [1, 1, 0, 0]


# -- dumps -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_the_origin_is_in_the_dump(tmp_path, suffix):
    pytest.importorskip("pyarrow")
    batch = a_batch()
    records = records_of(batch, prompt_ids=[[1]] * 4, completion_ids=[[2] * n for n in (2, 3, 3, 3)])
    with DumpWriter(tmp_path / f"dump.{suffix}") as writer:
        writer.write(records)
    assert [record.origin for record in read([tmp_path], warn=lambda text: None)] == NAMES


def test_an_unknown_origin_is_refused():
    with pytest.raises(ValueError, match="origin is 'stale'"):
        origin_ids(["stale"])
    row = {"prompt_ids": [5], "completion_ids": [7], "rollout_logp": [-0.1], "logp": [-0.2], "origin": "stale"}
    with pytest.raises(ValueError, match="origin is 'stale', expected one of fresh, replay, demonstration, prefix"):
        Record.of(row)
