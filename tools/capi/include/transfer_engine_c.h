/* C interface of kvplane's transfer engine.
 *
 * Names, types, numbers and conventions are those of Mooncake's transfer_engine_c.h, so that a program written for that
 * header (NIXL's and TensorRT-LLM's plugins, Go bindings) compiles and links against libtransfer_engine.so unchanged.
 *
 * Conventions
 *   - A function that returns int returns 0 for success. Registration, segments and notifications return the negative
 *     ERR_* numbers below; submitTransfer*, getTransferStatus and freeBatchID return the same numbers positive.
 *   - Any thread may call any function at any time, except destroyTransferEngine, which must be the last call.
 *   - An engine belongs to the process that made it: after a fork, calls of the child on it fail with ERR_CONTEXT, and
 *     destroying it there ends nothing. A child makes its own.
 *   - Memory that is mapped read-only may be registered: peers read it, and no transfer writes to it.
 *   - A null engine, buffer or string is rejected with INVALID_ARGUMENT; it does not crash.
 *   - Memory named in a request belongs to the transfer until its status is COMPLETED, CANCELED, TIMEOUT or FAILED.
 *     From then on nothing accesses it. A COMPLETED write is visible to any later read of the target.
 */
#ifndef TRANSFER_ENGINE_C
#define TRANSFER_ENGINE_C

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define segment_handle_t int32_t
#define segment_id_t int32_t
#define batch_id_t uint64_t

/* Handle of the engine's own memory. */
#define LOCAL_SEGMENT (0)
/* Result of allocateBatchID on failure. */
#define INVALID_BATCH UINT64_MAX

#define OPCODE_READ (0)
#define OPCODE_WRITE (1)

/* States of a transfer. WAITING and PENDING are in flight, all others are final. */
#define STATUS_WAITING (0)
#define STATUS_PENDING (1)
#define STATUS_INVALID (2)
#define STATUS_CANCELED (3)
#define STATUS_COMPLETED (4)
#define STATUS_TIMEOUT (5)
#define STATUS_FAILED (6)

/* Moves length bytes between source, in this process, and target_offset, an absolute address in the target's process
 * (for a file segment: an offset in the file). */
struct transfer_request {
    int opcode;
    void *source;
    segment_id_t target_id;
    uint64_t target_offset;
    uint64_t length;
};
typedef struct transfer_request transfer_request_t;

/* Named message. */
struct notify_msg {
    char *name;
    char *msg;
};
typedef struct notify_msg notify_msg_t;

struct transfer_status {
    int status;
    uint64_t transferred_bytes;
};
typedef struct transfer_status transfer_status_t;

/* Kept for programs that name it; no function takes or returns one. */
struct segment_desc {
    int type;
    union {
        struct {
            void *addr;
            uint64_t size;
            const char *location;
        } rdma;
        struct {
            const char *file_path;
            const char *subsystem_name;
            const char *proto;
            const char *ip;
            uint64_t port;
        } nvmeof;
    } desc_;
};
typedef struct segment_desc segment_desc_t;

struct buffer_entry {
    void *addr;
    size_t length;
};
typedef struct buffer_entry buffer_entry_t;

/* Load of one rail, see getNicLoadStats. */
struct nic_load_stat {
    char device_name[64];
    uint64_t inflight_bytes;
    double ewma_bandwidth_bps;
};
typedef struct nic_load_stat nic_load_stat_t;

typedef void *transfer_engine_t;
typedef void *transport_t;

/* ---- engine -------------------------------------------------------------------------------------------------------- */

/* Starts an engine. metadata_conn_string is "P2PHANDSHAKE", "http://host:port/metadata", "redis://host:port",
 * "etcd://a;b" or "host:port" (etcd). With P2PHANDSHAKE the engine's name is the address that getLocalIpAndPort
 * returns; otherwise it is local_server_name. rpc_port 0 takes a free port. auto_discover is ignored. NULL on
 * failure. */
transfer_engine_t createTransferEngine(const char *metadata_conn_string, const char *local_server_name,
                                       const char *ip_or_host_name, uint64_t rpc_port, int auto_discover);

/* Destroys an engine: transfers in flight are cancelled, and memory may be freed when this returns. NULL is ignored. */
void destroyTransferEngine(transfer_engine_t engine);

/* Refreshes the descriptions of all open segments. */
int discoverTopology(transfer_engine_t engine);

/* Writes "ip:port", the name by which peers open the engine, and a final zero into buf_out; truncated to buf_len. */
int getLocalIpAndPort(transfer_engine_t engine, char *buf_out, size_t buf_len);

/* Installs a transport by name: non-NULL, or NULL if it is unavailable. The engine uses every transport that works
 * here automatically, except two. "file" must be installed before files are opened: segment names often come from
 * other machines. "rdma" must be installed before Mooncake's engines can reach this one over RDMA; from then on,
 * only those with RDMA can, because they use one protocol for each segment. For "rdma", args is NULL, or its first
 * element is NULL or the assignment of devices to memory, as JSON: {"cpu:0": [["mlx5_0"], ["mlx5_1"]]}; it may name
 * existing devices only. If RDMA is unavailable, the reason is printed to standard error. args is ignored for other
 * transports. */
transport_t installTransport(transfer_engine_t engine, const char *proto, void **args);
int uninstallTransport(transfer_engine_t engine, const char *proto);

/* On SIGTERM or SIGINT, removes the engine from the metadata store and then lets the signal have its default effect.
 * For programs without a handler of their own for these signals. */
void enableGracefulShutdown(transfer_engine_t engine);

/* ---- segments ------------------------------------------------------------------------------------------------------ */

/* Opens a peer's segment by name; "file:///path" opens a file, if the transport "file" is installed. The handle is at
 * least 1, LOCAL_SEGMENT for the engine's own name, or negative on failure. */
segment_id_t openSegment(transfer_engine_t engine, const char *segment_name);
/* Like openSegment, and requests the description from the peer even if the segment is open. */
segment_id_t openSegmentNoCache(transfer_engine_t engine, const char *segment_name);
int closeSegment(transfer_engine_t engine, segment_id_t segment_id);
/* Refreshes the descriptions of all open segments. */
int syncSegmentCache(transfer_engine_t engine);
/* Removes this engine's own descriptor from the metadata store. */
int removeLocalSegment(transfer_engine_t engine, const char *segment_name);
/* Connects before the first transfer. */
int warmupEfaSegment(transfer_engine_t engine, const char *segment_name);

/* ---- memory -------------------------------------------------------------------------------------------------------- */

/* Registers addr .. addr + length for transfers, and for peers if remote_accessible is not 0. The memory must stay
 * mapped until it is unregistered. Length 0 is rejected, as is overlap with registered memory. */
int registerLocalMemory(transfer_engine_t engine, void *addr, size_t length, const char *location,
                        int remote_accessible);
/* Unregisters memory; when this returns 0, no peer accesses it any more. -4: a peer still does, such as a process of
 * this host that was stopped in the middle of a copy; then the memory must stay mapped, and this be called again. */
int unregisterLocalMemory(transfer_engine_t engine, void *addr);
/* Registers or unregisters all ranges, or none. */
int registerLocalMemoryBatch(transfer_engine_t engine, buffer_entry_t *buffer_list, size_t buffer_len,
                             const char *location);
int unregisterLocalMemoryBatch(transfer_engine_t engine, void **addr_list, size_t addr_len);

/* ---- transfers ----------------------------------------------------------------------------------------------------- */

/* Allocates a batch with capacity for batch_size transfers; INVALID_BATCH on failure. */
batch_id_t allocateBatchID(transfer_engine_t engine, size_t batch_size);
/* Starts transfers; validated as a whole before any has an effect. May be called again while the batch has capacity;
 * tasks are numbered in order. */
int submitTransfer(transfer_engine_t engine, batch_id_t batch_id, struct transfer_request *entries, size_t count);
/* Like submitTransfer; delivers the message to the first request's target when all of these have completed. */
int submitTransferWithNotify(transfer_engine_t engine, batch_id_t batch_id, struct transfer_request *entries,
                             size_t count, notify_msg_t notify_msg);
/* Returns the state of one transfer. Also drives the I/O of transfers. */
int getTransferStatus(transfer_engine_t engine, batch_id_t batch_id, size_t task_id, struct transfer_status *status);
/* Frees a batch. BATCH_BUSY (4) while one of its transfers is in flight. */
int freeBatchID(transfer_engine_t engine, batch_id_t batch_id);

/* ---- notifications ------------------------------------------------------------------------------------------------- */

/* Returns the messages received since the last call; NULL and *size 0 when there are none. Free with
 * freeNotifsMsgBuf. */
notify_msg_t *getNotifsFromEngine(transfer_engine_t engine, int *size);
int freeNotifsMsgBuf(notify_msg_t *msg, int size);
/* Sends a message to the engine of an open segment. */
int genNotifyInEngine(transfer_engine_t engine, uint64_t target_id, notify_msg_t notify_msg);

/* ---- statistics ---------------------------------------------------------------------------------------------------- */

/* Fills in up to *count rails and sets *count to their total number. */
int getNicLoadStats(transfer_engine_t engine, nic_load_stat_t *stats, size_t *count);
/* Describes the paths to all peers, as text or JSON, truncated to buf_len. */
int showLinks(transfer_engine_t engine, char *buf_out, size_t buf_len, int json);

#ifdef __cplusplus
}
#endif

#endif /* TRANSFER_ENGINE_C */
