//! quinn, TLS identities and the message codec live here and nowhere else.
