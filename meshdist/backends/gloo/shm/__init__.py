"""Shared memory between the ranks of a host: collectives, and the channels of point-to-point messages."""
