"""Run notebook cells on worker processes: `%load_ext meshdist`, then `%%mesh -n 4 --axes dp=2,tp=2`."""
