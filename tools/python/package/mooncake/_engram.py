"""Embedding tables in the store, one object for each head, read row by row: `EngramStore`."""

import operator

from mooncake._types import several

#: Bytes of a value of a table.
_VALUE_BYTES = 4
#: Most bytes of a table.
_MOST_BYTES = (1 << 63) - 1
#: Code of a registration of memory that is registered: its owner did so.
_REGISTERED = -600


class EngramStoreConfig:
    """Number of rows of each head's table, and of values in a row. It has no other attributes."""

    __slots__ = ("table_vocab_sizes", "embedding_dim")

    def __init__(self):
        self.table_vocab_sizes = []
        self.embedding_dim = 0


def _whole(value, name):
    """Returns a number as int, also one of numpy's; TypeError for anything else."""
    if type(value).__name__ in ("bool", "bool_") or not hasattr(value, "__index__"):
        raise TypeError(f"{name} is int, not {value!r}")
    return operator.index(value)


def _count(value, name):
    """Returns a number above 0; TypeError for another type, ValueError for another number."""
    if _whole(value, f"EngramStoreConfig: {name}") <= 0:
        raise ValueError(f"EngramStoreConfig: {name} is above 0, not {value}")
    return operator.index(value)


class EngramStore:
    """Tables of one layer."""

    def __init__(self, layer_id, config, store=None):
        if not isinstance(config, EngramStoreConfig):
            raise TypeError(f"EngramStore: config is EngramStoreConfig, not {type(config).__name__}")
        if store is not None and not hasattr(store, "get_into_ranges"):
            raise TypeError(f"EngramStore: store is MooncakeDistributedStore, not {type(store).__name__}")
        self._dim = _count(config.embedding_dim, "embedding_dim")
        sizes = several(config.table_vocab_sizes, "EngramStoreConfig", "table_vocab_sizes", "int")
        self._sizes = [_count(size, "a size of table_vocab_sizes") for size in sizes]
        if not self._sizes:
            raise ValueError("EngramStoreConfig: table_vocab_sizes has the size of the table of each head, and is empty")
        if max(self._sizes) * self._dim * _VALUE_BYTES > _MOST_BYTES:
            raise ValueError(f"EngramStoreConfig: a table of {max(self._sizes)} rows of {self._dim} values is too large")
        self._layer = _whole(layer_id, "EngramStore: layer_id")
        self._store = store

    def get_embedding_dim(self):
        """Returns the number of values in a row."""
        return self._dim

    def get_num_heads(self):
        """Returns the number of tables."""
        return len(self._sizes)

    def get_store_keys(self):
        """Returns the keys of the tables."""
        return [f"engram:l{self._layer}:h{head}" for head in range(len(self._sizes))]

    def get_table_vocab_sizes(self):
        """Returns the number of rows of each table."""
        return list(self._sizes)

    def populate(self, embedding_buffers):
        """Stores the tables, float32 arrays of the configured shapes. Existing tables are left unchanged."""
        tables = several(embedding_buffers, "populate", "embedding_buffers", "arrays")
        if len(tables) != len(self._sizes):
            raise ValueError(f"{len(tables)} tables for {len(self._sizes)} heads")
        keys = self.get_store_keys()
        # Nothing is stored before all tables were checked.
        arrays = [self._table(*one) for one in zip(keys, self._sizes, tables)]
        store, registered = self._need(), []
        try:
            for number, array in enumerate(arrays):
                code = store.register_buffer(array.ctypes.data, array.nbytes)
                if code == _REGISTERED:
                    # By its owner, or for another head: a copy has memory of its own.
                    arrays[number] = array = array.copy()
                    code = store.register_buffer(array.ctypes.data, array.nbytes)
                if code != 0:
                    raise RuntimeError(f"{keys[number]}: the table's memory could not be registered: error {code}")
                registered.append(array.ctypes.data)
            places = [array.ctypes.data for array in arrays]
            codes = store.batch_put_from(keys, places, [array.nbytes for array in arrays])
        finally:
            for pointer in registered:
                store.unregister_buffer(pointer)
        for key, code in zip(keys, codes):
            if code != 0:
                raise RuntimeError(f"{key}: error {code}")

    def _table(self, key, rows, table):
        """Returns a table as a contiguous array of float32; TypeError or ValueError for another one."""
        import numpy

        array = numpy.asarray(table)
        if array.dtype.kind not in "biufV" or array.dtype.names:
            raise TypeError(f"{key}: a table of real numbers, not of {array.dtype}")
        if array.shape != (rows, self._dim):
            raise ValueError(f"{key}: a table of {array.shape}, not of {(rows, self._dim)}")
        return numpy.ascontiguousarray(array, dtype=numpy.float32)

    def lookup(self, row_ids):
        """Returns the rows of an array of row numbers [batch, length, head], as float32 [batch, length, head,
        values]."""
        import numpy

        ids = numpy.asarray(row_ids)
        if ids.ndim != 3 or ids.shape[2] != len(self._sizes):
            raise ValueError(f"row_ids of shape {ids.shape}, not [batch, length, {len(self._sizes)}]")
        if ids.size and ids.dtype.kind not in "iu":
            raise TypeError(f"row_ids are integers, not {ids.dtype}")
        for head, rows in enumerate(self._sizes):
            some = ids[:, :, head]
            if some.size and (some.min() < 0 or some.max() >= rows):
                raise IndexError(f"head {head} has rows 0 to {rows - 1}")
        ids = numpy.ascontiguousarray(ids, dtype=numpy.int64)
        out = numpy.empty((*ids.shape, self._dim), dtype=numpy.float32)
        if out.size == 0:
            return out
        store, row = self._need(), _VALUE_BYTES * self._dim
        pointer = out.ctypes.data
        if store.register_buffer(pointer, out.nbytes) != 0:
            raise RuntimeError("the result's memory could not be registered")
        try:
            heads = len(self._sizes)
            places = [[(at * heads + head) * row for at in range(ids[:, :, 0].size)] for head in range(heads)]
            rows = [(ids[:, :, head].ravel() * row).tolist() for head in range(heads)]
            sizes = [[row] * len(some) for some in rows]
            results = store.get_into_ranges([pointer], [self.get_store_keys()], [places], [rows], [sizes])
        finally:
            store.unregister_buffer(pointer)
        for key, codes in zip(self.get_store_keys(), results[0]):
            if any(code != row for code in codes):
                raise RuntimeError(f"{key}: error {min(codes)}")
        return out

    def remove_from_store(self, force=False):
        """Removes the tables. Returns the number of those that existed."""
        return sum(code == 0 for code in self._need().batch_remove(self.get_store_keys(), force))

    def _need(self):
        if self._store is None:
            raise RuntimeError("this EngramStore was made without a store")
        return self._store
