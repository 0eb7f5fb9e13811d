//! TLS handshake: rustls, fed record by record, so that bytes behind the handshake are not taken for a part of it.

use std::sync::Arc;

use rustls::client::UnbufferedClientConnection;
use rustls::server::UnbufferedServerConnection;
use rustls::unbuffered::{ConnectionState, EncodeError};
use rustls::{AlertDescription, Error};

use crate::session::{Kernel, Session, record_at};
use crate::{Keychain, Keys, TlsError};

/// Most bytes of the peer that a handshake keeps: far more than a certificate chain of ours.
pub const HANDSHAKE_BYTES: usize = 64 << 10;
/// Most records of the peer in a handshake: about six are usual.
const RECORDS: usize = 64;

enum End {
    Client(UnbufferedClientConnection),
    Server(UnbufferedServerConnection),
}

/// A handshake in progress.
pub struct Handshake {
    end: End,
    keys: Arc<Keys>,
    /// Bytes of the peer that rustls has seen and still needs: the first of those that the caller keeps.
    fed: usize,
    records: usize,
}

/// Result of advancing a handshake.
pub enum Step {
    /// More bytes of the peer are needed.
    More(Box<Handshake>),
    /// The handshake is complete. Bytes of the peer behind it belong to the session.
    Done(Box<Session>),
}

/// Next step that rustls requires.
enum Next {
    Again,
    Input,
    Ready,
}

impl Handshake {
    /// Begins a handshake with a server.
    ///
    /// # Errors
    /// Returns an error if the keychain has no certificate.
    pub fn client(keychain: &Keychain) -> Result<Box<Self>, TlsError> {
        let keys = keychain.keys()?;
        let name = keys.server_name(keychain.server_role())?;
        let end = UnbufferedClientConnection::new(Arc::clone(&keys.client), name)?;
        Ok(Box::new(Self { end: End::Client(end), keys, fed: 0, records: 0 }))
    }

    /// Begins a handshake with a client.
    ///
    /// # Errors
    /// Returns an error if the keychain has no certificate.
    pub fn server(keychain: &Keychain) -> Result<Box<Self>, TlsError> {
        let keys = keychain.keys()?;
        let end = UnbufferedServerConnection::new(Arc::clone(&keys.server))?;
        Ok(Box::new(Self { end: End::Server(end), keys, fed: 0, records: 0 }))
    }

    /// Advances as far as possible with the received bytes. Appends bytes to send to `out`, also on failure, when they
    /// are the alert for the peer. `arrived` holds the received bytes that are not consumed yet. The returned `usize`
    /// is the number of leading bytes consumed now; the caller passes the others again, with the bytes that follow
    /// them.
    ///
    /// # Errors
    /// Returns the reason of a failed handshake, with the next step for the operator.
    pub fn advance(mut self: Box<Self>, arrived: &mut [u8], out: &mut Vec<u8>) -> Result<(usize, Step), TlsError> {
        let mut used = 0;
        loop {
            let seen = &mut arrived[used..used + self.fed];
            let (discard, next) = match &mut self.end {
                End::Client(end) => {
                    let status = end.process_tls_records(seen);
                    (status.discard, react(status.state, out))
                }
                End::Server(end) => {
                    let status = end.process_tls_records(seen);
                    (status.discard, react(status.state, out))
                }
            };
            used += discard;
            self.fed -= discard;
            match next {
                Ok(Next::Again) => {}
                Ok(Next::Ready) if self.is_done() => return Ok((used, Step::Done(Box::new(self.finish(out)?)))),
                Ok(Next::Ready | Next::Input) => {
                    let Some(record) = record_at(&arrived[used + self.fed..])? else {
                        return Ok((used, Step::More(self)));
                    };
                    self.fed += record;
                    self.records += 1;
                    if self.records > RECORDS || self.fed > HANDSHAKE_BYTES {
                        return Err(TlsError::LongHandshake { records: RECORDS, bytes: HANDSHAKE_BYTES });
                    }
                }
                Err(error) => {
                    self.last_words(&mut arrived[used..used + self.fed], out);
                    return Err(error.into());
                }
            }
        }
    }

    fn is_done(&self) -> bool {
        match &self.end {
            End::Client(end) => !end.is_handshaking(),
            End::Server(end) => !end.is_handshaking(),
        }
    }

    /// Sends the peer the alert of the failure.
    fn last_words(&mut self, seen: &mut [u8], out: &mut Vec<u8>) {
        // An alert is one record, and rustls returns it before it processes further records.
        for _ in 0..2 {
            let next = match &mut self.end {
                End::Client(end) => react(end.process_tls_records(seen).state, out),
                End::Server(end) => react(end.process_tls_records(seen).state, out),
            };
            if !matches!(next, Ok(Next::Again)) {
                return;
            }
        }
    }

    fn finish(self, out: &mut Vec<u8>) -> Result<Session, TlsError> {
        match self.end {
            // rustls has verified that the certificate is valid and names the server.
            End::Client(end) => {
                let (secrets, kernel) = end.dangerous_into_kernel_connection()?;
                Session::new(secrets, Kernel::Client(kernel))
            }
            End::Server(end) => {
                let ours =
                    end.peer_certificates().and_then(|chain| chain.first()).is_some_and(|one| self.keys.is_ours(one));
                let (secrets, kernel) = end.dangerous_into_kernel_connection()?;
                let mut session = Session::new(secrets, Kernel::Server(kernel))?;
                if ours {
                    return Ok(session);
                }
                out.extend_from_slice(&session.alert(AlertDescription::AccessDenied)?);
                Err(TlsError::NoRole)
            }
        }
    }
}

fn react<D>(state: Result<ConnectionState<'_, '_, D>, Error>, out: &mut Vec<u8>) -> Result<Next, Error> {
    match state? {
        ConnectionState::EncodeTlsData(mut data) => {
            let at = out.len();
            let bytes = match data.encode(&mut []) {
                Err(EncodeError::InsufficientSize(size)) => size.required_size,
                Ok(_) | Err(EncodeError::AlreadyEncoded) => return Ok(Next::Again),
            };
            out.resize(at + bytes, 0);
            data.encode(&mut out[at..]).map_err(|error| Error::General(error.to_string()))?;
            Ok(Next::Again)
        }
        ConnectionState::TransmitTlsData(data) => {
            data.done();
            Ok(Next::Again)
        }
        ConnectionState::BlockedHandshake => Ok(Next::Input),
        ConnectionState::WriteTraffic(_) => Ok(Next::Ready),
        ConnectionState::PeerClosed | ConnectionState::Closed => {
            Err(Error::AlertReceived(AlertDescription::CloseNotify))
        }
        _ => Err(Error::General("data arrived during the handshake".to_owned())),
    }
}
