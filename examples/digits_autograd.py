"""Train the network of digits_placements.py from its loss alone: meshdist.autograd computes the gradients.

    meshrun -n 4 examples/digits_autograd.py --mesh 2x2
    python examples/digits_autograd.py

The loss is NumPy for the whole arrays. The gradient of a weight is placed as the weight is: the sums along "dp", which
are pending at the end of the backward pass, are computed in one all_reduce for all weights. Losses and accuracy are
those of train_digits.py for every mesh, up to rounding.
"""

from typing import Any

import numpy as np
from digits_placements import Arrays, forward, main

from meshdist.autograd import value_and_grad
from meshdist.tensor import DTensor


def loss(weights: Arrays, x: DTensor, y: DTensor) -> Any:
    """Return the mean cross-entropy of a batch; `y` has a row of 0 and 1 for each image."""
    logits = forward(weights, x)[1]
    logits = logits - logits.max(axis=1, keepdims=True)
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return -(log_p * y).sum() / len(y)


if __name__ == "__main__":
    main(value_and_grad(loss))
