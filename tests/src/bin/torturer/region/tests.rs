use super::*;
use std::sync::atomic::Ordering;

fn region(kind: Kind) -> Region {
    Region::new(kind, 7, 16, &std::env::temp_dir()).unwrap()
}

#[test]
fn every_kind_is_right_after_all_that_can_be_done_to_it() {
    for kind in Kind::ALL {
        let mut region = region(kind);
        let pages = region.pages();
        region.write(0, 8);
        region.poke(3);
        region.forget(2, 3).unwrap();
        region.check(0, pages).unwrap();
        region.write(4, 2);
        region.move_away().unwrap();
        region.check(0, pages).unwrap();
        region.resize(pages + 2).unwrap();
        region.resize(9).unwrap();
        region.resize(12).unwrap();
        region.protect(1, 2, true).unwrap();
        assert!(region.in_the_way(2, 4, true) && !region.in_the_way(2, 4, false));
        region.open().unwrap();
        let pages = region.pages();
        region.check(0, pages).unwrap();
        region.check_books().unwrap();
        region.discard().unwrap();
    }
}

#[test]
fn a_page_that_is_older_elsewhere_or_gone_is_noticed_and_named() {
    let mut region = region(Kind::Anonymous);
    region.write(0, 16);
    let old: Vec<u64> = region.area.words(5).iter().map(|w| w.load(Ordering::Relaxed)).collect();
    region.write(5, 1);
    let put = |region: &Region, page: usize, words: &[u64]| {
        region.area.words(page).iter().zip(words).for_each(|(word, old)| word.store(*old, Ordering::Relaxed));
    };
    let complaint = |region: &mut Region| region.check(0, 16).unwrap_err().to_string();
    put(&region, 5, &old);
    let text = complaint(&mut region);
    assert!(text.contains("must be region 7 page 5 version 2 with 0 pokes and is region 7 page 5 version 1"), "{text}");
    region.write(5, 1);
    put(&region, 9, &old);
    let text = complaint(&mut region);
    assert!(text.contains("page 9") && text.contains("and is region 7 page 5 version 1"), "{text}");
    put(&region, 9, &[0; 512]);
    assert!(complaint(&mut region).contains("and is zeros"));
    region.write(0, 16);
    region.check(0, 16).unwrap();
    region.cells[3].pokes += 1;
    assert!(region.check_books().is_err());
    region.cells[3].pokes -= 1;
    region.discard().unwrap();
}

#[test]
fn what_lies_behind_a_cut_is_as_it_was() {
    let mut front = region(Kind::Huge);
    let pages = front.pages();
    front.write(0, pages);
    let mut back = front.cut(100, 50).unwrap();
    assert_eq!((front.pages(), back.pages()), (100, pages - 150));
    front.check(0, 100).unwrap();
    let pages = back.pages();
    back.check(0, pages).unwrap();
    back.check_books().unwrap();
    front.discard().unwrap();
    back.discard().unwrap();
}

#[test]
fn what_another_process_scribbles_can_be_repeated_in_the_books() {
    let mut region = region(Kind::Memfd);
    let (mut there, mut here) = (Chance::new(5), Chance::new(5));
    let before = region.cells.clone();
    (0..50).for_each(|_| region.scribble(&mut there, true));
    let after = std::mem::replace(&mut region.cells, before);
    (region.sum, region.versions) = (region.summed(), 0);
    (0..50).for_each(|_| region.scribble(&mut here, false));
    assert_eq!(region.cells, after);
    region.check(0, 16).unwrap();
    region.discard().unwrap();
}
