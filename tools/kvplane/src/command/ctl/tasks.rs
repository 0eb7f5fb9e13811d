//! `kvplane ctl tasks` and `kvplane ctl copy`: lists tasks in flight, and replicates objects to a second node.

use std::time::{Duration, Instant};

use clap::Args;
use kvplane::rpc::message::{CancelTask, ListTasks, MemberStatus, Status, TaskState, TaskStatus};
use kvplane::{Client, ControlLink};
use serde_json::{Value, json};

use crate::command::process::durations;
use crate::command::{Failure, size};

/// Interval at which a task is polled while the command waits for it.
const LOOK: Duration = Duration::from_millis(50);

/// List or cancel tasks.
#[derive(Args)]
pub(crate) struct Tasks {
    /// Print as JSON.
    #[arg(long)]
    json: bool,
    /// Cancel the copy task with this number. Replicas that it has made stay.
    #[arg(long, value_name = "NUMBER")]
    cancel: Option<u64>,
}

/// Replicate objects to a second node.
#[derive(Args)]
pub(crate) struct CopyKeys {
    /// Keys of the objects; at most 512.
    #[arg(required = true)]
    keys: Vec<String>,
    /// Time to wait for the task, in seconds. 0: do not wait.
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = durations::seconds())]
    wait: u64,
}

impl CopyKeys {
    pub(super) fn run(&self, client: &mut Client) -> Result<(), Failure> {
        let id = client.replicas().create_task(&self.keys, &[])?;
        let until = Instant::now() + Duration::from_secs(self.wait);
        loop {
            let Some(task) = client.replicas().task(id)? else {
                return Err(format!("task {id} is unknown: the control plane keeps tasks for a limited time").into());
            };
            match task.state {
                TaskState::Succeeded => {
                    println!("task {id}: {} of {} objects are replicated", task.copied, task.objects);
                    return Ok(());
                }
                TaskState::Failed => return Err(format!("task {id} failed: {}", task.message).into()),
                TaskState::Cancelled => return Err(format!("task {id} was cancelled").into()),
                TaskState::Pending | TaskState::Running if Instant::now() >= until => {
                    println!("task {id}: {} of {} objects are replicated so far", task.copied, task.objects);
                    return Ok(());
                }
                TaskState::Pending | TaskState::Running => std::thread::sleep(LOOK),
            }
        }
    }
}

impl Tasks {
    pub(super) fn run(&self, link: &ControlLink) -> Result<(), Failure> {
        if let Some(id) = self.cancel {
            link.call(CancelTask { tenant: link.own_tenant().map(str::to_owned), id })?;
            println!("task {id} is cancelled; the replicas that it has made stay");
            return Ok(());
        }
        let status = link.call(Status)?;
        let drained: Vec<&MemberStatus> = status.members.iter().filter(|member| member.state == "draining").collect();
        let copying = all(link)?;
        if self.json {
            let shown: Vec<Value> = drained.into_iter().map(drain_json).chain(copying.iter().map(copy_json)).collect();
            println!("{:#}", json!({ "tasks": shown }));
            return Ok(());
        }
        if drained.is_empty() && copying.is_empty() {
            println!("no task is in flight");
        }
        for member in drained {
            let left = member.load.map_or_else(
                || "the node has not reported yet what is left".to_owned(),
                |load| format!("{} objects, {}, are left in its memory", load.objects, size::show(load.used_bytes)),
            );
            println!("drain of node {}: {left}", member.node);
        }
        for task in copying {
            let (copied, of, state) = (task.copied, task.objects, word(task.state));
            let why = if task.message.is_empty() { String::new() } else { format!(": {}", task.message) };
            println!("copy {} of {:?}: {state}, {copied} of {of} objects{why}", task.id, task.name);
        }
        Ok(())
    }
}

/// Lists all copy tasks, also ended ones.
fn all(link: &ControlLink) -> Result<Vec<TaskStatus>, Failure> {
    let (mut tasks, mut after) = (Vec::new(), 0);
    loop {
        // A certificate for one tenant may list only that tenant's tasks.
        let tenant = link.own_tenant().map(str::to_owned);
        let page = link.call(ListTasks { tenant, id: None, after })?;
        tasks.extend(page.tasks);
        match tasks.last().filter(|_| page.more) {
            Some(last) => after = last.id,
            None => return Ok(tasks),
        }
    }
}

const fn word(state: TaskState) -> &'static str {
    match state {
        TaskState::Pending => "pending",
        TaskState::Running => "running",
        TaskState::Succeeded => "succeeded",
        TaskState::Failed => "failed",
        TaskState::Cancelled => "cancelled",
    }
}

fn drain_json(member: &MemberStatus) -> Value {
    json!({
        "task": "drain",
        "node": member.node,
        "incarnation": member.incarnation,
        "objects_left": member.load.map(|load| load.objects),
        "bytes_left": member.load.map(|load| load.used_bytes),
    })
}

fn copy_json(task: &TaskStatus) -> Value {
    json!({
        "task": "copy",
        "id": task.id,
        "tenant": if task.tenant.is_empty() { "default" } else { &task.tenant },
        "name": task.name,
        "state": word(task.state),
        "objects": task.objects,
        "copied": task.copied,
        "bytes": task.bytes,
        "created_ms": task.created_ms,
        "updated_ms": task.updated_ms,
        "message": task.message,
    })
}
