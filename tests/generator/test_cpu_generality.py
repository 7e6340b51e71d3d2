"""Programs that no attention author writes: every statement, rank, layout and dtype has code that agrees with the interpreter."""

from __future__ import annotations

import numpy as np
import pytest
from cpu_kernels import assert_agrees, widest

from generator.tl.checker import parse_and_check
from generator.tl.expand import expand
from generator.tl.ir import Program
from generator.tl.memory import matrix_shapes

RESHAPE = "from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)"

PROGRAMS = {
    # a product inside two loops, its accumulator reset by the outer one
    "nested_loops": """
Argument M, N, K, Parts i32
Constant BM = 32, BN = 24, BK = 16
Grid m = 0:ceildiv(M, BM), n = 0:ceildiv(N, BN)
Allocate A in global (M, K) f32
Allocate B in global (K, N) f32
Allocate C in global (M, N) f32
Allocate total in register (BM, BN) f32 = 0
Allocate part in register (BM, BN) f32
for p = 0:Parts
  Compute part = 0.0
  for k = p * 2:min(p * 2 + 2, ceildiv(K, BK))
    Copy A (BM, BK) in coordinate [L = m, D = k] from global to shared
    Copy B (BK, BN) in coordinate [L = k, D = n] from global to shared
    Compute GEMM A, B and accumulate part
  end
  Compute total = total + part * (p + 1)
end
Copy total into C (BM, BN) in coordinate [L = m, D = n] from register to global
""",
    "branches": """
Argument M, N, Tiles i32
Argument limit f32
Constant BM = 16, BN = 40
Grid m = 0:ceildiv(M, BM)
Allocate X in global (M, N) f32
Allocate Keep in global (Tiles) i32
Allocate Y in global (M) f32
Allocate sum in register (BM) f32 = 0
Allocate T in register (BM, BN) f32
for j = 0:ceildiv(N, BN)
  if Keep[j] != 0 and j >= 0
    Copy X (BM, BN) in coordinate [L = m, D = j] from global to shared
    Compute T = min(X, limit)
    Compute sum = sum + rowsum(T)
  else
    Compute sum = sum - 1.0
  end
end
Copy sum into Y (BM) in coordinate [L = m] from register to global
""",
    "whole_numbers": """
Argument M, N i32
Constant BM = 16, BN = 24
Grid m = 0:ceildiv(M, BM)
Allocate X in global (M, N) f32
Allocate First in global (M) i32
Allocate Count in global (M) i32
Allocate count in register (BM) i32 = 0
Allocate start in register (BM) i32
Allocate T in register (BM, BN) f32
Copy First (BM) in coordinate [L = m] from global to shared
Compute start = First % 7 - First // 3
for j = 0:ceildiv(N, BN) reversed
  Copy X (BM, BN) in coordinate [L = m, D = j] from global to shared
  Compute T = where(j * BN + cols < N and X > 0.0, 1.0, 0.0)
  Compute count = where(rowsum(T) > 3.0, count + j * 2, max(count, start))
end
Copy count into Count (BM) in coordinate [L = m] from register to global
""",
    # a captured bias in both layouts, a vector along the keys, equality of captured labels
    "captured": f"""
Argument SeqQ, SeqK i32
Argument scale f32 positive
Constant BM = 32, BN = 24, D = 16, DV = 16
Grid m = 0:ceildiv(SeqQ, BM)
Allocate Q in global (SeqQ, D) f32
Allocate K in global (SeqK, D) f32
Allocate V in global (SeqK, DV) f32
Allocate Bias in global (SeqQ, SeqK) f32
Allocate KeyBias in global (SeqK) f32
Allocate Label in global (SeqK) i32
Allocate RowLabel in global (SeqQ) i32
Allocate O in global (SeqQ, DV) f32
Allocate S in register (BM, BN) f32
Allocate acc in register (BM, DV) f32 = 0
Copy Q (BM, D) in coordinate [L = m] from global to shared
Let row = m * BM + rows
for j = 0:ceildiv(SeqK, BN)
  Copy K (BN, D) in coordinate [L = j] from global to shared
  Copy V (BN, DV) in coordinate [L = j] from global to shared
  Compute GEMM Q, K^T and get S
  Let kv = j * BN + cols
  Compute S = S * scale + Bias[row, kv] * 2.0 + KeyBias[kv]
  Compute S = where(kv < SeqK and Label[kv] == RowLabel[row], S, 0.0)
  Reshape S {RESHAPE} and get P f32
  Compute GEMM P, V and accumulate acc
end
Compute acc = acc + Bias[row, cols] - KeyBias[cols] * RowLabel[row]
Copy acc into O (BM, DV) in coordinate [L = m] from register to global
""",
    # operands used transposed, an operand computed in registers on either side, a chain of three products
    "operands": f"""
Argument M, N i32
Constant BM = 16, BN = 32, D = 24
Grid m = 0:1
Allocate A in global (D, M) f32
Allocate B in global (N, D) f32
Allocate G in global (D, D) f32
Allocate C in global (M, N) f32
Allocate E in global (M, D) f32
Allocate T in register (BM, D) f32
Allocate U in register (BM, BN) f32
Allocate W in register (BM, D) f32 = 1
Copy A (D, BM) in coordinate [L = 0] from global to shared
Copy B (BN, D) in coordinate [L = 0] from global to shared
Copy G (D, D) in coordinate [L = 0] from global to shared
Compute GEMM A^T, G and get T
Reshape T {RESHAPE} and get TA f32
Compute GEMM TA, B^T and get U
Reshape U {RESHAPE} and get UA f32
Compute GEMM UA, B and accumulate W
Compute W = W * 0.5 + T
Copy U into C (BM, BN) in coordinate [L = m] from register to global
Copy W into E (BM, D) in coordinate [L = m] from register to global
""",
    "rounded_tiles": f"""
Argument M, N i32
Constant BM = 32, BN = 32, D = 16
Grid m = 0:ceildiv(M, BM)
Allocate A in global (M, D) f16
Allocate B in global (N, D) f16
Allocate V in global (N, D) bf16
Allocate C in global (M, D) f16
Allocate S in register (BM, BN) f32
Allocate H in register (BM, BN) f16
Allocate P in register (BM, BN) bf16
Allocate top in register (BM) bf16
Allocate acc in register (BM, D) f32 = 0
Copy A (BM, D) in coordinate [L = m] from global to shared
for j = 0:ceildiv(N, BN)
  Copy B (BN, D) in coordinate [L = j] from global to shared
  Copy V (BN, D) in coordinate [L = j] from global to shared
  Compute GEMM A, B^T and get S
  Compute H = S * 1.01
  Compute top = rowmax(H)
  Compute P = where(j * BN + cols < N, H - top, 0.0)
  Reshape P {RESHAPE} and get PA bf16
  Compute GEMM PA, V and accumulate acc
end
Copy acc into C (BM, D) in coordinate [L = m] from register to global
""",
    "functions": """
Argument M, N i32
Argument x f32
Constant BM = 16, BN = 40
Grid m = 0:ceildiv(M, BM)
Allocate X in global (M, N) f32
Allocate Y in global (M, N) f32
Allocate Z in global (M) f32
Allocate a in register (BM, BN) f32
Allocate b in register (BM, BN) f32
Allocate r in register (BM) f32
Copy X (BM, BN) in coordinate [L = m] from global to shared
Compute a = exp(X) + exp2(X * 3.0) + log(abs(X) + 1.0) + log2(abs(X) + 2.0) - sqrt(abs(X))
Compute a = a + tanh(X * 4.0) + tanh(X * 0.01) + floor(X * 5.0) + max(X, 0.25) - min(X, -0.25) + (-X)
Compute b = where(not (X > 0.5 or X < -1.0) and X != 0.0, a / (X * X + 1.0), -a)
Compute b = b + (rows * 3 - cols // 2) % 5 + abs(cols - 7) + ceildiv(cols, 3) + where(rows == cols, 10, 0)
Compute r = rowmax(b) + rowsum(a * 0.01) * log(x) + exp(rows * -0.25)
Compute b = b - r
Copy b into Y (BM, BN) in coordinate [L = m] from register to global
Copy r into Z (BM) in coordinate [L = m] from register to global
""",
    # two tiles with masks of their own in one loop, one of them outside of any interval
    "two_masks": """
Argument M, N, Window i32
Constant BM = 16, BN = 24
Grid m = 0:ceildiv(M, BM)
Allocate X in global (M, N) f32
Allocate Y in global (M) f32
Allocate S in register (BM, BN) f32
Allocate T in register (BM, BN) f32
Allocate low in register (BM) f32 = -inf
Allocate sum in register (BM) f32 = 0
for j = 0:ceildiv(N, BN)
  Copy X (BM, BN) in coordinate [L = m, D = j] from global to shared
  Let kv = j * BN + cols
  Let row = m * BM + rows
  Compute S = where(kv < N and (kv <= row or kv >= row + Window), X, -inf)
  Compute T = where(kv < N and kv % 3 == 1, X, 0.0)
  Compute low = max(low, rowmax(S))
  Compute sum = sum + rowsum(T)
end
Compute sum = sum + where(low == -inf, 0.0, low)
Copy sum into Y (BM) in coordinate [L = m] from register to global
""",
    # decayed running sums: state of a tile, not of rows, carried backwards
    "carried_tile": """
Argument M, N i32
Constant BM = 8, BN = 40
Grid n = 0:ceildiv(N, BN)
Allocate X in global (M, N) f32
Allocate Y in global (M, N) f32
Allocate state in register (BM, BN) f32 = 0
for i = 0:ceildiv(M, BM) reversed
  Copy X (BM, BN) in coordinate [L = i, D = n] from global to shared
  Compute state = state * 0.5 + X
  Copy state into Y (BM, BN) in coordinate [L = i, D = n] from register to global
end
""",
}

SIZES: dict[str, list[dict[str, int | float]]] = {
    "nested_loops": [{"M": 40, "N": 50, "K": 70, "Parts": 3}, {"M": 1, "N": 1, "K": 1, "Parts": 0}],
    "branches": [{"M": 20, "N": 100, "Tiles": 3, "limit": 0.5}],
    "whole_numbers": [{"M": 37, "N": 70}],
    "captured": [{"SeqQ": 40, "SeqK": 50, "scale": 0.5}, {"SeqQ": 3, "SeqK": 20, "scale": 0.5}],
    "operands": [{"M": 13, "N": 29}],
    "rounded_tiles": [{"M": 40, "N": 70}],
    "functions": [{"M": 20, "N": 33, "x": 2.5}],
    "two_masks": [{"M": 20, "N": 60, "Window": 9}],
    "carried_tile": [{"M": 30, "N": 50}],
}


def program_of(name: str) -> Program:
    parsed = parse_and_check(f"Kernel {name}\n{PROGRAMS[name].strip()}\n")
    assert parsed.program is not None, parsed.diagnostics
    return parsed.program


@pytest.mark.parametrize("target", sorted({widest(), "cpu-avx2"}))
@pytest.mark.parametrize("name", PROGRAMS)
def test_agrees_with_the_interpreter(name: str, target: str) -> None:
    program = program_of(name)
    for sizes in SIZES[name]:
        rng = np.random.default_rng(len(name))
        arrays = {}
        for matrix, shape in matrix_shapes(expand(program), sizes).items():
            whole = program.allocations[matrix].dtype == "i32"
            arrays[matrix] = (
                rng.integers(0, 3, shape) if whole else rng.standard_normal(shape).astype(np.float16).astype(np.float32)
            )
        assert_agrees(program, {n: x for n, x in arrays.items() if n not in program.outputs}, sizes, target)
