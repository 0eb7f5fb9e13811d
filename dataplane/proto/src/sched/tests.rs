//! Tests of the decisions alone; the client's tests run them against a network.
