"""Objects replicated on two nodes, through Mooncake's interface."""

import os
import subprocess
import tempfile
import time
import unittest

import kvplane
from mooncake.store import MooncakeDistributedStore, ReplicateConfig

_LONGEST_S = 60


class Replicas(unittest.TestCase):
    """A control plane with replication factor two, and two nodes."""

    def setUp(self):
        directory = tempfile.TemporaryDirectory(prefix="kvplane-python-")
        self.addCleanup(directory.cleanup)
        before = os.environ.get("XDG_RUNTIME_DIR")
        self.addCleanup(
            lambda: os.environ.pop("XDG_RUNTIME_DIR") if before is None else os.environ.update(XDG_RUNTIME_DIR=before)
        )
        os.environ["XDG_RUNTIME_DIR"] = directory.name
        state = os.path.join(directory.name, "state")
        self.start("control plane of", "control", "--cluster", "dev", "--replicas", "2", "--state", state)
        for number in (1, 2):
            self.start(f"node {number} with", "node", "--cluster", "dev", "--node-id", str(number), "--pool", "64m")
        self.store = MooncakeDistributedStore()
        self.addCleanup(self.store.close)
        self.assertEqual(self.store.setup("localhost", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", ""), 0)

    def start(self, until, *words):
        command = [os.environ["KVPLANE_BINARY"], *words]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        for line in process.stdout:
            if until in line:
                return
        self.fail(f"kvplane {words[0]} ended with {process.wait()}")

    def ends(self, key):
        described = self.store.get_replica_desc(key)
        return [one.get_memory_descriptor().buffer_descriptor.transport_endpoint for one in described]

    def put_twice(self, key):
        """Puts until two nodes hold the object: a first put may come before the nodes know each other."""
        config = ReplicateConfig()
        config.replica_num = 2
        until = time.monotonic() + _LONGEST_S
        while time.monotonic() < until:
            self.assertEqual(self.store.upsert(key, key.encode(), config), 0)
            ends = self.ends(key)
            if len(ends) == 2:
                return ends
        self.fail(f"{key} has one copy")

    def test_a_segment_is_cleared_of_second_replicas_and_of_only_ones(self):
        keys = [f"twice-{index}" for index in range(20)]
        ends = {key: self.put_twice(key) for key in keys}
        segments = sorted({end for both in ends.values() for end in both})
        self.assertEqual(len(segments), 2)
        there = segments[0]
        second = [key for key in keys if ends[key][1] == there]
        self.assertTrue(second)
        self.assertEqual(self.store.batch_replica_clear([*keys, "nowhere"], there), second)
        for key in keys:
            self.assertEqual(self.store.get(key), key.encode())
            self.assertEqual(self.ends(key), ends[key][:1] if key in second else ends[key])
        # Once more: the replicas left on this node are first replicas, and stay.
        self.assertEqual(self.store.batch_replica_clear(keys, there), [])
        # Clearing the only replica removes the object.
        other = segments[1]
        alone = [key for key in keys if self.ends(key) == [other]]
        self.assertEqual(sorted(alone), sorted(second))
        self.assertEqual(self.store.batch_replica_clear(second, other), second)
        self.assertEqual([self.store.is_exist(key) for key in second], [0] * len(second))
        self.assertEqual(sorted(self.store.batch_replica_clear(keys)), sorted(set(keys) - set(second)))
        with kvplane.Store(cluster="dev") as store:
            self.assertEqual(store.exists_many(keys), [False] * len(keys))


if __name__ == "__main__":
    unittest.main()
