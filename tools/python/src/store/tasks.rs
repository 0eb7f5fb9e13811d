//! Holders of objects, and replication tasks, in the numbers that Mooncake's users compare with.

use kvplane::Error;
use kvplane::rpc::message::{TaskState, TaskStatus};
use kvplane::rpc::{CallError, RefusalCode};
use pyo3::prelude::*;

use crate::cpython::Keys;
use crate::outcome::{failed, store_code};
use crate::store::Store;
use crate::store::clients::Clients;
use crate::store::values::each;
use crate::waiting::waiting;

/// `TASK_NOT_FOUND`.
const NO_TASK: i64 = -1400;
/// `TASK_PENDING_LIMIT_EXCEEDED`.
const TOO_MANY: i64 = -1401;
/// `INVALID_PARAMS`, as Mooncake answers for a missing segment.
const NO_SEGMENT: i64 = -600;
/// `NOT_SUPPORTED`: this cluster keeps a single replica of everything, or the task is too large.
const NOT_HERE: i64 = -1012;

/// Task as Python sees it: state in Mooncake's numbers, objects, replicated ones, times of creation and of the last
/// change in milliseconds since 1970, and a message.
pub(crate) type TaskTuple = (u8, u32, u32, u64, u64, String);

/// Returns the addresses of the shards that hold the objects under these keys; empty where that is unavailable.
pub(crate) fn replicas(clients: &Clients, keys: &Keys) -> Vec<Vec<String>> {
    let keys: Vec<&[u8]> = keys.iter().collect();
    let places = clients.with(|member| member.client.replicas().locate(&keys));
    let places = places.ok().and_then(Result::ok).unwrap_or_else(|| vec![Vec::new(); keys.len()]);
    places.into_iter().map(|shards| shards.iter().map(ToString::to_string).collect()).collect()
}

/// Returns true if a member of a store's cluster has a segment of this name, by the map in use.
#[pyfunction]
pub(crate) fn has_segment(py: Python<'_>, store: &Bound<'_, Store>, name: &str) -> PyResult<bool> {
    let clients = &store.get().clients;
    let found = waiting(py, || clients.with(|member| member.client.placement().node_of_segment(name).is_some()))?;
    Ok(found.unwrap_or_default())
}

/// Removes the replicas of these objects. Returns for each 1 if there was one, 0 if not, or an error code.
pub(crate) fn remove_copies(clients: &Clients, keys: &Keys) -> Vec<i64> {
    each(clients, keys, |client, keys| client.replicas().remove(keys))
}

/// Replicates objects. Returns the number of the task, or 0 and an error code.
pub(crate) fn create(clients: &Clients, keys: &Keys, targets: &[String]) -> (u64, i64) {
    let keys: Vec<&[u8]> = keys.iter().collect();
    match clients.with(|member| member.client.replicas().create_task(&keys, targets)) {
        Ok(Ok(id)) => (id, 0),
        Ok(Err(error)) => (0, code_of(&error)),
        Err(code) => (0, code),
    }
}

/// Returns the code of a task that was not created, or not cancelled.
pub(crate) fn code_of(error: &Error) -> i64 {
    let Error::Call(CallError::Refused(refusal)) = error else { return store_code(error) };
    let code = match refusal.known_code() {
        Some(RefusalCode::NotFound) => NO_SEGMENT,
        Some(RefusalCode::LimitReached) => TOO_MANY,
        Some(RefusalCode::BadRequest) => NOT_HERE,
        _ => return store_code(error),
    };
    failed(code, refusal.reason.clone())
}

/// Converts the state of a task; an error code if there is none.
pub(crate) fn seen(task: Option<TaskStatus>) -> Result<TaskTuple, i64> {
    let Some(task) = task else { return Err(failed(NO_TASK, "there is no such task, or it was forgotten")) };
    let state = match task.state {
        TaskState::Pending => 0,
        TaskState::Running => 1,
        TaskState::Failed | TaskState::Cancelled => 2,
        TaskState::Succeeded => 3,
    };
    let message = match task.state {
        TaskState::Cancelled => "cancelled".to_owned(),
        _ => task.message,
    };
    Ok((state, task.objects, task.copied, task.created_ms, task.updated_ms, message))
}
