"""Train a small language model on a mesh: data parallel "dp", tensor parallel "tp", pipeline parallel "pp".

    meshrun -n 4 examples/train_transformer.py --mesh 2x2x1
    meshrun -n 4 examples/train_transformer.py --mesh 1x2x2 --schedule zero-bubble --sequence-parallel --plot run.png
    python examples/train_transformer.py --steps 100
    meshrun -n 4 examples/train_transformer.py --mesh 2x2x1 --plain
    meshrun -n gpu examples/train_transformer.py --device cuda

A decoder in NumPy, or with --device cuda in CuPy on a GPU for each rank, learns to write like this project's
documentation, character by character, and at the end writes some lines. All these are the same run: parameters, batches
and, up to rounding, losses do not depend on the mesh, nor on the schedule of the pipeline. In a step,

    along "pp"  PipelineRunner takes the micro-batches through the stages, forward and backward; a stage is a function
                of transformer_network.py, and autograd_stage makes its backward pass;
    along "tp"  the layers of the network complete their sums, in both directions;
    along "dp"  GradientReducer averages the gradients, or with --zero ShardedOptimizer spreads Adam over the ranks.

transformer_tools.py has the text, Adam and the checkpoints. With --plain, transformer_plain.py does all of it by hand,
with nothing but the calls of the flat API.
"""

import argparse
import json
import math
import os
import re
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import transformer_plain
from digits_tools import array_module, progress
from transformer_network import Network, block_of, first_values, parameters_of
from transformer_tools import (
    ReplicatedOptimizer,
    adam,
    batch_of,
    learning_rate,
    load,
    load_text,
    plot,
    save,
)

import meshdist as dist
from meshdist.functional import all_gather
from meshdist.parallel import (
    PipelineRunner,
    PipelineStage,
    Schedule,
    ShardedOptimizer,
    autograd_stage,
    dualpipe_v,
    gpipe,
    interleaved,
    looped_bfs,
    one_f_one_b,
    zbv,
    zero_bubble,
)

SCHEDULES = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "looped-bfs": looped_bfs,
    "interleaved": interleaved,
    "zero-bubble": zero_bubble,
    "zbv": zbv,
    "dualpipe-v": dualpipe_v,
}
LAUNCHED = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")  # by meshrun, Open MPI, MPICH, Slurm


def train(mesh: dist.DeviceMesh, args: argparse.Namespace) -> dict[str, Any]:
    """Train, and return the loss of every global batch, the speed, and what the model writes."""
    dp, tp, pp = mesh["dp"], mesh["tp"], mesh["pp"]
    sizes = {"context": args.context, "width": args.width, "heads": args.heads, "layers": args.layers}
    network = Network(tp, args.sequence_parallel, **sizes, seed=args.seed)
    schedule = schedule_of(args, pp.size())
    text = load_text()
    check_sizes(args, network, dp.size(), schedule, len(text))

    # What this rank has: stages of the pipeline, and of each parameter of theirs its block along tp.
    specs = {s: parameters_of(network, s, schedule.num_stages) for s in schedule.stages_of(pp.get_local_rank())}
    of_all = {name: spec for stage in specs.values() for name, spec in stage.items()}
    blocks = {name: block_of(network, s, first_values(network, name, s, args.dtype)) for name, s in of_all.items()}
    blocks = {name: array_module(args.device).asarray(block) for name, block in blocks.items()}
    optimizer = (ShardedOptimizer if args.zero else ReplicatedOptimizer)(blocks, adam, dp)
    losses = load(Path(args.checkpoint), mesh, network, of_all, optimizer) if args.resume else []
    stages = {
        s: autograd_stage(network.stage(s, schedule.num_stages), {name: optimizer.parameters[name] for name in names})
        for s, names in specs.items()
    }
    runner = PipelineRunner(stages, schedule, pp, loss=network.loss)

    rows = np.split(np.arange(args.batch), dp.size())[dp.get_local_rank()]
    done = len(losses)
    mesh.barrier()
    began = perf_counter()
    for number in progress(args.steps, losses) if mesh.get_rank() == 0 else range(done + 1, args.steps + 1):
        tokens, following = batch_of(text, number, args.batch, args.context, args.seed)
        result = runner.step(tokens[rows], following[rows], return_outputs=False)
        gradients = {name: g for stage in result.gradients.values() for name, g in stage.items()}
        optimizer.step(gradients, lr=learning_rate(number, args.steps, args.lr), step=number)
        losses.append(mean_loss(result.losses, mesh, schedule))
        if not np.isfinite(losses[-1]):
            raise FloatingPointError(f"the loss of step {number} is {losses[-1]}: try a lower --lr than {args.lr}")
        if args.checkpoint and (number == args.steps or number % args.save_every == 0):
            save(Path(args.checkpoint), mesh, network, of_all, optimizer, losses)
    seconds = perf_counter() - began

    run = {"losses": losses, "steps_per_s": (len(losses) - done) / seconds, "schedule": schedule.name}
    timeline = runner.timeline()
    run["bubble"] = timeline.bubble
    if args.sample and dp.get_local_rank() == 0:
        run["sample"] = sample(stages, schedule, network, pp, args)
    run |= {"mesh": f"{dp.size()}x{tp.size()}x{pp.size()}", "dtype": args.dtype}
    if args.plot and mesh.get_rank() == 0:
        plot(args.plot, run, timeline)
    return run


def mean_loss(losses: list[Any] | None, mesh: dist.DeviceMesh, schedule: Schedule) -> float:
    """Return the mean over micro-batches and "dp" on all ranks; the ranks of the last stage have the losses."""
    loss = np.array(0.0 if losses is None else np.mean([float(loss) for loss in losses]))
    mesh["pp"].broadcast(loss, group_src=schedule.rank_of(schedule.num_stages - 1))
    return float(mesh["dp"].all_reduce(loss, op="avg"))


def sample(
    stages: dict[int, PipelineStage],
    schedule: Schedule,
    network: Network,
    pp: dist.DeviceMesh,
    args: argparse.Namespace,
) -> str:
    """Let the model continue the prompt: each character takes a forward pass through the pipeline."""
    forward = Schedule([[f"{stage}F0" for stage in schedule.stages_of(rank)] for rank in range(pp.size())], "forward")
    runner, rng = PipelineRunner(stages, forward, pp), np.random.default_rng(args.seed)
    text = np.frombuffer(args.prompt.encode("ascii"), np.uint8).astype(np.int64)
    for _ in range(args.sample):
        seen = text[-network.context :]
        tokens = np.zeros((1, network.context), np.int64)  # a token does not see those after it: any will do
        tokens[0, : len(seen)] = seen
        logits = runner.eval(tokens).outputs
        new = np.zeros(1, np.int64)
        if logits is not None:  # on the rank of the last stage: for each token, this rank's part of the logits
            last = all_gather(logits[len(seen) - 1], network.tp, axis=0)
            last = last if args.device == "cpu" else last.get()
            new[0] = np.argmax(last / args.temperature + rng.gumbel(size=len(last)))
        pp.broadcast(new, group_src=schedule.rank_of(schedule.num_stages - 1))
        text = np.append(text, new)
    return text.astype(np.uint8).tobytes().decode("ascii")


def schedule_of(args: argparse.Namespace, pp: int) -> Schedule:
    return SCHEDULES[args.schedule or "1f1b"](pp, args.micro_batches or (1 if pp == 1 else 2 * pp))


def mesh_shape(text: str | None, world_size: int) -> tuple[int, int, int]:
    """Check `--mesh DPxTPxPP` against the number of ranks; without it, all ranks are data parallel."""
    text = f"{world_size}x1x1" if text is None else text
    match = re.fullmatch(r"([1-9][0-9]*)x([1-9][0-9]*)x([1-9][0-9]*)", text)
    if match is None:
        raise ValueError(f"--mesh must be DPxTPxPP, three positive numbers such as 2x2x1, got {text!r}")
    dp, tp, pp = int(match[1]), int(match[2]), int(match[3])
    if dp * tp * pp != world_size:
        raise ValueError(f"--mesh {text} needs {dp * tp * pp} ranks, but {world_size} run: meshrun -n {dp * tp * pp}")
    return dp, tp, pp


def check_sizes(args: argparse.Namespace, network: Network, dp: int, schedule: Schedule, text_length: int) -> None:
    tp, micro_batches = network.tp.size(), schedule.num_microbatches
    if args.batch % (dp * micro_batches):
        raise ValueError(
            f"--batch {args.batch} must be a multiple of {dp * micro_batches}, the ranks along dp times the"
            f" micro-batches: {dp} x {micro_batches}"
        )
    if network.heads % tp or network.width % network.heads:
        raise ValueError(
            f"--heads {network.heads} must be a multiple of {tp}, the ranks along tp, and divide"
            f" --width {network.width}"
        )
    if network.sequence_parallel and network.context % tp:
        raise ValueError(f"--context {network.context} must be a multiple of {tp}, the ranks along tp, to be sharded")
    if network.vocabulary % tp:
        raise ValueError(f"the vocabulary, {network.vocabulary}, must be a multiple of {tp}, the ranks along tp")
    if network.context >= text_length:
        raise ValueError(f"--context {network.context} must be less than the text is long, {text_length}")
    if network.layers < schedule.num_stages:
        raise ValueError(
            f"--layers {network.layers} must be at least {schedule.num_stages}, the stages of the pipeline"
        )


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description="Train a small language model on a mesh of ranks.")
    add = made.add_argument
    add("--mesh", metavar="DPxTPxPP", help="ranks along dp, tp and pp (default: all along dp)")
    add("--schedule", choices=SCHEDULES, help="of the pipeline (default: 1f1b, or with --plain gpipe)")
    add("--micro-batches", type=int, metavar="N", help="of a step (default: 1, or 2 for each rank of a pipeline)")
    add("--sequence-parallel", action="store_true", help="shard the activations between the layers along tp")
    add("--zero", action="store_true", help="spread the state of the optimizer along dp")
    add("--device", choices=["cpu", "cuda"], default="cpu", help="of the arrays (default: %(default)s)")
    add("--backend", help="of the groups (default: gloo, and with --device cuda nccl for GPU arrays)")
    add("--plain", action="store_true", help="the same by hand, from transformer_plain.py")
    add("--steps", type=int, default=300, help="batches to train on (default: %(default)s)")
    add("--batch", type=int, default=16, help="sequences in a global batch (default: %(default)s)")
    add("--context", type=int, default=64, help="characters of a sequence (default: %(default)s)")
    add("--width", type=int, default=96, help="numbers for a character between layers (default: %(default)s)")
    add("--heads", type=int, default=4, help="of attention (default: %(default)s)")
    add("--layers", type=int, default=4, help="blocks of attention and MLP (default: %(default)s)")
    add("--lr", type=float, default=6e-3, help="the highest learning rate (default: %(default)s)")
    add("--dtype", choices=["float32", "float64"], default="float32", help="(default: %(default)s)")
    add("--seed", type=int, default=0, help="of parameters, batches and sample (default: %(default)s)")
    add("--checkpoint", metavar="DIR", help="save to this folder, which all ranks share")
    add("--save-every", type=int, default=100, metavar="N", help="steps between checkpoints (default: %(default)s)")
    add("--resume", action="store_true", help="go on from the newest checkpoint of --checkpoint, on any mesh")
    add("--sample", type=int, default=120, metavar="N", help="characters to write at the end (default: %(default)s)")
    add("--prompt", default="The ", help="what the sample begins with (default: %(default)r)")
    add("--temperature", type=float, default=0.7, help="of the sample (default: %(default)s)")
    add("--json", metavar="PATH", help="write losses, speed and the sample to this file")
    add("--plot", metavar="PATH", help="draw the losses and the pipeline into this file (needs matplotlib)")
    return made


def parsed() -> argparse.Namespace:
    made = parser()
    args = made.parse_args()
    for name in ("steps", "batch", "context", "width", "heads", "layers", "save_every", "micro_batches"):
        if (value := getattr(args, name)) is not None and value < 1:
            made.error(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    for name in ("lr", "temperature"):
        if not 0 < getattr(args, name) < math.inf:
            made.error(f"--{name} must be a positive number, got {getattr(args, name)}")
    if not args.prompt or not args.prompt.isascii():
        made.error(f"--prompt must have one or more characters, all of them ASCII, got {args.prompt!r}")
    for path in filter(None, (args.json, args.plot)):
        if not Path(path).absolute().parent.is_dir():
            made.error(f"there is no folder to write {path} to")
    if args.resume and not args.checkpoint:
        made.error("--resume needs --checkpoint, the folder to go on from")
    if args.plain and (args.zero or args.sequence_parallel or args.checkpoint or args.plot or args.device != "cpu"):
        made.error("--plain has no --zero, --sequence-parallel, --checkpoint, --plot and --device cuda")
    if args.plain and args.schedule not in (None, "gpipe"):
        made.error(f"--plain has no schedule but gpipe, got {args.schedule}")
    return args


def main() -> None:
    args = parsed()
    launched = any(name in os.environ for name in LAUNCHED)
    alone: dict[str, Any] = {} if launched else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(args.backend or {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}[args.device], **alone)
    shape = mesh_shape(args.mesh, dist.get_world_size())
    mesh = dist.init_device_mesh(args.device, shape, mesh_dim_names=("dp", "tp", "pp"))
    run = (transformer_plain.train if args.plain else train)(mesh, args)
    if dist.get_rank() == 0:
        if args.json:
            Path(args.json).write_text(json.dumps(run) + "\n")
        if "sample" in run:
            print(run["sample"])
        print("mesh {mesh} {dtype}: loss {loss:.4f}, {steps_per_s:.1f} steps/s".format(loss=run["losses"][-1], **run))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
