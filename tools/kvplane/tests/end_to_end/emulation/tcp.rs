//! TCP segments in Ethernet frames: the connections that they belong to, and segments that reset those.
//!
//! A reset is accepted only with the sequence number that its receiver expects next (RFC 5961): onward that of the
//! segment itself, and back the one that it acknowledges.

const ETHERNET: usize = 14;
const IP: usize = 20;
const TCP: usize = 20;
const SYN: u8 = 0x02;
const RST: u8 = 0x04;
const ACK: u8 = 0x10;

/// Addresses of the ends of a TCP connection; the smaller one first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Flow([([u8; 4], u16); 2]);

/// A TCP segment over IPv4.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Segment<'a> {
    frame: &'a [u8],
    tcp: &'a [u8],
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// Returns the internet checksum (RFC 1071) of bytes of even length.
fn checksum<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> [u8; 2] {
    let words = parts.into_iter().flat_map(|part| part.chunks_exact(2).map(|word| u32::from(u16_at(word, 0))));
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    (!(sum as u16)).to_be_bytes()
}

impl<'a> Segment<'a> {
    /// Returns the segment of a frame that has one.
    pub(crate) fn parse(frame: &'a [u8]) -> Option<Self> {
        let ip = frame.get(ETHERNET..).filter(|ip| ip.len() >= IP)?;
        let is_tcp = u16_at(frame, 12) == 0x0800 && ip[0] >> 4 == 4 && ip[9] == 6;
        let tcp = ip.get(usize::from(ip[0] & 15) * 4..).filter(|tcp| is_tcp && tcp.len() >= TCP)?;
        Some(Self { frame, tcp })
    }

    fn address(&self, at: usize) -> [u8; 4] {
        let at = ETHERNET + at;
        [self.frame[at], self.frame[at + 1], self.frame[at + 2], self.frame[at + 3]]
    }

    /// Returns its connection.
    pub(crate) fn flow(&self) -> Flow {
        let source = (self.address(12), u16_at(self.tcp, 0));
        let target = (self.address(16), u16_at(self.tcp, 2));
        Flow([source.min(target), source.max(target)])
    }

    /// True for the segment that begins a connection.
    pub(crate) fn is_first(&self) -> bool {
        self.tcp[13] & (SYN | ACK) == SYN
    }

    /// True if it resets its connection.
    #[cfg(test)]
    pub(crate) fn is_reset(&self) -> bool {
        self.tcp[13] & RST != 0
    }

    /// Returns a segment that resets the end which this one is for.
    pub(crate) fn reset_onward(&self) -> Vec<u8> {
        let (sequence, acknowledged) = (u32_at(self.tcp, 4), u32_at(self.tcp, 8));
        self.reset(false, sequence, acknowledged)
    }

    /// Returns a segment that resets the end which this one is from.
    pub(crate) fn reset_back(&self) -> Vec<u8> {
        let (sequence, acknowledged) = (u32_at(self.tcp, 8), u32_at(self.tcp, 4));
        self.reset(true, sequence, acknowledged)
    }

    fn reset(&self, is_back: bool, sequence: u32, acknowledged: u32) -> Vec<u8> {
        let (mut hardware, mut addresses, mut ports) = (
            [&self.frame[..6], &self.frame[6..12]],
            [self.address(12), self.address(16)],
            [u16_at(self.tcp, 0), u16_at(self.tcp, 2)],
        );
        if is_back {
            hardware.reverse();
            addresses.reverse();
            ports.reverse();
        }
        let mut ip = vec![0x45, 0, 0, (IP + TCP) as u8, 0, 0, 0x40, 0, 64, 6, 0, 0];
        ip.extend(addresses.concat());
        let sum = checksum([&ip[..]]);
        ip[10..12].copy_from_slice(&sum);
        let mut tcp: Vec<u8> = ports.iter().flat_map(|port| port.to_be_bytes()).collect();
        tcp.extend(sequence.to_be_bytes());
        tcp.extend(acknowledged.to_be_bytes());
        tcp.extend([5 << 4, RST | ACK, 0, 0, 0, 0, 0, 0]);
        let sum = checksum([&ip[12..], &[0, 6, 0, TCP as u8], &tcp[..]]);
        tcp[16..18].copy_from_slice(&sum);
        [&hardware.concat()[..], &[8, 0], &ip, &tcp].concat()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::emulation::switch::hardware_address;

    /// Returns a segment between the hosts of two ports of a switch.
    pub(crate) fn segment(from: usize, to: usize, is_first: bool) -> Vec<u8> {
        let flags = if is_first { SYN } else { ACK };
        let port = |host: usize| (7000 + host as u16).to_be_bytes();
        let ip = [0x45, 0, 0, 40, 0, 0, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, from as u8, 10, 0, 0, to as u8];
        let tcp = [&port(from)[..], &port(to), &[0, 0, 1, 0, 0, 0, 2, 0, 0x50, flags, 1, 0, 0, 0, 0, 0]].concat();
        [&hardware_address(to)[..], &hardware_address(from), &[8, 0], &ip, &tcp].concat()
    }

    #[test]
    fn resets_are_what_each_end_expects_next() {
        let frame = segment(3, 4, false);
        let segment = Segment::parse(&frame).expect("a segment");
        assert!(!segment.is_first() && !segment.is_reset());
        let (onward, back) = (segment.reset_onward(), segment.reset_back());
        for (reset, from, to, sequence) in [(&onward, 3, 4, 0x100), (&back, 4, 3, 0x200)] {
            assert_eq!(reset[..12], [hardware_address(to), hardware_address(from)].concat());
            let parsed = Segment::parse(reset).expect("a segment");
            assert!(parsed.is_reset());
            assert_eq!(parsed.flow(), segment.flow());
            assert_eq!((u16_at(parsed.tcp, 0), u32_at(parsed.tcp, 4)), (7000 + from as u16, sequence));
            // A right checksum makes the sum of all words zero.
            let ip = &reset[ETHERNET..ETHERNET + IP];
            assert_eq!(checksum([ip]), [0, 0]);
            assert_eq!(checksum([&ip[12..], &[0, 6, 0, 20], parsed.tcp]), [0, 0]);
        }
    }

    #[test]
    fn other_frames_are_no_segments() {
        let frame = segment(0, 1, true);
        assert!(Segment::parse(&frame).is_some_and(|segment| segment.is_first()));
        for length in 0..frame.len() {
            assert!(Segment::parse(&frame[..length]).is_none());
        }
        for (at, value) in [(12, 0x86), (ETHERNET, 0x65), (ETHERNET + 9, 17)] {
            let mut other = frame.clone();
            other[at] = value;
            assert!(Segment::parse(&other).is_none());
        }
    }
}
