//! The data plane of `kvevents serve`, for HTTP and gRPC.
//!
//! Theory of operation. [`Server`] owns the listening socket and every client's connection, on its own threads. It answers queries and
//! probes from the index and from a [`fleet::Table`]. The table describes the fleet. The control plane (Python) writes each change of
//! registrations, trust and adapters to the table. All other requests go to the control plane through a queue.
//!
//! The data plane alone decides which callers and hosts are allowed, and limits connections ([`policy`], [`connections`]). The control
//! plane alone has the rules for the contents of requests. The data plane answers only requests that it understands completely. It forwards
//! all other requests (malformed, refused, unknown model) to the control plane, so that the text of each error exists in only one place. If
//! the control plane has read a query itself, it returns the fields, and the data plane answers the query.
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
pub use json_tokens::extract_array;
pub use problems::Problem;
pub use repeated::check_names;
pub use server::{Failure, Server};
