"""Models over several processes: the mesh they form (`mesh`) and FSDP2 over it (`shard`).

`headway.packing.mesh` says how many processes each kind of parallelism takes, `build_mesh` makes the groups,
`shard_model` lays the parameters over them, and `gradient_norm` is right for parameters on any of these meshes.
"""

from headway.models.parallel.clip import clipping_factor, gradient_norm
from headway.models.parallel.mesh import Mesh, build_mesh, fill
from headway.models.parallel.shard import model_name, own_classes, reduce_gradients, shard_model
from headway.tracing.unwrap import local

__all__ = [
    "Mesh",
    "build_mesh",
    "clipping_factor",
    "fill",
    "gradient_norm",
    "local",
    "model_name",
    "own_classes",
    "reduce_gradients",
    "shard_model",
]
