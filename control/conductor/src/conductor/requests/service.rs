//! Service levels: the terms of requests, and the classes and weights of flows that operators set.

use std::collections::BTreeMap;
use std::sync::Arc;

use bincode::{Decode, Encode};

use crate::conductor::durable::Durable;
use crate::conductor::error::{ConductorError, bad};
use crate::index::MAX_NAME_BYTES;
use crate::scheduler::{DEFAULT_FLOW_WEIGHT, MAX_FLOW_WEIGHT, ServiceTerms};

/// Maximum length of the name of a flow and of a class, in bytes.
pub const MAX_SERVICE_NAME_BYTES: usize = 128;
/// Highest priority of a request; the lowest one is its negative, and 0 is that of a request without one.
pub const MAX_PRIORITY: i8 = 4;
/// Maximum number of classes.
const MOST_CLASSES: usize = 256;
/// Maximum number of flows with a weight of their own, over all tenants.
const MOST_WEIGHTS: usize = 4_096;

/// Service that a scheduler requests for a request. The default is that of a request without any terms.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
pub struct RequestTerms {
    /// Class of the request, whose terms apply where the request has none of its own; empty for none.
    pub class: String,
    /// Flow whose share of the prefill time the request uses; empty for the default flow.
    pub flow: String,
    /// Priority among the requests of the flows whose turn it is, from -[`MAX_PRIORITY`] to [`MAX_PRIORITY`]; higher
    /// ones go first.
    pub priority: Option<i8>,
    /// Objective for the first token, in nanoseconds after the arrival: instead of the class's and the model's.
    pub ttft_ns: Option<u64>,
    /// Expected number of tokens that the request decodes; 0 if unknown.
    pub output_tokens: u32,
    /// Session, such as a conversation, whose next turn the request is, at most [`MAX_NAME_BYTES`] long; empty for
    /// none.
    pub session: String,
}

/// Terms of a class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, Decode)]
pub struct ClassTerms {
    /// Priority of its requests.
    pub priority: i8,
    /// Objective for their first token, in nanoseconds after the arrival; none for that of their model.
    pub ttft_ns: Option<u64>,
}

impl ClassTerms {
    fn check(&self, class: &str) -> Result<(), ConductorError> {
        check_priority(self.priority)?;
        if self.ttft_ns == Some(0) {
            return Err(bad(format!("class {class:?}: an objective of 0 ns for the first token; give at least 1")));
        }
        Ok(())
    }
}

/// Classes and weights, with the changes that are not durable yet.
#[derive(Default)]
pub struct ServiceLevels {
    classes: BTreeMap<String, ClassTerms>,
    /// Weights of flows, by tenant.
    weights: BTreeMap<String, BTreeMap<String, u32>>,
    changes: Vec<Durable>,
}

impl ServiceLevels {
    /// Returns the service that a request of a tenant gets.
    pub(in crate::conductor) fn resolve(
        &self,
        tenant: &str,
        terms: &RequestTerms,
    ) -> Result<ServiceTerms, ConductorError> {
        check_name("flow", &terms.flow)?;
        if terms.session.len() > MAX_NAME_BYTES {
            return Err(bad(format!("a session of {} bytes; at most {MAX_NAME_BYTES}", terms.session.len())));
        }
        let class = match terms.class.as_str() {
            "" => ClassTerms::default(),
            name => *self.classes.get(name).ok_or_else(|| ConductorError::UnknownClass { name: name.to_owned() })?,
        };
        let priority = terms.priority.unwrap_or(class.priority);
        check_priority(priority)?;
        let weight = self.weights.get(tenant).and_then(|flows| flows.get(&terms.flow));
        let ttft_ns = terms.ttft_ns.or(class.ttft_ns);
        let weight = weight.copied().unwrap_or(DEFAULT_FLOW_WEIGHT);
        // Most requests have neither; the default is not allocated.
        let [flow, class] =
            [&terms.flow, &terms.class].map(|name| if name.is_empty() { Arc::default() } else { name.as_str().into() });
        let session = (!terms.session.is_empty()).then(|| Arc::from(terms.session.as_str()));
        let (output_tokens, groups) = (terms.output_tokens, false);
        Ok(ServiceTerms { flow, weight, priority, ttft_ns, class, output_tokens, session, groups })
    }

    /// Sets the terms of a class of requests, or removes it. Requests that are queued or booked keep theirs.
    ///
    /// # Errors
    /// When a value is out of range, there are too many classes, or there is none to remove.
    pub fn set_class(&mut self, name: &str, terms: Option<ClassTerms>) -> Result<(), ConductorError> {
        check_named("class", name)?;
        match terms {
            Some(terms) => {
                terms.check(name)?;
                if self.classes.len() >= MOST_CLASSES && !self.classes.contains_key(name) {
                    return Err(ConductorError::ServiceLimit { what: "classes", most: MOST_CLASSES });
                }
                self.classes.insert(name.to_owned(), terms);
            }
            None if self.classes.remove(name).is_none() => {
                return Err(ConductorError::UnknownClass { name: name.to_owned() });
            }
            None => {}
        }
        self.changes.push(Durable::Class(name.to_owned(), terms));
        Ok(())
    }

    /// Sets the weight of a tenant's flow, or resets it to [`DEFAULT_FLOW_WEIGHT`]: from its next request on.
    ///
    /// # Errors
    /// When the weight is out of range, or too many flows have one.
    pub fn set_weight(&mut self, tenant: &str, flow: &str, weight: Option<u32>) -> Result<(), ConductorError> {
        check_name("flow", flow)?;
        if let Some(weight) = weight
            && !(1..=MAX_FLOW_WEIGHT).contains(&weight)
        {
            let range = format!("from 1 to {MAX_FLOW_WEIGHT}, and {DEFAULT_FLOW_WEIGHT} by default");
            return Err(bad(format!("flow {flow:?}: a weight of {weight}; weights are {range}")));
        }
        let count: usize = self.weights.values().map(BTreeMap::len).sum();
        let is_new = self.weights.get(tenant).is_none_or(|flows| !flows.contains_key(flow));
        match weight {
            Some(_) if is_new && count >= MOST_WEIGHTS => {
                return Err(ConductorError::ServiceLimit { what: "weights of flows", most: MOST_WEIGHTS });
            }
            Some(weight) => {
                self.weights.entry(tenant.to_owned()).or_default().insert(flow.to_owned(), weight);
            }
            None => {
                if let Some(flows) = self.weights.get_mut(tenant) {
                    flows.remove(flow);
                }
                self.weights.retain(|_, flows| !flows.is_empty());
            }
        }
        self.changes.push(Durable::Weight { tenant: tenant.to_owned(), flow: flow.to_owned(), weight });
        Ok(())
    }

    /// Restores a class that an operator had set; it is durable already.
    ///
    /// # Errors
    /// When a limit no longer allows it.
    pub fn restore_class(&mut self, name: &str, terms: ClassTerms) -> Result<(), ConductorError> {
        self.set_class(name, Some(terms))?;
        self.changes.pop();
        Ok(())
    }

    /// Restores the weight of a flow that an operator had set; it is durable already.
    ///
    /// # Errors
    /// When a limit no longer allows it.
    pub fn restore_weight(&mut self, tenant: &str, flow: &str, weight: u32) -> Result<(), ConductorError> {
        self.set_weight(tenant, flow, Some(weight))?;
        self.changes.pop();
        Ok(())
    }

    /// Returns the classes by name.
    #[must_use]
    pub const fn classes(&self) -> &BTreeMap<String, ClassTerms> {
        &self.classes
    }

    /// Returns the flows with a weight of their own: tenant, name, weight.
    pub fn weights(&self) -> impl Iterator<Item = (&str, &str, u32)> {
        let tenants = self.weights.iter();
        tenants.flat_map(|(tenant, flows)| {
            flows.iter().map(move |(flow, weight)| (tenant.as_str(), flow.as_str(), *weight))
        })
    }

    /// Returns true while [`Self::take_changes`] has changes to return.
    pub(in crate::conductor) const fn has_changes(&self) -> bool {
        !self.changes.is_empty()
    }

    /// Takes the changes since the last call.
    pub(in crate::conductor) fn take_changes(&mut self) -> Vec<Durable> {
        std::mem::take(&mut self.changes)
    }
}

fn check_priority(priority: i8) -> Result<(), ConductorError> {
    if (-MAX_PRIORITY..=MAX_PRIORITY).contains(&priority) {
        return Ok(());
    }
    Err(bad(format!("a priority of {priority}; priorities are from -{MAX_PRIORITY} to {MAX_PRIORITY}")))
}

fn check_name(what: &str, name: &str) -> Result<(), ConductorError> {
    match name.len() {
        0..=MAX_SERVICE_NAME_BYTES => Ok(()),
        bytes => Err(bad(format!("the name of a {what} has {bytes} bytes; at most {MAX_SERVICE_NAME_BYTES}"))),
    }
}

fn check_named(what: &str, name: &str) -> Result<(), ConductorError> {
    if name.is_empty() {
        return Err(bad(format!("the name of a {what} is empty")));
    }
    check_name(what, name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_terms_come_before_those_of_the_class() {
        let mut levels = ServiceLevels::default();
        levels.set_class("chat", Some(ClassTerms { priority: 2, ttft_ns: Some(5) })).expect("valid");
        let chat = RequestTerms { class: "chat".to_owned(), ..RequestTerms::default() };
        let of = |terms: &RequestTerms| levels.resolve("", terms).map(|terms| (terms.priority, terms.ttft_ns));
        assert_eq!(of(&chat), Ok((2, Some(5))));
        assert_eq!(of(&RequestTerms { priority: Some(-1), ..chat.clone() }), Ok((-1, Some(5))));
        assert_eq!(of(&RequestTerms { ttft_ns: Some(9), ..chat.clone() }), Ok((2, Some(9))));
        assert_eq!(of(&RequestTerms::default()), Ok((0, None)));
        levels.set_class("chat", None).expect("it was set");
        assert_eq!(levels.resolve("", &chat), Err(ConductorError::UnknownClass { name: "chat".to_owned() }));
    }

    #[test]
    fn values_out_of_range_are_refused() {
        let mut levels = ServiceLevels::default();
        let class = |priority, ttft_ns| Some(ClassTerms { priority, ttft_ns });
        for (name, terms) in
            [("a", class(5, None)), ("a", class(-5, None)), ("a", class(0, Some(0))), ("", class(0, None))]
        {
            assert!(matches!(levels.set_class(name, terms), Err(ConductorError::Bad { .. })), "{name:?} {terms:?}");
        }
        assert!(levels.set_class("none", None).is_err());
        for weight in [0, MAX_FLOW_WEIGHT + 1] {
            assert!(matches!(levels.set_weight("", "a", Some(weight)), Err(ConductorError::Bad { .. })));
        }
        let long = "x".repeat(MAX_SERVICE_NAME_BYTES + 1);
        assert!(levels.set_weight("", &long, Some(1)).is_err());
        assert!(levels.resolve("", &RequestTerms { flow: long, ..RequestTerms::default() }).is_err());
        assert!(levels.resolve("", &RequestTerms { priority: Some(i8::MIN), ..RequestTerms::default() }).is_err());
        assert!(!levels.has_changes(), "nothing of it was taken");
    }

    #[test]
    fn numbers_of_classes_and_weights_are_limited() {
        let mut levels = ServiceLevels::default();
        for at in 0..MOST_WEIGHTS {
            levels.set_weight(if at % 2 == 0 { "" } else { "t" }, &format!("{at}"), Some(1)).expect("below the limit");
        }
        assert!(matches!(levels.set_weight("", "more", Some(1)), Err(ConductorError::ServiceLimit { .. })));
        levels.set_weight("", "0", Some(2)).expect("it has one already");
        levels.set_weight("", "0", None).expect("reset");
        levels.set_weight("", "more", Some(1)).expect("there is room again");
        assert_eq!(levels.weights().count(), MOST_WEIGHTS);
        let of = |tenant: &str, flow: &str| {
            let terms = RequestTerms { flow: flow.to_owned(), ..RequestTerms::default() };
            levels.resolve(tenant, &terms).map(|terms| terms.weight)
        };
        assert_eq!((of("t", "1"), of("", "1"), of("", "0")), (Ok(1), Ok(DEFAULT_FLOW_WEIGHT), Ok(DEFAULT_FLOW_WEIGHT)));
        for at in 0..MOST_CLASSES {
            levels.set_class(&format!("{at}"), Some(ClassTerms { priority: 0, ttft_ns: None })).expect("below");
        }
        let more = levels.set_class("more", Some(ClassTerms { priority: 0, ttft_ns: None }));
        assert!(matches!(more, Err(ConductorError::ServiceLimit { .. })));
    }
}
