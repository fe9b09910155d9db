"""A custom backend: gloo carries out the calls, and each is logged. `meshrun examples/logging_backend.py`."""

import time

import numpy as np

import meshdist as dist
from meshdist.backends import Plan, Wrapper, num_bytes


def report(words, buffers, start):
    print(f"{words}, {num_bytes(buffers)} bytes, {(time.perf_counter() - start) * 1e6:.0f} us")


class LoggingEngine(Wrapper):
    def prepare(self, call):
        return LoggedPlan(self, call, super().prepare(call))

    def send(self, array, dst, tag):
        return LoggedMessage(super().send(array, dst, tag), f"rank {self.rank}: send to {dst}", array)

    def recv(self, array, src, tag):
        return LoggedMessage(super().recv(array, src, tag), f"rank {self.rank}: recv from {src}", array)


class LoggedPlan(Plan):
    def __init__(self, engine, call, plan):
        super().__init__(engine, call)
        self.words, self.plan = f"rank {call.rank}: {call.collective.name}", plan

    def steps(self, send, recv):
        start = time.perf_counter()
        yield from self.plan.steps(send, recv)
        report(self.words, send if recv is None else recv, start)


class LoggedMessage:
    def __init__(self, message, *what):
        self.message, self.what = message, (*what, time.perf_counter())

    def __getattr__(self, name):  # forward all but `ready` to the message
        return getattr(self.message, name)

    def ready(self):
        if self.what and self.message.ready():
            report(*self.what)
            self.what = ()
        return not self.what


if __name__ == "__main__":
    dist.Backend.register_backend("logging", LoggingEngine.around("gloo"), extended_api=True, devices="cpu")
    dist.init_process_group("logging")
    rank, x = dist.get_rank(), np.ones(4)
    dist.all_reduce(x)
    if rank ^ 1 < dist.get_world_size():  # the ranks in pairs
        (dist.recv if rank % 2 else dist.send)(x, rank ^ 1)
    dist.destroy_process_group()
