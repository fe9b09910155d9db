"""`python -m meshdist.launch` is meshrun."""

from meshdist.launch.meshrun import main

if __name__ == "__main__":
    raise SystemExit(main())
