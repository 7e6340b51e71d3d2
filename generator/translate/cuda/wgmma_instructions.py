"""wgmma's products as device functions: one for each shape, operand kind and dtype that a kernel uses."""

from __future__ import annotations

from dataclasses import dataclass

BEGIN, END = "// wgmma products", "// end of wgmma products"


@dataclass(frozen=True, slots=True, order=True)
class Product:
    """64 x n += 64 x 16 times 16 x n. kind "ss": A in shared memory, "rs": in registers. k_major_b: B is used transposed."""

    kind: str
    n: int
    k_major_b: bool
    dtype: str

    @property
    def name(self) -> str:
        return f"wgmma_{self.kind}_{self.n}_{'t' if self.k_major_b else 'n'}_{self.dtype}"

    def text(self) -> str:
        """A function of (accumulator, A's descriptor or registers, B's descriptor, whether to add)."""
        nd, na = self.n // 2, 1 if self.kind == "ss" else 4
        d = ", ".join(f"%{i}" for i in range(nd))
        a = f"%{nd}" if self.kind == "ss" else "{" + ", ".join(f"%{nd + i}" for i in range(4)) + "}"
        order = f"{'0, ' if self.kind == 'ss' else ''}{int(not self.k_major_b)}"
        parameter = "u64 a" if self.kind == "ss" else "const u32* a"
        inputs = '"l"(a)' if self.kind == "ss" else ", ".join(f'"r"(a[{i}])' for i in range(4))
        outputs = ", ".join(f'"+f"(d[{i}])' for i in range(nd))
        instruction = f"wgmma.mma_async.sync.aligned.m64n{self.n}k16.f32.{self.dtype}.{self.dtype}"
        return (
            f"DEVICE void {self.name}(float (&d)[{nd}], {parameter}, u64 b, int add) {{\n"
            f'  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{nd + na + 1}, 0;\\n{instruction} "\n'
            f'               "{{{d}}}, {a}, %{nd + na}, p, 1, 1, {order};\\n}}\\n"\n'
            f'               : {outputs} : {inputs}, "l"(b), "r"(add));\n'
            "}"
        )


def section(products: set[Product]) -> str:
    return "\n".join([BEGIN, *(p.text() for p in sorted(products)), END])
