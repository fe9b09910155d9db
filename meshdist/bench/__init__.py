"""bench: how long collectives take here, and whether they are right. `python -m meshdist.bench --help`."""
