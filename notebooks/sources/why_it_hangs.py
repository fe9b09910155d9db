# %% [markdown]
# # Why it hangs, and what the library says
#
# A distributed program hangs when one rank waits for another that never arrives. This notebook makes the usual
# mistakes, one after the other, and prints the error on each rank. The ranks are threads of this notebook. Calls time
# out after three seconds; the default of a job is 30 minutes (`init_process_group(timeout=...)`).

# %%
import logging
import textwrap
import time

import numpy as np

import meshdist as dist

logging.getLogger("meshdist").setLevel("ERROR")  # the same report is logged as a warning before the timeout


def tell(program, ranks=3, seconds=3):
    """Run `program` on ranks that are threads, and print the result of each; the longest message in full."""

    def main():
        try:
            program()
        except (dist.DistError, ValueError) as error:
            # The message is enough here; in a script, the exception would end this rank, and then the others.
            return f"{type(error).__name__}: {error}"
        return "fine"

    told = dist.run(main, ranks, timeout=seconds)
    for rank, what in enumerate(told):
        first, *more = f"rank {rank}: {what}".splitlines()
        for line in [first, *(more if what == max(told, key=len) else [])]:
            print(textwrap.fill(line, 100, subsequent_indent="        "))
        print()


# %% [markdown]
# ## A call that not all ranks make
#
# The most common mistake is a collective inside of `if rank == 0`. If a rank ends without the call, the others raise
# an error that names it at once, long before the timeout.


# %%
def program():
    x = np.ones(4)
    if dist.get_rank() != 2:  # a log, a checkpoint, an early return
        dist.all_reduce(x)


tell(program)

# %% [markdown]
# ## Calls that disagree
#
# Ranks compare their calls while they wait for each other: the name, the dtype, the number of elements, the op and the
# root, and in `all_reduce`, `reduce`, `broadcast` and `scan` the shape. With other libraries, calls that differ hang or
# give garbage; here an error shows both calls and their lines.


# %% varies
def program():
    x = np.ones(1000, np.float32 if dist.get_rank() == 0 else np.int32)
    dist.all_reduce(x)


tell(program, ranks=2)


# %% varies
def program():
    x = np.ones(1000)
    if dist.get_rank() == 0:
        dist.all_reduce(x)
    else:
        dist.broadcast(x, src=0)


tell(program, ranks=2)

# %% [markdown]
# ## The same calls, in a different order
#
# On one group that is a disagreement as above. On two groups it is a deadlock: rank 0 waits in the first group for
# rank 1, which waits in the second one for rank 0. Ranks that have waited for a second check each other's state: once
# the deadlock is certain, all of them raise an error.


# %% varies
def program():
    one, other = dist.new_group([0, 1], group_desc="one"), dist.new_group([0, 1], group_desc="other")
    x = np.ones(4)
    for group in (one, other):
        dist.all_reduce(x, group=group)  # both groups are connected now
    for group in (one, other) if dist.get_rank() == 0 else (other, one):
        dist.all_reduce(x, group=group)


tell(program, ranks=2)

# %% [markdown]
# ## Everybody receives first
#
# A ring in which all ranks receive before they send. `sendrecv` and `mesh.shift` do both at once.
# Posting `irecv` before `isend`, or letting one rank send first, also helps.


# %% varies
def program():
    rank, size, x = dist.get_rank(), dist.get_world_size(), np.ones(4)
    dist.recv(x, src=(rank - 1) % size)
    dist.send(x, dst=(rank + 1) % size)


tell(program)

# %% [markdown]
# If all ranks send first, the program is just as wrong, but works as long as messages are small: up to 64 KiB they are
# buffered. `MESHDIST_EAGER_LIMIT=0` makes every `send` wait until it is received, and so finds such mistakes early.
#
# ## Who is missing?
#
# `monitored_barrier` is a barrier whose timeout error names all missing ranks. Put one where you suspect that ranks
# diverge.


# %% varies
def program():
    if dist.get_rank() in (1, 3):
        time.sleep(3)  # busy elsewhere
    dist.monitored_barrier(timeout=2)


tell(program, ranks=4)

# %% [markdown]
# ## A rank that fails
#
# A rank that raises an exception ends the job: `meshrun` ends the other ranks and shows the traceback once. The errors
# of the other ranks name the rank and its exception; `meshdist.run` raises that exception itself.


# %%
def program():
    if dist.get_rank() == 1:
        raise FileNotFoundError("batch-17.npz")
    dist.barrier()


try:
    dist.run(program, 3)
except FileNotFoundError as error:
    print(f"{type(error).__name__}: {error}")
    print(*getattr(error, "__notes__", ["raised on rank 1 of 3 by meshdist.run"]))

# %% [markdown]
# ## Meshes that differ
#
# All ranks must create the same mesh. If a rank creates another one, it raises an error that shows both.


# %% varies
def program():
    shape = (2, 2) if dist.get_rank() != 3 else (4, 1)
    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    mesh["tp"].all_reduce(np.ones(2))


tell(program, ranks=4)

# %% [markdown]
# ## It is slow, but does not hang
#
# Then the ranks wait for the slowest one. A profile names it:


# %%
def program():
    x = np.ones(1000)
    dist.barrier()
    with dist.profile() as p:
        for _ in range(20):
            if dist.get_rank() == 1:
                np.linalg.svd(np.ones((400, 400)))  # extra work on this rank
            dist.all_reduce(x)
    return p.merged()


timeline = dist.run(program, 3)[0]
print("slowest: rank", timeline.slowest().rank)
axes = timeline.plot()

# %% [markdown]
# ## In a job
#
# - `python -m meshdist.debug attach` asks a running job who waits for whom; `kill -USR1 PID` asks one rank.
# - Every rank keeps its last calls; `MESHDIST_FLIGHT_RECORDER_DIR=folder` writes them to files when a job fails, and
#   `python -m meshdist.debug report folder` prints a report of them.
# - `MESHDIST_DEBUG=DETAIL` logs every call with its bytes and its line, and compares shapes in all collectives.
# - `meshdist.breakpoint(rank=1)` opens a debugger on one rank, while the others wait for it.
# - `init_process_group(timeout=60)` shortens the wait while you look for the mistake.
#
# For more, see [look into a job](../docs/debugging.md).
