"""Backend `nccl`: calls on GPU arrays over NCCL, through CuPy."""
