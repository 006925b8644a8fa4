"""This library's log-prob head in TRL's forward: the same numbers, used where it should be."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM

from offcorr.trl import GRPOConfig
from offcorr.trl import lm_head as heads

CPU = torch.device("cpu")
needs_the_function = pytest.mark.skipif(
    not heads.SUPPORTED, reason="TRL before 1.16 makes log-probs of whole logits: there is no function to replace"
)


def answers(folder, choice, labels, autocast=False, **options):
    """(log-probs, entropy, log sum of squares, every gradient) by TRL's forward with one of the heads."""
    from trl.trainer.utils import add_fused_lm_head

    model = AutoModelForCausalLM.from_pretrained(folder)
    add_fused_lm_head(model, outputs=("log_probs", "entropy", "log_sum_sq_probs"), **options)
    with heads.lm_head(choice, CPU), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = model(input_ids=labels.clamp(min=0), labels=labels, fused_lm_head=True)
    (out.log_probs.sum() + 0.3 * out.entropy.square().sum()).backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return out.log_probs, out.entropy, out.log_sum_sq_probs, gradients


@needs_the_function
@pytest.mark.parametrize("masked", ["some", "all"])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "cast_lm_head_to_fp32": True}], ids=["plain", "options"])
def test_the_same_numbers(model_folder, options, masked):
    draw = torch.Generator().manual_seed(0)
    labels = torch.randint(2, 23, (3, 11), generator=draw)
    labels[:, : 11 if masked == "all" else 4] = -100
    theirs = answers(model_folder, "trl", labels, **options)
    for choice in ("offcorr", "exact"):
        torch.testing.assert_close(answers(model_folder, choice, labels, **options), theirs, rtol=1e-5, atol=1e-5)


@needs_the_function
def test_the_same_numbers_under_autocast(model_folder):
    labels = torch.randint(2, 23, (3, 11), generator=torch.Generator().manual_seed(0))
    ours, theirs = (answers(model_folder, choice, labels, autocast=True) for choice in ("offcorr", "trl"))
    torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.05)  # bfloat16: TRL rounds the logits too


@needs_the_function
def test_a_head_in_another_precision():
    """Kept in float32 over a bfloat16 model, say: TRL's function takes it in the hidden states' precision."""
    from trl.trainer.utils import _ChunkedLogProbFunction

    draw = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(shape, generator=draw) for shape in ((9, 8), (70, 8), (70,)))
    targets = torch.randint(70, (9,), generator=draw)
    results = []
    for function in (heads.LinearLogProb, _ChunkedLogProbFunction):
        leaves = [x.clone().requires_grad_() for x in ((hidden / 4).bfloat16(), weight, bias)]
        logp, entropy, *_ = function.apply(*leaves, targets, 0.9, 32, None, 1.0, ("log_probs", "entropy"))
        results.append([logp, entropy, *torch.autograd.grad((logp + entropy).sum(), leaves)])
    for ours, theirs in zip(*results, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=0.03, atol=0.03)  # TRL rounds the logits too


@needs_the_function
@pytest.mark.parametrize(("choice", "used"), [("auto", True), ("offcorr", True), ("trl", False)])
def test_the_choice(make_trainer, replay, monkeypatch, choice, used):
    calls = []
    own = heads.LinearLogProb.apply
    monkeypatch.setattr(heads.LinearLogProb, "apply", staticmethod(lambda *given: calls.append(1) or own(*given)))
    make_trainer(rollout_func=replay("old_logp"), logprob_head=choice, loss_type="ppo", max_steps=1).train()
    assert bool(calls) == used
    calls.clear()
    make_trainer(rollout_func=replay("old_logp"), logprob_head=choice, loss_type="dapo", max_steps=1).train()
    assert bool(calls) == (choice == "offcorr")  # TRL's own loss keeps TRL's head unless told otherwise
    from trl.trainer import utils

    assert utils._ChunkedLogProbFunction is not heads.LinearLogProb  # put back


@needs_the_function
@pytest.mark.parametrize("choice, precision", [("offcorr", "fp32"), ("exact", "fp32"), ("exact", "bf16")])
def test_the_samplers_log_probs_to_the_last_bit(make_trainer, choice, precision):
    """Under the weights that sampled; prompts of different lengths, sampled with a KV cache."""
    from offcorr import exact
    from offcorr.rollout import OffPolicy

    trainer = make_trainer(
        rollout_func=OffPolicy(precision=precision),
        logprob_head=choice,
        loss_type="ppo",
        max_steps=1,
        log_metrics="full",
        temperature=0.8,
        model_init_kwargs={"dtype": "float32" if precision == "fp32" else "bfloat16"},
        per_device_train_batch_size=16,
    )
    prompts = [f"{'1+' * (i % 4)}{i}=" for i in range(8)]
    trainer.train_dataset = Dataset.from_dict({"prompt": prompts})
    assert next(trainer.model.parameters()).dtype == (torch.float32 if precision == "fp32" else torch.bfloat16)
    with exact.batch_invariant():
        trainer.train()
    name = "offcorr/engine/abs_max"
    largest = [entry[name] for entry in trainer.state.log_history if name in entry]
    assert len(largest) == 1 and (largest[0] == 0) == (choice == "exact")


def test_exact_takes_no_images(model_folder):
    model = heads.counting_real_tokens(AutoModelForCausalLM.from_pretrained(model_folder))
    ids = torch.ones(1, 3, dtype=torch.long)
    with pytest.raises(ValueError, match="text alone, but the batch has pixel_values"):
        model(input_ids=ids, attention_mask=ids, pixel_values=ids)


def test_auto_leaves_what_was_not_measured_to_trl():
    from contextlib import nullcontext

    assert isinstance(heads.lm_head("auto", torch.device("cuda")), nullcontext)
    assert isinstance(heads.lm_head("auto", CPU), nullcontext) == (not heads.SUPPORTED)


def test_refusals(monkeypatch):
    with pytest.raises(ValueError, match="logprob_head is 'ours', expected one of"):
        GRPOConfig("out", logprob_head="ours", bf16=False, report_to=[])
    monkeypatch.setattr("offcorr.trl.config.SUPPORTED", False)
    with pytest.raises(ValueError, match="this TRL does not have"):
        GRPOConfig("out", logprob_head="offcorr", bf16=False, report_to=[])
