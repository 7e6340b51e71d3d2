"""TL's dtypes in emitted code: the runtime's enumerator, the element type behind a pointer, the size in bytes."""

TYPES = {"f16": "F16", "bf16": "BF16", "f32": "F32", "i32": "I32"}
C_TYPES = {"f16": "f16_t", "bf16": "bf16_t", "f32": "float", "i32": "int"}
BYTES = {"f16": 2, "bf16": 2, "f32": 4, "i32": 4}
