"""ALP: learnable noise on every layer's input, in the ratio's numerator alone  (2603.19470; official code)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class LayerPerturbation(nn.Module):
    """A causal language model whose decoder layers see their input with Gaussian noise, when asked.

    h_l <- h_l + exp(log_std_l) * e,  e ~ N(0, 1), one learnable log_std a layer.

    With a ``noise_seed`` the log-probs are of the perturbed policy: the ``logp`` of a ``Batch``, numerator of every
    ratio.  Without one the model is itself: sampling, ``old_logp`` and ``rollout_logp`` stay unperturbed.  A seed
    gives the same noise each time, and travels with the call, so gradient checkpointing replays it, whenever it runs.
    Global random state is neither read nor changed.

    Args:
        model: hands on the keywords of its forward to its layers, as those of transformers do.
        std: at the start.
        layers: their indices; None: all, which the paper found best.

    Train ``parameters()`` of this module: the model's and ``log_std`` [layers].  The noise depends on the shape of the
    batch; take another seed for each micro-batch, and for each rank.

        policy = LayerPerturbation(model)
        logits = policy(input_ids, noise_seed=step).logits  # for logp
        logits = policy(input_ids).logits                   # for old_logp, and to sample from
    """

    def __init__(self, model: nn.Module, std: float = 1e-6, layers: Sequence[int] | None = None) -> None:
        super().__init__()
        if not std > 0:
            raise ValueError(f"std is {std}, expected > 0: it is learned as its logarithm")
        blocks = _decoder_layers(model)
        picked = range(len(blocks)) if layers is None else layers
        outside = [index for index in picked if not 0 <= index < len(blocks)]
        if outside or not picked:
            raise ValueError(f"layers holds {outside or 'nothing'}, expected indices below {len(blocks)}")
        for index in picked:
            if any(isinstance(hook, _Perturb) for hook in blocks[index]._forward_pre_hooks.values()):
                raise ValueError(f"layer {index} is perturbed already: wrap a model once")
        self.model = model
        self.log_std = nn.Parameter(torch.full((len(picked),), math.log(std)))
        self._reached: set[int] = set()
        for place, index in enumerate(picked):
            blocks[index].register_forward_pre_hook(_Perturb(self, place), with_kwargs=True)

    def forward(self, *args: Any, noise_seed: int | None = None, **kwargs: Any) -> Any:
        """The model's answer; perturbed where ``noise_seed`` is given.

        Raises:
            RuntimeError: the model kept the seed from its layers, so nothing was perturbed.
        """
        if noise_seed is None:
            return self.model(*args, **kwargs)
        self._reached.clear()
        answer = self.model(*args, noise_seed=noise_seed, **kwargs)
        if len(self._reached) < len(self.log_std):
            raise RuntimeError(
                f"noise reached {len(self._reached)} of {len(self.log_std)} layers: {type(self.model).__name__} does "
                "not hand on the keywords of its forward to its layers"
            )
        return answer

    def noise(self, place: int, seed: int, like: Tensor) -> Tensor:
        """The unit noise of the ``place``-th perturbed layer under a seed."""
        generator = torch.Generator(like.device).manual_seed(seed * len(self.log_std) + place)
        return torch.randn(like.shape, generator=generator, dtype=like.dtype, device=like.device)


class _Perturb:
    """A layer's pre-hook.  It runs again when gradient checkpointing replays the layer, with the same keywords."""

    def __init__(self, owner: LayerPerturbation, place: int) -> None:
        self.owner, self.place = owner, place

    def __call__(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        seed = kwargs.pop("noise_seed", None)
        if seed is None:
            return None
        hidden, rest = (args[0], args[1:]) if args else (kwargs.pop("hidden_states"), ())
        std = self.owner.log_std[self.place].exp().to(hidden.dtype)
        self.owner._reached.add(self.place)
        return (hidden + std * self.owner.noise(self.place, seed, hidden), *rest), kwargs


def _decoder_layers(model: Any) -> Any:
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    decoder = base.get_decoder() if hasattr(base, "get_decoder") else base
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ValueError(f"{type(model).__name__} has no decoder with a list of layers to perturb")
    return layers
