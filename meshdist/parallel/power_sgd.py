"""PowerSGD: gradients as products of two thin matrices. Vogels et al., "PowerSGD", 2019 (arXiv:1905.13727).

A matrix M of gradients is approximated by P Q^T, of `rank` columns each, by one step of power iteration: P = M Q is
averaged over the ranks and orthogonalized, then Q = M^T P is averaged. What the product misses is added to the
gradients of the next step (error feedback), and Q is the start of the next step (warm start).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from meshdist.arrays.device_types import new_empty
from meshdist.arrays.host import consecutive_views
from meshdist.collectives.all_reduce import all_reduce
from meshdist.parallel.bucket_reduction import Rounds, real_buffer
from meshdist.parallel.gradient_buckets import GradBucket, checked_count
from meshdist.runtime.work import Work

_MOST_BY_GRAM_SCHMIDT = 2  # columns; with more, a QR factorization is faster


class PowerSGD:
    """A communication hook that compresses by PowerSGD; made by `power_sgd` and `batched_power_sgd`.

    Each reducer needs its own, since it keeps the errors and the matrices of its buckets.

    Attributes:
        steps: How many steps it has reduced.
    """

    def __init__(
        self,
        rank: int,
        start_iteration: int,
        min_compression_rate: float,
        use_error_feedback: bool,
        warm_start: bool,
        orthogonalization_epsilon: float,
        random_seed: int,
        by_parameter: bool,
    ) -> None:
        self.__name__ = "power_sgd" if by_parameter else "batched_power_sgd"
        if isinstance(rank, GradBucket):
            raise TypeError(f"{self.__name__} creates a hook; write hook={self.__name__}()")
        self.steps = 0
        self._rank = checked_count(self.__name__, "rank", rank, 1)
        self._start_iteration = checked_count(self.__name__, "start_iteration", start_iteration, 0)
        self._min_rate = min_compression_rate
        self._feeds_back = use_error_feedback
        self._warm_start = warm_start
        self._epsilon = orthogonalization_epsilon
        self._by_parameter = by_parameter
        self._random = np.random.RandomState(random_seed)
        self._errors: dict[int, Any] = {}
        self._qs: dict[int, Any] = {}
        self._before = self._after = 0

    def compression_stats(self) -> tuple[float, int, int]:
        """Return the rate of compression, and the numbers of elements before and after it, of all steps so far."""
        return (self._before / self._after if self._after else 0.0), self._before, self._after

    def __call__(self, bucket: GradBucket) -> Work | Rounds:
        """Average a bucket: see `GradientReducer(hook=...)`."""
        buffer = real_buffer(bucket, self.__name__)
        if self.steps < self._start_iteration:
            self.steps += bucket.is_last()
            work: Work = all_reduce(buffer, "avg", bucket.group, async_op=True)
            return work
        return self._rounds(bucket)

    def _rounds(self, bucket: GradBucket) -> Rounds:
        buffer, group, index = bucket.buffer(), bucket.group, bucket.index()
        size = group.size()
        if self._feeds_back:
            error = self._errors.get(index)
            if error is not None:
                if error.size != buffer.size:
                    prefix = group.error_prefix(self.__name__)
                    raise ValueError(
                        f"{prefix}: the hook keeps the errors of {error.size} gradients for bucket {index}, which has"
                        f" {buffer.size}; make a hook for each reducer"
                    )
                buffer += error
            given = buffer.copy()
        matrices, rest = self._matrices(bucket)
        ranks = [min(*matrix.shape, self._rank) for matrix in matrices]
        ps, p_flat = _stacked([(len(matrix), rank) for matrix, rank in zip(matrices, ranks, strict=True)], buffer)
        qs, q_flat = _stacked([(matrix.shape[1], rank) for matrix, rank in zip(matrices, ranks, strict=True)], buffer)
        self._after += p_flat.size + q_flat.size + sum(array.size for array in rest)
        self._start(index, qs, q_flat)
        for matrix, q, p in zip(matrices, qs, ps, strict=True):
            np.matmul(matrix, q, out=p)
        if rest:
            rest_flat = np.concatenate([array.reshape(-1) for array in rest])
            yield all_reduce(rest_flat, "avg", group, async_op=True)
            for array, average in zip(rest, consecutive_views(rest_flat, [array.shape for array in rest]), strict=True):
                array[...] = average
        if matrices:
            # The sum will do: its columns are normalized.
            yield all_reduce(p_flat, "sum", group, async_op=True)
            for matrix, q, p in zip(matrices, qs, ps, strict=True):
                orthogonalize(p, self._epsilon)
                np.matmul(matrix.T, p, out=q)
            yield all_reduce(q_flat, "sum", group, async_op=True)
            q_flat /= size
            for matrix, q, p in zip(matrices, qs, ps, strict=True):
                np.matmul(p, q.T, out=matrix)
        if not self._by_parameter:
            buffer[...] = matrices[0].reshape(-1)[: buffer.size]
        # A NaN of this step would stay in the errors and in Q. All ranks find it, since they have the same sums.
        if all(np.isfinite(sums).all() for sums in ((q_flat, rest_flat) if rest else (q_flat,))):
            if self._feeds_back:
                self._errors[index] = given - buffer
            if self._warm_start:
                self._qs[index] = q_flat
        else:
            self._errors.pop(index, None)
            self._qs.pop(index, None)
        self.steps += bucket.is_last()
        return None

    def _matrices(self, bucket: GradBucket) -> tuple[list[Any], list[Any]]:
        """Return the matrices to compress, and the gradients that are averaged as they are."""
        buffer = bucket.buffer()
        self._before += buffer.size
        if not self._by_parameter:
            side = math.ceil(math.sqrt(buffer.size))
            square = new_empty((side * side,), buffer)
            square[: buffer.size] = buffer
            square[buffer.size :] = 0
            return [square.reshape(side, side)], []
        matrices, rest = [], []
        for gradient in bucket.gradients():
            matrix = gradient.reshape(len(gradient) if gradient.ndim else 1, -1) if gradient.size else gradient
            num_rows, num_columns = matrix.shape if gradient.size else (0, 0)
            rank = min(num_rows, num_columns, self._rank)
            if (num_rows + num_columns) * rank * self._min_rate < num_rows * num_columns:
                matrices.append(matrix)
            else:
                rest.append(gradient)
        return matrices, rest

    def _start(self, index: int, qs: list[Any], q_flat: Any) -> None:
        """Fill in where the power iteration starts: the same on all ranks."""
        if self._warm_start and index in self._qs:
            q_flat[...] = self._qs[index]
        elif qs:
            # Another projection in every step: what is orthogonal to one of them would never be sent.
            drawn = np.random.RandomState(self._random.randint(1_000_000_000))
            for q in qs:
                _fill(q, drawn.standard_normal(q.shape).astype(q.dtype))
        for q in qs:
            orthogonalize(q, self._epsilon if self._by_parameter else 0)


def power_sgd(
    rank: int = 1,
    start_iteration: int = 1000,
    min_compression_rate: float = 2,
    use_error_feedback: bool = True,
    warm_start: bool = True,
    orthogonalization_epsilon: float = 0,
    random_seed: int = 0,
) -> PowerSGD:
    """Return a hook that compresses each gradient of two or more dims by PowerSGD; torch's `powerSGD_hook`.

    Args:
        rank: The columns of the two matrices of a gradient: torch's `matrix_approximation_rank`.
        start_iteration: Until this step, gradients are averaged as they are: torch's `start_powerSGD_iter`. The first
            steps of a training suffer most from approximation; a tenth of all steps is a good start.
        min_compression_rate: Gradients that would not become smaller by this factor are averaged as they are.
        use_error_feedback: Add the error of a step to the gradients of the next.
        warm_start: Start a step from the matrices of the step before, and not from random ones.
        orthogonalization_epsilon: Added to the norms of columns. It is not needed where matrices may be zero.
        random_seed: The same on all ranks.

    A NaN or an infinity makes the averages of its step NaN; errors and matrices are then forgotten.

    Raises:
        TypeError: A number is not an integer. From the hook: a gradient is complex.
        ValueError: `rank` is less than 1, or `start_iteration` is negative.

    Example:
        >>> import meshdist as dist
        >>> from meshdist.parallel import GradientReducer
        >>> from meshdist.parallel.communication_hooks import power_sgd
        >>> def main():
        ...     reducer = GradientReducer({"w": np.zeros((8, 8))}, hook=power_sgd(start_iteration=0))
        ...     reducer.ready("w", np.outer(np.arange(8.0), np.ones(8)))  # of rank 1: nothing is lost
        ...     reducer.wait()
        ...     return reducer.gradients["w"][:, 0].round(6).tolist()
        >>> dist.run(main, 2)[1]
        [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    """
    options = min_compression_rate, use_error_feedback, warm_start, orthogonalization_epsilon, random_seed
    return PowerSGD(rank, start_iteration, *options, by_parameter=True)


def batched_power_sgd(
    rank: int = 1,
    start_iteration: int = 1000,
    use_error_feedback: bool = True,
    warm_start: bool = True,
    random_seed: int = 0,
) -> PowerSGD:
    """Return a hook that compresses a whole bucket as one square matrix; torch's `batched_powerSGD_hook`.

    It is faster than `power_sgd` and much less accurate.

    Args:
        rank: The columns of the two matrices of a bucket, as for `power_sgd`.
        start_iteration: Until this step, gradients are averaged as they are.
        use_error_feedback: Add the error of a step to the gradients of the next.
        warm_start: Start a step from the matrices of the step before, and not from random ones.
        random_seed: The seed of the random matrices, the same on all ranks.

    Raises:
        TypeError: A number is not an integer. From the hook: a gradient is complex.
        ValueError: `rank` is less than 1, or `start_iteration` is negative.
    """
    return PowerSGD(rank, start_iteration, 0, use_error_feedback, warm_start, 0, random_seed, by_parameter=False)


def orthogonalize(matrix: Any, epsilon: float = 0) -> None:
    """Make the columns of a matrix, no more than its rows, orthonormal, in place; columns of zeros remain.

    Example:
        >>> x = np.array([[3.0, 1.0], [4.0, 0.0]])
        >>> orthogonalize(x)
        >>> x.round(6).tolist()
        [[0.6, 0.8], [0.8, -0.6]]
    """
    if matrix.shape[1] > _MOST_BY_GRAM_SCHMIDT and matrix.dtype.itemsize > 2:
        matrix[...] = np.linalg.qr(matrix)[0]
        return
    for place in range(matrix.shape[1]):
        column, rest = matrix[:, place : place + 1], matrix[:, place + 1 :]
        norm = np.sqrt((column * column).sum())
        with np.errstate(invalid="ignore"):  # infinities become NaNs
            column /= norm + epsilon + (norm == 0)  # a column of zeros remains one
        rest -= (column * rest).sum(axis=0, keepdims=True) * column


def _stacked(shapes: Sequence[tuple[int, int]], like: Any) -> tuple[list[Any], Any]:
    """Return matrices that are views of one flat array, and that array."""
    flat = new_empty((sum(math.prod(shape) for shape in shapes),), like)
    return consecutive_views(flat, shapes), flat


def _fill(array: Any, host: Any) -> None:
    if isinstance(array, np.ndarray):
        array[...] = host
    else:
        array.set(host)
