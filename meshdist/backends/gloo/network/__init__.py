"""Collectives between hosts: `rail` is what they are made of, `moves` and `reductions` are the plans."""
