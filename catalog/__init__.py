"""The kernel catalog and the loader: `import catalog` is what serving code needs. torch and pyarrow come at the first use."""

from __future__ import annotations

import importlib
from typing import Any

#: Public name -> the module that defines it.
_PUBLIC = {
    "open": "catalog.store",
    "Catalog": "catalog.store",
    "CatalogError": "catalog.errors",
    "make_row": "catalog.schema",
    "scaled_dot_product_attention": "catalog.attention",
    "flash_attn_func": "catalog.attention",
    "flash_attn_varlen_func": "catalog.attention",
    "flash_attn_with_kvcache": "catalog.attention",
    "explain": "catalog.attention",
    "configure": "catalog.settings",
    "attention_kernel": "catalog.settings",
    "Settings": "catalog.settings",
    "SettingsError": "catalog.settings",
    "UnknownSettingWarning": "catalog.settings",
    "NoKernelError": "catalog.reasons",
    "FallbackWarning": "catalog.counting",
    "stats": "catalog.serving",
    "last_decision": "catalog.serving",
    "freeze": "catalog.serving",
    "unfreeze": "catalog.serving",
    "reload": "catalog.serving",
    "plan": "catalog.planning",
    "warmup": "catalog.planning",
    "has_kernel": "catalog.planning",
    "get_kernel_variants": "catalog.planning",
    "loaded_kernels": "catalog.planning",
    "collect_env": "catalog.planning",
}

__all__ = list(_PUBLIC)  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'catalog' has no attribute {name!r}")
    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
