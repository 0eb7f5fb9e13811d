//! Our lanes against a raw peer.
