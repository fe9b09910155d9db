"""The known schedules, each for any number of ranks and micro-batches: torch's, step for step."""

from __future__ import annotations

from collections import Counter

from meshdist.parallel.pipeline_actions import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Action
from meshdist.parallel.pipeline_schedules import Schedule

Row = list[Action | None]


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """Return GPipe: all forward passes, then all backward passes; a stage on each rank.

    Source: Huang et al., "GPipe" (2019), section 2.3.

    Args:
        num_ranks: Ranks of the pipeline.
        num_microbatches: Micro-batches of a step.

    Raises:
        ValueError: A number is not positive.

    Example:
        >>> from meshdist.parallel import gpipe
        >>> gpipe(3, 2).show(width=80)
        GPipe: makespan 12, bubble 50.0%
        rank 0 F0 F1 ..................B0--- B1---
        rank 1 ...F0 F1 .........B0--- B1--- ......
        rank 2 ......F0 F1 B0--- B1--- ............
        rank 0: bubble 50%, 2 activations
        rank 1: bubble 50%, 2 activations
        rank 2: bubble 50%, 2 activations
    """
    _check_counts("gpipe", num_ranks=num_ranks, num_microbatches=num_microbatches)
    batches = range(num_microbatches)
    rows = [
        [Action(rank, FORWARD, batch) for batch in batches] + [Action(rank, BACKWARD, batch) for batch in batches]
        for rank in range(num_ranks)
    ]
    return Schedule(rows, "GPipe")


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """Return 1F1B: one forward, one backward in turn, so that rank r keeps at most `num_ranks - r` activations.

    Source: Narayanan et al., "PipeDream" (2019) and "Efficient Large-Scale Language Model Training" (2021).

    Args:
        num_ranks: Ranks of the pipeline, a stage on each.
        num_microbatches: Micro-batches of a step.

    Raises:
        ValueError: A number is not positive.
    """
    _check_counts("one_f_one_b", num_ranks=num_ranks, num_microbatches=num_microbatches)
    rows: list[Row] = []
    for rank in range(num_ranks):
        count = _Counter()
        warmup = min(num_ranks - 1 - rank, num_microbatches)
        row: Row = [count.next(rank, FORWARD) for _ in range(warmup)]
        for _ in range(num_microbatches - warmup):
            row += [count.next(rank, FORWARD), count.next(rank, BACKWARD)]
        rows.append(row + [count.next(rank, BACKWARD) for _ in range(warmup)])
    return Schedule(rows, "1F1B")


def looped_bfs(num_ranks: int, num_microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """Return looped BFS: all micro-batches through a rank's first stage, then through its next one.

    Source: Lamy-Poirier, "Breadth-First Pipeline Parallelism" (2022). Stage s is on rank s modulo `num_ranks`.

    Args:
        num_ranks: Ranks of the pipeline.
        num_microbatches: Micro-batches of a step.
        stages_per_rank: Stages on each rank.

    Raises:
        ValueError: A number is not positive.
    """
    _check_counts("looped_bfs", num_ranks=num_ranks, num_microbatches=num_microbatches, stages_per_rank=stages_per_rank)
    rows: list[Row] = []
    for rank in range(num_ranks):
        stages = range(rank, num_ranks * stages_per_rank, num_ranks)
        row: Row = [None] * rank
        row += [Action(stage, FORWARD, batch) for stage in stages for batch in range(num_microbatches)]
        row += [None] * (2 * (num_ranks - 1 - rank))
        row += [
            Action(stage, BACKWARD, batch) for stage in reversed(stages) for batch in reversed(range(num_microbatches))
        ]
        rows.append(row)
    return Schedule(rows, "LoopedBFS")


def interleaved(num_ranks: int, num_microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """Return interleaved 1F1B: several stages on each rank, micro-batches in rounds, a smaller bubble than 1F1B.

    Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (2021),
    section 2.2. Stage s is on rank s modulo `num_ranks`.

    Args:
        num_ranks: Ranks of the pipeline.
        num_microbatches: Micro-batches of a step: with r = `num_microbatches // num_ranks` rounds, a multiple of r.
        stages_per_rank: Stages on each rank.

    Raises:
        ValueError: A number is not positive, or the micro-batches do not divide into rounds.
    """
    per_round = _per_round("interleaved", num_ranks, num_microbatches, stages_per_rank)
    rows: list[Row] = []
    for rank in range(num_ranks):
        forwards, backwards = _passes(rank, num_ranks, num_microbatches, stages_per_rank, per_round)
        warmup = min((stages_per_rank - 1) * per_round + 2 * (num_ranks - 1 - rank), len(forwards))
        row: Row = [None] * rank + forwards[:warmup]
        if warmup:  # the first backward pass comes at the same step on all ranks, two later for each hop
            row += [None] * (stages_per_rank * num_ranks + 2 * (num_ranks - 1 - rank) - warmup - rank)
        steady = len(forwards) - warmup
        for forward, backward in zip(forwards[warmup:], backwards[:steady], strict=True):
            row += [forward, backward]
        for backward in backwards[steady:]:
            row += [None, backward]
        rows.append(row)
    return Schedule(rows, "Interleaved1F1B")


def zero_bubble(num_ranks: int, num_microbatches: int, stages_per_rank: int = 1) -> Schedule:
    """Return ZB-H1: 1F1B, interleaved where ranks have several stages, whose bubbles are filled with backward_weight.

    Rank r delays the gradients of the weights by r micro-batches, so that it keeps no more activations than 1F1B does
    on rank 0. Source: Qi et al., "Zero Bubble Pipeline Parallelism" (2023), section 2; torch's InterleavedZeroBubble.

    Args:
        num_ranks: Ranks of the pipeline. Stage s is on rank s modulo `num_ranks`.
        num_microbatches: Micro-batches of a step: with r = `num_microbatches // num_ranks` rounds, a multiple of r.
        stages_per_rank: Stages on each rank.

    Raises:
        ValueError: A number is not positive, or the micro-batches do not divide into rounds.
    """
    per_round = _per_round("zero_bubble", num_ranks, num_microbatches, stages_per_rank)
    rows: list[Row] = []
    for rank in range(num_ranks):
        forwards, backwards = _passes(rank, num_ranks, num_microbatches, stages_per_rank, per_round)
        warmup = min((stages_per_rank - 1) * per_round + num_ranks - 1 - rank, len(forwards))
        inputs = [Action(action.stage, BACKWARD_INPUT, action.microbatch) for action in backwards]
        weights = [Action(action.stage, BACKWARD_WEIGHT, action.microbatch) for action in backwards]
        row: Row = [None] * rank + forwards[:warmup]
        if warmup:
            row += [None] * (num_ranks - 1 - rank)
        for number, backward in enumerate(inputs):
            row += forwards[warmup + number : warmup + number + 1]
            row.append(backward)
            if number >= rank:
                row.append(weights[number - rank])
        rows.append([*row, *weights[max(0, len(weights) - rank) :]])
    return Schedule(_delayed(rows), "InterleavedZeroBubble" if stages_per_rank > 1 else "ZB-H1")


def zbv(num_ranks: int, num_microbatches: int) -> Schedule:
    """Return ZB-V: two stages on each rank in the shape of a V, no bubble where F, I and W take equally long.

    Rank r has the stages r and `2 * num_ranks - 1 - r`, so the first rank also has the last stage, and the loss.
    Source: Qi et al., "Zero Bubble Pipeline Parallelism" (2023), section 6; torch's ZBVZeroBubble.

    Args:
        num_ranks: Ranks of the pipeline.
        num_microbatches: Micro-batches of a step; with fewer than `2 * num_ranks` there are idle steps.

    Raises:
        ValueError: A number is not positive.
    """
    _check_counts("zbv", num_ranks=num_ranks, num_microbatches=num_microbatches)
    whole = max(2 * num_ranks - 1, num_microbatches)
    rows: list[Row] = []
    for rank in range(num_ranks):
        count, down, up = _Counter(), rank, 2 * num_ranks - 1 - rank
        row: Row = [None] * rank
        row += count.series([(down, FORWARD)], 2 * (num_ranks - rank) - 1)
        row += count.series([(up, FORWARD), (down, FORWARD)], rank)
        row += count.series([(up, FORWARD), (up, BACKWARD_INPUT), (up, BACKWARD_WEIGHT)], num_ranks - rank)
        while count[up, FORWARD] < whole:
            steady = [(stage, kind) for stage in (down, up) for kind in (FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)]
            row += count.series(steady if count[down, FORWARD] < whole else steady[1:], 1)
        row += count.series([(down, BACKWARD_INPUT), (up, BACKWARD_INPUT)], rank)
        row += count.series([(down, BACKWARD_INPUT), (down, BACKWARD_WEIGHT)], num_ranks - rank)
        for stage in (up, down):
            row += count.series(
                [(stage, BACKWARD_WEIGHT)], count[stage, BACKWARD_INPUT] - count[stage, BACKWARD_WEIGHT]
            )
        rows.append([action if action is not None and action.microbatch < num_microbatches else None for action in row])
    return Schedule(rows, "ZBV")


def dualpipe_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """Return DualPipeV: two stages on each rank in the shape of a V, forward and backward in pairs.

    The pairs are what DeepSeek's kernels overlap; here the two follow each other. Source: DeepSeek-AI, "DeepSeek-V3
    Technical Report" (2024), section 3.2.1, and torch's DualPipeV. The stages are those of `zbv`.

    Args:
        num_ranks: Ranks of the pipeline.
        num_microbatches: Micro-batches of a step, at least `2 * num_ranks`.

    Raises:
        ValueError: A number is not positive, or there are fewer micro-batches than stages.
    """
    _check_counts("dualpipe_v", num_ranks=num_ranks, num_microbatches=num_microbatches)
    if num_microbatches < 2 * num_ranks:
        raise ValueError(
            f"dualpipe_v: num_microbatches must be at least the number of stages, {2 * num_ranks}, got"
            f" {num_microbatches}"
        )
    return Schedule([_dualpipe_v_row(rank, num_ranks, num_microbatches) for rank in range(num_ranks)], "DualPipeV")


def _dualpipe_v_row(rank: int, num_ranks: int, num_microbatches: int) -> Row:
    count, down, up = _Counter(), rank, 2 * num_ranks - 1 - rank
    after, here = num_ranks - 1 - rank, rank + 1
    row: Row = count.series([(down, FORWARD)], 2 * after)
    row += count.series([(down, FORWARD), (up, FORWARD)], here)
    row += count.series([(up, BACKWARD_INPUT), (up, BACKWARD_WEIGHT), (up, FORWARD)], after)
    pairs = [(down, FORWARD), (up, BACKWARD), (up, FORWARD), (down, BACKWARD)]
    row += count.series(pairs, num_microbatches - 2 * num_ranks + here)
    row += count.series(pairs[1:], after)
    # From the middle of the last backward passes on, their weights wait, and fill the bubbles at the end.
    whole = 2 * (here // 2) + 1 - rank % 2
    for number in range(2 * here):
        row.append(count.next(down if number % 2 else up, BACKWARD if number < whole else BACKWARD_INPUT))
    for _ in range(after):
        row += [*count.oldest_weight(), count.next(down, BACKWARD_INPUT)]
    for _ in range(here):
        row += count.oldest_weight()
    return row


class _Counter(Counter[tuple[int, str]]):
    """The next micro-batch of each stage and kind; a whole backward pass counts as both halves."""

    def __init__(self) -> None:
        super().__init__()
        self._inputs: list[Action] = []

    def next(self, stage: int, kind: str) -> Action:
        first = BACKWARD_INPUT if kind == BACKWARD else kind
        action = Action(stage, kind, self[stage, first])
        self[stage, first] += 1
        if kind == BACKWARD:
            self[stage, BACKWARD_WEIGHT] += 1
        elif kind == BACKWARD_INPUT:
            self._inputs.append(action)
        elif kind == BACKWARD_WEIGHT:
            self._inputs.remove(Action(stage, BACKWARD_INPUT, action.microbatch))
        return action

    def series(self, kinds: list[tuple[int, str]], times: int) -> Row:
        return [self.next(stage, kind) for _ in range(times) for stage, kind in kinds]

    def oldest_weight(self) -> Row:
        """Return the backward pass of the weights that has waited longest, or nothing."""
        if not self._inputs:
            return []
        oldest = self._inputs.pop(0)
        self[oldest.stage, BACKWARD_WEIGHT] += 1
        return [Action(oldest.stage, BACKWARD_WEIGHT, oldest.microbatch)]


def _passes(
    rank: int, num_ranks: int, num_microbatches: int, stages_per_rank: int, per_round: int
) -> tuple[list[Action], list[Action]]:
    """Return the forward and backward passes of a rank: rounds of micro-batches, each through all stages in turn."""
    count = _Counter()
    forwards, backwards = [], []
    for number in range(num_microbatches * stages_per_rank):
        local = number // per_round % stages_per_rank
        forwards.append(count.next(rank + num_ranks * local, FORWARD))
        backwards.append(count.next(rank + num_ranks * (stages_per_rank - 1 - local), BACKWARD))
    return forwards, backwards


def _delayed(rows: list[Row]) -> list[Row]:
    """Put idle steps before forward passes whose input is not there yet if all actions take one step."""
    delayed: list[Row] = [[] for _ in rows]
    left = [row[::-1] for row in rows]
    done: set[Action] = set()
    while any(left):
        begun = []
        for row, actions in zip(delayed, left, strict=True):
            if not actions:
                continue
            action = actions[-1]
            if action is not None and action.kind == FORWARD and action.stage > 0:
                before = Action(action.stage - 1, FORWARD, action.microbatch)
                if before not in done:
                    row.append(None)
                    continue
            row.append(actions.pop())
            if action is not None:
                begun.append(action)
        done.update(begun)
    return delayed


def _per_round(of: str, num_ranks: int, num_microbatches: int, stages_per_rank: int) -> int:
    _check_counts(of, num_ranks=num_ranks, num_microbatches=num_microbatches, stages_per_rank=stages_per_rank)
    rounds = max(1, num_microbatches // num_ranks)
    if num_microbatches % rounds:
        below = num_microbatches - num_microbatches % num_ranks
        raise ValueError(
            f"{of}: {num_microbatches} micro-batches do not divide into {rounds} rounds of about {num_ranks}; take a"
            f" multiple of the {num_ranks} ranks, such as {below} or {below + num_ranks}"
        )
    return num_microbatches // rounds


def _check_counts(of: str, **counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{of}: {name} must be at least 1, got {count}")
