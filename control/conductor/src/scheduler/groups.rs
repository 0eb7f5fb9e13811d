//! Capabilities of instances, and the pipeline groups that they form.

use std::fmt;
use std::sync::Arc;

use bincode::{Decode, Encode};

use super::Scheduler;
use super::bookings::PrefillBook;
use super::error::SchedulerError;
use crate::cost::pipeline::{DEFAULT_ACTIVATION_BYTES, DEFAULT_LAYERS};
use crate::policy::GroupView;

/// Minimum and maximum number of stages of a pipeline group.
pub const PIPELINE_STAGES: (u32, u32) = (2, 16);
/// Minimum and maximum length of a chunk, in tokens.
pub const CHUNK_TOKENS: (u32, u32) = (1_000, 1 << 20);
/// Maximum number of layers of a model.
pub const MAX_LAYERS: u32 = 1_024;
/// Maximum number of bytes of activations for a token.
pub const MAX_ACTIVATION_BYTES: u32 = 1 << 20;
/// Maximum length of the name of a pipeline group, in bytes.
pub const MAX_GROUP_NAME_BYTES: usize = 128;

/// Capabilities of an instance, beside prefills and decodes of its own. The default is none.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
pub struct InstanceCapabilities {
    /// True if it begins a prefill when the first layer of a fetched prefix has arrived, and fetches the other layers
    /// meanwhile.
    pub layer_wise: bool,
    /// Number of its model's layers; 0 for [`DEFAULT_LAYERS`].
    pub layers: u32,
    /// Its stage in a pipeline group, if it is in one.
    pub stage: Option<PipelineMembership>,
}

/// Stage of an instance in a pipeline group, which exists once each of its stages has an instance.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct PipelineMembership {
    /// Name of the group, unique in its tenant.
    pub group: String,
    /// Stage, from 0.
    pub stage: u32,
    /// Number of stages.
    pub stages: u32,
    /// Maximum length of a chunk, in tokens.
    pub chunk_tokens: u32,
    /// Bytes of activations for each token that a stage passes on, beside KV cache; 0 for
    /// [`DEFAULT_ACTIVATION_BYTES`].
    pub activation_bytes: u32,
}

impl PipelineMembership {
    /// Returns the bytes of activations for each token that a stage passes on.
    const fn activation_bytes(&self) -> u32 {
        if self.activation_bytes == 0 { DEFAULT_ACTIVATION_BYTES } else { self.activation_bytes }
    }
}

/// Reason why capabilities are rejected.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum CapabilityError {
    /// The model has too many layers.
    Layers { layers: u32 },
    /// The name of the group is empty or too long.
    GroupName { bytes: usize },
    /// The group has too few or too many stages.
    Stages { group: String, stages: u32 },
    /// The model has fewer layers than the group has stages.
    FewLayers { group: String, stages: u32, layers: u32 },
    /// The stage is not one of the group's.
    Stage { group: String, stage: u32, stages: u32 },
    /// The chunks are too short or too long.
    ChunkTokens { group: String, chunk_tokens: u32 },
    /// The chunks do not consist of whole blocks.
    PartialBlocks { group: String, chunk_tokens: u32, block_tokens: u32 },
    /// A token has too many bytes of activations.
    ActivationBytes { group: String, bytes: u32 },
    /// The instance only decodes.
    NoPrefill { group: String },
    /// Another instance of the group has registered something else.
    Differs {
        group: String,
        what: &'static str,
        /// The other instance.
        other: Arc<str>,
    },
    /// Another instance has the stage.
    StageTaken { group: String, stage: u32, other: Arc<str> },
}

impl fmt::Display for CapabilityError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Layers { layers } => write!(f, "a model of {layers} layers; at most {MAX_LAYERS}"),
            Self::GroupName { bytes } => {
                write!(f, "a pipeline group's name must have 1 to {MAX_GROUP_NAME_BYTES} bytes, not {bytes}")
            }
            Self::Stages { group, stages } => {
                let (least, most) = PIPELINE_STAGES;
                write!(f, "pipeline group {group:?} has {stages} stages; must be {least} to {most}")
            }
            Self::FewLayers { group, stages, layers } => {
                write!(f, "pipeline group {group:?} has {stages} stages, more than the {layers} layers of the model")
            }
            Self::Stage { group, stage, stages } => {
                write!(f, "stage {stage} of pipeline group {group:?}; its {stages} stages are numbered from 0")
            }
            Self::ChunkTokens { group, chunk_tokens } => {
                let (least, most) = CHUNK_TOKENS;
                write!(f, "chunks of {chunk_tokens} tokens in pipeline group {group:?}; must be {least} to {most}")
            }
            Self::PartialBlocks { group, chunk_tokens, block_tokens } => write!(
                f,
                "chunks of {chunk_tokens} tokens in pipeline group {group:?}; must be a multiple of the block's \
                 {block_tokens} tokens"
            ),
            Self::ActivationBytes { group, bytes } => write!(
                f,
                "{bytes} bytes of activations for a token in pipeline group {group:?}; at most {MAX_ACTIVATION_BYTES}"
            ),
            Self::NoPrefill { group } => {
                write!(f, "an instance that only decodes cannot be in pipeline group {group:?}")
            }
            Self::Differs { group, what, other } => {
                write!(f, "instance {other:?} of pipeline group {group:?} has registered another {what}")
            }
            Self::StageTaken { group, stage, other } => {
                write!(f, "instance {other:?} is stage {stage} of pipeline group {group:?} already")
            }
        }
    }
}

impl std::error::Error for CapabilityError {}

impl InstanceCapabilities {
    /// Returns the number of its model's layers.
    #[must_use]
    pub const fn layers(&self) -> u32 {
        if self.layers == 0 { DEFAULT_LAYERS } else { self.layers }
    }

    /// Checks all limits, for an instance with this block size that prefills or does not.
    ///
    /// # Errors
    /// When a value is out of its limits.
    pub fn check(&self, block_tokens: u32, prefills: bool) -> Result<(), CapabilityError> {
        if self.layers > MAX_LAYERS {
            return Err(CapabilityError::Layers { layers: self.layers });
        }
        let Some(of) = &self.stage else { return Ok(()) };
        let (group, layers) = (of.group.clone(), self.layers());
        let PipelineMembership { stage, stages, chunk_tokens, activation_bytes, .. } = *of;
        if group.is_empty() || group.len() > MAX_GROUP_NAME_BYTES {
            return Err(CapabilityError::GroupName { bytes: group.len() });
        }
        if !prefills {
            return Err(CapabilityError::NoPrefill { group });
        }
        if !(PIPELINE_STAGES.0..=PIPELINE_STAGES.1).contains(&stages) {
            return Err(CapabilityError::Stages { group, stages });
        }
        if stages > layers {
            return Err(CapabilityError::FewLayers { group, stages, layers });
        }
        if stage >= stages {
            return Err(CapabilityError::Stage { group, stage, stages });
        }
        if !(CHUNK_TOKENS.0..=CHUNK_TOKENS.1).contains(&chunk_tokens) {
            return Err(CapabilityError::ChunkTokens { group, chunk_tokens });
        }
        if !chunk_tokens.is_multiple_of(block_tokens.max(1)) {
            return Err(CapabilityError::PartialBlocks { group, chunk_tokens, block_tokens });
        }
        if activation_bytes > MAX_ACTIVATION_BYTES {
            return Err(CapabilityError::ActivationBytes { group, bytes: activation_bytes });
        }
        Ok(())
    }

    /// Sets them for a prefill instance. They were checked, also beside those of the other members of its group.
    ///
    /// # Errors
    /// When the instance is unknown.
    pub fn install(&self, scheduler: &mut Scheduler, instance: usize) -> Result<(), SchedulerError> {
        scheduler.bookings.prefill(instance)?.layer_wise = self.layer_wise.then(|| self.layers());
        scheduler.groups.join(instance, self);
        Ok(())
    }

    /// Checks that this instance can be in one group with instance `name` of the same pool, if both name that group.
    ///
    /// # Errors
    /// When their groups differ in what all members have in common, or both have the same stage.
    pub fn check_beside(&self, name: &Arc<str>, other: &Self) -> Result<(), CapabilityError> {
        let (Some(own), Some(theirs)) = (&self.stage, &other.stage) else { return Ok(()) };
        if own.group != theirs.group {
            return Ok(());
        }
        let pairs = [
            ("number of stages", own.stages == theirs.stages),
            ("chunk length", own.chunk_tokens == theirs.chunk_tokens),
            ("number of layers", self.layers() == other.layers()),
            ("size of activations", own.activation_bytes() == theirs.activation_bytes()),
        ];
        let (group, other) = (own.group.clone(), Arc::clone(name));
        if let Some((what, _)) = pairs.into_iter().find(|(_, is_equal)| !is_equal) {
            return Err(CapabilityError::Differs { group, what, other });
        }
        if own.stage == theirs.stage {
            return Err(CapabilityError::StageTaken { group, stage: own.stage, other });
        }
        Ok(())
    }
}

/// Pipeline group, with the members that have registered.
struct PipelineGroup {
    name: Arc<str>,
    members: Vec<Option<usize>>,
    chunk_tokens: u32,
    layers: u32,
    activation_bytes: u32,
}

/// Pipeline groups of a pool.
#[derive(Default)]
pub(super) struct PipelineGroups {
    groups: Vec<PipelineGroup>,
}

impl PipelineGroups {
    /// Adds a prefill instance to the group that its capabilities name, if they name one. They were checked, also
    /// beside those of the other members.
    pub(super) fn join(&mut self, instance: usize, capabilities: &InstanceCapabilities) {
        self.leave(instance);
        let Some(of) = &capabilities.stage else { return };
        let at = self.groups.iter().position(|group| *group.name == *of.group).unwrap_or_else(|| {
            self.groups.push(PipelineGroup {
                name: of.group.as_str().into(),
                members: vec![None; of.stages as usize],
                chunk_tokens: of.chunk_tokens,
                layers: capabilities.layers(),
                activation_bytes: of.activation_bytes(),
            });
            self.groups.len() - 1
        });
        if let Some(member) = self.groups[at].members.get_mut(of.stage as usize) {
            *member = Some(instance);
        }
    }

    /// Removes a prefill instance from its group; a group without members is removed.
    pub(super) fn leave(&mut self, instance: usize) {
        for group in &mut self.groups {
            group.members.iter_mut().filter(|member| **member == Some(instance)).for_each(|member| *member = None);
        }
        self.groups.retain(|group| group.members.iter().any(Option::is_some));
    }

    /// Returns the groups of which every stage has an instance that accepts requests and is not excluded.
    pub(super) fn views(&self, books: &[PrefillBook], barred: &[u32]) -> Vec<GroupView> {
        let accepts =
            |at: &usize| books.get(*at).is_some_and(|book| book.alive && book.takes) && !barred.contains(&(*at as u32));
        let view = |group: &PipelineGroup| {
            let members: Option<Vec<usize>> = group.members.iter().copied().collect();
            Some(GroupView {
                name: Arc::clone(&group.name),
                members: members.filter(|members| members.iter().all(accepts))?,
                chunk_tokens: group.chunk_tokens,
                layers: group.layers,
                activation_bytes: group.activation_bytes,
            })
        };
        self.groups.iter().filter_map(view).collect()
    }
}
