"""Causes in arithmetic: precision, keys and values, routing, dropout, positions."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from offcorr.lab.mismatch.models import LEARNED_POSITIONS, MOE
from offcorr.lab.mismatch.setup import Setup, cause
from offcorr.training.precision import Precision, quantise_fp8, quantise_int


@cause(changes=["precision"])
def precision(setup: Setup) -> None:
    """The sampler computes in bf16 or fp16, or its matrices are quantised to int8, int4 or fp8."""
    name = setup.pick(
        "precision",
        weak=["fp16", "int8"],
        usual=["bf16", "bf16", "int8", "fp8_e4m3"],
        strong=["fp8_e5m2", "int4", "fp8_e4m3"],
    )

    setup.wrap.append(lambda module: at_precision(module, Precision.named(name)))


def at_precision(module: Any, precision: Precision) -> Any:
    """A copy of a model at a precision; quantised are the matrices but embeddings, output head and routers."""
    module = copy.deepcopy(module).to(precision.compute)
    head = module.get_output_embeddings()
    for part in module.modules():
        if precision.quantise is None or part is head or isinstance(part, nn.Embedding) or is_router(part):
            continue
        for weight in part.parameters(recurse=False):
            if weight.dim() >= 2:
                # A Conv1D holds its matrix as [in, out], a Linear as [out, in].
                turned = type(part).__name__ == "Conv1D"
                rows = weight.data.mT.contiguous() if turned else weight.data
                weight.data = precision.quantise(rows).mT.contiguous() if turned else precision.quantise(rows)
    return module


def is_router(part: nn.Module) -> bool:
    """Whether a part chooses experts."""
    return type(part).__name__.endswith("Router")


@cause(changes=["kv_cache"])
def kv_cache(setup: Setup) -> None:
    """The sampler stores keys and values in bf16, fp8 or int8, one scale per head and token for int8."""
    name = setup.pick(
        "stored",
        weak=["bf16", "int8"],
        usual=["fp8_e4m3", "fp8_e4m3", "fp8_e5m2", "int8"],
        strong=["fp8_e5m2", "int4"],
    )
    setup.stored = {
        "bf16": lambda x: x.bfloat16().to(x.dtype),
        "int8": lambda x: quantise_int(x, 8),
        "int4": lambda x: quantise_int(x, 4),
        "fp8_e4m3": lambda x: x.to(torch.float8_e4m3fn).to(x.dtype),  # unscaled, as vLLM's default
        "fp8_e5m2": lambda x: x.to(torch.float8_e5m2).to(x.dtype),
    }[name]
    setup.prefill = setup.one_of("prefill", [1024, 1024, 8])


@cause(changes=["routing"], only=sorted(MOE))
def moe_routing(setup: Setup) -> None:
    """The sampler's routers choose experts from logits in a lower precision; the experts' weights stay exact."""
    name = setup.pick("router", weak=["bf16"], usual=["bf16", "fp8"], strong=["fp8", "int4"])
    rounded: Callable[[Tensor], Tensor] = {
        "bf16": lambda x: x.bfloat16().float(),
        "fp8": lambda x: quantise_fp8(x, "float8_e4m3fn"),
        "int4": lambda x: quantise_int(x, 4),
    }[name]

    def hook(module: Any, inputs: tuple[Tensor, ...], output: Any) -> Any:
        hidden = inputs[0].reshape(-1, module.hidden_dim)
        chosen = nn.functional.linear(rounded(hidden), rounded(module.weight)).topk(module.top_k, dim=-1).indices
        logits = output[0]
        scores = logits.softmax(-1).gather(-1, chosen)
        return logits, scores / scores.sum(-1, keepdim=True), chosen

    def wrap(module: nn.Module) -> nn.Module:
        module = copy.deepcopy(module)
        for part in module.modules():
            if is_router(part):
                part.register_forward_hook(hook)
        return module

    setup.wrap.append(wrap)


@cause(changes=["dropout"])
def dropout(setup: Setup) -> None:
    """The trainer computes its log-probs with dropout on, after every attention and feed-forward part."""
    share = setup.pick("dropout", weak=[0.02, 0.05], usual=[0.05, 0.1], strong=[0.15, 0.2])
    generator = setup.generator()

    def hook(module: Any, inputs: Any, output: Any) -> Any:
        values = output[0] if isinstance(output, tuple) else output
        kept = (torch.rand(values.shape, generator=generator) >= share) / (1 - share)
        return (values * kept, *output[1:]) if isinstance(output, tuple) else values * kept

    setup.saved = setup.saved or setup.trainer
    setup.trainer = copy.deepcopy(setup.trainer)
    for name, part in setup.trainer.named_modules():
        if name.rpartition(".")[2] in ("self_attn", "attention", "attn", "mlp"):
            part.register_forward_hook(hook)


@cause(changes=["positions"])
def position(setup: Setup) -> None:
    """The trainer attends to padding, numbers positions from the padding's beginning (learned positions), begins them
    anew at the completion, or leaves a gap before it."""
    kinds = ["padding attended", "gap"] + ["restarted"] * (setup.strength == "strong")
    if setup.subject.architecture in LEARNED_POSITIONS:
        kinds += ["padding counted", "padding counted"]
    kind = setup.one_of("position", kinds)
    gap = setup.pick("gap", weak=[1, 2], usual=[4, 8], strong=[16, 32]) if kind == "gap" else 0

    def changed(places: Tensor, completion: int) -> Tensor:
        if kind == "padding counted":
            return torch.arange(places.shape[1]).expand_as(places)
        shifted = places.clone()
        if kind == "restarted":
            shifted[:, completion:] -= places[:, completion : completion + 1]
        else:
            shifted[:, completion:] += gap
        return shifted.clamp_min(0)

    setup.padding_seen = kind == "padding attended"
    setup.positions = None if setup.padding_seen else changed
