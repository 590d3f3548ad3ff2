//! The fuzz targets of `fuzz/`, run for a moment on generated input: raw bytes, and bytes that are nearly right, which
//! get further.

use proptest::prelude::*;

#[path = "../../../fuzz/src/wire.rs"]
mod targets;

fn nearly(valid: Vec<u8>, at: prop::sample::Index, with: u8) -> Vec<u8> {
    let mut bytes = valid;
    let i = at.index(bytes.len());
    bytes[i] = with;
    bytes
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn arbitrary_bytes_never_panic(data in prop::collection::vec(any::<u8>(), 0..1200)) {
        targets::frame_header(&data);
        targets::hello(&data);
        targets::welcome(&data);
        targets::stream(&data);
        targets::runs(&data);
        targets::file(&data);
    }

    #[test]
    fn headers_with_plausible_fields_never_panic(
        kind in 0u8..15, flags in prop_oneof![9 => 0u8..3, 1 => any::<u8>()],
        space in any::<u32>(),
        address in prop_oneof![Just(0u64), any::<u64>(), (0u64..1 << 36).prop_map(|page| page << 12)],
        length in prop_oneof![Just(0u32), any::<u32>(), (0u32..300).prop_map(|pages| pages << 12)],
        extra in prop_oneof![Just(0u32), 0u32..300, any::<u32>()],
        payload in prop::collection::vec(any::<u8>(), 0..600),
    ) {
        let mut bytes = vec![kind, flags, 0, 0];
        bytes.extend(space.to_le_bytes());
        bytes.extend(address.to_le_bytes());
        bytes.extend(length.to_le_bytes());
        bytes.extend(extra.to_le_bytes());
        targets::frame_header(&bytes);
        bytes.extend(payload);
        targets::stream(&bytes);
    }

    #[test]
    fn compressed_pages_come_out_as_they_were_and_hostile_ones_do_no_harm(
        word in prop::collection::vec(any::<u8>(), 1..100), times in 1usize..200,
        noise in prop::collection::vec(any::<u8>(), 0..600),
        at in any::<prop::sample::Index>(), with in any::<u8>(),
    ) {
        use tranship_wire::{Codec, packed::Packer};
        let repeated = word.repeat(times);
        targets::packed(&repeated);
        targets::packed(&noise);
        for codec in Codec::ALL {
            if let Some(packed) = Packer::new().unwrap().pack(codec, &repeated) {
                targets::packed(&nearly(packed.to_vec(), at, with));
            }
        }
    }

    #[test]
    fn greetings_with_one_wrong_byte_never_panic(at in any::<prop::sample::Index>(), with in any::<u8>()) {
        use tranship_wire::{Hello, Purpose, Refusal, RefusalKind, Welcome};
        let id = "m-4k7tq0zd".parse().unwrap();
        let hello = Hello::new("rack3-host7".parse().unwrap(), Purpose::Pages { stream: 3 }, Some(id));
        let hello = nearly(hello.encode(), at, with);
        targets::hello(&hello[6..]);
        targets::hello(&hello);
        let refusal = Refusal { kind: RefusalKind::Node, reason: "no\u{7}pe".into() };
        let welcome = nearly(Welcome::Refused(refusal).encode(), at, with);
        targets::welcome(&welcome[6..]);
        targets::welcome(&welcome);
    }
}
