"""Float64 attention, forward and backward, straight from the formulas (small sizes)."""

from __future__ import annotations

import torch

LARGE = 1 << 40


def visibility(case, arrays, device):
    """bool [B, Sq, Sk]"""
    i = torch.arange(case.Sq, device=device).view(1, -1, 1)
    j = torch.arange(case.Sk, device=device).view(1, 1, -1)

    def per_batch(name, absent):
        x = arrays.get(name)
        return (
            torch.full((case.B, 1, 1), absent, device=device)
            if x is None
            else x.long().view(-1, 1, 1)
        )

    position = i + per_batch("q_offset", case.Sk - case.Sq)
    left = per_batch("window_left", case.left if case.left >= 0 else LARGE)
    right = per_batch("window_right", case.right if case.right >= 0 else LARGE)
    if case.causal:
        right = right.clamp(max=0)
    seen = (j >= position - left) & (j <= position + right)
    seen &= (i < per_batch("q_lengths", LARGE)) & (j < per_batch("kv_lengths", LARGE))
    return seen, position


def attention(case, t, backward: bool):
    """t: q k v (do dlse) as the kernel gets them. Returns dict of float64 results in BHSD, plus
    L and m."""
    btnh = case.layout == 0

    def wide(x):
        x = x.double()
        return x.transpose(1, 2) if btnh else x

    G = case.Hq // case.Hkv
    q, k, v = wide(t["q"]), wide(t["k"]), wide(t["v"])
    seen, position = visibility(case, t, q.device)
    key_live = seen.any(1)[:, None, :, None]  # [B, 1, Sk, 1]
    row_live = seen.any(2)[:, None, :, None]
    zero = torch.zeros((), dtype=torch.float64, device=q.device)
    k = torch.where(key_live, k, zero)
    v = torch.where(key_live, v, zero)
    q = torch.where(row_live, q, zero)
    kk, vv = k.repeat_interleave(G, 1), v.repeat_interleave(G, 1)
    s = case.scale * q @ kk.transpose(2, 3)
    capped = s
    if case.softcap > 0:
        capped = s = case.softcap * torch.tanh(s / case.softcap)
    if t.get("alibi_slopes") is not None:
        j = torch.arange(case.Sk, device=q.device).view(1, 1, 1, -1)
        s = s - t["alibi_slopes"].double()[:, :, None, None] * (position[:, None] - j).abs()
    s = s.masked_fill(~seen[:, None], -torch.inf)
    m = (
        s.amax(-1, keepdim=True)
        if case.Sk
        else torch.full_like(s.sum(-1, keepdim=True), -torch.inf)
    )
    sinks = t.get("sinks")
    if sinks is not None:
        sinks = sinks.double().view(1, -1, 1, 1)
        m = torch.maximum(m, sinks)
    safe = torch.where(m == -torch.inf, zero, m)
    e = torch.exp(s - safe)
    total = e.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks - safe)
    lse = safe + torch.log(total)
    p = torch.where(row_live, e / torch.where(total == 0, zero + 1, total), zero)
    o = p @ vv
    out = {"o": o, "L": lse[..., 0], "m": m[..., 0], "row_live": row_live[..., 0]}
    if not backward:
        return out
    do = torch.where(row_live, wide(t["do"]), zero)
    dlse = t["dlse"].double()[..., None] if t.get("dlse") is not None else zero
    dlse = torch.where(row_live, dlse.expand_as(lse), zero)
    # delta from the o that the kernel was given (16 bits): with peaked rows its rounding
    # dominates otherwise
    given = torch.where(row_live, wide(t["o"]), zero)
    delta = (given * do).sum(-1, keepdim=True) - dlse
    ds = p * (do @ vv.transpose(2, 3) - delta)
    dv = p.transpose(2, 3) @ do
    if sinks is not None:  # an empty row's own dL flows to the sink
        full = t["dlse"].double()[..., None] if t.get("dlse") is not None else torch.zeros_like(lse)
        out["dsinks"] = -(torch.exp(sinks - lse) * ((given * do).sum(-1, keepdim=True) - full)).sum(
            (0, 2, 3)
        )
    if case.softcap > 0:
        ds = ds * (1 - (capped / case.softcap) ** 2)
    out["dq"] = case.scale * ds @ kk
    dk = case.scale * ds.transpose(2, 3) @ q
    out["dk"] = dk.view(case.B, case.Hkv, G, case.Sk, -1).sum(2)
    out["dv"] = dv.view(case.B, case.Hkv, G, case.Sk, -1).sum(2)
    if case.kv_broadcast:
        out["dk"], out["dv"] = out["dk"].sum(0, keepdim=True), out["dv"].sum(0, keepdim=True)
    return out
