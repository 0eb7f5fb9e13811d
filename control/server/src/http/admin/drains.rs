//! Drain jobs, in the paths and the JSON of Mooncake's master. A node's pool is one segment, so a job drains the nodes
//! of its segments: their slots migrate to other owners, which import the objects.
//!
//! | request | action |
//! |---|---|
//! | `POST /api/v1/drain_jobs`, body `{"segments": [...]}` | drains the segments' nodes; all of them, or none |
//! | `GET /api/v1/drain_jobs` | lists the nodes that are drained at present, each as a job |
//! | `GET /api/v1/drain_jobs/query?job_id=` | reports a job's progress |
//! | `POST /api/v1/drain_jobs/cancel?job_id=` | ends the drain of its nodes; migrated objects stay where they are |
//!
//! Jobs are not stored: a job's id names the incarnations of its nodes, and their state is in the cluster state, which
//! outlives the control plane. A unit of work is a node.

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use hyper::body::Incoming;
use hyper::{Method, Request, StatusCode};
use kvplane_cluster::MemberState;
use kvplane_proto::ids::{Incarnation, NodeId};
use kvplane_rpc::Refusal;
use kvplane_rpc::message::{EmptyReply, SegmentOwner};
use serde_json::{Value, json};

use super::{INVALID_PARAMS, JOB_NOT_FOUND, UNAVAILABLE, failure, json_body, ok, parameter, refused, segments};
use crate::cluster::view::{NodeHoldings, View};
use crate::control::Control;
use crate::http::Answer;

/// Most nodes of one job.
const NODES_MOST: usize = 256;

/// Most incarnations whose start of the drain is remembered.
const INCARNATIONS_MOST: usize = 1 << 16;

/// An incarnation of a node.
type NodeIncarnation = (u64, u64);

/// Start of each incarnation's drain, with its bytes at that time; lost when this process ends.
#[derive(Debug, Default)]
struct DrainStarts(Mutex<BTreeMap<NodeIncarnation, (Instant, u64)>>);

/// Drain jobs, and the starts of their nodes' drains.
pub(crate) struct DrainJobs {
    control: Arc<Control>,
    starts: DrainStarts,
}

/// State of one node of a job.
struct Unit {
    state: UnitState,
    /// Present incarnation of the node.
    incarnation: u64,
    objects: u64,
    bytes: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum UnitState {
    /// Its slots wait for earlier migrations.
    Blocked,
    /// It still has objects.
    Active,
    /// It has no objects, or has left.
    Succeeded,
    /// Its drain was cancelled.
    Canceled,
    /// The node died, or has restarted.
    Failed,
    /// The node is not known.
    Unknown,
}

fn unknown(id: &str) -> Answer {
    failure(StatusCode::NOT_FOUND, JOB_NOT_FOUND, &format!("there is no drain job {id:?}"))
}

fn bad(reason: &str) -> Answer {
    failure(StatusCode::BAD_REQUEST, INVALID_PARAMS, reason)
}

/// Reason why a request's body names no segments that a job can drain.
#[derive(Clone, PartialEq, Eq, Debug)]
enum SegmentsError {
    /// It has no list of segments, or an empty one.
    Missing,
    /// It has more than [`NODES_MOST`].
    Many { count: usize },
    /// It chooses the segments to migrate to.
    Targets,
    /// One of its segments is not a text.
    NotName { value: Value },
}

impl fmt::Display for SegmentsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing => f.write_str("the body must have segments, a list of names"),
            Self::Many { count } => {
                write!(f, "{count} segments are too many for one job; at most {NODES_MOST}")
            }
            Self::Targets => f.write_str(
                "target_segments cannot be chosen: slots migrate to all other members, by weight; leave it out",
            ),
            Self::NotName { value } => write!(f, "{value} is not the name of a segment"),
        }
    }
}

impl Error for SegmentsError {}

/// Returns the segments that a job is to drain.
fn segments_of(body: &Value) -> Result<Vec<&str>, SegmentsError> {
    let names = body.get("segments").and_then(Value::as_array).filter(|names| !names.is_empty());
    let names = names.ok_or(SegmentsError::Missing)?;
    if names.len() > NODES_MOST {
        return Err(SegmentsError::Many { count: names.len() });
    }
    if body.get("target_segments").and_then(Value::as_array).is_some_and(|targets| !targets.is_empty()) {
        return Err(SegmentsError::Targets);
    }
    let not_name = |value: &Value| SegmentsError::NotName { value: value.clone() };
    names.iter().map(|value| value.as_str().ok_or_else(|| not_name(value))).collect()
}

impl DrainJobs {
    /// Creates the jobs of a control plane; drains that are in progress already have no known start.
    pub(crate) fn new(control: Arc<Control>) -> Self {
        Self { control, starts: DrainStarts::default() }
    }

    /// Answers a request, its body included.
    pub(super) async fn answer(&self, path: &str, request: Request<Incoming>) -> Answer {
        let method = request.method().clone();
        let wrong = |text: &str| failure(StatusCode::METHOD_NOT_ALLOWED, INVALID_PARAMS, text);
        if path == super::DRAIN_JOBS {
            return match method {
                Method::POST => self.begin(request).await,
                Method::GET | Method::HEAD => self.list(),
                _ => wrong("GET and POST are served here"),
            };
        }
        let Some(id) = parameter(&request, "job_id") else {
            return failure(StatusCode::BAD_REQUEST, INVALID_PARAMS, "the query must have a job_id");
        };
        let Some(incarnations) = incarnations_of(&id) else { return unknown(&id) };
        match (path == super::DRAIN_CANCEL, method) {
            (false, Method::GET | Method::HEAD) => self.show(&incarnations),
            (true, Method::POST) => self.cancel(&incarnations),
            (false, _) => wrong("only GET is served here"),
            (true, _) => wrong("only POST is served here"),
        }
    }

    async fn begin(&self, request: Request<Incoming>) -> Answer {
        let body = match json_body(request).await {
            Ok(body) => body,
            Err(answer) => return answer,
        };
        let names = match segments_of(&body) {
            Ok(names) => names,
            Err(error) => return bad(&error.to_string()),
        };
        let view = match View::of(&self.control.cluster) {
            Ok(view) => view,
            Err(refusal) => return refused(&refusal),
        };
        let mut incarnations = Vec::new();
        for name in names {
            let segment = match segments::find(&view, name) {
                Ok(segment) => segment,
                Err(answer) => return answer,
            };
            match segment.owner {
                SegmentOwner::Node { node, incarnation } if !incarnations.contains(&(node.0, incarnation.0)) => {
                    incarnations.push((node.0, incarnation.0));
                }
                SegmentOwner::Node { .. } => {}
                SegmentOwner::Client { .. } => {
                    return bad(&format!("segment {name:?} is a client's and has no objects"));
                }
            }
        }
        if let Err(refusal) = self.drain_all(&incarnations) {
            return failure(StatusCode::CONFLICT, UNAVAILABLE, &refusal.reason);
        }
        self.show(&incarnations)
    }

    /// Drains all nodes, or none: if one is refused, the drains begun before it are undone.
    fn drain_all(&self, incarnations: &[NodeIncarnation]) -> Result<(), Refusal> {
        let units = self.units(incarnations)?;
        for (at, ((node, incarnation), unit)) in incarnations.iter().zip(&units).enumerate() {
            if let Err(refusal) = self.control.drain_now(NodeId(*node), Some(Incarnation(*incarnation))) {
                let fresh =
                    incarnations.iter().zip(&units).take(at).filter(|(_, unit)| unit.state == UnitState::Canceled);
                fresh.for_each(|(incarnation, _)| drop(self.undrain(*incarnation)));
                return Err(refusal);
            }
            self.starts.begin((*node, *incarnation), unit);
        }
        Ok(())
    }

    fn undrain(&self, of: NodeIncarnation) -> Result<EmptyReply, Refusal> {
        let (node, incarnation) = of;
        self.control.undrain_now(NodeId(node), Some(Incarnation(incarnation)))
    }

    fn cancel(&self, incarnations: &[NodeIncarnation]) -> Answer {
        let units = match self.units(incarnations) {
            Ok(units) => units,
            Err(refusal) => return refused(&refusal),
        };
        for (incarnation, unit) in incarnations.iter().zip(units) {
            let is_drained = matches!(unit.state, UnitState::Blocked | UnitState::Active | UnitState::Succeeded);
            // A node that has left meanwhile cannot be undrained, and need not be.
            if is_drained && let Err(refusal) = self.undrain((incarnation.0, unit.incarnation)) {
                tracing::debug!(node = incarnation.0, reason = refusal.reason, "there is no drain to undo");
            }
        }
        self.show(incarnations)
    }

    fn show(&self, incarnations: &[NodeIncarnation]) -> Answer {
        match self.units(incarnations) {
            Ok(units) if units.iter().all(|unit| unit.state == UnitState::Unknown) => unknown(&id_of(incarnations)),
            Ok(units) => ok(&self.job(incarnations, &units)),
            Err(refusal) => refused(&refusal),
        }
    }

    fn list(&self) -> Answer {
        let holdings = match NodeHoldings::of_members(&self.control.cluster) {
            Ok(holdings) => holdings,
            Err(refusal) => return refused(&refusal),
        };
        let drained = holdings.iter().filter(|(_, of)| of.state == MemberState::Draining);
        let job_of = |(node, of): (&u64, &NodeHoldings)| {
            let incarnation = (*node, of.incarnation);
            self.job(&[incarnation], &[self.unit(Some(of), incarnation)])
        };
        let jobs: Vec<Value> = drained.map(job_of).collect();
        ok(&json!({ "success": true, "jobs": jobs }))
    }

    /// Returns the states of a job's nodes.
    fn units(&self, incarnations: &[NodeIncarnation]) -> Result<Vec<Unit>, Refusal> {
        let holdings = NodeHoldings::of_members(&self.control.cluster)?;
        Ok(incarnations.iter().map(|incarnation| self.unit(holdings.get(&incarnation.0), *incarnation)).collect())
    }

    fn unit(&self, holding: Option<&NodeHoldings>, whose: NodeIncarnation) -> Unit {
        let (_, incarnation) = whose;
        let Some(of) = holding else { return Unit { state: UnitState::Unknown, incarnation, objects: 0, bytes: 0 } };
        // A successor goes on with the drain.
        let is_continued = Incarnation(of.incarnation).continues(Incarnation(incarnation));
        let state = match of.state {
            _ if !is_continued => UnitState::Failed,
            MemberState::Draining if of.shared => UnitState::Blocked,
            // A report from before the drain is no evidence of the objects left.
            MemberState::Draining if of.objects == Some(0) && !of.moving && self.starts.heard_since(whose, of) => {
                UnitState::Succeeded
            }
            MemberState::Draining => UnitState::Active,
            MemberState::Left => UnitState::Succeeded,
            MemberState::Dead => UnitState::Failed,
            MemberState::Joining | MemberState::Active | MemberState::Suspect => UnitState::Canceled,
        };
        let is_left = of.state.is_live() && is_continued;
        let (objects, bytes) = if is_left { (of.objects.unwrap_or(0), of.bytes) } else { (0, 0) };
        Unit { state, incarnation: of.incarnation, objects, bytes }
    }

    fn job(&self, incarnations: &[NodeIncarnation], units: &[Unit]) -> Value {
        let count = |state: UnitState| units.iter().filter(|unit| unit.state == state).count();
        let [blocked, active, succeeded, canceled] =
            [UnitState::Blocked, UnitState::Active, UnitState::Succeeded, UnitState::Canceled].map(count);
        let failed = count(UnitState::Failed) + count(UnitState::Unknown);
        let (status, name) = match () {
            () if failed > 0 => (4, "FAILED"),
            () if blocked + active > 0 => (2, "RUNNING"),
            () if canceled > 0 => (5, "CANCELED"),
            () => (3, "SUCCEEDED"),
        };
        let left: u64 = units.iter().map(|unit| unit.objects).sum();
        let message = match () {
            () if failed > 0 => "a node died or restarted before its drain was complete",
            () if active > 0 => "the new owners import the remaining objects",
            () if blocked > 0 => "waits for earlier migrations",
            () if canceled > 0 => "the drain was cancelled",
            () => "the drain is complete",
        };
        json!({
            "success": true,
            "job_id": id_of(incarnations),
            "status": status,
            "status_name": name,
            "succeeded_units": succeeded,
            "failed_units": failed,
            "blocked_units": blocked,
            "active_units": active,
            "canceled_units": canceled,
            "migrated_bytes": self.starts.migrated(incarnations, units),
            "remaining_objects": left,
            "message": message,
        })
    }
}

impl DrainStarts {
    /// Records the start of an incarnation's drain with its bytes, and forgets other incarnations of the node.
    fn begin(&self, incarnation: NodeIncarnation, unit: &Unit) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.retain(|(node, of), _| *node != incarnation.0 || *of == incarnation.1);
        if unit.state == UnitState::Canceled && known.len() < INCARNATIONS_MOST {
            known.insert(incarnation, (Instant::now(), unit.bytes));
        }
    }

    /// Returns true if an incarnation has sent a message since its drain began; for a drain that an earlier process
    /// began, any message counts.
    fn heard_since(&self, incarnation: NodeIncarnation, of: &NodeHoldings) -> bool {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        of.heard.is_some_and(|heard| known.get(&incarnation).is_none_or(|(began, _)| heard > *began))
    }

    /// Returns the bytes of memory that these incarnations have lost since their drains began, as far as known.
    fn migrated(&self, incarnations: &[NodeIncarnation], units: &[Unit]) -> u64 {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let gone = |(incarnation, unit): (&NodeIncarnation, &Unit)| {
            known.get(incarnation).map_or(0, |(_, had)| had.saturating_sub(unit.bytes))
        };
        incarnations.iter().zip(units).map(gone).sum()
    }
}

fn id_of(incarnations: &[NodeIncarnation]) -> String {
    let parts: Vec<String> = incarnations.iter().map(|(node, incarnation)| format!("{node}.{incarnation}")).collect();
    format!("drain-{}", parts.join("-"))
}

fn incarnations_of(id: &str) -> Option<Vec<NodeIncarnation>> {
    let parts: Vec<&str> = id.strip_prefix("drain-")?.split('-').take(NODES_MOST + 1).collect();
    let incarnation = |part: &&str| {
        let (node, incarnation) = part.split_once('.')?;
        Some((node.parse().ok()?, incarnation.parse().ok()?))
    };
    (parts.len() <= NODES_MOST).then(|| parts.iter().map(incarnation).collect())?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn job_ids_encode_their_incarnations() {
        for incarnations in [vec![(7, 3)], vec![(u64::MAX, 0), (1, u64::MAX)]] {
            assert_eq!(incarnations_of(&id_of(&incarnations)), Some(incarnations));
        }
        for wrong in
            ["", "drain-", "drain-7", "drain-7.x", "drain-7.1-", "job-7.1", &format!("drain-{}", "7.1-".repeat(300))]
        {
            assert_eq!(incarnations_of(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn the_segments_of_a_job_are_a_list_of_names() {
        assert_eq!(segments_of(&json!({ "segments": ["a", "b"], "max_concurrency": 4 })), Ok(vec!["a", "b"]));
        for wrong in [json!({}), json!({ "segments": [] }), json!({ "segments": [7] }), json!({ "segments": "a" })] {
            assert!(segments_of(&wrong).is_err(), "{wrong}");
        }
        let chosen = json!({ "segments": ["a"], "target_segments": ["b"] });
        assert!(segments_of(&chosen).unwrap_err().to_string().contains("target_segments"));
    }
}
