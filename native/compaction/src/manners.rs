//! How copies of blocks were announced: where, and as what.

use kvevents_index::planes::{Plane, tier};

use super::store::{Place, PlaceView, StoreView};

/// Ways of announcing that a stream may use, and places: the bits of a block's mask. An engine has a handful.
pub const MAX_MANNERS: usize = 64;

/// Kinds of groups whose blocks are keyed by their tokens.
pub fn is_dense(kind: Option<&[u8]>) -> bool {
    matches!(
        kind,
        None | Some(b"full_attention" | b"mla_attention" | b"sink_full_attention")
    )
}

/// The window of a sliding-window group.
pub fn window_of(kind: Option<&[u8]>, window: Option<i64>) -> Option<i64> {
    window.filter(|&window| window > 0 && kind == Some(b"sliding_window"))
}

/// What the copies of one store have in common.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Manner {
    /// Number of its place.
    pub place: usize,
    /// Kind of attention of the group.
    pub kind: Option<Box<[u8]>>,
    /// Its window.
    pub window: Option<i64>,
    /// For a store without tokens, what it said of a block's size.
    pub bare: Option<u64>,
}

#[derive(Debug)]
struct Known {
    place: Place,
    /// Number of its plane, by which removals and clears are meant.
    plane: usize,
    /// Manners of it, as bits.
    manners: u64,
}

/// All that a stream has used.
#[derive(Debug, Default)]
pub struct Manners {
    all: Vec<Manner>,
    places: Vec<Known>,
    /// Each with its manners, as bits.
    planes: Vec<(Plane, u64)>,
    /// The last one that was asked for.
    last: usize,
}

fn plane_of(view: &PlaceView<'_>) -> Plane {
    let text = |bytes: Option<&[u8]>| bytes.map(|bytes| String::from_utf8_lossy(bytes).into_owned());
    Plane {
        tier: tier(&text(view.medium).unwrap_or_default()),
        locality: text(view.locality),
        ownership: text(view.ownership),
        group: view.group.unwrap_or(0),
    }
}

impl Manners {
    /// One of them.
    pub fn get(&self, number: u8) -> &Manner {
        &self.all[usize::from(number)]
    }

    /// Where its copies are.
    pub fn place(&self, number: u8) -> &Place {
        &self.places[self.get(number).place].place
    }

    /// What its copies count for.
    pub fn plane(&self, number: u8) -> &Plane {
        &self.planes[self.places[self.get(number).place].plane].0
    }

    /// Manners with tokens, as bits.
    pub fn dense(&self) -> u64 {
        self.those(|manner| manner.bare.is_none())
    }

    /// All of them, in an order that does not depend on which was used first: the fastest tier leads.
    pub fn ranked(&self) -> Vec<u8> {
        let mut all: Vec<u8> = (0..self.all.len() as u8).collect();
        all.sort_by_cached_key(|&number| {
            let (plane, place, manner) = (self.plane(number), self.place(number), self.get(number));
            let place = (
                place.medium.clone(),
                place.locality.clone(),
                place.ownership.clone(),
                place.group,
            );
            (
                plane.level(),
                plane.group,
                place,
                manner.kind.clone(),
                manner.window,
                manner.bare,
            )
        });
        all
    }

    fn those(&self, meant: impl Fn(&Manner) -> bool) -> u64 {
        let numbers = (0..self.all.len()).filter(|&number| meant(&self.all[number]));
        numbers.fold(0, |bits, number| bits | 1 << number)
    }

    /// The number of a store's manner; None when there are too many.
    #[inline]
    pub fn of(&mut self, store: &StoreView<'_>, bare: Option<u64>) -> Option<u8> {
        if self.is(self.last, store, bare) {
            return Some(self.last as u8);
        }
        let found = (0..self.all.len()).find(|&number| self.is(number, store, bare));
        self.last = match found {
            Some(number) => number,
            None => self.add(store, bare)?,
        };
        Some(self.last as u8)
    }

    #[inline]
    fn is(&self, number: usize, store: &StoreView<'_>, bare: Option<u64>) -> bool {
        self.all.get(number).is_some_and(|known| {
            known.bare == bare
                && known.kind.as_deref() == store.kind
                && known.window == store.window
                && self.places[known.place].place.view() == store.place
        })
    }

    #[cold]
    fn add(&mut self, store: &StoreView<'_>, bare: Option<u64>) -> Option<usize> {
        let place = self.placed(&store.place)?;
        if self.all.len() >= MAX_MANNERS {
            return None;
        }
        let number = self.all.len();
        let kind = store.kind.map(Box::from);
        self.all.push(Manner {
            place,
            kind,
            window: store.window,
            bare,
        });
        let known = &mut self.places[place];
        known.manners |= 1 << number;
        self.planes[known.plane].1 |= 1 << number;
        Some(number)
    }

    /// The number of a place, which it keeps; None when there are too many.
    pub fn placed(&mut self, view: &PlaceView<'_>) -> Option<usize> {
        if let Some(found) = self.places.iter().position(|known| known.place.view() == *view) {
            return Some(found);
        }
        if self.places.len() >= MAX_MANNERS {
            return None;
        }
        let plane = plane_of(view);
        let number = match self.planes.iter().position(|(known, _)| *known == plane) {
            Some(number) => number,
            None => {
                self.planes.push((plane, 0));
                self.planes.len() - 1
            }
        };
        self.places.push(Known {
            place: Place::of(view),
            plane: number,
            manners: 0,
        });
        Some(self.places.len() - 1)
    }

    /// For a removal, manners of exactly its place, and of all places that count for the same plane.
    #[inline]
    pub fn meant(&self, place: usize) -> (u64, u64) {
        let known = &self.places[place];
        (known.manners, self.planes[known.plane].1)
    }

    /// Manners that a clear is meant for.
    pub fn cleared(&self, medium: Option<&[u8]>, group: Option<i64>) -> u64 {
        let tier = medium.map(|medium| tier(&String::from_utf8_lossy(medium)));
        let planes = self.planes.iter().filter(|(plane, _)| {
            tier.as_ref().is_none_or(|tier| *tier == plane.tier) && group.is_none_or(|group| group == plane.group)
        });
        planes.fold(0, |bits, (_, manners)| bits | manners)
    }

    /// Heap bytes, about.
    pub fn bytes(&self) -> usize {
        let text = |bytes: &Option<Box<[u8]>>| bytes.as_ref().map_or(0, |bytes| bytes.len());
        let places: usize = (self.places.iter())
            .map(|known| 2 * (text(&known.place.medium) + text(&known.place.locality) + text(&known.place.ownership)))
            .sum();
        places
            + self.all.iter().map(|manner| text(&manner.kind)).sum::<usize>()
            + self.all.capacity() * size_of::<Manner>()
            + self.places.capacity() * size_of::<Known>()
            + self.planes.capacity() * size_of::<(Plane, u64)>()
    }
}
