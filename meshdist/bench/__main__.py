"""`python -m meshdist.bench` measures collectives."""

from meshdist.bench.command_line import main
from meshdist.system.command_lines import until_closed

if __name__ == "__main__":
    raise SystemExit(until_closed(main))
