//! Data tickets: the control plane makes them, and gives nodes the keys to check them with.
//!
//! With a state directory the keys outlive the process, in a file of their own that only the user can read, and with
//! the state in etcd they are there: so a restart changes nothing for who holds a ticket.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use kvplane_proto::digest::tenant_number;
use kvplane_rpc::files::{read_private, write_private};
use kvplane_rpc::message::{Done, GetTicket, GetTicketKeys, KeyOfTickets, TicketKeys, TicketReply};
use kvplane_rpc::p2p::GetPeerKeys;
use kvplane_rpc::{Caller, Refusal, RefusalCode, Role, random_bytes};
use kvplane_ticket::{Credential, Mint, Rights, Role as HolderRole, Terms, TicketKey};

use crate::config::StartError;
use crate::control::Control;
use crate::etcd::Turn;

/// File of the keys within the state directory.
pub(crate) const KEYS_FILE: &str = "ticket.keys";
/// Most bytes of that file.
const FILE_BYTES: u64 = 64 << 10;

/// How tickets are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TicketConfig {
    /// How long one is good, in seconds. Clients have another after a third of it.
    pub lifetime_s: u64,
    /// How long tickets are made with one key, in seconds.
    pub key_term_s: u64,
}

impl Default for TicketConfig {
    fn default() -> Self {
        Self { lifetime_s: 600, key_term_s: 3_600 }
    }
}

/// What makes tickets, and where its keys are kept.
pub(crate) struct Tickets {
    mint: Mint,
    keep: Keep,
}

/// Where the keys are kept.
pub(crate) enum Keep {
    /// Nowhere: they are as old as the process.
    Nowhere,
    /// In a directory.
    Directory(PathBuf),
    /// In etcd, where these are.
    Etcd(Turn, Option<String>),
}

fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

impl Tickets {
    /// With the keys that are kept, or new ones.
    pub(crate) fn open(cluster: &str, config: &TicketConfig, keep: Keep) -> Result<Self, StartError> {
        let (now, times) = (unix_seconds(), (config.lifetime_s, config.key_term_s));
        let mut mint = Mint::new(cluster, times, now, random_bytes).map_err(StartError::Identity)?;
        let (kept, place) = match &keep {
            Keep::Nowhere => (None, PathBuf::new()),
            Keep::Etcd(_, kept) => (kept.clone(), PathBuf::from("the key \"tickets\" in etcd")),
            Keep::Directory(directory) => {
                let path = directory.join(KEYS_FILE);
                let read = |path: &Path| read_private(path, FILE_BYTES).map_err(|error| error.into());
                let text = path.exists().then(|| read(&path)).transpose().map_err(StartError::Identity)?;
                (text, path)
            }
        };
        if let Some(text) = kept {
            mint.resume(parse(&text).ok_or(StartError::TicketKeys(place))?, now);
        }
        let tickets = Self { mint, keep };
        tickets.save().map_err(|refusal| StartError::FirstChange(refusal.reason))?;
        Ok(tickets)
    }

    fn save(&self) -> Result<(), Refusal> {
        let storage = |reason: String| Refusal::new(RefusalCode::Storage, reason);
        match &self.keep {
            Keep::Nowhere => Ok(()),
            Keep::Directory(directory) => {
                let path = directory.join(KEYS_FILE);
                write_private(&path, shown(&self.mint).as_bytes()).map_err(|error| storage(error.to_string()))
            }
            Keep::Etcd(turn, _) => turn.keep_tickets(&shown(&self.mint)).map_err(storage),
        }
    }

    /// Takes another key into use when it is time, or at once.
    fn rotate(&mut self, now: u64, at_once: bool) -> Result<(), Refusal> {
        let none = |error: kvplane_rpc::IdentityError| Refusal::new(RefusalCode::Storage, error.to_string());
        if self.mint.rotate(now, at_once, random_bytes).map_err(none)? {
            self.save()?;
        }
        Ok(())
    }

    fn reply(&self, terms: &Terms, now: u64) -> TicketReply {
        self.told(&self.mint.issue(terms, now))
    }

    fn told(&self, credential: &Credential) -> TicketReply {
        let (ticket, secret) = credential.parts();
        let valid_ns = self.mint.lifetime().saturating_mul(1_000_000_000);
        TicketReply { wanted: true, ticket: ticket.to_vec(), secret: secret.to_vec(), valid_ns }
    }
}

const NO_TICKET: TicketReply = TicketReply { wanted: false, ticket: Vec::new(), secret: Vec::new(), valid_ns: 0 };

const fn holder_role(role: Role) -> HolderRole {
    match role {
        Role::Client | Role::Scheduler => HolderRole::Client,
        Role::Admin | Role::Control | Role::Node => HolderRole::Admin,
    }
}

const fn told(key: &TicketKey) -> KeyOfTickets {
    KeyOfTickets { id: key.id, secret: key.secret, until: key.until }
}

/// One line a key: its number, when its last ticket ends, the key; the one in use comes first, then the next one.
fn shown(mint: &Mint) -> String {
    let mut text = String::new();
    for key in mint.keys() {
        // Writing to a string does not fail.
        let _ = write!(text, "{:016x} {} ", key.id, key.until);
        for byte in key.secret {
            let _ = write!(text, "{byte:02x}");
        }
        text.push('\n');
    }
    text
}

fn parse(text: &str) -> Option<Vec<TicketKey>> {
    let key = |line: &str| {
        let mut words = line.split(' ');
        let (id, until, hex) = (words.next()?, words.next()?, words.next()?);
        let mut secret = [0; 32];
        if hex.len() != 64 || !hex.is_ascii() || words.next().is_some() {
            return None;
        }
        for (at, byte) in secret.iter_mut().enumerate() {
            *byte = u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).ok()?;
        }
        Some(TicketKey { id: u64::from_str_radix(id, 16).ok()?, secret, until: until.parse().ok()? })
    };
    text.lines().map(key).collect::<Option<Vec<_>>>().filter(|keys| keys.len() >= 2)
}

impl Control {
    /// A ticket for who calls.
    pub(crate) fn ticket(&self, caller: Caller, call: &GetTicket) -> Result<TicketReply, Refusal> {
        let epoch = self.epoch()?;
        self.with_mint(|tickets, now| {
            let Some(tickets) = tickets else { return Ok(NO_TICKET) };
            tickets.rotate(now, false)?;
            let terms = Terms {
                role: holder_role(caller.role),
                rights: Rights::READ.and(Rights::WRITE),
                tenant: call.tenant.as_deref().map(|name| tenant_number(name.as_bytes())),
                holder: call.holder,
                incarnation: 0,
                epochs: (epoch, u64::MAX),
            };
            Ok(tickets.reply(&terms, now))
        })
    }

    /// What a node needs to let others in.
    pub(crate) fn ticket_keys(&self, call: &GetTicketKeys) -> Result<TicketKeys, Refusal> {
        let epoch = self.epoch()?;
        self.with_mint(|tickets, seconds| {
            let Some(tickets) = tickets else { return Ok(TicketKeys { seconds, keys: Vec::new(), ticket: NO_TICKET }) };
            tickets.rotate(seconds, false)?;
            let terms = Terms {
                role: HolderRole::Node,
                rights: Rights::READ.and(Rights::WRITE).and(Rights::FETCH),
                tenant: None,
                holder: call.node,
                incarnation: call.incarnation,
                epochs: (epoch, u64::MAX),
            };
            let keys = tickets.mint.keys().map(told).collect();
            Ok(TicketKeys { seconds, keys, ticket: tickets.reply(&terms, seconds) })
        })
    }

    /// What a process of the P2P store needs: the keys of its tenant's peers, which say nothing about those of nodes.
    pub(crate) fn peer_keys(&self, caller: Caller, call: &GetPeerKeys) -> Result<TicketKeys, Refusal> {
        self.with_mint(|tickets, seconds| {
            let Some(tickets) = tickets else { return Ok(TicketKeys { seconds, keys: Vec::new(), ticket: NO_TICKET }) };
            tickets.rotate(seconds, false)?;
            let terms = Terms {
                role: holder_role(caller.role),
                rights: Rights::READ.and(Rights::WRITE),
                tenant: None,
                holder: call.client,
                incarnation: 0,
                epochs: (0, u64::MAX),
            };
            let credential = tickets.mint.issue_to_peer(&call.tenant, &terms, seconds);
            let keys = tickets.mint.keys().map(|key| told(&key.for_peers(&call.tenant))).collect();
            Ok(TicketKeys { seconds, keys, ticket: tickets.told(&credential) })
        })
    }

    /// Makes a new key at once.
    pub(crate) fn rotate_tickets_now(&self) -> Result<Done, Refusal> {
        self.with_mint(|tickets, now| match tickets {
            Some(tickets) => tickets.rotate(now, true).map(|()| Done),
            None => Err(Refusal::new(RefusalCode::NotFound, "this control plane makes no tickets".to_owned())),
        })
    }

    fn with_mint<T>(&self, make: impl FnOnce(Option<&mut Tickets>, u64) -> Result<T, Refusal>) -> Result<T, Refusal> {
        make(self.core()?.tickets.as_mut(), unix_seconds())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_read_back_from_their_file() {
        let mut mint = Mint::new("a", (600, 3_600), 5, random_bytes).expect("random bytes");
        assert_eq!(mint.rotate(9, true, random_bytes).ok(), Some(true));
        let text = shown(&mint);
        let keys: Vec<TicketKey> = mint.keys().cloned().collect();
        assert_eq!(parse(&text), Some(keys));
        let short = text.lines().next().map(str::to_owned);
        for torn in ["", "x", &text[..text.len() - 2], &text.replace(' ', "  "), &short.unwrap_or_default()] {
            assert_eq!(parse(torn), None, "{torn}");
        }
    }
}
