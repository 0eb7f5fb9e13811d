from typing import Any, List, NoReturn, Optional, Tuple

from mooncake.mooncake_ep_buffer import EventHandle as EventHandle
from mooncake.mooncake_ep_buffer import EventOverlap as EventOverlap

#: A torch tensor in host memory, or a numpy array.
Array = Any
#: A process group of torch, or a `kvplane.group.Group`.
Group = Any

def calculate_elastic_buffer_size(
    num_ranks: int,
    num_max_tokens_per_rank: int,
    hidden: int,
    num_topk: int,
    use_fp8_dispatch: bool,
    allow_hybrid_mode: bool,
    allow_multiple_reduction: bool,
) -> int: ...

class EPHandle:
    do_expand: bool
    num_experts: int
    expert_alignment: int
    num_max_tokens_per_rank: int
    num_sms: Optional[int]
    topk_idx: Any
    num_recv_tokens_per_expert_list: List[int]
    psum_num_recv_tokens_per_scaleup_rank: Any
    psum_num_recv_tokens_per_expert: Any
    num_unaligned_recv_tokens_per_expert: Any
    recv_src_metadata: Any
    dst_buffer_slot_idx: Any
    token_metadata_at_forward: Any
    channel_linked_list: Any
    native_handle: Any
    num_recv_tokens: int
    def __init__(
        self,
        do_expand: bool,
        num_experts: int,
        expert_alignment: int,
        num_max_tokens_per_rank: int,
        num_sms: Optional[int],
        topk_idx: Any,
        num_recv_tokens_per_expert_list: List[int],
        psum_num_recv_tokens_per_scaleup_rank: Any,
        psum_num_recv_tokens_per_expert: Any,
        recv_src_metadata: Any,
        dst_buffer_slot_idx: Any,
        token_metadata_at_forward: Any,
        channel_linked_list: Any,
        native_handle: Any = ...,
        num_unaligned_recv_tokens_per_expert: Any = ...,
    ) -> None: ...

class ElasticBuffer:
    active_ranks: Any
    group: Group
    rank_idx: int
    num_ranks: int
    num_bytes: int
    num_scaleout_ranks: int
    num_scaleup_ranks: int
    scaleout_rank_idx: int
    scaleup_rank_idx: int
    num_rdma_ranks: int
    num_nvlink_ranks: int
    def __init__(
        self,
        group: Group,
        num_bytes: Optional[int] = ...,
        num_max_tokens_per_rank: int = ...,
        hidden: int = ...,
        num_topk: int = ...,
        use_fp8_dispatch: bool = ...,
        deterministic: bool = ...,
        allow_hybrid_mode: bool = ...,
        allow_multiple_reduction: bool = ...,
        prefer_overlap_with_compute: bool = ...,
        sl_idx: int = ...,
        num_allocated_qps: int = ...,
        num_cpu_timeout_secs: int = ...,
        num_gpu_timeout_secs: int = ...,
        explicitly_destroy: bool = ...,
    ) -> None: ...
    def update_ep_member(self) -> None: ...
    def destroy(self) -> None: ...
    @staticmethod
    def get_buffer_size_hint(
        group: Group,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = ...,
        use_fp8_dispatch: bool = ...,
        allow_hybrid_mode: bool = ...,
        allow_multiple_reduction: bool = ...,
    ) -> int: ...
    @staticmethod
    def get_engram_storage_size_hint(
        num_entries: int, hidden: int, num_max_tokens_per_rank: int, dtype: Any = ...
    ) -> int: ...
    @staticmethod
    def get_pp_buffer_size_hint(num_max_tensor_bytes: int, num_max_inflight_tensors: int) -> int: ...
    @staticmethod
    def get_agrs_buffer_size_hint(group: Group, num_max_session_bytes: int) -> int: ...
    def get_physical_domain_size(self) -> Tuple[int, int]: ...
    def get_logical_domain_size(self) -> Tuple[int, int]: ...
    def barrier(self, use_comm_stream: bool = ..., with_cpu_sync: bool = ..., sequential: bool = ...) -> None: ...
    @staticmethod
    def capture() -> EventHandle: ...
    def get_theoretical_num_sms(self, *arguments: Any, **keywords: Any) -> NoReturn: ...
    def get_comm_stream(self, *arguments: Any, **keywords: Any) -> NoReturn: ...
    def engram_write(self, *arguments: Any, **keywords: Any) -> NoReturn: ...
    def engram_fetch(self, *arguments: Any, **keywords: Any) -> NoReturn: ...
    def pp_set_config(self, *arguments: Any, **keywords: Any) -> NoReturn: ...
    def pp_send(self, *arguments: Any, **keywords: Any) -> NoReturn: ...
    def pp_recv(self, *arguments: Any, **keywords: Any) -> NoReturn: ...
    def create_agrs_session(self, *arguments: Any, **keywords: Any) -> NoReturn: ...
    def destroy_agrs_session(self, *arguments: Any, **keywords: Any) -> NoReturn: ...
    def agrs_new_session(self, *arguments: Any, **keywords: Any) -> NoReturn: ...
    def agrs_set_config(self, *arguments: Any, **keywords: Any) -> NoReturn: ...
    def agrs_get_inplace_tensor(self, *arguments: Any, **keywords: Any) -> NoReturn: ...
    def all_gather(self, *arguments: Any, **keywords: Any) -> NoReturn: ...
    def dispatch(
        self,
        x: Any,
        topk_idx: Optional[Array] = ...,
        topk_weights: Optional[Array] = ...,
        num_experts: Optional[int] = ...,
        num_max_tokens_per_rank: Optional[int] = ...,
        expert_alignment: Optional[int] = ...,
        handle: Optional[EPHandle] = ...,
        do_expand: bool = ...,
        do_cpu_sync: Optional[bool] = ...,
        num_sms: Optional[int] = ...,
        async_with_compute_stream: bool = ...,
        *,
        cumulative_local_expert_recv_stats: Optional[Array] = ...,
        previous_event: Optional[EventHandle] = ...,
        previous_event_before_epilogue: Optional[EventHandle] = ...,
        do_handle_copy: bool = ...,
        do_zero_padding: bool = ...,
        use_tma_aligned_col_major_sf: bool = ...,
    ) -> Tuple[Any, Any, Any, EPHandle, EventOverlap]: ...
    def combine(
        self,
        x: Array,
        handle: EPHandle,
        topk_weights: Optional[Array] = ...,
        num_sms: Optional[int] = ...,
        async_with_compute_stream: bool = ...,
        *,
        bias: Any = ...,
        previous_event: Optional[EventHandle] = ...,
        previous_event_before_epilogue: Optional[EventHandle] = ...,
    ) -> Tuple[Any, Any, EventOverlap]: ...
