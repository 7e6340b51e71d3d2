"""The stand-in for a GPU, for every test here that asks for it."""

from fake_gpu import fake_driver, nvml

__all__ = ["fake_driver", "nvml"]
