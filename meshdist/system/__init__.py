"""The operating system: deadlines, limits, processes, environment variables."""
