"""Backend `nccl`: arrays in the memory of GPUs, carried by NCCL, by way of CuPy."""
