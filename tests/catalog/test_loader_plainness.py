"""The quick check that a call is like the last one: it may never hold for a call that has to be looked at anew."""

import subprocess
import sys
import textwrap

import pytest
import torch
from kernel_factory import Shelf, spec
from torch.nn.attention import SDPBackend, sdpa_kernel

import catalog
from catalog import plainness, serving

pytestmark = pytest.mark.usefixtures("fresh_loader")

SDPA = torch.nn.functional.scaled_dot_product_attention


def rand(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


Q, K, V = (rand(1, 4, 30, 16, seed=s) for s in range(3))


@pytest.fixture
def kernel():
    shelf = Shelf()
    made = shelf.add(spec())
    catalog.configure(catalog=shelf.source(), probe="off")
    catalog.scaled_dot_product_attention(Q, K, V)
    assert serving.server().latest is not None and serving.server().latest.check(Q, K, V)
    return made


def why():
    return catalog.last_decision().reasons[0].code if catalog.last_decision().kernel_id is None else "kernel"


def test_this_torch_has_the_guard():
    assert plainness.guard_is_usable()


@pytest.mark.parametrize("around", ["torch.device('meta')", "torch.inference_mode()", "torch.autocast('cpu')", "torch.no_grad()"])
def test_where_it_is_imported_does_not_matter(around):
    code = f"""
        import torch
        torch.set_default_dtype(torch.float64)
        with {around}:
            from catalog import plainness
        with torch.inference_mode():
            a, b, c = (torch.zeros(1, 2, 3, 4) for _ in range(3))
            assert plainness.check_like(a, b, c)(a, b, c)
        """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=120)


@pytest.mark.parametrize("position", range(3))
def test_what_differs_is_seen(kernel, position):
    def call(other, **more):
        arguments = [Q, K, V]
        arguments[position] = other
        out = catalog.scaled_dot_product_attention(*arguments, **more)
        torch.testing.assert_close(out, SDPA(*arguments, **more), rtol=1e-4, atol=1e-5)
        found = why()
        catalog.scaled_dot_product_attention(Q, K, V)
        assert catalog.last_decision().kernel_id == kernel
        return found, out

    same = (Q, K, V)[position]
    assert call(same.clone())[0] == "kernel"
    found, out = call(same.clone().requires_grad_())
    assert found == "requires_grad" and out.grad_fn is not None
    with torch.no_grad():
        wants = same.clone().requires_grad_()
        assert call(wants)[0] == "kernel"
    assert call(wants)[0] == "requires_grad"
    assert call(torch._neg_view(same.clone()))[0] == "tensor_view"
    assert call(same.repeat_interleave(2, -1)[..., ::2])[0] == "layout"
    assert call(same, is_causal=True)[0] == "no_kernel"
    assert call(same, dropout_p=0.0, scale=0.5)[0] == "kernel"
    assert call(torch.nn.Parameter(same, requires_grad=False))[0] == "kernel"


def test_contexts_are_seen(kernel):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert catalog.scaled_dot_product_attention(Q, K, V).dtype == torch.bfloat16 and why() == "autocast"
    with torch.inference_mode():
        catalog.scaled_dot_product_attention(Q, K, V)
        assert why() == "kernel"
    seen = []

    class Dispatch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    class Function(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    for mode in (Dispatch, Function):
        seen.clear()
        with mode():
            catalog.scaled_dot_product_attention(Q, K, V)
        assert why() == "torch_mode" and seen
    torch.vmap(lambda x: catalog.scaled_dot_product_attention(Q + 0 * x, K, V))(torch.zeros(2))
    assert why() in ("functorch", "tensor_subclass")
    torch.use_deterministic_algorithms(True)
    try:
        catalog.configure(allow_unmeasured=True)
        catalog.scaled_dot_product_attention(Q, K, V)
    finally:
        torch.use_deterministic_algorithms(False)
    with catalog.attention_kernel("sdpa"):
        catalog.scaled_dot_product_attention(Q, K, V)
        assert why() == "override"
    catalog.scaled_dot_product_attention(Q, K, V)
    assert why() == "kernel"


def test_subclasses_and_modes_see_torchs_function_and_nothing_else(kernel):
    seen = []

    class Watched(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            seen.append(function)
            return super().__torch_function__(function, types, args, kwargs or {})

    class Watching(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    for position in range(3):
        arguments = [Q, K, V]
        arguments[position] = arguments[position].clone().as_subclass(Watched)
        assert type(catalog.scaled_dot_product_attention(*arguments)) is Watched and why() == "tensor_subclass"
        assert seen == [SDPA]
        seen.clear()
    for _ in range(2):
        with Watching():
            catalog.scaled_dot_product_attention(Q, K, V)
        assert seen == [SDPA]
        seen.clear()


def test_a_way_of_torchs_that_is_named_is_gone(kernel):
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):  # there is none on a CPU
        for function in (SDPA, catalog.scaled_dot_product_attention):
            with pytest.raises(RuntimeError, match="No viable backend"):
                function(Q, K, V)
    for named in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
        with sdpa_kernel(named):
            assert torch.equal(catalog.scaled_dot_product_attention(Q, K, V), SDPA(Q, K, V)) and why() == "torch_backend"
            assert not catalog.explain(catalog.scaled_dot_product_attention, Q, K, V).kernel_id
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]):
        catalog.scaled_dot_product_attention(Q, K, V)
        assert why() == "kernel"


def test_tensors_whose_memory_was_given_back(kernel):
    for position in range(3):
        arguments = [Q, K, V]
        arguments[position] = arguments[position].clone()
        arguments[position].untyped_storage().resize_(0)
        with pytest.raises(RuntimeError, match="storage of size 0"):
            catalog.scaled_dot_product_attention(*arguments)
        assert why() == "tensor_view"


def test_tangents_are_not_dropped(kernel):
    """Where torch has no rule for them it says so."""
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(Q, torch.ones_like(Q))
        for function in (SDPA, catalog.scaled_dot_product_attention):
            with pytest.raises(NotImplementedError, match="forward AD"):
                function(dual, K, V)
        assert why() == "requires_grad"
        flash = catalog.flash_attn_func(dual, K, V, return_lse=True)[0]
        assert torch.autograd.forward_ad.unpack_dual(flash).tangent is not None
        with pytest.raises(NotImplementedError, match="forward AD"):
            catalog.plan("scaled_dot_product_attention", Q, K, V).run(dual, K, V)
    catalog.scaled_dot_product_attention(Q, K, V)
    assert why() == "kernel"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_trace_holds_torchs_operation(kernel):
    traced = torch.jit.trace(lambda q: catalog.scaled_dot_product_attention(q, K, V), Q, check_trace=False)
    assert why() == "compiling" and "scaled_dot_product_attention" in str(traced.graph)
    torch.testing.assert_close(traced(Q * 2), SDPA(Q * 2, K, V), rtol=1e-4, atol=1e-5)
    catalog.scaled_dot_product_attention(Q, K, V)
    assert why() == "kernel"


def test_the_two_families_do_not_take_each_others_frames(kernel):
    catalog.flash_attn_func(Q, K, V)
    assert why() != "kernel"
    catalog.scaled_dot_product_attention(Q, K, V)
    assert why() == "kernel"


def test_without_the_guard_everything_works_too(monkeypatch, kernel):
    monkeypatch.setattr(plainness, "guard_is_usable", lambda: False)
    catalog.configure()
    for _ in range(3):
        catalog.scaled_dot_product_attention(Q, K, V)
        assert why() == "kernel" and serving.server().latest is None
