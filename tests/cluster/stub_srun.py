"""Stands for srun: starts the tasks of a step on this machine, with the variables that Slurm sets.

It takes them from the #SBATCH lines that it is told of by STUB_TASKS_PER_NODE, on nodes called as STUB_NODES says, and
writes its own options to the file STUB_OPTIONS. As srun does, it passes SIGUSR2 on to the tasks.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path


def main():
    words = sys.argv[1:]
    options = []
    while words[0].startswith("-"):
        options.append(words.pop(0))
    if "STUB_OPTIONS" in os.environ:
        Path(os.environ["STUB_OPTIONS"]).write_text("\n".join(options))
    nodes, per_node = os.environ["STUB_NODES"], int(os.environ["STUB_TASKS_PER_NODE"])
    num_tasks = per_node * len(nodes.split(","))
    tasks = []
    signal.signal(signal.SIGUSR2, lambda number, frame: [task.send_signal(number) for task in tasks])
    for rank in range(num_tasks):
        variables = {
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NODELIST": nodes,
            "SLURM_STEP_NUM_TASKS": str(num_tasks),
            "SLURM_NTASKS": str(num_tasks),
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank % per_node),
            "SLURM_NODEID": str(rank // per_node),
        }
        tasks.append(subprocess.Popen(words, env={**os.environ, **variables}))
    return max(task.wait() for task in tasks)


if __name__ == "__main__":
    sys.exit(main())
