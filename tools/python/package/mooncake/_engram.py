"""Embedding tables in the store, one object for each head, read row by row: `EngramStore`."""


class EngramStoreConfig:
    """Number of rows of each head's table, and of values in a row."""

    def __init__(self):
        self.table_vocab_sizes = []
        self.embedding_dim = 0


class EngramStore:
    """Tables of one layer."""

    def __init__(self, layer_id, config, store=None):
        if config.embedding_dim <= 0 or not config.table_vocab_sizes:
            raise ValueError("embedding_dim is above 0, and there is a table for each head")
        self._layer = layer_id
        self._sizes = [int(size) for size in config.table_vocab_sizes]
        self._dim = int(config.embedding_dim)
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
        import numpy

        if len(embedding_buffers) != len(self._sizes):
            raise ValueError(f"{len(embedding_buffers)} tables for {len(self._sizes)} heads")
        for key, rows, table in zip(self.get_store_keys(), self._sizes, embedding_buffers):
            array = numpy.ascontiguousarray(table, dtype=numpy.float32)
            if array.shape != (rows, self._dim):
                raise ValueError(f"{key}: a table of {array.shape}, not of {(rows, self._dim)}")
            code = self._need().put(key, array)
            if code != 0:
                raise RuntimeError(f"{key}: error {code}")

    def lookup(self, row_ids):
        """Returns the rows of an array of row numbers [batch, length, head], as float32 [batch, length, head,
        values]."""
        import numpy

        ids = numpy.ascontiguousarray(row_ids, dtype=numpy.int64)
        if ids.ndim != 3 or ids.shape[2] != len(self._sizes):
            raise ValueError(f"row_ids of shape {ids.shape}, not [batch, length, {len(self._sizes)}]")
        for head, rows in enumerate(self._sizes):
            some = ids[:, :, head]
            if some.size and (some.min() < 0 or some.max() >= rows):
                raise IndexError(f"head {head} has rows 0 to {rows - 1}")
        out = numpy.empty((*ids.shape, self._dim), dtype=numpy.float32)
        if out.size == 0:
            return out
        store, row = self._need(), 4 * self._dim
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
