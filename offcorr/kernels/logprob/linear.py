"""Log-probabilities of targets under a linear head, without the [tokens, vocabulary] logits.

    logits = soft_cap tanh(logit_scale (hidden . weight^T + bias) / soft_cap) / temperature
    logp = log softmax(logits)[target]      d logp / d logits_v = 1[v = target] - p_v
    entropy = -sum_v p_v log p_v            d entropy / d logits_v = -p_v (log p_v + entropy)

The outer loop runs over tiles of the vocabulary, the inner one over chunks of tokens.  Each step is a matrix product
into one reused [chunk, tile] buffer, followed by ``fold_tile`` (in torch on a CPU, in Triton on a GPU).  Products of
half-precision inputs are float32.  The backward pass computes the tiles again, only for tokens whose incoming gradient
is not 0.  With a frozen head the forward pass has already computed dlogp/dhidden, and the backward pass is one
elementwise product.

Outside the support of truncated sampling, where one is given, the logits are -inf.  Where the head is split over ranks,
each rank folds its part of the vocabulary, and ``_merged`` combines the running sums.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from offcorr.kernels.dispatch import chosen, why_no_triton
from offcorr.kernels.logprob import tiles
from offcorr.kernels.logprob.checks import check_float, check_head, check_slice, check_targets, transform_of
from offcorr.kernels.logprob.support import Support, support_of
from offcorr.kernels.logprob.tiles import Finished, Transform
from offcorr.stages.checks import warn_first

ALIGNED = 64
"""With rows of a multiple of this many numbers, and chunks of a multiple of this many rows, every chunk starts at an
address with the alignment that makes a matrix product pick the same kernel."""


class LogProbs(NamedTuple):
    """Results per token, in the shape of ``target``.

    They are float32 (float64 for float64 inputs), and 0 on tokens that the mask excludes.
    """

    logp: Tensor
    """log p(target), in nats."""
    entropy: Tensor | None
    """Entropy of the distribution over the vocabulary (or the support), in nats; None unless it was requested."""
    sum_sq_probs: Tensor | None
    """Sum over the vocabulary (or the support) of p^2, detached; None unless it was requested."""


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    support: Tensor | tuple[Tensor, Tensor] | None = None,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    soft_cap: float | None = None,
    entropy: bool = False,
    sum_sq_probs: bool = False,
    frozen_head: bool | None = None,
    batch_invariant: bool = False,
    chunk: int | None = None,
    group: Any = None,
    vocabulary_start: int | None = None,
) -> LogProbs:
    """Log-probabilities (and entropies) of ``target`` under a linear head, without the [tokens, vocabulary] logits.

    The gradient reaches hidden, weight and bias through ``logp`` and ``entropy``; ``sum_sq_probs`` is detached.
    With p = softmax(logits), d logp / d logits_v = 1[v = target] - p_v; the module's docstring has that of the entropy.

    Args:
        hidden: [..., H], the last hidden states.
        weight: [V, H], the head.
        target: [...], integers: the tokens whose log-probability is computed.
        bias: [V].
        mask: [...], bool or integer: the valid tokens.  Hidden states and targets of other tokens never enter a result
            or a gradient; their results and gradients are 0.
        support: the tokens that the sampler kept at each position (top-p, top-k, min-p).  The distribution is
            renormalised over them: log-prob, entropy and sum of squared probabilities are those of the sampler that
            reports processed log-probs.  One of

            - [..., K], integers: token ids; numbers outside the vocabulary, such as -1, are padding;
            - (ids [M], offsets [N + 1]), integers: token n of the N in ``target``, flattened, keeps
              ids[offsets[n]:offsets[n + 1]].  Offsets may be on the CPU; from a GPU they take a host synchronisation;
            - [..., V], bool.

            A position without an id is not truncated: its distribution is that over the vocabulary.  A mask says so
            with True everywhere.
        temperature: divides the logits.
        logit_scale: multiplies the logits, the bias included.
        soft_cap: bounds the scaled product x by soft_cap tanh(x / soft_cap); None: no bound.
        entropy: whether to compute the entropy.
        sum_sq_probs: whether to compute the sum of squared probabilities.
        frozen_head: whether weight and bias receive no gradient.  Then dlogp/dhidden [..., H] is computed in the
            forward pass, and a step takes 2 matrix products instead of 3; a gradient of the entropy still needs the
            tiles a second time.  None: frozen if neither weight nor bias requires a gradient.
        batch_invariant: whether the results of a token are the same, bit for bit, whatever else is in the batch.  Then
            every matrix product has ``chunk`` rows, the last one padded; ``chunk`` is rounded up to a multiple of 64,
            and H is padded to a multiple of 64, which copies the head if H is not one.
        chunk: tokens per tile; None: 512 on a CPU, at most 4096 on a GPU.
        group: the process group (``torch.distributed``) over whose ranks the vocabulary is split (tensor parallelism).
            ``weight`` [V_rank, H] and ``bias`` [V_rank] are the rank's part, of any size; everything else, ``support``
            and the incoming gradients included, is the same on all of them.  Results and the gradient of hidden are
            those of the whole head, on every rank; the gradients of weight and bias are those of the rank's part.
            Every rank has to take part in each forward and each backward pass.
        vocabulary_start: with ``group``, the token that the first row of ``weight`` is for.

    A valid target outside the vocabulary (-100, for example) makes every result of its token NaN and is counted
    (see ``out_of_vocabulary``), without a host synchronisation; on a CPU it is warned of, once.  A valid target outside
    its support is a ValueError on a CPU; on a GPU it is treated in the same way and counted by ``out_of_support``.

    With ``group``, a forward pass takes one all-gather, of 6 numbers per token and rank, and a backward pass one
    all-reduce, of hidden's gradient in float32.  With a frozen head the forward pass takes both, and the backward pass
    none unless the entropy has a gradient.  Under autocast the inputs are rounded to its dtype, as
    in a linear layer.

    Raises:
        RuntimeError: a second derivative is requested (``create_graph=True``).
        ValueError: shapes do not fit together, tensors are on different devices, weight is a DTensor, a target is
            outside its support (on a CPU), temperature, soft_cap or chunk is not positive, or only one of group and
            vocabulary_start is given.
        TypeError: dtypes differ (outside autocast) or are not one of float16, bfloat16, float32 and float64, or target
            or mask has the wrong dtype.

    >>> hidden, weight = torch.zeros(2, 4), torch.ones(8, 4)
    >>> linear_logprob(hidden, weight, torch.tensor([0, 7])).logp.exp()
    tensor([0.1250, 0.1250])

    A sampler with top-k or top-p kept 2 tokens at the first position and all 8 at the second:

    >>> kept = torch.tensor([[0, 3], [-1, -1]])
    >>> linear_logprob(hidden, weight, torch.tensor([0, 7]), support=kept).logp.exp()
    tensor([0.5000, 0.1250])

    With tensor parallelism, where a rank has ``weight[start:end]``; here there is one rank:

    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    >>> part = {"group": dist.group.WORLD, "vocabulary_start": 0}
    >>> linear_logprob(hidden, weight, torch.tensor([0, 7]), **part).logp.exp()
    tensor([0.1250, 0.1250])
    >>> dist.destroy_process_group()
    """
    dtype = check_head(hidden, weight, bias)
    check_targets(target, mask, hidden.shape[:-1], "hidden", hidden.device)
    start = check_slice(group, vocabulary_start)
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk is {chunk}, expected at least 1 token")
    if frozen_head is None:
        frozen_head = not (weight.requires_grad or (bias is not None and bias.requires_grad))
    if frozen_head:
        weight, bias = weight.detach(), bias.detach() if bias is not None else None
    layout = _tiles_for(hidden.device, dtype, chunk)
    if batch_invariant:
        # All rows of a product are summed in the same order only if the rows and the chunks are aligned.
        hidden, weight = _aligned(hidden), _aligned(weight)
        layout["chunk"] = _round_up(layout["chunk"], ALIGNED)
    plan = _Plan(
        transform_of(logit_scale, soft_cap, temperature),
        entropy,
        sum_sq_probs,
        sums_gradient=frozen_head and hidden.requires_grad and torch.is_grad_enabled(),
        batch_invariant=batch_invariant,
        group=group,
        **layout,
    )
    flat = hidden.reshape(-1, hidden.shape[-1]).to(dtype)
    kept = None
    if support is not None:
        kept = support_of(support, target.shape, target.device, start + len(weight), split=group is not None)
    targets = _prepare_targets(target, mask, start, len(weight), plan, kept)
    return _reshaped(_LinearLogProb.apply(flat, weight, bias, targets, plan), target.shape)


def logits_logprob(
    logits: Tensor,
    target: Tensor,
    *,
    mask: Tensor | None = None,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    soft_cap: float | None = None,
    entropy: bool = False,
    sum_sq_probs: bool = False,
) -> LogProbs:
    """Log-probabilities (and entropies) of ``target`` [...] from ``logits`` [..., V].

    It serves models whose head cannot be called separately.  Options, results and errors are those of
    ``linear_logprob``.  Half-precision logits are summed in float32, and their gradient has their dtype.

    >>> logits_logprob(torch.zeros(1, 2, 4), torch.tensor([[0, 3]]), entropy=True).entropy.exp()
    tensor([[4., 4.]])
    """
    check_float("logits", logits)
    if logits.ndim < 1 or logits.shape[-1] < 1:
        raise ValueError(f"logits has shape {tuple(logits.shape)}, expected (..., V) with V at least 1")
    check_targets(target, mask, logits.shape[:-1], "logits", logits.device)
    vocabulary = logits.shape[-1]
    plan = _Plan(
        transform_of(logit_scale, soft_cap, temperature),
        entropy,
        sum_sq_probs,
        **_tiles_for(logits.device, logits.dtype, max(1, 2**20 // vocabulary)) | {"step": 1},
    )
    flat = logits.reshape(-1, vocabulary)
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    targets = _prepare_targets(target, mask, 0, vocabulary, plan)
    return _reshaped(_LogitsLogProb.apply(flat, targets, plan), target.shape)


def out_of_vocabulary(*, reset: bool = False) -> int:
    """Number of valid targets outside the vocabulary so far in this process, on all devices.

    Reading it synchronises with every device that holds a count.  ``reset`` sets it back to 0 after it is read.
    """
    return _read(_OUT_OF_VOCABULARY, reset)


def out_of_support(*, reset: bool = False) -> int:
    """Number of valid targets outside their ``support`` so far in this process, on all GPUs.

    On a CPU such a target is an error and not counted.  Reading it synchronises as ``out_of_vocabulary`` does.

    >>> out_of_support()
    0
    """
    return _read(_OUT_OF_SUPPORT, reset)


def naive_logprob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    support: Tensor | tuple[Tensor, Tensor] | None = None,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    soft_cap: float | None = None,
) -> LogProbs:
    """Reference definition of ``linear_logprob``: all logits in memory, gradients by autograd, always with entropy."""
    logits = hidden @ weight.T
    logits = logit_scale * (logits if bias is None else logits + bias)
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    if support is not None:
        kept = support_of(support, target.shape, target.device, len(weight))
        logits = logits.where(kept.tile(slice(None), target.numel(), 0, len(weight)).view(logits.shape), -torch.inf)
    log_p = torch.log_softmax(logits / temperature, -1)
    p = log_p.exp()
    entropy = -(p * torch.where(p > 0, log_p, 0)).sum(-1)
    return LogProbs(log_p.gather(-1, target[..., None])[..., 0], entropy, (p * p).sum(-1).detach())


# -- the head ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Plan:
    """Options of one call, and the sizes and dtypes of its tiles."""

    transform: Transform
    entropy: bool
    squares: bool
    tiles: Any
    """The module that supplies ``fold_tile`` and ``grad_tile``."""
    inputs: torch.dtype
    """Dtype of hidden states and head, after autocast."""
    factors: torch.dtype
    """Dtype of the matrices that are multiplied, the gradient tile included."""
    sums: torch.dtype
    """Dtype of products, sums and results."""
    chunk: int
    columns: int
    step: int
    """The size of a chunk is a multiple of this; above 1, the last chunk is padded."""
    on_host: bool
    """Whether values can be read without a host synchronisation, as on a CPU.  Then a forward pass skips masked tokens,
    and a target outside its support is an error."""
    sums_gradient: bool = False
    """Whether the forward pass computes dlogp/dhidden."""
    batch_invariant: bool = False
    group: Any = None
    """The process group whose ranks hold the parts of the head; None: the head is whole."""

    @property
    def slope(self) -> float:
        """The largest d logit / d product."""
        return abs(self.transform.scale) / self.transform.temperature


def _tiles_for(device: torch.device, dtype: torch.dtype, chunk: int | None) -> dict[str, Any]:
    on_gpu = device.type == "cuda"
    fused = chosen() == "triton" or (chosen() == "auto" and on_gpu)
    sums = torch.promote_types(dtype, torch.float32)
    module: Any = tiles
    if fused and sums == torch.float32 and not why_no_triton():
        from offcorr.kernels.logprob import fold

        module = fold
    as_on_gpu = on_gpu or module is not tiles
    # On a CPU, products of half-precision matrices are slow, and their results are rounded to half precision.
    factors = dtype if as_on_gpu else sums
    chunk, columns, step = (chunk or 4096, 16384, 256) if as_on_gpu else (chunk or 512, 8192, 1)
    return dict(
        tiles=module,
        inputs=dtype,
        factors=factors,
        sums=sums,
        chunk=chunk,
        columns=columns,
        step=min(step, chunk),
        on_host=not as_on_gpu,
    )


class _Targets(NamedTuple):
    """Targets of a call, each tensor [N]."""

    clamped: Tensor
    """The target's row of the head, clamped so that it can be used as an index."""
    column: Tensor
    """The same where this head has that row, else -1."""
    mask: Tensor | None
    unsupported: Tensor | None
    """Whether the token is valid and its target is outside its support; None: no target is."""
    support: Support | None
    start: int
    """The vocabulary entry of the head's first row."""

    @property
    def here(self) -> Tensor:
        """Whether this head has the target's row."""
        return self.column >= 0

    def zero_masked(self, values: Tensor) -> Tensor:
        """``values`` [N], set to 0 (False) on masked tokens."""
        return values if self.mask is None else torch.where(self.mask, values, 0)

    def valid(self, values: Tensor) -> Tensor:
        """``values`` [N], bool, and whether the token is valid."""
        return values if self.mask is None else values & self.mask

    def computed(self, plan: _Plan) -> Tensor | None:
        """Indices of the tokens that a forward pass computes; None: all."""
        return self.mask.nonzero().squeeze(1) if self.mask is not None and plan.on_host else None

    def kept(self, rows: _Rows, chunk: slice, first: int, columns: int) -> Tensor | None:
        """The part of the support for one tile [R, C] that starts at row ``first`` of the head."""
        if self.support is None:
            return None
        return self.support.tile(rows.positions(chunk), chunk.stop - chunk.start, self.start + first, columns)


def _prepare_targets(
    target: Tensor, mask: Tensor | None, start: int, size: int, plan: _Plan, support: Support | None = None
) -> _Targets:
    """The targets and mask, flattened, for a head with ``size`` rows from vocabulary entry ``start`` on.

    Raises:
        ValueError: a valid target is outside its support (on a CPU).
    """
    shape = target.shape
    target = target.reshape(-1).long()
    row = target - start
    mask = None if mask is None else mask.reshape(-1) != 0
    targets = _Targets(
        row.clamp(0, size - 1), torch.where((row >= 0) & (row < size), row, -1), mask, None, support, start
    )
    if plan.group is None:
        outside = targets.valid(~targets.here)
        _count(_OUT_OF_VOCABULARY, outside)
        if plan.on_host and not torch.compiler.is_compiling() and outside.any():
            warn_first(
                "linear_logprob: out of vocabulary",
                f"{int(outside.sum())} targets, such as {int(target[outside][0])}, are outside the vocabulary of "
                f"{size}, and their results are NaN: pass mask=, which leaves padding such as -100 out",
            )
    if support is None:
        return targets
    unsupported = targets.valid(~support.contains(target))
    if not plan.on_host:
        _count(_OUT_OF_SUPPORT, unsupported)
        return targets._replace(unsupported=unsupported)
    if wrong := unsupported.nonzero().squeeze(1).tolist():
        place = [int(x) for x in torch.unravel_index(torch.tensor(wrong[0]), shape)]
        others = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise ValueError(
            f"target{place} is {target[wrong[0]]}{others}, expected one of the tokens that support{place} keeps, from "
            "which the sampler drew; are target and support of the same positions?"
        )
    return targets


_OUT_OF_VOCABULARY: dict[torch.device, Tensor] = {}
_OUT_OF_SUPPORT: dict[torch.device, Tensor] = {}


def _count(counts: dict[torch.device, Tensor], wrong: Tensor) -> None:
    device = wrong.device
    if device not in counts:
        with torch.inference_mode(False):  # a tensor made in inference mode could not be added to outside it
            counts[device] = torch.zeros((), dtype=torch.int64, device=device)
    counts[device] += wrong.sum()


def _read(counts: dict[torch.device, Tensor], reset: bool) -> int:
    total = sum(int(count.item()) for count in counts.values())
    if reset:
        counts.clear()
    return total


class _Rows:
    """The tokens that are computed, gathered into chunks of equal size; the last chunk may be padded with zeros."""

    def __init__(self, index: Tensor | None, tokens: int, plan: _Plan) -> None:
        self.tokens = tokens
        self.index = index if index is None or index.numel() < tokens else None
        self.count = tokens if self.index is None else self.index.numel()
        if plan.batch_invariant:
            self.size = plan.chunk
        else:  # as few chunks as the plan allows, of nearly equal size
            size = math.ceil(self.count / max(1, math.ceil(self.count / plan.chunk)))
            self.size = max(1, _round_up(size, plan.step))
        pads = plan.batch_invariant or plan.step > 1
        self.padded = _round_up(self.count, self.size) if pads else self.count
        # Batch-invariant results need a copy: the caller's tensor may start at any address, and some matrix products
        # choose their kernel by the alignment.
        self.uses_input = self.index is None and self.padded == self.tokens and not plan.batch_invariant

    def __iter__(self) -> Iterator[slice]:
        for first in range(0, self.padded, self.size):
            yield slice(first, min(first + self.size, self.padded))

    def gather(self, x: Tensor) -> Tensor:
        """Rows of ``x`` [N, ...] for the computed tokens, [padded, ...]."""
        if self.uses_input:
            return x
        gathered = x.new_zeros(self.padded, *x.shape[1:])
        gathered[: self.count] = x if self.index is None else x[self.index]
        return gathered

    def positions(self, chunk: slice) -> slice | Tensor:
        """The tokens of one chunk, as an index of a tensor [N, ...]; fewer than the chunk's rows if it is padded."""
        return chunk if self.index is None else self.index[chunk]

    def copy(self, x: Tensor, chunk: slice, dtype: torch.dtype) -> Tensor:
        """A copy of one chunk of ``x`` [N, ...] in ``dtype``, which the caller may overwrite."""
        return x[self.positions(chunk)].to(dtype, copy=True)

    def scatter(self, x: Tensor) -> Tensor:
        """``x`` [padded, ...] as [N, ...], with 0 for tokens that were not computed."""
        x = x[: self.count]
        return x if self.index is None else x.new_zeros(self.tokens, *x.shape[1:]).index_copy_(0, self.index, x)


class _LinearLogProb(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: _Targets, plan: _Plan
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        ctx.set_materialize_grads(False)
        ctx.targets, ctx.plan, ctx.head = targets, plan, weight.shape
        with torch.autocast(hidden.device.type, enabled=False):
            rows = _Rows(targets.computed(plan), len(hidden), plan)
            h, target, column = _gathered(hidden, targets, rows, plan)
            logit, slope = _target_logit(h, weight, bias, target, column, rows, plan)
            state = tiles.start(rows.padded, logit)
            gradient = torch.empty_like(h, dtype=plan.sums) if plan.sums_gradient else None
            buffer = _Buffer(rows, weight, plan)
            for first, w, b in _vocabulary(weight, bias, plan):
                for c in rows:
                    tile, weights = buffer.tiles(c, w)
                    _product(h[c], w.T, tile)
                    plan.tiles.fold_tile(
                        *(tile, b, column[c], state[:, c], plan.transform, first),
                        weights=None if gradient is None else weights,
                        kept=targets.kept(rows, c, first, len(w)),
                        entropy=plan.entropy,
                        squares=plan.squares,
                    )
                    if gradient is not None:
                        if first:
                            gradient[c].mul_(state[4, c, None])
                        _product(weights, w, gradient[c], accumulate=first > 0)
            whole = state
            if plan.group is not None:
                whole, logit = _merged(state, logit, column, targets, rows, plan)
            if targets.unsupported is not None:
                logit = torch.where(rows.gather(targets.unsupported), torch.nan, logit)
            finished = tiles.finish(whole, logit)
            if gradient is not None:
                to_probability = -(state[0] - finished.lse).exp()
                to_target = -torch.expm1(finished.logp) * slope
                for c in rows:
                    row = weight[target[c]].to(plan.inputs).to(plan.sums)
                    gradient[c].mul_(to_probability[c, None]).addcmul_(to_target[c, None], row)
                gradient = _summed(rows.scatter(gradient), plan).to(hidden.dtype)
            stats = rows.scatter(torch.stack([finished.lse, finished.entropy, finished.logp, slope], 1))
            ctx.save_for_backward(hidden, weight, bias, stats, gradient)
            return _results(ctx, finished, rows, targets, plan)

    @staticmethod
    def backward(
        ctx: Any, d_logp: Tensor | None, d_entropy: Tensor | None, _: None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        _refuse_second_derivatives()
        hidden, weight, bias, stats, gradient = ctx.saved_tensors
        targets, plan = ctx.targets, ctx.plan
        if d_logp is None and d_entropy is None:
            return None, None, None, None, None
        if gradient is not None and d_entropy is None and d_logp is not None:
            d = targets.zero_masked(d_logp)[:, None]
            return torch.where(d != 0, d * gradient, 0).to(hidden.dtype), None, None, None, None
        if weight.shape != ctx.head:
            raise RuntimeError(
                f"weight has shape {tuple(weight.shape)} in the backward pass, expected {tuple(ctx.head)} as in the "
                "forward pass: a head that FSDP or ZeRO-3 splits again in between must be gathered for both"
            )
        with torch.autocast(hidden.device.type, enabled=False):
            per_token, active = _incoming(stats, d_logp, d_entropy, targets)
            rows = _Rows(
                active.nonzero().squeeze(1), len(hidden), plan
            )  # on a GPU, the only host synchronisation of a backward pass
            h, target, column = _gathered(hidden, targets, rows, plan)
            per_row = rows.gather(per_token).T.contiguous()
            unit = None
            if plan.factors == torch.float16 and rows.count:
                # float16 has no numbers between 0 and 6e-8: gradients are divided by a unit near the largest of them.
                unit = (per_row[2:4].abs().amax() * (plan.slope / 2**8)).clamp(min=torch.finfo(plan.sums).tiny)
                per_row[2:] /= unit
            # The targets' entries are rounded here, so that their rounding error is known and can be added back.
            rounded = per_row[4].to(plan.factors).to(plan.sums)
            lost, per_row[4] = per_row[4] - rounded, rounded
            needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
            allocate = torch.empty_like if rows.count else torch.zeros_like
            grad_hidden = allocate(h, dtype=plan.sums) if needs_hidden else None
            grad_weight = allocate(weight) if needs_weight else None
            grad_bias = torch.zeros_like(bias, dtype=plan.sums) if needs_bias else None
            buffer = _Buffer(rows, weight, plan)
            for first, w, b in _vocabulary(weight, bias, plan) if rows.count else ():
                last = first + len(w)
                summed: Tensor | None = None
                if grad_weight is not None:
                    summed = grad_weight[first:last]
                    if summed.dtype != plan.sums:
                        summed = torch.empty_like(summed, dtype=plan.sums)
                for c in rows:
                    tile, out = buffer.tiles(c, w)
                    _product(h[c], w.T, tile)
                    plan.tiles.grad_tile(
                        *(tile, b, column[c], per_row[:, c], plan.transform, first, out),
                        kept=targets.kept(rows, c, first, len(w)),
                        entropy=d_entropy is not None,
                    )
                    if grad_hidden is not None:
                        _product(out, w, grad_hidden[c], accumulate=first > 0)
                    if summed is not None:
                        _product(out.T, h[c], summed, accumulate=c.start > 0)
                    if grad_bias is not None:
                        grad_bias[first:last] += out.sum(0, dtype=plan.sums)
                if grad_weight is not None and summed is not None:
                    grad_weight[first:last] = summed if unit is None else summed * unit
            if grad_hidden is not None:
                for c in rows if plan.factors != plan.sums else ():
                    grad_hidden[c].addcmul_(lost[c, None], weight[target[c]].to(plan.inputs).to(plan.sums))
                grad_hidden = rows.scatter(grad_hidden if unit is None else grad_hidden * unit)
                grad_hidden = _summed(grad_hidden, plan).to(hidden.dtype)
            if grad_bias is not None:
                grad_bias = (grad_bias if unit is None else grad_bias * unit).to(bias.dtype)
            return grad_hidden, grad_weight, grad_bias, None, None


def _vocabulary(weight: Tensor, bias: Tensor | None, plan: _Plan) -> Iterator[tuple[int, Tensor, Tensor | None]]:
    """(number of the first entry, weight, bias) of each vocabulary tile."""
    for first in range(0, len(weight), plan.columns):
        tile = slice(first, first + plan.columns)
        yield first, weight[tile].to(plan.inputs).to(plan.factors), None if bias is None else bias[tile]


def _gathered(hidden: Tensor, targets: _Targets, rows: _Rows, plan: _Plan) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states of the computed tokens, and their targets' clamped rows and columns.

    A NaN in one token's hidden states stays in that token's row of every product.
    """
    return rows.gather(hidden).to(plan.factors), rows.gather(targets.clamped), rows.gather(targets.column)


def _target_logit(
    h: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, column: Tensor, rows: _Rows, plan: _Plan
) -> tuple[Tensor, Tensor]:
    """Logits of the targets and d logit / d product, each [padded], computed in ``plan.sums``.

    Where this head does not have the target's row they are 0 if another rank may have it, else the logit is NaN, which
    makes every result of the token NaN.
    """
    product = torch.empty(rows.padded, dtype=plan.sums, device=h.device)
    for c in rows:
        row = weight[target[c]].to(plan.inputs).to(plan.sums)
        torch.sum(h[c].to(plan.sums) * row, 1, out=product[c])
    logit, slope = plan.transform(product, None if bias is None else bias.to(plan.sums)[target])
    here = column >= 0
    return torch.where(here, logit, torch.nan if plan.group is None else 0), slope * here.to(logit.dtype)


def _merged(
    state: Tensor, logit: Tensor, column: Tensor, targets: _Targets, rows: _Rows, plan: _Plan
) -> tuple[Tensor, Tensor]:
    """State and logits of the targets over all ranks' parts of the vocabulary, by one all-gather.

    The ranks are summed in the same order on each of them, so that all have the same bits.
    """
    own = torch.stack([*state[:4], logit, (column >= 0).to(logit.dtype)])
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size(plan.group))]
    dist.all_gather(parts, own, group=plan.group)
    ranks = torch.stack(parts)
    found = ranks[:, 5].sum(0) == 1
    _count(_OUT_OF_VOCABULARY, targets.valid(rows.scatter(~found)))
    return tiles.merge(ranks[:, :4]), torch.where(found, ranks[:, 4].sum(0), torch.nan)


def _summed(gradient: Tensor, plan: _Plan) -> Tensor:
    """The sum of a gradient over the ranks that hold the parts of the head."""
    if plan.group is not None:
        dist.all_reduce(gradient, group=plan.group)
    return gradient


class _Buffer:
    """Memory that every tile reuses: one tile of products, and one of factors if their dtype is another."""

    def __init__(self, rows: _Rows, weight: Tensor, plan: _Plan) -> None:
        size = min(rows.size, rows.padded) * min(plan.columns, len(weight))
        self.first = self.second = torch.empty(size, dtype=plan.sums, device=weight.device)
        if plan.factors != plan.sums:
            self.second = torch.empty(size, dtype=plan.factors, device=weight.device)

    def tiles(self, chunk: slice, w: Tensor) -> tuple[Tensor, Tensor]:
        """Views of both for a chunk of tokens and a vocabulary tile ``w``."""
        shape = chunk.stop - chunk.start, len(w)
        return self.first[: math.prod(shape)].view(shape), self.second[: math.prod(shape)].view(shape)


def _product(a: Tensor, b: Tensor, out: Tensor, accumulate: bool = False) -> None:
    """Writes a @ b to ``out``, or adds it, in the precision of ``out``."""
    if a.dtype == out.dtype:
        torch.addmm(out, a, b, beta=float(accumulate), out=out)
    elif not (a.is_cuda and _WIDENS):
        torch.addmm(out, a.to(out.dtype), b.to(out.dtype), beta=float(accumulate), out=out)
    elif accumulate:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)  # type: ignore[call-overload]
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)  # type: ignore[call-overload]


_WIDENS = hasattr(torch.ops.aten.mm, "dtype_out") and torch.version.hip is None
"""Whether cuBLAS can return float32 products of half-precision matrices (from torch 2.8)."""


def _incoming(
    stats: Tensor, d_logp: Tensor | None, d_entropy: Tensor | None, targets: _Targets
) -> tuple[Tensor, Tensor]:
    """Inputs of ``grad_tile`` for every token [N, 5] (``tiles.ROWS``), and which tokens have a gradient [N]."""
    lse, entropy, logp, slope = stats.unbind(1)
    none = torch.zeros_like(lse)
    d_logp = none if d_logp is None else targets.zero_masked(d_logp)
    d_entropy = none if d_entropy is None else targets.zero_masked(d_entropy)
    p = logp.exp()
    d_target = -d_logp * torch.expm1(logp) - d_entropy * torch.where(p > 0, p * (logp + entropy), 0)
    rows = torch.stack([lse, entropy, d_logp, d_entropy, d_target * slope], 1)
    return rows, (d_logp != 0) | (d_entropy != 0)


def _refuse_second_derivatives() -> None:
    if torch.is_grad_enabled():  # create_graph=True: autograd would treat the gradient as a constant
        raise RuntimeError(
            "log-probabilities have first derivatives only: create_graph=True asks for the gradient of a gradient; "
            "naive_logprob supports it, with all logits in memory"
        )


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _aligned(x: Tensor) -> Tensor:
    """``x`` [..., H], padded with zeros to a multiple of ``ALIGNED``."""
    missing = -x.shape[-1] % ALIGNED
    return torch.nn.functional.pad(x, (0, missing)) if missing else x


def _results(
    ctx: Any, finished: Finished, rows: _Rows, targets: _Targets, plan: _Plan
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    logp = targets.zero_masked(rows.scatter(finished.logp))
    entropy = targets.zero_masked(rows.scatter(finished.entropy)) if plan.entropy else None
    sum_sq_probs = targets.zero_masked(rows.scatter(finished.sum_sq_probs)) if plan.squares else None
    if sum_sq_probs is not None:
        ctx.mark_non_differentiable(sum_sq_probs)
    return logp, entropy, sum_sq_probs


# -- from logits ---------------------------------------------------------------------------------------------


class _LogitsLogProb(torch.autograd.Function):
    """The Triton kernels read the logits in place; the torch functions work on copies of a few rows at a time."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: _Targets, plan: _Plan
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        ctx.set_materialize_grads(False)
        ctx.targets, ctx.plan = targets, plan
        fused = plan.tiles is not tiles
        rows = _Rows(targets.computed(plan), len(logits), plan)
        target = rows.gather(targets.clamped)
        picked = logits.gather(1, targets.clamped[:, None])[:, 0].to(plan.sums, copy=True)
        outside = targets.valid(~targets.here)
        logit, slope = plan.transform(rows.gather(torch.where(outside, torch.nan, picked)), None)
        state = tiles.start(rows.padded, logit)
        for c in [slice(0, rows.padded)] if fused else rows:
            plan.tiles.fold_tile(
                *(
                    logits if fused else rows.copy(logits, c, plan.sums),
                    None,
                    target[c],
                    state[:, c],
                    plan.transform,
                    0,
                ),
                entropy=plan.entropy,
                squares=plan.squares,
            )
        finished = tiles.finish(state, logit)
        slope = slope * torch.ones_like(logit)
        ctx.save_for_backward(
            logits, rows.scatter(torch.stack([finished.lse, finished.entropy, finished.logp, slope], 1))
        )
        return _results(ctx, finished, rows, targets, plan)

    @staticmethod
    def backward(ctx: Any, d_logp: Tensor | None, d_entropy: Tensor | None, _: None) -> tuple[Tensor, None, None]:
        _refuse_second_derivatives()
        logits, stats = ctx.saved_tensors
        targets, plan = ctx.targets, ctx.plan
        per_token, active = _incoming(stats, d_logp, d_entropy, targets)
        if plan.tiles is not tiles:  # rows without a gradient are not read, and get zeros
            grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
            plan.tiles.grad_tile(
                *(logits, None, targets.clamped, per_token.T.contiguous(), plan.transform, 0, grad),
                entropy=d_entropy is not None,
            )
            return grad, None, None
        grad = torch.zeros_like(logits)
        rows = _Rows(active.nonzero().squeeze(1), len(logits), plan)
        target, per_row = rows.gather(targets.clamped), rows.gather(per_token).T
        for c in rows:
            tile = rows.copy(logits, c, plan.sums)
            plan.tiles.grad_tile(
                *(tile, None, target[c], per_row[:, c], plan.transform, 0, tile), entropy=d_entropy is not None
            )
            grad[c if rows.index is None else rows.index[c]] = tile.to(grad.dtype)
        return grad, None, None


def _reshaped(results: tuple[Tensor, Tensor | None, Tensor | None], shape: torch.Size) -> LogProbs:
    return LogProbs(*(None if x is None else x.reshape(shape) for x in results))  # type: ignore[arg-type]
