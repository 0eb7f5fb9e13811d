/* Two P2P stores in one program, through the C interface alone: an object goes from one to the other, and changes.
 * Arguments: a cluster and the runtime directory of its control plane. Prints one line for each check; the exit status
 * is the number that failed. */
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

    /* The trainer goes, changes it and registers it anew: other bytes need force while somebody has the former ones. */
    check(p2pStoreUnregister(trainer, "c/model") == 0, "it is unregistered");
    check(p2pStoreUnregister(trainer, "c/model") == P2P_ERR_PAYLOAD_NOT_OPENED, "and only once");
    first[5] ^= 1;
    check(p2pStoreRegister(trainer, "c/model", ours, sizes, 2, SHARD, 0) == P2P_ERR_PAYLOAD_OPENED, "no changes");
    check(p2pStoreRegister(trainer, "c/model", ours, sizes, 2, SHARD, 1) == 0, "unless that is forced");
    check(p2pStoreDeleteReplica(engine, "c/model") == 0, "the replica is deleted");
    check(p2pStoreDeleteReplica(engine, "c/model") == P2P_ERR_PAYLOAD_NOT_OPENED, "and only once");
    check(p2pStoreGetReplica(engine, "c/model", theirs, sizes, 2, 60) == 0 && into[5] == first[5], "the new one comes");

    /* What cannot be. */
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
    options.cluster = "nobody's";
    check(p2pStoreCreate(&options) == NULL, "no control plane, no store");
    p2pStoreDestroy(engine);
    p2pStoreDestroy(trainer);
    p2pStoreDestroy(NULL);
    free(first), free(second), free(into), free(more);
    return failures;
}
