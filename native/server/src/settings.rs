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

/// Limits a duration to a century: the clock overflows above some hundreds of years.
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
    /// The address that the service listens at, and names that it is reached by.
    pub(crate) host: String,
    pub(crate) names: Vec<String>,
    /// Whether queries are answered here; if not, they are forwarded.
    pub(crate) answers_queries: bool,
    /// Default weights of `/v1/select`.
    pub(crate) select: Terms,
    /// Methods by path, and paths of probes.
    pub(crate) paths: HashMap<String, Vec<String>>,
    pub(crate) probes: Vec<String>,
    /// Bounds of the histograms' buckets: of durations, and of shares of a prompt.
    pub(crate) seconds: Vec<f64>,
    pub(crate) depths: Vec<f64>,
    pub(crate) threads: usize,
    pub(crate) tls: Option<Tls>,
}
