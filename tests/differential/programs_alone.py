"""Programs of one process that is in no world yet: stores, and beginning and ending a world."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
from both_sides import Side

_SHORT = timedelta(milliseconds=10)


def hash_store(on: Side) -> None:
    _store(on, on.dist.HashStore())


def file_store(on: Side) -> None:
    with tempfile.TemporaryDirectory() as directory:
        _store(on, on.dist.FileStore(f"{directory}/store", 1))


def tcp_store(on: Side) -> None:
    store = on.dist.TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=10))
    on.case("a port was picked", lambda: store.port > 0)
    on.case("host", lambda: store.host)
    _store(on, store)
    # torch's other stores read past the end of the shorter list.
    on.case("multi_set of unequal lists", lambda: store.multi_set(["m1", "m2"], ["a"]))


def prefix_store(on: Side) -> None:
    below = on.dist.HashStore()
    store = on.dist.PrefixStore("part", below)
    _store(on, store)
    on.case("below", lambda: below.get("part/text"))
    on.case("underlying_store", lambda: store.underlying_store.get("part/text"))
    on.case("a prefix of a prefix", lambda: on.dist.PrefixStore("inner", store).set("x", "y"))
    on.case("is in both", lambda: below.get("part/inner/x"))


def _store(on: Side, store: Any) -> None:
    store.set_timeout(timedelta(seconds=5))
    _values(on, store)
    _numbers(on, store)
    _compared(on, store)
    _deleted(on, store)
    _many(on, store)
    _waits(on, store)
    on.case("is a Store", lambda: isinstance(store, on.dist.Store))
    on.case("timeout", lambda: store.timeout.total_seconds())
    on.case("a timeout that is none", lambda: store.set_timeout("soon"))


def _values(on: Side, store: Any) -> None:
    on.case("set text", lambda: store.set("text", "value"))
    on.case("get text", lambda: store.get("text"))
    on.case("set again", lambda: (store.set("text", "other"), store.get("text")))
    on.case("set empty", lambda: (store.set("empty", ""), store.get("empty")))
    on.case("set words of others", lambda: (store.set("words", "äöü ∑"), store.get("words")))
    on.case("set long", lambda: (store.set("long", "x" * 300_000), len(store.get("long"))))
    on.case("set zeros", lambda: (store.set("zeros", "a\0b"), store.get("zeros")))
    on.case("empty key", lambda: (store.set("", "v"), store.get("")))
    on.case("a key that is none", lambda: store.set(3, "v"))
    on.case("a value that is none", lambda: store.set("k", 3))
    on.case("append", lambda: (store.append("text", "+more"), store.get("text")))
    on.case("append to nothing", lambda: (store.append("appended", "first"), store.get("appended")))


def _numbers(on: Side, store: Any) -> None:
    on.case("add", lambda: [store.add("count", 1), store.add("count", 41), store.add("count", -2)])
    on.case("add 0", lambda: store.add("nothing", 0))
    on.case("get a count", lambda: store.get("count"))
    on.case("add to a number in text", lambda: (store.set("number", "7"), store.add("number", 3)))
    on.case("add large", lambda: [store.add("large", 2**40), store.add("large", 2**62)])
    on.case("add a fraction", lambda: store.add("count", 1.5))


def _compared(on: Side, store: Any) -> None:
    on.case("compare_set of nothing, expecting nothing", lambda: store.compare_set("c", "", "first"))
    on.case("compare_set of another", lambda: store.compare_set("c", "wrong", "second"))
    on.case("it stays", lambda: store.get("c"))
    on.case("compare_set of the same", lambda: store.compare_set("c", "first", "second"))
    on.case("it changed", lambda: store.get("c"))
    on.case("compare_set of nothing, expecting something", lambda: store.compare_set("d", "something", "x"))
    on.case("nothing came of it", lambda: store.check(["d"]))


def _deleted(on: Side, store: Any) -> None:
    on.case("delete_key", lambda: (store.set("gone", "1"), store.delete_key("gone"), store.check(["gone"])))
    on.case("delete_key again", lambda: store.delete_key("gone"))


def _many(on: Side, store: Any) -> None:
    on.case("has_extended_api", lambda: store.has_extended_api())
    on.case("multi_set", lambda: store.multi_set(["m1", "m2"], ["a", "b"]))
    on.case("multi_get", lambda: store.multi_get(["m2", "m1", "m2"]))
    on.case("multi_get of none", lambda: store.multi_get([]))
    before = store.num_keys()
    on.case("num_keys grows by", lambda: (store.set("one more", ""), store.num_keys() - before)[1])
    on.case("num_keys stays", lambda: (store.set("one more", "1"), store.num_keys() - before)[1])
    on.case("check", lambda: [store.check(["text"]), store.check(["text", "missing"]), store.check(["missing"])])
    on.case("check nothing", lambda: store.check([]))
    on.case("check one key", lambda: store.check("text"))


def _waits(on: Side, store: Any) -> None:
    on.case("wait for what is there", lambda: store.wait(["text", "empty"]))
    on.case("wait with a timeout", lambda: store.wait(["text"], timedelta(seconds=1)))
    on.case("wait for nothing", lambda: store.wait([]))
    on.case("wait too long", lambda: store.wait(["text", "missing"], _SHORT))
    on.case("it is usable after that", lambda: store.get("text"))
    store.set_timeout(_SHORT)
    on.case("get too long", lambda: store.get("missing"))
    store.set_timeout(timedelta(seconds=5))


def wrong_stores(on: Side) -> None:
    dist = on.dist
    on.case("a taken port", lambda: _taken_port(on))
    on.case("nobody there", lambda: dist.TCPStore("127.0.0.1", 1, 2, False, timedelta(milliseconds=50)))
    on.case("a port out of range", lambda: dist.TCPStore("127.0.0.1", 70000, 1, True))
    on.case("FileStore without a path", lambda: dist.FileStore())
    on.case("PrefixStore of nothing", lambda: dist.PrefixStore("x"))
    on.case("PrefixStore of no store", lambda: dist.PrefixStore("x", 3))
    on.case("two clients of a master", lambda: _two_clients(on))


def _taken_port(on: Side) -> Any:
    first = on.dist.TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=5))
    second = on.dist.TCPStore("127.0.0.1", first.port, 1, True, timedelta(seconds=1))
    return first, second


def _two_clients(on: Side) -> Any:
    master = on.dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=5))
    client = on.dist.TCPStore("127.0.0.1", master.port, None, False, timedelta(seconds=5))
    client.set("from the client", "1")
    master.add("from both", 1)
    return master.get("from the client"), client.add("from both", 1), master.num_keys() == client.num_keys()


def before_a_world(on: Side) -> None:
    """Every call without init_process_group."""
    dist = on.dist
    x = on.array(np.zeros(2, np.float32))
    on.case("is_initialized", lambda: dist.is_initialized())
    on.case("group.WORLD", lambda: dist.group.WORLD)
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(x),
        "broadcast": lambda: dist.broadcast(x, 0),
        "reduce": lambda: dist.reduce(x, 0),
        "all_gather": lambda: dist.all_gather([x], x),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(x, x),
        "gather": lambda: dist.gather(x, [x]),
        "scatter": lambda: dist.scatter(x, [x]),
        "reduce_scatter": lambda: dist.reduce_scatter(x, [x]),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(x, x),
        "all_to_all": lambda: dist.all_to_all([x], [x]),
        "all_to_all_single": lambda: dist.all_to_all_single(x, x),
        "barrier": lambda: dist.barrier(),
        "monitored_barrier": lambda: dist.monitored_barrier(),
        "send": lambda: dist.send(x, 1),
        "recv": lambda: dist.recv(x, 1),
        "isend": lambda: dist.isend(x, 1),
        "irecv": lambda: dist.irecv(x, 1),
        "all_gather_object": lambda: dist.all_gather_object([None], 1),
        "broadcast_object_list": lambda: dist.broadcast_object_list([1], 0),
        "gather_object": lambda: dist.gather_object(1, [None]),
        "scatter_object_list": lambda: dist.scatter_object_list([None], [1]),
        "get_rank": lambda: dist.get_rank(),
        "get_world_size": lambda: dist.get_world_size(),
        "get_backend": lambda: dist.get_backend(),
        "new_group": lambda: dist.new_group([0]),
        "get_process_group_ranks": lambda: dist.get_process_group_ranks(None),
        "destroy_process_group": lambda: dist.destroy_process_group(),
        "DeviceMesh without a launcher": lambda: dist.init_device_mesh("cpu", (1,)),
    }
    for name, call in calls.items():
        on.case(name, call)


def beginnings(on: Side) -> None:
    """Ways to begin a world, right ones and wrong ones, and to end it."""
    init = partial(on.dist.init_process_group, timeout=timedelta(seconds=5))
    with tempfile.TemporaryDirectory() as directory:
        url = f"file://{directory}/meeting"
        on.case("unknown backend", lambda: init("no such thing", store=on.dist.HashStore(), rank=0, world_size=1))
        on.case("a backend that is a number", lambda: init(3, store=on.dist.HashStore(), rank=0, world_size=1))
        on.case("store without a rank", lambda: init("gloo", store=on.dist.HashStore(), world_size=1))
        on.case("store without a size", lambda: init("gloo", store=on.dist.HashStore(), rank=0))
        on.case("store and url", lambda: init("gloo", url, store=on.dist.HashStore(), rank=0, world_size=1))
        on.case("unknown scheme", lambda: init("gloo", "carrier-pigeon://x", rank=0, world_size=1))
        on.case("tcp without a size", lambda: init("gloo", "tcp://127.0.0.1:29999", rank=0))
        on.case("tcp without a rank", lambda: init("gloo", "tcp://127.0.0.1:29999", world_size=1))
        on.case("file without a path", lambda: init("gloo", "file://", rank=0, world_size=1))
        on.case("still none", lambda: on.dist.is_initialized())
        _without_variables(on, init)
        _begun(on, "store", lambda: init("gloo", store=on.dist.HashStore(), rank=0, world_size=1))
        _begun(on, "upper case", lambda: init("GLOO", store=on.dist.HashStore(), rank=0, world_size=1))
        _begun(on, "file", lambda: init("gloo", url, rank=0, world_size=1))
        _begun(on, "no backend", lambda: init(store=on.dist.HashStore(), rank=0, world_size=1))


def _without_variables(on: Side, init: Callable[..., Any]) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for missing in variables:
        os.environ.update({name: value for name, value in variables.items() if name != missing})
        on.case(f"env:// without {missing}", init, "gloo", "env://")
        if on.dist.is_initialized():
            on.dist.destroy_process_group()
        for name in variables:
            os.environ.pop(name, None)


def _begun(on: Side, label: str, begin: Callable[[], Any]) -> None:
    dist = on.dist
    on.case(f"{label}: begin", begin)
    on.case(f"{label}: is_initialized", lambda: dist.is_initialized())
    on.case(f"{label}: again", begin)
    on.case(f"{label}: place", lambda: [dist.get_rank(), dist.get_world_size(), str(dist.get_backend())])
    on.case(f"{label}: backends by device", lambda: str(dist.get_backend_config()))
    on.case(f"{label}: alone", lambda: _alone(on))
    on.case(f"{label}: end", lambda: dist.destroy_process_group())
    on.case(f"{label}: is ended", lambda: dist.is_initialized())
    on.case(f"{label}: end again", lambda: dist.destroy_process_group())


def _alone(on: Side) -> Any:
    x, y, out = (on.array(np.arange(3, dtype=np.float32) + k) for k in range(3))
    on.dist.all_reduce(x)
    on.dist.broadcast(y, 0)
    on.dist.all_gather([out], x)
    on.dist.barrier()
    return x, y, out


PROGRAMS = (hash_store, file_store, tcp_store, prefix_store, wrong_stores, before_a_world, beginnings)
