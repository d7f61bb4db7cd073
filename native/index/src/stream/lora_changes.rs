//! Detects that the name of a LoRA refers to other weights than before.

use super::Stream;
use super::placing::PlacedBlock;
use crate::holders::contexts::Context;
use crate::rules::replaced_loras::{ReplacedLoras, StoredBlock};
use crate::step_counter;
use crate::store::shared_state::SharedState;

impl Stream {
    /// Records whether a stored block of a LoRA belongs to the weights that are loaded now: see `ReplacedLoras::note`. Returns false if too
    /// many LoRAs were replaced.
    #[cold]
    pub fn note_lora(&mut self, shared: &mut SharedState, placed: &PlacedBlock, placement: u16, parent: Option<u32>) -> bool {
        let Some(lora) = lora_of(shared, placed.number) else {
            return true;
        };
        let Some(loras) = shared.loras(self.number) else { return true };
        let is_on_device = self.is_on_device(placement);
        let may_have_twin = is_on_device && placed.has_twin;
        let has_current_twin = may_have_twin && self.has_current_twin(shared, loras, lora, placed.number, placement);
        if !has_current_twin && !loras.contains(lora) {
            return true;
        }
        let stored = StoredBlock {
            lora,
            record: placed.number,
            parent,
            is_known: placed.is_known,
            is_on_device,
            has_current_twin,
        };
        let mut is_noted = true;
        self.lora_bytes = shared.change_loras(self.number, |loras| is_noted = loras.note(&stored));
        is_noted
    }

    /// Whether the stream holds another block with the same key on this placement, if that block is not outdated.
    fn has_current_twin(&self, shared: &SharedState, loras: &ReplacedLoras, lora: u64, number: u32, placement: u16) -> bool {
        let (mut is_held, context) = (false, shared.records.context(number));
        shared.for_each_twin(false, shared.records.key(number), |other| {
            step_counter::count(1);
            is_held |= other != number
                && shared.records.context(other) == context
                && shared.sets.holds(shared.records.set(other), placement, self.number)
                && !loras.is_outdated(lora, other);
        });
        is_held
    }

    /// Whether some LoRA was replaced, so that blocks might have been computed with its former weights.
    #[inline]
    pub fn has_replaced_loras(&self) -> bool {
        self.lora_bytes > 0
    }

    /// Removes what is recorded about a block that the stream does not hold any more. If the stream then holds no block, no LoRA counts as
    /// replaced.
    pub(super) fn forget_lora(&mut self, shared: &mut SharedState, number: u32) {
        if !self.has_replaced_loras() {
            return;
        }
        let (lora, is_last) = (lora_of(shared, number), self.blocks == 0);
        self.lora_bytes = shared.change_loras(self.number, |loras| {
            if is_last {
                *loras = ReplacedLoras::default();
            } else if let Some(lora) = lora {
                loras.remove(lora, number);
            }
        });
    }

    /// Moves what is recorded about a LoRA's block from one record of the block to another.
    pub(super) fn exchange_lora(&mut self, shared: &mut SharedState, from: u32, to: u32) {
        if self.has_replaced_loras()
            && let Some(lora) = lora_of(shared, from)
        {
            shared.change_loras(self.number, |loras| {
                if loras.remove(lora, from) {
                    loras.store(lora, to);
                }
            });
        }
    }

    /// The replaced LoRAs, in any order.
    pub fn replaced_loras(&self, shared: &SharedState) -> Vec<u64> {
        shared.loras(self.number).into_iter().flat_map(ReplacedLoras::iter).collect()
    }

    /// Records that the engine lists another path for a LoRA than before. Does nothing if blocks have already shown this change, or if too
    /// many LoRAs were replaced.
    pub fn replace_listed_lora(&mut self, shared: &mut SharedState, lora: u64) {
        if self.blocks > 0 && shared.loras(self.number).is_some_and(|loras| loras.has_room(lora)) {
            self.lora_bytes = shared.change_loras(self.number, |loras| loras.replace_listed(lora));
        }
    }

    /// Records that a LoRA was replaced, as a snapshot states.
    pub fn put_replaced_lora(&mut self, shared: &mut SharedState, lora: u64) {
        self.lora_bytes = shared.change_loras(self.number, |loras| loras.replace(lora));
    }

    /// Records that a block was stored after its LoRA was replaced, as a snapshot states. Does nothing if the LoRA was not replaced.
    pub fn put_current(&mut self, shared: &mut SharedState, number: u32) {
        if let Some(lora) = lora_of(shared, number) {
            self.lora_bytes = shared.change_loras(self.number, |loras| loras.store(lora, number));
        }
    }

    /// Whether a block might have been computed with replaced weights.
    pub fn is_outdated(&self, shared: &SharedState, number: u32) -> bool {
        self.has_replaced_loras()
            && lora_of(shared, number)
                .is_some_and(|lora| shared.loras(self.number).is_some_and(|loras| loras.is_outdated(lora, number)))
    }
}

/// The part of a block's seed that its LoRA contributes; None if the block has no LoRA.
fn lora_of(shared: &SharedState, number: u32) -> Option<u64> {
    let context: &Context = shared.contexts.get(shared.records.context(number));
    (context.lora != 0 && !context.is_keyed()).then_some(context.lora)
}
