"""What became of a job, as a cell of the table."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

from faults_compared.fault import Fault
from faults_compared.jobs import Job, Seen

_MOST_CHARACTERS = 220
_MOST_MESSAGES = 2
_AT_ONCE_S = 0.1


def tell(job: Job, fault: Fault) -> str:
    """Return what the ranks saw, those alike together."""
    if job.fault_s is None:
        return "did not come to the fault: " + "; ".join(code(seen.error) for seen in job.seen if seen.error)
    if fault.asks == "files":
        left = job.left()
        return f"left: {', '.join(map(code, map(general, left)))}" if left else "nothing is left"
    if fault.asks == "processes":
        return _processes(job, fault)
    ranks = list(range(fault.ranks)) if fault.watched is None else list(fault.watched)
    kinds: dict[str, list[int]] = {}
    for rank in ranks:
        kinds.setdefault(_kind(job.seen[rank]), []).append(rank)
    sentences = [_sentence(kind, some, ranks, job, fault) for kind, some in kinds.items()]
    notes = list(dict.fromkeys(note for rank in ranks for note in job.seen[rank].notes if note))
    return "; ".join([*filter(None, sentences), *notes])


def _kind(seen: Seen) -> str:
    if seen.error is not None:
        return "error"
    if seen.ended_s is not None:
        return {None: "returns", True: "right", False: "no error"}[seen.right]
    return "hangs" if seen.gone_s is None else "gone"


def _sentence(kind: str, some: Sequence[int], ranks: Sequence[int], job: Job, fault: Fault) -> str:
    which = "" if len(some) == len(ranks) else f"rank {some[0]}: " if len(some) == 1 else f"ranks {listed(some)}: "
    seen = [job.seen[rank] for rank in some]
    if kind == "error":
        return f"{which}error {_times([each.ended_s for each in seen], job)}: {_messages(seen)}"
    if kind == "hangs":
        return f"{which}hangs (ended from outside after {fault.grace_s:g} s)"
    if kind == "gone":
        statuses = {_status(each.status) for each in seen}
        how = statuses.pop() if len(statuses) == 1 else ""
        return f"{which}the process is gone {_times([each.gone_s for each in seen], job)}{how}"
    if kind == "no error":
        return f"{which}**{'wrong values' if fault.has_answer else 'no error'}**"
    # Where something is noted, that says all.
    return (
        f"{which}{'right' if kind == 'right' else 'returns'}" if kind == "right" or not job.seen[some[0]].notes else ""
    )


def _processes(job: Job, fault: Fault) -> str:
    assert job.fault_s is not None
    living = [rank for rank, seen in enumerate(job.seen) if seen.gone_s is None]
    if living:
        which = "all ranks are" if len(living) == len(job.seen) else f"rank {listed(living)} is"
        return f"**{which} still there after {fault.grace_s:g} s**"
    return f"all processes are gone after {seconds((job.over_s or job.fault_s) - job.fault_s)}"


def _times(times: Sequence[float | None], job: Job) -> str:
    after = sorted(max(0.0, time_s - (job.fault_s or 0.0)) for time_s in times if time_s is not None)
    if after[-1] < _AT_ONCE_S:
        return "at once"
    first, last = seconds(after[0]), seconds(after[-1])
    return f"after {first}" if first == last else f"after {first.removesuffix(' s')} to {last}"


def seconds(duration_s: float) -> str:
    """Return a duration as coarse as it is worth.

    Example:
        >>> seconds(0.0123), seconds(0.52), seconds(12.04)
        ('0.01 s', '0.5 s', '12 s')
    """
    digits = 2 if duration_s < 0.095 else 1 if duration_s < 9.95 else 0
    return f"{duration_s:.{digits}f} s"


def _messages(seen: Sequence[Seen]) -> str:
    # Of those that differ in a number alone, the first; and of a rank that passes on what another one said, that.
    texts: dict[str, str] = {}
    for each in sorted(seen, key=lambda each: each.ended_s or 0.0):
        text = general(each.error or "")
        texts.setdefault(re.sub(r"\d+", "0", text), text)
    chosen: list[str] = []
    for text in sorted(texts.values(), key=len):
        if not any(_core(other) in _core(text) for other in chosen):
            chosen.append(text)
    return ", ".join(code(short(text)) for text in texts.values() if text in chosen[:_MOST_MESSAGES])


def _core(text: str) -> str:
    """Return a message without the call and the rank that it begins with, and all numbers alike."""
    return re.sub(r"\d+", "0", text.partition("): ")[2] or text)


def _status(status: int | None) -> str:
    if status is None:
        return ""
    return f" ({signal.Signals(-status).name})" if status < 0 else f" (status {status})"


def general(text: str) -> str:
    """Return a text without what is another one each time: processes, hosts, directories, ports."""
    text = re.sub(r"pid \d+ on [\w.-]+", "pid 4711 on node1", text)
    text = re.sub(r"process \d+", "process 4711", text)
    text = re.sub(r"(/[\w.-]+)*/faults-\w+", "/tmp/job", text)
    text = re.sub(r"(127\.0\.0\.1|localhost|\[[\da-f:.]+\]):\d{4,5}", r"\1:29500", text)
    text = re.sub(r"127\.0\.0\.1, \d{4,5}", "127.0.0.1, 29500", text)
    text = re.sub(r"\bport: \d+", "port: 29500", text)
    return re.sub(r"(?:/[\w.+-]+)+/(\w+\.(?:cc|cpp|cu|h|hpp|py))", r"\1", text)


def short(text: str) -> str:
    """Return a text, or its beginning where it is long."""
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS].rstrip()} ..."


def code(text: str | None) -> str:
    """Return a text as code in a cell of a Markdown table."""
    return f"`{(text or '').replace('`', chr(39)).replace('|', chr(92) + '|')}`"


def listed(numbers: Sequence[int]) -> str:
    """Return numbers, with commas."""
    return ", ".join(map(str, numbers))
