"""Diagnosis: explain hangs and failed runs."""
