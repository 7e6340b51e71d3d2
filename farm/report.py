"""A catalog as one HTML page: what was tried, what won, by how much. Self-contained: no script, no network, no file beside it."""

from __future__ import annotations

import datetime as dt
import html
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from catalog.store import Catalog
from farm.jobs import Row

COLUMNS = (
    "row_id", "spec_hash", "spec_name", "masks", "scores", "batch", "num_heads", "num_kv_heads", "seqlen_q", "seqlen_k",
    "head_dim", "head_dim_v", "dtype", "target", "device_name", "device_key", "author", "reason_code", "message", "p20_s",
    "p50_s", "p80_s", "baseline_name", "baseline_p50_s", "ratio_p50", "ratio_low", "ratio_high", "generation", "tuning",
    "compile_s", "verify_s", "measure_s", "again_s", "created_at", "revoked_at",
)  # fmt: skip

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem; color: #1b1f24; }
h1 { font-size: 1.6rem; margin-bottom: .2rem; }
h2 { font-size: 1.15rem; margin-top: 2.2rem; }
table { border-collapse: collapse; width: 100%; font-size: .88rem; }
th, td { padding: .3rem .6rem; text-align: left; border-bottom: 1px solid #d8dee4; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
.lose { color: #b35900; }
.win { color: #116329; font-weight: 600; }
.note { color: #57606a; }
svg { display: block; max-width: 100%; height: auto; }
svg text { font: 12px system-ui, sans-serif; fill: currentColor; }
@media (prefers-color-scheme: dark) {
  body { color: #e6edf3; background: #0d1117; }
  th, td { border-color: #30363d; }
  .note { color: #9198a1; }
  .win { color: #56d364; }
  .lose { color: #e3b341; }
}
"""


def make_report(opened: Catalog) -> str:
    """The page as text."""
    rows = opened.rows(COLUMNS).to_pylist()
    best = best_rows(rows)
    parts = [
        f"<h1>Kernel farm: {_text(opened.uri)}</h1>",
        f'<p class="note">{len(rows)} attempts, {sum(r["reason_code"] == "ok" for r in rows)} verified and timed; '
        f"written {dt.datetime.now(dt.UTC):%Y-%m-%d %H:%M} UTC.</p>",
    ]
    for device in sorted({(r["device_name"] or "", r["device_key"] or "") for r in best}):
        parts += _device(device, [r for r in best if (r["device_name"] or "", r["device_key"] or "") == device])
    parts += _endings(rows) + _times(rows)
    body = "\n".join(parts)
    return f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Kernel farm</title><style>{STYLE}</style></head><body>\n{body}\n</body></html>\n'  # noqa: E501


def best_rows(rows: Iterable[Row]) -> list[Row]:
    """The fastest verified row of each spec, target and device: of the longest measurement, by the ratio to its own rival."""
    best: dict[tuple[str, ...], Row] = {}
    for row in rows:
        if row["reason_code"] != "ok" or not row["p50_s"] or row["revoked_at"]:
            continue
        key = (row["spec_hash"], row["target"], row["device_key"] or "")
        if key not in best or _rank(row) > _rank(best[key]):
            best[key] = row
    return sorted(best.values(), key=lambda r: (r["spec_name"] or "", r["dtype"], r["seqlen_k"], r["target"]))


def _rank(row: Row) -> tuple[float, ...]:
    return (row["generation"] or 0, row["ratio_p50"] or 0.0, -row["p50_s"])


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def _device(device: tuple[str, str], best: list[Row]) -> list[str]:
    ratios = [r["ratio_p50"] for r in best if r["ratio_p50"]]
    said = ""
    if ratios:
        said = (
            f"<p>Rival's time over ours, medians of calls that alternate in one run: geometric mean "
            f"{geometric_mean(ratios):.2f}x over {len(ratios)} problems, worst {min(ratios):.2f}x, best {max(ratios):.2f}x.</p>"
        )
    return [f"<h2>{_text(device[0] or 'no device')}</h2>", said, _ratios_plot(best), _best_table(best)]


def _best_table(best: list[Row]) -> str:
    titles = ("problem", "dtype", "target", "ours, ms", "rival, ms", "rival", "ratio", "interval", "holes", "row")
    cells = [
        (
            *(_name(r), r["dtype"], r["target"], _ms(r["p50_s"]), _ms(r["baseline_p50_s"]), r["baseline_name"] or "-"),
            *(_ratio(r["ratio_p50"]), _interval(r), _holes(r["tuning"]), r["row_id"][:12]),
        )
        for r in best
    ]
    return _table(titles, cells, numbers={3, 4, 6})


def _endings(rows: list[Row]) -> list[str]:
    counts = Counter(r["reason_code"] for r in rows)
    examples = {r["reason_code"]: r["message"] for r in rows if r["message"]}
    cells = [(reason, str(count), (examples.get(reason) or "")[:200]) for reason, count in counts.most_common()]
    return ["<h2>How the attempts ended</h2>", _table(("reason", "attempts", "for example"), cells, numbers={1})]


def _times(rows: list[Row]) -> list[str]:
    sums = {name: sum(r[name] or 0.0 for r in rows) for name in ("compile_s", "verify_s", "measure_s", "again_s")}
    cells = [(name.removesuffix("_s"), f"{total:.1f}") for name, total in sums.items()]
    told = '<p class="note">A binary that was in the cache was compiled in no time.</p>'
    return ["<h2>Where the time went</h2>", _table(("stage", "seconds"), cells, numbers={1}), told]


def _ratios_plot(best: list[Row], width: int = 900) -> str:
    """A bar a problem on a logarithmic axis around 1, with its interval."""
    shown = [r for r in best if r["ratio_p50"]][:60]
    if not shown:
        return ""
    left, line, top = 360, 22, 26
    low = min(0.8, *(r["ratio_low"] or r["ratio_p50"] for r in shown))
    high = max(1.25, *(r["ratio_high"] or r["ratio_p50"] for r in shown))

    def x(ratio: float) -> float:
        share = (math.log(max(ratio, 1e-3)) - math.log(low)) / (math.log(high) - math.log(low))
        return left + share * (width - left - 60)

    marks = [t for t in (0.1, 0.2, 0.5, 0.8, 1, 1.25, 1.5, 2, 3, 5, 10, 20, 50) if low <= t <= high]
    height = top + line * len(shown) + 6
    out = [f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="time of the rival over ours">']
    for mark in marks:
        stroke = "#57606a" if mark == 1 else "#d8dee4"
        out.append(f'<line x1="{x(mark):.1f}" x2="{x(mark):.1f}" y1="{top - 6}" y2="{height}" stroke="{stroke}"/>')
        out.append(f'<text x="{x(mark):.1f}" y="{top - 10}" text-anchor="middle">{mark:g}x</text>')
    for i, r in enumerate(shown):
        y, end, start = top + i * line, x(r["ratio_p50"]), x(1)
        colour = "#2da44e" if r["ratio_p50"] >= 1 else "#d4862a"
        out.append(f'<text x="{left - 8}" y="{y + 14}" text-anchor="end">{_text(_name(r))} {r["dtype"]}</text>')
        out.append(f'<rect x="{min(start, end):.1f}" y="{y + 3}" width="{abs(end - start):.1f}" height="13" fill="{colour}"/>')
        if r["ratio_low"]:
            a, b = x(r["ratio_low"]), x(r["ratio_high"])
            out.append(f'<line x1="{a:.1f}" x2="{b:.1f}" y1="{y + 9.5}" y2="{y + 9.5}" stroke="currentColor"/>')
        out.append(f'<text x="{max(end, start) + 6:.1f}" y="{y + 14}">{r["ratio_p50"]:.2f}x</text>')
    return "\n".join([*out, "</svg>"])


def _name(row: Row) -> str:
    lengths = str(row["seqlen_q"]) if row["seqlen_q"] == row["seqlen_k"] else f"{row['seqlen_q']}x{row['seqlen_k']}"
    return f"{row['spec_name'] or row['masks'] or 'full'} {row['batch']} x {lengths}"


def _table(titles: Sequence[str], cells: Sequence[Sequence[str]], numbers: set[int]) -> str:
    def row(tag: str, values: Sequence[str]) -> str:
        mark = (f'<{tag} class="n">' if i in numbers else f"<{tag}>" for i in range(len(values)))
        return "<tr>" + "".join(f"{m}{_cell(v)}</{tag}>" for m, v in zip(mark, values, strict=True)) + "</tr>"

    return "\n".join(["<table>", row("th", titles), *(row("td", c) for c in cells), "</table>"])


def _cell(value: str) -> str:
    if value.endswith("x") and value[:-1].replace(".", "", 1).isdigit():
        return f'<span class="{"win" if float(value[:-1]) >= 1 else "lose"}">{value}</span>'
    return _text(value)


def _text(value: Any) -> str:
    return html.escape(str(value))


def _ms(seconds: float | None) -> str:
    return f"{1e3 * seconds:.3f}" if seconds else "-"


def _ratio(value: float | None) -> str:
    return f"{value:.2f}x" if value else "-"


def _interval(row: Row) -> str:
    return f"{_ratio(row['ratio_low'])} to {_ratio(row['ratio_high'])}" if row["ratio_low"] else "-"


def _holes(tuning: str | None) -> str:
    return (tuning or "").strip("{}").replace('"', "").replace(":", "=") or "-"
