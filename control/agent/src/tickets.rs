//! Data tickets on this side: a client's, renewed while its line to the control plane lives, and a node's keys.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use kvplane_engine::ShardHandle;
use kvplane_rpc::message::{GetTicket, GetTicketKeys, TicketReply};
use kvplane_rpc::{Client, RefusalCode, random_bytes};
use kvplane_sys::random::random_u64;
use kvplane_ticket::{Challenges, Credential, TicketKey};
use tokio::sync::Notify;

use crate::error::Error;
use crate::link::ControlLink;

/// After how much of a ticket's time another is asked for.
const RENEW_AFTER: u32 = 3;
/// When it is asked for again that was not had.
const RETRY: Duration = Duration::from_secs(2);

/// The ticket of a line's holder.
#[derive(Default)]
pub(crate) struct Holder {
    /// Grows with every ticket that came; 0 before the first.
    generation: AtomicU64,
    state: Mutex<State>,
    /// There is something to look at.
    pub(crate) changed: Notify,
}

#[derive(Default)]
struct State {
    /// What is asked for; nothing while nobody wants a ticket, or there are none.
    wanted: Option<GetTicket>,
    credential: Option<Arc<Credential>>,
    renew_at: Option<Instant>,
    /// When the credential came, and how long it is good from then on.
    had: Option<(Instant, Duration)>,
    /// Why no newer one could be had when that was tried last.
    trouble: Option<String>,
    /// Whether it was found out that this cluster has none.
    none: bool,
}

impl Holder {
    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// When the ticket is to be renewed.
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

    /// Has the ticket renewed now, whatever it is good for.
    pub(crate) fn renew_at_once(&self) {
        let mut state = self.state();
        if state.wanted.is_some() {
            state.renew_at = Some(Instant::now());
        }
    }

    /// What is to be asked for now; again soon, if nothing comes of it.
    pub(crate) fn begin_renewal(&self) -> Option<GetTicket> {
        let mut state = self.state();
        state.renew_at = Some(Instant::now() + RETRY);
        state.wanted.clone()
    }

    /// Asks for a newer ticket. What fails, or makes no sense, is asked for again.
    pub(crate) async fn renew(&self, client: Client, call: GetTicket) {
        let outcome = match client.call(&call).await {
            Ok(reply) => self.take(call, &reply).map_err(|error| error.to_string()),
            Err(error) => Err(error.to_string()),
        };
        if let Err(trouble) = outcome {
            self.state().trouble = Some(trouble);
        }
    }

    /// Why a shard may count the ticket as ended: it could not be renewed, or else the shard's time is another.
    pub(crate) fn why_ended(&self) -> Option<String> {
        let state = self.state();
        let (had, valid) = state.had?;
        let (age_s, valid_s) = (had.elapsed().as_secs(), valid.as_secs());
        Some(match &state.trouble {
            Some(trouble) => format!("a ticket of {valid_s} s is {age_s} s old and was not renewed: {trouble}"),
            None => format!(
                "a ticket of {valid_s} s is {age_s} s old: the shard's node was told another ticket time, by a control \
                 plane without the state of ours"
            ),
        })
    }
}

pub(crate) fn credential_of(reply: &TicketReply) -> Result<Credential, Error> {
    Credential::from_parts(&reply.ticket, &reply.secret)
        .map_err(|error| Error::Argument(format!("the control plane gave no ticket that this build knows: {error}")))
}

impl ControlLink {
    /// Changes when there is another ticket; 0 while there is none.
    pub(crate) fn ticket_generation(&self) -> u64 {
        self.holder().generation.load(Ordering::Acquire)
    }

    /// The latest ticket, if this cluster has some and one was asked for.
    pub(crate) fn credential(&self) -> Option<Arc<Credential>> {
        self.holder().state().credential.clone()
    }

    /// Has a ticket from now on, renewed in time, if shards of this cluster want some: for all tenants, or, where our
    /// certificate is for one only, for that one.
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

/// What a node does about tickets.
pub(crate) struct NodeTickets {
    node: u64,
    /// Whether its shards want tickets.
    pub(crate) wanted: bool,
    keys: Option<GrantedKeys>,
}

/// Keys, the control plane's seconds, and the node's own ticket.
struct GrantedKeys {
    keys: Vec<TicketKey>,
    seconds: u64,
    credential: Arc<Credential>,
}

impl NodeTickets {
    /// Asks the control plane whether it makes tickets.
    pub(crate) fn ask(link: &ControlLink, node: u64, incarnation: u64) -> Result<Self, Error> {
        let keys = given(link, node, incarnation)?;
        Ok(Self { node, wanted: keys.is_some(), keys })
    }

    /// What a shard challenges its peers with, if it is to.
    pub(crate) fn challenges(&self) -> Result<Option<Challenges>, Error> {
        if !self.wanted {
            return Ok(None);
        }
        let mut seed = [0; 32];
        random_bytes(&mut seed).map_err(|error| Error::Argument(error.to_string()))?;
        Ok(Some(Challenges::new(seed)))
    }

    /// Gives the shards the keys of now.
    ///
    /// # Errors
    /// When they cannot be had, or the control plane does about tickets what it did not when the node started.
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
            let (now, before) = if self.wanted { ("no", "") } else { ("", "no ") };
            return Err(Error::Argument(format!(
                "the control plane makes {now} tickets now, and made {before}tickets when this node started: start the \
                 node again"
            )));
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
    let key = |key: kvplane_rpc::message::KeyOfTickets| TicketKey { id: key.id, secret: key.secret, until: key.until };
    Ok(Some(GrantedKeys { keys: reply.keys.into_iter().map(key).collect(), seconds: reply.seconds, credential }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ticket_that_ended_says_by_whose_doing() {
        let holder = Holder::default();
        assert_eq!(holder.why_ended(), None, "there was none");
        holder.state().had = Some((Instant::now(), Duration::from_secs(900)));
        let says = |part: &str| holder.why_ended().is_some_and(|why| why.contains(part));
        assert!(says("told another ticket time"), "it is young: the node's time is another");
        holder.state().trouble = Some("no control plane answers".to_owned());
        assert!(says("was not renewed: no control plane answers"));
    }
}
