"""Runs six steps of a small language model under ESSLearningRate; each rank writes the rates that its optimizer read.

torchrun --nproc-per-node 2 ess_worker.py BACKEND FOLDER        BACKEND: ddp, zero2, zero3 or fsdp2

``reference`` is the same run in one process, with the rates and the SGD update written out.
"""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn

import offcorr
from offcorr.training.ess_lr import ESSLearningRate

STEPS, ACCUMULATION, SEQUENCES, LENGTH, VOCABULARY, RATE = 6, 2, 8, 6, 11, 2.0
LOSS = offcorr.get("reinforce")


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, VOCABULARY))


def data(step):
    """Returns (ids [8, 7], advantages [8], rollout_logp [8, 6]) of a step; the mismatch grows from step to step."""
    chance = torch.Generator().manual_seed(100 + step)
    ids = torch.randint(VOCABULARY, (SEQUENCES, LENGTH + 1), generator=chance)
    advantages = torch.randn(SEQUENCES, generator=chance)
    with torch.no_grad():
        clean = log_probs(build(), ids)
    return ids, advantages, clean + 0.1 * (2 + step) * torch.randn(clean.shape, generator=chance)


def log_probs(model, ids):
    return model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


def batch_of(model, step, rows):
    ids, advantages, rollout_logp = (part[rows] for part in data(step))
    logp = log_probs(model, ids)
    return offcorr.Batch(logp=logp, rollout_logp=rollout_logp, advantages=advantages, mask=rollout_logp < 0)


def warm_up_and_decay(step):
    return min((step + 1) / 2, (STEPS + 2 - step) / STEPS)


def reference():
    """Returns the rates, and the weights at the end."""
    model = build()
    rates = []
    for step in range(STEPS):
        model.zero_grad()
        batch = batch_of(model, step, slice(None))
        LOSS(batch).loss.backward()
        weight = torch.where(batch.mask, batch.logp.detach() - batch.rollout_logp, 0).sum(1).exp()
        ess = (weight.sum() ** 2 / (SEQUENCES * weight.square().sum())).item()
        rates.append(RATE * warm_up_and_decay(step) * min(1.0, ess / 0.9) ** 0.5)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= rates[-1] * parameter.grad
    return rates, torch.cat([p.detach().flatten() for p in model.parameters()])


def main(backend, folder):
    torch.set_num_threads(1)
    model = build()
    accelerator, model, optimizer = prepare(backend, model)
    ess_lr = ESSLearningRate(optimizer, base=0.9)
    inner = optimizer
    while hasattr(inner, "optimizer"):
        inner = inner.optimizer
    scheduler = torch.optim.lr_scheduler.LambdaLR(inner, warm_up_and_decay)
    read, computed = [], []
    # Registered last, so it sees the rate that the update reads; ZeRO calls step several times per step.
    inner.register_step_pre_hook(lambda opt, *_: read[-1].extend(group["lr"] for group in opt.param_groups))
    rank, world = accelerator.process_index, accelerator.num_processes
    each = SEQUENCES // (world * ACCUMULATION)
    for step in range(STEPS):
        read.append([])
        optimizer.zero_grad()
        for micro in range(ACCUMULATION):
            last = micro == ACCUMULATION - 1
            first = (micro * world + rank) * each
            with accelerator.accumulate(model):
                assert accelerator.sync_gradients == last
                batch = batch_of(model, step, slice(first, first + each))
                ess_lr.add(batch)
                # Gradients are averaged over the ranks, and over the micro-batches.
                loss = LOSS(batch, denominator=SEQUENCES * LENGTH / (world * ACCUMULATION)).loss
                applied = ess_lr.applied(lambda vector: accelerator.gather(vector[None])) if last else nullcontext(1.0)
                with applied as lr_scale:
                    accelerator.backward(loss)
                    optimizer.step()  # does nothing under DeepSpeed
        computed.append(scheduler.get_last_lr()[0] * lr_scale)
        assert inner.param_groups[0]["lr"] == scheduler.get_last_lr()[0]
        scheduler.step()
    weights = torch.cat([weight.flatten() for weight in whole(model)])
    torch.save({"read": read, "computed": computed, "weights": weights}, Path(folder, f"{rank}.pt"))


def prepare(backend, model):
    """Returns (accelerator, model, optimizer) as a user would prepare them."""
    from accelerate import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin, PartialState
    from accelerate.utils import DistributedType

    PartialState(cpu=True)  # with use_cpu=True, Accelerator would ignore DeepSpeed
    settings = {"gradient_accumulation_steps": ACCUMULATION}
    if backend.startswith("zero"):
        import deepspeed

        # Otherwise it would be compiled at start on a CPU and never used.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        plugin = DeepSpeedPlugin(zero_stage=int(backend[-1]), gradient_accumulation_steps=ACCUMULATION)
        plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = SEQUENCES // (2 * ACCUMULATION)
        plugin.deepspeed_config["zero_allow_untested_optimizer"] = True
        plugin.deepspeed_config["zero_force_ds_cpu_optimizer"] = False
        settings["deepspeed_plugin"] = plugin
    elif backend == "fsdp2":
        settings["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2)
    accelerator = Accelerator(**settings)
    if backend == "fsdp2":  # Accelerate offers it on accelerators only, but it also runs on gloo
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = settings["fsdp_plugin"]
    wanted = {"ddp": "MULTI_CPU", "fsdp2": "FSDP"}.get(backend, "DEEPSPEED")
    assert accelerator.distributed_type == wanted, accelerator.distributed_type
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    return accelerator, *accelerator.prepare(model, optimizer)


def whole(model):
    from offcorr.training.snapshots import changing_weights

    return [weight.detach().clone() for _, weight in changing_weights(getattr(model, "module", model))]


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # threads of gloo may still run when the interpreter exits
