"""Give tasks to whoever is free: rank 0 hands them out, the other ranks compute."""

import numpy as np

import meshdist as dist

NUM_TASKS = 20
NONE = -1


def compute(task: int) -> float:
    """Return the result of a task."""
    return float(sum(1 / k**2 for k in range(1, 1 + 500 * task)))


def hand_out(num_workers: int) -> list[float]:
    """Give all tasks to the workers, each as soon as it asks, and return the results in order."""
    results = [0.0] * NUM_TASKS
    answer = np.empty(2)  # a task and its result; a worker's first answer has no task
    next_task, at_work = 0, num_workers
    while at_work:
        worker = dist.recv(answer)  # from any rank
        if answer[0] != NONE:
            results[int(answer[0])] = float(answer[1])
        task = next_task if next_task < NUM_TASKS else NONE
        next_task += 1
        at_work -= task == NONE
        dist.send(np.array([task]), dst=worker)
    return results


def work() -> None:
    """Ask for tasks and answer them until there are no more."""
    task, answer = np.array([NONE]), np.array([NONE, 0.0])
    while True:
        dist.send(answer, dst=0)
        dist.recv(task, src=0)
        if task[0] == NONE:
            return
        answer[:] = task[0], compute(int(task[0]))


def main() -> None:
    num_workers = dist.get_world_size() - 1
    if dist.get_rank() == 0:
        results = hand_out(num_workers) if num_workers else [compute(task) for task in range(NUM_TASKS)]
        print(f"{len(results)} results, from {results[0]:.4f} to {results[-1]:.4f}")
    else:
        work()


if __name__ == "__main__":
    dist.init_process_group()
    main()
    dist.destroy_process_group()
