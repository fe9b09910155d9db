"""Communication hooks: other ways to average a bucket of gradients than one all_reduce, most of them with fewer bytes.

A hook is given to `GradientReducer(hook=...)` and called with each GradBucket. A hook with several rounds of
communication is a generator, which yields what it waits for: the reducer goes on with the rounds of all buckets in
turns, in the same order on all ranks.
"""

from __future__ import annotations

from types import GeneratorType
from typing import Any

import numpy as np

from meshdist.arrays.device_types import new_empty
from meshdist.collectives.all_gather_into_tensor import all_gather_into_tensor
from meshdist.collectives.all_reduce import all_reduce as _all_reduce
from meshdist.collectives.all_to_all_single import all_to_all_single
from meshdist.groups.process_group import ProcessGroup
from meshdist.groups.world import resolve
from meshdist.parallel.bucket_reduction import Hook, Rounds, real_buffer, result_of
from meshdist.parallel.gradient_buckets import GradBucket, checked_count
from meshdist.parallel.power_sgd import PowerSGD, batched_power_sgd, power_sgd
from meshdist.runtime.context import GroupLike
from meshdist.runtime.work import Work

__all__ = [
    "PostLocalSGD",
    "PowerSGD",
    "all_reduce",
    "batched_power_sgd",
    "bf16_compress",
    "fp16_compress",
    "fp16_compress_wrapper",
    "post_local_sgd",
    "power_sgd",
    "quantization_perchannel",
    "quantization_pertensor",
]


def __dir__() -> list[str]:
    return sorted(__all__)


_EPSILON = np.float32(np.finfo(np.float32).eps)
_LEVELS = 255


def all_reduce(bucket: GradBucket) -> Work:
    """Average the bucket by an all_reduce, as without a hook; torch's `allreduce_hook`.

    Args:
        bucket: The bucket; its buffer is reduced in place.
    """
    work: Work = _all_reduce(bucket.buffer(), "avg", bucket.group, async_op=True)
    return work


def fp16_compress(bucket: GradBucket) -> Work:
    """Average the bucket in float16: half the bytes of float32; torch's `fp16_compress_hook`.

    The gradients are divided by the number of ranks first, so sums overflow only where a gradient exceeds 65,504.

    Args:
        bucket: The bucket, of any floating dtype.

    Raises:
        TypeError: Complex gradients.
    """
    return _compressed(bucket, np.dtype(np.float16), "fp16_compress")


def bf16_compress(bucket: GradBucket) -> Work | Rounds:
    """Average the bucket in bfloat16: half the bytes of float32, with its range; torch's `bf16_compress_hook`.

    In GPU memory, and without ml_dtypes, which has bfloat16 for NumPy, float32 gradients are rounded to 16 bits, sent
    by an all_to_all, and added in float32; then the averages are rounded and gathered. The bytes are the same.

    Args:
        bucket: The bucket, of any floating dtype; without ml_dtypes and in GPU memory, of float32.

    Raises:
        TypeError: Complex gradients; without ml_dtypes or in GPU memory, a dtype other than float32.
    """
    try:
        from ml_dtypes import bfloat16
    except ModuleNotFoundError:
        return _rounded_to_16_bits(bucket)
    if not isinstance(bucket.buffer(), np.ndarray):
        return _rounded_to_16_bits(bucket)
    return _compressed(bucket, np.dtype(bfloat16), "bf16_compress")


def fp16_compress_wrapper(hook: Hook) -> Hook:
    """Return a hook that calls another one with the bucket in float16; torch's `fp16_compress_wrapper`.

    With `power_sgd()` it halves what that sends.

    Args:
        hook: A communication hook.
    """

    def in_float16(bucket: GradBucket) -> Rounds:
        with np.errstate(over="ignore"):
            half = bucket.over(real_buffer(bucket, "fp16_compress_wrapper").astype(np.float16))
        begun = hook(half)
        if isinstance(begun, GeneratorType):
            result = yield from begun
        else:
            yield begun
            result = result_of(begun)
        return half.buffer() if result is None else result

    return in_float16


def _compressed(bucket: GradBucket, dtype: Any, of: str) -> Work:
    with np.errstate(over="ignore"):  # as on a GPU, infinities show in the gradients
        divided = real_buffer(bucket, of).astype(dtype)
    divided /= bucket.group.size()
    work: Work = _all_reduce(divided, group=bucket.group, async_op=True)
    return work


def _rounded_to_16_bits(bucket: GradBucket) -> Rounds:
    buffer, size = bucket.buffer(), bucket.group.size()
    if buffer.dtype != np.float32:
        prefix = bucket.group.error_prefix("bf16_compress")
        raise TypeError(f"{prefix}: gradients of {buffer.dtype} need ml_dtypes: pip install ml_dtypes")
    rows = -(-buffer.size // size)
    padded, mine = (new_empty((size, rows), _upper_half(buffer[:0])) for _ in range(2))
    padded.reshape(-1)[: buffer.size] = _upper_half(buffer)
    padded.reshape(-1)[buffer.size :] = 0
    yield all_to_all_single(mine, padded, group=bucket.group, async_op=True)
    mean = (_widened(mine) / np.float32(size)).sum(axis=0, dtype=np.float32)
    yield all_gather_into_tensor(padded, _upper_half(mean), bucket.group, async_op=True)
    return _widened(padded).reshape(-1)[: buffer.size]


def _upper_half(array: Any) -> Any:
    """Return float32 numbers as bfloat16, in uint16: rounded to the nearest, ties to even."""
    bits = (array if array.flags.c_contiguous else array.copy()).view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    return np.where(np.isnan(array), np.uint32(0x7FC0), rounded).astype(np.uint16)


def _widened(halves: Any) -> Any:
    return (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)


def quantization_pertensor(bucket: GradBucket) -> Rounds:
    """Average the bucket in 8 bits per gradient, scaled between each rank's smallest and largest.

    torch's `quantization_pertensor_hook`: every rank gets the bytes of all others, so more than 8 ranks send more than
    an all_reduce of float32 does.

    Args:
        bucket: The bucket, of a floating dtype.

    Raises:
        TypeError: Complex gradients.
    """
    return _quantized(bucket, real_buffer(bucket, "quantization_pertensor").reshape(1, -1))


def quantization_perchannel(bucket: GradBucket, bucket_size: int = 512) -> Rounds:
    """Average the bucket in 8 bits per gradient, scaled between the smallest and largest of every `bucket_size`.

    torch's `quantization_perchannel_hook`. To choose the size: `hook=partial(quantization_perchannel,
    bucket_size=128)`.

    Args:
        bucket: The bucket, of a floating dtype.
        bucket_size: The number of consecutive gradients in a channel.

    Raises:
        TypeError: Complex gradients.
    """
    buffer = real_buffer(bucket, "quantization_perchannel")
    channels = new_empty((-(-buffer.size // bucket_size), bucket_size), buffer)
    flat = channels.reshape(-1)
    flat[: buffer.size] = buffer
    flat[buffer.size :] = 0
    return _quantized(bucket, channels)


def _quantized(bucket: GradBucket, channels: Any) -> Rounds:
    """Average the rows of `channels`, each between its own least and greatest element."""
    if not channels.size:
        return None
    size, num_channels = bucket.group.size(), len(channels)
    numbers = channels.astype(np.float32)
    # The range includes zero, which is exact: a gradient is often zero.
    least = np.minimum(numbers.min(axis=1, keepdims=True), 0)
    greatest = np.maximum(numbers.max(axis=1, keepdims=True), 0)
    with np.errstate(invalid="ignore"):  # a NaN shows in the averages of its channel
        scale = np.maximum((greatest - least) / np.float32(_LEVELS), _EPSILON)
        zero = np.clip(-np.round(least / scale), 0, _LEVELS).astype(np.float32)
        levels = np.clip(np.round(numbers / scale) + zero, 0, _LEVELS).astype(np.uint8)
    # One message: the scale and the zero of each channel, and its levels.
    head = 8 * num_channels
    end = head + numbers.size
    message = new_empty((-(-end // 8) * 8,), bucket.buffer().view(np.uint8))
    message[:head].view(np.float32)[...] = np.concatenate([scale, zero]).reshape(-1)
    message[head:end] = levels.reshape(-1)
    found = new_empty((size, message.size), message)
    yield all_gather_into_tensor(found, message, bucket.group, async_op=True)
    total = np.zeros_like(numbers)
    for rank in range(size):
        scales, zeros = found[rank, :head].view(np.float32).reshape(2, num_channels, 1)
        with np.errstate(invalid="ignore"):
            total += scales * (found[rank, head:end].reshape(numbers.shape).astype(np.float32) - zeros)
    return (total / np.float32(size)).reshape(-1)[: bucket.buffer().size]


class PostLocalSGD:
    """A communication hook made by `post_local_sgd`.

    Attributes:
        step: How many steps it has reduced; a checkpoint keeps it.
        fault_group: The group over which the ranks exchange the faults of the last step; None if they do not.
    """

    def __init__(
        self, subgroup: ProcessGroup, start_iteration: int, group: ProcessGroup | None, is_local: bool
    ) -> None:
        self.step = 0
        self.fault_group: ProcessGroup | None = None
        self._subgroup = subgroup
        self._start_iteration = start_iteration
        self._group = group
        self._is_local = is_local

    def __call__(self, bucket: GradBucket) -> Work | None:
        """Average a bucket: see `GradientReducer(hook=...)`."""
        if self.step < self._start_iteration:
            self.fault_group = self._group or bucket.group
        else:
            self.fault_group = None if self._is_local else self._subgroup
        self.step += bucket.is_last()
        if self.fault_group is None:
            return None
        work: Work = _all_reduce(bucket.buffer(), "avg", self.fault_group, async_op=True)
        return work


def post_local_sgd(
    subgroup: GroupLike, start_iteration: int, group: GroupLike = None, post_local_gradient_allreduce: bool = True
) -> PostLocalSGD:
    """Return a hook for post-local SGD: all ranks average their gradients at first, later only those of a subgroup.

    After `start_iteration` steps, average the parameters over all ranks now and then, by a PeriodicAverager with as
    many `warmup_steps`, or by a HierarchicalAverager. Lin et al., "Don't Use Large Mini-Batches, Use Local SGD", 2018;
    torch's `post_localSGD_hook`.

    Args:
        subgroup: The ranks among which gradients are averaged later, such as `mesh["tp"]` for those of a host.
        start_iteration: The step, counted from 0, from which gradients are averaged over the subgroup only.
        group: The ranks among which they are averaged until then; that of the reducer if None.
        post_local_gradient_allreduce: If False, gradients are not averaged at all from that step on.

    Raises:
        TypeError: `start_iteration` is not an integer.
        ValueError: `start_iteration` is negative.
    """
    start_iteration = checked_count("post_local_sgd", "start_iteration", start_iteration, 0)
    wide = None if group is None else resolve(group)
    return PostLocalSGD(resolve(subgroup), start_iteration, wide, is_local=not post_local_gradient_allreduce)
