//! Records: what is sealed with the keys of a handshake, and opened where it lies.
//!
//! A record is 5 bytes of header, up to 16 KiB of plain bytes, their type, and 16 bytes that prove all that (RFC 8446,
//! 5.2).
//! The ciphers and the derivation of keys are rustls'; what is here is their order: numbers of records, the change of
//! keys before a cipher's limit, and what is no data.

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

/// The most plain bytes in a record.
pub const PLAIN_BYTES: usize = 16 << 10;
const HEADER_BYTES: usize = 5;
/// The longest record: what TLS allows, ours are some 240 bytes shorter.
pub const RECORD_BYTES: usize = HEADER_BYTES + PLAIN_BYTES + 256;
/// Types of messages that come after a handshake.
const NEW_SESSION_TICKET: u8 = 4;
const KEY_UPDATE: u8 = 24;

/// The bytes of the record that these begin with; none when more of it has to come.
pub(crate) fn record_at(bytes: &[u8]) -> Result<Option<usize>, TlsError> {
    let Some(header) = bytes.first_chunk::<HEADER_BYTES>() else { return Ok(None) };
    let length = usize::from(u16::from_be_bytes([header[3], header[4]]));
    if !(20..=23).contains(&header[0]) || header[1] != 3 || length == 0 || length > PLAIN_BYTES + 256 {
        return Err(TlsError::new(format!("what the peer sent is no TLS record: it begins with {header:02x?}")));
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

/// A sealed connection.
pub struct Session {
    kernel: Kernel,
    suite: &'static Tls13CipherSuite,
    seal: Box<dyn MessageEncrypter>,
    /// The number of the next record that is sealed, and the one before which keys are changed.
    sealed: u64,
    limit: u64,
    open: Box<dyn MessageDecrypter>,
    opened: u64,
    /// The peer wants to be sent under new keys.
    asked: bool,
}

/// What a record was.
#[derive(Debug)]
pub enum OpenedRecord<'a> {
    /// More of it has to come.
    More,
    /// These bytes.
    Data(&'a [u8]),
    /// Nothing for who uses the connection.
    Nothing,
    /// The peer sends no more, and said so.
    Closed,
}

impl Session {
    pub(crate) fn new(secrets: ExtractedSecrets, kernel: Kernel) -> Result<Self, TlsError> {
        let suite = kernel.suite().tls13().ok_or_else(|| TlsError::new("the peers have agreed on no TLS 1.3"))?;
        let ((sealed, tx), (opened, rx)) = (secrets.tx, secrets.rx);
        let (seal, open) = (encrypter(suite, tx)?, decrypter(suite, rx)?);
        let limit = suite.common.confidentiality_limit;
        Ok(Self { kernel, suite, seal, sealed, limit, open, opened, asked: false })
    }

    /// The name of the cipher.
    #[must_use]
    pub fn cipher(&self) -> String {
        format!("{:?}", self.suite.common.suite)
    }

    /// Changes keys after so many records already, for tests; the cipher's own limit stays.
    pub fn limit_records(&mut self, records: u64) {
        self.limit = self.limit.min(records.max(1));
    }

    /// Seals these bytes, at most [`PLAIN_BYTES`], as one record, which is put behind `out`, perhaps after others.
    ///
    /// # Errors
    /// When the cipher does not, after which the connection is of no use.
    pub fn seal(&mut self, plain: &[u8], mut out: impl FnMut(Vec<u8>)) -> Result<(), TlsError> {
        if self.asked || self.sealed >= self.limit {
            out(self.record(ContentType::Handshake, &[KEY_UPDATE, 0, 0, 1, 0])?);
            let (number, secrets) = self.kernel.next_tx()?;
            (self.seal, self.sealed, self.asked) = (encrypter(self.suite, secrets)?, number, false);
        }
        out(self.record(ContentType::ApplicationData, plain)?);
        Ok(())
    }

    /// The record after which we send no more.
    ///
    /// # Errors
    /// As [`Self::seal`].
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

    /// Opens the first record of `bytes`, where it lies. Says also how many bytes it took.
    ///
    /// # Errors
    /// When a record was changed on its way, or should not have come; the connection is of no use any more. None of its
    /// bytes have been given out.
    pub fn open<'a>(&mut self, bytes: &'a mut [u8]) -> Result<(usize, OpenedRecord<'a>), TlsError> {
        let Some(taken) = record_at(bytes)? else { return Ok((0, OpenedRecord::More)) };
        let (header, sealed) = bytes[..taken].split_at_mut(HEADER_BYTES);
        if header[0] != u8::from(ContentType::ApplicationData) {
            return Err(TlsError::new("a record came that is not sealed, behind a handshake"));
        }
        let message = InboundOpaqueMessage::new(ContentType::ApplicationData, ProtocolVersion::TLSv1_2, sealed);
        let message = self.open.decrypt(message, self.opened)?;
        self.opened += 1;
        let plain = message.payload;
        let opened = match message.typ {
            ContentType::ApplicationData => OpenedRecord::Data(plain),
            ContentType::Alert => match plain {
                [_, 0] => OpenedRecord::Closed,
                [_, alert] => return Err(TlsError::alert(AlertDescription::from(*alert))),
                _ => return Err(TlsError::new("the peer ended TLS, and not even that as it should")),
            },
            ContentType::Handshake => self.after_handshake(plain)?,
            other => return Err(TlsError::new(format!("a sealed record of the type {other:?} came"))),
        };
        Ok((taken, opened))
    }

    /// Takes the messages of a handshake that come behind it.
    fn after_handshake(&mut self, mut plain: &[u8]) -> Result<OpenedRecord<'static>, TlsError> {
        let wrong = || TlsError::new("the peer sent a message of a handshake that has no place behind it");
        while let Some((&[typ, a, b, c], rest)) = plain.split_first_chunk::<4>() {
            let length = u32::from_be_bytes([0, a, b, c]) as usize;
            let (body, rest) = rest.split_at_checked(length).ok_or_else(wrong)?;
            match (typ, body) {
                // Nothing is resumed.
                (NEW_SESSION_TICKET, _) => {}
                (KEY_UPDATE, &[asks @ (0 | 1)]) if rest.is_empty() => {
                    let (number, secrets) = self.kernel.next_rx()?;
                    (self.open, self.opened) = (decrypter(self.suite, secrets)?, number);
                    self.asked |= asks == 1;
                }
                _ => return Err(wrong()),
            }
            plain = rest;
        }
        if plain.is_empty() { Ok(OpenedRecord::Nothing) } else { Err(wrong()) }
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
        _ => Err(TlsError::new("the peers have agreed on a cipher that is not known here")),
    }
}
