"""The `nccl` backend: calls on GPU arrays over NCCL, through CuPy."""
