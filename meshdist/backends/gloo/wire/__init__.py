"""The wire: TCP between the ranks of a world that share no memory.

`interfaces` finds the addresses to listen at, `door` lets peers in and turns strangers away, `caller` connects to
peers, `connection` moves frames over one socket, `link` is all that there is with one peer, `wire` holds the links of
a rank and moves them on. `bag` is what has come for one group; `outbox` and `inbox` are send and recv.
"""
