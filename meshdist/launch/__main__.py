"""`python -m meshdist.launch` is meshrun."""

from meshdist.launch.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
