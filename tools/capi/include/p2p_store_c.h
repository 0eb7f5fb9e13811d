/* The C interface of kvplane's P2P store: big objects go from peer to peer, by name (docs/p2p.md).
 *
 * The calls are those of the Go package of Mooncake's P2P store, with the same meaning: the caller's memory is the
 * replica, who fetches an object becomes a source of it, and Register is matched by Unregister.
 *
 * Conventions
 *   - A function that returns int returns 0 for success, or a negative P2P_ERR_* number; p2pStoreLastError says more.
 *   - Any thread may call any function at any time, except p2pStoreDestroy, which must be the last call.
 *   - A null store, name or array is refused with P2P_ERR_INVALID_ARGUMENT; it does not crash.
 *   - Memory that was registered, or fetched into, stays mapped and as it is until p2pStoreUnregister,
 *     p2pStoreDeleteReplica or p2pStoreDestroy has returned.
 */
#ifndef P2P_STORE_C
#define P2P_STORE_C

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* An argument makes no sense: a null pointer, a size of 0, buffers that are not as long as the object's. */
#define P2P_ERR_INVALID_ARGUMENT (-1)
/* Memory is registered already, whole or in part. */
#define P2P_ERR_ADDRESS_OVERLAPPED (-2)
/* The object is held here already, or is there with other bytes. */
#define P2P_ERR_PAYLOAD_OPENED (-3)
/* The object is not held here. */
#define P2P_ERR_PAYLOAD_NOT_OPENED (-4)
/* Nobody has an object of that name. */
#define P2P_ERR_PAYLOAD_NOT_FOUND (-5)
/* No source is left for a part of it, or time is up. What has arrived is in the memory. */
#define P2P_ERR_TOO_MANY_RETRIES (-6)
/* Memory could not be registered, or is used still. It must stay, and the call may be repeated. */
#define P2P_ERR_TRANSFER_ENGINE (-7)
/* The control plane cannot be reached, or refuses. */
#define P2P_ERR_CONTROL_PLANE (-8)

typedef void *p2p_store_t;

/* Settings; what is NULL or 0 is as it usually is. */
struct p2p_store_options {
    /* Name of the cluster: "dev" unless set. */
    const char *cluster;
    /* Addresses of control planes elsewhere, "host:port,host:port"; NULL for the one of this user on this host. */
    const char *control;
    /* Directory with ca.pem, client.pem and client.key; needed with control. */
    const char *certificates;
    /* Where the control plane of this host says where it is, when that is not the user's runtime directory. */
    const char *runtime_directory;
    /* Whose objects. */
    const char *tenant;
    /* Where peers reach this process, "ip:port". Unless set, the address of this host that leads to the control plane,
     * where that is on another host and makes tickets, else "127.0.0.1:0". Another address than a loopback one needs a
     * control plane that makes tickets. */
    const char *listen;
    /* Labels: one copy of an object comes to a host, and sources in the same rack go first. */
    const char *host;
    const char *rack;
};
typedef struct p2p_store_options p2p_store_options_t;

/* An object, of its newest version. */
struct p2p_payload_info {
    char *name;
    uint64_t version;
    uint64_t max_shard_size;
    uint64_t total_size;
    uint64_t *size_list;
    size_t size_list_len;
};
typedef struct p2p_payload_info p2p_payload_info_t;

/* Starts serving; options may be NULL. NULL on failure. */
p2p_store_t p2pStoreCreate(const p2p_store_options_t *options);

/* Ends it, without waiting for readers: they fetch elsewhere what they lack. NULL is ignored. */
void p2pStoreDestroy(p2p_store_t store);

/* Publishes memory as an object and serves it: each range is one of its buffers, cut into shards of max_shard_size
 * bytes at most (64 MiB are usual) and of fewer where that makes less than 256 of them, down to 64 KiB. Other bytes than before become the next version; unless force_create is set, they are
 * refused while anybody has the object. */
int p2pStoreRegister(p2p_store_t store, const char *name, void *const *addr_list, const uint64_t *size_list,
                     size_t count, uint64_t max_shard_size, int force_create);

/* Stops serving an object that was registered or fetched, and waits for its readers. */
int p2pStoreUnregister(p2p_store_t store, const char *name);

/* Objects whose names begin so; p2pStoreFreeList frees them. */
int p2pStoreList(p2p_store_t store, const char *name_prefix, p2p_payload_info_t **list, size_t *count);
void p2pStoreFreeList(p2p_payload_info_t *list, size_t count);

/* Fetches the newest version into memory as long as its buffers, checks it, and serves it from then on. Until
 * deadline_seconds are over it waits for parts that no source has: who had them may be starting again. 0 is none given:
 * an hour then, and 12 s for such parts. */
int p2pStoreGetReplica(p2p_store_t store, const char *name, void *const *addr_list, const uint64_t *size_list,
                       size_t count, double deadline_seconds);

/* Which of several processes this is that all fetch the same object at about the same time (docs/p2p.md). */
struct p2p_rank {
    /* The job's name, the same for all its ranks; NULL is a job without a name. */
    const char *job;
    /* Which one this is, from 0 on, and how many there are. */
    uint32_t rank;
    uint32_t ranks;
    /* How long another rank is waited for before its shards are fetched from others; 0 is 2 seconds. */
    double patience_seconds;
};
typedef struct p2p_rank p2p_rank_t;

/* As p2pStoreGetReplica, from the job's other ranks by a schedule; what that does not bring comes as always. */
int p2pStoreGetReplicaAsRank(p2p_store_t store, const char *name, void *const *addr_list, const uint64_t *size_list,
                             size_t count, double deadline_seconds, const p2p_rank_t *rank);

/* Stops being a source of an object that was fetched. */
int p2pStoreDeleteReplica(p2p_store_t store, const char *name);

/* Where a rank that wrote a checkpoint has its bytes. */
struct p2p_part {
    /* The rank, as the manifest calls it. */
    const char *participant;
    /* The object that it registered; the newest version if that is 0; and in which of its buffers the bytes are. */
    const char *name;
    uint64_t version;
    size_t buffer;
    /* Where each of the rank's fragments begins there. NULL: one directly after the other in the manifest's order. */
    const uint64_t *offset_list;
    size_t offset_list_len;
};
typedef struct p2p_part p2p_part_t;

/* How many bytes a rank of a manifest (JSON, docs/p2p.md) has. */
int p2pStoreReshardSize(const char *target, const char *participant, uint64_t *size);

/* Reads into memory what a rank of the target's manifest is to have of what the ranks of the source's wrote; parts says
 * where those are that it overlaps with. Each of its fragments goes where offset_list says; or, if that is NULL, one
 * directly after the other, and size is what p2pStoreReshardSize says. Shards that are read as a whole are compared
 * with their hashes: how many bytes that were is written to checked, unless it is NULL. Nothing is served from there,
 * and the memory is the caller's again when this has returned. Until deadline_seconds are over it waits for ranks that
 * nobody serves; 0 is none given: an hour then, and 3 s where nobody holds what is wanted. */
int p2pStoreReshard(p2p_store_t store, const char *source, const char *target, const char *participant,
                    const p2p_part_t *parts, size_t part_count, void *addr, uint64_t size, const uint64_t *offset_list,
                    size_t offset_list_len, double deadline_seconds, uint64_t *checked);

/* Writes why the last call of this thread failed, and a final zero; cut to buf_len. */
int p2pStoreLastError(char *buf_out, size_t buf_len);

#ifdef __cplusplus
}
#endif

#endif
