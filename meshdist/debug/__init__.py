"""Diagnosis: what the messages of failed runs say."""
