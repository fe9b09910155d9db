"""Programs of arrays over a mesh of GPUs, for real ones and for the stand-in."""

import numpy as np

import meshdist as dist


def on_gpu_mesh(shape, names, main):
    def program():
        mesh = dist.init_device_mesh(
            "cuda", shape, mesh_dim_names=names, backend_override=dict.fromkeys(names, "cuda:threads")
        )
        return main(mesh)

    return dist.run(program, int(np.prod(shape)), timeout=60)


def stencils(mesh):
    """Return, as NumPy arrays, what needs ghost rows, other layouts, or columns of neighbours."""
    from meshdist.tensor import Shard, distribute_tensor, halo, implicit_redistribution, map_overlap

    whole = np.random.default_rng(0).standard_normal((12, 10))
    placements = [Shard(dim) for dim in range(mesh.ndim)]
    x = distribute_tensor(whole, mesh, placements, src_data_rank=None)
    found = [halo(x, width, periodic) for width in (1, (2, 0), (0, 3)) for periodic in (False, True)]
    arrays = [map_overlap(lambda block: block * 2, x, 1), *np.gradient(x), np.diff(x, axis=0), np.diff(x, axis=1)]
    with implicit_redistribution():
        arrays += [np.trapezoid(x, axis=0), np.roll(x, (1, -2), (0, 1)), np.flip(x, 1), x[1:9:3, ::-2], x[x > 0]]
        arrays += [np.sort(x, axis=0), np.fft.fft2(x), x @ x.T, np.cumsum(x, axis=0), x.argmax(axis=0)]
    found += [array.full() for array in arrays]
    found.append(x.redistribute([Shard(1 - dim) for dim in range(mesh.ndim)]).to_local())
    line = mesh[mesh.mesh_dim_names[0]]
    columns, rank = x.to_local()[:, 1:3], line.get_local_rank()
    found.append(line.shift(columns))
    room = x.to_local() * 0
    line.sendrecv(columns, room[:, 2:4], (rank + 1) % line.size(), (rank - 1) % line.size())
    found.append(room)
    return [part.get() if hasattr(part, "get") else part for part in found]


def check_stencils(shape):
    """Compare what `stencils` returns on a mesh of GPUs of this shape with that on a mesh of CPUs."""
    names = ("dp", "tp")[: len(shape)]
    want = dist.run(
        lambda: stencils(dist.init_device_mesh("cpu", shape, mesh_dim_names=names)), int(np.prod(shape)), timeout=60
    )
    for rank, found in enumerate(on_gpu_mesh(shape, names, stencils)):
        for here, there in zip(found, want[rank], strict=True):
            np.testing.assert_allclose(here, there, rtol=1e-12, atol=1e-12)
