//! Which worker takes a prompt. The service, `kvevents.routing` and the simulator choose by the same code.

mod choice;
mod loads;
pub mod score;
mod ties;
mod trust;
mod weights;

pub use choice::{Considered, Contender, LoadFrom, Question, Selected, Terms, Tier, Tiers, WorkerTrust, choose, select_among};
pub use loads::EngineLoads;
pub use ties::{MAX_TURNS, Tie, Ties};
pub use trust::{State, Trust};
pub use weights::Weights;
