"""Calls of a store that take and return torch tensors.

A tensor is stored as an object with a header (`_tensors`). A split tensor is one object for each part: for rank `r`
along a tensor-parallel axis, the key is `KEY_tp_r`.
"""

from mooncake import _parallel, _tensors
from mooncake._types import put_batches, refused, several

INVALID_PARAMS = -600
FILE_NOT_FOUND = -1100
#: There is no local buffer, by the configuration of the store.
NO_BUFFER = -200
#: An invalid key has no object.
_OBJECT_CODES = {-400: -704}
#: Bytes of tensors that are put in one batch.
_BATCH_BYTES = 64 << 20


def _part_key(key, rank):
    return f"{key}_tp_{rank}"


class TensorCalls:
    """Mixin of the store."""

    # --- one tensor ------------------------------------------------------------------------------------------------

    def _put_each(self, keys, objects_of, config, replace):
        """Stores the objects of each key in batches: `objects_of(row)` returns those of a key, or the code of an error.
        Returns a code for each key: the first error of its objects."""
        native = self._native
        if native is None:
            return [-1] * len(keys)
        code = refused(config, len(keys))
        if code != 0 or not self._copies:
            return [code or NO_BUFFER] * len(keys)
        codes, batch, size = [0] * len(keys), [], 0
        for row in range(len(keys)):
            objects = objects_of(row)
            if isinstance(objects, int):
                codes[row] = objects
                continue
            batch += [(row, one) for one in objects]
            size += sum(one.size() for one in objects)
            # Tensors outside registered memory, and those with gaps, are copied: not all of a long list at once.
            if size >= _BATCH_BYTES:
                _put_batch(native, batch, codes, config, replace)
                batch, size = [], 0
        if batch:
            _put_batch(native, batch, codes, config, replace)
        return codes

    def _put_tensors(self, keys, tensors, config, replace):
        torch = _tensors.load_torch()
        several(keys, "batch")
        if len(keys) != len(tensors):
            return _invalid(keys)
        return self._put_each(keys, lambda row: _objects(keys[row], tensors[row], torch), config, replace)

    def put_tensor(self, key, tensor):
        """Stores a tensor."""
        return self._put_tensors([key], [tensor], None, False)[0]

    def upsert_tensor(self, key, tensor):
        """Stores a tensor and replaces an existing object."""
        return self._put_tensors([key], [tensor], None, True)[0]

    def pub_tensor(self, key, tensor, config=None):
        """Stores a tensor with put options."""
        return self._put_tensors([key], [tensor], config, False)[0]

    def upsert_pub_tensor(self, key, tensor, config=None):
        """Does the same and replaces an existing object."""
        return self._put_tensors([key], [tensor], config, True)[0]

    def get_tensor(self, key):
        """Returns a tensor; None when there is none."""
        torch = _tensors.load_torch()
        handle = self.get_buffer(key)
        return None if handle is None else _view(handle, torch)

    def put_tensor_from(self, key, buffer_ptr, size):
        """Stores memory that holds a tensor with its header; -600 if it does not hold one of this size."""
        return self.put_from(key, buffer_ptr, size) if _holds(buffer_ptr, size) else INVALID_PARAMS

    def upsert_tensor_from(self, key, buffer_ptr, size):
        """Does the same and replaces an existing object."""
        return self.upsert_from(key, buffer_ptr, size) if _holds(buffer_ptr, size) else INVALID_PARAMS

    def get_tensor_into(self, key, buffer_ptr, size):
        """Reads a tensor with its header into registered memory. Returns a tensor over that memory, or None."""
        torch = _tensors.load_torch()
        got = self.get_into(key, buffer_ptr, size)
        if got < 0:
            return None
        return _view(_memory(buffer_ptr, got), torch)

    def get_tensor_into_cuda(self, key, tensor):
        """Reads the bytes of a tensor into another of the same type and length, whose memory is registered: of a device or
        of the host. Returns their number."""
        return self.batch_get_tensor_into_cuda([key], [tensor])[0]

    # --- many ------------------------------------------------------------------------------------------------------

    def batch_put_tensor(self, keys, tensors_list):
        """Stores many tensors."""
        return self._put_tensors(keys, tensors_list, None, False)

    def batch_upsert_tensor(self, keys, tensors_list):
        """Stores many tensors and replaces existing objects."""
        return self._put_tensors(keys, tensors_list, None, True)

    def batch_pub_tensor(self, keys, tensors_list, config=None):
        """Stores many tensors with put options."""
        return self._put_tensors(keys, tensors_list, config, False)

    def batch_upsert_pub_tensor(self, keys, tensors_list, config=None):
        """Does the same and replaces existing objects."""
        return self._put_tensors(keys, tensors_list, config, True)

    def batch_get_tensor(self, keys):
        """Returns many tensors; None for each that does not exist."""
        torch = _tensors.load_torch()
        return [None if handle is None else _view(handle, torch) for handle in self.batch_get_buffer(keys)]

    def batch_put_tensor_from(self, keys, buffer_ptrs, sizes):
        """Stores memory that holds tensors with their headers; -600 for all if one piece does not hold a tensor of its
        size."""
        keys = several(keys, "batch_put_tensor_from")
        return self.batch_put_from(keys, buffer_ptrs, sizes) if _all_hold(keys, buffer_ptrs, sizes) else _invalid(keys)

    def batch_upsert_tensor_from(self, keys, buffer_ptrs, sizes):
        """Does the same and replaces existing objects."""
        keys = several(keys, "batch_upsert_tensor_from")
        return self.batch_upsert_from(keys, buffer_ptrs, sizes) if _all_hold(keys, buffer_ptrs, sizes) else _invalid(keys)

    def batch_get_tensor_into(self, keys, buffer_ptrs, sizes):
        """Reads tensors into registered memory; -600 for each if the lists differ in length."""
        torch = _tensors.load_torch()
        keys = several(keys, "batch_get_tensor_into")
        if not len(keys) == len(buffer_ptrs) == len(sizes):
            return _invalid(keys)
        codes = self.batch_get_into(keys, buffer_ptrs, sizes)
        memory = [_memory(at, max(got, 0)) for got, at in zip(codes, buffer_ptrs)]
        return [None if got < 0 else _view(some, torch) for got, some in zip(codes, memory)]

    def batch_get_tensor_into_cuda(self, keys, tensors_list):
        """Reads many tensors; -600 for each whose destination does not match it."""
        native, keys = self._native, several(keys, "batch_get_tensor_into_cuda")
        if len(keys) != len(tensors_list):
            return _invalid(keys)
        if native is None:
            return [-1] * len(keys)
        # Header and bytes are of one version.
        opened = native.open_ranges(keys)
        codes, versions = [_OBJECT_CODES.get(code, code) for code, _ in opened], [version for _, version in opened]
        some = [number for number, code in enumerate(codes) if code == 0]
        heads = bytearray(max(len(some), 1) * _tensors.HEADER_BYTES)
        at = _native().buffer_address(heads, True)[0]
        native.register(at, len(heads))
        try:
            places = [at + index * _tensors.HEADER_BYTES for index in range(len(some))]
            sizes = [_tensors.HEADER_BYTES] * len(some)
            read = _ranges_of(native, keys, versions, some, [0] * len(some), places, sizes)
        finally:
            native.unregister(at)
        wanted = []
        for index, (number, code) in enumerate(zip(some, read)):
            head = bytes(heads[index * _tensors.HEADER_BYTES :][: _tensors.HEADER_BYTES])
            place = _place_for(head, tensors_list[number]) if code > 0 else None
            codes[number] = INVALID_PARAMS if place is None else 0
            if place is not None:
                wanted.append((number, *place))
        numbers, *columns = zip(*wanted) if wanted else ((), (), (), ())
        for number, code in zip(numbers, _ranges_of(native, keys, versions, numbers, *columns)):
            codes[number] = code
        return codes

    # --- parts of tensors, along one axis --------------------------------------------------------------------------

    def put_tensor_with_tp(self, key, tensor, tp_rank=0, tp_size=1, split_dim=0):
        """Stores a tensor in `tp_size` parts, one object for each."""
        return self.pub_tensor_with_tp(key, tensor, None, tp_rank, tp_size, split_dim)

    def pub_tensor_with_tp(self, key, tensor, config=None, tp_rank=0, tp_size=1, split_dim=0):
        """Does the same with put options."""
        return self._put_with_tp([key], [tensor], config, tp_size, split_dim)[0]

    def _put_with_tp(self, keys, tensors, config, tp_size, split_dim):
        torch = _tensors.load_torch()
        several(keys, "batch")
        if len(keys) != len(tensors):
            return _invalid(keys)
        parts = lambda row: _parts(keys[row], tensors[row], torch, tp_size, split_dim)
        return self._put_each(keys, parts, config, False)

    def get_tensor_with_tp(self, key, tp_rank=0, tp_size=1, split_dim=0):
        """Returns the part of one rank; None when it does not exist."""
        return self.get_tensor(_part_key(key, tp_rank) if tp_size > 1 else key)

    def put_tensor_with_tp_from(self, key, buffer_ptr, size, tp_rank=0, tp_size=1, split_dim=0):
        """Stores memory that holds a whole tensor with its header in `tp_size` parts, whatever the rank."""
        return self.batch_put_tensor_with_tp_from([key], [buffer_ptr], [size], tp_rank, tp_size, split_dim)[0]

    def get_tensor_with_tp_into(self, key, buffer_ptr, size, tp_rank=0, tp_size=1, split_dim=0):
        """Reads the part of one rank into registered memory."""
        return self.get_tensor_into(_part_key(key, tp_rank) if tp_size > 1 else key, buffer_ptr, size)

    def batch_put_tensor_with_tp(self, base_keys, tensors_list, tp_rank=0, tp_size=1, split_dim=0):
        """Stores many tensors in parts."""
        return self._put_with_tp(base_keys, tensors_list, None, tp_size, split_dim)

    def batch_pub_tensor_with_tp(
        self, base_keys, tensors_list, config=None, tp_rank=0, tp_size=1, split_dim=0
    ):
        """Does the same with put options."""
        return self._put_with_tp(base_keys, tensors_list, config, tp_size, split_dim)

    def batch_get_tensor_with_tp(self, base_keys, tp_rank=0, tp_size=1):
        """Returns the parts of one rank."""
        keys = several(base_keys, "batch", "base_keys")
        return self.batch_get_tensor([_part_key(key, tp_rank) if tp_size > 1 else key for key in keys])

    def batch_put_tensor_with_tp_from(self, base_keys, buffer_ptrs, sizes, tp_rank=0, tp_size=1, split_dim=0):
        """Stores memory that holds many whole tensors with their headers, each in `tp_size` parts."""
        keys = several(base_keys, "batch", "base_keys")
        if tp_size <= 1:
            return self.batch_put_tensor_from(keys, buffer_ptrs, sizes)
        if not len(keys) == len(buffer_ptrs) == len(sizes):
            return _invalid(keys)
        torch = _tensors.load_torch()

        def parts(row):
            tensor = _held(buffer_ptrs[row], sizes[row], torch)
            return INVALID_PARAMS if tensor is None else _parts(keys[row], tensor, torch, tp_size, split_dim)

        return self._put_each(keys, parts, None, False)

    def batch_get_tensor_with_tp_into(self, base_keys, buffer_ptrs, sizes, tp_rank=0, tp_size=1):
        """Reads parts of one rank into registered memory."""
        keys = [_part_key(key, tp_rank) if tp_size > 1 else key for key in several(base_keys, "batch", "base_keys")]
        return self.batch_get_tensor_into(keys, buffer_ptrs, sizes)

    # --- parts of tensors, along several axes ----------------------------------------------------------------------

    def put_tensor_with_parallelism(self, key, tensor, parallelism=None, config=None, writer_partition=None):
        """Stores the part that the axes name, or that a writer has. If a tensor-parallel axis is the only one, the
        tensor is that part; otherwise it is the whole tensor, from which the part is taken. -600 for invalid axes."""
        return self.batch_put_tensor_with_parallelism([key], [tensor], [parallelism], config, [writer_partition])[0]

    def upsert_tensor_with_parallelism(self, key, tensor, parallelism=None, config=None, writer_partition=None):
        """Does the same and replaces an existing object."""
        return self.batch_upsert_tensor_with_parallelism([key], [tensor], [parallelism], config, [writer_partition])[0]

    def put_tensor_with_parallelism_from(
        self, key, buffer_ptr, size, parallelism=None, config=None, writer_partition=None
    ):
        """Does the same from memory that holds a tensor with its header; along a tensor-parallel axis, the tensor is
        the whole one and all parts are stored."""
        where = [parallelism], config, [writer_partition]
        return self.batch_put_tensor_with_parallelism_from([key], [buffer_ptr], [size], *where)[0]

    def upsert_tensor_with_parallelism_from(
        self, key, buffer_ptr, size, parallelism=None, config=None, writer_partition=None
    ):
        """Does the same and replaces an existing object."""
        where = [parallelism], config, [writer_partition]
        return self.batch_upsert_tensor_with_parallelism_from([key], [buffer_ptr], [size], *where)[0]

    def get_tensor_with_parallelism(self, key, target=None):
        """Returns a tensor in the form of its target: as it was stored, one part, or all parts of a tensor-parallel
        axis together. Parts of another number of ranks than the target's are joined and split again. None where that is
        impossible."""
        torch = _tensors.load_torch()
        if target is None:
            return self.get_tensor(key)
        mode, parallelism = str(target.mode).lower(), target.parallelism
        if parallelism is None:
            if mode == "as_stored":
                return self.get_tensor(key)
            return self._get_of_writers(key, torch) if mode == "full" else None
        axes = _parallel.axes_of(parallelism)
        if axes is None or mode not in ("as_stored", "shard", "full"):
            return None
        axis = _parallel.tensor_axis(axes)
        if mode == "full":
            return None if axis is None else self._whole_of_parts(key, axes, torch)
        stored = self.get_buffer(_parallel.part_key(key, axes))
        if stored is not None and _axes_in(stored) == axes:
            return _view(stored, torch)
        if mode == "as_stored" or axis is None:
            return None
        if len(axes) == 1:
            written = self.get_buffer(_parallel.writer_key(key, axis))
            if written is not None and _axes_in(written) == axes:
                return _view(written, torch)
        whole = self._whole_of_parts(key, axes, torch)
        if whole is not None:
            # Parts of unequal size would differ between splitting rules, of which torch alone has two.
            return _parallel.narrowed(whole, axis) if _parallel.is_uniform(whole.shape, axis) else None
        if len(axes) > 1:
            return None
        # A part stored under this name by a call that does not know axes.
        plain = self.get_buffer(_part_key(key, axis.rank) if axis.size > 1 else key)
        return _view(plain, torch) if plain is not None and _axes_in(plain) == () else None

    def _whole_of_parts(self, key, axes, torch):
        """Returns all parts along the tensor-parallel axis joined, or None."""
        axis = _parallel.tensor_axis(axes)
        whole = self._joined_parts(key, axes, axis.size, torch)
        if whole is None:
            others = (one for one in self._stored_axes(key, axes) if one and one.split == axis.split and one.size != axis.size)
            joined = (self._joined_parts(key, axes, other.size, torch) for other in others)
            whole = next((one for one in joined if one is not None), None)
        return whole

    def _stored_axes(self, key, axes):
        """Returns the split of the tensor from its manifest; otherwise from the first part, because calls that know
        only one axis store no manifest."""
        yield _parallel.manifest_axis(self.get(f"{key}__parallelism_manifest"))
        first = self.get_buffer(_part_key(key, 0)) if len(axes) == 1 else None
        yield _parallel.tensor_axis((first and _axes_in(first)) or ())

    def _joined_parts(self, key, axes, size, torch):
        parts = [_parallel.at_rank(axes, rank, size) for rank in range(size)]
        split = _parallel.tensor_axis(axes).split
        return self._joined([(_parallel.part_key(key, part), part) for part in parts], split, torch)

    def _get_of_writers(self, key, torch):
        """Returns the parts of all writers joined; the object under the key itself, if no writers stored parts."""
        axis = _parallel.manifest_axis(self.get(f"{key}__writer_manifest"))
        if axis is None:
            return self.get_tensor(key)
        parts = [axis._replace(rank=rank) for rank in range(axis.size)]
        return self._joined([(_parallel.writer_key(key, part), (part,)) for part in parts], axis.split, torch)

    def _joined(self, parts, split, torch):
        """Joins the tensors of these keys, each with its axes; None if one is missing or belongs to another split."""
        if self.is_exist(parts[0][0]) != 1:
            return None
        found = self.batch_get_buffer([name for name, _ in parts])
        if any(one is None or _axes_in(one) != axes for one, (_, axes) in zip(found, parts)):
            return None
        views = [_view(one, torch) for one in found]
        return None if any(one is None for one in views) else torch.cat(views, split)

    def get_tensor_with_parallelism_into(self, key, buffer_ptr, size, target=None):
        """Does the same into memory, with the header before it. Returns a tensor over that memory, or None."""
        if target is None or (target.parallelism is None and str(target.mode).lower() == "as_stored"):
            return self.get_tensor_into(key, buffer_ptr, size)
        torch = _tensors.load_torch()
        tensor = self.get_tensor_with_parallelism(key, target)
        if tensor is None:
            return None
        tensor = _tensors.contiguous(tensor, torch)
        address, count = _tensors.raw(tensor, torch)
        value = _tensors.header(tensor, torch) + _native().read_memory(address, count)
        if len(value) > size:
            return None
        try:
            _native().write_memory(buffer_ptr, value, len(value))
        except ValueError:
            return None
        return _view(_memory(buffer_ptr, len(value)), torch)

    def batch_put_tensor_with_parallelism(
        self, keys, tensors_list, parallelisms=None, config=None, writer_partitions=None
    ):
        """Stores many parts."""
        return self._put_parts(keys, [tensors_list], (parallelisms, writer_partitions), config, False, _part)

    def batch_upsert_tensor_with_parallelism(
        self, keys, tensors_list, parallelisms=None, config=None, writer_partitions=None
    ):
        """Does the same and replaces existing objects."""
        return self._put_parts(keys, [tensors_list], (parallelisms, writer_partitions), config, True, _part)

    def batch_put_tensor_with_parallelism_from(
        self, keys, buffer_ptrs, sizes, parallelisms=None, config=None, writer_partitions=None
    ):
        """Stores many parts from memory."""
        columns, where = [buffer_ptrs, sizes], (parallelisms, writer_partitions)
        return self._put_parts(keys, columns, where, config, False, _part_from)

    def batch_upsert_tensor_with_parallelism_from(
        self, keys, buffer_ptrs, sizes, parallelisms=None, config=None, writer_partitions=None
    ):
        """Does the same and replaces existing objects."""
        columns, where = [buffer_ptrs, sizes], (parallelisms, writer_partitions)
        return self._put_parts(keys, columns, where, config, True, _part_from)

    def _put_parts(self, keys, columns, where, config, replace, part):
        keys = several(keys, "batch_put_tensor_with_parallelism")
        alone = where == (None, None) and len(columns) == 2
        where = [_each_of(values, keys) for values in where]
        if None in where or any(len(column) != len(keys) for column in columns):
            return _invalid(keys)
        if alone and not _all_hold(keys, *columns):
            return _invalid(keys)
        torch, manifests = _tensors.load_torch(), {}

        def objects(row):
            found = part(keys[row], *(column[row] for column in columns), [values[row] for values in where], torch)
            if isinstance(found, int):
                return found
            parts, manifest = found
            if manifest is not None:
                manifests[row] = manifest
            return parts

        codes = self._put_each(keys, objects, config, replace)
        if any(codes[row] == 0 for row in manifests):
            # A manifest has the number of parts, and is beside them when they are there.
            beside = lambda row: [manifests[row]] if row in manifests and codes[row] == 0 else codes[row] or []
            codes = self._put_each(keys, beside, config, replace)
        return codes

    def batch_get_tensor_with_parallelism(self, keys, targets=None):
        """Returns many tensors in the form of their targets; None for all if the numbers of targets and keys differ."""
        keys = several(keys, "batch_get_tensor_with_parallelism")
        targets = _each_of(targets, keys)
        if targets is None:
            return [None] * len(keys)
        return [self.get_tensor_with_parallelism(key, target) for key, target in zip(keys, targets)]

    def batch_get_tensor_with_parallelism_into(self, keys, buffer_ptrs, sizes, targets=None):
        """Reads many parts into memory; None for all if the lists differ in length."""
        keys = several(keys, "batch_get_tensor_with_parallelism_into")
        targets = _each_of(targets, keys)
        if targets is None or not len(keys) == len(buffer_ptrs) == len(sizes):
            return [None] * len(keys)
        return [self.get_tensor_with_parallelism_into(*row) for row in zip(keys, buffer_ptrs, sizes, targets)]

    # --- files -----------------------------------------------------------------------------------------------------

    def save_tensor_to_safetensor(self, key, file_name=None):
        """Writes a stored tensor to a safetensors file, which by default is named after the key. Returns 0; -1100 if
        there is no such tensor, -600 if the file cannot be written."""
        from safetensors.torch import save_file

        tensor = self.get_tensor(key)
        if tensor is None:
            return FILE_NOT_FOUND
        name = key if file_name is None else file_name
        try:
            save_file({key: tensor}, name)
        except Exception as error:  # The library has errors of its own beside OSError.
            _say(f"save_tensor_to_safetensor: {name}: {error}")
            return INVALID_PARAMS
        return 0

    def load_tensor_from_safetensor(self, key=None, file_name=None):
        """Stores the tensor of this key from such a file, or the first one if the file has no such key, under the key
        or, without one, the file's name. Returns that tensor; None if the file cannot be read or has none."""
        from safetensors.torch import load_file

        if file_name is None:
            raise TypeError("load_tensor_from_safetensor(): file_name is missing")
        try:
            tensors = load_file(file_name)
        except Exception as error:  # The library has errors of its own beside OSError.
            _say(f"load_tensor_from_safetensor: {file_name}: {error}")
            return None
        if not tensors:
            _say(f"load_tensor_from_safetensor: {file_name} has no tensor")
            return None
        chosen = key if key in tensors else next(iter(tensors))
        if key is not None and key != chosen:
            _say(f"load_tensor_from_safetensor: {file_name} has no {key!r}: its first tensor, {chosen!r}, is taken")
        tensor = tensors[chosen]
        return tensor if self.put_tensor(file_name if key is None else key, tensor) == 0 else None


class _Object:
    """Object to put: its key, and its bytes, a head and memory at an address. `owner` keeps that memory."""

    def __init__(self, key, head, address=0, length=0, owner=None):
        self.key, self._head, self._address, self._length, self._owner = key, head, address, length, owner

    def size(self):
        """Returns the number of bytes."""
        return len(self._head) + self._length

    def pieces(self):
        """Returns addresses and lengths: the head is in this interpreter's memory, and the bytes are in torch's."""
        place = _native().buffer_address(self._head, False)[0] if self._head else 0
        return [place, self._address], [len(self._head), self._length]


def _put_batch(native, batch, codes, config, replace):
    """Puts objects, each with the row of its key, and records the first error of each row."""
    keys = [one.key for _, one in batch]
    columns = list(zip(*(one.pieces() for _, one in batch)))
    for indexes, options in put_batches(config, replace, len(batch), [row for row, _ in batch]):
        some = [keys[index] for index in indexes]
        pieces = [[column[index] for index in indexes] for column in columns]
        for index, code in zip(indexes, native.put_from_pieces(some, *pieces, options)):
            row = batch[index][0]
            codes[row] = codes[row] or _put_code(code)


def _objects(key, tensor, torch, layout=None):
    """Returns the object of a tensor, or the code of an error. For a part, `layout` has the whole shape and the axes."""
    if not isinstance(tensor, torch.Tensor):
        return INVALID_PARAMS
    tensor = _tensors.contiguous(tensor, torch)
    try:
        head = _tensors.header(tensor, torch, layout)
    except (TypeError, ValueError) as error:
        _say(f"{key!r}: {error}")
        return INVALID_PARAMS
    address, size = _tensors.raw(tensor, torch)
    return [_Object(key, head, address, size, tensor)]


def _parts(key, tensor, torch, tp_size, split_dim):
    """Returns the objects of the parts of a tensor, or the code of an error."""
    if tp_size <= 1:
        return _objects(key, tensor, torch)
    if not isinstance(tensor, torch.Tensor) or not -tensor.dim() <= split_dim < tensor.dim():
        return INVALID_PARAMS
    if tensor.shape[split_dim] < tp_size:
        return INVALID_PARAMS
    made = []
    for rank, part in enumerate(tensor.tensor_split(tp_size, split_dim)):
        axis = _parallel.Axis("tp", rank, tp_size, split_dim % tensor.dim())
        made.append(_objects(_part_key(key, rank), part, torch, (tensor.shape, (axis,))))
    return _joined_or_error(made)


def _part(key, tensor, where, torch):
    """Returns the objects of the part that the axes name, or that a writer has, and its manifest, if there is one; or
    the code of an error."""
    parallelism, writer = where
    if parallelism is None and writer is None:
        return _with_manifest(_objects(key, tensor, torch), None)
    if not isinstance(tensor, torch.Tensor) or None not in where:
        return INVALID_PARAMS
    if writer is not None:
        axis = _parallel.writer_axis(writer)
        if axis is None or not _parallel.is_uniform(tensor.shape, axis):
            return INVALID_PARAMS
        part = _parallel.narrowed(tensor, axis)
        objects = _objects(_parallel.writer_key(key, axis), part, torch, (tensor.shape, (axis,)))
        return _with_manifest(objects, _Object(f"{key}__writer_manifest", _parallel.manifest(axis)))
    axes = _parallel.axes_of(parallelism)
    if axes is None:
        return INVALID_PARAMS
    axis = _parallel.tensor_axis(axes)
    name = _parallel.part_key(key, axes)
    if axis is None:
        return _with_manifest(_objects(name, tensor, torch, (tensor.shape, axes)), None)
    if axis.split >= tensor.dim():
        return INVALID_PARAMS
    whole, part = list(tensor.shape), tensor
    if len(axes) == 1:
        whole[axis.split] *= axis.size
    elif not _parallel.is_uniform(whole, axis):
        return INVALID_PARAMS
    else:
        part = _parallel.narrowed(tensor, axis)
    return _with_manifest(_objects(name, part, torch, (whole, axes)), _axis_manifest(key, axis))


def _part_from(key, buffer_ptr, size, where, torch):
    """Does the same with memory that holds a tensor with its header; along a tensor-parallel axis, the tensor is the
    whole one, and all parts are returned."""
    parallelism, writer = where
    if parallelism is None and writer is None:
        return ([_Object(key, b"", buffer_ptr, size)], None) if _holds(buffer_ptr, size) else INVALID_PARAMS
    tensor = _held(buffer_ptr, size, torch) if None in where else None
    if tensor is None:
        return INVALID_PARAMS
    axes = _parallel.axes_of(parallelism) if writer is None else None
    axis = _parallel.tensor_axis(axes) if axes else None
    if axis is None:
        return _part(key, tensor, where, torch)
    if not _parallel.is_uniform(tensor.shape, axis):
        return INVALID_PARAMS
    made = []
    for rank in range(axis.size):
        part, these = _parallel.narrowed(tensor, axis._replace(rank=rank)), _parallel.at_rank(axes, rank, axis.size)
        made.append(_objects(_parallel.part_key(key, these), part, torch, (tensor.shape, these)))
    return _with_manifest(_joined_or_error(made), _axis_manifest(key, axis))


def _axis_manifest(key, axis):
    return _Object(f"{key}__parallelism_manifest", _parallel.manifest(axis))


def _with_manifest(objects, manifest):
    return objects if isinstance(objects, int) else (objects, manifest)


def _joined_or_error(made):
    """Joins lists of objects; the first code of an error, if there is one."""
    bad = next((one for one in made if isinstance(one, int)), None)
    return bad if bad is not None else [one for objects in made for one in objects]


def _say(text):
    import sys

    print(f"kvplane: {text}", file=sys.stderr)


def _memory(address, size):
    import ctypes

    return (ctypes.c_char * size).from_address(address)


def _axes_in(buffer):
    """Returns the axes of a stored part, none for a whole tensor; None if the bytes are no tensor."""
    try:
        return _tensors.axes_in(buffer)
    except ValueError:
        return None


def _native():
    from kvplane import _native as native

    return native


def _ranges_of(native, keys, versions, numbers, offsets, places, sizes):
    """Reads a range of each of these objects, of its version. Returns their lengths or error codes."""
    if not numbers:
        return []
    some, these = [keys[number] for number in numbers], [versions[number] for number in numbers]
    which = list(range(len(some)))
    return native.get_ranges(some, which, list(offsets), list(places), list(sizes), these)


def _place_for(head, tensor):
    """Returns offset, destination and number of the bytes of the tensor with this header; None if they do not match."""
    try:
        name, shape, offset, count = _tensors.parse_head(head)
    except ValueError:
        return None
    matches = str(tensor.dtype).rsplit(".", 1)[-1] == name and tensor.numel() * tensor.element_size() == count
    return (offset, tensor.data_ptr(), count) if matches and count and tensor.is_contiguous() else None


def _invalid(keys):
    return [INVALID_PARAMS] * len(keys)


def _holds(buffer_ptr, size):
    """Returns True if memory begins with the header of a tensor that has this size with it."""
    try:
        return _tensors.whole_size(_native().read_memory(buffer_ptr, _tensors.HEADER_BYTES)) == size
    except ValueError:
        return False


def _all_hold(keys, pointers, sizes):
    return len(keys) == len(pointers) == len(sizes) and all(map(_holds, pointers, sizes))


def _held(buffer_ptr, size, torch):
    """Returns a copy of the tensor that memory holds with its header; None if it does not hold one of this size."""
    if not _holds(buffer_ptr, size):
        return None
    try:
        return _view(bytearray(_native().read_memory(buffer_ptr, size)), torch)
    except ValueError:
        return None


def _view(buffer, torch):
    try:
        return _tensors.view(buffer, torch)
    except (ValueError, TypeError):
        return None


def _put_code(code):
    return INVALID_PARAMS if code == -400 else code


def _each_of(values, keys):
    """Returns one value for each key: those of a list of as many, or None for each. None for anything else."""
    if values is None:
        return [None] * len(keys)
    return values if isinstance(values, (list, tuple)) and len(values) == len(keys) else None
