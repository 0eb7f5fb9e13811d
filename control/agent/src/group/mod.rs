//! Process groups: the link of a process of a world to the control plane, which keeps the groups and their views.

mod error;
mod link;
mod mailbox;

pub use error::GroupLinkError;
pub use link::{GroupLink, GroupLinkConfig, MemberHost};
pub use mailbox::ReportSignal;
