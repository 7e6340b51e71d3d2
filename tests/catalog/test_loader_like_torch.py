"""`catalog.scaled_dot_product_attention` beside torch's own on any arguments: values, strides, gradients, errors and their words.

Kernels are there for the ordinary calls among them, and an ordinary call came just before: what is remembered of it may never
answer another. What kernels are right on is in test_loader_kernels.
"""

import contextlib
import re

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from kernel_factory import CAUSAL, Shelf, spec

import catalog

SDPA = torch.nn.functional.scaled_dot_product_attention
DIMS = [(8, 8), (5, 3), (1, 1)]
BUCKETS = [(q, k) for q in (1, 2, 4, 8) for k in (1, 2, 4, 8)]


@pytest.fixture(scope="module")
def shelf():
    made = Shelf()
    for dim, dim_v in DIMS:
        for masks in ((), CAUSAL):
            for kv_heads in (4, 2, 1):
                sizes = {"heads": 4, "kv_heads": kv_heads, "dim": dim, "dim_v": dim_v, "batch": 2}
                made.add(spec(masks=masks, **sizes), buckets=BUCKETS)
    return made


@pytest.fixture
def serving(fresh_loader, shelf):
    catalog.configure(catalog=shelf.source(), probe="off", allow_unmeasured=True)


def usually(one, *others):
    """Mostly `one`, so that a call has seldom more than one strange thing about it."""
    return st.one_of(*[st.just(one)] * 12, *map(st.just, others))


STRANGE_NUMBERS = (
    0,
    1,
    -1.0,
    True,
    1e39,
    1e-50,
    float("inf"),
    float("nan"),
    "1",
    [1.0],
    1j,
    10**400,
    np.float32(0.5),
    np.ones(1),
)
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "scale": usually(None, 0.25, np.float64(0.25), *STRANGE_NUMBERS),
        "dropout_p": usually(0.0, None, 2.0, *STRANGE_NUMBERS),
        "is_causal": usually(True, False, 1, 0, None, "x", np.bool_(True)),
        "enable_gqa": usually(True, False, 1, None, "x"),
        "attn_mask": usually(None, "zeros", "bools", "row", "double", "ints", "large", False),
        "querry": usually(None),
    },
)
LAYOUTS = usually(
    "contiguous", "transposed", "expanded", "stepped", "offset", "meta", "nested", "sparse", "grad", "parameter", "negated"
)
CONTEXTS = usually("plain", "no_grad", "inference", "autocast")


@st.composite
def shapes(draw):
    """Three shapes that fit, or nearly."""
    dim, dim_v = draw(st.sampled_from(DIMS))
    batch, seqlen_q, seqlen_k = draw(usually(2, 0, 1)), draw(st.integers(0, 7)), draw(st.integers(0, 7))
    kv_heads = draw(usually(4, 0, 1, 2, 3))
    found = [[batch, 4, seqlen_q, dim], [batch, kv_heads, seqlen_k, dim], [batch, kv_heads, seqlen_k, dim_v]]
    if draw(usually(False, True)):
        found[draw(st.integers(0, 2))][draw(st.integers(0, 3))] = draw(st.integers(0, 3))
    leave = draw(usually(0, 1, 2, 3, -1))
    return [[1, *shape] if leave < 0 else shape[leave:] for shape in found]


def tensor(shape, seed, dtype, layout):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    match layout:
        case "transposed" if x.dim() > 2:
            return x.transpose(-3, -2).contiguous().transpose(-3, -2)
        case "expanded" if x.dim() > 1 and x.shape[0]:
            return x[:1].expand(x.shape)
        case "stepped":
            return torch.stack((x, x), -1).flatten(-2)[..., ::2] if x.dim() else x
        case "offset":
            return torch.cat((x[:1], x))[1:] if x.shape[0] else x
        case "meta":
            return x.to("meta")
        case "nested" if x.dim() > 1 and x.numel():
            return torch.nested.nested_tensor(list(x))
        case "sparse":
            return x.to_sparse()
        case "grad" if x.is_floating_point():
            return x.requires_grad_()
        case "parameter" if x.is_floating_point():
            return torch.nn.Parameter(x, requires_grad=False)
        case "negated":
            return torch._neg_view(-x)
    return x


def mask(kind, query, key):
    """A mask by name; anything else is what it is."""
    if not isinstance(kind, str):
        return kind
    rows, keys = (x.shape[-2] if x.dim() > 1 and not x.is_nested else 1 for x in (query, key))
    made = {
        "zeros": torch.zeros(rows, keys), "bools": torch.ones(rows, keys).tril().bool(), "row": torch.ones(1, keys).bool(),
        "double": torch.zeros(rows, keys).double(), "ints": torch.ones(rows, keys).int(), "large": torch.zeros(rows + 1, keys),
    }  # fmt: skip
    return made[kind]


def context(name):
    match name:
        case "no_grad":
            return torch.no_grad()
        case "inference":
            return torch.inference_mode()
        case "autocast":
            return torch.autocast("cpu", dtype=torch.bfloat16)
    return contextlib.nullcontext()


def outcome(function, tensors, options):
    """What a call gave, or its error without the argument's position, which depends on how an argument was passed."""
    try:
        return function(*tensors, **options)
    except Exception as error:
        return type(error), re.sub(r" \(position \d\)", "", str(error))


def facts(x):
    if not isinstance(x, torch.Tensor):
        return x
    strided = x.layout is torch.strided and not x.is_nested
    return (
        type(x), x.dtype, x.device, x.layout, x.requires_grad, x.grad_fn is not None, x.is_inference(),
        (x.shape, x.stride(), x.storage_offset()) if strided else None,
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore::UserWarning")
@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shapes(),
    st.tuples(*[usually(torch.float32, torch.bfloat16, torch.float64, torch.int32)] * 3),
    st.booleans(),
    st.tuples(LAYOUTS, LAYOUTS, LAYOUTS),
    OPTIONS,
    CONTEXTS,
)
def test_any_call_is_torchs(serving, found, dtypes, one_dtype, layouts, options, around):
    dtypes = dtypes[:1] * 3 if one_dtype else dtypes
    tensors = [tensor(*given) for given in zip(found, (1, 2, 3), dtypes, layouts, strict=True)]
    options = {name: value for name, value in options.items() if name != "querry" or value}
    if "attn_mask" in options:
        options["attn_mask"] = mask(options["attn_mask"], *tensors[:2])
    usual = [tensor([2, 4, 5, 8], seed, torch.float32, "contiguous") for seed in range(3)]
    catalog.scaled_dot_product_attention(*usual, is_causal=bool(options.get("is_causal")))
    assert catalog.last_decision().kernel_id, "the ordinary call before has to be a kernel's"
    with context(around):
        theirs = outcome(SDPA, tensors, options)
        ours = outcome(catalog.scaled_dot_product_attention, tensors, options)
    assert facts(ours) == facts(theirs), catalog.last_decision()
    told = catalog.stats()
    assert sum(told["outcomes"].values()) == told["calls"]
    if isinstance(theirs, torch.Tensor) and theirs.layout is torch.strided and not (theirs.is_nested or theirs.is_meta):
        assume(isinstance(options.get("dropout_p", 0.0), str | list) or not np.any(options.get("dropout_p", 0.0)))
        close = {"rtol": 2e-2, "atol": 2e-2} if theirs.dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(ours.detach(), theirs.detach(), equal_nan=True, **close)


@pytest.mark.parametrize("position", range(3))
def test_a_nested_tensor_after_a_kernels_call_does_not_end_the_process(serving, position):
    """torch's guard asks every tensor for strides; a nested one has none, and the error has nobody to catch it."""
    ordinary = [tensor([2, 4, 4, 8], seed, torch.float32, "contiguous") for seed in range(3)]
    strange = list(ordinary)
    strange[position] = tensor([2, 4, 4, 8], 9, torch.float32, "nested")
    for function in (catalog.scaled_dot_product_attention, catalog.flash_attn_func):
        function(*ordinary)
        assert catalog.last_decision().kernel_id
        outcome(function, strange, {})
    plan = catalog.plan("scaled_dot_product_attention", *ordinary)
    outcome(plan.run, strange, {})
    assert catalog.last_decision().reasons[0].code == "tensor_layout"


def test_the_numbers_of_a_call_are_read_when_it_is_made(serving):
    """A tensor in a key is compared by identity: one that changed since would stand for what it was."""
    q, k, v = (tensor([2, 4, 5, 8], seed, torch.float32, "contiguous") for seed in range(3))
    scale = torch.tensor(0.5)
    for value in (0.5, 2.0):
        scale.fill_(value)
        out = catalog.scaled_dot_product_attention(q, k, v, scale=scale)
        torch.testing.assert_close(out, SDPA(q, k, v, scale=value), rtol=1e-4, atol=1e-5)
        flash = catalog.flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), softmax_scale=scale)
        torch.testing.assert_close(flash.transpose(1, 2), out, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["strict", "auto"])
def test_every_call_that_was_one_is_counted_once(serving, mode):
    catalog.configure(mode=mode)
    q = tensor([2, 4, 5, 8], 0, torch.float32, "contiguous")
    with pytest.raises(TypeError):
        catalog.scaled_dot_product_attention(1, q, q)
    with pytest.raises(ValueError, match="softcap"):
        catalog.flash_attn_func(q, q, q, softcap=-1.0)
    for wanted in (q, q.double(), q.double()):
        outcome(catalog.scaled_dot_product_attention, (wanted, wanted, wanted), {})
    told = catalog.stats()
    assert told["calls"] == 3 and told["outcomes"].pop("miss:dtype") == 2 and list(told["outcomes"].values()) == [1]
