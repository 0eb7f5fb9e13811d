/* TENT's C interface to kvplane's transfer engine.
 *
 * Names, types, numbers and layouts are those of the C part of Mooncake's tent/transfer_engine.h, so that a program
 * written for that header compiles and links against libtransfer_engine.so unchanged: have this directory's parent
 * among the include paths. The C++ class of the original is not here.
 *
 * Conventions
 *   - A function that returns int returns 0 for success and -1 for failure, tent_available excepted. The reason of a
 *     failure is printed on standard error, once for each reason; 256 reasons are printed at most.
 *   - Any thread may call any function at any time. A handle of an engine is a number that is never used again: a call
 *     on a destroyed engine fails, as one on a null engine does.
 *   - An engine belongs to the process that made it: after a fork, calls of the child on it fail, and
 *     destroying it there ends nothing. A child makes its own.
 *   - Null pointers, unknown segments, batches and tasks, numbers without a meaning, and texts that do not end within
 *     their limit are refused, and have no effect.
 *   - What TENT has and kvplane has not is refused as well: the functions say what.
 *   - Memory named in a request belongs to the transfer until its status is CANCELED, COMPLETED, TIMEOUT or FAILED.
 *     From then on nothing accesses that of this process. A COMPLETED write is visible to any later read of the target;
 *     another one may be carried out until the target has answered a later request of this engine.
 */
#ifndef TENT_API_H
#define TENT_API_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define tent_batch_id_t uint64_t
#define tent_segment_id_t uint64_t

/* Handle of the engine's own memory. */
#ifndef LOCAL_SEGMENT_ID
#define LOCAL_SEGMENT_ID (0ull)
#endif

#define OPCODE_READ (0)
#define OPCODE_WRITE (1)

/* Moves length bytes between source, in this process, and target_offset, an absolute address in the target's process
 * (for a file segment: an offset in the file). Initialise it with zeros: fields may be added.
 *
 * priority is 0 (high), 1 (medium) or 2 (low); the requests of one call have the most urgent of their priorities.
 * transport_hint is TRANSPORT_UNSPEC, or the only transport to use: accepted where the engine uses no other, because it
 * chooses among its transports for each peer, and TRANSPORT_IOURING for files. */
struct tent_request {
    int opcode;
    void *source;
    tent_segment_id_t target_id;
    uint64_t target_offset;
    uint64_t length;
    int priority;
    int transport_hint;
};
typedef struct tent_request tent_request_t;

/* States. A submitted transfer is PENDING until it has one of the other states, which are final. WAITING and INVALID
 * are not used. */
#define STATUS_WAITING (0)
#define STATUS_PENDING (1)
#define STATUS_INVALID (2)
#define STATUS_CANCELED (3)
#define STATUS_COMPLETED (4)
#define STATUS_TIMEOUT (5)
#define STATUS_FAILED (6)

struct tent_status {
    int status;
    uint64_t transferred_bytes;
};
typedef struct tent_status tent_status_t;

typedef void *tent_engine_t;

/* Buffer of a segment. location is "cpu:N", a device such as "cuda:N", or "*" where it is unknown. */
struct tent_buffer_info {
    uint64_t base, length;
    char location[64];
};

#define TYPE_MEMORY (0)
#define TYPE_FILE (1)

struct tent_segment_info {
    int type;
    int num_buffers;
    struct tent_buffer_info *buffers;
};
typedef struct tent_segment_info tent_segment_info_t;

/* Received notification. handle is always 0: notifications do not name their sender. */
struct tent_notifi_record {
    tent_segment_id_t handle;
    char name[256];
    char msg[4096];
};
typedef struct tent_notifi_record tent_notifi_record_t;

struct tent_notifi_info {
    int num_records;
    struct tent_notifi_record *records;
};
typedef struct tent_notifi_info tent_notifi_info;

/* Permissions of peers: none, reading, or reading and writing. */
#define PERM_LOCAL_READ_WRITE (0)
#define PERM_GLOBAL_READ_ONLY (1)
#define PERM_GLOBAL_READ_WRITE (2)

/* Transports. An engine may have RDMA, SHM (also copies by the kernel), TCP and, for files, IOURING; the others are
 * refused. */
#define TRANSPORT_UNSPEC (0)
#define TRANSPORT_RDMA (1)
#define TRANSPORT_MNNVL (2)
#define TRANSPORT_SHM (3)
#define TRANSPORT_NVLINK (4)
#define TRANSPORT_GDS (5)
#define TRANSPORT_IOURING (6)
#define TRANSPORT_TCP (7)
#define TRANSPORT_ASCEND_DIRECT (8)
#define TRANSPORT_SUNRISE_LINK (9)
#define TRANSPORT_TPU (10)
#define TRANSPORT_UB (11)
#define TRANSPORT_MPCOMM (12)

/* Options of memory. An empty location stands for "*": any node at an allocation, the actual location at a
 * registration. transport_type is TRANSPORT_UNSPEC, or a transport that the engine uses (tent_allocate_memory_ex), or
 * the only one that it uses (registrations). shm_path must be empty, and shm_offset and internal must be 0: allocated
 * memory is shared without a path, and no memory is hidden from peers that may use it. */
struct tent_memory_options {
    char location[64];
    int permission;
    int transport_type;
    char shm_path[256];
    size_t shm_offset;
    int internal;
};
typedef struct tent_memory_options tent_memory_options_t;

/* ---- engine -------------------------------------------------------------------------------------------------------- */

/* Settings of the engines that this thread creates from now on, by keys such as "transports/tcp/enable". A setting
 * that is made has precedence over that of the file. The environment variable MC_TENT_CONF (JSON, or the path of a file
 * with JSON) has precedence over both, but for the first five keys:
 *
 *   metadata_type               "p2p" (default), "etcd", "redis" or "http"
 *   metadata_servers            "host:port", several for etcd: "a:2379;b:2379"; for http the URL
 *   local_segment_name          name in the metadata store; with "p2p" the name is the engine's address
 *   rpc_server_hostname         address to listen on and to announce; default: loopback. One beyond loopback opens the
 *                               engine's ports to that network, without authentication; a line on standard error warns
 *   rpc_server_port             port of handshakes; 0 (default) takes a free one
 *   transports/tcp/enable       "true" (default) or "false"
 *   transports/shm/enable       "true" (default) or "false"
 *   transports/rdma/enable      "true" (default: where there are devices) or "false"
 *   transports/io_uring/enable  "true" allows files to be opened as segments, "false" (default) does not: names of
 *                               segments often come from other machines
 *   topology/rdma_whitelist     names of the RDMA devices to use, separated by commas
 *   topology/priority_matrix    assignment of devices to memory, as JSON
 *   topology/custom_json_path   path of a file with one
 *
 * For other keys a line on standard error says that they have no effect. A key of more than 256 bytes, a value or file
 * of more than 1 MiB, a value that does not fit its key, an unreadable file, and devices in topology/rdma_blacklist
 * keep an engine from being created. */
void tent_load_config_from_file(const char *path);
void tent_set_config(const char *key, const char *value);

/* Starts an engine with the settings of this thread; NULL on failure. */
tent_engine_t tent_create_engine(void);

/* Destroys an engine: transfers in flight are cancelled, and memory that it allocated is freed. When this returns, and
 * no other call on the engine is in progress, registered memory may be freed. NULL is ignored. */
void tent_destroy_engine(tent_engine_t engine);

/* Returns 1 for an engine that was created and not destroyed, else 0. */
int tent_available(tent_engine_t engine);

/* Writes the name by which peers open the engine's segment, and a final zero. Fails when buf_len is too small for
 * them. */
int tent_segment_name(tent_engine_t engine, char *buf, size_t buf_len);

/* Writes the address of handshakes, without the port, and a final zero into addr_buf, and the port into *port. Fails
 * when buf_len is too small. */
int tent_rpc_server_addr_port(tent_engine_t engine, char *addr_buf, size_t buf_len, uint16_t *port);

/* ---- segments ------------------------------------------------------------------------------------------------------ */

/* Opens a peer's segment by name, or the file "file:///path" where files are allowed, and writes its handle.
 * LOCAL_SEGMENT_ID for the engine's own name and for an empty one. Fails when the peer does not answer. Each open is
 * closed by one tent_close_segment. */
int tent_open_segment(tent_engine_t engine, tent_segment_id_t *handle, const char *segment_name);
int tent_close_segment(tent_engine_t engine, tent_segment_id_t handle);

/* Writes the kind and the buffers of a segment, which tent_free_segment_info frees: it also sets them to NULL, and has
 * no effect on buffers that were freed. */
int tent_get_segment_info(tent_engine_t engine, tent_segment_id_t handle, tent_segment_info_t *info);
void tent_free_segment_info(tent_segment_info_t *info);

/* ---- memory -------------------------------------------------------------------------------------------------------- */

/* Allocates memory that peers on the same host can map, and writes its address. location is "*", "cpu:N" for a NUMA
 * node of this machine, or a device such as "cuda:N". It must be registered to be used. */
int tent_allocate_memory(tent_engine_t engine, void **addr, size_t size, const char *location);
int tent_allocate_memory_ex(tent_engine_t engine, void **addr, size_t size, tent_memory_options_t *opts);

/* Frees memory that the engine allocated, after unregistering what is registered of it. Fails when nothing was
 * allocated at addr, and when peers still use the memory: then it stays, and may be freed later. */
int tent_free_memory(tent_engine_t engine, void *addr);

/* Registers addr .. addr + size for transfers, and for peers as far as permitted (default: PERM_GLOBAL_READ_WRITE). The
 * memory must stay mapped until it is unregistered. The same range may be registered several times with the same
 * options; length 0 and ranges that overlap others are refused. The batches register all ranges or none. */
int tent_register_memory(tent_engine_t engine, void *addr, size_t size);
int tent_register_memory_with_perm(tent_engine_t engine, void *addr, size_t size, int permission);
int tent_register_memory_ex(tent_engine_t engine, void *addr, size_t size, tent_memory_options_t *opts);
int tent_register_memory_batch(tent_engine_t engine, void **addrs, size_t *sizes, size_t count, int permission);
int tent_register_memory_batch_ex(tent_engine_t engine, void **addrs, size_t *sizes, size_t count,
                                  tent_memory_options_t *opts);

/* Undoes one registration; after the last one no peer accesses the memory any more. size must be that of the
 * registration, or 0. Fails when nothing is registered at addr, and when a peer still uses the memory, such as a
 * process of this host that was stopped in the middle of a copy: then it must stay mapped, and this be called again.
 * The batch undoes all or none; sizes may be NULL. */
int tent_unregister_memory(tent_engine_t engine, void *addr, size_t size);
int tent_unregister_memory_batch(tent_engine_t engine, void **addrs, size_t *sizes, size_t count);

/* ---- transfers ----------------------------------------------------------------------------------------------------- */

/* Allocates a batch with capacity for batch_size transfers. 0 beyond a limit (1,048,576 transfers and batches),
 * UINT64_MAX without an engine. */
tent_batch_id_t tent_allocate_batch(tent_engine_t engine, size_t batch_size);

/* Frees a batch once its transfers have ended, which they go on to do; until then its status can be queried. */
int tent_free_batch(tent_engine_t engine, tent_batch_id_t batch_id);

/* Starts transfers; validated as a whole before any has an effect. May be called again while the batch has capacity;
 * tasks are numbered in order. */
int tent_submit(tent_engine_t engine, tent_batch_id_t batch_id, tent_request_t *entries, size_t count);

/* Like tent_submit; when all of these transfers have completed, the owner of each of their segments gets one
 * notification. */
int tent_submit_notif(tent_engine_t engine, tent_batch_id_t batch_id, tent_request_t *entries, size_t count,
                      const char *name, const char *message);

/* Writes the state of one transfer, or of the batch: PENDING while one of its transfers is, else the most serious of
 * their states (FAILED, TIMEOUT, CANCELED, COMPLETED), and COMPLETED without transfers. Also drives their I/O. */
int tent_task_status(tent_engine_t engine, tent_batch_id_t batch_id, size_t task_id, tent_status_t *status);
int tent_overall_status(tent_engine_t engine, tent_batch_id_t batch_id, tent_status_t *status);

/* Writes the states of up to *count transfers of a batch and sets *count to their total number. */
int tent_task_status_list(tent_engine_t engine, tent_batch_id_t batch_id, tent_status_t *statuses, size_t *count);

/* Cancels a transfer, which soon has a final state; no effect on one that has ended. Fails while others of the same
 * call of tent_submit are in flight: submit alone what may have to be cancelled. */
int tent_cancel_task(tent_engine_t engine, tent_batch_id_t batch_id, size_t task_id);

/* ---- notifications ------------------------------------------------------------------------------------------------- */

/* Sends a notification to the engine of an open segment. name has up to 255 bytes of UTF-8, message up to 4,095. */
int tent_send_notifs(tent_engine_t engine, tent_segment_id_t handle, const char *name, const char *message);

/* Writes the notifications received since the last call, which tent_free_notifs frees: it also sets them to NULL, and
 * has no effect on records that were freed. Longer texts, which other interfaces can send, are cut. */
int tent_recv_notifs(tent_engine_t engine, tent_notifi_info *info);
void tent_free_notifs(tent_notifi_info *info);

/* ---- statistics ---------------------------------------------------------------------------------------------------- */

/* Load of one rail: a connection or device to one peer. */
struct tent_nic_load_stat {
    char device_name[64];
    uint64_t inflight_bytes;
    double ewma_bandwidth_bps;
};
typedef struct tent_nic_load_stat tent_nic_load_stat_t;

/* Writes the load of up to *count rails and sets *count to their total number. */
int tent_get_nic_load_stats(tent_engine_t engine, tent_nic_load_stat_t *stats, size_t *count);

#ifdef __cplusplus
}
#endif

#endif /* TENT_API_H */
