"""``VLLMServer`` with a real vLLM server on this machine's CPU, in fp32 and in bf16.

The model is random, small and changed by large steps, so that every difference between two weights shows.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, TrainerCallback

from offcorr.data import Demonstrations, Prefixes, Replay, Traces
from offcorr.rollout import Engine, EngineError, Sampling, VLLMServer, decode, save_for_engine, score
from offcorr.rollout.served import ServedWeights
from offcorr.training import ORIGINS, Precision, Replica
from offcorr.trl import GRPOConfig, GRPOTrainer
from tests.rollout.rollout_models import EOS, fresh_model, tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")

PROMPTS = ["a3b1=", "c2=", "b7a3c9=", "a1b2c3a4="]
ARGUMENTS = {"max_new_tokens": 32, "eos_token_ids": [EOS]}
KEYS = ("completion_ids", "env_mask", "logprobs", "old_logp")


def model_of(seed=0, **changes):
    return fresh_model(seed, head_dim=32, **changes).eval()


def gap(found, wanted):
    return torch.tensor([x - y for a, b in zip(found, wanted, strict=True) for x, y in zip(a, b, strict=True)]).abs()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Checkpoints for the server: with a head of its own, and with a tied one."""
    made = {}
    for name, save in (("own", lambda m, f: save_for_engine(m, f)), ("tied", lambda m, f: m.save_pretrained(f))):
        made[name] = tmp_path_factory.mktemp(name)
        save(model_of(), made[name])
        tokenizer().save_pretrained(made[name])
    return made


@pytest.fixture(scope="module")
def fp32(start_server, folders, tmp_path_factory):
    """A server in fp32 whose prefix cache has short blocks, and whose checkpoint has a tied head."""
    log = tmp_path_factory.mktemp("fp32") / "server.txt"
    with start_server(folders["tied"], log, "--dtype", "float32", "--block-size", "32") as url:
        yield url


@pytest.fixture(scope="module")
def bf16(start_server, folders, tmp_path_factory):
    log = tmp_path_factory.mktemp("bf16") / "server.txt"
    with start_server(folders["own"], log, "--dtype", "bfloat16") as url:
        yield url


def prompts_of(n=32, length=6):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(2, 17, (n, length), generator=generator).tolist()


def served_by(url, model, folder, **options):
    options = {"tolerance": 0.1, "sampling": Sampling()} | options
    return ServedWeights(Engine(url), Replica(model, "cpu"), folder / "weights", **options)


def changed(model, by=0.05, seed=1):
    new = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    for weight in new.parameters():
        weight.data += by * torch.randn(weight.shape, generator=generator)
    return new


def sampled_gap(served, version, model, prompts):
    decoded = served.sample(version, prompts, **ARGUMENTS, seeds=range(len(prompts)))
    return gap(decoded.logp, score(model, prompts, decoded.completion_ids)), decoded


# -- what the engine says


def test_fp32_log_probs_are_the_trainers(fp32, tmp_path):
    model = model_of()
    served, prompts = served_by(fp32, model, tmp_path), prompts_of()
    served.ensure(0, dict(model.named_parameters()), prompts)
    found, decoded = sampled_gap(served, 0, model, prompts)
    assert len(found) > 300
    assert found.mean() < 1e-6
    assert found.max() < 1e-4
    again = served.sample(0, prompts, **ARGUMENTS, seeds=range(32))
    assert again == decoded  # a seed gives the same tokens again


def test_bf16_log_probs_differ_as_a_model_in_bf16_does(bf16, tmp_path):
    model = model_of()
    served, prompts = served_by(bf16, model, tmp_path), prompts_of()
    served.ensure(0, dict(model.named_parameters()), prompts)
    found, _ = sampled_gap(served, 0, model, prompts)
    sampler = Replica(model, "cpu").load(dict(model.named_parameters()), Precision.named("bf16"))
    ours = decode(sampler, prompts, generator=torch.Generator().manual_seed(0), **ARGUMENTS)
    simulated = gap(ours.logp, score(model, prompts, ours.completion_ids))
    assert 0.3 < found.mean() / simulated.mean() < 3
    assert 0.3 < found.quantile(0.95) / simulated.quantile(0.95) < 3


def test_temperature_and_top_k_are_in_the_log_probs(fp32, tmp_path):
    model, sampling = model_of(), Sampling(temperature=0.7, top_k=4)
    served, prompts = served_by(fp32, model, tmp_path, sampling=sampling), prompts_of(8)
    served.ensure(0, dict(model.named_parameters()), prompts)
    decoded = served.sample(0, prompts, max_new_tokens=1, eos_token_ids=[EOS], seeds=range(8))
    for prompt, (token,), (found,) in zip(prompts, decoded.completion_ids, decoded.logp, strict=True):
        with torch.no_grad():
            wanted = sampling.logp(model(torch.tensor([prompt])).logits[0, -1])
        assert wanted[token].item() == pytest.approx(found, abs=1e-5)


# -- replacing weights


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_a_replacement_reaches_every_weight(name, request, tmp_path):
    """The fp32 server's checkpoint has a tied head, the bf16 server's one of its own."""
    model, bound = model_of(), {"fp32": 1e-6, "bf16": 0.05}[name]
    served, prompts = served_by(request.getfixturevalue(name), model, tmp_path), prompts_of()
    served.ensure(0, dict(model.named_parameters()), prompts)
    new = changed(model)
    served.ensure(1, dict(new.named_parameters()), prompts)
    found, decoded = sampled_gap(served, 1, new, prompts)
    assert found.mean() < bound
    assert gap(decoded.logp, score(model, prompts, decoded.completion_ids)).mean() > 3 * bound + 0.1


@pytest.mark.parametrize(
    ("name", "kept"), [("fp32", "all weights"), ("bf16", "all weights"), ("bf16", "the output head")]
)
def test_a_replacement_that_did_not_happen_is_found_and_named(name, kept, request, tmp_path, monkeypatch):
    """The server answers 200 in both cases.  Which vLLM on which CPU keeps a tied head varies, so the old head is
    written into the checkpoint here; the server and all it answers are real.
    """
    model = model_of()
    served, prompts = served_by(request.getfixturevalue(name), model, tmp_path), prompts_of()
    served.ensure(0, dict(model.named_parameters()), prompts)
    _, decoded = sampled_gap(served, 0, model, prompts)
    served.remember(prompts, decoded.completion_ids)
    new = changed(model, by=0.01)
    loaded = copy.deepcopy(model if kept == "all weights" else new)
    loaded.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    monkeypatch.setattr("offcorr.rollout.served.save_for_engine", lambda _, folder: save_for_engine(loaded, folder))
    with pytest.raises(EngineError, match=f"version 1, but its log-probs are those with {kept} of version 0"):
        served.ensure(1, dict(new.named_parameters()), prompts)


def test_a_stale_prefix_cache_is_wrong_and_never_left(fp32, tmp_path):
    model = model_of()
    served, prompts = served_by(fp32, model, tmp_path), prompts_of(8, length=70)
    served.ensure(0, dict(model.named_parameters()), prompts)
    sampled_gap(served, 0, model, prompts)  # fills the cache: two whole blocks of 32 tokens for each prompt
    new = changed(model)
    save_for_engine(new, tmp_path / "new")
    engine = served.engine
    reload = {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path / "new")}}
    engine._call(engine.urls[0], "/collective_rpc", reload)
    stale, _ = sampled_gap(served, 0, new, prompts)
    assert stale.mean() > 0.02  # a reload alone
    served.ensure(1, dict(new.named_parameters()), prompts)
    fresh, _ = sampled_gap(served, 1, new, prompts)
    assert fresh.mean() < 1e-6


def test_two_servers_share_the_prompts_and_both_get_the_weights(fp32, bf16, tmp_path):
    model = changed(model_of(), seed=2)
    served, prompts = served_by(f"{fp32},{bf16}", model, tmp_path), prompts_of()
    served.ensure(5, dict(model.named_parameters()), prompts)
    decoded = served.sample(5, prompts, **ARGUMENTS, seeds=range(32))
    wanted = score(model, prompts, decoded.completion_ids)
    exact, rounded = (gap(decoded.logp[i::2], wanted[i::2]).mean() for i in range(2))
    assert exact < 1e-6 < 1e-4 < rounded < 0.05


def test_somebody_elses_weights_end_the_sampling(fp32, tmp_path):
    model, prompts = model_of(), prompts_of(4)
    weights = dict(model.named_parameters())
    mine, another = served_by(fp32, model, tmp_path / "mine"), served_by(fp32, model, tmp_path / "another")
    mine.ensure(0, weights, prompts)
    another.ensure(0, weights, prompts)
    with pytest.raises(EngineError, match="were replaced by somebody else"):
        mine.sample(0, prompts, **ARGUMENTS, seeds=range(4))
    with pytest.raises(EngineError, match="were replaced by somebody else"):
        mine.ensure(0, weights, prompts)


# -- in TRL's trainer


def reward(completions, **kwargs):
    return [len(set(text)) / (1 + len(text)) for text in map(str, completions)]


class Recording(VLLMServer):
    """Records what it returned, with the trainer's step."""

    def __post_init__(self):
        super().__post_init__()
        self.calls, self.sampled = [], []

    def sample(self, prompt_ids, trainer, prefixes=None):
        self.sampled.append(super().sample(prompt_ids, trainer, prefixes))
        return self.sampled[-1]

    def __call__(self, prompts, trainer):
        returned = super().__call__(prompts, trainer)
        self.calls.append((trainer.state.global_step, trainer.model.training, returned))
        return returned


def trainer_of(sampler, folder, callbacks=(), peft=None, **options):
    settings = {
        "loss_type": "minpro",
        "per_device_train_batch_size": 16,
        "per_device_eval_batch_size": 16,
        "num_generations": 4,
        "steps_per_generation": 2,
        "max_completion_length": 12,
        "max_steps": 12,
        "learning_rate": 5e-3,
        "lr_scheduler_type": "constant",
        "bf16": False,
        "use_cpu": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "gradient_checkpointing": False,
    }
    data = Dataset.from_dict({"prompt": PROMPTS * 16})
    return GRPOTrainer(
        model_of(),
        reward,
        args=GRPOConfig(str(folder), **settings | options),
        train_dataset=data,
        eval_dataset=data.select(range(4)),
        processing_class=tokenizer(),
        rollout_func=sampler,
        callbacks=list(callbacks),
        peft_config=peft,
    )


def test_the_lag_is_real_and_both_gaps_are_measured(bf16, tmp_path):
    sampler = Recording(url=bf16, sync_every=4)
    trainer = trainer_of(sampler, tmp_path, eval_strategy="steps", eval_steps=6)
    trainer.train()
    training = [(step, out["rollout_version"][0]) for step, train, out in sampler.calls if train]
    assert training == [(0, 0), (2, 0), (4, 4), (6, 4), (8, 8), (10, 8)]
    evaluated = {(step, out["rollout_version"][0]) for step, train, out in sampler.calls if not train}
    assert evaluated == {(6, 6), (12, 12)}  # the weights being trained, and afterwards version 4 again
    for _, train, out in sampler.calls:
        rounding = gap(out["logprobs"], out["old_logp"]).mean()
        assert 1e-4 < rounding < 0.05, (train, rounding)
    logs = [entry for entry in trainer.state.log_history if "offcorr/staleness/lag" in entry]
    assert [round(entry["offcorr/staleness/lag"], 6) for entry in logs] == [0, 1, 2, 3] * 3
    assert logs[0]["offcorr/staleness/abs_mean"] < 1e-6 < logs[3]["offcorr/staleness/abs_mean"]
    assert all(1e-4 < entry["offcorr/engine/abs_mean"] < 0.05 for entry in logs)
    assert not (tmp_path / "engine_weights").exists()


def test_lora_adapters_reach_the_server_merged(fp32, tmp_path):
    sampler = Recording(url=fp32)
    adapters = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    trainer = trainer_of(sampler, tmp_path, max_steps=4, peft=adapters)
    trainer.train()
    assert [(step, out["rollout_version"][0]) for step, _, out in sampler.calls] == [(0, 0), (2, 2)]
    assert max(gap(out["logprobs"], out["old_logp"]).max() for _, _, out in sampler.calls) < 1e-4


class KillAt(TrainerCallback):
    """Kills a server after a number of updates."""

    def __init__(self, url, step):
        self.url, self.step = url, step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            port = self.url.rpartition(":")[2]
            for pid in subprocess.check_output(["pgrep", "-f", f"port {port}"], text=True).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)


def test_a_killed_server_ends_the_run_with_a_checkpoint_that_continues_it(start_server, folders, tmp_path, fp32):
    whole = trainer_of(VLLMServer(url=fp32, sync_every=4), tmp_path / "whole")
    whole.train()
    with start_server(folders["tied"], tmp_path / "first.txt", "--dtype", "float32", "--block-size", "32") as url:
        sampler = VLLMServer(url=url, sync_every=4, patience=1.0)
        killed = trainer_of(sampler, tmp_path / "run", [KillAt(url, 6)])
        with pytest.raises(
            EngineError, match=r"(?s)no answer from a vLLM server .*Start one.*after 6 updates is saved"
        ):
            killed.train()
    checkpoint = tmp_path / "run" / "checkpoint-6"
    assert (checkpoint / "trainer_state.json").exists()
    resumed = trainer_of(VLLMServer(url=fp32, sync_every=4), tmp_path / "run")
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert resumed.state.global_step == 12
    for (name, wanted), found in zip(whole.model.named_parameters(), resumed.model.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


def test_two_ranks_train_from_one_server(fp32, tmp_path):
    worker = Path(__file__).with_name("two_ranks.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "29631"]
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [*command, str(worker), fp32, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert ranks[0]["versions"] == ranks[1]["versions"] == [0, 0, 4, 4]
    assert ranks[0]["completions"] != ranks[1]["completions"]  # each has its own prompts and seeds
    assert max(ranks[0]["gap"], ranks[1]["gap"]) < 1e-5
    # The failure that only the main rank met reaches both, rather than one waiting for the other.
    assert all("were replaced by somebody else" in rank["error"] for rank in ranks)


def test_the_asynchronous_trainer_samples_from_the_server(fp32, folders, tmp_path):
    from offcorr.trl.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
    from offcorr.trl.local_worker import VLLMWorker

    args = AsyncGRPOConfig(
        str(tmp_path),
        loss_type="minpro",
        anchor="snapshot",
        max_steps=6,
        per_device_train_batch_size=16,
        token_budget=0,
        num_generations=4,
        max_completion_length=12,
        max_staleness=4,
        weight_sync_steps=2,
        learning_rate=5e-3,
        log_metrics="full",
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        gradient_checkpointing=False,
    )
    data = Dataset.from_dict({"prompt": PROMPTS * 16})
    model = AutoModelForCausalLM.from_pretrained(folders["tied"])
    worker = VLLMWorker(model, tokenizer(), data, reward, args, url=fp32)
    trainer = AsyncGRPOTrainer(
        model=str(folders["tied"]),
        reward_funcs=reward,
        args=args,
        train_dataset=data,
        processing_class=tokenizer(),
        rollout_worker=worker,
        weight_transfer=worker,
    )
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "offcorr/staleness/lag" in entry]
    assert len(logs) == 6
    assert max(entry["offcorr/engine/abs_mean"] for entry in logs) < 1e-5  # old_logp is of the version that sampled
    assert max(entry["offcorr/staleness/abs_mean"] for entry in logs) > 1e-4
    assert 0 < max(entry["offcorr/staleness/lag_max"] for entry in logs) <= 4


# -- TRL's own vLLM paths


@pytest.mark.parametrize("mode", ["colocate", "server"])
def test_trls_own_vllm_paths_with_our_trainer(mode, vllm_python, folders, tmp_path, request):
    script, root = Path(__file__).with_name("trl_vllm.py"), str(Path(__file__).parents[2])
    url = [request.getfixturevalue("bf16")] if mode == "server" else []
    command = [str(vllm_python), str(script), str(folders["own"]), str(tmp_path), *url]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": root}, capture_output=True, text=True, timeout=900, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "vLLM importance sampling correction, which is switched off" in done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert not found["trl_corrects"]  # no mismatch is corrected twice
    assert found["syncs"] == 2  # one for each generation
    logs = [entry for entry in found["logs"] if "offcorr/engine/abs_mean" in entry]
    assert len(logs) == 8
    # The engine's gap is bf16's (colocate mode turns an fp32 checkpoint into bf16), and steady; staleness is 0 at the
    # first of the four updates on a generation, and grows.
    assert all(1e-4 < entry["offcorr/engine/abs_mean"] < 0.05 for entry in logs)
    staleness = [entry["offcorr/staleness/abs_mean"] for entry in logs]
    assert staleness[0] < 1e-6
    assert staleness[4] < 1e-6
    assert staleness[3] > staleness[1] > 1e-5
    assert found["anchor"] == "Recomputed"
    assert not any("sampling/importance_sampling_ratio" in name for entry in logs for name in entry)


def test_replay_demonstrations_and_prefixes_around_the_server(fp32, tmp_path):
    """The server continues a prefix with the trainer's log-probs, and every origin trains."""
    traces = Traces([{"prompt": p, "completion": "abc123", "logp": [-1.0] * 7} for p in PROMPTS[:2]], tokenizer())
    inner = Recording(url=fp32, sync_every=4)
    shown = Demonstrations(Prefixes(inner, traces, share=0.5), traces)
    trainer = trainer_of(Replay(shown, share=0.5), tmp_path, log_metrics="full")
    trainer.train()
    given = 0
    for out in inner.sampled:
        for ids, mask, reported, own in zip(*(out[name] for name in KEYS), strict=True):
            known = [i for i, one in enumerate(mask) if one]
            given += len(mask) - len(known)
            assert tokenizer().decode(ids[: known[0]]) == "abc123"[: known[0]]
            assert gap([[reported[i] for i in known]], [[own[i] for i in known]]).max() < 1e-4
    assert given > 20
    logged = {name for entry in trainer.state.log_history for name in entry}
    assert {f"offcorr/origin/{origin}/share" for origin in ORIGINS} <= logged
