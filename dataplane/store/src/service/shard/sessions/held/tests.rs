//! Tests of the lists against plain vectors.

use proptest::prelude::*;

use super::{Deadlines, Handles, List};

proptest! {
    #[test]
    fn handles_belong_to_their_holders(
        ops in prop::collection::vec((0..4u8, 0..3u32, 0..8u32, 0..3u32), 0..120),
    ) {
        let mut handles = Handles::new(0);
        let mut lists = [List::new(); 3];
        let mut model: Vec<(u32, u32, u32)> = Vec::new();
        for (op, session, index, generation) in ops {
            let list = &mut lists[session as usize];
            let held = model.iter().position(|&(_, held, _)| held == index);
            match op {
                0 | 1 if held.is_none() => {
                    handles.lend(list, session, index, generation);
                    model.push((session, index, generation));
                }
                2 => {
                    let first = model.iter().position(|&(holder, ..)| holder == session);
                    let expected = first.map(|at| model.remove(at)).map(|(_, index, generation)| (index, generation));
                    prop_assert_eq!(handles.take_first(list), expected);
                }
                _ => {
                    let mine = model.iter().position(|&entry| entry == (session, index, generation));
                    prop_assert_eq!(handles.take(list, session, index, generation), mine.is_some());
                    mine.map(|at| model.remove(at));
                }
            }
            for index in 0..9 {
                let expected = model.iter().find(|entry| entry.1 == index).map(|entry| (entry.0, entry.2));
                prop_assert_eq!(handles.holder(index), expected);
            }
        }
    }

    #[test]
    fn deadlines_expire_in_order(ops in prop::collection::vec((0..3u8, 0..8u32, 1..5u64), 0..120)) {
        let mut deadlines = Deadlines::new(2);
        let mut model: Vec<(u64, u32)> = Vec::new();
        let mut now_ns = 0;
        for (op, index, step_ns) in ops {
            match op {
                0 if model.iter().all(|entry| entry.1 != index) => {
                    deadlines.set(index, now_ns + 10);
                    model.push((now_ns + 10, index));
                }
                0 | 1 => {
                    deadlines.cancel(index);
                    model.retain(|entry| entry.1 != index);
                }
                _ => {
                    now_ns += step_ns;
                    while let Some(index) = deadlines.take_due(now_ns) {
                        prop_assert_eq!(model.remove(0).1, index);
                    }
                }
            }
            prop_assert_eq!(deadlines.next_ns(), model.first().map(|entry| entry.0));
            prop_assert!(op < 2 || deadlines.next_ns().is_none_or(|at_ns| at_ns > now_ns));
        }
    }
}

#[test]
#[should_panic(expected = "is on a list already")]
fn a_handle_has_one_holder() {
    let mut handles = Handles::new(1);
    let (mut one, mut two) = (List::new(), List::new());
    handles.lend(&mut one, 0, 0, 1);
    handles.lend(&mut two, 1, 0, 1);
}
