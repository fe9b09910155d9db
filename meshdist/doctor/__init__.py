"""python -m meshdist.doctor: what of this machine, and of the cluster of a job, stands in the way of meshdist."""
