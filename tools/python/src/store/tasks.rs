//! Who has copies of objects, and tasks that make them, in the numbers that Mooncake's users compare with.

use kvplane::Error;
use kvplane::rpc::message::{TaskState, TaskStatus};
use kvplane::rpc::{CallError, RefusalCode};

use crate::cpython::Keys;
use crate::outcome::{failed, store_code};
use crate::store::clients::Clients;

/// `TASK_NOT_FOUND`.
const NO_TASK: i64 = -1400;
/// `TASK_PENDING_LIMIT_EXCEEDED`.
const TOO_MANY: i64 = -1401;
/// `INVALID_PARAMS`, as the original answers for a segment that is not there.
const NO_SEGMENT: i64 = -600;
/// `NOT_SUPPORTED`: this cluster keeps one copy of everything, or the task is too large.
const NOT_HERE: i64 = -1012;

/// A task as Python sees it: state by Mooncake's numbers, objects, copied ones, when it was made and last changed in
/// milliseconds since 1970, and a message.
pub(crate) type TaskTuple = (u8, u32, u32, u64, u64, String);

/// Where the objects of these keys are: for each the addresses of its shards, none where that cannot be asked.
pub(crate) fn replicas(clients: &Clients, keys: &Keys) -> Vec<Vec<String>> {
    let keys: Vec<&[u8]> = keys.iter().collect();
    let places = clients.with(|member| member.client.replicas(&keys));
    let places = places.ok().and_then(Result::ok).unwrap_or_else(|| vec![Vec::new(); keys.len()]);
    places.into_iter().map(|shards| shards.iter().map(ToString::to_string).collect()).collect()
}

/// Has second owners give their copies of these objects up: for each 1 where one had it, 0 where none had, or an
/// error's number.
pub(crate) fn remove_copies(clients: &Clients, keys: &Keys) -> Vec<i64> {
    let keys: Vec<&[u8]> = keys.iter().collect();
    match clients.with(|member| member.client.remove_copies(&keys)) {
        Ok(Ok(gone)) => gone.into_iter().map(|gone| gone.map_or_else(|why| store_code(&why), i64::from)).collect(),
        Ok(Err(why)) => vec![store_code(&why); keys.len()],
        Err(code) => vec![code; keys.len()],
    }
}

/// Has objects copied to a second node: the number of the task, or 0 and an error's number.
pub(crate) fn create(clients: &Clients, keys: &Keys, targets: &[String]) -> (u64, i64) {
    let keys: Vec<&[u8]> = keys.iter().collect();
    match clients.with(|member| member.client.create_copy_task(&keys, targets)) {
        Ok(Ok(id)) => (id, 0),
        Ok(Err(error)) => (0, code_of(&error)),
        Err(code) => (0, code),
    }
}

/// The number for why a task was not made, or not ended.
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

/// A task, or the number for none.
pub(crate) fn seen(task: Option<TaskStatus>) -> Result<TaskTuple, i64> {
    let Some(task) = task else { return Err(failed(NO_TASK, "there is no such task, or not any more")) };
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
