"""Point-to-point messages of a group: over shared memory between ranks of one host, else over TCP."""
