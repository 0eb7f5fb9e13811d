"""Steps of the ranks of a job, for `test_group.py`."""

import array
import os
import time

from kvplane.group import Error, World

CODES = {"u8": "B", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "f32": "f", "f64": "d"}
STATE = {}


def open_world(name, rank, control):
    STATE["world"] = World(name, rank, control)
    STATE["groups"] = {}
    return os.getpid()


def open_group(name, order, options):
    group = STATE["world"].group(name, order, **options)
    STATE["groups"][name] = group
    return group.rank


def refused(step, *arguments):
    """Class, code, ranks and text of the error that a step raises; None if it succeeds."""
    try:
        globals()[step](*arguments)
    except Error as problem:
        return [type(problem).__name__, problem.code, list(problem.ranks), str(problem)]
    return None


def collective(group, name, kind, values, *arguments):
    """A collective in place: the values afterwards, the ranks that failed, and the epoch."""
    memory = array.array(CODES[kind], values)
    work = getattr(STATE["groups"][group], name)(memory, *arguments)
    after = work.result().tolist()
    return [after, work.failed, work.epoch]


def begin(group, name, kind, values, *arguments):
    """Begins a collective in place, which `end` waits for."""
    memory = array.array(CODES[kind], values)
    STATE["begun"] = getattr(STATE["groups"][group], name)(memory, *arguments), memory


def end():
    work, memory = STATE.pop("begun")
    work.wait()
    return [memory.tolist(), work.failed, work.epoch]


def parts(group, name, kind, values, size, *arguments):
    """A collective from one array to another."""
    source, target = array.array(CODES[kind], values), array.array(CODES[kind], [77] * size)
    first = (target, source) if name == "scatter" else (source, target)
    work = getattr(STATE["groups"][group], name)(*first, *arguments)
    work.wait()
    return [target.tolist(), work.failed]


def barrier(group, deadline=None):
    work = STATE["groups"][group].barrier(deadline)
    work.wait()
    return work.failed


def begin_and_forget(group, count):
    """Begins reductions without a reference to their arrays, and waits for the last one only."""
    works = [STATE["groups"][group].all_reduce(array.array("q", [1] * 1000)) for _ in range(count)]
    last = works.pop()
    del works
    return last.result().tolist()[:1]


def status(group):
    one = STATE["groups"][group]
    return [one.size, one.active, one.members, one.epoch, one.peers, one.rank, one.max_size]


def propose(group, activate, ranks, deadline=20.0):
    one = STATE["groups"][group]
    change = (one.activate if activate else one.deactivate)(ranks, deadline)
    return [change.applied, change.dropped, change.reason]


def join(group, deadline=30.0):
    STATE["groups"][group].join(deadline)
    return STATE["groups"][group].size


def sync(group):
    return STATE["groups"][group].sync_after_failure().status


def await_active(group, expected):
    """Waits until the mask of participants is this."""
    one = STATE["groups"][group]
    until = time.monotonic() + 30
    while one.active != expected and time.monotonic() < until:
        time.sleep(0.005)
    return one.active == expected


def ring(group):
    """Each rank sends to the next one."""
    one = STATE["groups"][group]
    sent, received = array.array("i", [one.rank, 7]), array.array("i", [0, 0])
    works = [one.send(sent, (one.rank + 1) % one.size), one.receive(received, (one.rank - 1) % one.size)]
    for work in works:
        work.wait()
    return received.tolist()


def exchange(group, peer, does_send, values, tag=0, deadline=None):
    one = STATE["groups"][group]
    memory = array.array("i", values)
    work = (one.send if does_send else one.receive)(memory, peer, tag, deadline)
    work.wait()
    return [memory.tolist(), work.failed]


def receive_from_any(group, number):
    """The values of messages without a named source, and their sources."""
    one, found = STATE["groups"][group], []
    for _ in range(number):
        memory = array.array("i", [0])
        work = one.receive(memory)
        work.wait()
        found.append([memory[0], work.source])
    return sorted(found)


def numpy_types(group):
    """Sums of all types that numpy has, and of bfloat16 where it is installed; splits, gathers into new arrays."""
    import numpy

    one, found = STATE["groups"][group], {}
    kinds = ["u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8", "?"]
    types = [numpy.dtype(kind) for kind in kinds]
    try:
        import ml_dtypes

        types.append(numpy.dtype(ml_dtypes.bfloat16))
    except ImportError:
        pass
    for kind in types:
        values = numpy.full((2, 3), one.rank + 1).astype(kind)
        reduction = "or" if kind.name == "bool" else "sum"
        found[kind.name] = one.all_reduce(values, reduction).result().astype("f8").sum()
    gathered = one.all_gather(numpy.full(2, one.rank, numpy.complex64)).result()
    found["gathered"] = [list(gathered.shape), gathered.real.ravel().tolist()]
    return found


def close_group(group):
    STATE["groups"].pop(group).close()


def close_world():
    STATE.pop("world").close()
