"""Default algorithms of the collectives over send and recv, for backends without a native form.

Each is a generator of `(transport, call, send, recv)` that yields what it waits for. Posting never blocks: post a send
and a receive together, then wait for both. Messages between two ranks keep their order.
"""
