//! Applies events to the blocks of a stream.

mod block_keys;
mod learning;
mod prefetching;
mod stores;

use std::borrow::Cow;

pub use self::block_keys::{StoredKeys, extras_at, extras_of, stored_keys};
use self::prefetching::Ring;
pub use self::stores::HOST_OF_SGLANG;
use crate::groups::GroupKind;
use crate::holders::placements::{Placement, TIERS, level_of, tier};
use crate::rules::location::Location;
use crate::step_counter;
use crate::store::shared_state::SharedState;
use crate::stream::{RemovalTarget, Stream};
use crate::sync::yielding_lock::{WORK_PER_HOLD, Writer};
use crate::wire::scan::{Event, Kind, Scratch, Span, extra_keys};

/// The medium that a clear names if all tiers are certainly empty after the clear, and the next events can be those of another engine. Only
/// publishers of kvevents name this medium: a snapshot begins with such a clear and announces all groups again.
pub const EVERY_TIER: &[u8] = b"*";

/// The events of a payload.
pub struct PayloadEvents<'a> {
    /// The bytes to which the spans of the events refer: see `decode::ReadPayload`.
    pub bytes: &'a [u8],
    /// The events.
    pub scratch: &'a Scratch,
}

impl PayloadEvents<'_> {
    fn text(&self, span: Option<Span>) -> Option<&str> {
        span.map(|span| std::str::from_utf8(span.bytes(self.bytes)).unwrap_or(""))
    }

    /// The location that an event names.
    #[inline]
    pub fn location(&self, event: &Event) -> Location<'_> {
        let text = |span| self.bytes(span).map(Cow::Borrowed);
        Location {
            medium: text(event.medium),
            locality: text(event.locality),
            ownership: text(event.ownership),
            group: event.group,
        }
    }

    /// The extra keys of an event's blocks; None if no block has an extra key.
    fn extra_keys(&self, event: &Event) -> Option<&[u8]> {
        self.bytes(event.extra_keys.filter(|_| event.has_extra_keys))
    }

    /// The bytes of a span.
    pub fn bytes(&self, span: Option<Span>) -> Option<&[u8]> {
        span.map(|span| span.bytes(self.bytes))
    }
}

/// The hashes of one event. The buffers are reused for the next event.
#[derive(Debug, Default)]
pub struct EventHashes {
    locals: Vec<u64>,
    keys: Vec<u64>,
    extras: Vec<(usize, u64)>,
    window: Vec<u32>,
    ring: Ring,
    targets: Vec<RemovalTarget>,
}

/// Number of blocks for which the buffers keep memory after an event.
const MAX_IDLE_BLOCKS: usize = 1 << 14;

impl EventHashes {
    /// Releases the buffers' memory if a very large event has made them grow.
    pub fn shrink(&mut self) {
        if self.keys.capacity().max(self.extras.capacity()) > MAX_IDLE_BLOCKS {
            *self = Self::default();
        }
    }
}

impl Stream {
    /// Applies one event. Returns whether the event cleared the whole stream.
    pub fn apply_event(
        &mut self,
        writer: &mut Writer<'_, SharedState>,
        read: &PayloadEvents<'_>,
        event: &Event,
        work: &mut EventHashes,
    ) -> bool {
        match event.kind {
            Kind::Stored => self.apply_store(writer, read, event, work),
            Kind::Removed => self.apply_removal(writer, read, event, work),
            Kind::Cleared => return self.apply_clear(writer, read, event),
        }
        if self.group_cache.is_some() {
            self.note_changed_copies(read, event);
        }
        false
    }

    /// Records which copies a store or a removal has changed.
    fn note_changed_copies(&mut self, read: &PayloadEvents<'_>, event: &Event) {
        let group = event.group.unwrap_or(0);
        let level = read.location(event).placement().level() as u8;
        let hashes = event.hashes.slice(&read.scratch.hashes);
        self.changed_copies.extend(hashes.iter().map(|&hash| (hash, group, level)));
    }

    fn apply_removal(
        &mut self,
        writer: &mut Writer<'_, SharedState>,
        read: &PayloadEvents<'_>,
        event: &Event,
        work: &mut EventHashes,
    ) {
        writer.spend(1);
        let hashes = event.hashes.slice(&read.scratch.hashes);
        let group = event.group.unwrap_or(0);
        if self.groups.kind(group) == Some(GroupKind::Unknown) {
            return self.count_unkept(group, read.location(event).is_on_device(), hashes, false);
        }
        let Some(placement) = self.placement(writer, read, event) else {
            self.counters.unknown += hashes.len() as u64;
            return;
        };
        for some in hashes.chunks(WORK_PER_HOLD) {
            self.remove(writer, some, placement, event.group.is_some(), &mut work.targets);
            if self.remove_all_after_skipped_removal(writer) {
                return self.set_aside("too-many-alike");
            }
            self.spend(writer, some.len());
        }
    }

    fn apply_clear(&mut self, writer: &mut Writer<'_, SharedState>, read: &PayloadEvents<'_>, event: &Event) -> bool {
        writer.spend(1);
        step_counter::count(1 + self.held().count());
        let medium = read.text(event.medium).map(tier);
        let empties_device = |tier: &String| tier == TIERS[0] || tier.as_bytes() == EVERY_TIER;
        if event.group.is_none() && medium.as_ref().is_none_or(empties_device) {
            self.hit_reports.clear();
        }
        if medium.is_none() && event.group.is_none() {
            self.clear_all(writer);
            return true;
        }
        if read.bytes(event.medium) == Some(EVERY_TIER) && event.group.is_none() {
            self.begin_engine(writer);
            self.evidence.begin_engine();
            return false;
        }
        let is_cleared = |placement: &Placement| placement.is_cleared_by(medium.as_deref(), event.group);
        let placements: Vec<u16> = (self.held().map(|(placement, _)| placement))
            .filter(|&placement| is_cleared(writer.view.placements.get(placement)))
            .collect();
        let is_unknown = medium.as_ref().is_some_and(|tier| level_of(tier) == TIERS.len());
        if is_unknown && !self.has_any(|placement| placements.contains(&placement)) {
            // The stream may hold the cleared blocks on a tier of another name.
            self.clear_all(writer);
            self.set_aside("unknown-medium");
            return false;
        }
        if medium.as_ref().is_none_or(|tier| tier == TIERS[0]) {
            self.clear_unkept(event.group);
        }
        if !self.clear(writer, |placement| placements.contains(&placement)) {
            self.set_aside("too-many-clears");
        }
        if let Some(tier) = medium.filter(|_| event.group.is_none()) {
            let held = self.lower_levels();
            self.evidence.clear_level(level_of(&tier), held);
        }
        false
    }

    /// Returns the placement that an event names.
    fn placement(&mut self, shared: &mut SharedState, read: &PayloadEvents<'_>, event: &Event) -> Option<u16> {
        let group = Some(event.group.unwrap_or(0)); // a block without a group is in group 0
        let texts = [event.medium, event.locality, event.ownership].map(|text| read.bytes(text));
        let is_meant = |known: &Location<'_>| {
            known.group == group && [&known.medium, &known.locality, &known.ownership].map(Option::as_deref) == texts
        };
        if let Some((_, placement)) = self.places.iter().find(|(known, _)| is_meant(known)) {
            return Some(*placement);
        }
        if self.places.len() >= shared.limits.places {
            return None;
        }
        let location = Location {
            group,
            ..read.location(event)
        };
        let number = self.use_placement(shared, location.placement())?;
        self.places.push((location.to_static(), number));
        Some(number)
    }
}

/// Whether any block of a store has an extra key.
pub fn has_extra_keys(raw: Option<&[u8]>) -> bool {
    let mut has_any = false;
    if let Some(raw) = raw {
        extra_keys(raw, |_, _| has_any = true);
    }
    has_any
}
