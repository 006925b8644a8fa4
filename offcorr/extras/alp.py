"""ALP: learnable noise on the input of every layer, in the numerator of the ratio only (2603.19470; official code)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from offcorr.stages.checks import check_value


class LayerPerturbation(nn.Module):
    """Causal language model with optional Gaussian noise on the input of its decoder layers.

    h_l <- h_l + exp(log_std_l) * e,  e ~ N(0, 1), with one learnable log_std per layer (ALP, 2603.19470).

    With a ``noise_seed`` the log-probs are those of the perturbed policy: use them as the ``logp`` of a ``Batch``, the
    numerator of every ratio.  Without one the model is unperturbed: use it for sampling, ``old_logp`` and
    ``rollout_logp``.  The same seed gives the same noise.  It is passed on as a keyword of the layers, so gradient
    checkpointing replays the noise.  Global random state is neither read nor changed.

    The gradient reaches the weights of the model and, by the reparametrisation above, ``log_std`` [layers]; train
    ``parameters()`` of this module.  The noise depends on the shape of the batch: use another seed for every
    micro-batch and for every rank.

    Args:
        model: passes the keywords of its forward on to its layers, as the models of transformers do.
        std: initial standard deviation, above 0.
        layers: indices of the perturbed layers; None: all, the best choice in the paper.

    Raises:
        ValueError: std is not positive, an index is out of range, a layer is perturbed already, or the model has no
            decoder with a list of layers.

    >>> from transformers import Qwen3Config, Qwen3ForCausalLM
    >>> sizes = dict(vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=1)
    >>> model = Qwen3ForCausalLM(Qwen3Config(**sizes, num_key_value_heads=1, head_dim=8))
    >>> policy, input_ids = LayerPerturbation(model, std=0.1), torch.tensor([[1, 2, 3]])
    >>> perturbed = policy(input_ids=input_ids, noise_seed=0).logits  # for logp
    >>> plain = policy(input_ids=input_ids).logits  # for old_logp, and to sample from
    >>> bool((perturbed != plain).any()), bool((policy(input_ids=input_ids).logits == plain).all())
    (True, True)
    """

    def __init__(self, model: nn.Module, std: float = 1e-6, layers: Sequence[int] | None = None) -> None:
        super().__init__()
        check_value("LayerPerturbation", "std", std, low=0.0, above=True)  # it is learned as its logarithm
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
        """Returns the model's output; with a ``noise_seed``, that of the perturbed model.

        Raises:
            RuntimeError: the model did not pass the seed on to all layers.
        """
        if noise_seed is None:
            return self.model(*args, **kwargs)
        self._reached.clear()
        output = self.model(*args, noise_seed=noise_seed, **kwargs)
        if len(self._reached) < len(self.log_std):
            raise RuntimeError(
                f"noise reached {len(self._reached)} of {len(self.log_std)} layers: {type(self.model).__name__} does "
                "not pass the keywords of its forward on to its layers"
            )
        return output

    def noise(self, place: int, seed: int, like: Tensor) -> Tensor:
        """Returns the unit noise of the ``place``-th perturbed layer for a seed, in the shape of ``like``."""
        generator = torch.Generator(like.device).manual_seed(seed * len(self.log_std) + place)
        return torch.randn(like.shape, generator=generator, dtype=like.dtype, device=like.device)


class _Perturb:
    """Forward pre-hook of a layer.

    Gradient checkpointing runs it again with the same keywords, and so with the same seed.
    """

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
