"""The calls of a store that take and return torch tensors.

A tensor is an object with a header (`_tensors`). One that is split is an object for each part: of rank `r` along a
tensor-parallel axis, the key is `KEY_tp_r`.
"""

import copy

from mooncake import _tensors
from mooncake._types import TensorParallelism, kept, refused, several

INVALID_PARAMS = -600
NO_CUDA = "this needs a CUDA device's memory, and this build knows no CUDA; get into host memory and copy"


def _part_key(key, rank):
    return f"{key}_tp_{rank}"


def _axes(parallelism):
    """The axes of a `TensorParallelism`, or of a list of them."""
    if parallelism is None:
        return []
    axes = parallelism.axes if isinstance(parallelism, TensorParallelism) else list(parallelism)
    for axis in axes:
        if axis.kind not in ("tp", "dp", "ep", "pp") or not 0 <= axis.rank < max(axis.size, 1):
            raise ValueError(f"an axis is tp, dp, ep or pp, with a rank below its size; not {axis.kind!r}")
    return axes


def _full_key(key, axes):
    """A key that says which part of a tensor it is: along dp, all have the same."""
    for axis in axes:
        if axis.kind == "tp" and axis.size > 1:
            key = _part_key(key, axis.rank)
        elif axis.kind == "ep" and axis.size > 1:
            key = f"{key}_ep_{axis.rank if axis.expert_id is None else axis.expert_id}"
        elif axis.kind == "pp" and axis.size > 1:
            key = f"{key}_pp_{axis.rank if axis.stage_id is None else axis.stage_id}"
    return key


def _of_rank(axis, rank, split):
    """An axis; where it is the one that is put together, that of a rank."""
    if axis is not split:
        return axis
    one = copy.copy(axis)
    one.rank = rank
    return one


class TensorCalls:
    """Mixed into the store."""

    # --- one tensor ------------------------------------------------------------------------------------------------

    def _put_tensor(self, key, tensor, replace, config=None, keys=1):
        torch = _tensors.load_torch()
        if not isinstance(tensor, torch.Tensor):
            return INVALID_PARAMS
        native = self._native
        if native is None:
            return -1
        code = refused(config, keys)
        if code != 0:
            return code
        tensor = _tensors.contiguous(tensor, torch)
        address, size = _tensors.raw(tensor, torch)
        head = _tensors.header(tensor, torch)
        if size == 0:
            return _put_code(native.put(key, head, kept(config, replace)))
        # The header is in this interpreter's memory and the bytes are torch's: one object of two pieces.
        place = _native().buffer_address(head, False)[0]
        pieces = [[place, address]], [[len(head), size]]
        return _put_code(native.put_from_pieces([key], *pieces, kept(config, replace))[0])

    def put_tensor(self, key, tensor):
        """Stores a tensor."""
        return self._put_tensor(key, tensor, False)

    def upsert_tensor(self, key, tensor):
        """Stores a tensor in place of what is there."""
        return self._put_tensor(key, tensor, True)

    def pub_tensor(self, key, tensor, config=None):
        """Stores a tensor, and says how it is to be kept."""
        return self._put_tensor(key, tensor, False, config)

    def upsert_pub_tensor(self, key, tensor, config=None):
        """The same in place of what is there."""
        return self._put_tensor(key, tensor, True, config)

    def get_tensor(self, key):
        """A tensor; None when there is none."""
        torch = _tensors.load_torch()
        handle = self.get_buffer(key)
        return None if handle is None else _view(handle, torch)

    def put_tensor_from(self, key, buffer_ptr, size):
        """Stores memory that holds a tensor with its header."""
        return self.put_from(key, buffer_ptr, size)

    def upsert_tensor_from(self, key, buffer_ptr, size):
        """The same in place of what is there."""
        return self.upsert_from(key, buffer_ptr, size)

    def get_tensor_into(self, key, buffer_ptr, size):
        """Brings a tensor with its header into registered memory: a tensor over that memory, or None."""
        torch = _tensors.load_torch()
        got = self.get_into(key, buffer_ptr, size)
        if got < 0:
            return None
        import ctypes

        return _view((ctypes.c_char * got).from_address(buffer_ptr), torch)

    def get_tensor_into_cuda(self, key, tensor):
        """Not without CUDA."""
        raise NotImplementedError(NO_CUDA)

    # --- many ------------------------------------------------------------------------------------------------------

    def batch_put_tensor(self, keys, tensors_list):
        """Stores many tensors."""
        return _each(self.put_tensor, keys, tensors_list)

    def batch_upsert_tensor(self, keys, tensors_list):
        """Stores many in place of what is there."""
        return _each(self.upsert_tensor, keys, tensors_list)

    def batch_pub_tensor(self, keys, tensors_list, config=None):
        """Stores many, and says how they are to be kept."""
        return _each(lambda key, tensor: self._put_tensor(key, tensor, False, config, len(keys)), keys, tensors_list)

    def batch_upsert_pub_tensor(self, keys, tensors_list, config=None):
        """The same in place of what is there."""
        return _each(lambda key, tensor: self._put_tensor(key, tensor, True, config, len(keys)), keys, tensors_list)

    def batch_get_tensor(self, keys):
        """Many tensors; None for each that is not there."""
        torch = _tensors.load_torch()
        return [None if handle is None else _view(handle, torch) for handle in self.batch_get_buffer(keys)]

    def batch_put_tensor_from(self, keys, buffer_ptrs, sizes):
        """Stores memory that holds tensors with their headers."""
        return self.batch_put_from(keys, buffer_ptrs, sizes)

    def batch_upsert_tensor_from(self, keys, buffer_ptrs, sizes):
        """The same in place of what is there."""
        return self.batch_upsert_from(keys, buffer_ptrs, sizes)

    def batch_get_tensor_into(self, keys, buffer_ptrs, sizes):
        """Brings tensors into registered memory."""
        torch = _tensors.load_torch()
        import ctypes

        codes = self.batch_get_into(keys, buffer_ptrs, sizes)
        memory = [(ctypes.c_char * max(got, 0)).from_address(at) for got, at in zip(codes, buffer_ptrs)]
        return [None if got < 0 else _view(some, torch) for got, some in zip(codes, memory)]

    def batch_get_tensor_into_cuda(self, keys, tensors_list):
        """Not without CUDA."""
        raise NotImplementedError(NO_CUDA)

    # --- parts of tensors, along one axis --------------------------------------------------------------------------

    def put_tensor_with_tp(self, key, tensor, tp_rank=0, tp_size=1, split_dim=0):
        """Stores a tensor in `tp_size` parts, one object for each."""
        return self.pub_tensor_with_tp(key, tensor, None, tp_rank, tp_size, split_dim)

    def pub_tensor_with_tp(self, key, tensor, config=None, tp_rank=0, tp_size=1, split_dim=0):
        """The same, and says how they are to be kept."""
        return self._put_with_tp(key, tensor, config, tp_size, split_dim, 1)

    def _put_with_tp(self, key, tensor, config, tp_size, split_dim, keys):
        torch = _tensors.load_torch()
        if tp_size <= 1:
            return self._put_tensor(key, tensor, False, config, keys)
        if not isinstance(tensor, torch.Tensor) or not -tensor.dim() <= split_dim < tensor.dim():
            return INVALID_PARAMS
        if tensor.shape[split_dim] < tp_size:
            return INVALID_PARAMS
        for rank, part in enumerate(tensor.tensor_split(tp_size, split_dim)):
            code = self._put_tensor(_part_key(key, rank), part, False, config, None)
            if code != 0:
                return code
        return 0

    def get_tensor_with_tp(self, key, tp_rank=0, tp_size=1, split_dim=0):
        """The part of one rank; None when it is not there."""
        return self.get_tensor(_part_key(key, tp_rank) if tp_size > 1 else key)

    def put_tensor_with_tp_from(self, key, buffer_ptr, size, tp_rank=0, tp_size=1, split_dim=0):
        """Stores memory that holds the part of one rank, with its header."""
        return self.put_from(_part_key(key, tp_rank) if tp_size > 1 else key, buffer_ptr, size)

    def get_tensor_with_tp_into(self, key, buffer_ptr, size, tp_rank=0, tp_size=1, split_dim=0):
        """Brings the part of one rank into registered memory."""
        return self.get_tensor_into(_part_key(key, tp_rank) if tp_size > 1 else key, buffer_ptr, size)

    def batch_put_tensor_with_tp(self, base_keys, tensors_list, tp_rank=0, tp_size=1, split_dim=0):
        """Stores many in parts."""
        put = lambda key, tensor: self.put_tensor_with_tp(key, tensor, tp_rank, tp_size, split_dim)
        return _each(put, base_keys, tensors_list)

    def batch_pub_tensor_with_tp(
        self, base_keys, tensors_list, config=None, tp_rank=0, tp_size=1, split_dim=0
    ):
        """The same, and says how they are to be kept."""
        put = lambda key, tensor: self._put_with_tp(key, tensor, config, tp_size, split_dim, len(base_keys))
        return _each(put, base_keys, tensors_list)

    def batch_get_tensor_with_tp(self, base_keys, tp_rank=0, tp_size=1):
        """The parts of one rank."""
        keys = several(base_keys, "batch", "base_keys")
        return self.batch_get_tensor([_part_key(key, tp_rank) if tp_size > 1 else key for key in keys])

    def batch_put_tensor_with_tp_from(self, base_keys, buffer_ptrs, sizes, tp_rank=0, tp_size=1, split_dim=0):
        """Stores memory that holds parts of one rank."""
        keys = [_part_key(key, tp_rank) if tp_size > 1 else key for key in several(base_keys, "batch", "base_keys")]
        return self.batch_put_from(keys, buffer_ptrs, sizes)

    def batch_get_tensor_with_tp_into(self, base_keys, buffer_ptrs, sizes, tp_rank=0, tp_size=1):
        """Brings parts of one rank into registered memory."""
        keys = [_part_key(key, tp_rank) if tp_size > 1 else key for key in several(base_keys, "batch", "base_keys")]
        return self.batch_get_tensor_into(keys, buffer_ptrs, sizes)

    # --- parts of tensors, along several axes ----------------------------------------------------------------------

    def put_tensor_with_parallelism(self, key, tensor, parallelism=None, config=None, writer_partition=None):
        """Stores the part of a tensor that its axes say: the tensor given is that part."""
        return self._put_tensor(_full_key(key, _axes(parallelism)), tensor, False, config)

    def upsert_tensor_with_parallelism(self, key, tensor, parallelism=None, config=None, writer_partition=None):
        """The same in place of what is there."""
        return self._put_tensor(_full_key(key, _axes(parallelism)), tensor, True, config)

    def put_tensor_with_parallelism_from(
        self, key, buffer_ptr, size, parallelism=None, config=None, writer_partition=None
    ):
        """The same from memory that holds the part with its header."""
        return self.put_from(_full_key(key, _axes(parallelism)), buffer_ptr, size, config)

    def upsert_tensor_with_parallelism_from(
        self, key, buffer_ptr, size, parallelism=None, config=None, writer_partition=None
    ):
        """The same in place of what is there."""
        return self.upsert_from(_full_key(key, _axes(parallelism)), buffer_ptr, size, config)

    def get_tensor_with_parallelism(self, key, target=None):
        """A tensor as its target says: as it was stored, one part, or all parts of a tensor-parallel axis together."""
        torch = _tensors.load_torch()
        axes = _axes(target.parallelism) if target is not None else []
        if target is None or target.mode in ("as_stored", "shard"):
            return self.get_tensor(_full_key(key, axes))
        if target.mode != "full":
            raise ValueError(f"a target's mode is as_stored, shard or full, not {target.mode!r}")
        split = next((axis for axis in axes if axis.kind == "tp" and axis.size > 1), None)
        if split is None:
            return self.get_tensor(_full_key(key, axes))
        keys = [_full_key(key, [_of_rank(axis, rank, split) for axis in axes]) for rank in range(split.size)]
        parts = self.batch_get_tensor(keys)
        return None if any(part is None for part in parts) else torch.cat(parts, split.split_dim or 0)

    def get_tensor_with_parallelism_into(self, key, buffer_ptr, size, target=None):
        """Brings one part into registered memory."""
        if target is not None and target.mode == "full":
            return None
        axes = _axes(target.parallelism) if target is not None else []
        return self.get_tensor_into(_full_key(key, axes), buffer_ptr, size)

    def batch_put_tensor_with_parallelism(
        self, keys, tensors_list, parallelisms=None, config=None, writer_partitions=None
    ):
        """Stores many parts."""
        rows = zip(several(keys, "batch_put_tensor_with_parallelism"), tensors_list, _all(parallelisms, keys))
        put = lambda key, part, axes: self._put_tensor(_full_key(key, _axes(axes)), part, False, config, len(keys))
        return [put(*row) for row in rows]

    def batch_upsert_tensor_with_parallelism(
        self, keys, tensors_list, parallelisms=None, config=None, writer_partitions=None
    ):
        """The same in place of what is there."""
        rows = zip(several(keys, "batch_upsert_tensor_with_parallelism"), tensors_list, _all(parallelisms, keys))
        put = lambda key, part, axes: self._put_tensor(_full_key(key, _axes(axes)), part, True, config, len(keys))
        return [put(*row) for row in rows]

    def batch_put_tensor_with_parallelism_from(
        self, keys, buffer_ptrs, sizes, parallelisms=None, config=None, writer_partitions=None
    ):
        """Stores many parts from memory."""
        several(keys, "batch_put_tensor_with_parallelism_from")
        names = [_full_key(key, _axes(axes)) for key, axes in zip(keys, _all(parallelisms, keys))]
        return self.batch_put_from(names, buffer_ptrs, sizes, config)

    def batch_upsert_tensor_with_parallelism_from(
        self, keys, buffer_ptrs, sizes, parallelisms=None, config=None, writer_partitions=None
    ):
        """The same in place of what is there."""
        several(keys, "batch_upsert_tensor_with_parallelism_from")
        names = [_full_key(key, _axes(axes)) for key, axes in zip(keys, _all(parallelisms, keys))]
        return self.batch_upsert_from(names, buffer_ptrs, sizes, config)

    def batch_get_tensor_with_parallelism(self, keys, targets=None):
        """Many tensors as their targets say."""
        keys = several(keys, "batch_get_tensor_with_parallelism")
        return [self.get_tensor_with_parallelism(key, target) for key, target in zip(keys, _all(targets, keys))]

    def batch_get_tensor_with_parallelism_into(self, keys, buffer_ptrs, sizes, targets=None):
        """Brings many parts into registered memory."""
        keys = several(keys, "batch_get_tensor_with_parallelism_into")
        rows = zip(keys, buffer_ptrs, sizes, _all(targets, keys))
        return [self.get_tensor_with_parallelism_into(*row) for row in rows]

    # --- files -----------------------------------------------------------------------------------------------------

    def save_tensor_to_safetensor(self, key, file_name=None):
        """Writes a stored tensor to a file of safetensors."""
        from safetensors.torch import save_file

        tensor = self.get_tensor(key)
        if tensor is None:
            return -704
        save_file({key: tensor}, file_name or f"{key}.safetensors")
        return 0

    def load_tensor_from_safetensor(self, key=None, file_name=None):
        """Stores the tensors of such a file, or the one of this key; that one, or all by their keys."""
        from safetensors.torch import load_file

        if file_name is None:
            raise TypeError("load_tensor_from_safetensor(): file_name is missing")
        tensors = load_file(file_name)
        chosen = tensors if key is None else {key: tensors[key]}
        for name, tensor in chosen.items():
            code = self.put_tensor(name, tensor)
            if code != 0:
                return code
        return chosen if key is None else chosen[key]


def _native():
    from kvplane import _native as native

    return native


def _view(buffer, torch):
    try:
        return _tensors.view(buffer, torch)
    except (ValueError, TypeError):
        return None


def _put_code(code):
    return INVALID_PARAMS if code == -400 else code


def _each(put, keys, tensors):
    several(keys, "batch")
    if len(keys) != len(tensors):
        return [INVALID_PARAMS] * len(keys)
    return [put(key, tensor) for key, tensor in zip(keys, tensors)]


def _all(values, keys):
    """One for each key."""
    if values is None or not isinstance(values, (list, tuple)):
        return [values] * len(keys)
    if len(values) != len(keys):
        raise ValueError(f"{len(values)} for {len(keys)} keys")
    return values
