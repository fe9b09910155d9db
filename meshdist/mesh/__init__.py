"""Meshes: n-d arrangements of ranks with named axes, each axis with its process groups."""
