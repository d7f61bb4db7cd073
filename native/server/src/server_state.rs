//! State that all connections of a server share.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use bytes::Bytes;
use hyper::StatusCode;
use parking_lot::RwLock;
use tokio::sync::{Notify, Semaphore};
use tokio_rustls::TlsAcceptor;

use crate::connections::Connections;
use crate::endpoints::{Endpoints, Question};
use crate::forward::Upstream;
use crate::policy::Policy;
use crate::settings::Settings;

/// Number of sweeps without a report after which the control plane counts as failed: 10 s.
pub(crate) const MAX_SILENCE: u32 = 50;
/// Size of a body above which a separate thread reads it, so that it does not delay other clients.
const MANY_BYTES: usize = 1 << 16;
/// Size of the body of a prompt above which a separate thread reads it; token ids are read faster.
const MANY_PROMPT_BYTES: usize = 1 << 20;

/// Status and body of the answers to probes.
pub(crate) struct Probes {
    pub(crate) live: (StatusCode, Bytes),
    pub(crate) ready: (StatusCode, Bytes),
}

/// State that all connections share.
pub(crate) struct Shared {
    pub(crate) settings: Settings,
    pub(crate) connections: Arc<Connections>,
    pub(crate) endpoints: Endpoints,
    pub(crate) policy: Policy,
    pub(crate) upstream: Upstream,
    pub(crate) probes: RwLock<Option<Probes>>,
    /// Number of sweeps since the control plane has set `probes`.
    pub(crate) silence: AtomicU32,
    pub(crate) heavy: Semaphore,
    pub(crate) is_draining: Notify,
    pub(crate) tls: Option<RwLock<TlsAcceptor>>,
}

impl Shared {
    /// Whether the service is ready, according to the last report of the control plane.
    pub(crate) fn is_ready(&self) -> bool {
        let is_alive = self.silence.load(Ordering::Relaxed) <= MAX_SILENCE;
        is_alive
            && self
                .probes
                .read()
                .as_ref()
                .is_some_and(|probes| probes.ready.0 == StatusCode::OK)
    }

    /// Runs work on a query of this many bytes, in a separate thread if they are many. None if the service ends.
    pub(crate) async fn run<T>(&self, question: Question, size: usize, work: impl FnOnce() -> T) -> Option<T> {
        let most = match question {
            Question::Query | Question::Match => MANY_PROMPT_BYTES,
            Question::QueryByHash | Question::Select => MANY_BYTES,
            // Six bytes can be a prompt that every worker holds, and each of them is a row of the answer.
            Question::MatchMany => 0,
        };
        if size <= most {
            return Some(work());
        }
        let _permit = self.heavy.acquire().await.ok()?;
        Some(tokio::task::block_in_place(work))
    }
}
