"""`out=` of FlashAttention's functions: written by a kernel where that is a copy of its result, and by torch elsewhere."""

import pytest
import torch
from kernel_factory import CAUSAL_BR, Shelf, spec

import catalog

pytestmark = pytest.mark.usefixtures("fresh_loader")

SHAPE = (2, 8, 4, 16)


@pytest.fixture(autouse=True)
def serving(fresh_loader):
    shelf = Shelf()
    shelf.add(spec(masks=CAUSAL_BR, batch=2, seqlen_q=8, seqlen_k=8))
    catalog.configure(catalog=shelf.source(), probe="off", allow_unmeasured=True)


def rand(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def call(q, k, v, out=None):
    found = catalog.flash_attn_func(q, k, v, causal=True, out=out)
    assert catalog.last_decision().kernel_id, str(catalog.last_decision())
    return found


def inputs():
    return [rand(*SHAPE, seed=seed) for seed in range(3)]


@pytest.mark.parametrize("which", range(3))
def test_an_input_may_be_the_output(which):
    given = inputs()
    expected = call(*given)
    assert call(*given, out=given[which]) is given[which]
    torch.testing.assert_close(given[which], expected)


def test_an_output_that_lies_on_a_part_of_an_input():
    wide = rand(2, 9, 4, 16, seed=5)
    given = [wide[:, :8], *inputs()[1:]]
    expected = call(*given)
    torch.testing.assert_close(call(*given, out=wide[:, 1:]), expected)


@pytest.mark.parametrize("out", [torch.zeros(2, 1, 4, 16).expand(SHAPE), torch.zeros(SHAPE, requires_grad=True)])
def test_what_torch_would_not_write_is_not_written(out):
    with pytest.raises(RuntimeError) as theirs:
        out.copy_(torch.zeros(SHAPE))
    before = out.clone()
    with pytest.raises(RuntimeError) as ours:
        call(*inputs(), out=out)
    assert str(ours.value) == str(theirs.value) and torch.equal(out, before)


def test_a_negated_view_holds_the_result():
    memory = torch.empty(SHAPE)
    call(*inputs(), out=torch._neg_view(memory))
    torch.testing.assert_close(-memory, call(*inputs()))


def test_an_inference_tensor_is_written_in_inference_mode_only():
    with torch.inference_mode():
        out = torch.empty(SHAPE)
        expected = call(*inputs()).clone()
        torch.testing.assert_close(call(*inputs(), out=out), expected)
    with pytest.raises(RuntimeError, match="inference tensor"):
        call(*inputs(), out=out)


def test_autograd_learns_that_a_tensor_it_saved_was_written():
    out, weight = torch.ones(SHAPE), torch.ones(SHAPE, requires_grad=True)
    product = (out * weight).sum()
    with torch.no_grad():
        call(*inputs(), out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_an_output_of_a_packed_call():
    starts = torch.tensor([0, 8], dtype=torch.int32)
    q, k, v = (x[0] for x in inputs())
    expected = catalog.flash_attn_varlen_func(q, k, v, starts, starts, 8, 8, causal=True)
    assert catalog.last_decision().kernel_id
    for out in (torch.empty_like(q), k):
        found = catalog.flash_attn_varlen_func(q, k, v, starts, starts, 8, 8, causal=True, out=out)
        assert found is out and catalog.last_decision().kernel_id
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("which", range(3))
def test_a_plan_writes_into_memory_of_its_own_only(which):
    given = inputs()
    plan = catalog.plan("flash_attn_func", *given, causal=True)
    out = torch.empty(SHAPE)
    torch.testing.assert_close(plan.run(*given, out=out), call(*given))
    with pytest.raises(ValueError, match="out: expected memory of its own"):
        plan.run(*given, out=given[which])
    overlapping = torch.empty(2 * 8 * 4 * 16 + 16)[16:].view(SHAPE)
    given[which] = overlapping.as_strided(SHAPE, overlapping.stride(), 0)
    with pytest.raises(ValueError, match="out: expected memory of its own"):
        plan.run(*given, out=overlapping)


def test_a_plan_writes_what_torch_would_write_only():
    given = inputs()
    plan = catalog.plan("flash_attn_func", *given, causal=True)
    expected = call(*given)
    with torch.inference_mode():
        inference = torch.empty(SHAPE)
        torch.testing.assert_close(plan.run(*given, out=inference), expected)
    for out in (inference, torch.zeros(SHAPE, requires_grad=True), torch._neg_view(torch.zeros(SHAPE))):
        for _ in range(2):
            with pytest.raises(ValueError, match="out: expected memory of its own, that torch would write too"):
                plan.run(*given, out=out)
    with pytest.raises(ValueError, match="out: expected shape"):
        plan.run(*given, out=torch.empty(2, 8, 4, 15))
    with pytest.raises(ValueError, match="out: expected dtype"):
        plan.run(*given, out=torch.empty(SHAPE, dtype=torch.float64))
    with pytest.raises(ValueError, match="out: expected strides"):
        plan.run(*given, out=torch.empty(2, 4, 8, 16).transpose(1, 2))
    weight, out = torch.ones(SHAPE, requires_grad=True), torch.ones(SHAPE)
    product = (out * weight).sum()
    plan.run(*given, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_a_plan_that_torch_answers_writes_as_a_kernel_would():
    wide = [x.double() for x in inputs()]
    plan = catalog.plan("flash_attn_func", *wide, causal=True, return_lse=True)
    assert plan.kernel is None
    out = torch.empty(SHAPE, dtype=torch.float64)
    found, lse = plan.run(*wide, out=out)
    expected, expected_lse = catalog.flash_attn_func(*wide, causal=True, return_lse=True)
    assert found is out and torch.equal(out, expected) and torch.equal(lse, expected_lse)
    with pytest.raises(ValueError, match="out: expected dtype torch.float64, found torch.float32"):
        plan.run(*wide, out=torch.empty(SHAPE))
