from typing import Any, List, Optional, Tuple

from mooncake.mooncake_elastic_buffer import ElasticBuffer as ElasticBuffer
from mooncake.mooncake_elastic_buffer import EPHandle as EPHandle
from mooncake.mooncake_elastic_buffer import calculate_elastic_buffer_size as calculate_elastic_buffer_size
from mooncake.mooncake_ep_buffer import Buffer as Buffer
from mooncake.mooncake_ep_buffer import EventHandle as EventHandle
from mooncake.mooncake_ep_buffer import EventOverlap as EventOverlap
from mooncake.mooncake_ep_buffer import get_ep_buffer_size_hint as get_ep_buffer_size_hint

#: A torch tensor in host memory, or a numpy array.
Array = Any

MAX_QP_COUNT: int

class ExpertPlacement:
    physical_to_logical_map: Any
    num_logical_experts: int
    num_physical_experts: int
    num_ranks: int
    def __init__(
        self, physical_to_logical_map: Array, num_logical_experts: int, num_ranks: int, rank: int = ...
    ) -> None: ...
    def logical_to_physical(self, active_ranks: Optional[Array] = ...) -> Tuple[Any, Any]: ...
    def lost_logical_experts(self, active_ranks: Optional[Array]) -> Any: ...
    def topk_ids_logical_to_physical(self, topk_ids: Array, active_ranks: Optional[Array] = ...) -> Any: ...

class RankMismatch(RuntimeError):
    rank: int
    field: str
    theirs: Any
    ours: Any
    def __init__(self, rank: int, field: str, theirs: Any, ours: Any) -> None: ...

class SourceTimeout(TimeoutError):
    ranks: List[int]
    def __init__(self, kind: str, timeout: Optional[float], ranks: List[int]) -> None: ...
