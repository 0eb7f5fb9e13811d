//! The public crate: Node, Client, TransferEngine.
