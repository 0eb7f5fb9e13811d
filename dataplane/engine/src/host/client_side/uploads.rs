//! Uploads: requests whose payloads are still being sent.

use kvplane_proto::RequestId;

/// Requests whose payloads have not left yet, by the indexes of their ids; as long as the client's own table of
/// requests.
///
/// An id is not reused before its payload has left: it is freed by its answer, which is not accepted before, or by the
/// end of its connection, which is reported after.
#[derive(Default)]
pub(crate) struct Uploads {
    generations: Vec<Option<u32>>,
}

impl Uploads {
    /// Begins the upload of a request's payload.
    pub(crate) fn start(&mut self, request: RequestId) {
        let index = request.index as usize;
        if self.generations.len() <= index {
            self.generations.resize(index + 1, None);
        }
        self.generations[index] = Some(request.generation);
    }

    /// Ends the upload: the payload has left, or never will.
    pub(crate) fn finish(&mut self, request: RequestId) {
        assert!(self.is_unfinished(request), "the payload of {request:?} left twice");
        self.generations[request.index as usize] = None;
    }

    /// Returns true if a request's payload has not left yet.
    pub(crate) fn is_unfinished(&self, request: RequestId) -> bool {
        self.generations.get(request.index as usize) == Some(&Some(request.generation))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_upload_is_of_one_generation_of_its_request() {
        let mut uploads = Uploads::default();
        let [old, new] = [1, 2].map(|generation| RequestId { index: 5, generation });
        uploads.start(old);
        assert!(uploads.is_unfinished(old) && !uploads.is_unfinished(new));
        uploads.finish(old);
        uploads.start(new);
        assert!(!uploads.is_unfinished(old) && uploads.is_unfinished(new));
    }
}
