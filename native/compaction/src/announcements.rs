//! Announcements: groups of stores with the same location, kind of KV cache group, and form. The copies of an announcement are counted
//! together.

use std::borrow::Cow;

use kvevents_index::holders::placements::Placement;
use kvevents_index::rules::location::owned;

use super::event::{Location, Store, Text};

/// Maximum number of announcements of a stream: each block has one bit for each announcement. An engine uses only a few.
pub const MAX_ANNOUNCEMENTS: usize = 64;

/// The properties that all stores of one announcement have.
#[derive(Clone, Debug)]
pub struct Announcement {
    /// Location of the copies.
    pub location: Location<'static>,
    /// Placement of the copies. Removals and clears do not distinguish copies on one placement.
    pub placement: Placement,
    /// All announcements with this placement, as bits.
    together: u64,
    /// Kind of attention of the group.
    pub kind: Text<'static>,
    /// Sliding window of the group, in tokens; None if the group has no window.
    pub window: Option<i64>,
    /// The block size, if the stores have neither tokens nor keys; None if they have.
    pub tokenless_size: Option<u64>,
}

/// The announcements from which a removal takes copies, as bits.
#[derive(Clone, Copy, Debug)]
pub struct RemovalScope {
    /// Announcements with exactly the location of the removal.
    pub exact: u64,
    /// Announcements with any location on the placement of the removal.
    pub placement: u64,
    /// Level of that placement.
    pub level: usize,
}

/// All announcements that a stream has used, indexed by ID.
#[derive(Debug, Default)]
pub struct Announcements {
    all: Vec<Announcement>,
    /// The ID that the previous call of `number_of` has returned.
    last: usize,
}

/// The positions of the set bits, in ascending order.
pub fn bits(mut mask: u64) -> impl Iterator<Item = u8> {
    std::iter::from_fn(move || {
        let bit = mask.trailing_zeros();
        mask &= mask.wrapping_sub(1);
        (bit < 64).then_some(bit as u8)
    })
}

impl Announcement {
    #[inline]
    fn matches(&self, store: &Store<'_>, tokenless_size: Option<u64>) -> bool {
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
        let is_last = self
            .all
            .get(self.last)
            .is_some_and(|last| last.matches(store, tokenless_size));
        if !is_last {
            let found = self.all.iter().position(|known| known.matches(store, tokenless_size));
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

    /// All announcements on the placement of this announcement, as bits.
    pub fn on_placement_of(&self, number: u8) -> u64 {
        self.get(number).together
    }

    /// Announcements of stores with tokens or keys, as bits.
    pub fn dense_announcements(&self) -> u64 {
        self.select(|known| known.tokenless_size.is_none())
    }

    /// The announcements from which a removal at `location` takes copies.
    pub fn removal_scope(&self, location: &Location<'_>) -> RemovalScope {
        let exact = self.select(|known| known.location == *location);
        let placement = match self.all.get(exact.trailing_zeros() as usize) {
            Some(known) => Cow::Borrowed(&known.placement),
            None => Cow::Owned(location.placement()),
        };
        RemovalScope {
            exact,
            placement: self.select(|known| known.placement == *placement),
            level: placement.level(),
        }
    }

    /// For each placement that a removal at `location` can mean if no copy is on its own placement, the announcements there.
    pub fn unstated_scopes(&self, location: &Location<'_>) -> Vec<RemovalScope> {
        let (own, mut scopes) = (location.placement(), Vec::<RemovalScope>::new());
        let is_meant =
            |known: &Announcement| known.placement != own && own.may_mean(&known.placement, location.group.is_some());
        for number in bits(self.select(is_meant)) {
            let (placement, level) = (self.on_placement_of(number), self.get(number).placement.level());
            if scopes.iter().all(|scope| scope.placement != placement) {
                scopes.push(RemovalScope {
                    exact: 0,
                    placement,
                    level,
                });
            }
        }
        scopes
    }

    /// The announcements whose copies a clear of a tier or of a group removes, as bits.
    pub fn cleared_announcements(&self, tier: Option<&str>, group: Option<i64>) -> u64 {
        self.select(|known| known.placement.is_cleared_by(tier, group))
    }

    /// Whether an announcement is about copies on the device.
    pub fn is_on_device(&self, number: u8) -> bool {
        self.get(number).placement.level() == 0
    }

    /// The levels of these announcements, as bits.
    pub fn levels_of(&self, announcements: u64) -> u8 {
        let meant = bits(announcements).map_while(|number| self.all.get(usize::from(number)));
        meant.fold(0, |levels, known| levels | 1 << known.placement.level())
    }

    /// The announcements on tiers of the given `levels`, as bits. Level 0 is the device.
    pub fn on_levels(&self, levels: u8) -> u64 {
        self.select(|known| levels >> known.placement.level() & 1 != 0)
    }

    /// The IDs of all announcements, those on the fastest tier first. The order does not depend on the history of the stream.
    pub fn ranked_ids(&self) -> Vec<u8> {
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
