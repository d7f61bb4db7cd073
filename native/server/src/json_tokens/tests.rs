//! The fast decoder reads the numbers of the JSON text, exactly as a slow decoder, which reads them one by one.

use proptest::prelude::*;

use super::*;

fn read(text: &[u8]) -> Option<Vec<u32>> {
    extract_array(text, "t").map(|(_, tokens)| tokens)
}

/// Asserts that both decoders return the same result.
fn check(text: &[u8]) {
    let expected = extract_with(text, b"t", |_, end, _| end);
    assert_eq!(
        extract_with(text, b"t", side_by_side::read),
        expected,
        "{}",
        text.escape_ascii()
    );
}

fn usual_number() -> impl Strategy<Value = String> {
    prop_oneof![0..10_u32, 0..1_000_u32, 0..128_256_u32, 0..100_000_000_u32].prop_map(|number| number.to_string())
}

fn odd_number() -> impl Strategy<Value = String> {
    prop_oneof![
        10 => any::<u32>().prop_map(|number| number.to_string()),
        10 => (9_999_990..100_000_010_u32).prop_map(|number| number.to_string()),
        1 => "[0-9]{1,22}",
        1 => "0[0-9]{1,9}",
        1 => "-[0-9]{1,6}",
        1 => "[0-9]{1,6}[.eE][0-9]{1,3}",
        1 => "[\"a-z\\[{]{0,3}",
    ]
}

fn odd_byte() -> impl Strategy<Value = u8> {
    prop_oneof![any::<u8>(), prop::sample::select(b"0123456789,, \n\t]]}[-.+e\":/;".to_vec())]
}

/// Returns `numbers` numbers, whose widths repeat `widths`.
fn listed(widths: &[u32], separator: &str, numbers: usize) -> Vec<u8> {
    let number = |at: usize| (10_u32.pow(widths[at % widths.len()] - 1) + at as u32 % 9).to_string();
    let list: Vec<String> = (0..numbers).map(number).collect();
    format!(r#"{{"t":[7{separator}{}],"m":"n"}}"#, list.join(separator)).into_bytes()
}

const EVERY_WIDTH: [u32; 11] = [5, 6, 5, 4, 6, 1, 5, 3, 7, 2, 8];

/// With a comma and a space after each number, eight of these numbers take 64 bytes.
const WHOLE_BLOCKS: [u32; 8] = [7, 6, 6, 6, 6, 6, 6, 6];

#[test]
fn truncated_texts() {
    for separator in [", ", ","] {
        let text = listed(&EVERY_WIDTH, separator, 800);
        for end in 0..=text.len() {
            check(&text[..end]);
        }
    }
}

#[test]
fn one_replaced_byte() {
    for (widths, separator) in [(&EVERY_WIDTH[..], ", "), (&EVERY_WIDTH, ","), (&WHOLE_BLOCKS, ", ")] {
        let text = listed(widths, separator, 300);
        for place in 0..text.len() {
            for byte in *b"0,9 ]-.\n\x80\xAC/:" {
                let mut text = text.clone();
                text[place] = byte;
                check(&text);
            }
        }
    }
}

#[test]
fn only_complete_arrays_are_extracted() {
    for (text, tokens) in [
        (r#"{"t":[]}"#, Some(vec![])),
        (r#" { "m" : "a\"]}" , "t" : [ 1 , 23,456 ] } "#, Some(vec![1, 23, 456])),
        (
            r#"{"x":{"t":[9]},"t":[0,4294967295],"y":[[{}],null,-1.5e3]}"#,
            Some(vec![0, u32::MAX]),
        ),
        (r#"{"t":[4294967296]}"#, None),
        (r#"{"t":[01]}"#, None),
        (r#"{"t":[1.0]}"#, None),
        (r#"{"t":[1e3]}"#, None),
        (r#"{"t":[-1]}"#, None),
        (r#"{"t":[1,]}"#, None),
        (r#"{"t":[,1]}"#, None),
        (r#"{"t":[1 2]}"#, None),
        (r#"{"t":[1,"2"]}"#, None),
        (r#"{"t":[1],"t":[2]}"#, None),
        (r#"{"t":[1]}x"#, None),
        (r#"{"t":[1"#, None),
        (r#"{"t":null}"#, None),
        (r#"{"u":[1]}"#, None),
        ("", None),
        ("[1]", None),
    ] {
        assert_eq!(read(text.as_bytes()), tokens, "{text}");
    }
}

proptest! {
    /// Each list of numbers is read completely, with any spaces in the list and any other fields in the object.
    #[test]
    fn lists_are_read_completely(tokens in prop::collection::vec(any::<u32>(), 0..50), gap in "[ \n\t]{0,2}", small in any::<bool>()) {
        let tokens: Vec<u32> = tokens.into_iter().map(|token| if small { token >> 16 } else { token }).collect();
        let list: Vec<String> = tokens.iter().map(|token| format!("{gap}{token}{gap}")).collect();
        let text = format!(r#"{{"a":"[1,2]","t":[{}],"b":{{"t":[3]}}}}"#, list.join(","));
        let found = extract_with(text.as_bytes(), b"t", side_by_side::read).unwrap();
        prop_assert_eq!(&found.tokens, &tokens);
        prop_assert!(text[found.start..].starts_with('['));
        prop_assert!(text[..found.end].ends_with(']'));
    }

    /// Numbers of any width, usually with equal separators. Other text follows the numbers, some bytes are replaced, and the text is
    /// truncated somewhere.
    #[test]
    fn the_fast_loop_reads_as_the_slow_decoder_does(
        numbers in prop_oneof![
            prop::collection::vec(usual_number(), 0..800),
            prop::collection::vec(prop_oneof![200 => usual_number(), 1 => odd_number()], 0..800),
            prop::collection::vec(odd_number(), 0..300),
        ],
        separator in prop_oneof![4 => ", ", 4 => ",", 1 => "[ \n]?,[ \t]{0,3}"],
        replaced in prop::collection::vec((any::<prop::sample::Index>(), odd_byte()), 0..3),
        behind in "[,0-9 ]{0,400}",
        cut in prop_oneof![3 => Just(None), 1 => any::<prop::sample::Index>().prop_map(Some)],
    ) {
        let mut text = format!(r#"{{"t":[{}],"p":"{behind}"}}"#, numbers.join(&separator)).into_bytes();
        for (place, byte) in replaced {
            let place = place.index(text.len());
            text[place] = byte;
        }
        if let Some(cut) = cut {
            text.truncate(cut.index(text.len()));
        }
        check(&text);
    }

    /// The fast loop reads all usual numbers, except numbers in the last few hundred bytes.
    #[test]
    fn usual_numbers_are_read_quickly(
        numbers in prop::collection::vec(usual_number(), 300..800), separator in prop_oneof![Just(", "), Just(",")]
    ) {
        let text = format!("7{separator}{}]", numbers.join(separator));
        let mut tokens = Vec::new();
        let end = side_by_side::read(text.as_bytes(), 1, &mut tokens);
        prop_assert!(tokens.len() + 210 >= numbers.len(), "{} of {}", tokens.len(), numbers.len());
        let read: Vec<String> = tokens.iter().map(u32::to_string).collect();
        prop_assert_eq!(&read[..], &numbers[..tokens.len()]);
        prop_assert_eq!(&text[..end], ["7", separator, &read.join(separator)].concat());
    }

    /// No input makes the decoder panic.
    #[test]
    fn no_text_makes_the_decoder_panic(text in "[{}\\[\\]\",:0-9t \\\\-]{0,40}") {
        let _ = read(text.as_bytes());
    }
}
