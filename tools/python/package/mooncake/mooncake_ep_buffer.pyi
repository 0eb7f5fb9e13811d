from typing import Any, Callable, Optional, Tuple

#: A torch tensor in host memory, or a numpy array.
Array = Any
#: A process group of torch, or a `kvplane.group.Group`.
Group = Any
Handle = Tuple[Any, Any, int, int, int]

def get_ep_buffer_size_hint(
    num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
) -> int: ...

class EventHandle:
    def __init__(self, stream_ptr: int = ...) -> None: ...
    def current_stream_wait(self, stream_ptr: int = ...) -> None: ...
    def synchronize(self) -> None: ...

class EventOverlap:
    event: Optional[EventHandle]
    extra_tensors: Optional[tuple]
    def __init__(self, event: Optional[EventHandle] = ..., extra_tensors: Optional[tuple] = ...) -> None: ...
    def current_stream_wait(self, release_handle: bool = ...) -> None: ...
    def __call__(self, release_handle: bool = ...) -> EventOverlap: ...
    def __enter__(self) -> EventOverlap: ...
    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None: ...

class Buffer:
    group: Group
    backend: Group
    rank: int
    group_size: int
    num_ep_buffer_bytes: int
    disable_p2p: bool
    def __init__(self, group: Group, num_ep_buffer_bytes: int = ..., disable_p2p: bool = ...) -> None: ...
    def connect(self, is_update: bool = ...) -> None: ...
    def update_ep_member(self) -> None: ...
    @staticmethod
    def get_ep_buffer_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int: ...
    def dispatch(
        self,
        x: Array,
        topk_idx: Array,
        active_ranks: Optional[Array],
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        timeout_us: int,
        use_fp8: Optional[bool] = ...,
        async_finish: bool = ...,
        return_recv_hook: bool = ...,
    ) -> Tuple[Any, Any, Handle, EventOverlap, Optional[Callable[[], None]]]: ...
    def combine(
        self,
        x: Array,
        topk_idx: Array,
        topk_weights: Array,
        active_ranks: Optional[Array],
        timeout_us: int,
        handle: Handle,
        zero_copy: bool = ...,
        async_finish: bool = ...,
        return_recv_hook: bool = ...,
        out: Optional[Array] = ...,
    ) -> Tuple[Any, EventOverlap, Optional[Callable[[], None]]]: ...
    def get_next_combine_buffer(self, handle: Handle) -> Any: ...
