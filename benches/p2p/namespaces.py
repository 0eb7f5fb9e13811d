"""P2P store between network namespaces with shaped links: bytes sent by each member, and time to completion.

    sudo python3 benches/p2p/namespaces.py [--receivers 8] [--mbit 200] [--mib 64] [--ranks] target/release/kvplane [CASE ...]

Cases: swarm, origin-killed, seed-killed, slow, late. Each has a source and receivers with a link of their own (tbf both
ways) on one bridge, and a control plane beside them. Bytes are the kernel's counters of the links; times are from the
start of the gets to the end of the last one, as each reports it. CPU use is printed too: the used fraction of the
processors' time, by the kernel's counters, and the seconds of each kind of process. Namespaces and processes are removed
at the end.
"""

import argparse
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

PREFIX = f"kvp{os.getpid() % 10000}"


def run(*words, check=True):
    return subprocess.run(words, check=check, capture_output=True, text=True).stdout


def processors():
    """Returns the seconds of all processors since the start: by kind of use, and in total."""
    names = ["user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal"]
    line = pathlib.Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    return {name: int(ticks) / os.sysconf("SC_CLK_TCK") for name, ticks in zip(names, line)}


def used(child):
    """Returns the CPU seconds of a process."""
    fields = pathlib.Path(f"/proc/{child.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Bed:
    """A bridge, and the namespaces of the control plane, the origin and the receivers."""

    def __init__(self, arguments, work):
        self.arguments, self.work, self.children = arguments, work, []
        run("ip", "netns", "add", f"{PREFIX}hub")
        self.hub("ip", "link", "add", "br0", "type", "bridge")
        self.hub("ip", "link", "set", "br0", "up")
        # A firewall on bridges would double the cost of each packet.
        for table in ["iptables", "ip6tables", "arptables"]:
            run("ip", "netns", "exec", f"{PREFIX}hub", "sysctl", "-qw", f"net.bridge.bridge-nf-call-{table}=0", check=False)
        self.add("ctl", 1, None)
        self.add("src", 2, arguments.mbit)
        for number in range(arguments.receivers + 1):
            slow = number == 0 and arguments.case == "slow"
            self.add(f"r{number}", 10 + number, arguments.mbit / 10 if slow else arguments.mbit)

    def hub(self, *words):
        return run("ip", "netns", "exec", f"{PREFIX}hub", *words)

    def add(self, name, address, mbit):
        space = f"{PREFIX}{name}"
        run("ip", "netns", "add", space)
        self.hub("ip", "link", "add", f"v{name}", "type", "veth", "peer", "name", "eth0", "netns", space)
        self.hub("ip", "link", "set", f"v{name}", "master", "br0", "up")
        inside = ["ip", "netns", "exec", space]
        run(*inside, "ip", "addr", "add", f"10.177.0.{address}/24", "dev", "eth0")
        run(*inside, "ip", "link", "set", "lo", "up")
        run(*inside, "ip", "link", "set", "eth0", "up")
        # Large segments would exceed the token bucket.
        run(*inside, "ip", "link", "set", "dev", "eth0", "gso_max_size", "16384", "gro_max_size", "16384", check=False)
        self.hub("ip", "link", "set", "dev", f"v{name}", "gso_max_size", "16384")
        if mbit:
            shape = ["root", "tbf", "rate", f"{mbit}mbit", "burst", "64kb", "latency", "30ms"]
            run(*inside, "tc", "qdisc", "add", "dev", "eth0", *shape)
            self.hub("tc", "qdisc", "add", "dev", f"v{name}", *shape)

    def start(self, name, *words):
        log = open(self.work / f"{name}.log", "w")
        command = ["ip", "netns", "exec", f"{PREFIX}{name}", str(self.arguments.binary), *map(str, words)]
        child = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        self.children.append(child)
        return child

    def sent(self, name):
        shown = json.loads(run("ip", "netns", "exec", f"{PREFIX}{name}", "ip", "-s", "-j", "link", "show", "eth0"))
        return shown[0]["stats64"]["tx"]["bytes"]

    def said(self, name, words, patience=120):
        until = time.monotonic() + patience
        while time.monotonic() < until:
            text = (self.work / f"{name}.log").read_text()
            if words in text:
                return True
            if all(child.poll() is not None for child in self.children):
                break
            time.sleep(0.005)
        raise SystemExit(f"{name} did not say {words!r}: {text!r}")

    def close(self):
        for child in self.children:
            if child.poll() is None:
                child.kill()
            child.wait()
        spaces = [line.split()[0] for line in run("ip", "netns", "list").splitlines() if line.startswith(PREFIX)]
        for space in spaces:
            run("ip", "netns", "del", space, check=False)


def measure(arguments, work):
    bed = Bed(arguments, work)
    try:
        return swarm(bed, arguments, work)
    finally:
        bed.close()


def swarm(bed, arguments, work):
    cert = [str(arguments.binary), "ctl", "--cluster", "bed", "cert"]
    authority, identity = work / "ca", work / "id"
    run(*cert, "init", "--authority", str(authority))
    for role in ["control", "client"]:
        run(*cert, "issue", role, "--authority", str(authority), "--out", str(identity))
    control = "10.177.0.1:7400"
    bed.start("ctl", "control", "--cluster", "bed", "--listen", control, "--identity", identity, "--state", work / "state")
    content = work / "object"
    content.write_bytes(os.urandom(arguments.mib << 20))
    size = arguments.mib << 20

    def p2p(name, address, action, *words):
        where = ["--cluster", "bed", "--control", control, "--identity", identity, "--no-shared-memory"]
        where += ["--listen", f"10.177.0.{address}:0", "--host", name]
        where += ["--runtime-directory", work / f"run-{name}"]
        return bed.start(name, "p2p", action, *words, *where)

    time.sleep(1)
    source = p2p("src", 2, "put", "o", content, "--shard", arguments.shard)
    bed.said("src", "serves")
    receivers = [f"r{number}" for number in range(arguments.receivers)]
    names = [*receivers, f"r{arguments.receivers}"]
    before = {name: bed.sent(name) for name in ["src", *names]}

    def get(name):
        number, words = int(name[1:]), ["--seed", "600"]
        # A late receiver is not one of the ranks.
        if arguments.ranks and number < arguments.receivers:
            words += ["--rank", number, "--ranks", arguments.receivers]
        return p2p(name, 10 + number, "get", "o", work / f"copy-{name}", *words)

    plane = bed.children[0]
    were, bench = processors(), time.process_time()
    before_plane, before_source = used(plane), used(source)
    start = time.monotonic()
    children = {name: get(name) for name in receivers}
    gone = None
    if arguments.case in ("origin-killed", "seed-killed"):
        if arguments.case == "origin-killed":
            while bed.sent("src") - before["src"] < 1.0 * size and time.monotonic() - start < 60:
                time.sleep(0.005)
            gone = source
        else:
            while bed.sent("r1") - before["r1"] < 0.5 * size and time.monotonic() - start < 60:
                time.sleep(0.005)
            gone = children["r1"]
            receivers.remove("r1")
        # The child is `ip netns exec`, which has executed the program.
        gone.send_signal(signal.SIGKILL)
    ends, counted = {}, [name for name in receivers if not (arguments.case == "slow" and name == "r0")]
    while len(ends) < len(receivers):
        for name in receivers:
            if name not in ends and "has \"o\"" in (work / f"{name}.log").read_text():
                ends[name] = time.monotonic() - start
            elif children[name].poll() is not None and name not in ends:
                raise SystemExit(f"{name} ended: {(work / f'{name}.log').read_text()!r}")
        if time.monotonic() - start > 300:
            raise SystemExit(f"{sorted(set(receivers) - set(ends))} are not done after 300 s")
        # This script shares the processors with the measured processes.
        time.sleep(0.02)
    # The CPU time of killed processes is unknown.
    running = [child for child in children.values() if child.poll() is None]
    spent = {name: is_now - were[name] for name, is_now in processors().items()}
    idle = spent["idle"] + spent["iowait"]
    cpu = {
        "busy": round(1 - idle / sum(spent.values()), 2),
        "iowait": round(spent["iowait"], 2),
        "softirq": round(spent["softirq"], 2),
        "system": round(spent["system"], 2),
        "user": round(spent["user"] + spent["nice"], 2),
        "control_plane": round(used(plane) - before_plane, 2),
        "receivers": round(sum(map(used, running)), 2),
        "bench": round(time.process_time() - bench, 2),
    }
    if source.poll() is None:
        cpu["source"] = round(used(source) - before_source, 2)
    sent = {name: (bed.sent(name) - before[name]) / size for name in before}
    alone = size * 8 / (arguments.mbit * 1e6)
    result = {
        "case": arguments.case,
        "receivers": arguments.receivers,
        "ranks": arguments.ranks,
        "seconds": round(max(ends[name] for name in counted), 3),
        "beside_the_fluid_bound": round(max(ends[name] for name in counted) / alone, 3),
        "origin_sent": round(sent["src"], 3),
        "most_sent_by_a_receiver": round(max(sent[name] for name in receivers), 3),
        "first_seconds": round(min(ends[name] for name in counted), 3),
        "processors": cpu,
    }
    if arguments.case == "late":
        late = names[-1]
        start = time.monotonic()
        get(late)
        bed.said(late, "has \"o\"")
        result["late_beside_its_link"] = round((time.monotonic() - start) / alone, 3)
    for name in receivers:
        if (work / f"copy-{name}" / "object").read_bytes() != content.read_bytes():
            raise SystemExit(f"{name} has other bytes")
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("binary", type=pathlib.Path)
    parser.add_argument("cases", nargs="*", default=["swarm"], metavar="CASE")
    parser.add_argument("--receivers", type=int, default=8)
    parser.add_argument("--mbit", type=float, default=200)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--shard", default="256KiB")
    parser.add_argument("--ranks", action="store_true", help="receivers are ranks of a job: a static schedule")
    parser.add_argument("--keep", action="store_true", help="keep the logs")
    arguments = parser.parse_args()
    # Namespaces are removed on SIGTERM too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    arguments.binary = arguments.binary.resolve()
    for case in arguments.cases:
        arguments.case = case
        work = pathlib.Path(tempfile.mkdtemp(prefix="kvplane-p2p-"))
        try:
            print(json.dumps(measure(arguments, work)), flush=True)
        finally:
            if arguments.keep:
                print(work, file=sys.stderr)
            else:
                shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
