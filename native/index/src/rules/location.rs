//! Where copies of blocks are, as events state it.

use std::borrow::Cow;

use crate::holders::placements::{Placement, tier};

/// A text field of an event, as bytes; None if the event lacks the field.
pub type Text<'a> = Option<Cow<'a, [u8]>>;

/// Copies a text.
pub fn owned(text: &Text<'_>) -> Text<'static> {
    text.as_ref().map(|bytes| Cow::Owned(bytes.to_vec()))
}

/// The location of copies of blocks. Several locations can have the same placement.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
#[allow(missing_docs)]
pub struct Location<'a> {
    pub medium: Text<'a>,
    pub locality: Text<'a>,
    pub ownership: Text<'a>,
    pub group: Option<i64>,
}

impl Location<'_> {
    /// Copies the value, with owned texts.
    pub fn to_static(&self) -> Location<'static> {
        Location {
            medium: owned(&self.medium),
            locality: owned(&self.locality),
            ownership: owned(&self.ownership),
            group: self.group,
        }
    }

    /// Returns the placement of copies at this location. A location without a group is in group 0.
    pub fn placement(&self) -> Placement {
        let text = |bytes: &Text<'_>| bytes.as_ref().map(|bytes| String::from_utf8_lossy(bytes).into_owned());
        Placement {
            tier: tier(&text(&self.medium).unwrap_or_default()),
            locality: text(&self.locality),
            ownership: text(&self.ownership),
            group: self.group.unwrap_or(0),
        }
    }

    /// Whether the location is on the device.
    #[inline]
    pub fn is_on_device(&self) -> bool {
        let is_plain = matches!(self.medium.as_deref(), None | Some(b"GPU")) && self.locality.is_none();
        is_plain || self.placement().level() == 0
    }

    /// Heap bytes.
    pub fn bytes(&self) -> usize {
        let texts = [&self.medium, &self.locality, &self.ownership];
        texts.into_iter().flatten().map(|text| text.len()).sum()
    }
}
