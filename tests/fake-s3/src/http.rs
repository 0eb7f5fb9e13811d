//! HTTP/1.1 as far as the service needs it: bodies with a length, connections that are kept.

use std::io::{BufRead, Write};
use std::net::TcpStream;

/// Longest body.
const BODY_BYTES: usize = 256 << 20;

/// Request.
pub(crate) struct Request {
    pub(crate) method: String,
    pub(crate) path: String,
    query: Vec<(String, String)>,
    pub(crate) range: Option<String>,
    pub(crate) is_signed: bool,
    pub(crate) body: Vec<u8>,
}

impl Request {
    pub(crate) fn query(&self, name: &str) -> Option<String> {
        self.query.iter().find(|(key, _)| key == name).map(|(_, value)| value.clone())
    }
}

/// Response.
pub(crate) struct Response {
    status: u16,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
}

impl Response {
    pub(crate) fn new(status: u16) -> Self {
        Self { status, headers: Vec::new(), body: Vec::new() }
    }

    pub(crate) fn error(status: u16, code: &str) -> Self {
        let body = format!("<?xml version=\"1.0\"?><Error><Code>{code}</Code><Message>{code}</Message></Error>");
        Self::new(status).with("Content-Type", "application/xml").with_body(body.into_bytes())
    }

    pub(crate) fn with(mut self, name: &str, value: &str) -> Self {
        self.headers.push((name.to_owned(), value.to_owned()));
        self
    }

    pub(crate) fn with_body(mut self, body: Vec<u8>) -> Self {
        self.body = body;
        self
    }
}

/// Decodes `%XX`.
fn decoded(text: &str) -> String {
    let (mut bytes, mut out) = (text.bytes(), Vec::new());
    while let Some(byte) = bytes.next() {
        let hex = |byte: Option<u8>| byte.and_then(|byte| char::from(byte).to_digit(16));
        match byte {
            b'%' => match (hex(bytes.next()), hex(bytes.next())) {
                (Some(high), Some(low)) => out.push((high * 16 + low) as u8),
                _ => out.push(b'%'),
            },
            b'+' => out.push(b' '),
            other => out.push(other),
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}

/// Reads a request; `None` at the end of the connection.
pub(crate) fn read(reader: &mut impl BufRead) -> Option<Request> {
    let mut line = String::new();
    if reader.read_line(&mut line).ok()? == 0 {
        return None;
    }
    let mut words = line.split_whitespace();
    let (method, target) = (words.next()?.to_owned(), words.next()?.to_owned());
    let (path, query) = target.split_once('?').unwrap_or((&target, ""));
    let pair = |pair: &str| {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        (decoded(name), decoded(value))
    };
    let query = query.split('&').filter(|part| !part.is_empty()).map(pair).collect();
    let (mut range, mut is_signed, mut length) = (None, false, 0);
    loop {
        let mut header = String::new();
        reader.read_line(&mut header).ok()?;
        let header = header.trim_end();
        if header.is_empty() {
            break;
        }
        let (name, value) = header.split_once(':')?;
        match name.to_ascii_lowercase().as_str() {
            "content-length" => length = value.trim().parse().ok().filter(|length| *length <= BODY_BYTES)?,
            "range" => range = Some(value.trim().to_owned()),
            "authorization" => is_signed = value.contains("AWS4-HMAC-SHA256"),
            _ => {}
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    Some(Request { method, path: decoded(path), query, range, is_signed, body })
}

/// Writes a response; `None` if the connection is gone.
pub(crate) fn write(mut stream: &TcpStream, request: &Request, response: &Response) -> Option<()> {
    let mut head = format!("HTTP/1.1 {} Status\r\n", response.status);
    for (name, value) in &response.headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    head.push_str(&format!("Content-Length: {}\r\n\r\n", response.body.len()));
    stream.write_all(head.as_bytes()).ok()?;
    if request.method != "HEAD" {
        stream.write_all(&response.body).ok()?;
    }
    stream.flush().ok()
}
