"""`python -m meshdist.launch` is meshrun, and passes --local-rank to the script, as torch.distributed.launch does."""

from meshdist.launch.meshrun import main

if __name__ == "__main__":
    raise SystemExit(main(passes_local_rank=True))
