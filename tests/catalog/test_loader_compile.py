"""torch.compile and torch.export: no graph break, kernels run at run time, fake results equal real ones."""

import pytest
import torch
import torch._dynamo.testing
from kernel_factory import CAUSAL, CAUSAL_BR, Shelf, spec

import catalog.attention  # its import registers the operators

pytestmark = pytest.mark.usefixtures("fresh_loader")


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def rand(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def serve():
    shelf = Shelf()
    buckets = [(n, n) for n in (4, 8, 16, 32, 64)]
    kernels = [shelf.add(spec(batch=2, masks=masks), buckets=buckets) for masks in ((), CAUSAL, CAUSAL_BR)]
    catalog.configure(catalog=shelf.source(), probe="off", allow_unmeasured=True)
    return kernels


def compiled(function, **options):
    return torch.compile(function, fullgraph=True, backend="aot_eager", **options)


def test_kernels_run_inside_a_compiled_function():
    _, *causal = serve()
    q = rand(2, 6, 4, 16).transpose(1, 2)

    def model(x):
        return catalog.scaled_dot_product_attention(x * 2, x, x, is_causal=True).transpose(1, 2).reshape(2, -1) + 1

    expected = torch.nn.functional.scaled_dot_product_attention(q * 2, q, q, is_causal=True).transpose(1, 2).reshape(2, -1) + 1
    torch.testing.assert_close(compiled(model)(q), expected, rtol=1e-4, atol=1e-5)
    (hit,) = catalog.stats()["outcomes"]
    assert hit.removeprefix("hit:") in causal


def test_the_other_family_inside_a_compiled_function():
    serve()
    q = rand(2, 6, 4, 16)

    def model(x):
        out, lse = catalog.flash_attn_func(x, x, x, causal=True, softcap=3.0, return_lse=True)
        return out + 1, lse * 2, catalog.flash_attn_func(x, x, x, window_size=(2, None))

    for found, expected in zip(compiled(model)(q), model(q), strict=True):
        torch.testing.assert_close(found, expected)


def test_dynamic_lengths_compile_at_most_twice():
    serve()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    model = torch.compile(lambda x: catalog.scaled_dot_product_attention(x, x, x), fullgraph=True, backend=counter, dynamic=True)
    for n in range(3, 53):
        x = rand(2, 4, n, 16)
        torch.testing.assert_close(model(x), torch.nn.functional.scaled_dot_product_attention(x, x, x), rtol=1e-4, atol=1e-5)
    assert counter.frame_count <= 2
    assert sum(n for label, n in catalog.stats()["outcomes"].items() if label.startswith("hit:")) == 50


def test_gradients_masks_and_autocast_are_traced_as_torchs_own():
    serve()
    q = rand(2, 4, 6, 16).requires_grad_()
    out = compiled(lambda x: catalog.scaled_dot_product_attention(x, x, x))(q)
    assert torch.autograd.grad(out.sum(), q)[0].abs().sum() > 0
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    x = q.detach()
    found = compiled(lambda x: catalog.scaled_dot_product_attention(x, x, x, attn_mask=mask))(x)
    torch.testing.assert_close(found, torch.nn.functional.scaled_dot_product_attention(x, x, x, mask))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert compiled(lambda x: catalog.scaled_dot_product_attention(x, x, x))(x).dtype == torch.bfloat16
    assert catalog.stats()["calls"] == 0
    with torch.no_grad():
        compiled(lambda x: catalog.scaled_dot_product_attention(x, x, x))(q)
    assert catalog.stats()["calls"] == 1


LAYOUTS = {
    "contiguous": lambda *s: rand(*s),
    "transposed": lambda b, h, s, d: rand(b, s, h, d).transpose(1, 2),
    "sliced": lambda b, h, s, d: rand(b, h, 2 * s, d)[:, :, ::2],
    "outermost last": lambda b, h, s, d: rand(s, h, b, d).permute(2, 1, 0, 3),
    "expanded": lambda b, h, s, d: rand(1, h, s, d).expand(b, h, s, d),
    "spread": lambda b, h, s, d: rand(b, h, s, 2 * d)[..., ::2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("served", [True, False])
def test_the_fake_result_has_the_strides_of_the_real_one(layout, served):
    if served:
        serve()
    q = LAYOUTS[layout](2, 4, 6, 16)
    for v in (rand(2, 4, 6, 16), rand(2, 4, 6, 8)):
        arguments = (q, rand(2, 4, 6, 16, seed=1), v, True)
        torch.library.opcheck(torch.ops.farm.sdpa.default, arguments)
        with torch._subclasses.FakeTensorMode() as mode:
            fake = torch.ops.farm.sdpa(*(mode.from_tensor(x) for x in arguments[:3]), True)
        assert torch.ops.farm.sdpa(*arguments).stride() == fake.stride()
    q, slopes = q.transpose(1, 2), torch.tensor([0.5, 0.25, 0.1, 0.0])
    torch.library.opcheck(torch.ops.farm.flash.default, (q, q, q, None, True, 3, -1, 2.0, slopes, slopes * 2, True))


def test_export_keeps_the_operator():
    serve()

    class Model(torch.nn.Module):
        def forward(self, x):
            return catalog.scaled_dot_product_attention(x, x, x)

    x = rand(2, 4, 6, 16)
    exported = torch.export.export(Model(), (x,))
    assert "farm.sdpa" in exported.graph_module.code
    torch.testing.assert_close(exported.module()(x), Model()(x))
