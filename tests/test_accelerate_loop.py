"""recipes/accelerate_loop.py: one update is the same however it is laid out and split; runs end above their start.

As a script, started by torchrun, this file is one of two processes that share an update.
"""

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
from test_recipes import assert_improved
from transformers import AttentionInterface, Qwen3Config, Qwen3ForCausalLM
from transformers.masking_utils import AttentionMaskInterface

import offcorr
from offcorr import embedded

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "recipes"))
import accelerate_loop as loop  # noqa: E402

# Token-mean; mean over sequences; looks at the whole update before its first step; looks at whole groups of it.
METHODS = ("minpro", "gspo", "m2po", "asymre")


def tiny_model():
    config = Qwen3Config(
        vocab_size=23,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    loop.answer_with_log_probs(model, temperature=0.9)
    return model


def some_samples(n=8):
    """Of very different lengths, and with log-probs some way off."""
    generator = torch.Generator().manual_seed(3)

    def draw(low, high):
        return int(torch.randint(low, high, (), generator=generator))

    samples = []
    for i in range(n):
        prompt, length = draw(1, 6), draw(1, 12)
        ids = torch.randint(0, 23, (prompt + length,), generator=generator).tolist()
        old = (-3 + torch.randn(length, generator=generator)).tolist()
        rollout = [x + 0.1 * float(torch.randn((), generator=generator)) for x in old]
        samples.append(loop.Sample(ids, prompt, rollout, old, (-1.0) ** i * (1 + i / 3), float(i % 2), i // 4, 0))
    return samples


def one_process(accumulation=1):
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    return Accelerator(cpu=True, gradient_accumulation_steps=accumulation)


def updated_weights(accelerator, method, packed=True):
    """After one update on this process's part of the samples, and what was measured."""
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer = accelerator.prepare(model, optimizer)
    mine = some_samples()[accelerator.process_index :: accelerator.num_processes]
    window = [loop.lay_out(micro, packed, "cpu") for micro in loop.split(mine, accelerator.gradient_accumulation_steps)]
    seen = loop.update(accelerator, model, optimizer, offcorr.get(method), window, max_grad_norm=1e9)
    merged = seen.all_reduce(lambda vector: accelerator.gather(vector[None])).compute()
    weights = {name: p.detach().clone() for name, p in accelerator.unwrap_model(model).named_parameters()}
    return weights, merged


def assert_same(found, wanted):
    before = tiny_model().state_dict()
    assert max(float((wanted[name] - before[name]).abs().max()) for name in wanted) > 1e-3  # it did step
    for name, weight in wanted.items():
        torch.testing.assert_close(found[name], weight, atol=2e-6, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def test_log_probs_are_the_models_own():
    """Packed rows see nothing of their neighbours: the log-probs of each sequence alone."""
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
    """What a variable-length kernel does with what it is given, one sequence after another; it sees no positions."""
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
    """The keywords of flash_attention_2 are enough: an attention with nothing else gives the same log-probs."""
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
    """Micro-batches hold different numbers of tokens; the mean is over all of them."""
    whole, measured = updated_weights(one_process(), method)
    split, measured_split = updated_weights(one_process(accumulation), method)
    assert_same(split, whole)
    assert measured == pytest.approx(measured_split, rel=1e-4, abs=1e-5)


@pytest.mark.slow
def test_processes_change_nothing(tmp_path):
    """Two processes of two micro-batches each, against one process with everything."""
    launch([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"], __file__, [str(tmp_path)])
    for method in METHODS:
        whole, _ = updated_weights(one_process(), method)
        assert_same(torch.load(tmp_path / f"{method}.pt"), whole)


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


def train(folder, config, *flags):
    """`accelerate launch recipes/accelerate_loop.py`; the logged history."""
    embedded.model_path(progress=False)
    launcher = [sys.executable, "-m", "accelerate.commands.launch"]
    launcher += ["--config_file", str(ROOT / "recipes" / "accelerate" / f"{config}.yaml")]
    said = launch(launcher, ROOT / "recipes" / "accelerate_loop.py", ["--output_dir", str(folder), *flags])
    assert "held-out sampled accuracy, end" in said
    assert (folder / "history.png").stat().st_size > 10_000
    assert (folder / "model" / "config.json").exists()
    return json.loads((folder / "history.json").read_text())


@pytest.mark.slow
def test_one_process(tmp_path):
    """A stale, quantised sampler, a corrected loss and a learning rate that follows the effective sample size."""
    flags = ("--loss", "minpro", "--lag", "4", "--precision", "int8", "--ess_lr", "sqrt")
    history = train(tmp_path, "one_process", *flags, "--generations", "4", "--eval_every", "4", "--use_cpu")
    assert_improved(history)
    trained = [entry for entry in history if "reward" in entry]
    assert [entry["step"] for entry in trained] == [4, 8, 12, 16]
    assert all(entry["offcorr/engine/abs_mean"] > 1e-4 for entry in trained)
    assert all(0 < entry["lr_scale"] < 1 for entry in trained)


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
    """Gradients, optimizer state and weights split over two processes: the numbers of the run that splits nothing."""
    history = train(tmp_path, config, *DISTRIBUTED)
    assert_improved(history)
    for found, wanted in zip(history, two_plain_processes, strict=True):
        for name in {"reward", "eval_reward", "offcorr/staleness/abs_mean"} & wanted.keys():
            assert found[name] == pytest.approx(wanted[name], rel=0.02, abs=0.03), (name, found["step"])


if __name__ == "__main__":
    process = Accelerator(cpu=True, gradient_accumulation_steps=2)
    for name in METHODS:
        shared, _ = updated_weights(process, name)
        if process.is_main_process:
            torch.save(shared, Path(sys.argv[1]) / f"{name}.pt")
    process.wait_for_everyone()
    process.end_training()
