//! What is sent arrives; what is not allowed is refused on both sides.

use std::io::{Cursor, ErrorKind};

use proptest::prelude::*;
use tranship_types::{AddressSpaceId, NodeName, PAGE_SIZE};
use tranship_wire::*;

fn node() -> impl Strategy<Value = NodeName> {
    "[a-z0-9][a-z0-9._-]{0,62}".prop_map(|s| s.parse().unwrap())
}

fn hello() -> impl Strategy<Value = Hello> {
    let purpose = prop_oneof![
        Just(Purpose::Control),
        Just(Purpose::Files),
        Just(Purpose::Trees),
        Just(Purpose::Image),
        Just(Purpose::Log),
        any::<u8>().prop_map(|stream| Purpose::Pages { stream }),
        any::<bool>().prop_map(|resume| Purpose::Wants { resume }),
    ];
    let migration = prop::option::of("[a-z0-9][a-z0-9-]{0,39}".prop_map(|s| s.parse().unwrap()));
    (any::<u16>(), any::<u16>(), purpose, migration, node()).prop_map(|(min, max, purpose, migration, node)| Hello {
        versions: Versions { min, max },
        purpose,
        migration,
        node,
    })
}

fn header() -> impl Strategy<Value = FrameHeader> {
    let pages = (any::<u32>(), 0u64..(1 << 35) - 256, 1usize..=256).prop_map(|(space, page, n)| {
        FrameHeader::pages(AddressSpaceId(space), page * PAGE_SIZE, n * PAGE_SIZE as usize).unwrap()
    });
    let zero = (any::<u32>(), 0u64..1 << 34, 1u32..=u32::MAX)
        .prop_map(|(space, page, n)| FrameHeader::zero(AddressSpaceId(space), page * PAGE_SIZE, n).unwrap());
    let packed = (any::<u32>(), 0u64..(1 << 35) - 256, 1u32..=256, any::<bool>(), any::<prop::sample::Index>())
        .prop_map(|(space, page, n, lz4, length)| {
            let codec = if lz4 { Codec::Lz4 } else { Codec::Zstd };
            let length = 1 + length.index(n as usize * PAGE_SIZE as usize - 1);
            FrameHeader::packed(AddressSpaceId(space), (page * PAGE_SIZE, n), codec, length).unwrap()
        });
    let same =
        (0u32..1 << 30, 0u64..(1 << 35) - 256, 1u32..=256, 1u32..1 << 30).prop_map(|(space, page, n, further)| {
            FrameHeader::same(AddressSpaceId(space), (page * PAGE_SIZE, n), AddressSpaceId(space + further)).unwrap()
        });
    prop_oneof![
        (1usize..=1 << 20).prop_map(|n| FrameHeader::message(n).unwrap()),
        pages,
        packed,
        zero,
        same,
        (1usize..=4096).prop_map(|n| FrameHeader::file_begin(n).unwrap()),
        (0u64..1 << 40, 1usize..=1 << 20).prop_map(|(offset, n)| FrameHeader::file_data(offset, n).unwrap()),
        any::<u64>().prop_map(|total| FrameHeader::End { total }),
        any::<u64>().prop_map(|timestamp_ns| FrameHeader::Ping { timestamp_ns }),
        any::<u64>().prop_map(|timestamp_ns| FrameHeader::Pong { timestamp_ns }),
        Just(FrameHeader::Named),
        (any::<u32>(), 0u64..1 << 35, 1usize..=64 << 10).prop_map(|(space, page, n)| FrameHeader::later(
            AddressSpaceId(space),
            page * PAGE_SIZE,
            n
        )
        .unwrap()),
        (any::<u32>(), 0u64..1 << 35, 1usize..=64 << 10).prop_map(|(space, page, n)| FrameHeader::want(
            AddressSpaceId(space),
            page * PAGE_SIZE,
            n
        )
        .unwrap()),
    ]
}

proptest! {
    #[test]
    fn headers_survive_the_wire(header in header()) {
        prop_assert_eq!(FrameHeader::decode(&header.encode()), Ok(header));
    }

    #[test]
    fn greetings_survive_the_wire_also_with_fields_of_later_versions(hello in hello(), tail in prop::collection::vec(any::<u8>(), 0..100)) {
        let mut bytes = hello.encode();
        prop_assert_eq!(read_hello(&mut Cursor::new(&bytes)).unwrap(), hello.clone());
        bytes.extend(&tail);
        let length = (bytes.len() - HELLO_PREFIX_LEN) as u16;
        bytes[4..6].copy_from_slice(&length.to_le_bytes());
        prop_assert_eq!(read_hello(&mut Cursor::new(&bytes)).unwrap(), hello);
    }

    #[test]
    fn negotiation_is_symmetric_and_picks_the_newest_common_version(a in any::<(u8, u8)>(), b in any::<(u8, u8)>()) {
        let window = |w: (u8, u8)| Versions { min: w.0.into(), max: w.1.into() };
        let (a, b) = (window(a), window(b));
        let expected = (0..=255u16).rev().find(|v| [a, b].iter().all(|w| (w.min..=w.max).contains(v)));
        prop_assert_eq!(negotiate(a, b).ok(), expected);
        prop_assert_eq!(negotiate(b, a).ok(), expected);
    }

    #[test]
    fn messages_arrive_over_streams_that_give_a_byte_at_a_time(text in ".{0,300}", number in any::<i64>()) {
        let mut wire = Vec::new();
        write_message(&mut wire, &(text.clone(), number)).unwrap();
        let mut trickle = Trickle(Cursor::new(wire));
        prop_assert_eq!(read_message::<_, (String, i64)>(&mut trickle).unwrap(), (text, number));
    }
}

/// Gives one byte for each read.
struct Trickle(Cursor<Vec<u8>>);

impl std::io::Read for Trickle {
    fn read(&mut self, buf: &mut [u8]) -> std::io::Result<usize> {
        let n = buf.len().min(1);
        self.0.read(&mut buf[..n])
    }
}

#[test]
fn what_is_out_of_bounds_is_refused_by_name() {
    let space = AddressSpaceId(7);
    let page = PAGE_SIZE as usize;
    assert!(matches!(FrameHeader::message(0), Err(WireError::Empty { .. })));
    assert!(matches!(FrameHeader::message((1 << 20) + 1), Err(WireError::TooLong { .. })));
    assert!(matches!(FrameHeader::pages(space, 4096, 0), Err(WireError::Empty { .. })));
    assert!(matches!(FrameHeader::pages(space, 4096, page + 1), Err(WireError::Unaligned { .. })));
    assert!(matches!(FrameHeader::pages(space, 4097, page), Err(WireError::Unaligned { .. })));
    assert!(matches!(FrameHeader::pages(space, 4096, (1 << 20) + page), Err(WireError::TooLong { .. })));
    assert!(matches!(FrameHeader::pages(space, USER_ADDRESS_END, page), Err(WireError::OutOfRange { .. })));
    assert!(matches!(FrameHeader::pages(space, u64::MAX - 4095, page), Err(WireError::OutOfRange { .. })));
    assert!(FrameHeader::pages(space, USER_ADDRESS_END - PAGE_SIZE, page).is_ok());
    assert!(matches!(FrameHeader::zero(space, 0, 0), Err(WireError::Empty { .. })));
    assert!(matches!(FrameHeader::zero(space, USER_ADDRESS_END - PAGE_SIZE, 2), Err(WireError::OutOfRange { .. })));
    assert!(matches!(FrameHeader::file_data(u64::MAX, 1), Err(WireError::OutOfRange { .. })));

    let packed = |address, pages, length| FrameHeader::packed(space, (address, pages), Codec::Lz4, length);
    assert!(matches!(packed(4096, 1, 0), Err(WireError::Empty { .. })));
    assert!(matches!(packed(4096, 0, 1), Err(WireError::Empty { .. })));
    assert!(matches!(packed(4096, 1, page), Err(WireError::TooLong { .. })));
    assert!(matches!(packed(4096, 257, page), Err(WireError::TooLong { .. })));
    assert!(matches!(packed(4096, u32::MAX, page), Err(WireError::TooLong { .. })));
    assert!(matches!(packed(4097, 1, 1), Err(WireError::Unaligned { .. })));
    assert!(matches!(packed(USER_ADDRESS_END, 1, 1), Err(WireError::OutOfRange { .. })));
    assert!(packed(4096, 256, (1 << 20) - 1).is_ok());

    let same = |address, pages, other| FrameHeader::same(space, (address, pages), AddressSpaceId(other));
    assert!(matches!(same(4096, 0, 8), Err(WireError::Empty { .. })));
    assert!(matches!(same(4096, 257, 8), Err(WireError::TooLong { .. })));
    assert!(matches!(same(4097, 1, 8), Err(WireError::Unaligned { .. })));
    assert!(matches!(same(USER_ADDRESS_END, 1, 8), Err(WireError::OutOfRange { .. })));
    assert!(matches!(same(4096, 1, space.0), Err(WireError::Unknown { value: 7, .. })));
    let object = AddressSpaceId::object(8).unwrap();
    assert!(matches!(same(4096, 1, object.0), Err(WireError::Unknown { .. })));
    assert!(matches!(FrameHeader::same(object, (4096, 1), space), Err(WireError::Unknown { .. })));
    assert!(same(4096, 256, 8).is_ok());

    let mut unheard_of = packed(4096, 1, 1).unwrap().encode();
    unheard_of[1] = 3;
    assert!(matches!(FrameHeader::decode(&unheard_of), Err(WireError::Unknown { value: 3, .. })));
    let mut flagged = FrameHeader::End { total: 1 }.encode();
    flagged[1] = 1;
    assert!(matches!(FrameHeader::decode(&flagged), Err(WireError::NotZero { field: "flags", .. })));
}

#[test]
fn pages_and_their_end_arrive() {
    let mut wire = Vec::new();
    let content: Vec<u8> = (0..3 * PAGE_SIZE).map(|i| (i % 251) as u8).collect();
    write_pages(&mut wire, AddressSpaceId(12), 0x7000_0000, &content).unwrap();
    write_zero(&mut wire, AddressSpaceId(12), 0x8000_0000, 9).unwrap();
    write_end(&mut wire, content.len() as u64).unwrap();

    let mut r = Cursor::new(wire);
    let FrameHeader::Pages { space, range } = read_header(&mut r).unwrap() else { panic!() };
    assert_eq!((space, range.start, range.len()), (AddressSpaceId(12), 0x7000_0000, 3 * PAGE_SIZE));
    let mut got = vec![0; range.len() as usize];
    std::io::Read::read_exact(&mut r, &mut got).unwrap();
    assert_eq!(got, content);
    let FrameHeader::Zero { range, .. } = read_header(&mut r).unwrap() else { panic!() };
    assert_eq!(range.pages(), 9);
    let end = r.position();
    read_end(&mut r, content.len() as u64).unwrap();
    r.set_position(end);
    assert!(matches!(read_end(&mut r, 1), Err(ReadError::Incomplete { sent: 12288, received: 1 })));
    assert!(matches!(read_header(&mut r), Err(ReadError::Closed)));
}

#[test]
fn compressed_pages_arrive_and_what_would_not_get_smaller_is_not_compressed() {
    let mut packer = packed::Packer::new().unwrap();
    let mut unpacker = packed::Unpacker::default();
    let content: Vec<u8> = (0..256 * PAGE_SIZE).map(|i| (i % 251) as u8).collect();
    let mut state = 1u64;
    let mut noise = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 56) as u8
    };
    let noise: Vec<u8> = (0..256 * PAGE_SIZE).map(|_| noise()).collect();
    for codec in Codec::ALL {
        assert_eq!(packer.pack(codec, &noise), None);
        let packed = packer.pack(codec, &content).unwrap();
        assert!(packed.len() < content.len() / 50, "{codec}: {}", packed.len());
        let mut wire = Vec::new();
        write_packed(&mut wire, AddressSpaceId(12), (0x7000_0000, 256), codec, packed).unwrap();

        let mut r = Cursor::new(wire);
        let FrameHeader::Packed { range, codec: told, length, .. } = read_header(&mut r).unwrap() else { panic!() };
        assert_eq!((range.len(), told), (content.len() as u64, codec));
        let mut got = vec![0; content.len()];
        unpacker.read(&mut r, codec, length, &mut got).unwrap();
        assert_eq!(got, content);
    }
}

#[test]
fn compressed_pages_that_come_out_longer_or_shorter_than_announced_are_refused() {
    let mut packer = packed::Packer::new().unwrap();
    let mut unpacker = packed::Unpacker::default();
    for codec in Codec::ALL {
        let packed = packer.pack(codec, &[7; 2 * 4096]).unwrap().to_vec();
        for announced in [4096, 3 * 4096] {
            let mut r = packed.as_slice();
            let error = unpacker.read(&mut r, codec, packed.len() as u32, &mut vec![0; announced]).unwrap_err();
            assert!(matches!(error, ReadError::Wire(WireError::Packed { .. })), "{codec}: {error}");
        }
    }
}

#[test]
fn another_frame_than_a_message_is_an_error() {
    let mut wire = Vec::new();
    write_ping(&mut wire, 1).unwrap();
    let error = read_message::<_, String>(&mut Cursor::new(&wire)).unwrap_err();
    assert!(matches!(error, ReadError::Unexpected { expected: Kind::Message, found: Kind::Ping }), "{error}");
}

#[test]
fn a_message_over_the_limit_is_not_sent_at_all() {
    let mut wire = Vec::new();
    let error = write_message(&mut wire, &"x".repeat(1 << 20)).unwrap_err();
    assert!(matches!(error, WriteError::Wire(WireError::TooLong { .. })), "{error}");
    assert!(wire.is_empty());
    write_message(&mut wire, &"x".repeat((1 << 20) - 2)).unwrap();
}

#[test]
fn a_message_that_breaks_off_is_an_error_of_the_stream() {
    let mut wire = Vec::new();
    write_message(&mut wire, "some text").unwrap();
    for cut in 1..wire.len() {
        let error = read_message::<_, String>(&mut Cursor::new(&wire[..cut])).unwrap_err();
        assert!(matches!(&error, ReadError::Io(e) if e.kind() == ErrorKind::UnexpectedEof), "{cut}: {error}");
    }
}

#[test]
fn a_greeting_over_the_limit_is_refused_before_it_is_read() {
    let mut bytes = MAGIC.to_vec();
    bytes.extend(1025u16.to_le_bytes());
    let error = read_hello(&mut Cursor::new(bytes)).unwrap_err();
    assert!(matches!(error, ReadError::Wire(WireError::TooLong { length: 1025, .. })), "{error}");
    let error = read_hello(&mut Cursor::new(b"GET / HTTP/1.1\r\n")).unwrap_err();
    assert!(matches!(error, ReadError::Wire(WireError::Magic)), "{error}");
}

#[test]
fn a_refusals_reason_is_cut_and_cannot_steer_a_terminal() {
    let reason = format!("\u{1b}[2Jno{}", "ä".repeat(600));
    let bytes = Welcome::Refused(Refusal { kind: RefusalKind::Unwanted, reason }).encode();
    let Welcome::Refused(got) = read_welcome(&mut Cursor::new(bytes)).unwrap() else { panic!() };
    assert!(got.reason.starts_with("[2Jnoä") && got.reason.len() <= 512);
}
