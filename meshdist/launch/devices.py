"""How many ranks this host is made for: one per GPU, or one per processor."""

from __future__ import annotations

from meshdist.systems import available_cores


def num_gpus() -> int:
    """Return how many CUDA GPUs a process started here sees, given CUDA_VISIBLE_DEVICES; 0 without a driver."""
    import ctypes

    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def parse_num_ranks(text: str) -> int:
    """Return what `--nproc-per-node` means: a positive number, "cpu", "gpu", or "auto" (GPUs if there are any).

    Raises:
        ValueError: It is none of them, or there is no GPU to start a rank for.
    """
    if text == "cpu":
        return available_cores()
    if text == "auto":
        return num_gpus() or available_cores()
    if text == "gpu":
        found = num_gpus()
        if found == 0:
            raise ValueError("gpu: this host shows no CUDA GPU (driver missing, or hidden by CUDA_VISIBLE_DEVICES)")
        return found
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise ValueError(f"expected a positive number, auto, cpu or gpu, got {text!r}")
