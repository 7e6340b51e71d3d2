"""Plans from YAML: small files (examples/plans/ has one a model), every wrong field named with its path and line.

The records that a file becomes are `farm.plan`'s.
"""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path
from typing import Any, get_args

from catalog.locations import read_small
from farm.fields import DocumentError, Problem, Reader, did_you_mean, read_document, show
from farm.plan import AUTHORS, Budget, Model, Plan, Shape, Tuning
from farm.rules import known_rules, known_targets
from farm.variants import VariantsError, load_variants
from generator.authors.ledger import Price
from generator.spec import TL_DTYPES, AttentionSpec, Layout, Phase, Rule, SpecError
from verifier.records import RIVAL_GROUPS

PlanError = DocumentError
PHASES: tuple[str, ...] = get_args(Phase)
LAYOUTS: tuple[str, ...] = get_args(Layout)


def load_plan(path: str | Path | None = None) -> Plan:
    """The plan in a file, or the small default plan. Raises PlanError with one line for each wrong field."""
    if path is None:
        text = resources.files("farm").joinpath("plans/default.yaml").read_text()
        return read_plan(text, "default.yaml")
    path = Path(path)
    try:
        text = read_small(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise _refusal(path, f"expected a YAML text in UTF-8, found rubbish at byte {error.start}") from None
    except OSError as error:
        raise _refusal(path, f"cannot be read: {(error.strerror or str(error)).lower()}") from None
    return read_plan(text, str(path), path.parent)


def _refusal(path: Path, message: str) -> PlanError:
    return PlanError(str(path), (Problem("", 0, message),))


def read_plan(text: str, file: str, folder: Path = Path()) -> Plan:
    """The plan that a text describes; `folder` is what its relative file names refer to."""
    root = read_document(text, file)
    plan = _plan(root, folder) if root.fields("models, targets, ...") else None
    if root.problems or plan is None:
        raise PlanError(file, tuple(sorted(root.problems, key=lambda p: p.line)))
    return plan


#: Of models for which a plan names none.
DEFAULT_DTYPES: tuple[str, ...] = ("fp32",)


def _plan(root: Reader, folder: Path) -> Plan | None:
    variants = root.take("variants", lambda r: _variants(r, folder))
    dtypes = root.take("dtypes", _dtypes, DEFAULT_DTYPES)
    shapes = _shapes(root)
    plan = Plan(
        name=root.take("name", Reader.name) or "plan",
        models=root.take("models", lambda r: r.all(lambda m: _model(m, dtypes, shapes))) or (),
        raw_specs=root.take("specs", lambda r: r.all(_raw_spec)) or (),
        targets=root.take("targets", _targets) or ("cpu",),
        author=root.take("author", lambda r: r.one_of(*AUTHORS)) or "rules",
        author_options=root.take("author_options", _options) or (),
        rivals=root.take("rivals", _rivals),
        tuning=root.take("tuning", _tuning) or Tuning(),
        budget=root.take("budget", _budget) or Budget(),
        prices=root.take("prices", _prices) or (),
        catalog=root.take("catalog", lambda r: r.text("a folder or a location")),
        variants=variants,
    )
    root.finish()
    if not root.problems and not plan.models and not plan.raw_specs:
        root.wrong("expected at least one entry in models or specs, found none")
    return plan


def _variants(reader: Reader, folder: Path) -> str | None:
    name = reader.text("the name of a Python file")
    if name is None:
        return None
    path = Path(os.path.realpath(folder / name))
    try:
        load_variants(path)
    except VariantsError as error:
        return reader.wrong(str(error))
    return str(path)


def _dtypes(reader: Reader) -> tuple[str, ...]:
    return reader.some_of(*TL_DTYPES)


def _rivals(reader: Reader) -> tuple[str, ...]:
    return tuple(dict.fromkeys(reader.all(lambda r: r.one_of(*RIVAL_GROUPS))))


def _targets(reader: Reader) -> tuple[str, ...]:
    return reader.some_of(*known_targets())


def _shapes(reader: Reader) -> tuple[Shape, ...] | None:
    """What `batch`, `seqlens` and `shapes` of a model (or of the whole plan) ask for; None when none is given."""
    batch = reader.take("batch", Reader.whole, 1) or 1
    lengths = reader.take("seqlens", lambda r: r.all(lambda x: x.whole(1)))
    shapes = reader.take("shapes", lambda r: r.all(lambda x: _shape(x, batch)))
    if lengths is None and shapes is None:
        return None
    return tuple(Shape(batch, n, n) for n in lengths or ()) + (shapes or ())


def _shape(reader: Reader, batch: int) -> Shape | None:
    if not reader.fields("batch, seqlen_q, seqlen_k, phase"):
        return None
    seqlen = reader.take("seqlen", Reader.whole)
    needed = seqlen is None and reader.get("seqlen") is None
    seqlen_q = reader.take("seqlen_q", Reader.whole, seqlen, required=needed)
    seqlen_k = reader.take("seqlen_k", Reader.whole, seqlen, required=needed)
    own_batch = reader.take("batch", Reader.whole, batch)
    phase = reader.take("phase", lambda r: r.one_of(*PHASES), PHASES[0])
    reader.finish()
    return Shape(own_batch, seqlen_q, seqlen_k, phase) if own_batch and seqlen_q and seqlen_k and phase else None


def _model(reader: Reader, dtypes: tuple[str, ...] | None, shapes: tuple[Shape, ...] | None) -> Model | None:
    if not reader.fields("name, num_heads, head_dim, ..."):
        return None
    before = len(reader.problems)
    num_heads = reader.take("num_heads", Reader.whole, required=True)
    num_kv_heads = reader.take("num_kv_heads", Reader.whole, num_heads)
    head_dim = reader.take("head_dim", Reader.whole, required=True)
    model = Model(
        name=reader.take("name", Reader.name, required=True) or "",
        num_heads=num_heads or 1,
        num_kv_heads=num_kv_heads or 1,
        head_dim=head_dim or 1,
        head_dim_v=reader.take("head_dim_v", Reader.whole, head_dim) or 1,
        shapes=_shapes(reader) or shapes or (),
        dtypes=reader.take("dtypes", _dtypes, dtypes) or (),
        masks=reader.take("masks", lambda r: _rules(r, "mask")) or (),
        scores=reader.take("scores", lambda r: _rules(r, "score")) or (),
        softmax_scale=reader.take("softmax_scale", Reader.number),
        layout=reader.take("layout", lambda r: r.one_of(*LAYOUTS), LAYOUTS[0]) or LAYOUTS[0],
    )
    reader.finish()
    if len(reader.problems) > before:
        return None
    if not model.shapes:
        return reader.wrong("seqlens is missing: give seqlens or shapes here or at the top of the plan")
    return _checked(reader, model)


def _checked(reader: Reader, model: Model) -> Model | None:
    """The model when every spec of it is one that an attention can have."""
    try:
        for _ in model.specs():
            pass
    except SpecError as error:
        return _wrong_spec(reader, error)
    return model


def _rules(reader: Reader, kind: str) -> tuple[Rule, ...]:
    """Rules that all hold, each once."""
    found = reader.all(lambda r: _rule(r, kind))
    names = [rule.name for rule in found]
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        reader.wrong(f"expected each {kind} rule once, found {twice[0]} {names.count(twice[0])} times")
    return found


def _rule(reader: Reader, kind: str) -> Rule | None:
    """`causal` or `window: {left: 4095, right: 0}`."""
    known = known_rules(kind)
    if isinstance(reader.value, str):
        name, given = reader.value, None
    elif isinstance(reader.value, dict) and len(reader.value) == 1:
        ((name, given),) = reader.value.items()
    else:
        return reader.expected(f"a {kind} rule, such as {next(iter(known))} or {{name: {{parameter: value}}}}")
    if name not in known:
        near = did_you_mean(name, tuple(known))
        return reader.wrong(f"expected a {kind} rule of {', '.join(known)}, found {show(name)}{near}")
    return known[name].read(given, reader)


def _raw_spec(reader: Reader) -> AttentionSpec | None:
    """One problem with every field of its own; lengths and batch may be 0."""
    if not reader.fields("num_heads, head_dim, batch, seqlen_q, seqlen_k, ..."):
        return None
    before = len(reader.problems)
    num_heads = reader.take("num_heads", Reader.whole, required=True)
    head_dim = reader.take("head_dim", Reader.whole, required=True)
    plain: dict[str, Any] = {
        "num_heads": num_heads,
        "num_kv_heads": reader.take("num_kv_heads", Reader.whole, num_heads),
        "head_dim": head_dim,
        "head_dim_v": reader.take("head_dim_v", Reader.whole, head_dim),
        **{n: reader.take(n, lambda r: r.whole(0), required=True) for n in ("batch", "seqlen_q", "seqlen_k")},
        "dtype": reader.take("dtype", lambda r: r.one_of(*TL_DTYPES), DEFAULT_DTYPES[0]),
        "masks": reader.take("masks", lambda r: _rules(r, "mask"), ()),
        "scores": reader.take("scores", lambda r: _rules(r, "score"), ()),
        "phase": reader.take("phase", lambda r: r.one_of(*PHASES), PHASES[0]),
        "softmax_scale": reader.take("softmax_scale", Reader.number),
        "layout": reader.take("layout", lambda r: r.one_of(*LAYOUTS), LAYOUTS[0]),
        "name": reader.take("name", Reader.name, ""),
    }
    reader.finish()
    if len(reader.problems) > before:
        return None
    try:
        return AttentionSpec(**plain)
    except SpecError as error:
        return _wrong_spec(reader, error)


def _wrong_spec(reader: Reader, error: SpecError) -> None:
    """Notes what no attention has at the field that it names, where the plan gives that."""
    name, _, message = str(error).partition(": ")
    place = reader.get(name) if name in reader.taken else None
    (place or reader).wrong(message if place else str(error))


def _options(reader: Reader) -> tuple[tuple[str, Any], ...]:
    """Options of a language model author: plain values, checked by the author."""
    if not reader.fields("model, base_url, ..."):
        return ()
    for name, value in reader.value.items():
        if isinstance(value.value, dict | list):
            value.expected("a plain value")
        reader.taken.add(name)
    return tuple(sorted((name, r.value) for name, r in reader.value.items()))


def _prices(reader: Reader) -> tuple[tuple[str, Price], ...]:
    """`NAME: {in: 2.5, out: 10}`, US dollars for a million tokens."""
    if not reader.fields("a model's name: {in: 2.5, out: 10}"):
        return ()
    reader.taken |= set(reader.value)
    found = {name: _price(r) for name, r in reader.value.items()}
    return tuple(sorted((name, price) for name, price in found.items() if price is not None))


def _price(reader: Reader) -> Price | None:
    if not reader.fields("in, out"):
        return None
    amounts = [reader.take(n, lambda r: r.number(0.0, "US dollars for a million tokens"), required=True) for n in ("in", "out")]
    reader.finish()
    known = [amount for amount in amounts if amount is not None]
    return Price(*known) if len(known) == len(amounts) else None


def _tuning(reader: Reader) -> Tuning | None:
    if not reader.fields("candidates, keep, measure_s"):
        return None
    default = Tuning()
    candidates = reader.take("candidates", lambda r: r.whole(1, 1000), default.candidates)
    keep = reader.take("keep", lambda r: r.number(0.0, "a share above 0 and below 1"), default.keep)
    measure_s = reader.take("measure_s", lambda r: r.number(0.01, "seconds, from 0.01 to 3600", 3600.0), default.measure_s)
    if keep is not None and not 0 < keep < 1 and (place := reader.get("keep")):
        place.expected("a share above 0 and below 1")
    reader.finish()
    return Tuning(candidates, keep, measure_s) if candidates and keep and measure_s else None


def _budget(reader: Reader) -> Budget | None:
    if not reader.fields("minutes, attempts, usd, tokens, gpu_s"):
        return None
    budget = Budget(
        reader.take("minutes", lambda r: r.number(0.0, "minutes, at least 0")),
        reader.take("attempts", lambda r: r.whole(0)),
        reader.take("usd", lambda r: r.number(0.0, "an amount, at least 0")),
        reader.take("tokens", lambda r: r.whole(0)),
        reader.take("gpu_s", lambda r: r.number(0.0, "seconds, at least 0")),
    )
    reader.finish()
    return budget
