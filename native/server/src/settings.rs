//! Settings that the control plane passes once, at the start.

use std::collections::HashMap;
use std::time::Duration;

use serde::Deserialize;

use kvevents_routing::Terms;

/// Limits of requests and connections: the fields of `kvevents.service.settings.Limits` that the data plane uses.
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

/// Limits a duration to a century, since the clock overflows above some hundreds of years.
pub(crate) fn seconds(seconds: f64) -> Duration {
    Duration::from_secs_f64(seconds.clamp(0.0, 3e9))
}

/// The server's certificate, as names of PEM files.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Tls {
    pub(crate) certificate: String,
    pub(crate) key: String,
    pub(crate) client_ca: Option<String>,
}

/// Placeholder for a name in the path of an endpoint.
const ITEM: &str = "{id}";

/// All settings.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Settings {
    pub(crate) limits: Limits,
    /// SHA-256 digests of bearer tokens with permission to query, as hexadecimal digits.
    pub(crate) tokens: Vec<String>,
    /// Whether any tokens are configured.
    pub(crate) has_tokens: bool,
    /// Whether callers without a token have permission to query.
    pub(crate) is_open: bool,
    /// Whether the `Host` of a request is checked.
    pub(crate) checks_host: bool,
    /// The address at which the service listens, and further names of the service.
    pub(crate) host: String,
    pub(crate) names: Vec<String>,
    /// Whether queries are answered here; if not, they are forwarded.
    pub(crate) answers_queries: bool,
    /// Default weights of `/v1/select`.
    pub(crate) select: Terms,
    /// Methods by path, and paths of probes.
    pub(crate) paths: HashMap<String, Vec<String>>,
    pub(crate) probes: Vec<String>,
    /// Bounds of the buckets of both histograms: durations, and shares of a prompt.
    pub(crate) seconds: Vec<f64>,
    pub(crate) depths: Vec<f64>,
    pub(crate) threads: usize,
    pub(crate) tls: Option<Tls>,
}

impl Settings {
    /// Returns the path of the endpoint of a request. None for an unknown path.
    pub(crate) fn endpoint<'a>(&'a self, path: &'a str) -> Option<&'a str> {
        if self.paths.contains_key(path) {
            return Some(path);
        }
        let is_endpoint = |known: &&String| {
            let item = known
                .split_once(ITEM)
                .and_then(|(prefix, suffix)| path.strip_prefix(prefix)?.strip_suffix(suffix));
            item.is_some_and(|item| !item.is_empty() && !item.contains('/'))
        };
        self.paths.keys().find(is_endpoint).map(String::as_str)
    }
}
