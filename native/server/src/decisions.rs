//! A sample of the newest choices with their candidates, from which operators see why workers are chosen.

use std::collections::VecDeque;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use serde_json::json;

use crate::fleet::Scope;
use kvevents_routing::Selection;

/// Maximum number of choices in the sample.
const MAX_DECISIONS: usize = 64;
/// Maximum number of candidates that are stored with a choice, the best first.
const MAX_CANDIDATES: usize = 16;
/// Minimum time between two choices in the sample.
const MIN_INTERVAL: Duration = Duration::from_secs(1);

/// A sample of the newest choices.
#[derive(Default)]
pub(crate) struct Decisions {
    sample: Mutex<Sample>,
}

#[derive(Default)]
struct Sample {
    choices: VecDeque<serde_json::Value>,
    next: Option<Instant>,
}

impl Decisions {
    /// Returns whether the next choice must be stored; true at most once per `MIN_INTERVAL`.
    pub(crate) fn is_due(&self) -> bool {
        let now = Instant::now();
        let mut sample = self.sample.lock();
        let is_due = sample.next.is_none_or(|next| next <= now);
        if is_due {
            sample.next = Some(now + MIN_INTERVAL);
        }
        is_due
    }

    /// Stores a choice.
    pub(crate) fn add(&self, scope: &Scope, prompt_tokens: usize, selected: &Selection<'_>) {
        let at = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
        let mut selection = json!(selected);
        for name in ["considered", "unreachable"] {
            if let Some(list) = selection[name].as_array_mut() {
                list.truncate(MAX_CANDIDATES);
            }
        }
        let choice = json!({
            "at": at, "model": scope.model, "tenant": scope.tenant, "group": scope.group, "prompt_tokens": prompt_tokens,
            "selection": selection,
        });
        let mut sample = self.sample.lock();
        if sample.choices.len() >= MAX_DECISIONS {
            sample.choices.pop_front();
        }
        sample.choices.push_back(choice);
    }

    /// The choices as JSON, the newest first.
    pub(crate) fn json(&self) -> Vec<u8> {
        let sample = self.sample.lock();
        let choices: Vec<&serde_json::Value> = sample.choices.iter().rev().collect();
        json!({ "decisions": choices }).to_string().into_bytes()
    }
}
