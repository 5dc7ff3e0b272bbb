"""Models over several processes.

`ranks.py` joins the processes, `mesh.py` groups them and has the norm of gradients over them, `shard.py` is FSDP2 over
a model, `sequence.py` and `exchange.py` deal a pack's slots, `experts.py` the experts of a layer.
"""
