//! Tickets, and the clocks of the hosts that a control plane runs on: they differ, and jump either way. The control
//! plane's keys and ticket time are on its disk, and are lost with that.

use std::rc::Rc;
use std::sync::Arc;

use kvplane_proto::Status;
use kvplane_ticket::{Challenges, Credential, Mint, Rights, Role, Terms, TicketKey, TicketTime};

use crate::world::World;
use crate::world::check::{CheckResult, Rule, broken};
use crate::world::faults::Party;
use crate::world::queue::Message;

/// Lifetime of a ticket, and of a key, in seconds.
const TIMES_S: (u64, u64) = (3, 2);
/// Correct time at the beginning of the World, in seconds.
const NOON_S: u64 = 1_700_000_000;
/// Errors of clocks, in seconds.
const WRONG_S: [i64; 5] = [0, 7_200, -7_200, 1_200, -1_000_000_000];
/// Number of hosts on which the control plane runs in turn.
const HOSTS: usize = 2;

/// Ticket message of the control plane.
#[derive(Debug)]
pub(crate) struct TicketNews {
    /// Time and keys, for a node.
    keys: Option<(u64, Vec<TicketKey>)>,
    credential: Arc<Credential>,
}

/// Issuer of tickets while the control plane runs, and its durable state.
#[derive(Default)]
pub(crate) struct Tickets {
    running: Option<(Mint, TicketTime)>,
    keys: Option<Vec<TicketKey>>,
    time_s: Option<u64>,
    /// Clock error of each host, and the host on which the control plane runs.
    wrong_s: [i64; HOSTS],
    host: usize,
    /// Greatest time that was sent since the state was lost.
    told_s: u64,
}

impl Tickets {
    pub(crate) fn lose(&mut self) {
        (self.keys, self.time_s, self.told_s) = (None, None, 0);
    }
}

impl World {
    /// Starts the issuer on the same or another host.
    pub(crate) fn start_tickets(&mut self) {
        if !self.scenario.tickets {
            return;
        }
        let faults = &mut self.streams.clocks;
        let tickets = &mut self.control.tickets;
        tickets.host = faults.below(HOSTS as u64) as usize;
        let wall_s = (NOON_S + self.now_ns / 1_000_000_000).saturating_add_signed(tickets.wrong_s[tickets.host]);
        let time = TicketTime::begin(tickets.time_s, wall_s, TIMES_S.0, self.now_ns);
        let now_s = time.now(self.now_ns);
        let draw = |out: &mut [u8]| -> Result<(), std::convert::Infallible> {
            out.iter_mut().for_each(|byte| *byte = faults.below(256) as u8);
            Ok(())
        };
        let Ok(mut mint) = Mint::new("world", TIMES_S.0, TIMES_S.1, now_s, draw);
        if let Some(keys) = tickets.keys.clone() {
            mint.resume(keys, now_s);
        }
        tickets.keys = Some(mint.keys().cloned().collect());
        tickets.running = Some((mint, time));
    }

    /// Sets a clock.
    pub(crate) fn set_clock(&mut self) {
        let faults = &mut self.streams.clocks;
        let host = faults.below(HOSTS as u64) as usize;
        let wrong_s = WRONG_S[faults.below(WRONG_S.len() as u64) as usize];
        self.control.tickets.wrong_s[host] = wrong_s;
        self.detail(host as u64, || format!("the clock of host {host} is wrong by {wrong_s} s"));
    }

    /// Sends a ticket, and to a node the keys.
    pub(crate) fn tell_tickets(&mut self, to: Party) {
        let (faults, now_ns) = (&mut self.streams.clocks, self.now_ns);
        let tickets = &mut self.control.tickets;
        let Some((mint, time)) = &mut tickets.running else { return };
        if let Some(wanted_s) = time.wanted(now_ns) {
            tickets.time_s = Some(wanted_s);
            time.reserve(wanted_s);
        }
        let now_s = time.now(now_ns);
        let draw = |out: &mut [u8]| -> Result<(), std::convert::Infallible> {
            out.iter_mut().for_each(|byte| *byte = faults.below(256) as u8);
            Ok(())
        };
        let Ok(_) = mint.rotate(now_s, false, draw);
        tickets.keys = Some(mint.keys().cloned().collect());
        let rights = Rights::READ.and(Rights::WRITE);
        let (role, rights, holder, incarnation) = match to {
            Party::Node(node) => (Role::Node, rights.and(Rights::FETCH), node as u64 + 1, self.nodes[node].incarnation),
            Party::Client(_) | Party::Control => (Role::Client, rights, 1_000 + to.word(), 0),
        };
        let terms = Terms { role, rights, tenant: None, holder, incarnation, epochs: (0, u64::MAX) };
        let credential = Arc::new(mint.issue(&terms, now_s));
        let keys = matches!(to, Party::Node(_)).then(|| (now_s, mint.keys().cloned().collect()));
        let before_s = std::mem::replace(&mut tickets.told_s, now_s);
        if now_s < before_s {
            self.violate(broken(Rule::Tickets, format!("the ticket time went back from {before_s} s to {now_s} s")));
        }
        self.tell(to, Message::Tickets(Rc::new(TicketNews { keys, credential })));
    }

    /// Delivers a ticket message of the control plane.
    pub(crate) fn hear_tickets(&mut self, party: Party, told: &TicketNews) {
        let now_ns = self.now_ns;
        match party {
            Party::Node(node) if self.nodes[node].up => {
                for incarnation in self.nodes[node].shards.clone() {
                    if let Some((seconds, keys)) = &told.keys {
                        self.incarnations[incarnation].service.control().learn_keys(keys.clone(), *seconds, now_ns);
                        self.drain_service(incarnation, None);
                    }
                    let fetcher = self.incarnations[incarnation].fetcher;
                    self.clients[fetcher].client.set_credential(Arc::clone(&told.credential), now_ns);
                    self.drain_client(fetcher);
                }
            }
            Party::Client(client) if self.clients[client].alive => {
                self.clients[client].has_ticket = true;
                self.clients[client].client.set_credential(Arc::clone(&told.credential), now_ns);
                self.drain_client(client);
            }
            _ => {}
        }
    }

    /// Returns the challenges of a shard, if it requires tickets.
    pub(crate) fn challenges(&mut self) -> Option<Challenges> {
        let mut seed = [0; 32];
        seed.iter_mut().for_each(|byte| *byte = self.streams.clocks.below(256) as u8);
        self.scenario.tickets.then(|| Challenges::new(seed))
    }

    /// Checks that no client is refused because of its ticket: all of them are valid.
    pub(crate) fn check_ticket(&self, client: usize, status: Status) -> CheckResult {
        let refused = matches!(status, Status::Prove | Status::Unauthorized | Status::TicketEnded);
        if refused && self.scenario.tickets {
            return Err(broken(
                Rule::Tickets,
                format!("client {client} was refused although its ticket is valid: {status}"),
            ));
        }
        Ok(())
    }
}
