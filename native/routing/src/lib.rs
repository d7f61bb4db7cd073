//! Selects the worker for a prompt. The service, `kvevents.routing` and the simulator use this code.

mod choice;
mod loads;
mod reservations;
pub mod score;
#[cfg(feature = "testing")]
pub mod testing;
mod ties;
mod trust;
mod weights;
mod work;

pub use choice::{
    Contender, ExplainedCandidate, Labels, LoadFrom, Question, ScoreWeights, Selection, Tier, Tiers, WorkerTrust, choose,
    max_requests,
};
pub use loads::Loads;
pub use reservations::{Reservation, ReservationCounts, ReservationRequest, ReservedPrompt, TooManyReservations, Update};
pub use ties::{MAX_TURNS, Tie, Ties};
pub use trust::{State, Trust};
pub use weights::Weights;
pub use work::Progress;
