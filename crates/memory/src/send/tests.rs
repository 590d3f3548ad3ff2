use std::sync::Mutex;

use super::*;

#[derive(Default)]
struct Seen {
    read: Mutex<Vec<(u64, Vec<u8>)>>,
    missed: Mutex<Vec<(u32, u64)>>,
}

impl Witness for Seen {
    fn due(&self, chunk: &Chunk) -> Vec<PageRange> {
        vec![chunk.range]
    }

    fn read(&self, _: AddressSpaceId, address: u64, pages: &[u8]) {
        self.read.lock().unwrap().push((address, pages.to_vec()));
    }

    fn missed(&self, chunk: &Chunk) {
        self.missed.lock().unwrap().push((chunk.pid, chunk.range.pages()));
    }
}

#[test]
fn what_cannot_be_read_while_the_tasks_run_is_left_out_and_returned() {
    let size = PAGE_SIZE as usize;
    let memory = vec![7u8; 6 * size];
    let there = (memory.as_ptr() as u64).next_multiple_of(PAGE_SIZE);
    let chunk = |pid, start, end| Chunk { space: AddressSpaceId(1), pid, range: PageRange { start, end } };
    // Nothing is ever mapped at the second page of an address space, and no process has the second number.
    let own = std::process::id();
    let chunks = [
        chunk(own, PAGE_SIZE, 3 * PAGE_SIZE),
        chunk(4_000_000, there, there + PAGE_SIZE),
        chunk(own, there, there + 2 * PAGE_SIZE),
    ];
    let mut streams = [Stream::new(Vec::new(), None)];
    let counters = Counters::default();
    let seen = Seen::default();
    send_running(&chunks, Version::First, &mut streams, &counters, &seen).unwrap();
    assert_eq!(seen.missed.into_inner().unwrap(), [(own, 1), (own, 1), (4_000_000, 1)]);
    assert_eq!(seen.read.into_inner().unwrap(), [(there, vec![7; 2 * size])]);
    assert_eq!(counters.sent.into_inner(), 2 * PAGE_SIZE);
    let error = send(&chunks, Version::First, &mut streams, &Counters::default()).unwrap_err();
    assert!(matches!(error, SendError::Read { .. }), "{error}");
}

#[test]
fn zero_pages_are_left_out_and_runs_kept_whole() {
    let size = PAGE_SIZE as usize;
    let mut pages = vec![0u8; 6 * size];
    pages[size] = 1;
    pages[3 * size - 1] = 1;
    pages[5 * size + 7] = 1;
    let runs: Vec<(u64, usize)> = runs_with_data(&pages).map(|(at, run)| (at / PAGE_SIZE, run.len() / size)).collect();
    assert_eq!(runs, [(1, 2), (5, 1)]);
    assert_eq!(runs_with_data(&pages[..size]).count(), 0);
}

#[test]
fn a_page_that_is_waited_for_while_it_is_on_its_way_is_sent_once_more() {
    let size = PAGE_SIZE as usize;
    let memory = vec![7u8; 9 * size];
    let start = (memory.as_ptr() as u64).next_multiple_of(PAGE_SIZE);
    let (space, pages) = (AddressSpaceId(1), |first: u64, count: u64| PageRange {
        start: start + first * PAGE_SIZE,
        end: start + (first + count) * PAGE_SIZE,
    });
    let outbox = Outbox::default();
    outbox.add(&[Chunk { space, pid: std::process::id(), range: pages(0, 8) }]);
    let ask = |range: PageRange| {
        let (mut stream, counters) = (Stream::new(Vec::new(), None), Counters::default());
        outbox.send_wanted(space, &[range], &mut stream, &counters).unwrap();
        counters.sent.into_inner() / PAGE_SIZE
    };
    assert_eq!(ask(pages(6, 2)), 2, "asked for before it was taken");
    assert_eq!(ask(pages(6, 2)), 0, "it is on the fastest way there is");
    let (mut stream, counters) = (Stream::new(Vec::new(), None), Counters::default());
    outbox.send((0, 1), &mut stream, &counters, |_| false).unwrap();
    assert_eq!(counters.sent.into_inner(), 6 * PAGE_SIZE);
    assert_eq!((ask(pages(4, 4)), ask(pages(4, 4))), (2, 0));
    assert_eq!(outbox.bytes(), 0);
}

/// What was written, cut where it was flushed.
#[derive(Default)]
struct Flushed {
    written: Vec<u8>,
    flushed: Vec<Vec<u8>>,
}

impl Write for Flushed {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.written.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.flushed.push(std::mem::take(&mut self.written));
        Ok(())
    }
}

#[test]
fn the_page_that_is_waited_for_leaves_before_those_around_it() {
    let memory = vec![7u8; 9 * PAGE_SIZE as usize];
    let start = (memory.as_ptr() as u64).next_multiple_of(PAGE_SIZE);
    let (space, range) = (AddressSpaceId(1), PageRange { start, end: start + 8 * PAGE_SIZE });
    let outbox = Outbox::default();
    outbox.add(&[Chunk { space, pid: std::process::id(), range }]);
    let mut stream = Stream::new(Flushed::default(), None);
    outbox.send_wanted(space, &[range], &mut stream, &Counters::default()).unwrap();
    let frames = stream.link().flushed.iter().map(|bytes| tranship_wire::read_header(&mut bytes.as_slice()).unwrap());
    let second = start + PAGE_SIZE;
    let parts = [PageRange { start, end: second }, PageRange { start: second, end: range.end }];
    assert!(frames.eq(parts.map(|range| FrameHeader::Pages { space, range })));
    assert_eq!(outbox.bytes(), 0);
}

/// Memory of three chunks' places, of which the second one is the second stream's if there are two, and what is to be sent of it: all.
fn three_chunks() -> (Vec<u8>, Outbox) {
    let memory = vec![7u8; 5 * CHUNK as usize];
    let start = (memory.as_ptr() as u64).next_multiple_of(2 * CHUNK);
    let outbox = Outbox::default();
    let chunk = |range| Chunk { space: AddressSpaceId(1), pid: std::process::id(), range };
    let all = PageRange { start, end: start + 3 * CHUNK };
    outbox.add(&all.cut(CHUNK).map(chunk).collect::<Vec<_>>());
    (memory, outbox)
}

#[test]
fn on_a_narrow_link_the_first_stream_sends_alone_while_the_others_rest() {
    let (_memory, outbox) = three_chunks();
    let (mut first, counters) = (Stream::new(Vec::new(), None), [Counters::default(), Counters::default()]);
    let sent = |number: usize| counters[number].sent.load(Ordering::Relaxed);
    let looks = AtomicU64::new(0);
    std::thread::scope(|scope| {
        let second = Mutex::new(None);
        let narrow = |_: &Vec<u8>| match looks.fetch_add(1, Ordering::Relaxed) {
            0 => true,
            1 => {
                let other = scope.spawn(|| {
                    let mut second = Stream::new(Vec::new(), None);
                    outbox.send((1, 2), &mut second, &counters[1], |_| true).unwrap();
                });
                *second.lock().unwrap() = Some(other);
                std::thread::sleep(std::time::Duration::from_millis(50));
                assert_eq!(sent(1), 0, "it rests");
                false
            }
            2 => {
                second.lock().unwrap().take().unwrap().join().unwrap();
                assert_eq!(sent(1), CHUNK, "it goes on");
                false
            }
            _ => false,
        };
        outbox.send((0, 2), &mut first, &counters[0], narrow).unwrap();
    });
    assert_eq!((sent(0), outbox.bytes()), (2 * CHUNK, 0));

    let (_memory, outbox) = three_chunks();
    let counters = [Counters::default(), Counters::default()];
    for (number, counters) in counters.iter().enumerate() {
        outbox.send((number, 2), &mut Stream::new(Vec::new(), None), counters, |_| true).unwrap();
    }
    assert_eq!(counters.map(|counters| counters.sent.into_inner()), [3 * CHUNK, 0]);
}

#[test]
fn the_others_do_not_rest_any_more_when_the_first_stream_is_broken() {
    struct Broken;
    impl Write for Broken {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::ErrorKind::BrokenPipe.into())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let (_memory, outbox) = three_chunks();
    let counters = Counters::default();
    outbox.send((0, 2), &mut Stream::new(Broken, None), &counters, |_| true).unwrap_err();
    outbox.send((1, 2), &mut Stream::new(Vec::new(), None), &counters, |_| true).unwrap();
    assert_eq!(counters.sent.into_inner(), CHUNK);
}
