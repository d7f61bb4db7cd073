//! Weights that have names.

use serde::{Deserialize, Deserializer};

/// Pairs of a name and a weight, in the given order; each name occurs only once.
#[derive(Clone, Debug)]
pub struct Weights<K>(pub Vec<(K, f64)>);

impl<K: Clone + PartialEq> Weights<K> {
    /// Returns these weights and `others`; if a name is in both, the weight in `others` counts.
    pub fn updated(&self, others: &Self) -> Self {
        let mut all = self.clone();
        for (name, weight) in &others.0 {
            all.set(name, *weight);
        }
        all
    }

    fn set(&mut self, name: &K, weight: f64) {
        match self.0.iter_mut().find(|(known, _)| known == name) {
            Some(known) => known.1 = weight,
            None => self.0.push((name.clone(), weight)),
        }
    }
}

impl<K> Default for Weights<K> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<'de, K: Deserialize<'de> + Clone + PartialEq> Deserialize<'de> for Weights<K> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Visitor<K>(std::marker::PhantomData<K>);

        impl<'de, K: Deserialize<'de> + Clone + PartialEq> serde::de::Visitor<'de> for Visitor<K> {
            type Value = Weights<K>;

            fn expecting(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                out.write_str("weights by name")
            }

            fn visit_map<A: serde::de::MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut found = Weights::default();
                while let Some((name, weight)) = map.next_entry()? {
                    if found.0.iter().any(|(known, _)| *known == name) {
                        return Err(serde::de::Error::custom("a name occurs twice"));
                    }
                    found.0.push((name, weight));
                }
                Ok(found)
            }
        }

        from.deserialize_map(Visitor(std::marker::PhantomData))
    }
}
