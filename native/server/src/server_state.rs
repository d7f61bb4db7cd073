//! State that all connections of a server share.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use bytes::Bytes;
use hyper::http::request::Parts;
use hyper::{Response, StatusCode};
use parking_lot::RwLock;
use tokio::sync::{Notify, Semaphore, watch};
use tokio_rustls::TlsAcceptor;
use tonic_health::pb::health_check_response::ServingStatus;

use crate::body::Body;
use crate::connections::Connections;
use crate::control_plane::ControlPlane;
use crate::endpoints::{Endpoints, Question};
use crate::settings::{Access, Settings};

/// Number of sweeps after which a control plane that has not reported counts as failed: 10 s.
pub(crate) const MAX_SILENCE: u32 = 50;
/// A separate thread reads a body of at least this number of bytes, so that other clients are not delayed.
const THREAD_BYTES: usize = 1 << 16;
/// A separate thread reads a body with one prompt if it has at least this number of bytes. The number is larger than `THREAD_BYTES`, since
/// token ids are read faster.
const THREAD_PROMPT_BYTES: usize = 1 << 20;

/// Status and body of the answers to probes.
pub(crate) struct Probes {
    pub(crate) live: (StatusCode, Bytes),
    pub(crate) ready: (StatusCode, Bytes),
}

/// State that all connections share.
pub(crate) struct ServerState {
    pub(crate) settings: Settings,
    pub(crate) connections: Arc<Connections>,
    pub(crate) endpoints: Endpoints,
    pub(crate) control_plane: Arc<ControlPlane>,
    pub(crate) probes: RwLock<Option<Probes>>,
    /// Number of sweeps since the control plane last set `probes`.
    pub(crate) silence: AtomicU32,
    pub(crate) heavy: Semaphore,
    pub(crate) is_draining: Notify,
    /// The health that is sent to clients that watch it; None after the end of the service.
    pub(crate) watched_health: watch::Sender<Option<ServingStatus>>,
    pub(crate) tls: Option<RwLock<TlsAcceptor>>,
}

impl ServerState {
    /// Whether the service is ready, according to the latest report of the control plane.
    pub(crate) fn health(&self) -> ServingStatus {
        let is_alive = self.silence.load(Ordering::Relaxed) <= MAX_SILENCE;
        let probes = self.probes.read();
        if is_alive && probes.as_ref().is_some_and(|probes| probes.ready.0 == StatusCode::OK) {
            ServingStatus::Serving
        } else {
            ServingStatus::NotServing
        }
    }

    /// If the health has changed, sends it to the clients that watch it.
    pub(crate) fn report_health(&self) {
        let health = self.health();
        self.watched_health.send_if_modified(|watched| {
            watched
                .as_mut()
                .is_some_and(|watched| std::mem::replace(watched, health) != health)
        });
    }

    /// Returns the control plane's answer to a request, and counts it. Returns None if the control plane ends before it answers.
    pub(crate) async fn ask(&self, head: &Parts, peer: &str, access: &Access, body: Bytes) -> Option<Response<Body>> {
        let began = Instant::now();
        let answer = self.control_plane.ask(head, peer, access, body).await?;
        if !access.path.is_empty() {
            let status = answer.status().as_u16();
            self.endpoints.metrics.request(&access.path, status, began.elapsed());
        }
        Some(answer)
    }

    /// Runs work on a query of `size` bytes, in a separate thread if it is large. Returns None if the service ends.
    pub(crate) async fn run<T>(&self, question: Question, size: usize, work: impl FnOnce() -> T) -> Option<T> {
        let limit = match question {
            Question::Query | Question::Match => THREAD_PROMPT_BYTES,
            Question::QueryByHash | Question::Select | Question::Reservation(_) => THREAD_BYTES,
            // A prompt of six bytes can match each worker, and the answer has a row for each worker and prompt.
            Question::MatchMany => 0,
        };
        if size <= limit {
            return Some(work());
        }
        let _permit = self.heavy.acquire().await.ok()?;
        Some(tokio::task::block_in_place(work))
    }
}
