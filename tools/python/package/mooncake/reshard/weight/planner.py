"""The planner under its public names."""

from mooncake.reshard.weight._planner.api import (
    plan_placement_transfer,
    plan_placement_transfer_to_local_target,
    plan_stored_transfer_to_target_placement,
)
from mooncake.reshard.weight._planner.attested import (
    BoundWeightFragment,
    RuntimeBindingAttestation,
    RuntimeBindingEvidence,
)
from mooncake.reshard.weight._planner.binding import (
    bind_logical_transfer_plan,
    resolve_executor_plan,
    resolve_executor_plans,
)
from mooncake.reshard.weight._planner.bound import ExecutorTransferPlan, RuntimeFragmentSnapshot, TransferPlan
from mooncake.reshard.weight._planner.contracts import (
    ExecutableTransferOperation,
    LiveTransferOperation,
    LogicalTransferOperation,
    LogicalTransferPlan,
    PipelineRouteGroup,
    PlacementExecutorPlan,
    PlanningLimits,
    RuntimeTensorOwner,
    StoredLoadOperation,
    TransferRegion,
)

__all__ = [
    "BoundWeightFragment",
    "ExecutableTransferOperation",
    "ExecutorTransferPlan",
    "LiveTransferOperation",
    "RuntimeBindingAttestation",
    "RuntimeBindingEvidence",
    "RuntimeFragmentSnapshot",
    "RuntimeTensorOwner",
    "StoredLoadOperation",
    "TransferPlan",
    "bind_logical_transfer_plan",
    "resolve_executor_plan",
    "resolve_executor_plans",
    "LogicalTransferPlan",
    "LogicalTransferOperation",
    "PlanningLimits",
    "PipelineRouteGroup",
    "PlacementExecutorPlan",
    "TransferRegion",
    "plan_placement_transfer",
    "plan_placement_transfer_to_local_target",
    "plan_stored_transfer_to_target_placement",
]
