/* C interface of kvplane's process groups: collectives that survive their members.
 *
 * Names, numbers, layouts and conventions are those of Mooncake's mooncake_pg.h, with the configuration as in 0.3.14,
 * so that a program written for that header compiles and links against libtransfer_engine.so unchanged. The Cpu half is
 * complete; each Gpu function returns mooncakePgNotSupported.
 *
 * Conventions
 *   - A function returns mooncakePgSuccess or another mooncakePgResult_t; mooncakePgGetLastError has the text.
 *   - Handles are looked up: a null, stale or foreign one is rejected with mooncakePgInvalidArgument. So are null
 *     pointers where the call needs memory; nothing crashes for them.
 *   - Any thread may call any function at any time. A handle that one thread destroys stays valid for the calls that
 *     others have begun with it.
 *   - "Rank" is the rank in the group, unless it is named global: that is the rank of the process in its world.
 *
 * Memory
 *   - Send and receive buffers stay valid and unchanged until the completion is complete. From then on nothing accesses
 *     them. Destroying a completion, or a wait that timed out, does not end the operation; mooncakePgCommDestroy does.
 *   - failedRanksHint has an entry for each of maxGroupSize ranks. The call that begins an operation sets them to 0;
 *     the call of mooncakePgCompletionIsCompleted or mooncakePgCompletionWait that finds the operation ended sets those
 *     of ranks that failed to 1. It stays valid until then, or until the completion is destroyed.
 *   - activeRanksMirror stays valid until mooncakePgCommDestroy has returned. It is written at any time from another
 *     thread, an entry at a time, and always before the completion of an operation that a rank failed in.
 *   - Strings and arrays of arguments are read during the call only.
 *
 * Order: all members call the same collectives in the same order. Operations that differ end with an error that names
 * both calls, at all members. Operations of a communicator run one after another; up to 4,096 may wait.
 */
#ifndef MOONCAKE_PG_H_
#define MOONCAKE_PG_H_

#include <limits.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Most ranks of a world, and of a group. */
#define MOONCAKE_PG_MAX_RANKS 64
/* Room for a text, with its final zero; longer ones are truncated. */
#define MOONCAKE_PG_MAX_ERROR_STRING 256
/* Marks a field of the configuration that is not set. */
#define MOONCAKE_PG_CONFIG_UNDEF_INT INT_MIN

#define MOONCAKE_PG_COMM_CONFIG_MAGIC 0x20B6DE6B
#define MOONCAKE_PG_COMM_CONFIG_VERSION 1u

/* Process of a world. */
typedef struct mooncakePgContext *mooncakePgContext_t;
/* Membership of a group. */
typedef struct mooncakePgComm *mooncakePgComm_t;
/* Operation or message in flight. */
typedef struct mooncakePgCompletion *mooncakePgCompletion_t;
/* Stream of a device; kept for programs that name it. */
typedef void *mooncakePgStream_t;

typedef enum mooncakePgResult {
    mooncakePgSuccess = 0,
    /* An argument is invalid, or the members call different operations. */
    mooncakePgInvalidArgument = 1,
    /* The call does not fit the state: calls in another order, a rank that is taken, a member that was deactivated. */
    mooncakePgInvalidState = 2,
    /* Memory of devices, or elements that are not reduced so. */
    mooncakePgNotSupported = 3,
    mooncakePgTimeout = 4,
    /* A context with communicators, or too many operations or proposals that wait. */
    mooncakePgResourceBusy = 5,
    /* The connections to the other processes cannot be set up. */
    mooncakePgTransferEngineError = 6,
    /* The control plane is unreachable, or refuses the call. */
    mooncakePgRpcError = 7,
    /* No memory, no thread, or the control plane could not be started. */
    mooncakePgSystemError = 8,
    mooncakePgInternalError = 9
} mooncakePgResult_t;

/* Types of elements. All are moved. Reduced are the integers, Float16, Float32, Float64, Bfloat16 and Bool; of Uint16,
 * Uint32 and Uint64 only sums and products. Integers wrap; a Bool is a byte, 0 or 1. */
typedef enum mooncakePgDataType {
    mooncakePgInt8 = 0,
    mooncakePgUint8 = 1,
    mooncakePgInt16 = 2,
    mooncakePgUint16 = 3,
    mooncakePgInt32 = 4,
    mooncakePgUint32 = 5,
    mooncakePgInt64 = 6,
    mooncakePgUint64 = 7,
    mooncakePgFloat16 = 8,
    mooncakePgFloat32 = 9,
    mooncakePgFloat64 = 10,
    mooncakePgBfloat16 = 11,
    mooncakePgBool = 12,
    mooncakePgFloat8e4m3fn = 13,
    mooncakePgFloat8e5m2 = 14,
    mooncakePgFloat8e4m3fnuz = 15,
    mooncakePgFloat8e5m2fnuz = 16,
    mooncakePgFloat8e8m0fnu = 17
} mooncakePgDataType_t;

/* Avg is the sum divided by the number of ranks that contributed; of floating-point types only. */
typedef enum mooncakePgReduceOp {
    mooncakePgSum = 0,
    mooncakePgAvg = 1,
    mooncakePgProduct = 2,
    mooncakePgMin = 3,
    mooncakePgMax = 4
} mooncakePgReduceOp_t;

typedef enum mooncakePgDeviceType {
    mooncakePgDeviceCpu = 0,
    mooncakePgDeviceGpu = 1
} mooncakePgDeviceType_t;

typedef enum mooncakePgIdResolvePolicy {
    /* A founding member: all of them name the same group. */
    mooncakePgIdResolveCreateOrAttach = 0,
    /* A joiner: the group exists, and its ranks are the beginning of this order, or all of it. */
    mooncakePgIdResolveAttachOrExtend = 1
} mooncakePgIdResolvePolicy_t;

typedef enum mooncakePgGpuCollectiveBackend {
    mooncakePgGpuCollectiveBackendLegacy = 0,
    mooncakePgGpuCollectiveBackendNew = 1
} mooncakePgGpuCollectiveBackend_t;

/* Description of a communicator. A program begins with MOONCAKE_PG_COMM_CONFIG_INITIALIZER, and sets groupId, rank,
 * size, globalRanks, globalRankCount and deviceType. */
typedef struct mooncakePgCommConfig {
    /* sizeof(mooncakePgCommConfig_t) where the program was compiled: 104 bytes without the last field, as before
     * 0.3.14, or more. Fields beyond those known here are ignored; more than 4,096 bytes are rejected. */
    size_t structSize;
    unsigned int magic;
    unsigned int version;
    /* Name of the group, 1 to 256 bytes: the same at all members, and used once in a world. */
    const char *groupId;
    /* Rank of this process in the group. */
    int rank;
    /* Number of members. */
    int size;
    /* Most members that the group may ever have, at most 64; size by default. The same at all members. */
    int maxGroupSize;
    /* Global rank of each member, by its rank: size entries, none twice. */
    const int32_t *globalRanks;
    size_t globalRankCount;
    mooncakePgDeviceType_t deviceType;
    /* Ignored for the CPU. */
    int deviceIndex;
    mooncakePgIdResolvePolicy_t idResolvePolicy;
    /* 1, 1: members that fail are deactivated before the operation completes that they failed in.
     * 1, 0: they contribute no longer, and mooncakePgCommSyncAfterFailure deactivates them.
     * 0, 0: they contribute no longer, and mooncakePgCommDeactivateRanks deactivates them.
     * 0, 1: rejected. The same at all members. */
    int autoDeactivateOnFailure;
    int autoSyncOnFailure;
    /* NULL, or memory in which a 1 marks each active rank, kept up to date: at least maxGroupSize entries. */
    int32_t *activeRanksMirror;
    size_t activeRanksMirrorCount;
    /* The mirror is memory of a device: not supported. */
    int activeRanksMirrorIsDevice;
    int activeRanksMirrorDeviceIndex;
    /* Ignored for the CPU. */
    mooncakePgGpuCollectiveBackend_t preferredGpuCollectiveBackend;
} mooncakePgCommConfig_t;

#define MOONCAKE_PG_COMM_CONFIG_INITIALIZER                                                                            \
    {sizeof(mooncakePgCommConfig_t),                                                                                   \
     MOONCAKE_PG_COMM_CONFIG_MAGIC,                                                                                    \
     MOONCAKE_PG_COMM_CONFIG_VERSION,                                                                                  \
     NULL,                                                                                                             \
     MOONCAKE_PG_CONFIG_UNDEF_INT,                                                                                     \
     MOONCAKE_PG_CONFIG_UNDEF_INT,                                                                                     \
     MOONCAKE_PG_CONFIG_UNDEF_INT,                                                                                     \
     NULL,                                                                                                             \
     0,                                                                                                                \
     mooncakePgDeviceGpu,                                                                                              \
     MOONCAKE_PG_CONFIG_UNDEF_INT,                                                                                     \
     mooncakePgIdResolveCreateOrAttach,                                                                                \
     1,                                                                                                                \
     1,                                                                                                                \
     NULL,                                                                                                             \
     0,                                                                                                                \
     0,                                                                                                                \
     MOONCAKE_PG_CONFIG_UNDEF_INT,                                                                                     \
     mooncakePgGpuCollectiveBackendLegacy}

typedef enum mooncakePgProposalStatus {
    /* The view is as before; rejectReason says why. */
    mooncakePgProposalRejected = 0,
    /* The view of newEpoch has the change. */
    mooncakePgProposalApplied = 1,
    /* As Applied, but for droppedRanks, which failed meanwhile. */
    mooncakePgProposalAppliedWithDroppedRanks = 2
} mooncakePgProposalStatus_t;

typedef struct mooncakePgProposalResponse {
    mooncakePgProposalStatus_t status;
    uint64_t newEpoch;
    size_t droppedRankCount;
    int32_t droppedRanks[MOONCAKE_PG_MAX_RANKS];
    char rejectReason[MOONCAKE_PG_MAX_ERROR_STRING];
} mooncakePgProposalResponse_t;

typedef enum mooncakePgSyncAfterFailureStatus {
    /* The members that failed are deactivated. */
    mooncakePgSyncReconciled = 0,
    /* No active member has failed. */
    mooncakePgSyncNoPending = 1,
    /* The view is as before; rejectReason says why. */
    mooncakePgSyncRejected = 2
} mooncakePgSyncAfterFailureStatus_t;

typedef struct mooncakePgSyncAfterFailureResponse {
    mooncakePgSyncAfterFailureStatus_t status;
    char rejectReason[MOONCAKE_PG_MAX_ERROR_STRING];
} mooncakePgSyncAfterFailureResponse_t;

/* Layouts on 64-bit machines. */
#if UINTPTR_MAX == UINT64_MAX && (defined(__cplusplus) || __STDC_VERSION__ >= 201112L)
#ifdef __cplusplus
#define MOONCAKE_PG_LAYOUT(holds) static_assert(holds, #holds)
#else
#define MOONCAKE_PG_LAYOUT(holds) _Static_assert(holds, #holds)
#endif
MOONCAKE_PG_LAYOUT(sizeof(mooncakePgCommConfig_t) == 112);
MOONCAKE_PG_LAYOUT(offsetof(mooncakePgCommConfig_t, globalRanks) == 40);
MOONCAKE_PG_LAYOUT(offsetof(mooncakePgCommConfig_t, activeRanksMirror) == 80);
MOONCAKE_PG_LAYOUT(offsetof(mooncakePgCommConfig_t, preferredGpuCollectiveBackend) == 104);
MOONCAKE_PG_LAYOUT(sizeof(mooncakePgProposalResponse_t) == 536);
MOONCAKE_PG_LAYOUT(offsetof(mooncakePgProposalResponse_t, droppedRanks) == 24);
MOONCAKE_PG_LAYOUT(sizeof(mooncakePgSyncAfterFailureResponse_t) == 260);
#undef MOONCAKE_PG_LAYOUT
#endif

/* ---- errors ------------------------------------------------------------------------------------------------------ */

/* Returns the meaning of a result: a constant. */
const char *mooncakePgGetErrorString(mooncakePgResult_t result);

/* Returns the text of this thread's last failure; empty before the first. It is valid until the thread's next failure,
 * or its end. */
const char *mooncakePgGetLastError(void);

/* ---- process ----------------------------------------------------------------------------------------------------- */

/* Creates a context. In this order: create, settings, initialize, rank 0 launches a coordinator unless there is one,
 * and all connect to it. The settings before initialize cannot change afterwards. */
mooncakePgResult_t mooncakePgContextCreate(mooncakePgContext_t *context);

/* Sets the rank of this process in its world of at most maxWorldSize processes. Repeated with the same numbers, it does
 * nothing. */
mooncakePgResult_t mooncakePgContextInitialize(mooncakePgContext_t context, int globalRank, int maxWorldSize);

/* Finds a control plane for a new world, and writes the address that all processes pass to
 * mooncakePgContextConnectCoordinator: at most 255 bytes and a final zero. KVPLANE_CONTROL names the control plane
 * ("host:port,host:port"); without it this starts one on loopback: the program kvplane, from KVPLANE_BINARY or the
 * search path. The program is a process of its own, which ends a minute after the world's last process: the end of rank
 * 0 ends nothing. Only processes of the same user on this host reach it. For global rank 0 only. */
mooncakePgResult_t mooncakePgContextLaunchCoordinator(mooncakePgContext_t context, char *coordinatorAddressBuf,
                                                      size_t coordinatorAddressBufSize);

/* Joins the world at a control plane, and waits up to 30 s for it. The address is what LaunchCoordinator wrote, or
 * "[CLUSTER@]HOST:PORT[,HOST:PORT...][/WORLD]"; the world is "default" if it is not named. A control plane of this user
 * on this host is found by its address. Any other one takes certificates: the directory in KVPLANE_CERTS, and the
 * cluster in KVPLANE_CLUSTER ("kvplane" by default). A second call does nothing. */
mooncakePgResult_t mooncakePgContextConnectCoordinator(mooncakePgContext_t context, const char *coordinatorAddress);

/* Sets the address at which other processes connect to this one; "127.0.0.1" by default. An address beyond loopback is
 * refused by mooncakePgContextConnectCoordinator unless connections are authenticated. Before initialize. */
mooncakePgResult_t mooncakePgContextSetHostIp(mooncakePgContext_t context, const char *hostIp);

/* Takes the address of an engine that createTransferEngine returned as this process's; NULL changes nothing. The engine
 * itself is not used: a process's groups have connections of their own. Before initialize. */
mooncakePgResult_t mooncakePgContextSetTransferEngine(mooncakePgContext_t context, void *transferEngine);

/* Names the RDMA devices that connections to other hosts use, the best one first; without names, they use TCP. A device
 * that does not exist fails mooncakePgContextConnectCoordinator. Before initialize. */
mooncakePgResult_t mooncakePgContextSetDeviceFilter(mooncakePgContext_t context, const char *const *filters,
                                                    size_t filterCount);

/* Sets the time from the beginning of a collective after which it fails if a living rank has not called it, for those
 * begun from now on; 0 and the default: 30 minutes. A dead rank is found sooner: at once if its connection is reset,
 * and within 30 s, or half a second after this time, if it is silent. */
mooncakePgResult_t mooncakePgContextSetCollectiveTimeout(mooncakePgContext_t context, size_t timeoutUs);

/* Sets the time within which a message arrives, for those begun from now on; 10 s by default. */
mooncakePgResult_t mooncakePgContextSetP2PTimeout(mooncakePgContext_t context, int64_t timeoutUs);

/* Sets the time within which mooncakePgCommSyncAfterFailure ends; 30 s by default. */
mooncakePgResult_t mooncakePgContextSetFaultReconciliationWindow(mooncakePgContext_t context, int64_t timeoutUs);

/* Leaves the world. mooncakePgResourceBusy while the context has communicators. NULL is ignored. */
mooncakePgResult_t mooncakePgContextDestroy(mooncakePgContext_t context);

/* ---- group ------------------------------------------------------------------------------------------------------- */

/* Becomes a member of a group. Waits up to 300 s: a founding member until all of them take part, a joiner for the
 * group's founding. Until mooncakePgCommJoin, a joiner's collectives run with itself alone. */
mooncakePgResult_t mooncakePgCommCreate(mooncakePgContext_t context, const mooncakePgCommConfig_t *config,
                                        mooncakePgComm_t *comm);

/* Leaves the group for good: waits up to 5 s for operations in flight, and ends the others. An operation that is
 * complete here and not yet at another member is repeated there without this one, as after a failure: a barrier before
 * leaving keeps the results before it equal. NULL is ignored. The handle is gone even if this fails. */
mooncakePgResult_t mooncakePgCommDestroy(mooncakePgComm_t comm);

mooncakePgResult_t mooncakePgCommGetRank(mooncakePgComm_t comm, int *rank);

/* Returns the highest active rank and one; ranks below that are not active are counted. For a joiner the size in its
 * configuration, until it has joined. Buffers with a part for each rank have that many. */
mooncakePgResult_t mooncakePgCommGetSize(mooncakePgComm_t comm, int *size);
mooncakePgResult_t mooncakePgCommGetMaxGroupSize(mooncakePgComm_t comm, int *maxGroupSize);

/* ---- collectives on the memory of devices: mooncakePgNotSupported ------------------------------------------------ */

mooncakePgResult_t mooncakePgBroadcastGpu(const void *sendBuffer, void *recvBuffer, size_t count,
                                          mooncakePgDataType_t dataType, int root, mooncakePgComm_t comm,
                                          mooncakePgStream_t stream, int32_t *failedRanksHint,
                                          size_t failedRanksHintCount);
mooncakePgResult_t mooncakePgAllReduceGpu(const void *sendBuffer, void *recvBuffer, size_t count,
                                          mooncakePgDataType_t dataType, mooncakePgReduceOp_t reduceOp,
                                          mooncakePgComm_t comm, mooncakePgStream_t stream, int32_t *failedRanksHint,
                                          size_t failedRanksHintCount);
mooncakePgResult_t mooncakePgAllGatherGpu(const void *sendBuffer, void *recvBuffer, size_t count,
                                          mooncakePgDataType_t dataType, mooncakePgComm_t comm,
                                          mooncakePgStream_t stream, int32_t *failedRanksHint,
                                          size_t failedRanksHintCount);
mooncakePgResult_t mooncakePgReduceScatterGpu(const void *sendBuffer, void *recvBuffer, size_t count,
                                              mooncakePgDataType_t dataType, mooncakePgReduceOp_t reduceOp,
                                              mooncakePgComm_t comm, mooncakePgStream_t stream,
                                              int32_t *failedRanksHint, size_t failedRanksHintCount);
mooncakePgResult_t mooncakePgAllToAllGpu(const void *sendBuffer, void *recvBuffer, size_t count,
                                         mooncakePgDataType_t dataType, mooncakePgComm_t comm,
                                         mooncakePgStream_t stream, int32_t *failedRanksHint,
                                         size_t failedRanksHintCount);
mooncakePgResult_t mooncakePgReduceGpu(const void *sendBuffer, void *recvBuffer, size_t count,
                                       mooncakePgDataType_t dataType, mooncakePgReduceOp_t reduceOp, int root,
                                       mooncakePgComm_t comm, mooncakePgStream_t stream, int32_t *failedRanksHint,
                                       size_t failedRanksHintCount);
mooncakePgResult_t mooncakePgGatherGpu(const void *sendBuffer, void *recvBuffer, size_t count,
                                       mooncakePgDataType_t dataType, int root, mooncakePgComm_t comm,
                                       mooncakePgStream_t stream, int32_t *failedRanksHint,
                                       size_t failedRanksHintCount);
mooncakePgResult_t mooncakePgScatterGpu(const void *sendBuffer, void *recvBuffer, size_t count,
                                        mooncakePgDataType_t dataType, int root, mooncakePgComm_t comm,
                                        mooncakePgStream_t stream, int32_t *failedRanksHint,
                                        size_t failedRanksHintCount);
mooncakePgResult_t mooncakePgBarrierGpu(mooncakePgComm_t comm, mooncakePgStream_t stream, int32_t *failedRanksHint,
                                        size_t failedRanksHintCount);

/* ---- collectives ------------------------------------------------------------------------------------------------- */

/* Each begins an operation, and returns its completion, which the caller destroys. count is the elements of a part: of
 * the buffer of a collective that has one, else of each rank's part. A buffer may be NULL where it has no bytes, or
 * where the rank does not need it: the send buffer of a broadcast or scatter is the root's, the receive buffer of a
 * reduce or gather, too. The two buffers may be the same memory, and may overlap in parts.
 *
 * An operation that a rank fails in is repeated among the others: all of them get the same result, without that rank's
 * contribution, and the hint has the rank. Parts of ranks that do not take part stay as they were. */

/* Every rank receives the root's count elements. */
mooncakePgResult_t mooncakePgBroadcastCpu(const void *sendBuffer, void *recvBuffer, size_t count,
                                          mooncakePgDataType_t dataType, int root, mooncakePgComm_t comm,
                                          int32_t *failedRanksHint, size_t failedRanksHintCount,
                                          mooncakePgCompletion_t *completion);
/* Every rank receives the reduction of count elements of all. */
mooncakePgResult_t mooncakePgAllReduceCpu(const void *sendBuffer, void *recvBuffer, size_t count,
                                          mooncakePgDataType_t dataType, mooncakePgReduceOp_t reduceOp,
                                          mooncakePgComm_t comm, int32_t *failedRanksHint,
                                          size_t failedRanksHintCount, mooncakePgCompletion_t *completion);
/* Every rank receives the count elements of each: size * count elements. */
mooncakePgResult_t mooncakePgAllGatherCpu(const void *sendBuffer, void *recvBuffer, size_t count,
                                          mooncakePgDataType_t dataType, mooncakePgComm_t comm,
                                          int32_t *failedRanksHint, size_t failedRanksHintCount,
                                          mooncakePgCompletion_t *completion);
/* Every rank receives the reduction of its part: count elements of size * count. */
mooncakePgResult_t mooncakePgReduceScatterCpu(const void *sendBuffer, void *recvBuffer, size_t count,
                                              mooncakePgDataType_t dataType, mooncakePgReduceOp_t reduceOp,
                                              mooncakePgComm_t comm, int32_t *failedRanksHint,
                                              size_t failedRanksHintCount, mooncakePgCompletion_t *completion);
/* Every rank sends count elements to each, and receives as many: both buffers have size * count. */
mooncakePgResult_t mooncakePgAllToAllCpu(const void *sendBuffer, void *recvBuffer, size_t count,
                                         mooncakePgDataType_t dataType, mooncakePgComm_t comm,
                                         int32_t *failedRanksHint, size_t failedRanksHintCount,
                                         mooncakePgCompletion_t *completion);
/* The root receives the reduction of count elements of all. */
mooncakePgResult_t mooncakePgReduceCpu(const void *sendBuffer, void *recvBuffer, size_t count,
                                       mooncakePgDataType_t dataType, mooncakePgReduceOp_t reduceOp, int root,
                                       mooncakePgComm_t comm, int32_t *failedRanksHint, size_t failedRanksHintCount,
                                       mooncakePgCompletion_t *completion);
/* The root receives the count elements of each: size * count elements. */
mooncakePgResult_t mooncakePgGatherCpu(const void *sendBuffer, void *recvBuffer, size_t count,
                                       mooncakePgDataType_t dataType, int root, mooncakePgComm_t comm,
                                       int32_t *failedRanksHint, size_t failedRanksHintCount,
                                       mooncakePgCompletion_t *completion);
/* Every rank receives its count elements of the root's size * count. */
mooncakePgResult_t mooncakePgScatterCpu(const void *sendBuffer, void *recvBuffer, size_t count,
                                        mooncakePgDataType_t dataType, int root, mooncakePgComm_t comm,
                                        int32_t *failedRanksHint, size_t failedRanksHintCount,
                                        mooncakePgCompletion_t *completion);
/* Completes once all ranks have called it. */
mooncakePgResult_t mooncakePgBarrierCpu(mooncakePgComm_t comm, int32_t *failedRanksHint, size_t failedRanksHintCount,
                                        mooncakePgCompletion_t *completion);

/* ---- messages ---------------------------------------------------------------------------------------------------- */

/* Messages between two members, active or not, arrive in their order. The receiver's buffer has the size of the
 * message. A peer that failed, or did not answer in time, is in the hint of the completed message, which then has no
 * content. */
mooncakePgResult_t mooncakePgSendGpu(const void *sendBuffer, size_t count, mooncakePgDataType_t dataType, int peer,
                                     mooncakePgComm_t comm, mooncakePgStream_t stream, int32_t *failedRanksHint,
                                     size_t failedRanksHintCount, mooncakePgCompletion_t *completion);
mooncakePgResult_t mooncakePgRecvGpu(void *recvBuffer, size_t count, mooncakePgDataType_t dataType, int peer,
                                     mooncakePgComm_t comm, mooncakePgStream_t stream, int32_t *failedRanksHint,
                                     size_t failedRanksHintCount, mooncakePgCompletion_t *completion);
mooncakePgResult_t mooncakePgSendCpu(const void *sendBuffer, size_t count, mooncakePgDataType_t dataType, int peer,
                                     mooncakePgComm_t comm, int32_t *failedRanksHint, size_t failedRanksHintCount,
                                     mooncakePgCompletion_t *completion);
mooncakePgResult_t mooncakePgRecvCpu(void *recvBuffer, size_t count, mooncakePgDataType_t dataType, int peer,
                                     mooncakePgComm_t comm, int32_t *failedRanksHint, size_t failedRanksHintCount,
                                     mooncakePgCompletion_t *completion);

/* ---- completions ------------------------------------------------------------------------------------------------- */

/* Writes 1 if the operation has ended, else 0. Once it has ended, returns what mooncakePgCompletionWait returns. */
mooncakePgResult_t mooncakePgCompletionIsCompleted(mooncakePgCompletion_t completion, int *completed);

/* Waits for the end of the operation: at most timeoutUs, or without end of its own if that is negative; the operation
 * has its deadline. mooncakePgTimeout if it has not ended by then, or has ended because its own deadline passed.
 * mooncakePgSuccess for an operation that a rank failed in, its root included: the hint has those ranks, and where the
 * root is among them there is no result. */
mooncakePgResult_t mooncakePgCompletionWait(mooncakePgCompletion_t completion, int64_t timeoutUs);

/* Frees a completion. The operation goes on. NULL is ignored. */
mooncakePgResult_t mooncakePgCompletionDestroy(mooncakePgCompletion_t completion);

/* ---- membership -------------------------------------------------------------------------------------------------- */

/* Writes 1 for each active rank and 0 for the others: maxGroupSize entries; rankCount is the room for them. A rank that
 * failed is active until it is deactivated. For a joiner, only itself is, until it has joined. */
mooncakePgResult_t mooncakePgCommGetActiveRanks(mooncakePgComm_t comm, int32_t *activeRanks, size_t rankCount);

/* Writes 1 for each of these ranks that is alive, connected, and active or ready to be activated, else 0. */
mooncakePgResult_t mooncakePgCommGetPeerState(mooncakePgComm_t comm, const int32_t *ranks, size_t rankCount,
                                              int32_t *peerStates);

/* Proposes to activate ranks that have called mooncakePgCommJoin, and waits for the outcome: up to 20 s until they are
 * ready, and for the members to follow the new view. Any member may propose, and several may propose the same. */
mooncakePgResult_t mooncakePgCommActivateRanks(mooncakePgComm_t comm, const int32_t *ranks, size_t rankCount,
                                               mooncakePgProposalResponse_t *response);

/* Proposes to deactivate ranks, and waits for the outcome. Their operations in flight end with an error. A deactivated
 * member may join again. */
mooncakePgResult_t mooncakePgCommDeactivateRanks(mooncakePgComm_t comm, const int32_t *ranks, size_t rankCount,
                                                 mooncakePgProposalResponse_t *response);

/* Waits up to 5 s for the operations in flight of this joiner, or deactivated member; says that it is ready; and waits
 * up to 300 s until a member has activated it. */
mooncakePgResult_t mooncakePgCommJoin(mooncakePgComm_t comm);

/* Deactivates the members that failed, and waits until this member follows the new view. */
mooncakePgResult_t mooncakePgCommSyncAfterFailure(mooncakePgComm_t comm,
                                                  mooncakePgSyncAfterFailureResponse_t *response);

/* Returns the epoch of the view that this member follows. It grows with each change of the view, from 1 on. */
mooncakePgResult_t mooncakePgCommGetEpoch(mooncakePgComm_t comm, uint64_t *epoch);

/* Returns the number of ranks for which mooncakePgCommGetPeerState writes 1. */
mooncakePgResult_t mooncakePgCommGetNumSyncedRanks(mooncakePgComm_t comm, int *numSyncedRanks);

#ifdef __cplusplus
}
#endif

#endif
