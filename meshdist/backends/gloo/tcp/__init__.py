"""TCP between the ranks of a world that are on different hosts.

`listen_addresses` selects addresses, `acceptor` authenticates incoming and `connector` makes outgoing connections,
through `dialling`; `connection` moves frames, those of `outgoing` among them, `resumption` gives one that was reset a
new socket, and `retention` has what was lost. `link` holds the connections with one peer, `transport` all links of a
rank, and `group_receive_state` what has arrived for one group; `sender` and `receiver` implement send and recv.
"""
