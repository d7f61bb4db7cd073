//! The data plane of `kvevents serve`, for HTTP and gRPC.
//!
//! Theory of operation. [`Server`] owns the listening socket and every client's connection, on threads of its own. It answers
//! queries and probes from the index and from a [`fleet::Table`]: an immutable picture of the fleet that the control plane
//! (Python) replaces as a whole whenever registration, trust or adapters change. Everything else goes to the control plane by a
//! queue.
//!
//! Callers, hosts and limits of connections are decided only here ([`policy`], [`connections`]). The control plane alone has the rules
//! for the contents of requests. The code here answers only requests that it understands completely; all others (malformed, refused,
//! unknown model) are forwarded, so that each error is written in one place. A query that the control plane reads comes back as
//! fields, and is answered here too.
#![deny(missing_docs)]

mod answers;
mod body;
mod connections;
mod control_plane;
mod decisions;
mod endpoints;
pub mod fleet;
mod grpc;
mod json_tokens;
mod metrics;
mod policy;
mod problems;
mod proto;
mod receive;
mod repeated;
mod requests;
mod select;
mod server;
mod server_state;
mod settings;
mod socket;
mod tls;

pub use control_plane::{Event, Headers, Request, Stream};
pub use json_tokens::lift;
pub use problems::Problem;
pub use repeated::check_names;
pub use server::{Failure, Server};
