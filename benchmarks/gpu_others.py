"""Other people's code for the same results, called the way they call it; what cannot be imported raises ImportError.

Log-probs of hidden states: ``LOGPROBS``, (hidden [N, H], weight [V, H], target [N]) -> log-probs [N], or the mean [1].
Losses: each of ``SETTINGS`` is one method, by our name, as TRL and Liger spell it.  TRL's is its trainer's own
``_compute_loss``, metrics included; Liger's Triton kernel starts from logits, its chunked loss from hidden states.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

import offcorr
from offcorr.lab.kernels import naive_head

# -- log-probs of hidden states ------------------------------------------------------------------------------


def trl(hidden: Tensor, weight: Tensor, target: Tensor, outputs: tuple[str, ...] = ()) -> Tensor:
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    return ChunkedLogProbFunction.apply(hidden, weight, None, target, 1.0, 32768, None, 1.0, outputs)[0]


def liger(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    # One scalar: its gradients are made in the forward pass.
    return -LigerFusedLinearCrossEntropyLoss(reduction="mean")(weight, hidden, target)[None]


def cut_cross_entropy(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    from cut_cross_entropy import linear_cross_entropy

    return -linear_cross_entropy(hidden, weight, target, reduction="none")


def torch_reference(hidden: Tensor, weight: Tensor, target: Tensor, options: Any = None) -> Tensor:
    if not hasattr(torch.nn.functional, "linear_cross_entropy"):
        raise ImportError(f"torch {torch.__version__} has no linear_cross_entropy")
    given = {} if options is None else {"options": options}
    return -torch.nn.functional.linear_cross_entropy(hidden, weight, target, reduction="none", **given)


def torch_chunked(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    if not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        raise ImportError(f"torch {torch.__version__} has no LinearCrossEntropyOptions")
    return torch_reference(hidden, weight, target, torch.nn.LinearCrossEntropyOptions())


LOGPROBS = {
    "naive": naive_head,
    "TRL": trl,
    "Liger (one scalar)": liger,
    "cut-cross-entropy": cut_cross_entropy,
    "torch linear_cross_entropy": torch_reference,
    "torch linear_cross_entropy, chunked": torch_chunked,
}

# -- losses --------------------------------------------------------------------------------------------------


class Setting(NamedTuple):
    """One method, as TRL and Liger name it."""

    loss_type: str
    low: float = 0.2
    high: float = 0.2
    level: str = "token"


SETTINGS = {
    "dapo": Setting("dapo", 0.2, 0.28),
    "grpo": Setting("grpo", 0.2, 0.2),
    "gspo": Setting("grpo", 3e-4, 4e-4, "sequence"),
    "cispo": Setting("cispo", high=5.0),
    "sapo": Setting("sapo"),
    "vespo": Setting("vespo"),
}


class _OneProcess(SimpleNamespace):
    """What ``_compute_loss`` asks of an accelerator."""

    num_processes, sync_gradients = 1, True

    def gather(self, x: Tensor) -> Tensor:
        return x

    def reduce(self, x: Tensor, reduction: str) -> Tensor:
        return x


def trl_loss(setting: Setting, logp: Tensor, given: offcorr.Batch) -> Tensor:
    """TRL's loss of ``logp``, by the code of its trainer; the rest of ``given`` is what that finds in its inputs."""
    from trl import GRPOTrainer

    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logp, torch.zeros_like(logp), None),
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
        accelerator=_OneProcess(),
        args=SimpleNamespace(
            delta=None,
            use_bias_correction_kl=False,
            steps_per_generation=1,
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
            vespo_k_pos=2.0,
            vespo_lambda_pos=3.0,
            vespo_k_neg=3.0,
            vespo_lambda_neg=2.0,
        ),
        aux_loss_enabled=False,
        beta=0.0,
        current_gradient_accumulation_steps=1,
        epsilon_high=setting.high,
        epsilon_low=setting.low,
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
        importance_sampling_level=setting.level,
        loss_type=setting.loss_type,
        max_completion_length=logp.shape[1],
        model=SimpleNamespace(training=True),
        off_policy_mask_threshold=None,
        top_entropy_quantile=1.0,
        use_vllm=False,
    )
    mask = given.mask.to(logp.dtype)
    nothing = torch.empty(len(mask), 0, dtype=torch.long, device=mask.device)
    inputs = {
        "prompt_ids": nothing,
        "prompt_mask": nothing,
        "completion_ids": mask.long(),  # read by the forward pass alone, whose result is given
        "completion_mask": mask,
        "advantages": given.advantages,
        "old_per_token_logps": given.old_logp,
        "num_items_in_batch": mask.sum(),
    }
    return GRPOTrainer._compute_loss(trainer, None, inputs)


def trl_loss_from_logits(setting: Setting, logits: Tensor, ids: Tensor, given: offcorr.Batch) -> Tensor:
    """``logits`` [B, T + 1, V], the last position unused."""
    from trl.trainer.utils import selective_log_softmax

    return trl_loss(setting, selective_log_softmax(logits[:, :-1], ids).float(), given)


def liger_loss_from_logits(
    setting: Setting, logits: Tensor, ids: Tensor, given: offcorr.Batch, inplace: bool = True
) -> Tensor:
    """``logits`` [B, T + 1, V], the last position unused; in place, its default: the gradient overwrites them."""
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss

    loss, _ = triton_grpo_loss(
        logits,
        given.old_logp,
        None,
        ids,
        given.advantages,
        completion_mask=given.mask.to(torch.int32),
        temperature=1.0,
        beta=0.0,
        eps_low=setting.low,
        eps_high=setting.high,
        inplace=inplace,
        loss_type=setting.loss_type,
        importance_sampling_level=setting.level,
        reduce=True,
    )
    return loss


def trl_loss_from_hidden(setting: Setting, hidden: Tensor, weight: Tensor, ids: Tensor, given: offcorr.Batch) -> Tensor:
    """``hidden`` [B, T, H]; with the entropy, which its trainer always asks for."""
    logp = trl(hidden.flatten(0, 1), weight, ids.flatten(), ("entropy",))
    return trl_loss(setting, logp.view(ids.shape), given)


def liger_loss_from_hidden(
    setting: Setting, hidden: Tensor, weight: Tensor, ids: Tensor, given: offcorr.Batch, compiled: bool = True
) -> Tensor:
    """``hidden`` [B, T, H]; a sequence at a time, gradients in the forward pass."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    loss_fn = LigerFusedLinearGRPOLoss(
        beta=0.0,
        compiled=compiled,
        use_ref_model=False,
        epsilon_low=setting.low,
        epsilon_high=setting.high,
        loss_type=setting.loss_type,
        importance_sampling_level=setting.level,
    )
    mask = given.mask.to(torch.float32)
    return loss_fn(hidden, weight, ids, mask, given.advantages, old_per_token_logps=given.old_logp)[0]
