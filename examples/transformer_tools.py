"""What surrounds the training of train_transformer.py: the text, the optimizer, checkpoints, the picture."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from transformer_network import Network, Parameter

import meshdist as dist
from meshdist import checkpoint
from meshdist.parallel import GradientReducer, PipelineTimeline, ShardedOptimizer
from meshdist.tensor import DTensor, Replicate, Shard

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

ADAM_STATE = ("m", "v")


def save(
    folder: Path,
    mesh: dist.DeviceMesh,
    network: Network,
    specs: Mapping[str, Parameter],
    optimizer: Optimizer,
    losses: list[float],
) -> None:
    """Write `folder/step-N`, which does not depend on the mesh. All ranks call it and share the folder.

    The ranks of "tp" write their blocks, and those of "pp" what their stages have; what is spread along "dp" is
    consolidated before.
    """
    state = {"parameters": optimizer.parameters, **optimizer.consolidate_state_dict()}
    tree: dict[str, Any] = {kind: over_tp(mesh, specs, arrays) for kind, arrays in state.items()}
    checkpoint.save(folder, {**tree, "losses": losses, "sizes": network.sizes}, step=len(losses), group=mesh)


def load(
    folder: Path, mesh: dist.DeviceMesh, network: Network, specs: Mapping[str, Parameter], optimizer: Optimizer
) -> list[float]:
    """Take this rank's blocks of the newest checkpoint of any mesh; return the losses of the steps before it."""
    if checkpoint.latest(folder) is None:
        raise FileNotFoundError(f"--resume: there is no checkpoint in {folder}; start without --resume")
    sizes = checkpoint.load(folder, {"sizes": ""}, strict=False, group=mesh)["sizes"]
    if sizes != network.sizes:
        raise ValueError(
            f"--resume: the checkpoint in {folder} is of a network with {sizes}, and this one has {network.sizes}"
        )
    blocks = {name: np.empty_like(array) for name, array in optimizer.parameters.items()}
    like: dict[str, Any] = {kind: over_tp(mesh, specs, blocks) for kind in ("parameters", *ADAM_STATE)}
    found = checkpoint.load(folder, {**like, "losses": [], "sizes": ""}, group=mesh)
    for name, array in found["parameters"].items():
        optimizer.parameters[name][...] = array.to_local()
    optimizer.load_state_dict({kind: {name: x.to_local() for name, x in found[kind].items()} for kind in ADAM_STATE})
    return list(found["losses"])


def over_tp(mesh: dist.DeviceMesh, specs: Mapping[str, Parameter], blocks: Mapping[str, Array]) -> dict[str, DTensor]:
    """Return arrays over "tp" of which these are the blocks of this rank."""
    cuts = {name: Replicate() if specs[name].cut is None else Shard(specs[name].cut) for name in blocks}
    return {name: DTensor.from_local(x, mesh["tp"], [cuts[name]], specs[name].shape) for name, x in blocks.items()}


# ---- Picture


def plot(path: str, run: dict[str, Any], timeline: PipelineTimeline) -> None:
    """Draw the losses, and what each rank of a pipeline computed when in the last step."""
    from matplotlib.figure import Figure  # without pyplot: drawn by Agg, no display needed

    figure = Figure(figsize=(8, 6), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=(3, 2))
    above.plot(range(1, len(run["losses"]) + 1), run["losses"], color="#77aadd")  # the blue of the bars below
    above.set_title(f"a transformer learns to write text: mesh {run['mesh']}, {run['dtype']}", fontsize="medium")
    above.set(xlabel="step", ylabel="loss per character")
    above.grid(alpha=0.3)
    timeline.show("plot", ax=below)
    figure.savefig(path, dpi=150)
