//! TLS session: encrypts records with the keys of a handshake, and decrypts them in place.
//!
//! A record is 5 bytes of header, up to 16 KiB of plaintext, the type of these, and an authentication tag of 16 bytes
//! (RFC 8446, 5.2). The ciphers and the key derivation are those of rustls; this module keeps their order: record
//! numbers, key updates before a cipher's limit, and messages that are not data.

use rustls::client::ClientConnectionData;
use rustls::crypto::cipher::{
    InboundOpaqueMessage, MessageDecrypter, MessageEncrypter, OutboundChunks, OutboundPlainMessage,
};
use rustls::kernel::KernelConnection;
use rustls::server::ServerConnectionData;
use rustls::{
    AlertDescription, ConnectionTrafficSecrets, ContentType, Error, ExtractedSecrets, ProtocolVersion,
    SupportedCipherSuite, Tls13CipherSuite,
};

use crate::TlsError;

/// Most bytes of plaintext in a record.
pub const PLAIN_BYTES: usize = 16 << 10;
pub(crate) const HEADER_BYTES: usize = 5;
/// Length of the longest record that TLS allows; those that this module sends are some 240 bytes shorter.
pub const RECORD_BYTES: usize = HEADER_BYTES + PLAIN_BYTES + 256;
/// Types of messages after a handshake.
const NEW_SESSION_TICKET: u8 = 4;
const KEY_UPDATE: u8 = 24;

/// Returns the length of the first record in these bytes; `None` if it is incomplete.
pub(crate) fn record_at(bytes: &[u8]) -> Result<Option<usize>, TlsError> {
    let Some(header) = bytes.first_chunk::<HEADER_BYTES>() else { return Ok(None) };
    let length = usize::from(u16::from_be_bytes([header[3], header[4]]));
    if !(20..=23).contains(&header[0]) || header[1] != 3 || length == 0 || length > PLAIN_BYTES + 256 {
        return Err(TlsError::NotTls { header: *header });
    }
    Ok((bytes.len() >= HEADER_BYTES + length).then_some(HEADER_BYTES + length))
}

pub(crate) enum Kernel {
    Client(KernelConnection<ClientConnectionData>),
    Server(KernelConnection<ServerConnectionData>),
}

impl Kernel {
    fn suite(&self) -> SupportedCipherSuite {
        match self {
            Self::Client(kernel) => kernel.negotiated_cipher_suite(),
            Self::Server(kernel) => kernel.negotiated_cipher_suite(),
        }
    }

    fn next_tx(&mut self) -> Result<(u64, ConnectionTrafficSecrets), Error> {
        match self {
            Self::Client(kernel) => kernel.update_tx_secret(),
            Self::Server(kernel) => kernel.update_tx_secret(),
        }
    }

    fn next_rx(&mut self) -> Result<(u64, ConnectionTrafficSecrets), Error> {
        match self {
            Self::Client(kernel) => kernel.update_rx_secret(),
            Self::Server(kernel) => kernel.update_rx_secret(),
        }
    }
}

/// An established TLS connection.
pub struct Session {
    kernel: Kernel,
    suite: &'static Tls13CipherSuite,
    seal: Box<dyn MessageEncrypter>,
    /// Number of the next record to encrypt, and the limit at which the keys are updated.
    sealed: u64,
    limit: u64,
    open: Box<dyn MessageDecrypter>,
    opened: u64,
    /// True if the peer has requested an update of the keys that this end encrypts with.
    asked: bool,
}

/// Content of a record.
#[derive(Debug)]
pub enum OpenedRecord<'a> {
    /// The record is incomplete: more bytes are needed.
    More,
    /// Plaintext of a data record.
    Data(&'a [u8]),
    /// A record without data for the caller.
    Nothing,
    /// The peer has closed its direction, with a `close_notify`.
    Closed,
}

impl Session {
    pub(crate) fn new(secrets: ExtractedSecrets, kernel: Kernel) -> Result<Self, TlsError> {
        let suite = kernel.suite().tls13().ok_or(TlsError::OtherVersion)?;
        let ((sealed, tx), (opened, rx)) = (secrets.tx, secrets.rx);
        let (seal, open) = (encrypter(suite, tx)?, decrypter(suite, rx)?);
        let limit = suite.common.confidentiality_limit;
        Ok(Self { kernel, suite, seal, sealed, limit, open, opened, asked: false })
    }

    /// Returns the name of the cipher.
    #[must_use]
    pub fn cipher(&self) -> String {
        format!("{:?}", self.suite.common.suite)
    }

    /// Updates keys after `records` records already, for tests; the cipher's own limit still applies.
    pub fn limit_records(&mut self, records: u64) {
        self.limit = self.limit.min(records.max(1));
    }

    /// Encrypts these bytes, at most [`PLAIN_BYTES`], as one record, and passes it to `out`, after a key update if one
    /// is due.
    ///
    /// # Errors
    /// Returns the error of the cipher, after which the connection is unusable.
    pub fn seal(&mut self, plain: &[u8], mut out: impl FnMut(Vec<u8>)) -> Result<(), TlsError> {
        if self.asked || self.sealed >= self.limit {
            out(self.record(ContentType::Handshake, &[KEY_UPDATE, 0, 0, 1, 0])?);
            let (number, secrets) = self.kernel.next_tx()?;
            (self.seal, self.sealed, self.asked) = (encrypter(self.suite, secrets)?, number, false);
        }
        out(self.record(ContentType::ApplicationData, plain)?);
        Ok(())
    }

    /// Returns the `close_notify` record, after which this end sends no more.
    ///
    /// # Errors
    /// Returns the error of the cipher, as [`Self::seal`] does.
    pub fn close(&mut self) -> Result<Vec<u8>, TlsError> {
        self.record(ContentType::Alert, &[1, AlertDescription::CloseNotify.into()])
    }

    pub(crate) fn alert(&mut self, alert: AlertDescription) -> Result<Vec<u8>, TlsError> {
        self.record(ContentType::Alert, &[2, alert.into()])
    }

    fn record(&mut self, typ: ContentType, plain: &[u8]) -> Result<Vec<u8>, TlsError> {
        let payload = OutboundChunks::Single(plain);
        let message = OutboundPlainMessage { typ, version: ProtocolVersion::TLSv1_2, payload };
        let record = self.seal.encrypt(message, self.sealed)?;
        self.sealed += 1;
        Ok(record.encode())
    }

    /// Decrypts the first record of `bytes` in place. Returns the number of bytes consumed, and the content.
    ///
    /// # Errors
    /// Returns an error if a record was changed in transit, or is not allowed at this point; the connection is unusable
    /// then. None of the record's bytes have been returned.
    pub fn open<'a>(&mut self, bytes: &'a mut [u8]) -> Result<(usize, OpenedRecord<'a>), TlsError> {
        let Some(taken) = record_at(bytes)? else { return Ok((0, OpenedRecord::More)) };
        let (header, sealed) = bytes[..taken].split_at_mut(HEADER_BYTES);
        if header[0] != u8::from(ContentType::ApplicationData) {
            return Err(TlsError::Unencrypted);
        }
        let message = InboundOpaqueMessage::new(ContentType::ApplicationData, ProtocolVersion::TLSv1_2, sealed);
        let message = self.open.decrypt(message, self.opened)?;
        self.opened += 1;
        let plain = message.payload;
        let opened = match message.typ {
            ContentType::ApplicationData => OpenedRecord::Data(plain),
            ContentType::Alert => match plain {
                [_, 0] => OpenedRecord::Closed,
                [_, alert] => return Err(TlsError::Alert(AlertDescription::from(*alert))),
                _ => return Err(TlsError::MalformedAlert),
            },
            ContentType::Handshake => self.after_handshake(plain)?,
            other => return Err(TlsError::UnexpectedRecord(other)),
        };
        Ok((taken, opened))
    }

    /// Processes handshake messages that follow the handshake.
    fn after_handshake(&mut self, mut plain: &[u8]) -> Result<OpenedRecord<'static>, TlsError> {
        while let Some((&[typ, a, b, c], rest)) = plain.split_first_chunk::<4>() {
            let length = u32::from_be_bytes([0, a, b, c]) as usize;
            let (body, rest) = rest.split_at_checked(length).ok_or(TlsError::UnexpectedHandshake)?;
            match (typ, body) {
                // Sessions are never resumed.
                (NEW_SESSION_TICKET, _) => {}
                (KEY_UPDATE, &[asks @ (0 | 1)]) if rest.is_empty() => {
                    let (number, secrets) = self.kernel.next_rx()?;
                    (self.open, self.opened) = (decrypter(self.suite, secrets)?, number);
                    self.asked |= asks == 1;
                }
                _ => return Err(TlsError::UnexpectedHandshake),
            }
            plain = rest;
        }
        if plain.is_empty() { Ok(OpenedRecord::Nothing) } else { Err(TlsError::UnexpectedHandshake) }
    }
}

fn encrypter(
    suite: &Tls13CipherSuite,
    secrets: ConnectionTrafficSecrets,
) -> Result<Box<dyn MessageEncrypter>, TlsError> {
    let (key, iv) = parts(secrets)?;
    Ok(suite.aead_alg.encrypter(key, iv))
}

fn decrypter(
    suite: &Tls13CipherSuite,
    secrets: ConnectionTrafficSecrets,
) -> Result<Box<dyn MessageDecrypter>, TlsError> {
    let (key, iv) = parts(secrets)?;
    Ok(suite.aead_alg.decrypter(key, iv))
}

fn parts(
    secrets: ConnectionTrafficSecrets,
) -> Result<(rustls::crypto::cipher::AeadKey, rustls::crypto::cipher::Iv), TlsError> {
    match secrets {
        ConnectionTrafficSecrets::Aes128Gcm { key, iv }
        | ConnectionTrafficSecrets::Aes256Gcm { key, iv }
        | ConnectionTrafficSecrets::Chacha20Poly1305 { key, iv } => Ok((key, iv)),
        _ => Err(TlsError::UnknownCipher),
    }
}
