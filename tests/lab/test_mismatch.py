"""The generator of mismatch: each cause is real, differs from a clean dump, and is repeatable."""

from __future__ import annotations

import functools
import json

import numpy as np
import pytest
import torch

from offcorr.diagnose import read
from offcorr.diagnose.record import LOGPS, NAMES
from offcorr.lab.mismatch import ARCHITECTURES, CAUSES, Recipe, apart, check, make, pairs, prepare
from offcorr.lab.mismatch.__main__ import main
from offcorr.lab.mismatch.decode import decode, score
from offcorr.lab.mismatch.models import subject

QUICK = Recipe(steps=60)
"""Models that have learned little, but are made in some seconds, once."""

IDS = """clean precision kv_cache moe_routing stale_weights adapter_not_synced policy_updates dropout temperature
temperature_silent raw_logprobs unnormalised top_p top_p_silent top_k min_p repetition_penalty penalty_silent logit_mask
shift mask sentinel appended_eos stored_bf16 retokenised chat_template truncated_prompt weights_swapped
stale_prefix_cache position""".split()


def fields(record):
    """The record in a form that can be compared."""
    return repr([np.asarray(getattr(record, name)).tolist() for name in NAMES])


def remade(*causes, architecture="gpt2", seed=0, sequences=8, strength="strong"):
    return make(causes, architecture=architecture, seed=seed, sequences=sequences, strength=strength, recipe=QUICK)


dump = functools.cache(remade)


def together(records, name):
    """One field of every token that the logged mask keeps."""
    rows = [getattr(r, name)[np.ones(len(r), bool) if r.mask is None else r.mask] for r in records]
    return np.concatenate(rows)


def gap(records, of="old_logp"):
    return together(records, of) - together(records, "rollout_logp")


def balance(records):
    """Mean of surprisal minus entropy (nats), and its standard error."""
    excess = -together(records, "old_logp") - together(records, "entropy")
    return excess.mean(), excess.std() / len(excess) ** 0.5


def test_the_ids_are_those_of_the_reports():
    assert set(CAUSES) == set(IDS)
    assert all(cause.made.endswith(".") and cause.architectures for cause in CAUSES.values())


@pytest.mark.parametrize("name", IDS)
def test_a_cause_generates_numbers_that_are_repeatable(name):
    architecture = "mixtral" if name == "moe_routing" else "gpt2"
    one, again = dump(name, architecture=architecture), remade(name, architecture=architecture)
    assert one.settings == again.settings and len(one.records) == 8
    for a, b in zip(one.records, again.records, strict=True):
        assert fields(a) == fields(b)
        learned = np.ones(len(a), bool) if a.mask is None else a.mask
        for field in (*LOGPS, "entropy"):
            assert getattr(a, field) is None or np.isfinite(getattr(a, field)[learned]).all()


def test_another_seed_gives_other_sequences():
    one, other = dump("clean"), dump("clean", seed=3)  # of the same model
    assert [r.completion_ids.tolist() for r in one.records] != [r.completion_ids.tolist() for r in other.records]


SEEN_ELSEWHERE = {"policy_updates", "temperature_silent", "top_p_silent", "penalty_silent"}


@pytest.mark.parametrize("name", sorted(set(IDS) - SEEN_ELSEWHERE - {"clean"}))
def test_a_cause_opens_a_gap_between_the_logged_numbers(name):
    records = dump(name, architecture="mixtral" if name == "moe_routing" else "gpt2").records
    assert np.abs(gap(records)).max() > 1e-3


@pytest.mark.parametrize("architecture", ["gpt2", "mixtral"])
def test_clean_data_agrees(architecture):
    records = dump("clean", architecture=architecture, sequences=32).records
    assert np.abs(gap(records)).max() < 1e-4
    mean, error = balance(records)
    assert abs(mean) < 4 * error


def test_the_updates_of_a_batch_move_only_the_weights_that_are_updated():
    records = dump("policy_updates").records
    assert np.abs(gap(records)).max() < 1e-4 and np.abs(gap(records, "logp")).mean() > 0.01


@pytest.mark.parametrize("name", ["temperature_silent", "top_p_silent"])
def test_a_silent_transform_shows_in_the_entropy_only(name):
    records = dump(name, sequences=32).records
    mean, error = balance(records)
    assert np.abs(gap(records)).max() < 1e-4 and abs(mean) > 6 * error


@pytest.mark.parametrize("name", ["precision", "stale_weights", "kv_cache", "dropout"])
def test_the_mean_ratio_of_two_policies_is_one(name):
    rho = np.exp(gap(dump(name, sequences=32, strength="usual").records))
    assert rho.std() > 0 and abs(rho.mean() - 1) < 5 * rho.std() / len(rho) ** 0.5


def test_top_p_moves_a_log_prob_by_the_kept_mass():
    made = dump("top_p", sequences=32)
    d = gap(made.records)
    assert d.max() < 1e-4 and d.min() > np.log(made.settings["top_p"]) - 1e-4 and d.min() < -0.05


def test_top_k_has_no_common_floor():
    d = gap(dump("top_k", sequences=32).records)
    assert d.max() < 1e-4 and d.min() < -1


def test_penalties_raise_what_is_new_and_lower_what_was_seen():
    made = dump("repetition_penalty", sequences=32)
    d = [r.old_logp - r.rollout_logp for r in made.records]
    kind = made.settings["penalty_kind"]
    seen, new = [], []
    for record, row in zip(made.records, d, strict=True):
        for t, token in enumerate(record.completion_ids):
            before = record.completion_ids[:t].tolist() + (record.prompt_ids.tolist() if kind == "repetition" else [])
            if record.mask is None or record.mask[t]:
                (seen if token in before else new).append(row[t])
    assert np.mean(seen) > np.mean(new) + 0.05


def test_the_settings_say_how_far_the_sampler_drew_from_the_trainer():
    assert dump("clean").settings["drawn_gap"] < 1e-4
    assert dump("temperature_silent").settings["drawn_gap"] > 0.05  # which the logs do not show
    assert dump("sentinel").settings["drawn_gap"] < 1e-4  # the logs alone are wrong


def test_a_shift_is_the_true_series_one_token_away():
    made = dump("shift", sequences=16)
    back = [np.roll(record.rollout_logp, -made.settings["shift"]) for record in made.records]
    d = [np.abs(record.old_logp - row)[1:-1] for record, row in zip(made.records, back, strict=True)]
    assert np.median(np.concatenate(d)) < 1e-4


def test_stored_log_probs_are_representable_in_bf16():
    logp = torch.from_numpy(together(dump("stored_bf16").records, "rollout_logp"))
    assert torch.equal(logp, logp.bfloat16().double())


def test_router_flips_are_few_and_large():
    d = np.abs(gap(dump("moe_routing", architecture="mixtral", sequences=32, strength="usual").records))
    assert np.median(d) < 1e-4 < 1e-2 < d.max()


def test_an_appended_end_is_the_last_token():
    for record in dump("appended_eos").records:
        d = np.abs(record.old_logp - record.rollout_logp)
        assert (d[:-1] < 1e-4).all() or record.mask is not None
        assert record.completion_ids[-1] == 1


def test_weights_are_swapped_where_the_settings_say():
    made = next(d for seed in range(0, 30, 3) if (d := dump("weights_swapped", seed=seed)).settings["spread"] == 0)
    before, after = [], []
    for record in made.records:
        d = np.abs(record.old_logp - record.rollout_logp)
        d = np.where(True if record.mask is None else record.mask, d, np.nan)
        before += d[: made.settings["swapped_at"]].tolist()
        after += d[made.settings["swapped_at"] + 1 :].tolist()
    old, new = (np.nanmean(x) for x in (before, after))
    if made.settings["trainer_has"] == "old":
        assert old < 1e-4 < new
    else:  # keys and values of the old weights remain
        assert new < old


def test_pairs_are_made_together():
    made = dump("appended_eos", "precision")
    assert made.causes == ("precision", "appended_eos")
    assert np.median(np.abs(gap(made.records))) > 1e-4
    assert all(record.completion_ids[-1] == 1 for record in made.records)
    made = dump("dropout", "stale_weights", strength="weak")
    assert made.causes == ("stale_weights", "dropout")
    alone = dump("dropout", strength="weak")
    assert np.abs(gap(made.records)).mean() != np.abs(gap(alone.records)).mean()
    assert "top_p" in apart("top_p", "top_p_silent")
    assert all(not apart(*pair) for pair in pairs("mixtral")) and len(pairs("mixtral")) > 200


def test_every_pair_can_be_prepared():
    for first, second in pairs("gpt2"):
        setup = prepare([first, second], architecture="gpt2", seed=0, recipe=QUICK)
        assert set(setup.settings) >= {"temperature", "trainer_temperature", "tools"}


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="causes has 'heat', expected some of"):
        check(["heat"], "gpt2")
    with pytest.raises(ValueError, match="top_p and raw_logprobs|raw_logprobs and top_p"):
        check(["top_p", "raw_logprobs"], "gpt2")
    with pytest.raises(
        ValueError, match="moe_routing cannot be made with architecture 'gpt2', expected one of mixtral"
    ):
        check(["moe_routing"], "gpt2")
    with pytest.raises(ValueError, match="strength is 'huge', expected one of weak, usual, strong"):
        check(["top_p"], "gpt2", "huge")
    with pytest.raises(ValueError, match="sequences is 0"):
        dump("top_p", sequences=0)
    with pytest.raises(ValueError, match="architecture is 'gpt9', expected one of llama"):
        subject("gpt9")


def test_the_decode_loop_takes_each_place_by_its_own_weights():
    """Against full forwards: old weights up to a boundary; and a cache that rounds nothing changes nothing."""
    model = subject("gpt2", 0, QUICK)
    old, new = model.module, model.at("rl", 16)
    prompts = [[5, 6, 7], [8, 9, 10, 11, 12]]
    kept = {"max_new_tokens": 12, "boundaries": [[4, 6]]}
    made = decode([old, new], prompts, generator=torch.Generator().manual_seed(0), **kept)
    same = decode([old, new], prompts, generator=torch.Generator().manual_seed(0), stored=lambda x: x, **kept)
    assert made == same
    by_old, _ = score(old, prompts, made.completion_ids)
    for row, boundary in enumerate([4, 6]):
        d = np.abs(by_old[row].numpy() - np.array(made.processed[row]))
        assert d[: boundary + 1].max() < 1e-5 and (len(d) <= boundary + 1 or d[boundary + 1 :].max() > 1e-4)


def test_the_command_writes_what_reads_back(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("offcorr.lab.mismatch.models.Recipe", lambda: QUICK)
    arguments = ["--output", str(tmp_path), "--causes", "clean", "top_p+shift", "moe_routing"]
    assert main([*arguments, "--architectures", "gpt2", "--sequences", "4", "--seeds", "3"]) == 0
    assert "2 dumps" in capsys.readouterr().out
    files = sorted(path.name for path in tmp_path.glob("*.gz"))
    assert files == ["clean.gpt2.usual.3.jsonl.gz", "top_p+shift.gpt2.usual.3.jsonl.gz"]
    warned = []
    back = list(read([tmp_path / files[0]], warn=warned.append))
    assert all(text.startswith("no record has") for text in warned)
    wanted = make(["clean"], architecture="gpt2", seed=3, sequences=4, recipe=QUICK)
    assert [fields(record) for record in back] == [fields(record) for record in wanted.records]
    truth = json.loads((tmp_path / "clean.gpt2.usual.3.json").read_text())
    assert truth["causes"] == ["clean"] and truth["settings"] == wanted.settings
    before = (tmp_path / files[0]).stat().st_mtime_ns
    assert main([*arguments, "--architectures", "gpt2", "--sequences", "4", "--seeds", "3"]) == 0
    said = capsys.readouterr()
    assert "0 dumps to" in said.err and "2 are there already" in said.err
    assert (tmp_path / files[0]).stat().st_mtime_ns == before
    one = ["--output", str(tmp_path / "one"), "--causes", "clean", "--architectures", "gpt2", "--sequences", "4"]
    assert main([*one, "--seeds", "3"]) == 0
    said = capsys.readouterr()
    assert said.err.startswith("1 dump to ") and said.out.startswith("1 dump in ")
    with pytest.raises(SystemExit):
        main(["--output", str(tmp_path), "--causes", "heat"])
    assert "heat" in capsys.readouterr().err


def test_every_architecture_is_known():
    assert {a for cause in CAUSES.values() for a in cause.architectures} == set(ARCHITECTURES)
