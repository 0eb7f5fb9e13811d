//! Tests of holding an object: one of several concurrent threads succeeds, and unknown versions are refused.

use kvplane::PublishOptions;

use super::{Bed, filled, get, publish, regions, store};

#[test]
fn one_of_several_threads_holds_an_object() {
    let bed = Bed::start(0, 0);
    let [origin, other] = ["a", "b"].map(|host| store(&bed, host));
    for round in 0..5 {
        let name = format!("o{round}");
        let all: Vec<_> = (0..6).map(|_| filled(7)).collect();
        let took = std::thread::scope(|scope| {
            let register = |memory| origin.register(&name, memory, &PublishOptions { version: Some(1), ..publish() });
            let all: Vec<_> = all.iter().map(|memory| scope.spawn(move || register(memory).is_ok())).collect();
            all.into_iter().map(|one| one.join().unwrap()).filter(|took| *took).count()
        });
        let members = || origin.describe(&name, Some(1)).map_or(0, |found| found.members.len());
        assert_eq!((took, members()), (1, 1));
        let object = other.find(&name, None).expect("there");
        let got = std::thread::scope(|scope| {
            let fetch = || get(&other, &object, &regions()).is_ok();
            let all: Vec<_> = (0..4).map(|_| scope.spawn(fetch)).collect();
            all.into_iter().map(|one| one.join().unwrap()).filter(|got| *got).count()
        });
        assert_eq!((got, members()), (1, 2));
        other.delete_replica(&name, None).expect("nobody reads");
        origin.unregister(&name, None).expect("nobody reads");
        assert_eq!(members(), 0);
    }
}

#[test]
fn a_version_without_members_hides_no_other() {
    let bed = Bed::start(0, 0);
    let [origin, other] = ["a", "b"].map(|host| store(&bed, host));
    let first = filled(1);
    origin.register("o", &first, &publish()).expect("published");
    assert_eq!(origin.register("o", &filled(2), &publish()).expect("another version"), 2);
    assert_eq!(other.find("o", None).expect("there").version, 2);
    origin.unregister("o", Some(2)).expect("nobody reads");
    assert_eq!(other.find("o", None).expect("the one that is held").version, 1);
    origin.unregister("o", Some(1)).expect("nobody reads");
    assert!(other.find("o", None).is_err(), "nobody has any");
    assert_eq!(origin.register("o", &filled(3), &publish()).expect("numbers go on"), 3);
}
