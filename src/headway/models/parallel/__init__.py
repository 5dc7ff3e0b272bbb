"""Models over several processes: the mesh they form (`mesh`) and FSDP2 over it (`shard`).

`headway.packing.mesh` says how many processes each kind of parallelism takes, `build_mesh` makes the groups,
`shard_model` lays the parameters over them, and `clip_` is the gradient norm that is right for parameters on any of
these meshes.
"""

from headway.models.parallel.clip import clip_
from headway.models.parallel.mesh import Mesh, build_mesh, fill
from headway.models.parallel.shard import model_name, own_classes, reduce_gradients, shard_model
from headway.tracing.unwrap import local

__all__ = [
    "Mesh",
    "build_mesh",
    "clip_",
    "fill",
    "local",
    "model_name",
    "own_classes",
    "reduce_gradients",
    "shard_model",
]
