"""What a call needs below its group and its backend: work, waiting, progress, peers, hooks, the flight recorder."""
