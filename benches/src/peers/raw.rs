//! Limits of the machine: a raw socket ping-pong of the same size, and one thread's memcpy of the same working set.

use std::net::TcpStream;
use std::time::{Duration, Instant};

use super::cells::{Cell, Op};
use super::meter::{Meter, Usage};
use super::row::Figures;
use super::side::Side;
use crate::Failure;
use crate::peer::{Peer, receive, send};

/// Bytes of a transfer's request and reply besides the payload on kvplane's wire: a header and an item, a header.
const QUESTION_BYTES: u64 = 64 + 32;
const ANSWER_BYTES: u64 = 64;
/// Largest message for which a ping-pong makes sense, in bytes.
const LARGEST_PING_BYTES: u64 = 64 << 10;
/// Size below which a copy stays in the caches of one core, and says nothing about memory.
const SMALLEST_COPY_BYTES: u64 = 1 << 20;

type Measurement = Option<(Figures, Usage)>;

/// Repeats a call for `seconds` after a warm-up of a tenth of it.
fn timed(
    seconds: f64,
    bytes: u64,
    mut call: impl FnMut() -> Result<(), Failure>,
) -> Result<(Figures, Instant), Failure> {
    let warm_up = Instant::now();
    while warm_up.elapsed().as_secs_f64() < seconds / 10.0 {
        call()?;
    }
    let (start, mut samples_us) = (Instant::now(), Vec::new());
    while start.elapsed() < Duration::from_secs_f64(seconds) || samples_us.len() < 3 {
        let begin = Instant::now();
        call()?;
        samples_us.push(begin.elapsed().as_nanos() as f64 / 1e3);
    }
    let (end, calls) = (Instant::now(), samples_us.len());
    let seconds = (end - start).as_secs_f64();
    samples_us.sort_by(f64::total_cmp);
    let at = |share: f64| samples_us.get((share * calls as f64) as usize).copied();
    let gb_s = bytes as f64 * calls as f64 / seconds / 1e9;
    Ok((Figures { calls: calls as u64, seconds, gb_s, p50_us: at(0.5), p99_us: at(0.99) }, end))
}

/// Ping-pong over one socket, spinning or blocking.
pub(crate) struct PingPong {
    pub(crate) pacing: &'static str,
}

impl Side for PingPong {
    fn start(&mut self, _buffer_bytes: u64) -> Result<String, Failure> {
        Ok(String::from("plain socket calls"))
    }

    fn measure(&mut self, cell: Cell, seconds: f64, _round: usize) -> Result<Measurement, Failure> {
        if cell.batch != 1 || cell.block_bytes > LARGEST_PING_BYTES {
            return Ok(None);
        }
        let (there, back) = match cell.op {
            Op::Write => (QUESTION_BYTES + cell.block_bytes, ANSWER_BYTES),
            Op::Read => (QUESTION_BYTES, ANSWER_BYTES + cell.block_bytes),
        };
        let peer = Peer::start(&["echo", self.pacing, &there.to_string(), &back.to_string()])?;
        let mut stream = TcpStream::connect(&peer.said)?;
        stream.set_nodelay(true)?;
        stream.set_nonblocking(self.pacing == "spin")?;
        let meter = Meter::start(&[std::process::id(), peer.pid()]);
        let (question, mut answer) = (vec![1; there as usize], vec![0; back as usize]);
        let (figures, end) = timed(seconds, cell.bytes(), || {
            send(&mut stream, &question)?;
            receive(&mut stream, &mut answer)?;
            Ok(())
        })?;
        Ok(Some((figures, meter.finish(end, figures.seconds))))
    }

    fn stop(&mut self) {}
}

/// Memcpy by one thread, block by block over as many bytes as a call moves.
#[derive(Default)]
pub(crate) struct Memcpy {
    source: Vec<u8>,
    destination: Vec<u8>,
}

impl Side for Memcpy {
    fn start(&mut self, _buffer_bytes: u64) -> Result<String, Failure> {
        Ok(String::from("the C library's"))
    }

    fn measure(&mut self, cell: Cell, seconds: f64, _round: usize) -> Result<Measurement, Failure> {
        if cell.block_bytes < SMALLEST_COPY_BYTES {
            return Ok(None);
        }
        let bytes = cell.bytes() as usize;
        if self.source.len() < bytes {
            (self.source, self.destination) = (vec![1; bytes], vec![2; bytes]);
        }
        let meter = Meter::start(&[std::process::id()]);
        let (source, destination) = (&self.source[..bytes], &mut self.destination[..bytes]);
        let block = cell.block_bytes as usize;
        let (figures, end) = timed(seconds, cell.bytes(), || {
            for (to, from) in destination.chunks_exact_mut(block).zip(source.chunks_exact(block)) {
                std::hint::black_box(to).copy_from_slice(std::hint::black_box(from));
            }
            Ok(())
        })?;
        Ok(Some((figures, meter.finish(end, figures.seconds))))
    }

    fn buffers(&self) -> u64 {
        2
    }

    fn stop(&mut self) {
        *self = Self::default();
    }
}
