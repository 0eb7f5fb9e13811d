"""Stand-in for the native classes of process groups, for tests of the Python layer above them.

One process (`python fake_groups.py control --listen HOST:PORT`) has the membership of all worlds and computes all
collectives; the members send it their arrays. A process is alive while its connection is. The semantics are those of
`kvplane._native`: views with epochs, joiners, changes of the view, ranks that fail while a collective runs. `install`
puts the classes in the native module's place.
"""

import argparse
import ctypes
import pickle
import queue
import socket
import struct
import sys
import threading
import time

FORMATS = {"u8": "B", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "f16": "e", "f32": "f", "f64": "d", "bool": "?"}
SIZES = {"u8": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "f16": 2, "bf16": 2, "f32": 4, "f64": 8, "bool": 1}
INVALID, NOT_FOUND, CONFLICT, UNREACHABLE, TIMEOUT, MISMATCH, EXCLUDED, CLOSED = -600, -704, -705, -900, -901, -1800, -1801, -1
_LONGEST_S = 60


def unpack(kind, data):
    """Numbers of a type."""
    if kind == "bf16":
        words = struct.unpack(f"<{len(data) // 2}H", data)
        return [struct.unpack("<f", struct.pack("<I", word << 16))[0] for word in words]
    return list(struct.unpack(f"<{len(data) // SIZES[kind]}{FORMATS[kind]}", data))


def pack(kind, numbers):
    """Bytes of numbers of a type; integers wrap around."""
    if kind == "bf16":
        out = b""
        for number in numbers:
            bits = struct.unpack("<I", struct.pack("<f", number))[0]
            out += struct.pack("<H", (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)
        return out
    if kind[0] in "iu":
        bits = SIZES[kind] * 8
        low = 1 << (bits - 1) if kind[0] == "i" else 0
        numbers = [(int(number) + low) % (1 << bits) - low for number in numbers]
    return struct.pack(f"<{len(numbers)}{FORMATS[kind]}", *numbers)


def combine(kind, reduction, several):
    """Reduction of arrays of one type, as bytes."""
    columns = zip(*(unpack(kind, data) for data in several))
    done = []
    for column in columns:
        value = column[0]
        for other in column[1:]:
            if reduction in ("sum", "avg"):
                value = value + other
            elif reduction == "product":
                value = value * other
            elif reduction == "min":
                value = min(value, other)
            elif reduction == "max":
                value = max(value, other)
            else:
                value = {"and": value & other, "or": value | other, "xor": value ^ other}[reduction]
        if reduction == "avg":
            value = value / len(several) if kind[-2:] in ("16", "32", "64") and kind[0] in "fb" else value // len(several)
        done.append(value)
    return pack(kind, done)


def receive(connection):
    """Next message of a connection; None at its end."""
    head = b""
    while len(head) < 8:
        more = connection.recv(8 - len(head))
        if not more:
            return None
        head += more
    left, parts = int.from_bytes(head, "little"), []
    while left:
        more = connection.recv(min(left, 1 << 20))
        if not more:
            return None
        parts.append(more)
        left -= len(more)
    return pickle.loads(b"".join(parts))


def send(connection, message):
    """Sends a message."""
    data = pickle.dumps(message)
    connection.sendall(len(data).to_bytes(8, "little") + data)


class Failure(Exception):
    """An error for the caller: code, message, ranks."""


class Group:
    """A group, at the server."""

    def __init__(self, world, number, name, order, most, mode):
        self.world, self.number, self.name, self.order = world, number, name, list(order)
        self.most, self.mode, self.epoch = most, mode, 0
        self.states = ["absent"] * most
        self.participants = set()
        #: Process by rank, and its collectives that wait, oldest first: (request, operation).
        self.processes = {}
        self.waiting = {rank: [] for rank in range(most)}
        #: Sends and receives that wait, by source, target and tag; receives from any source have None.
        self.messages = {}
        self.proposals = []
        #: Members that were active when the operation in flight was begun.
        self.began = None
        self.unsynced = set()

    def status(self):
        alive = [rank in self.processes and self.processes[rank].alive for rank in range(self.most)]
        return self.number, self.epoch, list(self.states), sorted(self.participants), alive

    def change(self, participants):
        """The next view."""
        if participants != self.participants or not self.epoch:
            self.participants = participants
            self.epoch += 1

    def active(self):
        return {rank for rank, state in enumerate(self.states) if state == "active"}

    def publish(self):
        for process in set(self.processes.values()):
            process.tell(("status", *self.status()))

    def lose(self, rank, process):
        """The process of a rank is gone."""
        if self.processes.get(rank) is not process:
            return
        self.waiting[rank] = []
        if self.states[rank] != "active" or self.mode == "automatic":
            self.states[rank] = "absent"
        elif self.states[rank] == "active":
            self.unsynced.add(rank)
        self.change(self.participants - {rank})

    def settle(self):
        """Ends everything that can end now."""
        self.decide()
        self.publish()
        while self.run():
            pass
        self.exchange()

    def decide(self):
        """Proposals whose ranks are ready, and members that have joined."""
        for proposal in list(self.proposals):
            process, request, kind, ranks, until = proposal
            reply = None
            if kind == "join":
                if self.states[ranks[0]] == "active":
                    reply = None, None
                elif time.monotonic() > until:
                    reply = None, (TIMEOUT, "no member has activated this rank", [])
            else:
                unready = [rank for rank in ranks if not self.is_ready(rank)]
                if not unready:
                    for rank in ranks:
                        self.states[rank] = "active"
                    self.change(self.participants | set(ranks))
                    reply = ("applied", self.epoch, [], ""), None
                elif time.monotonic() > until:
                    reply = ("rejected", self.epoch, [], f"ranks {unready} are not ready"), None
            if reply is not None:
                self.proposals.remove(proposal)
                self.publish()
                process.tell(("reply", request, *reply))

    def is_ready(self, rank):
        process = self.processes.get(rank)
        return process is not None and process.alive and self.states[rank] in ("awaiting", "active")

    def run(self):
        """Runs the next collective, if all participants have begun it."""
        heads = {rank: self.waiting[rank][0] for rank in self.participants if self.waiting[rank]}
        if heads and self.began is None:
            self.began = self.active()
        if not heads or set(heads) != self.participants:
            return False
        failed = sorted(self.began - self.participants)
        self.began = None
        for rank in heads:
            self.waiting[rank].pop(0)
        first = min(heads)
        differing = [rank for rank in heads if heads[rank][1]["key"] != heads[first][1]["key"]]
        if differing:
            what = f"ranks {differing} began {heads[differing[0]][1]['key']}, not rank {first}'s {heads[first][1]['key']}"
            for rank, (request, _) in heads.items():
                self.processes[rank].tell(("reply", request, None, (MISMATCH, what, differing)))
            return True
        given = {rank: operation for rank, (_, operation) in heads.items()}
        root = given[first].get("root", first)
        failed = sorted({*failed, root} - self.participants)
        try:
            results = compute(given, max(self.participants) + 1)
        except Failure as failure:
            for rank, (request, _) in heads.items():
                self.processes[rank].tell(("reply", request, None, failure.args))
            return True
        for rank, (request, _) in heads.items():
            self.processes[rank].tell(("reply", request, (results[rank], failed, self.epoch), None))
        return True

    def alone(self, rank, request, operation):
        """A collective of a member that has not joined: it is its own participant."""
        operation = dict(operation, root=rank if "root" in operation else None)
        result = compute({rank: operation}, operation["size"])[rank]
        self.processes[rank].tell(("reply", request, (result, [], self.epoch), None))

    def exchange(self):
        """Pairs of a send and a receive, and those whose peer is gone."""
        for (source, target, tag), (sends, receives) in self.messages.items():
            from_any = self.messages.get((None, target, tag), ((), []))[1]
            while sends and (receives or from_any):
                (one, data), (other, size) = sends.pop(0), (receives or from_any).pop(0)
                failure, result = None, (data, [], self.epoch)
                if data["key"] != size["key"]:
                    what = f"rank {source} sent {data['key']}, and rank {target} receives {size['key']}"
                    failure, result = (MISMATCH, what, [source]), None
                else:
                    result = ([(0, data["data"])], [], self.epoch, source)
                self.processes[source].tell(("reply", one, result and ([], [], self.epoch, target), failure))
                self.processes[target].tell(("reply", other, result, failure))
            for waiting, own, peer in ((sends, source, target), (receives, target, source)):
                if peer is not None and peer not in self.participants:
                    for request, _ in waiting:
                        self.processes[own].tell(("reply", request, ([], [peer], self.epoch), None))
                    waiting.clear()

    def expire(self, now):
        for rank, several in self.waiting.items():
            for entry in list(several):
                request, operation = entry
                if now > operation["until"]:
                    several.remove(entry)
                    missing = sorted(one for one in self.participants if not self.waiting[one] and one != rank)
                    what = f"ranks {missing} have not begun it by the deadline"
                    self.processes[rank].tell(("reply", request, None, (TIMEOUT, what, missing)))
        for (source, target, _), both in self.messages.items():
            for several, own, peer in ((both[0], source, target), (both[1], target, source)):
                for entry in list(several):
                    if now > entry[1]["until"]:
                        several.remove(entry)
                        awaited = [] if peer is None else [peer]
                        what = f"ranks {awaited} have no counterpart by the deadline"
                        self.processes[own].tell(("reply", entry[0], None, (TIMEOUT, what, awaited)))
        self.decide()


def compute(given, size):
    """Results by rank: lists of (offset in the target, bytes)."""
    one = next(iter(given.values()))
    kind, name, count = one.get("type"), one["name"], one.get("count", 0)
    step = count * SIZES.get(kind, 1)
    ranks = sorted(given)
    results = {rank: [] for rank in ranks}
    if name in ("all_reduce", "reduce"):
        done = combine(kind, one["reduction"], [given[rank]["data"] for rank in ranks])
        for rank in ranks:
            results[rank] = [(0, done)] if name == "all_reduce" or rank == one["root"] else []
    elif name in ("broadcast", "scatter") and one["root"] not in given:
        # The root's array is lost with it: the root is among the ranks that failed.
        pass
    elif name == "broadcast":
        for rank in ranks:
            results[rank] = [] if rank == one["root"] else [(0, given[one["root"]]["data"])]
    elif name in ("all_gather", "gather"):
        parts = [(rank * step, given[rank]["data"]) for rank in ranks]
        for rank in ranks:
            results[rank] = parts if name == "all_gather" or rank == one["root"] else []
    elif name == "scatter":
        data = given[one["root"]]["data"]
        for rank in ranks:
            results[rank] = [(0, data[rank * step : (rank + 1) * step])]
    elif name == "reduce_scatter":
        done = combine(kind, one["reduction"], [given[rank]["data"] for rank in ranks])
        for rank in ranks:
            # A rank that is alone has the only part that there is room for.
            results[rank] = [(0, done[rank * step : (rank + 1) * step])]
    elif name == "all_to_all":
        item = SIZES[kind]
        for to in ranks:
            for of in ranks:
                if max(to, of) >= min(len(given[of]["to"]), len(given[to]["of"])):
                    # A rank began when the group had not grown to the other one.
                    continue
                begin = sum(given[of]["to"][:to]) * item
                data = given[of]["data"][begin : begin + given[of]["to"][to] * item]
                if given[to]["of"][of] * item != len(data):
                    what = f"rank {of} sends {len(data) // item} elements to rank {to}, which expects {given[to]['of'][of]}"
                    raise Failure(MISMATCH, what, [of])
                results[to].append((sum(given[to]["of"][:of]) * item, data))
    return results


class Process:
    """A connected process, at the server."""

    def __init__(self, server, connection):
        self.server, self.connection = server, connection
        self.alive, self.world, self.rank = True, None, None
        self.outgoing = queue.Queue()
        threading.Thread(target=self.write, daemon=True).start()

    def tell(self, message):
        self.outgoing.put(message)

    def write(self):
        while True:
            message = self.outgoing.get()
            if message is None:
                return
            try:
                send(self.connection, message)
            except OSError:
                return

    def serve(self):
        try:
            while True:
                message = receive(self.connection)
                if message is None:
                    break
                with self.server.lock:
                    request, name, arguments = message
                    try:
                        reply = getattr(self, name)(request, *arguments)
                    except Failure as failure:
                        self.tell(("reply", request, None, failure.args))
                        continue
                    if reply is not NotImplemented:
                        self.tell(("reply", request, reply, None))
        except OSError:
            pass
        with self.server.lock:
            self.end()

    def end(self):
        if not self.alive:
            return
        self.alive = False
        for group in [group for group in self.server.groups.values() if group.world == self.world]:
            for rank, process in list(group.processes.items()):
                if process is self:
                    group.lose(rank, self)
            group.settle()
        self.outgoing.put(None)

    def register(self, _, world, rank):
        key = (world, rank)
        other = self.server.processes.get(key)
        if other is not None and other.alive:
            raise Failure(CONFLICT, f"rank {rank} has a live process already; it has to end first", [rank])
        self.world, self.rank = world, rank
        self.server.processes[key] = self

    def unregister(self, request):
        self.tell(("reply", request, None, None))
        self.end()
        return NotImplemented

    def attach(self, request, name, order, most, mode, joining):
        same = [one for one in self.server.groups.values() if (one.world, one.name) == (self.world, name)]
        found = [one for one in same if one.order == order[: len(one.order)] if joining or one.order == order]
        if joining and not found:
            raise Failure(NOT_FOUND, "no group has this name and a beginning of these members to be joined", [])
        if any((one.most, one.mode) != (most, mode) for one in found):
            raise Failure(MISMATCH, "the group has this name, and another size or failure mode", [])
        if not found and same:
            raise Failure(MISMATCH, f"the group has this name, and another order, {same[0].order}", [])
        group = found[0] if found else None
        if group is None:
            self.server.numbers += 1
            group = Group(self.world, self.server.numbers, name, order, most, mode)
            self.server.groups[group.number] = group
        group.order = list(order) if len(order) > len(group.order) else group.order
        rank = order.index(self.rank)
        group.processes[rank] = self
        if group.states[rank] != "active":
            group.states[rank] = "inactive"
        if not group.epoch and all(one in group.processes for one in range(len(group.order))):
            for one in range(len(group.order)):
                group.states[one] = "active"
            group.change(set(range(len(group.order))))
        group.publish()
        self.tell(("reply", request, (group.number, rank), None))
        group.settle()
        return NotImplemented

    def collective(self, request, number, operation):
        group = self.server.groups[number]
        rank = next(rank for rank, process in group.processes.items() if process is self)
        operation["until"] = time.monotonic() + operation["deadline"]
        if operation["alone"]:
            group.alone(rank, request, operation)
        elif group.epoch and rank not in group.participants:
            raise Failure(EXCLUDED, f"rank {rank} is no participant of the group's view", [rank])
        else:
            group.waiting[rank].append((request, operation))
            group.settle()
        return NotImplemented

    def message(self, request, number, source, target, tag, operation):
        group = self.server.groups[number]
        operation["until"] = time.monotonic() + operation["deadline"]
        both = group.messages.setdefault((source, target, tag), ([], []))
        rank = next(rank for rank, process in group.processes.items() if process is self)
        both[0 if rank == source else 1].append((request, operation))
        group.settle()
        return NotImplemented

    def join(self, request, number, deadline):
        group = self.server.groups[number]
        rank = next(rank for rank, process in group.processes.items() if process is self)
        if group.states[rank] != "active":
            group.states[rank] = "awaiting"
        group.proposals.append((self, request, "join", [rank], time.monotonic() + deadline))
        group.settle()
        return NotImplemented

    def propose(self, request, number, activate, ranks, deadline):
        group = self.server.groups[number]
        if activate:
            group.proposals.append((self, request, "activate", ranks, time.monotonic() + deadline))
            group.settle()
            return NotImplemented
        if not group.active() - set(ranks):
            return "rejected", group.epoch, [], "no member would be left"
        for rank in ranks:
            group.unsynced.discard(rank)
            if group.states[rank] == "active":
                group.states[rank] = "inactive" if self.server.is_alive(group, rank) else "absent"
        before = group.participants
        group.change(before - set(ranks))
        group.publish()
        self.tell(("reply", request, ("applied", group.epoch, [], ""), None))
        group.settle()
        return NotImplemented

    def sync(self, request, number, _):
        group = self.server.groups[number]
        had, group.unsynced = group.unsynced, set()
        if group.mode == "deferred":
            for rank in had:
                group.states[rank] = "absent"
            group.epoch += bool(had)
        group.publish()
        self.tell(("reply", request, ("reconciled" if had else "none_pending", ""), None))
        return NotImplemented

    def detach(self, request, number):
        group = self.server.groups[number]
        for rank, process in list(group.processes.items()):
            if process is self:
                del group.processes[rank]
                group.waiting[rank] = []
                group.states[rank] = "absent"
                group.change(group.participants - {rank})
        if not group.processes:
            del self.server.groups[number]
        self.tell(("reply", request, None, None))
        group.settle()
        return NotImplemented


class Server:
    """Membership and collectives of all worlds."""

    def __init__(self, listen, idle):
        host, _, port = listen.rpartition(":")
        self.listener = socket.create_server((host, int(port)))
        self.lock = threading.RLock()
        self.processes, self.groups, self.numbers = {}, {}, 0
        self.idle, self.seen = idle, time.monotonic()

    def is_alive(self, group, rank):
        process = group.processes.get(rank)
        return process is not None and process.alive

    def run(self):
        host, port = self.listener.getsockname()
        print(f"control plane of fake on {host}:{port}", flush=True)
        print("ready", flush=True)
        self.listener.settimeout(0.02)
        while True:
            with self.lock:
                now = time.monotonic()
                for group in list(self.groups.values()):
                    group.expire(now)
                if any(process.alive for process in self.processes.values()):
                    self.seen = now
                if now - self.seen > self.idle:
                    return
            try:
                connection, _ = self.listener.accept()
            except socket.timeout:
                continue
            connection.settimeout(None)
            process = Process(self, connection)
            threading.Thread(target=process.serve, daemon=True).start()


class GroupProcess:
    """As `kvplane._native.GroupProcess`."""

    def __init__(self, control, world, rank, host=None, **more):
        del host, more
        if control is None:
            raise RuntimeError(UNREACHABLE, "no control plane of this user runs on this host", [])
        name, _, port = control.rpartition(":")
        try:
            self.connection = socket.create_connection((name, int(port)), timeout=5)
        except OSError as problem:
            raise RuntimeError(UNREACHABLE, f"{control}: {problem}", []) from None
        self.connection.settimeout(None)
        self.lock, self.number = threading.Lock(), 0
        self.replies, self.groups = {}, {}
        self.is_closed = False
        threading.Thread(target=self.read, daemon=True).start()
        try:
            self.call("register", world, rank)
        except RuntimeError:
            self.close()
            raise

    def read(self):
        try:
            while True:
                message = receive(self.connection)
                if message is None:
                    break
                if message[0] == "status":
                    number, *status = message[1:]
                    self.groups[number] = status
                else:
                    _, request, result, failure = message
                    self.replies.pop(request)(result, failure)
        except OSError:
            pass
        for ended in list(self.replies.values()):
            ended(None, (UNREACHABLE, "the stand-in of the control plane is gone", []))

    def start(self, ended, name, *arguments):
        with self.lock:
            if self.is_closed:
                raise RuntimeError(CLOSED, "closed", [])
            self.number += 1
            self.replies[self.number] = ended
            try:
                send(self.connection, (self.number, name, arguments))
            except OSError:
                raise RuntimeError(UNREACHABLE, "the stand-in of the control plane is gone", []) from None

    def call(self, name, *arguments):
        done, found = threading.Event(), []

        def ended(result, failure):
            found.extend((result, failure))
            done.set()

        self.start(ended, name, *arguments)
        if not done.wait(_LONGEST_S):
            raise RuntimeError(TIMEOUT, f"{name} has no answer", [])
        if found[1] is not None:
            raise RuntimeError(*found[1])
        return found[0]

    def attach(self, name, order, max_size, failure_mode, joining):
        number, rank = self.call("attach", name, list(order), max_size, failure_mode, joining)
        return ProcessGroup(self, number, rank, name, max_size, len(order), joining)

    def close(self):
        if not self.is_closed:
            try:
                self.call("unregister")
            except RuntimeError:
                pass
            self.is_closed = True
            # A reader is in a call, which closing alone does not end.
            try:
                self.connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            self.connection.close()


class ProcessGroup:
    """As `kvplane._native.ProcessGroup`."""

    def __init__(self, process, number, rank, name, max_size, declared, joining):
        self.process, self.number, self.rank, self.name = process, number, rank, name
        self.max_size, self.declared, self.is_alone = max_size, declared, joining

    def status(self):
        return self.process.groups[self.number]

    @property
    def epoch(self):
        return self.status()[0]

    def size(self):
        states = self.status()[1]
        if self.is_alone and states[self.rank] != "active" or "active" not in states:
            return self.declared
        return max(rank for rank, state in enumerate(states) if state == "active") + 1

    def active(self):
        if self.is_alone and self.status()[1][self.rank] != "active":
            return [rank == self.rank for rank in range(self.max_size)]
        return [rank in self.status()[2] for rank in range(self.max_size)]

    def member_states(self):
        return list(self.status()[1])

    def peer_states(self):
        return list(self.status()[3])

    def begin(self, name, target, deadline, data=b"", **given):
        work = Work(self, target)
        alone = self.is_alone and self.status()[1][self.rank] != "active"
        names = ("count", "type", "reduction", "root")
        key = (name, *(given[one] for one in names if one in given))
        operation = dict(given, name=name, data=data, deadline=deadline, alone=alone, key=key, size=self.size())
        self.process.start(work.ended, "collective", self.number, operation)
        return work

    @staticmethod
    def read(address, count, data_type):
        return ctypes.string_at(address, count * SIZES[data_type]) if count and address else b""

    def all_reduce(self, address, count, data_type, reduction, deadline):
        data = self.read(address, count, data_type)
        return self.begin("all_reduce", address, deadline, data, count=count, type=data_type, reduction=reduction)

    def reduce(self, address, count, data_type, reduction, root, deadline):
        data = self.read(address, count, data_type)
        given = {"count": count, "type": data_type, "reduction": reduction, "root": root}
        return self.begin("reduce", address, deadline, data, **given)

    def broadcast(self, address, count, data_type, root, deadline):
        data = self.read(address, count, data_type)
        return self.begin("broadcast", address, deadline, data, count=count, type=data_type, root=root)

    def all_gather(self, source, target, count, parts, data_type, deadline):
        return self.begin("all_gather", target, deadline, self.read(source, count, data_type), count=count, type=data_type)

    def gather(self, source, target, count, parts, data_type, root, deadline):
        data = self.read(source, count, data_type)
        return self.begin("gather", target, deadline, data, count=count, type=data_type, root=root)

    def scatter(self, source, target, count, parts, data_type, root, deadline):
        data = self.read(source, count * self.size(), data_type)
        return self.begin("scatter", target, deadline, data, count=count, type=data_type, root=root)

    def reduce_scatter(self, source, target, count, parts, data_type, reduction, deadline):
        data = self.read(source, count * self.size(), data_type)
        return self.begin("reduce_scatter", target, deadline, data, count=count, type=data_type, reduction=reduction)

    def all_to_all(self, source, target, source_counts, target_counts, data_type, deadline):
        data = self.read(source, sum(source_counts), data_type)
        given = {"type": data_type, "to": list(source_counts), "of": list(target_counts)}
        return self.begin("all_to_all", target, deadline, data, **given)

    def barrier(self, deadline):
        return self.begin("barrier", 0, deadline)

    def exchange(self, source, target, tag, address, deadline, **given):
        work = Work(self, address)
        operation = dict(given, key=(given["count"], given["type"]), deadline=deadline)
        self.process.start(work.ended, "message", self.number, source, target, tag, operation)
        return work

    def send(self, address, count, data_type, peer, tag, deadline):
        data = self.read(address, count, data_type)
        return self.exchange(self.rank, peer, tag, 0, deadline, count=count, type=data_type, data=data)

    def receive(self, address, count, data_type, peer, tag, deadline):
        return self.exchange(peer, self.rank, tag, address, deadline, count=count, type=data_type)

    def join(self, deadline):
        self.process.call("join", self.number, deadline)
        self.is_alone = False

    def propose(self, activate, ranks, deadline):
        return self.process.call("propose", self.number, activate, list(ranks), deadline)

    def sync_after_failure(self, deadline):
        return self.process.call("sync", self.number, deadline)

    def detach(self):
        self.process.call("detach", self.number)


class Work:
    """As `kvplane._native.GroupWork`."""

    def __init__(self, group, target):
        self.group, self.target = group, target
        self.done = threading.Event()
        self.failure, self.failures, self.view, self.peer = None, [], 0, None

    def ended(self, result, failure):
        self.failure = failure
        if failure is None:
            parts, self.failures, self.view, *peer = result
            self.peer = peer[0] if peer else None
            for offset, data in parts:
                ctypes.memmove(self.target + offset, data, len(data))
        self.done.set()

    def wait(self, deadline):
        if not self.done.wait(deadline):
            return False
        if self.failure is not None:
            raise RuntimeError(*self.failure)
        return True

    def is_done(self):
        return self.done.is_set()

    def failed(self):
        return [rank in self.failures for rank in range(self.group.max_size)]

    def epoch(self):
        return self.view

    def source(self):
        return self.peer


def install():
    """Puts the classes in the place of the native module's."""
    from kvplane import _native

    _native.GroupProcess, _native.ProcessGroup, _native.GroupWork = GroupProcess, ProcessGroup, Work


def main():
    """Command line, as far as the program's: `control --listen HOST:PORT [--stop-when-idle SECONDS]`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=["control"])
    parser.add_argument("--listen", default="127.0.0.1:0")
    parser.add_argument("--stop-when-idle", type=float, default=3600.0)
    arguments, _ = parser.parse_known_args()
    Server(arguments.listen, arguments.stop_when_idle).run()


if __name__ == "__main__":
    sys.exit(main())
