"""Layouts of ranks in n dimensions: pure arithmetic."""
