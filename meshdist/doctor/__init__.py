"""python -m meshdist.doctor: check whether meshdist can run on this machine, and on the cluster of a job."""
