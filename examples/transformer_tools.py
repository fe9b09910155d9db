"""What surrounds the training of train_transformer.py: the text, the optimizer, checkpoints, the picture."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from transformer_network import Network, Parameter, block_of

import meshdist as dist
from meshdist.functional import all_gather
from meshdist.parallel import GradientReducer, PipelineTimeline, ShardedOptimizer

Array = np.ndarray
TEXT = Path(__file__).parent / "data" / "documentation.txt"

# ---- Data


def load_text() -> Array:
    """Return the text as tokens: its bytes, which are ASCII."""
    return np.frombuffer(TEXT.read_bytes(), np.uint8).astype(np.int64)


def batch_of(text: Array, step: int, size: int, context: int, seed: int) -> tuple[Array, Array]:
    """Return the tokens of the batch of a step and, for each, the token that follows: both (size, context)."""
    begins = np.random.default_rng([seed, step]).integers(len(text) - context, size=(size, 1))
    places = begins + np.arange(context)
    return text[places], text[places + 1]


# ---- Optimizer


def adam(parameters: Array, gradients: Array, state: dict[str, Array], lr: float, step: int) -> None:
    """Change parameters by the algorithm of Kingma and Ba, "Adam" (2015); `step` counts from 1."""
    beta1, beta2, epsilon = 0.9, 0.99, 1e-8
    m = state.setdefault("m", np.zeros_like(parameters))
    v = state.setdefault("v", np.zeros_like(parameters))
    m += (1 - beta1) * (gradients - m)
    v += (1 - beta2) * (gradients * gradients - v)
    parameters -= lr / (1 - beta1**step) * m / (np.sqrt(v / (1 - beta2**step)) + epsilon)


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Rise to the peak in 20 steps, then fall to a tenth of it along a cosine."""
    return float(peak * min(step / 20, 0.55 + 0.45 * np.cos(np.pi * step / steps)))


class ReplicatedOptimizer:
    """Updates all parameters on all ranks of a group, with the mean of their gradients.

    The methods are those of meshdist.parallel.ShardedOptimizer, where each rank has the state of its part only.
    """

    def __init__(self, parameters: Mapping[str, Array], update: Callable[..., None], group: dist.DeviceMesh) -> None:
        self.parameters = parameters
        self._update = update
        self._reducer = GradientReducer(parameters, group)
        self._states: dict[str, dict[str, Array]] = {name: {} for name in parameters}

    def step(self, gradients: Mapping[str, Array], **options: Any) -> None:
        for name, gradient in gradients.items():
            self._reducer.ready(name, gradient)
        self._reducer.wait()
        for name, parameter in self.parameters.items():
            self._update(parameter, self._reducer.gradients[name], self._states[name], **options)

    def consolidate_state_dict(self) -> dict[str, dict[str, Array]]:
        kinds = next(iter(self._states.values()))
        return {kind: {name: state[kind] for name, state in self._states.items()} for kind in kinds}

    def load_state_dict(self, state_dict: Mapping[str, Mapping[str, Array]]) -> None:
        for name in self._states:
            self._states[name] = {kind: arrays[name].copy() for kind, arrays in state_dict.items()}


Optimizer = ReplicatedOptimizer | ShardedOptimizer

# ---- Checkpoints


def save(
    folder: Path,
    mesh: dist.DeviceMesh,
    network: Network,
    specs: Mapping[str, Parameter],
    optimizer: Optimizer,
    losses: list[float],
) -> None:
    """Write whole arrays to `folder/step-N`, a file for each rank of "pp". All ranks call it and share the folder.

    What is cut along "tp" is gathered, and what is spread along "dp" consolidated: the files do not depend on the mesh.
    """
    done = folder / f"step-{len(losses):06}"
    part = done.with_suffix(".part")
    state = {"parameters": optimizer.parameters, **optimizer.consolidate_state_dict()}
    whole = {}
    for kind, arrays in state.items():
        for name, array in arrays.items():
            cut = specs[name].cut
            whole[f"{kind}/{name}"] = array if cut is None else all_gather(array, mesh["tp"], axis=cut)
    if mesh.get_rank() == 0:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
    mesh.barrier()
    if mesh["dp"].get_local_rank() == mesh["tp"].get_local_rank() == 0:
        np.savez(part / f"pp-{mesh['pp'].get_local_rank()}.npz", losses=losses, sizes=network.sizes, **whole)
    mesh.barrier()
    if mesh.get_rank() == 0:
        shutil.rmtree(done, ignore_errors=True)
        part.rename(done)  # a checkpoint that has its name is whole


def load(folder: Path, network: Network, specs: Mapping[str, Parameter], optimizer: Optimizer) -> list[float]:
    """Take this rank's blocks of the newest checkpoint of any mesh; return the losses of the steps before it."""
    steps = sorted(folder.glob("step-" + "[0-9]" * 6))
    if not steps:
        raise FileNotFoundError(f"--resume: there is no checkpoint in {folder}; start without --resume")
    state: dict[str, dict[str, Array]] = {}
    losses: list[float] = []
    for path in steps[-1].glob("pp-*.npz"):
        with np.load(path) as file:
            losses, sizes = file["losses"].tolist(), str(file["sizes"])
            if sizes != network.sizes:
                raise ValueError(f"--resume: {path} is of a network with {sizes}, and this one has {network.sizes}")
            for kind, name in (key.split("/") for key in file.files if "/" in key):
                if name in specs:
                    state.setdefault(kind, {})[name] = block_of(network, specs[name], file[f"{kind}/{name}"])
    for name, array in state.pop("parameters").items():
        optimizer.parameters[name][...] = array
    optimizer.load_state_dict(state)
    return losses


# ---- Picture


def plot(path: str, run: dict[str, Any], timeline: PipelineTimeline) -> None:
    """Draw the losses, and what each rank of a pipeline computed when in the last step."""
    from matplotlib.figure import Figure  # without pyplot: drawn by Agg, no display needed

    figure = Figure(figsize=(8, 6), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=(3, 2))
    above.plot(range(1, len(run["losses"]) + 1), run["losses"])
    above.set(title=f"mesh {run['mesh']}, {run['dtype']}", xlabel="step", ylabel="loss per character")
    above.grid(alpha=0.3)
    timeline.show("plot", ax=below)
    figure.savefig(path, dpi=150)
