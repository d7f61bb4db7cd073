//! The history of one stream, collapsed: payloads go in, and what is still live comes out as events.

mod blocks;
#[cfg(test)]
#[path = "../../index/src/scan/cases.rs"]
mod cases;
#[cfg(test)]
#[path = "../../index/src/scan/layouts.rs"]
mod layouts;
mod manners;
mod naming;
mod rules;
mod shelf;
mod slots;
mod spelling;
mod state;
mod store;
mod telling;
#[cfg(test)]
mod tests;

use kvevents_index::applying::Read;
use kvevents_index::prefetch;
use kvevents_index::scan::{Schema, Scratch, scan};

use spelling::Sheets;
use state::State;

pub use manners::MAX_MANNERS;
pub use rules::MAX_GROUPS;
pub use state::{MAX_DEAD, MAX_EXTRA, MAX_LIVE, MAX_NAMED_BYTES, MAX_WAITING, MAX_WINDOWS};
pub use store::{Place, Store, Told};

/// See the module.
#[derive(Debug, Default)]
pub struct Compactor {
    state: State,
    scratch: Scratch,
}

impl Compactor {
    /// Takes one payload in. False, and nothing has changed, where the scanner does not read it.
    pub fn fold(&mut self, payload: &[u8], schema: &Schema) -> bool {
        let read = scan(payload, schema, &mut self.scratch).is_some();
        if read && self.scratch.digests {
            // Told as numbers, they would be other hashes to whoever keeps digests.
            self.state.lose("digests");
        } else if read {
            let read = Read {
                payload,
                scratch: &self.scratch,
            };
            for (event, &like) in self.scratch.events.iter().zip(&self.scratch.likes) {
                self.state.event(&read, event, like);
            }
        }
        self.scratch.shrink();
        read
    }

    /// Takes payloads in up to the first one that is not read: how many.
    pub fn fold_many(&mut self, payloads: &[&[u8]], schema: &Schema) -> usize {
        let mut next = payloads.iter().skip(1);
        let unread = payloads.iter().position(|payload| {
            next.next().into_iter().for_each(|next| prefetch::beginning(next));
            !self.fold(payload, schema)
        });
        unread.unwrap_or(payloads.len())
    }

    /// What rebuilds the state after a clear of everything. None where that is not known, or cannot be said in events.
    pub fn events(&mut self) -> Option<Vec<Told>> {
        telling::tell(&mut self.state)
    }

    /// Notes that some of the stream was never seen; what is known is kept, and told.
    pub fn miss(&mut self) {
        self.state.partial = true;
    }

    /// Whether some of the stream was never seen since the last clear of everything.
    pub fn partial(&self) -> bool {
        self.state.partial
    }

    /// The same as payloads of at most `limit` bytes for `fold`, by limits of ours; the first event is a clear of everything.
    pub fn payloads(&mut self, limit: usize, ts: f64) -> Option<Vec<Vec<u8>>> {
        let mut sheets = Sheets::new(limit, ts);
        telling::tell_to(&mut self.state, |event| sheets.take(&event))?;
        Some(sheets.finish())
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.state = State::default();
    }

    /// Gives up until the stream is cleared: what was sent is not all there was.
    pub fn lose(&mut self, reason: &'static str) {
        self.state.lose(reason);
    }

    /// What there was too much of, or what else `lose` was told; nothing is kept until the stream is cleared.
    pub fn lost(&self) -> Option<&'static str> {
        self.state.lost
    }

    /// Blocks with at least one copy.
    pub fn live(&self) -> usize {
        self.state.blocks.live()
    }

    /// Blocks kept, dead ancestors and orphans too.
    pub fn nodes(&self) -> usize {
        self.state.blocks.live() + self.state.blocks.dead() + self.state.waiting.len()
    }

    /// Heap bytes, about; those of the last payload apart.
    pub fn bytes(&self) -> usize {
        self.state.bytes()
    }
}
