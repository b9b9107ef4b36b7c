//! What goes over the wire: shapes of requests and answers, and what an error becomes. One file for each layer of the
//! library holds its shapes and the mapping of its errors. No other module builds JSON or status codes of errors.

pub(crate) mod answers;
pub(crate) mod claim;
pub(crate) mod entity;
pub(crate) mod etag;
pub(crate) mod flow;
pub(crate) mod lock;
pub(crate) mod node;
pub(crate) mod page;
pub(crate) mod problem;
pub(crate) mod request;
pub(crate) mod review;
pub(crate) mod schedule;
pub(crate) mod sse;
pub(crate) mod state;
pub(crate) mod store;
pub(crate) mod task;
pub(crate) mod time;
pub(crate) mod wait;
pub(crate) mod when;
pub(crate) mod workflow;
