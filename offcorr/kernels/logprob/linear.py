"""Log-probabilities of targets under a linear head, without the [tokens, vocabulary] logits.

    logits = soft_cap tanh(logit_scale (hidden . weight^T + bias) / soft_cap) / temperature
    logp = log softmax(logits)[target]      d logp / d logits_v = 1[v = target] - p_v
    entropy = -sum_v p_v log p_v            d entropy / d logits_v = -p_v (log p_v + entropy)

The head is walked in vocabulary tiles, within each in chunks of tokens: a matrix product into one reused [chunk, tile]
buffer, then ``fold_tile`` (torch here, Triton on a GPU).  Half-precision inputs give float32 products.  The backward
computes the tiles again, for the tokens alone whose incoming gradient is not 0; under a frozen head the forward has
already summed U = dlogp/dhidden, and the backward is one elementwise product.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offcorr.kernels.logprob import tiles
from offcorr.kernels.logprob.checks import check_float, check_head, check_targets, transform_of
from offcorr.kernels.logprob.tiles import Finished, Transform

ALIGNED = 64
"""Numbers in a row, and rows in a chunk, whose multiples begin at addresses that all matrix products take alike."""


class LogProbs(NamedTuple):
    """Per token, in the shape of ``target``, float32 (float64 for float64 inputs); 0 under the mask."""

    logp: Tensor
    """log p(target), nats."""
    entropy: Tensor | None
    """Entropy of the whole distribution, nats."""
    sum_sq_probs: Tensor | None
    """Sum over the vocabulary of p^2; detached."""


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    soft_cap: float | None = None,
    entropy: bool = False,
    sum_sq_probs: bool = False,
    frozen_head: bool | None = None,
    batch_invariant: bool = False,
    chunk: int | None = None,
) -> LogProbs:
    """Log-probabilities (and entropy) of ``target`` [...] under ``hidden`` [..., H] and a head ``weight`` [V, H].

    Differentiable in hidden, weight and bias through ``logp`` and ``entropy``; ``sum_sq_probs`` is detached.

    Args:
        bias: [V].
        mask: [...], bool or integer: the tokens that count.  Elsewhere nothing is read, results and gradients are 0.
        frozen_head: Weight and bias get no gradient, and dlogp/dhidden [..., H] is summed in the forward pass
            (2 matrix products, not 3).  None: where neither asks for one.  An entropy gradient costs a recomputation.
        batch_invariant: A token's results do not depend on what else is in the batch, bit for bit: every matrix
            product has ``chunk`` rows, the last padded.  ``chunk`` is rounded up to a multiple of 64, and H is padded
            to one (which copies the head where it is none).
        chunk: Tokens in a tile; None: 512 on a CPU, at most 4096 on a GPU.

    A target outside the vocabulary where the mask is (-100 included) gives NaN in all results of its token and is
    counted (``out_of_vocabulary``), without a host synchronisation.  Under autocast the inputs are rounded to its
    dtype, as a linear layer does.

    Raises:
        RuntimeError: a gradient of the gradient is asked for (``create_graph=True``).
        ValueError: shapes that do not fit together, tensors on different devices, a vocabulary-sharded head,
            temperature, soft_cap or chunk not positive.
        TypeError: dtypes that differ (outside autocast) or are none of float16, bfloat16, float32, float64; a
            target or mask of the wrong kind.

    >>> hidden, weight = torch.zeros(2, 4), torch.ones(8, 4)
    >>> linear_logprob(hidden, weight, torch.tensor([0, 7])).logp.exp()
    tensor([0.1250, 0.1250])
    """
    dtype = check_head(hidden, weight, bias)
    check_targets(target, mask, hidden.shape[:-1], "hidden", hidden.device)
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk is {chunk}, expected at least 1 token")
    if frozen_head is None:
        frozen_head = not (weight.requires_grad or (bias is not None and bias.requires_grad))
    if frozen_head:
        weight, bias = weight.detach(), bias.detach() if bias is not None else None
    tiles = _tiles_for(hidden.device, dtype, chunk)
    if batch_invariant:
        # Rows of one product are summed in one order only where they, and the blocks they are taken in, are aligned.
        hidden, weight = _aligned(hidden), _aligned(weight)
        tiles["chunk"] = _round_up(tiles["chunk"], ALIGNED)
    plan = _Plan(
        transform_of(logit_scale, soft_cap, temperature),
        entropy,
        sum_sq_probs,
        sums_gradient=frozen_head and hidden.requires_grad and torch.is_grad_enabled(),
        batch_invariant=batch_invariant,
        **tiles,
    )
    flat = hidden.reshape(-1, hidden.shape[-1]).to(dtype)
    token = _Targets.of(target, mask, weight.shape[0])
    found = _LinearLogProb.apply(flat, weight, bias, token, plan)
    return _shaped(found, target.shape)


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
    """As ``linear_logprob``, from ``logits`` [..., V], for models whose head cannot be reached.

    Half-precision logits are read as they are and summed in float32; the gradient has their dtype.

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
    found = _LogitsLogProb.apply(flat, _Targets.of(target, mask, vocabulary), plan)
    return _shaped(found, target.shape)


def out_of_vocabulary(*, reset: bool = False) -> int:
    """Targets outside the vocabulary met so far in this process, all devices; reading them waits for the devices."""
    found = sum(int(count.item()) for count in _OUT_OF_VOCABULARY.values())
    if reset:
        _OUT_OF_VOCABULARY.clear()
    return found


def naive_logprob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    soft_cap: float | None = None,
) -> LogProbs:
    """``linear_logprob`` as one would write it: all logits at once, gradients by autograd; the definition."""
    logits = hidden @ weight.T
    logits = logit_scale * (logits if bias is None else logits + bias)
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    log_p = torch.log_softmax(logits / temperature, -1)
    p = log_p.exp()
    entropy = -torch.where(p > 0, p * log_p, 0).sum(-1)
    return LogProbs(log_p.gather(-1, target[..., None])[..., 0], entropy, (p * p).sum(-1).detach())


# -- the head ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Plan:
    """What one call does, and in which tiles."""

    transform: Transform
    entropy: bool
    squares: bool
    tiles: Any
    """The module with ``fold_tile`` and ``grad_tile``."""
    inputs: torch.dtype
    """Of hidden states and head, autocast included."""
    factors: torch.dtype
    """Of the matrices that are multiplied, the gradient tile among them."""
    sums: torch.dtype
    """Of products, sums and results."""
    chunk: int
    columns: int
    step: int
    """Chunks are cut to a multiple of this, and the last is padded if it is above 1."""
    counts_mask: bool
    """Whether a forward pass leaves masked tokens out; on a GPU it would have to wait for their number."""
    sums_gradient: bool = False
    batch_invariant: bool = False

    @property
    def slope(self) -> float:
        """The largest d logit / d product."""
        return abs(self.transform.scale) / self.transform.temperature


def _tiles_for(device: torch.device, dtype: torch.dtype, chunk: int | None) -> dict[str, Any]:
    from offcorr.kernels.dispatch import chosen

    on_gpu = device.type == "cuda"
    fused = chosen() == "triton" or (chosen() == "auto" and on_gpu)
    sums = torch.promote_types(dtype, torch.float32)
    tiles: Any = tiles
    if fused and sums == torch.float32 and importlib.util.find_spec("triton") is not None:
        from offcorr.kernels.logprob import fold

        tiles = fold
    as_on_gpu = on_gpu or tiles is not tiles
    # A CPU multiplies half precision slowly and rounds the result to it.
    factors = dtype if as_on_gpu else sums
    chunk, columns, step = (chunk or 4096, 16384, 256) if as_on_gpu else (chunk or 512, 8192, 1)
    return dict(
        tiles=tiles,
        inputs=dtype,
        factors=factors,
        sums=sums,
        chunk=chunk,
        columns=columns,
        step=min(step, chunk),
        counts_mask=not as_on_gpu,
    )


class _Targets(NamedTuple):
    """Per token [N]: a target that can be looked up, whether it counts, whether it was outside the vocabulary."""

    inside: Tensor
    mask: Tensor | None
    bad: Tensor

    @classmethod
    def of(cls, target: Tensor, mask: Tensor | None, vocabulary: int) -> _Targets:
        target = target.reshape(-1).long()
        bad = (target < 0) | (target >= vocabulary)
        if mask is not None:
            mask = mask.reshape(-1) != 0
            bad = bad & mask
        device = target.device
        if device not in _OUT_OF_VOCABULARY:
            with torch.inference_mode(False):  # whose tensors could not be added to afterwards
                _OUT_OF_VOCABULARY[device] = torch.zeros((), dtype=torch.int64, device=device)
        _OUT_OF_VOCABULARY[device] += bad.sum()
        return cls(target.clamp(0, vocabulary - 1), mask, bad)

    def present(self, found: Tensor) -> Tensor:
        """``found`` [N] with 0 under the mask."""
        return found if self.mask is None else torch.where(self.mask, found, 0)

    def kept(self, plan: _Plan) -> Tensor | None:
        """Which tokens a forward pass computes; None: all."""
        return self.mask.nonzero().squeeze(1) if self.mask is not None and plan.counts_mask else None


_OUT_OF_VOCABULARY: dict[torch.device, Tensor] = {}


class _Rows:
    """The tokens that take part, brought together in chunks of one size; the last may be padded with zeros."""

    def __init__(self, index: Tensor | None, tokens: int, plan: _Plan) -> None:
        self.tokens = tokens
        self.index = index if index is None or index.numel() < tokens else None
        self.count = tokens if self.index is None else self.index.numel()
        if plan.batch_invariant:
            self.size = plan.chunk
        else:  # chunks as equal as can be
            size = math.ceil(self.count / max(1, math.ceil(self.count / plan.chunk)))
            self.size = max(1, _round_up(size, plan.step))
        pads = plan.batch_invariant or plan.step > 1
        self.padded = _round_up(self.count, self.size) if pads else self.count
        # A view of the caller's may lie at any address, and some matrix products look at that.
        self.as_it_is = self.index is None and self.padded == self.tokens and not plan.batch_invariant

    def __iter__(self) -> Iterator[slice]:
        for first in range(0, self.padded, self.size):
            yield slice(first, min(first + self.size, self.padded))

    def take(self, x: Tensor) -> Tensor:
        """[N, ...] -> [padded, ...]"""
        if self.as_it_is:
            return x
        taken = x.new_zeros(self.padded, *x.shape[1:])
        taken[: self.count] = x if self.index is None else x[self.index]
        return taken

    def copy(self, x: Tensor, chunk: slice, dtype: torch.dtype) -> Tensor:
        """One chunk of ``x`` [N, ...], to be overwritten."""
        return x[chunk if self.index is None else self.index[chunk]].to(dtype, copy=True)

    def put(self, x: Tensor) -> Tensor:
        """[padded, ...] -> [N, ...], 0 for tokens that took no part"""
        x = x[: self.count]
        return x if self.index is None else x.new_zeros(self.tokens, *x.shape[1:]).index_copy_(0, self.index, x)


class _LinearLogProb(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, token: _Targets, plan: _Plan
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        ctx.set_materialize_grads(False)
        ctx.token, ctx.plan, ctx.head = token, plan, weight.shape
        with torch.autocast(hidden.device.type, enabled=False):
            rows = _Rows(token.kept(plan), len(hidden), plan)
            h, target = _taken(hidden, token, rows, plan)
            logit, slope = _target_logit(h, weight, bias, target, rows, plan)
            logit = torch.where(rows.take(token.bad), torch.nan, logit)  # from here on, everything of the token is NaN
            state = tiles.start(rows.padded, logit)
            gradient = torch.empty_like(h, dtype=plan.sums) if plan.sums_gradient else None
            buffer = _Buffer(rows, weight, plan)
            for first, w, b in _vocabulary(weight, bias, plan):
                for c in rows:
                    tile, weights = buffer.tiles(c, w)
                    _product(h[c], w.T, tile)
                    plan.tiles.fold_tile(
                        *(tile, b, target[c], state[:, c], plan.transform, first),
                        weights=None if gradient is None else weights,
                        entropy=plan.entropy,
                        squares=plan.squares,
                    )
                    if gradient is not None:
                        if first:
                            gradient[c].mul_(state[4, c, None])
                        _product(weights, w, gradient[c], accumulate=first > 0)
            found = tiles.finish(state, logit)
            if gradient is not None:
                to_probability = -(state[0] - found.lse).exp()
                to_target = -torch.expm1(found.logp) * slope
                for c in rows:
                    row = weight[target[c]].to(plan.inputs).to(plan.sums)
                    gradient[c].mul_(to_probability[c, None]).addcmul_(to_target[c, None], row)
                gradient = rows.put(gradient.to(hidden.dtype))
            stats = rows.put(torch.stack([found.lse, found.entropy, found.logp, slope], 1))
            ctx.save_for_backward(hidden, weight, bias, stats, gradient)
            return _results(ctx, found, rows, token, plan)

    @staticmethod
    def backward(
        ctx: Any, d_logp: Tensor | None, d_entropy: Tensor | None, _: None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        _refuse_second_derivatives()
        hidden, weight, bias, stats, gradient = ctx.saved_tensors
        token, plan = ctx.token, ctx.plan
        if d_logp is None and d_entropy is None:
            return None, None, None, None, None
        if gradient is not None and d_entropy is None and d_logp is not None:
            d = token.present(d_logp)[:, None]
            return torch.where(d != 0, d * gradient, 0).to(hidden.dtype), None, None, None, None
        if weight.shape != ctx.head:
            raise RuntimeError(
                f"weight has shape {tuple(weight.shape)} in the backward pass, expected {tuple(ctx.head)} as in the "
                "forward pass: a head that FSDP or ZeRO-3 splits again in between must be gathered for both"
            )
        with torch.autocast(hidden.device.type, enabled=False):
            per_token, alive = _incoming(stats, d_logp, d_entropy, token)
            rows = _Rows(alive.nonzero().squeeze(1), len(hidden), plan)  # on a GPU, the one wait of a backward pass
            h, target = _taken(hidden, token, rows, plan)
            given = rows.take(per_token).T.contiguous()
            unit = None
            if plan.factors == torch.float16 and rows.count:
                # Which holds little below 6e-8: gradients are counted in units near the largest.
                unit = (given[2:4].abs().amax() * (plan.slope / 2**8)).clamp(min=torch.finfo(plan.sums).tiny)
                given[2:] /= unit
            # Rounded here, so that what the tile loses of the targets' entries is known and can be put back.
            rounded = given[4].to(plan.factors).to(plan.sums)
            lost, given[4] = given[4] - rounded, rounded
            to_hidden, to_weight, to_bias = ctx.needs_input_grad[:3]
            like = (torch.empty_like, torch.zeros_like)[not rows.count]
            grad_hidden = like(h, dtype=plan.sums) if to_hidden else None
            grad_weight = like(weight) if to_weight else None
            grad_bias = torch.zeros_like(bias, dtype=plan.sums) if to_bias else None
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
                        *(tile, b, target[c], given[:, c], plan.transform, first, out),
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
                grad_hidden = rows.put(grad_hidden if unit is None else grad_hidden * unit).to(hidden.dtype)
            if grad_bias is not None:
                grad_bias = (grad_bias if unit is None else grad_bias * unit).to(bias.dtype)
            return grad_hidden, grad_weight, grad_bias, None, None


def _vocabulary(weight: Tensor, bias: Tensor | None, plan: _Plan) -> Iterator[tuple[int, Tensor, Tensor | None]]:
    """(first entry, weight, bias) of each tile."""
    for first in range(0, len(weight), plan.columns):
        own = slice(first, first + plan.columns)
        yield first, weight[own].to(plan.inputs).to(plan.factors), None if bias is None else bias[own]


def _taken(hidden: Tensor, token: _Targets, rows: _Rows, plan: _Plan) -> tuple[Tensor, Tensor]:
    """Hidden states and targets of the tokens that take part; garbage in one row of a product stays in that row."""
    return rows.take(hidden).to(plan.factors), rows.take(token.inside)


def _target_logit(
    h: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, rows: _Rows, plan: _Plan
) -> tuple[Tensor, Tensor]:
    """The targets' logits and d logit / d product [padded], never rounded to half precision."""
    product = torch.empty(rows.padded, dtype=plan.sums, device=h.device)
    for c in rows:
        row = weight[target[c]].to(plan.inputs).to(plan.sums)
        torch.sum(h[c].to(plan.sums) * row, 1, out=product[c])
    logit, slope = plan.transform(product, None if bias is None else bias.to(plan.sums)[target])
    return logit, slope * torch.ones_like(logit)


class _Buffer:
    """One tile of products, and one in the dtype of the factors where that is another; used for every tile."""

    def __init__(self, rows: _Rows, weight: Tensor, plan: _Plan) -> None:
        size = min(rows.size, rows.padded) * min(plan.columns, len(weight))
        self.first = self.second = torch.empty(size, dtype=plan.sums, device=weight.device)
        if plan.factors != plan.sums:
            self.second = torch.empty(size, dtype=plan.factors, device=weight.device)

    def tiles(self, chunk: slice, w: Tensor) -> tuple[Tensor, Tensor]:
        shape = chunk.stop - chunk.start, len(w)
        return self.first[: math.prod(shape)].view(shape), self.second[: math.prod(shape)].view(shape)


def _product(a: Tensor, b: Tensor, out: Tensor, accumulate: bool = False) -> None:
    """``out (+)= a @ b``, with the result never rounded to less than ``out`` holds."""
    if a.dtype == out.dtype:
        torch.addmm(out, a, b, beta=float(accumulate), out=out)
    elif not (a.is_cuda and _WIDENS):
        torch.addmm(out, a.to(out.dtype), b.to(out.dtype), beta=float(accumulate), out=out)
    elif accumulate:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)  # type: ignore[call-overload]
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)  # type: ignore[call-overload]


_WIDENS = hasattr(torch.ops.aten.mm, "dtype_out") and torch.version.hip is None
"""Whether cuBLAS may be asked for float32 products of half-precision matrices (torch 2.8)."""


def _incoming(stats: Tensor, d_logp: Tensor | None, d_entropy: Tensor | None, token: _Targets) -> tuple[Tensor, Tensor]:
    """What ``grad_tile`` needs of each token [N, 5], and the tokens with any gradient [N]."""
    lse, entropy, logp, slope = stats.unbind(1)
    none = torch.zeros_like(lse)
    d_logp = none if d_logp is None else token.present(d_logp)
    d_entropy = none if d_entropy is None else token.present(d_entropy)
    p = logp.exp()
    d_target = -d_logp * torch.expm1(logp) - d_entropy * torch.where(p > 0, p * (logp + entropy), 0)
    rows = torch.stack([lse, entropy, d_logp, d_entropy, d_target * slope], 1)
    return rows, (d_logp != 0) | (d_entropy != 0)


def _refuse_second_derivatives() -> None:
    if torch.is_grad_enabled():  # of create_graph=True: what is returned would be taken for a constant
        raise RuntimeError(
            "log-probabilities have first derivatives only: create_graph=True asks for the gradient of a gradient; "
            "naive_logprob has it, at the memory of all logits"
        )


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _aligned(x: Tensor) -> Tensor:
    """[..., H] with zeros up to a multiple of ``ALIGNED``."""
    missing = -x.shape[-1] % ALIGNED
    return torch.nn.functional.pad(x, (0, missing)) if missing else x


def _results(
    ctx: Any, found: Finished, rows: _Rows, token: _Targets, plan: _Plan
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    logp = token.present(rows.put(found.logp))
    entropy = token.present(rows.put(found.entropy)) if plan.entropy else None
    sum_sq_probs = token.present(rows.put(found.sum_sq_probs)) if plan.squares else None
    if sum_sq_probs is not None:
        ctx.mark_non_differentiable(sum_sq_probs)
    return logp, entropy, sum_sq_probs


# -- from logits ---------------------------------------------------------------------------------------------


class _LogitsLogProb(torch.autograd.Function):
    """Triton reads the logits where they are; torch copies a few rows at a time."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, token: _Targets, plan: _Plan) -> tuple[Tensor, Tensor | None, Tensor | None]:
        ctx.set_materialize_grads(False)
        ctx.token, ctx.plan = token, plan
        fused = plan.tiles is not tiles
        rows = _Rows(token.kept(plan), len(logits), plan)
        target = rows.take(token.inside)
        picked = logits.gather(1, token.inside[:, None])[:, 0].to(plan.sums, copy=True)
        logit, slope = plan.transform(rows.take(torch.where(token.bad, torch.nan, picked)), None)
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
        found = tiles.finish(state, logit)
        slope = slope * torch.ones_like(logit)
        ctx.save_for_backward(logits, rows.put(torch.stack([found.lse, found.entropy, found.logp, slope], 1)))
        return _results(ctx, found, rows, token, plan)

    @staticmethod
    def backward(ctx: Any, d_logp: Tensor | None, d_entropy: Tensor | None, _: None) -> tuple[Tensor, None, None]:
        _refuse_second_derivatives()
        logits, stats = ctx.saved_tensors
        token, plan = ctx.token, ctx.plan
        per_token, alive = _incoming(stats, d_logp, d_entropy, token)
        if plan.tiles is not tiles:  # dead rows are not read, and get zeros
            grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
            plan.tiles.grad_tile(
                *(logits, None, token.inside, per_token.T.contiguous(), plan.transform, 0, grad),
                entropy=d_entropy is not None,
            )
            return grad, None, None
        grad = torch.zeros_like(logits)
        rows = _Rows(alive.nonzero().squeeze(1), len(logits), plan)
        target, given = rows.take(token.inside), rows.take(per_token).T
        for c in rows:
            tile = rows.copy(logits, c, plan.sums)
            plan.tiles.grad_tile(
                *(tile, None, target[c], given[:, c], plan.transform, 0, tile), entropy=d_entropy is not None
            )
            grad[c if rows.index is None else rows.index[c]] = tile.to(grad.dtype)
        return grad, None, None


def _shaped(found: tuple[Tensor, Tensor | None, Tensor | None], shape: torch.Size) -> LogProbs:
    return LogProbs(*(None if x is None else x.reshape(shape) for x in found))  # type: ignore[arg-type]
