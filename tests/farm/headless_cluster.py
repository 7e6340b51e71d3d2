"""A cluster of two nodes in a process of its own, whose head dies at a word. Run as a script by `test_head`; tests nothing.

A process that has a call of Ray's on its way to a head that died is ended by Ray after 60 s: it must not be the one that tests.
"""

import os
import sys

from ray.cluster_utils import Cluster

if __name__ == "__main__":
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "resources": {"class_head": 1}})
    cluster.add_node(num_cpus=1, resources={"class_cpu": 1}, object_store_memory=80 << 20)
    cluster.wait_for_nodes()
    print(f"at {cluster.address}", flush=True)
    if sys.stdin.readline().strip() == "kill the head":
        cluster.head_node.kill_gcs_server(check_alive=False)
        print("killed", flush=True)
        sys.stdin.read()
    for node in (*cluster.worker_nodes, cluster.head_node):
        node.kill_all_processes(check_alive=False, allow_graceful=False)
    os._exit(0)  # Ray would look for the head once more
