//! UDP sockets of both ends, with room for what arrives while nobody looks.
//!
//! The kernel's own size holds some 90 to 280 datagrams of small calls. At 10,000 requests a second that is a few
//! milliseconds: a thread that is kept off its core for longer loses datagrams, and what they carried comes a second
//! time tens of milliseconds later, with a smaller window for all calls behind it.

use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;

use quinn::udp::{UdpSockRef, UdpSocketState};
use quinn::{Endpoint, EndpointConfig, Runtime, ServerConfig, TokioRuntime};

use crate::quic::reset::ResetSecret;

/// Bytes of datagrams that wait to be read, and to be sent. The kernel gives as much as `net.core.rmem_max` and
/// `net.core.wmem_max` allow, and counts its own structures: 1,800 to 3,600 datagrams of small calls.
pub(crate) const BUFFER_BYTES: usize = 4 << 20;

/// An endpoint on `address` that makes connections. Needs a tokio runtime.
///
/// # Errors
/// When there is no such socket.
pub(crate) fn client_endpoint(address: SocketAddr) -> io::Result<Endpoint> {
    open(EndpointConfig::default(), None, bind(address)?)
}

/// An endpoint on `address` that accepts connections. Needs a tokio runtime.
///
/// # Errors
/// When there is no such socket.
pub(crate) fn server_endpoint(address: SocketAddr, server: ServerConfig, secret: &ResetSecret) -> io::Result<Endpoint> {
    let socket = bind(address)?;
    let config = secret.endpoint(socket.local_addr()?);
    open(config, Some(server), socket)
}

fn open(config: EndpointConfig, server: Option<ServerConfig>, socket: UdpSocket) -> io::Result<Endpoint> {
    Endpoint::new(config, server, socket, Arc::new(TokioRuntime) as Arc<dyn Runtime>)
}

fn bind(address: SocketAddr) -> io::Result<UdpSocket> {
    let socket = UdpSocket::bind(address)?;
    let options = UdpSockRef::from(&socket);
    let state = UdpSocketState::new(UdpSockRef::from(&socket))?;
    // A socket with less room works too.
    let _ = state.set_recv_buffer_size(options, BUFFER_BYTES);
    let _ = state.set_send_buffer_size(UdpSockRef::from(&socket), BUFFER_BYTES);
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_have_all_the_room_that_the_kernel_allows() {
        let socket = bind(SocketAddr::from(([127, 0, 0, 1], 0))).expect("a port");
        let state = UdpSocketState::new(UdpSockRef::from(&socket)).expect("options");
        let has = state.recv_buffer_size(UdpSockRef::from(&socket)).expect("a size");
        let Ok(most) = std::fs::read_to_string("/proc/sys/net/core/rmem_max") else {
            println!("skipped: the kernel does not say how much room a socket may have");
            return;
        };
        let most: usize = most.trim().parse().expect("a number");
        // The kernel books twice of what was asked for.
        assert_eq!(has, 2 * most.min(BUFFER_BYTES));
    }
}
