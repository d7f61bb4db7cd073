//! Announcements: stores with the same location, the same kind of group and the same form, whose copies are counted together.

use std::borrow::Cow;

use kvevents_index::holders::placements::Placement;
use kvevents_index::rules::location::owned;

use super::event::{Location, Store, Text};

/// Maximum number of different announcements of a stream: a block has one bit for each announcement. An engine needs only a few.
pub const MAX_ANNOUNCEMENTS: usize = 64;

/// The common part of stores whose copies are counted together.
#[derive(Clone, Debug)]
pub struct Announcement {
    /// Location of the copies.
    pub location: Location<'static>,
    /// Placement of the copies: removals and clears do not distinguish copies on the same placement.
    pub placement: Placement,
    /// The announcements on the same placement, as bits.
    together: u64,
    /// Kind of attention of the group.
    pub kind: Text<'static>,
    /// Sliding window of the announced group.
    pub window: Option<i64>,
    /// The block size of stores without tokens; None if the stores have tokens or keys.
    pub tokenless_size: Option<u64>,
}

/// Announcements to which a removal applies, as bits.
#[derive(Clone, Copy, Debug)]
pub struct Removable {
    /// Announcements at exactly this location.
    pub exact: u64,
    /// Announcements at any location on the same placement.
    pub placement: u64,
}

/// All announcements that a stream has used, indexed by ID.
#[derive(Debug, Default)]
pub struct Announcements {
    all: Vec<Announcement>,
    /// The ID that was returned last.
    last: usize,
}

/// Positions of the set bits.
pub fn bits(mut mask: u64) -> impl Iterator<Item = u8> {
    std::iter::from_fn(move || {
        let bit = mask.trailing_zeros();
        mask &= mask.wrapping_sub(1);
        (bit < 64).then_some(bit as u8)
    })
}

impl Announcement {
    #[inline]
    fn is_of(&self, store: &Store<'_>, tokenless_size: Option<u64>) -> bool {
        self.tokenless_size == tokenless_size
            && self.window == store.window
            && self.kind == store.kind
            && self.location == store.location
    }
}

impl Announcements {
    /// The announcement with this ID.
    pub fn get(&self, number: u8) -> &Announcement {
        &self.all[usize::from(number)]
    }

    /// All announcements, in the order of their IDs.
    pub fn iter(&self) -> impl Iterator<Item = &Announcement> {
        self.all.iter()
    }

    /// The level of a store's placement.
    pub fn level_of(&self, store: &Store<'_>) -> usize {
        let is_last = self.all.get(self.last).filter(|last| last.location == store.location);
        is_last.map_or_else(|| store.location.placement().level(), |last| last.placement.level())
    }

    /// Returns the ID of a store's announcement; None if there are too many announcements.
    #[inline]
    pub fn number_of(&mut self, store: &Store<'_>, tokenless_size: Option<u64>) -> Option<u8> {
        let is_last = self.all.get(self.last).is_some_and(|last| last.is_of(store, tokenless_size));
        if !is_last {
            let found = self.all.iter().position(|known| known.is_of(store, tokenless_size));
            self.last = match found {
                Some(number) => number,
                None => self.add(store, tokenless_size)?,
            };
        }
        Some(self.last as u8)
    }

    #[cold]
    fn add(&mut self, store: &Store<'_>, tokenless_size: Option<u64>) -> Option<usize> {
        if self.all.len() >= MAX_ANNOUNCEMENTS {
            return None;
        }
        let placement = store.location.placement();
        let together = self.select(|known| known.placement == placement) | 1 << self.all.len();
        for known in self.all.iter_mut().filter(|known| known.placement == placement) {
            known.together = together;
        }
        self.all.push(Announcement {
            location: store.location.to_static(),
            placement,
            together,
            kind: owned(&store.kind),
            window: store.window,
            tokenless_size,
        });
        Some(self.all.len() - 1)
    }

    fn select(&self, is_meant: impl Fn(&Announcement) -> bool) -> u64 {
        let numbers = (0..self.all.len()).filter(|&number| is_meant(&self.all[number]));
        numbers.fold(0, |bits, number| bits | 1 << number)
    }

    /// The announcements on the same placement as this announcement, as bits.
    pub fn on_placement_of(&self, number: u8) -> u64 {
        self.get(number).together
    }

    /// Announcements with tokens or keys, as bits.
    pub fn dense(&self) -> u64 {
        self.select(|known| known.tokenless_size.is_none())
    }

    /// The announcements that a removal at `location` removes.
    pub fn removable(&self, location: &Location<'_>) -> Removable {
        let exact = self.select(|known| known.location == *location);
        let placement = match self.all.get(exact.trailing_zeros() as usize) {
            Some(known) => Cow::Borrowed(&known.placement),
            None => Cow::Owned(location.placement()),
        };
        Removable {
            exact,
            placement: self.select(|known| known.placement == *placement),
        }
    }

    /// The announcements that a clear of a tier or of a group removes, as bits.
    pub fn clearable(&self, tier: Option<&str>, group: Option<i64>) -> u64 {
        self.select(|known| known.placement.is_cleared_by(tier, group))
    }

    /// Whether an announcement is about copies on the device.
    pub fn is_on_device(&self, number: u8) -> bool {
        self.get(number).placement.level() == 0
    }

    /// The levels of the given announcements, as bits.
    pub fn levels_of(&self, announcements: u64) -> u8 {
        let meant = bits(announcements).map_while(|number| self.all.get(usize::from(number)));
        meant.fold(0, |levels, known| levels | 1 << known.placement.level())
    }

    /// The announcements on the given levels, as bits.
    pub fn on_levels(&self, levels: u8) -> u64 {
        self.select(|known| levels >> known.placement.level() & 1 != 0)
    }

    /// The IDs of all announcements, the fastest tier first, in an order that does not depend on the order of their first use.
    pub fn ranked(&self) -> Vec<u8> {
        let mut numbers: Vec<u8> = (0..self.all.len() as u8).collect();
        numbers.sort_by_key(|&number| {
            let known = self.get(number);
            let group = (known.placement.level(), known.placement.group);
            (group, &known.location, &known.kind, known.window, known.tokenless_size)
        });
        numbers
    }

    /// Approximate heap bytes.
    pub fn bytes(&self) -> usize {
        let texts = |known: &Announcement| 2 * known.location.bytes() + known.kind.as_ref().map_or(0, |kind| kind.len());
        self.all.iter().map(texts).sum::<usize>() + self.all.capacity() * size_of::<Announcement>()
    }
}
