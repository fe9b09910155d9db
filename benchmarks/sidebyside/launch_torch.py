"""The script whose launch is timed, with torch: a 2-d mesh, one all_reduce along an axis, the end."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
x = torch.ones(1)
dist.all_reduce(x, group=mesh["tp"].get_group())
assert x.item() == 2
dist.barrier()  # else the first to end now and then brings the other down
dist.destroy_process_group()
