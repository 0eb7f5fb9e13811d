/* Two P2P stores in one program, through the C interface alone: one fetches an object from the other, which updates it.
 * Arguments: a cluster and the runtime directory of its control plane. Prints one line for each check; the exit status
 * is the number of failed checks. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "p2p_store_c.h"

static int failures;

static void check(int holds, const char *what) {
    char why[512] = "";
    if (!holds) p2pStoreLastError(why, sizeof why);
    printf("%s: %s %s\n", holds ? "ok" : "FAILED", what, why);
    failures += !holds;
}

enum { FIRST = (1 << 20) + 77, SECOND = 4096, SHARD = 1 << 16 };

static void fill(unsigned char *bytes, size_t count, unsigned seed) {
    for (size_t i = 0; i < count; i++) bytes[i] = (unsigned char)((i * 2654435761u + seed) >> 13);
}

/* Two ranks write 8 rows of 512 bytes each; a reader fetches 12 rows beginning with the third. */
static void reshard(p2p_store_t trainer, p2p_store_t engine) {
    const char *form = "{\"tensors\":[{\"tensor_id\":\"w\",\"global_shape\":[16,512],\"dtype\":\"uint8\"}],"
                       "\"parts\":[%s]}";
    const char *written = "{\"participant_id\":\"tp0\",\"fragments\":[{\"tensor_id\":\"w\",\"global_offset\":[0,0],"
                          "\"local_shape\":[8,512]}]},{\"participant_id\":\"tp1\",\"fragments\":[{\"tensor_id\":\"w\","
                          "\"global_offset\":[8,0],\"local_shape\":[8,512]}]}";
    const char *wanted = "{\"participant_id\":\"one\",\"fragments\":[{\"tensor_id\":\"w\",\"global_offset\":[2,0],"
                         "\"local_shape\":[12,512]}]}";
    char source[1024], target[1024];
    snprintf(source, sizeof source, form, written);
    snprintf(target, sizeof target, form, wanted);
    unsigned char *whole = malloc(16 * 512), *into = malloc(12 * 512 + 3);
    fill(whole, 16 * 512, 3);
    void *first = whole, *second = whole + 8 * 512;
    uint64_t half = 8 * 512, size = 0, checked = 0, at = 3, none = 0;
    check(p2pStoreRegister(trainer, "r/tp0", &first, &half, 1, 1024, 0) == 0 &&
              p2pStoreRegister(trainer, "r/tp1", &second, &half, 1, 1024, 0) == 0,
          "two ranks register what they have");
    p2p_part_t parts[2] = {{.participant = "tp0", .name = "r/tp0", .offset_list = &none, .offset_list_len = 1},
                           {.participant = "tp1", .name = "r/tp1", .version = 1}};
    check(p2pStoreReshardSize(target, "one", &size) == 0 && size == 12 * 512, "the size is returned");
    check(p2pStoreReshard(engine, source, target, "one", parts, 2, into, size, NULL, 0, 60, &checked) == 0 &&
              !memcmp(into, whole + 2 * 512, size) && checked == size,
          "it is read and checked");
    check(p2pStoreReshard(engine, source, target, "one", parts, 2, into, size + 3, &at, 1, 0, NULL) == 0 &&
              !memcmp(into + 3, whole + 2 * 512, size),
          "where it is to go");
    check(p2pStoreReshard(engine, source, target, "one", parts, 2, into, size + 3, NULL, 0, 60, NULL) ==
              P2P_ERR_INVALID_ARGUMENT, "memory of another size");
    check(p2pStoreReshard(engine, source, target, "one", parts, 1, into, size, NULL, 0, 60, NULL) ==
              P2P_ERR_INVALID_ARGUMENT, "a rank is missing");
    check(p2pStoreReshard(engine, source, target, "two", parts, 2, into, size, NULL, 0, 60, NULL) ==
              P2P_ERR_INVALID_ARGUMENT, "no such rank");
    check(p2pStoreReshard(engine, "{", target, "one", parts, 2, into, size, NULL, 0, 60, NULL) ==
              P2P_ERR_INVALID_ARGUMENT, "no manifest");
    check(p2pStoreReshardSize(target, NULL, &size) == P2P_ERR_INVALID_ARGUMENT, "no rank");
    check(p2pStoreReshardSize(target, "one", NULL) == P2P_ERR_INVALID_ARGUMENT, "no room");
    whole[5 * 512] ^= 1;
    check(p2pStoreReshard(engine, source, target, "one", parts, 2, into, size, NULL, 0, 60, NULL) ==
              P2P_ERR_TOO_MANY_RETRIES, "bytes that changed are not believed");
    check(p2pStoreUnregister(trainer, "r/tp0") == 0 && p2pStoreUnregister(trainer, "r/tp1") == 0, "they go");
    free(whole), free(into);
}

/* One rank of a job, in its own thread. */
struct seat {
    p2p_store_t store;
    p2p_rank_t rank;
    void *into;
    int result;
};

static void *take_seat(void *argument) {
    struct seat *seat = argument;
    uint64_t size = FIRST;
    seat->result = p2pStoreGetReplicaAsRank(seat->store, "c/ranks", &seat->into, &size, 1, 60, &seat->rank);
    return NULL;
}

/* Two ranks fetch by a schedule; invalid ranks are rejected. */
static void ranks(const p2p_store_options_t *options, p2p_store_t trainer) {
    unsigned char *whole = malloc(FIRST);
    void *from = whole;
    uint64_t size = FIRST;
    struct seat seats[2];
    pthread_t threads[2];
    fill(whole, FIRST, 5);
    check(p2pStoreRegister(trainer, "c/ranks", &from, &size, 1, SHARD, 0) == 0, "it is registered for ranks");
    for (unsigned i = 0; i < 2; i++) {
        p2p_rank_t rank = {.job = "load", .rank = i, .ranks = 2, .patience_seconds = i ? 30 : 0};
        seats[i] = (struct seat){.store = p2pStoreCreate(options), .rank = rank, .into = malloc(FIRST), .result = 1};
        check(seats[i].store != NULL, "a rank's store starts");
    }
    p2p_rank_t wrong = {.rank = 2, .ranks = 2};
    void *into = seats[0].into;
    check(p2pStoreGetReplicaAsRank(seats[0].store, "c/ranks", &into, &size, 1, 60, &wrong) == P2P_ERR_INVALID_ARGUMENT,
          "rank 2 of 2");
    wrong.rank = 0, wrong.patience_seconds = -1;
    check(p2pStoreGetReplicaAsRank(seats[0].store, "c/ranks", &into, &size, 1, 60, &wrong) == P2P_ERR_INVALID_ARGUMENT,
          "no patience");
    check(p2pStoreGetReplicaAsRank(seats[0].store, "c/ranks", &into, &size, 1, 60, NULL) == P2P_ERR_INVALID_ARGUMENT,
          "no rank");
    for (int i = 0; i < 2; i++) pthread_create(&threads[i], NULL, take_seat, &seats[i]);
    for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
    for (int i = 0; i < 2; i++) {
        check(seats[i].result == 0 && !memcmp(seats[i].into, whole, FIRST), "a rank has it");
        p2pStoreDestroy(seats[i].store);
        free(seats[i].into);
    }
    check(p2pStoreUnregister(trainer, "c/ranks") == 0, "it goes");
    free(whole);
}

int main(int argc, char **argv) {
    if (argc != 3) return 99;
    p2p_store_options_t options = {.cluster = argv[1], .runtime_directory = argv[2], .host = "trainer"};
    p2p_store_t trainer = p2pStoreCreate(&options);
    options.host = "engine";
    p2p_store_t engine = p2pStoreCreate(&options);
    check(trainer && engine, "two stores start");
    if (!trainer || !engine) return failures;

    unsigned char *first = malloc(FIRST), *second = malloc(SECOND), *into = malloc(FIRST), *more = malloc(SECOND);
    fill(first, FIRST, 1);
    fill(second, SECOND, 2);
    void *ours[2] = {first, second}, *theirs[2] = {into, more};
    uint64_t sizes[2] = {FIRST, SECOND};
    check(p2pStoreGetReplica(engine, "c/model", theirs, sizes, 2, 5) == P2P_ERR_PAYLOAD_NOT_FOUND, "nobody has it yet");
    check(p2pStoreRegister(trainer, "c/model", ours, sizes, 2, SHARD, 0) == 0, "it is registered");
    check(p2pStoreRegister(trainer, "c/model", ours, sizes, 2, SHARD, 1) == P2P_ERR_PAYLOAD_OPENED, "and only once");
    check(p2pStoreGetReplica(engine, "c/model", theirs, sizes, 2, 60) == 0, "it is fetched");
    check(!memcmp(first, into, FIRST) && !memcmp(second, more, SECOND), "with the same bytes");
    check(p2pStoreGetReplica(engine, "c/model", theirs, sizes, 2, 60) == P2P_ERR_PAYLOAD_OPENED, "and only once");

    p2p_payload_info_t *list = NULL;
    size_t count = 0;
    check(p2pStoreList(engine, "c/", &list, &count) == 0 && count == 1, "it is listed");
    check(count == 1 && !strcmp(list[0].name, "c/model") && list[0].version == 1 && list[0].max_shard_size == SHARD &&
              list[0].total_size == FIRST + SECOND && list[0].size_list_len == 2 && list[0].size_list[0] == FIRST &&
              list[0].size_list[1] == SECOND,
          "with its sizes");
    p2pStoreFreeList(list, count);
    check(p2pStoreList(engine, "d/", &list, &count) == 0 && count == 0, "nothing is listed elsewhere");
    p2pStoreFreeList(list, count);

    /* The trainer changes and re-registers the object: new bytes need force while a peer holds the old ones. */
    check(p2pStoreUnregister(trainer, "c/model") == 0, "it is unregistered");
    check(p2pStoreUnregister(trainer, "c/model") == P2P_ERR_PAYLOAD_NOT_OPENED, "and only once");
    first[5] ^= 1;
    check(p2pStoreRegister(trainer, "c/model", ours, sizes, 2, SHARD, 0) == P2P_ERR_PAYLOAD_OPENED, "no changes");
    check(p2pStoreRegister(trainer, "c/model", ours, sizes, 2, SHARD, 1) == 0, "unless that is forced");
    check(p2pStoreDeleteReplica(engine, "c/model") == 0, "the replica is deleted");
    check(p2pStoreDeleteReplica(engine, "c/model") == P2P_ERR_PAYLOAD_NOT_OPENED, "and only once");
    check(p2pStoreGetReplica(engine, "c/model", theirs, sizes, 2, 60) == 0 && into[5] == first[5], "the new one comes");

    /* Invalid arguments. */
    uint64_t wrong[2] = {FIRST - 1, SECOND};
    check(p2pStoreRegister(engine, "c/overlap", theirs, wrong, 1, SHARD, 0) == P2P_ERR_ADDRESS_OVERLAPPED,
          "memory that overlaps is refused");
    check(p2pStoreDeleteReplica(engine, "c/model") == 0, "the replica is deleted again");
    check(p2pStoreGetReplica(engine, "c/model", theirs, wrong, 2, 5) == P2P_ERR_INVALID_ARGUMENT, "a wrong size");
    check(p2pStoreGetReplica(engine, "c/model", NULL, sizes, 2, 5) == P2P_ERR_INVALID_ARGUMENT, "no addresses");
    check(p2pStoreGetReplica(engine, NULL, theirs, sizes, 2, 5) == P2P_ERR_INVALID_ARGUMENT, "no name");
    check(p2pStoreGetReplica(engine, "c/model", theirs, sizes, 2, -1) == P2P_ERR_INVALID_ARGUMENT, "no time");
    check(p2pStoreUnregister(NULL, "c/model") == P2P_ERR_INVALID_ARGUMENT, "no store");
    check(p2pStoreRegister(trainer, "c/shards", ours, sizes, 2, 0, 0) == P2P_ERR_INVALID_ARGUMENT, "shards of 0 bytes");
    char why[8];
    check(p2pStoreLastError(why, sizeof why) == 0 && strlen(why) == 7, "why is said, cut to the room for it");
    second[7] ^= 1;
    check(p2pStoreGetReplica(engine, "c/model", theirs, sizes, 2, 60) == P2P_ERR_TOO_MANY_RETRIES,
          "bytes that changed are not taken");
    reshard(trainer, engine);
    ranks(&options, trainer);
    options.cluster = "nobody's";
    check(p2pStoreCreate(&options) == NULL, "no control plane, no store");
    p2pStoreDestroy(engine);
    p2pStoreDestroy(trainer);
    p2pStoreDestroy(NULL);
    free(first), free(second), free(into), free(more);
    return failures;
}
