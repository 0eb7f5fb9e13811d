//! Side of the successor: it prepares while the running process serves, takes over, and reports that it serves.

use std::net::TcpListener;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;

use kvplane_cluster::handover::{SuccessorEnd, SuccessorInput, SuccessorStep};
use kvplane_engine::{KeptFiles, MappedMemory, ShardListeners};
use kvplane_proto::ids::Incarnation;
use kvplane_sys::MemoryDirectory;
use serde_json::{Value, json};

use super::message::{check_user, expect, number, receive, send};
use super::{Handover, HandoverError, Line, PREPARATION, REPLY, UpgradeReport, socket_path, sockets_of};
use crate::error::Error;
use crate::link::software;
use crate::node::{Node, NodeConfig, NodeConfigError, NodePlan};

/// Link of a successor to the running process of its node.
pub struct Succession {
    stream: UnixStream,
    end: SuccessorEnd,
    mapped: Vec<Arc<MappedMemory>>,
    plan: Option<Box<NodePlan>>,
}

impl Succession {
    /// Asks the running process of the node for its memory, connects to the control plane, and maps the memory. The
    /// running process serves meanwhile.
    ///
    /// # Errors
    /// When no process of the node runs here, when it refuses, or when this process could not start.
    pub fn begin(config: &NodeConfig) -> Result<Self, Error> {
        let Some(node) = config.node else { return Err(NodeConfigError::KeptMemoryWithoutNode.into()) };
        let sockets = sockets_of(config.runtime_directory.as_deref())?;
        let path = socket_path(&sockets, config.control.cluster(), node);
        let stream = UnixStream::connect(&path).map_err(|_| HandoverError::NotRunning { node, path })?;
        check_user(&stream)?;
        let plan = NodePlan::of(config)?;
        send(&stream, &plan.shape(config).hello(software()), &[], REPLY)?;
        let mut end = SuccessorEnd::default();
        expect(&receive(&stream, 0, REPLY)?.0, "offer")?;
        next(&mut end, SuccessorInput::Offered, SuccessorStep::Map)?;
        let mut mapped = Vec::with_capacity(plan.layout.shards.len());
        for shard in 0..plan.layout.shards.len() {
            let (message, fds) = receive(&stream, 2, REPLY)?;
            expect(&message, "memory")?;
            if number(&message, "shard")? != shard as u64 {
                return Err(HandoverError::Malformed { what: "the order of its shards" }.into());
            }
            let Ok([pool, image]) = <[_; 2]>::try_from(fds) else {
                return Err(HandoverError::Malformed { what: "memory without descriptors" }.into());
            };
            let files = KeptFiles::adopt(config.keep_memory.as_deref(), shard as u16, pool, image);
            let files = files.map_err(HandoverError::File)?;
            mapped.push(Arc::new(plan.map_memory(config, shard, files)?));
        }
        next(&mut end, SuccessorInput::Mapped, SuccessorStep::Ask)?;
        Ok(Self { stream, end, mapped, plan: Some(Box::new(plan)) })
    }

    /// Has the running process stop, and takes its memory and listeners over. From its return on, this process is to
    /// serve.
    ///
    /// # Errors
    /// When the running process refuses, or is gone: then this process must not serve.
    pub fn take(&mut self, config: &NodeConfig) -> Result<Handover, Error> {
        let taken = self.take_over(config);
        if taken.is_err() {
            self.end.handle(SuccessorInput::Lost);
        }
        taken
    }

    fn take_over(&mut self, config: &NodeConfig) -> Result<Handover, Error> {
        let stream = &self.stream;
        send(stream, &json!({ "kind": "hand over" }), &[], REPLY)?;
        let (message, mut lock) = receive(stream, config.keep_memory.iter().count(), PREPARATION)?;
        expect(&message, "claim")?;
        let stopped_ns = number(&message, "stopped_ns")?;
        let claim = match (&config.keep_memory, lock.pop()) {
            (Some(directory), Some(lock)) => {
                Some(Arc::new(MemoryDirectory::adopt(directory, lock).map_err(HandoverError::File)?))
            }
            _ => None,
        };
        // Processes of a version that hands directories over only do not say it, and need not.
        let incarnation = message.get("incarnation").and_then(Value::as_u64);
        let incarnation = match (&claim, incarnation) {
            (None, None) => return Err(HandoverError::Malformed { what: "incarnation" }.into()),
            (_, incarnation) => Incarnation(incarnation.unwrap_or(0)),
        };
        let mut listeners = Vec::with_capacity(self.mapped.len());
        for _ in &self.mapped {
            // Shards of a node listen for peers on its host, too.
            let (message, fds) = receive(stream, 2, REPLY)?;
            expect(&message, "listeners")?;
            let Ok([tcp, shm]) = <[_; 2]>::try_from(fds) else {
                return Err(HandoverError::Malformed { what: "listeners" }.into());
            };
            let (tcp, shm) = (TcpListener::from(tcp), Some(UnixListener::from(shm)));
            listeners.push(Arc::new(ShardListeners { tcp, shm }));
        }
        next(&mut self.end, SuccessorInput::Passed, SuccessorStep::Confirm)?;
        send(stream, &json!({ "kind": "taken" }), &[], REPLY)?;
        // Without it, it is unknown whether the running process serves again.
        expect(&receive(stream, 0, REPLY)?.0, "go")?;
        next(&mut self.end, SuccessorInput::Go, SuccessorStep::Serve)?;
        Ok(Handover { claim, listeners, memory: self.mapped.clone(), line: Line::of(incarnation), stopped_ns })
    }

    /// Starts the node with what was taken over.
    ///
    /// # Errors
    /// See [`Node::start`]: it may be called again. When nothing was taken over.
    pub fn start(&mut self, config: &NodeConfig, handover: &Handover) -> Result<Node, Error> {
        if !self.end.may_serve() {
            return Err(HandoverError::Closed.into());
        }
        let plan = self.plan.take().map_or_else(|| NodePlan::of(config), |plan| Ok(*plan))?;
        plan.start(config, Some(handover))
    }

    /// Reports to the former process that this one serves: it ends.
    ///
    /// # Errors
    /// When a shard of this process does not answer.
    pub fn report(self, node: &Node, handover: &Handover) -> Result<UpgradeReport, Error> {
        let pause_ns = kvplane_engine::cpu::monotonic_ns().saturating_sub(handover.stopped_ns);
        let report = UpgradeReport::of_node(node, pause_ns, handover.is_void())?;
        // The former process ends in any case, and may have ended already.
        let _ = send(&self.stream, &report.message(), &[], REPLY);
        Ok(report)
    }
}

/// Takes note of what has happened, after which this process has this step to do.
fn next(end: &mut SuccessorEnd, input: SuccessorInput, step: SuccessorStep) -> Result<(), HandoverError> {
    if end.handle(input) == step { Ok(()) } else { Err(HandoverError::Closed) }
}
