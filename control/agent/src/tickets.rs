//! Data tickets: those of a client, renewed while its control link lives, and the ticket keys of a node.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use kvplane_engine::ShardHandle;
use kvplane_rpc::message::{GetTicket, GetTicketKeys, TicketReply};
use kvplane_rpc::{Client, RefusalCode, random_bytes};
use kvplane_sys::random::random_u64;
use kvplane_ticket::{Challenges, Credential, TicketError, TicketKey};
use tokio::sync::Notify;

use crate::error::Error;
use crate::link::ControlLink;

/// Part of a ticket's validity after which it is renewed: one third.
const RENEW_AFTER: u32 = 3;
/// Backoff after a failed renewal.
const RETRY: Duration = Duration::from_secs(2);

/// Ticket of a control link.
#[derive(Default)]
pub(crate) struct Holder {
    /// Number of tickets received so far; 0 before the first.
    generation: AtomicU64,
    state: Mutex<State>,
    /// Wakes the control link's thread after a change.
    pub(crate) changed: Notify,
}

#[derive(Default)]
struct State {
    /// Request for the next ticket; `None` while no ticket is wanted, or where the cluster issues none.
    wanted: Option<GetTicket>,
    credential: Option<Arc<Credential>>,
    renew_at: Option<Instant>,
    /// Time at which the credential was received, and its validity from then on.
    had: Option<(Instant, Duration)>,
    /// Error of the last renewal, if that failed.
    trouble: Option<String>,
    /// True once it is known that this cluster issues no tickets.
    none: bool,
}

impl Holder {
    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the time of the next renewal.
    pub(crate) fn due(&self) -> Option<Instant> {
        self.state().renew_at
    }

    fn take(&self, call: GetTicket, reply: &TicketReply) -> Result<(), Error> {
        let mut state = self.state();
        if !reply.wanted {
            *state = State { none: true, ..State::default() };
            return Ok(());
        }
        let credential = credential_of(reply)?;
        state.wanted = Some(call);
        state.credential = Some(Arc::new(credential));
        let (now, valid) = (Instant::now(), Duration::from_nanos(reply.valid_ns));
        (state.renew_at, state.had, state.trouble) = (Some(now + valid / RENEW_AFTER), Some((now, valid)), None);
        drop(state);
        self.generation.fetch_add(1, Ordering::Release);
        self.changed.notify_one();
        Ok(())
    }

    /// Schedules a renewal for now, whatever validity is left.
    pub(crate) fn renew_at_once(&self) {
        let mut state = self.state();
        if state.wanted.is_some() {
            state.renew_at = Some(Instant::now());
        }
    }

    /// Returns the request for a renewal that is due, and schedules the next attempt in case this one fails.
    pub(crate) fn begin_renewal(&self) -> Option<GetTicket> {
        let mut state = self.state();
        state.renew_at = Some(Instant::now() + RETRY);
        state.wanted.clone()
    }

    /// Renews the ticket. A failure, or a malformed reply, is retried later.
    pub(crate) async fn renew(&self, client: Client, call: GetTicket) {
        let outcome = match client.call(&call).await {
            Ok(reply) => self.take(call, &reply).map_err(|error| error.to_string()),
            Err(error) => Err(error.to_string()),
        };
        if let Err(trouble) = outcome {
            self.state().trouble = Some(trouble);
        }
    }

    /// Returns the reason why a shard may count the ticket as ended: its renewal failed, or the shard's ticket time
    /// differs.
    pub(crate) fn why_ended(&self) -> Option<String> {
        let state = self.state();
        let (had, valid) = state.had?;
        let (age_s, valid_s) = (had.elapsed().as_secs(), valid.as_secs());
        Some(match &state.trouble {
            Some(trouble) => format!("a ticket of {valid_s} s is {age_s} s old and was not renewed: {trouble}"),
            None => format!(
                "a ticket of {valid_s} s is {age_s} s old: the shard's node follows another ticket time, of a control \
                 plane with another cluster state"
            ),
        })
    }
}

/// Reason why the tickets that the control plane issues, or does not issue, cannot be used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum TicketIssueError {
    /// A ticket has a format that this build does not know.
    Format(TicketError),
    /// The control plane issues no tickets any more, which the shards of this node require.
    StoppedForNode,
    /// The control plane issues tickets now, which the shards of this node do not require.
    BegunForNode,
    /// The control plane issues no tickets any more, which the peers of this process require.
    StoppedForPeers,
}

impl fmt::Display for TicketIssueError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Format(error) => write!(f, "the control plane issued a ticket of an unknown format: {error}"),
            Self::StoppedForNode => f.write_str(
                "the control plane issues no tickets now, and issued tickets when this node started: restart the node",
            ),
            Self::BegunForNode => f.write_str(
                "the control plane issues tickets now, and issued no tickets when this node started: restart the node",
            ),
            Self::StoppedForPeers => f.write_str(
                "the control plane issues no tickets now, and issued some when this process started: restart it",
            ),
        }
    }
}

impl std::error::Error for TicketIssueError {}

pub(crate) fn credential_of(reply: &TicketReply) -> Result<Credential, Error> {
    Credential::from_parts(&reply.ticket, &reply.secret).map_err(|error| TicketIssueError::Format(error).into())
}

impl ControlLink {
    /// Returns a counter that changes with every new ticket; 0 while there is none.
    pub(crate) fn ticket_generation(&self) -> u64 {
        self.holder().generation.load(Ordering::Acquire)
    }

    /// Returns the latest ticket, if this cluster issues tickets and one was requested.
    pub(crate) fn credential(&self) -> Option<Arc<Credential>> {
        self.holder().state().credential.clone()
    }

    /// Requests a ticket and keeps it renewed, if the shards of this cluster require tickets: for all tenants or, where
    /// the certificate is bound to one, for that one.
    pub(crate) fn hold_ticket(&self, tenant: &str) -> Result<(), Error> {
        {
            let state = self.holder().state();
            if state.none || state.credential.is_some() {
                return Ok(());
            }
        }
        let everybodys = GetTicket { holder: random_u64()?, tenant: None };
        let one = GetTicket { tenant: Some(tenant.to_owned()), ..everybodys.clone() };
        match self.call(everybodys.clone()) {
            Ok(reply) => self.holder().take(everybodys, &reply),
            Err(Error::Call(error)) if error.refusal() == Some(RefusalCode::NotPermitted) => {
                let reply = self.call(one.clone())?;
                self.holder().take(one, &reply)
            }
            Err(error) => Err(error),
        }
    }
}

/// Ticket state of a node.
pub(crate) struct NodeTickets {
    node: u64,
    /// True if the node's shards require tickets.
    pub(crate) wanted: bool,
    keys: Option<GrantedKeys>,
}

/// Ticket keys, the control plane's ticket time in seconds, and the node's own ticket.
struct GrantedKeys {
    keys: Vec<TicketKey>,
    seconds: u64,
    credential: Arc<Credential>,
}

impl NodeTickets {
    /// Queries the control plane whether it issues tickets.
    pub(crate) fn ask(link: &ControlLink, node: u64, incarnation: u64) -> Result<Self, Error> {
        let keys = given(link, node, incarnation)?;
        Ok(Self { node, wanted: keys.is_some(), keys })
    }

    /// Gets keys and a ticket for another incarnation of the node, if the control plane issues tickets.
    pub(crate) fn renew(&mut self, link: &ControlLink, incarnation: u64) -> Result<(), Error> {
        if self.wanted {
            *self = Self::ask(link, self.node, incarnation)?;
        }
        Ok(())
    }

    /// Returns the challenges that a shard sends to its peers, if it requires tickets.
    pub(crate) fn challenges(&self) -> Result<Option<Challenges>, Error> {
        if !self.wanted {
            return Ok(None);
        }
        let mut seed = [0; 32];
        random_bytes(&mut seed)?;
        Ok(Some(Challenges::new(seed)))
    }

    /// Passes the current ticket keys to the shards.
    ///
    /// # Errors
    /// When the control plane does not answer, or has started or stopped issuing tickets since the node started.
    pub(crate) fn refresh(
        &mut self,
        link: &ControlLink,
        incarnation: u64,
        shards: &[ShardHandle],
    ) -> Result<(), Error> {
        let keys = match self.keys.take() {
            Some(keys) => Some(keys),
            None => given(link, self.node, incarnation)?,
        };
        if keys.is_some() != self.wanted {
            let error = if self.wanted { TicketIssueError::StoppedForNode } else { TicketIssueError::BegunForNode };
            return Err(error.into());
        }
        let Some(GrantedKeys { keys, seconds, credential }) = keys else { return Ok(()) };
        for shard in shards {
            shard.learn_keys(keys.clone(), seconds)?;
            shard.set_credential(Arc::clone(&credential))?;
        }
        Ok(())
    }
}

fn given(link: &ControlLink, node: u64, incarnation: u64) -> Result<Option<GrantedKeys>, Error> {
    let reply = link.call(GetTicketKeys { node, incarnation })?;
    if !reply.ticket.wanted {
        return Ok(None);
    }
    let credential = Arc::new(credential_of(&reply.ticket)?);
    Ok(Some(GrantedKeys { keys: reply.keys, seconds: reply.seconds, credential }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_say_what_changed_and_what_to_restart() {
        let says = |error: TicketIssueError, text: &str| assert_eq!(error.to_string(), text);
        says(
            TicketIssueError::StoppedForNode,
            "the control plane issues no tickets now, and issued tickets when this node started: restart the node",
        );
        says(
            TicketIssueError::BegunForNode,
            "the control plane issues tickets now, and issued no tickets when this node started: restart the node",
        );
        says(
            TicketIssueError::Format(TicketError::Field("role")),
            "the control plane issued a ticket of an unknown format: a ticket whose role is invalid or unknown to this \
             build",
        );
    }

    #[test]
    fn an_ended_ticket_reports_the_cause() {
        let holder = Holder::default();
        assert_eq!(holder.why_ended(), None, "there was none");
        holder.state().had = Some((Instant::now(), Duration::from_secs(900)));
        let says = |part: &str| holder.why_ended().is_some_and(|why| why.contains(part));
        assert!(says("follows another ticket time"), "it is young: the node's time is another");
        holder.state().trouble = Some("no control plane answers".to_owned());
        assert!(says("was not renewed: no control plane answers"));
    }
}
