//! Copies of objects that are there already: made by tasks of the control plane, and given up.

use kvplane_client::Request;
use kvplane_proto::{Digest, Status};
use kvplane_rpc::message::{CancelTask, CreateTask, ListTasks, TASK_NAME_BYTES, TaskStatus};

use super::Client;
use crate::error::Error;

impl Client {
    /// Has the objects under these keys copied to the second owners of their slots, as if they had been put with two
    /// replicas; the number of the task that sees to it. Where copies go follows from the keys: `targets`, names of
    /// segments, only have to be there. Objects in stripes count as many; at most 512 go in one task.
    ///
    /// # Errors
    /// When one of the objects is not there ([`Status::NotFound`]), or the control plane makes no task.
    pub fn create_copy_task(&mut self, keys: &[impl AsRef<[u8]>], targets: &[String]) -> Result<u64, Error> {
        let digests: Result<Vec<Digest>, Error> = keys.iter().map(|key| self.digest(key.as_ref())).collect();
        let digests = self.parts_of(keys, &digests?)?;
        let digests = digests.into_iter().map(|digest| digest.0).collect();
        let mut name = match keys {
            [key] => String::from_utf8_lossy(key.as_ref()).into_owned(),
            keys => format!("{} keys", keys.len()),
        };
        name.truncate(name.floor_char_boundary(TASK_NAME_BYTES));
        let call = CreateTask { tenant: self.tenant_name(), name, digests, targets: targets.to_vec() };
        Ok(self.link.call(call)?.id)
    }

    /// How a task of this client's tenant is; nothing where there is none of this number, or none any more.
    ///
    /// # Errors
    /// When the control plane does not answer.
    pub fn task(&self, id: u64) -> Result<Option<TaskStatus>, Error> {
        let call = ListTasks { tenant: Some(self.tenant_name()), id: Some(id), after: 0 };
        Ok(self.link.call(call)?.tasks.pop())
    }

    /// Ends a task of this client's tenant. What was copied stays copied.
    ///
    /// # Errors
    /// When there is none of this number that is not over.
    pub fn cancel_task(&self, id: u64) -> Result<(), Error> {
        self.link.call(CancelTask { tenant: Some(self.tenant_name()), id }).map(|_| ())
    }

    /// Has the second owners of the objects under these keys give their copies up; for each whether there was one, as
    /// far as is known, and it is gone. The object stays with its first owner, and gets no copy by itself: until it is
    /// put with two replicas or a task copies it, it is asked for so much that its shard wants one, or its slot has
    /// another first owner. Objects in stripes count as a whole.
    ///
    /// # Errors
    /// When a key is empty or too long, or the owners cannot be asked; for one object when its owner refuses
    /// ([`Status::Busy`] where the second owner does not answer), or a stripe of it is missing.
    pub fn remove_copies(&mut self, keys: &[impl AsRef<[u8]>]) -> Result<Vec<Result<bool, Error>>, Error> {
        let (mut parts, mut whole) = (Vec::new(), Vec::with_capacity(keys.len()));
        for key in keys {
            let digest = self.digest(key.as_ref())?;
            whole.push(match self.parts_of(&[key], &[digest]) {
                Ok(digests) => {
                    parts.extend(digests.iter().map(|digest| Request::RemoveCopy(*digest)));
                    Ok(digests.len())
                }
                Err(Error::Status { status: Status::NotFound, .. }) => Ok(0),
                Err(why) => Err(why),
            });
        }
        let mut results = if parts.is_empty() { Vec::new() } else { self.run(&parts)? }.into_iter();
        let mut of_one = |count: usize| {
            let statuses: Vec<Status> = results.by_ref().take(count).map(|result| result.status).collect();
            let refused = statuses.iter().find(|status| !matches!(status, Status::Ok | Status::NotFound));
            refused.map_or(Ok(statuses.contains(&Status::Ok)), |status| Err(*status))
        };
        let gone: Vec<Result<Result<bool, Status>, Error>> =
            whole.into_iter().map(|count| count.map(&mut of_one)).collect();
        let problem = |status| self.problem("removal of a copy".to_owned(), status);
        Ok(gone.into_iter().map(|one| one.and_then(|gone| gone.map_err(problem))).collect())
    }

    /// The tenant whose objects the client uses: as it was configured, or as its certificate says.
    #[must_use]
    pub fn tenant_name(&self) -> String {
        String::from_utf8_lossy(&self.tenant).into_owned()
    }

    fn no_copy(&self, key: &[u8], status: Status) -> Error {
        self.problem(format!("copy of the object under \"{}\"", key.escape_ascii()), status)
    }

    /// All that there is of these objects: those in stripes are their heads and their stripes.
    fn parts_of(&mut self, keys: &[impl AsRef<[u8]>], digests: &[Digest]) -> Result<Vec<Digest>, Error> {
        if digests.is_empty() {
            return Ok(Vec::new());
        }
        let sizes: Vec<Request> = digests.iter().map(|digest| Request::Size(*digest)).collect();
        let results = self.run(&sizes)?;
        let mut parts = Vec::with_capacity(digests.len());
        for ((key, digest), result) in keys.iter().zip(digests).zip(results) {
            let striped = match result.status {
                Status::Ok => {
                    parts.push(*digest);
                    continue;
                }
                Status::Striped => self.parts_of_striped(*digest)?,
                status => return Err(self.no_copy(key.as_ref(), status)),
            };
            parts.extend(striped.ok_or_else(|| self.no_copy(key.as_ref(), Status::NotFound))?);
        }
        Ok(parts)
    }
}
