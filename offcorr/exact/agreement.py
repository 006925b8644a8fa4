"""``check``: whether a sampler's log-probs are the trainer's, to the last bit, and what differs first if not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from offcorr.exact.scoring import Trace, score


@dataclass(frozen=True)
class Agreement:
    """Result of ``check``: |d| (nats) over the completion tokens, d = trainer's log-prob - sampler's log-prob.

    Args:
        mean: of |d|.
        max: of |d|.
        tokens: that were compared.
        differing: tokens with d other than 0.
        first_difference: the first module, in the order of execution, whose input or output differs between the two
            sides on the sequence with the largest |d|; None if ``exact``, or where nothing was looked for.
    """

    mean: float
    max: float
    tokens: int
    differing: int
    first_difference: str | None = None

    @classmethod
    def of(cls, logp: Tensor, rollout_logp: Tensor, mask: Tensor) -> Agreement:
        """The agreement of log-probs that a training loop already has; one host synchronisation.

        Args:
            logp: [B, T] the trainer's (nats).
            rollout_logp: [B, T] the sampler's.
            mask: [B, T] bool, the completion tokens.

        Raises:
            ValueError: the mask holds no token.

        >>> logp = torch.tensor([[-1.0, -2.0, 0.0]])
        >>> Agreement.of(logp, torch.tensor([[-1.0, -2.5, 9.0]]), torch.tensor([[True, True, False]]))
        Agreement(mean=0.25, max=0.5, tokens=2, differing=1, first_difference=None)
        """
        difference = (logp.detach().double() - rollout_logp.to(logp.device).double()).abs()[mask]
        if not difference.numel():
            raise ValueError("mask holds no token, expected at least one")
        numbers = torch.stack([difference.mean(), difference.max(), (difference != 0).sum()])
        mean, largest, differing = numbers.tolist()
        return cls(mean, largest, difference.numel(), int(differing))

    @property
    def exact(self) -> bool:
        """Whether every log-prob is the same number on both sides."""
        return self.differing == 0

    def metrics(self) -> dict[str, float]:
        """Numbers for a log, under the name that slime gives them.

        >>> Agreement(mean=0.0, max=0.0, tokens=12, differing=0).metrics()["train_rollout_logprob_abs_diff"]
        0.0
        """
        return {
            "train_rollout_logprob_abs_diff": self.mean,
            "train_rollout_logprob_abs_diff_max": self.max,
            "train_rollout_logprob_differing": self.differing / self.tokens,
        }

    def __str__(self) -> str:
        text = f"train_rollout_logprob_abs_diff: mean {self.mean:.3g}, max {self.max:.3g}, over {self.tokens} tokens"
        if self.exact:
            return f"{text}: exactly equal"
        text += f", of which {self.differing} differ"
        return f"{text}; the first difference is at the {self.first_difference}" if self.first_difference else text


def check(
    trainer: nn.Module,
    prompt_ids: Sequence[Sequence[int]],
    completion_ids: Sequence[Sequence[int]],
    rollout_logp: Sequence[Sequence[float]] | None = None,
    *,
    sampler: nn.Module | None = None,
    temperature: float = 1.0,
    locate: bool = True,
) -> Agreement:
    """Compares the trainer's log-probs of sampled tokens with the sampler's, and finds where they begin to differ.

    The trainer scores all completions in one forward pass.  The sampler's log-probs are ``rollout_logp``, as it
    reported them; without them the sampler scores the same tokens with a KV cache, one at a time.  Where the two
    differ, both passes are repeated with the inputs and outputs of every innermost module recorded.  "output of X" then
    means that X itself computes another result from equal inputs, "input of X" that what lies between X and the module
    before it does: attention, for the input of an attention layer's output projection.

    Both models are switched to evaluation mode and restored; no gradient is computed.  Wrap the call in the contexts
    that training and sampling run in (``batch_invariant``, ``fp32_head``, autocast).

    Args:
        trainer: a causal language model of transformers.
        prompt_ids: B prompts of at least one token each.
        completion_ids: B completions.
        rollout_logp: the sampler's log-prob (nats) of each completion token.
        sampler: the model that sampled; None: the trainer itself.
        temperature: of both sides.
        locate: False to leave out the search for the first module that differs.

    Raises:
        ValueError: the lengths do not fit.
        FloatingPointError: a log-prob of either side is not finite.

    >>> class Uniform(nn.Module):
    ...     def forward(self, input_ids, attention_mask=None):
    ...         return type("Output", (), {"logits": torch.zeros(*input_ids.shape, 4)})
    >>> print(check(Uniform(), [[1, 2]], [[0, 3]], [[-1.5, -1.25]], locate=False))
    train_rollout_logprob_abs_diff: mean 0.125, max 0.136, over 2 tokens, of which 2 differ
    """
    sampler = trainer if sampler is None else sampler
    modes = [(module, module.training) for model in (trainer, sampler) for module in model.modules()]
    trainer.eval()
    sampler.eval()
    try:
        with torch.no_grad():
            return _compared(trainer, sampler, prompt_ids, completion_ids, rollout_logp, temperature, locate)
    finally:
        for module, mode in modes:
            module.training = mode


def _compared(
    trainer: nn.Module,
    sampler: nn.Module,
    prompt_ids: Sequence[Sequence[int]],
    completion_ids: Sequence[Sequence[int]],
    rollout_logp: Sequence[Sequence[float]] | None,
    temperature: float,
    locate: bool,
) -> Agreement:
    logp, mask = score(trainer, prompt_ids, completion_ids, temperature=temperature)
    if rollout_logp is None:
        theirs = score(sampler, prompt_ids, completion_ids, temperature=temperature, cached=True)[0]
    else:
        theirs = _padded(rollout_logp, completion_ids, logp)
    for name, values in (("the trainer's log-probs", logp), ("rollout_logp", theirs.to(logp.device))):
        if not bool(torch.isfinite(values).all()):
            row, token = (~torch.isfinite(values)).nonzero()[0].tolist()
            raise FloatingPointError(
                f"{name}: sequence {row}, token {token} is {values[row, token].item()}, expected a finite number"
            )
    found = Agreement.of(logp, theirs, mask)
    if found.exact or not locate:
        return found
    worst = int((logp.double() - theirs.to(logp.device).double()).abs().amax(-1).argmax())
    return replace(found, first_difference=_first_difference(trainer, sampler, prompt_ids, completion_ids, worst))


def _padded(rows: Sequence[Sequence[float]], completions: Sequence[Sequence[int]], like: Tensor) -> Tensor:
    if len(rows) != len(completions):
        raise ValueError(f"rollout_logp has {len(rows)} sequences, expected {len(completions)}, one per completion")
    padded = torch.zeros(like.shape, dtype=torch.float64)
    for index, (row, completion) in enumerate(zip(rows, completions, strict=True)):
        if len(row) != len(completion):
            raise ValueError(
                f"rollout_logp[{index}] has {len(row)} log-probs, expected {len(completion)}, one per completion token"
            )
        padded[index, : len(row)] = torch.tensor(row, dtype=torch.float64)
    return padded


NOWHERE = (
    "log-probs themselves: the modules compute the same in both passes (rollout_logp comes from other weights, "
    "another temperature, another precision, or another batch)"
)


def _first_difference(
    trainer: nn.Module,
    sampler: nn.Module,
    prompt_ids: Sequence[Sequence[int]],
    completion_ids: Sequence[Sequence[int]],
    row: int,
) -> str:
    recorded = []
    for model, cached in ((trainer, False), (sampler, True)):
        trace = Trace(model, row)
        try:
            score(model, prompt_ids, completion_ids, cached=cached, trace=trace)
        finally:
            trace.remove()
        recorded.append({key: torch.cat(parts) for key, parts in trace.values.items()})
    ours, theirs = recorded
    for key, values in ours.items():
        others = theirs.get(key)
        tokens = 0 if others is None else min(len(values), len(others))  # the last token is not fed to a sampler
        if others is not None and not torch.equal(values[:tokens].double(), others[:tokens].to(values.device).double()):
            name, side, *_ = key
            return f"{side} of {name or type(trainer).__name__}"
    return NOWHERE
