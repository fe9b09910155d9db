"""Measures meshdist, torch.distributed and Open MPI side by side: what the commands beside this package share."""
