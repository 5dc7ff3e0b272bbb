"""Models over several processes: the mesh they form (`mesh`) and FSDP2 over it (`shard`).

`MeshShape.of` says how many processes each kind of parallelism takes, `build_mesh` makes the groups, `shard_model` lays
the parameters over them, and `clip_` is the gradient norm that is right for parameters on any of these meshes.
"""

from headway.models.parallel.clip import clip_
from headway.models.parallel.mesh import Mesh, build_mesh
from headway.models.parallel.shard import model_name, reduce_gradients, shard_model
from headway.plan.mesh_shape import MeshShape

__all__ = ["Mesh", "MeshShape", "build_mesh", "clip_", "model_name", "reduce_gradients", "shard_model"]
