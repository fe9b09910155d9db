"""Programs about groups and meshes: who is where in them, and collectives on a part of the ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
from both_sides import Side
from diff_values import any_bits, exact


def _numbers(on: Side, *of: object) -> Any:
    return on.array(exact("int64", (4,), "SUM", on.rank, *of))


def queries(on: Side) -> None:
    """What the world says of itself."""
    dist = on.dist
    for name in ("is_initialized", "is_available", "get_rank", "get_world_size"):
        on.case(name, lambda name=name: getattr(dist, name)())
    # How many there are depends on the programs before.
    on.case("get_pg_count", lambda: dist.get_pg_count() >= 1)
    for name in ("is_gloo_available", "is_torchelastic_launched", "is_nccl_available", "is_xccl_available"):
        on.case(name, lambda name=name: getattr(dist, name)())
    for name in ("gloo", "no such thing"):
        on.case(f"is_backend_available {name}", lambda name=name: dist.is_backend_available(name))
    on.case("is_ucc_available", lambda: dist.is_ucc_available())
    on.case("get_node_local_rank", lambda: dist.get_node_local_rank())
    on.case("get_node_local_rank with a fallback", lambda: dist.get_node_local_rank(5))
    on.case("get_default_backend_for_device", lambda: dist.get_default_backend_for_device("cpu"))
    on.case("ranks of the world", lambda: dist.get_process_group_ranks(dist.group.WORLD))
    on.case("ranks of None", lambda: dist.get_process_group_ranks(None))
    on.case("rank and size of the group", lambda: [dist.group.WORLD.rank(), dist.group.WORLD.size()])
    for number in (0, on.size - 1, on.size, -1):
        on.case(f"get_group_rank {number}", lambda number=number: dist.get_group_rank(dist.group.WORLD, number))
        on.case(f"get_global_rank {number}", lambda number=number: dist.get_global_rank(dist.group.WORLD, number))
    for op in ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "AVG"):
        on.case(f"supports_complex {op}", lambda op=op: dist.supports_complex(getattr(dist.ReduceOp, op)))


def backend_names(on: Side) -> None:
    for name in ("gloo", "GLOO", "Mpi", "nccl", "ucc", "undefined"):
        on.case(f"Backend({name!r})", lambda name=name: str(on.dist.Backend(name)))
    for name in ("GLOO", "MPI", "NCCL", "UCC", "UNDEFINED"):
        on.case(f"Backend.{name}", lambda name=name: str(getattr(on.dist.Backend, name)))
    on.case("Backend(3)", lambda: on.dist.Backend(3))
    on.case("is a str", lambda: isinstance(on.dist.Backend("gloo"), str))
    on.case("equals its name", lambda: on.dist.Backend("GLOO") == "gloo")


def debug_levels(on: Side) -> None:
    dist = on.dist
    on.case("names", lambda: [dist.DebugLevel.OFF.name, dist.DebugLevel.INFO.name, dist.DebugLevel.DETAIL.name])
    on.case("at first", lambda: dist.get_debug_level().name)
    on.case("printed", lambda: [str(dist.get_debug_level()), repr(dist.get_debug_level()), f"{dist.DebugLevel.INFO}"])
    for name in ("INFO", "DETAIL", "OFF"):
        dist.barrier()  # ranks that are threads have one level
        on.case(f"set {name}", lambda name=name: dist.set_debug_level(getattr(dist.DebugLevel, name)))
        dist.barrier()
        on.case(f"get {name}", lambda: dist.get_debug_level().name)
    on.case("a level that is none", lambda: dist.set_debug_level("LOUD"))
    on.case("from the environment", lambda: dist.set_debug_level_from_env())


def parts(on: Side) -> None:
    """Groups of some ranks; all ranks make them, since torch needs it."""
    last = on.size - 1
    _in_group(on, "first and last", [0, last])
    _in_group(on, "last and first", [last, 0])
    _in_group(on, "without the first", list(range(1, on.size)))
    _in_group(on, "all", None)
    _in_group(on, "alone", [last])


def _in_group(on: Side, label: str, ranks: list[int] | None) -> None:
    dist = on.dist
    group = dist.new_group(ranks)
    members = sorted(range(on.size) if ranks is None else ranks)
    inside = on.rank in members

    def case(name: str, function: Any) -> None:
        on.case(f"{label}: {name}", function)

    case("rank", lambda: dist.get_rank(group))
    case("size", lambda: dist.get_world_size(group))
    if not inside:
        _outside(on, label, group, members)
        return
    case("ranks", lambda: dist.get_process_group_ranks(group))
    case("backend", lambda: dist.get_backend(group) == dist.get_backend())
    case("the group's own", lambda: [group.rank(), group.size()])
    for rank in range(on.size):
        case(f"group rank of {rank}", lambda rank=rank: dist.get_group_rank(group, rank))
        case(f"global rank of {rank}", lambda rank=rank: dist.get_global_rank(group, rank))
    root, place = members[-1], len(members) - 1
    _rooted(on, label, group, members, {"src": root}, {"dst": root})
    _rooted(on, f"{label}, group ranks", group, members, {"group_src": place}, {"group_dst": place})
    case("all_reduce", lambda: _all_reduce(on, group))
    case("async all_reduce", lambda: _all_reduce_async(on, group))
    case("all_gather", lambda: _all_gather(on, group, len(members)))
    case("all_to_all_single", lambda: _all_to_all_single(on, group, len(members)))
    case("barrier", lambda: dist.barrier(group))
    stranger = next((rank for rank in range(on.size) if rank not in members), None)
    if stranger is not None:
        case("broadcast from a stranger", lambda: dist.broadcast(_numbers(on), stranger, group=group))
        case("reduce to a stranger", lambda: dist.reduce(_numbers(on), stranger, group=group))
    case("group rank out of range", lambda: dist.broadcast(_numbers(on), group=group, group_src=len(members)))
    case("both ranks", lambda: dist.broadcast(_numbers(on), src=root, group=group, group_src=place))
    case("no rank", lambda: dist.broadcast(_numbers(on), group=group))
    case("destroy", lambda: dist.destroy_process_group(group))


def _rooted(on: Side, label: str, group: Any, members: list[int], src: Any, dst: Any) -> None:
    dist, root, size = on.dist, members[-1], len(members)

    def broadcast() -> Any:
        x = _numbers(on)
        dist.broadcast(x, group=group, **src)
        return x

    def reduce() -> Any:
        x = _numbers(on)
        dist.reduce(x, group=group, **dst)
        return x if on.rank == root else None

    def gather() -> Any:
        out = [_numbers(on, "out") for _ in members] if on.rank == root else None
        dist.gather(_numbers(on), out, group=group, **dst)
        return out

    def scatter() -> Any:
        x = _numbers(on, "out")
        dist.scatter(x, [_numbers(on, to) for to in range(size)] if on.rank == root else None, group=group, **src)
        return x

    def objects() -> Any:
        things = [on.rank, "a"]
        dist.broadcast_object_list(things, group=group, **src)
        return things

    def message() -> Any:
        x = _numbers(on)
        if on.rank == root:
            others = members[:-1] if "src" in src else range(size - 1)
            name = "dst" if "src" in src else "group_dst"
            return [dist.send(x, group=group, **{name: peer}) for peer in others]
        received = _numbers(on, "out")
        return dist.recv(received, group=group, **src), received

    for function in (broadcast, reduce, gather, scatter, objects, message):
        on.case(f"{label}: {function.__name__}", function)


def _all_reduce(on: Side, group: Any) -> Any:
    x = _numbers(on)
    on.dist.all_reduce(x, group=group)
    return x


def _all_reduce_async(on: Side, group: Any) -> Any:
    x = _numbers(on)
    on.dist.all_reduce(x, on.dist.ReduceOp.MAX, group, True).wait()
    return x


def _all_gather(on: Side, group: Any, size: int) -> Any:
    out = [_numbers(on, "out") for _ in range(size)]
    on.dist.all_gather(out, _numbers(on), group)
    return out


def _all_to_all_single(on: Side, group: Any, size: int) -> Any:
    out = on.array(np.zeros((2 * size, 3), np.float32))
    on.dist.all_to_all_single(out, on.array(any_bits("float32", (2 * size, 3), on.rank)), group=group)
    return out


def _outside(on: Side, label: str, group: Any, members: list[int]) -> None:
    """On a rank that is not in the group."""
    dist = on.dist

    def unchanged(name: str, call: Any) -> None:
        x = _numbers(on)
        on.case(f"{label}, outside: {name}", lambda: (call(x), x))

    on.note(f"{label}, outside: the group is NON_GROUP_MEMBER", group is dist.GroupMember.NON_GROUP_MEMBER)
    unchanged("all_reduce", lambda x: dist.all_reduce(x, group=group))
    unchanged("async all_reduce", lambda x: dist.all_reduce(x, group=group, async_op=True))
    unchanged("broadcast", lambda x: dist.broadcast(x, members[0], group=group))
    unchanged("reduce", lambda x: dist.reduce(x, members[0], group=group))
    unchanged("all_gather", lambda x: dist.all_gather([x], x, group=group))
    unchanged("all_gather_into_tensor", lambda x: dist.all_gather_into_tensor(x, x, group=group))
    unchanged("gather", lambda x: dist.gather(x, None, members[0], group=group))
    unchanged("scatter", lambda x: dist.scatter(x, None, members[0], group=group))
    unchanged("reduce_scatter", lambda x: dist.reduce_scatter(x, [x], group=group))
    unchanged("all_to_all", lambda x: dist.all_to_all([x], [x], group=group))
    unchanged("all_to_all_single", lambda x: dist.all_to_all_single(x, x, group=group))
    unchanged("send", lambda x: dist.send(x, members[0], group=group))
    unchanged("recv", lambda x: dist.recv(x, members[0], group=group))
    unchanged("isend", lambda x: dist.isend(x, members[0], group=group))
    unchanged("irecv", lambda x: dist.irecv(x, members[0], group=group))
    unchanged("barrier", lambda x: dist.barrier(group))
    unchanged("broadcast_object_list", lambda x: dist.broadcast_object_list([1], members[0], group=group))
    unchanged("all_gather_object", lambda x: dist.all_gather_object([1], 2, group=group))
    unchanged("gather_object", lambda x: dist.gather_object(1, None, members[0], group=group))
    unchanged("scatter_object_list", lambda x: dist.scatter_object_list([1], None, members[0], group=group))
    on.case(f"{label}, outside: ranks", lambda: dist.get_process_group_ranks(group))
    on.case(f"{label}, outside: get_backend", lambda: dist.get_backend(group))
    on.case(f"{label}, outside: get_group_rank", lambda: dist.get_group_rank(group, members[0]))
    on.case(f"{label}, outside: get_global_rank", lambda: dist.get_global_rank(group, 0))
    on.case(f"{label}, outside: destroy", lambda: dist.destroy_process_group(group))


def wrong_groups(on: Side) -> None:
    for label, ranks in (
        ("no such rank", [0, on.size]),
        ("negative", [-1, 0]),
        ("twice", [0, 0]),
        ("none", []),
        ("no numbers", ["a"]),
        ("more than ranks", list(range(on.size + 1))),
    ):
        on.case(label, lambda ranks=ranks: on.dist.new_group(ranks))
    on.case("unknown backend", lambda: on.dist.new_group([0, 1], backend="no such thing"))


def subgroups(on: Side) -> None:
    dist = on.dist

    def halves(size: int) -> Any:
        mine, every = dist.new_subgroups(size)
        return dist.get_process_group_ranks(mine), len(every), dist.get_rank(mine), _all_reduce(on, mine)

    def enumerated(lists: list[list[int]]) -> Any:
        mine, every = dist.new_subgroups_by_enumeration(lists)
        if mine is None or mine is dist.GroupMember.NON_GROUP_MEMBER:
            return None, len(every)
        return dist.get_process_group_ranks(mine), len(every), dist.get_rank(mine), _all_reduce(on, mine)

    on.case("of one", halves, 1)
    on.case("of all", halves, on.size)
    if on.size == 4:
        on.case("of two", halves, 2)
    on.case("that do not divide", halves, 3 if on.size != 3 else 2)
    on.case("larger than the world", halves, on.size + 1)
    on.case("of none", halves, 0)
    everyone = list(range(on.size))
    on.case("enumerated", enumerated, [everyone[::2], everyone[1::2]])
    on.case("enumerated, some", enumerated, [everyone[:2]])
    on.case("enumerated, overlapping", enumerated, [[0, 1], [1, 0]])


def mesh_line(on: Side) -> None:
    """A mesh of one dimension over all ranks."""
    mesh = on.dist.init_device_mesh("cpu", (on.size,), mesh_dim_names=("dp",))
    _mesh(on, "line", mesh)
    on.case("all_reduce", lambda: _all_reduce(on, mesh.get_group()))
    on.case("by name", lambda: _all_reduce(on, mesh.get_group("dp")))
    on.case("of the slice", lambda: _all_reduce(on, mesh["dp"].get_group()))
    on.case("no such name", lambda: mesh["tp"])
    on.case("no such group", lambda: mesh.get_group("tp"))
    on.case("two names for one", lambda: on.dist.init_device_mesh("cpu", (on.size,), mesh_dim_names=("a", "b")))
    on.case("too large", lambda: on.dist.init_device_mesh("cpu", (on.size + 1,)))
    on.case("no such device", lambda: on.dist.init_device_mesh("no such device", (on.size,)))
    on.case("a device with an index", lambda: on.dist.init_device_mesh("cuda:0", (on.size,)))


def mesh_plane(on: Side) -> None:
    """A mesh of two dimensions, one of them of size 1 where the ranks give no more."""
    rows = 2 if on.size % 2 == 0 else 1
    mesh = on.dist.init_device_mesh("cpu", (rows, on.size // rows), mesh_dim_names=("dp", "tp"))
    _mesh(on, "plane", mesh)
    for name in ("dp", "tp"):
        _mesh(on, name, mesh[name])
        on.case(f"all_reduce along {name}", lambda name=name: _all_reduce(on, mesh.get_group(name)))
        on.case(f"{name} is its slice", lambda name=name: mesh[name].get_group() == mesh.get_group(name))
    on.case("local ranks", lambda: [mesh.get_local_rank(0), mesh.get_local_rank("tp"), mesh["tp"].get_local_rank()])
    on.case("local rank of no axis", lambda: mesh.get_local_rank())
    on.case("group of no axis", lambda: mesh.get_group())
    on.case("all groups", lambda: [on.dist.get_process_group_ranks(group) for group in mesh.get_all_groups()])
    on.case("both names", lambda: mesh["dp", "tp"].mesh.tolist())
    on.case("the other order", lambda: mesh["tp", "dp"].mesh.tolist())
    on.case("a name twice", lambda: mesh["dp", "dp"])
    on.case("names twice", lambda: on.dist.init_device_mesh("cpu", (rows, on.size // rows), mesh_dim_names=("a", "a")))
    on.case("equal", lambda: mesh == on.dist.init_device_mesh("cpu", mesh.shape, mesh_dim_names=("dp", "tp")))


def mesh_of_ranks(on: Side) -> None:
    """A mesh of ranks in an order of one's own."""
    ranks = list(reversed(range(on.size)))
    mesh = on.dist.DeviceMesh("cpu", ranks)
    _mesh(on, "reversed", mesh)
    on.case("slice of a mesh without names", lambda: mesh["dp"])
    on.case("ranks twice", lambda: on.dist.DeviceMesh("cpu", [0, 0]))


def _mesh(on: Side, label: str, mesh: Any) -> None:
    for name in ("ndim", "shape", "mesh_dim_names", "device_type"):
        on.case(f"{label}: {name}", lambda name=name: _plain(getattr(mesh, name)))
    on.case(f"{label}: mesh", lambda: mesh.mesh.tolist())
    on.case(f"{label}: sizes", lambda: [mesh.size(), *[mesh.size(dim) for dim in range(mesh.ndim)]])
    on.case(f"{label}: rank", lambda: mesh.get_rank())
    on.case(f"{label}: coordinate", lambda: _plain(mesh.get_coordinate()))
    if mesh.ndim == 1:
        on.case(f"{label}: local rank", lambda: mesh.get_local_rank())
        on.case(f"{label}: ranks", lambda: on.dist.get_process_group_ranks(mesh.get_group()))


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, (list, tuple)) else value


PROGRAMS = (
    queries,
    backend_names,
    debug_levels,
    parts,
    wrong_groups,
    subgroups,
    mesh_line,
    mesh_plane,
    mesh_of_ranks,
)
