# It is imported by the workers, and has no tests.
collect_ignore = ["dask_ranks.py"]
