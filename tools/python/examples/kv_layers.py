"""Stores and loads the KV cache of a transformer layer by layer, as an engine does between prefill and decode.

    python kv_layers.py [--layers 32] [--tokens 512]

Needs numpy, and a cluster: `kvplane dev`. The shape is that of a model with grouped-query attention: for each layer keys
and values of [tokens, heads, dim] in 16 bits. The writer sends each layer as it is computed, and the object appears when
all are there; the reader takes each layer as it needs it, into the place where its model has it.
"""

import argparse
import time

import numpy
from mooncake.store import MooncakeDistributedStore


def main():
    """Writes, reads, compares."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--master", default="127.0.0.1:50051")
    arguments = parser.parse_args()

    store = MooncakeDistributedStore()
    if store.setup("localhost", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", arguments.master) != 0:
        raise SystemExit("no cluster: start `kvplane dev`")

    # [layers, keys and values, tokens, heads, dim]
    shape = (arguments.layers, 2, arguments.tokens, arguments.heads, arguments.dim)
    computed = numpy.random.default_rng(7).standard_normal(shape, dtype=numpy.float32).astype(numpy.float16)
    loaded = numpy.zeros_like(computed)
    for cache in (computed, loaded):
        assert store.register_buffer(cache.ctypes.data, cache.nbytes) == 0
    layer_bytes = computed[0].nbytes
    key = f"example/{arguments.layers}x{arguments.tokens}"
    store.remove(key, force=True)

    start = time.perf_counter()
    assert store.batch_put_session_start([key], [computed.nbytes]) == [0]
    for layer in range(arguments.layers):
        # Here a model computes the layer.
        address = computed[layer].ctypes.data
        written = store.batch_put_from_multi_buffer_ranges([key], [[address]], [[layer_bytes]], [[layer * layer_bytes]])
        assert written == [layer_bytes], written
    assert store.batch_put_session_end([key]) == [0]
    stored = time.perf_counter()

    assert store.batch_get_session_start([key]) == [0]
    for layer in range(arguments.layers):
        address = loaded[layer].ctypes.data
        read = store.batch_get_into_multi_buffer_ranges([key], [[address]], [[layer_bytes]], [[layer * layer_bytes]])
        assert read == [layer_bytes], read
        # Here a model uses the layer, while the next one is on its way.
    store.batch_get_session_end([key])
    done = time.perf_counter()

    assert (loaded == computed).all()
    size = computed.nbytes / 1e6
    print(f"{size:.0f} MB in {arguments.layers} layers: stored at {size / (stored - start) / 1e3:.1f} GB/s, "
          f"loaded at {size / (done - stored) / 1e3:.1f} GB/s, every value equal")
    store.remove(key, force=True)
    store.close()


if __name__ == "__main__":
    main()
