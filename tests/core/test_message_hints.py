"""What the errors of messages say to write instead, to who comes from MPI."""

from __future__ import annotations

import pydoc
import re
import threading
import traceback

import numpy as np
import pytest

import meshdist as dist
from meshdist import functional
from meshdist.tensor import Shard, distribute_tensor

OBJECTS = "; send objects with send_object, broadcast_object_list, all_gather_object and the like"

OF_ALL = "init_process_group and new_group take the timeout of all calls"
OF_SENDRECV = "send, recv, dst, src, group, tag, group_dst, group_src, recv_tag"
OF_ONE = f"limits one wait; {OF_ALL}"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: dist.recv(np.ones(1), src=-1), r"one of \[0\]; got -1; leave src out to receive from any rank$"),
        (lambda: dist.send(np.ones(1), dst=-1), r"one of \[0\]; got -1$"),
        (
            lambda: dist.recv(np.ones(1), tag=None),
            "call info = probe\\(tag=None\\) first, then recv\\(x, src=info\\.source, tag=info\\.tag\\)$",
        ),
        (lambda: dist.batch_isend_irecv([(dist.isend, np.ones(1), 0)]), r"got tuple; write meshdist\.P2POp\("),
        (
            lambda: dist.batch_isend_irecv(dist.P2POp(dist.isend, np.ones(1), 0)),
            r"must be a list of P2POp, got P2POp; write batch_isend_irecv\(\[op\]\)$",
        ),
        (lambda: dist.Waitall, r"'Waitall': write `for work in works: work\.wait\(\)`$"),
        (
            lambda: dist.Scatterv,
            r": write `functional\.scatter\(blocks, src=src\)`, with a list of blocks on the source, and None",
        ),
        (lambda: dist.Gatherv, r": write `functional\.gather\(x, dst, axis=0, uneven=True\)`$"),
        (lambda: dist.Sendrecv_replace, r": write `sendrecv\(x\.copy\(\), x, dst, src\)`$"),
        (lambda: dist.isend_object, r": write `isend_object_list\(\[obj\], dst\)`$"),
        (
            lambda: dist.irecv_objects,
            r": write `irecv_object_list\(src\)`; `\[obj\] = work\.result\(\)` is the object$",
        ),
        (lambda: dist.send_object(1, "text"), r"got 'text'; did you swap obj and dst\?$"),
        (lambda: dist.irecv_object_list([None]), r"write objects = irecv_object_list\(src\)\.result\(\)$"),
    ],
    ids=[
        "any source",
        "no destination",
        "any tag",
        "batch of tuples",
        "no batch",
        "Waitall",
        "Scatterv",
        "Gatherv",
        "Sendrecv_replace",
        "isend_object",
        "irecv_objects",
        "swapped object",
        "a list to receive into",
    ],
)
def test_what_to_write_instead(call, words):
    def main():
        with pytest.raises((ValueError, TypeError, AttributeError), match=words):
            call()

    dist.run(main, 1)


OWN_GROUP = "'group'; a method runs over its own group: along an axis of a mesh, mesh[\"dp\"].{}(...)"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x, mesh: dist.send(x, dest=0), "send() got an unexpected keyword argument 'dest'; did you mean dst=?"),
        (lambda x, mesh: mesh.send(x, dest=0), "'dest'; did you mean dst=?"),
        (lambda x, mesh: dist.recv(x, source=0), "'source'; did you mean src=?"),
        (lambda x, mesh: dist.probe(source=0), "'source'; did you mean src=?"),
        (lambda x, mesh: dist.send_object_list([x], dest=0), "'dest'; did you mean dst=?"),
        (lambda x, mesh: dist.recv_object_list([x], source=0), "'source'; did you mean src=?"),
        (lambda x, mesh: mesh.isend_object_list([x], dest=0), "'dest'; did you mean dst=?"),
        (lambda x, mesh: dist.irecv_object_list(source=0), "'source'; did you mean src=?"),
        (lambda x, mesh: dist.broadcast(x, root=0), "'root'; did you mean src=?"),
        (lambda x, mesh: dist.reduce(x, root=0), "'root'; did you mean dst=?"),
        (lambda x, mesh: dist.all_reduce(x, comm=mesh), "'comm'; did you mean group=?"),
        (lambda x, mesh: dist.all_reduce(x, oper="sum"), "'oper'; did you mean op=?"),
        (lambda x, mesh: dist.all_reduce(x, asynch=True), "'asynch'; did you mean async_op=?"),
        (lambda x, mesh: dist.all_reduce(x, asynchronous=True), "'asynchronous'; did you mean async_op=?"),
        (lambda x, mesh: mesh.all_reduce(x, group=mesh), OWN_GROUP.format("all_reduce")),
        (lambda x, mesh: mesh.broadcast(x, 0, group=mesh), OWN_GROUP.format("broadcast")),
        (lambda x, mesh: mesh.all_reduce(x, comm=mesh), OWN_GROUP.format("all_reduce").replace("group", "comm", 1)),
        (lambda x, mesh: dist.new_group().send(x, 0, comm=mesh), OWN_GROUP.format("send").replace("group", "comm", 1)),
        (lambda x, mesh: dist.new_group().send(x, 0, group=mesh), OWN_GROUP.format("send")),
        (lambda x, mesh: dist.all_reduce(x, axis="dp"), 'along an axis of a mesh: mesh["dp"].all_reduce(...)'),
        (
            lambda x, mesh: dist.reduce_scatter_tensor(x, x, dim=1),
            "'dim'; meshdist.functional.reduce_scatter_tensor takes dim=, a dimension of the array; along an axis of a"
            ' mesh: mesh["dp"].reduce_scatter_tensor(...)',
        ),
        (
            lambda x, mesh: dist.reduce_scatter(x, [x], dim=1),
            "'dim'; meshdist.functional.reduce_scatter takes dim=, a dimension of the array; along an axis of a"
            ' mesh: mesh["dp"].reduce_scatter(...)',
        ),
        (
            lambda x, mesh: mesh["dp"].all_gather(x),
            "'tensor'; meshdist.functional.all_gather(x, group=...) returns the result",
        ),
        (lambda x, mesh: dist.all_reduce(x, bogus=1), "'bogus'; it takes tensor, op, group, async_op"),
        (lambda x, mesh: dist.sendrecv(x, x, 0, 0, foo=1), f"'foo'; it takes {OF_SENDRECV}"),
        (lambda x, mesh: dist.recv(x, src=0, timeout=1), f"'timeout'; `irecv(...).wait(timeout=...)` {OF_ONE}"),
        (lambda x, mesh: mesh.send(x, dst=0, timeout=1), f"'timeout'; `irecv(...).wait(timeout=...)` {OF_ONE}"),
        (
            lambda x, mesh: dist.all_reduce(x, timeout=1),
            f"'timeout'; `all_reduce(..., async_op=True).wait(timeout=...)` {OF_ONE}",
        ),
        (lambda x, mesh: dist.all_gather_object([None], 1, timeout=1), f"'timeout'; {OF_ALL}"),
        (
            lambda x, mesh: dist.all_gather_object(x),
            "the first argument is a list that gets them: objects = [None] * size",
        ),
    ],
)
def test_what_a_keyword_of_another_library_is_called_here(call, words):
    def main():
        mesh = dist.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        with pytest.raises(TypeError, match=f"{re.escape(words)}(, or |$)"):
            call(np.ones(1), mesh)

    dist.run(main, 1)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x, mesh: dist.init_process_group(backnd="gloo"), "init_process_group() got .*; did you mean backend=?"),
        (lambda x, mesh: dist.new_group(rank=[0]), "new_group() got .*; did you mean ranks=?"),
        (lambda x, mesh: dist.spawn(print, nproc=2), "spawn() got .*; did you mean nprocs=?"),
        (lambda x, mesh: dist.run(print, n=2), "run() got .*; did you mean world_size=?"),
        (lambda x, mesh: mesh.shift(x, disp=1), "DeviceMesh.shift() got .*; did you mean by=?"),
        (lambda x, mesh: mesh.halo_exchange(x, wdth=1), "DeviceMesh.halo_exchange() got .*; did you mean width=?"),
        (lambda x, mesh: mesh.halo_exchange(x, halo=1), "DeviceMesh.halo_exchange() got .*; did you mean width=?"),
        (lambda x, mesh: mesh.show(axes="dp"), "DeviceMesh.show() got .*; did you mean axis=?"),
        (lambda x, mesh: mesh.flatten(nme="all"), "DeviceMesh.flatten() got .*; did you mean name=?"),
        (lambda x, mesh: mesh.get_group(axis="dp"), "DeviceMesh.get_group() got .*; did you mean mesh_dim=?"),
        (lambda x, mesh: mesh.get_local_rank(axis="dp"), "DeviceMesh.get_local_rank() got .*; did you mean mesh_dim=?"),
        (
            lambda x, mesh: mesh.get_rank("x"),
            "DeviceMesh.get_rank() takes 1 positional argument but 2 were given; get_local_rank(axis) is the rank",
        ),
        (lambda x, mesh: mesh.get_group(foo=1), "DeviceMesh.get_group() got .*; it takes mesh_dim"),
        (
            lambda x, mesh: mesh.halo_exchange(x, with_corners=True),
            "DeviceMesh.halo_exchange() got .*; it takes block, width, periodic, dims, tag",
        ),
        (lambda x, mesh: mesh.shift(x, timeout=1), f"DeviceMesh.shift() got .*; {OF_ALL}"),
        (lambda x, mesh: dist.zeros(3, dtyp=int), "zeros() got .*; did you mean dtype=?"),
        (lambda x, mesh: dist.shrink_group([1], flags=1), "shrink_group() got .*; did you mean"),
        (lambda x, mesh: dist.check_replicated(x, nme="x"), "check_replicated() got .*; did you mean name=?"),
        (lambda x, mesh: distribute_tensor(x, device_mesh=mesh), "distribute_tensor() got .*; did you mean mesh=?"),
        (lambda x, mesh: distribute_tensor(x, mesh).full(dst=0), "DTensor.full() got .*; did you mean root=?"),
        (
            lambda x, mesh: distribute_tensor(x, mesh).redistribute(placement=None),
            "DTensor.redistribute() got .*; did you mean placements=?",
        ),
        (lambda x, mesh: mesh.get_group().rank(foo=1), "ProcessGroup.rank() got .*"),
    ],
)
def test_errors_name_public_functions_and_the_keyword_that_was_meant(call, words):
    def main():
        mesh = mesh_of_one()
        with pytest.raises(TypeError, match=f"^{re.escape(words).replace(re.escape('.*'), '.*')}"):
            call(np.ones(1), mesh)

    dist.run(main, 1)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: dist.init_device_mesh("cpu", (1,), dim_names=("dp",)), "'dim_names'; did you mean mesh_dim_names=?"),
        (lambda: dist.init_device_mesh("cpu", (1,), axis_names=("dp",)), "'axis_names'; did you mean mesh_dim_names=?"),
        (lambda: dist.init_device_mesh("cpu", (1,), ("dp",)), "; the names of the axes are a keyword: mesh_dim_names="),
    ],
)
def test_how_the_axes_of_a_mesh_are_named(call, words):
    with pytest.raises(TypeError, match=re.escape(words)):
        call()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: dist.rank, "'rank': write `get_rank()`"),
        (lambda: dist.size, "'size': write `get_world_size()`"),
        (lambda: dist.DTensor, "'DTensor': write `from meshdist.tensor import DTensor`"),
        (lambda: dist.Mesh, "'Mesh': `init_device_mesh` creates a DeviceMesh"),
        (lambda: dist.make_mesh, "'make_mesh': `init_device_mesh("),
        (lambda: mesh_of_one().rank, "'rank': `get_local_rank()` is the rank along the axis"),
        (lambda: mesh_of_one().axis_names, "'axis_names': write `mesh_dim_names`"),
        (lambda: mesh_of_one().dims, "'dims': `mesh_dim_names` has the names of the axes, `shape` their sizes"),
        (lambda: mesh_of_one().coords, "'coords': write `get_coordinate()`"),
        (lambda: mesh_of_one().psum, "'psum': write `all_reduce(x)`"),
        (lambda: functional.pmean, """'pmean': write `all_reduce(x, op="avg")`"""),
        (lambda: functional.allreduce, "'allreduce'; did you mean 'all_reduce'?"),
        (lambda: dist.get_local_rank, "'get_local_rank': `get_node_local_rank()` is the rank on this host"),
        (lambda: dist.Shard, "'Shard': write `from meshdist.tensor import Shard`"),
        (lambda: dist.SUM, "'SUM': write `ReduceOp.SUM`"),
        (lambda: dist.all_reduce(np.ones(1), op=np.add), "got ufunc 'add'; did you mean ReduceOp.SUM?"),
        (lambda: mesh_of_one().ANY_SOURCE, "'ANY_SOURCE': write `recv(x)`, without `src`"),
        (lambda: dist.ReduceOp("mean"), "unknown op 'mean'; choose from sum, product, min"),
        (lambda: dist.ReduceOp("mean"), "; did you mean 'avg'?"),
        (lambda: dist.isend(np.array([{}]), 0), OBJECTS),
        (
            lambda: dist.isend({"a": 1}, 0),
            f"tensor must be an array, got dict; pass its arrays one by one, or{OBJECTS[1:]}",
        ),
        (
            lambda: dist.all_reduce({"a": np.ones(2)}),
            "got dict; functional.all_reduce takes dicts of arrays, and returns the result",
        ),
        (
            lambda: mesh_of_one().shift({"a": np.ones(2)}),
            "x must be an array, got dict; pass its arrays one by one, or",
        ),
        (
            lambda: dist.all_reduce([1.0, 2.0]),
            "use np.array(tensor), or functional.all_reduce, which takes numbers and",
        ),
        (
            lambda: dist.recv([0.0] * 4),
            "got list; make an array for the result, such as buf = np.empty(4), and pass that",
        ),
        (lambda: dist.irecv(0.0), "got float; make an array for the result, such as buf = np.empty(()), and pass that"),
        (lambda: dist.send([0.0] * 4, 0), "tensor must be an array, got list; use np.array(tensor)"),
        (
            lambda: dist.all_gather_into_tensor([0.0] * 4, np.ones(4)),
            "got a list of 4 elements; make an array for the result, such as buf = np.empty(4), and pass that",
        ),
        (lambda: dist.all_reduce(np.ones(1), reduce_op="sum"), "'reduce_op'; did you mean op=?"),
        (
            lambda: dist.all_reduce(np.ones(1), op="maxloc"),
            "avg; the location of the maximum or minimum is not supported: gather",
        ),
        (
            lambda: dist.ReduceOp.MINLOC,
            "MINLOC': the location of the maximum or minimum is not supported: gather the values",
        ),
        (lambda: dist.destroy, "'destroy'; did you mean 'destroy_process_group'?"),
        (lambda: dist.get_group, "'get_group': `group.WORLD` is the group of all ranks, `mesh.get_group(axis)`"),
        (
            lambda: mesh_of_one().shift(np.ones(1), async_op=True),
            "; an async shift is two messages along the axis: line.isend(x, (i + 1) % n) and line.irecv(y,",
        ),
        (
            lambda: mesh_of_one().gather(np.ones(1)),
            "got None; meshdist.functional.gather(x, group=..., group_dst=0) returns a new list",
        ),
        (
            lambda: dist.scatter(np.ones(1)),
            "got None; meshdist.functional.scatter(blocks, group=..., group_src=0) takes the list alone",
        ),
        (
            lambda: functional.broadcast(None, 0),
            "x must be an array, got NoneType; every rank passes an array or tree with the structure, shapes and dtypes"
            " of the source's; where only the source knows them, write [x] = broadcast_object_list([x], src)",
        ),
        (
            lambda: dist.all_gather([np.ones(1)], np.ones(1), uneven=True),
            "'uneven'; meshdist.functional.all_gather takes uneven=",
        ),
        (lambda: dist.shift, """'shift': it is a method of meshes: write `mesh["x"].shift(x)`"""),
        (
            lambda: dist.Comm_split,
            "'Comm_split': `new_subgroups_by_enumeration(lists)` creates groups, and each axis of",
        ),
        (lambda: dist.Split, "'Split': `new_subgroups_by_enumeration(lists)` creates groups, and each axis of"),
        (
            lambda: dist.IN_PLACE,
            "'IN_PLACE': `all_reduce(x)`, `broadcast(x)` and `reduce(x)` replace `x`; to keep it, use `meshdist.func",
        ),
        (lambda: dist.Comm_size, "'Comm_size'; did you mean 'get_world_size'?"),
        (lambda: dist.waitany, "'waitany': write `wait_any(works)`"),
        (lambda: dist.waitsome, "'waitsome': write `wait_any(works)`, and `[work for work in works if"),
        (lambda: dist.any_source, "'any_source': write `recv(x)`, without `src`"),
        (lambda: dist.recv_any, "'recv_any': write `recv(x)`, without `src`"),
        (lambda: dist.sendrecv_replace, "'sendrecv_replace': write `sendrecv(x.copy(), x, dst, src)`"),
        (lambda: dist.waitall, "'waitall': write `for work in works: work.wait()`"),
        (lambda: dist.testany, "'testany': write `[work for work in works if work.is_completed()]`"),
        (lambda: dist.Testall, "'Testall': write `all(work.is_completed() for work in works)`"),
        (lambda: dist.isend("abc", 0), f"tensor must be an array, got str{OBJECTS}"),
        (lambda: dist.all_reduce(3), "got int; use np.array(tensor), or functional.all_reduce, which takes numbers"),
        (lambda: functional.all_reduce("x"), "all_reduce on group 'world' (rank 0 of 1): x must be an array, got str"),
        (lambda: functional.all_to_all(["x"]), "all_to_all on group 'world' (rank 0 of 1): x[0] must be an array"),
        (
            lambda: functional.all_to_all([1]),
            "x[0] must be an array, got int; x is a list of arrays, one for each rank; functional.all_to_all_single(",
        ),
        (
            lambda: functional.reduce_scatter([1.0]),
            "x[0] must be an array, got float; x is a list of arrays, one for each rank; functional.reduce_scatter_ten",
        ),
        (lambda: functional.reduce_scatter(3), "x must be a list of arrays, one for each rank, got int"),
        (
            lambda: functional.scatter([1, 2], [1, 2], src=0),
            "x must be an array, got list; pass the list of blocks as x on the source, and None on the other ranks",
        ),
        (
            lambda: dist.all_reduce(np.float64(3)),
            "; use np.array(tensor), or functional.all_reduce, which takes numbers and lists, and returns the result",
        ),
        (lambda: dist.recv(np.int64(3)), "make an array for the result, such as buf = np.empty(()), and pass that"),
        (lambda: dist.send_object_list({"a": 1}, 0), "must be a list, got dict; to send one object, pass [obj]"),
    ],
)
def test_names_and_arguments_that_are_called_otherwise(call, words):
    def main():
        with pytest.raises((ValueError, TypeError, AttributeError), match=re.escape(words)):
            call()

    dist.run(main, 1)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: dist.send(np.ones(1), 0, 7), "send"),
        (lambda: dist.recv(np.ones(1), 0, 7), "recv"),
        (lambda: dist.isend(np.ones(1), 0, np.int64(7)), "isend"),
        (lambda: dist.irecv(np.ones(1), 0, 7), "irecv"),
        (lambda: dist.sendrecv(np.ones(1), np.ones(1), 0, 0, 7), "sendrecv"),
        (lambda: dist.probe(0, 7), "probe"),
        (lambda: dist.iprobe(0, 7), "iprobe"),
        (lambda: dist.send_object_list([1], 0, 7), "send_object_list"),
        (lambda: dist.recv_object_list([1], 0, 7), "recv_object_list"),
        (lambda: dist.isend_object_list([1], 0, 7), "isend_object_list"),
        (lambda: dist.irecv_object_list(0, 7), "irecv_object_list"),
    ],
)
def test_a_tag_in_the_place_of_the_group(call, name):
    def main():
        with pytest.raises(TypeError, match=rf"^{name}: group must be .*, got int(64)?; for a tag, write tag=7$"):
            call()

    dist.run(main, 1)


@pytest.mark.parametrize("call", [lambda: dist.broadcast(np.ones(1), 0, 7), lambda: dist.recv(np.ones(1), 0, True)])
def test_what_is_no_tag_in_the_place_of_the_group(call):
    def main():
        with pytest.raises(TypeError, match=r": group must be .*, got (int|bool)$"):
            call()

    dist.run(main, 1)


@pytest.mark.parametrize(
    ("call", "pair"),
    [
        (lambda x, whole: dist.all_gather(x, list(whole)), "tensor and tensor_list"),
        (lambda x, whole: dist.gather(list(whole), x), "tensor and gather_list"),
        (lambda x, whole: dist.scatter(list(whole), x), "scatter_list and tensor"),
        (lambda x, whole: dist.reduce_scatter(list(whole), x), "input_list and output"),
        (lambda x, whole: dist.all_gather_into_tensor(x, whole), "output_tensor and input_tensor"),
        (lambda x, whole: dist.reduce_scatter_tensor(whole, x), "input and output"),
        (lambda x, whole: dist.all_gather_object({}, [None, None]), "object_list and obj"),
    ],
)
def test_an_output_in_the_place_of_the_input(call, pair):
    def main():
        with pytest.raises((TypeError, ValueError), match=rf"; did you swap {pair}\?$"):
            call(np.ones(3), np.ones((2, 3)))

    dist.run(main, 2)


def test_methods_ask_for_ranks_in_their_group():
    def main():
        mesh, x = mesh_of_one(), np.ones(1)
        for call in (mesh.broadcast, mesh["dp"].send, mesh.get_group().reduce):
            with pytest.raises(ValueError, match=r": pass (src|dst), a rank in the group, 0 to 0$"):
                call(x)

    def flat():
        group = dist.new_group([1])
        if dist.get_rank() == 1:
            with pytest.raises(ValueError, match=r"one of \[1\]; got 0; for a rank in the group, pass group_src=0$"):
                dist.broadcast(np.ones(1), src=0, group=group)
            with pytest.raises(ValueError, match=r": pass src \(a global rank\) or group_src"):
                dist.broadcast(np.ones(1), group=group)

    dist.run(main, 1)
    dist.run(flat, 2)


@pytest.mark.parametrize(
    ("op", "tensor", "words"),
    [
        (np.ones(2), dist.isend, "got array([1., 1.]); did you swap op and tensor?"),
        (dist.send, np.ones(2), "; did you mean meshdist.isend?"),
    ],
)
def test_which_op_of_a_message_was_meant(op, tensor, words):
    with pytest.raises(ValueError, match=f"{re.escape(words)}$"):
        dist.P2POp(op, tensor, 1)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: dist.send(1, np.ones(2)), "got array([1., 1.]); did you swap tensor and dst?"),
        (lambda: dist.recv(0, np.ones(1)), "got array([1.]); did you swap tensor and src?"),
        (lambda: dist.isend(0, np.ones(1)), "; did you swap tensor and dst?"),
        (lambda: dist.irecv(np.int64(0), np.ones(1)), "; did you swap tensor and src?"),
        (lambda: mesh_of_one().send(0, np.ones(1)), "; did you swap tensor and dst?"),
        (lambda: dist.broadcast(0, np.ones(1)), "; did you swap tensor and src?"),
        (lambda: dist.send_object_list(0, ["a"]), "got ['a']; did you swap object_list and dst?"),
        (lambda: dist.recv_object_list(0, []), "got []; did you swap object_list and src?"),
        (lambda: dist.send(np.ones(1), np.ones(1)), "got array([1.])"),
        (lambda: dist.send(1, 2.5), "got 2.5"),
        (
            lambda: dist.send(1, np.ones((1000, 1000))),
            "got the array float64[1000, 1000]; did you swap tensor and dst?",
        ),
        (lambda: dist.sendrecv(np.ones(1), 1, np.ones(1), 0), "got array([1.]); did you swap recv and dst?"),
        (lambda: dist.P2POp(dist.isend, 1, np.ones(1)), "got array([1.]); did you swap tensor and peer?"),
    ],
)
def test_an_array_in_the_place_of_its_peer(call, words):
    def main():
        with pytest.raises(TypeError, match=f"(dst|src|peer) must be an integer, .*{re.escape(words)}$"):
            call()

    dist.run(main, 1)


@pytest.mark.parametrize(
    ("call", "name"),
    [(lambda: dist.new_group(rank=[0]), "new_group"), (lambda: dist.recv(np.ones(1), source=0), "recv")],
)
def test_a_wrong_argument_is_raised_by_the_function_of_that_name(call, name):
    def main():
        with pytest.raises(TypeError, match="; did you mean") as raised:
            call()
        return traceback.extract_tb(raised.value.__traceback__)[1:]

    (frames,) = dist.run(main, 1)
    *_, last = frames
    assert last.name == name
    assert last.line == "raise wrong_arguments"


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: dist.init_process_group(init_method="tcp://0.0.0.0:0", rank=0, world_size=2), "init_process_group"),
        (lambda: dist.init_process_group("glo"), "init_process_group"),
        (lambda: dist.spawn(print, nprocs=0), "spawn"),
    ],
)
def test_the_traceback_of_the_start_of_a_world_ends_at_the_call(monkeypatch, call, name):
    monkeypatch.delenv("MESHDIST_SECRET", raising=False)

    def names():
        with pytest.raises((ValueError, dist.DistNetworkError)) as raised:
            call()
        return [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)][1:]

    assert names() == ["<lambda>", name]
    monkeypatch.setenv("MESHDIST_DEBUG", "DETAIL")
    assert len(names()) > 2


def test_the_traceback_of_a_rank_ends_at_the_line_of_the_user():
    def main():
        dist.all_reduce(np.ones(1), op="none")

    with pytest.raises(ValueError, match="unknown op") as raised:
        dist.run(main, 2)
    frames = traceback.extract_tb(raised.value.__traceback__)
    assert [frame.name for frame in frames[-2:]] == ["run", "main"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Wait", "; did you mean 'wait'?"),
        ("Test", ": write `is_completed()`"),
        ("done", ": write `is_completed()`"),
        ("is_done", ": write `is_completed()`"),
        ("is_complete", "; did you mean 'is_completed'?"),
        ("Waitall", ": write `for work in works: work.wait()`"),
        ("Testany", ": `is_completed()` of each Work tells whether it is done"),
        ("Cancel", ": a call that has begun is carried out; `wait(timeout)` ends the wait,"),
        ("synchronize", " (torch.distributed has one): use `wait()`; see docs/migration.md"),
        ("_nothing", ""),
    ],
)
def test_names_of_other_libraries_handles_of_calls(name, words):
    def main():
        send, receive = dist.isend(np.ones(1), 0), dist.irecv(np.ones(1), 0)
        for work in (send, receive, dist.all_reduce(np.ones(1), async_op=True)):
            with pytest.raises(AttributeError, match=rf"\w* has no attribute '{name}'{re.escape(words)}"):
                getattr(work, name)
            assert not hasattr(work, name)
            work.wait()

    dist.run(main, 1)


def public(names):
    return {name for name in names if not name.startswith("_")}


def test_what_dir_and_help_list_of_handles_is_what_programs_use():
    of_work = {"exception", "get_future", "is_completed", "is_success", "result", "source_rank", "wait"}
    of_future = {"add_done_callback", "done", "set_exception", "set_result", "then", "value", "wait"}
    assert (public(dir(dist.Work)), public(dir(dist.Future)), public(dir(dist.Future()))) == (of_work, *[of_future] * 2)

    def main():
        x = np.ones(1)
        works = [dist.isend(x, 0), dist.irecv(x, 0), dist.all_reduce(np.ones(1), async_op=True)]
        assert [public(dir(work)) for work in works] == [of_work] * 3
        assert [work.wait() for work in works] == [True] * 3

    dist.run(main, 1)
    page = pydoc.render_doc(dist.Work, renderer=pydoc.plaintext)
    assert "is_completed" in page
    assert not {"hasten", "await_done", "has_begun", "observe"} & {*re.findall(r"\w+", page)}


def test_help_calls_probe_a_function_and_says_what_the_fields_of_its_result_are():
    assert pydoc.render_doc(dist.probe, renderer=pydoc.plaintext).startswith(
        "Python Library Documentation: function in"
    )
    page = pydoc.render_doc(dist.MessageInfo, renderer=pydoc.plaintext)
    assert "Get_count" in page
    assert "Alias for field number" not in page


@pytest.mark.parametrize("name", ["numpy", "detach"])
def test_how_a_dtensor_becomes_an_array(name):
    def main():
        array = distribute_tensor(np.ones(2), mesh_of_one(), {"dp": Shard(0)})
        with pytest.raises(AttributeError, match=rf"no attribute '{name}'; use x\.full\(\) for the whole array"):
            getattr(array, name)

    dist.run(main, 1)


def test_what_to_pass_instead_of_a_dtensor():
    def main():
        mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        array = distribute_tensor(np.ones(2), mesh, {"dp": Shard(0)})
        with pytest.raises(TypeError) as raised:
            dist.all_reduce(array)
        return str(raised.value)

    words = "tensor must be an array, got DTensor; pass x.to_local(), this rank's block, or x.full(), the whole array"
    assert dist.run(main, 2) == [f"all_reduce on group 'world' (rank {rank} of 2): {words}" for rank in range(2)]


def mesh_of_one():
    return dist.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))


def test_a_recv_that_times_out_names_the_messages_that_are_there():
    have_sent, is_told = threading.Barrier(3), threading.Event()

    def main():
        rank = dist.get_rank()
        if rank:
            dist.send(np.ones(1), dst=0, tag=3 if rank == 2 else 7)
        have_sent.wait(10)
        if rank:
            assert is_told.wait(10)
            return ""
        with pytest.raises(dist.DistTimeoutError) as failed:
            dist.recv(np.ones(1), src=1, tag=3)
        is_told.set()
        return str(failed.value)

    text = dist.run(main, 3, timeout=0.5)[0]
    assert (
        "with tag 3; a message with tag 7 is waiting to be received; a message with this tag from rank 2 is waiting"
        in text
    )


def test_the_warning_before_a_timeout_names_the_message_that_is_there(caplog):
    is_told = threading.Event()

    def main():
        rank = dist.get_rank()
        if rank == 1:
            dist.send(np.ones(1), dst=0, tag=5)
        dist.barrier()
        if rank:
            assert is_told.wait(10)
            return
        with pytest.raises(dist.DistTimeoutError, match="with tag 0; a message with tag 5 is waiting to be received"):
            dist.recv(np.ones(1))
        is_told.set()

    dist.run(main, 3, timeout=2)
    warnings = [record.getMessage() for record in caplog.records if "has been waiting for" in record.getMessage()]
    assert [" s (timeout: 2 s; a message with tag 5 is waiting to be received)\n" in text for text in warnings] == [
        True
    ], warnings
