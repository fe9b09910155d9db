"""Faults, and what three libraries do about them: what compare_faults.py runs."""
