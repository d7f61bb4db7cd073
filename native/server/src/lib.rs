//! The data plane of `kvevents serve`, for HTTP and gRPC.
//!
//! Theory of operation. [`Server`] owns the listening socket and every client's connection, on its own threads. It answers queries and
//! probes from the index and from a [`fleet::Table`]. The table describes the fleet; the control plane (Python) writes each change of
//! registrations, trust and adapters to it. All other requests go to the control plane through a queue.
//!
//! Only this crate decides which callers and hosts are allowed, and limits connections ([`policy`], [`connections`]). Only the control
//! plane has the rules for the contents of requests. The data plane answers only requests that it understands completely. The data plane
//! forwards all other requests (malformed, refused, unknown model), so that the text of each error exists in one place only. If the control
//! plane reads a query itself, it passes the fields back, and the data plane answers the query as well.
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
