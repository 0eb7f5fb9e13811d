//! Access control of the P2P store: peers of the same tenant, which prove tickets under keys that the control plane
//! gives to them only. Where the control plane issues no tickets, the engine is on loopback and requires none.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvplane_rpc::message::TicketKeys;
use kvplane_rpc::p2p::GetPeerKeys;
use kvplane_rpc::random_bytes;
use kvplane_ticket::Challenges;
use kvplane_transfer::{TransferEngine, TransferEngineConfig};

use super::catalog::Catalog;
use crate::error::Error;
use crate::link::ControlLink;
use crate::tickets::{TicketIssueError, credential_of};

/// Part of a ticket's validity after which it is renewed: one third.
const RENEW_AFTER: u32 = 3;
/// Refresh interval while objects are served: well within the time after which the engine's ticket clock stops without
/// the control plane's, and short enough for keys that are replaced at once.
const SERVING: Duration = Duration::from_secs(10);
/// Backoff after a failed renewal.
const RETRY: Duration = Duration::from_secs(2);

/// Ticket keys and tickets of one store.
pub(super) struct Guard {
    /// State of the next renewal; `None` where the control plane issues no tickets.
    renewal: Option<Renewal>,
}

struct Renewal {
    asked: Instant,
    valid: Duration,
}

impl Guard {
    /// Starts an engine that admits authorized peers only.
    ///
    /// # Errors
    /// When the control plane issues no tickets and the engine would listen beyond loopback, or when the engine does
    /// not start.
    pub(super) fn start(
        link: &ControlLink,
        call: &GetPeerKeys,
        config: TransferEngineConfig,
    ) -> Result<(Self, TransferEngine), Error> {
        let reply = link.call(call.clone())?;
        if !reply.ticket.wanted {
            if !config.listen.ip().is_loopback() {
                return Err(Error::NoTickets { listen: config.listen });
            }
            return Ok((Self { renewal: None }, TransferEngine::start(config)?));
        }
        let mut seed = [0; 32];
        random_bytes(&mut seed)?;
        let engine = TransferEngine::start_guarded(config, Challenges::new(seed))?;
        let renewal = take(&engine, &reply)?;
        Ok((Self { renewal: Some(renewal) }, engine))
    }

    /// Renews the keys and the ticket when they are due.
    ///
    /// # Errors
    /// When the control plane does not answer, or issues no tickets any more; the next attempt follows after a backoff.
    pub(super) fn refresh(&mut self, catalog: &Catalog, engine: &TransferEngine, serving: bool) -> Result<(), Error> {
        let Some(before) = &mut self.renewal else { return Ok(()) };
        let after = before.valid / RENEW_AFTER;
        let after = if serving { after.min(SERVING) } else { after };
        if before.asked.elapsed() < after {
            return Ok(());
        }
        before.asked = (Instant::now() + RETRY).checked_sub(after).unwrap_or(before.asked);
        let reply = catalog.peer_keys()?;
        if !reply.ticket.wanted {
            return Err(TicketIssueError::StoppedForPeers.into());
        }
        *before = take(engine, &reply)?;
        Ok(())
    }
}

fn take(engine: &TransferEngine, reply: &TicketKeys) -> Result<Renewal, Error> {
    let credential = Arc::new(credential_of(&reply.ticket)?);
    engine.learn_keys(reply.keys.clone(), reply.seconds, &credential)?;
    Ok(Renewal { asked: Instant::now(), valid: Duration::from_nanos(reply.ticket.valid_ns) })
}
