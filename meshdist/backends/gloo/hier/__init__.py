"""Collectives across hosts: the plans over rails (one rank of each host), and those of two levels."""
