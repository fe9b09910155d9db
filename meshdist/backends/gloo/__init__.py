"""The `gloo` backend, meshdist's own CPU backend (not the Gloo library): shared memory in a host, TCP between hosts.

Layers, from below: `published` and `match` (the store, matching of messages); the transports `shm`
and `tcp`; `p2p` (send and recv over either); `hier` (collectives across hosts); `backend`.
"""
