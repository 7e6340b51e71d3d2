"""Attention in float64, row by row and plain to see: what the loader's tests compare with. Shares no code with the package."""

import math

import torch


def reference(q, k, v, *, scale=None, visible=None, bias=None, softcap=0.0, sinks=None):
    """q (B, H, Sq, D), k and v (B, Hkv, Sk, D) -> out, lse in float64. visible(i, j) -> bool; bias (B, H, Sq, Sk) or less."""
    q, k, v = q.double(), k.double(), v.double()
    batch, heads, seqlen_q, dim = q.shape
    kv_heads, seqlen_k = k.shape[1:3]
    scale = dim**-0.5 if scale is None else scale
    out = torch.zeros(batch, heads, seqlen_q, v.shape[-1], dtype=torch.float64)
    lse = torch.full((batch, heads, seqlen_q), -math.inf, dtype=torch.float64)
    for h in range(heads):
        kh, vh = k[:, h // (heads // kv_heads)], v[:, h // (heads // kv_heads)]
        for i in range(seqlen_q):
            keys = [j for j in range(seqlen_k) if visible is None or visible(i, j)]
            if not keys and sinks is None:
                continue
            s = scale * torch.einsum("bd,bjd->bj", q[:, h, i], kh[:, keys])
            if softcap:
                s = softcap * torch.tanh(s / softcap)
            if bias is not None:
                s = s + bias.double().expand(batch, heads, seqlen_q, seqlen_k)[:, h, i][:, keys]
            if sinks is not None:
                s = torch.cat([s, sinks[h].double().expand(batch, 1)], -1)
            lse[:, h, i] = torch.logsumexp(s, -1)
            dead = torch.isneginf(lse[:, h, i])
            s = s[:, : len(keys)]
            p = torch.where(dead[:, None], 0.0, torch.exp(s - torch.where(dead, 0.0, lse[:, h, i])[:, None]))
            out[:, h, i] = torch.einsum("bj,bjd->bd", p, vh[:, keys])
    return out, lse


def top_left(i, j):
    return j <= i


def bottom_right(seqlen_q, seqlen_k):
    return lambda i, j: j <= i + seqlen_k - seqlen_q


def window(seqlen_q, seqlen_k, left, right):
    def visible(i, j):
        at = i + seqlen_k - seqlen_q
        return (left is None or left < 0 or j >= at - left) and (right is None or right < 0 or j <= at + right)

    return visible
