"""`python -m meshdist.bench` measures collectives."""

from meshdist.bench.command_line import main

if __name__ == "__main__":
    raise SystemExit(main())
