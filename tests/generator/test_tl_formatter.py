"""`farm tl fmt`: canonical lines, comments kept, the same program."""

from pathlib import Path

import pytest

from generator.tl.formatter import format_text
from generator.tl.parser import parse_or_raise
from generator.tl.printer import print_program

ROOT = Path(__file__).parents[2]
PROGRAMS = sorted([*(ROOT / "tests" / "programs" / "valid").glob("*.tl"), *(ROOT / "examples" / "tl").glob("*.tl")])


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_formatting_keeps_program_and_comments(path):
    text = path.read_text()
    formatted = format_text(text)
    assert parse_or_raise(formatted) == parse_or_raise(text)
    assert format_text(formatted) == formatted
    assert [c.split("#")[1].strip() for c in text.splitlines() if "#" in c] == [
        c.split("#")[1].strip() for c in formatted.splitlines() if "#" in c
    ]


def test_spelling_indentation_and_gaps():
    text = """

KERNEL  x
# sizes
argument a  fp32 , N int # the call's
constant BM=64,   BN in {32,64}
Allocate X in GLOBAL (N,BM) half
Allocate Y in global (N, BM) f16


for i = (0):ceildiv( N,BM )   reversed
copy X (BM,64) in coordinate [ i ] from global to registers # a tile
   if N>3
      compute X = X*(2)
   else
# nothing to do
      compute X = -(X)
   end if
 copy X into Y(BM,64) in coordinate [L=i,D=0] from register to global
end
"""
    assert (
        format_text(text)
        == """Kernel x
# sizes
Argument a f32
Argument N i32           # the call's
Constant BM = 64, BN in {32, 64}
Allocate X in global (N, BM) f16
Allocate Y in global (N, BM) f16

for i = 0:ceildiv(N, BM) reversed
  Copy X (BM, 64) in coordinate [L = i] from global to register  # a tile
  if N > 3
    Compute X = X * 2
  else
    # nothing to do
    Compute X = -X
  end
  Copy X into Y (BM, 64) in coordinate [L = i] from register to global
end
"""
    )


def test_prose_of_a_sketch_is_kept():
    text = "Copy Q from global to shared\nfor each tile of keys\n Compute GEMM Q, K and get S\nend\n"
    assert format_text(text) == text.replace(" Compute", "  Compute") == print_program(parse_or_raise(text))
