"""Random programs for soak.py and soak_faults.py."""
