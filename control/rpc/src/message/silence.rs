//! Message about unresponsive members.

/// Reports that a member has owed a reply for a quarter of a second, in which nothing else arrived from it. The control
/// plane decides from its own probes and heartbeats whether the member is expelled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct ReportSilence {
    pub node: u64,
    pub incarnation: u64,
}
