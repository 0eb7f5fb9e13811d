"""Measures the tiers `kvplane.vllm` and `kvplane.lmcache` beside the frameworks' own, in turns, in one run.

    python bench_connectors.py [--blocks N] [--sizes 64K,1M] [--rounds N] [--folder DIR] [--redis HOST:PORT]

`KVPLANE_VLLM` and `KVPLANE_LMCACHE` name directories with unpacked packages, see `tests/frameworks.py`; `KVPLANE_BINARY`
is the program `kvplane`, of which a cluster is started on this host. LMCache's own adapters are compiled against torch:
where torch and what LMCache imports are installed, LMCache is imported as it is, with its adapters `fs`, `fs_native` and
`resp`, and vLLM's tier of files has its compiled module; else LMCache's `fs` alone is measured, which needs aiofiles.
Every side stores the blocks, looks them up and loads them into other memory, where every byte is compared. `--folder` is
where files are put.
"""

import argparse
import contextlib
import importlib
import importlib.util
import mmap
import os
import pathlib
import shutil
import statistics
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "tests"))

import bed  # noqa: E402
import frameworks  # noqa: E402

_UNITS = {"K": 1 << 10, "M": 1 << 20}


def vllm_side(name, size, blocks, settings):
    """Host memory of an engine with a tier of vLLM's."""
    import test_vllm

    class Side:
        def __init__(self, memory):
            self.engine = test_vllm.Engine(
                size=size, chunks=2 * blocks, model=f"bench {size}", memory=memory, **settings
            )

        def keys(self, turn):
            return [test_vllm.key((turn << 32) + number) for number in range(blocks)]

        def store(self, keys):
            self.done(self.engine.result(self.engine.job(keys, range(blocks), False)))

        def lookup(self, keys):
            assert self.engine.lookup(keys, "bench") == ["HIT"] * blocks

        def load(self, keys):
            self.done(self.engine.result(self.engine.job(keys, range(blocks, 2 * blocks), True)))

        def done(self, result):
            problem = self.engine.tier._blocks.problem if hasattr(self.engine.tier, "_blocks") else ""
            assert result.success, f"{name}: {result} {problem}"

        def forget(self, keys):
            tier = self.engine.tier
            if hasattr(tier, "file_mapper"):
                for key in keys:
                    os.unlink(tier.file_mapper.get_file_name(key))
            else:
                tier._blocks.remove([tier._prefix + key.hex() for key in keys])

        def close(self):
            self.engine.close()

    return name, Side


def lmcache_side(name, size, blocks, make):
    """Memory of a cache server with an adapter of LMCache's."""
    import test_lmcache
    from lmcache.v1.distributed.internal_api import L1MemoryDesc

    class Side(test_lmcache.Server):
        def __init__(self, memory):
            self.memory = memory
            self.at = test_lmcache.ctypes.addressof(test_lmcache.ctypes.c_char.from_buffer(memory))
            self.adapter = make(L1MemoryDesc(self.at, len(memory), 4096))

        def keys(self, turn):
            return [test_lmcache.Adapter.key((turn << 32) + number) for number in range(blocks)]

        def objects(self, first):
            return [test_lmcache.Object(self.memory, (first + slot) * size, size) for slot in range(blocks)]

        def store(self, keys):
            assert self.stored(self.adapter.submit_store_task(keys, self.objects(0))).is_successful()

        def lookup(self, keys):
            assert super().lookup(keys) == list(range(blocks))
            self.adapter.submit_unlock(keys)

        def load(self, keys):
            assert super().load(keys, self.objects(blocks)) == list(range(blocks))

        def forget(self, keys):
            self.adapter.delete(keys)

    return name, Side


def plug_in(settings):
    """Makes an adapter by LMCache's factory of plug-ins."""
    plugin_l2_adapter = importlib.import_module("lmcache.v1.distributed.l2_adapters.plugin_l2_adapter")
    config = plugin_l2_adapter.PluginL2AdapterConfig.from_dict(
        {"module_path": "kvplane.lmcache", "class_name": "KvplaneL2Adapter", "adapter_params": settings}
    )
    return lambda arena: plugin_l2_adapter._create_plugin_adapter(config, arena)


def own(module, kind, function, settings):
    """Makes an adapter of LMCache's own."""
    found = importlib.import_module(f"lmcache.v1.distributed.l2_adapters.{module}")
    config = getattr(found, kind).from_dict(settings)
    return lambda arena: getattr(found, function)(config, arena)


def measure(sides, size, blocks, rounds):
    """Runs all sides in turns; returns the seconds of each step, by side."""
    # One memory for all sides, each of which has its turn.
    memory = mmap.mmap(-1, 2 * size * blocks)
    made = {name: side(memory) for name, side in sides}
    seconds = {name: {"store": [], "lookup": [], "load": []} for name in made}
    half = size * blocks
    try:
        for turn in range(rounds):
            value = os.urandom(1 << 20) * (half // (1 << 20) + 1)
            for name, side in made.items():
                memory[:half] = value[turn : turn + half]
                memory[half:] = bytes(half)
                keys = side.keys(turn)
                for step in ("store", "lookup", "load"):
                    begun = time.perf_counter()
                    getattr(side, step)(keys)
                    seconds[name][step].append(time.perf_counter() - begun)
                    print(f"{name}: {step} {1000 * seconds[name][step][-1]:.1f} ms", file=sys.stderr)
                assert memory[half:] == value[turn : turn + half], f"{name}: other bytes"
                side.forget(keys)
    finally:
        for side in made.values():
            side.close()
    return seconds


def show(title, seconds, size, blocks):
    """Prints a table: medians, and how many times as long the others take."""
    print(f"\n{title}, {blocks} blocks of {size >> 10} KiB, ms (and times of ours, paired)\n")
    print("| side | store | lookup | load |\n|---|---|---|---|")
    ours = next(iter(seconds.values()))
    for name, steps in seconds.items():
        cells = []
        for step, values in steps.items():
            ratio = statistics.median(one / our for one, our in zip(values, ours[step]))
            cells.append(f"{1000 * statistics.median(values):.1f} ({ratio:.2f})")
        print(f"| {name} | {' | '.join(cells)} |")


def lmcache_sides(size, blocks, folder, redis):
    """Sides of LMCache, ours first."""
    where = str(folder / f"lmcache-{size}")
    sides = [lmcache_side("kvplane.lmcache", size, blocks, plug_in({"namespace": f"bench {size}"}))]
    if importlib.util.find_spec("aiofiles") is not None:
        settings = {"base_path": where}
        make = own("fs_l2_adapter", "FSL2AdapterConfig", "_create_fs_adapter", settings)
        sides.append(lmcache_side("LMCache fs", size, blocks, make))
    if "lmcache" not in frameworks._LOADED:
        settings = {"base_path": where + "-native"}
        make = own("fs_native_l2_adapter", "FSNativeL2AdapterConfig", "_create_fs_native_l2_adapter", settings)
        sides.append(lmcache_side("LMCache fs_native", size, blocks, make))
        if redis:
            host, _, port = redis.rpartition(":")
            settings = {"host": host, "port": int(port)}
            make = own("resp_l2_adapter", "RESPL2AdapterConfig", "_create_resp_l2_adapter", settings)
            sides.append(lmcache_side("LMCache resp (Redis)", size, blocks, make))
    return sides


def main():
    """Command line entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=1000)
    parser.add_argument("--sizes", default="64K,1M")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=pathlib.Path)
    parser.add_argument("--redis")
    parser.add_argument("--only", default="vllm,lmcache")
    arguments = parser.parse_args()
    sizes = [int(text[:-1]) * _UNITS[text[-1]] for text in arguments.sizes.split(",")]
    # The blocks of one side and turn at a time, and what the store needs beside them.
    room = arguments.blocks * max(sizes) * 3 // 2 + (256 << 20)
    # A pool of gigabytes takes its time on a busy machine.
    bed._LONGEST_S = 600
    cluster = bed.Bed(memory=f"{room >> 20}m")
    folder = pathlib.Path(tempfile.mkdtemp(prefix="kvplane-bench-", dir=arguments.folder))
    try:
        for size in sizes:
            if "vllm" in arguments.only:
                # With torch, vLLM's tier of files uses its compiled module.
                with contextlib.suppress(ImportError):
                    importlib.import_module("torch")
                frameworks.load("vllm")
                ours = {"type": "KvplaneTierManager", "module_path": "kvplane.vllm", "namespace": "bench"}
                sides = [
                    vllm_side("kvplane.vllm", size, arguments.blocks, ours),
                    vllm_side("vLLM fs", size, arguments.blocks, {"type": "fs", "root_dir": str(folder / "vllm")}),
                ]
                show("vLLM", measure(sides, size, arguments.blocks, arguments.rounds), size, arguments.blocks)
            if "lmcache" in arguments.only:
                try:
                    importlib.import_module("lmcache.v1.distributed.l2_adapters.fs_native_l2_adapter")
                except ImportError as error:
                    print(f"LMCache's own native adapters are left out: {error}", file=sys.stderr)
                    frameworks.load("lmcache")
                sides = lmcache_sides(size, arguments.blocks, folder, arguments.redis)
                show("LMCache", measure(sides, size, arguments.blocks, arguments.rounds), size, arguments.blocks)
    finally:
        cluster.close()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
