"""Attention whose results do not depend on the batch, its padding, or the number of tokens at a time.

The order in which a softmax and a weighted sum add their terms follows from the place of a key in its row, so the
keys of every row are first moved to the front; the terms of what lies behind them are exactly 0.
"""

from __future__ import annotations

import torch
from torch import Tensor


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Scaled dot-product attention with torch's signature, [B, H, Q, D] and [B, H, K, D] -> [B, H, Q, D].

    It computes in float32 and holds all scores, [B, H, Q, K].  The softmax and the products that it calls have to be
    batch-invariant themselves (``batch_invariant``).

    Raises:
        ValueError: ``dropout_p`` is not 0; an input does not have four dimensions; there are both a mask and
            ``is_causal``; or the queries of a row do not all start at the same key (packed rows, sliding windows).
    """
    if dropout_p > 0:
        raise ValueError(f"dropout_p is {dropout_p}, expected 0: two passes with dropout never agree (model.eval())")
    if query.dim() != 4:
        raise ValueError(f"query has shape {tuple(query.shape)}, expected four dimensions: batch, heads, queries, size")
    if attn_mask is not None and is_causal:
        raise ValueError("attn_mask and is_causal=True are both given, expected one of them")
    dtype, wide = query.dtype, torch.float64 if query.dtype == torch.float64 else torch.float32
    batch, heads, rows, size = query.shape
    columns = key.shape[-2]
    if enable_gqa and key.shape[1] != heads:
        key, value = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (key, value))
    query, key, value = (x.to(wide) for x in (query, key, value))
    bias = None
    if is_causal:
        attended = torch.ones(1, 1, rows, columns, dtype=torch.bool, device=query.device).tril_()
    elif attn_mask is None:
        attended = torch.ones(1, 1, rows, columns, dtype=torch.bool, device=query.device)
    else:
        mask = attn_mask[(None,) * (4 - attn_mask.dim())].expand(batch, -1, rows, columns)
        attended = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
        bias = None if mask.dtype == torch.bool else mask.to(wide)
        start = first_keys(attended)
        if bool(start.any()):
            moved = torch.arange(columns, device=query.device) + start[..., None]  # [B, h, K]
            order = moved.clamp(max=columns - 1)
            in_mask = order[:, :, None].expand(attended.shape)
            attended = attended.gather(-1, in_mask) & (moved < columns)[:, :, None]
            bias = None if bias is None else bias.gather(-1, in_mask)
            rows_of = torch.arange(batch, device=query.device)[:, None, None]
            heads_of = torch.arange(heads, device=query.device)[:, None]
            key, value = (x[rows_of, heads_of, order.expand(batch, heads, columns)] for x in (key, value))
    scores = torch.matmul(query * (size**-0.5 if scale is None else scale), key.transpose(-1, -2))
    if bias is not None:
        scores = scores + bias
    any_key = attended.any(-1, keepdim=True)
    scores = scores.masked_fill(~attended & any_key, -torch.inf)
    out = torch.matmul(scores.softmax(-1), value)
    return torch.where(any_key, out, 0.0).to(dtype)  # 0 for a query without keys (a padding token), as in torch


def first_keys(attended: Tensor) -> Tensor:
    """The first key that the queries of a row attend to, [B, h, Q, K] bool -> [B, h].

    Raises:
        ValueError: two queries of a row differ in it.

    >>> mask = torch.tensor([[[[False, False, False], [False, True, False], [False, True, True]]]])
    >>> first_keys(mask)
    tensor([[1]])
    """
    any_key = attended.any(-1)
    first = attended.int().argmax(-1)
    start = torch.where(any_key, first, attended.shape[-1]).amin(-1)
    differs = (any_key & (first != start[..., None])).flatten(1).any(-1)
    if bool(differs.any()):
        row = int(differs.int().argmax())
        raise ValueError(
            f"the attention mask of row {row} has queries that start at different keys, expected one start per row: "
            "batch-invariant attention takes neither packed rows nor sliding windows; pass one sequence per row"
        )
    return torch.where(any_key.any(-1), start, 0)
