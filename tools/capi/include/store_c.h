/* C interface of kvplane's store: the calls of Mooncake's store_c.h under their names, with their conventions.
 *
 * Conventions
 *   - A function that returns int or int64_t returns 0 or a count for success, or a negative number of Mooncake's: -1
 *     for a null pointer and for a call before the setup, -200 for no space, -600 for arguments that make no sense,
 *     -704 for no such object, -900 and -901 for nodes or a control plane that are not reached, or not in time. The
 *     reason of a failed setup is printed to standard error.
 *   - Any thread may call any function at any time, except mooncake_store_destroy, which must be the last call. Every
 *     call is bounded by a deadline. When a call returns, no transfer accesses its memory any more. Calls on a store
 *     that was destroyed return -1, and a second mooncake_store_destroy does nothing.
 *   - A store belongs to the process that made it: after a fork, calls of the child on it fail, and destroying it there
 *     ends nothing. A child makes its own.
 *   - Strings are not used after a call has returned.
 *   - Memory that was registered must stay mapped until mooncake_store_unregister_buffer or mooncake_store_destroy has
 *     returned. Gets read into registered memory only, and not into memory that was registered read-only; puts send any
 *     memory. Memory that is not mapped is -600, as far as it can be told before the call.
 *   - A batch call returns 0 if it was carried out, and has the outcome of each object in its array. Before the setup it
 *     returns -1, with -1 for each object.
 */
#ifndef MOONCAKE_STORE_C_H
#define MOONCAKE_STORE_C_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef void *mooncake_store_t;

/* Options of puts; NULL stands for one replica and no pins. */
struct mooncake_replicate_config {
    /* Number of replicas, as far as there are nodes and memory; 0 and 1 mean one, and more than 8 mean 8. */
    size_t replica_num;
    /* Not 0: other objects are evicted first, for half an hour. */
    int with_soft_pin;
    /* Not 0: never evicted. */
    int with_hard_pin;
    /* Names of processes, host:port, whose memory is preferred for long objects. */
    const char **preferred_segments;
    size_t preferred_segments_count;
};
typedef struct mooncake_replicate_config mooncake_replicate_config_t;

/* Creates a store; NULL on failure. */
mooncake_store_t mooncake_store_create(void);

/* Destroys a store. Objects in the memory that it provides migrate to other nodes, as far as 4 s and their memory allow.
 * NULL and a store that was destroyed are ignored. */
void mooncake_store_destroy(mooncake_store_t store);

/* Connects to a cluster, and provides it with global_segment_size bytes of memory if that is not 0. master_server_addr is
 * the control plane's address, by default that of this user on this host; one on another host needs KVPLANE_CERTS.
 * KVPLANE_CLUSTER names the cluster if there are several. protocol is tcp or rdma; metadata_server, local_buffer_size and
 * device_name have no meaning here. -900 within five seconds if there is no control plane; -1 for a second setup. */
int mooncake_store_setup(mooncake_store_t store, const char *local_hostname, const char *metadata_server,
                         uint64_t global_segment_size, uint64_t local_buffer_size, const char *protocol,
                         const char *device_name, const char *master_server_addr);

/* Connects to the control plane of this host. */
int mooncake_store_init_all(mooncake_store_t store, const char *protocol, const char *device_name,
                            uint64_t mount_segment_size);

/* 0 when the cluster answers, 1 before the setup, 2 when it does not answer. */
int mooncake_store_health_check(mooncake_store_t store);

/* Stores a value. An existing object is left unchanged, which is no error. */
int mooncake_store_put(mooncake_store_t store, const char *key, const void *value, size_t size,
                       const mooncake_replicate_config_t *config);

/* Does the same from memory that may be registered. */
int mooncake_store_put_from(mooncake_store_t store, const char *key, void *buffer, size_t size,
                            const mooncake_replicate_config_t *config);

/* Stores many objects in one batch. 0, and the outcome of each in results_out. */
int mooncake_store_batch_put_from(mooncake_store_t store, const char **keys, void **buffers, const size_t *sizes,
                                  size_t count, const mooncake_replicate_config_t *config, int *results_out);

/* Reads an object into registered memory. Returns its length. */
int64_t mooncake_store_get_into(mooncake_store_t store, const char *key, void *buffer, size_t size);

/* Reads many objects in one batch. 0, and the length of each, or an error, in results_out. */
int mooncake_store_batch_get_into(mooncake_store_t store, const char **keys, void **buffers, const size_t *sizes,
                                  size_t count, int64_t *results_out);

/* 1 when there is an object, 0 when not. */
int mooncake_store_is_exist(mooncake_store_t store, const char *key);

/* The same for many keys, with one request to each shard. */
int mooncake_store_batch_is_exist(mooncake_store_t store, const char **keys, size_t count, int *results_out);

/* Length of an object. */
int64_t mooncake_store_get_size(mooncake_store_t store, const char *key);

/* Name of this process, as it is a preferred segment; -1 if it has no room. */
int mooncake_store_get_hostname(mooncake_store_t store, char *buf_out, size_t buf_len);

/* Removes an object. There are no leases: it is removed even while others read it, whose reads complete; force has no
 * effect. */
int mooncake_store_remove(mooncake_store_t store, const char *key, int force);

/* Removes the objects whose keys match a regular expression, matched in linear time. Returns their number. */
int64_t mooncake_store_remove_by_regex(mooncake_store_t store, const char *pattern, int force);

/* Removes all objects of the tenant. Returns their number. */
int64_t mooncake_store_remove_all(mooncake_store_t store, int force);

/* Registers memory; -600 if a part of it is registered, or is not readable memory of this process. */
int mooncake_store_register_buffer(mooncake_store_t store, void *buffer, size_t size);

/* Unregisters the memory that begins at buffer. */
int mooncake_store_unregister_buffer(mooncake_store_t store, void *buffer);

#ifdef __cplusplus
}
#endif

#endif
