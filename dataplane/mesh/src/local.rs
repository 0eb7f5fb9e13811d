//! Connections to processes of this host: a Unix socket each, over which the memory of the channel is passed.
//!
//! After that the socket carries nothing but its end: the kernel closes it when the process ends, however it ends.
//! Only processes of the same user (or root) are accepted. No call blocks.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kvplane_proto::Status;
use kvplane_sys::private_files::{private_directory, runtime_directory};
use kvplane_sys::random::random_u64;
use kvplane_sys::{HugePages, Interest, Poller, Region, RegionOptions, SharedDoorbell, cpu, doorbell, stream, unix};
use kvplane_transport::{ConnectionId, Source, Token};

use crate::error::{DownCause, MeshError, kernel};
use crate::hello::{Hello, MESSAGE_BYTES, Welcome, pad, unpad};
use crate::shared::channel_bytes;

/// Bytes of the region of a doorbell's flag.
const BELL_BYTES: usize = 4096;
/// Limit of connections: the oldest that has not said who it is makes room for another.
const CONNECTIONS: usize = 256;
/// Largest ring that a peer may offer, in bytes.
const MAX_RING_BYTES: usize = 1 << 30;

/// Connections of one process to others of its host.
pub(crate) struct Local {
    listener: UnixListener,
    path: PathBuf,
    slots: Vec<Slot>,
    bell: SharedDoorbell,
    bell_region: Arc<Region>,
    bell_event: OwnedFd,
}

#[derive(Default)]
struct Slot {
    generation: u32,
    connection: Option<Connection>,
}

struct Connection {
    socket: UnixStream,
    phase: Phase,
}

enum Phase {
    /// Accepted; the hello has not arrived.
    Greeting,
    /// The hello was answered, or will be.
    Greeted,
    /// We have sent a hello.
    Asking,
    /// The channel is in use.
    Open,
}

/// Event of a connection.
pub(crate) enum LocalEvent {
    /// A peer introduced itself, with its doorbell; or with a message that is to be refused.
    Hello(ConnectionId, Result<(Hello, SharedDoorbell), Status>),
    /// A peer answered: with the memory of the channel and its doorbell if it welcomes us.
    Answer(ConnectionId, Welcome, Option<(Arc<Region>, SharedDoorbell)>),
    /// The connection has ended.
    Gone(ConnectionId, DownCause),
}

impl Local {
    /// Starts to listen in this directory, or in the user's.
    ///
    /// # Errors
    /// When the directory is not private, or the kernel refuses a resource.
    pub(crate) fn start(poller: &Poller, directory: Option<&Path>) -> Result<Self, MeshError> {
        let directory = match directory {
            Some(directory) => directory.to_owned(),
            None => runtime_directory().map_err(MeshError::Directory)?,
        };
        private_directory(&directory).map_err(MeshError::Directory)?;
        kvplane_transport::sockets::sweep(&directory);
        let number = random_u64().map_err(kernel("random numbers"))?;
        let path = directory.join(format!("mesh-{number:016x}.shm"));
        let listener = UnixListener::bind(&path).map_err(kernel("Unix socket of the mesh"))?;
        listener.set_nonblocking(true).map_err(kernel("Unix socket of the mesh"))?;
        let options = RegionOptions {
            shared: true,
            huge: HugePages::Never,
            ..RegionOptions::new("kvplane-mesh-bell", BELL_BYTES)
        };
        let bell_region = Region::allocate(&options)?;
        let bell_event = doorbell::event_fd().map_err(kernel("doorbell of the mesh"))?;
        let copy = bell_event.try_clone().map_err(kernel("doorbell of the mesh"))?;
        let bell = SharedDoorbell::new(Arc::clone(&bell_region), 0, copy);
        let listening = Token { source: Source::ShmListener, index: 0, generation: 0 };
        let ringing = Token { source: Source::ShmDoorbell, index: 0, generation: 0 };
        poller.add(listener.as_fd(), listening.to_bits(), Interest::Readable).map_err(kernel("poller of the mesh"))?;
        poller.add(bell.fd(), ringing.to_bits(), Interest::ReadableEdge).map_err(kernel("poller of the mesh"))?;
        Ok(Self { listener, path, slots: Vec::new(), bell, bell_region, bell_event })
    }

    /// Returns the path of the socket.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the doorbell that peers ring.
    pub(crate) const fn bell(&self) -> &SharedDoorbell {
        &self.bell
    }

    /// Returns true if a process listens at a path, or may; never waits.
    ///
    /// # Errors
    /// The kernel's: no process listens there.
    pub(crate) fn probe(path: &Path) -> io::Result<()> {
        match unix::connect(path) {
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(error),
            _ => Ok(()),
        }
    }

    /// Connects to the process at a path and introduces this one.
    ///
    /// # Errors
    /// The kernel's; `PermissionDenied` if a process of another user listens there.
    pub(crate) fn connect(&mut self, poller: &Poller, path: &Path, hello: &Hello) -> io::Result<ConnectionId> {
        let socket = unix::connect(path)?;
        check_user(&socket)?;
        unix::send_with_fds(&socket, &pad(&hello.encode()), &self.bell_fds()?)?;
        self.add(poller, socket, Phase::Asking)
    }

    fn bell_fds(&self) -> io::Result<[BorrowedFd<'_>; 2]> {
        let region = self.bell_region.fd().ok_or_else(|| io::Error::other("a shared region has a descriptor"))?;
        Ok([region, self.bell_event.as_fd()])
    }

    fn add(&mut self, poller: &Poller, socket: UnixStream, phase: Phase) -> io::Result<ConnectionId> {
        let index = self.slots.iter().position(|slot| slot.connection.is_none()).unwrap_or(self.slots.len());
        if index == self.slots.len() {
            self.slots.push(Slot::default());
        }
        let slot = &mut self.slots[index];
        slot.generation = slot.generation.wrapping_add(1);
        let id = ConnectionId { index: index as u32, generation: slot.generation };
        let token = Token { source: Source::ShmSocket, index: id.index, generation: id.generation };
        poller.add(socket.as_fd(), token.to_bits(), Interest::ReadableEdge)?;
        slot.connection = Some(Connection { socket, phase });
        Ok(id)
    }

    fn connection(&mut self, id: ConnectionId) -> Option<&mut Connection> {
        let slot = self.slots.get_mut(id.index as usize)?;
        if slot.generation == id.generation { slot.connection.as_mut() } else { None }
    }

    /// Accepts the connections that wait.
    pub(crate) fn accept(&mut self, poller: &Poller) {
        while let Ok(Some(socket)) = stream::accept(self.listener.as_fd()) {
            let socket = UnixStream::from(socket);
            if check_user(&socket).is_err() {
                continue;
            }
            if self.slots.iter().filter(|slot| slot.connection.is_some()).count() >= CONNECTIONS {
                let silent =
                    |slot: &&mut Slot| matches!(&slot.connection, Some(Connection { phase: Phase::Greeting, .. }));
                match self.slots.iter_mut().find(silent) {
                    Some(slot) => slot.connection = None,
                    None => continue,
                }
            }
            // A failure closes the connection; its peer tries again.
            let _ = self.add(poller, socket, Phase::Greeting);
        }
    }

    /// Handles the readiness of a connection's socket: returns what arrived.
    pub(crate) fn ready(&mut self, token: Token) -> Option<LocalEvent> {
        let id = ConnectionId { index: token.index, generation: token.generation };
        let connection = self.connection(id)?;
        let mut bytes = [0; MESSAGE_BYTES];
        let (count, fds) = match unix::recv_with_fds(&connection.socket, &mut bytes, 3) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return None,
            Err(error) => return Some(self.failed(id, DownCause::Failed(error.to_string()))),
            Ok((0, _)) => return Some(self.failed(id, DownCause::Ended)),
            Ok(received) => received,
        };
        let Some(message) = unpad(&bytes).filter(|_| count == MESSAGE_BYTES) else {
            return Some(self.failed(id, DownCause::Failed(format!("a message of {count} bytes arrived"))));
        };
        match connection.phase {
            Phase::Greeting => {
                connection.phase = Phase::Greeted;
                Some(LocalEvent::Hello(id, take_hello(message, fds)))
            }
            Phase::Asking => {
                let Some(welcome) = Welcome::decode(message) else {
                    return Some(self.failed(id, DownCause::Failed("the answer to a hello is malformed".to_owned())));
                };
                match take_channel(&welcome, fds) {
                    Ok(channel) => Some(LocalEvent::Answer(id, welcome, channel)),
                    Err(error) => Some(self.failed(id, DownCause::Failed(error.to_string()))),
                }
            }
            Phase::Greeted | Phase::Open => {
                Some(self.failed(id, DownCause::Failed("a message arrived where none is expected".to_owned())))
            }
        }
    }

    /// Answers a hello: with the memory of the channel, if it is welcome.
    ///
    /// # Errors
    /// The kernel's; the connection is then to be closed.
    pub(crate) fn answer(
        &mut self,
        id: ConnectionId,
        welcome: &Welcome,
        channel: Option<&Arc<Region>>,
    ) -> io::Result<()> {
        let [bell, event] = self.bell_fds()?;
        let fds: Vec<BorrowedFd<'_>> =
            channel.and_then(|channel| channel.fd()).map_or(Vec::new(), |fd| vec![fd, bell, event]);
        let slot = self.slots.get(id.index as usize).filter(|slot| slot.generation == id.generation);
        let Some(connection) = slot.and_then(|slot| slot.connection.as_ref()) else {
            return Err(io::ErrorKind::NotConnected.into());
        };
        unix::send_with_fds(&connection.socket, &pad(&welcome.encode()), &fds)
    }

    /// Notes that the channel of a connection is in use.
    pub(crate) fn open(&mut self, id: ConnectionId) {
        if let Some(connection) = self.connection(id) {
            connection.phase = Phase::Open;
        }
    }

    /// Closes a connection. No event follows.
    pub(crate) fn close(&mut self, id: ConnectionId) {
        if self.connection(id).is_some() {
            self.slots[id.index as usize].connection = None;
        }
    }

    fn failed(&mut self, id: ConnectionId, cause: DownCause) -> LocalEvent {
        self.close(id);
        LocalEvent::Gone(id, cause)
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

fn check_user(socket: &UnixStream) -> io::Result<()> {
    let uid = unix::peer_credentials(socket)?.uid;
    match uid == cpu::effective_uid() || uid == 0 {
        true => Ok(()),
        false => Err(io::ErrorKind::PermissionDenied.into()),
    }
}

fn take_hello(message: &[u8], fds: Vec<OwnedFd>) -> Result<(Hello, SharedDoorbell), Status> {
    // A sender of another version may pass other descriptors.
    let hello = Hello::decode(message)?;
    let bell = take_bell(&mut fds.into_iter()).map_err(|_| Status::BadRequest)?;
    Ok((hello, bell))
}

fn take_bell(fds: &mut impl Iterator<Item = OwnedFd>) -> io::Result<SharedDoorbell> {
    let missing = || io::Error::other("a descriptor is missing");
    let region = Region::map_shared(fds.next().ok_or_else(missing)?, BELL_BYTES, true).map_err(io::Error::other)?;
    Ok(SharedDoorbell::new(region, 0, fds.next().ok_or_else(missing)?))
}

/// Maps the channel of a welcome; `None` for a refusal.
fn take_channel(welcome: &Welcome, fds: Vec<OwnedFd>) -> io::Result<Option<(Arc<Region>, SharedDoorbell)>> {
    if welcome.status != Status::Ok {
        return Ok(None);
    }
    let capacity = welcome.ring_bytes as usize;
    if !capacity.is_power_of_two() || !(4096..=MAX_RING_BYTES).contains(&capacity) {
        return Err(io::Error::other(format!("rings of {capacity} bytes were offered")));
    }
    let mut fds = fds.into_iter();
    let channel = fds.next().ok_or_else(|| io::Error::other("a descriptor is missing"))?;
    let channel = Region::map_shared(channel, channel_bytes(capacity), true).map_err(io::Error::other)?;
    Ok(Some((channel, take_bell(&mut fds)?)))
}
