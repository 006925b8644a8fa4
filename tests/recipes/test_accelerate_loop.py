"""Tests of recipes/accelerate_loop.py: layout and split do not change an update, and runs end above their start.

Started by torchrun as a script, this file is one of two processes that share an update.
"""

import dataclasses
import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

import offcorr
from offcorr import toy
from offcorr.diagnose import diagnose, read, records_of
from offcorr.diagnose.writer import StepDumps
from offcorr.training import ESSLearningRate, Step, token_baseline
from offcorr.training.alarms import MismatchError
from tests.recipes.test_recipes import assert_improved
from tests.tiny import qwen3

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "recipes"))
import accelerate_loop as loop  # noqa: E402

# Token-mean; mean over sequences; statistics of the whole update; statistics of whole groups.
METHODS = ("minpro", "gspo", "m2po", "asymre")
# Cases in which two processes must agree with one: each method, the optimal baseline, the ESS learning rate.
SHARED = {name: {"method": name} for name in METHODS}
SHARED |= {"opob": {"method": "vcpo", "opob": True}, "opob-m2po": {"method": "m2po?tokens=all", "opob": True}}
SHARED |= {"ess": {"method": "minpro", "ess": True}, "vcpo": {"method": "vcpo", "opob": True, "ess": True}}


def tiny_model():
    model = qwen3(vocab_size=23, initializer_range=0.2)
    loop.return_log_probs(model, temperature=0.9)
    return model


def some_samples(n=8):
    """Returns samples of very different lengths, whose log-probs differ from the model's."""
    generator = torch.Generator().manual_seed(3)

    def draw(low, high):
        return int(torch.randint(low, high, (), generator=generator))

    samples = []
    for i in range(n):
        prompt, length = draw(1, 6), draw(1, 12)
        ids = torch.randint(0, 23, (prompt + length,), generator=generator).tolist()
        old = (-3 + torch.randn(length, generator=generator)).tolist()
        rollout = [x + 0.1 * float(torch.randn((), generator=generator)) for x in old]
        advantages, reward = [(-1.0) ** i * (1 + i / 3)] * length, [0.0, 1.0, 0.3][i % 3]
        samples.append(loop.Sample(ids, prompt, rollout, old, advantages, reward, i // 4, 0))
    return samples


def one_process(accumulation=1):
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    return Accelerator(cpu=True, gradient_accumulation_steps=accumulation)


def updated_weights(
    accelerator, method, packed=True, samples=None, opob=False, ess=False, monitor=None, dumps=None, version=None
):
    """Returns the weights after one update on this process's part of the samples, and the metrics."""
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer = accelerator.prepare(model, optimizer)
    ess_lr = ESSLearningRate(optimizer) if ess else None
    samples = samples or some_samples()
    mine = samples[accelerator.process_index :: accelerator.num_processes]
    if opob:  # whole groups
        mine = list(loop.split(samples, accelerator.num_processes))[accelerator.process_index]
    micros = loop.split(mine, len(mine) if opob else accelerator.gradient_accumulation_steps)
    window = [loop.lay_out(micro, packed, "cpu", version) for micro in micros]
    take = loop.opob_update if opob else loop.update
    gather = lambda vector: accelerator.gather(vector[None])  # noqa: E731
    step = Step(offcorr.get(method), ess_lr=ess_lr, gather=gather, monitor=monitor)
    take(accelerator, model, optimizer, step, window, 1e9, dumps)
    step.end(1)
    merged = step.metrics()
    weights = {name: p.detach().clone() for name, p in accelerator.unwrap_model(model).named_parameters()}
    return weights, merged


def assert_same(found, wanted):
    before = tiny_model().state_dict()
    assert max(float((wanted[name] - before[name]).abs().max()) for name in wanted) > 1e-3  # the weights changed
    for name, weight in wanted.items():
        torch.testing.assert_close(found[name], weight, atol=2e-6, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def test_log_probs_are_the_models_own():
    """Packed rows do not attend to their neighbours: the log-probs are those of each sequence alone."""
    samples, model = some_samples(4), tiny_model()
    batch = loop.trained_batch(model, loop.lay_out(samples, True, "cpu")).padded()
    del model.forward  # the plain model again
    for row, sample in enumerate(samples):
        logits = model(input_ids=torch.tensor([sample.ids])).logits[0, :-1] / 0.9
        alone = logits.log_softmax(-1).gather(-1, torch.tensor(sample.ids[1:])[:, None])[:, 0]
        torch.testing.assert_close(
            batch.logp[row, sample.prompt : len(sample.ids)], alone[sample.prompt - 1 :], atol=1e-5, rtol=1e-5
        )


def attention_by_cu_seqlens(module, query, key, value, mask, *, cu_seq_lens_q, cu_seq_lens_k, scaling=None, **kwargs):
    """Variable-length attention, one sequence after another, that sees no positions."""
    assert mask is None and torch.equal(cu_seq_lens_q, cu_seq_lens_k) and cu_seq_lens_q.dtype == torch.int32
    ends = cu_seq_lens_q.tolist()
    assert kwargs["max_length_q"] == kwargs["max_length_k"] == max(b - a for a, b in pairwise(ends))
    parts = [
        F.scaled_dot_product_attention(
            *(x[:, :, a:b] for x in (query, key, value)), is_causal=True, scale=scaling, enable_gqa=True
        )
        for a, b in pairwise(ends)
    ]
    return torch.cat(parts, 2).transpose(1, 2), None


def test_the_same_cu_seqlens_reach_attention_and_loss():
    """The keywords of flash_attention_2 suffice: attention from them alone gives the same log-probs."""
    AttentionInterface.register("by_cu_seqlens", attention_by_cu_seqlens)
    AttentionMaskInterface.register("by_cu_seqlens", lambda **kwargs: None)
    micro = loop.lay_out(some_samples(), True, "cpu")
    assert micro.inputs["cu_seq_lens_q"].tolist() == micro.fields["cu_seqlens"].tolist()
    model = tiny_model()
    wanted = loop.trained_batch(model, micro).logp
    model.config._attn_implementation = "by_cu_seqlens"
    found = loop.trained_batch(model, micro).logp
    mask = micro.fields["mask"]
    torch.testing.assert_close(found[mask], wanted[mask], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_packed_and_padded_give_the_same_update(method):
    packed, measured = updated_weights(one_process(), method)
    padded, measured_padded = updated_weights(one_process(), method, packed=False)
    assert_same(packed, padded)
    assert measured == pytest.approx(measured_padded, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("accumulation", [2, 4])
def test_accumulation_changes_nothing(method, accumulation):
    """Micro-batches have different numbers of tokens, and the mean is over all of them."""
    whole, measured = updated_weights(one_process(), method)
    split, measured_split = updated_weights(one_process(accumulation), method)
    assert_same(split, whole)
    assert measured == pytest.approx(measured_split, rel=1e-4, abs=1e-5)


@pytest.mark.slow
def test_processes_change_nothing(tmp_path):
    """Two processes, with two micro-batches each or one trajectory at a time, against one process."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    launch(torchrun, __file__, [str(tmp_path)])
    assert_dumped(tmp_path / "dump", ["step_000004.rank_0.parquet", "step_000004.rank_1.parquet"])
    for name, options in SHARED.items():
        whole, measured = updated_weights(one_process(), **options)
        found, found_measured = torch.load(tmp_path / f"{name}.pt")
        assert_same(found, whole)
        assert found_measured == pytest.approx(measured, rel=1e-4, abs=1e-5), name
        assert 0.05 < measured.get("lr_scale", 0.5) < 0.95


# -- monitor and dump ---------------------------------------------------------------------------------------------


def assert_dumped(folder, files):
    """The dump has each sample once, as it was sampled, and says where it comes from."""
    assert sorted(file.name for file in folder.iterdir()) == files
    records = list(read([folder], warn=lambda text: None))
    samples = some_samples()
    assert len(records) == len(samples)
    for record in records:
        (sample,) = (s for s in samples if [*record.prompt_ids, *record.completion_ids] == s.ids)
        assert len(record.prompt_ids) == sample.prompt and record.mask.all()
        assert record.rollout_logp == pytest.approx(sample.rollout_logp, rel=1e-6)
        assert record.old_logp == pytest.approx(sample.old_logp, rel=1e-6)
        assert (record.reward, record.group_id) == (pytest.approx(sample.reward), sample.group)
        assert (record.step, record.rollout_version, record.trainer_version) == (4, 0, 3)
        assert record.entropy is None  # of the weights of version 3, where version 0 sampled


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("accumulation", "opob"), [(1, False), (2, False), (1, True)])
def test_what_is_trained_on_is_dumped(tmp_path, packed, accumulation, opob):
    dumps = StepDumps(tmp_path / "dump")
    options = {"packed": packed, "opob": opob, "dumps": dumps, "version": 3}
    updated_weights(one_process(accumulation), "vcpo", **options)
    dumps.end()
    assert_dumped(tmp_path / "dump", ["step_000004.rank_0.parquet"])


def test_an_update_that_is_not_wanted_is_not_dumped(tmp_path):
    dumps = StepDumps(tmp_path, every=2)
    updated_weights(one_process(), "minpro", dumps=dumps, version=3)
    dumps.end()
    assert not list(tmp_path.iterdir())


def test_the_monitor_refuses_shifted_log_probs_and_knows_the_ids():
    kept = []
    monitor = offcorr.Monitor(self_test="off")
    monitor.keep = lambda batch, ids, step: kept.extend(records_of(batch, **ids(batch)))
    updated_weights(one_process(), "minpro", monitor=monitor, version=3)
    assert sorted([*one.prompt_ids, *one.completion_ids] for one in kept) == sorted(s.ids for s in some_samples())

    def shifted(sample):
        return dataclasses.replace(sample, old_logp=[*sample.rollout_logp[1:], -3.0])

    samples = [shifted(sample) for sample in some_samples(64)]
    with pytest.raises(MismatchError, match=r"the training was not begun.*token"):
        updated_weights(one_process(), "minpro", samples=samples, monitor=offcorr.Monitor(), version=0)


def test_flags_of_monitor_and_dump(tmp_path):
    accelerator = one_process()
    assert loop.make_monitor(loop.Arguments(monitor="off"), accelerator) is None
    made = loop.make_monitor(loop.Arguments(output_dir=str(tmp_path), temperature=0.7), accelerator)
    assert (made.folder, made.temperature, made.actions["critical"]) == (tmp_path / "mismatch", 0.7, ("warn",))
    assert loop.make_dumps(loop.Arguments(), accelerator) is None
    (tmp_path / "step_000001.rank_0.parquet").touch()
    with pytest.raises(FileExistsError, match="the dump of another run"):
        loop.make_dumps(loop.Arguments(dump_rollouts=str(tmp_path)), accelerator)
    with pytest.raises(ValueError, match="monitor is 'wran'"):
        loop.Arguments(monitor="wran")
    with pytest.raises(ValueError, match="dump_every is 0, expected a number of updates, 1 or more"):
        loop.Arguments(dump_every=0)


# -- baselines ----------------------------------------------------------------------------------------------------


def rewarded(samples, baseline):
    """Returns the samples with reward minus ``baseline``, one number per group, as the advantage."""
    return [
        sample.with_advantages([sample.reward - baseline[sample.group]] * len(sample.advantages)) for sample in samples
    ]


@pytest.mark.parametrize("method", ["vcpo", "reinforce", "cispo", "m2po?tokens=all"])
@pytest.mark.parametrize("packed", [True, False])
def test_opob_with_a_constant_baseline_is_the_corrections_own_gradient(method, packed, monkeypatch):
    """With its baseline replaced by 0.3, the update and the metrics are those of the advantages R - 0.3."""

    class Constant(loop.OPOB):
        def end_group(self):
            self._squared_norm, self._rewarded_norm = torch.tensor(1.0), torch.tensor(0.3)
            return super().end_group()

    wanted, measured = updated_weights(
        one_process(), method, packed, samples=rewarded(some_samples(), [0.3, 0.3]), ess=True
    )
    monkeypatch.setattr(loop, "OPOB", Constant)
    found, found_measured = updated_weights(one_process(), method, packed, opob=True, ess=True)
    assert_same(found, wanted)
    assert found_measured == pytest.approx(measured, rel=1e-4, abs=1e-5)


def test_opob_is_the_baseline_of_least_variance():
    """b* = sum w^2 |g|^2 R / sum w^2 |g|^2 per prompt, with g the gradient of the mean log-prob."""
    model, samples = tiny_model(), some_samples()
    energy, praise = [0.0, 0.0], [0.0, 0.0]
    for sample in samples:
        batch = loop.trained_batch(model, loop.lay_out([sample], True, "cpu"))
        logp = batch.logp[batch.mask]
        weight = min((logp.detach() - torch.tensor(sample.rollout_logp)).sum().exp().item(), 8.0)
        norm = sum(score.square().sum().item() for score in torch.autograd.grad(logp.mean(), list(model.parameters())))
        energy[sample.group] += weight**2 * norm
        praise[sample.group] += weight**2 * norm * sample.reward
    baseline = [total / of for total, of in zip(praise, energy, strict=True)]
    assert abs(baseline[0] - baseline[1]) > 0.04
    wanted, _ = updated_weights(one_process(), "vcpo", samples=rewarded(samples, baseline))
    found, _ = updated_weights(one_process(), "vcpo", opob=True)
    assert_same(found, wanted)


@pytest.mark.parametrize("packed", [True, False])
def test_token_advantages(packed):
    """The advantages are R - b_t, with b_t computed from the model's full softmax."""
    model, samples = tiny_model(), some_samples()
    found = loop.less_token_baseline(model, rewarded(samples, [0.0, 0.0]), packed, "cpu")
    micro = loop.lay_out(samples, False, "cpu")
    batch = loop.trained_batch(model, micro)
    del model.forward  # the plain model again
    with torch.no_grad():
        logits = model(input_ids=micro.inputs["input_ids"], attention_mask=micro.inputs["attention_mask"]).logits / 0.9
    squares = logits.softmax(-1).square().sum(-1).roll(1, -1)
    wanted = batch.rewards[:, None] - token_baseline(dataclasses.replace(batch, sum_sq_probs=squares))
    for row, before, after in zip(wanted, samples, found, strict=True):
        torch.testing.assert_close(
            torch.tensor(after.advantages), row[before.prompt : len(before.ids)], rtol=1e-4, atol=1e-5
        )
        assert dataclasses.replace(after, advantages=before.advantages) == before


def test_group_advantages():
    for before, after in zip(some_samples(), loop.less_group_mean(some_samples()), strict=True):
        rewards = torch.tensor([sample.reward for sample in some_samples() if sample.group == before.group])
        wanted = (before.reward - rewards.mean()) / rewards.std()
        assert after.advantages == pytest.approx([wanted.item()] * len(before.rollout_logp), rel=1e-3)


def test_opob_refuses_what_it_cannot_do(monkeypatch):
    accelerator = one_process()
    loop.check_opob(accelerator, offcorr.get("vcpo"))
    with pytest.raises(ValueError, match="Clip.* of 'ppo' may treat advantages of one sign otherwise"):
        loop.check_opob(accelerator, offcorr.get("ppo"))
    for kind in (DistributedType.DEEPSPEED, DistributedType.FSDP):
        accelerator.state.distributed_type = kind
        with pytest.raises(
            ValueError, match=f"gradient of each trajectory on its own process, which {kind.value} shards"
        ):
            loop.check_opob(accelerator, offcorr.get("vcpo"))
    accelerator = one_process()
    accelerator.state._mixed_precision = "fp16"
    with pytest.raises(ValueError, match="beside the loss scaler of mixed_precision fp16: use bf16 or no"):
        loop.check_opob(accelerator, offcorr.get("vcpo"))
    with pytest.raises(ValueError, match="accumulation 2 has nothing to split"):
        loop.Arguments(baseline="opob", accumulation=2)
    with pytest.raises(ValueError, match="baseline is 'best', expected group, token or opob"):
        loop.Arguments(baseline="best")
    assert loop.Arguments(baseline="opob", prompts=8, samples=8, updates=8).micro_batch == 8
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="it has 4 of the 8 x 8, expected a multiple of 8"):
        loop.Arguments(baseline="opob", prompts=8, samples=8, updates=8)


def test_the_batch_must_split_evenly():
    with pytest.raises(ValueError, match="3 prompts x 5 samples do not split into 4 updates of 1 micro-batches"):
        loop.Arguments(prompts=3, samples=5)
    with pytest.raises(ValueError, match="ess_lr is 'cube'"):
        loop.Arguments(ess_lr="cube")


def launch(launcher, script, flags):
    run = subprocess.run(
        [*launcher, str(script), *flags],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
        timeout=570,
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-6000:]
    return run.stdout


RUNS_ON = {
    "one_process": "1 x cpu, NO",
    "two_cpu_processes": "2 x cpu, MULTI_CPU",
    "deepspeed_zero2_cpu": "2 x cpu, DEEPSPEED",
    "deepspeed_zero3_cpu": "2 x cpu, DEEPSPEED",
    "fsdp2_cpu": "2 x cpu, FSDP",
}


def train(folder, config, *flags):
    """Runs `accelerate launch recipes/accelerate_loop.py` and returns the logged history."""
    toy.model_path(progress=False)
    launcher = [sys.executable, "-m", "accelerate.commands.launch"]
    launcher += ["--config_file", str(ROOT / "recipes" / "accelerate" / f"{config}.yaml")]
    said = launch(launcher, ROOT / "recipes" / "accelerate_loop.py", ["--output_dir", str(folder), *flags])
    assert f"{RUNS_ON[config]}\n" in said  # the kind of run, as the script prints it
    assert "held-out sampled accuracy, end" in said
    assert (folder / "history.png").stat().st_size > 10_000
    assert (folder / "model" / "config.json").exists()
    return json.loads((folder / "history.json").read_text())


@pytest.mark.slow
def test_one_process(tmp_path):
    """A run with a stale, quantised sampler, a corrected loss and the ESS learning rate."""
    flags = ("--loss", "minpro", "--lag", "4", "--precision", "int8", "--ess_lr", "sqrt")
    dump = ("--dump_rollouts", str(tmp_path / "dump"), "--dump_every", "4")
    history = train(tmp_path, "one_process", *flags, *dump, "--generations", "4", "--eval_every", "4", "--use_cpu")
    assert_improved(history)
    assert [file.name[:11] for file in sorted((tmp_path / "dump").iterdir())] == [
        f"step_{n:06d}" for n in (1, 5, 9, 13)
    ]
    causes = {cause.cause for cause in diagnose(read([tmp_path / "dump"], warn=lambda text: None)).causes}
    assert causes == {"policy_updates", "precision"}  # the lag and the int8 weights
    trained = [entry for entry in history if "reward" in entry]
    assert [entry["step"] for entry in trained] == [4, 8, 12, 16]
    assert all(entry["offcorr/engine/abs_mean"] > 1e-4 for entry in trained)
    assert all(0 < entry["lr_scale"] < 1 for entry in trained)


@pytest.mark.slow
@pytest.mark.parametrize("baseline", ["token", "opob"])
def test_baselines(tmp_path, baseline):
    """VCPO learns with either baseline."""
    flags = ("--loss", "vcpo", "--baseline", baseline, "--ess_lr", "sqrt", "--lag", "4", "--precision", "int8")
    history = train(tmp_path, "one_process", *flags, "--generations", "4", "--eval_every", "4", "--use_cpu")
    assert_improved(history)
    trained = [entry for entry in history if "reward" in entry]
    assert all(entry["offcorr/staleness/abs_mean"] > 1e-4 and 0 < entry["lr_scale"] < 1 for entry in trained)


@pytest.fixture(scope="module")
def two_plain_processes(tmp_path_factory):
    return train(tmp_path_factory.mktemp("ddp"), "two_cpu_processes", *DISTRIBUTED)


DISTRIBUTED = "--loss minpro --lag 2 --accumulation 2 --generations 3 --eval_every 3 --use_cpu".split()


@pytest.mark.slow
def test_two_processes(two_plain_processes):
    assert_improved(two_plain_processes)


@pytest.mark.slow
@pytest.mark.parametrize("config", ["deepspeed_zero2_cpu", "deepspeed_zero3_cpu", "fsdp2_cpu"])
def test_sharded_runs_are_the_same_run(tmp_path, two_plain_processes, config):
    """Sharding gradients, optimizer state and weights over two processes does not change the numbers."""
    history = train(tmp_path, config, *DISTRIBUTED)
    assert_improved(history)
    for found, wanted in zip(history, two_plain_processes, strict=True):
        for name in {"reward", "eval_reward", "offcorr/staleness/abs_mean"} & wanted.keys():
            assert found[name] == pytest.approx(wanted[name], rel=0.02, abs=0.03), (name, found["step"])


if __name__ == "__main__":
    process = Accelerator(cpu=True, gradient_accumulation_steps=2)
    for name, options in SHARED.items():
        shared = updated_weights(process, **options)
        if process.is_main_process:
            torch.save(shared, Path(sys.argv[1]) / f"{name}.pt")
    both = StepDumps(Path(sys.argv[1]) / "dump", rank=process.process_index)
    updated_weights(process, "minpro", dumps=both, version=3)
    both.end()
    process.wait_for_everyone()
    process.end_training()
