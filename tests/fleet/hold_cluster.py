"""A Ray cluster of several nodes on this machine, held by a separate process: `hold_cluster.py NODES`.

It prints the address. A line with a node's identifier on its input removes that node and adds another one; the end of
its input stops the cluster.
"""

import sys

from ray.cluster_utils import Cluster


def main() -> None:
    options = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=options)
    for _ in range(int(sys.argv[1]) - 1):
        cluster.add_node(**options)
    print(cluster.head_node.node_id, cluster.address, flush=True)
    for line in sys.stdin:
        (node,) = (candidate for candidate in cluster.list_all_nodes() if candidate.node_id == line.strip())
        cluster.remove_node(node, allow_graceful=False)
        cluster.add_node(**options)
        print("replaced", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
