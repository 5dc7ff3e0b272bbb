"""Train a recipe on whole nodes of a Ray cluster: a task on each node, which starts torchrun there.

    python examples/ray/train.py --nodes 2 --gpus 8 recipe.yaml --set run.folder=/shared/run

Every node must see the recipe, the data and the run folder. If a node is lost, all tasks start again, and the run
continues from its newest checkpoint.
"""

import argparse
import subprocess


def torchrun(node: int, nodes: int, gpus: int, address: str, options: list[str]) -> list[str]:
    """Command of one node: torchrun with a process for each of its GPUs."""
    rendezvous = ["--node-rank", str(node), "--master-addr", address, "--master-port", "29500"]
    size = ["--nnodes", str(nodes), "--nproc-per-node", str(gpus)]
    return ["torchrun", *size, *rendezvous, "--no-python", "headway", "train", *options, "--resume-if-any"]


def main() -> None:
    """Hold as many whole nodes as are asked for, and train on them until the run is done."""
    from ray.util import get_node_ip_address
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    import ray

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1, help="nodes that train")
    parser.add_argument("--gpus", type=int, default=8, help="GPUs of each node")
    parser.add_argument("--tries", type=int, default=3, help="starts of the whole job")
    chosen, options = parser.parse_known_args()
    ray.init()
    group = placement_group([{"GPU": chosen.gpus, "CPU": 1}] * chosen.nodes, strategy="STRICT_SPREAD")
    ray.get(group.ready())

    def on_node(function, node, *arguments):  # noqa: ANN001, ANN002, ANN202 - Ray's own types are not known here
        place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node)
        task = ray.remote(num_gpus=chosen.gpus, num_cpus=1, max_retries=0, scheduling_strategy=place)(function)
        return task.remote(*arguments)

    for left in reversed(range(chosen.tries)):
        address = ray.get(on_node(get_node_ip_address, 0))
        commands = [torchrun(node, chosen.nodes, chosen.gpus, address, options) for node in range(chosen.nodes)]
        tasks = [on_node(subprocess.check_call, node, command) for node, command in enumerate(commands)]
        try:
            ray.get(tasks)
            return
        except ray.exceptions.RayError:
            if not left:
                raise
            for task in tasks:
                ray.cancel(task, force=True)


if __name__ == "__main__":
    main()
