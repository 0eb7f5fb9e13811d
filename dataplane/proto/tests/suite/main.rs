//! Integration tests of the wire format, in one binary: a module for each subject.

mod wire_arbitrary;
mod wire_document;
mod wire_frame;
mod wire_messages;
