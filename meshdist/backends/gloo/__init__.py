"""Backend `gloo`: our own CPU backend, named as scripts name it; shared memory between the ranks of a host.

It is not the Gloo library. `segment` hands the memory around, `arena` divides it, `lockstep` keeps the ranks in step,
`movement` and `reduction` are the collectives, `messages` is send and recv, `single_copy` reads and writes a peer's
memory, `joint_copy` does so for a message from both sides.
"""
