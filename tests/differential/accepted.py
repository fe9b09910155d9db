"""Where meshdist answers otherwise than torch, on purpose: by module and program, what the cases are called, and why.

An entry that no case needs any more fails its test, as a difference without an entry does.
"""

from __future__ import annotations

from both_sides import Program

NOT_IN_GLOO = "meshdist carries every dtype; torch's Gloo has no 16-bit integers, unsigned ones above 8 bits, or float8"
_DTYPES = r"u?int16|uint32|uint64"
_PRODUCT = r"PRODUCT complex\d+ .*"
_MOVED = rf"({_DTYPES}|float8_e4m3fn|float8_e5m2) .*"
STACKED = "torch's Gloo has the concatenated form alone; the documentation has both"
STRIDED = "torch's Gloo takes the memory of a strided array for a plain one, or refuses it; meshdist packs and unpacks"
RETURNED = "a sync call of meshdist returns its output, so that calls can be chained"
LAST_MADE = "torch knows nobody's group, and answers for whichever was made last; meshdist says that it cannot know"
OUTSIDE_SEND = "torch refuses `send` alone of all calls from outside a group; meshdist warns, as for the others"
ONLY_CPU = "gloo carries the arrays of CPUs; torch says so of CUDA tensors as well"
COMPLEX_PRODUCT = "torch has no products of complex numbers; those of meshdist are NumPy's"
NOT_RANKS = "torch hands any number back where the group is the world; meshdist says that there is no such rank"

ACCEPTED: dict[str, dict[str, str]] = {
    "programs_movement.broadcast": {_MOVED: NOT_IN_GLOO},
    "programs_movement.all_gather": {_MOVED: NOT_IN_GLOO},
    "programs_movement.all_gather_uneven": {"rows by rank": "arrays of different sizes: torch has them for NCCL"},
    "programs_movement.all_gather_into_tensor": {"stacked .*": STACKED, f"concatenated {_MOVED}": NOT_IN_GLOO},
    "programs_movement.gather": {
        _MOVED: NOT_IN_GLOO,
        r"complex\d+ .*": "torch views complex numbers as pairs of real ones, but not in gather",
    },
    "programs_movement.scatter": {_MOVED: NOT_IN_GLOO},
    "programs_movement.all_to_all": {
        _MOVED: NOT_IN_GLOO,
        "uneven": "arrays of different sizes: torch's Gloo has them in all_to_all_single alone",
    },
    "programs_movement.all_to_all_single": {
        _MOVED: NOT_IN_GLOO,
        "rows that do not divide": "torch leaves rows behind, or fails later; rows that do not divide are an error",
    },
    "programs_movement.strided": {
        "(all_reduce|broadcast), (every_second|columns)": STRIDED,
        "(all_to_all_single|all_to_all_of_plain), (every_second|columns|transposed)": STRIDED,
        "all_gather_into_plain, .*": STACKED,
    },
    "programs_reductions.all_reduce": {rf"\w+ ({_DTYPES}) .*": NOT_IN_GLOO, _PRODUCT: COMPLEX_PRODUCT},
    "programs_reductions.reduce": {rf"\w+ ({_DTYPES}) .*": NOT_IN_GLOO, _PRODUCT: COMPLEX_PRODUCT},
    "programs_reductions.reduce_scatter": {rf"\w+ ({_DTYPES}) .*": NOT_IN_GLOO, _PRODUCT: COMPLEX_PRODUCT},
    "programs_reductions.reduce_scatter_tensor": {
        rf"concatenated \w+ ({_DTYPES}) .*": NOT_IN_GLOO,
        f"concatenated {_PRODUCT}": COMPLEX_PRODUCT,
        "stacked": STACKED,
    },
    "programs_reductions.special_values": {
        r"NaN of rank \d (MIN|MAX) .*": "a NaN propagates, as in NumPy; in Gloo it depends on the rank that has it"
    },
    "programs_calls.started_messages": {
        "batch of nothing": "torch fails on an empty list with an IndexError; to meshdist it is nothing to do",
        "P2POp irecv of no rank": "meshdist receives from any rank in a batch, too",
    },
    "programs_calls.async_calls": {
        "reduce_scatter(_tensor)?": "torch's is_completed() of these is False even after wait()",
    },
    "programs_calls.works": {
        "result": "a Work of meshdist gives what the sync call returns; torch gives the list of the outputs",
        "then that raises": "meshdist raises what the callback raised; torch a RuntimeError with its words",
    },
    "programs_calls.returns": {"(?!.*barrier).*": RETURNED},
    "programs_groups.queries": {
        r"get_(group|global)_rank (-1|\d)": NOT_RANKS,
        "supports_complex PRODUCT": COMPLEX_PRODUCT,
    },
    "programs_groups.parts": {
        ".*, outside: send": OUTSIDE_SEND,
        ".*, outside: (ranks|get_group_rank|get_global_rank)": LAST_MADE,
    },
    "programs_groups.wrong_groups": {"unknown backend": "torch looks at the backend on the members alone"},
    "programs_groups.mesh_plane": {
        "a name twice": "torch makes a mesh with one axis twice",
        "the other order": "meshdist gives the axes in the order named",
    },
    "programs_groups.mesh_of_ranks": {
        "reversed: (local rank|ranks)": "ranks are numbered as they are given; torch takes the world's numbers",
        "ranks twice": "torch makes a mesh in which a rank sits twice",
    },
    "programs_errors.objects": {
        "all_gather_object that cannot be pickled": "a TypeError that names call, rank and type; torch's is pickle's",
    },
    "programs_errors.ops": {"text": "meshdist takes the names of the ops"},
    "programs_alone.file_store": {
        "delete_key again": "torch's FileStore notes the end of any key, and calls that a success",
        "has_extended_api": "torch's FileStore has the methods, each of several steps; here each is one",
    },
    "programs_alone.tcp_store": {
        "multi_set of unequal lists": "an argument is wrong: ValueError; torch's is a DistStoreError",
    },
    "programs_alone.before_a_world": {
        "DeviceMesh without a launcher": "a process that no launcher started is a world of one",
    },
    "programs_alone.beginnings": {
        "env:// without MASTER_PORT": "the only rank of a world waits for nobody, so it needs no port",
        "env:// without MASTER_ADDR": "the documentation has rank 0 need none; torch's code refuses that",
        ".*: backends by device": ONLY_CPU,
        "no backend: place": "torch's name is 'undefined' where None was given; the backend of meshdist is gloo",
    },
}

# Names that both have and that no program calls.
NOT_COMPARED = {
    "DistBackendError": "its subclasses and it are compared where they are raised",
    "DistError": "its subclasses and it are compared where they are raised",
    "DistNetworkError": "its subclasses and it are compared where they are raised",
    "DistStoreError": "its subclasses and it are compared where they are raised",
    "ProcessGroup": "groups are made by new_group; torch's class is not made to be called",
    "autograd": "torch's is of rpc; ours has gradients of arrays and collectives, which tests/autograd compares",
    "breakpoint": "it waits for a person",
    "default_pg_timeout": "it is a constant",
    "device_mesh": "the module that holds DeviceMesh",
    "is_mpi_available": "it depends on what is installed",
    "register_rendezvous_handler": "it changes the module for all that comes after it",
    "rendezvous": "init_process_group is compared, which calls it",
    "shrink_group": "torch has it for NCCL alone",
    "split_group": "torch has it for NCCL alone",
    "torch": "the library itself, which torch.distributed has imported; ours has its backend",
}


def accepted(program: Program) -> dict[str, str]:
    """Return the accepted differences of a program: patterns of labels, and the reasons."""
    return ACCEPTED.get(name_of(program), {})


def name_of(program: Program) -> str:
    """Return how a program is called here and in the names of tests."""
    return f"{program.__module__}.{program.__name__}"
