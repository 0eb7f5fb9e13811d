//! What is posted and what is over: queue pairs, the queues that they share, and completions.

mod channel;
mod completion;
mod completion_queue;
mod one_sided;
mod queue_pair;
mod receive_queue;
mod send_queue;
mod slots;
#[cfg(test)]
mod tests;

pub use channel::CompletionChannel;
pub use completion::{Completion, Entry, PollResult, QueueId, Status};
pub use completion_queue::CompletionQueue;
pub use one_sided::{OneSided, OneSidedRun};
pub use queue_pair::QueuePair;
pub use receive_queue::SharedReceiveQueue;
pub use send_queue::{Operation, Payload, Remote, Request};
pub use slots::RetiredRequest;
