"""`python -m meshdist.launch` is meshrun, and passes --local-rank to the script, as torch.distributed.launch does."""

from meshdist.launch.meshrun import main
from meshdist.system.command_lines import until_closed

if __name__ == "__main__":
    raise SystemExit(until_closed(lambda: main(passes_local_rank=True)))
