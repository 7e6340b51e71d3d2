"""`farm explain`, `farm reproduce`, `farm logs`: why a call gets its kernel; one row again, and what was said of it. Prints."""

from __future__ import annotations

import json
import re
import tempfile
from typing import TYPE_CHECKING, Annotated, Any

import typer

from farm.config import catalog_location
from farm.console import EXIT_FAILED, CatalogOption, InputError, JsonOption

if TYPE_CHECKING:
    from farm.jobs import Shop


_CALL = re.compile(r"(\d+)x(\d+)(?:/(\d+))?x(\d+)(?:x(\d+))?")
#: Of every size, as in a plan.
LARGEST = 2**31 - 1
_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


def explain(
    call: Annotated[
        str, typer.Argument(help="BATCHxHEADSxSEQLEN, or BATCHxHEADS/KV_HEADSxSEQLEN_QxSEQLEN_K: 1x32/8x777.", show_default=False)
    ],
    dim: Annotated[str, typer.Option(help="Head dimension, or HEAD_DIM/HEAD_DIM_V.")] = "128",
    dtype: Annotated[str, typer.Option(help="fp32, fp16 or bf16.")] = "fp32",
    causal: Annotated[bool, typer.Option("--causal", help="Causal.")] = False,
    window: Annotated[str | None, typer.Option(help="LEFT,RIGHT keys beside the query; -1: all.")] = None,
    softcap: Annotated[float, typer.Option(help="Bound of the scores; 0: none.")] = 0.0,
    function: Annotated[str, typer.Option(help="scaled_dot_product_attention or flash_attn_func.")] = "",
    location: CatalogOption = None,
    as_json: JsonOption = False,
) -> None:
    """Which kernel a call would get on this machine, and why every other was turned down. Exit code 1 when none is found."""
    import catalog

    chosen = function or ("flash_attn_func" if window or softcap else "scaled_dot_product_attention")
    arguments, options = _arguments(call, dim, dtype, chosen, causal, window, softcap)
    catalog.configure(catalog=catalog_location(location))
    decision = catalog.explain(chosen, *arguments, **options)
    typer.echo(json.dumps(decision.to_plain()) if as_json else str(decision))
    if decision.kernel_id is None:
        raise typer.Exit(EXIT_FAILED)


def _arguments(
    call: str, dim: str, dtype: str, function: str, causal: bool, window: str | None, softcap: float
) -> tuple[list[Any], dict[str, Any]]:
    """Tensors without values, and the keywords of the function that is asked about. Raises InputError."""
    import torch

    found = _CALL.fullmatch(call)
    if not found:
        raise InputError("CALL", f"expected BATCHxHEADS[/KV_HEADS]xSEQLEN_Q[xSEQLEN_K], such as 1x32/8x777, found {call!r}")
    batch, heads, seqlen_q = int(found[1]), int(found[2]), int(found[4])
    kv_heads, seqlen_k = int(found[3] or heads), int(found[5] or seqlen_q)
    dims = re.fullmatch(r"([1-9]\d*)(?:/([1-9]\d*))?", dim)
    if not dims:
        raise InputError("--dim", f"expected HEAD_DIM or HEAD_DIM/HEAD_DIM_V, found {dim!r}")
    if dtype not in _DTYPES:
        raise InputError("--dtype", f"expected one of {', '.join(_DTYPES)}, found {dtype!r}")
    shapes = [(heads, seqlen_q, int(dims[1])), (kv_heads, seqlen_k, int(dims[1])), (kv_heads, seqlen_k, int(dims[2] or dims[1]))]
    if max(batch, heads, seqlen_q, seqlen_k, kv_heads) > LARGEST:
        raise InputError("CALL", f"expected numbers of at most {LARGEST}, found {call!r}")
    if max(int(dims[1]), int(dims[2] or 1)) > LARGEST:
        raise InputError("--dim", f"expected at most {LARGEST}, found {dim}")
    if not all((batch, heads, seqlen_q, seqlen_k, kv_heads)) or heads % kv_heads:
        raise InputError("CALL", f"expected numbers of at least 1, heads a multiple of key heads, found {call!r}")
    try:
        tensors = [torch.empty(batch, *shape, dtype=getattr(torch, _DTYPES[dtype])) for shape in shapes]
    except RuntimeError:
        raise InputError("CALL", f"{call}: its tensors do not fit into this machine's memory") from None
    match function:
        case "scaled_dot_product_attention":
            if window or softcap:
                raise InputError("--function", "scaled_dot_product_attention has no window and no softcap; use flash_attn_func")
            return tensors, {"is_causal": causal, "enable_gqa": heads != kv_heads}
        case "flash_attn_func":
            sides = (-1, -1) if window is None else _window(window)
            return [t.transpose(1, 2) for t in tensors], {"causal": causal, "window_size": sides, "softcap": softcap}
        case other:
            raise InputError("--function", f"expected scaled_dot_product_attention or flash_attn_func, found {other!r}")


def _window(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(-?\d+),(-?\d+)", text.replace(" ", ""))
    if not found:
        raise InputError("--window", f"expected LEFT,RIGHT such as 255,0, found {text!r}")
    left, right = int(found[1]), int(found[2])
    if max(left, right) > LARGEST:
        raise InputError("--window", f"expected at most {LARGEST}, found {text!r}")
    return left, right


def reproduce(
    row_id: Annotated[str, typer.Argument(help="A row's id, or the beginning of one.", show_default=False)],
    location: CatalogOption = None,
    seconds: Annotated[float, typer.Option(min=0.1, max=3600, help="Seconds of measuring.")] = 2.0,
    record: Annotated[bool, typer.Option("--record", help="Store the outcome as the attempt's next row.")] = False,
    variants: Annotated[str | None, typer.Option(help="The file with rules of your own that the row's plan named.")] = None,
    sanitize: Annotated[bool, typer.Option("--sanitize", help="Run a CUDA kernel under compute-sanitizer too.")] = False,
    as_json: JsonOption = False,
) -> None:
    """One row again, here, from its stored artifacts. Exit code 1 when the verdict is another one."""
    from catalog import store
    from farm.jobs import new_run_id
    from farm.reproduce import reproduce as run
    from generator.canonical import to_plain

    opened = store.open(catalog_location(location))
    row = opened.get(row_id)
    path = _variants(variants)
    if record:
        result = run(opened, row, _shop(opened.uri, path, sanitize), seconds)
        with opened.writer(new_run_id()) as writer:
            writer.append(result.after)
    else:  # the catalog stays as it is, and may be one that can only be read
        with tempfile.TemporaryDirectory(prefix="farm-reproduce-") as scratch:
            result = run(opened, row, _shop(scratch, path, sanitize), seconds)
    if as_json:
        kept = ("row_id", "reason_code", "message", "binary_hash", "device_key", "p50_s", "baseline_p50_s", "ratio_p50")
        sides = {side: {k: r.get(k) for k in kept} for side, r in (("before", result.before), ("after", result.after))}
        typer.echo(json.dumps(to_plain(sides | {"same_verdict": result.same_verdict, "same_binary": result.same_binary})))
    else:
        for line in result.lines():
            typer.echo(line)
    if not result.same_verdict:
        raise typer.Exit(EXIT_FAILED)


#: Columns that say why an attempt ended as it did, and those that name its artifacts.
_FINDINGS = ("message", "witness_check", "witness_input", "witness_expected", "witness_found")
_ARTIFACTS = ("sketch_hash", "tl_hash", "program_hash", "source_hash", "binary_hash", "transcript_hash")


def logs(
    row_id: Annotated[str, typer.Argument(help="A row's id, or the beginning of one.", show_default=False)],
    location: CatalogOption = None,
    as_json: JsonOption = False,
) -> None:
    """What compiler and verifier said of one attempt, with its program's source beside it by name."""
    from catalog import store

    opened = store.open(catalog_location(location))
    row = opened.get(row_id)
    findings = {name: row[name] for name in _FINDINGS if row[name]}
    artifacts = {name.removesuffix("_hash"): opened.artifacts.path(row[name]) for name in _ARTIFACTS if row[name]}
    log = opened.artifacts.text(row["log_hash"]) if row["log_hash"] else None
    if as_json:
        head = {name: row[name] for name in ("row_id", "spec_name", "spec_hash", "target", "reason_code")}
        typer.echo(json.dumps(head | findings | {"artifacts": {k: str(v) for k, v in artifacts.items()}, "log": log}))
        return
    typer.echo(f"{row['row_id']}: {row['spec_name'] or row['spec_hash'][:12]} on {row['target']}: {row['reason_code']}")
    for name, value in (findings | artifacts).items():
        typer.echo(f"{name}: {value}")
    typer.echo(log or "log: none was kept; the compiler said nothing")


def _variants(file: str | None) -> str | None:
    """The file with rules of the user's own, read. Raises InputError."""
    from farm.variants import VariantsError, load_variants

    if file is None:
        return None
    try:
        return load_variants(file).path
    except VariantsError as error:
        raise InputError("--variants", str(error)) from None


def _shop(catalog: str, variants: str | None, sanitize: bool) -> Shop:
    from farm.config import load_config, usable_cache
    from farm.jobs import Shop

    return Shop(catalog, str(usable_cache(load_config())), "reproduce", variants, sanitize=sanitize)
