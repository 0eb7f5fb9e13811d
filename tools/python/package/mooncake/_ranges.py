"""Parts of objects: ranges, and the sessions that read and write an object layer by layer."""

INVALID_PARAMS = -600
OBJECT_NOT_FOUND = -704

#: The last address there is; no buffer reaches it.
_LAST = (1 << 64) - 1


def _place(pointer, offset):
    """Where a range goes; what lies beyond all addresses is refused like what lies beyond a buffer."""
    return min(pointer + offset, _LAST) if offset <= _LAST else offset


class Ranges:
    """The calls of a store that name ranges of objects."""

    def get_into_ranges(self, buffer_ptrs, all_keys, all_dst_offsets, all_src_offsets, all_sizes):
        """Brings ranges of objects into registered buffers; for each range its length, nested as the sizes are."""
        native = self._native
        keys, which, offsets, addresses, sizes, shape = [], [], [], [], [], []
        columns = zip(buffer_ptrs, all_keys, all_dst_offsets, all_src_offsets, all_sizes)
        for pointer, some_keys, destinations, sources, lengths in columns:
            counts = []
            shape.append(counts)
            for key, to, of, some in zip(some_keys, destinations, sources, lengths):
                if not len(to) == len(of) == len(some):
                    # What does not fit together is refused as a whole, by a number below zero.
                    counts.append(-max(len(to), len(of), len(some)))
                    continue
                counts.append(len(some))
                which.extend([len(keys)] * len(some))
                keys.append(key)
                offsets.extend(of)
                addresses.extend([_place(pointer, at) for at in to])
                sizes.extend(some)
        if native is None:
            return [[[-1] * abs(count) for count in counts] for counts in shape]
        codes = iter(native.get_ranges(keys, which, offsets, addresses, sizes))
        take = lambda count: [INVALID_PARAMS] * -count if count < 0 else [next(codes) for _ in range(count)]
        return [[take(count) for count in counts] for counts in shape]

    def batch_get_session_start(self, keys):
        """Begins to read objects range by range: 0 for each that is there."""
        native = self._native
        if native is None:
            return [-1] * len(keys)
        codes = []
        for key, size in zip(keys, native.sizes(keys)):
            if size >= 0:
                self._reading[key] = size
            codes.append(0 if size >= 0 else size)
        return codes

    def batch_get_into_multi_buffer_ranges(self, keys, all_buffer_ptrs, all_sizes, all_src_offsets):
        """Brings ranges of objects of open sessions; for each object the bytes of all its ranges."""
        native = self._native
        if native is None:
            return [-1] * len(keys)
        known = [key in self._reading for key in keys]
        return _sums(native.get_ranges, keys, known, all_buffer_ptrs, all_sizes, all_src_offsets)

    def batch_get_session_end(self, keys):
        """Ends such sessions."""
        for key in keys:
            self._reading.pop(key, None)
        return 0

    def batch_put_session_start(self, keys, sizes, config=None):
        """Begins to write objects range by range: 0 for each, or why not. They are there when they are ended."""
        from mooncake._types import kept

        native = self._native
        if native is None:
            return [-1] * len(keys)
        return native.begin(keys, sizes, kept(config, False))

    def batch_put_from_multi_buffer_ranges(self, keys, all_buffer_ptrs, all_sizes, all_dst_offsets):
        """Writes ranges of such objects; for each object the bytes of all its ranges."""
        native = self._native
        if native is None:
            return [-1] * len(keys)
        return _sums(native.fill, keys, [True] * len(keys), all_buffer_ptrs, all_sizes, all_dst_offsets)

    def batch_put_session_end(self, keys):
        """Makes objects of what was written: 0 for each."""
        return self._end(keys, True)

    def batch_put_session_revoke(self, keys):
        """Gives up what was written: 0 for each."""
        return self._end(keys, False)

    def _end(self, keys, commit):
        native = self._native
        if native is None:
            return [-1] * len(keys)
        return [INVALID_PARAMS if code == OBJECT_NOT_FOUND else code for code in native.end(keys, commit)]


def _sums(move, keys, known, all_pointers, all_sizes, all_offsets):
    """Moves the ranges of all objects in one go; for each object the sum of its lengths, or its first error."""
    if not len(keys) == len(all_pointers) == len(all_sizes) == len(all_offsets):
        return [INVALID_PARAMS] * len(keys)
    totals, which, offsets, addresses, sizes = [], [], [], [], []
    for number, (good, pointers, lengths, starts) in enumerate(zip(known, all_pointers, all_sizes, all_offsets)):
        whole = good and len(pointers) == len(lengths) == len(starts)
        totals.append(0 if whole else INVALID_PARAMS)
        if whole:
            which.extend([number] * len(pointers))
            offsets.extend(starts)
            addresses.extend(pointers)
            sizes.extend(lengths)
    if which:
        for number, code in zip(which, move(keys, which, offsets, addresses, sizes)):
            if totals[number] >= 0:
                totals[number] = INVALID_PARAMS if code == OBJECT_NOT_FOUND else code if code < 0 else totals[number] + code
    return totals
