"""A second copy of a model for other weights than the model's own, such as a sampler's."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from offcorr.training.precision import Precision
from offcorr.training.snapshots import frozen_weights, is_sharded, refuse_fsdp1


class Replica:
    """The structure of ``model``, without its hooks, wrappers and patches; ``load`` sets its weights.

    It is built once and reused: loading sets pointers and builds no modules.  ``model`` is never written to.  If it is
    not sharded, its frozen parameters are shared, so a LoRA replica costs its adapters only; under ZeRO-3 and FSDP2 the
    structure is built from ``model.config``.

    Quantisation applies to the matrices that an engine quantises: the weights of ``nn.Linear`` and of fused experts
    (three dimensions), without the output head and the embeddings.  In a PEFT model the adapters stay as they are, as
    engines serve a LoRA over a quantised base.
    """

    def __init__(self, model: nn.Module, device: torch.device | str) -> None:
        refuse_fsdp1(model)
        sharded = any(is_sharded(parameter) for parameter in model.parameters())
        self.module = _strip(_from_config(model) if sharded else _share(model)).eval()
        self._zero3 = any(hasattr(parameter, "ds_id") for parameter in model.parameters())
        self._frozen = dict(frozen_weights(model))
        self._slots = _slots(self.module)
        self._matrices = _matrices(self.module)
        if is_peft(model):
            self._matrices &= self._frozen.keys()
        # Frozen weights are cast once per precision; without a cast they are the model's own tensors.
        self._frozen_at: dict[Precision | None, dict[str, Tensor]] = {}
        self.device = torch.device(device)
        self.module.to(self.device)

    def load(self, weights: Mapping[str, Tensor], precision: Precision | None = None) -> nn.Module:
        """The module with ``weights``, named as by ``changing_weights``, at ``precision``.

        Args:
            precision: None: every weight in its own dtype, the trainer's.

        Raises:
            KeyError: a name that the model does not have.
            ValueError: there is nothing to quantise.
        """
        if precision is not None and precision.quantise is not None and not self._matrices:
            raise ValueError(f"precision {precision.name!r}: this model has no nn.Linear weight to quantise")
        if precision not in self._frozen_at:
            self._frozen_at[precision] = {
                name: self._at(name, weight, precision) for name, weight in self._frozen.items()
            }
        for name, weight in self._frozen_at[precision].items():
            self._set(name, weight)
        for name, weight in weights.items():
            self._set(name, self._at(name, weight.to(self.device), precision))
        return self.module

    def _at(self, name: str, weight: Tensor, precision: Precision | None) -> Tensor:
        # Packed frozen weights (4-bit bases) are not floats and stay as they are.
        if precision is None or not weight.is_floating_point():
            return weight
        weight = weight.to(precision.compute)
        if precision.quantise is None or name not in self._matrices:
            return weight
        return precision.quantise(weight)

    def _set(self, name: str, weight: Tensor) -> None:
        if not weight.is_floating_point():
            return
        weight = weight.to(self.device)
        parameter = nn.Parameter(weight, requires_grad=False)  # one Parameter, so that tied weights stay tied
        if self._zero3:
            _mark_available(parameter)
        for module, attribute in self._slots[name]:
            if attribute in module._buffers:
                module._buffers[attribute] = weight
            else:
                module._parameters[attribute] = parameter


def _mark_available(parameter: Any) -> None:
    """Mark a parameter as gathered, for code that checks every parameter under ZeRO-3."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    parameter.ds_status = ZeroParamStatus.AVAILABLE


def is_peft(model: nn.Module) -> bool:
    """True for peft's own wrapper around a base model."""
    return hasattr(model, "get_base_model")


def base_of(model: Any) -> Any:
    """The model inside peft's wrapper, or ``model`` itself."""
    return model.get_base_model() if is_peft(model) else model


def _share(model: nn.Module) -> nn.Module:
    """A copy of the structure with the same parameters."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


def _from_config(model: Any) -> Any:
    """A new model from the configuration, with other weights."""
    if is_peft(model):
        from peft import get_peft_model

        fresh = _from_config(model.get_base_model())
        for name, config in model.peft_config.items():
            if is_peft(fresh):
                fresh.add_adapter(name, config)
            else:
                fresh = get_peft_model(fresh, config, adapter_name=name)
        fresh.set_adapter(model.active_adapter)
        return fresh
    # FSDP2 puts a class of its own in front of the model's.
    classes = type(model).__mro__
    original = next(c for c in classes if "FSDPModule" not in {b.__name__ for b in c.__mro__})
    return original(copy.deepcopy(model.config))


def _strip(model: nn.Module) -> nn.Module:
    """Remove the patches and hooks of trainers, whose closures refer to the original model."""
    for module in model.modules():
        for patched in ("forward", "_original_forward"):
            module.__dict__.pop(patched, None)
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            hooks.clear()
    return model


def _slots(model: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    """The modules and attributes that hold each weight: several for a tied weight, under its first name."""
    first_name: dict[int, str] = {}
    slots: dict[str, list[tuple[nn.Module, str]]] = defaultdict(list)
    for prefix, module in model.named_modules(remove_duplicate=False):
        for attribute, weight in [*module._parameters.items(), *module._buffers.items()]:
            if weight is not None:
                name = f"{prefix}.{attribute}" if prefix else attribute
                slots[first_name.setdefault(id(weight), name)].append((module, attribute))
    return dict(slots)


def _matrices(model: nn.Module) -> set[str]:
    """Names of the weights that weight-only quantisation touches."""
    head = getattr(base_of(model), "get_output_embeddings", lambda: None)()
    return {
        name
        for name, places in _slots(model).items()
        for module, attribute in places[:1]
        if module is not head and _is_matrix(module, attribute)
    }


def _is_matrix(module: nn.Module, attribute: str) -> bool:
    if isinstance(module, nn.Linear):
        return attribute == "weight"
    weight = module._parameters.get(attribute)
    convolution = isinstance(module, nn.modules.conv._ConvNd)
    return weight is not None and weight.dim() == 3 and not convolution  # fused experts
