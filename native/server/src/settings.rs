//! Settings that the control plane passes once, when it starts the server.

use std::borrow::Cow;
use std::collections::HashMap;
use std::time::Duration;

use hyper::http::request::Parts;
use hyper::{Method, Uri};
use percent_encoding::percent_decode_str;
use serde::Deserialize;

use crate::policy::{Endpoint, Policy, Refusal};
use kvevents_routing::ScoreWeights;

/// Limits of requests and connections: those fields of `kvevents.service.settings.Limits` that the data plane uses.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Limits {
    pub(crate) max_body_bytes: usize,
    pub(crate) max_json_bytes: usize,
    pub(crate) max_tokens: usize,
    pub(crate) max_hashes: usize,
    pub(crate) max_candidates: usize,
    pub(crate) max_rows: usize,
    pub(crate) reservation_seconds: f64,
    pub(crate) max_clients: usize,
    pub(crate) reserved_clients: usize,
    pub(crate) max_received_bytes: usize,
    pub(crate) max_unread_bytes: usize,
    pub(crate) request_seconds: f64,
    pub(crate) idle_seconds: f64,
    pub(crate) unread_seconds: f64,
}

impl Limits {
    pub(crate) fn request(&self) -> Duration {
        seconds(self.request_seconds)
    }

    pub(crate) fn idle(&self) -> Duration {
        seconds(self.idle_seconds)
    }

    pub(crate) fn unread_time(&self) -> Duration {
        seconds(self.unread_seconds)
    }

    #[cfg(test)]
    pub(crate) fn for_tests() -> Self {
        Self {
            max_body_bytes: 1 << 20,
            max_json_bytes: 1 << 16,
            max_tokens: 1 << 16,
            max_hashes: 1_024,
            max_candidates: 64,
            max_rows: 1_024,
            reservation_seconds: 300.0,
            max_clients: 16,
            reserved_clients: 2,
            max_received_bytes: 1 << 20,
            max_unread_bytes: 256 << 20,
            request_seconds: 5.0,
            idle_seconds: 50.0,
            unread_seconds: 5.0,
        }
    }
}

/// Converts seconds to a duration, at most a century: the clock overflows after some hundreds of years.
pub(crate) fn seconds(seconds: f64) -> Duration {
    Duration::from_secs_f64(seconds.clamp(0.0, 3e9))
}

/// Names of PEM files for the TLS of the server.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Tls {
    pub(crate) certificate: String,
    pub(crate) key: String,
    pub(crate) client_ca: Option<String>,
}

/// The text in the path of an endpoint that represents any name.
const NAME_PLACEHOLDER: &str = "{id}";

/// All settings of the server.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Settings {
    pub(crate) limits: Limits,
    pub(crate) policy: Policy,
    /// Whether the data plane answers queries; otherwise it forwards all of them.
    pub(crate) answers_queries: bool,
    /// Weights of `/v1/select` for requests without weights.
    pub(crate) select: ScoreWeights,
    /// Maps the path and the method of each endpoint to the endpoint.
    pub(crate) endpoints: HashMap<String, HashMap<String, Endpoint>>,
    /// Paths that are answered even on reserved connections: those of probes, and a few others.
    pub(crate) probes: Vec<String>,
    /// Bounds, in seconds, of the buckets of the histogram of durations.
    pub(crate) seconds: Vec<f64>,
    /// Bounds of the buckets of the histogram of matched shares of prompts, from 0 to 1.
    pub(crate) depths: Vec<f64>,
    pub(crate) threads: usize,
    pub(crate) tls: Option<Tls>,
}

impl Settings {
    /// Returns the endpoint and the caller of a request.
    pub(crate) fn access(&self, head: &Parts) -> Access {
        let method = if head.method == Method::HEAD {
            "GET"
        } else {
            head.method.as_str()
        };
        let mut access = Access::default();
        if let Some((path, methods)) = self.endpoints_at(&decoded_path(&head.uri)) {
            access.path.clone_from(path);
            if let Some((method, endpoint)) = methods.get_key_value(method) {
                access.method.clone_from(method);
                let (caller, refusal) = self.policy.check(&head.headers, endpoint, method == "GET");
                (access.caller, access.refusal) = (caller.into(), refusal);
            }
        }
        access
    }

    /// Returns the path in the table that matches the path of a request, and its endpoints by method. Returns None if no path matches.
    fn endpoints_at(&self, path: &str) -> Option<(&String, &HashMap<String, Endpoint>)> {
        let is_endpoint = |(known, _): &(&String, _)| {
            let item = known
                .split_once(NAME_PLACEHOLDER)
                .and_then(|(prefix, suffix)| path.strip_prefix(prefix)?.strip_suffix(suffix));
            item.is_some_and(|item| !item.is_empty() && !item.contains('/'))
        };
        let with_item = || self.endpoints.iter().find(is_endpoint);
        self.endpoints.get_key_value(path).or_else(with_item)
    }
}

/// The path in a request's target, without percent-encoding.
pub(crate) fn decoded_path(target: &Uri) -> Cow<'_, str> {
    percent_decode_str(target.path()).decode_utf8_lossy()
}

/// The endpoint of a request, and whether the caller may use it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Access {
    /// Path of the endpoint, as in the table; empty if no endpoint has the request's path.
    pub(crate) path: String,
    /// Method of the endpoint, as in the table; empty if the endpoint does not have the request's method.
    pub(crate) method: String,
    /// Name of the caller; empty if the endpoint is unknown.
    pub(crate) caller: String,
    pub(crate) refusal: Option<Refusal>,
}

impl Access {
    /// Whether the body of the request may be received, and the request answered. Otherwise the control plane answers with an error.
    pub(crate) fn is_granted(&self) -> bool {
        !self.method.is_empty() && self.refusal.is_none()
    }
}
