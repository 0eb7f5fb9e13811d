//! Replication tasks: existing objects are replicated by tasks of the control plane, and replicas removed.

use kvplane_client::Request;
use kvplane_proto::{Digest, Status};
use kvplane_rpc::message::{CancelTask, CreateTask, ListTasks, TASK_NAME_BYTES, TaskStatus};

use super::Client;
use crate::error::Error;

impl Client {
    /// Replicates the objects under these keys to the replica owners of their slots, as if they had been put with two
    /// replicas. Returns the number of the task. The destination follows from the key: `targets`, names of segments,
    /// only have to exist. A striped object counts as its stripe head and stripes; at most 512 objects go in one task.
    ///
    /// # Errors
    /// When one of the objects does not exist ([`Status::NotFound`]), or the control plane refuses the task.
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

    /// Returns the state of a task of this client's tenant; `None` if there is no task of this number, or it was
    /// forgotten.
    ///
    /// # Errors
    /// When the control plane does not answer.
    pub fn task(&self, id: u64) -> Result<Option<TaskStatus>, Error> {
        let call = ListTasks { tenant: Some(self.tenant_name()), id: Some(id), after: 0 };
        Ok(self.link.call(call)?.tasks.pop())
    }

    /// Cancels a task of this client's tenant. Objects that were replicated stay replicated.
    ///
    /// # Errors
    /// When there is no unfinished task of this number.
    pub fn cancel_task(&self, id: u64) -> Result<(), Error> {
        self.link.call(CancelTask { tenant: Some(self.tenant_name()), id }).map(|_| ())
    }

    /// Removes the replicas of the objects under these keys from their replica owners. Returns for each whether there
    /// was a replica, as far as is known, and it is gone. The object stays with its owner and is not replicated again
    /// until it is put with two replicas, a task replicates it, it becomes hot enough that its shard replicates it, or
    /// its slot has another owner. A striped object counts as a whole.
    ///
    /// # Errors
    /// When a key is empty or too long, or the owners do not answer; for a single object when its owner refuses
    /// ([`Status::Busy`] where the replica owner does not answer), or a stripe of it is missing.
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
        let problem = |status| self.problem("removal of a replica".to_owned(), status);
        Ok(gone.into_iter().map(|one| one.and_then(|gone| gone.map_err(problem))).collect())
    }

    /// Returns the tenant whose objects the client uses: as configured, or as bound by its certificate.
    #[must_use]
    pub fn tenant_name(&self) -> String {
        String::from_utf8_lossy(&self.tenant).into_owned()
    }

    fn no_copy(&self, key: &[u8], status: Status) -> Error {
        self.problem(format!("replication of the object under \"{}\"", key.escape_ascii()), status)
    }

    /// Returns the digests of everything that these objects consist of: for striped ones, stripe head and stripes.
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
