/* C interface of kvplane's P2P store: large objects are copied from peer to peer, by name (docs/p2p.md).
 *
 * The calls are those of the Go package of Mooncake's P2P store, with the same semantics: the caller's memory is the
 * replica, a process that fetches an object serves it to others, and Register is matched by Unregister.
 *
 * Conventions
 *   - A function that returns int returns 0 for success, or a negative P2P_ERR_* number; p2pStoreLastError has the text.
 *   - Any thread may call any function at any time, except p2pStoreDestroy, which must be the last call.
 *   - A store belongs to the process that made it: after a fork, calls of the child on it fail, and
 *     destroying it there ends nothing. A child makes its own.
 *   - A null store, name or array is rejected with P2P_ERR_INVALID_ARGUMENT; it does not crash.
 *   - Memory that was registered, or fetched into, must stay mapped and unchanged until p2pStoreUnregister,
 *     p2pStoreDeleteReplica or p2pStoreDestroy has returned.
 */
#ifndef P2P_STORE_C
#define P2P_STORE_C

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* An argument is invalid: a null pointer, a size of 0, buffers of other lengths than the object's. */
#define P2P_ERR_INVALID_ARGUMENT (-1)
/* Memory is registered already, entirely or in part. */
#define P2P_ERR_ADDRESS_OVERLAPPED (-2)
/* The object is held here already, or exists with other bytes. */
#define P2P_ERR_PAYLOAD_OPENED (-3)
/* The object is not held here. */
#define P2P_ERR_PAYLOAD_NOT_OPENED (-4)
/* No peer holds an object of that name. */
#define P2P_ERR_PAYLOAD_NOT_FOUND (-5)
/* No peer holds a part of it, or the deadline has passed. Parts that have arrived are in the memory. */
#define P2P_ERR_TOO_MANY_RETRIES (-6)
/* Memory could not be registered, or is still in use. It must not be freed, and the call may be repeated. */
#define P2P_ERR_TRANSFER_ENGINE (-7)
/* The control plane is unreachable, or refuses the call. */
#define P2P_ERR_CONTROL_PLANE (-8)

typedef void *p2p_store_t;

/* Settings; NULL or 0 selects the default. */
struct p2p_store_options {
    /* Name of the cluster; "dev" by default. */
    const char *cluster;
    /* Addresses of remote control planes, "host:port,host:port"; NULL for the one of this user on this host. */
    const char *control;
    /* Directory with ca.pem, client.pem and client.key; needed with control. */
    const char *certificates;
    /* Directory in which the control plane of this host is published, if not the user's runtime directory. */
    const char *runtime_directory;
    /* Tenant of the objects. */
    const char *tenant;
    /* Address on which peers reach this process, "ip:port". By default, the address of this host on the route to the
     * control plane, if that is on another host and issues tickets, else "127.0.0.1:0". An address beyond loopback
     * requires a control plane that issues tickets. */
    const char *listen;
    /* Labels: an object is fetched to a host once, and peers in the same rack are preferred. */
    const char *host;
    const char *rack;
};
typedef struct p2p_store_options p2p_store_options_t;

/* Object, in its newest version. */
struct p2p_payload_info {
    char *name;
    uint64_t version;
    uint64_t max_shard_size;
    uint64_t total_size;
    uint64_t *size_list;
    size_t size_list_len;
};
typedef struct p2p_payload_info p2p_payload_info_t;

/* Creates a store; options may be NULL. NULL on failure. */
p2p_store_t p2pStoreCreate(const p2p_store_options_t *options);

/* Destroys a store, without waiting for readers: these fetch the missing shards from other peers. NULL is ignored. */
void p2pStoreDestroy(p2p_store_t store);

/* Publishes memory as an object and serves it: each range is one of its buffers, divided into shards of at most
 * max_shard_size bytes (usually 64 MiB), and of fewer if there would be less than 256 shards, down to 64 KiB. Bytes
 * that differ from the present version become the next version; unless force_create is set, they are refused while
 * any peer holds the object. */
int p2pStoreRegister(p2p_store_t store, const char *name, void *const *addr_list, const uint64_t *size_list,
                     size_t count, uint64_t max_shard_size, int force_create);

/* Stops serving an object that was registered or fetched, and waits for its readers. */
int p2pStoreUnregister(p2p_store_t store, const char *name);

/* Lists the objects whose names begin with name_prefix; p2pStoreFreeList frees the list. */
int p2pStoreList(p2p_store_t store, const char *name_prefix, p2p_payload_info_t **list, size_t *count);
void p2pStoreFreeList(p2p_payload_info_t *list, size_t count);

/* Fetches the newest version into memory of the length of its buffers, verifies it, and serves it from then on. Until
 * deadline_seconds have passed, it waits for parts that no peer holds: their peer may be restarting. With 0 it takes at
 * most an hour, and waits 12 s for such parts. */
int p2pStoreGetReplica(p2p_store_t store, const char *name, void *const *addr_list, const uint64_t *size_list,
                       size_t count, double deadline_seconds);

/* Rank of this process among several that all fetch the same object at about the same time (docs/p2p.md). */
struct p2p_rank {
    /* Name of the job, the same for all its ranks; NULL for the empty name. */
    const char *job;
    /* Number of this rank, from 0 on, and number of ranks. */
    uint32_t rank;
    uint32_t ranks;
    /* Longest wait for another rank before its shards are fetched from other peers; 0 for 2 seconds. */
    double patience_seconds;
};
typedef struct p2p_rank p2p_rank_t;

/* Like p2pStoreGetReplica, from the job's other ranks by a schedule; missing shards are fetched the usual way. */
int p2pStoreGetReplicaAsRank(p2p_store_t store, const char *name, void *const *addr_list, const uint64_t *size_list,
                             size_t count, double deadline_seconds, const p2p_rank_t *rank);

/* Stops serving an object that was fetched. */
int p2pStoreDeleteReplica(p2p_store_t store, const char *name);

/* Location of the bytes of a rank that wrote a checkpoint. */
struct p2p_part {
    /* Rank, as named in the manifest. */
    const char *participant;
    /* Object that the rank registered; its version, 0 for the newest; and the index of the buffer with the bytes. */
    const char *name;
    uint64_t version;
    size_t buffer;
    /* Offset of each of the rank's fragments in the buffer; NULL if they are packed in the manifest's order. */
    const uint64_t *offset_list;
    size_t offset_list_len;
};
typedef struct p2p_part p2p_part_t;

/* Returns the number of bytes of a rank of a manifest (JSON, docs/p2p.md). */
int p2pStoreReshardSize(const char *target, const char *participant, uint64_t *size);

/* Reads the fragments of a rank of the target's manifest into memory, from the bytes that the ranks of the source's
 * manifest wrote; parts gives the locations of those that it overlaps with. The fragments are stored at the offsets
 * in offset_list or, if that is NULL, packed, and size is the result of p2pStoreReshardSize. Shards that are read
 * completely are verified against their hashes: the number of their bytes is written to checked, unless it is NULL.
 * The memory is not served, and is the caller's again when this has returned. Until deadline_seconds have passed, it
 * waits for ranks that no peer serves; with 0 it takes at most an hour, and waits 3 s if no peer holds the bytes. */
int p2pStoreReshard(p2p_store_t store, const char *source, const char *target, const char *participant,
                    const p2p_part_t *parts, size_t part_count, void *addr, uint64_t size, const uint64_t *offset_list,
                    size_t offset_list_len, double deadline_seconds, uint64_t *checked);

/* Writes the message of this thread's last failure, and a final zero; truncated to buf_len. */
int p2pStoreLastError(char *buf_out, size_t buf_len);

#ifdef __cplusplus
}
#endif

#endif
