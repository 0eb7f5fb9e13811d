//! Replicas of objects: puts that count them, queries for the shards that hold objects, and replication tasks.

use std::net::SocketAddr;
use std::time::Duration;

use kvplane_client::{Request, TaskResult};
use kvplane_proto::message::PutOptions;
use kvplane_proto::{Digest, Status};
use kvplane_rpc::message::{CancelTask, CreateTask, ListTasks, TASK_NAME_BYTES, TaskStatus};

use super::bounce::BounceBuffer;
use super::namespace::{Namespace, check_options};
use super::objects::{HEAD_BYTES, Objects};
use super::outcome::Put;
use super::puts::WholePuts;
use crate::error::Error;

/// Longest wait for an owner whose replica owner answered in its place.
const OWNER_WAIT: Duration = Duration::from_secs(1);

/// Replicas of a client's objects: [`Client::replicas`](super::Client::replicas).
pub struct Replicas<'a> {
    pub(super) objects: &'a mut Objects,
    pub(super) namespace: &'a Namespace,
    pub(super) puts: &'a mut WholePuts,
    pub(super) bounce: &'a mut BounceBuffer,
}

impl Replicas<'_> {
    /// Stores a copy of these bytes under a key, replicated as `options` say, and waits until as many replicas as they
    /// say are written, or turn out not to be; all of them if they say nothing. Returns the number of owners that have
    /// the object by then: 0 if an object existed already.
    ///
    /// # Errors
    /// When the bytes cannot be stored, or are too long for one shard: the status says why.
    pub fn put(&mut self, key: &[u8], value: &[u8], options: &PutOptions) -> Result<(Put, u8), Error> {
        let slice = self.bounce.copy_in(value, self.objects.requester_mut())?;
        let waits = if options.wait_replicas == 0 { options.replicas } else { options.wait_replicas };
        let options = PutOptions { wait_replicas: waits, ..*options };
        check_options(&options)?;
        let book = self.puts.new_book();
        let request = self.namespace.put(book, key, slice.local(), &options)?;
        let result = self.objects.put_new(&[request], book)?[0];
        Ok((self.objects.requester().stored(result, slice.local().bytes)?, result.replicas))
    }

    /// Returns the shards that hold the objects under these keys, for each the owner before the replica owners; empty
    /// where there is no object. One byte of each object is read, which counts as an access and promotes objects that
    /// are on an SSD only. The replica owners that have it are known where the cluster keeps several replicas and
    /// [`super::ClientConfig::spread`] is on; for a striped object, the stripe head decides. Where the owner is dead or
    /// does not answer and a replica owner answers in its place, the other replica owners are not known, and the owner
    /// is left out unless it confirms within a second that it has the object.
    ///
    /// # Errors
    /// When a key is empty or too long, there is no map, or an owner does not answer.
    pub fn locate(&mut self, keys: &[impl AsRef<[u8]>]) -> Result<Vec<Vec<SocketAddr>>, Error> {
        if keys.is_empty() {
            return Ok(Vec::new());
        }
        let digests = self.namespace.digests(keys)?;
        let bounce = self.bounce.at_least(digests.len() * HEAD_BYTES, self.objects.requester_mut())?;
        let room = |at: usize, bytes| bounce.slice(at * HEAD_BYTES, bytes).local();
        let first = |(at, digest): (usize, &_)| Request::GetRange(*digest, 0, room(at, 1));
        let requests: Vec<Request> = digests.iter().enumerate().map(first).collect();
        let mut results = self.objects.requester_mut().run(&requests)?;
        let striped: Vec<usize> = (0..results.len()).filter(|at| results[*at].status == Status::Striped).collect();
        let head = |at: &usize| Request::GetHead(digests[*at], room(*at, HEAD_BYTES));
        let heads: Vec<Request> = striped.iter().map(head).collect();
        let heads = if heads.is_empty() { Vec::new() } else { self.objects.requester_mut().run(&heads)? };
        striped.into_iter().zip(heads).for_each(|(at, result)| results[at] = result);
        let owners = self.owners_of_hedged(&digests, &results)?;
        let by_map = self.objects.requester_mut().owners()?;
        let places = results.into_iter().zip(&digests).zip(owners).map(|((result, digest), has_owner)| {
            if !self.objects.requester().present(result, "query of the replicas")? {
                return Ok(Vec::new());
            }
            let owner = (!result.from_replica || has_owner).then_some(0);
            let others = result.replica_owners.iter().map(|number| 1 + number);
            Ok(by_map.shards_of(*digest, owner.into_iter().chain(others)))
        });
        places.collect()
    }

    /// Returns the number of replicas that each part of the object under a key has: the fewest of the stripe head and
    /// the stripes if it is striped; 0 if a part is missing. As [`Self::locate`], it knows the replica owners where
    /// [`super::ClientConfig::spread`] is on, and one byte of each part is read.
    ///
    /// # Errors
    /// When the key is empty or too long, there is no object, there is no map, or an owner does not answer.
    pub fn count(&mut self, key: &[u8]) -> Result<u8, Error> {
        let digest = self.namespace.digest(key)?;
        let parts = self.parts_of(&[key], &[digest])?;
        let bounce = self.bounce.at_least(parts.len() * HEAD_BYTES, self.objects.requester_mut())?;
        let read = |(at, part): (usize, &Digest)| {
            let room = |bytes| bounce.slice(at * HEAD_BYTES, bytes).local();
            match parts.len() > 1 && *part == digest {
                true => Request::GetHead(*part, room(HEAD_BYTES)),
                false => Request::GetRange(*part, 0, room(1)),
            }
        };
        let requests: Vec<Request> = parts.iter().enumerate().map(read).collect();
        let results = self.objects.requester_mut().run(&requests)?;
        let owners = self.owners_of_hedged(&parts, &results)?;
        let mut fewest = u8::MAX;
        for (result, has_owner) in results.into_iter().zip(owners) {
            let is_there = self.objects.requester().present(result, "query of the replicas")?;
            let owner = usize::from(!result.from_replica || has_owner);
            let shards = if is_there { owner + result.replica_owners.count() } else { 0 };
            fewest = fewest.min(u8::try_from(shards).unwrap_or(u8::MAX));
        }
        Ok(fewest)
    }

    /// Removes the replicas of the objects under these keys from their replica owners. Returns for each whether there
    /// was a replica, as far as is known, and it is gone. The object stays with its owner and is not replicated again
    /// until it is put with two replicas, a task replicates it, it becomes hot enough that its shard replicates it, or
    /// its slot has another owner. A striped object counts as a whole.
    ///
    /// # Errors
    /// When a key is empty or too long, or the owners do not answer; for a single object when its owner refuses
    /// ([`Status::Busy`] where the replica owner does not answer), or a stripe of it is missing.
    pub fn remove(&mut self, keys: &[impl AsRef<[u8]>]) -> Result<Vec<Result<bool, Error>>, Error> {
        let (mut parts, mut whole) = (Vec::new(), Vec::with_capacity(keys.len()));
        for key in keys {
            let digest = self.namespace.digest(key.as_ref())?;
            whole.push(match self.parts_of(&[key], &[digest]) {
                Ok(digests) => {
                    parts.extend(digests.iter().map(|digest| Request::RemoveCopy(*digest)));
                    Ok(digests.len())
                }
                Err(Error::Status { status: Status::NotFound, .. }) => Ok(0),
                Err(why) => Err(why),
            });
        }
        let mut results =
            if parts.is_empty() { Vec::new() } else { self.objects.requester_mut().run(&parts)? }.into_iter();
        let mut of_one = |count: usize| {
            let statuses: Vec<Status> = results.by_ref().take(count).map(|result| result.status).collect();
            let refused = statuses.iter().find(|status| !matches!(status, Status::Ok | Status::NotFound));
            refused.map_or(Ok(statuses.contains(&Status::Ok)), |status| Err(*status))
        };
        let gone: Vec<Result<Result<bool, Status>, Error>> =
            whole.into_iter().map(|count| count.map(&mut of_one)).collect();
        let problem = |status| self.objects.requester().problem("removal of a replica".to_owned(), status);
        Ok(gone.into_iter().map(|one| one.and_then(|gone| gone.map_err(problem))).collect())
    }

    /// Replicates the objects under these keys to the replica owners of their slots, as if they had been put with two
    /// replicas. Returns the number of the task. The destination follows from the key: `targets`, names of segments,
    /// only have to exist. A striped object counts as its stripe head and stripes; at most 512 objects go in one task.
    ///
    /// # Errors
    /// When one of the objects does not exist ([`Status::NotFound`]), or the control plane refuses the task.
    pub fn create_task(&mut self, keys: &[impl AsRef<[u8]>], targets: &[String]) -> Result<u64, Error> {
        let digests = self.parts_of(keys, &self.namespace.digests(keys)?)?;
        let digests = digests.into_iter().map(|digest| digest.0).collect();
        let mut name = match keys {
            [key] => String::from_utf8_lossy(key.as_ref()).into_owned(),
            keys => format!("{} keys", keys.len()),
        };
        name.truncate(name.floor_char_boundary(TASK_NAME_BYTES));
        let call = CreateTask { tenant: self.namespace.tenant_name(), name, digests, targets: targets.to_vec() };
        Ok(self.objects.requester().link().call(call)?.id)
    }

    /// Returns the state of a task of this client's tenant; `None` if there is no task of this number, or it was
    /// forgotten.
    ///
    /// # Errors
    /// When the control plane does not answer.
    pub fn task(&self, id: u64) -> Result<Option<TaskStatus>, Error> {
        let call = ListTasks { tenant: Some(self.namespace.tenant_name()), id: Some(id), after: 0 };
        Ok(self.objects.requester().link().call(call)?.tasks.pop())
    }

    /// Cancels a task of this client's tenant. Objects that were replicated stay replicated.
    ///
    /// # Errors
    /// When there is no unfinished task of this number.
    pub fn cancel_task(&self, id: u64) -> Result<(), Error> {
        self.objects.requester().link().call(CancelTask { tenant: Some(self.namespace.tenant_name()), id }).map(|_| ())
    }

    /// Returns, for each object that its replica owner answered for, whether the owner has it too. A hedged get does
    /// not tell: the owner may only be slow.
    fn owners_of_hedged(&mut self, digests: &[Digest], results: &[TaskResult]) -> Result<Vec<bool>, Error> {
        let mut owners = vec![false; results.len()];
        let hedged: Vec<usize> = (0..results.len()).filter(|at| results[*at].from_replica).collect();
        if hedged.is_empty() {
            return Ok(owners);
        }
        let requests: Vec<Request> = hedged.iter().map(|at| Request::Exists(digests[*at])).collect();
        let soon = self.objects.requester().deadline().min(OWNER_WAIT);
        let answers = self.objects.within(soon, |objects| objects.requester_mut().run(&requests))?;
        for (at, answer) in hedged.into_iter().zip(answers) {
            // `Striped` means that the stripe head exists. A query may be hedged, too.
            owners[at] = matches!(answer.status, Status::Ok | Status::Striped) && !answer.from_replica;
        }
        Ok(owners)
    }

    fn no_copy(&self, key: &[u8], status: Status) -> Error {
        self.objects.requester().problem(format!("replication of the object under \"{}\"", key.escape_ascii()), status)
    }

    /// Returns the digests of everything that these objects consist of: for striped ones, stripe head and stripes.
    fn parts_of(&mut self, keys: &[impl AsRef<[u8]>], digests: &[Digest]) -> Result<Vec<Digest>, Error> {
        if digests.is_empty() {
            return Ok(Vec::new());
        }
        let sizes: Vec<Request> = digests.iter().map(|digest| Request::Size(*digest)).collect();
        let results = self.objects.requester_mut().run(&sizes)?;
        let mut parts = Vec::with_capacity(digests.len());
        for ((key, digest), result) in keys.iter().zip(digests).zip(results) {
            let striped = match result.status {
                Status::Ok => {
                    parts.push(*digest);
                    continue;
                }
                Status::Striped => self.objects.parts_of_striped(*digest)?,
                status => return Err(self.no_copy(key.as_ref(), status)),
            };
            parts.extend(striped.ok_or_else(|| self.no_copy(key.as_ref(), Status::NotFound))?);
        }
        Ok(parts)
    }
}
