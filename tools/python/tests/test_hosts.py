"""Several hosts, simulated by network namespaces. Skipped where namespaces cannot be created."""

import os
import shutil
import subprocess
import sys
import tempfile
import unittest

#: Runs in its own namespace, which is host a; creates host b and starts a control plane on a.
TWO_HOSTS = r"""
import os, pathlib, subprocess, sys, time
place, binary = pathlib.Path(sys.argv[1]), os.environ["KVPLANE_BINARY"]
def run(*words):
    subprocess.run(list(map(str, words)), check=True, stdout=subprocess.DEVNULL)
run("ip", "link", "set", "lo", "up")
host_b = subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
while os.readlink(f"/proc/{host_b.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
    time.sleep(0.01)
on_b = ["nsenter", "-t", str(host_b.pid), "-n"]
run("ip", "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", host_b.pid)
for where, addresses in (([], ["10.79.9.1/24"]), (on_b, ["10.79.9.2/24", "10.79.9.3/24"])):
    for address in addresses:
        run(*where, "ip", "address", "add", address, "dev", "cable")
    run(*where, "ip", "link", "set", "cable", "up")
    run(*where, "ip", "link", "set", "lo", "up")
def environment(name, certificates=True):
    directory = place / name
    directory.mkdir(mode=0o700, exist_ok=True)
    more = {"XDG_RUNTIME_DIR": str(directory)}
    if certificates:
        more["KVPLANE_CERTS"] = str(place / "certificates")
    return dict({key: value for key, value in os.environ.items() if key != "KVPLANE_CERTS"}, **more)
control = subprocess.Popen([binary, "control", "--cluster", "kvplane", "--listen", "10.79.9.1:50051", "--state",
    place / "state", "--http", "127.0.0.1:0"], env=environment("control", False), stdout=subprocess.PIPE,
    stderr=subprocess.DEVNULL, text=True)
while "control plane of" not in control.stdout.readline():
    assert control.poll() is None
for role in ("node", "client"):
    run(binary, "ctl", "cert", "issue", "--authority", place / "state", "--cluster", "kvplane", "--out",
        place / "certificates", role)
MEMBER = '''
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup(sys.argv[1], "P2PHANDSHAKE", 32 << 20, 16 << 20, "tcp", "", "10.79.9.1:50051")
print(code, store.get_hostname() or "nobody", flush=True)
sys.stdin.read()
'''
def member(host, certificates=True):
    started = subprocess.Popen([*on_b, sys.executable, "-c", MEMBER, host], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, env=environment("host-b", certificates), text=True)
    return started, *started.stdout.readline().split()
stranger, code, _ = member("10.79.9.2", False)
print("without certificates", code)
listening = subprocess.run([*on_b, "ss", "-Hltn"], capture_output=True, text=True).stdout
print("listening:", listening.strip() or "nobody")
members = [member("10.79.9.3"), member("localhost"), member("10.79.9.1")]
print(*(f"{code} {name.rsplit(':')[0]}" for _, code, name in members))
os.environ.update(environment("host-a"))
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup("10.79.9.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", "10.79.9.1:50051") == 0
keys = [f"far-{index}" for index in range(64)]
# Sockets in the file system do not reach another host.
import kvplane
with kvplane.Store("10.79.9.1:50051", shared_memory=False) as far:
    far.put_many({key: key.encode() for key in keys})
    print(far.get_many(keys) == [key.encode() for key in keys])
run(binary, "ctl", "cert", "issue", "--authority", place / "state", "--cluster", "kvplane", "--out",
    place / "of-acme", "--tenant", "acme", "client")
with kvplane.Store("10.79.9.1:50051", certificates=str(place / "of-acme"), shared_memory=False) as acme:
    acme.put("own", b"of acme")
    print(acme.get("own"), acme.size("own"), acme.exists("own"), acme.exists_many(["own", "none", keys[0]]))
found = {store.get_replica_desc(key)[0].get_memory_descriptor().buffer_descriptor.transport_endpoint for key in keys}
print(found == {name for _, _, name in members})
store.close()
for process in (stranger, *(started for started, *_ in members), host_b):
    process.stdin.close()
    process.wait()
control.terminate()
control.wait()
"""

#: Runs in a namespace whose only name server never answers.
NO_NAMES = r"""
import pathlib, socket, subprocess, sys
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
silent = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
silent.bind(("127.0.0.1", 53))
conf = pathlib.Path(sys.argv[1]) / "resolv.conf"
conf.write_text("nameserver 127.0.0.1\noptions timeout:5 attempts:3\n")
subprocess.run(["mount", "--bind", conf, "/etc/resolv.conf"], check=True)
from mooncake.store import MooncakeDistributedStore
print(MooncakeDistributedStore().setup("h", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", "kv-master.cluster.internal:50051"))
import kvplane.p2p
try:
    kvplane.p2p.ObjectStore("kv-master.cluster.internal:50051")
except ConnectionError as error:
    print("within" in str(error))
"""


class Hosts(unittest.TestCase):
    """Features that work on one host work between two."""

    def setUp(self):
        programs = [name for name in ("ip", "unshare", "nsenter", "ss", "mount") if shutil.which(name) is None]
        if os.getuid() != 0 or programs:
            self.skipTest(f"needs root, and {', '.join(programs) or 'nothing else'}")
        made = subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True, check=False)
        if made.returncode:
            self.skipTest(f"no namespaces: {made.stderr.decode().strip()}")
        directory = tempfile.TemporaryDirectory(prefix="kvplane-hosts-")
        self.addCleanup(directory.cleanup)
        self.place = directory.name

    def run_in(self, unshare, script):
        """Runs a script in new namespaces; returns its standard output and standard error."""
        path = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
        command = ["unshare", *unshare, "--fork", "--kill-child", sys.executable, "-c", script, self.place]
        done = subprocess.run(command, env=path, capture_output=True, text=True, timeout=120, check=False)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return done.stdout.strip().split("\n"), done.stderr

    def test_memory_of_another_host(self):
        lines, problems = self.run_in(["--net", "--pid", "--mount-proc"], TWO_HOSTS)
        self.assertEqual(lines[:2], ["without certificates -900", "listening: nobody"])
        self.assertEqual(lines[2:], ["0 10.79.9.3 0 10.79.9.2 0 10.79.9.2", "True",
                                     "b'of acme' 7 True [True, False, False]", "True"])
        self.assertIn("KVPLANE_CERTS", problems)

    def test_a_name_server_that_is_silent(self):
        lines, problems = self.run_in(["--net", "--mount", "--pid", "--mount-proc"], NO_NAMES)
        self.assertEqual(lines, ["-900", "True"])
        self.assertIn("kv-master.cluster.internal:50051 did not answer within 4.5 s", problems)


if __name__ == "__main__":
    unittest.main()
