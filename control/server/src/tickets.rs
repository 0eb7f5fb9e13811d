//! Data tickets: the control plane issues them, and gives nodes the keys to verify them.
//!
//! With a state directory, the keys and the ticket time outlive the process, in files that only the user can read; with
//! the state in etcd, they are stored there. So a restart changes nothing for a ticket's holder, whatever the host's
//! clock shows by then ([`TicketTime`]).

use std::error::Error;
use std::fmt::{self, Write as _};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use kvplane_proto::digest::tenant_number;
use kvplane_rpc::message::{GetTicket, GetTicketKeys, TicketKeys, TicketReply};
use kvplane_rpc::p2p::GetPeerKeys;
use kvplane_rpc::{Caller, Refusal, RefusalCode, Role, random_bytes};
use kvplane_sys::private_files::{FileError, read_private, write_private};
use kvplane_ticket::{Credential, Mint, Rights, Role as HolderRole, Terms, TicketKey, TicketTime};

use crate::config::StartError;
use crate::server::clock::HostClock;
use crate::store::etcd::{EtcdChangeError, Turn};

/// Name of the file of the keys in the state directory.
pub(crate) const KEYS_FILE: &str = "ticket.keys";
/// Name of the file of the ticket time in the state directory.
pub(crate) const TIME_FILE: &str = "ticket-time";
/// Most bytes of one of these files.
const FILE_BYTES: u64 = 64 << 10;

/// Lifetimes of tickets and keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TicketConfig {
    /// Lifetime of a ticket, in seconds. Clients renew it after a third of it.
    pub lifetime_s: u64,
    /// Time for which a key signs new tickets, in seconds.
    pub key_term_s: u64,
}

impl Default for TicketConfig {
    fn default() -> Self {
        Self { lifetime_s: 600, key_term_s: 3_600 }
    }
}

/// Issuer of tickets, with the place of its keys and its time.
pub(crate) struct Tickets {
    mint: Mint,
    keep: Keep,
    time: TicketTime,
    /// The origin of the monotonic clock that advances the time.
    clock: HostClock,
    /// True if the last attempt to make the time durable failed.
    stands: bool,
}

/// Place of the keys and the time.
pub(crate) enum Keep {
    /// In memory only: they end with the process.
    Nowhere,
    /// In a directory.
    Directory(PathBuf),
    /// In etcd.
    Etcd {
        /// The turn in which they may be changed.
        turn: Turn,
        /// The stored keys.
        keys: Option<String>,
        /// The stored ticket time, in seconds.
        time_s: Option<u64>,
    },
}

/// Reason why the ticket time or the keys could not be made durable.
#[derive(Debug)]
enum KeepError {
    /// Their file cannot be written.
    File(FileError),
    /// etcd does not confirm the change.
    Etcd(EtcdChangeError),
}

impl fmt::Display for KeepError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(error) => error.fmt(f),
            Self::Etcd(error) => error.fmt(f),
        }
    }
}

impl Error for KeepError {}

/// Returns the seconds of the host's wall clock. Only the very first ticket time derives from it.
fn host_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

impl Keep {
    fn keys(&self) -> Result<Option<String>, StartError> {
        match self {
            Self::Nowhere => Ok(None),
            Self::Etcd { keys, .. } => Ok(keys.clone()),
            Self::Directory(directory) => read(&directory.join(KEYS_FILE)),
        }
    }

    /// Returns the place of the keys, for messages.
    fn place_of_keys(&self) -> PathBuf {
        match self {
            Self::Nowhere => PathBuf::new(),
            Self::Etcd { .. } => PathBuf::from("the key \"tickets\" in etcd"),
            Self::Directory(directory) => directory.join(KEYS_FILE),
        }
    }

    /// Returns the durable ticket time, in seconds.
    fn time_s(&self) -> Result<Option<u64>, StartError> {
        match self {
            Self::Nowhere => Ok(None),
            Self::Etcd { time_s, .. } => Ok(*time_s),
            Self::Directory(directory) => {
                let path = directory.join(TIME_FILE);
                let Some(text) = read(&path)? else { return Ok(None) };
                text.trim_end().parse().map(Some).map_err(|_| StartError::TicketTime(path))
            }
        }
    }

    fn keep_time(&self, seconds: u64) -> Result<(), KeepError> {
        match self {
            Self::Nowhere => Ok(()),
            Self::Etcd { turn, .. } => turn.keep_ticket_time(seconds).map_err(KeepError::Etcd),
            Self::Directory(directory) => {
                let text = format!("{seconds}\n");
                write_private(&directory.join(TIME_FILE), text.as_bytes()).map_err(KeepError::File)
            }
        }
    }

    fn keep_keys(&self, mint: &Mint) -> Result<(), KeepError> {
        match self {
            Self::Nowhere => Ok(()),
            Self::Etcd { turn, .. } => turn.keep_tickets(&shown(mint)).map_err(KeepError::Etcd),
            Self::Directory(directory) => {
                write_private(&directory.join(KEYS_FILE), shown(mint).as_bytes()).map_err(KeepError::File)
            }
        }
    }
}

fn read(path: &Path) -> Result<Option<String>, StartError> {
    let text = path.exists().then(|| read_private(path, FILE_BYTES)).transpose();
    text.map_err(|error| StartError::Identity(error.into()))
}

impl Tickets {
    /// Opens the issuer with the stored keys and time, or with new ones.
    pub(crate) fn open(cluster: &str, config: &TicketConfig, keep: Keep) -> Result<Self, StartError> {
        Self::open_at(cluster, config, keep, host_seconds())
    }

    /// Opens the issuer on a host whose wall clock shows `host_s`.
    fn open_at(cluster: &str, config: &TicketConfig, keep: Keep, host_s: u64) -> Result<Self, StartError> {
        let clock = HostClock::start();
        let time = match keep {
            Keep::Nowhere => TicketTime::passing(host_s, 0),
            Keep::Directory(_) | Keep::Etcd { .. } => TicketTime::begin(keep.time_s()?, host_s, config.lifetime_s, 0),
        };
        let now = time.now(0);
        let (lifetime_s, term_s) = (config.lifetime_s, config.key_term_s);
        let mut mint = Mint::new(cluster, lifetime_s, term_s, now, random_bytes).map_err(StartError::Identity)?;
        if let Some(text) = keep.keys()? {
            mint.resume(parse(&text).ok_or_else(|| StartError::TicketKeys(keep.place_of_keys()))?, now);
        }
        let mut tickets = Self { mint, keep, time, clock, stands: false };
        tickets.reserve(0).map_err(|error| StartError::FirstChange(error.to_string()))?;
        tickets.save().map_err(|refusal| StartError::FirstChange(refusal.reason))?;
        Ok(tickets)
    }

    /// Reserves more time durably, if needed.
    fn reserve(&mut self, now_ns: u64) -> Result<(), KeepError> {
        let Some(reserved_s) = self.time.wanted(now_ns) else { return Ok(()) };
        self.keep.keep_time(reserved_s)?;
        self.time.reserve(reserved_s);
        Ok(())
    }

    /// Returns the ticket time in seconds. If no more of it can be made durable, it stands still: tickets last longer
    /// then, and none is rejected.
    fn now(&mut self) -> u64 {
        let now_ns = self.clock.now_ns();
        let outcome = self.reserve(now_ns);
        let stood = core::mem::replace(&mut self.stands, outcome.is_err());
        match outcome {
            Err(error) if !stood => tracing::error!("the ticket time cannot be saved and stands still: {error}"),
            Ok(()) if stood => tracing::info!("the ticket time advances again"),
            _ => {}
        }
        self.time.now(now_ns)
    }

    fn save(&self) -> Result<(), Refusal> {
        let storage = |error: KeepError| Refusal::new(RefusalCode::Storage, error.to_string());
        self.keep.keep_keys(&self.mint).map_err(storage)
    }

    /// Rotates the key if it is due, or at once.
    fn rotate(&mut self, now: u64, at_once: bool) -> Result<(), Refusal> {
        let none = |error: kvplane_rpc::IdentityError| Refusal::new(RefusalCode::Storage, error.to_string());
        if self.mint.rotate(now, at_once, random_bytes).map_err(none)? {
            self.save()?;
        }
        Ok(())
    }

    /// Issues a ticket to the caller, from this epoch on.
    pub(crate) fn issue(&mut self, caller: Caller, call: &GetTicket, epoch: u64) -> Result<TicketReply, Refusal> {
        let now = self.now();
        self.rotate(now, false)?;
        let terms = Terms {
            role: holder_role(caller.role),
            rights: Rights::READ.and(Rights::WRITE),
            tenant: call.tenant.as_deref().map(|name| tenant_number(name.as_bytes())),
            holder: call.holder,
            incarnation: 0,
            epochs: (epoch, u64::MAX),
        };
        Ok(self.reply(&terms, now))
    }

    /// Returns the keys with which a node verifies tickets, and a ticket for the node, from this epoch on.
    pub(crate) fn keys_of_node(&mut self, call: &GetTicketKeys, epoch: u64) -> Result<TicketKeys, Refusal> {
        let seconds = self.now();
        self.rotate(seconds, false)?;
        let terms = Terms {
            role: HolderRole::Node,
            rights: Rights::READ.and(Rights::WRITE).and(Rights::FETCH),
            tenant: None,
            holder: call.node,
            incarnation: call.incarnation,
            epochs: (epoch, u64::MAX),
        };
        let keys = self.mint.keys().cloned().collect();
        Ok(TicketKeys { seconds, keys, ticket: self.reply(&terms, seconds) })
    }

    /// Returns the keys of a tenant's peers for a process of the P2P store; they reveal nothing about the keys of
    /// nodes.
    pub(crate) fn keys_of_peer(&mut self, caller: Caller, call: &GetPeerKeys) -> Result<TicketKeys, Refusal> {
        let seconds = self.now();
        self.rotate(seconds, false)?;
        let terms = Terms {
            role: holder_role(caller.role),
            rights: Rights::READ.and(Rights::WRITE),
            tenant: None,
            holder: call.client,
            incarnation: 0,
            epochs: (0, u64::MAX),
        };
        let credential = self.mint.issue_to_peer(&call.tenant, &terms, seconds);
        let keys = self.mint.keys().map(|key| key.for_peers(&call.tenant)).collect();
        Ok(TicketKeys { seconds, keys, ticket: self.told(&credential) })
    }

    /// Rotates the key at once.
    pub(crate) fn rotate_at_once(&mut self) -> Result<(), Refusal> {
        let now = self.now();
        self.rotate(now, true)
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

/// Answer to a request for a ticket where shards require none.
pub(crate) const NO_TICKET: TicketReply =
    TicketReply { wanted: false, ticket: Vec::new(), secret: Vec::new(), valid_ns: 0 };

/// Answer to a request for keys where shards require no tickets.
pub(crate) const NO_KEYS: TicketKeys = TicketKeys { seconds: 0, keys: Vec::new(), ticket: NO_TICKET };

const fn holder_role(role: Role) -> HolderRole {
    match role {
        Role::Client | Role::Scheduler => HolderRole::Client,
        Role::Admin | Role::Control | Role::Node => HolderRole::Admin,
    }
}

/// Formats the keys, one per line: number, end of its last ticket, secret; the current key comes first, then the next
/// one.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_read_back_from_their_file() {
        let mut mint = Mint::new("a", 600, 3_600, 5, random_bytes).expect("random bytes");
        assert_eq!(mint.rotate(9, true, random_bytes).ok(), Some(true));
        let text = shown(&mint);
        let keys: Vec<TicketKey> = mint.keys().cloned().collect();
        assert_eq!(parse(&text), Some(keys));
        let short = text.lines().next().map(str::to_owned);
        for torn in ["", "x", &text[..text.len() - 2], &text.replace(' ', "  "), &short.unwrap_or_default()] {
            assert_eq!(parse(torn), None, "{torn}");
        }
    }

    /// Creates an empty directory for a test.
    fn directory(name: &str) -> PathBuf {
        let directory = std::env::temp_dir().join(format!("kvplane-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&directory);
        std::fs::create_dir_all(&directory).expect("a directory");
        directory
    }

    fn open(directory: &Path, host_s: u64) -> Tickets {
        Tickets::open_at("a", &TicketConfig::default(), Keep::Directory(directory.to_owned()), host_s)
            .unwrap_or_else(|error| panic!("{error}"))
    }

    #[test]
    fn epoch_time_does_not_follow_jumps_of_the_hosts_clock() {
        let directory = directory("ticket-time");
        let mut last = open(&directory, 1_000_000).now();
        assert!((1_000_000..1_000_010).contains(&last), "the first of all is the host's");
        // The host's clock is two hours ahead, correct, and of 1970: by restarts, or on another host.
        for host_s in [1_007_200, 1_000_001, 0, u64::MAX] {
            let mut tickets = open(&directory, host_s);
            let now = tickets.now();
            assert!(now >= last && now < last + 70, "{now} after {last} with a clock of {host_s}");
            last = now;
        }
        let damaged = directory.join(TIME_FILE);
        std::fs::write(&damaged, "soon").expect("written");
        let keep = Keep::Directory(directory.clone());
        let opened = Tickets::open_at("a", &TicketConfig::default(), keep, 5).map(drop);
        assert!(matches!(opened, Err(StartError::TicketTime(path)) if path == damaged));
        std::fs::remove_dir_all(&directory).expect("removed");
    }

    #[test]
    fn epoch_time_stands_still_while_it_cannot_be_made_durable() {
        let directory = directory("ticket-time-stands");
        let mut tickets = open(&directory, 500);
        let before = tickets.now();
        std::fs::remove_dir_all(&directory).expect("removed");
        let second_ns = 1_000_000_000;
        assert!(tickets.reserve(120 * second_ns).is_err());
        assert_eq!(tickets.time.now(120 * second_ns), before + 60, "what is durable");
        std::fs::create_dir_all(&directory).expect("a directory");
        tickets.reserve(120 * second_ns).expect("kept");
        assert_eq!(tickets.time.now(120 * second_ns), before + 120);
        std::fs::remove_dir_all(&directory).expect("removed");
    }
}
