"""Profiles and accounts: times and bytes of calls."""
