/* The C interface of kvplane's transfer engine.
 *
 * Names, types, numbers and conventions are those of Mooncake's transfer_engine_c.h, so that a program written for that
 * header (NIXL's and TensorRT-LLM's plugins, Go bindings) compiles and links against libtransfer_engine.so unchanged.
 *
 * Conventions
 *   - A function that returns int returns 0 for success. Registration, segments and notifications return the negative
 *     ERR_* numbers below; submitTransfer*, getTransferStatus and freeBatchID return the same numbers positive.
 *   - Any thread may call any function at any time, except destroyTransferEngine, which must be the last call.
 *   - A null engine, buffer or string is refused with INVALID_ARGUMENT; it does not crash.
 *   - Memory named in a request belongs to the transfer until its status is COMPLETED, CANCELED, TIMEOUT or FAILED.
 *     From then on nothing touches it. A COMPLETED write is visible to whoever reads the target next.
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

/* The handle of the engine's own memory. */
#define LOCAL_SEGMENT (0)
/* What allocateBatchID returns when it cannot. */
#define INVALID_BATCH UINT64_MAX

#define OPCODE_READ (0)
#define OPCODE_WRITE (1)

/* States of a transfer. WAITING and PENDING are under way, all others are final. */
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

/* A named message. */
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

/* Load of one way out of this machine, see getNicLoadStats. */
struct nic_load_stat {
    char device_name[64];
    uint64_t inflight_bytes;
    double ewma_bandwidth_bps;
};
typedef struct nic_load_stat nic_load_stat_t;

typedef void *transfer_engine_t;
typedef void *transport_t;

/* ---- life ---------------------------------------------------------------------------------------------------------- */

/* Starts an engine. metadata_conn_string is "P2PHANDSHAKE", "http://host:port/metadata", "redis://host:port",
 * "etcd://a;b" or "host:port" (etcd). With P2PHANDSHAKE the engine's name is the address that getLocalIpAndPort gives;
 * else it is local_server_name. rpc_port 0 takes a free port. auto_discover is accepted. NULL on failure. */
transfer_engine_t createTransferEngine(const char *metadata_conn_string, const char *local_server_name,
                                       const char *ip_or_host_name, uint64_t rpc_port, int auto_discover);

/* Ends it: transfers under way are cancelled, memory is free when this returns. NULL is ignored. */
void destroyTransferEngine(transfer_engine_t engine);

/* Reads the machine's topology anew. */
int discoverTopology(transfer_engine_t engine);

/* Writes "ip:port", as peers would open it, and a final zero into buf_out; cut to buf_len. */
int getLocalIpAndPort(transfer_engine_t engine, char *buf_out, size_t buf_len);

/* Asks for a transport by name: non-NULL, or NULL where there is none. The engine uses every transport that works here by
 * itself, but for two. "file" must be asked for before files are opened: names of segments often come from other machines.
 * "rdma" must be asked for before Mooncake's engines reach this one over RDMA; from then on, only those with RDMA do, for
 * they take one protocol for each segment. Then args is NULL, or its first element is NULL or which devices serve which
 * memory, as JSON: {"cpu:0": [["mlx5_0"], ["mlx5_1"]]}; it names only devices that are there. Why there is no RDMA is said
 * on standard error. args is not looked at for other transports. */
transport_t installTransport(transfer_engine_t engine, const char *proto, void **args);
int uninstallTransport(transfer_engine_t engine, const char *proto);

/* When SIGTERM or SIGINT arrives, takes the engine out of the metadata store and ends the process as the signal does by
 * default. For programs without a handler of their own for these. */
void enableGracefulShutdown(transfer_engine_t engine);

/* ---- segments ------------------------------------------------------------------------------------------------------ */

/* Opens a peer's memory by name; "file:///path" opens a file, where installTransport
 * allowed it. The handle is at least 1, LOCAL_SEGMENT for the engine's own name, or negative on failure. */
segment_id_t openSegment(transfer_engine_t engine, const char *segment_name);
/* The same, asking the peer again even if the name is known. */
segment_id_t openSegmentNoCache(transfer_engine_t engine, const char *segment_name);
int closeSegment(transfer_engine_t engine, segment_id_t segment_id);
/* Forgets what is known of peers; it is asked for again on the next use. */
int syncSegmentCache(transfer_engine_t engine);
/* Takes this engine's own descriptor out of the metadata store. */
int removeLocalSegment(transfer_engine_t engine, const char *segment_name);
/* Connects ahead of the first transfer. */
int warmupEfaSegment(transfer_engine_t engine, const char *segment_name);

/* ---- memory -------------------------------------------------------------------------------------------------------- */

/* Lets transfers use addr .. addr + length, and peers too where remote_accessible is not 0. The memory must stay mapped
 * until it is unregistered. Length 0 is refused, as is overlap with registered memory. */
int registerLocalMemory(transfer_engine_t engine, void *addr, size_t length, const char *location,
                        int remote_accessible);
/* Takes it back; when this returns 0 no peer writes it any more. -4 says that one still does, as a process of this host
 * may that was stopped in the middle of a copy: then the memory must stay mapped, and this be called again. */
int unregisterLocalMemory(transfer_engine_t engine, void *addr);
/* All or none. */
int registerLocalMemoryBatch(transfer_engine_t engine, buffer_entry_t *buffer_list, size_t buffer_len,
                             const char *location);
int unregisterLocalMemoryBatch(transfer_engine_t engine, void **addr_list, size_t addr_len);

/* ---- transfers ----------------------------------------------------------------------------------------------------- */

/* Makes a batch with room for batch_size transfers; INVALID_BATCH on failure. */
batch_id_t allocateBatchID(transfer_engine_t engine, size_t batch_size);
/* Starts transfers; checked as a whole before any has an effect. May be called again while the batch has room; tasks
 * are numbered in order. */
int submitTransfer(transfer_engine_t engine, batch_id_t batch_id, struct transfer_request *entries, size_t count);
/* The same; sends the message to the first request's target when all of these have completed. */
int submitTransferWithNotify(transfer_engine_t engine, batch_id_t batch_id, struct transfer_request *entries,
                             size_t count, notify_msg_t notify_msg);
/* The state of one transfer. Asking also moves transfers on. */
int getTransferStatus(transfer_engine_t engine, batch_id_t batch_id, size_t task_id, struct transfer_status *status);
/* Forgets a batch. BATCH_BUSY (4) while one of its transfers is under way. */
int freeBatchID(transfer_engine_t engine, batch_id_t batch_id);

/* ---- notifications ------------------------------------------------------------------------------------------------- */

/* The messages that came since the last call; NULL and *size 0 when there are none. Free with freeNotifsMsgBuf. */
notify_msg_t *getNotifsFromEngine(transfer_engine_t engine, int *size);
int freeNotifsMsgBuf(notify_msg_t *msg, int size);
/* Sends a message to the engine of an open segment. */
int genNotifyInEngine(transfer_engine_t engine, uint64_t target_id, notify_msg_t notify_msg);

/* ---- what there is to know ----------------------------------------------------------------------------------------- */

/* Fills in up to *count ways and sets *count to how many there are. */
int getNicLoadStats(transfer_engine_t engine, nic_load_stat_t *stats, size_t *count);
/* Describes the ways to each open segment, as text or JSON, cut to buf_len. */
int showLinks(transfer_engine_t engine, char *buf_out, size_t buf_len, int json);

#ifdef __cplusplus
}
#endif

#endif /* TRANSFER_ENGINE_C */
