//! Encodes batches of map events, as msgpack, for tests.

/// A short text.
pub fn text(value: &str) -> Vec<u8> {
    assert!(value.len() < 32);
    [&[0xA0 | value.len() as u8], value.as_bytes()].concat()
}

/// A batch with a timestamp and these events, at most 15 of them.
pub fn batch(events: &[Vec<u8>]) -> Vec<u8> {
    [vec![0x92, 0x01, 0x90 | events.len() as u8], events.concat()].concat()
}

/// A map event.
pub fn map(tag: &str, fields: &[(&str, &[u8])]) -> Vec<u8> {
    let mut out = vec![0x80 | (fields.len() + 1) as u8];
    out.extend([text("type"), text(tag)].concat());
    for (name, value) in fields {
        out.extend([&text(name), *value].concat());
    }
    out
}
