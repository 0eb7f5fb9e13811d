"""Gloo (torch.distributed, CPU tensors) between two processes over loopback. usage: gloo_driver.py BUFFER_BYTES

Two-sided: both ends know the number of calls beforehand. A call is complete when the receiver has all bytes: a write
ends with the peer's reply of 8 bytes, a read begins with a request of 8 bytes.
"""
import os
import sys
import tempfile
import time

os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from drive import other_side, say, serve, summary  # noqa: E402

WRITE, READ, END = 1, 2, 3
torch.set_num_threads(1)
is_target = "--target" in sys.argv
folder = sys.argv[-1] if is_target else tempfile.mkdtemp(prefix="gloo-")
word, command = torch.zeros(1, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)


def send_all(blocks, peer):
    for work in [dist.isend(block, peer) for block in blocks]:
        work.wait()


def receive_all(blocks, peer):
    for work in [dist.irecv(block, peer) for block in blocks]:
        work.wait()


def join(rank):
    dist.init_process_group("gloo", store=dist.FileStore(folder + "/store", 2), rank=rank, world_size=2)


def answer_commands():
    join(1)
    while True:
        dist.recv(command, 0)
        op, size, batch, calls = command.tolist()
        if op == END:
            os._exit(0)
        blocks = [torch.ones(size, dtype=torch.uint8) for _ in range(batch)]
        for _ in range(calls):
            if op == WRITE:
                receive_all(blocks, 0)
                dist.send(word, 0)
            else:
                dist.recv(word, 0)
                send_all(blocks, 0)


def run(op, size, batch, calls, blocks):
    command[:] = torch.tensor([op, size, batch, calls])
    dist.send(command, 1)
    time.sleep(0.005)  # the other side creates its tensors
    samples, begin = [], time.perf_counter()
    for _ in range(calls):
        before = time.perf_counter()
        if op == WRITE:
            send_all(blocks, 1)
            dist.recv(word, 1)
        else:
            dist.send(word, 1)
            receive_all(blocks, 1)
        samples.append(time.perf_counter() - before)
    return samples, time.perf_counter() - begin


def measure(op, size, batch, seconds):
    op = WRITE if op == "write" else READ
    blocks = [torch.ones(size, dtype=torch.uint8) for _ in range(batch)]
    samples, spent = run(op, size, batch, 4, blocks)
    calls = max(3, min(100_000, int(seconds / (sorted(samples)[1] + 1e-9))))
    return summary(*run(op, size, batch, calls, blocks))


if is_target:
    say(ready=True)
    answer_commands()
child, _ = other_side(folder)
join(0)
serve(measure, "torch-" + torch.__version__, [os.getpid(), child.pid])
command[0] = END
dist.send(command, 1)
time.sleep(0.1)
os._exit(0)
