"""The CPU translator: core TL to one self-contained C++17 source with vector code. `kernel.py` is its table of contents."""

from generator.translate.cpu.kernel import translate_cpu

__all__ = ["translate_cpu"]
