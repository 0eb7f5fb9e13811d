//! UDP sockets of both ends, with buffers for datagrams that arrive while the thread does not run.
//!
//! The kernel's default size holds some 90 to 280 datagrams of small calls. At 10,000 requests a second that is a few
//! milliseconds: a thread that is descheduled for longer loses datagrams, and their contents are retransmitted tens of
//! milliseconds later, with a smaller congestion window for all calls behind them.

use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;

use quinn::udp::{UdpSockRef, UdpSocketState};
use quinn::{Endpoint, EndpointConfig, Runtime, ServerConfig, TokioRuntime};

use crate::quic::reset::ResetSecret;

/// Bytes of the receive buffer and of the send buffer. The kernel gives as much as `net.core.rmem_max` and
/// `net.core.wmem_max` allow, and counts its own structures: 1,800 to 3,600 datagrams of small calls.
pub(crate) const BUFFER_BYTES: usize = 4 << 20;

/// Opens a client endpoint on `address`. Needs a tokio runtime.
///
/// # Errors
/// When the socket cannot be opened.
pub(crate) fn client_endpoint(address: SocketAddr) -> io::Result<Endpoint> {
    open(EndpointConfig::default(), None, bind(address)?)
}

/// Opens a server endpoint on `address`. Needs a tokio runtime.
///
/// # Errors
/// When the socket cannot be opened.
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
    // A socket with smaller buffers works too.
    let _ = state.set_recv_buffer_size(options, BUFFER_BYTES);
    let _ = state.set_send_buffer_size(UdpSockRef::from(&socket), BUFFER_BYTES);
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn socket_buffers_have_the_largest_size_that_the_kernel_allows() {
        let socket = bind(SocketAddr::from(([127, 0, 0, 1], 0))).expect("a port");
        let state = UdpSocketState::new(UdpSockRef::from(&socket)).expect("options");
        let has = state.recv_buffer_size(UdpSockRef::from(&socket)).expect("a size");
        let Ok(most) = std::fs::read_to_string("/proc/sys/net/core/rmem_max") else {
            println!("skipped: the kernel does not say how much room a socket may have");
            return;
        };
        let most: usize = most.trim().parse().expect("a number");
        // The kernel doubles the size that was set.
        assert_eq!(has, 2 * most.min(BUFFER_BYTES));
    }
}
