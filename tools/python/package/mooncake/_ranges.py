"""Ranges of objects, and the sessions that read and write an object layer by layer."""

import operator
import threading
import time

from mooncake._types import RangedReadSnapshot, put_batches, refused, several, texts

INVALID_KEY = -400
INVALID_PARAMS = -600
PENDING = -703
OBJECT_NOT_FOUND = -704
OBJECT_EXISTS = -705
#: Idle limit of a put session.
IDLE_S = 300
#: Deadline of a call.
CALL_S = 10

#: Largest address; no buffer contains it.
_LAST = (1 << 64) - 1


def _place(pointer, offset):
    """Returns the destination of a range; one beyond the address space is rejected like one beyond a buffer. Numbers are
    Python's, because sums of numpy's types wrap; those that are no offset stay as they are, and the native module
    raises TypeError for them."""
    pointer, offset = operator.index(pointer), operator.index(offset)
    return min(pointer + offset, _LAST) if 0 <= offset <= _LAST else offset


class Ranges:
    """Calls of a store on ranges of objects."""

    def get_into_ranges(self, buffer_ptrs, all_keys, all_dst_offsets, all_src_offsets, all_sizes):
        """Reads ranges of objects into registered buffers. Returns the length of each range, nested like the sizes."""
        return self._into_ranges(buffer_ptrs, all_keys, all_dst_offsets, all_src_offsets, all_sizes, None)

    def prepare_get_into_ranges_snapshot(self, keys):
        """Returns the versions of objects, for reads of ranges that need not look them up again."""
        native, keys = self._native, several(keys, "prepare_get_into_ranges_snapshot")
        if native is None:
            return RangedReadSnapshot(self, {})
        opened = zip(keys, native.open_ranges(keys))
        return RangedReadSnapshot(self, {_raw(key): version if code == 0 else None for key, (code, version) in opened})

    def get_into_ranges_from_snapshot(
        self, snapshot, buffer_ptrs, all_keys, all_dst_offsets, all_src_offsets, all_sizes
    ):
        """Does what `get_into_ranges` does with the versions of a snapshot: all ranges of an object that one call reads
        are of one version. An object that was replaced, or evicted and is in memory again, since the snapshot was
        prepared has another version, which the snapshot has from then on. -600 for keys that are not in the
        snapshot."""
        if not isinstance(snapshot, RangedReadSnapshot):
            kind = type(snapshot).__name__
            raise TypeError(f"get_into_ranges_from_snapshot(): snapshot is a RangedReadSnapshot, not {kind}")
        if snapshot._store is not self:
            raise ValueError("Ranged-read snapshot belongs to another Store")
        return self._into_ranges(buffer_ptrs, all_keys, all_dst_offsets, all_src_offsets, all_sizes, snapshot._versions)

    def _into_ranges(self, buffer_ptrs, all_keys, all_dst_offsets, all_src_offsets, all_sizes, versions):
        native = self._native
        for some in all_keys:
            several(some, "get_into_ranges")
        keys, which, offsets, addresses, sizes, shape = [], [], [], [], [], []
        columns = (several(all_keys, "get_into_ranges", "all_keys"), all_dst_offsets, all_src_offsets, all_sizes)
        even = all(len(column) == len(buffer_ptrs) for column in columns)
        for number, pointer in enumerate(buffer_ptrs):
            # Mismatched lists are rejected as a whole, by negative numbers: one for each key and each of its
            # destinations, as far as these exist.
            some_keys = all_keys[number] if number < len(all_keys) else (None,)
            rows = [column[number] if number < len(column) else () for column in columns[1:]]
            whole = even and all(len(row) == len(some_keys) for row in rows)
            shape.append([])
            for place, key in enumerate(some_keys):
                count = len(rows[0][place]) if place < len(rows[0]) else 1
                good = whole and all(len(row[place]) == count for row in rows)
                shape[-1].append((count, good))
                if good:
                    to, of, lengths = (row[place] for row in rows)
                    which.extend([len(keys)] * count)
                    keys.append(key)
                    offsets.extend(of)
                    addresses.extend([_place(pointer, at) for at in to])
                    sizes.extend(lengths)
        if native is None:
            return [[[-1] * count for count, _ in counts] for counts in shape]
        if versions is None:
            codes = iter(native.get_ranges(keys, which, offsets, addresses, sizes))
        else:
            codes = iter(_of_versions(native, versions, keys, (which, offsets, addresses, sizes)))
        take = lambda count, good: [_read(next(codes)) if good else INVALID_PARAMS for _ in range(count)]
        return [[take(*one) for one in counts] for counts in shape]

    def batch_get_session_start(self, keys):
        """Opens get sessions: 0 for each object that exists. All ranges of a session are of one version."""
        native, keys = self._native, several(keys, "batch_get_session_start")
        if native is None:
            return [-1] * len(keys)
        codes = []
        for key, (code, version) in zip(keys, native.open_ranges(keys)):
            if code == 0:
                self._reading[_raw(key)] = version
            codes.append(_read(code))
        return codes

    def batch_get_into_multi_buffer_ranges(self, keys, all_buffer_ptrs, all_sizes, all_src_offsets):
        """Reads ranges of objects of open sessions. Returns for each object the number of bytes of all its ranges."""
        native, keys = self._native, several(keys, "batch_get_into_multi_buffer_ranges")
        if native is None:
            return [-1] * len(keys)
        versions = [self._reading.get(_raw(key)) for key in keys]
        known = [version is not None for version in versions]
        versions = [version or 0 for version in versions]
        # An object that was removed or replaced since its session began is not found: versions are never mixed.
        move = lambda *ranges: native.get_ranges(*ranges, versions)
        return _sums(move, keys, known, all_buffer_ptrs, all_sizes, all_src_offsets, OBJECT_NOT_FOUND)

    def batch_get_session_end(self, keys):
        """Closes get sessions."""
        for key in texts(keys, "batch_get_session_end", "keys"):
            self._reading.pop(_raw(key), None)
        return 0

    def batch_put_session_start(self, keys, sizes, config=None):
        """Opens put sessions: 0 for each, or an error code. The objects become visible when their sessions end."""
        native, keys = self._native, several(keys, "batch_put_session_start")
        if native is None:
            return [-1] * len(keys)
        code = INVALID_PARAMS if len(keys) != len(sizes) else refused(config, len(keys))
        if code != 0:
            return [code] * len(keys)
        writing = self._writing
        codes = writing.claim(keys)
        claimed = {number for number, code in enumerate(codes) if code == 0}
        begun = {}
        try:
            for indexes, options in put_batches(config, False, len(keys)):
                some = [at for at in indexes if at in claimed]
                if some:
                    outcomes = native.begin([keys[at] for at in some], [sizes[at] for at in some], options)
                    begun.update(zip(some, outcomes))
        finally:
            for at in claimed:
                code = begun.get(at, -1)
                codes[at] = INVALID_PARAMS if code == INVALID_KEY else code
                if code != 0:
                    writing.end(keys[at])
        return codes

    def batch_put_from_multi_buffer_ranges(self, keys, all_buffer_ptrs, all_sizes, all_dst_offsets):
        """Writes ranges of such objects. Returns for each object the number of bytes of all its ranges."""
        native, keys = self._native, several(keys, "batch_put_from_multi_buffer_ranges")
        if native is None:
            return [-1] * len(keys)
        self._writing.touch(keys)
        known = [True] * len(keys)
        return _sums(native.fill, keys, known, all_buffer_ptrs, all_sizes, all_dst_offsets, INVALID_PARAMS)

    def batch_put_session_end(self, keys):
        """Commits put sessions: 0 for each."""
        return self._end(keys, True)

    def batch_put_session_revoke(self, keys):
        """Aborts put sessions: 0 for each."""
        return self._end(keys, False)

    def _end(self, keys, commit):
        native, keys = self._native, several(keys, "batch_put_session_end" if commit else "batch_put_session_revoke")
        if native is None:
            return [-1] * len(keys)
        codes = native.end(keys, commit)
        for key, code in zip(keys, codes):
            # The missing ranges can still be written.
            if code != PENDING:
                self._writing.end(key)
        return [INVALID_PARAMS if code in (OBJECT_NOT_FOUND, INVALID_KEY) else code for code in codes]


class Writing:
    """Keys of open put sessions with the time of their last use: the store aborts idle sessions."""

    def __init__(self):
        self._lock = threading.Lock()
        self._used = {}

    def claim(self, keys):
        """Returns 0 for each key that the caller may use, -600 for one with a session, -705 for one that is named
        twice."""
        now, codes, ours = time.monotonic(), [], set()
        with self._lock:
            for key in map(_raw, keys):
                open_since = self._used.get(key)
                if key in ours:
                    codes.append(OBJECT_EXISTS)
                elif open_since is not None and now - open_since < IDLE_S:
                    codes.append(INVALID_PARAMS)
                else:
                    ours.add(key)
                    self._used[key] = now
                    codes.append(0)
        return codes

    def touch(self, keys):
        """Records a use of the keys."""
        now = time.monotonic()
        with self._lock:
            for key in map(_raw, keys):
                if key in self._used:
                    self._used[key] = now

    def end(self, key):
        """Removes a key without a session."""
        with self._lock:
            self._used.pop(_raw(key), None)


def _of_versions(native, versions, keys, columns):
    """Reads ranges of objects of these versions, by key; None where there was no object. Objects that have another version
    by now are looked up again, and all of their ranges are read again, until a call's deadline: others may replace them
    all the time."""
    raws = [_raw(key) for key in keys]
    codes = [OBJECT_NOT_FOUND if raws[which] in versions else INVALID_PARAMS for which in columns[0]]

    def move(wanted):
        at = [number for number, which in enumerate(columns[0]) if which in wanted]
        if at:
            of = [versions.get(raw) or 0 for raw in raws]
            moved = native.get_ranges(keys, *([column[number] for number in at] for column in columns), of)
            for number, code in zip(at, moved):
                codes[number] = code

    known = {index for index, raw in enumerate(raws) if versions.get(raw) is not None}
    move(known)
    until = time.monotonic() + CALL_S
    while True:
        gone = sorted({which for which, code in zip(columns[0], codes) if code == OBJECT_NOT_FOUND and which in known})
        if not gone or time.monotonic() >= until:
            break
        again = zip(gone, native.open_ranges([keys[index] for index in gone]))
        there = {index: version for index, (code, version) in again if code == 0}
        versions.update((raws[index], version) for index, version in there.items())
        # Those that were removed stay missing.
        known = set(there)
        move(there)
    return codes


def _raw(key):
    if not isinstance(key, (str, bytes)):
        raise TypeError(f"a key is str or bytes, not {type(key).__name__}")
    return key.encode() if isinstance(key, str) else key


def _read(code):
    """Returns the code of a read: an invalid key has no object."""
    return OBJECT_NOT_FOUND if code == INVALID_KEY else code


def _sums(move, keys, known, all_pointers, all_sizes, all_offsets, missing):
    """Transfers the ranges of all objects at once. Returns for each object the sum of its lengths, or its first
    error."""
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
                code = missing if code in (OBJECT_NOT_FOUND, INVALID_KEY) else code
                totals[number] = code if code < 0 else totals[number] + code
    return totals
