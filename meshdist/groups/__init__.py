"""Process groups: what a rank calls."""
