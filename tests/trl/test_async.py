"""Corrections on the packed rows of TRL's asynchronous trainer, by its own reader, batcher, collator and trainer."""

import copy
import dataclasses
import math
import queue
import warnings
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
import trl
from packaging.version import Version

if Version(trl.__version__) < Version("1.16"):
    pytest.skip("this TRL has no asynchronous trainer on packed rows", allow_module_level=True)

from transformers import AttentionInterface, AutoModelForCausalLM, HfArgumentParser, TrainerCallback
from trl.experimental.async_grpo.async_grpo_trainer import (
    AsyncRolloutWorker,
    FixedCountBatcher,
    RolloutQueueDataset,
    RolloutSample,
)
from trl.experimental.async_grpo.packing import TREE_ATTENTION, register_tree_attention

import offcorr
from offcorr import Batch, toy
from offcorr.diagnose import read
from offcorr.toy.warm_start import build_tokenizer, save_tokenizer
from offcorr.trl.async_grpo import (
    AsyncGRPOConfig,
    AsyncGRPOTrainer,
    ColumnCollator,
    ColumnQueue,
    CorrectedSample,
    dense_tree_attention,
    packed_batch,
)
from offcorr.trl.local_worker import LocalWorker
from tests.recipes.test_recipes import assert_improved, launch
from tests.tiny import qwen3

ROOT = Path(__file__).resolve().parents[2]
TREE = ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")


def tiny_model(attention="sdpa"):
    register_tree_attention()
    AttentionInterface.register(TREE_ATTENTION, dense_tree_attention)
    tokenizer = build_tokenizer()
    return qwen3(
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        attn_implementation=attention,
    )


def some_samples(seed=0, old_logp=True, version=3):
    """Three prompts of two completions: shared beginnings, tool answers in between, one with nothing to train on."""
    generator = np.random.default_rng(seed)
    samples = []
    for group in range(3):
        prompt = generator.integers(3, 20, size=2 + group).tolist()
        for place in range(2):
            length = int(generator.integers(4, 9))
            ids = [*prompt, *generator.integers(3, 20, size=length).tolist()]
            mask = np.array([0] * len(prompt) + [1] * length)
            if place:
                mask[len(prompt) + 1 : len(prompt) + 3] = 0  # a tool spoke
            if (group, place) == (1, 0):
                mask[:] = 0
            fields = {
                "prompt": [],
                "completion": [],
                "input_ids": np.array(ids),
                "completion_mask": mask,
                "old_log_probs": (-2 + 0.5 * generator.normal(size=len(ids))).astype(np.float32) * mask,
                "advantage": float(generator.normal()),
                "model_version": version - group,
                "group_id": 10 + group,
                "metrics": {"reward": float(place)},
            }
            own = (fields["old_log_probs"] + 0.1 * generator.normal(size=len(ids)).astype(np.float32)) * mask
            samples.append(CorrectedSample(**fields, old_logp=own) if old_logp else RolloutSample(**fields))
    return samples


def through_trl(samples, processes=1):
    """The inputs of compute_loss on each rank, through reader, batcher and collator."""
    buffer = queue.Queue()
    for sample in samples:
        buffer.put(sample)
    reader = RolloutQueueDataset(ColumnQueue(buffer), lambda: 3, lambda s: None, 60.0, metrics=defaultdict(list))
    rows = next(iter(FixedCountBatcher(reader, processes, len(samples))))
    collator = ColumnCollator(0, processes, metrics=defaultdict(list))
    batch = collator([rows])
    return [{name: value[rank : rank + 1] for name, value in batch.items()} for rank in range(processes)], rows


def packed_logp(model, inputs):
    """As TRL's compute_loss: the row without padding, the trie's paths as keywords; [N] of each position's target."""
    real = inputs["attention_mask"].bool()
    tree = {name: inputs[name][inputs[name] >= 0] for name in TREE}
    tree |= dict(zip(("tree_max_seqlen_q", "tree_max_seqlen_k"), inputs["tree_max_seqlens"][0].tolist(), strict=True))
    ids, positions, labels = (inputs[name][real][None] for name in ("input_ids", "position_ids", "shift_labels"))
    logits = model(input_ids=ids, position_ids=positions, use_cache=False, **tree).logits
    return logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None]).flatten()


def padded_reference(model, samples):
    """The same samples, each alone through the model, as a padded batch with the tools' tokens masked."""
    width = max(len(sample["input_ids"]) for sample in samples)

    def row(values, fill=0.0):
        values = torch.as_tensor(values)
        return torch.nn.functional.pad(values, (0, width - len(values)), value=fill)

    logps = []
    for sample in samples:
        ids = torch.tensor(sample["input_ids"])[None]
        logp = model(input_ids=ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[0, :, 0]
        logps.append(row(torch.nn.functional.pad(logp, (1, 0))))
    return torch.stack(logps), row


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("method", ["minpro", "gspo", "turn_ppo", "topr", "m2po", "vcpo", "icepop"])
def test_a_packed_row_is_the_padded_batch(processes, method):
    """Loss, gradient of the model and metrics on TRL's trie are those of every sample alone."""
    samples = some_samples()
    ranks, rows = through_trl(samples, processes)
    by_ids = {tuple(sample.input_ids): sample for sample in samples}
    tree, plain = tiny_model(TREE_ATTENTION), tiny_model()
    loss_fn = offcorr.get(method)
    seen = 0
    for inputs, trl_row in zip(ranks, rows, strict=True):
        packed = packed_batch(inputs, packed_logp(tree, inputs), version=3)
        logp, row = padded_reference(plain, trl_row.samples)
        sent = [by_ids[tuple(sample["input_ids"])] for sample in trl_row.samples]
        padded = Batch(
            logp=logp,
            mask=torch.stack([row(s.completion_mask) for s in sent]).bool(),
            advantages=torch.tensor([s.advantage for s in sent]),
            rollout_logp=torch.stack([row(s.old_log_probs) for s in sent]),
            old_logp=torch.stack([row(s.old_logp) for s in sent]).float(),
            rewards=torch.tensor([s.metrics["reward"] for s in sent]),
            group_ids=torch.tensor([s.group_id for s in sent]),
            rollout_version=torch.stack([torch.full_like(row(s.completion_mask), s.model_version) for s in sent]),
            trainer_version=3,
        )
        found, wanted = loss_fn(packed, denominator=20.0), loss_fn(padded, denominator=20.0)
        torch.testing.assert_close(found.loss, wanted.loss)
        gradients = torch.autograd.grad(found.loss, list(tree.parameters()))
        for got, exact in zip(gradients, torch.autograd.grad(wanted.loss, list(plain.parameters())), strict=True):
            torch.testing.assert_close(got, exact, atol=1e-6, rtol=1e-4)
        assert found.metrics.compute() == pytest.approx(wanted.metrics.compute(), rel=1e-4, abs=1e-6)
        lengths = packed.cu_seqlens.diff()
        present = lengths > 0  # bincount leaves out trailing samples without terms
        assert packed.group_ids[present].tolist() == padded.group_ids[: len(present)][present].tolist()
        assert packed.rollout_version.tolist() == padded.rollout_version[padded.mask].tolist()
        seen += len(trl_row.samples)
    assert seen == 6 and all(float(inputs["global_n_sequences"][0]) == 6 for inputs in ranks)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda s: {"old_logp": s.old_logp[1:]},
            r"CorrectedSample has old_logp of shape \(.*\), expected .*one number",
        ),
        (lambda s: {"old_logp": -1.0}, r"CorrectedSample has old_logp of shape \(\), expected \("),
        (lambda s: {"old_log_probs": s.old_log_probs[1:]}, r"has old_log_probs of shape .*token of input_ids"),
        (lambda s: {"completion_mask": s.completion_mask[:-1]}, "has completion_mask of shape"),
    ],
)
def test_every_token_of_a_sample_has_its_number(change, message):
    good, *_ = some_samples()
    buffer = queue.Queue()
    listed = dataclasses.replace(good, old_logp=good.old_logp.tolist())
    for sample in (good, listed, dataclasses.replace(good, **change(good))):
        buffer.put(sample)
    columns = ColumnQueue(buffer)
    first, second = (columns.get().metrics["offcorr"]["old_logp"] for _ in range(2))
    assert np.array_equal(first, second) and np.array_equal(first, good.old_logp)
    with pytest.raises(ValueError, match=message):
        columns.get()


def test_the_trie_shares_what_samples_share():
    """The reference above is worth something only if tokens are shared."""
    (inputs,), rows = through_trl(some_samples())
    assert int(inputs["attention_mask"].sum()) < sum(len(sample["input_ids"]) for sample in rows[0].samples)


def test_a_sliding_window_sees_its_width():
    """Dense tree attention on one chain against a mask written by hand."""
    query, key, value = torch.randn(3, 1, 2, 6, 4, generator=torch.Generator().manual_seed(0))
    chain = {
        "tree_kv_index": torch.arange(6),
        "tree_cu_seqlens_q": torch.tensor([0, 6]),
        "tree_cu_seqlens_k": torch.tensor([0, 6]),
    }
    found, _ = dense_tree_attention(None, query, key, value, None, sliding_window=2, scaling=0.5, **chain)
    scores = 0.5 * query @ key.transpose(-1, -2)
    place = torch.arange(6)
    distance = place[:, None] - place
    scores = scores.masked_fill((distance < 0) | (distance >= 2), -torch.inf)
    torch.testing.assert_close(found.transpose(1, 2), scores.softmax(-1) @ value)
    with pytest.raises(ValueError, match="softcap"):
        dense_tree_attention(None, query, key, value, None, softcap=30.0, **chain)


# -- the trainer ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    tiny_model().save_pretrained(path)
    save_tokenizer(path)
    return path


def trainer_of(folder, tmp_path, worker=None, reward=toy.reward, loss=None, cls=AsyncGRPOTrainer, **options):
    settings = {
        "learning_rate": 1e-3,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 6,
        "token_budget": 0,
        "max_steps": 3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "bf16": False,
        "use_cpu": True,
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "log_metrics": "full",
    }
    args = AsyncGRPOConfig(str(tmp_path), **settings | options)
    data = toy.dataset(16, split="train")
    worker = worker or LocalWorker(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), build_tokenizer(), data, reward, args
    )
    return cls(
        str(folder),
        reward_funcs=reward,
        args=args,
        train_dataset=data,
        rollout_worker=worker,
        weight_transfer=worker,
        loss=loss,
    )


def gradients(trainer, micro_batches):
    """Summed over one optimizer step's micro-batches."""
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = len(micro_batches)
    trainer._window = micro_batches
    trainer.model.zero_grad()
    for inputs in micro_batches:
        trainer.compute_loss(trainer.model, inputs).backward()
    return {name: p.grad.clone() for name, p in trainer.model.named_parameters()}


def assert_close(found, wanted):
    assert max(float(gradient.abs().max()) for gradient in wanted.values()) > 1e-4
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-6, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def test_trls_own_loss_is_ppo_against_the_engine(folder, tmp_path):
    """TRL's clipped ratio, by its own code and as a correction with the engine's log-probs as anchor."""
    (inputs,), _ = through_trl(some_samples(old_logp=False))
    clipped = offcorr.get("ppo", eps_low=0.2, eps_high=0.2, aggregate="token-mean")
    theirs = trainer_of(folder, tmp_path, epsilon=0.2)
    ours = trainer_of(folder, tmp_path, loss=clipped, anchor="rollout")
    assert_close(gradients(ours, [inputs]), gradients(theirs, [inputs]))
    assert "offcorr/staleness/abs_mean" in ours.correction_step.metrics()
    for name in ("ratio", "kl", "clip_ratio/region_mean", "entropy"):
        assert ours._metrics["train"][name] == pytest.approx(theirs._metrics["train"][name])
    assert ours._step_samples == theirs._step_samples == 6


@pytest.mark.filterwarnings("ignore:'asymre' compares")
@pytest.mark.parametrize(
    "method", ["minpro", "gspo", "m2po", "asymre", "icepop?low=0.97&high=1.03&count_rejected=False"]
)
def test_micro_batches_change_nothing(folder, tmp_path, method):
    """A step in one micro-batch and in two of different sizes."""
    samples = some_samples()
    trainer = trainer_of(folder, tmp_path, loss_type=method)
    (whole,), _ = through_trl(samples)
    parts = [through_trl(part)[0][0] for part in (samples[:2], samples[2:])]
    assert_close(gradients(trainer, parts), gradients(trainer, [whole]))


def test_training_with_a_sampler_thread(folder, tmp_path, caplog):
    """The whole of it, three steps of two micro-batches: a correction that looks ahead at the step's batch."""

    def variety(completions, **kwargs):
        return [float(len(set(text))) for text in completions]

    options = {"loss_type": "m2po", "gradient_accumulation_steps": 2, "max_staleness": 2}
    trainer = trainer_of(folder, tmp_path, reward=variety, **options)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "offcorr/staleness/lag_max" in entry]
    assert len(logged) == 3 and all(entry["offcorr/staleness/lag_max"] <= 2 for entry in logged)
    assert all(entry["offcorr/engine/abs_mean"] < 1e-5 for entry in logged)  # same weights, same precision
    assert any(not torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())
    assert trainer.trainer_version == trainer.model_version == 4  # the first sync, and one a step
    (said,) = [record.getMessage() for record in caplog.records if record.name == "offcorr"]
    assert said.startswith("offcorr: loss 'm2po'; old_logp: the weights that sampled, as the sampler supplied it")
    assert "engine log-probs: yes; sampled by LocalWorker; " in said and repr(trainer.anchor) == "Supplied()"


class Preloaded:
    """A worker whose samples were all made long ago, by the first weights."""

    def __init__(self, samples):
        self.rollout_buffer, self.metrics_queue = queue.Queue(), queue.Queue()
        for sample in samples:
            self.rollout_buffer.put(sample)

    def check_health(self, stale_after_s):
        raise TimeoutError("nothing fresh enough")

    def send_weights(self, iterator):
        list(iterator)

    def nothing(self, *args):
        pass

    start = stop = update_model_version = init_weight_transfer = pause = resume = destroy = nothing


@pytest.mark.parametrize("max_staleness", [1, 2])
def test_a_sample_too_old_is_not_trained_on(folder, tmp_path, max_staleness):
    """Lag 0, 1 ... max_staleness where they are trained on, though they are read a step before; the rest is dropped."""
    old = [dataclasses.replace(s, model_version=1) for seed in range(12) for s in some_samples(seed)]
    fresh = [dataclasses.replace(s, model_version=99) for seed in range(3) for s in some_samples(seed)]
    options = {"loss_type": "ppo", "max_staleness": max_staleness, "per_device_train_batch_size": 6}
    trainer = trainer_of(folder, tmp_path, Preloaded(old + fresh), max_steps=max_staleness + 2, **options)
    trainer.train()
    assert logged(trainer, "offcorr/staleness/lag_max") == [*range(max_staleness + 1), 0]
    assert sum(logged(trainer, "sample/dropped_stale_total")) == len(old) - 6 * (max_staleness + 1)


def test_what_the_worker_raises_reaches_the_trainer(folder, tmp_path):
    def broken(**kwargs):
        raise ZeroDivisionError("no reward")

    trainer = trainer_of(folder, tmp_path, reward=broken, loss_type="ppo")
    ended = "the rollout worker's thread has ended: reward function broken raised ZeroDivisionError: no reward"
    with pytest.raises(RuntimeError, match=ended) as caught:
        trainer.train()
    assert isinstance(caught.value.__cause__.__cause__, ZeroDivisionError)


def test_another_number_of_rewards_reaches_the_trainer(folder, tmp_path):
    def short(completions, **kwargs):
        return [1.0]

    trainer = trainer_of(folder, tmp_path, reward=short, loss_type="ppo")
    with pytest.raises(RuntimeError, match=r"reward function short returned 1 rewards, expected a list of \d+ numbers"):
        trainer.train()


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        (math.inf, "reward function odd_one returned an infinite reward"),
        (None, "a completion has no reward: every reward function returned None or NaN for it"),
    ],
)
def test_a_reward_that_is_no_number_is_said_once(folder, tmp_path, odd, said):
    """The rest of the prompts is trained on."""

    def odd_one(completions, **kwargs):
        return [odd if i == 0 else float(len(text) % 3) for i, text in enumerate(completions)]

    trainer = trainer_of(folder, tmp_path, reward=odd_one, loss_type="ppo", max_steps=3)
    with pytest.warns(UserWarning, match=said) as caught:
        trainer.train()
    assert len([1 for w in caught if said in str(w.message)]) == 1
    assert all(math.isfinite(loss) for loss in logged(trainer, "loss"))


def test_rewards_of_trls_worker_are_named_by_function():
    sample = dataclasses.replace(some_samples()[0], advantage=math.nan)
    sample.metrics = {"reward": math.inf, "rewards/length": 1.0, "rewards/score": math.inf}
    buffer, said = queue.Queue(), []
    buffer.put(sample)
    assert ColumnQueue(buffer, said.append).get().advantage == 0.0
    assert [text[:50] for text in said] == ["reward function score returned an infinite reward:"]


@pytest.mark.parametrize(
    ("old_logp", "options", "cure"),
    [
        (True, {"loss_type": "ppo"}, "take anchor='snapshot', which uses those that Preloaded supplies"),
        (False, {"loss_type": "ppo"}, "take anchor='rollout', which uses those that Preloaded reports"),
        (False, {"loss_type": "ppo", "loss_kwargs": {"weight": {"name": "truncate", "cap": 2.0}}}, "sample with a wor"),
    ],
)
def test_an_anchor_that_does_nothing_is_said(folder, tmp_path, old_logp, options, cure):
    samples = [one for seed in range(8) for one in some_samples(seed, old_logp, version=0)]
    settings = {"anchor": "recomputed", "max_steps": 1, "max_staleness": 9, "per_device_train_batch_size": 6}
    trainer = trainer_of(folder, tmp_path, Preloaded(samples), **settings, **options)
    with pytest.warns(UserWarning, match="every staleness ratio of 'ppo' will be 1, .* each sample is used") as caught:
        trainer.train()
    (said,) = [str(w.message) for w in caught if "every staleness ratio" in str(w.message)]
    assert "Where the sampler has the current weights, this is as it should be" in said
    assert f"For a sampler that lags, {cure}" in said


def test_a_worker_with_a_configuration_of_its_own_is_refused(folder, tmp_path):
    """TRL sets in the trainer's configuration how far a worker may run ahead; another's stays -1."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    other = AsyncGRPOConfig(str(tmp_path), bf16=False, use_cpu=True)
    worker = LocalWorker(model, build_tokenizer(), toy.dataset(16, split="train"), toy.reward, other)
    trainer = trainer_of(folder, tmp_path, worker, loss_type="ppo")
    with pytest.raises(ValueError, match="max_inflight_tasks is -1, .* give the worker that same object"):
        trainer.train()


def test_refused_before_the_model_is_loaded(tmp_path):
    def config(**options):
        return AsyncGRPOConfig(str(tmp_path), bf16=False, use_cpu=True, **options)

    nowhere = str(tmp_path / "no model here")
    with pytest.raises(ValueError, match="loss_kwargs=.* goes with a correction"):
        config(loss_kwargs={"eps_high": 0.3})
    with pytest.raises(ValueError, match="anchor is 'yesterday'"):
        config(anchor="yesterday")
    with pytest.raises(ValueError, match="did you mean 'minpro'"):
        AsyncGRPOTrainer(nowhere, args=config(loss_type="minprop"))
    with pytest.warns(UserWarning, match="need not be all"), pytest.raises(OSError):
        AsyncGRPOTrainer(nowhere, args=config(loss_type="asymre"))
    with pytest.raises(ValueError, match="in one of two ways"):
        AsyncGRPOTrainer(nowhere, args=config(loss_type="ppo"), loss=offcorr.get("ppo"))
    with pytest.raises(ValueError, match=r"'tis': the anchor Rollout\(\) puts rollout_logp in the place .* that \w+\("):
        AsyncGRPOTrainer(nowhere, args=config(loss_type="tis", anchor="rollout"))
    with pytest.raises(ValueError, match="anchor 'ewma' needs window"):
        AsyncGRPOTrainer(nowhere, args=config(loss_type="ppo", anchor="ewma"))
    with pytest.raises(ValueError, match="anchor='log_linear' goes with a correction"):
        AsyncGRPOTrainer(nowhere, args=config(anchor="log_linear"))
    with pytest.raises(ValueError, match=r"\['power'\] of 'holderpo' follows the training.* set max_steps"):
        AsyncGRPOTrainer(nowhere, args=config(loss_type="holderpo"))
    with pytest.raises(ValueError, match="is -1.0, expected"):
        AsyncGRPOTrainer(nowhere, args=config(loss_type="tis", loss_kwargs={"cap": {"start": 2.0, "end": -1.0}}))
    with pytest.raises(TypeError, match="loss is a str, expected an offcorr.Correction"):
        AsyncGRPOTrainer(nowhere, args=config(), loss="ppo")
    theirs = object.__new__(AsyncRolloutWorker)
    for worker in ({}, {"rollout_worker": theirs}):
        with pytest.raises(ValueError, match="AsyncRolloutWorker, TRL's own rollout_worker, has none: pass a worker"):
            AsyncGRPOTrainer(nowhere, args=config(loss_type="ppo", anchor="snapshot"), **worker)


def test_the_command_line(tmp_path):
    base = ["--output_dir", str(tmp_path), "--bf16", "false", "--use_cpu", "true", "--loss_type", "ppo"]
    (args,) = HfArgumentParser(AsyncGRPOConfig).parse_args_into_dataclasses(
        [*base, *("--anchor", "ewma", "--anchor_kwargs", '{"window": 16}', "--ess_lr", "sqrt", "--ess_base", "auto")]
    )
    assert (args.anchor, args.anchor_kwargs, args.ess_lr, args.ess_base) == ("ewma", {"window": 16}, "sqrt", "auto")
    assert args.lr_scheduler_type == "constant" and args.learning_rate == 1e-6  # TRL's own defaults stand


def test_a_constant_length_is_the_longest_completion(folder, tmp_path):
    options = {"aggregate": "seq-mean-token-sum-norm"}
    trainer = trainer_of(folder, tmp_path, loss_type="ppo", loss_kwargs=options, max_completion_length=5)
    assert trainer.correction.max_length == 5


# -- anchors, schedules and the learning rate, which the synchronous trainer has too ------------------------------


class Recording(AsyncGRPOTrainer):
    """Keeps what each micro-batch was made of, and the correction it met."""

    def __init__(self, *args, **kwargs):
        self.seen, self.in_force = [], []
        super().__init__(*args, **kwargs)

    def _batch(self, inputs):
        batch = super()._batch(inputs)
        self.seen.append((self.state.global_step, inputs, batch))
        self.in_force.append(self.correction)
        return batch


class Weights(TrainerCallback):
    """Copies of the model before the first optimizer step and after each."""

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.seen = [copy.deepcopy(model.state_dict())]

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.seen.append(copy.deepcopy(model.state_dict()))


class Rates(TrainerCallback):
    """The rates that the optimizer reads inside its steps, from the second on, by a hook after all others."""

    def on_step_begin(self, args, state, control, optimizer=None, **kwargs):
        if state.global_step == 1:
            self.read = []
            optimizer.optimizer.register_step_pre_hook(lambda opt, *_: self.read.append(opt.param_groups[0]["lr"]))


def preloaded(steps, first=0, version=99):
    """Six samples a step, the same at every call."""
    samples = [sample for seed in range(first, steps + 2) for sample in some_samples(seed, old_logp=False)]
    return Preloaded([dataclasses.replace(sample, model_version=version) for sample in samples])


def logged(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def parameters(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


NARROW = {"eps_low": 1e-3, "eps_high": 1e-3}  # what has moved is clipped
EWMA = {"loss_type": "ppo", "loss_kwargs": NARROW, "anchor": "ewma", "per_device_train_batch_size": 6}


@pytest.mark.parametrize("proximal_lag", [0, 1, 2])
def test_log_linear_is_its_formula(folder, tmp_path, proximal_lag):
    options = {"anchor": "log_linear", "anchor_kwargs": {"proximal_lag": proximal_lag}}
    trainer = trainer_of(folder, tmp_path, cls=Recording, loss_type="ppo", **options)
    trainer.trainer_version = 3
    samples = some_samples(old_logp=False)  # sampled by versions 3, 2 and 1
    (inputs,), _ = through_trl(samples)
    gradients(trainer, [inputs])
    ((_, _, batch),) = trainer.seen
    terms = inputs["token_index"] >= 0
    reported, sampled = inputs["old_log_probs"][terms].tolist(), inputs["rollout_version"][terms].tolist()
    alphas = {}
    for term, (rollout, version) in enumerate(zip(reported, sampled, strict=True)):
        behind = 3 - version
        alphas[version] = alpha = max((behind - proximal_lag) / behind, 0) if behind else float(proximal_lag == 0)
        wanted = rollout + alpha * (batch.logp[term].item() - rollout)
        assert batch.old_logp[term].item() == pytest.approx(wanted, abs=1e-6)
    assert [alphas[version] for version in (1, 2, 3)] == {0: [1, 1, 1], 1: [0.5, 0, 0], 2: [0, 0, 0]}[proximal_lag]
    # Of the gap to the engine its ratio is a part: what is logged is all of it.
    measured = trainer.correction_step.metrics()
    gap = (batch.logp.detach() - torch.tensor(reported)).abs().mean().item()
    assert measured["offcorr/staleness/abs_mean"] == pytest.approx(gap, rel=1e-5)
    assert not any(name.startswith("offcorr/engine/") for name in measured)


def test_log_linear_says_what_to_pass(folder, tmp_path):
    trainer = trainer_of(folder, tmp_path, loss_type="ppo", anchor="log_linear")
    (inputs,), _ = through_trl(some_samples())
    del inputs["rollout_version"]
    with pytest.raises(ValueError, match="rollout_version is None.*anchor 'log_linear'.* model_version"):
        gradients(trainer, [inputs])
    trainer = trainer_of(folder, tmp_path, loss_type="ppo", anchor="snapshot")
    (inputs,), _ = through_trl(some_samples(old_logp=False))
    with pytest.raises(ValueError, match="old_logp is None.*anchor 'snapshot'.* CorrectedSample"):
        gradients(trainer, [inputs])


@pytest.mark.parametrize("reset_below", [None, 0.5])
def test_ewma_is_the_one_stepped_by_hand(folder, tmp_path, reset_below):
    """Every step's old_logp, under the mean of the weights so far, with the resets that the active share says."""
    weights, options = Weights(), {"anchor_kwargs": {"window": 4, "reset_below": reset_below}}
    worker = preloaded(4)
    trainer = trainer_of(folder, tmp_path, worker, cls=Recording, max_steps=4, **EWMA | options)
    trainer.add_callback(weights)
    trainer.train()
    assert [step for step, _, _ in trainer.seen] == [0, 1, 2, 3]
    beta, held, shares, resets = 4 / 6, [weights.seen[0]], [], []
    by_hand = tiny_model(TREE_ATTENTION)
    for step, inputs, batch in trainer.seen:
        age = [beta**k for k in reversed(range(len(held)))]
        mean = {
            name: sum(w * past[name].double() for w, past in zip(age, held, strict=True)) / sum(age)
            for name in weights.seen[0]
        }
        by_hand.load_state_dict({name: value.float() for name, value in mean.items()})
        with torch.no_grad():
            wanted = packed_logp(by_hand, inputs)[inputs["token_index"][inputs["token_index"] >= 0]]
        torch.testing.assert_close(batch.old_logp, wanted, atol=2e-5, rtol=1e-5)
        shares.append((trainer.correction(batch).coefficient != 0).double().mean().item())
        moved = weights.seen[step + 1]
        held = [moved] if reset_below and shares[-1] < reset_below else [*held, moved]
        resets.append((resets or [0])[-1] + (len(held) == 1))
    if reset_below:
        assert logged(trainer, "offcorr/anchor/active") == pytest.approx(shares)
        assert logged(trainer, "offcorr/anchor/resets") == resets and 0 < resets[-1] < 4
    staleness = logged(trainer, "offcorr/staleness/abs_mean")
    assert staleness[0] < 1e-6 and staleness[1] > 1e-3


def test_resume_gives_the_same_run(folder, tmp_path):
    """The mean and the options in force, from a checkpoint."""
    settings = EWMA | {"loss_type": "holderpo", "anchor_kwargs": {"window": 4, "reset_below": 0.5}}
    settings |= {"max_steps": 5, "save_strategy": "steps", "save_steps": 3}
    whole = trainer_of(folder, tmp_path / "whole", preloaded(5), **settings)
    whole.train()
    resumed = trainer_of(folder, tmp_path / "again", preloaded(5, first=3), **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert torch.equal(parameters(resumed), parameters(whole))
    for name in ("offcorr/schedule/power", "offcorr/anchor/resets", "offcorr/staleness/abs_mean"):
        assert logged(resumed, name) == logged(whole, name) and len(logged(whole, name)) == 5

    (tmp_path / "whole" / "checkpoint-3" / "offcorr_trainer.pt").unlink()
    anew = trainer_of(folder, tmp_path / "anew", preloaded(5, first=3), **settings)
    with pytest.warns(UserWarning, match=r"the checkpoint .* has no state of EWMA\("):
        anew.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert not torch.equal(parameters(anew), parameters(whole))


def test_options_that_run_over_training(folder, tmp_path):
    """holderpo's own, and those asked for, a weight's too: in force at each step, from first to last."""
    options = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, "max_steps": 3}
    options |= {"loss_type": "holderpo", "cls": Recording}
    own = trainer_of(folder, tmp_path, preloaded(3), **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*but the micro-batches of an optimizer step")  # one has no loss terms
        own.train()
    assert [loss.ratio.power for loss in own.in_force] == pytest.approx([2.0, 2.0, 0.5, 0.5, -1.0, -1.0])
    assert logged(own, "offcorr/schedule/power") == pytest.approx([2.0, 0.5, -1.0])
    cap = {"name": "truncate", "cap": {"start": 3, "end": 1.5}}
    asked = {"power": {"start": 1.0, "end": 4.0}, "weight": [cap]}
    given = trainer_of(folder, tmp_path, preloaded(3), loss_kwargs=asked, **options)
    given.train()
    assert logged(given, "offcorr/schedule/power") == pytest.approx([1.0, 2.5, 4.0])
    assert (given.in_force[-1].ratio.power, given.in_force[-1].weight[0].high) == (4.0, 1.5)
    held = trainer_of(folder, tmp_path, preloaded(3), loss_kwargs={"power": 2.0}, **options)
    held.train()
    assert {loss.ratio.power for loss in held.in_force} == {2.0} and not logged(held, "offcorr/schedule/power")


@pytest.mark.parametrize(("base", "version"), [(1.0, 1), ("auto", 1), ("auto", 0)])
def test_the_rate_follows_the_ess_of_the_step(folder, tmp_path, base, version):
    """Of both micro-batches' trajectories.  Calibrated on what the weights of the moment sampled, or never."""
    options = {"ess_lr": "linear", "ess_base": base, "learning_rate": 1e-2, "max_staleness": 9}
    options |= {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, "loss_type": "ppo"}
    rates = Rates()
    trainer = trainer_of(folder, tmp_path, preloaded(3, version=version), cls=Recording, max_steps=3, **options)
    trainer.add_callback(rates)
    trainer.train()
    ess = []
    for step in range(3):
        sums = []
        for _, _, batch in (entry for entry in trainer.seen if entry[0] == step):
            log_ratio = (batch.logp.detach() - batch.rollout_logp).double()
            sums += [part.sum() for part in log_ratio.split(batch.cu_seqlens.diff().tolist()) if len(part)]
        weight = torch.stack(sums).exp()
        ess.append((weight.sum() ** 2 / (len(weight) * weight.square().sum())).item())
    # The trainer's versions are 1, 2 and 3.
    calibrated = ess[0] if (base, version) == ("auto", 1) else 1.0
    scales = [min(1.0, one / calibrated) for one in ess]
    assert logged(trainer, "lr_scale") == pytest.approx(scales, rel=1e-5) and min(scales) < 0.99
    assert rates.read == pytest.approx([1e-2 * scale for scale in scales[1:]], rel=1e-5)
    assert logged(trainer, "ess_base") == pytest.approx([calibrated] * 3 if base == "auto" else [])


def test_between_weight_syncs_nothing_is_on_policy(folder, tmp_path):
    """The trainer's version is that of the last sync, and its weights are no longer."""
    options = {"ess_lr": "linear", "ess_base": "auto", "weight_sync_steps": 2, "per_device_train_batch_size": 6}
    trainer = trainer_of(folder, tmp_path, preloaded(2, version=1), max_steps=2, loss_type="ppo", **options)
    trainer.train()
    first, second = logged(trainer, "ess_base")
    assert first == second < 1 and logged(trainer, "lr_scale")[0] == 1.0


# -- the recipe ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_recipe(tmp_path):
    """Sampling and training at the same time, int8 against fp32, one update of lag at most; to the end, and better."""
    toy.model_path(progress=False)
    flags = "--loss_type minpro --precision int8 --max_staleness 1 --use_cpu true"
    history = launch(tmp_path, *flags.split(), recipe="async_grpo.py", steps=16)
    assert_improved(history)
    lags = [entry["offcorr/staleness/lag_max"] for entry in history if "offcorr/staleness/lag_max" in entry]
    assert max(lags) == 1
    assert all(entry["offcorr/engine/abs_mean"] > 1e-4 for entry in history if "offcorr/engine/abs_mean" in entry)


@pytest.mark.filterwarnings("ignore:step", "ignore:in the first batch")
def test_the_monitor_of_packed_rows(folder, tmp_path):
    """Log-probs drawn at random are an alarm after ``persistence`` steps; its records are the workers' samples."""
    monitor = {"self_test": "warn", "persistence": 2, "warning": "dump", "critical": ["dump", "stop"]}
    settings = {"per_device_train_batch_size": 6, "loss_type": "ppo", "monitor": monitor, "max_steps": 4}
    trainer = trainer_of(folder, tmp_path, preloaded(4), **settings)
    trainer.train()
    assert trainer.state.global_step == 2 and (tmp_path / "checkpoint-2").is_dir()
    (alarm,) = trainer.correction_step.monitor.alarms
    assert alarm.series == "staleness"  # the engine's log-probs are the anchor
    assert (alarm.step, alarm.severity) == (2, "critical") and alarm.dump.parent == tmp_path / "mismatch"
    records = list(read([alarm.dump], warn=lambda text: None))
    trained = {1: [], 2: []}
    for seed in (0, 1):
        for sample in some_samples(seed):
            if sample.completion_mask.any():
                last = int(sample.completion_mask.nonzero()[0][-1])
                trained[seed + 1].append(sample.input_ids[: last + 1].tolist())
    for step, wanted in trained.items():
        found = [[*r.prompt_ids.tolist(), *r.completion_ids.tolist()] for r in records if r.step == step]
        assert sorted(found) == sorted(wanted)
