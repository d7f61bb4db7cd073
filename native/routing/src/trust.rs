//! Trust: how certain it is that the known blocks of a stream are the blocks that its engine holds.

use serde::{Deserialize, Serialize};

/// Code and sentence for blocks that might be gone, as in `kvevents.service.fleet.faults`.
const UNCERTAIN: (&str, &str) = (
    "uncertain-copies",
    "some of these blocks were announced several times and removed less often, so they might be gone",
);

/// State of a worker's stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum State {
    /// The stream has no connection yet.
    Connecting,
    /// The stream requests batches that it has missed.
    Replaying,
    /// No batch is missing.
    Exact,
    /// The known blocks might not be the blocks that the engine holds.
    Degraded,
    /// The stream has lost its connection.
    Stale,
}

impl State {
    /// Name of the state in answers.
    pub fn name(self) -> &'static str {
        match self {
            Self::Connecting => "CONNECTING",
            Self::Replaying => "REPLAYING",
            Self::Exact => "EXACT",
            Self::Degraded => "DEGRADED",
            Self::Stale => "STALE",
        }
    }
}

/// The trust in one worker's part of an answer.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Trust {
    /// The state of the worker's stream; `Degraded` if some blocks of the answer might be gone.
    pub state: State,
    /// The reason why the state is not EXACT; empty if the state is EXACT.
    pub reason: String,
    /// Codes of the reasons why the state is not EXACT.
    pub reason_codes: Vec<String>,
    /// Whether the engine's own cache had the same blocks at the latest attestation.
    pub attested: bool,
}

impl Trust {
    /// Returns the trust in an answer with blocks that might be gone.
    pub fn if_uncertain(&self) -> Self {
        let (code, sentence) = UNCERTAIN;
        let (is_exact, separator) = (self.state == State::Exact, if self.reason.is_empty() { "" } else { "; " });
        Self {
            state: if is_exact { State::Degraded } else { self.state },
            reason: format!("{}{separator}{sentence}", self.reason),
            reason_codes: self.reason_codes.iter().cloned().chain([code.to_owned()]).collect(),
            attested: false,
        }
    }
}
