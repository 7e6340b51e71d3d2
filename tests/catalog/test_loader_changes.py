"""A catalog that is damaged, moved away or compacted under a process that serves from it: calls go on."""

import logging
import shutil
import subprocess
import sys
import textwrap

import pytest
import torch
from kernel_factory import CAUSAL, Shelf, spec

import catalog

pytestmark = pytest.mark.usefixtures("fresh_loader")

SDPA = torch.nn.functional.scaled_dot_product_attention
X = torch.randn(1, 4, 30, 16, generator=torch.Generator().manual_seed(1))


def call(x=X, **more):
    """The code of the reason why torch answered, or "kernel"."""
    out = catalog.scaled_dot_product_attention(x, x, x, **more)
    torch.testing.assert_close(out, SDPA(x, x, x, **more), rtol=2e-2, atol=2e-2)
    decision = catalog.last_decision()
    return "kernel" if decision.kernel_id else decision.reasons[0].code


@pytest.fixture
def folder(tmp_path):
    shelf = Shelf()
    for of in (spec(), spec(masks=CAUSAL), spec(dtype="bf16")):
        shelf.add(of)
    made = shelf.save(tmp_path / "catalog")
    catalog.configure(catalog=str(made), probe="off", allow_unmeasured=True)
    return made


def moved_away(folder):
    folder.rename(folder.with_name("elsewhere"))


def a_file_instead(folder):
    shutil.rmtree(folder)
    folder.write_text("no folder")


def rows_cannot_be_listed(folder):
    shutil.rmtree(folder / "rows")
    (folder / "rows").write_text("no folder")


@pytest.mark.parametrize("change", [moved_away, a_file_instead, rows_cannot_be_listed])
def test_calls_go_on_and_reload_says_what_is_wrong(folder, change):
    assert call() == "kernel"
    change(folder)
    assert call() == "kernel"
    assert call(X.bfloat16()) in ("no_catalog", "no_kernel")  # its rows were not read before
    with pytest.raises(catalog.CatalogError, match="catalog: "):
        catalog.reload()
    assert call() == "kernel"  # what was in force stays


def test_rows_that_cannot_be_read_are_a_reason_in_strict_mode(folder):
    catalog.configure(mode="strict")
    assert call() == "kernel"
    rows_cannot_be_listed(folder)
    with pytest.raises(catalog.NoKernelError, match="no_catalog: its rows cannot be read now: .*listing failed"):
        call(X.bfloat16())


def test_damaged_parts_are_named_in_the_log(folder, caplog):
    for part in (folder / "rows").iterdir():
        part.write_bytes(part.read_bytes()[:-1])
    with caplog.at_level(logging.WARNING, "catalog"):
        assert call() == "no_kernel"
        assert call(X.bfloat16()) == "no_kernel"
    said = [record.message for record in caplog.records if record.message.startswith("left out: ")]
    assert len(said) == 1 and ".parquet: " in said[0] and "farm catalog verify" in said[0]


@pytest.mark.parametrize("column, value", [("launch", {"entry": "kernel"}), ("launch", [1]), ("spec", '{"num_heads": 1}')])
def test_one_row_that_cannot_be_read_leaves_the_others(column, value, caplog):
    shelf = Shelf()
    kernel = shelf.add(spec())
    odd = dict(shelf.rows[0], row_id="f" * 32, binary_hash="f" * 64)
    odd[column] = value if isinstance(value, str) else catalog.make_row(
        attempt_key="0" * 64, reason_code="wrong_value", spec=spec(), target="cpu", translator_version="-", harness_version="-",
        launch=value,
    )["launch"]  # fmt: skip
    shelf.rows.append(odd)
    catalog.configure(catalog=shelf.source(), probe="off")
    with caplog.at_level(logging.WARNING, "catalog"):
        assert call() == "kernel" and catalog.last_decision().kernel_id == kernel
    assert f"row {'f' * 32} is left out: its spec or launch cannot be read" in caplog.text


def test_a_catalog_that_two_processes_compact_serves(folder):
    code = f"""
        import catalog
        from catalog.compaction import compact
        for turn in range(12):
            try:
                compact(catalog.open({str(folder)!r}), rows_per_part=1 + turn % 4)
            except catalog.CatalogError as error:
                assert "another compaction" in str(error), error
        """
    others = [subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)]) for _ in range(2)]
    served = 0
    while any(other.poll() is None for other in others) or not served:
        catalog.reload()
        assert call() == call(is_causal=True) == call(X.bfloat16()) == "kernel"
        served += 1
    assert [other.returncode for other in others] == [0, 0]
