//! The message about members that say nothing.

/// Says that a member has owed an answer for about half a second, and that nothing else was heard of it meanwhile.
/// The control plane decides from what it hears by itself if that costs the member its membership.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct ReportSilence {
    /// Which member.
    pub node: u64,
    /// In which incarnation.
    pub incarnation: u64,
}
