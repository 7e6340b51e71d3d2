"""Values of a kernel in this process against float64: ragged shapes, reruns, views, hints. Times nothing."""

from __future__ import annotations

from typing import Any

import gpu_cases as cases
from gpu_cases import Build
from gpu_kernels import Kernel

from generator.spec import AttentionSpec
from generator.translate.records import Translated
from verifier.records import Binary


def check(b: Build, translated: Translated, binary: Binary) -> dict[str, Any]:
    """Errors against float64 on every shape, and whether reruns agree bit for bit."""

    kernel = Kernel(translated, binary)
    rows, worst, bad = [], {"rms": 0.0, "lse": 0.0}, []
    limit = 6e-3 if b.spec.dtype == "bf16" else 1.2e-3
    fast = 3e-3 if any(r.name == "softcap" for r in b.spec.scores) else 3e-4
    for i, shape in enumerate(cases.SHAPES):
        s = cases.sized(b.spec, *shape)
        found = check_shape(kernel, s, i)
        ok = found["rms"] <= limit and found["lse"] <= fast and found["dead"] and not found["nan"]
        worst = {k: max(worst[k], found[k]) for k in worst}
        rows.append({"shape": shape, **found, "ok": ok})
        if not ok:
            bad.append(f"{shape}: rms {found['rms']:.1e} lse {found['lse']:.1e} dead {found['dead']} nan {found['nan']}")
    repeats = differing_reruns(kernel, cases.sized(b.spec, 2, 8, 2, 900, 1100))
    view = check_views(kernel, b.spec)
    return {"rows": rows, **worst, "bad": bad, "differing_reruns": repeats, "views": view, "attributes": kernel.loaded.attributes}


def case_tensors(s: AttentionSpec, seed: int) -> tuple[dict[str, Any], Any]:
    """Tensors on the device and the float64 reference."""
    import torch

    from verifier.input_values import make_values
    from verifier.inputs import Case
    from verifier.oracle import attention

    values = make_values(Case("check", s, seed=seed))
    if seed % 3 == 2:
        values["q"] = values["q"] * 4
    reference = attention(s, values)
    tensors = {n: t.cuda() for n, t in values.items()}
    tensors |= {n: t.transpose(1, 2).contiguous().transpose(1, 2) for n, t in tensors.items() if n in ("q", "k", "v")}
    kind = tensors["q"].dtype
    tensors["o"] = torch.full(
        (s.batch, s.seqlen_q, s.num_heads, s.head_dim_v), float("nan"), device="cuda", dtype=kind
    ).transpose(1, 2)
    tensors["lse"] = torch.full((s.batch, s.num_heads, s.seqlen_q), float("nan"), device="cuda")
    return tensors, reference


def errors(tensors: dict[str, Any], reference: Any) -> dict[str, Any]:
    import torch

    out, lse = tensors["o"].double().cpu(), tensors["lse"].double().cpu()
    scale = float(reference.out.norm().clamp_min(1e-30))
    seen = torch.isfinite(reference.lse)
    difference = (lse - reference.lse)[seen].abs()
    return {
        "rms": float((out - reference.out).norm()) / scale if bool(reference.out.any()) else float(out.abs().max()),
        "lse": float(difference.max()) if difference.numel() else 0.0,
        "dead": bool((lse[~seen] == -torch.inf).all()) and bool((out[~seen] == 0).all()),
        "nan": bool(torch.isnan(out).any() | torch.isnan(lse).any()),
    }


def check_shape(kernel: Kernel, s: AttentionSpec, seed: int) -> dict[str, Any]:
    import torch

    tensors, reference = case_tensors(s, seed)
    kernel.prepared(s, tensors)()
    torch.cuda.synchronize()
    return errors(tensors, reference)


def differing_reruns(kernel: Kernel, s: AttentionSpec, runs: int = 12) -> int:
    import torch

    tensors, _ = case_tensors(s, 7)
    first, differing = None, 0
    for _ in range(runs):
        tensors["o"] = torch.full_like(tensors["o"], float("nan"))
        kernel.prepared(s, tensors)()
        bits = tensors["o"].contiguous().view(torch.int16)
        first = bits if first is None else first
        differing += int((bits != first).any())
    return differing


def check_views(kernel: Kernel, s: AttentionSpec) -> dict[str, Any]:
    """Misaligned and expanded operands (the second entry point), gaps between rows, a misaligned output."""
    import torch

    s = cases.sized(s, 2, 4, 2, 70, 90)
    out = {}
    for name in ("odd offset", "gaps", "expanded", "output"):
        tensors, reference = case_tensors(s, 11)
        if name == "expanded":
            from verifier.oracle import attention

            for n in ("k", "v"):
                tensors[n] = tensors[n][:1, :1].expand(tensors[n].shape)
            host = {n: t.cpu() for n, t in tensors.items()}
            reference = attention(s, host)
        for n in ("q", "k", "v") if name in ("odd offset", "gaps") else ("o",) if name == "output" else ():
            t = tensors[n]
            wide = torch.zeros((*t.shape[:-1], t.shape[-1] + (16 if name == "gaps" else 3)), device="cuda", dtype=t.dtype)
            at = 8 if name == "gaps" else 1
            wide[..., at : at + t.shape[-1]] = t
            tensors[n] = wide[..., at : at + t.shape[-1]]
        try:
            kernel.prepared(s, tensors)()
            torch.cuda.synchronize()
            out[name] = errors(tensors, reference)
        except Exception as error:  # noqa: BLE001 - a view that cannot be run is a finding
            out[name] = {"error": f"{type(error).__name__}: {str(error)[:200]}"}
    return out


def same_bits(builds: list[tuple[str, Translated, Binary]], s: AttentionSpec) -> dict[str, bool]:
    """Schedules differ, values must not."""
    import torch

    outs = {}
    for name, translated, binary in builds:
        tensors, _ = case_tensors(s, 5)
        Kernel(translated, binary).prepared(s, tensors)()
        torch.cuda.synchronize()
        outs[name] = tensors["o"].contiguous().view(torch.int16)
    first = next(iter(outs.values()))
    return {name: bool((x == first).all()) for name, x in outs.items()}
