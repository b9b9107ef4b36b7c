//! The store's tests at its public API, one file a topic.

mod smoke;
