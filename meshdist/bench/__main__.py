"""`python -m meshdist.bench` measures collectives."""

from meshdist.bench.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
