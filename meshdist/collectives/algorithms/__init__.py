"""The default algorithms of the collectives, over send and recv: what a backend without a native form runs.

Each is a generator of `(backend, call, send, recv)` that yields what has to be waited for. Posting never blocks, so a
send and a receive are posted together and then waited for. Messages between two ranks keep their order.
"""
